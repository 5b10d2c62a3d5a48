"""Readers with a genuine ticket that arrived before the grant of the lease. Pure."""

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from kvferry.protocol.heartbeats import Deadlines
from kvferry.protocol.messages import Attach, Confirm, Detach
from kvferry.protocol.tickets import Ticket
from kvferry.types import RequestId, Route

MAX_PENDING_TICKETS = 10_000
"""Maximum number of tickets that wait for a grant. Peers cause these entries, so they are bounded.
"""


@dataclass(slots=True)
class PendingReaders:
    """The readers of one ticket."""

    serial: int
    """Serial of the readers' ticket. A preempted prefill may have an earlier lease, with a lower
    serial.
    """
    readers: dict[str, tuple[Route, Attach]] = field(default_factory=dict)
    """Maps each reader to the route for replies and to the reader's `Attach`."""
    ends: dict[str, Confirm | Detach] = field(default_factory=dict)
    """Maps each reader that has finished before the grant to the reader's last message."""
    is_abandoned: bool = False
    """Whether the lease is to be abandoned as soon as it is granted."""


@dataclass(slots=True)
class PendingTickets:
    """The tickets that wait for a grant, with their readers."""

    grant_wait_s: float
    """How long a reader waits for the grant."""
    _tickets: dict[RequestId, PendingReaders] = field(default_factory=dict, init=False)
    _deadlines: Deadlines[RequestId] = field(default_factory=Deadlines, init=False)
    _by_transport: Counter[str] | None = field(default=None, init=False)
    """Number of unfinished readers by transport; None means: count again."""

    def __contains__(self, request: str) -> bool:
        return request in self._tickets

    def num_readers(self, transport: str) -> int:
        """Return how many readers may be reading with this transport."""
        if self._by_transport is None:
            self._by_transport = Counter(
                attach.transport
                for pending in self._tickets.values()
                for _, attach in pending.readers.values()
                if attach.reader not in pending.ends
            )
        return self._by_transport[transport]

    def add(self, ticket: Ticket, message: Attach, route: Route, now: float) -> bool:
        """Add a reader; False if too many tickets wait."""
        known = self._tickets.get(ticket.lease)
        if known is None and len(self._tickets) >= MAX_PENDING_TICKETS:
            return False
        if known is None or known.serial < ticket.serial:
            known = self._tickets[ticket.lease] = PendingReaders(ticket.serial)
            self._deadlines.set(ticket.lease, now + self.grant_wait_s)
        self._by_transport = None
        known.readers[message.reader] = (route, msgspec.structs.replace(message, ticket=""))
        known.ends.pop(message.reader, None)
        return True

    def end(self, request: RequestId, message: Confirm | Detach) -> bool:
        """Keep a reader's last message until the grant; False if no such reader waits."""
        pending = self._tickets.get(request)
        if (
            pending is None
            or message.reader not in pending.readers
            or (isinstance(message, Confirm) and message.serial not in (0, pending.serial))
        ):
            return False
        pending.ends[message.reader] = message
        self._by_transport = None
        return True

    def abandon(self, request: RequestId) -> None:
        """Have the lease abandoned as soon as it is granted."""
        if request in self._tickets:
            self._tickets[request].is_abandoned = True

    def take(self, request: RequestId, serial: int) -> PendingReaders | None:
        """Remove and return the readers for whom the lease with this serial was granted."""
        pending = self._tickets.get(request)
        if pending is None or pending.serial > serial:
            return None
        del self._tickets[request]
        self._deadlines.drop(request)
        self._by_transport = None
        return pending

    def take_overdue(self, now: float) -> list[tuple[Route, RequestId, str]]:
        """Remove and return the readers that have waited too long."""
        overdue = []
        for request in self._deadlines.take_due(now):
            pending, self._by_transport = self._tickets[request], None
            for reader in [reader for reader in pending.readers if reader not in pending.ends]:
                route, _ = pending.readers.pop(reader)
                overdue.append((route, request, reader))
            # Keep an early `Confirm` until the grant arrives: the `Confirm` then settles the lease.
            if not any(isinstance(end, Confirm) for end in pending.ends.values()):
                del self._tickets[request]
        return overdue

    def next_deadline(self) -> float | None:
        return self._deadlines.next()
