"""Copies between a transfer's places and its window, in the order of the stream. Owned by the thread of its transport."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.planes.address_copy import AddressCopier, AddressCopies, CopyJob
from kvferry.planes.staging_ring import Slot
from kvferry.planes.staging_stream import SegmentStream

__all__ = ["BounceBuffer", "CopyLimits", "SlotCopier", "chunk_end", "max_chunk_bytes"]


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """How much is done at a time."""

    chunk_bytes: int
    """What the first job gathers: the other side hears of it when it is complete. Each job gathers twice as much as the one before, so that
    a transfer begins early, and a long one costs few turns."""
    tick_bytes: int
    """What one turn begins to copy. Host memory is copied in the turn itself, so it is little there."""

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
        """Take note of what is complete. TransportError when the device has failed; then nothing of it is under way any more."""
        try:
            while self._jobs and self._jobs[0][1].is_done():
                self.done = self._jobs.popleft()[0]
        except BaseException:
            self._jobs.clear()
            raise

    def advance(self, limit: int, total: int) -> int:
        """Begin to copy up to byte `limit`, as far as one turn goes: the bytes begun. Small segments wait for others, or for a lull."""
        largest = max_chunk_bytes(self.slot, total)
        began, limits = self.started, self.bounce_buffer.limits.within(largest, self.granularity)
        while self.started - began < limits.tick_bytes:
            most = self._next_bytes(limits, largest) if self.is_gathering else limits.tick_bytes
            end = chunk_end(self.started, limit, most, self.granularity, total)
            if end <= self.started or (end - self.started < limits.chunk_bytes and end < total and self._jobs):
                break
            self._start(end)
        return self.started - began

    def _next_bytes(self, limits: CopyLimits, largest: int) -> int:
        grown = max(limits.chunk_bytes, min(self.started, largest, limits.tick_bytes))
        return max(self.granularity, grown - grown % self.granularity)

    def _start(self, end: int) -> None:
        cut: Callable[[int, int, int, Slot], list[AddressCopies]]
        cut = self.stream.gathered if self.is_gathering else self.stream.scattered
        self._jobs.append((end, self.bounce_buffer.copier.start(cut(self.started, end, self.bounce_buffer.address, self.slot))))
        self.started = end


def max_chunk_bytes(slot: Slot, total: int) -> int:
    """What is done at once in a window at most: half of it where it is used again and again, so that one half is filled while the other is
    emptied."""
    return slot.size_bytes if total <= slot.size_bytes else max(1, slot.size_bytes // 2)


def chunk_end(start: int, limit: int, most: int, granularity: int, total: int) -> int:
    """Where a stretch of at most `most` bytes ends that begins at `start`: before `limit`, and between two grains or at the very end."""
    end = min(limit, start + most)
    return max(start, end if end == total else end - end % granularity)
