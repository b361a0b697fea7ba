"""How far a row's time would lie elsewhere if the row were run again: an interval over its processes.

The process is the unit. The blocks of one process share its memory layout, its clocks and its neighbours, so that more of them
say more about that process and nothing about the next one. A process is its median block; the row is the median of its
processes, with a 95 % t interval on the logarithms of the processes' medians, since what disturbs a time multiplies it. (Georges,
Buytaert and Eeckhout, "Statistically Rigorous Java Performance Evaluation", OOPSLA 2007, on several starts of a process.)

Only the standard library is imported: the parent, which keeps the records, has to stay small, and SciPy takes 44 MB.
"""

import functools
import math
import statistics
from collections.abc import Mapping, Sequence

CONFIDENCE = 0.95


def step_of(blocks_ms: Sequence[Sequence[float]]) -> dict:
    """A record's step_ms from its blocks: one list per process, ms per batch each.

    {"median": over the processes of their medians, "min", "max": of all blocks, "processes": n, "interval": [low, high] in ms,
    or None for a single process, whose blocks say nothing about another one}.
    """
    every = [ms for blocks in blocks_ms for ms in blocks]
    medians = [statistics.median(blocks) for blocks in blocks_ms]
    median = statistics.median(medians)
    found = interval(medians)
    if found:  # of a skewed few the mean of the logarithms may lie far from the median that the interval is shown with
        found = [min(found[0], median), max(found[1], median)]
    return {"median": median, "min": min(every), "max": max(every), "processes": len(medians), "interval": found}


def interval(medians: Sequence[float], confidence: float = CONFIDENCE) -> list[float] | None:
    """[low, high] of the mean of the logarithms, brought back to ms, by Student's t; None of fewer than two processes."""
    if len(medians) < 2:
        return None
    logs = [math.log(ms) for ms in medians]
    half = t_quantile(0.5 + confidence / 2, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    return [_ms(middle - half), _ms(middle + half)]


def ratio(slower: Sequence[Sequence[float]], faster: Sequence[Sequence[float]]) -> list[float] | None:
    """[low, high] of how many times as long one row's step takes as another's, from the blocks of both, a list per process.

    Welch's t interval of the difference of the logarithms, brought back; None where either has fewer than two processes.
    """
    logs = [[math.log(statistics.median(blocks)) for blocks in row] for row in (slower, faster)]
    if min(map(len, logs)) < 2:
        return None
    parts = [statistics.variance(row) / len(row) for row in logs]
    squares = sum(part**2 / (len(row) - 1) for part, row in zip(parts, logs, strict=True))
    degrees = max(1, int(sum(parts) ** 2 / squares)) if squares else len(logs[0]) + len(logs[1]) - 2
    half = t_quantile(0.5 + CONFIDENCE / 2, degrees) * math.sqrt(sum(parts))
    middle = statistics.fmean(logs[0]) - statistics.fmean(logs[1])
    of_medians = math.exp(statistics.median(logs[0]) - statistics.median(logs[1]))
    return [min(_ms(middle - half), of_medians), max(_ms(middle + half), of_medians)]


def _ms(log: float) -> float:
    return math.exp(min(max(log, -500.0), 500.0))  # two processes far apart have an interval beyond any float


def half_width(step: Mapping | None) -> float | None:
    """The interval of a step_ms to the side that reaches further, as a fraction of the median; None where there is none."""
    if not step or not step.get("interval"):
        return None
    low, high = step["interval"]
    return max(high / step["median"], step["median"] / low) - 1


@functools.lru_cache
def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t with a whole number of degrees of freedom, for 0.5 < probability < 1."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_probability(middle, degrees) < probability else (low, middle)
    return high


def t_probability(t: float, degrees: int) -> float:
    """P(T < t) for t > 0: the finite sums of Abramowitz and Stegun, 26.7.3 (odd degrees) and 26.7.4 (even)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + within / 2
