"""Push matching on each producer rank: joins a consumer's registration with its prefill.

Either side may arrive first. The two legs match by the match id of the push ticket. The match id
is unique, so a leg with a match id matches only a leg with the same match id. If neither leg has a
match id (behind a router that signs nothing), legs match by equal request ids, else by request ids
without the random tail that each engine appends, because a router sends the same X-Request-Id to
both legs. But clients choose request ids, and may choose the same id again. If a match is
ambiguous, `PushMatcher` refuses the registrations: a guess could hand one request's KV to another
request. See docs/decisions/030-push.md.

A registration waits for a prefill, and a prefill waits for a registration. Both waits are bounded
in time and in number. When the two meet, every registered consumer rank gets the ticket and from
then on is an ordinary reader. A running prefill may be published, and published again whenever
more tokens are ready; the readers get an offer each time. If a leg ends before its counterpart has
arrived (a failed prefill, a consumer without need for KV), the leg leaves a tombstone, and the
counterpart does not wait in vain. Each reader is in one state: waiting, offered exactly one
prefill, or unknown.

    registration  waiting ── prefill published ──> offered ── cancelled, expired, refused ──> gone
    prefill       waiting ── registration ───────> offered ── lease ended ──────────────────> gone

Pure: the caller passes `now` (local monotonic seconds) and handles the `results`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.protocol.heartbeats import Deadlines, earliest
from kvferry.protocol.messages import (
    PushCancel,
    PushOffer,
    PushRegistration,
    PushWithdrawal,
    Refused,
)
from kvferry.protocol.producer.matching import MatchIndex, MatchKey, Tombstones
from kvferry.types import RequestId, Route

MAX_READERS = 20_000
"""Maximum number of waiting and offered readers; further registrations are refused."""
MAX_LEASES_WAITED = 4
"""Upper limit of a registration's lifetime without a heartbeat, in our lease periods."""

RegistrationKey = tuple[str, str]
"""`("", match id)` or, without a match id, `(consumer engine id, request id)`.

Several readers may register under one key: the ranks of a consumer, the requests that together
answer one client request (its choices), and another consumer that the router tried after the first
had refused.
"""


@dataclass(frozen=True, slots=True)
class MatcherReply:
    """A message to one reader, and the route to send the message to."""

    route: Route
    message: PushOffer | PushWithdrawal | Refused
    lease: RequestId | None = None
    """The request whose lease is offered; None if the message is not an offer."""


@dataclass(frozen=True, slots=True)
class ReaderLeft:
    """A reader has declined the prefill that matched the reader's registration."""

    request: RequestId
    reader: str


@dataclass(frozen=True, slots=True)
class PrefillDeclined:
    """No reader will need this published prefill."""

    request: RequestId


MatcherResult = MatcherReply | ReaderLeft | PrefillDeclined


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The registration of one reader."""

    registration_key: RegistrationKey
    name: MatchKey
    route: Route
    lease_ttl_s: float


@dataclass(slots=True)
class _Prefill:
    """A published prefill, and the readers with an offer of the prefill."""

    name: MatchKey
    ticket: str
    ready_tokens: int
    registration_key: RegistrationKey | None = None
    offered_readers: dict[str, _Waiting] = field(default_factory=dict)
    """Readers with an offer of this prefill, and the registration of each reader."""


@dataclass(slots=True)
class PushMatcher:
    """Registrations and published prefills of this rank, matched as soon as both are present."""

    lease_ttl_s: float
    """How long a tombstone is kept; the caller passes its lease duration."""
    leg_wait_s: float = 30.0
    """How long a registration waits for its prefill leg to arrive at the engine."""
    results: list[MatcherResult] = field(default_factory=list, init=False)
    """Results that the owner of the matcher has not handled yet, oldest first."""
    _waiting: dict[str, _Waiting] = field(default_factory=dict, init=False)
    """Registrations that wait for a prefill, by reader."""
    _waiting_index: MatchIndex[str] = field(default_factory=MatchIndex, init=False)
    """Waiting readers."""
    _prefills: dict[RequestId, _Prefill] = field(default_factory=dict, init=False)
    _ready: MatchIndex[RequestId] = field(default_factory=MatchIndex, init=False)
    """Published prefills that no registration has matched yet."""
    _matched: dict[RegistrationKey, RequestId] = field(default_factory=dict, init=False)
    _offered_to: dict[str, RequestId] = field(default_factory=dict, init=False)
    """The prefill that each reader was offered."""
    _ended: Tombstones[RequestId] = field(init=False)
    """Prefills that have ended, with the reason."""
    _declined: Tombstones[RegistrationKey] = field(init=False)
    """Registrations whose readers need nothing, even if the prefill is computed again."""
    _expiry: Deadlines[str] = field(default_factory=Deadlines, init=False)
    _expected: MatchIndex[RequestId] = field(default_factory=MatchIndex, init=False)
    """Prefill legs that have arrived at the engine and have not ended."""
    _leg_deadlines: Deadlines[str] = field(default_factory=Deadlines, init=False)
    """Waiting readers whose prefill leg has not arrived: a router may have failed to send it, or
    the engine's front-end may have rejected it.
    """

    def __post_init__(self) -> None:
        self._ended, self._declined = Tombstones(self.lease_ttl_s), Tombstones(self.lease_ttl_s)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_entries(self) -> int:
        """Total number of registrations, offers, prefill legs, prefills and tombstones."""
        return (
            len(self._waiting)
            + len(self._offered_to)
            + len(self._expected)
            + len(self._prefills)
            + len(self._ended)
            + len(self._declined)
        )

    # -- calls from the engine --

    def expect(self, request: RequestId, match_id: str) -> None:
        """Note a prefill leg that the engine has yet to compute; registrations wait for it."""
        name = MatchKey(request, match_id)
        self._expected.add(request, name)
        for reader in self._waiting_index.find(name):
            self._leg_deadlines.drop(reader)

    def publish(self, request: RequestId, match_id: str, ticket: str, ready_tokens: int) -> None:
        """Publish a leased prefill, or more ready tokens of an already published prefill.

        Present and future registrations get an offer with this ticket.
        """
        known = self._prefills.get(request)
        if known is not None:
            known.ticket, known.ready_tokens = ticket, ready_tokens
            for reader, waiting in known.offered_readers.items():
                self._reply_offer(waiting.route, reader, request)
            return
        name = MatchKey(request, match_id)
        self._prefills[request] = _Prefill(name, ticket, ready_tokens)
        readers = self._waiting_index.find(name)
        found = {self._waiting[reader].registration_key for reader in readers}
        if len(found) == 1:
            self._offer(request, readers)
            return
        self._refuse_all(
            readers, f"{len(found)} requests of decode engines match prefill {request}"
        )
        self._ready.add(request, name)
        if not found and self._declined.find(name) is not None:
            self.results.append(PrefillDeclined(request))

    def fail(self, request: RequestId, match_id: str, reason: str, now: float) -> None:
        """Refuse every reader of a prefill that ended without KV to transfer."""
        self._expected.drop(request)
        name = MatchKey(request, match_id)
        prefill = self._prefills.get(request)
        for reader, waiting in prefill.offered_readers.items() if prefill is not None else ():
            self._refuse(waiting.route, reader, reason)
        self._forget(request)
        self._refuse_all(self._waiting_index.find(name), reason)
        self._ended.add(request, name, reason, now)

    def withdraw(self, request: RequestId, serial: int, now: float) -> None:
        """Withdraw a prefill that will be computed again; its readers wait again.

        If all readers have left already, no reader will need the recomputed prefill either.
        """
        prefill = self._forget(request)
        if (
            prefill is not None
            and prefill.registration_key is not None
            and not prefill.offered_readers
        ):
            self._declined.add(prefill.registration_key, prefill.name, "", now)
        for reader, waiting in prefill.offered_readers.items() if prefill is not None else ():
            self.results.append(MatcherReply(waiting.route, PushWithdrawal(reader, serial)))
            self._wait(reader, waiting, now)

    def end(self, request: RequestId, reason: str, now: float) -> list[str]:
        """Remove a prefill whose lease has ended; later registrations are refused with the reason.

        Returns the readers with an offer of the prefill.
        """
        self._expected.drop(request)
        prefill = self._forget(request)
        if prefill is None:
            return []
        self._ended.add(request, prefill.name, reason, now)
        return list(prefill.offered_readers)

    def _forget(self, request: RequestId) -> _Prefill | None:
        prefill = self._prefills.pop(request, None)
        if prefill is None:
            return None
        self._ready.drop(request)
        for reader in prefill.offered_readers:
            del self._offered_to[reader]
        if prefill.registration_key is not None:
            del self._matched[prefill.registration_key]
        return prefill

    # -- messages from consumers --

    def register(self, route: Route, message: PushRegistration, now: float) -> None:
        registration_key = _registration_key(message)
        name = MatchKey(message.request_id, message.match_id)
        self._declined.remove(registration_key)
        self._remove(message.reader)
        waiting = _Waiting(
            registration_key,
            name,
            route,
            min(message.lease_ttl_s, MAX_LEASES_WAITED * self.lease_ttl_s),
        )
        over = self._ended.find(name)
        found = (
            [self._matched[registration_key]]
            if registration_key in self._matched
            else self._ready.find(name)
        )
        if len(self._waiting) + len(self._offered_to) >= MAX_READERS:
            self._refuse(
                route,
                message.reader,
                f"more than {MAX_READERS} readers are registered with this engine",
            )
        elif len(found) == 1:
            self._wait(message.reader, waiting, now)
            self._offer(found[0], self._waiting_under(registration_key, name))
        elif over is not None or found:
            self._refuse(
                route,
                message.reader,
                over or f"{len(found)} prefills match this request: {', '.join(sorted(found))}",
            )
        else:
            self._wait(message.reader, waiting, now)
            if not self._expected.find(name):
                self._leg_deadlines.set(message.reader, now + self.leg_wait_s)

    def leave(self, reader: str) -> None:
        """Forget a reader that needs no further messages, whether it waits or was offered KV."""
        self._remove(reader)

    def offered_to(self, reader: str) -> RequestId | None:
        return self._offered_to.get(reader)

    def cancel(self, message: PushCancel, now: float) -> None:
        registration_key = _registration_key(message)
        self._remove(message.reader)
        if registration_key in self._matched:
            self.results.append(ReaderLeft(self._matched[registration_key], message.reader))
        self._decline(registration_key, MatchKey(message.request_id, message.match_id), now)

    def decline(self, match_id: str, now: float) -> None:
        """Handle a router's report that no further reader will register for this match id. A reader
        that has registered keeps the prefill.
        """
        self._decline(("", match_id), MatchKey(RequestId(""), match_id), now)

    def _decline(self, registration_key: RegistrationKey, name: MatchKey, now: float) -> None:
        if registration_key in self._matched or self._waiting_under(registration_key, name):
            return
        found = self._ready.find_exactly(name)
        if len(found) == 1:
            self.results.append(PrefillDeclined(found[0]))
        if len(found) <= 1:
            # Leave a tombstone even for a published prefill: the engine may preempt the prefill,
            # compute it again and publish it again.
            self._declined.add(registration_key, name, "", now)

    def renew(self, readers: Iterable[str], now: float) -> set[str]:
        """Extend registrations; returns the readers known to this rank.

        A reader with an offer counts as known: another rank may have withdrawn the same prefill
        already, and then the reader renews its registration again.
        """
        known = {
            reader for reader in readers if reader in self._waiting or reader in self._offered_to
        }
        for reader in known & self._waiting.keys():
            self._expiry.set(reader, now + self._waiting[reader].lease_ttl_s)
        return known

    # -- time --

    def advance(self, now: float) -> None:
        for reader in self._expiry.take_due(now):
            self._remove(reader)
        for reader in self._leg_deadlines.take_due(now):
            self._refuse(
                self._waiting[reader].route,
                reader,
                # A leg that ended more than `lease_ttl_s` before D registered is forgotten.
                f"no prefill leg for this request arrived within {self.leg_wait_s:g} s, or its "
                "blocks were freed long before the decode side registered",
            )
            self._remove(reader)
        self._ended.expire(now)
        self._declined.expire(now)

    def next_deadline(self) -> float | None:
        return earliest(
            self._expiry.next(),
            self._leg_deadlines.next(),
            self._ended.next_deadline(),
            self._declined.next_deadline(),
        )

    # -- internals --

    def _wait(self, reader: str, waiting: _Waiting, now: float) -> None:
        self._waiting[reader] = waiting
        self._waiting_index.add(reader, waiting.name)
        self._expiry.set(reader, now + waiting.lease_ttl_s)

    def _waiting_under(self, registration_key: RegistrationKey, name: MatchKey) -> list[str]:
        return [
            reader
            for reader in self._waiting_index.find_exactly(name)
            if self._waiting[reader].registration_key == registration_key
        ]

    def _offer(self, request: RequestId, readers: list[str]) -> None:
        """Offer a prefill to readers that wait under one registration key."""
        self._ready.drop(request)
        prefill = self._prefills[request]
        for reader in readers:
            waiting = self._stop_waiting(reader)
            self._matched[waiting.registration_key] = request
            prefill.registration_key = waiting.registration_key
            prefill.offered_readers[reader], self._offered_to[reader] = waiting, request
            self._reply_offer(waiting.route, reader, request)

    def _reply_offer(self, route: Route, reader: str, request: RequestId) -> None:
        prefill = self._prefills[request]
        self.results.append(
            MatcherReply(route, PushOffer(reader, prefill.ticket, prefill.ready_tokens), request)
        )

    def _refuse_all(self, readers: list[str], reason: str) -> None:
        for reader in readers:
            self._refuse(self._stop_waiting(reader).route, reader, reason)

    def _refuse(self, route: Route, reader: str, reason: str) -> None:
        self.results.append(MatcherReply(route, Refused("", reader, reason)))

    def _stop_waiting(self, reader: str) -> _Waiting:
        self._waiting_index.drop(reader)
        self._expiry.drop(reader)
        self._leg_deadlines.drop(reader)
        return self._waiting.pop(reader)

    def _remove(self, reader: str) -> None:
        """Remove a reader from the waiting readers and from the readers of a prefill."""
        offered = self._offered_to.pop(reader, None)
        if offered is not None:
            del self._prefills[offered].offered_readers[reader]
        if reader in self._waiting:
            self._stop_waiting(reader)


def _registration_key(message: PushRegistration | PushCancel) -> RegistrationKey:
    return (
        ("", message.match_id)
        if message.match_id
        else (message.decode_engine_id, message.request_id)
    )
