"""Leases on KV blocks: which readers may still read the blocks, and until when.

A producer grants a lease when prefill ends. Readers attach to the lease, renew the lease by
heartbeat, and finally confirm their read or detach. The producer frees the blocks only after the
lease has ended. A lease ends in one of three ways:

- The lease is settled (a reader has confirmed or detached, or the ticket was given up) and no
  reader is attached, awaited or offered. Awaited readers are the sibling ranks of a reader that has
  attached: other ranks of the same consumer, for the same request, that have not attached yet.
- The deadline passes without a renewal.
- The producer revokes the lease.

The lease of a retained turn has its own duration, and the owner evicts the turn when the engine
needs the blocks. In push, a lease is open while prefill still fills the blocks: until `close`, an
open lease has no deadline and can end only by `revoke`.

The module also holds `TextsById`, which routers can ask for, and `OpenQuestions` about turns that
have not ended. Pure: the caller passes `now` (local monotonic seconds) and acts on the returned
values.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from kvferry.errors import LocalProtocolError
from kvferry.events import LeaseEnded
from kvferry.protocol.heartbeats import Deadlines
from kvferry.types import LeaseEnd, RequestId

MAX_READERS = 8192
"""Readers of one lease, awaited readers included. Enough for a large number of samples of one
prompt, each on a few ranks.
"""


class TicketStatus(StrEnum):
    """State of the lease that a ticket refers to."""

    HELD = "held"
    PENDING = "pending"
    """The scheduler has issued the ticket, but the grant has not reached this table yet."""
    GONE = "gone"


@dataclass(slots=True)
class _Lease:
    """State of one granted lease."""

    serial: int
    readers: dict[str, str] = field(default_factory=dict)
    """Attached readers, each with the transport used for reading."""
    awaited: set[str] = field(default_factory=set)
    """Sibling ranks of attached readers that have not attached yet."""
    offered: set[str] = field(default_factory=set)
    """Push readers that were offered the lease and will attach or detach."""
    is_open: bool = False
    settled: LeaseEnd | None = None
    unsettled: LeaseEnd = LeaseEnd.EXPIRED
    """How the lease ends if the deadline passes before the lease is settled."""


@dataclass(slots=True)
class LeaseTable:
    """Every granted lease of one worker.

    A renewal never shortens a lease. Leases are granted in rising order of serials, so the table
    can tell a pending ticket from an ended lease without remembering ended leases
    (docs/decisions/003-tickets-and-serials.md).
    """

    lease_ttl_s: float
    extension_s: float
    _leases: dict[RequestId, _Lease] = field(default_factory=dict, init=False)
    _last_serial: int = field(default=0, init=False)
    _deadlines: Deadlines[RequestId] = field(default_factory=Deadlines, init=False)
    """Deadlines of the leases that are not open."""
    _readers_by_transport: Counter[str] = field(default_factory=Counter, init=False)
    _possibly_ended: dict[RequestId, None] = field(default_factory=dict, init=False)
    """Leases to examine in `take_ended`: a reader has left, or the lease was settled or closed."""

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._leases

    def is_open(self, request: RequestId) -> bool:
        lease = self._leases.get(request)
        return lease is not None and lease.is_open

    @property
    def num_entries(self) -> int:
        """Size of the heap of deadlines, stale entries included."""
        return self._deadlines.num_entries

    def num_readers(self, transport: str) -> int:
        """Return how many readers, over all leases, read with this transport."""
        return self._readers_by_transport[transport]

    def grant(
        self, request: RequestId, serial: int, now: float, lease_ttl_s: float | None = None
    ) -> None:
        """Grant a lease on the blocks of a finished prefill or, with its own `lease_ttl_s`, on a
        retained turn, which may never be read. A renewal does not shorten the lease; `evict` does.
        """
        lease = self._add(request, serial)
        if lease_ttl_s is None:
            lease_ttl_s = self.lease_ttl_s
        else:
            lease.unsettled = LeaseEnd.LAPSED
        self._deadlines.set(request, now + lease_ttl_s)

    def evict(self, request: RequestId, now: float) -> None:
        """Stop retaining a turn because the owner needs the blocks.

        The lease waits for no new reader. Attached readers may finish as long as they renew. Call
        `take_ended` afterwards.
        """
        if self.abandon(request):
            # A dead reader must not hold the blocks for the long duration of a retained turn.
            deadline, latest = self._deadlines.get(request), now + self.lease_ttl_s
            if deadline is not None and deadline > latest:
                self._deadlines.set(request, latest)

    def open(self, request: RequestId, serial: int) -> None:
        """Grant a lease on blocks that the engine is still filling.

        The lease neither ends nor expires before `close`; only `revoke` ends an open lease.
        """
        self._add(request, serial).is_open = True

    def close(self, request: RequestId, now: float) -> None:
        """Turn an open lease into an ordinary one, because the engine has filled the blocks.

        Call `take_ended` afterwards: all readers may have left already.
        """
        lease = self._leases.get(request)
        if lease is None or not lease.is_open:
            raise LocalProtocolError(f"{request} has no open lease")
        lease.is_open = False
        self._possibly_ended[request] = None
        self._deadlines.set(request, now + self.lease_ttl_s)

    def _add(self, request: RequestId, serial: int) -> _Lease:
        if request in self._leases or serial <= self._last_serial:
            raise LocalProtocolError(
                f"lease granted twice: {request} (serial {serial}, last {self._last_serial})"
            )
        self._last_serial = serial
        lease = self._leases[request] = _Lease(serial)
        return lease

    def ticket_status(self, request: RequestId, serial: int) -> TicketStatus:
        """Return whether the lease of a ticket is held, still to be granted, or over."""
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
        """Add a reader and renew the lease; False if the lease is not held or has too many readers.

        The first of several sibling ranks to attach names the rest; the lease then awaits each
        named reader until that reader has attached or detached.
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
        # A reader may attach again, with another transport, and must not be counted twice.
        self._drop_reader(lease, reader)
        lease.readers[reader] = transport
        self._readers_by_transport[transport] += 1
        self._deadlines.extend([request], now + self.extension_s)
        return True

    def note_offer(self, request: RequestId, reader: str) -> None:
        """Record that a reader was offered the lease and will attach or detach.

        Ignored if the lease is not held, or has too many readers.
        """
        lease = self._leases.get(request)
        if (
            lease is not None
            and reader not in lease.readers
            and len(lease.readers) + len(lease.offered) < MAX_READERS
        ):
            lease.offered.add(reader)

    def renew_all(self, requests: Sequence[RequestId], now: float) -> list[RequestId]:
        """Renew leases and return those that are not held (a late heartbeat, not an error)."""
        self._deadlines.extend(requests, now + self.extension_s)
        return [request for request in requests if request not in self._leases]

    def confirm(self, request: RequestId, reader: str, now: float) -> bool:
        """Detach a reader and return True if the lease was alive for the reader's whole read.

        A reader that is dropped with its lease cannot attach to that lease again, so "attached now"
        means "attached during the whole read". Call `take_ended` afterwards. If the result is
        False, nothing has changed.
        """
        lease = self._leases.get(request)
        if lease is None or reader not in lease.readers:
            return False
        deadline = self._deadlines.get(request)
        if deadline is not None and deadline <= now:
            return False
        self._drop_reader(lease, reader)
        lease.settled = LeaseEnd.CONFIRMED
        self._possibly_ended[request] = None
        return True

    def detach(self, request: RequestId, reader: str, end: LeaseEnd = LeaseEnd.RELEASED) -> bool:
        """Remove a reader that has not used the blocks, or that will not attach.

        If the lease is not settled yet, `end` settles it. False if the reader is unknown. Call
        `take_ended` afterwards.
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
        self._possibly_ended[request] = None
        return True

    def abandon(self, request: RequestId) -> bool:
        """Wait for no new reader; readers that are attached, awaited or offered may finish.

        Call `take_ended` afterwards.
        """
        lease = self._leases.get(request)
        if lease is None:
            return False
        lease.settled = lease.settled or LeaseEnd.RELEASED
        self._possibly_ended[request] = None
        return True

    def take_ended(self) -> list[LeaseEnded]:
        """Remove and return the closed, settled leases without attached, awaited or offered
        readers.
        """
        ended = []
        for request in self._possibly_ended:
            lease = self._leases.get(request)
            if lease is None or lease.is_open or lease.settled is None:
                continue
            if not (lease.readers or lease.awaited or lease.offered):
                ended.append(self._remove(request, lease))
        self._possibly_ended.clear()
        return ended

    def revoke(self, request: RequestId) -> LeaseEnded | None:
        """Remove and return a lease even if readers are attached, because the KV is not valid."""
        lease = self._leases.get(request)
        if lease is None:
            return None
        lease.unsettled = LeaseEnd.RELEASED
        return self._remove(request, lease)

    def expire(self, now: float) -> list[LeaseEnded]:
        """Remove and return every lease whose deadline has passed, earliest first."""
        return [
            self._remove(request, self._leases[request])
            for request in self._deadlines.take_due(now)
        ]

    def next_deadline(self) -> float | None:
        """Return the latest time for the next call of `expire`; None if no deadline is set.

        The time may be too early after a renewal; `expire` then finds nothing to end.
        """
        return self._deadlines.next()

    def _remove(self, request: RequestId, lease: _Lease) -> LeaseEnded:
        del self._leases[request]
        self._deadlines.drop(request)
        for reader in list(lease.readers):
            self._drop_reader(lease, reader)
        return LeaseEnded(request, lease.settled or lease.unsettled)

    def _drop_reader(self, lease: _Lease, reader: str) -> None:
        transport = lease.readers.pop(reader, None)
        if transport is not None:
            self._readers_by_transport[transport] -= 1
            # Peers choose the transport names, so zero counts are deleted to bound the memory.
            if not self._readers_by_transport[transport]:
                del self._readers_by_transport[transport]


# -- questions of routers --
# What routers ask a side channel for, by an id that the router chose: the `kv_transfer_params` of a
# retained turn, if the engine's answer (a stream) does not contain them, and the reason why a
# transfer failed. A router may ask before the engine has ended the turn: the client's stream ends
# in another process than the turn.


MAX_TURN_ID_CHARS = 64


@dataclass(slots=True)
class TextsById:
    """Texts that routers ask for by id, each valid until a deadline.

    The number of texts and their total length are bounded; the oldest text is forgotten first.
    """

    max_texts: int = 10_000
    max_chars: int = 64 * 1024 * 1024
    _texts: OrderedDict[str, tuple[float, str]] = field(default_factory=OrderedDict, init=False)
    """Id -> (time until which the text is valid, text)."""
    _num_chars: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, text_id: str, text: str, until: float) -> None:
        """Remember a text, which may be empty; a repeated id replaces the earlier text."""
        self._forget(text_id)
        self._texts[text_id] = (until, text)
        self._num_chars += len(text)
        while len(self._texts) > self.max_texts or self._num_chars > self.max_chars:
            self._forget(next(iter(self._texts)))

    def find(self, text_id: str, now: float) -> str | None:
        """Return a text; empty if the text is no longer valid, None if the id is unknown, because
        it was never added or was forgotten.
        """
        if text_id not in self._texts:
            return None
        until, text = self._texts[text_id]
        return text if now < until else ""

    def _forget(self, text_id: str) -> None:
        _, text = self._texts.pop(text_id, (0.0, ""))
        self._num_chars -= len(text)


Asker = TypeVar("Asker")


@dataclass(slots=True)
class OpenQuestions(Generic[Asker]):
    """Questions about turns that have not ended, each with a deadline. `take` and `expire` scan all
    of them: routers ask about a turn only as it ends, so few are open.
    """

    max_questions: int = 10_000
    _open: list[tuple[str, Asker, float]] = field(default_factory=list, init=False)
    """The turn, the asker and the deadline of each question."""

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, turn_id: str, asker: Asker, until: float) -> bool:
        """Add a question; False if there are too many already."""
        if len(self._open) >= self.max_questions:
            return False
        self._open.append((turn_id, asker, until))
        return True

    def take(self, turn_id: str) -> list[Asker]:
        """Remove the questions about a turn that has ended; return the askers."""
        askers = [asker for turn, asker, _ in self._open if turn == turn_id]
        self._open = [question for question in self._open if question[0] != turn_id]
        return askers

    def expire(self, now: float) -> list[tuple[str, Asker]]:
        """Remove the questions whose deadline has passed; return the turn and asker of each."""
        due = [(turn, asker) for turn, asker, until in self._open if until <= now]
        self._open = [question for question in self._open if question[2] > now]
        return due
