"""What one of the kernels of kernels/ has to do, and how it sees sizes."""

import os
from typing import NamedTuple

DTYPE_CODES = {"tf32": 0, "float16": 1, "bfloat16": 2, "float32": 3}  # DTYPE_CODE of the kernels
HALVES = 4  # that of tf32 whose products read float16 times powers of two: halves.py
HALVES_ALLOWED = os.environ.get("WAVEFRONT_LSTM_BY_FLOAT16", "1").lower() not in ("0", "false", "no", "off")
PAIRS = 5  # that of float32 whose products read pairs of such
SUFFIXES = {HALVES: "_by_float16", PAIRS: "_by_pairs_of_float16"}  # of a kernel's name
WARPS = 8  # of a thread block
LINE = 64  # bytes of the inner dimension that a warp takes at once


class Work(NamedTuple):
    """One kernel's work.

    Attributes:
        lanes, batch: layers that advance together; sequences.
        units: of a layer, padded to `multiple`.
        dtype_code: of DTYPE_CODES, or HALVES or PAIRS.
        backward: which of the two kernels.
        recurrent_dropout: whether gates see parts of h alone.
        lengths: whether sequences have lengths of their own.
        directions: 1, or 2 of a single layer.
        keeps_factors: whether what stays for the weights' gradients are the factors, of HALVES or PAIRS.
    """

    lanes: int
    batch: int
    units: int
    dtype_code: int
    backward: bool
    recurrent_dropout: bool = False
    lengths: bool = False
    directions: int = 1
    keeps_factors: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the products."""
        return 2 if self.dtype_code in (1, 2, HALVES) else 4

    @property
    def scaled(self) -> bool:
        """Whether factors of the products have powers of two."""
        return self.dtype_code in (HALVES, PAIRS)

    @property
    def pairs(self) -> bool:
        """Whether factors are pairs."""
        return self.dtype_code == PAIRS

    @property
    def ring(self) -> bool:
        """Whether what a step needs of the last one goes through a ring, beside what stays for the weights' gradients."""
        return self.scaled and not self.keeps_factors


def halves_allowed(dtype_code: int) -> bool:
    """Whether HALVES may take the place of this DTYPE_CODE."""
    return HALVES_ALLOWED and dtype_code == DTYPE_CODES["tf32"]


def by_float16(dtype_code: int) -> int | None:
    """What may take the place of this DTYPE_CODE."""
    if HALVES_ALLOWED and dtype_code == DTYPE_CODES["float32"]:
        return PAIRS
    return HALVES if halves_allowed(dtype_code) else None


def multiple(itemsize: int) -> int:
    """What units are padded to a multiple of."""
    return LINE // itemsize


def padded_units(units: int, itemsize: int) -> int:
    """Of a layer, as the kernels have them."""
    return parts(units, multiple(itemsize)) * multiple(itemsize)


def parts(size: int, of: int) -> int:
    """How many parts of size `of` cover `size`."""
    return -(-size // of)
