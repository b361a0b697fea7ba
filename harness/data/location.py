"""Where the data sets are to be looked for, as `--data` or the environment says. Standard library only.

A parent asks before it installs or writes anything; harness/data/sets.py does the looking, in a child.
"""

import os
from pathlib import Path
from typing import NamedTuple

from harness.errors import UserError

ENVIRONMENT = "LSTM_BENCH_DATA"
EMBEDDED = "embedded"


class DataLocation(NamedTuple):
    """Where to look; its fields are the arguments of `mnist` and `ptb`, in order."""

    folder: Path | None  # None: look everywhere
    embedded: str  # why the embedded sets are wanted, "" when they are not
    where: str  # who named the folder: "--data" or LSTM_BENCH_DATA


def locate(option: str | None) -> DataLocation:
    """What `--data` (None: not given) and the environment ask for. UserError when there is no such folder."""
    where = "--data" if option is not None else ENVIRONMENT
    value = option if option is not None else os.environ.get(ENVIRONMENT) or None
    if value is None:
        return DataLocation(None, "", where)
    if value == EMBEDDED:
        return DataLocation(None, f"asked for by {where}={EMBEDDED}", where)
    folder = Path(os.path.expanduser(value))
    if not value or not os.path.isdir(folder):
        raise UserError(f"{where}={value}: no such folder; expected one that holds mnist/ and ptb/, or `{EMBEDDED}`")
    return DataLocation(folder, "", where)
