"""A bounce buffer and its slots: registered memory that holds bytes between gather and scatter.

A slot belongs to one transfer, whose bytes are written into the slot cyclically: byte `b` of the
stream lies at `b % size_bytes` of the slot. `Slot`, `SlotTable` and `SegmentStream` are pure;
`SlotCopier` starts copies and is owned by the transport's thread.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kvferry.errors import LocalProtocolError
from kvferry.transports.copy.gather import AddressCopier, AddressCopies, CopyJob
from kvferry.transports.copy.segments import MAX_PLACES, Offsets

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


class Direction(Enum):
    GATHER = "from the blocks into the slot"
    SCATTER = "from the slot into the blocks"


# -- segment stream --
# The bytes of a transfer as a stream: all segments in a row, in the order of the plan. The two
# sides have the same stream, with different addresses for the segments.
#
# The stream computes which copies move a range of bytes into a slot or out of a slot. Nothing is
# computed for the whole transfer in advance, so that a long transfer starts as early as a short
# transfer.


class SegmentStream:
    """The segments known so far, in the order of the stream."""

    def __init__(self) -> None:
        self._starts = [0]
        """Where the segments of each region start in the stream, and the end of the stream."""
        self._segments: list[tuple[int, int, Offsets]] = []

    @property
    def total_bytes(self) -> int:
        return self._starts[-1]

    def append(self, address: int, segment_bytes: int, offsets: Offsets) -> None:
        """Append segments of one size at `address + offsets[i]`, which have been checked."""
        if len(offsets):
            self._segments.append((segment_bytes, address, offsets))
            self._starts.append(self.total_bytes + segment_bytes * len(offsets))

    def copies(
        self, start: int, end: int, slot: Slot, buffer_address: int, direction: Direction
    ) -> list[AddressCopies]:
        """Return the copies that move bytes `start` to `end` of the stream, sorted by size. Regions
        that share their offsets share a list of copies.
        """
        if not 0 <= start <= end <= self.total_bytes or end - start > slot.size_bytes:
            raise LocalProtocolError(
                f"bytes {start} to {end} of a bounce-buffer transfer of {self.total_bytes} do not "
                f"fit {slot}; this is a bug"
            )
        found: dict[tuple[int, int], tuple[Offsets, list[int], list[int]]] = {}
        for in_buffer, length in slot.places(start, end):
            at = buffer_address + in_buffer
            for size, address, offsets in self._cut(start, start + length):
                _, here, there = found.setdefault((size, id(offsets)), (offsets, [], []))
                here.append(address)
                there.append(at)
                at += size * len(offsets)
            start += length
        made = []
        for (size, _), (offsets, here, there) in found.items():
            in_a_row = np.arange(0, size * len(offsets), size, dtype=np.int64)
            for first in range(0, len(here), MAX_PLACES):
                sides = (
                    (offsets, tuple(here[first : first + MAX_PLACES])),
                    (in_a_row, tuple(there[first : first + MAX_PLACES])),
                )
                source, target = sides if direction is Direction.GATHER else sides[::-1]
                made.append(AddressCopies(size, source[0], target[0], source[1], target[1]))
        return sorted(made, key=lambda part: (part.size_bytes, part.num_rows))

    def _cut(self, start: int, end: int) -> Iterator[tuple[int, int, Offsets]]:
        """Yield groups of equal parts that cover bytes `start` to `end`, in order: size, address,
        offsets from that address. The first and the last may be a part of one segment.
        """
        index = bisect_right(self._starts, start) - 1
        while start < end:
            size, address, offsets = self._segments[index]
            nth, skipped = divmod(start - self._starts[index], size)
            until = min(len(offsets), (end - self._starts[index]) // size)
            if skipped or until <= nth:
                size, address, until = min(end - start, size - skipped), address + skipped, nth + 1
            # The array itself shows which regions share their offsets: take no view of all of it.
            yield size, address, offsets if until - nth == len(offsets) else offsets[nth:until]
            start += size * (until - nth)
            index += start == self._starts[index + 1]


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
class BounceBuffer:
    """The bounce buffer of this process, with the copier."""

    address: int
    size_bytes: int
    copier: AddressCopier
    chunk_bytes: int
    """Size of the first gather job.

    The other side is notified when a job is complete. Each job gathers as much as all earlier jobs
    together, so that a transfer starts early and a long transfer takes few ticks.
    """
    tick_bytes: int
    """Bytes that one tick starts to copy.

    Host memory is copied during the tick itself, so the limit is small there.
    """


@dataclass(slots=True, eq=False)
class SlotCopier:
    """The copies of one transfer. `started` and `done` count bytes of the stream."""

    bounce_buffer: BounceBuffer
    stream: SegmentStream
    slot: Slot
    direction: Direction
    granularity: int = 1
    started: int = 0
    done: int = 0
    _jobs: deque[tuple[int, CopyJob]] = field(default_factory=deque)

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def has_work(self, moved: int) -> bool:
        """Whether copies are active or can start, after NIXL has moved bytes up to `moved`."""
        return bool(self._jobs) or self.started < self._limit(moved)

    def collect(self) -> None:
        """Record completed copies. TransportError if the device has failed; then no copy is active
        any more.
        """
        try:
            while self._jobs and self._jobs[0][1].is_done():
                self.done = self._jobs.popleft()[0]
        except BaseException:
            self._jobs.clear()
            raise

    def advance(self, moved: int, total: int, *, may_start: bool) -> int:
        """Record completed copies, and start copies as far as one tick allows, after NIXL has moved
        bytes up to `moved`. Return the bytes started. TransportError as in `collect`.

        A small chunk waits for more bytes while earlier copies of the transfer are active.
        """
        self.collect()
        began, limit, largest = self.started, self._limit(moved), max_chunk_bytes(self.slot, total)
        buffer = self.bounce_buffer
        chunk_bytes = max(self.granularity, min(buffer.chunk_bytes, largest))
        tick_bytes = max(chunk_bytes, buffer.tick_bytes)
        while may_start and self.started - began < tick_bytes:
            most = tick_bytes
            if self.direction is Direction.GATHER:
                most = max(chunk_bytes, min(self.started, largest, tick_bytes))
                most = max(self.granularity, most - most % self.granularity)
            end = chunk_end(self.started, limit, most, self.granularity, total)
            if end <= self.started or (
                end - self.started < chunk_bytes and end < total and self._jobs
            ):
                break
            copies = self.stream.copies(
                self.started, end, self.slot, buffer.address, self.direction
            )
            self._jobs.append((end, buffer.copier.start(copies)))
            self.started = end
        self.collect()
        return self.started - began

    def _limit(self, moved: int) -> int:
        """Return the position up to which bytes may be copied: into the room that NIXL has emptied,
        or what NIXL has brought.
        """
        room = self.slot.size_bytes if self.direction is Direction.GATHER else 0
        return min(self.stream.total_bytes, moved + room)


def must_report(emptied: int, reported: int, total: int, room: int, *, is_waiting: bool) -> bool:
    """Whether a side that empties a slot of `room` bytes reports now how far it is.

    The other side needs the report to fill the slot again, or to complete the transfer. A transfer
    whose rest fits the slot is reported at the end only. Otherwise a quarter of the slot is
    reported at a time, or all when nothing more has arrived (`is_waiting`).
    """
    if emptied <= reported or emptied == total:
        return emptied > reported
    return reported + room < total and (4 * (emptied - reported) >= room or is_waiting)


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
