"""An honest row of NumPy arrays, and mistakes to plant in it: what the tests of harness/measure/proof.py go through."""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np

from harness.measure.proof import CURVE_STEPS, LIMITS, TO_HOST_LIMIT, UPDATE_STEPS, Kernel, Proof

SHAPES = {
    "embedding": (11, 4),
    "lstm_0/forward/kernel": (4, 12),
    "lstm_1/forward/kernel": (3, 12),
    "dense_0/bias": (11,),
    "unused": (2,),  # its gradients and updates are zero
}
KERNEL = Kernel(
    ops={r"_?\w*MatMul": 4, "Softmax": (1, 1)},
    not_ops="CudnnRNN.*",
    kernels="gemm",
    not_kernels="cudnn",
    rest_kernels="fusion",
)
PROFILE = {
    "ops": {"MatMul": 3, "_FusedMatMul": 2, "Softmax": 1, "AfterCudnnRNN": 1},
    "kernels": {"sm90_gemm_f32": 0.2, "loop_fusion": 0.01},
}
LOSSES = np.array([2.4, 2.31, 2.2, 2.13, 2.05, 1.96])


def tensors(seed: int, scale: float) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: scale * generator.normal(size=shape) * (name != "unused") for name, shape in SHAPES.items()}


def operands() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    return generator.normal(size=(4, 5, 16)), generator.normal(size=(16, 11))


def cut_to_10_bits(array: np.ndarray) -> np.ndarray:
    """float32 with TF32's mantissa."""
    bits = array.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32)


def rounded_to_bfloat16(array: np.ndarray) -> np.ndarray:
    """float32 with bfloat16's mantissa, to the nearest."""
    bits = (array.astype(np.float32).view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def product(precision: str) -> np.ndarray:
    """A matrix product, [4, 5, 11], as hardware of that precision computes and stores it."""
    x, w = operands()
    if precision == "tf32":
        return cut_to_10_bits(x) @ cut_to_10_bits(w)
    if precision == "bf16":
        return rounded_to_bfloat16(rounded_to_bfloat16(x) @ rounded_to_bfloat16(w))
    dtype = {"fp32": np.float32, "fp16": np.float16}[precision]
    return x.astype(dtype) @ w.astype(dtype)


REFERENCE = {
    "outputs": {"logits": operands()[0] @ operands()[1], "hidden": operands()[0] @ operands()[1][:, ::2], "loss": LOSSES[0]},
    "gradients": tensors(2, 0.1),
    "updates": tensors(3, 1e-3),
    "losses": LOSSES,
    "loss_sensitivity": np.array([0.0, 0.1, 0.2, 1.0, 1.0, 3.0]),
    "update_sensitivity": dict.fromkeys(SHAPES, 1.0),
    "rounded_losses": np.zeros(CURVE_STEPS),
    "rounded_length": 0.0,
    "rounded_gradients": dict.fromkeys(SHAPES, 0.0),
    "rounded_updates": dict.fromkeys(SHAPES, 0.0),
    "gradient_step": 1.0,
    "clip_bias": np.zeros(11),
    "clip_targets": np.zeros((4, 5)),
    "clip_gradients": tensors(6, 0.1),
    "setup": {"learning_rate": 1.0},
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
        self.reference = REFERENCE
        self.start = tensors(4, 1.0)
        self.gradients = {name: array.astype(np.float32) for name, array in REFERENCE["gradients"].items()}
        self.updates = dict(REFERENCE["updates"])
        self.losses = LOSSES.astype(np.float32)
        self.forward = LOSSES[::-1].astype(np.float32)
        hidden = {"hidden": self.shown["hidden"].copy()}
        self.alone = hidden | {name: array.astype(np.float32) for name, array in REFERENCE["stack_gradients"].items()}
        self.alone_losses = np.full(CURVE_STEPS, 0.5, np.float32)
        self.elsewhere = {name: array.astype(np.float32) for name, array in REFERENCE["clip_gradients"].items()}
        self.anew = True  # whether the stack's results are those of the batch that it is given
        self.one_mean = False  # as `fit` reports it
        self.blocks = [self.losses, self.losses]
        self.dropout = False
        self.difference = ""  # of the timed callable from the proven one
        self.differs = ""  # of a whole training from the configured one
        self.profile = {kind: dict(found) for kind, found in PROFILE.items()}
        self.kernel, self.device = KERNEL, "gpu"
        self.loss, self.reads, self.copied, self.copied_in_fit = object(), 0, TO_HOST_LIMIT, 0
        self.lag_s, self.lag_limit_s = [1.0, 0.004], [0.003, 0.004]  # another process came between in the first block
        self.masks = ""  # what is wrong with dropout's
        self.at_work = ["", "update of model.py"]  # in one block of two
        self.steps = 1  # what ran before the proof

    def restore(self):
        self.steps = 0

    def outputs(self):
        return self.shown

    stack_batches = range(2)

    def gradients_elsewhere(self, bias, targets):
        return self.elsewhere

    def train_steps(self, count, clock=None, first=0):
        self.steps += count
        return self.losses[:count].mean(keepdims=True) if self.one_mean else self.losses[:count]

    def first_gradients(self):
        assert self.steps == 1, "gradients are read after exactly one step since restore"
        return self.gradients

    def stack_results(self, number=0):
        return {name: array + number for name, array in self.alone.items()} if self.anew else self.alone

    def graph_mismatch(self):
        return self.difference

    def weights(self):
        part = self.steps / UPDATE_STEPS
        return {name: array + part * self.updates.get(name, 0.0) for name, array in self.start.items()}


def prove(row: FakeRow, precision: str = "fp32", made: Callable[[str], Proof] = Proof) -> dict:
    """The record of the whole proof; `made` makes it, which a test may replace."""
    proof = made(precision)
    proof.outputs(row.outputs(), REFERENCE["outputs"])
    proof.losses("the forward passes", row.forward, REFERENCE["forward_losses"])
    proof.stack(row, row.alone_losses, REFERENCE)
    proof.training(row, row.reference)
    proof.callable(row.graph_mismatch())
    proof.whole_training(row.differs)
    proof.dropout(row.masks)
    proof.clock(row.lag_s, row.lag_limit_s, row.at_work)
    proof.stays_on_device(row.loss, row.reads, row.copied)
    proof.copies(row.copied_in_fit, 5 * TO_HOST_LIMIT)
    proof.timed_losses(row.blocks, REFERENCE["losses"], row.dropout)
    proof.what_ran(row.profile, row.kernel, row.device)
    return proof.record()


def planted(change) -> FakeRow:
    row = FakeRow()
    change(row)
    return row


def replace_at(array: np.ndarray, index: int, value: float) -> np.ndarray:
    changed = np.array(array)
    changed.flat[index] = value
    return changed


SENSITIVE = [0.0, 1.0, 10.0, 100.0, 300.0, 1000.0]  # the last one: a limit of 9.5e-4, just within the curve's end


def in_a_case(**of_reference) -> FakeRow:
    """A row whose case is another one: the reference's sensitivities and rate."""
    row = FakeRow()
    row.reference = REFERENCE | of_reference
    return row


def losses_off(sensitivity: list[float], part: float) -> Callable[[FakeRow], None]:
    """Every loss off by this part of its limit, which its own sensitivity gives it."""

    def change(row: FakeRow) -> None:
        row.reference = REFERENCE | {"loss_sensitivity": np.array(sensitivity)}
        limits = np.maximum(LIMITS["fp32"].loss, 4 * 2.0**-22 * np.array(sensitivity))
        row.losses = LOSSES * (1 + part * limits)
        row.blocks = [row.losses, LOSSES * (1 - part * limits)]

    return change


def clips_coarsely(row: FakeRow) -> None:
    """A quarter as sensitive, but its framework's clipping is known to err four times as much as the precision's rounding."""
    losses_off(SENSITIVE, 0.95)(row)
    row.reference, row.update_rounding = REFERENCE | {"loss_sensitivity": np.array(SENSITIVE) / 4}, 2.0**-20


def losses_off_in_fit(sensitivity: list[float], part: float) -> Callable[[FakeRow], None]:
    """The mean of the first steps, off by this part of its last step's limit; the timed losses are right."""

    def change(row: FakeRow) -> None:
        losses_off(sensitivity, 0.0)(row)
        row.one_mean, row.losses = True, LOSSES * (1 + part * 4 * 2.0**-22 * sensitivity[UPDATE_STEPS - 1])

    return change


def is_chaotic(factor: float, at: int, end: int = 3) -> Callable[[FakeRow], None]:
    """Losses of another training from step `at` on, and in each block of another one; the curve has `end` steps."""

    def change(row: FakeRow) -> None:
        losses_off([0.0, *[1.0] * (end - 1), *[2000.0] * (CURVE_STEPS - end)], 0.5)(row)
        row.losses = np.append(LOSSES[:at], factor * LOSSES[at:])
        row.blocks = [row.losses, np.append(LOSSES[:at], factor**2 * LOSSES[at:])]

    return change


def apart_at(row: FakeRow, step: int) -> None:
    """With dropout, blocks that differ at one step."""
    row.dropout, row.blocks = True, [LOSSES, replace_at(LOSSES, step, 4 * LOSSES[step])]
    row.blocks = [np.append(losses, np.full(200, 1.5)) for losses in row.blocks]


def updates_off(sensitivity: float, size: float, part: float) -> Callable[[FakeRow], None]:
    """Every update off by this part of its limit, where updates are that sensitive and that large."""

    def change(row: FakeRow) -> None:
        updates = tensors(3, size)
        row.reference = REFERENCE | {"updates": updates, "update_sensitivity": dict.fromkeys(SHAPES, sensitivity)}
        for name, update in updates.items():
            norm = np.linalg.norm(update) or 1.0
            coarse = max(2.0**-24 * np.linalg.norm(row.start[name]) / norm, 2.0**-22 * sensitivity)
            limit = max(LIMITS["fp32"].update, min(0.5, 4 * coarse))
            row.updates[name] = update * (1 + part * limit)

    return change


def gradients_off(rate: float, part: float) -> Callable[[FakeRow], None]:
    """The embedding's gradient off by this part of its limit, where it is read off weights that changed by `rate` of it."""

    def change(row: FakeRow) -> None:
        row.reference = REFERENCE | {"gradient_step": rate}
        gradient, largest = REFERENCE["gradients"]["embedding"], np.abs(row.start["embedding"]).max()
        limit = 4 * 2.0**-24 * largest / (rate * np.abs(gradient).max())
        row.gradients = row.gradients | {"embedding": gradient * (1 + part * min(0.5, limit))}

    return change


def a_fifth_too_high(row: FakeRow) -> None:
    """Updates 1.2 times as long, of weights so large that what float32 loses of an update would be more."""
    updates = tensors(3, 1e-8)
    row.reference, row.updates = (
        REFERENCE | {"updates": updates},
        {name: 1.2 * update for name, update in updates.items()},
    )


# mistake: (the check that has to catch it, the proofs that it has to fail, how it is planted)
MISTAKES = {
    "a rate a fifth too high": ("hold_length", ["update"], a_fifth_too_high),
    "clipping below the bound": (
        "hold_length", ["clipping"], lambda r: r.elsewhere.update({n: 1.1 * g for n, g in r.elsewhere.items()}),
    ),
    "gradients of another batch": ("stack", ["gradients"], lambda r: setattr(r, "anew", False)),
    "dropout of another rate": ("dropout", ["dropout"], lambda r: setattr(r, "masks", "not this rate")),
    "the same masks in every block": (
        "dropout", ["dropout"], lambda r: (setattr(r, "dropout", True), setattr(r, "blocks", [r.losses, r.losses])),
    ),
    "a thread at work": ("clock", ["clock"], lambda r: setattr(r, "at_work", ["update of model.py", "update of model.py"])),
    "one logit off": ("outputs", ["outputs"], lambda r: r.shown.update(logits=replace_at(product("fp32"), 7, 1.0))),
    "logits missing": ("outputs", ["outputs"], lambda r: r.shown.pop("logits")),
    "hidden time-major": ("outputs", ["outputs"], lambda r: r.shown.update(hidden=r.shown["hidden"].swapaxes(0, 1))),
    "a NaN logit": ("outputs", ["outputs"], lambda r: r.shown.update(logits=replace_at(product("fp32"), 7, math.nan))),
    "a NaN in the second tensor": (
        "outputs",
        ["outputs"],
        lambda r: r.shown.update(hidden=replace_at(r.shown["hidden"], 7, math.nan)),
    ),
    "tf32 in fp32": ("outputs", ["outputs"], lambda r: r.shown.update(logits=product("tf32"))),
    "fp16 in fp32": ("outputs", ["outputs", "precision"], lambda r: r.shown.update(logits=product("fp16"))),
    "bf16 in fp32": ("outputs", ["outputs", "precision"], lambda r: r.shown.update(logits=product("bf16"))),
    "another loss": ("outputs", ["loss"], lambda r: r.shown.update(loss=np.float32(2.5))),
    "a forward loss": ("losses", ["loss"], lambda r: r.forward.put(4, 2.5)),
    "a NaN forward loss": ("losses", ["loss"], lambda r: r.forward.put(5, math.nan)),
    "a NaN loss after the curve": (
        "losses",
        ["loss"],
        lambda r: setattr(r, "forward", np.append(r.forward, [2.0, math.nan])),
    ),
    "no forward losses": ("losses", ["loss"], lambda r: setattr(r, "forward", r.forward[:0])),
    "the stack's outputs off": ("stack", ["outputs"], lambda r: r.alone["hidden"].put(7, 1.0)),
    "no outputs of the stack": ("stack", ["outputs"], lambda r: r.alone.pop("hidden")),
    "a gradient of the stack missing": ("stack", ["gradients"], lambda r: r.alone.pop("dense_0/bias")),
    "a loss of the stack": ("stack", ["loss"], lambda r: r.alone_losses.put(4, 0.6)),
    "a gradient missing": ("training", ["gradients"], lambda r: r.gradients.pop("dense_0/bias")),
    "a gradient zero": ("training", ["gradients"], lambda r: r.gradients.update({"dense_0/bias": np.zeros(11)})),
    "a gradient that should be zero": ("training", ["gradients"], lambda r: r.gradients["unused"].put(0, 1e-30)),
    "gates swapped": (
        "training",
        ["gradients"],
        lambda r: r.gradients.update(
            {"lstm_1/forward/kernel": r.gradients["lstm_1/forward/kernel"][:, [3, 4, 5, 0, 1, 2, *range(6, 12)]]}
        ),
    ),
    "a loss of the proof's own steps": (
        "training_losses",
        ["loss"],
        lambda r: setattr(r, "losses", r.losses * [1, 1.001, 1, 1, 1, 1]),
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
    "a block that parts late": (
        "timed_losses",
        ["spread"],
        lambda r: setattr(r, "blocks", [np.append(r.losses, [1.5] * 6 + [late] * 90) for late in (1.0, 1.9)]),
    ),
    "dropout in one block alone": (
        "timed_losses",
        ["spread"],
        lambda r: vars(r).update(dropout=True, blocks=[np.append(k * r.losses, np.full(200, 1.5)) for k in (1, 4)]),
    ),
    "losses beyond what the case explains": ("losses", ["loss"], losses_off(SENSITIVE, 1.1)),
    "a mean loss beyond what the case explains": ("losses", ["loss"], losses_off_in_fit(SENSITIVE, 1.5)),
    "another training before the curve's end": ("losses", ["loss"], is_chaotic(1.01, 2)),
    "blocks apart before the curve's end": ("timed_losses", ["spread"], lambda r: (is_chaotic(1.2, 3)(r), apart_at(r, 2))),
    "updates beyond what the case explains": ("training", ["update"], updates_off(1e4, 1e-3, 1.1)),
    "small updates that are too large": ("training", ["update"], updates_off(1.0, 1e-5, 1.1)),
    "a layer left out of tiny updates": ("training", ["update"], updates_off(1.0, 1e-8, -2.0)),
    "a gradient beyond what its weights' rounding explains": ("training", ["gradients"], gradients_off(1e-3, 1.1)),
    "a gradient of zero that no weight could show": ("training", ["gradients"], gradients_off(1e-8, -2.0)),
    "another timed graph": ("callable", ["callable"], lambda r: setattr(r, "difference", "node 3 is another")),
    "a whole training that does less": ("whole_training", ["training"], lambda r: setattr(r, "differs", "half of the data")),
    "a clock too early": ("clock", ["clock"], lambda r: setattr(r, "lag_s", [0.0031, 0.0041])),
    "a clock of no number": ("clock", ["clock"], lambda r: setattr(r, "lag_s", [math.nan] * 2)),
    "a float for a loss": ("stays_on_device", ["host"], lambda r: setattr(r, "loss", 2.4)),
    "an array for a loss": ("stays_on_device", ["host"], lambda r: setattr(r, "loss", LOSSES[:1])),
    "a loss that was read": ("stays_on_device", ["host"], lambda r: setattr(r, "reads", 1)),
    "a copy in a step": ("stays_on_device", ["host"], lambda r: setattr(r, "copied", TO_HOST_LIMIT + 1)),
    "a copy in fit": ("copies", ["host"], lambda r: setattr(r, "copied_in_fit", 5 * TO_HOST_LIMIT + 1)),
    "an op missing": ("what_ran", ["kernel"], lambda r: r.profile["ops"].pop("MatMul")),
    "an op twice": ("what_ran", ["kernel"], lambda r: r.profile["ops"].update(Softmax=2)),
    "a forbidden op": ("what_ran", ["kernel"], lambda r: r.profile["ops"].update(CudnnRNNV3=1)),
    "no kernel at all": ("what_ran", ["kernel"], lambda r: r.profile["kernels"].clear()),
    "its kernel missing": ("what_ran", ["kernel"], lambda r: r.profile["kernels"].pop("sm90_gemm_f32")),
    "the head's kernel missing": ("what_ran", ["kernel"], lambda r: r.profile["kernels"].pop("loop_fusion")),
    "a forbidden kernel": ("what_ran", ["kernel"], lambda r: r.profile["kernels"].update(cudnn_elementwise=0.1)),
}  # fmt: skip


def without_profile(row: FakeRow) -> None:
    row.device, row.profile = "cpu", {"ops": row.profile["ops"], "kernels": {}}


def forbids_nothing(row: FakeRow) -> None:
    row.kernel = KERNEL._replace(not_ops="", not_kernels="")


def reports_one_mean(row: FakeRow) -> None:
    row.one_mean = True


def has_dropout(row: FakeRow) -> None:
    row.dropout, row.blocks = True, [row.losses * 1.2, row.losses * 1.1]


def is_timed_for_one_step(row: FakeRow) -> None:
    row.blocks = [row.losses[:1], row.losses[:1]]


AS_FAR_AS_THE_CASE_EXPLAINS = {
    "sensitive losses": losses_off(SENSITIVE, 0.95),
    "losses after coarse clipping": clips_coarsely,
    "sensitive losses of fit": losses_off_in_fit(SENSITIVE, 0.95),
    "chaotic losses": is_chaotic(1.2, 3),
    "chaotic losses of fit": lambda row: (is_chaotic(1.2, 2, 2)(row), setattr(row, "one_mean", True)),
    "sensitive updates": updates_off(1e4, 1e-3, 0.95),
    "small updates": updates_off(1.0, 1e-5, 0.95),
    "gradients read off weights that hardly change": gradients_off(1e-3, 0.95),
}
HONEST = [lambda row: None, without_profile, forbids_nothing, reports_one_mean, has_dropout, is_timed_for_one_step]
# precision that a row computes in, and that it is shown as: the proofs that fail; of all other pairs of unlike ones "precision"
UNLIKE = {
    ("tf32", "fp32"): ["outputs"],
    ("fp16", "fp32"): ["outputs", "precision"],
    ("bf16", "fp32"): ["outputs", "precision"],
}
# mistake: what its reason has to say besides the name of the proof
SAYS = {
    "no kernel at all": "the profiler saw no kernel on the GPU",
    "an op missing": "ran 2 times, expected 4 or more",
    "an op twice": "ran 2 times, expected 1 to 1",
    "fp16 in fp32": "holds all float16 numbers",
    "fp32 as fp16": "holds not all float16 numbers",
    "bf16 as fp16": "holds all bfloat16 numbers, which is not fp16",
    "fp16 as bf16": "holds all float16 numbers, which is not bf16",
    "a NaN forward loss": "NaN or infinite loss at step 6 of the forward passes",
}
# mistake: the errors that have no number
NO_NUMBER = {
    "logits missing": {"outputs"},
    "hidden time-major": {"outputs"},
    "a NaN logit": {"outputs"},
    "a NaN in the second tensor": {"outputs"},
    "a gradient missing": {"gradients"},
    "a gradient that should be zero": {"gradients"},
    "a gradient of the stack missing": {"gradients"},
    "no outputs of the stack": {"outputs"},
    "a NaN forward loss": {"loss"},
    "a NaN timed loss": {"loss", "spread"},
}


def complaints(made: Callable[[str], Proof] = Proof) -> Iterator[str]:
    """What is not as it has to be, case by case, where `made` makes the proofs: nothing for a proof that does its work."""

    def expect(case: str, precision: str, row: FakeRow, failed: list[str]) -> Iterator[str]:
        try:
            record = prove(row, precision, made)
        except Exception as error:
            yield f"{case}: {type(error).__name__}: {error}"
            return
        if row.steps:
            yield f"{case}: what is timed next does not begin where the proof began"
        if sorted(record["failed"]) != sorted(failed) or record["ok"] == bool(failed):
            yield f"{case}: failed {record['failed']}, expected {failed}"
        if not all(f"{proof}: " in record["reason"] for proof in failed) or SAYS.get(case, "") not in record["reason"]:
            yield f"{case}: {record['reason']}"
        errors = {
            name for name in ("outputs", "gradients", "update", "loss", "spread") if record[f"{name}_err"] is None
        }
        if errors != NO_NUMBER.get(case, set()):
            yield f"{case}: without a number: {errors}"

    for mistake, (_, failed, change) in MISTAKES.items():
        yield from expect(mistake, "fp32", planted(change), failed)
    for change in HONEST:
        yield from expect(change.__name__, "fp32", planted(change), [])
    for case, change in AS_FAR_AS_THE_CASE_EXPLAINS.items():
        yield from expect(case, "fp32", planted(change), [])
    for computed in LIMITS:
        for named in LIMITS:
            failed = UNLIKE.get((computed, named), [] if computed == named else ["precision"])
            yield from expect(f"{computed} as {named}", named, FakeRow(computed), failed)
    try:
        proof = made("fp32")
        if proof.record()["outputs_err"] is not None or not proof.record()["ok"]:
            yield "nothing proven: an error without a proof"
        answers = np.linspace(0.5, 1.0, 6, dtype=np.float32).reshape(2, 3)  # of two requests, taken in turn
        given = {0: answers[0], 3: answers[1]}
        for case, found_there, failed in (
            ("right answers", given, []),
            ("an earlier answer", given | {5: answers[0]}, ["outputs"]),
            ("answers that are no arrays", {0: answers[0].tolist()}, ["host"]),
        ):
            held = made("fp32")
            held.answers("then", found_there, answers)
            if list(held.failures) != failed or (
                "outputs" in failed and "request 6 then" not in held.failures["outputs"]
            ):
                yield f"{case}: {held.failures}"
        hidden = replace_at(REFERENCE["outputs"]["hidden"], 3, math.nan)
        proof.outputs(FakeRow().outputs(), {**REFERENCE["outputs"], "hidden": hidden})
        if "outputs" not in proof.failures:
            yield "a reference with a NaN proves something"
    except Exception as error:
        yield f"nothing proven: {type(error).__name__}: {error}"


def complaints_of_modes(made: type[Kernel] = Kernel) -> list[str]:
    """What is wrong with the expected ops that each mode asks for."""
    kernel = made(**KERNEL._replace(rest_ops={"Softmax": 1})._asdict())
    plain, fused = SimpleNamespace(), SimpleNamespace(softmax_kernel="softmax_cross_entropy")
    alone = kernel._replace(rest_ops={}, rest_kernels="")
    in_training = kernel._replace(rest_kernels="softmax_cross_entropy")
    wanted = [
        ("stack", plain, alone), ("stack", fused, alone), ("forward", plain, kernel), ("forward", fused, kernel),
        ("train", plain, kernel), ("train", fused, in_training),
    ]  # fmt: skip
    found = [f"{mode}: {trial}" for mode, trial, asked in wanted if kernel.of_mode(mode, trial) != asked]
    passes = kernel._replace(ops={"MatMul": 10}, passes={"MatMul": (10, 30)}, train_ops={"Adam": (1, 1)})
    for mode, most, trains in (("train", 39, True), ("forward", 19, False), ("stack", 39, False), ("fit", 39, True)):
        asked = passes.of_mode(mode, plain)
        if (asked.ops, asked.passes, bool(asked.train_ops)) != ({"MatMul": (10, most)}, {}, trains):
            found.append(f"{mode}: {asked}")
    return found
