"""Finds the counterpart of a leg by match id or by request id, and keeps tombstones: push requests
that ended before the other side arrived. Pure.
"""

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvferry.protocol.heartbeats import Deadlines

K = TypeVar("K", bound=Hashable)
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


@dataclass(slots=True)
class MatchIndex(Generic[K]):
    """Entries that wait for their counterpart, indexed by the ids of their `MatchKey`."""

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
        """Add an entry, or replace the ids of an entry with the same key."""
        self.drop(key)
        self._names[key] = name
        for index, value in self._entries(name):
            index.setdefault(value, {})[key] = None

    def drop(self, key: K) -> None:
        """Remove an entry; an unknown key is ignored."""
        name = self._names.pop(key, None)
        if name is None:
            return
        for index, value in self._entries(name):
            del index[value][key]
            if not index[value]:
                del index[value]

    def find(self, name: MatchKey) -> list[K]:
        """Return all matches of the first matching rule that finds any."""
        return self.find_exactly(name) or (
            [] if name.match_id else list(self._by_base.get(name.base, ()))
        )

    def find_exactly(self, name: MatchKey) -> list[K]:
        """Return all matches by match id or full request id, without the rule that drops tails."""
        return list(
            self._by_match_id.get(name.match_id, ())
            if name.match_id
            else self._by_request.get(name.request, ())
        )

    def _entries(self, name: MatchKey) -> list[tuple[dict[str, dict[K, None]], str]]:
        if name.match_id:
            return [(self._by_match_id, name.match_id)]
        return [(self._by_request, name.request), (self._by_base, name.base)]


# -- tombstones --
# Tombstones for push requests that ended before the other side arrived.


MAX_TOMBSTONES = 10_000
"""Maximum number of tombstones of each kind. Beyond the maximum the oldest tombstone is dropped,
and its counterpart waits until the counterpart's own deadline.
"""

TombstoneKey = tuple[str, str]
"""Same form as `RegistrationKey`."""


@dataclass(slots=True)
class PushTombstones:
    """Tombstones of ended prefills, with the reason, and of consumers that need nothing.

    Only legs with a match id leave a tombstone: by request id, a client's retry with the same id
    would find the tombstone of the first attempt.
    """

    lease_ttl_s: float
    _over: MatchIndex[str] = field(default_factory=MatchIndex, init=False)
    _declined: MatchIndex[str] = field(default_factory=MatchIndex, init=False)
    _reasons: dict[str, str] = field(default_factory=dict, init=False)
    _expiry: Deadlines[str] = field(default_factory=Deadlines, init=False)

    def __len__(self) -> int:
        return len(self._over) + len(self._declined)

    def add_ended(self, name: MatchKey, reason: str, now: float) -> None:
        """Record why a prefill ended."""
        if not name.match_id:
            return
        key = f"over {name.request}"
        self._over.add(key, name)
        self._reasons[key] = reason
        self._keep(key, self._over, now)

    def add_declined(self, registration_key: TombstoneKey, name: MatchKey, now: float) -> None:
        """Record that no reader of this registration needs the prefill."""
        if not name.match_id:
            return
        key = _declined_key(registration_key)
        self._declined.add(key, name)
        self._keep(key, self._declined, now)

    def remove_declined(self, registration_key: TombstoneKey) -> None:
        """Remove the tombstone of a registration for which another reader has arrived."""
        self._forget(_declined_key(registration_key))

    def end_reason(self, name: MatchKey) -> str | None:
        found = self._over.find_exactly(name)
        return self._reasons[found[0]] if found else None

    def is_declined(self, name: MatchKey) -> bool:
        """Return whether no consumer needs this prefill, even if it is computed again."""
        return bool(self._declined.find_exactly(name))

    def expire(self, now: float) -> None:
        for key in self._expiry.take_due(now):
            self._forget(key)

    def next_deadline(self) -> float | None:
        return self._expiry.next()

    def _keep(self, key: str, match_index: MatchIndex[str], now: float) -> None:
        self._expiry.set(key, now + self.lease_ttl_s)
        if len(match_index) > MAX_TOMBSTONES:
            self._forget(match_index.oldest)

    def _forget(self, key: str) -> None:
        self._over.drop(key)
        self._declined.drop(key)
        self._reasons.pop(key, None)
        self._expiry.drop(key)


def _declined_key(registration_key: TombstoneKey) -> str:
    return f"declined {registration_key[0]} {registration_key[1]}"
