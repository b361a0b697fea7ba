"""The proof on NumPy arrays: each check fails when it should, passes when it should, and is what catches its mistake."""

import inspect
import math
from types import SimpleNamespace

import numpy as np
import pytest

from harness.proof import (
    CURVE_STEPS,
    DROPOUT_SPREAD_LIMIT,
    LIMITS,
    SPREAD_LIMIT,
    SPREAD_STEPS,
    UPDATE_STEPS,
    Kernel,
    Proof,
    max_error,
    norm_error,
)

SHAPES = {
    "embedding": (11, 4),
    "lstm_0/forward/kernel": (4, 12),
    "lstm_1/forward/kernel": (3, 12),
    "dense_0/bias": (11,),
}
KERNEL = Kernel(
    ops={r"_?\w*MatMul": 4}, not_ops="CudnnRNN.*", kernels="gemm", not_kernels="cudnn", rest_kernels="fusion"
)
PROFILE = {"ops": {"MatMul": 3, "_FusedMatMul": 2}, "kernels": {"sm90_gemm_f32": 0.2, "loop_fusion": 0.01}}
LOSSES = np.array([2.4, 2.31, 2.2, 2.13, 2.05, 1.96])


def tensors(seed: int, scale: float) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: scale * generator.normal(size=shape) for name, shape in SHAPES.items()}


def operands() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    return generator.normal(size=(4, 5, 16)), generator.normal(size=(16, 11))


def cut_to_10_bits(array: np.ndarray) -> np.ndarray:
    """float32 with TF32's mantissa."""
    bits = array.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32)


def product(precision: str) -> np.ndarray:
    """A matrix product, [4, 5, 11], as hardware of that precision computes and stores it."""
    x, w = operands()
    if precision == "tf32":
        return cut_to_10_bits(x) @ cut_to_10_bits(w)
    dtype = {"fp32": np.float32, "fp16": np.float16}[precision]
    return x.astype(dtype) @ w.astype(dtype)


REFERENCE = {
    "outputs": {"logits": operands()[0] @ operands()[1], "hidden": operands()[0] @ operands()[1][:, ::2], "loss": LOSSES[0]},
    "gradients": tensors(2, 0.1),
    "updates": tensors(3, 1e-3),
    "losses": LOSSES,
    "forward_losses": LOSSES[::-1],
    "stack_outputs": {"hidden": operands()[0] @ operands()[1][:, ::2], "loss": 0.5},
    "stack_gradients": tensors(5, 0.1),
    "stack_losses": np.full(CURVE_STEPS, 0.5),
}  # fmt: skip


class FakeRow:
    """A row that computes in `precision`, as a Trial; a test plants its mistake by changing an attribute."""

    def __init__(self, precision: str = "fp32") -> None:
        logits = product(precision)
        self.shown = {"logits": logits, "hidden": logits[..., ::2].copy(), "loss": np.float32(LOSSES[0])}
        self.start = tensors(4, 1.0)
        self.gradients = {name: array.astype(np.float32) for name, array in REFERENCE["gradients"].items()}
        self.updates = dict(REFERENCE["updates"])
        self.losses = LOSSES.astype(np.float32)
        self.forward = LOSSES[::-1].astype(np.float32)
        hidden = {"hidden": self.shown["hidden"].copy()}
        self.alone = hidden | {name: array.astype(np.float32) for name, array in REFERENCE["stack_gradients"].items()}
        self.alone_losses = np.full(CURVE_STEPS, 0.5, np.float32)
        self.one_mean = False  # as `fit` reports it
        self.blocks = [self.losses, self.losses]
        self.dropout = False
        self.difference = ""  # of the timed callable from the proven one
        self.profile = {kind: dict(found) for kind, found in PROFILE.items()}
        self.steps = 0

    def restore(self):
        self.steps = 0

    def outputs(self):
        return self.shown

    def train_steps(self, count):
        self.steps += count
        return self.losses[:count].mean(keepdims=True) if self.one_mean else self.losses[:count]

    def first_gradients(self):
        assert self.steps == 1, "gradients are read after exactly one step since restore"
        return self.gradients

    def stack_results(self):
        return self.alone

    def unproven(self):
        return self.difference

    def weights(self):
        assert self.steps in (0, UPDATE_STEPS)
        moved = self.updates if self.steps else {}
        return {name: array + moved.get(name, 0.0) for name, array in self.start.items()}


def prove(row: FakeRow, precision: str = "fp32") -> dict:
    proof = Proof(precision)
    proof.outputs(row.outputs(), REFERENCE["outputs"])
    proof.losses("the forward passes", row.forward, REFERENCE["forward_losses"])
    proof.stack(row, row.alone_losses, REFERENCE)
    proof.training(row, REFERENCE)
    proof.callable(row.unproven())
    proof.timed_losses(row.blocks, REFERENCE["losses"], row.dropout)
    proof.what_ran(row.profile, KERNEL, "gpu")
    return proof.record()


def planted(change) -> FakeRow:
    row = FakeRow()
    change(row)
    return row


def replace_at(array: np.ndarray, index: int, value: float) -> np.ndarray:
    changed = np.array(array)
    changed.flat[index] = value
    return changed


# mistake: (the check that has to catch it, the proofs that it has to fail, how it is planted)
MISTAKES = {
    "one logit off": ("outputs", ["outputs"], lambda r: r.shown.update(logits=replace_at(product("fp32"), 7, 1.0))),
    "logits missing": ("outputs", ["outputs"], lambda r: r.shown.pop("logits")),
    "hidden time-major": ("outputs", ["outputs"], lambda r: r.shown.update(hidden=r.shown["hidden"].swapaxes(0, 1))),
    "a NaN logit": ("outputs", ["outputs"], lambda r: r.shown.update(logits=replace_at(product("fp32"), 7, math.nan))),
    "tf32 in fp32": ("outputs", ["outputs"], lambda r: r.shown.update(logits=product("tf32"))),
    "fp16 in fp32": ("outputs", ["outputs", "precision"], lambda r: r.shown.update(logits=product("fp16"))),
    "another loss": ("outputs", ["loss"], lambda r: r.shown.update(loss=np.float32(2.5))),
    "a forward loss": ("losses", ["loss"], lambda r: r.forward.put(4, 2.5)),
    "a NaN forward loss": ("losses", ["loss"], lambda r: r.forward.put(5, math.nan)),
    "no forward losses": ("losses", ["loss"], lambda r: setattr(r, "forward", r.forward[:0])),
    "the stack's outputs off": ("stack", ["outputs"], lambda r: r.alone["hidden"].put(7, 1.0)),
    "no outputs of the stack": ("stack", ["outputs"], lambda r: r.alone.pop("hidden")),
    "a gradient of the stack missing": ("stack", ["gradients"], lambda r: r.alone.pop("dense_0/bias")),
    "a loss of the stack": ("stack", ["loss"], lambda r: r.alone_losses.put(4, 0.6)),
    "a gradient missing": ("training", ["gradients"], lambda r: r.gradients.pop("dense_0/bias")),
    "a gradient zero": ("training", ["gradients"], lambda r: r.gradients.update({"dense_0/bias": np.zeros(11)})),
    "gates swapped": (
        "training",
        ["gradients"],
        lambda r: r.gradients.update(
            {"lstm_1/forward/kernel": r.gradients["lstm_1/forward/kernel"][:, [3, 4, 5, 0, 1, 2, *range(6, 12)]]}
        ),
    ),
    "layer left out": ("training", ["update"], lambda r: r.updates.pop("lstm_1/forward/kernel")),
    "rate a thousandfold": (
        "training",
        ["update"],
        lambda r: r.updates.update({k: 1e3 * v for k, v in r.updates.items()}),
    ),
    "losses that only fall": ("losses", ["loss"], lambda r: setattr(r, "blocks", [r.losses * [1, 1, 1, 1, 1, 0.9]] * 2)),
    "a NaN timed loss": (
        "timed_losses",
        ["loss", "spread"],
        lambda r: setattr(r, "blocks", [r.losses, replace_at(r.losses, 3, math.nan)]),
    ),
    "a block of its own": (
        "timed_losses",
        ["spread"],
        lambda r: setattr(r, "blocks", [np.append(r.losses, 1.9), np.append(r.losses, 1.7)]),
    ),
    "a block that trains no more": (
        "timed_losses",
        ["spread"],
        lambda r: setattr(r, "blocks", [np.append(r.losses, later) for later in (np.full(30, 1.0), np.full(30, 1.9))]),
    ),
    "another timed graph": ("callable", ["callable"], lambda r: setattr(r, "difference", "node 3 is another")),
    "an op missing": ("what_ran", ["kernel"], lambda r: r.profile["ops"].pop("MatMul")),
    "a forbidden op": ("what_ran", ["kernel"], lambda r: r.profile["ops"].update(CudnnRNNV3=1)),
    "no kernel at all": ("what_ran", ["kernel"], lambda r: r.profile["kernels"].clear()),
    "its kernel missing": ("what_ran", ["kernel"], lambda r: r.profile["kernels"].pop("sm90_gemm_f32")),
    "the head's kernel missing": ("what_ran", ["kernel"], lambda r: r.profile["kernels"].pop("loop_fusion")),
    "a forbidden kernel": ("what_ran", ["kernel"], lambda r: r.profile["kernels"].update(cudnn_elementwise=0.1)),
}  # fmt: skip


def test_honest_row_passes_every_check_with_finite_errors_in_its_record():
    record = prove(FakeRow())
    assert record["ok"] and record["failed"] == [] and record["reason"] == ""
    assert 0 < record["outputs_err"] < 1e-6
    assert 0 < record["gradients_err"] < 1e-7
    assert 0 <= record["update_err"] < 1e-9
    assert 0 < record["loss_err"] < 1e-7
    assert record["spread_err"] == 0
    assert set(record["worst_at"]) == {"outputs", "gradients", "update", "loss", "spread"}
    assert record["worst_at"]["update"] in SHAPES
    assert record["limit"]["outputs"] == LIMITS["fp32"].outputs
    assert record["kernel"] == {"ops": {r"_?\w*MatMul": 5}, "kernels": PROFILE["kernels"]}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_fails_by_name_and_with_a_reason(mistake):
    _, failed, change = MISTAKES[mistake]
    record = prove(planted(change))
    assert not record["ok"] and sorted(record["failed"]) == sorted(failed)
    assert all(f"{proof}: " in record["reason"] for proof in failed)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_passes_once_its_check_does_nothing(mistake, monkeypatch):
    check, _, change = MISTAKES[mistake]
    monkeypatch.setattr(Proof, check, lambda self, *args, **kwargs: None)
    assert prove(planted(change))["ok"], f"{mistake} is caught without {check}"


def test_every_public_check_has_a_planted_mistake_that_it_alone_catches():
    public = {name for name, _ in inspect.getmembers(Proof, inspect.isfunction) if not name.startswith("_")}
    assert public - {"record", "hold"} == {check for check, _, _ in MISTAKES.values()}


@pytest.mark.parametrize("named", LIMITS)
@pytest.mark.parametrize("computed", LIMITS)
def test_precision_passes_under_its_own_name_only(computed, named):
    expected = {
        ("tf32", "fp32"): ["outputs"],
        ("fp16", "fp32"): ["outputs", "precision"],
        ("fp32", "tf32"): ["precision"],
        ("fp16", "tf32"): ["precision"],
        ("fp32", "fp16"): ["precision"],
        ("tf32", "fp16"): ["precision"],
    }
    assert prove(FakeRow(computed), named)["failed"] == expected.get((computed, named), [])


def test_one_tensor_of_another_precision_is_enough_to_fail():
    row = FakeRow("tf32")
    row.shown["hidden"] = product("fp32")[..., ::2]
    record = prove(row, "tf32")
    assert record["failed"] == ["precision"] and "hidden" in record["reason"]


def test_error_just_below_its_limit_passes_and_just_above_fails():
    scale = np.abs(REFERENCE["gradients"]["embedding"]).max()
    for factor, failed in ((0.99, []), (1.01, ["gradients"])):
        row = FakeRow("tf32")
        row.gradients["embedding"] = REFERENCE["gradients"]["embedding"].copy()
        row.gradients["embedding"][0, 0] += factor * LIMITS["tf32"].gradients * scale
        assert prove(row, "tf32")["failed"] == failed


def test_gradients_of_two_tensors_swapped_are_seen_although_both_are_there():
    row = FakeRow()
    row.gradients["lstm_0/forward/kernel"] = row.gradients["lstm_0/forward/kernel"][::-1]
    record = prove(row)
    assert record["failed"] == ["gradients"] and "lstm_0/forward/kernel" in record["reason"]


@pytest.mark.parametrize("precision", LIMITS)
def test_layer_outside_the_update_errs_by_exactly_one_in_every_precision(precision):
    row = FakeRow(precision)
    del row.updates["lstm_0/forward/kernel"]
    record = prove(row, precision)
    assert record["failed"] == ["update"] and record["update_err"] == 1.0
    assert "lstm_0/forward/kernel" in record["reason"]


def test_mean_loss_of_fit_is_held_against_the_mean_of_the_update_steps():
    row = FakeRow()
    row.one_mean = True
    assert prove(row)["ok"]
    row.losses = row.losses * np.float32(1.001)
    assert prove(row)["failed"] == ["loss"]


def test_losses_of_the_proofs_own_steps_follow_the_curve():
    row = FakeRow()
    row.losses = row.losses.copy()
    row.losses[1] *= 1.001
    record = prove(row)
    assert record["failed"] == ["loss"] and "step 2 of the proof's steps" in record["reason"]
    assert record["loss_err"] == pytest.approx(1e-3, rel=0.01)


def test_block_of_a_single_step_is_held_against_the_first_loss():
    for dropout in (False, True):
        row = FakeRow()
        row.blocks, row.dropout = [row.losses[:1], row.losses[:1]], dropout
        assert prove(row)["ok"]
    row = FakeRow()
    row.blocks = [np.array([LOSSES[:UPDATE_STEPS].mean()])] * 2
    assert prove(row)["failed"] == ["loss"]


def test_dropout_lifts_the_curve_and_widens_the_spread_but_not_endlessly():
    row = FakeRow()
    row.blocks = [row.losses * 1.2, row.losses * 1.1]
    assert prove(row)["failed"] == ["loss", "spread"]
    row.dropout = True
    assert SPREAD_LIMIT < prove(row)["spread_err"] < DROPOUT_SPREAD_LIMIT
    assert prove(row)["ok"]
    row.blocks = [row.losses, row.losses * 4]
    assert prove(row)["failed"] == ["spread"]
    row.blocks = [row.losses, np.full(CURVE_STEPS, np.inf)]
    assert "loss" in prove(row)["failed"]


def test_blocks_may_part_after_many_steps_but_not_on_average():
    row, steps = FakeRow(), np.random.default_rng(8).uniform(1, 2, (2, 200))
    steps[:, : SPREAD_STEPS - CURVE_STEPS] = 1.5
    row.blocks = [np.append(row.losses, later) for later in steps]
    assert np.abs(steps[0] / steps[1] - 1).max() > 0.5, "step by step they lie far apart"
    assert prove(row)["ok"]
    row.blocks[1][SPREAD_STEPS:] *= 2
    assert "mean losses" in prove(row)["reason"]


def test_infinite_errors_are_recorded_as_null_so_that_the_record_stays_json():
    row = FakeRow()
    row.shown["logits"] = row.shown["logits"][:, :-1]
    record = prove(row)
    assert record["failed"] == ["outputs"] and record["outputs_err"] is None


def test_reference_that_is_not_finite_proves_nothing():
    for error in (max_error, norm_error):
        assert error(np.ones(3), np.array([1.0, np.nan, 1.0])) == np.inf
    reference = {**REFERENCE["outputs"], "hidden": replace_at(REFERENCE["outputs"]["hidden"], 3, math.nan)}
    proof = Proof("fp32")
    proof.outputs(FakeRow().outputs(), reference)
    assert "outputs" in proof.failures


def test_error_of_a_tensor_that_should_be_zero_is_zero_or_infinite():
    for error in (max_error, norm_error):
        assert error(np.zeros(3), np.zeros(3)) == 0
        assert error(np.full(3, 1e-30), np.zeros(3)) == np.inf
        assert error(np.ones((3, 1)), np.ones(3)) == np.inf


@pytest.mark.parametrize("kernels", [{}, {"loop_fusion": 1.0}])
def test_kernels_are_asked_for_on_a_gpu_only(kernels):
    proof = Proof("fp32")
    proof.what_ran({"ops": PROFILE["ops"], "kernels": kernels}, KERNEL, "cpu")
    assert not proof.failures
    proof.what_ran({"ops": PROFILE["ops"], "kernels": kernels}, KERNEL, "gpu")
    assert list(proof.failures) == ["kernel"]


def test_ops_are_matched_whole_and_counted_together():
    cases = SimpleNamespace(
        enough={"loop:MatMul": 2, "loop:_FusedMatMul": 1}, outside={"MatMul": 3}, few={"loop:MatMul": 2}
    )
    for ops, fails in ((cases.enough, False), (cases.outside, True), (cases.few, True)):
        proof = Proof("fp32")
        proof.what_ran({"ops": ops, "kernels": {}}, Kernel(ops={r"loop:_?\w*MatMul": 3}), "cpu")
        assert bool(proof.failures) == fails


@pytest.mark.parametrize("launches, fails", [(0, True), (1, False), (2, True)])
def test_op_that_may_run_once_fails_when_it_runs_for_every_layer(launches, fails):
    proof = Proof("fp32")
    proof.what_ran({"ops": {"CudnnRNNV3": launches}, "kernels": {}}, Kernel(ops={"CudnnRNNV3": (1, 1)}), "cpu")
    assert bool(proof.failures) == fails
