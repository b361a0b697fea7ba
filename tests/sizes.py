"""How many cases a test takes: few by default, all with ./run_tests.sh --all."""

import os

ALL = os.environ.get("LSTM_BENCH_TESTS") == "all"


def cases(few: int, whole: int) -> int:
    """`whole` where all tests are run, else `few`."""
    return whole if ALL else few
