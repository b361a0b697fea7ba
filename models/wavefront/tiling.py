"""How the persistent kernels of kernels/wavefront.cu divide their work among the multiprocessors of a chip, and whether these or
those of kernels/cluster.cu (clusters.py) run.

A thread block owns some units of a layer and some sequences. More units mean that fewer blocks read the same sequences' h, and
more weights to keep; more sequences the other way round. `best_tiling` tries all that fit, and takes the one whose step should
take the least time by a formula, a fit to measured steps: of an H100, or of this chip where tune.py has measured it.
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

from . import clusters
from .clusters import ClusterTiling
from .nvrtc import Chip
from .work import HALVES, LINE, PAIRS, WARPS, Work, by_float16, multiple, parts

TUNE = f"python -m {__package__}.tune"
LOGGER = logging.getLogger("wavefront_lstm")
TILES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # of 8 sequences, of a thread block
MOST_SLICES = 16  # of a batch: a launch each
# Registers of a thread that are free for sums, weights and operands, by DTYPE_CODE.
REGISTERS = {0: 178, 1: 178, 2: 178, 3: 154, HALVES: 164, PAIRS: 158}

# us of a step, per unit of each of a tiling's terms: tune.py's fit to an H100's times, of its shapes and of wider, narrower and
# deeper ones (tests/models/tilings_h100.json in the suite).
COST_US = {
    "step": 0.805, "loads": 0.0381, "wait": 0.111, "operand": 0.0011, "streamed": 0.0086, "traffic": 0.0091, "shared": 0.0016,
    "products": 1.2001, "point": 0.3692, "gathered": 0.0603, "chunk": 0.175, "exchange": 0.6845, "exchanged": 0.0458,
    "cluster": 0.327, "cluster_forward": 0.2186, "cluster_chain": 0.0023, "cluster_sent": 0.0533, "cluster_products": 0.0174,
    "cluster_shared": 0.0317, "cluster_points": 0.3345,
}  # fmt: skip
BYTES_PER_US = 3e6  # of memory
PRODUCTS_PER_US = {0: 200e6, 1: 400e6, 2: 400e6, 3: 45e6}  # floating-point operations of a plain product, by DTYPE_CODE
HALVES_US = 0.5  # of a backward step with factors of float16, for its power of two: about that much on an H200
HALVES_CALL_US = {
    False: 8.0,
    True: 16.0,
}  # of a launch, forward and backward: an estimate of finding how large its numbers are
HALVES_STEPS = 2048  # at most: they bound a gradient by the number of steps


class Tiling(NamedTuple):
    """How a kernel divides its work.

    Attributes:
        unit_tile, batch_tile: units and sequences of a thread block.
        split: thread blocks of a cluster, which share the work on `unit_tile` units of each.
        column_warps: teams of warps, each with sequences of its own; the warps of a team share the inner dimension.
        in_registers, in_shared: blocks of the inner dimension, of each warp, whose weights stay there all the time.
        prefetch_depth: blocks of the other operand that a warp has on their way.
        chunk: tiles of 8 sequences of a warp whose sums go through shared memory together.
    """

    unit_tile: int
    batch_tile: int
    split: int
    column_warps: int
    in_registers: int
    in_shared: int
    prefetch_depth: int
    chunk: int

    source = "wavefront.cu"
    kernel = "lstm_wavefront"
    padded_inputs = False  # whether the kernel takes the inputs' product with padded gates

    def rows(self, work: Work) -> int:
        """Rows of weights of a thread block."""
        return self.split * self.unit_tile * (1 if work.backward else 4)

    def grid(self, work: Work) -> int:
        """Thread blocks."""
        return work.lanes * parts(work.units, self.split * self.unit_tile) * self.split * self.groups(work)

    def groups(self, work: Work) -> int:
        """Of thread blocks that wait for each other."""
        return work.directions * parts(work.batch, self.batch_tile)

    @property
    def k_warps(self) -> int:
        """Of a team."""
        return WARPS // self.column_warps

    @property
    def tiles(self) -> int:
        """Of 8 sequences, of a warp."""
        return self.batch_tile // 8 // self.column_warps

    @property
    def at_once(self) -> int:
        """Sequences of a team that its threads have numbers of at the same time, one thread for each unit."""
        found = 1
        while 2 * found * self.unit_tile <= 32 * self.k_warps and 8 * self.chunk % (2 * found) == 0:
            found *= 2
        return found

    @property
    def points(self) -> int:
        """Sequences of a thread, one after the other."""
        return 8 * self.tiles // self.at_once

    @property
    def bias_rows(self) -> int:
        """Of the gradients by the bias, of a group: so many sums."""
        return self.column_warps * self.at_once

    def shared_bytes(self, work: Work) -> int:
        return self.in_shared * self.k_warps * self.rows(work) * LINE + _partial_bytes(
            work, self.rows(work), self.chunk
        )

    def streamed(self, work: Work) -> float:
        """The share of the weights that are read from memory at every step."""
        count = _count(work, self)
        return max(0, count - self.in_registers - self.in_shared) / count

    def terms(self, work: Work) -> dict[str, float]:
        """What a step's time is made of, by name.

        loads, wait: blocks of the inner dimension that a warp reads, and how often it waits for them. operand, streamed: KB
        that a thread block reads, of the other operand and of weights; traffic: of all blocks, per 132. shared: KB of weights
        from shared memory. products: millions of multiply-adds of tf32. point: sequences of a thread. gathered: tiles of 16 rows
        and 8 sequences; chunk: gatherings. exchange, exchanged: a cluster, and sums that a thread has from its other blocks.
        """
        count, rows, tiles = _count(work, self), self.rows(work), self.tiles
        kilobytes = count * self.k_warps * LINE / 1000  # of a row, or of a sequence
        operand = min(self.batch_tile, work.batch) * kilobytes
        streamed = rows * kilobytes * self.streamed(work) * self.column_warps
        multiply_adds = rows * self.batch_tile * count * self.k_warps * multiple(work.itemsize)
        sums = self.points * (1 if work.backward else 4)  # of a thread
        return {
            "step": 1,
            "loads": count,
            "wait": parts(count, self.prefetch_depth),
            "operand": operand,
            "streamed": streamed,
            "traffic": (operand + streamed) * self.grid(work) / 132,
            "shared": rows * kilobytes * min(self.in_shared, count) / count * self.column_warps,
            "products": multiply_adds / 1e6 * {0: 1, 1: 0.5, 2: 0.5, 3: 3, HALVES: 0.5, PAIRS: 1.5}[work.dtype_code],
            "point": self.points,
            "gathered": rows / 16 * tiles,
            "chunk": tiles / self.chunk,
            "exchange": self.split > 1,
            "exchanged": sums * (self.split - 1),
        }

    def defines(self, work: Work, time: int, layer_units: int) -> tuple[tuple[str, int], ...]:
        """The macros of the kernels' source; layer_units: without the padding of `work`."""
        found = {
            "LANES": work.lanes, "TIME": time, "BATCH": work.batch, "UNITS": work.units, "LAYER_UNITS": layer_units,
            "DTYPE_CODE": work.dtype_code, "BACKWARD": int(work.backward), "UNIT_TILE": self.unit_tile,
            "BATCH_TILE": self.batch_tile, "SPLIT": self.split, "COLUMN_WARPS": self.column_warps,
            "IN_REGISTERS": self.in_registers, "IN_SHARED": self.in_shared, "PREFETCH_DEPTH": self.prefetch_depth,
            "CHUNK": self.chunk, "RECURRENT_DROPOUT": int(work.recurrent_dropout), "LENGTHS": int(work.lengths),
            "DIRECTIONS": work.directions, "KEEP_FACTORS": int(work.keeps_factors),
        }  # fmt: skip
        return tuple(found.items())


@functools.cache
def best_tiling(work: Work, chip: Chip) -> Tiling | ClusterTiling | None:
    """The tiling whose step should take the least time; None: none fits."""
    own = costs(chip)
    return min(tilings(work, chip), key=lambda tiling: step_us(work, tiling, own), default=None)


def costs_path(chip: Chip) -> Path:
    """Where tune.py keeps a chip's constants: below $XDG_CACHE_HOME, by default ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = re.sub(r"\W+", "-", chip.name.lower())
    return Path(cache, "wavefront_lstm", f"{name}-{chip.multiprocessors}-sm_{chip.capability}.json")


@functools.cache
def costs(chip: Chip) -> Mapping[str, float]:
    """COST_US as tune.py has measured it on such a chip, else an H100's. A file that cannot be used is a warning."""
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


def fits(work: Work, time: int, chip: Chip) -> bool:
    """Whether there is a tiling of both kernels' work, by whichever products."""
    return _fits(by_factors(work, time, chip), chip)


def _fits(work: Work, chip: Chip) -> bool:
    return None not in (best_tiling(work._replace(backward=backward), chip) for backward in (False, True))


def by_factors(work: Work, time: int, chip: Chip) -> Work:
    """The same of tf32 with factors of float16, of float32 with pairs of them, where a launch should take less time then or does
    not fit without.

    Both ways have to fit with them, though each is decided by itself.
    """
    code = by_float16(work.dtype_code)
    if code is None or time > HALVES_STEPS:
        return work
    if work.recurrent_dropout and code == PAIRS:
        return work
    halves = work._replace(dtype_code=code)
    if work.units % multiple(halves.itemsize) or not _fits(halves, chip):
        return work
    if not _fits(work, chip):
        return halves
    steps = time + work.lanes - 1
    own, other = (steps * step_us(each, best_tiling(each, chip), costs(chip)) for each in (work, halves))
    return halves if other + HALVES_CALL_US[work.backward] < own else work


def streamed(work: Work, time: int, chip: Chip) -> float:
    """The share of the weights that are read from memory at every step, of the kernel of which it is larger."""
    both = (by_factors(each, time, chip) for each in (work, work._replace(backward=True)))
    return max(fitting(each, chip).streamed(each) for each in both)


def fitting(work: Work, chip: Chip) -> Tiling | ClusterTiling:
    """The tiling of a kernel's work, or a ValueError where none fits either kernel's."""
    if not _fits(work, chip):
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


def step_us(work: Work, tiling: Tiling | ClusterTiling, costs_us: Mapping[str, float] = COST_US) -> float:
    """An estimate of one step, by the constants of a chip."""
    of_powers = HALVES_US if work.scaled and work.backward else 0
    return of_powers + sum(costs_us[name] * amount for name, amount in tiling.terms(work).items())


def tilings(work: Work, chip: Chip) -> Iterator[Tiling | ClusterTiling]:
    """All that fit."""
    yield from _tilings(work, chip)
    yield from clusters.tilings(work, chip)


def _tilings(work: Work, chip: Chip) -> Iterator[Tiling]:
    """All that fit, of wavefront.cu."""
    tiles_of_batch = parts(work.batch, 8)
    for column_warps, unit_tile in itertools.product((1, 2, 4, 8), range(4, 33, 4)):
        if unit_tile > 32 * WARPS // column_warps:
            continue
        of_batch = [k * column_warps for k in TILES]
        all_tiles = [
            k
            for k in of_batch
            if k <= tiles_of_batch or tiles_of_batch > max((j for j in of_batch if j < k), default=0)
        ]
        for split, tiles in itertools.product((1, *dict(chip.clusters)), all_tiles):
            tiling = Tiling(unit_tile, 8 * tiles, split, column_warps, 0, 0, 1, 1)
            if work.recurrent_dropout and not work.backward and split * unit_tile % 16:
                continue  # 16 rows of one product are of one gate, which has an h of its own
            if tiling.rows(work) % 16 == 0 and tiling.grid(work) <= chip.blocks(split):
                yield from _placements(work, chip, tiling)


def _placements(work: Work, chip: Chip, tiling: Tiling) -> Iterator[Tiling]:
    """Where a tiling can keep its weights, and how far ahead it can load."""
    count, row_tiles, tiles = _count(work, tiling), tiling.rows(work) // 16, tiling.tiles
    # Registers of a block's weights: of float32 the compiler keeps both halves.
    each = 16 if work.dtype_code == 3 else 8
    kept = tiles * work.recurrent_dropout  # words of masks: backward of all sums, forward beside each operand
    for chunk in (k for k in range(1, tiles + 1) if tiles % k == 0):
        chunked = tiling._replace(chunk=chunk)
        sums = row_tiles * tiles * (8 if work.dtype_code == PAIRS else 4)
        free = REGISTERS[work.dtype_code] - (8 if work.backward else 5) * chunked.points - sums
        free -= row_tiles * kept if work.backward else 0
        # A sequence's end, and the gradient by an h that stands still.
        free -= chunked.points * (1 + work.backward) * work.lengths
        left = chip.shared_bytes - _partial_bytes(work, 16 * row_tiles, chunk)
        in_shared = min(left // (tiling.k_warps * 16 * row_tiles * LINE), count)
        for prefetch_depth, streams in itertools.product((1, 2, 3, 4, 6, 8, 12), (False, True)):
            ring = prefetch_depth * (tiles * 4 + (0 if work.backward else kept) + (row_tiles * 8 if streams else 0))
            in_registers = min((free - ring) // (row_tiles * each), count - in_shared)
            if left >= 0 and ring <= free and prefetch_depth <= count and streams == (in_registers + in_shared < count):
                yield chunked._replace(in_registers=in_registers, in_shared=in_shared, prefetch_depth=prefetch_depth)


def _count(work: Work, tiling: Tiling) -> int:
    """Blocks of the inner dimension of each warp."""
    segments = 2 if work.lanes > 1 else 1
    blocks = segments * work.units * (4 if work.backward else 1) // multiple(work.itemsize)
    return parts(blocks, tiling.split * tiling.k_warps)


def _partial_bytes(work: Work, rows: int, chunk: int) -> int:
    return WARPS * chunk * 8 * (rows + 4) * 4 + 16 * (work.backward and work.scaled)


def layers_together(num_layers: int, time: int, work: Work, chip: Chip) -> int:
    """All layers or one at a time, whichever should take less time.

    Raises:
        ValueError: neither fits on the chip.
    """
    best = min((1, num_layers), key=lambda lanes: stack_us(num_layers, time, work._replace(lanes=lanes), chip))
    fitting(by_factors(work._replace(lanes=best), time, chip), chip)
    return best


def stack_us(num_layers: int, time: int, work: Work, chip: Chip) -> float:
    """An estimate of a whole stack both ways, `work.lanes` layers at a time, without what any division into lanes has; inf: it
    does not fit."""
    works = [by_factors(work._replace(backward=backward), time, chip) for backward in (False, True)]
    found = [best_tiling(of_pass, chip) for of_pass in works]
    if None in found:
        return float("inf")
    groups = num_layers // work.lanes
    steps = (time + work.lanes - 1) * groups
    # Layers in turn have the products of all inputs, and those of their gradients, outside of the kernels: the products
    # themselves, and what is written and read of them.
    rows = time * work.batch * work.directions * groups
    outside = (
        16 * rows * work.units**2 / PRODUCTS_PER_US[work.dtype_code]
        + 16 * rows * work.units * work.itemsize / BYTES_PER_US
    )
    of_sizes = groups * sum(HALVES_CALL_US[of_pass.backward] for of_pass in works if of_pass.scaled)
    return outside + of_sizes + steps * sum(step_us(*pair, costs(chip)) for pair in zip(works, found, strict=True))
