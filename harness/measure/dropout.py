"""Dropout as it is timed: masks are drawn in every step, an element each, by the rate of the workload.

Two things are held, wherever the float64 reference of a workload says that it has dropout, whatever the row says:

    losses      of the timed step from weights by which a loss tells the rates (models/reference/dropout.py), each with masks of
                its own, against as many of the reference: their mean, and their deviation from both sides
    ops         of a profiled step: it draws random numbers for every place that has masks

Masks that never change have no deviation. Masks that are drawn once for all steps of a block have none either, since a language
model's losses come from consecutive steps, at a learning rate of 0; in `fit`, whose steps start from restored weights, ops show
them.
"""

import re
from collections.abc import Mapping

import numpy as np

from harness.frameworks import runtimes

# Standard errors that a mean, and the logarithm of a deviation, may be off by. Of 500,000 right pairs of 32 losses, normal or as
# skewed as a gamma distribution of 15, none was off by more than 5.7.
ERRORS = 6.0
SAME = 1e-5  # relative; two blocks whose first SAME_STEPS losses agree to that have drawn the same masks
SAME_STEPS = 4  # by chance they do in fewer than one of 10⁷ cases: losses deviate by 5e-4 of themselves, or more

HIDDEN = "cudaGraphLaunch"  # of PyTorch: a replay shows no op


def wrong_losses(losses: np.ndarray, reference: np.ndarray, rounding: float) -> str:
    """How a row's losses differ from the reference's as dropout does not let them; "" where they do not.

    Args:
        losses, reference: [weights, n] and [weights, m]; those of one row are independent and alike.
        rounding: relative error that the precision may have in a loss.
    """
    losses, reference = np.asarray(losses, np.float64), np.asarray(reference, np.float64)
    if losses.ndim != 2 or len(losses) != len(reference) or not np.isfinite(losses).all():
        return (
            f"losses {losses.shape}, all finite: {np.isfinite(losses).all()}; expected {len(reference)} rows of numbers"
        )
    n, m = losses.shape[1], reference.shape[1]
    factor = np.exp(ERRORS * np.sqrt(0.5 / (n - 1) + 0.5 / (m - 1)))  # the variance of ln s is 1 / 2(n − 1)
    for number, (own, expected) in enumerate(zip(losses, reference, strict=True), 1):
        deviation, wanted, slack = np.std(own, ddof=1), np.std(expected, ddof=1), rounding * abs(expected.mean())
        where = f"of {n} steps from weights {number}, each with masks of its own,"
        if deviation < (least := wanted / factor):
            return f"losses {where} deviate by {deviation:.2g}, expected at least {least:.2g}: masks are not drawn anew"
        if deviation > (most := wanted * factor + slack):
            return f"losses {where} deviate by {deviation:.2g}, expected at most {most:.2g}: masks are shared"
        limit = ERRORS * np.sqrt(deviation**2 / n + wanted**2 / m) + slack
        if not abs(own.mean() - expected.mean()) <= limit:
            return (
                f"losses {where} are {own.mean():.5g} on average, expected {expected.mean():.5g} ± {limit:.2g}: "
                "not this rate, or not in all places"
            )
    return ""


def masks_not_drawn(ops: Mapping[str, float], framework: str, places: int, steps: int) -> str:
    """What a profile lacks of random numbers for so many places in so many steps; "" for none, or where it shows no ops.

    framework: of FRAMEWORKS, whose runtime says which ops draw them.
    """

    def count(pattern: str) -> int:
        return int(sum(times for op, times in ops.items() if re.fullmatch(pattern, op)))

    if HIDDEN in ops:
        return ""
    draws = runtimes.kind(framework).draws
    least = 1 if count(draws.together) else places - bool(count(draws.within))
    least *= steps if draws.each_step else 1
    seen = count(draws.ops)
    return f"random numbers were drawn {seen} times in {steps} steps, expected {least} or more" if seen < least else ""


def same_masks(blocks: list[np.ndarray]) -> str:
    """Which timed blocks, all from the same weights, had the same masks, by their losses [steps] each; "" where none had."""
    heads = np.asarray([losses[:SAME_STEPS] for losses in blocks], np.float64)
    for one in range(len(heads)):
        for other in range(one + 1, len(heads)):
            if np.allclose(heads[one], heads[other], rtol=SAME, atol=0.0):
                return f"timed blocks {one + 1} and {other + 1} have the same losses: they have drawn the same masks"
    return ""
