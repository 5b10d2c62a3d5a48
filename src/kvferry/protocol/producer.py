"""Readers with a genuine ticket whose lease has yet to be granted here. Plain data; pure."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from kvferry.errors import InvalidTicket
from kvferry.protocol.actions import CopyToHostBuffer
from kvferry.protocol.heartbeats import READ_BEGINS, Deadlines
from kvferry.protocol.host_buffers import BlockTables, HostBufferCopies, Publication
from kvferry.protocol.leases import EndedLease, LeaseTable, TicketStatus
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
    ToProducer,
    WriteFailed,
    Written,
)
from kvferry.protocol.push import ProducerSettings, PushCoordinator
from kvferry.protocol.push_writer import PushWriter
from kvferry.protocol.tickets import PushTicketKey, Ticket, TicketKey
from kvferry.types import RequestId, Route

__all__ = ["PendingReaders", "Producer", "ProducerReply", "ProducerSettings"]


@dataclass(slots=True)
class PendingReaders:
    """Readers that came before the grant."""

    serial: int
    """Of their ticket. A prefill that is preempted has another lease before it, perhaps."""
    readers: dict[str, tuple[Route, Attach]] = field(default_factory=dict)
    """Reader -> what it said, and where it is answered."""
    ends: dict[str, Confirm | Detach] = field(default_factory=dict)
    """Of readers that are through already."""
    is_abandoned: bool = False


# -------------------- producer --------------------
# The side that holds the blocks: grants leases, answers readers, says when blocks may be freed.
#
# The scheduler issues tickets and the worker holds the leases, so a reader's message may overtake
# the grant on its way to the worker. A reader with a genuine ticket whose grant has not arrived is
# served, for what the ticket names cannot be freed before; after `grant_wait_s` no more of them is
# believed.
#
# In push a consumer registers before there is a ticket; its registration and the finished prefill
# meet at the matcher (`push_desk.py`). Where the consumer has lent us its blocks, we write instead
# of offering (`writers.py`); it is a reader of the lease all the same.
#
# A producer with a host buffer's readers read a copy of the blocks (`exposures.py`). It tells each
# of them when the copy is there (`Ready`), confirms nobody before, offers no segment of a prefill
# before, and does not report the end of a lease whose blocks are still being copied. Pure: feed it,
# then take what it wants done.


MAX_PENDING_TICKETS = 10_000
READ_WATCH_S = 1.0
"""So long after a reader has stirred, transports that need our help are looked at more often."""
READ_START_S = 0.02
"""And so long all but constantly: some reads begin with a question to us, which comes a moment
after the news of it.
"""


@dataclass(frozen=True, slots=True)
class ProducerReply:
    route: Route
    message: (
        Ready
        | Confirmed
        | Refused
        | HeartbeatReply
        | PushOffer
        | PushWithdrawal
        | Written
        | WriteFailed
        | Revoked
    )


class Producer:
    def __init__(
        self,
        settings: ProducerSettings,
        key: TicketKey,
        push_key: PushTicketKey,
        writers: PushWriter,
    ) -> None:
        self._settings = settings
        self._key = key
        self._leases = LeaseTable(settings.lease_ttl_s, settings.lease_extension_s)
        self._pending: dict[RequestId, PendingReaders] = {}
        self._pending_deadlines: Deadlines[RequestId] = Deadlines()
        self._pending_by_transport: Counter[str] | None = None
        """Readers in claims that are not through, by transport; None: to be counted anew."""
        self._host_buffer_copies = HostBufferCopies()
        self._push = PushCoordinator(settings, (key, push_key), self._leases, writers)
        self._replies: list[ProducerReply] = []
        self._ended: list[EndedLease] = []
        self._read_expected_at = -math.inf

    @property
    def num_leases(self) -> int:
        """Those included that have ended but are not reported yet."""
        return len(self._leases) + self._host_buffer_copies.num_unreported

    @property
    def num_registrations(self) -> int:
        """Of ranks of consumers that wait for a prefill."""
        return self._push.num_registrations

    def num_readers(self, transport: str) -> int:
        """Readers that may be reading our blocks by this transport right now."""
        if self._pending_by_transport is None:
            ahead = (
                (pending, attach)
                for pending in self._pending.values()
                for _, attach in pending.readers.values()
            )
            self._pending_by_transport = Counter(
                attach.transport for pending, attach in ahead if attach.reader not in pending.ends
            )
        return self._leases.num_readers(transport) + self._pending_by_transport[transport]

    def is_copying(self, blocks: Collection[int]) -> bool:
        """Whether one of these blocks is being copied to where readers read it, or will be."""
        return self._host_buffer_copies.is_copying(blocks)

    def grant(self, request: RequestId, serial: int, now: float, blocks: BlockTables = ()) -> None:
        """The engine keeps this request's blocks for readers from now on. Which they are is asked
        only of a producer with a host buffer.
        """
        self._leases.grant(request, serial, now)
        if self._settings.uses_host_buffer:
            self._host_buffer_copies.grant(request, blocks)
        self._serve_pending_readers(request, serial, now)

    def retain(
        self, request: RequestId, serial: int, now: float, ttl_s: float, blocks: BlockTables = ()
    ) -> None:
        """The engine keeps this request's blocks for so long, or until it needs them, for whoever
        might come.
        """
        self._leases.retain(request, serial, now, ttl_s)
        if self._settings.uses_host_buffer:
            self._host_buffer_copies.grant(request, blocks)
        self._serve_pending_readers(request, serial, now)

    def evict(self, request: RequestId, now: float) -> bool:
        """The engine needs those blocks. True: somebody reads them, and they come back when he is
        through.
        """
        self._leases.evict(request, now)
        self._collect(request)
        return request in self._leases

    def _serve_pending_readers(self, request: RequestId, serial: int, now: float) -> None:
        """Readers that came before the lease."""
        pending = self._pending.get(request)
        if pending is None or pending.serial > serial:
            return
        del self._pending[request]
        self._pending_deadlines.drop(request)
        self._pending_by_transport = None
        for route, attach in pending.readers.values():
            self._attach(request, attach, route, now)
        for end in pending.ends.values():
            if isinstance(end, Confirm):
                self._leases.confirm(request, end.reader, now)
            else:
                self._leases.detach(request, end.reader)
        self._collect(request)
        if pending.is_abandoned:
            self.abandon(request)

    def open(self, request: RequestId, serial: int, now: float) -> None:
        """The engine computes this request for readers: what is published of it may be read from
        now on.
        """
        self._leases.open(request, serial)
        if self._settings.uses_host_buffer:
            self._host_buffer_copies.open(request)
        self._serve_pending_readers(request, serial, now)

    def close(self, request: RequestId, now: float, blocks: BlockTables = ()) -> None:
        """The engine is through with an open request and keeps its blocks for readers. A producer
        with a host buffer has yet to copy these.
        """
        self._leases.close(request, now)
        self._collect(request)
        if self._host_buffer_copies.failure_of(request):
            self._revoke(request)
        elif request in self._leases:
            self._host_buffer_copies.close(request, blocks)

    def withdraw(self, request: RequestId, serial: int, now: float) -> None:
        """The engine has taken back the blocks of an open request, to compute it again. Nobody who
        reads them now is confirmed.
        """
        self._leases.revoke(request)
        self._host_buffer_copies.withdraw(request)
        self._push.withdraw(request, serial, now)
        self._take_from_push()

    def publish(
        self,
        request: RequestId,
        match_id: str,
        ticket: str,
        ready_tokens: int,
        now: float,
        blocks: BlockTables = (),
    ) -> None:
        """So much of a leased prefill is for whoever has registered, or will register, for it. A
        producer with a host buffer copies these first.
        """
        # A reader that came ahead of the grant may have been served already.
        if request in self._leases:
            due = self._host_buffer_copies.publish(
                request, Publication(match_id, ticket, ready_tokens), blocks
            )
            if due is not None:
                self._offer(request, due, now)

    def _offer(self, request: RequestId, publication: Publication, now: float) -> None:
        self._push.publish(request, publication, now)
        self._take_from_push()

    def fail_prefill(self, request: RequestId, match_id: str, reason: str, now: float) -> None:
        """A prefill has ended without anything to hand over; whoever waits for it, or reads what
        there was of it, is told why.
        """
        self._leases.revoke(request)
        self._host_buffer_copies.withdraw(request)
        self._push.fail(request, match_id, reason, now)
        self._take_from_push()

    def copied_to_host_buffer(self, copy: int, error: str | None, now: float) -> None:
        """The copy that `CopyToHostBuffer` asked for has ended; it no longer reads the engine's
        blocks.
        """
        copied = self._host_buffer_copies.copied(copy, error)
        if copied is None:
            return
        for reader, route in copied.readers.items():
            reply = (
                Refused(copied.request, reader, copied.failure)
                if copied.failure
                else Ready(copied.request, reader)
            )
            self._replies.append(ProducerReply(route, reply))
        if copied.end is not None:
            self._ended.append(copied.end)
        elif copied.failure and copied.is_open:
            # The engine goes on with it, so there is nothing to report before it is closed.
            self._push.fail(copied.request, copied.match_id, copied.failure, now)
            self._take_from_push()
        elif copied.failure:
            self._revoke(copied.request)
        elif copied.publication is not None:
            self._offer(copied.request, copied.publication, now)

    def release_ticket(self, request: RequestId, serial: int) -> None:
        """Whoever held this ticket gives it up (a router, on behalf of a client that left)."""
        if self._leases.ticket_status(request, serial) is not TicketStatus.GONE:
            self.abandon(request)

    def abandon(self, request: RequestId) -> None:
        """Nobody will come for this request's blocks any more."""
        pending = self._pending.get(request)
        if pending is not None:
            pending.is_abandoned = True
        self._leases.abandon(request)
        self._collect(request)

    def is_reading_likely(self, now: float) -> bool:
        """Whether a reader has come, or said that its read begins, so lately that its bytes may be
        on their way.
        """
        return now < self._read_expected_at + READ_WATCH_S

    def is_read_beginning(self, now: float) -> bool:
        return now < self._read_expected_at + READ_START_S

    def receive(self, route: Route, message: ToProducer, now: float) -> None:
        if isinstance(message, Attach) or (
            isinstance(message, Heartbeat) and message.beat == READ_BEGINS
        ):
            self._read_expected_at = now
        match message:
            case Attach():
                self._receive_attach(route, message, now)
            case Heartbeat():
                self._receive_heartbeat(route, message, now)
            case Confirm() | Detach():
                self._receive_end(route, message, now)
            case PushRegistration() | PushCancel() | Revoke():
                self._push.receive(route, message, now)
                self._take_from_push()

    def advance(self, now: float) -> None:
        """Expire what has run out."""
        for ended in self._leases.expire(now):
            self._note_end(ended)
        self._push.advance(now)
        self._take_from_push()
        for request in self._pending_deadlines.take_due(now):
            pending, self._pending_by_transport = self._pending[request], None
            for reader in [reader for reader in pending.readers if reader not in pending.ends]:
                route, _ = pending.readers.pop(reader)
                self._refuse(
                    route,
                    request,
                    reader,
                    f"no lease was granted within {self._settings.grant_wait_s:g} s",
                )
            if not any(isinstance(end, Confirm) for end in pending.ends.values()):
                del self._pending[request]

    def next_deadline(self) -> float | None:
        deadlines = (
            self._pending_deadlines.next(),
            self._leases.next_deadline(),
            self._push.next_deadline(),
        )
        return min((at for at in deadlines if at is not None), default=None)

    def take_actions(self) -> list[CopyToHostBuffer]:
        return self._host_buffer_copies.take_actions()

    def take_replies(self) -> list[ProducerReply]:
        """What was written comes first: whoever hears that a registration is gone shall know by
        then that all of it was written.
        """
        replies, self._replies = self._replies, []
        return [*(ProducerReply(*reply) for reply in self._push.take_writer_replies()), *replies]

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
            self._refuse(
                route,
                ticket.lease,
                message.reader,
                "the ticket is of another engine or of an earlier incarnation of this one",
            )
            return
        match self._leases.ticket_status(ticket.lease, ticket.serial):
            case TicketStatus.HELD:
                self._attach(ticket.lease, message, route, now)
            case TicketStatus.PENDING:
                self._add_pending(ticket, message, route, now)
            case TicketStatus.GONE:
                self._refuse(
                    route, ticket.lease, message.reader, "the lease has ended", ticket.serial
                )

    def _add_pending(self, ticket: Ticket, message: Attach, route: Route, now: float) -> None:
        if ticket.lease not in self._pending and len(self._pending) >= MAX_PENDING_TICKETS:
            self._refuse(
                route,
                ticket.lease,
                message.reader,
                f"more than {MAX_PENDING_TICKETS} tickets wait for their lease",
            )
            return
        if ticket.lease not in self._pending or self._pending[ticket.lease].serial < ticket.serial:
            self._pending[ticket.lease] = PendingReaders(ticket.serial)
            self._pending_deadlines.set(ticket.lease, now + self._settings.grant_wait_s)
        pending, self._pending_by_transport = self._pending[ticket.lease], None
        pending.readers[message.reader] = (route, msgspec.structs.replace(message, ticket=""))
        pending.ends.pop(message.reader, None)

    def _receive_heartbeat(self, route: Route, message: Heartbeat, now: float) -> None:
        gone: Sequence[str] = message.leases
        if message.epoch == self._settings.epoch:
            leases: Sequence[RequestId] = [RequestId(lease) for lease in message.leases]
            missing = [
                lease for lease in self._leases.renew_all(leases, now) if lease not in self._pending
            ]
            registered = self._push.renew(missing, now)
            gone = [lease for lease in missing if lease not in registered]
        self._replies.append(
            ProducerReply(route, HeartbeatReply(self._settings.epoch, message.beat, list(gone)))
        )

    def _receive_end(self, route: Route, message: Confirm | Detach, now: float) -> None:
        request = RequestId(message.lease)
        pending = self._pending.get(request)
        if message.epoch == self._settings.epoch and isinstance(message, Detach):
            # Another rank's offer may have brought it here before ours.
            self._push.leave(message.reader)
            self._host_buffer_copies.leave(request, message.reader)
        if message.epoch != self._settings.epoch:
            if isinstance(message, Confirm):
                self._refuse(
                    route,
                    request,
                    message.reader,
                    "the producer has restarted since the ticket was issued",
                    message.serial,
                )
        elif isinstance(message, Confirm) and self._is_unready(request, message.reader):
            self._refuse(
                route,
                request,
                message.reader,
                "the blocks were not ready to be read",
                message.serial,
            )
        elif (
            pending is not None
            and message.reader in pending.readers
            and (isinstance(message, Detach) or message.serial in (0, pending.serial))
        ):
            pending.ends[message.reader] = message
            self._pending_by_transport = None
            if isinstance(message, Confirm):
                # Blocks are freed after their lease has ended, and this one has not even begun.
                self._replies.append(ProducerReply(route, Confirmed(request, message.reader)))
        elif isinstance(message, Confirm):
            self._confirm(request, message, route, now)
        else:
            self._leases.detach(request, message.reader)
            self._collect(request)

    def confirm_writes(self, now: float) -> None:
        """What had landed before this turn's commands, and is still leased, was right."""
        self._push.confirm_writes(now)
        self._take_from_push()

    def _take_from_push(self) -> None:
        for reply in self._push.take_replies():
            self._replies.append(ProducerReply(reply.route, reply.message))
            reader = reply.message.reader
            if reply.lease is not None and self._host_buffer_copies.offer(reply.lease, reader):
                self._replies.append(ProducerReply(reply.route, Ready(reply.lease, reader)))
        for request in self._push.take_possibly_ended():
            self._collect(request)
        for request in self._push.take_unwanted():
            self.abandon(request)

    def _attach(self, request: RequestId, message: Attach, route: Route, now: float) -> None:
        if not self._leases.attach(
            request, message.reader, now, message.transport, message.sibling_ranks
        ):
            self._refuse(route, request, message.reader, "too many readers share this lease")
        elif self._host_buffer_copies.failure_of(request):
            self._leases.detach(request, message.reader)
            self._refuse(
                route, request, message.reader, self._host_buffer_copies.failure_of(request)
            )
        elif self._settings.uses_host_buffer:
            is_offered = self._push.offered_to(message.reader) == request
            if self._host_buffer_copies.attach(
                request, message.reader, route, is_offered=is_offered
            ):
                self._replies.append(ProducerReply(route, Ready(request, message.reader)))
        elif message.wants_ready:
            self._replies.append(ProducerReply(route, Ready(request, message.reader)))

    def _confirm(self, request: RequestId, message: Confirm, route: Route, now: float) -> None:
        is_other = (
            message.serial
            and self._leases.ticket_status(request, message.serial) is not TicketStatus.HELD
        )
        if not is_other and self._leases.confirm(request, message.reader, now):
            self._replies.append(ProducerReply(route, Confirmed(request, message.reader)))
            # It has all it wanted, though there may be more to come.
            self._push.leave(message.reader)
            self._collect(request)
        else:
            self._refuse(
                route,
                request,
                message.reader,
                "the lease ended before the read was confirmed",
                message.serial,
            )

    def _refuse(
        self, route: Route, request: RequestId, reader: str, reason: str, serial: int = 0
    ) -> None:
        self._replies.append(ProducerReply(route, Refused(request, reader, reason, serial)))

    def _is_unready(self, request: RequestId, reader: str) -> bool:
        return self._host_buffer_copies.is_waiting(request, reader) or (
            self._settings.uses_host_buffer and request in self._pending
        )

    def _collect(self, request: RequestId) -> None:
        ended = self._leases.take_if_ended(request)
        if ended is not None:
            self._note_end(ended)

    def _revoke(self, request: RequestId) -> None:
        revoked = self._leases.revoke(request)
        if revoked is not None:
            self._note_end(revoked)

    def _note_end(self, ended: EndedLease) -> None:
        self._push.end(ended)
        if self._host_buffer_copies.end(ended):
            self._ended.append(ended)
