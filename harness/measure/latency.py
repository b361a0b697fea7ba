"""How long requests and single steps took, and what energy: how many are timed, and what they come to."""

import random
from collections.abc import Collection, Sequence
from typing import Any

from harness.measure import clocks

LIMIT_S = 4.0  # s that the requests of a point take, but for slow ones, of which a tenth is timed
LONGEST_S = 20.0  # s that this tenth takes at most: of the slowest as many are timed as fit, a hundredth at the least
SAMPLES = 16  # requests whose answers are held to the reference, besides the last one; which ones no row can know
JOULES_S = 1.0  # s that what is counted takes at the least: the counter moves some ten times a second
BUSY = 0.9  # part of the s between two readings of the counter that what is counted takes at the least
STEPS, STEPS_LIMIT_S = 200, 1.0  # single steps of a mode, and s that they take (or WARMUP_LIMIT_S): at the most
PER_MILLE = {"p50_ms": 500, "p99_ms": 990, "p999_ms": 999}


def requests_of(most: int, request_s: float) -> int:
    """How many requests are timed, of which one takes `request_s`: at most so many; the least: see LIMIT_S, LONGEST_S."""
    request_s = max(request_s, 1e-9)
    return min(most, max(1, most // 100, min(most // 10, int(LONGEST_S / request_s)), int(LIMIT_S / request_s)))


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
    counted = counted_joules(joules, sum(seconds))
    return {
        **{name: value and 1e3 * value for name, value in found.items()},
        "max_ms": 1e3 * max(seconds),
        "requests": len(seconds),
        "joules": counted and counted / len(seconds),
    }


def counted_joules(joules: float | None, busy_s: float, lasted_s: float | None = None) -> float | None:
    """The Joules between two readings of the counter, where these are of `busy_s` and can be told: long enough, and little else.

    lasted_s: s between the readings; None: what lies between two of what is counted belongs to it.
    """
    enough = busy_s >= JOULES_S and (lasted_s is None or busy_s >= BUSY * lasted_s)
    return joules if joules and enough else None


def joules_of_batch(energy: clocks.Energy | None) -> dict[str, Any]:
    """{"joules": the record's} of timed blocks; {} where they cannot be told."""
    joules = energy and counted_joules(energy.joules, energy.busy_s, energy.lasted_s)
    return {"joules": {"batch": joules / energy.batches}} if joules else {}


def joules_of_training(joules: float | None, seconds: float, epochs: int) -> dict[str, Any]:
    """{"joules": the record's} of a whole training of so many epochs, validations included; {} where they cannot be told."""
    joules = counted_joules(joules, seconds)
    return {"joules": {"training": joules, "epoch": joules / epochs}} if joules else {}


def steps_of(seconds: Sequence[float]) -> dict[str, Any]:
    """{"one_step": the record's}: percentiles of single steps in ms, null where there are too few, and how many; {} of none."""
    if not seconds:
        return {}
    found = {name: percentile(seconds, PER_MILLE[name]) for name in ("p50_ms", "p99_ms")}
    return {"one_step": {**{name: value and 1e3 * value for name, value in found.items()}, "steps": len(seconds)}}
