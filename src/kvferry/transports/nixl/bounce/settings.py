"""When transfers are staged, and with how much memory. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.transports.base import Segments
from kvferry.transports.copy.segments import Offsets
from kvferry.transports.copy.table import group_by_offsets
from kvferry.transports.nixl.bounce.messages import MAX_SEGMENTS
from kvferry.types import MemoryKind

__all__ = ["BounceSettings", "is_fragmented"]

MIB = 1024 * 1024
BY_KIND = {
    MemoryKind.VRAM: (256 * 1024, 1024 * MIB, 64 * MIB),
    MemoryKind.DRAM: (0, 64 * MIB, 4 * MIB),
}
"""Segment, ring and chunk, in bytes. docs/decisions/037-bounce-buffers.md has the measurements."""
BUFFER_SHARE = 100
"""A ring that nobody has set a size for takes at most the hundredth part of its device."""
MIN_BUFFER_BYTES = 64 * 1024
"""A smaller one has hardly room for a window of each side: then nothing is staged."""
MIN_DESCRIPTORS = 64
"""The two sides exchange some messages first: NIXL moves that many descriptors meanwhile."""
SAMPLED_SEGMENTS, SAMPLED_PLANS = 256, 4
"""Regions mostly move the same blocks, and are then one plan."""


@dataclass(frozen=True, slots=True)
class BounceSettings:
    """None: by the kind of memory."""

    segment_bytes: int | None = None
    """Transfers whose runs are shorter on average are staged; 0: none."""
    buffer_bytes: int | None = None
    """For our own transfers and for what is lent to peers: a quarter is kept for each, half is for
    whoever needs it.
    """
    chunk_bytes: int | None = None
    min_descriptors: int = MIN_DESCRIPTORS
    """Fewer go plainly whatever their size."""

    def resolved(
        self, kind: MemoryKind, device_bytes: int | None = None
    ) -> "ResolvedBounceSettings":
        values = (self.segment_bytes, self.buffer_bytes, self.chunk_bytes)
        segment, bounce_buffer, chunk = (
            value if value is not None else default
            for value, default in zip(values, BY_KIND[kind], strict=True)
        )
        if self.buffer_bytes is None and device_bytes is not None:
            bounce_buffer = min(bounce_buffer, device_bytes // BUFFER_SHARE // MIB * MIB)
        return ResolvedBounceSettings(segment, bounce_buffer, chunk, self.min_descriptors)


@dataclass(frozen=True, slots=True)
class ResolvedBounceSettings:
    segment_bytes: int
    buffer_bytes: int
    chunk_bytes: int
    min_descriptors: int

    @property
    def is_on(self) -> bool:
        return self.segment_bytes > 0 and self.buffer_bytes >= MIN_BUFFER_BYTES


def is_fragmented(segments: Sequence[Segments], settings: ResolvedBounceSettings) -> bool:
    """Whether NIXL would need many small descriptors. A guess from the first segments of the
    largest plans: to look at all takes as long as to move them.
    """
    num_segments = sum(len(part.local_offsets) for part in segments)
    if not settings.min_descriptors <= num_segments <= MAX_SEGMENTS:
        return False
    seen_bytes = seen_descriptors = 0
    for same in sorted(
        group_by_offsets(segments), key=lambda same: -len(same) * same[0].total_bytes
    )[:SAMPLED_PLANS]:
        local, remote, size = (
            same[0].local_offsets[:SAMPLED_SEGMENTS],
            same[0].remote_offsets[:SAMPLED_SEGMENTS],
            same[0].segment_bytes,
        )
        seen_descriptors += len(same) * (1 + _breaks(local, remote, size))
        seen_bytes += len(same) * len(local) * size
    share = seen_bytes / sum(part.total_bytes for part in segments)
    return (
        seen_descriptors / share >= settings.min_descriptors
        and seen_bytes < seen_descriptors * settings.segment_bytes
    )


def _breaks(local: Offsets, remote: Offsets, segment_bytes: int) -> int:
    """How often a segment is no neighbour of the one before it, on either side of that."""
    steps = np.diff(local)
    joined = (steps == np.diff(remote)) & (np.abs(steps) == segment_bytes)
    return int(len(steps) - np.count_nonzero(joined))
