"""The interval: Student's t, coverage where the process is the unit, and what --repeat-until costs of it."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.record import intervals, stopping_rule

DRAWS = 4000
BETWEEN, WITHIN = 0.03, 0.003  # standard deviations of the logarithms: processes ten times as far apart as their blocks


def test_quantiles_are_students():
    from scipy import stats

    for degrees, probability in itertools.product([*range(1, 40), 99, 500], [0.6, 0.9, 0.975, 0.995]):
        assert intervals.t_quantile(probability, degrees) == pytest.approx(stats.t.ppf(probability, degrees), rel=1e-10)


def draws_of(seed, processes, blocks=5, between=BETWEEN):
    """Endless rows of a true time of 10 ms: blocks_ms of `processes` processes each."""
    chance = random.Random(seed)
    while True:
        shifts = [chance.gauss(0, between) for _ in range(processes)]
        yield [[10 * math.exp(shift + chance.gauss(0, WITHIN)) for _ in range(blocks)] for shift in shifts]


def coverage(rows, interval_of) -> float:
    """Share of the rows whose interval holds the true time."""
    found = [interval_of(blocks_ms) for blocks_ms in itertools.islice(rows, DRAWS)]
    return sum(low <= 10.0 <= high for low, high in found) / DRAWS


@pytest.mark.parametrize("processes", [2, 3, 5, 10])
def test_interval_over_processes_holds_the_true_time_in_95_of_100_runs(processes):
    # of 4000 draws the standard error is 0.35 points
    covered = coverage(draws_of(processes, processes), lambda blocks: intervals.step_of(blocks)["interval"])
    assert 0.93 <= covered <= 0.97


def test_interval_over_blocks_as_if_they_were_independent_holds_it_far_too_seldom():
    def naive(blocks_ms):
        return intervals.interval([ms for blocks in blocks_ms for ms in blocks])

    assert coverage(draws_of(3, 3), naive) < 0.75


def test_narrow_enough_by_chance_is_rarer_from_five_processes_on():
    """A row that stops as soon as its interval is narrow (--repeat-until): coverage of what it then shows."""

    def stopped(least, seed):
        covered, rows = 0, draws_of(seed, 30, blocks=1, between=0.02)
        for blocks_ms in itertools.islice(rows, 1500):
            medians = [blocks[0] for blocks in blocks_ms]
            for count in range(least, len(medians) + 1):
                step = intervals.step_of([[ms] for ms in medians[:count]])
                if intervals.half_width(step) <= 0.02:
                    break
            covered += step["interval"][0] <= 10.0 <= step["interval"][1]
        return covered / 1500

    from_two, from_five = stopped(2, 1), stopped(stopping_rule.AT_LEAST, 2)
    assert from_two < from_five and from_five > 0.91


blocks = st.lists(st.lists(st.floats(1e-4, 1e6), min_size=1, max_size=6), min_size=1, max_size=8)


@given(blocks)
def test_step_is_in_order_whatever_the_blocks(blocks_ms):
    step = intervals.step_of(blocks_ms)
    assert step["min"] <= step["median"] <= step["max"] and step["processes"] == len(blocks_ms)
    if len(blocks_ms) == 1:
        assert step["interval"] is None and intervals.half_width(step) is None
    else:
        low, high = step["interval"]
        assert 0 < low <= step["median"] <= high < math.inf
        assert intervals.half_width(step) >= 0


@given(blocks, st.floats(0.01, 100.0))
def test_interval_goes_with_the_unit_of_time(blocks_ms, factor):
    step = intervals.step_of(blocks_ms)
    scaled = intervals.step_of([[ms * factor for ms in process] for process in blocks_ms])
    assert scaled["median"] == pytest.approx(step["median"] * factor)
    width, other = intervals.half_width(step), intervals.half_width(scaled)
    assert width == other if width is None else other == pytest.approx(width, rel=1e-6, abs=1e-9)


def test_more_blocks_of_a_process_make_no_interval_narrower():
    few, many = [[[ms] * count for ms in (10.0, 10.4, 9.9)] for count in (1, 100)]
    assert intervals.step_of(few)["interval"] == intervals.step_of(many)["interval"]


def test_median_is_that_of_the_processes_and_not_of_the_blocks():
    step = intervals.step_of([[10.0], [11.0], [20.0, 20.0, 20.0, 20.0]])
    assert (step["median"], step["min"], step["max"]) == (11.0, 10.0, 20.0)
    logs = [math.log(ms) for ms in (10.0, 11.0, 20.0)]
    half = 4.302652729749462 * statistics.stdev(logs) / math.sqrt(3)  # t of 2 degrees, from a table
    middle = statistics.fmean(logs)
    assert step["interval"] == pytest.approx([math.exp(middle - half), math.exp(middle + half)])
