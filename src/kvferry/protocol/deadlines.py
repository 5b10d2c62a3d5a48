"""When something is due for each of many things, without looking at all of them. Pure.

A heap with lazy removal: what was moved or dropped stays in it until it surfaces, or until there is more of that than of the rest.
"""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

__all__ = ["Deadlines"]

K = TypeVar("K", bound=str | int)
_MAX_STALE = 64
"""So many stale entries are always let be."""


@dataclass(slots=True)
class Deadlines(Generic[K]):
    _at: dict[K, float] = field(default_factory=dict, init=False)
    _heap: list[tuple[float, K]] = field(default_factory=list, init=False)

    def __len__(self) -> int:
        return len(self._at)

    @property
    def num_entries(self) -> int:
        """What is remembered, stale entries included: never much more than twice the deadlines there are."""
        return len(self._heap)

    def set(self, key: K, at: float) -> None:
        """The only deadline of this key, in place of an earlier one."""
        self._at[key] = at
        heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._at) + _MAX_STALE:
            self._heap = [(at, key) for key, at in self._at.items()]
            heapify(self._heap)

    def drop(self, key: K) -> None:
        """Unknown keys are ignored."""
        self._at.pop(key, None)

    def take_due(self, now: float) -> list[K]:
        """Remove and return every key whose time has come, earliest first."""
        due = []
        while (at := self.next()) is not None and at <= now:
            _, key = heappop(self._heap)
            del self._at[key]
            due.append(key)
        return due

    def next(self) -> float | None:
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None
