"""When something is due for each of many things, without looking at all of them. Pure.

A heap with lazy removal: what was moved or dropped stays in it until it surfaces, or until there is
more of that than of the rest.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from kvferry.types import RequestId

__all__ = ["READ_BEGINS", "Deadlines", "DueHeartbeat", "HeartbeatSchedule", "heartbeat_interval_s"]


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
        """What is remembered, stale entries included: never much more than twice the deadlines
        there are.
        """
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


# -------------------- heartbeats -------------------- Heartbeats of a consumer: which peers are due
# one, for which leases, and which have stopped answering. Pure.
#
# One message renews all leases held from a peer. The interval follows the producer's own lease
# time, which its ticket carries, so two sides with different settings still fit.


READ_BEGINS = 0
"""The number of a beat outside the rhythm: its sender is about to read. Those of the rhythm count
from 1.
"""

P = TypeVar("P", bound=Hashable)


def heartbeat_interval_s(lease_s: float) -> float:
    """A sixth of the lease, in whole seconds once that is at least one."""
    return float(lease_s // 6) if lease_s >= 6 else lease_s / 6


@dataclass(frozen=True, slots=True)
class DueHeartbeat(Generic[P]):
    peer: P
    number: int
    leases: list[RequestId]


@dataclass(slots=True)
class _PeerState:
    interval_s: float
    next_at: float
    leases: dict[RequestId, int] = field(default_factory=dict)
    """Lease -> how many of our requests read it."""
    number: int = 0
    unanswered_since: float | None = None


@dataclass(slots=True)
class HeartbeatSchedule(Generic[P]):
    """The pulse of every peer we hold leases from. A peer that leaves `max_unanswered` beats in a
    row unanswered is lost.
    """

    max_unanswered: int = 3
    _peer_states: dict[P, _PeerState] = field(default_factory=dict, init=False)

    def track(self, peer: P, lease: RequestId, interval_s: float, now: float) -> None:
        peer_state = self._peer_states.get(peer)
        if peer_state is None:
            peer_state = self._peer_states[peer] = _PeerState(interval_s, now + interval_s)
        peer_state.interval_s = min(peer_state.interval_s, interval_s)
        peer_state.next_at = min(peer_state.next_at, now + interval_s)
        peer_state.leases[lease] = peer_state.leases.get(lease, 0) + 1

    def untrack(self, peer: P, lease: RequestId) -> None:
        """One of our requests reads this lease no more. Unknown pairs are ignored."""
        peer_state = self._peer_states.get(peer)
        if peer_state is None or lease not in peer_state.leases:
            return
        peer_state.leases[lease] -= 1
        if peer_state.leases[lease] == 0:
            del peer_state.leases[lease]
        if not peer_state.leases:
            del self._peer_states[peer]

    def forget(self, peer: P) -> None:
        self._peer_states.pop(peer, None)

    def answered(self, peer: P, number: int) -> None:
        peer_state = self._peer_states.get(peer)
        if peer_state is not None and number == peer_state.number:
            peer_state.unanswered_since = None

    def due(self, now: float) -> list[DueHeartbeat[P]]:
        """The beats to send now; each is due again one interval later."""
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

    def lost(self, now: float) -> list[P]:
        """Peers that have been silent for `max_unanswered` intervals since a beat."""
        return [
            peer
            for peer, peer_state in self._peer_states.items()
            if (at := self._lost_at(peer_state)) is not None and at <= now
        ]

    def next_deadline(self) -> float | None:
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
