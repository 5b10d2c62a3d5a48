"""Copying pieces between two mapped regions, in slices, at the speed of memory.

Called by the thread that owns the plane. Neighbours on both sides are joined first. What is left is copied in the order of its source:
a processor reads ahead well only where addresses ascend; where the bytes are written hardly matters.
`kvferry bench transfer` shows what comes of it, beside memcpy.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from kvferry.planes.copiers import Copier
from kvferry.planes.runs import Bytes, Runs, batches, coalesce
from kvferry.ports.data import Pieces

__all__ = ["SLICE_BYTES", "Direction", "RegionCopy"]

SLICE_BYTES = 8 * 1024 * 1024
"""What one slice copies at most: about a millisecond, so that no message waits for a transfer."""


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
    copier: Copier

    def slices(self) -> Iterator[tuple[int, int]]:
        """Copy one slice each time; yields its bytes and how many copies it took."""
        target, source = (self.local, self.remote) if self.direction is Direction.READ else (self.remote, self.local)
        runs = self._from_source()
        for part in batches(runs, SLICE_BYTES, max(1, len(runs))):
            self.copier(target, source, part)
            yield part.total_bytes, len(part)

    def _from_source(self) -> Runs:
        """Joined, with the source as their local side, and sorted by it."""
        pieces = self.pieces
        if self.direction is Direction.WRITE:
            return coalesce(pieces)
        return coalesce(Pieces(pieces.remote_region, pieces.local_region, pieces.piece_bytes, pieces.remote_offsets, pieces.local_offsets))
