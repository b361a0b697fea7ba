"""The float64 references of a run on disk: references/<benchmark>.<hash>.npz, beside the records.

Read without np.load, which would unpack whatever a file says that it holds: only stored members are taken, whose
headers say exactly as many bytes as there are. So reading takes no more memory than twice the file's size.
"""

import math
import os
import struct
import tokenize
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import UserError
from harness.measure.proof import CURVE_STEPS

# What zipfile, and NumPy's reader of headers, raise for files that are none of theirs.
UNREADABLE = (OSError, EOFError, ValueError, TypeError, LookupError, RuntimeError, SyntaxError, struct.error,
              tokenize.TokenError, zipfile.BadZipFile, UserWarning)  # fmt: skip


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
        raise UserError(f"{path}: no reference ({what}); remove the file and run again with --resume") from None
    return reference


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """One stored array of plain numbers, read only when its header fits its size. Raises ValueError and zipfile's."""
    if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
        raise ValueError(f"{member.filename[:60]!r} is compressed, expected a stored array")
    with archive.open(member) as stream:
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError(f"{member.filename[:60]!r}: another version of NumPy's format, expected 1.0")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(stream)
        if dtype.kind not in "fiu" or min(shape, default=0) < 0:
            raise ValueError(
                f"{member.filename[:60]!r} holds {str(dtype)[:40]} {str(shape)[:40]}, expected plain numbers"
            )
        if math.prod(shape) * dtype.itemsize != member.file_size - stream.tell():
            raise ValueError(f"{member.filename[:60]!r} says {str(shape)[:40]} values of {dtype}, has another size")
        flat = np.frombuffer(bytearray(stream.read()), dtype)  # one that may be written to, as np.load gives
    return flat.reshape(shape[::-1]).T if by_columns else flat.reshape(shape)
