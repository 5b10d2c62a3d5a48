"""Copying pieces between two mapped regions, in slices, at the speed of memory.

Called by the thread that owns the plane. Neighbours on both sides are joined first. What is left is copied in the order of its source:
a processor reads ahead well only where addresses ascend; where the bytes are written hardly matters.
`kvferry bench transfer` shows what comes of it, beside memcpy.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvferry.planes.copiers import Copier
from kvferry.planes.runs import Bytes, Offsets, Runs, batches, coalesce
from kvferry.ports.data import Pieces

__all__ = ["SLICE_BYTES", "SLICE_COST", "Direction", "RegionCopy", "copy_in_slices"]

SLICE_BYTES = 16 * 1024 * 1024
"""What one slice copies at most: about a millisecond, so that no message waits for a transfer. Each empties the caches, so that whatever
the interpreter does between two slices is slow; there should be few."""

SLICE_COST = 128 * 1024
"""What a slice takes besides its bytes, in bytes that could have been copied meanwhile: some calls of the interpreter."""


class Direction(Enum):
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True, eq=False)
class RegionCopy:
    """One region's share of a transfer. The pieces have been checked against both regions."""

    pieces: Pieces
    local: Bytes
    remote: Bytes
    direction: Direction

    def ends(self) -> tuple[Bytes, Bytes]:
        """Target and source."""
        return (self.local, self.remote) if self.direction is Direction.READ else (self.remote, self.local)

    def cut(self) -> list[tuple[Runs, int]]:
        """Slices and their bytes: joined, with the source as their local side, and sorted by it."""
        pieces = self.pieces
        if self.direction is Direction.READ:
            pieces = Pieces(pieces.remote_region, pieces.local_region, pieces.piece_bytes, pieces.remote_offsets, pieces.local_offsets)
        runs = coalesce(pieces)
        return [(part, part.total_bytes) for part in batches(runs, SLICE_BYTES, max(1, len(runs)))]

    def is_cut_as(self, other: "RegionCopy") -> bool:
        """Whether the same places are copied, in another region."""
        ours, theirs = self.pieces, other.pieces
        return (
            (self.direction, ours.piece_bytes) == (other.direction, theirs.piece_bytes)
            and _are_same(ours.local_offsets, theirs.local_offsets)
            and _are_same(ours.remote_offsets, theirs.remote_offsets)
        )


def copy_in_slices(copies: Iterable[RegionCopy], copier: Copier) -> Iterator[tuple[int, int]]:
    """Copy one slice each time; yields its bytes and how many copies it took. Layers mostly move the same blocks: these are cut once."""
    last: RegionCopy | None = None
    parts: list[tuple[Runs, int]] = []
    for copy in copies:
        if last is None or not copy.is_cut_as(last):
            parts, last = copy.cut(), copy
        target, source = copy.ends()
        for runs, total_bytes in parts:
            copier(target, source, runs)
            yield total_bytes, len(runs)


def _are_same(first: Offsets, second: Offsets) -> bool:
    return first is second or np.array_equal(first, second)
