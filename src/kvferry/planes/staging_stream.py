"""The bytes of a transfer as one stream: its pieces in the order of the plan, one after the other. Each side has its own places for them.

Pure. What moves is a stretch of the stream; this says which copies bring it from its places into a window, or out of it. Nothing is
computed for the whole transfer beforehand, so that a long one begins as soon as a short one.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import LocalProtocolError
from kvferry.planes.address_copy import MAX_OFFSET, AddressCopies
from kvferry.planes.copy_table import together
from kvferry.planes.runs import Offsets
from kvferry.planes.staging_ring import Window

__all__ = ["Segment", "Stream", "common_grain"]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Pieces of one size in one region of this process: `address + offsets[i]`. They have been checked."""

    address: int
    piece_bytes: int
    offsets: Offsets

    @property
    def total_bytes(self) -> int:
        return self.piece_bytes * len(self.offsets)

    def places(self, start: int, end: int) -> Iterator[tuple[int, int, Offsets]]:
        """The bytes `start` to `end` of this segment, in order: (size, address, offsets from there) of equal pieces. The first and the last
        may be parts of one."""
        size = self.piece_bytes
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
class Stream:
    """The segments known so far."""

    total_bytes: int = 0
    _segments: list[Segment] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)

    def append(self, segment: Segment) -> None:
        if segment.total_bytes:
            self._segments.append(segment)
            self._starts.append(self.total_bytes)
            self.total_bytes += segment.total_bytes

    def gathered(self, start: int, end: int, ring_address: int, window: Window) -> list[AddressCopies]:
        """The copies that bring these bytes of the stream into the window. Those of one size follow each other."""
        found = self._pairs(start, end, ring_address, window)
        return together((size, offsets, ring, address, at, MAX_OFFSET, MAX_OFFSET) for size, address, offsets, at, ring in found)

    def scattered(self, start: int, end: int, ring_address: int, window: Window) -> list[AddressCopies]:
        """The copies that bring these bytes of the stream from the window to their places. Those of one size follow each other."""
        found = self._pairs(start, end, ring_address, window)
        return together((size, ring, offsets, at, address, MAX_OFFSET, MAX_OFFSET) for size, address, offsets, at, ring in found)

    def _pairs(self, start: int, end: int, ring_address: int, window: Window) -> Iterator[tuple[int, int, Offsets, int, Offsets]]:
        """(size, address in memory, offsets from there, address in the ring, offsets from there) of equal copies."""
        if not 0 <= start <= end <= self.total_bytes or end - start > window.size_bytes:
            raise LocalProtocolError(
                f"bytes {start} to {end} of a staged transfer of {self.total_bytes} do not fit {window}; this is a bug"
            )
        in_a_row: dict[tuple[int, int], Offsets] = {}
        """Of so many pieces of a size, one after the other: layers share them."""
        for at, length in window.places(start, end):
            for size, address, offsets in self._places(start, start + length):
                key = size, len(offsets)
                if key not in in_a_row:
                    in_a_row[key] = np.arange(0, size * len(offsets), size, dtype=np.int64)
                yield size, address, offsets, ring_address + at, in_a_row[key]
                at += size * len(offsets)
            start += length

    def _places(self, start: int, end: int) -> Iterator[tuple[int, int, Offsets]]:
        index = bisect_right(self._starts, start) - 1
        while start < end:
            segment, first = self._segments[index], self._starts[index]
            until = min(end, first + segment.total_bytes)
            yield from segment.places(start - first, until - first)
            start, index = until, index + 1


def common_grain(piece_sizes: Sequence[int], window_bytes: int) -> int:
    """What windows and stretches are best cut at, so that no piece is cut: the size of all pieces. 1 where they differ or are large."""
    sizes = set(piece_sizes)
    size = sizes.pop() if len(sizes) == 1 else 1
    return size if size * 4 <= window_bytes else 1
