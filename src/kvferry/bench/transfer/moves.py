"""The blocks that one move of `kvferry bench transfer` reads. Pure; the random order is seeded.

The memory of a side has a few regions of equal size, like the layers of a cache; the same blocks
move in every region.

    spread 1: every block moves
    spread 2: every second block moves, chosen at random, separately on each side
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvferry.transports.base import Segments
from kvferry.transports.copy.segments import Offsets

RUN_BLOCKS = 8
"""The number of adjacent blocks in a run, on both sides."""


class Pattern(StrEnum):
    """How the moved blocks lie in memory: each alone, or in runs of adjacent blocks."""

    SCATTERED = "scattered"
    RUNS = "runs"


@dataclass(frozen=True, slots=True)
class Blocks:
    """The memory of one side, divided into blocks."""

    segment_bytes: int
    regions: int
    per_region: int

    @property
    def count(self) -> int:
        return self.regions * self.per_region

    @property
    def region_bytes(self) -> int:
        return self.per_region * self.segment_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """The blocks of one move: `local_blocks[i]` is read from `remote_blocks[i]`.

    Block numbers count through all regions.
    """

    blocks: Blocks
    local_blocks: Offsets
    remote_blocks: Offsets

    @property
    def total_bytes(self) -> int:
        return len(self.local_blocks) * self.blocks.segment_bytes

    def part(self, most: int) -> "Move":
        """Return a move of about `most` of the blocks; the same move if the move has no more
        blocks.

        Every region has the same number of blocks, and runs stay whole.
        """
        regions = self.blocks.regions
        taken = max(1, most // regions // RUN_BLOCKS) * RUN_BLOCKS
        if len(self.local_blocks) <= taken * regions:
            return self
        return Move(
            self.blocks,
            *(
                side.reshape(regions, -1)[:, :taken].ravel()
                for side in (self.local_blocks, self.remote_blocks)
            ),
        )

    def joined(self) -> "Move":
        """Return a move of the same size that is contiguous on both sides: the first blocks in
        order.
        """
        first = np.arange(len(self.local_blocks), dtype=np.int64)
        return Move(self.blocks, first, first)

    def segments(self) -> list[Segments]:
        """Return the move as a transfer worker requests a move: one entry per region.

        Regions with the same offsets share the same arrays.
        """
        size, per_region = self.blocks.segment_bytes, self.blocks.per_region
        moved = len(self.local_blocks) // self.blocks.regions
        parts = list[Segments]()
        for region in range(self.blocks.regions):
            chosen = slice(region * moved, (region + 1) * moved)
            near, far = (
                (side[chosen] - region * per_region) * size
                for side in (self.local_blocks, self.remote_blocks)
            )
            if (
                parts
                and np.array_equal(near, parts[0].local_offsets)
                and np.array_equal(far, parts[0].remote_offsets)
            ):
                near, far = parts[0].local_offsets, parts[0].remote_offsets
            parts.append(Segments(region, region, size, near, far))
        return parts


def blocks_per_region(blocks: Blocks, pattern: Pattern, spread: int) -> int:
    """Return how many blocks of each region move; 0 if not even one run fits."""
    run = _run(pattern)
    return blocks.per_region // run // spread * run


def plan_move(blocks: Blocks, pattern: Pattern, spread: int, seed: int) -> Move:
    """Choose one of `spread` blocks in every region, in random order on both sides.

    Raise ValueError if not even one run fits.
    """
    random = np.random.default_rng(seed)
    run = _run(pattern)
    places = blocks.per_region // run
    moved = blocks_per_region(blocks, pattern, spread) // run
    if moved < 1:
        raise ValueError(
            f"{blocks.per_region} blocks in a region are too few for runs of {run}, spread over "
            f"{spread} times their size"
        )
    sides = []
    for _ in range(2):
        starts = random.permutation(places)[:moved] * run
        within = (starts[:, None] + np.arange(run)).ravel()
        sides.append(
            (np.arange(blocks.regions)[:, None] * blocks.per_region + within)
            .ravel()
            .astype(np.int64)
        )
    return Move(blocks, *sides)


def _run(pattern: Pattern) -> int:
    return 1 if pattern is Pattern.SCATTERED else RUN_BLOCKS
