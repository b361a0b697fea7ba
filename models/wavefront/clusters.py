"""How the kernels of one small layer (kernels/cluster.cu) divide their work among clusters of thread blocks.

A cluster owns some sequences, and each of its blocks some units; see the kernels' source. Clusters know nothing of each other, so
there may be more of them than run at the same time: these take their turn.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from .nvrtc import Chip
from .work import LINE, WARPS, Work, multiple, parts

TILES = (1, 2, 3, 4, 5, 6, 8)  # of 8 sequences, of a cluster
# Registers of a thread that are free for weights, sums, operands and the numbers of the pointwise part, by DTYPE_CODE. (Of
# weights of float32 the compiler keeps both halves.)
REGISTERS = {0: 190, 1: 190, 2: 190, 3: 120}
REGISTERS_OF_TWO = 96  # the same where a multiprocessor has two thread blocks
SHARED = 0.45  # what a second thread block of a multiprocessor adds to what the first takes, measured as tiling.COST_US
BOXES = 16  # bytes
RESERVED = 1024  # bytes of shared memory of each thread block that it does not have


class ClusterTiling(NamedTuple):
    """How a kernel divides its work.

    Attributes:
        own: units of a thread block, 32 or 64.
        batch_tile: sequences of a cluster.
        split: thread blocks of a cluster.
        in_registers: blocks of the inner dimension whose weights are in registers; the others' are in shared memory.
        parts: sums of each product, which take turns so that none waits for the last.
        per_multiprocessor: thread blocks that find a place on a multiprocessor at the same time.
        sharing, waves: of them as many as there are in fact; how often all clusters that run at the same time take their turn.
    """

    own: int
    batch_tile: int
    split: int
    in_registers: int
    parts: int
    per_multiprocessor: int
    sharing: int
    waves: int

    source = "cluster.cu"
    kernel = "lstm_cluster"
    padded_inputs = True  # which it copies 16 bytes at a time

    def groups(self, work: Work) -> int:
        """Clusters."""
        return work.directions * parts(work.batch, self.batch_tile)

    def grid(self, work: Work) -> int:
        """Thread blocks."""
        return self.split * self.groups(work)

    @property
    def bias_rows(self) -> int:
        """Of the gradients by the bias, of a cluster: so many sums."""
        return 32 * WARPS // self.own

    def count(self, work: Work) -> int:
        """Blocks of the inner dimension."""
        return (4 * self.own if work.backward else work.units) // multiple(work.itemsize)

    def row_tiles(self, work: Work) -> int:
        """Of 16 rows of weights, of a warp."""
        return parts(self.split * self.own // 16 if work.backward else self.own // 4, WARPS)

    @property
    def points(self) -> int:
        """Numbers of a thread in the pointwise part."""
        return self.batch_tile * self.own // (32 * WARPS)

    def streamed(self, work: Work) -> float:
        """The share of the weights that are read from memory at every step."""
        return 0

    def terms(self, work: Work) -> dict[str, float]:
        """What a step's time is made of, by name; all waves'.

        cluster: a step; cluster_forward: one forward besides. cluster_chain: products that wait for each other. And of a
        multiprocessor, cluster_sent: what goes to other blocks; cluster_products: products of fragments; cluster_shared:
        fragments of weights in shared memory; cluster_points: numbers of a thread.
        """
        count, row_tiles, tiles = self.count(work), self.row_tiles(work), self.batch_tile // 8
        products = count * (3 if work.dtype_code == 3 else 1)
        every = self.waves * (1 + SHARED * (self.sharing - 1))
        return {
            "cluster": self.waves,
            "cluster_forward": self.waves * (not work.backward),
            "cluster_chain": self.waves * products / count * (count - self.in_registers * (1 - 1 / self.parts)),
            "cluster_sent": every * tiles * self.split * self.own / 32,
            "cluster_products": every * products * row_tiles * tiles,
            "cluster_shared": every * (count - self.in_registers) * row_tiles,
            "cluster_points": every * self.points,
        }

    def shared_bytes(self, work: Work) -> int:
        count = self.count(work)
        operands = 2 * self.batch_tile * (count + 1 - count % 2) * LINE
        numbers = 16 // work.itemsize  # in 16 bytes
        on_the_way = self.batch_tile * (
            4 * (5 * self.own + 4) + work.itemsize * ((5 + work.lengths) * self.own + 2 * numbers)
        )
        exchanged = self.split * self.own * (self.batch_tile + 2) * 4 if work.backward else on_the_way
        return BOXES + operands + 2 * exchanged + (count - self.in_registers) * WARPS * self.row_tiles(work) * 16 * LINE

    def defines(self, work: Work, time: int, layer_units: int) -> tuple[tuple[str, int], ...]:
        """As of Tiling."""
        found = {
            "TIME": time, "BATCH": work.batch, "UNITS": work.units, "DTYPE_CODE": work.dtype_code, "BACKWARD": int(work.backward),
            "LENGTHS": int(work.lengths), "DIRECTIONS": work.directions, "OWN": self.own, "BATCH_TILE": self.batch_tile,
            "SPLIT": self.split, "IN_REGISTERS": self.in_registers, "PARTS": self.parts,
            "PER_MULTIPROCESSOR": self.per_multiprocessor,
        }  # fmt: skip
        return tuple(found.items())


def tilings(work: Work, chip: Chip) -> Iterator[ClusterTiling]:
    """All that fit."""
    if work.lanes > 1 or work.recurrent_dropout or work.scaled:
        return
    for own in (32, 64):
        split = next((size for size, most in sorted(chip.clusters) if most and size * own >= work.units), None)
        if split is None or own % multiple(work.itemsize):
            continue
        for tiles, sums, blocks in itertools.product(TILES, (1, 2), (1, 2)):
            if tiles > parts(work.batch, 8) or (blocks > 1 and work.itemsize > 2):  # 4 bytes leave too few registers
                continue
            most, clusters = dict(chip.clusters)[split], work.directions * parts(work.batch, 8 * tiles)
            sharing = min(blocks, parts(clusters, most))
            tiling = ClusterTiling(own, 8 * tiles, split, 0, sums, blocks, sharing, parts(clusters, most * blocks))
            row_tiles = tiling.row_tiles(work)
            free = REGISTERS[work.dtype_code] if blocks == 1 else REGISTERS_OF_TWO
            free -= 4 * row_tiles * tiles * sums + (13 if work.backward else 11) * tiling.points + 8 * tiles
            tiling = tiling._replace(in_registers=max(0, min(free // (8 * row_tiles), tiling.count(work))))
            if sums > max(1, tiling.in_registers):
                continue
            if tiling.shared_bytes(work) <= (chip.shared_bytes + RESERVED) // blocks - RESERVED:
                yield tiling
