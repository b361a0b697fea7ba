"""How the persistent kernels (kernels/wavefront.cu) divide their work among the multiprocessors of a chip.

A thread block owns some units of a layer and some sequences. More units mean that fewer blocks read the same sequences' h, and
more weights to keep; more sequences the other way round. `best_tiling` tries all that fit, and takes the one whose step should
take the least time by a formula, a fit to measured steps: of an H200, or of this chip where tune.py has measured it.
"""

import functools
import itertools
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from .nvrtc import Chip

TUNE = f"python -m {__package__}.tune"
LOGGER = logging.getLogger("wavefront_lstm")
DTYPE_CODES = {"tf32": 0, "float16": 1, "bfloat16": 2, "float32": 3}  # DTYPE_CODE of the kernels
WARPS = 8  # of a thread block
TILES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # of 8 sequences, of a thread block
LINE = 64  # bytes of the inner dimension that a warp takes at once
MOST_SLICES = 16  # of a batch: a launch each
# Registers of a thread that are free for sums, weights and operands, by DTYPE_CODE.
REGISTERS = {0: 178, 1: 178, 2: 178, 3: 154}

# us of a step, per unit of each of `terms`: tune.py's fit to an H200's tilings (tests/models/tilings_h200.json in the suite).
COST_US = {
    "step": 1.13, "wait": 0.087, "operand": 0.0078, "streamed": 0.0164, "traffic": 0.0079, "shared": 0.0038, "products": 1.0,
    "tile": 0.155, "gathered": 0.058, "chunk": 0.122, "exchange": 0.113, "exchanged": 0.474,
}  # fmt: skip
PRODUCTS_PER_US = {0: 200e6, 1: 400e6, 2: 400e6, 3: 45e6}  # floating-point operations of a plain product, by DTYPE_CODE


class Work(NamedTuple):
    """One kernel's work.

    Attributes:
        lanes, batch: layers that advance together; sequences.
        units: of a layer, padded to `multiple`.
        dtype_code: of DTYPE_CODES.
        backward: which of the two kernels.
        recurrent_dropout: whether gates see parts of h alone.
        lengths: whether sequences have lengths of their own.
        directions: 1, or 2 of a single layer.
    """

    lanes: int
    batch: int
    units: int
    dtype_code: int
    backward: bool
    recurrent_dropout: bool = False
    lengths: bool = False
    directions: int = 1

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the products."""
        return 2 if self.dtype_code in (1, 2) else 4


class Tiling(NamedTuple):
    """How a kernel divides its work.

    Attributes:
        unit_tile, batch_tile: units and sequences of a thread block.
        split: thread blocks of a cluster, which share the work on `unit_tile` units of each.
        in_registers, in_shared: blocks of the inner dimension, of each warp, whose weights stay there all the time.
        prefetch_depth: blocks of the other operand that a warp has on their way.
        chunk: tiles of 8 sequences whose sums go through shared memory together.
    """

    unit_tile: int
    batch_tile: int
    split: int
    in_registers: int
    in_shared: int
    prefetch_depth: int
    chunk: int

    def rows(self, work: Work) -> int:
        """Rows of weights of a thread block."""
        return self.split * self.unit_tile * (1 if work.backward else 4)

    def grid(self, work: Work) -> int:
        """Thread blocks."""
        return work.lanes * parts(work.units, self.split * self.unit_tile) * self.split * self.groups(work)

    def groups(self, work: Work) -> int:
        """Of thread blocks that wait for each other."""
        return work.directions * parts(work.batch, self.batch_tile)

    def shared_bytes(self, work: Work) -> int:
        return self.in_shared * WARPS * self.rows(work) * LINE + _partial_bytes(self.rows(work), self.chunk)


def multiple(itemsize: int) -> int:
    """What units are padded to a multiple of."""
    return LINE // itemsize


def padded_units(units: int, itemsize: int) -> int:
    """Of a layer, as the kernels have them."""
    return parts(units, multiple(itemsize)) * multiple(itemsize)


@functools.cache
def best_tiling(work: Work, chip: Chip) -> Tiling | None:
    """The tiling whose step should take the least time; None: none fits."""
    own = costs(chip)
    return min(_tilings(work, chip), key=lambda tiling: step_us(work, tiling, own), default=None)


def costs_path(chip: Chip) -> Path:
    """Where tune.py keeps a chip's constants: below $XDG_CACHE_HOME, by default ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = re.sub(r"\W+", "-", chip.name.lower())
    return Path(cache, "wavefront_lstm", f"{name}-{chip.multiprocessors}-sm_{chip.capability}.json")


@functools.cache
def costs(chip: Chip) -> Mapping[str, float]:
    """COST_US as tune.py has measured it on such a chip, else an H200's. A file that cannot be used is a warning."""
    try:
        path = costs_path(chip)
        found = json.loads(path.read_text())["costs_us"]
        if (
            found.keys() != COST_US.keys()
            or not all(0 <= us < float("inf") for us in found.values())
            or not any(found.values())
        ):
            raise ValueError(f"expected a number of 0 or more for each of {', '.join(COST_US)}")
    except FileNotFoundError:
        return COST_US
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:  # RuntimeError: no home
        LOGGER.warning("the constants of this GPU cannot be used (%r): run %s again", error, TUNE)
        return COST_US
    return found


def fits(work: Work, chip: Chip) -> bool:
    """Whether there is a tiling of both kernels' work."""
    return None not in (best_tiling(work._replace(backward=backward), chip) for backward in (False, True))


def fitting(work: Work, chip: Chip) -> Tiling:
    """The tiling of a kernel's work, or a ValueError where none fits either kernel's."""
    if not fits(work, chip):
        dropout = "with recurrent dropout " if work.recurrent_dropout else ""
        raise ValueError(
            f"{work.lanes} layers at a time of {work.units} units (padded) and batch {work.batch} {dropout}given: such "
            f"a step does not fit on the {chip.multiprocessors} multiprocessors of this GPU, nor does it in {MOST_SLICES} slices "
            "of the batch; use implementation='xla' (lstm_stack)"
        )
    return best_tiling(work, chip)


def notes(chip: Chip) -> list[str]:
    """For whoever reports times: that the work is divided by a chip's own constants, where it is."""
    own = costs(chip) is not COST_US
    return [f"the kernels' work is divided by times measured on this kind of GPU ({TUNE})"] if own else []


def step_us(work: Work, tiling: Tiling, costs_us: Mapping[str, float] = COST_US) -> float:
    """An estimate of one step, by the constants of a chip."""
    return sum(costs_us[name] * amount for name, amount in terms(work, tiling).items())


def terms(work: Work, tiling: Tiling) -> dict[str, float]:
    """What a step's time is made of, by name.

    wait: waits for memory. operand, streamed: KB that a thread block reads, of the other operand and of weights; traffic: of
    all blocks, per 132. shared: KB of weights in shared memory. products: millions of multiply-adds of tf32. tile: tiles of 8
    sequences; gathered: of 16 rows besides; chunk: gatherings. exchange, exchanged: those of a cluster, and their tiles.
    """
    count, rows, tiles = _count(work, tiling.split), tiling.rows(work), tiling.batch_tile // 8
    kilobytes = count * WARPS * LINE / 1000  # of a row, or of a sequence
    operand = min(tiling.batch_tile, work.batch) * kilobytes
    streamed = rows * kilobytes * max(0, count - tiling.in_registers - tiling.in_shared) / count
    multiply_adds = rows * tiling.batch_tile * count * WARPS * multiple(work.itemsize)
    return {
        "step": 1,
        "wait": parts(count, tiling.prefetch_depth),
        "operand": operand,
        "streamed": streamed,
        "traffic": (operand + streamed) * tiling.grid(work) / 132,
        "shared": rows * kilobytes * min(tiling.in_shared, count) / count,
        "products": multiply_adds / 1e6 * {0: 1, 1: 0.5, 2: 0.5, 3: 3}[work.dtype_code],
        "tile": tiles,
        "gathered": rows / 16 * tiles,
        "chunk": tiles / tiling.chunk,
        "exchange": tiling.split - 1,
        "exchanged": tiles * (tiling.split - 1),
    }


def _tilings(work: Work, chip: Chip) -> Iterator[Tiling]:
    """All that fit."""
    splits = (1, 2) if chip.capability >= 90 else (1,)  # clusters came with Hopper
    tiles_of_batch = parts(work.batch, 8)
    all_tiles = [
        k for k in TILES if k <= tiles_of_batch or tiles_of_batch > max((j for j in TILES if j < k), default=0)
    ]
    for split, unit_tile, tiles in itertools.product(splits, range(4, 33, 4), all_tiles):
        tiling = Tiling(unit_tile, 8 * tiles, split, 0, 0, 1, 1)
        row_tiles, rest = divmod(tiling.rows(work), 16)
        if work.recurrent_dropout and not work.backward and split * unit_tile % 16:
            continue  # 16 rows of one product are of one gate, which has an h of its own
        if not rest and tiling.grid(work) <= chip.multiprocessors:
            yield from _placements(work, chip, tiling, row_tiles, tiles)


def _placements(work: Work, chip: Chip, tiling: Tiling, row_tiles: int, tiles: int) -> Iterator[Tiling]:
    """Where a tiling can keep its weights, and how far ahead it can load."""
    count = _count(work, tiling.split)
    free = REGISTERS[work.dtype_code] - (8 if work.backward else 5) * tiles - row_tiles * tiles * 4
    kept = tiles * work.recurrent_dropout  # words of masks: backward of all sums, forward beside each operand
    free -= row_tiles * kept if work.backward else 0
    free -= tiles * (1 + work.backward) * work.lengths  # a sequence's end, and the gradient by an h that stands still
    for chunk in (k for k in range(1, tiles + 1) if tiles % k == 0):
        left = chip.shared_bytes - _partial_bytes(16 * row_tiles, chunk)
        in_shared = min(left // (WARPS * 16 * row_tiles * LINE), count)
        for prefetch_depth, streams in itertools.product((1, 2, 3, 4, 6, 8, 12), (False, True)):
            ring = prefetch_depth * (tiles * 4 + (0 if work.backward else kept) + (row_tiles * 8 if streams else 0))
            in_registers = min((free - ring) // (row_tiles * 8), count - in_shared)
            if left >= 0 and ring <= free and prefetch_depth <= count and streams == (in_registers + in_shared < count):
                yield tiling._replace(
                    in_registers=in_registers, in_shared=in_shared, prefetch_depth=prefetch_depth, chunk=chunk
                )


def _count(work: Work, split: int) -> int:
    """Blocks of the inner dimension of each warp."""
    segments = 2 if work.lanes > 1 else 1
    return parts(segments * work.units * (4 if work.backward else 1) // multiple(work.itemsize), split * WARPS)


def _partial_bytes(rows: int, chunk: int) -> int:
    return WARPS * chunk * 8 * (rows + 4) * 4


def parts(size: int, of: int) -> int:
    """How many parts of size `of` cover `size`."""
    return -(-size // of)


def layers_together(num_layers: int, time: int, work: Work, chip: Chip) -> int:
    """All layers or one at a time, whichever should take less time.

    Raises:
        ValueError: neither fits on the chip.
    """
    best = min((1, num_layers), key=lambda lanes: stack_us(num_layers, time, work._replace(lanes=lanes), chip))
    fitting(work._replace(lanes=best), chip)
    return best


def stack_us(num_layers: int, time: int, work: Work, chip: Chip) -> float:
    """An estimate of a whole stack both ways, `work.lanes` layers at a time, without what any division into lanes has; inf: it
    does not fit."""
    works = [work._replace(backward=backward) for backward in (False, True)]
    tilings = [best_tiling(of_pass, chip) for of_pass in works]
    if None in tilings:
        return float("inf")
    groups = num_layers // work.lanes
    steps = (time + work.lanes - 1) * groups
    # Layers in turn have the products of all inputs, and those of their gradients, outside of the kernels.
    outside = 16 * time * work.batch * work.units**2 * groups / PRODUCTS_PER_US[work.dtype_code]
    return outside + steps * sum(step_us(*pair, costs(chip)) for pair in zip(works, tilings, strict=True))


def defines(work: Work, time: int, tiling: Tiling) -> tuple[tuple[str, int], ...]:
    """The macros of the kernels' source."""
    found = {
        "LANES": work.lanes, "TIME": time, "BATCH": work.batch, "UNITS": work.units, "DTYPE_CODE": work.dtype_code,
        "BACKWARD": int(work.backward), "UNIT_TILE": tiling.unit_tile, "BATCH_TILE": tiling.batch_tile, "SPLIT": tiling.split,
        "IN_REGISTERS": tiling.in_registers, "IN_SHARED": tiling.in_shared, "PREFETCH_DEPTH": tiling.prefetch_depth,
        "CHUNK": tiling.chunk, "RECURRENT_DROPOUT": int(work.recurrent_dropout), "LENGTHS": int(work.lengths),
        "DIRECTIONS": work.directions,
    }  # fmt: skip
    return tuple(found.items())
