"""The one place that reads the clock.

Seed protocol: 60 batches, the first 10 are warm-up, 50 are timed; the clock stops after a device sync. A block is 50 batches, or
the multiple of 50 that fills MIN_BLOCK_S; of slow batches it has fewer: SLOW.

The warm-up is made of small blocks, called windows: one batch, then as many as fill WINDOW_S, then each a quarter longer than the
last, so that what is noise and not warming up averages out. It is over when the last three windows are within 2 % of each other
and at least WARMUP_BATCHES batches have run, every staged one among them; or, not settled, when it has taken WARMUP_LIMIT_S (1 s
in the full preset, 0.5 s in the quick one, 30 s at most). The protocol's least number of batches goes before the limit.
"""

import os
import statistics
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

# s that one batch takes at the least: batches per block then, which takes 0.4 s or more all the same
SLOW = {0.1: 5, 0.05: 10, 0.02: 20}
WINDOW_S = 0.05  # of the warm-up's second window
WINDOW_GROWTH = 1.25
SETTLED = 1.02  # the slowest of the last SETTLED_WINDOWS windows against the fastest, per batch
SETTLED_WINDOWS = 3
LAG_LIMIT_S = 0.002  # reading one loss takes under 1 ms on an idle device
LAG_SHARE = 0.01  # of the block, where that is more: what a figure may be wrong by
SHORT_BLOCK_S = 0.1
SHORT_LAG_LIMIT_S = 0.02  # of a block shorter than that
STANDARD = (sysconfig.get_path("stdlib"), "<frozen")  # files of a thread that waits for work
THREAD_S = 0.001  # in which another thread begins with its work
LAGS = 3  # at least so many blocks are late before a row is
LEAD_S = 0.1  # of the untimed rounds before single steps are timed


class Warmup(NamedTuple):
    """How long the warm-up took, by the clock and in batches, and whether it was over when it ended."""

    seconds: float
    batches: int
    settled: bool


class Blocks(NamedTuple):
    """Timed blocks: ms per batch of each block, batches per block, every step's loss (as the step returned it), the warm-up.

    The lags may be of more blocks than were asked for: see LAGS.
    energy: of all these blocks, and of what lies between them; None: no meter.
    """

    ms: list[float]
    batches_per_block: int
    losses: list[list[Any]]
    warmup: Warmup
    lag_s: list[float]  # per block, how long its last loss took to read after the clock stopped
    lag_limit_s: list[float]  # and how long it may have taken
    at_work: list[str]  # per block, a thread of Python that was at work when the clock stopped, or ""
    energy: "Energy | None"
    slow_s: float | None  # of SLOW, where one batch took longer than that when the warm-up ended


class Energy(NamedTuple):
    """What the meter counted from one reading to another.

    joules: of the device, at rest or not; lasted_s: s between the readings; busy_s: of these in what is timed.
    batches: that were run meanwhile.
    """

    joules: float
    lasted_s: float
    busy_s: float
    batches: int


class Requests(NamedTuple):
    """Timed requests: s of each request, block by block; answers that were kept, by the request's number from 0; the warm-up.

    joules: what the meter counted from the first block's start to the last one's end; None: no meter.
    """

    seconds: list[list[float]]
    answers: dict[int, Any]
    warmup: Warmup
    lag_s: list[float]  # as of Blocks, from the last answer of a block on until the device was idle
    lag_limit_s: list[float]
    at_work: list[str]
    joules: float | None


class Phases:
    """Seconds of what a process has done since it was started, by what that was: where the time of a run goes (docs/proof.md).

    started: when, by time.monotonic; None: now.
    """

    def __init__(self, started: float | None = None) -> None:
        self._seconds: dict[str, float] = {}
        self._last = time.monotonic() if started is None else started

    def over(self, name: str) -> None:
        """What was done since the last phase was this one."""
        before, self._last = self._last, time.monotonic()
        self._seconds[name] = self._seconds.get(name, 0.0) + self._last - before

    def __str__(self) -> str:
        return "seconds: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._seconds.items())


def metered(
    function: Callable[[], Any], sync: Callable[[], None], meter: Callable[[], float | None]
) -> tuple[float, Any, float | None]:
    """(seconds, result, Joules or None) of one call that begins and ends with an idle device; the clock lies within the meter."""
    before = meter()
    seconds, result = seconds_of(function, sync)
    return seconds, result, _taken(before, meter())


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
    read: Callable[[Any], Any],
    warmup_batches: int,
    warmup_limit_s: float,
    timed_batches: int,
    blocks: int,
    min_block_s: float,
    whole_rounds: bool = False,
    agree: Callable[[Any], Any] = lambda value: value,
    meter: Callable[[], float | None] = lambda: None,
) -> Blocks:
    """Time `blocks` blocks of `step(batch)`, rotating among `batches`, which lie on the device already.

    Args:
        step: one batch's work; returns its loss as a device scalar, which is kept and never read inside a block.
        sync: returns once the device is idle. Called before the clock starts and before it stops, never in between.
        restore: puts weights, optimizer and states back to where the proof began, so that every block walks the
            same trajectory and its losses can be compared with the reference's. Called outside the timed region.
        read: brings a loss to the host, and so waits for all that it comes from: of that nothing is left to wait for once the
            clock has stopped, unless `sync` came back too early. Called after the clock stopped.
        warmup_batches, warmup_limit_s: the least number of batches of the warm-up, and the s after which it is given up.
        whole_rounds: whether a block takes each of `batches` equally often: where they differ in size.
        agree: of what a process has found, what all processes that take these steps together go by: each of them has to take as
            many steps. Called outside the timed region.
        meter: Joules that the device has taken so far; None where it cannot be read. Called before the first block and after the
            last one.
    """
    least = max(warmup_batches, len(batches))  # every staged batch once: it may have a shape of its own
    rounds = len(batches) if whole_rounds else 1
    warmup, batch_s = _warm_up(step, batches, sync, restore, least, warmup_limit_s, rounds, agree)
    size = _multiple(block_size(batch_s, timed_batches, min_block_s), rounds)
    order = [batches[k % len(batches)] for k in range(size)]
    ms, losses, lag_s, limit_s, at_work = [], [], [], [], []
    before, began = meter(), time.monotonic()
    while len(ms) < blocks or (len(ms) < LAGS and agree(_all_late(lag_s, limit_s) or all(at_work))):
        restore()
        sync()
        threads = _threads()
        start = time.perf_counter()
        block_losses = [step(batch) for batch in order]
        sync()
        end = time.perf_counter()
        read(block_losses[-1])
        lag_s.append(time.perf_counter() - end)
        limit_s.append(lag_limit(end - start))
        time.sleep(THREAD_S)
        at_work.append(next((place for thread, place in _threads().items() if threads.get(thread) != place), ("",))[0])
        ms.append(1e3 * (end - start) / size)
        losses.append(block_losses)
    lasted_s, joules = time.monotonic() - began, _taken(before, meter())
    busy_s = 1e-3 * sum(ms) * size
    energy = None if joules is None else Energy(joules, lasted_s, busy_s, len(ms) * size)
    return Blocks(ms[:blocks], size, losses[:blocks], warmup, lag_s, limit_s, at_work, energy, slow_from(batch_s))


def time_single_steps(
    step: Callable[[Any], Any],
    batches: Sequence[Any],
    *,
    sync: Callable[[], None],
    restore: Callable[[], None],
    most: int,
    limit_s: float,
) -> list[float]:
    """s of single steps, each from an idle device to an idle device, so that nothing of one overlaps with another.

    Whole rounds of `batches`, as many as fit into `most` steps and `limit_s`, after untimed rounds of LEAD_S; [] where not even
    one fits. The synchronisation's own time is in each.
    """

    def single(batch: Any) -> float:
        return seconds_of(lambda: step(batch), sync)[0]

    restore()
    single(batches[0])  # which may have to put its graph back to where another mode's is
    if single(batches[0]) * len(batches) > limit_s:
        return []
    end, round_s = time.perf_counter() + LEAD_S, None
    while round_s is None or time.perf_counter() < end:
        round_s = sum(map(single, batches))
    rounds = max(1, min(most // len(batches), int(limit_s / max(round_s, 1e-9))))
    return [single(batch) for _ in range(rounds) for batch in batches]


def time_requests(
    answer: Callable[[Any], Any],
    requests: Sequence[Any],
    *,
    sync: Callable[[], None],
    restore: Callable[[], None],
    warmup_batches: int,
    warmup_limit_s: float,
    count: Callable[[float], int],
    blocks: int,
    kept: Callable[[int], Collection[int]],
    meter: Callable[[], float | None] = lambda: None,
) -> Requests:
    """Time `answer(request)` of one request after the other, each by itself: from the request on the host to its answer there.

    Nothing but the request lies between two readings of the clock.

    Args:
        answer: a request's work; returns its answer on the host, in memory that no later answer is written to.
        requests: taken in turn; before the first of each round `restore` is called, outside the timed region.
        count: s that one request takes at the warm-up's end → how many are timed.
        blocks: into which they are divided, as evenly as they go.
        kept: how many are timed → the numbers of the requests whose answers are kept.
        meter: Joules that the device has taken so far; None where it cannot be read.
    """
    warmup, request_s = _warm_up(
        answer, requests, sync, restore, max(warmup_batches, len(requests)), warmup_limit_s, 1, lambda value: value
    )
    total = max(blocks, count(request_s))
    wanted, answers = set(kept(total)), {}
    seconds, lag_s, limit_s, at_work = [], [], [], []
    sync()
    before = meter()
    for block in range(blocks):
        own: list[float] = []
        threads = _threads()
        for number in range(total * block // blocks, total * (block + 1) // blocks):
            place = number % len(requests)
            if place == 0:
                restore()
            request = requests[place]
            start = time.perf_counter()
            found = answer(request)
            end = time.perf_counter()
            own.append(end - start)
            if number in wanted:
                answers[number] = found
        end = time.perf_counter()
        sync()
        lag_s.append(time.perf_counter() - end)
        limit_s.append(lag_limit(sum(own)))
        time.sleep(THREAD_S)
        at_work.append(next((place for thread, place in _threads().items() if threads.get(thread) != place), ("",))[0])
        seconds.append(own)
    return Requests(seconds, answers, warmup, lag_s, limit_s, at_work, _taken(before, meter()))


def _taken(before: float | None, after: float | None) -> float | None:
    """Between two readings of a meter; None where one of them could not be read."""
    return None if before is None or after is None else after - before


def _all_late(lag_s: Sequence[float], limit_s: Sequence[float]) -> bool:
    return all(lag > limit for lag, limit in zip(lag_s, limit_s, strict=True))


def _threads() -> dict[int, tuple[str, types.FrameType, int]]:
    """Where each other thread of Python is that runs more than the standard library: it waits there, or it is at work.

    One that is in the very frame and at the very instruction of before has waited. (A frame that is kept is no later call's.)
    """
    found = {}
    for thread, top in sys._current_frames().items():
        frame = None if thread == threading.get_ident() else top
        while (
            frame and frame.f_code.co_filename.startswith(STANDARD) and "site-packages" not in frame.f_code.co_filename
        ):
            frame = frame.f_back
        if frame:
            code = frame.f_code
            found[thread] = f"{code.co_qualname} of {os.path.basename(code.co_filename)}", top, top.f_lasti
    return found


def lag_limit(block_s: float) -> float:
    """How many s the last loss of a block of `block_s` may take to read after the clock stopped.

    What is left to do then is missing from the block's time: 1 % of it at most, or 2 ms, twice of what a read takes. Of a block
    under 0.1 s, which only tests and tiny runs have, 20 ms: on a processor that others share, the kernel takes it away for some
    10 ms at a time. A clock that does not wait at all makes blocks look short, but then its lag is all that the steps took.
    One block within its limit is enough, and where none of one or two blocks is, more are run, for their lags alone.
    """
    return SHORT_LAG_LIMIT_S if block_s < SHORT_BLOCK_S else max(LAG_LIMIT_S, LAG_SHARE * block_s)


def _warm_up(
    step, batches, sync, restore, least: int, limit_s: float, multiple: int, agree: Callable
) -> tuple[Warmup, float]:
    """(the warm-up, s per batch at its end). A window begins like a block, from restored weights and on an idle device."""
    begin = time.perf_counter()
    batch_s: list[float] = []  # one per window
    done, size, window_s = 0, multiple, WINDOW_S
    while True:
        restore()
        order = [batches[(done + k) % len(batches)] for k in range(size)]
        seconds, _ = seconds_of(lambda order=order: [step(batch) for batch in order], sync)
        seconds, took = agree([seconds, time.perf_counter() - begin])
        done += size
        batch_s.append(seconds / size)
        recent = batch_s[-SETTLED_WINDOWS:]
        settled = len(recent) == SETTLED_WINDOWS and max(recent) <= SETTLED * min(recent)
        if done >= least and (settled or took >= limit_s):
            return Warmup(took, done, settled), statistics.median(recent)
        size = _multiple(max(1, round(window_s / max(batch_s[-1], 1e-5))), multiple)
        window_s *= WINDOW_GROWTH


def _multiple(count: int, of: int) -> int:
    """The smallest multiple of `of` that is not below count."""
    return -(-count // of) * of


def block_size(batch_s: float, timed_batches: int, min_block_s: float) -> int:
    """Batches in a block, from the seconds that one batch takes."""
    if (slow := slow_from(batch_s)) is not None and SLOW[slow] < timed_batches:
        return SLOW[slow]
    blocks_to_fill = min_block_s / max(batch_s * timed_batches, 1e-9)
    return timed_batches * max(1, -int(-blocks_to_fill // 1))


def slow_from(batch_s: float) -> float | None:
    """The largest of the times in SLOW that a batch of `batch_s` takes longer than; None for a batch that is not slow."""
    return next((least for least in SLOW if batch_s > least), None)


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


def first_call(function: Callable[["EpochClock"], object], sync: Callable[[], None]) -> float:
    """Seconds of function(clock), device idle before and after; of a Keras `fit` that feeds it, until the last step's end."""
    clock = EpochClock()
    sync()
    start = time.perf_counter()
    function(clock)
    sync()
    return (time.perf_counter() if clock.ended is None else clock.ended) - start


class EpochClock:
    """Seconds of each part of a whole training: training and validation per epoch.

    Whoever runs the training calls `begin`, `trained` and `validated`, each while the device is idle. For a Keras `fit` that is
    `callback`: there a part lasts from the begin of its first step to the end of its last one, when Keras has read that step's
    logs. (On PyTorch Keras takes an epoch's first batch before it says so.)

    What lies between two parts is no step's: Keras makes the next iterator over the data, and TensorFlow ends the last one. It
    may have to wait there for a thread of its own that sleeps until 10 ms · (2ⁿ - 1) after the iterator's first step, the oftener
    the fewer processors there are: cancelling wakes that thread before it says that it is cancelled
    (tensorflow/core/framework/cancellation.cc, StartCancel; model.cc, OptimizeLoop).

    Attributes:
        train_s, validation_s: of each epoch.
        ended: of a Keras `fit`: when its last step ended, by time.perf_counter; else None.
        whole_s: of a Keras `fit`, from its begin to `returned`; else None.
    """

    def __init__(self) -> None:
        self.train_s: list[float] = []
        self.validation_s: list[float] = []
        self.ended: float | None = None
        self.whole_s: float | None = None
        self._started = self._last = 0.0

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

    def returned(self) -> None:
        """The Keras `fit` has returned, to whoever called it."""
        self.whole_s = time.perf_counter() - self._started

    def callback(self):
        """A keras.callbacks.Callback that feeds this clock; it reads the time, and nothing of the device, around each step."""
        import keras

        clock = self

        class Feed(keras.callbacks.Callback):
            # Else Keras on JAX would read every step's logs in its main thread, where the steps wait for it. It reports the ends
            # of steps in threads of its own then, and has reported all of them before it reports the end of the epoch.
            async_safe = True

            def on_train_begin(self, logs=None):
                clock._started = time.perf_counter()

            def on_epoch_begin(self, epoch, logs=None):
                self.training, self.validation = ([], []), ([], [])  # begins and ends of steps

            def on_train_batch_begin(self, batch, logs=None):
                self.training[0].append(time.perf_counter())

            def on_train_batch_end(self, batch, logs=None):
                self.training[1].append(time.perf_counter())

            def on_test_batch_begin(self, batch, logs=None):
                self.validation[0].append(time.perf_counter())

            def on_test_batch_end(self, batch, logs=None):
                self.validation[1].append(time.perf_counter())

            def on_epoch_end(self, epoch, logs=None):
                for (begins, ends), seconds in (
                    (self.training, clock.train_s),
                    (self.validation, clock.validation_s),
                ):
                    if begins:
                        clock.ended = max(ends)
                        seconds.append(clock.ended - begins[0])

        return Feed()
