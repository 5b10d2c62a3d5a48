"""Finds the counterpart of a leg by match id or by request id, and keeps tombstones: push requests
that ended before the other side arrived. Pure.
"""

import re
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvferry.protocol.heartbeats import Deadlines

K = TypeVar("K", bound=str | int | tuple[str, str])
# The random tail that an engine appends to a request id.
_TAIL = re.compile(r"-[0-9a-f]{8}\Z")


@dataclass(frozen=True, slots=True)
class MatchKey:
    """The ids by which one leg is matched."""

    request: str
    """Request id that the leg's engine uses."""
    match_id: str = ""
    """Match id of the leg's push ticket; empty if the leg has no push ticket."""

    @property
    def base(self) -> str:
        """The request id without the engine's random tail."""
        return _TAIL.sub("", self.request)

    @property
    def rules(self) -> tuple[tuple[str, str], ...]:
        """What to match by, the most exact first."""
        if self.match_id:
            return (("match id", self.match_id),)
        return (("request", self.request), ("base", self.base))


@dataclass(slots=True)
class MatchIndex(Generic[K]):
    """Entries that wait for their counterpart, indexed by the ids of their `MatchKey`."""

    _names: dict[K, MatchKey] = field(default_factory=dict, init=False)
    _by_rule: dict[tuple[str, str], dict[K, None]] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: K) -> bool:
        return key in self._names

    @property
    def oldest(self) -> K:
        return next(iter(self._names))

    def add(self, key: K, name: MatchKey) -> None:
        """Add an entry, or replace the ids of an entry with the same key."""
        self.drop(key)
        self._names[key] = name
        for rule in name.rules:
            self._by_rule.setdefault(rule, {})[key] = None

    def drop(self, key: K) -> None:
        """Remove an entry; an unknown key is ignored."""
        name = self._names.pop(key, None)
        for rule in () if name is None else name.rules:
            del self._by_rule[rule][key]
            if not self._by_rule[rule]:
                del self._by_rule[rule]

    def find(self, name: MatchKey) -> list[K]:
        """Return all matches of the first matching rule that finds any."""
        found = (self._by_rule[rule] for rule in name.rules if rule in self._by_rule)
        return list(next(found, ()))

    def find_exactly(self, name: MatchKey) -> list[K]:
        """Return all matches by match id or full request id, without the rule that drops tails."""
        return list(self._by_rule.get(name.rules[0], ()))


# -- tombstones --
# Tombstones for push requests that ended before the other side arrived.


MAX_TOMBSTONES = 10_000
"""Maximum number of tombstones of each kind. Beyond the maximum the oldest tombstone is dropped,
and its counterpart waits until the counterpart's own deadline.
"""


@dataclass(slots=True)
class Tombstones(Generic[K]):
    """Tombstones of one kind, each with a reason.

    Only legs with a match id leave a tombstone: by request id, a client's retry with the same id
    would find the tombstone of the first attempt.
    """

    lease_ttl_s: float
    _index: MatchIndex[K] = field(default_factory=MatchIndex, init=False)
    _reasons: dict[K, str] = field(default_factory=dict, init=False)
    _expiry: Deadlines[K] = field(default_factory=Deadlines, init=False)

    def __len__(self) -> int:
        return len(self._index)

    def add(self, key: K, name: MatchKey, reason: str, now: float) -> None:
        if not name.match_id:
            return
        self._index.add(key, name)
        self._reasons[key] = reason
        self._expiry.set(key, now + self.lease_ttl_s)
        if len(self._index) > MAX_TOMBSTONES:
            self.remove(self._index.oldest)

    def remove(self, key: K) -> None:
        """Remove a tombstone; an unknown key is ignored."""
        self._index.drop(key)
        self._reasons.pop(key, None)
        self._expiry.drop(key)

    def find(self, name: MatchKey) -> str | None:
        """Return the reason of the tombstone; None if there is none."""
        found = self._index.find_exactly(name)
        return self._reasons[found[0]] if found else None

    def expire(self, now: float) -> None:
        for key in self._expiry.take_due(now):
            self.remove(key)

    def next_deadline(self) -> float | None:
        return self._expiry.next()
