"""What a row shows once its blocks have been timed: that the steps of a block, all of them, did the work of a proven step.

The proof before timing holds the first steps. What is left out later, or only while a block is timed, shows here, in a row's
first process:

    work      the whole block once more, untimed, its first and its last steps under the profiler: as many ops (on a CPU) or
              launched kernels (on a GPU) as that many steps launch
    replay    how far that block moved the weights, against the timed one: in length, since on a GPU training is not reproducible
              bit by bit, and SGD at rate 1 doubles a difference every step or two; not with dropout, whose masks differ
    next      from the weights, states and moments at the end of the timed block, the loss of the next two steps and the update
              of the first, against one float64 step
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from harness.measure.proof import ALONG_LIMIT, SLACK, WIDEST, Proof, along, norm_2, norm_error, stored_error, worst

PROFILED = 50  # batches: the protocol's block
PROFILED_LAUNCHES = 20_000  # more of them take the profiler longer than the row
MISSING = 0.01  # part of a block's kernels that may be missing: CUPTI drops one now and then
MOVES = 0.1  # part of an update that the rounding of float32 weights may be, for a tensor that has to move
MOVED_LIMIT = 0.1  # how far the lengths of two blocks' changes of the weights may lie apart


def hold_block(
    runtime: Any,
    proof: Proof,
    trial: Any,
    timed: tuple[Callable[[Any], Any], Sequence[Any], int],
    one: Mapping[str, Any],
    moved: Mapping[str, np.ndarray] | None,
) -> tuple[Mapping[str, Any], int]:
    """Run a block like the timed ones, from the same start, and hold its work and what it did to the weights.

    Args:
        timed: step, batches and batches per block, as of harness.measure.clocks.time_blocks.
        one: the profile of one step on the first batch, which the proof held.
        moved: what the last timed block left of all weights; None where no two blocks are alike.

    Returns:
        The profile of its last steps, and how many they are.
    """
    step, batches, size = timed
    alike = len({_shapes(batch) for batch in batches}) == 1
    step(batches[0])  # another mode's may have taken the place of its graph
    trial.restore()
    start = trial.weights() if moved is not None else {}
    round_ = min(len(batches), size)
    fit = max(round_, PROFILED_LAUNCHES // max(one["launches"], 1))
    last = min(size - round_, PROFILED, fit) // round_ * round_

    def steps(begin: int, end: int) -> None:
        for k in range(begin, end):
            step(batches[k % len(batches)])

    first = runtime.profile(lambda: steps(0, round_))
    if alike:  # else one step is no measure of another
        _hold_work(proof, one, 1, first, round_, "the block's first")
    steps(round_, size - last)
    profiled = first, round_
    if last:
        profiled = runtime.profile(lambda: steps(size - last, size)), last
        _hold_work(proof, first, round_, *profiled, "the block's last")
    if moved is not None:
        ended = trial.weights()
        changes = [{name: w[name] - start[name] for name in start} for w in (moved, ended)]
        lengths = [np.sqrt(sum(norm_2(change) ** 2 for change in of.values())) for of in changes]
        if not abs(lengths[0] - lengths[1]) <= MOVED_LIMIT * lengths[1]:
            why = f"the timed block moved the weights by {lengths[0]:.4g}, the same block untimed by {lengths[1]:.4g}"
            proof.failures.setdefault("replay", f"{why}, limit {MOVED_LIMIT:.0%}")
    return profiled


def _hold_work(proof: Proof, less: Mapping, steps: int, more: Mapping, times: int, which: str) -> None:
    """Fail where `more`, a profile of `times` steps, has fewer launches than `less`, one of `steps` steps, has for each."""
    expected, found = less["launches"] * times / steps, more["launches"]
    if found < expected - (max(1.0, MISSING * expected) if more["kernels"] else 0.0):
        what = "kernels" if more["kernels"] else "ops"
        proof.failures.setdefault(
            "work", f"{which} {times} steps ran {found} {what}, expected {expected:g} as in the proven steps"
        )


def _shapes(batch: Any) -> tuple:
    if isinstance(batch, tuple | list):
        return tuple(_shapes(part) for part in batch)
    return tuple(
        getattr(batch, "shape", ())
    )  # a tensor of several devices has none: its parts are alike in every batch


def hold_next_steps(proof: Proof, trial: Any, reference: Mapping[str, Any], number: int) -> None:
    """Train two steps on from where a block ended, on batches `number` and number + 1, and hold them to the float64 reference.

    Each step is compared from the weights that the row itself has before it, so that no error grows. Losses and updates may err
    as those of the proof, a loss by its limit of the first one's size: late in a training it can be near 0.
    """
    scale, moving = abs(float(reference["losses"][0])), []
    for k in range(2):
        start = trial.weights()
        expected_loss, expected = trial.reference_step(reference["setup"], number + k, update=not k)
        [loss] = trial.train_steps(1, first=number + k)
        where = f"step {number + k + 1}, after the timed block"
        proof.hold("loss", abs(float(loss) - expected_loss) / max(scale, abs(expected_loss)), where, proof.limit.loss)
        updates = {name: array - start[name] for name, array in trial.weights().items()}
        moving = moving if k else [name for name, update in expected.items() if update.any()]
        if not k:
            stored = stored_error(start, expected, norm_2)
            moving = [name for name in moving if stored[name] < MOVES]
            limits = {
                name: max(proof.limit.update, min(WIDEST[proof.precision], SLACK * error))
                for name, error in stored.items()
            }
            error, name, limit = worst(updates, expected, norm_error, limits)
            proof.hold("update", error, f"{name} of {where}", limit)
            limit = max(ALONG_LIMIT, min(WIDEST[proof.precision], SLACK * max(stored.values())))
            proof.hold_length("update", f"the update of {where}", along(updates, expected), limit)
        still = [name for name in moving if not updates[name].any()]
        if still:
            proof.failures.setdefault("update", f"{where} left {', '.join(still)} as it was")
