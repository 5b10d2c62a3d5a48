"""A bounce buffer and the windows in it: registered memory that transfers borrow for their bytes on the way.

Pure. A window belongs to one transfer; the bytes of the transfer go round in it: byte `b` of the stream lies at `b % size_bytes`.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.errors import LocalProtocolError

__all__ = ["SLOT_ALIGNMENT", "Slot", "SlotTable", "fair_slot_bytes", "round_to_granularity"]

SLOT_ALIGNMENT = 4096
"""Windows begin at multiples of it, so that segments keep the alignment that copies are fast with."""


@dataclass(frozen=True, slots=True, order=True)
class Slot:
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
        """Two tables for two users of one ring. Each has a quarter of the ring to itself, at either end, and what is between them belongs
        to whoever needs it: so neither can keep the other from going on, and one alone has three quarters."""
        quarter = max(1, buffer_bytes // 4 // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        lower, upper = cls(0, buffer_bytes - quarter), cls(quarter, buffer_bytes - quarter)
        lower._others, upper._others, upper._is_downward = upper._taken, lower._taken, True
        return lower, upper

    @property
    def is_free(self) -> bool:
        return not self._taken

    def take(self, size_bytes: int, least_bytes: int | None = None, granularity: int = 1) -> Slot | None:
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
        size_bytes = round_to_granularity(size_bytes, granularity)
        first = (found.end - size_bytes) // SLOT_ALIGNMENT * SLOT_ALIGNMENT if self._is_downward else found.first
        taken = Slot(first, size_bytes)
        insort(self._taken, taken)
        return taken

    def release(self, slot: Slot) -> None:
        if slot not in self._taken:
            raise LocalProtocolError(f"{slot} of a bounce buffer is given back, but nobody has it; this is a bug")
        self._taken.remove(slot)

    def _gaps(self) -> list[Slot]:
        gaps, at, end = [], _aligned(self._first), self._first + self.size_bytes
        for slot in (*sorted(self._taken + self._others), Slot(end, 0)):
            if min(slot.first, end) > at:
                gaps.append(Slot(at, min(slot.first, end) - at))
            at = max(at, _aligned(slot.end))
        return gaps


def fair_slot_bytes(table_bytes: int) -> tuple[int, int]:
    """The most and the least that one transfer takes of so much: something is left for the next, and nobody begins with a crumb. Of one of
    two tables of a ring the least fits twice into the quarter that nobody else can take."""
    return max(1, table_bytes * 3 // 4), max(1, table_bytes // 12)


def round_to_granularity(size_bytes: int, granularity: int) -> int:
    """The most of these bytes that holds whole grains only; all of them when they are less than one."""
    return size_bytes - size_bytes % granularity if size_bytes >= granularity else size_bytes


def _aligned(offset: int) -> int:
    return -(-offset // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
