"""The producer's half of push: checks registrations, and offers or writes prefills to readers.

`PushMatcher` (`push_matcher.py`) joins registrations with prefills. `PushWriter`
(`push_writer.py`) writes for readers with a write grant; all remaining readers get an
offer. Readers with a write grant are attached to the lease as well.
Pure: `Producer` owns the coordinator and passes `now`; replies go to the producer's outbox.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.errors import InvalidTicket
from kvferry.events import LeaseEnded
from kvferry.protocol.heartbeats import earliest
from kvferry.protocol.messages import (
    PushCancel,
    PushOffer,
    PushRegistration,
    PushWithdrawal,
    Ready,
    Refused,
    Revoke,
)
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.producer.host_buffers import HostBufferCopies
from kvferry.protocol.producer.leases import LeaseTable
from kvferry.protocol.producer.push_matcher import (
    MatcherReply,
    PrefillDeclined,
    PushMatcher,
    ReaderLeft,
)
from kvferry.protocol.producer.push_writer import ProducerSettings, PushWriter
from kvferry.protocol.tickets import PushTicketKey, TicketKey
from kvferry.types import Address, LeaseEnd, RequestId, Route

_END_REASONS = {
    LeaseEnd.CONFIRMED: "another reader has already received the prefill",
    LeaseEnd.RELEASED: "the prefill was released before the reader arrived",
    LeaseEnd.EXPIRED: "the prefill's lease expired before the reader arrived",
    LeaseEnd.LAPSED: "the reader did not come for the retained blocks in time",
}


@dataclass(slots=True)
class PushCoordinator:
    """Feeds registrations and prefills to the matcher, and matches to the leases and the writer."""

    settings: ProducerSettings
    keys: tuple[TicketKey, PushTicketKey]
    leases: LeaseTable
    """The lease table of the producer. `Producer` calls `take_ended` after each call from here."""
    host_buffer_copies: HostBufferCopies
    writers: PushWriter
    outbox: Outbox
    matcher: PushMatcher = field(init=False)
    """`Producer` passes prefills to the matcher, and calls `apply_results` after each call."""

    def __post_init__(self) -> None:
        self.matcher = PushMatcher(self.settings.lease_ttl_s, self.settings.leg_wait_s)

    def end(self, ended: LeaseEnded, now: float) -> None:
        """Remove the prefill of an ended lease and fail the writes from its blocks."""
        reason = _END_REASONS[ended.end]
        for reader in self.matcher.end(ended.request, reason, now):
            self.writers.fail(reader, reason)

    def confirm_writes(self, now: float) -> None:
        """Confirm the writes that had landed before this tick's commands and are still leased."""
        for request, reader in self.writers.take_landed():
            if self.leases.confirm(request, reader, now):
                # The last `Written` is in the outbox before the matcher forgets the reader: a
                # `HeartbeatReply` that no longer knows the registration must not overtake it.
                self.writers.finish(reader)
                self.matcher.leave(reader)
            else:
                self.writers.fail(reader, "the lease ended before all blocks were written")

    def apply_results(self, now: float) -> None:
        """Apply the matcher's decisions to the leases and the writer, and send the replies."""
        results, self.matcher.results = self.matcher.results, []
        for result in results:
            match result:
                case MatcherReply() if self.writers.has(result.message.reader):
                    self._write(result, now)
                case MatcherReply(route, message, lease):
                    self.outbox.reply(route, message)
                    if lease is not None:
                        self._note_offer(lease, message.reader, route)
                case ReaderLeft(request, reader):
                    self.leases.detach(request, reader)
                case PrefillDeclined(request):
                    self.leases.abandon(request)

    # -- messages from consumers --

    def receive(
        self, route: Route, message: PushRegistration | PushCancel | Revoke, now: float
    ) -> None:
        if isinstance(message, Revoke):
            self.writers.revoke(route, message)
            return
        refusal = self._refusal_reason(message, now)
        match message:
            case PushRegistration() if refusal is None:
                self.writers.register(route, message, now)
                self.matcher.register(route, message, now)
            case PushRegistration():
                self.outbox.reply(route, Refused("", message.reader, str(refusal)))
            case PushCancel() if refusal is None:
                self.writers.drop(message.reader)
                self.matcher.cancel(message, now)

    def renew(self, readers: Iterable[str], now: float) -> set[str]:
        """Extend registrations, and the leases from which we write for these readers.

        Returns the readers known to this rank.
        """
        known = self.matcher.renew(readers, now)
        self.leases.renew_all(self.writers.renew(known, now), now)
        return known

    # -- time --

    def advance(self, now: float) -> None:
        self.matcher.advance(now)
        self.apply_results(now)
        for reader in self.writers.advance(now):
            request = self.matcher.offered_to(reader)
            self.matcher.leave(reader)
            if request is not None:
                self.leases.detach(request, reader, LeaseEnd.EXPIRED)

    def next_deadline(self) -> float | None:
        return earliest(self.matcher.next_deadline(), self.writers.next_deadline())

    # -- internals --

    def _refusal_reason(self, message: PushRegistration | PushCancel, now: float) -> str | None:
        """Return why a registration or cancel is refused, or None to accept the message.

        A registration gets a prefill and a cancel frees a prefill. So the sender must prove, with a
        push ticket, that a router chose this engine and this match id for the sender.
        """
        if message.epoch != self.settings.epoch:
            return "the producer has restarted since the router chose it"
        if not message.match_id and not message.push_ticket:
            return self._refusal_reason_without_ticket(message, now)
        try:
            ticket = self.keys[1].open(message.push_ticket)
        except InvalidTicket as error:
            return str(error)
        shown = (ticket.engine, ticket.epoch, ticket.match_id)
        return (
            None
            if shown == (self.settings.engine, self.settings.epoch, message.match_id)
            else "the push ticket is for another engine or another request"
        )

    def _refusal_reason_without_ticket(
        self, message: PushRegistration | PushCancel, now: float
    ) -> str | None:
        """Return why a message without a push ticket is refused, or None.

        Without tickets, behind a router that signs nothing, only the configured `peers` may
        register. A cancel is accepted from a registered reader.
        """
        if isinstance(message, PushCancel):
            return (
                None
                if self.matcher.renew([message.reader], now)
                else "no reader is registered under this id"
            )
        address = str(Address(message.decode_host, message.decode_port))
        return (
            None
            if address in self.settings.peer_addresses
            else (
                f"the registration has no push ticket, and {address} is not among this engine's "
                "`peers`"
            )
        )

    def _note_offer(self, lease: RequestId, reader: str, route: Route) -> None:
        self.leases.note_offer(lease, reader)
        # The offered tokens are in the host buffer, so a reader need not wait for the rest.
        if self.host_buffer_copies.offer(lease, reader):
            self.outbox.reply(route, Ready(lease, reader))

    def _write(self, reply: MatcherReply, now: float) -> None:
        """Apply a reply of the matcher to a reader that we write for."""
        message, request = reply.message, reply.lease
        match message:
            case PushOffer(reader, ticket, ready_tokens) if request is not None:
                if self.leases.attach(
                    request, reader, now, "", self.writers.sibling_ranks_of(reader)
                ):
                    is_over = not self.leases.is_open(request)
                    opened = self.keys[0].open(ticket)
                    self.writers.offer(reader, opened, ready_tokens, is_over, now)
                else:
                    self.writers.drop(reader)
                    self.outbox.reply(
                        reply.route, Refused(request, reader, "too many readers share this lease")
                    )
            case PushWithdrawal(reader):
                self.writers.withdraw(reader)
            case _:
                self.writers.drop(message.reader)
                self.outbox.reply(reply.route, message)
