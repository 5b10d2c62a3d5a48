"""Deadlines of many keys, and the heartbeats that a consumer sends to its producers.

`Deadlines` returns the keys that are due without examining the other keys. `HeartbeatSchedule`
decides which peer is due a heartbeat, for which leases, and which peers have stopped answering.
Pure: the caller passes `now` (local monotonic seconds).
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from kvferry.types import RequestId

K = TypeVar("K", bound=str | int | tuple[str, str])
_MAX_STALE = 64
"""Up to this many stale entries of a heap are handled one by one; beyond that it is rebuilt."""


def earliest(*deadlines: float | None) -> float | None:
    """Return the earliest of several deadlines, each of which may be unset."""
    return min((at for at in deadlines if at is not None), default=None)


@dataclass(slots=True)
class Deadlines(Generic[K]):
    """One deadline per key, in a heap with lazy removal.

    An entry whose deadline was moved or dropped stays in the heap until the entry reaches the top,
    or until stale entries outnumber the live entries. `extend` does not touch the heap: the entry
    moves when it is due (docs/decisions/019-many-leases.md).
    """

    _at: dict[K, float] = field(default_factory=dict, init=False)
    """The time of each key's live entry."""
    _extended: dict[K, float] = field(default_factory=dict, init=False)
    """Deadlines that are later than the live entry."""
    _heap: list[tuple[float, K]] = field(default_factory=list, init=False)

    def __len__(self) -> int:
        return len(self._at)

    @property
    def num_entries(self) -> int:
        """Size of the heap, stale entries included: at most about twice the deadlines."""
        return len(self._heap)

    def get(self, key: K) -> float | None:
        return self._extended.get(key, self._at.get(key))

    def set(self, key: K, at: float) -> None:
        """Set the deadline of a key; replaces an earlier deadline of the same key."""
        self._extended.pop(key, None)
        self._at[key] = at
        heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._at) + _MAX_STALE:
            self._rebuild()

    def extend(self, keys: Iterable[K], until: float) -> None:
        """Move each deadline to `until`, if that is later. Keys without deadline are ignored."""
        entries, extended = self._at, self._extended
        for key in keys:
            if extended.get(key, entries.get(key, until)) < until:
                extended[key] = until

    def drop(self, key: K) -> None:
        """Remove the deadline of a key. Unknown keys are ignored."""
        self._at.pop(key, None)
        self._extended.pop(key, None)

    def take_due(self, now: float) -> list[K]:
        """Remove and return every key whose deadline has passed, earliest first."""
        due, num_extended = [], 0
        while (at := self.next()) is not None and at <= now:
            _, key = heappop(self._heap)
            extended = self._extended.pop(key, at)
            if extended > at:
                self.set(key, extended)
                num_extended += 1
                # One heartbeat renews many leases, so if some entries are extended, most are.
                if num_extended == _MAX_STALE:
                    self._rebuild()
                continue
            del self._at[key]
            due.append(key)
        return due

    def next(self) -> float | None:
        """Return the earliest deadline, or an earlier time if deadlines were extended; None if
        there is none.
        """
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _rebuild(self) -> None:
        self._at |= self._extended
        self._extended.clear()
        self._heap = [(at, key) for key, at in self._at.items()]
        heapify(self._heap)


# -- heartbeats --
# One heartbeat renews all leases that a consumer holds from a peer. The interval is derived from
# the producer's lease time, which the ticket carries, so both sides may have different settings.


READ_BEGINS = 0
"""Beat number of a heartbeat that announces a read. Regular heartbeats count from 1."""

P = TypeVar("P", bound=Hashable)


def heartbeat_interval_s(lease_ttl_s: float) -> float:
    """Return a sixth of the lease time, rounded down to whole seconds if at least one second."""
    return float(lease_ttl_s // 6) if lease_ttl_s >= 6 else lease_ttl_s / 6


@dataclass(frozen=True, slots=True)
class DueHeartbeat(Generic[P]):
    """A heartbeat to send now: the peer, the beat number and the leases to renew."""

    peer: P
    number: int
    leases: list[RequestId]


@dataclass(slots=True)
class _PeerState:
    """Heartbeats to one peer: the interval, the leases and the oldest unanswered beat."""

    interval_s: float
    next_at: float
    leases: dict[RequestId, int] = field(default_factory=dict)
    """Lease -> how many of our requests read under the lease."""
    number: int = 0
    """Number of the last regular beat."""
    unanswered_since: float | None = None
    """When the oldest unanswered beat was sent; None if the peer has answered the last beat."""


@dataclass(slots=True)
class HeartbeatSchedule(Generic[P]):
    """Heartbeats to every peer from which we hold leases.

    A peer is lost when the peer has not answered for `max_unanswered` intervals.
    """

    max_unanswered: int = 3
    _peer_states: dict[P, _PeerState] = field(default_factory=dict, init=False)

    def track(self, peer: P, lease: RequestId, interval_s: float, now: float) -> None:
        """Renew a lease from now on, on behalf of one more of our requests."""
        peer_state = self._peer_states.get(peer)
        if peer_state is None:
            peer_state = self._peer_states[peer] = _PeerState(interval_s, now + interval_s)
        peer_state.interval_s = min(peer_state.interval_s, interval_s)
        peer_state.next_at = min(peer_state.next_at, now + interval_s)
        peer_state.leases[lease] = peer_state.leases.get(lease, 0) + 1

    def untrack(self, peer: P, lease: RequestId) -> None:
        """Note that one of our requests no longer reads under a lease. Unknown pairs are ignored.

        The lease is renewed until no request reads under the lease.
        """
        peer_state = self._peer_states.get(peer)
        if peer_state is None or lease not in peer_state.leases:
            return
        peer_state.leases[lease] -= 1
        if peer_state.leases[lease] == 0:
            del peer_state.leases[lease]
        if not peer_state.leases:
            del self._peer_states[peer]

    def forget(self, peer: P) -> None:
        """Send no more heartbeats to a peer that is lost."""
        self._peer_states.pop(peer, None)

    def answered(self, peer: P, number: int) -> None:
        """Note a heartbeat reply. Only the reply to the latest beat counts."""
        peer_state = self._peer_states.get(peer)
        if peer_state is not None and number == peer_state.number:
            peer_state.unanswered_since = None

    def due(self, now: float) -> list[DueHeartbeat[P]]:
        """Return the heartbeats to send now; each is due again one interval later."""
        beats = []
        for peer, peer_state in self._peer_states.items():
            if peer_state.next_at > now:
                continue
            peer_state.next_at = now + peer_state.interval_s
            peer_state.number += 1
            peer_state.unanswered_since = (
                now if peer_state.unanswered_since is None else peer_state.unanswered_since
            )
            beats.append(DueHeartbeat(peer, peer_state.number, list(peer_state.leases)))
        return beats

    def skip_due(self, now: float) -> None:
        """Send none of the heartbeats that are due now; each is due again one interval later."""
        for peer_state in self._peer_states.values():
            if peer_state.next_at <= now:
                peer_state.next_at = now + peer_state.interval_s

    def lost(self, now: float) -> list[P]:
        """Return the peers that have left beats unanswered for `max_unanswered` intervals."""
        return [
            peer
            for peer, peer_state in self._peer_states.items()
            if (at := self._lost_at(peer_state)) is not None and at <= now
        ]

    def next_deadline(self) -> float | None:
        """Return when to call `due` and `lost` next; None if no peer is tracked."""
        deadlines = [peer_state.next_at for peer_state in self._peer_states.values()]
        deadlines += [
            at
            for peer_state in self._peer_states.values()
            if (at := self._lost_at(peer_state)) is not None
        ]
        return min(deadlines, default=None)

    def _lost_at(self, peer_state: _PeerState) -> float | None:
        if peer_state.unanswered_since is None:
            return None
        return peer_state.unanswered_since + self.max_unanswered * peer_state.interval_s
