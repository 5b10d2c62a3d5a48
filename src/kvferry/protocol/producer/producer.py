"""The producer holds KV blocks for readers: leases, answers to readers, and the end of each lease.

The scheduler issues tickets and the transfer worker holds the leases, so a reader's message may
arrive at the worker before the grant. The producer serves a reader with a genuine ticket even
then: the engine cannot free the blocks of a ticket before the grant has arrived. After
`grant_wait_s` without a grant the producer refuses the reader
(docs/decisions/003-tickets-and-serials.md).

In push a consumer registers before a ticket exists. The matcher joins the registration and the
finished prefill (`push_matcher.py`). If the consumer has granted write access to its
blocks, the producer writes instead of sending an offer (`push_writer.py`); the consumer
still counts as a reader of the lease.

Readers of a producer with a host buffer read a copy of the blocks (`host_buffers.py`).
Such a producer sends `Ready` to each reader when the copy is complete. Before the copy is complete
the producer neither confirms a reader nor offers that segment of a prefill. The end of a lease is
reported only when no copy reads its blocks any more.

Pure: the caller feeds commands and messages, passes `now`, and empties the outbox
(`protocol/outbox.py`) that the producer shares with all its parts.
"""

import math
from collections.abc import Collection, Sequence

from kvferry.errors import InvalidTicket
from kvferry.events import EvictionDeferred, LeaseEnded
from kvferry.protocol.heartbeats import READ_BEGINS, earliest
from kvferry.protocol.messages import (
    Attach,
    Confirm,
    Confirmed,
    Detach,
    Heartbeat,
    HeartbeatReply,
    PushCancel,
    PushRegistration,
    Ready,
    Refused,
    Revoke,
    ToProducer,
)
from kvferry.protocol.producer.host_buffers import HostBufferCopies, Publication
from kvferry.protocol.producer.leases import LeaseTable, TicketStatus
from kvferry.protocol.producer.pending import MAX_PENDING_TICKETS, PendingTickets
from kvferry.protocol.producer.push import PushCoordinator
from kvferry.protocol.producer.push_writer import ProducerSettings, PushWriter
from kvferry.protocol.tickets import PushTicketKey, TicketKey
from kvferry.types import BlockIds, RequestId, Route

READ_WATCH_S, READ_WATCH_INTERVAL_S = 1.0, 0.01
"""For this long after a reader's `Attach` or read announcement, the worker polls at this interval
the transports that need our help to be read (docs/decisions/019-many-leases.md).
"""
READ_START_S, READ_START_INTERVAL_S = 0.02, 0.001
"""As above, at first: some reads begin with a request to us that arrives a moment after the
announcement.
"""


class Producer:
    """State of every lease on this rank: its readers, registrations, writes and host copies."""

    def __init__(
        self,
        settings: ProducerSettings,
        key: TicketKey,
        push_key: PushTicketKey,
        writers: PushWriter,
    ) -> None:
        self.writers = writers
        self.outbox = writers.outbox
        """Actions and events of the producer, of its parts and of the writer."""
        self._settings = settings
        self._key = key
        self._leases = LeaseTable(settings.lease_ttl_s, settings.lease_extension_s)
        self._pending = PendingTickets(settings.grant_wait_s)
        self._host_buffer_copies = HostBufferCopies(self.outbox)
        self._push = PushCoordinator(
            settings,
            (key, push_key),
            self._leases,
            self._host_buffer_copies,
            writers,
            self.outbox,
        )
        self._read_expected_at = -math.inf

    @property
    def num_leases(self) -> int:
        """Number of leases, including leases that have ended but are not reported yet."""
        return len(self._leases) + self._host_buffer_copies.num_unreported

    @property
    def num_registrations(self) -> int:
        """Number of consumer ranks that are registered and wait for a prefill."""
        return self._push.matcher.num_waiting

    def num_readers(self, transport: str) -> int:
        """Return how many readers may be reading our blocks with this transport right now."""
        return self._leases.num_readers(transport) + self._pending.num_readers(transport)

    def is_copying(self, blocks: Collection[int]) -> bool:
        """Return whether a copy of one of these blocks to the host buffer is running or queued."""
        return self._host_buffer_copies.is_copying(blocks)

    def grant(
        self,
        request: RequestId,
        serial: int,
        now: float,
        blocks: BlockIds = (),
        lease_ttl_s: float | None = None,
    ) -> None:
        """Grant a lease on the blocks of a request, which the engine holds for readers from now on.

        Only a producer with a host buffer needs `blocks`. The lease of a retained turn has its own
        `lease_ttl_s`, and ends earlier if the engine needs the blocks and calls `evict`.
        """
        self._leases.grant(request, serial, now, lease_ttl_s)
        if self._settings.uses_host_buffer:
            self._host_buffer_copies.grant(request, blocks)
        self._serve_pending_readers(request, serial, now)

    def evict(self, request: RequestId, now: float) -> None:
        """Evict a retained turn; `EvictionDeferred` is reported if a reader is still attached."""
        self._leases.evict(request, now)
        self._settle(now)
        if request in self._leases:
            self.outbox.report(EvictionDeferred(request))

    def _serve_pending_readers(self, request: RequestId, serial: int, now: float) -> None:
        """Attach the readers that arrived before the grant, then apply their early endings."""
        pending = self._pending.take(request, serial)
        if pending is None:
            return
        for route, attach in pending.readers.values():
            self._attach(request, attach, route, now)
        for end in pending.ends.values():
            if isinstance(end, Confirm):
                self._leases.confirm(request, end.reader, now)
            else:
                self._leases.detach(request, end.reader)
        if pending.is_abandoned:
            self._leases.abandon(request)
        self._settle(now)

    def expect_prefill(self, request: RequestId, match_id: str) -> None:
        """Let registrations for this prefill wait: its leg has arrived at the engine."""
        self._push.matcher.expect(request, match_id)

    def open(self, request: RequestId, serial: int, now: float) -> None:
        """Open a lease on a request that the engine still computes; readers may read what is
        published.
        """
        self._leases.open(request, serial)
        if self._settings.uses_host_buffer:
            self._host_buffer_copies.open(request)
        self._serve_pending_readers(request, serial, now)

    def close(self, request: RequestId, now: float, blocks: BlockIds = ()) -> None:
        """Close an open lease: the engine has finished the request and keeps the blocks leased.

        `blocks` are the last blocks that a producer with a host buffer still has to copy.
        """
        self._leases.close(request, now)
        self._settle(now)
        if self._host_buffer_copies.failure_of(request):
            self.revoke(request, now)
        elif request in self._leases:
            self._host_buffer_copies.close(request, blocks)

    def withdraw(self, request: RequestId, serial: int, now: float) -> None:
        """Revoke an open lease, because the engine has preempted the request and reuses its blocks.

        No reader of this lease is confirmed any more. The engine will compute the request again.
        """
        self._leases.revoke(request)
        self._host_buffer_copies.withdraw(request)
        self._push.matcher.withdraw(request, serial, now)
        self._settle(now)

    def publish(
        self,
        request: RequestId,
        match_id: str,
        ticket: str,
        ready_tokens: int,
        now: float,
        blocks: BlockIds = (),
    ) -> None:
        """Offer `ready_tokens` tokens of a leased prefill to present and future registrations.

        A producer with a host buffer copies `blocks` first, and offers when the copy has ended.
        """
        # Readers that arrived before the grant may have ended the lease already.
        if request in self._leases:
            due = self._host_buffer_copies.publish(
                request, Publication(match_id, ticket, ready_tokens), blocks
            )
            if due is not None:
                self._offer(request, due, now)

    def _offer(self, request: RequestId, publication: Publication, now: float) -> None:
        self._push.matcher.publish(
            request, publication.match_id, publication.ticket, publication.ready_tokens
        )
        self._settle(now)

    def fail_prefill(self, request: RequestId, match_id: str, reason: str, now: float) -> None:
        """Revoke the lease of a failed prefill and refuse its readers and registrations."""
        self._leases.revoke(request)
        self._host_buffer_copies.withdraw(request)
        self._push.matcher.fail(request, match_id, reason, now)
        self._settle(now)

    def copied_to_host_buffer(self, copy: int, error: str | None, now: float) -> None:
        """Handle the end of a `CopyToHostBuffer` action; the copy no longer reads engine blocks."""
        copied = self._host_buffer_copies.copied(copy, error)
        if copied is None:
            return
        for reader, route in copied.readers.items():
            reply = (
                Refused(copied.request, reader, copied.failure)
                if copied.failure
                else Ready(copied.request, reader)
            )
            self.outbox.reply(route, reply)
        if copied.end is not None:
            self.outbox.report(copied.end)
        elif copied.failure and copied.is_open:
            # The engine still computes this request; the end of the lease is reported by `close`.
            self._push.matcher.fail(copied.request, copied.match_id, copied.failure, now)
            self._settle(now)
        elif copied.failure:
            self.revoke(copied.request, now)
        elif copied.publication is not None:
            self._offer(copied.request, copied.publication, now)

    def release_ticket(self, request: RequestId, serial: int, now: float) -> None:
        """End the lease of a ticket whose holder gave it up, such as a router whose client has
        disconnected.

        Attached readers are not waited for: their request is over, and one that hangs would hold
        the blocks. They are refused when they ask for confirmation.
        """
        status = self._leases.ticket_status(request, serial)
        if status is TicketStatus.HELD and not self._leases.is_open(request):
            self.revoke(request, now)
        elif status is not TicketStatus.GONE:
            self.abandon(request, now)

    def decline_push(self, match_id: str, now: float) -> None:
        """Free the prefill of a push whose router has ended the decode leg before D registered."""
        self._push.matcher.decline(match_id, now)
        self._settle(now)

    def abandon(self, request: RequestId, now: float) -> None:
        """Settle a lease that no further reader will attach to; attached readers may finish."""
        self._pending.abandon(request)
        self._leases.abandon(request)
        self._settle(now)

    def revoke(self, request: RequestId, now: float) -> None:
        """End a lease even if readers are attached, because the KV is not valid."""
        revoked = self._leases.revoke(request)
        if revoked is not None:
            self._note_end(revoked, now)

    def serving_interval_s(self, now: float) -> float | None:
        """Return how often to poll transports that need our help to be read; None if no reader has
        attached, or announced a read, within `READ_WATCH_S`.
        """
        if now < self._read_expected_at + READ_START_S:
            return READ_START_INTERVAL_S
        return READ_WATCH_INTERVAL_S if now < self._read_expected_at + READ_WATCH_S else None

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
        self._settle(now)

    def advance(self, now: float) -> None:
        """Expire leases, registrations and write grants, and refuse overdue pending readers."""
        for ended in self._leases.expire(now):
            self._note_end(ended, now)
        self._push.advance(now)
        self._settle(now)
        reason = f"no lease was granted within {self._settings.grant_wait_s:g} s"
        for route, request, reader in self._pending.take_overdue(now):
            self._refuse(route, request, reader, reason)

    def next_deadline(self) -> float | None:
        return earliest(
            self._pending.next_deadline(),
            self._leases.next_deadline(),
            self._push.next_deadline(),
        )

    def _receive_attach(self, route: Route, message: Attach, now: float) -> None:
        try:
            ticket = self._key.open(message.ticket)
        except InvalidTicket as error:
            self._refuse(route, RequestId(""), message.reader, str(error))
            return
        if (ticket.engine, ticket.epoch) != (self._settings.engine, self._settings.epoch):
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
                if not self._pending.add(ticket, message, route, now):
                    self._refuse(
                        route,
                        ticket.lease,
                        message.reader,
                        f"more than {MAX_PENDING_TICKETS} tickets wait for their lease",
                    )
            case TicketStatus.GONE:
                self._refuse(
                    route, ticket.lease, message.reader, "the lease has ended", ticket.serial
                )

    def _receive_heartbeat(self, route: Route, message: Heartbeat, now: float) -> None:
        gone: Sequence[str] = message.leases
        if message.epoch == self._settings.epoch:
            leases: Sequence[RequestId] = [RequestId(lease) for lease in message.leases]
            missing = [
                lease for lease in self._leases.renew_all(leases, now) if lease not in self._pending
            ]
            registered = self._push.renew(missing, now)
            gone = [lease for lease in missing if lease not in registered]
        self.outbox.reply(route, HeartbeatReply(self._settings.epoch, message.beat, list(gone)))

    def _receive_end(self, route: Route, message: Confirm | Detach, now: float) -> None:
        request = RequestId(message.lease)
        if isinstance(message, Confirm):
            refusal = self._confirm(request, message, now)
            if refusal:
                self._refuse(route, request, message.reader, refusal, message.serial)
            else:
                self.outbox.reply(route, Confirmed(request, message.reader))
        elif message.epoch == self._settings.epoch:
            # The offer of another producer rank may have made the reader attach here before this
            # rank has sent its own offer; so the reader may still be registered with the matcher.
            self._push.matcher.leave(message.reader)
            self._host_buffer_copies.leave(request, message.reader)
            if not self._pending.end(request, message):
                self._leases.detach(request, message.reader)

    def _confirm(self, request: RequestId, message: Confirm, now: float) -> str:
        """Return why the reader is not confirmed; empty if the reader may use what it read."""
        if message.epoch != self._settings.epoch:
            return "the producer has restarted since the ticket was issued"
        if self._is_unready(request, message.reader):
            return "the blocks were not ready to be read"
        if self._pending.end(request, message):
            # Confirming before the grant is safe: the engine frees blocks only after their lease
            # has ended, and this lease has not begun.
            return ""
        is_other = (
            message.serial
            and self._leases.ticket_status(request, message.serial) is not TicketStatus.HELD
        )
        if is_other or not self._leases.confirm(request, message.reader, now):
            return "the lease ended before the read was confirmed"
        # The reader has all tokens it wanted, even if the prefill will publish more.
        self._push.matcher.leave(message.reader)
        return ""

    def confirm_writes(self, now: float) -> None:
        """Confirm the writes that had landed before this tick's commands and are still leased.

        The caller executes the engine's commands of the tick first: a command may have revoked
        the lease while its blocks were being copied.
        """
        self._push.confirm_writes(now)
        self._settle(now)

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
            is_offered = self._push.matcher.offered_to(message.reader) == request
            if self._host_buffer_copies.attach(
                request, message.reader, route, is_offered=is_offered
            ):
                self.outbox.reply(route, Ready(request, message.reader))
        elif message.wants_ready:
            self.outbox.reply(route, Ready(request, message.reader))

    def _refuse(
        self, route: Route, request: RequestId, reader: str, reason: str, serial: int = 0
    ) -> None:
        self.outbox.reply(route, Refused(request, reader, reason, serial))

    def _is_unready(self, request: RequestId, reader: str) -> bool:
        return self._host_buffer_copies.is_waiting(request, reader) or (
            self._settings.uses_host_buffer and request in self._pending
        )

    def _settle(self, now: float) -> None:
        """Apply what the matcher has decided, and report the leases that have ended because their
        readers left or none will come.
        """
        self._push.apply_results(now)
        for ended in self._leases.take_ended():
            self._note_end(ended, now)

    def _note_end(self, ended: LeaseEnded, now: float) -> None:
        self._push.end(ended, now)
        if self._host_buffer_copies.end(ended):
            self.outbox.report(ended)
