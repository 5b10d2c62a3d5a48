"""The bytes of a transfer as one stream: its segments in the order of the plan, one after the other. Each side has its own places for them.

Pure. What moves is a stretch of the stream; this says which copies bring it from its places into a window, or out of it. Nothing is
computed for the whole transfer beforehand, so that a long one begins as soon as a short one.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import LocalProtocolError
from kvferry.planes.address_copy import MAX_OFFSET, AddressCopies
from kvferry.planes.copy_table import merge_by_offsets
from kvferry.planes.runs import Offsets
from kvferry.planes.staging_ring import Slot

__all__ = ["RegionSegments", "SegmentStream", "common_granularity"]


@dataclass(frozen=True, slots=True, eq=False)
class RegionSegments:
    """Segments of one size in one region of this process: `address + offsets[i]`. They have been checked."""

    address: int
    segment_bytes: int
    offsets: Offsets

    @property
    def total_bytes(self) -> int:
        return self.segment_bytes * len(self.offsets)

    def places(self, start: int, end: int) -> Iterator[tuple[int, int, Offsets]]:
        """The bytes `start` to `end` of this segment, in order: (size, address, offsets from there) of equal segments. The first and the
        last may be parts of one.
        """
        size = self.segment_bytes
        index, skipped = divmod(start, size)
        if skipped:
            part = min(end - start, size - skipped)
            yield part, self.address + skipped, self.offsets[index : index + 1]
            start += part
            index += 1
        last, rest = divmod(end, size)
        if start < end and last > index:
            yield size, self.address, self.offsets[index:last] if last - index < len(self.offsets) else self.offsets
        if start < end and rest:
            yield rest, self.address, self.offsets[last : last + 1]


@dataclass(slots=True)
class SegmentStream:
    """The segments known so far."""

    total_bytes: int = 0
    _region_segments: list[RegionSegments] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)

    def append(self, region_segments: RegionSegments) -> None:
        if region_segments.total_bytes:
            self._region_segments.append(region_segments)
            self._starts.append(self.total_bytes)
            self.total_bytes += region_segments.total_bytes

    def gathered(self, start: int, end: int, buffer_address: int, slot: Slot) -> list[AddressCopies]:
        """The copies that bring these bytes of the stream into the window. Those of one size follow each other."""
        found = self._pairs(start, end, buffer_address, slot)
        return merge_by_offsets(
            (size, offsets, buffer_offsets, address, at, MAX_OFFSET, MAX_OFFSET) for size, address, offsets, at, buffer_offsets in found
        )

    def scattered(self, start: int, end: int, buffer_address: int, slot: Slot) -> list[AddressCopies]:
        """The copies that bring these bytes of the stream from the window to their places. Those of one size follow each other."""
        found = self._pairs(start, end, buffer_address, slot)
        return merge_by_offsets(
            (size, buffer_offsets, offsets, at, address, MAX_OFFSET, MAX_OFFSET) for size, address, offsets, at, buffer_offsets in found
        )

    def _pairs(self, start: int, end: int, buffer_address: int, slot: Slot) -> Iterator[tuple[int, int, Offsets, int, Offsets]]:
        """(size, address in memory, offsets from there, address in the ring, offsets from there) of equal copies."""
        if not 0 <= start <= end <= self.total_bytes or end - start > slot.size_bytes:
            raise LocalProtocolError(
                f"bytes {start} to {end} of a bounce-buffer transfer of {self.total_bytes} do not fit {slot}; this is a bug"
            )
        in_a_row: dict[tuple[int, int], Offsets] = {}
        """Of so many segments of a size, one after the other: layers share them."""
        for at, length in slot.places(start, end):
            for size, address, offsets in self._places(start, start + length):
                key = size, len(offsets)
                if key not in in_a_row:
                    in_a_row[key] = np.arange(0, size * len(offsets), size, dtype=np.int64)
                yield size, address, offsets, buffer_address + at, in_a_row[key]
                at += size * len(offsets)
            start += length

    def _places(self, start: int, end: int) -> Iterator[tuple[int, int, Offsets]]:
        index = bisect_right(self._starts, start) - 1
        while start < end:
            region_segments, first = self._region_segments[index], self._starts[index]
            until = min(end, first + region_segments.total_bytes)
            yield from region_segments.places(start - first, until - first)
            start, index = until, index + 1


def common_granularity(segment_sizes: Sequence[int], slot_bytes: int) -> int:
    """What windows and stretches are best cut at, so that no segment is cut: the size of all segments. 1 where they differ or are large."""
    sizes = set(segment_sizes)
    size = sizes.pop() if len(sizes) == 1 else 1
    return size if size * 4 <= slot_bytes else 1
