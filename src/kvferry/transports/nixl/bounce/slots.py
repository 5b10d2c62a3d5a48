"""A bounce buffer and the windows in it: registered memory that transfers borrow for their bytes on
the way.

Pure. A window belongs to one transfer; the bytes of the transfer go round in it: byte `b` of the
stream lies at `b % size_bytes`.
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

__all__ = [
    "SLOT_ALIGNMENT",
    "BounceBuffer",
    "CopyLimits",
    "RegionSegments",
    "SegmentStream",
    "Slot",
    "SlotCopier",
    "SlotTable",
    "chunk_end",
    "common_granularity",
    "fair_slot_bytes",
    "max_chunk_bytes",
    "round_to_granularity",
]


SLOT_ALIGNMENT = 4096
"""Windows begin at multiples of it, so that segments keep the alignment that copies are fast
with.
"""


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A part of a ring, by its offset there."""

    first: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.first + self.size_bytes

    def places(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Where the bytes `start` to `end` of the stream lie: (offset in the ring, size), in order,
        cut where the window ends.
        """
        while start < end:
            at = start % self.size_bytes
            size = min(end - start, self.size_bytes - at)
            yield self.first + at, size
            start += size


class SlotTable:
    """Who has which part of a stretch of a ring. First fit; windows never overlap."""

    def __init__(self, first: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._first = first
        self._taken: list[Slot] = []
        self._others: list[Slot] = []
        """Those of a table whose stretch overlaps this one's."""
        self._is_downward = False

    @classmethod
    def shared_pair(cls, buffer_bytes: int) -> tuple["SlotTable", "SlotTable"]:
        """Two tables for two users of one ring. Each has a quarter of the ring to itself, at either
        end, and what is between them belongs to whoever needs it: so neither can keep the other
        from going on, and one alone has three quarters.
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
        """In the first gap that is large enough; else three quarters of the largest, so that
        something is left for the next, but at least `least_bytes`. Of whole grains where it can be.
        None, with nothing changed, while there is no gap for so much.
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
                f"{slot} of a bounce buffer is given back, but nobody has it; this is a bug"
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
    """The most and the least that one transfer takes of so much: something is left for the next,
    and nobody begins with a crumb. Of one of two tables of a ring the least fits twice into the
    quarter that nobody else can take.
    """
    return max(1, table_bytes * 3 // 4), max(1, table_bytes // 12)


def round_to_granularity(size_bytes: int, granularity: int) -> int:
    """The most of these bytes that holds whole grains only; all of them when they are less than
    one.
    """
    return size_bytes - size_bytes % granularity if size_bytes >= granularity else size_bytes


def _aligned(offset: int) -> int:
    return -(-offset // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


# -------------------- staging stream -------------------- The bytes of a transfer as one stream:
# its segments in the order of the plan, one after the other. Each side has its own places for them.
#
# Pure. What moves is a stretch of the stream; this says which copies bring it from its places into
# a window, or out of it. Nothing is computed for the whole transfer beforehand, so that a long one
# begins as soon as a short one.


@dataclass(frozen=True, slots=True, eq=False)
class RegionSegments:
    """Segments of one size in one region of this process: `address + offsets[i]`. They have been
    checked.
    """

    address: int
    segment_bytes: int
    offsets: Offsets

    @property
    def total_bytes(self) -> int:
        return self.segment_bytes * len(self.offsets)

    def places(self, start: int, end: int) -> Iterator[tuple[int, int, Offsets]]:
        """The bytes `start` to `end` of this segment, in order: (size, address, offsets from there)
        of equal segments. The first and the last may be parts of one.
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
    """The segments known so far."""

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
        """The copies that bring these bytes of the stream into the window. Those of one size follow
        each other.
        """
        found = self._pairs(start, end, buffer_address, slot)
        return merge_by_offsets(
            (size, offsets, buffer_offsets, address, at, MAX_OFFSET, MAX_OFFSET)
            for size, address, offsets, at, buffer_offsets in found
        )

    def scattered(
        self, start: int, end: int, buffer_address: int, slot: Slot
    ) -> list[AddressCopies]:
        """The copies that bring these bytes of the stream from the window to their places. Those of
        one size follow each other.
        """
        found = self._pairs(start, end, buffer_address, slot)
        return merge_by_offsets(
            (size, buffer_offsets, offsets, at, address, MAX_OFFSET, MAX_OFFSET)
            for size, address, offsets, at, buffer_offsets in found
        )

    def _pairs(
        self, start: int, end: int, buffer_address: int, slot: Slot
    ) -> Iterator[tuple[int, int, Offsets, int, Offsets]]:
        """(size, address in memory, offsets from there, address in the ring, offsets from there) of
        equal copies.
        """
        if not 0 <= start <= end <= self.total_bytes or end - start > slot.size_bytes:
            raise LocalProtocolError(
                f"bytes {start} to {end} of a bounce-buffer transfer of {self.total_bytes} do not "
                f"fit {slot}; this is a bug"
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
    """What windows and stretches are best cut at, so that no segment is cut: the size of all
    segments. 1 where they differ or are large.
    """
    sizes = set(segment_sizes)
    size = sizes.pop() if len(sizes) == 1 else 1
    return size if size * 4 <= slot_bytes else 1


# -------------------- staging lane -------------------- Copies between a transfer's places and its
# window, in the order of the stream. Owned by the thread of its transport.


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """How much is done at a time."""

    chunk_bytes: int
    """What the first job gathers: the other side hears of it when it is complete. Each job gathers
    twice as much as the one before, so that a transfer begins early, and a long one costs few
    turns.
    """
    tick_bytes: int
    """What one turn begins to copy. Host memory is copied in the turn itself, so it is little
    there.
    """

    def within(self, most_bytes: int, granularity: int) -> "CopyLimits":
        """Chunks are at most so large, and a grain is never cut."""
        chunk_bytes = max(granularity, min(self.chunk_bytes, most_bytes))
        return CopyLimits(chunk_bytes, max(chunk_bytes, self.tick_bytes))


@dataclass(frozen=True, slots=True)
class BounceBuffer:
    """The ring of this process, and what copies from and to it."""

    address: int
    size_bytes: int
    copier: AddressCopier
    limits: CopyLimits


@dataclass(slots=True, eq=False)
class SlotCopier:
    """One transfer's copies. `started` and `done` count bytes of the stream."""

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
        """Take note of what is complete. TransportError when the device has failed; then nothing of
        it is under way any more.
        """
        try:
            while self._jobs and self._jobs[0][1].is_done():
                self.done = self._jobs.popleft()[0]
        except BaseException:
            self._jobs.clear()
            raise

    def advance(self, limit: int, total: int) -> int:
        """Begin to copy up to byte `limit`, as far as one turn goes: the bytes begun. Small
        segments wait for others, or for a lull.
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
    """What is done at once in a window at most: half of it where it is used again and again, so
    that one half is filled while the other is emptied.
    """
    return slot.size_bytes if total <= slot.size_bytes else max(1, slot.size_bytes // 2)


def chunk_end(start: int, limit: int, most: int, granularity: int, total: int) -> int:
    """Where a stretch of at most `most` bytes ends that begins at `start`: before `limit`, and
    between two grains or at the very end.
    """
    end = min(limit, start + most)
    return max(start, end if end == total else end - end % granularity)
