"""The float64 references of a run on disk: references/<benchmark>.<hash>.npz, beside the records.

np.load would unpack whatever a file says that it holds. Here only stored members are taken, which together are no larger than the
file; NumPy reads each without pickles. So reading fills no more memory than twice the file's size.
"""

import os
import struct
import time
import tokenize
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import CrashError, UserError
from harness.measure.proof import CURVE_STEPS
from harness.record import records

# What zipfile, and NumPy's reader of headers, raise for files that are none of theirs.
UNREADABLE = (OSError, EOFError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, SyntaxError, MemoryError,
              struct.error, tokenize.TokenError, zipfile.BadZipFile, UserWarning)  # fmt: skip
WAIT_S = 0.05  # between two looks for a reference that another process computes
WAIT_LIMIT_S = 3900.0  # longer than that process may take (harness/run/parent.py)


def save_reference(path: Path, reference: Mapping[str, Any]) -> None:
    """Write a reference whole or not at all: nested dicts of arrays, stored as float32 (rounding 6e-8, below every limit)."""
    arrays = {}
    for key, value in reference.items():
        for name, array in value.items() if isinstance(value, Mapping) else [("", value)]:
            array = np.asarray(array)
            arrays[f"{key}|{name}"] = array.astype(np.float32) if array.size > CURVE_STEPS else array
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.savez(file, **arrays)
    temporary.replace(path)


def wait_for(path: Path) -> Path:
    """The path, when its reference is there. Raises CrashError with the reason where that could not be computed, or is gone."""
    failed, ends = path.with_suffix(records.NO_REFERENCE), time.monotonic() + WAIT_LIMIT_S
    while not path.exists():
        if failed.exists():
            raise CrashError(failed.read_text())
        if time.monotonic() >= ends:
            raise CrashError(
                f"{path.name}: not there after {WAIT_LIMIT_S:g} s, and nobody said why; run again with --resume"
            )
        time.sleep(WAIT_S)
    return path


def load_reference(path: Path) -> dict[str, Any]:
    """What `save_reference` wrote; UserError, in one line, for any other content."""
    reference: dict[str, Any] = {}
    try:
        with zipfile.ZipFile(path) as archive, warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # a header of Python 2: NumPy would rewrite it before reading
            members = archive.infolist()
            if sum(member.file_size for member in members) > os.path.getsize(path):
                raise ValueError("its members are larger than the file")
            for member in members:
                head, name = member.filename.removesuffix(".npy").split("|", 1)
                held = reference.setdefault(head, {}) if name else reference
                if not isinstance(held, dict) or (name or head) in held:
                    raise ValueError(f"{member.filename[:60]!r} stands there twice")
                held[name or head] = _array(archive, member)
    except UNREADABLE as error:
        what = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{path}: no reference ({what}); remove the file, here and in the runs beside this one, and run again with --resume"
        ) from None
    return reference


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """One stored array of plain numbers. Raises what UNREADABLE lists."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{member.filename[:60]!r} is compressed, expected a stored array")
    with archive.open(member) as stream:
        array = np.lib.format.read_array(stream, allow_pickle=False)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{member.filename[:60]!r} holds {str(array.dtype)[:40]}, expected plain numbers")
    return array
