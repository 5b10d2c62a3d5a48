"""Leases on KV blocks: who may still read them, and until when.

A producer grants a lease when prefill ends; readers attach to it, renew it by heartbeat, and
confirm or detach. It ends when somebody has settled it (confirmed, or given up) and nobody is
attached or awaited, or when it has run out. Blocks are freed only after that. One that is kept for
whoever might come has a time of its own, and is let go when its owner needs the blocks. In push a
lease may be open while prefill still fills the blocks; then it does not end before it is closed,
only by being revoked. Awaited are the companions of a reader that came: other ranks of its engine,
with the same request, that have not come yet. Pure: the caller passes `now` (local monotonic
seconds) and acts on what returns.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush

from kvferry.errors import LocalProtocolError
from kvferry.types import LeaseEnd, RequestId

__all__ = ["MAX_TURN_ID_CHARS", "EndedLease", "EndedTurns", "LeaseTable", "TicketStatus"]


MAX_READERS = 8192
"""Of one lease, those awaited included: a crowd of samples of one prompt, on each of a few
ranks.
"""

MAX_STALE_ENTRIES = 64
"""So many stale deadlines are dealt with one by one."""


class TicketStatus(StrEnum):
    """What the table knows of a ticket."""

    HELD = "held"
    PENDING = "ahead"
    """Its grant has not arrived yet."""
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class EndedLease:
    request: RequestId
    end: LeaseEnd


@dataclass(slots=True)
class _Lease:
    serial: int
    deadline: float
    readers: dict[str, str] = field(default_factory=dict)
    """Reader -> the transport it reads by."""
    awaited: set[str] = field(default_factory=set)
    offered: set[str] = field(default_factory=set)
    """Readers that have been told of it and will attach or detach."""
    is_open: bool = False
    settled: LeaseEnd | None = None
    unsettled: LeaseEnd = LeaseEnd.EXPIRED
    """What it is when it runs out before anybody has settled it."""


@dataclass(slots=True)
class LeaseTable:
    """Every granted lease. A renewal never shortens one; serials are granted in rising order, so a
    ticket's standing needs no history.
    """

    ttl_s: float
    extension_s: float
    _leases: dict[RequestId, _Lease] = field(default_factory=dict, init=False)
    _last_serial: int = field(default=0, init=False)
    # One entry per lease, and some of leases that have ended. A renewed lease keeps its old entry,
    # which is pushed back when it surfaces: renewals cost nothing here.
    _by_deadline: list[tuple[float, RequestId]] = field(default_factory=list, init=False)
    _readers_by_transport: Counter[str] = field(default_factory=Counter, init=False)

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._leases

    def is_open(self, request: RequestId) -> bool:
        lease = self._leases.get(request)
        return lease is not None and lease.is_open

    @property
    def num_entries(self) -> int:
        """What is remembered of deadlines: never much more than twice the leases."""
        return len(self._by_deadline)

    def num_readers(self, transport: str) -> int:
        """Readers attached to any lease that read by this transport."""
        return self._readers_by_transport[transport]

    def grant(self, request: RequestId, serial: int, now: float) -> None:
        self._run_until(request, self._add(request, serial), now + self.ttl_s)

    def retain(self, request: RequestId, serial: int, now: float, ttl_s: float) -> None:
        """Grant a lease for so long, for whoever might come. A renewal does not shorten it; `evict`
        does.
        """
        lease = self._add(request, serial)
        lease.unsettled = LeaseEnd.LAPSED
        self._run_until(request, lease, now + ttl_s)

    def evict(self, request: RequestId, now: float) -> None:
        """The owner needs the blocks: no further reader is waited for, and those attached only
        while they renew. Ask `take_if_ended`.
        """
        lease = self._leases.get(request)
        if lease is None:
            return
        lease.settled = lease.settled or LeaseEnd.RELEASED
        if lease.deadline > now + self.ttl_s:
            self._run_until(request, lease, now + self.ttl_s)

    def _run_until(self, request: RequestId, lease: _Lease, until: float) -> None:
        lease.deadline = until
        self._note_deadline(request, until)

    def open(self, request: RequestId, serial: int) -> None:
        """Grant a lease on blocks that the engine is still filling: it neither ends nor runs out
        before it is closed.
        """
        self._add(request, serial).is_open = True

    def close(self, request: RequestId, now: float) -> None:
        """Its engine is through with the blocks: from now on it is a lease like any other."""
        lease = self._leases.get(request)
        if lease is None or not lease.is_open:
            raise LocalProtocolError(f"no lease of {request} is open")
        lease.is_open = False
        self._run_until(request, lease, now + self.ttl_s)

    def _add(self, request: RequestId, serial: int) -> _Lease:
        if request in self._leases or serial <= self._last_serial:
            raise LocalProtocolError(
                f"lease granted twice: {request} (serial {serial}, last {self._last_serial})"
            )
        self._last_serial = serial
        lease = self._leases[request] = _Lease(serial, math.inf)
        return lease

    def _note_deadline(self, request: RequestId, at: float) -> None:
        heappush(self._by_deadline, (at, request))
        if len(self._by_deadline) > 2 * len(self._leases) + MAX_STALE_ENTRIES:
            # Most leases end long before they run out; what is left of them must not outnumber
            # those that live.
            self._rebuild_heap()

    def ticket_status(self, request: RequestId, serial: int) -> TicketStatus:
        lease = self._leases.get(request)
        if lease is not None and lease.serial == serial:
            return TicketStatus.HELD
        return TicketStatus.PENDING if serial > self._last_serial else TicketStatus.GONE

    def attach(
        self,
        request: RequestId,
        reader: str,
        now: float,
        transport: str = "",
        sibling_ranks: Iterable[str] = (),
    ) -> bool:
        """Register a reader and renew; False when the lease is not held or has too many readers.

        The first of its companions says who else will come; they are awaited until they have
        attached.
        """
        lease = self._leases.get(request)
        if lease is None:
            return False
        if reader not in lease.readers and reader not in lease.awaited:
            awaited = (lease.awaited | set(sibling_ranks)) - lease.readers.keys() - {reader}
            if len(lease.readers) + len(awaited) >= MAX_READERS:
                return False
            lease.awaited = awaited
        lease.awaited.discard(reader)
        lease.offered.discard(reader)
        self._drop_reader(lease, reader)
        lease.readers[reader] = transport
        self._readers_by_transport[transport] += 1
        lease.deadline = max(lease.deadline, now + self.extension_s)
        return True

    def note_offer(self, request: RequestId, reader: str) -> None:
        """It has been told of the lease and will attach or detach. Ignored where the lease is not
        held or has too many readers.
        """
        lease = self._leases.get(request)
        if (
            lease is not None
            and reader not in lease.readers
            and len(lease.readers) + len(lease.offered) < MAX_READERS
        ):
            lease.offered.add(reader)

    def renew_all(self, requests: Iterable[RequestId], now: float) -> list[RequestId]:
        """Extend leases; returns those that are not held (a late heartbeat, not an error)."""
        until, leases, missing = now + self.extension_s, self._leases, []
        for request in requests:
            lease = leases.get(request)
            if lease is None:
                missing.append(request)
            elif lease.deadline < until:
                lease.deadline = until
        return missing

    def confirm(self, request: RequestId, reader: str, now: float) -> bool:
        """Whether this reader has held the lease without a break until now. It is detached; ask
        `take_ended` afterwards.
        """
        lease = self._leases.get(request)
        if lease is None or reader not in lease.readers or lease.deadline <= now:
            return False
        self._drop_reader(lease, reader)
        lease.settled = LeaseEnd.CONFIRMED
        return True

    def detach(self, request: RequestId, reader: str, end: LeaseEnd = LeaseEnd.RELEASED) -> bool:
        """A reader leaves without having used the blocks, or will not come. If nobody has settled
        the lease yet, it ends like that.
        """
        lease = self._leases.get(request)
        if lease is None or not (
            reader in lease.readers or reader in lease.awaited or reader in lease.offered
        ):
            return False
        self._drop_reader(lease, reader)
        lease.awaited.discard(reader)
        lease.offered.discard(reader)
        lease.settled = lease.settled or end
        return True

    def abandon(self, request: RequestId) -> bool:
        """No further reader will come; those attached or awaited may finish."""
        lease = self._leases.get(request)
        if lease is None:
            return False
        lease.settled = lease.settled or LeaseEnd.RELEASED
        return True

    def take_if_ended(self, request: RequestId) -> EndedLease | None:
        """Remove and return a lease that is settled, has no reader left and awaits none."""
        lease = self._leases.get(request)
        if (
            lease is None
            or lease.is_open
            or lease.settled is None
            or lease.readers
            or lease.awaited
            or lease.offered
        ):
            return None
        del self._leases[request]
        return EndedLease(request, lease.settled)

    def revoke(self, request: RequestId) -> EndedLease | None:
        """Remove and return a lease although readers may be attached: there is nothing for them to
        read.
        """
        lease = self._leases.pop(request, None)
        if lease is None:
            return None
        for reader in list(lease.readers):
            self._drop_reader(lease, reader)
        return EndedLease(request, lease.settled or LeaseEnd.RELEASED)

    def expire(self, now: float) -> list[EndedLease]:
        """Remove and return every lease that has run out, earliest first."""
        ended, renewed = [], 0
        while self._by_deadline and self._by_deadline[0][0] <= now:
            _, request = heappop(self._by_deadline)
            lease = self._leases.get(request)
            if lease is None or lease.is_open:
                continue
            if lease.deadline > now:
                heappush(self._by_deadline, (lease.deadline, request))
                renewed += 1
                if renewed == MAX_STALE_ENTRIES:
                    # One beat renews many leases, so where some entries are stale most are: all at
                    # once is cheaper than one by one.
                    self._rebuild_heap()
                continue
            del self._leases[request]
            for reader in list(lease.readers):
                self._drop_reader(lease, reader)
            ended.append(EndedLease(request, lease.settled or lease.unsettled))
        return ended

    def next_deadline(self) -> float | None:
        """When to call `expire` next, at the latest; None while no lease is held."""
        while self._by_deadline and self._by_deadline[0][1] not in self._leases:
            heappop(self._by_deadline)
        return self._by_deadline[0][0] if self._by_deadline else None

    def _rebuild_heap(self) -> None:
        self._by_deadline = [
            (lease.deadline, request)
            for request, lease in self._leases.items()
            if not lease.is_open
        ]
        heapify(self._by_deadline)

    def _drop_reader(self, lease: _Lease, reader: str) -> None:
        transport = lease.readers.pop(reader, None)
        if transport is not None:
            self._readers_by_transport[transport] -= 1
            # Names come from peers: a transport nobody uses any more is not remembered.
            if not self._readers_by_transport[transport]:
                del self._readers_by_transport[transport]


# -------------------- turns -------------------- Turns of conversations that have ended here: what
# was kept of each, by the word that its router gave it. Pure.
#
# For routers that cannot see in an answer what was kept of it. Bounded in number and in bytes, the
# oldest forgotten first.


MAX_TURN_ID_CHARS = 64


@dataclass(slots=True)
class EndedTurns:
    max_turns: int = 10_000
    max_chars: int = 64 * 1024 * 1024
    _turns: OrderedDict[str, tuple[float, str]] = field(default_factory=OrderedDict, init=False)
    """By word: until when it is kept, and its parameters."""
    _num_chars: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, turn_id: str, params: str, until: float) -> None:
        """A word that was given twice means the later turn."""
        self.forget(turn_id)
        self._turns[turn_id] = (until, params)
        self._num_chars += len(params)
        while len(self._turns) > self.max_turns or self._num_chars > self.max_chars:
            self.forget(next(iter(self._turns)))

    def forget(self, turn_id: str) -> None:
        _, params = self._turns.pop(turn_id, (0.0, ""))
        self._num_chars -= len(params)

    def find(self, turn_id: str, now: float) -> str:
        """Empty: nothing is kept."""
        until, params = self._turns.get(turn_id, (0.0, ""))
        return params if now < until else ""
