"""Where the workers of a row are: each counts the calls that it has come to, in a file that its parent reads (run/workers.py).

All go through the same calls, so that of workers that hang it is known which one the others wait for. Standard library only.
"""

import mmap
import struct
from pathlib import Path

BEATS = struct.Struct("qq")  # calls that a worker has come to; its stage
STARTS, WORKS, STEPS = range(
    3
)  # stages: it imports and reads; it may compile; it only takes steps, each of which is short


class Beats:
    """Where a worker is, in a file that its parent reads.

    path: of the file, which is there already; None: nobody reads.
    """

    def __init__(self, path: str | None) -> None:
        self.count, self.stage, self._map = 0, STARTS, None
        if path:
            with Path(path).open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), BEATS.size)

    def beat(self) -> None:
        """The worker has come to its next call."""
        self.count += 1
        if self._map is not None:
            BEATS.pack_into(self._map, 0, self.count, self.stage)
