"""How far arrays are apart. (Python's max passes over a NaN that is not the first of its numbers.)"""

from collections.abc import Iterable

import numpy as np


def error(a, b) -> float:
    """max|a - b| / max|b|."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


def worst(pairs: Iterable[tuple]) -> float:
    """The largest `error` of pairs; NaN where there is one."""
    return float(np.max([error(a, b) for a, b in pairs]))
