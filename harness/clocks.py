"""The one place that reads the clock.

Seed protocol: 60 batches, the first 10 are warm-up, 50 are timed; the clock stops after a device sync. A block is 50 batches, or
the multiple of 50 that fills MIN_BLOCK_S; where one batch takes over SLOW_BATCH_S, a block is SLOW_BLOCK batches.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

SLOW_BATCH_S = 0.1
SLOW_BLOCK = 5  # batches per block where one batch takes over SLOW_BATCH_S
PROBE = 3  # batches timed after the warm-up to choose the size of a block


class Blocks(NamedTuple):
    """Timed blocks: ms per batch of each block, batches per block, and every step's loss (as the step returned it)."""

    ms: list[float]
    batches_per_block: int
    losses: list[list[Any]]


def seconds_of(function: Callable[[], Any], sync: Callable[[], None]) -> tuple[float, Any]:
    """(seconds, result) of one call that begins and ends with an idle device."""
    sync()
    start = time.perf_counter()
    result = function()
    sync()
    return time.perf_counter() - start, result


def time_blocks(
    step: Callable[[Any], Any],
    batches: Sequence[Any],
    *,
    sync: Callable[[], None],
    restore: Callable[[], None],
    warmup_batches: int,
    timed_batches: int,
    blocks: int,
    min_block_s: float,
    whole_rounds: bool = False,
) -> Blocks:
    """Time `blocks` blocks of `step(batch)`, rotating among `batches`, which lie on the device already.

    Args:
        step: one batch's work; returns its loss as a device scalar, which is kept and never read inside a block.
        sync: returns once the device is idle. Called before the clock starts and before it stops, never in between.
        restore: puts weights, optimizer and states back to where the proof began, so that every block walks the
            same trajectory and its losses can be held against the reference's. Called outside the timed region.
        whole_rounds: whether a block takes each of `batches` equally often: where they differ in size.
    """
    restore()
    for k in range(max(warmup_batches, len(batches))):  # every staged batch once: it may have a shape of its own
        step(batches[k % len(batches)])
    probe_s, _ = seconds_of(lambda: [step(batches[k % len(batches)]) for k in range(PROBE)], sync)
    size = block_size(probe_s / PROBE, timed_batches, min_block_s)
    if whole_rounds:
        size = -(-size // len(batches)) * len(batches)
    order = [batches[k % len(batches)] for k in range(size)]
    ms, losses = [], []
    for _ in range(blocks):
        restore()
        sync()
        start = time.perf_counter()
        block_losses = [step(batch) for batch in order]
        sync()
        ms.append(1e3 * (time.perf_counter() - start) / size)
        losses.append(block_losses)
    return Blocks(ms, size, losses)


def block_size(batch_s: float, timed_batches: int, min_block_s: float) -> int:
    """Batches in a block, from the seconds that one batch takes."""
    if batch_s > SLOW_BATCH_S:
        return min(SLOW_BLOCK, timed_batches)
    blocks_to_fill = min_block_s / max(batch_s * timed_batches, 1e-9)
    return timed_batches * max(1, -int(-blocks_to_fill // 1))


def run_for(seconds: float, step: Callable[[Any], Any], batches: Sequence[Any], sync: Callable[[], None]) -> int:
    """Keep the device busy for about `seconds`; returns the number of batches. Nothing is timed."""
    end = time.perf_counter() + seconds
    done = 0
    while time.perf_counter() < end:
        for batch in batches:
            step(batch)
        sync()  # bounds the queue of launched work
        done += len(batches)
    return done


class EpochClock:
    """Seconds of each part of a whole training: training and validation per epoch.

    Whoever runs the training calls `begin`, `trained` and `validated`, each while the device is idle; a Keras `fit` does so
    through `callback`, whose instants lie behind Keras' own reading of its metrics.
    """

    def __init__(self) -> None:
        self.train_s: list[float] = []
        self.validation_s: list[float] = []
        self._last = 0.0

    def begin(self) -> None:
        """An epoch starts."""
        self._last = time.perf_counter()

    def trained(self) -> None:
        """Its training has ended; a validation starts, if there is one."""
        self.train_s.append(self._since_last())

    def validated(self) -> None:
        """Its validation has ended."""
        self.validation_s.append(self._since_last())

    def _since_last(self) -> float:
        before, self._last = self._last, time.perf_counter()
        return self._last - before

    def callback(self):
        """A keras.callbacks.Callback that feeds this clock: at most four readings per epoch, none per step."""
        import keras

        clock = self

        class Feed(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                clock.begin()

            def on_test_begin(self, logs=None):
                clock.trained()

            def on_test_end(self, logs=None):
                clock.validated()

            def on_epoch_end(self, epoch, logs=None):
                if len(clock.train_s) <= epoch:  # a fit without validation data
                    clock.trained()

        return Feed()
