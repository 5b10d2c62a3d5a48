"""Heartbeats of a consumer: which peers are due one, for which leases, and which have stopped answering. Pure.

One message renews all leases held from a peer. The interval follows the producer's own lease time, which its ticket carries, so two sides
with different settings still fit.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvferry.types import RequestId

__all__ = ["READ_BEGINS", "Beat", "HeartbeatSchedule", "heartbeat_interval_s"]

READ_BEGINS = 0
"""The number of a beat outside the rhythm: its sender is about to read. Those of the rhythm count from 1."""

P = TypeVar("P", bound=Hashable)


def heartbeat_interval_s(lease_s: float) -> float:
    """A sixth of the lease, in whole seconds once that is at least one."""
    return float(lease_s // 6) if lease_s >= 6 else lease_s / 6


@dataclass(frozen=True, slots=True)
class Beat(Generic[P]):
    peer: P
    number: int
    leases: list[RequestId]


@dataclass(slots=True)
class _Pulse:
    interval_s: float
    next_at: float
    leases: dict[RequestId, int] = field(default_factory=dict)
    """Lease -> how many of our requests read it."""
    number: int = 0
    unanswered_since: float | None = None


@dataclass(slots=True)
class HeartbeatSchedule(Generic[P]):
    """The pulse of every peer we hold leases from. A peer that leaves `patience` beats in a row unanswered is lost."""

    patience: int = 3
    _pulses: dict[P, _Pulse] = field(default_factory=dict, init=False)

    def track(self, peer: P, lease: RequestId, interval_s: float, now: float) -> None:
        pulse = self._pulses.get(peer)
        if pulse is None:
            pulse = self._pulses[peer] = _Pulse(interval_s, now + interval_s)
        pulse.interval_s = min(pulse.interval_s, interval_s)
        pulse.next_at = min(pulse.next_at, now + interval_s)
        pulse.leases[lease] = pulse.leases.get(lease, 0) + 1

    def untrack(self, peer: P, lease: RequestId) -> None:
        """One of our requests reads this lease no more. Unknown pairs are ignored."""
        pulse = self._pulses.get(peer)
        if pulse is None or lease not in pulse.leases:
            return
        pulse.leases[lease] -= 1
        if pulse.leases[lease] == 0:
            del pulse.leases[lease]
        if not pulse.leases:
            del self._pulses[peer]

    def forget(self, peer: P) -> None:
        self._pulses.pop(peer, None)

    def answered(self, peer: P, number: int) -> None:
        pulse = self._pulses.get(peer)
        if pulse is not None and number == pulse.number:
            pulse.unanswered_since = None

    def due(self, now: float) -> list[Beat[P]]:
        """The beats to send now; each is due again one interval later."""
        beats = []
        for peer, pulse in self._pulses.items():
            if pulse.next_at > now:
                continue
            pulse.next_at = now + pulse.interval_s
            pulse.number += 1
            pulse.unanswered_since = now if pulse.unanswered_since is None else pulse.unanswered_since
            beats.append(Beat(peer, pulse.number, list(pulse.leases)))
        return beats

    def lost(self, now: float) -> list[P]:
        """Peers that have been silent for `patience` intervals since a beat."""
        return [peer for peer, pulse in self._pulses.items() if (at := self._lost_at(pulse)) is not None and at <= now]

    def next_deadline(self) -> float | None:
        deadlines = [pulse.next_at for pulse in self._pulses.values()]
        deadlines += [at for pulse in self._pulses.values() if (at := self._lost_at(pulse)) is not None]
        return min(deadlines, default=None)

    def _lost_at(self, pulse: _Pulse) -> float | None:
        if pulse.unanswered_since is None:
            return None
        return pulse.unanswered_since + self.patience * pulse.interval_s
