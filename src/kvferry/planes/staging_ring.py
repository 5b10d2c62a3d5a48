"""A staging ring and the windows in it: registered memory that transfers borrow for their bytes on the way.

Pure. A window belongs to one transfer; the bytes of the transfer go round in it: byte `b` of the stream lies at `b % size_bytes`.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.errors import LocalProtocolError

__all__ = ["WINDOW_ALIGNMENT", "Window", "WindowTable", "whole_grains"]

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

    def take(self, size_bytes: int) -> Window | None:
        """None, with nothing changed, while there is no such gap."""
        at = _aligned(self.first)
        for window in (*self._taken, Window(self.first + self.size_bytes, 0)):
            if window.first - at >= size_bytes > 0:
                taken = Window(at, size_bytes)
                insort(self._taken, taken)
                return taken
            at = _aligned(window.end)
        return None

    def take_share(self, wanted_bytes: int, grain: int, *, is_alone: bool) -> Window | None:
        """As much of these bytes as one transfer may have, in whole grains: three quarters when nobody else waits, else half, or the
        quarter that is left. Whoever does not give a window back shall not stop everybody."""
        quarter = self.size_bytes // 4 // WINDOW_ALIGNMENT * WINDOW_ALIGNMENT
        most = self.size_bytes - quarter if is_alone and quarter else max(1, self.size_bytes // 2)
        for share in (most, quarter or most):
            window = self.take(whole_grains(min(wanted_bytes, share), grain))
            if window is not None or wanted_bytes <= quarter:
                return window
        return None

    def give_back(self, window: Window) -> None:
        if window not in self._taken:
            raise LocalProtocolError(f"{window} of a staging ring is given back, but nobody has it; this is a bug")
        self._taken.remove(window)


def whole_grains(size_bytes: int, grain: int) -> int:
    """The most of these bytes that holds whole grains only; all of them when they are less than one."""
    return size_bytes - size_bytes % grain if size_bytes >= grain else size_bytes


def _aligned(offset: int) -> int:
    return -(-offset // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT
