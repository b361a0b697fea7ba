"""The proof on NumPy arrays: each check fails when it should, passes when it should, and is what catches its mistake."""

import inspect
import math
from types import SimpleNamespace

import numpy as np
import pytest

from harness.measure.proof import (
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
from tests.harness.proof_cases import (
    KERNEL,
    LOSSES,
    MISTAKES,
    PROFILE,
    REFERENCE,
    SENSITIVE,
    SHAPES,
    FakeRow,
    complaints,
    complaints_of_modes,
    is_chaotic,
    losses_off,
    planted,
    product,
    prove,
    replace_at,
)


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
    counts = {"launches": None, "syncs": None}  # a profile that has none
    assert record["kernel"] == {"ops": {r"_?\w*MatMul": 5, "Softmax": 1}, "kernels": PROFILE["kernels"], **counts}


def test_planted_mistakes_fail_by_name_and_with_a_reason_and_honest_rows_pass():
    assert list(complaints()) == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_passes_once_its_check_does_nothing(mistake, monkeypatch):
    check, _, change = MISTAKES[mistake]
    monkeypatch.setattr(Proof, check, lambda self, *args, **kwargs: None)
    assert prove(planted(change))["ok"], f"{mistake} is caught without {check}"


def test_every_public_check_has_a_planted_mistake_that_it_alone_catches():
    public = {name for name, _ in inspect.getmembers(Proof, inspect.isfunction) if not name.startswith("_")}
    assert public - {"record", "hold", "follows", "steps_before_chaos", "answers"} == {
        check for check, _, _ in MISTAKES.values()
    }


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
        row.blocks, row.dropout = [row.losses[:1], row.losses[:1] * (1.01 if dropout else 1.0)], dropout
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


def test_kernel_of_the_softmax_that_a_trial_says_it_has_must_run_in_training_alone():
    assert complaints_of_modes() == []


def test_record_names_the_longest_kernels_and_those_that_are_promised():
    longest = {f"product_{k}": 10.0 - k for k in range(8)}
    proof = Proof("fp32")
    kernel = Kernel(kernels="lstm", rest_kernels="softmax")
    proof.what_ran({"ops": {}, "kernels": {**longest, "lstm": 0.2, "softmax": 0.1, "other": 0.3}}, kernel, "gpu")
    assert list(proof.kernel["kernels"]) == [*list(longest)[:5], "lstm", "softmax"]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
@pytest.mark.parametrize("what", ["losses", "gradients", "updates"])
def test_what_coarse_rounding_does_to_a_classifier_widens_the_limits_of_coarse_precisions_alone(precision, what):
    failed = {"losses": "loss", "gradients": "gradients", "updates": "update"}[what]
    limit = 1.5 * getattr(LIMITS[precision], failed) if precision != "fp16" else {"loss": 0.01}.get(failed, 0.4)
    moved = np.full(CURVE_STEPS, limit / 2) if what == "losses" else dict.fromkeys(SHAPES, limit / 2)
    for part, passes in ((0.95, precision != "fp32"), (1.05, False)):
        row = FakeRow(precision)
        row.reference = REFERENCE | {f"rounded_{what}": moved, "rounded_length": 0.25 if what == "updates" else 0.0}
        if what == "losses":
            row.losses = LOSSES * (1 + part * limit)
            row.shown["loss"], row.blocks = LOSSES[0], [row.losses] * 2
        elif what == "gradients":
            row.gradients = {name: array * (1 + part * limit) for name, array in REFERENCE["gradients"].items()}
        else:
            wider = max(limit, LIMITS[precision].update)
            row.updates = {name: array * (1 + part * wider) for name, array in REFERENCE["updates"].items()}
        assert prove(row, precision)["failed"] == ([] if passes else [failed])


def test_the_limit_of_the_worst_error_stands_in_the_record_with_the_steps_that_were_compared():
    row = FakeRow()
    losses_off(SENSITIVE, 0.9)(row)
    of_last_step = row.blocks[1][-1:]
    row.losses = LOSSES
    row.blocks = [LOSSES, np.append(LOSSES[:-1], of_last_step)]
    record = prove(row)
    assert record["loss_err"] == pytest.approx(0.9 * record["limit"]["loss"], rel=1e-3)
    assert record["limit"]["loss"] > 90 * LIMITS["fp32"].loss and record["curve_steps"] == CURVE_STEPS
    is_chaotic(1.5, 3)(row)
    assert prove(row)["curve_steps"] == 3


def test_no_case_widens_a_limit_to_where_a_layer_that_is_left_out_would_pass():
    row = FakeRow()
    row.reference = REFERENCE | {"update_sensitivity": dict.fromkeys(SHAPES, 1e12), "gradient_step": 1e-30}
    row.updates = {name: 0.4 * array for name, array in REFERENCE["updates"].items()}
    row.gradients = {name: 0.4 * array for name, array in REFERENCE["gradients"].items()}
    assert sorted(prove(row)["failed"]) == ["gradients", "update"]
