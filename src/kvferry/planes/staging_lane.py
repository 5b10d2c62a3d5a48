"""Copies between a transfer's places and its window, in the order of the stream. Owned by the thread of its plane."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.planes.address_copy import AddressCopier, AddressCopies, CopyJob
from kvferry.planes.staging_ring import Window
from kvferry.planes.staging_stream import Stream

__all__ = ["CopyLane", "StagingPace", "StagingRing", "share_of", "stretch_end"]


@dataclass(frozen=True, slots=True)
class StagingPace:
    """How much is done at a time."""

    chunk_bytes: int
    """What the first job gathers: the other side hears of it when it is complete. Each job gathers twice as much as the one before, so that
    a transfer begins early, and a long one costs few turns."""
    turn_bytes: int
    """What one turn begins to copy. Host memory is copied in the turn itself, so it is little there."""

    def within(self, most_bytes: int, grain: int) -> "StagingPace":
        """Chunks are at most so large, and a grain is never cut."""
        chunk_bytes = max(grain, min(self.chunk_bytes, most_bytes))
        return StagingPace(chunk_bytes, max(chunk_bytes, self.turn_bytes))


@dataclass(frozen=True, slots=True)
class StagingRing:
    """The ring of this process, and what copies from and to it."""

    address: int
    size_bytes: int
    copier: AddressCopier
    pace: StagingPace


@dataclass(slots=True, eq=False)
class CopyLane:
    """One transfer's copies. `started` and `done` count bytes of the stream."""

    ring: StagingRing
    stream: Stream
    window: Window
    is_gathering: bool
    grain: int = 1
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
        """Begin to copy up to byte `limit`, as far as one turn goes: the bytes begun. Small pieces wait for others, or for a lull."""
        largest = share_of(self.window, total)
        began, pace = self.started, self.ring.pace.within(largest, self.grain)
        while self.started - began < pace.turn_bytes:
            most = self._next_bytes(pace, largest) if self.is_gathering else pace.turn_bytes
            end = stretch_end(self.started, limit, most, self.grain, total)
            if end <= self.started or (end - self.started < pace.chunk_bytes and end < total and self._jobs):
                break
            self._start(end)
        return self.started - began

    def _next_bytes(self, pace: StagingPace, largest: int) -> int:
        grown = max(pace.chunk_bytes, min(self.started, largest, pace.turn_bytes))
        return max(self.grain, grown - grown % self.grain)

    def _start(self, end: int) -> None:
        cut: Callable[[int, int, int, Window], list[AddressCopies]]
        cut = self.stream.gathered if self.is_gathering else self.stream.scattered
        self._jobs.append((end, self.ring.copier.start(cut(self.started, end, self.ring.address, self.window))))
        self.started = end


def share_of(window: Window, total: int) -> int:
    """What is done at once in a window at most: half of it where it is used again and again, so that one half is filled while the other is
    emptied."""
    return window.size_bytes if total <= window.size_bytes else max(1, window.size_bytes // 2)


def stretch_end(start: int, limit: int, most: int, grain: int, total: int) -> int:
    """Where a stretch of at most `most` bytes ends that begins at `start`: before `limit`, and between two grains or at the very end."""
    end = min(limit, start + most)
    return max(start, end if end == total else end - end % grain)
