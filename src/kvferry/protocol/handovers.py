"""A producer's half of push: who may register, what those who have are offered, and what is written for them. Pure.

The desk brings registrations and prefills together (`push_desk.py`); whoever has lent us blocks is written to instead of being sent an
offer (`writers.py`). A reader that we write for is attached to the lease like one that reads.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.errors import InvalidTicket
from kvferry.protocol.exposures import Publication
from kvferry.protocol.leases import EndedLease, LeaseTable
from kvferry.protocol.messages import PushCancel, PushOffer, PushRegistration, PushWithdrawal, Refused, Revoke
from kvferry.protocol.producer_settings import ProducerSettings
from kvferry.protocol.push_desk import DeskReply, PushDesk
from kvferry.protocol.push_tickets import PushTicketKey
from kvferry.protocol.tickets import TicketKey
from kvferry.protocol.writers import WriterReply, Writers
from kvferry.types import Address, LeaseEnd, RequestId, Route

__all__ = ["Handovers"]

_END_REASONS = {
    LeaseEnd.CONFIRMED: "the prefill has been handed over already",
    LeaseEnd.RELEASED: "the prefill was given up before",
    LeaseEnd.EXPIRED: "the prefill's lease ran out before",
    LeaseEnd.LAPSED: "nobody came in time for what was kept",
}


@dataclass(slots=True)
class Handovers:
    settings: ProducerSettings
    keys: tuple[TicketKey, PushTicketKey]
    leases: LeaseTable
    """The producer's."""
    writers: Writers
    _desk: PushDesk = field(init=False)
    _replies: list[DeskReply] = field(default_factory=list, init=False)
    _touched: list[RequestId] = field(default_factory=list, init=False)
    """Leases that may have ended."""
    _unwanted: list[RequestId] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._desk = PushDesk(self.settings.lease_ttl_s)

    @property
    def num_registrations(self) -> int:
        return self._desk.num_waiting

    # -- the engine's side -------------------------------------------------------------------------------------------

    def publish(self, request: RequestId, publication: Publication, now: float) -> None:
        """So much of a leased prefill is for whoever has registered, or will register, for it."""
        self._desk.publish(request, publication.handover, publication.ticket, publication.ready_tokens)
        self._take_from_desk(now)

    def withdraw(self, request: RequestId, serial: int, now: float) -> None:
        """A prefill is computed anew."""
        self._desk.withdraw(request, serial, now)
        self._take_from_desk(now)

    def fail(self, request: RequestId, handover: str, reason: str, now: float) -> None:
        """A prefill has ended without anything to hand over."""
        self._desk.fail(request, handover, reason, now)
        self._take_from_desk(now)

    def end(self, ended: EndedLease) -> None:
        for reader in self._desk.end(ended.request, _END_REASONS[ended.end]):
            self.writers.fail(reader, _END_REASONS[ended.end])

    def settle_writes(self, now: float) -> None:
        """What had landed before this turn's commands, and is still leased, was right."""
        for request, reader in self.writers.take_landed():
            if self.leases.confirm(request, reader, now):
                self.writers.finish(reader)
                self._desk.leave(reader)
                self._touched.append(request)
            else:
                self.writers.fail(reader, "the lease ended before all was written")

    # -- the consumer's side -----------------------------------------------------------------------------------------

    def receive(self, route: Route, message: PushRegistration | PushCancel | Revoke, now: float) -> None:
        if isinstance(message, Revoke):
            self.writers.revoke(route, message)
            return
        objection = self._objection_to(message, now)
        match message:
            case PushRegistration() if objection is None:
                self.writers.invite(route, message, now)
                self._desk.register(route, message, now)
            case PushRegistration():
                self._replies.append(DeskReply(route, Refused("", message.reader, str(objection))))
            case PushCancel() if objection is None:
                self.writers.drop(message.reader)
                self._desk.cancel(message, now)
        self._take_from_desk(now)

    def renew(self, readers: Iterable[str], now: float) -> set[str]:
        """Extend these registrations, and the leases that are written from for them. Returns those that are known here."""
        known = self._desk.renew(readers, now)
        self.leases.renew_all(self.writers.renew(known, now), now)
        return known

    def leave(self, reader: str) -> None:
        """It needs to hear no more."""
        self._desk.leave(reader)

    def offered_to(self, reader: str) -> RequestId | None:
        return self._desk.offered_to(reader)

    # -- time and results --------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        self._desk.advance(now)
        for reader in self.writers.advance(now):
            request = self._desk.offered_to(reader)
            self._desk.leave(reader)
            if request is not None:
                self._detach(request, reader, LeaseEnd.EXPIRED)

    def next_deadline(self) -> float | None:
        return min((at for at in (self._desk.next_deadline(), self.writers.next_deadline()) if at is not None), default=None)

    def take_replies(self) -> list[DeskReply]:
        replies, self._replies = self._replies, []
        return replies

    def take_writers_replies(self) -> list[WriterReply]:
        return self.writers.take_replies()

    def take_touched(self) -> list[RequestId]:
        """Leases that a reader has left; they may have ended by that."""
        touched, self._touched = self._touched, []
        return touched

    def take_unwanted(self) -> list[RequestId]:
        """Prefills that nobody will come for."""
        unwanted, self._unwanted = self._unwanted, []
        return unwanted

    # -- inside --------------------------------------------------------------------------------------------------------

    def _objection_to(self, message: PushRegistration | PushCancel, now: float) -> str | None:
        """Who names a prefill may have it, or have it freed, so it must have been sent here for it."""
        if message.epoch != self.settings.epoch:
            return "the producer has restarted since the router chose it"
        if not message.handover and not message.push_ticket:
            return self._objection_without_ticket(message, now)
        try:
            ticket = self.keys[1].open(message.push_ticket)
        except InvalidTicket as error:
            return str(error)
        shown = (ticket.engine, ticket.epoch, ticket.handover)
        return None if shown == (self.settings.engine, self.settings.epoch, message.handover) else "the push ticket is for something else"

    def _objection_without_ticket(self, message: PushRegistration | PushCancel, now: float) -> str | None:
        """Behind a router that signs nothing. Whoever registered was believed then."""
        if isinstance(message, PushCancel):
            return None if self._desk.renew([message.reader], now) else "nobody has registered under that name"
        address = str(Address(message.decode_host, message.decode_port))
        return None if address in self.settings.peers else f"there is no push ticket, and {address} is not among this engine's `peers`"

    def _take_from_desk(self, now: float) -> None:
        for reply in self._desk.take_replies():
            if self.writers.has(reply.message.reader):
                self._write(reply, now)
                continue
            if reply.lease is not None:
                self.leases.note_offer(reply.lease, reply.message.reader)
            self._replies.append(reply)
        for request, reader in self._desk.take_left():
            self._detach(request, reader)
        self._unwanted += self._desk.take_unwanted()

    def _write(self, reply: DeskReply, now: float) -> None:
        """News for a reader that we write for."""
        message, request = reply.message, reply.lease
        match message:
            case PushOffer(reader, ticket, ready_tokens) if request is not None:
                if self.leases.attach(request, reader, now, "", self.writers.companions_of(reader)):
                    is_over = not self.leases.is_open(request)
                    self.writers.offer(reader, request, self.keys[0].open(ticket), ready_tokens, is_over, now)
                else:
                    self.writers.drop(reader)
                    self._replies.append(DeskReply(reply.route, Refused(request, reader, "too many readers share this lease")))
            case PushWithdrawal(reader):
                self.writers.withdraw(reader)
            case _:
                self.writers.drop(message.reader)
                self._replies.append(reply)

    def _detach(self, request: RequestId, reader: str, end: LeaseEnd = LeaseEnd.RELEASED) -> None:
        self.leases.detach(request, reader, end)
        self._touched.append(request)
