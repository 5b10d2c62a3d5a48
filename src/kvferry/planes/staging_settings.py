"""When transfers are staged, and with how much memory. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.planes.copy_table import alike
from kvferry.planes.runs import Offsets
from kvferry.planes.staging_wire import MAX_PIECES
from kvferry.ports.data import Pieces
from kvferry.types import MemoryKind

__all__ = ["StagingSettings", "is_fragmented"]

MIB = 1024 * 1024
BY_KIND = {
    MemoryKind.VRAM: (256 * 1024, 1024 * MIB, 64 * MIB),
    MemoryKind.DRAM: (0, 64 * MIB, 4 * MIB),
}
"""Piece, ring and chunk, in bytes. docs/decisions/037-staged-nixl.md has the measurements."""
RING_SHARE = 100
"""A ring that nobody has set a size for takes at most the hundredth part of its device."""
LEAST_RING_BYTES = 64 * 1024
"""A smaller one has hardly room for a window of each side: then nothing is staged."""
MIN_RUNS = 64
"""The two sides exchange some messages first: NIXL moves that many descriptors meanwhile."""
SAMPLED_RUNS, SAMPLED_PLANS = 256, 4
"""Regions mostly move the same blocks, and are then one plan."""


@dataclass(frozen=True, slots=True)
class StagingSettings:
    """None: by the kind of memory."""

    piece_bytes: int | None = None
    """Transfers whose runs are shorter on average are staged; 0: none."""
    ring_bytes: int | None = None
    """For our own transfers and for what is lent to peers: a quarter is kept for each, half is for whoever needs it."""
    chunk_bytes: int | None = None
    min_runs: int = MIN_RUNS
    """Fewer go plainly whatever their size."""

    def resolved(self, kind: MemoryKind, device_bytes: int | None = None) -> "ResolvedStaging":
        values = (self.piece_bytes, self.ring_bytes, self.chunk_bytes)
        piece, ring, chunk = (value if value is not None else default for value, default in zip(values, BY_KIND[kind], strict=True))
        if self.ring_bytes is None and device_bytes is not None:
            ring = min(ring, device_bytes // RING_SHARE // MIB * MIB)
        return ResolvedStaging(piece, ring, chunk, self.min_runs)


@dataclass(frozen=True, slots=True)
class ResolvedStaging:
    piece_bytes: int
    ring_bytes: int
    chunk_bytes: int
    min_runs: int

    @property
    def is_on(self) -> bool:
        return self.piece_bytes > 0 and self.ring_bytes >= LEAST_RING_BYTES


def is_fragmented(pieces: Sequence[Pieces], settings: ResolvedStaging) -> bool:
    """Whether NIXL would need many small descriptors. A guess from the first pieces of the largest plans: to look at all takes as long as
    to move them."""
    num_pieces = sum(len(part.local_offsets) for part in pieces)
    if not settings.min_runs <= num_pieces <= MAX_PIECES:
        return False
    seen_bytes = seen_runs = 0
    for same in sorted(alike(pieces), key=lambda same: -len(same) * same[0].total_bytes)[:SAMPLED_PLANS]:
        local, remote, size = same[0].local_offsets[:SAMPLED_RUNS], same[0].remote_offsets[:SAMPLED_RUNS], same[0].piece_bytes
        seen_runs += len(same) * (1 + _breaks(local, remote, size))
        seen_bytes += len(same) * len(local) * size
    share = seen_bytes / sum(part.total_bytes for part in pieces)
    return seen_runs / share >= settings.min_runs and seen_bytes < seen_runs * settings.piece_bytes


def _breaks(local: Offsets, remote: Offsets, piece_bytes: int) -> int:
    """How often a piece is no neighbour of the one before it, on either side of that."""
    steps = np.diff(local)
    joined = (steps == np.diff(remote)) & (np.abs(steps) == piece_bytes)
    return int(len(steps) - np.count_nonzero(joined))
