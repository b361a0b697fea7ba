"""The clock: how large a block is, when the device is synchronised, and what an epoch of `fit` is made of."""

import math
from types import SimpleNamespace

import pytest

from harness.measure import clocks

PROTOCOL = dict(warmup_batches=10, warmup_limit_s=3.0, timed_batches=50, blocks=3, min_block_s=0.25)


class FakeDevice:
    """A step, a sync, a restore and a clock that take notes of the order in which they are called.

    batch_s: seconds of every batch, or of the k-th one.
    """

    def __init__(self, batch_s, restore_s: float = 0.0):
        self.now, self.batch_s, self.restore_s, self.calls, self.steps = 100.0, batch_s, restore_s, [], 0
        self.read_s = 0.001

    def perf_counter(self):
        self.calls.append("clock")
        return self.now

    def step(self, batch):
        self.now += self.batch_s(self.steps) if callable(self.batch_s) else self.batch_s
        self.steps += 1
        self.calls.append(batch)
        return f"loss {len(self.calls)}"

    def sync(self):
        self.calls.append("sync")

    def read(self, loss):
        self.now += self.read_s
        self.calls.append("read")

    def restore(self):
        self.now += self.restore_s
        self.calls.append("restore")


def timed(monkeypatch, batch_s, batches=("a", "b", "c"), restore_s=0.0, **changed):
    device = FakeDevice(batch_s, restore_s)
    monkeypatch.setattr(
        clocks,
        "time",
        SimpleNamespace(perf_counter=device.perf_counter, monotonic=lambda: device.now, sleep=lambda s: None),
    )
    found = clocks.time_blocks(
        device.step, batches, sync=device.sync, restore=device.restore, read=device.read, **{**PROTOCOL, **changed}
    )
    return found, device


def windows_of(device, blocks=3):
    """The batches of each window of the warm-up: what lies between two restores, before the blocks."""
    parts = " ".join(device.calls).split("restore")[1:-blocks]
    return ["".join(call for call in part.split() if call in "abc") for part in parts]


def test_block_is_the_published_50_batches_where_they_fill_the_time():
    assert clocks.block_size(0.25 / 50, 50, 0.25) == 50
    assert clocks.block_size(0.02, 50, 0.25) == 50


@pytest.mark.parametrize(("batch_s", "size"), [(0.0026, 100), (0.00249, 150), (0.001, 250), (0.0001, 2500)])
def test_block_is_the_smallest_multiple_of_50_that_fills_the_time(batch_s, size):
    assert clocks.block_size(batch_s, 50, 0.25) == size
    assert size * batch_s >= 0.25 > (size - 50) * batch_s


def test_block_of_slow_batches_has_fewer():
    seconds = (0.1001, 0.0999, 0.0501, 0.0499, 0.0201, 0.0199)
    assert [clocks.block_size(s, 50, 0.25) for s in seconds] == [5, 10, 10, 20, 20, 50]
    assert clocks.block_size(10.0, 3, 0.25) == 3
    assert [clocks.block_size(s, 5, 0.21) for s in (0.03, 0.05, 0.2)] == [10, 5, 5], "and still fill the time"


def test_block_has_an_end_even_if_the_clock_saw_no_time_pass():
    assert clocks.block_size(0.0, 50, 0.0) == 50
    assert math.isfinite(clocks.block_size(0.0, 50, 0.25))


def test_blocks_report_ms_per_batch_without_the_time_of_restoring(monkeypatch):
    found, _ = timed(monkeypatch, 0.02, restore_s=1000.0)
    assert found.ms == pytest.approx([20.0] * 3)
    assert found.batches_per_block == 50


def test_slow_step_is_timed_in_blocks_of_five(monkeypatch):
    found, device = timed(monkeypatch, 0.2)
    assert found.batches_per_block == 5 and found.ms == pytest.approx([200.0] * 3)
    assert [len(block) for block in found.losses] == [5] * 3
    assert found.warmup.batches == 10 and device.steps == 10 + 3 * 5


def test_device_is_synchronised_around_a_block_and_never_inside(monkeypatch):
    found, device = timed(monkeypatch, 0.02)
    block = ["sync", "clock", *(["a", "b", "c"] * 17)[:50], "sync", "clock", "read", "clock"]
    assert device.calls[-3 * (1 + len(block)) :] == ["restore", *block] * 3
    assert len(found.ms) == 3


def test_reading_a_loss_after_the_clock_stopped_is_timed_and_no_part_of_the_block(monkeypatch):
    found, _ = timed(monkeypatch, 0.02)
    assert found.lag_s == pytest.approx([0.001] * 3) and found.ms == pytest.approx([20.0] * 3)


@pytest.mark.parametrize(
    ("block_s", "limit_s"), [(0.0, 0.02), (0.099, 0.02), (0.1, 0.002), (0.2, 0.002), (0.25, 0.0025), (3.0, 0.03)]
)
def test_lag_may_be_a_percent_of_the_block_and_has_a_floor(block_s, limit_s):
    assert clocks.lag_limit(block_s) == pytest.approx(limit_s)


@pytest.mark.parametrize(
    ("blocks", "late", "lags"), [(1, 0, 1), (1, 1, 2), (1, 9, 3), (2, 1, 2), (2, 2, 3), (3, 9, 3), (4, 9, 4)]
)
def test_blocks_that_are_late_are_followed_by_more_whose_lags_alone_count(monkeypatch, blocks, late, lags):
    """`late`: how many blocks from the first on are."""
    seen, read = [], FakeDevice.read

    def reading(self, loss):
        self.read_s = 0.011 if len(seen) < late else 0.009  # of a block of 1 s
        seen.append(loss)
        read(self, loss)

    monkeypatch.setattr(FakeDevice, "read", reading)
    found, _ = timed(monkeypatch, 0.02, blocks=blocks)
    assert len(found.lag_s) == len(found.lag_limit_s) == lags
    assert found.lag_limit_s == pytest.approx([0.01] * lags)
    assert len(found.ms) == len(found.losses) == blocks and found.ms == pytest.approx([20.0] * blocks)


def test_warm_up_comes_first_in_windows_that_begin_like_a_block(monkeypatch):
    found, device = timed(monkeypatch, 0.02)
    assert windows_of(device) == ["a", "bca", "bca", "bcab"]  # 50 ms and a quarter more each; the batches go on in turn
    assert device.calls[:14] == ["clock", *["restore", "sync", "clock", "a", "sync", "clock", "clock"],
                                 *["restore", "sync", "clock", "b", "c", "a"]]  # fmt: skip
    assert found.warmup == (pytest.approx(0.22), 11, True)


def test_warm_up_goes_on_until_three_windows_are_within_two_percent(monkeypatch):
    found, device = timed(monkeypatch, lambda k: 0.004 * (1 + 2 * math.exp(-k / 40)))
    assert found.warmup.settled and found.warmup.batches == sum(map(len, windows_of(device)))
    assert 0.3 < found.warmup.seconds < 3.0 and found.warmup.batches > 10

    ms, done = [], 0
    for window in windows_of(device):
        ms.append(sum(0.004 * (1 + 2 * math.exp(-k / 40)) for k in range(done, done + len(window))) / len(window))
        done += len(window)
    settled = [max(ms[k - 2 : k + 1]) <= 1.02 * min(ms[k - 2 : k + 1]) for k in range(2, len(ms))]
    assert settled == [False] * (len(settled) - 1) + [True], "it ends with the first three that agree"


def test_one_long_window_is_no_three_that_agree(monkeypatch):
    found, device = timed(monkeypatch, 0.02, batches="abc" * 4, whole_rounds=True)
    assert windows_of(device) == ["abc" * 4] * 3 and found.warmup.settled


def test_warm_up_that_never_settles_ends_at_its_limit_and_says_so(monkeypatch):
    found, _ = timed(monkeypatch, lambda k: 0.002 * 1.01**k, warmup_limit_s=1.0)
    assert not found.warmup.settled
    assert 1.0 <= found.warmup.seconds < 1.0 + 1.0, "one window more at most"
    assert len(found.ms) == 3


def test_protocols_least_number_of_batches_goes_before_the_limit(monkeypatch):
    found, _ = timed(monkeypatch, lambda k: 0.2 * 1.1**k, warmup_limit_s=0.0)
    assert found.warmup.batches == 10 and not found.warmup.settled and found.warmup.seconds > 2.0


def test_restoring_counts_as_warming_up_but_not_as_time_of_a_batch(monkeypatch):
    found, _ = timed(monkeypatch, lambda k: 0.002 * 1.01**k, restore_s=0.2, warmup_limit_s=1.0)
    assert 1.0 <= found.warmup.seconds < 2.0
    steady, _ = timed(monkeypatch, 0.02, restore_s=0.5)
    assert steady.warmup == (pytest.approx(0.22 + 4 * 0.5), 11, True)


def test_window_has_an_end_even_if_the_clock_saw_no_time_pass(monkeypatch):
    found, _ = timed(monkeypatch, 0.0, timed_batches=2, min_block_s=0.0)
    assert found.warmup.settled and 10 < found.warmup.batches < 20_000


def test_every_block_starts_with_the_first_batch_and_takes_them_in_turn(monkeypatch):
    _, device = timed(monkeypatch, 0.02, batches=tuple("abcdefgh"), blocks=2)
    blocks = " ".join(device.calls).split("restore")[-2:]
    assert [block.split()[2:52] for block in blocks] == [list("abcdefgh" * 7)[:50]] * 2


def test_losses_of_every_timed_step_are_kept_in_order(monkeypatch):
    found, device = timed(monkeypatch, 0.02, blocks=2)
    steps = [f"loss {n}" for n, call in enumerate(device.calls, 1) if call in "abc"]
    assert [*found.losses[0], *found.losses[1]] == steps[-100:]


def test_seconds_of_starts_and_stops_on_an_idle_device(monkeypatch):
    device = FakeDevice(0.5)
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=device.perf_counter, sleep=lambda s: None))
    seconds, result = clocks.seconds_of(lambda: device.step("a"), device.sync)
    assert (seconds, result) == (0.5, "loss 3")
    assert device.calls == ["sync", "clock", "a", "sync", "clock"]


def test_run_for_keeps_the_device_busy_for_about_that_long(monkeypatch):
    device = FakeDevice(0.1)
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=device.perf_counter, sleep=lambda s: None))
    assert clocks.run_for(0.95, device.step, ["a", "b"], device.sync) == 10
    assert device.calls.count("sync") == 5


# -- fit ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tensorflow_runtime):
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    return model


@pytest.mark.parametrize("validation", [True, False])
def test_epoch_clock_tells_training_from_validation(model, validation, monkeypatch):
    import keras
    import numpy as np

    now = [0.0]
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda s: None))

    class Passes(keras.callbacks.Callback):
        """10 s per training batch, 1 s per validation batch."""

        def on_train_batch_end(self, batch, logs=None):
            now[0] += 10

        def on_test_batch_end(self, batch, logs=None):
            now[0] += 1

    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    clock = clocks.EpochClock()
    more = {"validation_data": (x, y)} if validation else {}
    model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[Passes(), clock.callback()], **more)
    assert clock.train_s == [40.0] * 3
    assert clock.validation_s == ([4.0] * 3 if validation else [])


def test_what_lies_around_the_steps_of_a_fit_is_in_the_whole_alone(model, monkeypatch):
    import keras
    import numpy as np

    now = [100.0]
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda s: None))

    class Passes(keras.callbacks.Callback):
        """10 s per training batch, 5 s before the first and 7 s after the last one; 1 s per validation batch, 2 s and 3 s."""

        def on_train_batch_begin(self, batch, logs=None):
            now[0] += 5 * (batch == 0)

        def on_test_batch_begin(self, batch, logs=None):
            now[0] += 2 * (batch == 0)

        def on_train_batch_end(self, batch, logs=None):
            now[0] += 10

        def on_test_begin(self, logs=None):
            now[0] += 7

        def on_test_batch_end(self, batch, logs=None):
            now[0] += 1

        def on_test_end(self, logs=None):
            now[0] += 3

    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    clock = clocks.EpochClock()
    callbacks = [Passes(), clock.callback()]
    model.fit(x, y, batch_size=2, epochs=2, verbose=0, validation_data=(x, y), callbacks=callbacks)
    now[0] += 9
    clock.returned()
    assert (clock.train_s, clock.validation_s) == ([40.0] * 2, [4.0] * 2)
    assert (clock.ended, clock.whole_s) == (100 + 2 * 61 - 3, 2 * 61 + 9)


def test_ends_of_steps_may_be_told_of_in_any_order_and_as_late_as_the_end_of_the_epoch(monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    from keras.src.callbacks.callback_list import CallbackList

    now = [0.0]
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda s: None))
    clock = clocks.EpochClock()
    feed = clock.callback()
    monkeypatch.setattr("keras.src.backend.IS_THREAD_SAFE", True)
    assert CallbackList([feed])._async_train, "it keeps no backend from reading logs in threads"
    feed.on_epoch_begin(0)
    for batch in range(4):
        now[0] += 1
        feed.on_train_batch_begin(batch)
    feed.on_test_begin()
    now[0] = 9.0
    with ThreadPoolExecutor() as pool:
        list(pool.map(feed.on_train_batch_end, reversed(range(4))))
    feed.on_epoch_end(0)
    assert (clock.train_s, clock.validation_s, clock.ended) == ([8.0], [], 9.0)


@pytest.mark.parametrize(("fed", "seconds"), [(True, 5.0), (False, 6.0)])
def test_first_call_of_a_fit_ends_with_its_step(monkeypatch, fed, seconds):
    now = [50.0]
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda s: None))

    def function(clock):
        now[0] += 2
        feed = clock.callback()
        if fed:
            feed.on_epoch_begin(0), feed.on_train_batch_begin(0)
        now[0] += 3
        if fed:
            feed.on_train_batch_end(0), feed.on_epoch_end(0)
        now[0] += 1

    assert clocks.first_call(function, lambda: None) == seconds


def test_epoch_clock_is_fed_by_a_loop_without_keras(monkeypatch):
    now = iter([5.0, 45.0, 49.0, 100.0, 130.0, 131.0])
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: next(now), sleep=lambda s: None))
    clock = clocks.EpochClock()
    for _ in range(2):
        clock.begin(), clock.trained(), clock.validated()
    assert clock.train_s == [40.0, 30.0] and clock.validation_s == [4.0, 1.0]


@pytest.mark.parametrize(("batch_s", "size"), [(0.02, 51), (0.2, 6)])
def test_block_takes_batches_of_different_sizes_equally_often(monkeypatch, batch_s, size):
    found, device = timed(monkeypatch, batch_s, whole_rounds=True)
    assert found.batches_per_block == size
    blocks = "".join(call for call in device.calls if call in "abc")[-3 * size :]
    assert [blocks.count(batch) for batch in "abc"] == [size] * 3
    assert all(window == "abc" * (len(window) // 3) for window in windows_of(device)), "in the warm-up likewise"


def test_every_staged_batch_is_warmed_up(monkeypatch):
    quick = dict(warmup_batches=1, timed_batches=2, min_block_s=0.0, warmup_limit_s=0.0)
    _, device = timed(monkeypatch, 0.06, **quick)
    assert windows_of(device) == ["a", "b", "c"]


def test_energy_is_read_outside_of_all_blocks_and_says_how_long_they_took(monkeypatch):
    calls = []
    device = FakeDevice(0.02, 1.0)

    def meter():
        calls.append(len(device.calls))
        return 100.0 * device.now

    monkeypatch.setattr(
        clocks,
        "time",
        SimpleNamespace(perf_counter=device.perf_counter, monotonic=lambda: device.now, sleep=lambda s: None),
    )
    found = clocks.time_blocks(
        device.step, "abc", sync=device.sync, restore=device.restore, read=device.read, meter=meter, **PROTOCOL
    )
    energy = found.energy
    assert energy.batches == 3 * 50 and energy.busy_s == pytest.approx(3.0)
    assert energy.lasted_s == pytest.approx(3 * (1.0 + 1.0 + 0.001)) and energy.joules == pytest.approx(
        100 * energy.lasted_s
    )
    first, last = calls
    assert device.calls[first] == "restore" and "restore" in device.calls[first + 1 :] and last == len(device.calls)


def test_blocks_without_a_meter_have_no_energy(monkeypatch):
    assert timed(monkeypatch, 0.02)[0].energy is None


def singles(monkeypatch, batch_s, batches="abc", most=200, limit_s=1.0):
    device = FakeDevice(batch_s, 0.0)
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=device.perf_counter))
    return clocks.time_single_steps(
        device.step, batches, sync=device.sync, restore=device.restore, most=most, limit_s=limit_s
    ), device


@pytest.mark.parametrize(("batch_s", "count"), [(0.001, 198), (0.01, 99), (0.1, 9), (0.3, 3), (0.4, 0)])
def test_single_steps_are_whole_rounds_within_their_limits(monkeypatch, batch_s, count):
    found, _ = singles(monkeypatch, batch_s)
    assert found == pytest.approx([batch_s] * count)


def test_each_single_step_begins_and_ends_with_an_idle_device(monkeypatch):
    found, device = singles(monkeypatch, 0.01, "ab", most=4)
    four = [call for batch in "abab" for call in ("sync", "clock", batch, "sync", "clock")]
    assert len(found) == 4 and device.calls[-20:] == four
    assert device.calls[0] == "restore" and device.steps > 4 + 0.1 / 0.01  # the untimed ones come first


def test_what_a_meter_reads_lies_around_the_clock(monkeypatch):
    device = FakeDevice(0.5, 0.0)
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=device.perf_counter))
    found = clocks.metered(lambda: device.step("a"), device.sync, lambda: (device.calls.append("meter"), device.now)[1])
    assert found == (0.5, "loss 4", 0.5)
    assert device.calls == ["meter", "sync", "clock", "a", "sync", "clock", "meter"]
    assert clocks.metered(lambda: 1, device.sync, lambda: None) == (0.0, 1, None)
