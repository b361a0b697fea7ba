"""Verdicts: against SciPy where a case is simple, by simulation where a promise is about many runs."""

import math

import numpy as np
import pytest
from scipy import optimize, special, stats

from harness.compare import verdicts
from harness.compare.verdicts import FASTER, INCONCLUSIVE, SAME, SLOWER, Row, judge

NOISE = 0.01  # between processes
LOG_5 = math.log(1.05)


def simulated(
    random, groups, modes=2, shift=None, slowed=(), by=LOG_5, noise=NOISE, own_drift=0.0, heavy=False, processes=5
):
    """Rows of two runs of the same code, but that the groups `slowed` are slower by `by` (log) after.

    Modes of a group share 0.7 of its processes' variance; groups are more and less noisy; all rows together shift by
    `shift` (log), anywhere within ±3 % where it is None, and each by a part of its own in both runs.
    """
    shift = random.uniform(-0.03, 0.03) if shift is None else shift
    rows = []
    for group in range(groups):
        spread = noise * math.exp(0.3 * random.standard_normal())

        def errors(spread=spread):
            draw = random.standard_t(3, processes) / math.sqrt(3) if heavy else random.standard_normal(processes)
            return spread * draw

        shared = errors(), errors()
        for _ in range(modes):
            before, after = (math.sqrt(0.7) * common + math.sqrt(0.3) * errors() for common in shared)
            own = own_drift * math.sqrt(2) * random.standard_normal() + by * (group in slowed)
            level = random.normal()
            rows.append(Row(np.exp(level + before), np.exp(level + after + shift + own), group, "cpu"))
    return rows


def rates(pairs, slowed=(), drift=verdicts.DRIFT, **settings):
    """(share of unchanged rows found different, share of pairs with one, share of slowed rows found slower)."""
    random = np.random.default_rng(20260131)
    wrong, families, found, unchanged, changed = 0, 0, 0, 0, 0
    for _ in range(pairs):
        rows = simulated(random, slowed=slowed, **settings)
        own = [judged.verdict for judged in judge(rows, drift)[0]]
        different = sum(t in (FASTER, SLOWER) for t, row in zip(own, rows, strict=True) if row.processes not in slowed)
        wrong, families = wrong + different, families + (different > 0)
        found += sum(t == SLOWER for t, row in zip(own, rows, strict=True) if row.processes in slowed)
        changed += sum(row.processes in slowed for row in rows)
        unchanged += sum(row.processes not in slowed for row in rows)
    return wrong / max(unchanged, 1), families / pairs, found / max(changed, 1)


# Against SciPy


@pytest.mark.parametrize(("first", "second"), [(5, 5), (5, 9), (12, 6)])
def test_one_row_alone_is_welchs_t_of_the_log_medians(first, second):
    random = np.random.default_rng(1)
    before, after = np.exp(random.normal(2, 0.01, first)), np.exp(random.normal(2.01, 0.03, second))
    (judged,), _ = judge([Row(before, after, "row", "cpu")], drift=0)
    expected = stats.ttest_ind(np.log(after), np.log(before), equal_var=False)
    low, high = np.exp(expected.confidence_interval(0.95))
    assert judged.p == pytest.approx(expected.pvalue)
    assert (judged.low, judged.high) == (pytest.approx(low), pytest.approx(high))
    assert judged.ratio == judged.raw == pytest.approx(stats.gmean(after) / stats.gmean(before))
    assert verdicts.geometric_mean([Row(before, after, "row", "cpu")], [0], drift=0) == pytest.approx(
        (judged.ratio, low, high)
    )


def test_shrunk_variances_and_their_degrees_of_freedom_follow_smyths_formulas():
    random = np.random.default_rng(2)
    variances = stats.f.rvs(8, 10, size=12, random_state=random) * 1e-4
    dofs = np.full(12, 8.0)
    fisher = np.log(variances)
    excess = np.var(fisher, ddof=1) - special.polygamma(1, 4)
    half = optimize.brentq(lambda x: special.polygamma(1, x) - excess, 1e-3, 1e6)
    common = math.exp(fisher.mean() - special.digamma(4) + math.log(4) + special.digamma(half) - math.log(half))
    assert verdicts.prior_of(variances, dofs) == pytest.approx((2 * half, common))
    shrunk, total = verdicts.shrink(variances, dofs)
    assert shrunk == pytest.approx((2 * half * common + 8 * variances) / (2 * half + 8))
    assert total == pytest.approx(2 * half + 8)


def test_the_prior_of_many_variances_is_the_one_they_were_drawn_from():
    variances = 3e-4 * stats.f.rvs(6, 12, size=50_000, random_state=np.random.default_rng(3))
    d0, s0 = verdicts.prior_of(variances, np.full(len(variances), 6.0))
    assert (d0, s0) == (pytest.approx(12, rel=0.05), pytest.approx(3e-4, rel=0.02))


def test_variances_no_further_apart_than_chance_are_pooled_and_no_more_than_all_their_freedom_is_claimed():
    shrunk, total = verdicts.shrink(np.array([1.0, 1.1, 0.9]), np.array([8.0, 8.0, 8.0]))
    assert np.ptp(shrunk) == 0 and list(total) == [24, 24, 24]


@pytest.mark.parametrize("others", [np.full(20, 1e-4), stats.f.rvs(8, 30, size=20, random_state=4) * 1e-4])
def test_a_row_far_noisier_than_the_rest_keeps_its_variance_and_its_own_freedom(others):
    shrunk, total = verdicts.shrink(np.append(others, 1e-2), np.full(21, 8.0))
    assert (shrunk[-1], total[-1]) == (1e-2, 8)
    assert total[0] > 8


@pytest.mark.parametrize("y", [1e-4, 0.1, 1.0, 50.0])
def test_trigamma_inverse_is_the_inverse(y):
    assert special.polygamma(1, verdicts.trigamma_inverse(y)) == pytest.approx(y)


def test_holm_is_the_step_down_of_its_definition():
    random = np.random.default_rng(5)
    for count in (1, 2, 7, 40):
        p = random.uniform(size=count) ** 3
        adjusted = verdicts.holm(p)
        ordered = sorted(p)
        for own, value in zip(p, adjusted, strict=True):
            rank = ordered.index(own)
            assert value == pytest.approx(min(1, max((count - k) * ordered[k] for k in range(rank + 1))))
    assert list(verdicts.holm(np.array([0.04, 0.01, 0.03]))) == pytest.approx([0.06, 0.03, 0.06])


def test_verdicts_of_many_rows_are_holms_over_all_of_them():
    row = Row(np.exp([0, 0.01, -0.01, 0.02, -0.02]), np.exp(np.array([0, 0.01, -0.01, 0.02, -0.02]) + 0.036), 0, None)
    alone = judge([row], drift=0)[0][0]
    among = judge([row] * 10, drift=0)[0][0]
    same_freedom = special.stdtr(80, -0.036 / math.sqrt(2 * 2.5e-4 / 5)) * 2 * 10  # d = 10 rows × 8, pooled
    assert alone.verdict == SLOWER and among.p == pytest.approx(same_freedom)
    assert [judged.p for judged in judge([row] * 10, drift=0)[0]] == pytest.approx([same_freedom] * 10)


def test_a_processs_variance_is_what_rows_have_in_common_whatever_their_number_of_processes():
    few, many = (stats.zscore([-1.0, 1.0] * half, ddof=1) * 0.01 for half in (2, 4))  # variance 1e-4 each
    rows = [Row(np.exp(side), np.exp(side), name, "cpu") for name, side in enumerate((few, few, many, many))]
    _, variance, _ = verdicts.welch(rows)
    assert variance == pytest.approx(2e-4 / np.array([4, 4, 8, 8]))


def test_what_is_not_known_of_the_drift_widens_the_interval_of_a_lone_row_and_adds_to_its_freedom():
    before = np.exp([0.0, 0.01, -0.01, 0.02, -0.02])
    (judged,), _ = judge([Row(before, before * 1.05, "row", "cpu")])
    variance, drift = 2 * 2.5e-4 / 5, (verdicts.DRIFT / 2) ** 2
    freedom = 8 * ((variance + drift) / variance) ** 2
    expected = stats.t(freedom, LOG_5, math.sqrt(variance + drift))
    assert np.log([judged.low, judged.high]) == pytest.approx(expected.ppf([0.025, 0.975]))
    assert judged.p == pytest.approx(2 * expected.cdf(0))


def test_more_rows_of_the_same_processes_say_no_more_about_the_drift():
    difference, variance = np.array([0.021, 0.019, 0.022]), np.array([4e-5, 3e-5, 2e-5])
    one = verdicts.common_shift(difference, variance, ["a", "b", "c"], 0.03)
    three = verdicts.common_shift(np.repeat(difference, 3), np.repeat(variance, 3), list("aaabbbccc"), 0.03)
    assert three[:2] == pytest.approx(one[:2]) and three[2] == pytest.approx(one[2])


# The words


@pytest.mark.parametrize(
    ("low", "high", "p", "expected"),
    [
        (0.981, 1.019, 0.6, SAME),
        (1.005, 1.019, 1e-6, SAME),  # surely another, and surely by less than 2 %
        (0.979, 1.001, 0.2, INCONCLUSIVE),
        (1.001, 1.021, 0.2, INCONCLUSIVE),  # its own interval excludes 1, Holm's p does not
        (1.001, 1.021, 0.049, SLOWER),
        (0.979, 0.999, 0.049, FASTER),
        (1.001, 1.021, 0.05, INCONCLUSIVE),
    ],
)
def test_a_verdict_follows_the_interval_and_holms_p(low, high, p, expected):
    assert verdicts.verdict(low, high, p) == expected


def test_equal_times_are_the_same_and_no_division_by_zero():
    judged, _ = judge([Row([1.0] * 5, [1.0] * 5, name, "cpu") for name in "abc"], drift=0)
    assert {j.verdict for j in judged} == {SAME} and all(j.ratio == 1 for j in judged)
    judged, _ = judge([Row([1.0] * 5, [2.0] * 5, name, "cpu") for name in "abc"], drift=0)
    assert {j.verdict for j in judged} == {SLOWER}


def test_no_rows_have_no_verdicts():
    assert judge([]) == ([], {})


# Over many runs


@pytest.mark.parametrize(
    "settings",
    [
        dict(groups=1),
        dict(groups=2, modes=3),
        dict(groups=4),
        dict(groups=10, modes=3),
        dict(groups=10, shift=0.03),
        dict(groups=6, heavy=True),
        dict(groups=6, noise=0.03),
        dict(groups=6, noise=0.002),
        dict(groups=6, own_drift=0.005),
        dict(groups=10, modes=1, own_drift=0.006, noise=0.003),  # rows drift apart by more than their processes
        dict(groups=6, processes=8),
    ],
    ids=str,
)
def test_at_most_5_percent_of_rows_of_the_same_commit_come_out_different_under_a_drift_of_3_percent(settings):
    assert rates(200, **settings)[0] <= 0.05


@pytest.mark.parametrize("settings", [dict(groups=10, modes=1), dict(groups=10, modes=3)], ids=str)
def test_one_row_or_more_of_the_same_commit_comes_out_different_in_5_percent_of_comparisons(settings):
    _, families, _ = rates(600, drift=0, shift=0.0, **settings)
    assert 0.005 < families < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 600)  # not by never finding any
    assert rates(600, **settings)[1] < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 600)


def test_without_allowing_for_drift_a_shift_of_all_rows_is_a_difference_of_all():
    assert rates(50, drift=0, groups=6, shift=0.03)[0] > 0.5


@pytest.mark.parametrize(
    "settings",
    [
        dict(groups=1, modes=1, shift=0.0),
        dict(groups=2, modes=1, shift=0.0),
        dict(groups=3, modes=3),
        dict(groups=5),
        dict(groups=10, modes=3),
        dict(groups=10, shift=-0.03),
        dict(groups=6, heavy=True),
    ],
    ids=str,
)
def test_a_row_slowed_by_5_percent_is_found_in_9_of_10_tries_at_5_processes(settings):
    wrong, _, found = rates(200, slowed=(0,), **settings)
    assert found >= 0.9 and wrong <= 0.05


def test_a_change_of_most_rows_is_not_taken_for_drift_nor_pinned_on_the_others():
    wrong, _, found = rates(100, groups=10, slowed=range(6), by=math.log(1.2))
    assert found >= 0.9 and wrong <= 0.05


def test_a_change_of_every_row_that_is_too_large_for_a_drift_is_left_in():
    rows = simulated(np.random.default_rng(6), 10, shift=math.log(1.1))
    judged, shifts = judge(rows)
    assert {j.verdict for j in judged} == {SLOWER} and not shifts["cpu"].removed
    assert all(j.ratio == j.raw for j in judged)


def test_a_common_shift_is_told_with_its_interval_and_taken_off_every_row():
    judged, shifts = judge(simulated(np.random.default_rng(7), 10, shift=0.02))
    shift = shifts["cpu"]
    assert shift.removed and shift.low < math.exp(0.02) < shift.high and shift.high - shift.low < 0.02
    assert all(j.ratio == pytest.approx(j.raw / shift.ratio) for j in judged)


def test_machines_drift_apart_and_rows_that_were_made_different_say_nothing_of_a_drift():
    random = np.random.default_rng(8)
    gpu = [row._replace(machine="gpu") for row in simulated(random, 8, shift=-0.025)]
    other = [row._replace(machine=None) for row in simulated(random, 8, shift=0.5)]
    judged, shifts = judge([*simulated(random, 8, shift=0.025), *gpu, *other])
    assert shifts.keys() == {"cpu", "gpu"} and shifts["cpu"].ratio > 1.015 and shifts["gpu"].ratio < 0.985
    assert all(j.ratio == j.raw and j.verdict == SLOWER for j in judged[-len(other) :])
    assert not {SLOWER, FASTER} & {j.verdict for j in judged[: -len(other)]}


def test_one_implementation_alone_cannot_tell_a_change_of_3_percent_from_a_drift():
    rows = simulated(np.random.default_rng(9), 1, modes=3, shift=0.03, noise=0.002)
    judged, shifts = judge(rows)
    assert {j.verdict for j in judged} == {INCONCLUSIVE} and shifts["cpu"].groups == 1 and not shifts["cpu"].removed
    assert {j.verdict for j in judge(rows, drift=0)[0]} == {SLOWER}


def test_a_row_slower_by_just_over_2_percent_is_rarely_called_the_same():
    random, same = np.random.default_rng(10), 0
    for _ in range(400):
        rows = simulated(random, 10, modes=1, slowed=(0,), by=math.log(1.0201), noise=0.004)
        same += judge(rows)[0][0].verdict == SAME
    assert same / 400 <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / 400)


def test_rows_of_the_same_commit_and_little_noise_are_the_same():
    random = np.random.default_rng(11)
    found = [j.verdict for _ in range(20) for j in judge(simulated(random, 8, noise=0.003))[0]]
    assert found.count(SAME) / len(found) > 0.95


def test_the_interval_of_a_row_holds_its_ratio_in_95_percent_of_runs():
    random, held, count = np.random.default_rng(12), 0, 0
    for _ in range(200):
        judged, _ = judge(simulated(random, 8, modes=1))
        held += sum(j.low < 1 < j.high for j in judged)
        count += len(judged)
    assert 0.94 < held / count < 0.995


def test_the_geometric_mean_of_rows_of_the_same_processes_is_no_surer_than_one_of_them():
    row = simulated(np.random.default_rng(13), 1, modes=1)[0]
    one = verdicts.geometric_mean([row], [0], drift=0)
    three = verdicts.geometric_mean([row, row, row], [0, 1, 2], drift=0)
    apart = [row._replace(processes=name) for name in "abc"]
    assert three[0] == pytest.approx(one[0])
    assert three[2] / three[1] > 1 + 0.7 * (one[2] / one[1] - 1)  # pooled, its freedom is larger
    independent = verdicts.geometric_mean(apart, [0, 1, 2], drift=0)
    assert math.log(independent[2] / independent[1]) < 0.65 * math.log(three[2] / three[1])


def test_the_geometric_mean_allows_for_the_drift_which_two_runs_do_not_tell():
    rows = simulated(np.random.default_rng(14), 10, shift=0.0)
    every = range(len(rows))
    _, low, high = verdicts.geometric_mean(rows, every)
    assert low < 0.975 and high > 1.025
    _, low, high = verdicts.geometric_mean(rows, every, drift=0)
    assert 0.98 < low < 1 < high < 1.02
    assert verdicts.geometric_mean(rows, [0, 1], drift=0)[0] == pytest.approx(
        math.sqrt(math.prod(stats.gmean(row.after) / stats.gmean(row.before) for row in rows[:2]))
    )
