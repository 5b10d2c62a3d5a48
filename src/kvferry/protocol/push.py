"""What a producer is told at the start. Plain data; pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.errors import InvalidTicket
from kvferry.protocol.host_buffers import Publication
from kvferry.protocol.leases import EndedLease, LeaseTable
from kvferry.protocol.messages import (
    PushCancel,
    PushOffer,
    PushRegistration,
    PushWithdrawal,
    Refused,
    Revoke,
)
from kvferry.protocol.push_matcher import MatcherReply, PushMatcher
from kvferry.protocol.push_writer import PushWriter, WriterReply
from kvferry.protocol.tickets import PushTicketKey, TicketKey
from kvferry.types import Address, EngineId, Epoch, LeaseEnd, RequestId, Route

__all__ = ["ProducerSettings", "PushCoordinator"]


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    engine: EngineId
    epoch: Epoch
    lease_ttl_s: float
    lease_extension_s: float
    grant_wait_s: float
    uses_host_buffer: bool = False
    peers: frozenset[str] = frozenset()
    """In push: side channels (host:port) of consumers that may register without a push ticket, by a
    prefill's request id.
    """


# -------------------- handovers -------------------- A producer's half of push: who may register,
# what those who have are offered, and what is written for them. Pure.
#
# The matcher brings registrations and prefills together (`push_desk.py`); whoever has lent us
# blocks is written to instead of being sent an offer (`writers.py`). A reader that we write for is
# attached to the lease like one that reads.


_END_REASONS = {
    LeaseEnd.CONFIRMED: "the prefill has been handed over already",
    LeaseEnd.RELEASED: "the prefill was given up before",
    LeaseEnd.EXPIRED: "the prefill's lease ran out before",
    LeaseEnd.LAPSED: "nobody came in time for what was kept",
}


@dataclass(slots=True)
class PushCoordinator:
    settings: ProducerSettings
    keys: tuple[TicketKey, PushTicketKey]
    leases: LeaseTable
    """The producer's."""
    writers: PushWriter
    _matcher: PushMatcher = field(init=False)
    _replies: list[MatcherReply] = field(default_factory=list, init=False)
    _possibly_ended: list[RequestId] = field(default_factory=list, init=False)
    """Leases that may have ended."""
    _unwanted: list[RequestId] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._matcher = PushMatcher(self.settings.lease_ttl_s)

    @property
    def num_registrations(self) -> int:
        return self._matcher.num_waiting

    # -- the engine's side --

    def publish(self, request: RequestId, publication: Publication, now: float) -> None:
        """So much of a leased prefill is for whoever has registered, or will register, for it."""
        self._matcher.publish(
            request, publication.match_id, publication.ticket, publication.ready_tokens
        )
        self._drain_matcher(now)

    def withdraw(self, request: RequestId, serial: int, now: float) -> None:
        """A prefill is computed again."""
        self._matcher.withdraw(request, serial, now)
        self._drain_matcher(now)

    def fail(self, request: RequestId, match_id: str, reason: str, now: float) -> None:
        """A prefill has ended without anything to hand over."""
        self._matcher.fail(request, match_id, reason, now)
        self._drain_matcher(now)

    def end(self, ended: EndedLease) -> None:
        for reader in self._matcher.end(ended.request, _END_REASONS[ended.end]):
            self.writers.fail(reader, _END_REASONS[ended.end])

    def confirm_writes(self, now: float) -> None:
        """What had landed before this turn's commands, and is still leased, was right."""
        for request, reader in self.writers.take_landed():
            if self.leases.confirm(request, reader, now):
                self.writers.finish(reader)
                self._matcher.leave(reader)
                self._possibly_ended.append(request)
            else:
                self.writers.fail(reader, "the lease ended before all was written")

    # -- the consumer's side --

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
                self._matcher.register(route, message, now)
            case PushRegistration():
                self._replies.append(MatcherReply(route, Refused("", message.reader, str(refusal))))
            case PushCancel() if refusal is None:
                self.writers.drop(message.reader)
                self._matcher.cancel(message, now)
        self._drain_matcher(now)

    def renew(self, readers: Iterable[str], now: float) -> set[str]:
        """Extend these registrations, and the leases that are written from for them. Returns those
        that are known here.
        """
        known = self._matcher.renew(readers, now)
        self.leases.renew_all(self.writers.renew(known, now), now)
        return known

    def leave(self, reader: str) -> None:
        """It needs to hear no more."""
        self._matcher.leave(reader)

    def offered_to(self, reader: str) -> RequestId | None:
        return self._matcher.offered_to(reader)

    # -- time and results --

    def advance(self, now: float) -> None:
        self._matcher.advance(now)
        for reader in self.writers.advance(now):
            request = self._matcher.offered_to(reader)
            self._matcher.leave(reader)
            if request is not None:
                self._detach(request, reader, LeaseEnd.EXPIRED)

    def next_deadline(self) -> float | None:
        return min(
            (
                at
                for at in (self._matcher.next_deadline(), self.writers.next_deadline())
                if at is not None
            ),
            default=None,
        )

    def take_replies(self) -> list[MatcherReply]:
        replies, self._replies = self._replies, []
        return replies

    def take_writer_replies(self) -> list[WriterReply]:
        return self.writers.take_replies()

    def take_possibly_ended(self) -> list[RequestId]:
        """Leases that a reader has left; they may have ended by that."""
        touched, self._possibly_ended = self._possibly_ended, []
        return touched

    def take_unwanted(self) -> list[RequestId]:
        """Prefills that nobody will come for."""
        unwanted, self._unwanted = self._unwanted, []
        return unwanted

    # -- inside --

    def _refusal_reason(self, message: PushRegistration | PushCancel, now: float) -> str | None:
        """Who names a prefill may have it, or have it freed, so it must have been sent here for
        it.
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
            else "the push ticket is for something else"
        )

    def _refusal_reason_without_ticket(
        self, message: PushRegistration | PushCancel, now: float
    ) -> str | None:
        """Behind a router that signs nothing. Whoever registered was believed then."""
        if isinstance(message, PushCancel):
            return (
                None
                if self._matcher.renew([message.reader], now)
                else "nobody has registered under that name"
            )
        address = str(Address(message.decode_host, message.decode_port))
        return (
            None
            if address in self.settings.peers
            else f"there is no push ticket, and {address} is not among this engine's `peers`"
        )

    def _drain_matcher(self, now: float) -> None:
        for reply in self._matcher.take_replies():
            if self.writers.has(reply.message.reader):
                self._write(reply, now)
                continue
            if reply.lease is not None:
                self.leases.note_offer(reply.lease, reply.message.reader)
            self._replies.append(reply)
        for request, reader in self._matcher.take_left():
            self._detach(request, reader)
        self._unwanted += self._matcher.take_unwanted()

    def _write(self, reply: MatcherReply, now: float) -> None:
        """News for a reader that we write for."""
        message, request = reply.message, reply.lease
        match message:
            case PushOffer(reader, ticket, ready_tokens) if request is not None:
                if self.leases.attach(
                    request, reader, now, "", self.writers.sibling_ranks_of(reader)
                ):
                    is_over = not self.leases.is_open(request)
                    self.writers.offer(
                        reader, request, self.keys[0].open(ticket), ready_tokens, is_over, now
                    )
                else:
                    self.writers.drop(reader)
                    self._replies.append(
                        MatcherReply(
                            reply.route,
                            Refused(request, reader, "too many readers share this lease"),
                        )
                    )
            case PushWithdrawal(reader):
                self.writers.withdraw(reader)
            case _:
                self.writers.drop(message.reader)
                self._replies.append(reply)

    def _detach(self, request: RequestId, reader: str, end: LeaseEnd = LeaseEnd.RELEASED) -> None:
        self.leases.detach(request, reader, end)
        self._possibly_ended.append(request)
