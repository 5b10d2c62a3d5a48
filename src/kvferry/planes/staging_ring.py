"""A staging ring and the windows in it: registered memory that transfers borrow for their bytes on the way.

Pure. A window belongs to one transfer; the bytes of the transfer go round in it: byte `b` of the stream lies at `b % size_bytes`.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.errors import LocalProtocolError

__all__ = ["WINDOW_ALIGNMENT", "Window", "WindowTable", "fair_window", "whole_grains"]

WINDOW_ALIGNMENT = 4096
"""Windows begin at multiples of it, so that pieces keep the alignment that copies are fast with."""


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """A part of a ring, by its offset there."""

    first: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.first + self.size_bytes

    def places(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Where the bytes `start` to `end` of the stream lie: (offset in the ring, size), in order, cut where the window ends."""
        while start < end:
            at = start % self.size_bytes
            size = min(end - start, self.size_bytes - at)
            yield self.first + at, size
            start += size


class WindowTable:
    """Who has which part of a stretch of a ring. First fit; windows never overlap."""

    def __init__(self, first: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._first = first
        self._taken: list[Window] = []
        self._others: list[Window] = []
        """Those of a table whose stretch overlaps this one's."""
        self._is_downward = False

    @classmethod
    def two_of(cls, ring_bytes: int) -> tuple["WindowTable", "WindowTable"]:
        """Two tables for two users of one ring. Each has a quarter of the ring to itself, at either end, and what is between them belongs
        to whoever needs it: so neither can keep the other from going on, and one alone has three quarters."""
        quarter = max(1, ring_bytes // 4 // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT
        lower, upper = cls(0, ring_bytes - quarter), cls(quarter, ring_bytes - quarter)
        lower._others, upper._others, upper._is_downward = upper._taken, lower._taken, True
        return lower, upper

    @property
    def is_free(self) -> bool:
        return not self._taken

    def take(self, size_bytes: int, least_bytes: int | None = None, grain: int = 1) -> Window | None:
        """In the first gap that is large enough; else three quarters of the largest, so that something is left for the next, but at least
        `least_bytes`. Of whole grains where it can be. None, with nothing changed, while there is no gap for so much."""
        gaps = self._gaps()
        if self._is_downward:
            gaps.reverse()
        found = next((gap for gap in gaps if gap.size_bytes >= size_bytes), None) or max(gaps, key=lambda gap: gap.size_bytes, default=None)
        least_bytes = size_bytes if least_bytes is None else min(size_bytes, least_bytes)
        if size_bytes <= 0 or found is None or found.size_bytes < least_bytes:
            return None
        if found.size_bytes < size_bytes:
            size_bytes = max(least_bytes, found.size_bytes * 3 // 4)
        size_bytes = whole_grains(size_bytes, grain)
        first = (found.end - size_bytes) // WINDOW_ALIGNMENT * WINDOW_ALIGNMENT if self._is_downward else found.first
        taken = Window(first, size_bytes)
        insort(self._taken, taken)
        return taken

    def give_back(self, window: Window) -> None:
        if window not in self._taken:
            raise LocalProtocolError(f"{window} of a staging ring is given back, but nobody has it; this is a bug")
        self._taken.remove(window)

    def _gaps(self) -> list[Window]:
        gaps, at, end = [], _aligned(self._first), self._first + self.size_bytes
        for window in (*sorted(self._taken + self._others), Window(end, 0)):
            if min(window.first, end) > at:
                gaps.append(Window(at, min(window.first, end) - at))
            at = max(at, _aligned(window.end))
        return gaps


def fair_window(table_bytes: int) -> tuple[int, int]:
    """The most and the least that one transfer takes of so much: something is left for the next, and nobody begins with a crumb. Of one of
    two tables of a ring the least fits twice into the quarter that nobody else can take."""
    return max(1, table_bytes * 3 // 4), max(1, table_bytes // 12)


def whole_grains(size_bytes: int, grain: int) -> int:
    """The most of these bytes that holds whole grains only; all of them when they are less than one."""
    return size_bytes - size_bytes % grain if size_bytes >= grain else size_bytes


def _aligned(offset: int) -> int:
    return -(-offset // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT
