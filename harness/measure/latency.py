"""How long requests took: how many are timed, and what their times come to."""

import random
from collections.abc import Collection, Sequence
from typing import Any

LIMIT_S = (
    4.0  # s that the requests of a point take; slow ones longer, since a tenth of them is timed whatever that takes
)
SAMPLES = 16  # requests whose answers are held to the reference, besides the last one; which ones no row can know
JOULES_S = 1.0  # s that the requests take together at the least: the counter moves some ten times a second
PER_MILLE = {"p50_ms": 500, "p99_ms": 990, "p999_ms": 999}


def requests_of(most: int, request_s: float) -> int:
    """How many requests are timed, of which one takes `request_s`: at most so many, and a tenth of that at the least."""
    return min(most, max(1, most // 10, int(LIMIT_S / max(request_s, 1e-9))))


def sampled(count: int) -> Collection[int]:
    """Numbers of the requests, of so many, whose answers are looked at."""
    return {*random.SystemRandom().sample(range(count), min(SAMPLES, count)), count - 1}


def percentile(seconds: Sequence[float], per_mille: int) -> float | None:
    """The shortest of these times that so many in a thousand do not exceed; None where no time would lie above it.

    Nearest rank, as numpy.percentile with method="inverted_cdf".
    """
    rank = -(-len(seconds) * per_mille // 1000)
    return sorted(seconds)[rank - 1] if 0 < rank < len(seconds) or len(seconds) == 1 else None


def latency_of(seconds: Sequence[float], joules: float | None) -> dict[str, Any]:
    """The record's `latency`: percentiles and the longest time in ms, how many requests, Joules of one of them or None."""
    found = {name: percentile(seconds, per_mille) for name, per_mille in PER_MILLE.items()}
    counted = joules if joules and sum(seconds) >= JOULES_S else None
    return {
        **{name: value and 1e3 * value for name, value in found.items()},
        "max_ms": 1e3 * max(seconds),
        "requests": len(seconds),
        "joules": counted and counted / len(seconds),
    }
