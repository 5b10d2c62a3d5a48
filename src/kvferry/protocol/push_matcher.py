"""Which registration and which finished prefill belong to one request, whichever comes first. Pure.

By the match id of their push ticket: it is nobody else's, so what has one matches only what has the
same. Where neither has one (behind a router that signs nothing) by equal request ids; else by
request ids without the random tail that each engine appends, because a router hands the same
X-Request-Id to both legs. But clients choose those, and choose the same again. What matches more
than one thing is the caller's to refuse: a guess would hand one request's KV to another.
"""

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvferry.protocol.heartbeats import Deadlines
from kvferry.protocol.messages import (
    PushCancel,
    PushOffer,
    PushRegistration,
    PushWithdrawal,
    Refused,
)
from kvferry.types import RequestId, Route

__all__ = [
    "MAX_LEASES_WAITED",
    "MAX_TOMBSTONES",
    "MatchIndex",
    "MatchKey",
    "MatcherReply",
    "PushMatcher",
    "PushTombstones",
]


K = TypeVar("K", bound=Hashable)
_TAIL = re.compile(r"-[0-9a-f]{8}\Z")


@dataclass(frozen=True, slots=True)
class MatchKey:
    """What one leg is known by."""

    request: str
    """Its engine's own id."""
    match_id: str = ""
    """Of its push ticket; empty: it has none."""

    @property
    def base(self) -> str:
        return _TAIL.sub("", self.request)


@dataclass(slots=True)
class MatchIndex(Generic[K]):
    """Things that wait for their counterpart, found by its name without looking at all of them."""

    _names: dict[K, MatchKey] = field(default_factory=dict, init=False)
    _by_match_id: dict[str, dict[K, None]] = field(default_factory=dict, init=False)
    _by_request: dict[str, dict[K, None]] = field(default_factory=dict, init=False)
    _by_base: dict[str, dict[K, None]] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: K) -> bool:
        return key in self._names

    @property
    def oldest(self) -> K:
        return next(iter(self._names))

    def add(self, key: K, name: MatchKey) -> None:
        """In place of what it was known by before."""
        self.drop(key)
        self._names[key] = name
        for index, value in self._entries(name):
            index.setdefault(value, {})[key] = None

    def drop(self, key: K) -> None:
        """Unknown keys are ignored."""
        name = self._names.pop(key, None)
        if name is None:
            return
        for index, value in self._entries(name):
            del index[value][key]
            if not index[value]:
                del index[value]

    def find(self, name: MatchKey) -> list[K]:
        """All that match at the first step at which any does."""
        return self.find_exactly(name) or (
            [] if name.match_id else list(self._by_base.get(name.base, ()))
        )

    def find_exactly(self, name: MatchKey) -> list[K]:
        """The same without the step that ignores tails."""
        return list(
            self._by_match_id.get(name.match_id, ())
            if name.match_id
            else self._by_request.get(name.request, ())
        )

    def _entries(self, name: MatchKey) -> list[tuple[dict[str, dict[K, None]], str]]:
        if name.match_id:
            return [(self._by_match_id, name.match_id)]
        return [(self._by_request, name.request), (self._by_base, name.base)]


# -------------------- push endings -------------------- What of a push ended before its counterpart
# came: remembered for a while, so that nobody waits for nothing. Pure.


MAX_TOMBSTONES = 10_000
"""Of each kind. Of more, the oldest is forgotten: its counterpart then waits for its own
deadline.
"""

TombstoneKey = tuple[str, str]


@dataclass(slots=True)
class PushTombstones:
    """Prefills that are over, with the reason, and consumers that need nothing. Only those with a
    handover: a client that tries again with its old request id is not the one that was here before.
    """

    tombstone_ttl_s: float
    _over: MatchIndex[str] = field(default_factory=MatchIndex, init=False)
    _declined: MatchIndex[str] = field(default_factory=MatchIndex, init=False)
    _reasons: dict[str, str] = field(default_factory=dict, init=False)
    _expiry: Deadlines[str] = field(default_factory=Deadlines, init=False)
    _undated: dict[str, None] = field(default_factory=dict, init=False)
    """Their time counts from the next look at the clock."""

    def __len__(self) -> int:
        return len(self._over) + len(self._declined)

    def add_ended(self, name: MatchKey, reason: str, now: float | None = None) -> None:
        """Without `now`, it counts from the next `expire`."""
        if not name.match_id:
            return
        key = f"over {name.request}"
        self._over.add(key, name)
        self._reasons[key] = reason
        self._keep(key, self._over, now)

    def add_declined(self, registration_key: TombstoneKey, name: MatchKey, now: float) -> None:
        if not name.match_id:
            return
        key = _declined_key(registration_key)
        self._declined.add(key, name)
        self._keep(key, self._declined, now)

    def remove_declined(self, registration_key: TombstoneKey) -> None:
        """Another of its readers has come after all."""
        self._forget(_declined_key(registration_key))

    def end_reason(self, name: MatchKey) -> str | None:
        found = self._over.find_exactly(name)
        return self._reasons[found[0]] if found else None

    def is_declined(self, name: MatchKey) -> bool:
        """Whether all who would have come for it need nothing, however often it is computed."""
        return bool(self._declined.find_exactly(name))

    def expire(self, now: float) -> None:
        for key in self._undated:
            self._expiry.set(key, now + self.tombstone_ttl_s)
        self._undated.clear()
        for key in self._expiry.take_due(now):
            self._forget(key)

    def next_deadline(self) -> float | None:
        return self._expiry.next()

    def _keep(self, key: str, match_index: MatchIndex[str], now: float | None) -> None:
        if now is None:
            self._undated[key] = None
        else:
            self._expiry.set(key, now + self.tombstone_ttl_s)
        if len(match_index) > MAX_TOMBSTONES:
            self._forget(match_index.oldest)

    def _forget(self, key: str) -> None:
        self._over.drop(key)
        self._declined.drop(key)
        self._reasons.pop(key, None)
        self._expiry.drop(key)
        self._undated.pop(key, None)


def _declined_key(registration_key: TombstoneKey) -> str:
    return f"declined {registration_key[0]} {registration_key[1]}"


# -------------------- push desk --------------------
# Where registrations and finished prefills meet, on each rank of the side that computes. Pure.
#
# A prefill may be published while it still computes, and again whenever there is more of it; its
# readers are told each time.
#
# A registration waits for its prefill, a prefill for its registration; each for a bounded time and
# in bounded number. When they meet, every rank of the consumer that registered is sent the ticket,
# and from then on it is a reader like any other. What ends before its counterpart has come (a
# prefill that failed, a consumer that needs nothing) is remembered for a while, so that nobody
# waits for nothing. A reader is in one place: it waits, or it was offered one prefill and hears of
# what becomes of it, or it is unknown.
#
#     registration   waiting ── prefill published ──> offered      ── cancelled, expired, refused ──> gone
#     prefill        waiting ── registration ───────> offered      ── its lease has ended ──────────> gone


MAX_READERS = 20_000
"""Ranks of consumers that wait, or hear of what they were offered. More are refused."""
MAX_LEASES_WAITED = 4
"""A registration lives as long as it asks for, but no more than so many leases of ours."""

RegistrationKey = tuple[str, str]
"""A handover; or, without one, a consumer's engine and its request. Several readers register for
it: the ranks, the requests that answer one client's request together, and another consumer that a
router has turned to when the first refused.
"""


@dataclass(frozen=True, slots=True)
class MatcherReply:
    route: Route
    message: PushOffer | PushWithdrawal | Refused
    lease: RequestId | None = None
    """What is offered."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    registration_key: RegistrationKey
    name: MatchKey
    route: Route
    lease_s: float


@dataclass(slots=True)
class _Prefill:
    name: MatchKey
    ticket: str
    ready_tokens: int
    registration_key: RegistrationKey | None = None
    offered_readers: dict[str, _Waiting] = field(default_factory=dict)
    """Readers that were offered it."""


@dataclass(slots=True)
class PushMatcher:
    tombstone_ttl_s: float
    """How long an ending is remembered."""
    _waiting: dict[str, _Waiting] = field(default_factory=dict, init=False)
    """By reader."""
    _readers: dict[RegistrationKey, list[str]] = field(default_factory=dict, init=False)
    _waiting_index: MatchIndex[RegistrationKey] = field(default_factory=MatchIndex, init=False)
    _prefills: dict[RequestId, _Prefill] = field(default_factory=dict, init=False)
    _ready: MatchIndex[RequestId] = field(default_factory=MatchIndex, init=False)
    """Those that nobody has come for."""
    _matched: dict[RegistrationKey, RequestId] = field(default_factory=dict, init=False)
    _offered_to: dict[str, RequestId] = field(default_factory=dict, init=False)
    """By reader, what it was offered."""
    _tombstones: PushTombstones = field(init=False)
    _expiry: Deadlines[str] = field(default_factory=Deadlines, init=False)
    _replies: list[MatcherReply] = field(default_factory=list, init=False)
    _given_up: "_Unclaimed" = field(default_factory=lambda: _Unclaimed(), init=False)

    def __post_init__(self) -> None:
        self._tombstones = PushTombstones(self.tombstone_ttl_s)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_entries(self) -> int:
        """All that is held here, of whatever kind."""
        return (
            len(self._waiting) + len(self._offered_to) + len(self._prefills) + len(self._tombstones)
        )

    # -- the engine's side --

    def publish(self, request: RequestId, match_id: str, ticket: str, ready_tokens: int) -> None:
        """So much of this prefill is there and leased; whoever registers for it gets this ticket.
        Or there is more of it than before.
        """
        known = self._prefills.get(request)
        if known is not None:
            known.ticket, known.ready_tokens = ticket, ready_tokens
            for reader, waiting in known.offered_readers.items():
                self._reply_offer(waiting.route, reader, request)
            return
        name = MatchKey(request, match_id)
        self._prefills[request] = _Prefill(name, ticket, ready_tokens)
        found = self._waiting_index.find(name)
        if len(found) == 1:
            self._offer(request, found[0])
            return
        for registration_key in found:
            self._refuse_all(
                registration_key, f"{len(found)} requests of decode sides match prefill {request}"
            )
        self._ready.add(request, name)
        if not found and self._tombstones.is_declined(name):
            self._given_up.unwanted.append(request)

    def fail(self, request: RequestId, match_id: str, reason: str, now: float) -> None:
        """This prefill ended without anything to hand over."""
        name = MatchKey(request, match_id)
        prefill = self._prefills.get(request)
        for reader, waiting in prefill.offered_readers.items() if prefill is not None else ():
            self._refuse(waiting.route, reader, reason)
        self._forget(request)
        for registration_key in self._waiting_index.find(name):
            self._refuse_all(registration_key, reason)
        self._tombstones.add_ended(name, reason, now)

    def withdraw(self, request: RequestId, serial: int, now: float) -> None:
        """This prefill is computed again; its readers wait as they did before. If all have left,
        nobody comes for the next one either.
        """
        prefill = self._forget(request)
        if (
            prefill is not None
            and prefill.registration_key is not None
            and not prefill.offered_readers
        ):
            self._tombstones.add_declined(prefill.registration_key, prefill.name, now)
        for reader, waiting in prefill.offered_readers.items() if prefill is not None else ():
            self._replies.append(MatcherReply(waiting.route, PushWithdrawal(reader, serial)))
            self._wait(reader, waiting, now)

    def end(self, request: RequestId, reason: str) -> list[str]:
        """Its lease has ended. Whoever comes for it now is told why there is nothing. Returns the
        readers that had been offered it.
        """
        prefill = self._forget(request)
        if prefill is None:
            return []
        self._tombstones.add_ended(prefill.name, reason)
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

    # -- the consumer's side --

    def register(self, route: Route, message: PushRegistration, now: float) -> None:
        registration_key = _registration_key(message)
        name = MatchKey(message.request_id, message.match_id)
        self._tombstones.remove_declined(registration_key)
        self._remove(message.reader)
        waiting = _Waiting(
            registration_key,
            name,
            route,
            min(message.lease_s, MAX_LEASES_WAITED * self.tombstone_ttl_s),
        )
        over = self._tombstones.end_reason(name)
        found = (
            [self._matched[registration_key]]
            if registration_key in self._matched
            else self._ready.find(name)
        )
        if len(self._waiting) + len(self._offered_to) >= MAX_READERS:
            self._refuse(
                route, message.reader, f"more than {MAX_READERS} readers are registered here"
            )
        elif len(found) == 1:
            self._wait(message.reader, waiting, now)
            self._offer(found[0], registration_key)
        elif over is not None or found:
            self._refuse(
                route,
                message.reader,
                over or f"{len(found)} prefills match this request: {', '.join(sorted(found))}",
            )
        else:
            self._wait(message.reader, waiting, now)

    def leave(self, reader: str) -> None:
        """It needs to hear no more, whether it waits or was offered something."""
        self._remove(reader)

    def offered_to(self, reader: str) -> RequestId | None:
        return self._offered_to.get(reader)

    def cancel(self, message: PushCancel, now: float) -> None:
        registration_key = _registration_key(message)
        self._remove(message.reader)
        if registration_key in self._matched:
            self._given_up.left.append((self._matched[registration_key], message.reader))
        if registration_key in self._matched or registration_key in self._readers:
            return
        name = MatchKey(message.request_id, message.match_id)
        found = self._ready.find_exactly(name)
        if len(found) == 1:
            self._given_up.unwanted.append(found[0])
        if len(found) <= 1:
            # Also of one that is there: it may be computed again.
            self._tombstones.add_declined(registration_key, name, now)

    def renew(self, readers: Iterable[str], now: float) -> set[str]:
        """Extend these registrations; returns those that are known here. One may have been offered
        what is withdrawn elsewhere already.
        """
        known = {
            reader for reader in readers if reader in self._waiting or reader in self._offered_to
        }
        for reader in known & self._waiting.keys():
            self._expiry.set(reader, now + self._waiting[reader].lease_s)
        return known

    # -- time and results --

    def advance(self, now: float) -> None:
        for reader in self._expiry.take_due(now):
            self._remove(reader)
        self._tombstones.expire(now)

    def next_deadline(self) -> float | None:
        return min(
            (
                at
                for at in (self._expiry.next(), self._tombstones.next_deadline())
                if at is not None
            ),
            default=None,
        )

    def take_replies(self) -> list[MatcherReply]:
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

    # -- inside --

    def _wait(self, reader: str, waiting: _Waiting, now: float) -> None:
        self._waiting[reader] = waiting
        self._readers.setdefault(waiting.registration_key, []).append(reader)
        self._waiting_index.add(waiting.registration_key, waiting.name)
        self._expiry.set(reader, now + waiting.lease_s)

    def _offer(self, request: RequestId, registration_key: RegistrationKey) -> None:
        self._ready.drop(request)
        prefill = self._prefills[request]
        self._matched[registration_key], prefill.registration_key = request, registration_key
        for reader, waiting in self._drop(registration_key):
            prefill.offered_readers[reader], self._offered_to[reader] = waiting, request
            self._reply_offer(waiting.route, reader, request)

    def _reply_offer(self, route: Route, reader: str, request: RequestId) -> None:
        prefill = self._prefills[request]
        self._replies.append(
            MatcherReply(route, PushOffer(reader, prefill.ticket, prefill.ready_tokens), request)
        )

    def _refuse_all(self, registration_key: RegistrationKey, reason: str) -> None:
        for reader, waiting in self._drop(registration_key):
            self._refuse(waiting.route, reader, reason)

    def _refuse(self, route: Route, reader: str, reason: str) -> None:
        self._replies.append(MatcherReply(route, Refused("", reader, reason)))

    def _drop(self, registration_key: RegistrationKey) -> list[tuple[str, _Waiting]]:
        readers = self._readers.pop(registration_key, [])
        self._waiting_index.drop(registration_key)
        for reader in readers:
            self._expiry.drop(reader)
        return [(reader, self._waiting.pop(reader)) for reader in readers]

    def _remove(self, reader: str) -> None:
        """From wherever it is."""
        offered = self._offered_to.pop(reader, None)
        if offered is not None:
            del self._prefills[offered].offered_readers[reader]
        waiting = self._waiting.pop(reader, None)
        if waiting is None:
            return
        self._expiry.drop(reader)
        members = self._readers[waiting.registration_key]
        members.remove(reader)
        if not members:
            self._drop(waiting.registration_key)


def _registration_key(message: PushRegistration | PushCancel) -> RegistrationKey:
    return (
        ("", message.match_id)
        if message.match_id
        else (message.decode_engine_id, message.request_id)
    )


@dataclass(slots=True)
class _Unclaimed:
    """What is not needed any more, since the last time somebody asked."""

    unwanted: list[RequestId] = field(default_factory=list)
    left: list[tuple[RequestId, str]] = field(default_factory=list)
