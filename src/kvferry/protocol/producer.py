"""The side that holds the blocks: grants leases, answers readers, says when blocks may be freed.

The scheduler issues tickets and the worker holds the leases, so a reader's message may overtake the grant on its way to the worker. A
reader with a genuine ticket whose grant has not arrived is served, for what the ticket names cannot be freed before; after `grant_wait_s`
no more of them is believed.

In push a consumer registers before there is a ticket; its registration and the finished prefill meet at the desk (`push_desk.py`). Where
the consumer has lent us its blocks, we write instead of offering (`writers.py`); it is a reader of the lease all the same.

A staged producer's readers read a copy of the blocks, which is made when the lease is granted. It tells each of them when the copy is there
(`Ready`), confirms nobody before, and does not report the end of a lease whose blocks are still being copied.
Pure: feed it, then take what it wants done.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvferry.errors import InvalidTicket
from kvferry.protocol.actions import Expose
from kvferry.protocol.deadlines import Deadlines
from kvferry.protocol.heartbeats import READ_BEGINS
from kvferry.protocol.leases import EndedLease, LeaseTable, Standing
from kvferry.protocol.messages import (
    Attach,
    Confirm,
    Confirmed,
    Detach,
    Heartbeat,
    HeartbeatReply,
    PushCancel,
    PushOffer,
    PushRegistration,
    PushWithdrawal,
    Ready,
    Refused,
    Revoke,
    Revoked,
    WriteFailed,
    Written,
)
from kvferry.protocol.push_desk import DeskReply, PushDesk
from kvferry.protocol.push_tickets import PushTicketKey
from kvferry.protocol.tickets import Ticket, TicketKey
from kvferry.protocol.writers import Writers
from kvferry.types import Address, EngineId, Epoch, LeaseEnd, RequestId, Route

__all__ = ["Producer", "ProducerSettings", "Reply"]

MAX_CLAIMS = 10_000
READ_WATCH_S = 1.0
"""So long after a reader has stirred, planes that need our help are looked at more often."""


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    engine: EngineId
    epoch: Epoch
    lease_ttl_s: float
    lease_extension_s: float
    grant_wait_s: float
    is_staged: bool = False
    peers: frozenset[str] = frozenset()
    """In push: side channels (host:port) of consumers that may register without a push ticket, by a prefill's request id."""


_END_REASONS = {
    LeaseEnd.CONFIRMED: "the prefill has been handed over already",
    LeaseEnd.RELEASED: "the prefill was given up before",
    LeaseEnd.EXPIRED: "the prefill's lease ran out before",
}


@dataclass(frozen=True, slots=True)
class Reply:
    route: Route
    message: Ready | Confirmed | Refused | HeartbeatReply | PushOffer | PushWithdrawal | Written | WriteFailed | Revoked


@dataclass(slots=True)
class _Claim:
    """Readers that came before the grant."""

    serial: int
    """Of their ticket. A prefill that is preempted has another lease before it, perhaps."""
    readers: dict[str, tuple[Route, Attach]] = field(default_factory=dict)
    """Reader -> what it said, and where it is answered."""
    ends: dict[str, Confirm | Detach] = field(default_factory=dict)
    """Of readers that are through already."""
    is_abandoned: bool = False


@dataclass(slots=True)
class _Copy:
    """Blocks of a lease on their way to where they are read."""

    waiting: dict[str, Route] = field(default_factory=dict)
    """Readers to be told when they are there."""
    end: EndedLease | None = None
    """How the lease has ended meanwhile: the copy still reads the blocks, so it is not reported yet."""


class Producer:
    def __init__(self, settings: ProducerSettings, key: TicketKey, push_key: PushTicketKey, writers: Writers) -> None:
        self._settings = settings
        self._key = key
        self._push_key = push_key
        self._leases = LeaseTable(settings.lease_ttl_s, settings.lease_extension_s)
        self._claims: dict[RequestId, _Claim] = {}
        self._claim_deadlines: Deadlines[RequestId] = Deadlines()
        self._ahead: Counter[str] | None = None
        """Readers in claims that are not through, by plane; None: to be counted anew."""
        self._copies: dict[RequestId, _Copy] = {}
        self._desk = PushDesk(settings.lease_ttl_s)
        self._writers = writers
        self._actions: list[Expose] = []
        self._replies: list[Reply] = []
        self._ended: list[EndedLease] = []
        self._stirred_at = -math.inf

    @property
    def num_leases(self) -> int:
        """Those included that have ended but are not reported yet."""
        return len(self._leases) + sum(copy.end is not None for copy in self._copies.values())

    @property
    def num_registrations(self) -> int:
        """Of ranks of consumers that wait for a prefill."""
        return self._desk.num_waiting

    def num_readers(self, plane: str) -> int:
        """Readers that may be reading our blocks by this plane right now."""
        if self._ahead is None:
            ahead = ((claim, attach) for claim in self._claims.values() for _, attach in claim.readers.values())
            self._ahead = Counter(attach.plane for claim, attach in ahead if attach.reader not in claim.ends)
        return self._leases.num_readers(plane) + self._ahead[plane]

    def grant(self, request: RequestId, serial: int, now: float, blocks: tuple[tuple[int, ...], ...] = ()) -> None:
        """The engine keeps this request's blocks for readers from now on. Which they are is asked only of a staged producer."""
        self._leases.grant(request, serial, now)
        if self._settings.is_staged:
            self._copies[request] = _Copy()
            self._actions.append(Expose(request, blocks))
        self._serve_claim(request, serial, now)

    def _serve_claim(self, request: RequestId, serial: int, now: float) -> None:
        """Readers that came before the lease."""
        claim = self._claims.get(request)
        if claim is None or claim.serial > serial:
            return
        del self._claims[request]
        self._claim_deadlines.drop(request)
        self._ahead = None
        for route, attach in claim.readers.values():
            self._attach(request, attach, route, now)
        for end in claim.ends.values():
            if isinstance(end, Confirm):
                self._leases.confirm(request, end.reader, now)
            else:
                self._leases.detach(request, end.reader)
        self._collect(request)
        if claim.is_abandoned:
            self.abandon(request)

    def open(self, request: RequestId, serial: int, now: float) -> None:
        """The engine computes this request for readers: what is published of it may be read from now on."""
        self._leases.open(request, serial)
        self._serve_claim(request, serial, now)

    def close(self, request: RequestId, now: float) -> None:
        """The engine is through with an open request and keeps its blocks for readers."""
        self._leases.close(request, now)
        self._collect(request)

    def withdraw(self, request: RequestId, serial: int, now: float) -> None:
        """The engine has taken back the blocks of an open request, to compute it anew. Nobody who reads them now is confirmed."""
        self._leases.revoke(request)
        self._desk.withdraw(request, serial, now)
        self._take_from_desk(now)

    def publish(self, request: RequestId, handover: str, ticket: str, ready_tokens: int, now: float) -> None:
        """So much of a leased prefill is for whoever has registered, or will register, for it."""
        # A reader that came ahead of the grant may have been served already.
        if request in self._leases:
            self._desk.publish(request, handover, ticket, ready_tokens)
            self._take_from_desk(now)

    def withhold(self, request: RequestId, handover: str, reason: str, now: float) -> None:
        """A prefill has ended without anything to hand over; whoever waits for it, or reads what there was of it, is told why."""
        self._leases.revoke(request)
        self._desk.fail(request, handover, reason, now)
        self._take_from_desk(now)

    def exposed(self, request: RequestId, error: str | None) -> None:
        """The copy that `Expose` asked for has ended; it no longer reads the request's blocks."""
        copy = self._copies.pop(request)
        if copy.end is not None:
            self._ended.append(copy.end)
        elif error is None:
            self._replies += [Reply(route, Ready(request, reader)) for reader, route in copy.waiting.items()]
        else:
            revoked = self._leases.revoke(request)
            assert revoked is not None
            self._note_end(revoked)
            for reader, route in copy.waiting.items():
                self._refuse(route, request, reader, f"the blocks could not be copied to the host buffer: {error}")

    def hand_back(self, request: RequestId, serial: int) -> None:
        """Whoever held this ticket gives it up (a router, on behalf of a client that left)."""
        if self._leases.standing(request, serial) is not Standing.GONE:
            self.abandon(request)

    def abandon(self, request: RequestId) -> None:
        """Nobody will come for this request's blocks any more."""
        claim = self._claims.get(request)
        if claim is not None:
            claim.is_abandoned = True
        self._leases.abandon(request)
        self._collect(request)

    def is_reading_likely(self, now: float) -> bool:
        """Whether a reader has come, or said that its read begins, so lately that its bytes may be on their way."""
        return now < self._stirred_at + READ_WATCH_S

    def receive(
        self, route: Route, message: Attach | Heartbeat | Confirm | Detach | PushRegistration | PushCancel | Revoke, now: float
    ) -> None:
        if isinstance(message, Attach) or (isinstance(message, Heartbeat) and message.beat == READ_BEGINS):
            self._stirred_at = now
        match message:
            case Attach():
                self._receive_attach(route, message, now)
            case Heartbeat():
                self._receive_heartbeat(route, message, now)
            case Confirm() | Detach():
                self._receive_end(route, message, now)
            case PushRegistration() | PushCancel():
                self._receive_push(route, message, now)
            case Revoke():
                self._writers.revoke(route, message)

    def advance(self, now: float) -> None:
        """Expire what has run out."""
        for ended in self._leases.expire(now):
            self._note_end(ended)
        self._desk.advance(now)
        for reader in self._writers.advance(now):
            self._leave(reader)
        for request in self._claim_deadlines.take_due(now):
            claim, self._ahead = self._claims[request], None
            for reader in [reader for reader in claim.readers if reader not in claim.ends]:
                route, _ = claim.readers.pop(reader)
                self._refuse(route, request, reader, f"no lease was granted within {self._settings.grant_wait_s:g} s")
            if not any(isinstance(end, Confirm) for end in claim.ends.values()):
                del self._claims[request]

    def next_deadline(self) -> float | None:
        deadlines = (self._claim_deadlines.next(), self._leases.next_deadline(), self._desk.next_deadline(), self._writers.next_deadline())
        return min((at for at in deadlines if at is not None), default=None)

    def take_actions(self) -> list[Expose]:
        actions, self._actions = self._actions, []
        return actions

    def take_replies(self) -> list[Reply]:
        """What was written comes first: whoever hears that a registration is gone shall know by then that all of it was written."""
        replies, self._replies = self._replies, []
        return [*(Reply(*reply) for reply in self._writers.take_replies()), *replies]

    def take_ended(self) -> list[EndedLease]:
        """Leases that have ended since the last call: their blocks may be freed."""
        ended, self._ended = self._ended, []
        return ended

    def _receive_attach(self, route: Route, message: Attach, now: float) -> None:
        try:
            ticket = self._key.open(message.ticket)
        except InvalidTicket as error:
            self._refuse(route, RequestId(""), message.reader, str(error))
            return
        if (ticket.engine_id, ticket.epoch_id) != (self._settings.engine, self._settings.epoch):
            self._refuse(route, ticket.lease, message.reader, "the ticket is of another engine or of an earlier life of this one")
            return
        match self._leases.standing(ticket.lease, ticket.serial):
            case Standing.HELD:
                self._attach(ticket.lease, message, route, now)
            case Standing.AHEAD:
                self._claim(ticket, message, route, now)
            case Standing.GONE:
                self._refuse(route, ticket.lease, message.reader, "the lease has ended", ticket.serial)

    def _claim(self, ticket: Ticket, message: Attach, route: Route, now: float) -> None:
        if ticket.lease not in self._claims and len(self._claims) >= MAX_CLAIMS:
            self._refuse(route, ticket.lease, message.reader, f"more than {MAX_CLAIMS} tickets wait for their lease")
            return
        if ticket.lease not in self._claims or self._claims[ticket.lease].serial < ticket.serial:
            self._claims[ticket.lease] = _Claim(ticket.serial)
            self._claim_deadlines.set(ticket.lease, now + self._settings.grant_wait_s)
        claim, self._ahead = self._claims[ticket.lease], None
        claim.readers[message.reader] = (route, msgspec.structs.replace(message, ticket=""))
        claim.ends.pop(message.reader, None)

    def _receive_heartbeat(self, route: Route, message: Heartbeat, now: float) -> None:
        gone: Sequence[str] = message.leases
        if message.epoch == self._settings.epoch:
            leases: Sequence[RequestId] = [RequestId(lease) for lease in message.leases]
            missing = [lease for lease in self._leases.renew_all(leases, now) if lease not in self._claims]
            registered = self._desk.renew(missing, now)
            self._leases.renew_all(self._writers.renew(registered, now), now)
            gone = [lease for lease in missing if lease not in registered]
        self._replies.append(Reply(route, HeartbeatReply(self._settings.epoch, message.beat, list(gone))))

    def _receive_end(self, route: Route, message: Confirm | Detach, now: float) -> None:
        request = RequestId(message.lease)
        claim = self._claims.get(request)
        if message.epoch == self._settings.epoch and isinstance(message, Detach):
            # Another rank's offer may have brought it here before ours.
            self._desk.leave(message.reader)
        if message.epoch != self._settings.epoch:
            if isinstance(message, Confirm):
                self._refuse(route, request, message.reader, "the producer has restarted since the ticket was issued", message.serial)
        elif isinstance(message, Confirm) and self._is_unready(request):
            self._refuse(route, request, message.reader, "the blocks were not ready to be read", message.serial)
        elif claim is not None and message.reader in claim.readers and (isinstance(message, Detach) or message.serial in (0, claim.serial)):
            claim.ends[message.reader] = message
            self._ahead = None
            if isinstance(message, Confirm):
                # Blocks are freed after their lease has ended, and this one has not even begun.
                self._replies.append(Reply(route, Confirmed(request, message.reader)))
        elif isinstance(message, Confirm):
            self._confirm(request, message, route, now)
        else:
            self._leases.detach(request, message.reader)
            self._collect(request)

    def _receive_push(self, route: Route, message: PushRegistration | PushCancel, now: float) -> None:
        objection = self._objection_to(message, now)
        if isinstance(message, PushRegistration):
            if objection is None:
                self._writers.invite(route, message, now)
                self._desk.register(route, message, now)
            else:
                self._refuse(route, RequestId(""), message.reader, objection)
        elif objection is None:
            self._writers.drop(message.reader)
            self._desk.cancel(message, now)
        self._take_from_desk(now)

    def _objection_to(self, message: PushRegistration | PushCancel, now: float) -> str | None:
        """Who names a prefill may have it, or have it freed, so it must have been sent here for it."""
        if message.epoch != self._settings.epoch:
            return "the producer has restarted since the router chose it"
        if not message.handover and not message.push_ticket:
            return self._objection_without_ticket(message, now)
        try:
            ticket = self._push_key.open(message.push_ticket)
        except InvalidTicket as error:
            return str(error)
        shown = (ticket.engine, ticket.epoch, ticket.handover)
        return None if shown == (self._settings.engine, self._settings.epoch, message.handover) else "the push ticket is for something else"

    def settle_writes(self, now: float) -> None:
        """What had landed before this turn's commands, and is still leased, was right."""
        for request, reader in self._writers.take_landed():
            if self._leases.confirm(request, reader, now):
                self._writers.finish(reader)
                self._desk.leave(reader)
                self._collect(request)
            else:
                self._writers.fail(reader, "the lease ended before all was written")

    def _objection_without_ticket(self, message: PushRegistration | PushCancel, now: float) -> str | None:
        """Behind a router that signs nothing. Whoever registered was believed then."""
        if isinstance(message, PushCancel):
            return None if self._desk.renew([message.reader], now) else "nobody has registered under that name"
        address = str(Address(message.decode_host, message.decode_port))
        return None if address in self._settings.peers else f"there is no push ticket, and {address} is not among this engine's `peers`"

    def _take_from_desk(self, now: float) -> None:
        for reply in self._desk.take_replies():
            if self._writers.has(reply.message.reader):
                self._write(reply, now)
                continue
            if reply.lease is not None:
                self._leases.note_offer(reply.lease, reply.message.reader)
            self._replies.append(Reply(reply.route, reply.message))
        for request, reader in self._desk.take_left():
            self._leases.detach(request, reader)
            self._collect(request)
        for request in self._desk.take_unwanted():
            self.abandon(request)

    def _write(self, reply: DeskReply, now: float) -> None:
        """News for a reader that we write for."""
        message, request = reply.message, reply.lease
        match message:
            case PushOffer(reader, ticket, ready_tokens) if request is not None:
                if self._leases.attach(request, reader, now, "", self._writers.companions_of(reader)):
                    is_over = not self._leases.is_open(request)
                    self._writers.offer(reader, request, self._key.open(ticket), ready_tokens, is_over, now)
                else:
                    self._refuse(reply.route, request, reader, "too many readers share this lease")
            case PushWithdrawal(reader):
                self._writers.withdraw(reader)
            case _:
                self._writers.drop(message.reader)
                self._replies.append(Reply(reply.route, message))

    def _leave(self, reader: str) -> None:
        """A reader that we wrote for is not heard of any more."""
        request = self._desk.offered_to(reader)
        self._desk.leave(reader)
        if request is not None:
            self._leases.detach(request, reader)
            self._collect(request)

    def _attach(self, request: RequestId, message: Attach, route: Route, now: float) -> None:
        if not self._leases.attach(request, message.reader, now, message.plane, message.companions):
            self._refuse(route, request, message.reader, "too many readers share this lease")
        elif request in self._copies:
            self._copies[request].waiting[message.reader] = route
        elif self._settings.is_staged:
            self._replies.append(Reply(route, Ready(request, message.reader)))

    def _confirm(self, request: RequestId, message: Confirm, route: Route, now: float) -> None:
        is_other = message.serial and self._leases.standing(request, message.serial) is not Standing.HELD
        if not is_other and self._leases.confirm(request, message.reader, now):
            self._replies.append(Reply(route, Confirmed(request, message.reader)))
            # It has all it wanted, though there may be more to come.
            self._desk.leave(message.reader)
            self._collect(request)
        else:
            self._refuse(route, request, message.reader, "the lease ended before the read was confirmed", message.serial)

    def _refuse(self, route: Route, request: RequestId, reader: str, reason: str, serial: int = 0) -> None:
        self._replies.append(Reply(route, Refused(request, reader, reason, serial)))

    def _is_unready(self, request: RequestId) -> bool:
        return request in self._copies or (self._settings.is_staged and request in self._claims)

    def _collect(self, request: RequestId) -> None:
        ended = self._leases.take_if_ended(request)
        if ended is not None:
            self._note_end(ended)

    def _note_end(self, ended: EndedLease) -> None:
        for reader in self._desk.end(ended.request, _END_REASONS[ended.end]):
            self._writers.fail(reader, _END_REASONS[ended.end])
        copy = self._copies.get(ended.request)
        if copy is None:
            self._ended.append(ended)
        else:
            copy.end = ended
