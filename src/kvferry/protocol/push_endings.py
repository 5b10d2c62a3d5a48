"""What of a push ended before its counterpart came: remembered for a while, so that nobody waits for nothing. Pure."""

from dataclasses import dataclass, field

from kvferry.protocol.deadlines import Deadlines
from kvferry.protocol.matching import MatchIndex, MatchKey

__all__ = ["MAX_TOMBSTONES", "PushTombstones"]

MAX_TOMBSTONES = 10_000
"""Of each kind. Of more, the oldest is forgotten: its counterpart then waits for its own deadline."""

Claimant = tuple[str, str]


@dataclass(slots=True)
class PushTombstones:
    """Prefills that are over, with the reason, and consumers that need nothing. Only those with a handover: a client that tries again with
    its old request id is not the one that was here before."""

    tombstone_ttl_s: float
    _over: MatchIndex[str] = field(default_factory=MatchIndex, init=False)
    _declined: MatchIndex[str] = field(default_factory=MatchIndex, init=False)
    _reasons: dict[str, str] = field(default_factory=dict, init=False)
    _expiry: Deadlines[str] = field(default_factory=Deadlines, init=False)
    _undated: dict[str, None] = field(default_factory=dict, init=False)
    """Their time counts from the next look at the clock."""

    def __len__(self) -> int:
        return len(self._over) + len(self._declined)

    def add_ended(self, name: MatchKey, reason: str, now: float | None = None) -> None:
        """Without `now`, it counts from the next `expire`."""
        if not name.match_id:
            return
        key = f"over {name.request}"
        self._over.add(key, name)
        self._reasons[key] = reason
        self._keep(key, self._over, now)

    def add_declined(self, registration_key: Claimant, name: MatchKey, now: float) -> None:
        if not name.match_id:
            return
        key = _key(registration_key)
        self._declined.add(key, name)
        self._keep(key, self._declined, now)

    def remove_declined(self, registration_key: Claimant) -> None:
        """Another of its readers has come after all."""
        self._forget(_key(registration_key))

    def end_reason(self, name: MatchKey) -> str | None:
        found = self._over.find_exactly(name)
        return self._reasons[found[0]] if found else None

    def is_declined(self, name: MatchKey) -> bool:
        """Whether all who would have come for it need nothing, however often it is computed."""
        return bool(self._declined.find_exactly(name))

    def expire(self, now: float) -> None:
        for key in self._undated:
            self._expiry.set(key, now + self.tombstone_ttl_s)
        self._undated.clear()
        for key in self._expiry.take_due(now):
            self._forget(key)

    def next_deadline(self) -> float | None:
        return self._expiry.next()

    def _keep(self, key: str, match_index: MatchIndex[str], now: float | None) -> None:
        if now is None:
            self._undated[key] = None
        else:
            self._expiry.set(key, now + self.tombstone_ttl_s)
        if len(match_index) > MAX_TOMBSTONES:
            self._forget(match_index.oldest)

    def _forget(self, key: str) -> None:
        self._over.drop(key)
        self._declined.drop(key)
        self._reasons.pop(key, None)
        self._expiry.drop(key)
        self._undated.pop(key, None)


def _key(registration_key: Claimant) -> str:
    return f"declined {registration_key[0]} {registration_key[1]}"
