"""Copying segments between two mapped regions, in slices, at the speed of memory.

Called by the thread that owns the transport. Neighbours on both sides are joined first. What is left is copied in the order of its source:
a processor reads ahead well only where addresses ascend; where the bytes are written hardly matters.
`kvferry bench transfer` shows what comes of it, beside memcpy.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvferry.planes.copiers import Copier
from kvferry.planes.runs import Bytes, Descriptors, Offsets, batches, coalesce
from kvferry.ports.data import Segments

__all__ = ["SLICE_BYTES", "SLICE_COST", "CopyDirection", "RegionCopy", "copy_in_slices"]

SLICE_BYTES = 16 * 1024 * 1024
"""What one slice copies at most: about a millisecond, so that no message waits for a transfer. Each empties the caches, so that whatever
the interpreter does between two slices is slow; there should be few."""

SLICE_COST = 128 * 1024
"""What a slice takes besides its bytes, in bytes that could have been copied meanwhile: some calls of the interpreter."""


class CopyDirection(Enum):
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True, eq=False)
class RegionCopy:
    """One region's share of a transfer. The segments have been checked against both regions."""

    segments: Segments
    local: Bytes
    remote: Bytes
    direction: CopyDirection

    def ends(self) -> tuple[Bytes, Bytes]:
        """Target and source."""
        return (self.local, self.remote) if self.direction is CopyDirection.READ else (self.remote, self.local)

    def cut(self) -> list[tuple[Descriptors, int]]:
        """Slices and their bytes: joined, with the source as their local side, and sorted by it."""
        segments = self.segments
        if self.direction is CopyDirection.READ:
            segments = Segments(
                segments.remote_region, segments.local_region, segments.segment_bytes, segments.remote_offsets, segments.local_offsets
            )
        descriptors = coalesce(segments)
        return [(part, part.total_bytes) for part in batches(descriptors, SLICE_BYTES, max(1, len(descriptors)))]

    def is_cut_as(self, other: "RegionCopy") -> bool:
        """Whether the same places are copied, in another region."""
        ours, theirs = self.segments, other.segments
        return (
            (self.direction, ours.segment_bytes) == (other.direction, theirs.segment_bytes)
            and _are_same(ours.local_offsets, theirs.local_offsets)
            and _are_same(ours.remote_offsets, theirs.remote_offsets)
        )


def copy_in_slices(copies: Iterable[RegionCopy], copier: Copier) -> Iterator[tuple[int, int]]:
    """Copy one slice each time; yields its bytes and how many copies it took. Layers mostly move the same blocks: these are cut once."""
    last: RegionCopy | None = None
    parts: list[tuple[Descriptors, int]] = []
    for copy in copies:
        if last is None or not copy.is_cut_as(last):
            parts, last = copy.cut(), copy
        target, source = copy.ends()
        for descriptors, total_bytes in parts:
            copier(target, source, descriptors)
            yield total_bytes, len(descriptors)


def _are_same(first: Offsets, second: Offsets) -> bool:
    return first is second or np.array_equal(first, second)
