"""Is a row faster or slower after than before? The statistics of `python -m harness.compare`; knows no record.

The unit is the process: of each, the logarithm of the median of its blocks. Blocks of one process share its memory
layout, its clocks and its neighbours, and are not independent. Differences are of logarithms: exp of one is a ratio.

1  Welch's t on each row, its variance shrunk across rows and its degrees of freedom added to theirs (Smyth 2004, "Linear
   models and empirical Bayes methods", eqs. 3 to 7, as in limma; on Welch's variance: Demissie et al. 2008, "Unequal
   group variances in microarray data analyses"). A row that is much noisier than the rest keeps its own.
2  What all rows shift by together between two runs may be the machine's drift, which no number of processes averages
   out. It is estimated from all rows, each of which may have been changed, and taken off; what is not known of it, and
   how far apart rows drift, widens the intervals. A shift too large for a drift is a change and stays.
3  Holm's step-down over the rows of the comparison: that one or more of unchanged rows is called faster or slower has a
   probability of at most 5 %, as far as 2 describes the machine. "Same" claims the opposite, so that no correction for
   many rows makes it safer: it asks for the row's own 95 % interval to lie within ±2 %, where that of a row changed by
   more lies in at most 2.5 %.

The constants of 2 were chosen by simulation, for one row of three slowed by 5 % to be found in 9 of 10 tries under a drift
of up to ±3 %, and for rows that drift apart by as much as 0.6 % not to be called different; tests/ hold them to it.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

ALPHA = 0.05
MIN_PROCESSES = 5
SAME_PERCENT = 2.0  # an interval that lies within ± this is "same"
DRIFT = 0.03  # of a machine between two runs: 95 % of shifts are smaller
BEYOND = 4 / 3  # times the drift: a larger common shift is no drift
KNOWN = 3 / 4  # of its prior variance: what may be left unknown of a shift that is taken off
CHANGED = 0.25  # prior probability that a row was changed
CHANGE = 0.1  # standard deviation of such a change
NOISY = 0.01  # probability of a variance so large, under the others', below which it is not shrunk
APART = 1 / 5  # the rows' own parts of a drift against the part that they share, the mean of its prior

FASTER, SLOWER, SAME, INCONCLUSIVE = "faster", "slower", "same", "inconclusive"


class Row(NamedTuple):
    """What is judged.

    Attributes:
        before, after: ms, one median per process.
        processes: rows with an equal value were timed in the same processes, so one says nothing new about the other.
        machine: rows with an equal value drift together; None where the row itself may have been made different, such
            as by other settings: nothing is learned from it, or known for it, about the drift.
    """

    before: Sequence[float]
    after: Sequence[float]
    processes: Hashable
    machine: Hashable | None


class Shift(NamedTuple):
    """What the rows of one machine shifted by together.

    Attributes:
        ratio, low, high: after/before with its 95 % interval; of rows that say nothing about a drift, what it may be anyway.
        removed: whether it was taken off the rows: found, and not too large for a drift.
        groups: of rows in processes of their own; of one alone a drift and a change look the same.
    """

    ratio: float
    low: float
    high: float
    removed: bool
    groups: int


class Judged(NamedTuple):
    """`raw` is after/before as measured; `ratio` and its 95 % interval are without the common shift; `p` is Holm's."""

    raw: float
    ratio: float
    low: float
    high: float
    p: float
    verdict: str


def trigamma_inverse(y: float) -> float:
    """x > 0 with trigamma(x) = y, by Newton's method on 1/trigamma, which is nearly linear (Smyth 2004, appendix)."""
    x = 0.5 + 1 / y
    for _ in range(50):
        value = special.polygamma(1, x)
        step = value * (1 - value / y) / special.polygamma(2, x)
        x += step
        if abs(step) < 1e-10 * x:
            break
    return float(x)


def prior_of(variances: np.ndarray, dofs: np.ndarray) -> tuple[float, float]:
    """(d0, s0²), the degrees of freedom and the variance of what at least two variances have in common; d0 may be infinite.

    From mean and variance of log s², which is Fisher's z: s² ~ s0² F(d, d0) (Smyth 2004, section 6.2).
    """
    logs = np.log(variances) - special.digamma(dofs / 2) + np.log(dofs / 2)
    excess = logs.var(ddof=1) - special.polygamma(1, dofs / 2).mean()
    if excess <= 0:
        return np.inf, float(np.average(variances, weights=dofs))
    d0 = 2 * trigamma_inverse(excess)
    return d0, float(np.exp(logs.mean() + special.digamma(d0 / 2) - np.log(d0 / 2)))


def shrink(variances: np.ndarray, dofs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(variances drawn towards what they have in common, their degrees of freedom with the prior's added).

    A variance too large for that (NOISY) stays as it is: shrunk, a noisy row would find differences that are none.
    """
    if len(variances) < 2:
        return variances, dofs
    d0, s0 = prior_of(variances, dofs)
    if np.isinf(d0):
        shrunk = np.full(len(variances), s0)
        noisy = special.chdtrc(dofs, dofs * variances / s0) < NOISY
    else:
        shrunk = (d0 * s0 + dofs * variances) / (d0 + dofs)
        noisy = special.fdtrc(dofs, d0, variances / s0) < NOISY
    total = np.minimum(d0 + dofs, dofs.sum())  # never more than all rows together have
    return np.where(noisy, variances, shrunk), np.where(noisy, dofs, total)


def welch(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per row (log of after/before, its variance, its degrees of freedom): Welch's, shrunk across rows."""
    before, after = [np.log(row.before) for row in rows], [np.log(row.after) for row in rows]
    difference = np.array([b.mean() - a.mean() for a, b in zip(before, after, strict=True)])
    parts = np.array([[side.var(ddof=1) / len(side) for side in sides] for sides in (before, after)])  # [2, rows]
    parts = np.maximum(parts, max(1e-5 * np.median(parts), 1e-14))  # equal medians: no logarithm of 0
    inverse = np.array([[1 / len(side) for side in sides] for sides in (before, after)])
    variance = parts.sum(0)
    dof = variance**2 / (parts**2 * inverse / (1 - inverse)).sum(0)
    scale = inverse.sum(0)  # a process's variance, whatever the number of processes
    shrunk, dof = shrink(variance / scale, dof)
    return difference, shrunk * scale, dof


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's adjusted p: the k-th smallest of n, from 0, times n − k, never smaller than the one before, at most 1."""
    order = np.argsort(p)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1, np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order]))
    return adjusted


def common_shift(
    difference: np.ndarray, variance: np.ndarray, processes: Sequence[Hashable], drift: float
) -> tuple[float, float, Shift]:
    """(log shift to take off each row, variance to add to each row's, what the rows shifted by together).

    Rows of the same processes count as one. Unchanged, a row lies around the shift, as far off as its noise and its own
    part of the drift say; changed, anywhere, and then it says nothing of the shift.
    """
    names = dict.fromkeys(processes)
    own = [np.array([name == process for process in processes]) for name in names]
    mean = np.array([difference[rows].mean() for rows in own])[:, None, None]
    noise = np.array([variance[rows].mean() for rows in own])[:, None, None]  # their errors may be equal: no smaller
    prior = drift / 2
    shift = np.linspace(-4, 4, 401)[:, None] * prior  # [shift, 1]
    apart = np.linspace(0, 1 / 2, 7) * prior  # [7]: standard deviation of the rows' own parts of the drift

    def log_normal(x, variance):
        return -0.5 * (x**2 / variance + np.log(2 * np.pi * variance))

    unchanged = np.log(1 - CHANGED) + log_normal(mean - shift, noise + apart**2)
    changed = np.log(CHANGED) + log_normal(mean, noise + CHANGE**2)
    density = log_normal(shift, prior**2) - apart / (APART * prior) + np.logaddexp(unchanged, changed).sum(0)
    weight = np.exp(density - density.max())  # [shift, apart]
    weight /= weight.sum()
    center = float((weight * shift).sum())
    unknown = float((weight * (shift - center) ** 2).sum())
    known = len(names) > 1 and abs(center) <= BEYOND * drift and unknown <= KNOWN * prior**2
    ends = np.exp(center + np.array([0, -1.96, 1.96]) * np.sqrt(unknown))
    found = Shift(*map(float, ends), removed=known, groups=len(names))
    if not known:
        return 0.0, prior**2, found
    return center, unknown + float((weight * apart**2).sum()), found


def judge(rows: Sequence[Row], drift: float = DRIFT) -> tuple[list[Judged], dict[Hashable, Shift]]:
    """(a verdict per row, in their order; the common shift per machine). drift 0: every shift is a change.

    Every side of every row needs at least two processes; the caller refuses fewer than MIN_PROCESSES.
    """
    if not rows:
        return [], {}
    difference, variance, dof = welch(rows)
    shift, unknown = np.zeros(len(rows)), np.full(len(rows), (drift / 2) ** 2)
    shifts = {}
    for machine in dict.fromkeys(row.machine for row in rows if row.machine is not None) if drift else ():
        own = np.array([row.machine == machine for row in rows])
        processes = [row.processes for row in rows if row.machine == machine]
        shift[own], unknown[own], shifts[machine] = common_shift(difference[own], variance[own], processes, drift)
    total = variance + unknown
    dof = dof * (total / variance) ** 2  # Satterthwaite: what is not known of the shift counts as known in its variance
    left = difference - shift
    error = np.sqrt(total)
    adjusted = holm(2 * special.stdtr(dof, -np.abs(left) / error))
    half = special.stdtrit(dof, 1 - ALPHA / 2) * error
    found = zip(*map(np.exp, (difference, left, left - half, left + half)), adjusted, strict=True)
    return [Judged(*map(float, row), verdict=verdict(*map(float, row[2:]))) for row in found], shifts


def verdict(low: float, high: float, p: float) -> str:
    """Of a ratio after/before with its 95 % interval and Holm's p. A sure difference within ±2 % is "same" too."""
    if low >= 1 - SAME_PERCENT / 100 and high <= 1 + SAME_PERCENT / 100:
        return SAME
    if p < ALPHA:
        return SLOWER if low > 1 else FASTER
    return INCONCLUSIVE


def geometric_mean(rows: Sequence[Row], chosen: Sequence[int], drift: float = DRIFT) -> tuple[float, float, float]:
    """(after/before over the chosen of the rows, its 95 % interval), with the common shift left in.

    Errors of rows of the same processes are taken for equal, those of others for independent; the drift, which is not
    known from two runs, is in the interval.
    """
    difference, variance, dof = (values[list(chosen)] for values in welch(rows))
    weight = np.sqrt(variance) / len(chosen)
    names = [rows[index].processes for index in chosen]
    own = [np.array([name == process for process in names]) for name in dict.fromkeys(names)]
    parts = np.array([weight[rows_of].sum() ** 2 for rows_of in own])
    freedom = np.array([dof[rows_of].min() for rows_of in own])
    total = parts.sum() + (drift / 2) ** 2
    half = special.stdtrit(total**2 / (parts**2 / freedom).sum(), 1 - ALPHA / 2) * np.sqrt(total)
    center = difference.mean()
    return tuple(float(np.exp(value)) for value in (center, center - half, center + half))
