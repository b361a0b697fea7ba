"""What each constant of a script's header changes: the reference, a row's result, the timing alone, or nothing.

A constant that is not listed here changes the reference, and with it everything else. So a new hyperparameter needs no entry:
the reference is computed anew, --resume measures the row anew, and a comparison marks it. An entry says that less changes,
and why. The process that computes the reference is given the constants that change it, and fails on reading another one.
"""

import enum
import re
from collections.abc import Mapping
from typing import Any


class Changes(enum.IntEnum):
    """The first thing that a constant changes on the way of a row; what comes after it changes too."""

    NOTHING = 0  # it picks rows or other constants, which are recorded by themselves
    TIMING = 1  # how long or how often a row is timed: two records that differ in it are of the same row
    RESULT = 2  # what a row computes, and not what the proof holds it against
    REFERENCE = 3  # the float64 reference, or its data


_BATCHES = "how many batches are timed"
_LIMIT = "when a row's processes are stopped"
_TRAINING = "a whole training alone: the proof takes a few steps at the first rate, from weights of its own"
EXCEPTIONS: dict[str, tuple[Changes, str]] = {
    "ROWS": (Changes.NOTHING, "picks rows"),
    "CONFIG": (Changes.NOTHING, "picks other constants"),
    "CONFIGS": (Changes.NOTHING, "what CONFIG picks from"),
    "PRESETS": (Changes.NOTHING, "what --quick and --full pick from"),
    "AXES": (Changes.NOTHING, "picks points, each with the constants of its own"),
    "POINTS": (Changes.NOTHING, "picks points, each with the constants of its own"),
    "RUNS": (Changes.NOTHING, "what the suite picks from"),
    "WARMUP_BATCHES": (Changes.TIMING, _BATCHES),
    "WARMUP_LIMIT_S": (Changes.TIMING, _BATCHES),
    "TIMED_BATCHES": (Changes.TIMING, _BATCHES),
    "MIN_BLOCK_S": (Changes.TIMING, _BATCHES),
    "REQUESTS": (Changes.TIMING, _BATCHES),
    "BLOCKS": (Changes.TIMING, _BATCHES),
    "PROCESSES": (Changes.TIMING, _BATCHES),
    "ROW_LIMIT_S": (Changes.TIMING, _LIMIT),
    "ROW_BUDGET_S": (Changes.TIMING, _LIMIT),
    "SCALING": (Changes.NOTHING, "picks points, each with the constants of its own"),
    "REPLICAS": (Changes.RESULT, "the reference is of the whole batch, however many devices share it"),
    "HOSTS": (Changes.RESULT, "where the workers run"),
    "PRECISION": (Changes.RESULT, "the reference is float64 for every precision"),
    "LOSS_SCALE": (Changes.RESULT, "is divided out again"),
    "EPOCHS": (Changes.RESULT, _TRAINING),
    "FLAT_EPOCHS": (Changes.RESULT, _TRAINING),
    "LR_DECAY": (Changes.RESULT, _TRAINING),
    "INIT_SCALE": (Changes.RESULT, _TRAINING),
}


# They say how many processes a row gets, and change nothing in one: --resume goes on where they are others.
HOW_MANY = ("PROCESSES", "ROW_LIMIT_S", "ROW_BUDGET_S")


def changed_by(name: str) -> Changes:
    """What a constant changes; BLOCKS_1 what BLOCKS does."""
    entry = EXCEPTIONS.get(name) or EXCEPTIONS.get(re.sub(r"_\d+$", "", name))
    return entry[0] if entry else Changes.REFERENCE


def of(constants: Mapping[str, Any], least: Changes = Changes.TIMING) -> dict[str, Any]:
    """The constants that change `least` or more; without it all that change anything."""
    return {name: value for name, value in constants.items() if changed_by(name) >= least}
