"""The proof: the callable that is timed computes what the float64 reference does, in the precision and by the kernel it names.

Per row, at benchmark size, in training mode with dropout 0, from large random weights, non-zero biases and
states, on the same bytes:

    outputs     of the forward pass, and the loss                             max|a − b| / max|b| per tensor
    gradients   of the first step, as the row's own optimizer received them   max|a − b| / max|b| per tensor
    update      of every weight by three steps of the row's own optimizer     ‖a − b‖₂ / ‖b‖₂ per tensor
    losses      of the timed steps, block by block, against the reference's   |a − b| / |b| per step
    kernel      what the profiler saw run
    host        what a timed step brought to the host: nothing, so that it does not wait for the device (a peer's call of cuDNN
                the lengths of its sequences, where its expected ops say so); `fit` may bring back what it was handed
    clock       how long the device went on after the clock of a block had stopped, and whether a thread of Python did
    clipping    a step on each side of the bound of the gradients' norm        length along the reference's

What is held after timing, in whole trainings and of dropout: after_blocks.py, training_proof.py and dropout.py of this folder.

The update is measured in the 2-norm because Adam divides every gradient by its own magnitude: where a gradient is smaller than
the rounding of the precision its sign is noise, and one such element alone would fill the maximum norm. A layer that is
left out of the update has an error of exactly 1 either way.

Limits follow from the case. Each is LIMITS' of the precision, or where that is more, how far a right row may move there: SLACK
times ROUNDING times the reference's own sensitivity to an error in the size of all updates (models/reference/networks.py). Where
that passes CURVE_END times LIMITS' loss, the losses are chaotic: the curve ends before that step, and the record says how many
steps were compared.

A precision is proven from both sides. A row that computes better than the precision it names is not that row: tf32 must err
by at least LIMITS' lower bound; fp16 outputs must be float16 numbers, bf16 outputs bfloat16 numbers, and the others' neither.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from harness.measure.dropout import same_masks

UPDATE_STEPS = 3  # optimizer steps of the check `update`
CURVE_STEPS = 6  # reference losses; every timed block's first losses are compared with them
# All blocks start from the same weights. On a GPU sums differ in their last bits from run to run, and SGD at rate 1 from large
# weights doubles such a difference with every step or two (0.1 % at step 8, 12 % at step 20 of PTB by sentences on an H200): step
# by step the blocks are compared over SPREAD_STEPS, then by their means.
SPREAD_STEPS = 12  # as many as are left of the curve, where that ends early
SPREAD_LIMIT = 0.05  # how far the blocks' losses may lie apart at the same step
DROPOUT_SPREAD_LIMIT = 0.7  # the same where every block draws its own dropout masks
# Bytes in a step, in copies of over harness.frameworks.profiles.SMALL_COPY bytes: metrics, and no tensor.
TO_HOST_LIMIT = 1024
MEANS_LIMIT = 0.25  # how far the blocks' mean losses may lie apart: that tells a training from none


class Limit(NamedTuple):
    """Largest error of each proof that a precision may show, and the least one on outputs that it must show."""

    outputs: float
    gradients: float
    update: float
    loss: float
    outputs_at_least: float = 0.0


# The largest error that was measured (outputs; gradients; update; loss), on an H200 and a CPU; the last three of fp16 in the
# stacked LM of three layers:
#   fp32  6.2e-7; 1.3e-5; 1.0e-4; 9.4e-7
#   tf32  2.1e-4 to 6.2e-4; 8.4e-4; 2.7e-3 (cudnn_stack in MNIST 4.0e-2: why, is not known yet); 2.5e-5
#   fp16  6.7e-4 to 1.9e-3; 1.8e-2; 0.23; 5.6e-5
#   bf16  3.4e-3 to 1.4e-2; 1.9e-2; 0.20; 2.3e-3 (PTB 4.8e-3, under its own limit), on a CPU alone (relus apart: see WIDEST)
# Outputs and gradients of a precision lie above the limits of the next finer one. fp16 updates err most: small
# gradients vanish, and Adam divides by them.
LIMITS = {
    "fp32": Limit(outputs=2e-5, gradients=2e-4, update=2e-3, loss=1e-5),
    "tf32": Limit(outputs=5e-3, gradients=1e-2, update=5e-2, loss=5e-4, outputs_at_least=5e-5),
    "fp16": Limit(outputs=1e-2, gradients=6e-2, update=0.5, loss=1e-3),
    "bf16": Limit(outputs=6e-2, gradients=0.2, update=0.5, loss=5e-3),
}


# By how large a part all updates of a step may be too large at once in a right row. Measured on the embedded text, where it is
# multiplied by 120: TensorFlow's fp32 2.2 × 2⁻²⁴, from the sum, root and quotient of clipping; the reference with products of
# operands cut to 10 bits, as tensor cores cut them, 1.1 × 2⁻¹¹ (rounded to 10 bits 0.06, fp16 0.1 × 2⁻¹¹).
ROUNDING = {"fp32": 2.0**-22, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
SLACK = 4.0
# Times what coarse rounding of the weights does to a classifier, whose relu turns on or off: of the reference with products of 10
# bits, rounded, on 16 seeds of MNIST and the digits, errors are half of that at most; without it 2 of 16 fail.
COARSE = {"fp32": 0.0, "tf32": 2.0, "fp16": 2.0, "bf16": 16.0}
# How far an update's length along the reference's may be from it; at an error of 0.23, as of fp16, it is 0.05.
ALONG_LIMIT = 0.1
CLIPPED_LIMIT = 0.05  # the same of gradients on the other side of the bound of clipping
CURVE_END = 100.0  # times LIMITS' loss: a limit beyond that would tell nothing
HALVES = {"fp16": "float16", "bf16": "bfloat16"}  # in which outputs are stored
STORED = 2.0**-24  # rounding of a float32 weight, which is the master's in every precision
# Limit of gradients and updates: a layer that is left out errs by 1. At bf16 relus of MNIST's head, on for a sequence and off in
# float64, make a bias' update wrong by 0.66 in a right row, and by 0.67 in the reference from weights that are off by 2⁻⁷.
WIDEST = {"fp32": 0.5, "tf32": 0.5, "fp16": 0.5, "bf16": 0.9}


class Trial(Protocol):
    """What a row has to show. `outputs` and `train_steps` run the very callables that are timed.

    Where a step of the proof cannot be the timed callable itself, `graph_mismatch` has to find the two alike. A trial whose
    steps run inside `fit` has `timed_steps(count)` too: `train_steps` with dropout, by the very function that is timed.
    """

    def restore(self) -> None:
        """Put weights, optimizer and states back to where the proof begins."""

    def outputs(self) -> Mapping[str, np.ndarray]:
        """Forward pass on the first batch: named arrays, "loss" among them."""

    def train_steps(self, count: int) -> np.ndarray:
        """Losses [count] of training on the batches 0 … count − 1 (fit reports one mean: then [1]).

        Where steps run inside `fit` it takes a harness.measure.clocks.EpochClock besides, or None, and a Keras `fit` feeds that.
        """

    def first_gradients(self) -> Mapping[str, np.ndarray]:
        """After exactly one step: the gradients that the optimizer received, under canonical names."""

    def weights(self) -> Mapping[str, np.ndarray]:
        """All weights now, under canonical names."""

    def reference_step(
        self, setup: Mapping[str, float], number: int, update: bool
    ) -> tuple[float, Mapping[str, np.ndarray]]:
        """(loss, update of every weight) by the float64 reference of a step on batch `number` from everything as it is now."""

    def gradients_elsewhere(self, bias: np.ndarray, targets: np.ndarray) -> Mapping[str, np.ndarray]:
        """What `first_gradients` gives from another head, dense_0's kernel 0 and this bias, on other targets [batch, time]."""

    def stack_results(self, number: int = 0) -> Mapping[str, np.ndarray]:
        """Of the stack alone, on one of its batches: "hidden", and the gradients by "inputs" and its weights."""

    def graph_mismatch(self) -> str:
        """How the timed callable differs from the one that the proof ran; "" where it does not."""


class Kernel(NamedTuple):
    """What has to be seen running for a row to be what its name says.

    `ops`: regular expression of an op → how often it has to be launched in one training step: at least so often, or, as a
    pair, at least and at most. `rest_ops`: the same of what is not the LSTM stack; a row's stack alone does not show them.
    `not_ops`: an expression that no op may match. `kernels`, `rest_kernels`, `not_kernels`: expressions of kernels' names on a
    GPU: one that has to run, one that has to run outside of the stack, and those that may not. See `of_mode`.
    Graph ops stand as "MatMul", those in a loop's body as "loop:MatMul", eager ones as "eager:MatMul".
    `train_ops`: as `ops`, of what a training step alone has, such as its optimizer. `passes`: expression of an op → how often it
    runs in one forward pass, and in one training step; a count that leaves room for another forward pass fails.
    `calls_copying_lengths`: calls of a forward pass, and as many of a backward pass, that may copy the sequences' lengths, int32
    [batch], to the host, for a peer whose binding of cuDNN cannot do without. `copies_mask`: whether a step may copy a mask
    there, int32 and of the targets' shape, for a peer that counts the lengths on the host.
    """

    ops: Mapping[str, Any] = {}
    rest_ops: Mapping[str, Any] = {}
    train_ops: Mapping[str, Any] = {}
    passes: Mapping[str, tuple[int, int]] = {}
    rest_kernels: str = ""
    not_ops: str = ""
    kernels: str = ""
    not_kernels: str = ""
    calls_copying_lengths: int = 0
    copies_mask: bool = False

    def lengths_bytes(self, mode: str, sequences: int, steps: int) -> int:
        """What a step of the mode may copy to the host of a batch of so many sequences, and of so many steps in all of them."""
        calls = self.calls_copying_lengths * {"forward": 1}.get(mode, 2)
        return 4 * (calls * sequences + self.copies_mask * steps)

    def of_mode(self, mode: str, trial: object) -> "Kernel":
        """What has to be seen in one mode: of the stack alone not the rest; in training also the kernel of the softmax that the
        trial says it has (`softmax_kernel`). `passes` become the most that `ops` may count."""
        ops = dict(self.ops)
        for op, (forward, training) in self.passes.items():
            least, most = bounds(ops.get(op, 0))
            ops[op] = least, min(most, (forward if mode == "forward" else training) + forward - 1)
        kernel = self._replace(ops=ops, passes={})
        if mode in ("forward", "stack"):
            kernel = kernel._replace(train_ops={})
        if mode == "stack":
            return kernel._replace(rest_ops={}, rest_kernels="")
        softmax = getattr(trial, "softmax_kernel", "") if mode == "train" else ""
        return kernel._replace(rest_kernels=softmax) if softmax else kernel


def max_error(value: np.ndarray, reference: np.ndarray) -> float:
    """max|a − b| / max|b|; infinite for another shape or a number that is not finite on either side."""
    return _error(value, reference, largest)


def norm_error(value: np.ndarray, reference: np.ndarray) -> float:
    """‖a − b‖₂ / ‖b‖₂; infinite for another shape or a number that is not finite on either side."""
    return _error(value, reference, norm_2)


def largest(array: np.ndarray) -> float:
    """max|a|"""
    return np.abs(array).max(initial=0.0)


def norm_2(array: np.ndarray) -> float:
    """‖a‖₂"""
    return np.sqrt(np.sum(np.square(array), dtype=np.float64))


def _error(value: np.ndarray, reference: np.ndarray, norm: Callable[[np.ndarray], float]) -> float:
    value, reference = np.asarray(value), np.asarray(reference)
    if value.shape != reference.shape or not (np.isfinite(value).all() and np.isfinite(reference).all()):
        return np.inf
    scale, difference = float(norm(reference)), float(norm(value - reference))
    return difference / scale if scale else (np.inf if difference else 0.0)


def worst(
    values: Mapping[str, np.ndarray],
    reference: Mapping[str, np.ndarray],
    error: Callable,
    limits: Mapping[str, float],
) -> tuple[float, str, float]:
    """(error, tensor's name, limit) of the tensor that errs most for its limit; a tensor that is missing errs infinitely."""
    errors = {name: error(values[name], expected) if name in values else np.inf for name, expected in reference.items()}
    name = max(errors, key=lambda name: errors[name] / limits[name])
    return errors[name], name, limits[name]


def stored_error(
    weights: Mapping[str, np.ndarray], changes: Mapping[str, np.ndarray], norm: Callable[[np.ndarray], float]
) -> dict[str, float]:
    """By tensor: the error of a change that is read off two float32 weights, of which each is rounded; 0 for no change."""
    sizes = {name: float(norm(change)) for name, change in changes.items()}
    return {name: STORED * float(norm(weights[name])) / size if size else 0.0 for name, size in sizes.items()}


def along(values: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> float:
    """<a, b> / <b, b> over all tensors: how long a is along b. Noise, which points elsewhere, leaves it; a rate does not."""
    shared = [
        (np.float64(values[name]).ravel(), np.float64(reference[name]).ravel()) for name in reference if name in values
    ]
    return sum(float(a @ b) for a, b in shared) / max(sum(float(b @ b) for _, b in shared), np.finfo(float).tiny)


def relative_range(values: np.ndarray) -> np.ndarray:
    """(max - min) / max|…| over the first axis."""
    return np.ptp(values, axis=0) / np.abs(values).max(axis=0)


def half_of(array: np.ndarray) -> str:
    """The 16 bits in which outputs were stored: "bf16" or "fp16" where every value is such a number, else "".

    Every bfloat16 number that is not very small or large is a float16 number too, so bfloat16 is looked for first.
    """
    if not (np.asarray(array, np.float32).view(np.uint32) & 0xFFFF).any():
        return "bf16"
    return "fp16" if np.array_equal(array, np.asarray(array, np.float16).astype(np.float32)) else ""


def count_of(pattern: str, ops: Mapping[str, float]) -> int:
    """How often the ops that match a pattern ran."""
    return int(sum(count for op, count in ops.items() if re.fullmatch(pattern, op)))


def bounds(times: int | tuple[int, int]) -> tuple[int, float]:
    """How often at least, and at most."""
    return times if isinstance(times, tuple) else (times, math.inf)


def not_seen(profile: Mapping[str, Any], kernel: Kernel, device: str) -> list[str]:
    """What a row promises and the profile does not show; empty when all is there."""
    ops, kernels = profile["ops"], profile["kernels"]
    missing = []
    for pattern, times in {**kernel.ops, **kernel.rest_ops, **kernel.train_ops}.items():
        least, most = bounds(times)
        if not least <= (count := count_of(pattern, ops)) <= most:
            expected = f"{least} or more" if most == math.inf else f"{least} to {most}"
            missing.append(f"op {pattern} ran {count} times, expected {expected}")
    if device == "gpu" and not kernels:
        missing.append("the profiler saw no kernel on the GPU: is CUPTI installed and allowed to this user?")
    elif device == "gpu" and not any(re.search(kernel.kernels, name) for name in kernels):
        missing.append(f"no kernel on the GPU matches {kernel.kernels}")
    elif device == "gpu" and not any(re.search(kernel.rest_kernels, name) for name in kernels):
        missing.append(f"no kernel on the GPU matches {kernel.rest_kernels}")
    return missing


class Proof:
    """Collects one row's errors and failures. `record()` is what the record keeps."""

    def __init__(self, precision: str) -> None:
        self.precision, self.limit = precision, LIMITS[precision]
        self.rounding = ROUNDING[precision]
        self.errors: dict[str, float] = {}
        self.worst_at: dict[str, str] = {}  # proof: tensor or step of its error
        self.failures: dict[str, str] = {}
        self.kernel: dict[str, Any] = {}
        self.limits: dict[str, float] = self.limit._asdict()  # those of the worst errors
        self.curve: np.ndarray | None = None  # limits of a training's losses
        self.start = ""  # digest of the weights that this process starts from

    def _loss_limits(self, reference: Mapping[str, Any]) -> np.ndarray:
        """Limits [n] of a training's losses, n being where the curve ends: at CURVE_STEPS, or before its first chaotic step."""
        moves = SLACK * self.rounding * np.asarray(reference["loss_sensitivity"])
        moves = np.maximum(moves, COARSE[self.precision] * np.asarray(reference["rounded_losses"]))
        moves = moves[moves <= CURVE_END * self.limit.loss]  # the first ones: they never fall
        return np.maximum(self.limit.loss, moves)

    def _gradient_limits(self, start: Mapping[str, np.ndarray], reference: Mapping[str, Any]) -> dict[str, float]:
        """By tensor. SGD's gradients are read off the change of the weights: a small change of large weights is coarse."""
        changes = {name: reference["gradient_step"] * array for name, array in reference["gradients"].items()}
        stored, rounded = stored_error(start, changes, largest), reference["rounded_gradients"]
        explained = {name: max(SLACK * stored[name], COARSE[self.precision] * float(rounded[name])) for name in stored}
        return {
            name: max(self.limit.gradients, min(WIDEST[self.precision], error)) for name, error in explained.items()
        }

    def _update_limits(self, start: Mapping[str, np.ndarray], reference: Mapping[str, Any]) -> dict[str, float]:
        """By tensor: as coarse as float32 weights, as sensitive as the training, as far as its relus may turn on or off."""
        stored, rounded = stored_error(start, reference["updates"], norm_2), reference["rounded_updates"]
        limits = {}
        for name in stored:
            moves = self.rounding * float(reference["update_sensitivity"][name])
            explained = max(SLACK * stored[name], SLACK * moves, COARSE[self.precision] * float(rounded[name]))
            limits[name] = max(self.limit.update, min(WIDEST[self.precision], explained))
        return limits

    def hold(self, proof: str, error: float, at: str, limit: float) -> None:
        """Keep the error of `proof` that is worst for its limit, and fail it above that (a NaN is above every limit)."""
        known = self.errors.get(proof, 0.0) / self.limits.get(proof, limit)
        if proof not in self.errors or error / limit > known or math.isnan(error):
            self.errors[proof], self.worst_at[proof], self.limits[proof] = error, at, limit
        if not error <= limit:
            self.failures.setdefault(proof, f"error {error:.2g} in {at}, limit {limit:g}")

    def outputs(self, outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> None:
        """Outputs and loss of the forward pass, and the precision that they betray."""
        tensors = {name: array for name, array in reference.items() if name != "loss"}
        self.hold("outputs", *worst(outputs, tensors, max_error, dict.fromkeys(tensors, self.limit.outputs)))
        self.hold("loss", max_error(outputs["loss"], reference["loss"]), "the forward pass", self.limit.loss)
        for name in tensors:
            if name not in outputs:
                continue
            error = max_error(outputs[name], tensors[name])
            if error < self.limit.outputs_at_least:
                least = self.limit.outputs_at_least
                self.failures.setdefault(
                    "precision", f"{name} errs by {error:.2g}, {self.precision} by {least:g} or more"
                )
            found, own = half_of(outputs[name]), self.precision if self.precision in HALVES else ""
            if found != own:
                holds = f"all {HALVES[found]}" if found else f"not all {HALVES[own]}"
                self.failures.setdefault("precision", f"{name} holds {holds} numbers, which is not {self.precision}")

    def answers(self, when: str, found: Mapping[int, Any], expected: np.ndarray) -> None:
        """Answers by their requests' numbers, which are NumPy arrays on the host, against expected [requests, …], taken in turn.

        A precision's least error is not held: at batch 1 libraries compute a product in float32 whatever they are allowed.
        """
        for number, answer in found.items():
            if type(answer) is not np.ndarray:
                self.failures.setdefault(
                    "host", f"an answer is a {type(answer).__name__}, not a NumPy array on the host"
                )
            error = max_error(answer, expected[number % len(expected)])
            self.hold("outputs", error, f"request {number + 1} {when}", self.limit.outputs)

    def stack(self, trial: Trial, losses: np.ndarray, reference: Mapping[str, Any]) -> None:
        """The stack alone: its outputs, all its gradients, and mean(outputs²), `losses` [n], of the first batches."""
        found = dict(trial.stack_results())
        hidden = {"hidden": found.pop("hidden")} if "hidden" in found else {}
        self.outputs({"loss": losses[0], **hidden}, reference["stack_outputs"])
        gradients = reference["stack_gradients"]
        self.hold("gradients", *worst(found, gradients, max_error, dict.fromkeys(gradients, self.limit.gradients)))
        if len(trial.stack_batches) > 1:
            other = trial.stack_results(1)
            same = [name for name, array in found.items() if np.array_equal(array, other.get(name))]
            if same:
                why = f"{', '.join(same)} are the same for another batch: they were not computed anew"
                self.failures.setdefault("gradients", why)
        self.losses("the stack's passes", losses, reference["stack_losses"])

    def follows(self, trial: Trial, reference: Mapping[str, Any]) -> None:
        """Set what the losses of this training may err by, and where their curve ends."""
        self.rounding = max(self.rounding, getattr(trial, "update_rounding", 0.0))
        self.curve = self._loss_limits(reference)

    def training(self, trial: Trial, reference: Mapping[str, Any]) -> None:
        """Gradients of the first step, the change of every weight by UPDATE_STEPS steps, and the losses on the way."""
        self.follows(trial, reference)
        trial.restore()
        start = trial.weights()
        trial.train_steps(1)
        limits = self._gradient_limits(start, reference)
        self.hold("gradients", *worst(trial.first_gradients(), reference["gradients"], max_error, limits))
        trial.restore()
        self.training_losses(trial.train_steps(UPDATE_STEPS), reference)
        updates = {name: array - start[name] for name, array in trial.weights().items()}
        limits = self._update_limits(start, reference)
        self.hold("update", *worst(updates, reference["updates"], norm_error, limits))
        sizes = [norm_2(update) ** 2 for update in reference["updates"].values()]
        sensitivity = [float(reference["update_sensitivity"][name]) ** 2 for name in reference["updates"]]
        moves = SLACK * self.rounding * math.sqrt(np.average(sensitivity, weights=sizes))
        limit = max(
            ALONG_LIMIT,
            min(WIDEST[self.precision], max(moves, COARSE[self.precision] * float(reference["rounded_length"]))),
        )
        self.hold_length("update", "the update", along(updates, reference["updates"]), limit)
        if len(reference["clip_bias"]):
            found = trial.gradients_elsewhere(reference["clip_bias"], reference["clip_targets"].astype(np.int64))
            length = along(found, reference["clip_gradients"])
            self.hold_length("clipping", "the gradient on the other side of the bound", length, CLIPPED_LIMIT)
        trial.restore()

    def training_losses(self, losses: np.ndarray, reference: Mapping[str, Any]) -> None:
        """The losses of the first UPDATE_STEPS steps."""
        losses, curve = np.asarray(losses), reference["losses"]
        limits = self.curve
        if losses.shape == (1,):  # the one mean that `fit` reports; none where it has a step after the curve's end
            curve, limits = np.mean(curve[:UPDATE_STEPS], keepdims=True), limits[UPDATE_STEPS - 1 : UPDATE_STEPS]
        self.losses("the proof's steps", losses, curve, limits)

    def hold_length(self, proof: str, what: str, length: float, limit: float = ALONG_LIMIT) -> None:
        """Fail where `length` (see `along`) is not 1."""
        if not abs(length - 1.0) <= limit:
            self.failures.setdefault(
                proof, f"{what} is {length:.3g} times as long as the reference's, limit 1 ± {limit:.2g}"
            )

    def callable(self, mismatch: str) -> None:
        """Fail where the timed callable is not the proven one, and `mismatch` says how it differs."""
        if mismatch:
            self.failures.setdefault("callable", mismatch)

    def whole_training(self, differs: str) -> None:
        """Fail where a whole training is not the configured one, and `differs` says how (harness.measure.training_proof)."""
        if differs:
            self.failures.setdefault("training", differs)

    def dropout(self, wrong: str) -> None:
        """Fail where dropout is not drawn as it has to be, and `wrong` says how (harness/measure/dropout.py)."""
        if wrong:
            self.failures.setdefault("dropout", wrong)

    def losses(self, where: str, losses: np.ndarray, reference: np.ndarray, limits: np.ndarray | None = None) -> None:
        """Losses [n] against the reference's curve [m], as far as both go, and `limits` [k] (None: LIMITS' for all)."""
        losses = np.asarray(losses, np.float64)
        limits = np.full(len(reference), self.limit.loss) if limits is None else limits
        if not len(losses):
            self.failures.setdefault("loss", f"{where} gave no losses")
        steps = min(len(losses), len(reference), len(limits))
        if not np.isfinite(losses).all():
            first = int(np.argmin(np.isfinite(losses))) + 1
            self.failures.setdefault("loss", f"NaN or infinite loss at step {first} of {where}")
        if not steps:
            return
        error = np.abs(losses[:steps] - reference[:steps]) / np.abs(reference[:steps])
        worst_step = int(np.argmax(np.where(np.isnan(error), np.inf, error / limits[:steps])))
        limit = float(limits[worst_step])
        self.hold("loss", float(error[worst_step]), f"step {worst_step + 1} of {where}", limit)

    def timed_losses(self, blocks: list[np.ndarray], reference: np.ndarray, dropout: bool) -> None:
        """Losses of the timed steps [blocks, steps]: each block against the reference, and all blocks against each other.

        With dropout on, the timed steps draw masks that the reference does not have: only the second holds then. Losses of a
        training have the limits, and the end of the curve, that `training` found.
        """
        for number, losses in enumerate(blocks, 1):
            self.losses(f"timed block {number}", losses, reference[:0] if dropout else reference, self.curve)
        if dropout:
            self.dropout(same_masks(blocks))
        together = np.asarray(blocks, np.float64)  # [blocks, steps]
        limit = DROPOUT_SPREAD_LIMIT if dropout else SPREAD_LIMIT
        steps = min(self.steps_before_chaos(SPREAD_STEPS), together.shape[1])
        apart = float(relative_range(together[:, :steps]).max())
        self.hold("spread", apart, f"the timed blocks' first {steps} losses, all from the same weights", limit)
        means = float(relative_range(together.mean(axis=1)))
        if not means <= MEANS_LIMIT:
            self.failures.setdefault(
                "spread", f"the timed blocks' mean losses differ by {means:.2g}, limit {MEANS_LIMIT:g}"
            )

    def clock(self, lag_s: Sequence[float], limit_s: Sequence[float], at_work: Sequence[str]) -> None:
        """`lag_s`, per block: how long its last loss had to be waited for after the clock had stopped; `limit_s`: may have been.

        One block within its limit is enough: what came between in another one was no work of the row's, since that would be in
        every block. See harness.measure.clocks.lag_limit.
        `at_work`: per block, the thread of Python that was at work when its clock stopped, or "".
        """
        if all(at_work):
            why = f"a thread of Python was at work when the clock stopped: {at_work[0]}; what it does is not in the block's time"
            self.failures.setdefault("clock", why)
        if all(not lag <= limit for lag, limit in zip(lag_s, limit_s, strict=True)):
            why = f"the device went on for {min(lag_s):.2g} s after the clock had stopped, limit {max(limit_s):.2g}"
            self.failures.setdefault("clock", why)

    def stays_on_device(self, loss: Any, reads: int, copied_bytes: int, lengths_bytes: int = 0) -> None:
        """A timed step: the loss that it returned, how often it read a tensor or waited, and what was copied to the host.

        lengths_bytes: what the row's expected ops allow besides (Kernel.calls_copying_lengths, copies_mask).
        """
        if isinstance(loss, float | np.generic | np.ndarray):
            self.failures.setdefault("host", f"the step returned a {type(loss).__name__}, not a tensor on the device")
        if reads:
            self.failures.setdefault(
                "host", f"a step reads a tensor to the host, or waits for the device, {reads} times"
            )
        self.copies(copied_bytes, TO_HOST_LIMIT + lengths_bytes)

    def copies(self, copied_bytes: int, limit: int) -> None:
        """What the profiler saw copied from the device to the host in the timed steps, and how much that may be."""
        if copied_bytes > limit:
            self.failures.setdefault("host", f"{copied_bytes} bytes were copied to the host, limit {limit}")

    def what_ran(self, profile: Mapping[str, Any], kernel: Kernel, device: str) -> None:
        """The profile of one step against what the row's name promises."""
        ops, kernels = profile["ops"], profile["kernels"]
        for missing in not_seen(profile, kernel, device):
            self.failures.setdefault("kernel", missing)
        for kind, names, forbidden in (("op", ops, kernel.not_ops), ("kernel", kernels, kernel.not_kernels)):
            find = re.fullmatch if kind == "op" else re.search
            for name in names:
                if forbidden and find(forbidden, name):
                    self.failures.setdefault("kernel", f"{kind} {name[:80]} ran, which is not what this row names")
        promised = [pattern for pattern in (kernel.kernels, kernel.rest_kernels) if pattern]
        top = sorted(kernels.items(), key=lambda item: -item[1])
        top = top[:5] + [item for item in top[5:] if any(re.search(pattern, item[0]) for pattern in promised)][:5]
        seen = {pattern: count_of(pattern, ops) for pattern in (*kernel.ops, *kernel.rest_ops, *kernel.train_ops)}
        self.kernel = {"ops": seen, "kernels": {name[:120]: round(ms, 4) for name, ms in top}}
        self.kernel |= {key: profile.get(key) for key in ("launches", "syncs")}

    def steps_before_chaos(self, steps: int) -> int:
        """So many steps, or those of a training's curve where that ends early."""
        return steps if self.curve is None or len(self.curve) >= CURVE_STEPS else len(self.curve)

    def record(self) -> dict:
        """The record's `proof`: {ok, outputs_err, gradients_err, …, worst_at, limit, curve_steps, kernel, failed, reason}."""
        errors = {f"{name}_err": self.errors.get(name) for name in ("outputs", "gradients", "update", "loss", "spread")}
        finite = {name: (None if error is None or not np.isfinite(error) else error) for name, error in errors.items()}
        reasons = [f"{proof}: {why}" for proof, why in self.failures.items()]
        return {"ok": not self.failures, **finite, "worst_at": self.worst_at, "limit": self.limits,
                "curve_steps": self.steps_before_chaos(CURVE_STEPS), "kernel": self.kernel,
                "start": self.start, "failed": list(self.failures), "reason": "; ".join(reasons)}  # fmt: skip
