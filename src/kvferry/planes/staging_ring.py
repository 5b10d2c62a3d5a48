"""A staging ring and the windows in it: registered memory that transfers borrow for their bytes on the way.

Pure. A window belongs to one transfer; the bytes of the transfer go round in it: byte `b` of the stream lies at `b % size_bytes`.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class WindowTable:
    """Who has which part of a ring. First fit; windows never overlap."""

    first: int
    size_bytes: int
    _taken: list[Window] = field(default_factory=list, init=False)

    @property
    def is_free(self) -> bool:
        return not self._taken

    def take(self, size_bytes: int, least_bytes: int | None = None, grain: int = 1) -> Window | None:
        """The first gap that is large enough; else the largest, if it holds `least_bytes`. Of whole grains where it can be. None, with
        nothing changed, while there is no such gap."""
        gaps = self._gaps()
        found = next((gap for gap in gaps if gap.size_bytes >= size_bytes), None) or max(gaps, key=lambda gap: gap.size_bytes, default=None)
        if size_bytes <= 0 or found is None or found.size_bytes < min(size_bytes, size_bytes if least_bytes is None else least_bytes):
            return None
        taken = Window(found.first, whole_grains(min(size_bytes, found.size_bytes), grain))
        insort(self._taken, taken)
        return taken

    def give_back(self, window: Window) -> None:
        if window not in self._taken:
            raise LocalProtocolError(f"{window} of a staging ring is given back, but nobody has it; this is a bug")
        self._taken.remove(window)

    def _gaps(self) -> list[Window]:
        gaps, at = [], _aligned(self.first)
        for window in (*self._taken, Window(self.first + self.size_bytes, 0)):
            if window.first > at:
                gaps.append(Window(at, window.first - at))
            at = _aligned(window.end)
        return gaps


def fair_window(table_bytes: int) -> tuple[int, int]:
    """The most and the least that one transfer takes of so much: something is left for the next, and nobody begins with a crumb."""
    return max(1, table_bytes * 3 // 4), max(1, table_bytes // 8)


def whole_grains(size_bytes: int, grain: int) -> int:
    """The most of these bytes that holds whole grains only; all of them when they are less than one."""
    return size_bytes - size_bytes % grain if size_bytes >= grain else size_bytes


def _aligned(offset: int) -> int:
    return -(-offset // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT
