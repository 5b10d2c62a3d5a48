"""Which registration and which finished prefill belong to one request, whichever comes first. Pure.

By the match id of their push ticket: it is nobody else's, so what has one matches only what has the same. Where neither has one
(behind a router that signs nothing) by equal request ids; else by request ids without the random tail that each engine appends, because
a router hands the same X-Request-Id to both legs. But clients choose those, and choose the same again. What matches more than one thing
is the caller's to refuse: a guess would hand one request's KV to another.
"""

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["MatchIndex", "MatchKey"]

K = TypeVar("K", bound=Hashable)
_TAIL = re.compile(r"-[0-9a-f]{8}\Z")


@dataclass(frozen=True, slots=True)
class MatchKey:
    """What one leg is known by."""

    request: str
    """Its engine's own id."""
    match_id: str = ""
    """Of its push ticket; empty: it has none."""

    @property
    def base(self) -> str:
        return _TAIL.sub("", self.request)


@dataclass(slots=True)
class MatchIndex(Generic[K]):
    """Things that wait for their counterpart, found by its name without looking at all of them."""

    _names: dict[K, MatchKey] = field(default_factory=dict, init=False)
    _by_match_id: dict[str, dict[K, None]] = field(default_factory=dict, init=False)
    _by_request: dict[str, dict[K, None]] = field(default_factory=dict, init=False)
    _by_base: dict[str, dict[K, None]] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: K) -> bool:
        return key in self._names

    @property
    def oldest(self) -> K:
        return next(iter(self._names))

    def add(self, key: K, name: MatchKey) -> None:
        """In place of what it was known by before."""
        self.drop(key)
        self._names[key] = name
        for index, value in self._entries(name):
            index.setdefault(value, {})[key] = None

    def drop(self, key: K) -> None:
        """Unknown keys are ignored."""
        name = self._names.pop(key, None)
        if name is None:
            return
        for index, value in self._entries(name):
            del index[value][key]
            if not index[value]:
                del index[value]

    def find(self, name: MatchKey) -> list[K]:
        """All that match at the first step at which any does."""
        return self.find_exactly(name) or ([] if name.match_id else list(self._by_base.get(name.base, ())))

    def find_exactly(self, name: MatchKey) -> list[K]:
        """The same without the step that ignores tails."""
        return list(self._by_match_id.get(name.match_id, ()) if name.match_id else self._by_request.get(name.request, ()))

    def _entries(self, name: MatchKey) -> list[tuple[dict[str, dict[K, None]], str]]:
        if name.match_id:
            return [(self._by_match_id, name.match_id)]
        return [(self._by_request, name.request), (self._by_base, name.base)]
