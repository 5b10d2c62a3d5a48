"""A bounce buffer and its slots: registered memory that holds bytes between gather and scatter.

A slot belongs to one transfer, whose bytes are written into the slot cyclically: byte `b` of the
stream lies at `b % size_bytes` of the slot. `Slot`, `SlotTable` and `SegmentStream` are pure;
`SlotCopier` starts copies and is owned by the transport's thread.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import LocalProtocolError
from kvferry.transports.copy.gather import MAX_OFFSET, AddressCopier, AddressCopies, CopyJob
from kvferry.transports.copy.segments import Offsets
from kvferry.transports.copy.table import merge_by_offsets

SLOT_ALIGNMENT = 4096
"""Slots start at multiples of this, so that segments keep the alignment that makes copies fast."""


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A part of a bounce buffer, by offset."""

    first: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.first + self.size_bytes

    def places(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield where bytes `start` to `end` of the stream lie: (offset in the buffer, size).

        In order, and cut where the slot wraps.
        """
        while start < end:
            at = start % self.size_bytes
            size = min(end - start, self.size_bytes - at)
            yield self.first + at, size
            start += size


class SlotTable:
    """The allocated slots in a range of a bounce buffer. First fit; slots never overlap."""

    def __init__(self, first: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._first = first
        self._taken: list[Slot] = []
        self._others: list[Slot] = []
        """Slots of the other table, whose range overlaps the range of this table."""
        self._is_downward = False

    @classmethod
    def shared_pair(cls, buffer_bytes: int) -> tuple["SlotTable", "SlotTable"]:
        """Return two tables for the two users of one bounce buffer.

            0         1/4        1/2        3/4         1
            ├── lower table ─────────────────┤
                       ├── upper table ─────────────────┤

        Each table has a quarter to itself, at either end, and both may use the half in the middle.
        So neither user can block the other, and a single user has three quarters.
        """
        quarter = max(1, buffer_bytes // 4 // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        lower, upper = cls(0, buffer_bytes - quarter), cls(quarter, buffer_bytes - quarter)
        lower._others, upper._others, upper._is_downward = upper._taken, lower._taken, True
        return lower, upper

    @property
    def is_free(self) -> bool:
        return not self._taken

    def take(
        self, size_bytes: int, least_bytes: int | None = None, granularity: int = 1
    ) -> Slot | None:
        """Allocate a slot in the first gap that is large enough.

        If no gap is large enough, the slot takes three quarters of the largest gap, so that room is
        left for the next transfer, but at least `least_bytes`. The size is a multiple of
        `granularity` where possible. None, with nothing changed, if no gap has `least_bytes`.
        """
        gaps = self._gaps()
        if self._is_downward:
            gaps.reverse()
        found = next((gap for gap in gaps if gap.size_bytes >= size_bytes), None) or max(
            gaps, key=lambda gap: gap.size_bytes, default=None
        )
        least_bytes = size_bytes if least_bytes is None else min(size_bytes, least_bytes)
        if size_bytes <= 0 or found is None or found.size_bytes < least_bytes:
            return None
        if found.size_bytes < size_bytes:
            size_bytes = max(least_bytes, found.size_bytes * 3 // 4)
        size_bytes = round_to_granularity(size_bytes, granularity)
        # The upper table allocates from the end of the buffer, so that the shared half fills from
        # both sides.
        first = (
            (found.end - size_bytes) // SLOT_ALIGNMENT * SLOT_ALIGNMENT
            if self._is_downward
            else found.first
        )
        taken = Slot(first, size_bytes)
        insort(self._taken, taken)
        return taken

    def release(self, slot: Slot) -> None:
        if slot not in self._taken:
            raise LocalProtocolError(
                f"{slot} of a bounce buffer is released, but is not allocated; this is a bug"
            )
        self._taken.remove(slot)

    def _gaps(self) -> list[Slot]:
        gaps, at, end = [], _aligned(self._first), self._first + self.size_bytes
        for slot in (*sorted(self._taken + self._others), Slot(end, 0)):
            if min(slot.first, end) > at:
                gaps.append(Slot(at, min(slot.first, end) - at))
            at = max(at, _aligned(slot.end))
        return gaps


def fair_slot_bytes(table_bytes: int) -> tuple[int, int]:
    """Return the most and the least bytes that one transfer takes of a table of this size.

    The upper bound leaves room for the next transfer; the lower bound avoids tiny slots. In a table
    of a shared pair, the least fits at least twice into the table's own quarter.
    """
    return max(1, table_bytes * 3 // 4), max(1, table_bytes // 12)


def round_to_granularity(size_bytes: int, granularity: int) -> int:
    """Round down to a multiple of `granularity`; smaller sizes are returned unchanged."""
    return size_bytes - size_bytes % granularity if size_bytes >= granularity else size_bytes


def _aligned(offset: int) -> int:
    return -(-offset // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


# -- segment stream --
# The bytes of a transfer as a stream: all segments in a row, in the order of the plan. The two
# sides have the same stream, with different addresses for the segments.
#
# The stream computes which copies move a range of bytes into a slot or out of a slot. Nothing is
# computed for the whole transfer in advance, so that a long transfer starts as early as a short
# transfer.


@dataclass(frozen=True, slots=True, eq=False)
class RegionSegments:
    """Segments of one size in one local region, at `address + offsets[i]`, already checked."""

    address: int
    segment_bytes: int
    offsets: Offsets

    @property
    def total_bytes(self) -> int:
        return self.segment_bytes * len(self.offsets)

    def places(self, start: int, end: int) -> Iterator[tuple[int, int, Offsets]]:
        """Yield groups of equal parts that cover bytes `start` to `end` of these segments, in
        order.

        Each group is (size, address, offsets from that address). The first and the last group may
        be a part of one segment.
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
            yield (
                size,
                self.address,
                self.offsets[index:last] if last - index < len(self.offsets) else self.offsets,
            )
        if start < end and rest:
            yield rest, self.address, self.offsets[last : last + 1]


@dataclass(slots=True)
class SegmentStream:
    """The segments known so far, in the order of the stream."""

    total_bytes: int = 0
    _region_segments: list[RegionSegments] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)

    def append(self, region_segments: RegionSegments) -> None:
        if region_segments.total_bytes:
            self._region_segments.append(region_segments)
            self._starts.append(self.total_bytes)
            self.total_bytes += region_segments.total_bytes

    def gathered(
        self, start: int, end: int, buffer_address: int, slot: Slot
    ) -> list[AddressCopies]:
        """Return the copies that move a range of the stream into the slot, grouped by size."""
        found = self._pairs(start, end, buffer_address, slot)
        return merge_by_offsets(
            (size, offsets, buffer_offsets, address, at, MAX_OFFSET, MAX_OFFSET)
            for size, address, offsets, at, buffer_offsets in found
        )

    def scattered(
        self, start: int, end: int, buffer_address: int, slot: Slot
    ) -> list[AddressCopies]:
        """Return the copies that move a range of the stream out of the slot, grouped by size."""
        found = self._pairs(start, end, buffer_address, slot)
        return merge_by_offsets(
            (size, buffer_offsets, offsets, at, address, MAX_OFFSET, MAX_OFFSET)
            for size, address, offsets, at, buffer_offsets in found
        )

    def _pairs(
        self, start: int, end: int, buffer_address: int, slot: Slot
    ) -> Iterator[tuple[int, int, Offsets, int, Offsets]]:
        """Yield groups of equal copies.

        Each is (size, address in memory, offsets from there, address in the bounce buffer, offsets
        from there).
        """
        if not 0 <= start <= end <= self.total_bytes or end - start > slot.size_bytes:
            raise LocalProtocolError(
                f"bytes {start} to {end} of a bounce-buffer transfer of {self.total_bytes} do not "
                f"fit {slot}; this is a bug"
            )
        in_a_row: dict[tuple[int, int], Offsets] = {}
        """Offsets of consecutive segments, by segment size and count; layers share the arrays."""
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
    """Return the size at which slots and chunks are best cut, so that no segment is cut.

    This is the size of all segments, or 1 if the sizes differ or are large for the slot.
    """
    sizes = set(segment_sizes)
    size = sizes.pop() if len(sizes) == 1 else 1
    return size if size * 4 <= slot_bytes else 1


# -- slot copier --
# Copies between the blocks and the slot of a transfer, in the order of the stream. Owned by the
# thread of the transport.


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """How many bytes are copied at a time."""

    chunk_bytes: int
    """Size of the first gather job.

    The other side is notified when a job is complete. Each job gathers as much as all earlier jobs
    together, so that a transfer starts early and a long transfer takes few ticks.
    """
    tick_bytes: int
    """Bytes that one tick starts to copy.

    Host memory is copied during the tick itself, so the limit is small there.
    """

    def within(self, most_bytes: int, granularity: int) -> "CopyLimits":
        """Limit chunks to `most_bytes`, but never below the granularity."""
        chunk_bytes = max(granularity, min(self.chunk_bytes, most_bytes))
        return CopyLimits(chunk_bytes, max(chunk_bytes, self.tick_bytes))


@dataclass(frozen=True, slots=True)
class BounceBuffer:
    """The bounce buffer of this process, with the copier."""

    address: int
    size_bytes: int
    copier: AddressCopier
    limits: CopyLimits


@dataclass(slots=True, eq=False)
class SlotCopier:
    """The copies of one transfer. `started` and `done` count bytes of the stream."""

    bounce_buffer: BounceBuffer
    stream: SegmentStream
    slot: Slot
    is_gathering: bool
    granularity: int = 1
    started: int = 0
    done: int = 0
    _jobs: deque[tuple[int, CopyJob]] = field(default_factory=deque)

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def collect(self) -> None:
        """Record completed copies. TransportError if the device has failed; then no copy runs any
        more.
        """
        try:
            while self._jobs and self._jobs[0][1].is_done():
                self.done = self._jobs.popleft()[0]
        except BaseException:
            self._jobs.clear()
            raise

    def advance(self, limit: int, total: int) -> int:
        """Start copies up to byte `limit`, as far as one tick allows; return the bytes started.

        A small chunk waits for more bytes while earlier copies of the transfer run.
        """
        largest = max_chunk_bytes(self.slot, total)
        began, limits = self.started, self.bounce_buffer.limits.within(largest, self.granularity)
        while self.started - began < limits.tick_bytes:
            most = self._next_bytes(limits, largest) if self.is_gathering else limits.tick_bytes
            end = chunk_end(self.started, limit, most, self.granularity, total)
            if end <= self.started or (
                end - self.started < limits.chunk_bytes and end < total and self._jobs
            ):
                break
            self._start(end)
        return self.started - began

    def _next_bytes(self, limits: CopyLimits, largest: int) -> int:
        grown = max(limits.chunk_bytes, min(self.started, largest, limits.tick_bytes))
        return max(self.granularity, grown - grown % self.granularity)

    def _start(self, end: int) -> None:
        cut: Callable[[int, int, int, Slot], list[AddressCopies]]
        cut = self.stream.gathered if self.is_gathering else self.stream.scattered
        self._jobs.append(
            (
                end,
                self.bounce_buffer.copier.start(
                    cut(self.started, end, self.bounce_buffer.address, self.slot)
                ),
            )
        )
        self.started = end


def max_chunk_bytes(slot: Slot, total: int) -> int:
    """Return the most bytes handled at once in a slot.

    If the transfer is longer than the slot, this is half of the slot, so that one half is filled
    while the second half is emptied.
    """
    return slot.size_bytes if total <= slot.size_bytes else max(1, slot.size_bytes // 2)


def chunk_end(start: int, limit: int, most: int, granularity: int, total: int) -> int:
    """Return the end of a chunk of at most `most` bytes from `start`.

    The chunk ends at `limit` or before, at a multiple of the granularity or at the end of the
    stream.
    """
    end = min(limit, start + most)
    return max(start, end if end == total else end - end % granularity)
