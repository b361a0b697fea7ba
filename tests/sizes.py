"""How many cases a test takes: few by default, all with ./run_tests.sh --all."""

import itertools
import os
from collections.abc import Iterable

import pytest

ALL = os.environ.get("LSTM_BENCH_TESTS") == "all"


def cases(few: int, whole: int) -> int:
    """`whole` where all tests are run, else `few`."""
    return whole if ALL else few


def half(*choices: Iterable) -> list:
    """Every combination of the choices, as parameters; by default every second one.

    Of three and more choices each pair of values is still met, of two each value.
    """
    numbered = itertools.product(*(list(enumerate(values)) for values in choices))
    return [
        pytest.param(*(value for _, value in picked), marks=[pytest.mark.slow] * (sum(k for k, _ in picked) % 2))
        for picked in numbered
    ]
