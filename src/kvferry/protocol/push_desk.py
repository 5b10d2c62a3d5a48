"""Where registrations and finished prefills meet, on each rank of the side that computes. Pure.

A prefill may be published while it still computes, and again whenever there is more of it; its readers are told each time.

A registration waits for its prefill, a prefill for its registration; each for a bounded time and in bounded number. When they meet,
every rank of the consumer that registered is sent the ticket, and from then on it is a reader like any other. What ends before its
counterpart has come (a prefill that failed, a consumer that needs nothing) is remembered for a while, so that nobody waits for nothing.

    registration   waiting ── prefill published ──> offered      ── cancelled, expired, refused ──> gone
    prefill        waiting ── registration ───────> offered      ── its lease has ended ──────────> gone
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.protocol.deadlines import Deadlines
from kvferry.protocol.matching import MatchName, Shelf
from kvferry.protocol.messages import PushCancel, PushOffer, PushRegistration, PushWithdrawal, Refused
from kvferry.types import RequestId, Route

__all__ = ["DeskReply", "PushDesk"]

MAX_WAITING = 20_000
"""Registrations of ranks. More are refused."""
MAX_REMEMBERED = 10_000
"""Endings that came before their counterpart. Of more, the oldest is forgotten: its counterpart then waits for its own deadline."""

Claimant = tuple[str, str]
"""A consumer's engine and its handover, or, without one, its request. Several readers register for it: the ranks, and the requests that
answer one client's request together and so share a handover."""


@dataclass(frozen=True, slots=True)
class DeskReply:
    route: Route
    message: PushOffer | PushWithdrawal | Refused
    lease: RequestId | None = None
    """What is offered."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    claimant: Claimant
    name: MatchName
    route: Route
    lease_s: float


@dataclass(slots=True)
class _Prefill:
    name: MatchName
    ticket: str
    ready_tokens: int
    claimant: Claimant | None = None
    audience: dict[str, _Waiting] = field(default_factory=dict)
    """Readers that were offered it."""


@dataclass(slots=True)
class PushDesk:
    remember_s: float
    """How long an ending is remembered."""
    _waiting: dict[str, _Waiting] = field(default_factory=dict, init=False)
    """By reader."""
    _readers: dict[Claimant, list[str]] = field(default_factory=dict, init=False)
    _wanted: Shelf[Claimant] = field(default_factory=Shelf, init=False)
    _prefills: dict[RequestId, _Prefill] = field(default_factory=dict, init=False)
    _ready: Shelf[RequestId] = field(default_factory=Shelf, init=False)
    """Those that nobody has come for."""
    _taken: dict[Claimant, RequestId] = field(default_factory=dict, init=False)
    _endings: "_Endings" = field(default_factory=lambda: _Endings(), init=False)
    _expiry: Deadlines[str] = field(default_factory=Deadlines, init=False)
    _replies: list[DeskReply] = field(default_factory=list, init=False)
    _given_up: "_GivenUp" = field(default_factory=lambda: _GivenUp(), init=False)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_remembered(self) -> int:
        """All that is held here, of whatever kind."""
        return len(self._waiting) + len(self._prefills) + len(self._endings)

    # -- the engine's side -----------------------------------------------------------------------------------------

    def publish(self, request: RequestId, handover: str, ticket: str, ready_tokens: int) -> None:
        """So much of this prefill is there and leased; whoever registers for it gets this ticket. Or there is more of it than before."""
        known = self._prefills.get(request)
        if known is not None:
            known.ticket, known.ready_tokens = ticket, ready_tokens
            for reader, waiting in known.audience.items():
                self._reply_offer(waiting.route, reader, request)
            return
        name = MatchName(request, handover)
        self._prefills[request] = _Prefill(name, ticket, ready_tokens)
        if self._endings.take_declined(name):
            self._given_up.unwanted.append(request)
            return
        found = self._wanted.find(name)
        if len(found) == 1:
            self._offer(request, found[0])
            return
        for claimant in found:
            self._refuse_all(claimant, f"{len(found)} requests of decode sides match prefill {request}")
        self._ready.add(request, name)

    def fail(self, request: RequestId, handover: str, reason: str, now: float) -> None:
        """This prefill ended without anything to hand over."""
        name = MatchName(request, handover)
        prefill = self._prefills.get(request)
        for reader, waiting in prefill.audience.items() if prefill is not None else ():
            self._refuse(waiting.route, reader, reason)
        self.forget(request)
        for claimant in self._wanted.find(name):
            self._refuse_all(claimant, reason)
        self._endings.remember_failed(name, reason, now + self.remember_s)

    def withdraw(self, request: RequestId, serial: int, now: float) -> None:
        """This prefill is computed anew; its readers wait as they did before."""
        prefill = self._prefills.get(request)
        self.forget(request)
        for reader, waiting in prefill.audience.items() if prefill is not None else ():
            self._replies.append(DeskReply(waiting.route, PushWithdrawal(reader, serial)))
            assert prefill is not None
            self._wait(reader, waiting, now)

    def leave(self, request: RequestId, reader: str) -> None:
        """A reader needs to hear no more of it."""
        if request in self._prefills:
            self._prefills[request].audience.pop(reader, None)

    def note_expiry(self, request: RequestId, now: float) -> None:
        """Its lease has run out, perhaps before anybody came: whoever comes now is told."""
        if request in self._ready:
            self._endings.remember_failed(self._prefills[request].name, "the prefill's lease ran out before", now + self.remember_s)

    def forget(self, request: RequestId) -> None:
        """Its lease has ended."""
        prefill = self._prefills.pop(request, None)
        self._ready.drop(request)
        if prefill is not None and prefill.claimant is not None:
            del self._taken[prefill.claimant]

    # -- the consumer's side ---------------------------------------------------------------------------------------

    def register(self, route: Route, message: PushRegistration, now: float) -> None:
        claimant = _claimant(message)
        name = MatchName(message.request_id, message.handover)
        self._endings.forget_declined(claimant)
        taken = self._taken.get(claimant)
        waiting = _Waiting(claimant, name, route, message.lease_s)
        if taken is not None:
            self._prefills[taken].audience[message.reader] = waiting
            self._reply_offer(route, message.reader, taken)
            return
        if message.reader in self._waiting:
            self._drop_reader(message.reader)
        failure = self._endings.failure_of(name)
        found = self._ready.find(name)
        if failure is not None or len(found) > 1:
            self._refuse(route, message.reader, failure or f"{len(found)} prefills match this request: {', '.join(sorted(found))}")
        elif len(self._waiting) >= MAX_WAITING:
            self._refuse(route, message.reader, f"more than {MAX_WAITING} registrations wait here")
        else:
            self._wait(message.reader, waiting, now)
            if found:
                self._offer(found[0], claimant)

    def cancel(self, message: PushCancel, now: float) -> None:
        claimant = _claimant(message)
        if message.reader in self._waiting:
            self._drop_reader(message.reader)
        if claimant in self._taken:
            self.leave(self._taken[claimant], message.reader)
            self._given_up.left.append((self._taken[claimant], message.reader))
        if claimant in self._taken or claimant in self._readers:
            return
        name = MatchName(message.request_id, message.handover)
        found = self._ready.find(name)
        if len(found) == 1:
            self._given_up.unwanted.append(found[0])
        elif not found:
            self._endings.remember_declined(claimant, name, now + self.remember_s)

    def renew(self, readers: Iterable[str], now: float) -> set[str]:
        """Extend these registrations; returns those that wait here."""
        known = {reader for reader in readers if reader in self._waiting}
        for reader in known:
            self._expiry.set(reader, now + self._waiting[reader].lease_s)
        return known

    # -- time and results ------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        for reader in self._expiry.take_due(now):
            self._drop_reader(reader)
        self._endings.expire(now)

    def next_deadline(self) -> float | None:
        return min((at for at in (self._expiry.next(), self._endings.next_deadline()) if at is not None), default=None)

    def take_replies(self) -> list[DeskReply]:
        replies, self._replies = self._replies, []
        return replies

    def take_unwanted(self) -> list[RequestId]:
        """Published prefills that nobody will come for."""
        unwanted, self._given_up.unwanted = self._given_up.unwanted, []
        return unwanted

    def take_left(self) -> list[tuple[RequestId, str]]:
        """Readers that will not come for what they were offered."""
        left, self._given_up.left = self._given_up.left, []
        return left

    # -- inside ----------------------------------------------------------------------------------------------------

    def _wait(self, reader: str, waiting: _Waiting, now: float) -> None:
        self._waiting[reader] = waiting
        self._readers.setdefault(waiting.claimant, []).append(reader)
        self._wanted.add(waiting.claimant, waiting.name)
        self._expiry.set(reader, now + waiting.lease_s)

    def _offer(self, request: RequestId, claimant: Claimant) -> None:
        self._ready.drop(request)
        prefill = self._prefills[request]
        self._taken[claimant], prefill.claimant = request, claimant
        for reader, waiting in self._drop(claimant):
            prefill.audience[reader] = waiting
            self._reply_offer(waiting.route, reader, request)

    def _reply_offer(self, route: Route, reader: str, request: RequestId) -> None:
        prefill = self._prefills[request]
        self._replies.append(DeskReply(route, PushOffer(reader, prefill.ticket, prefill.ready_tokens), request))

    def _refuse_all(self, claimant: Claimant, reason: str) -> None:
        for reader, waiting in self._drop(claimant):
            self._refuse(waiting.route, reader, reason)

    def _refuse(self, route: Route, reader: str, reason: str) -> None:
        self._replies.append(DeskReply(route, Refused("", reader, reason)))

    def _drop(self, claimant: Claimant) -> list[tuple[str, _Waiting]]:
        readers = self._readers.pop(claimant, [])
        self._wanted.drop(claimant)
        for reader in readers:
            self._expiry.drop(reader)
        return [(reader, self._waiting.pop(reader)) for reader in readers]

    def _drop_reader(self, reader: str) -> None:
        claimant = self._waiting.pop(reader).claimant
        self._expiry.drop(reader)
        self._readers[claimant].remove(reader)
        if not self._readers[claimant]:
            self._drop(claimant)


def _claimant(message: PushRegistration | PushCancel) -> Claimant:
    return message.decode_engine_id, f"handover {message.handover}" if message.handover else message.request_id


@dataclass(slots=True)
class _GivenUp:
    """What is not needed any more, since the last time somebody asked."""

    unwanted: list[RequestId] = field(default_factory=list)
    left: list[tuple[RequestId, str]] = field(default_factory=list)


@dataclass(slots=True)
class _Endings:
    """What ended before its counterpart came. Keys are numbered, so that the oldest goes first."""

    _failed: Shelf[str] = field(default_factory=Shelf, init=False)
    _declined: Shelf[str] = field(default_factory=Shelf, init=False)
    _reasons: dict[str, str] = field(default_factory=dict, init=False)
    _expiry: Deadlines[str] = field(default_factory=Deadlines, init=False)

    def __len__(self) -> int:
        return len(self._failed) + len(self._declined)

    def remember_failed(self, name: MatchName, reason: str, until: float) -> None:
        key = f"failed {name.request}"
        self._failed.add(key, name)
        self._reasons[key] = reason
        self._keep(key, self._failed, until)

    def remember_declined(self, claimant: Claimant, name: MatchName, until: float) -> None:
        key = _key(claimant)
        self._declined.add(key, name)
        self._keep(key, self._declined, until)

    def forget_declined(self, claimant: Claimant) -> None:
        """Another of its readers has come after all."""
        self._forget(_key(claimant))

    def failure_of(self, name: MatchName) -> str | None:
        """Not by ids without their tails: a client that tries again with its old id may get another answer."""
        found = self._failed.find_exactly(name)
        return self._reasons[found[0]] if found else None

    def take_declined(self, name: MatchName) -> bool:
        found = self._declined.find(name)
        for key in found if len(found) == 1 else ():
            self._forget(key)
        return len(found) == 1

    def expire(self, now: float) -> None:
        for key in self._expiry.take_due(now):
            self._forget(key)

    def next_deadline(self) -> float | None:
        return self._expiry.next()

    def _keep(self, key: str, shelf: Shelf[str], until: float) -> None:
        self._expiry.set(key, until)
        if len(shelf) > MAX_REMEMBERED:
            self._forget(shelf.oldest)

    def _forget(self, key: str) -> None:
        self._failed.drop(key)
        self._declined.drop(key)
        self._reasons.pop(key, None)
        self._expiry.drop(key)


def _key(claimant: Claimant) -> str:
    return f"declined {claimant[0]} {claimant[1]}"
