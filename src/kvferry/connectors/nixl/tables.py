"""Tables of the connector's scheduler: loads, held blocks, retained turns.

Pure: no clock, no I/O. The scheduler owns every table and uses the tables on the engine's main
thread.
"""

from collections import Counter
from dataclasses import dataclass, field

from kvferry.types import RequestId

# -- loads --

# Bounds the memory of `LoadTable`. A request whose ticket was forgotten reads the ticket again.
MAX_READ_TICKETS = 10_000

SharedTicketKey = tuple[str, str, int | str]
"""Engine, epoch and serial of one lease of one engine incarnation. For a push ticket, whose lease
does not exist yet, the match id stands in the place of the serial.
"""


@dataclass(frozen=True, slots=True)
class LoadOffer:
    """What a waiting request may load: the first `num_tokens` tokens of its prompt, or nothing
    because of `refusal`.
    """

    num_tokens: int
    ticket: SharedTicketKey | None = None
    refusal: str | None = None
    min_tokens: int = 1
    """Load nothing if fewer than this many tokens would be loaded."""
    is_optional: bool = False
    """The load only saves computation: if the load fails for any reason, the engine computes the
    request.
    """
    unchecked_ticket: str = ""
    """The ticket of a retained turn that the retaining engine has not confirmed yet. The scheduler
    asks only when the engine tries to schedule the request.
    """
    num_pending_ranks: int = 0
    """How many ranks still wait for the retaining engine's answer."""
    num_local_tokens: int | None = None
    """How many tokens of the request the engine already had when it last asked for the offer; None
    before it has asked.
    """
    leg_id: str = ""
    """The id under which the router may ask why the load failed; empty if there is none."""


@dataclass(slots=True)
class LoadTable:
    """The loads of this engine's requests: offered to the engine, in progress, and the tickets that
    were read. Requests that share a ticket read it once.
    """

    _offers: dict[RequestId, LoadOffer] = field(default_factory=dict)
    _loading: dict[RequestId, LoadOffer] = field(default_factory=dict)
    """Requests with a load in progress, and the offers that were accepted. An offer without a
    ticket: the request only waits for its failure to be reported.
    """
    _optional: set[RequestId] = field(default_factory=set)
    """Requests with an optional load, from the start of the load to the end of the request."""
    _reading: Counter[SharedTicketKey] = field(default_factory=Counter)
    """The number of loads in progress by ticket."""
    # Ordered by the time of the read, so that the oldest ticket is forgotten first.
    _read: dict[SharedTicketKey, None] = field(default_factory=dict)

    def offer(self, request: RequestId, offer: LoadOffer) -> None:
        """Add an offer, or replace the request's offer."""
        self._offers[request] = offer

    def get(self, request: RequestId) -> LoadOffer | None:
        return self._offers.get(request)

    def withdraw(self, request: RequestId) -> LoadOffer | None:
        return self._offers.pop(request, None)

    def withdraw_all(self) -> dict[RequestId, LoadOffer]:
        """Remove and return all offers, except those that only report a refusal."""
        offers = {request: offer for request, offer in self._offers.items() if not offer.refusal}
        for request in offers:
            del self._offers[request]
        return offers

    @property
    def loading(self) -> list[RequestId]:
        return list(self._loading)

    def is_loading(self, request: RequestId) -> bool:
        return request in self._loading

    def leg_id(self, request: RequestId) -> str:
        """The leg id of a request with a load in progress; empty if there is none."""
        offer = self._loading.get(request)
        return offer.leg_id if offer is not None else ""

    def is_optional(self, request: RequestId) -> bool:
        return request in self._optional

    def is_being_read(self, ticket: SharedTicketKey | None) -> bool:
        return ticket is not None and self._reading[ticket] > 0

    def was_read(self, ticket: SharedTicketKey | None) -> bool:
        return ticket in self._read

    def begin(self, request: RequestId, offer: LoadOffer) -> None:
        self._loading[request] = offer
        if offer.ticket is not None:
            self._reading[offer.ticket] += 1
        if offer.is_optional:
            self._optional.add(request)

    def end(self, request: RequestId, is_good: bool) -> None:
        """Record the end of a load. A failed load leaves the ticket unread, so that another request
        may try.
        """
        ticket = self._loading.pop(request).ticket
        if ticket is None:
            return
        self._reading[ticket] -= 1
        if not self._reading[ticket]:
            del self._reading[ticket]
        if is_good:
            self._read[ticket] = None
            while len(self._read) > MAX_READ_TICKETS:
                del self._read[next(iter(self._read))]

    def finish_request(self, request: RequestId) -> bool:
        """Drop the offer of a finished request. True if the transfer workers still prepare its load
        or write into its blocks; the load then ends with `end`.
        """
        self._optional.discard(request)
        return self._offers.pop(request, None) is not None or request in self._loading


# -- held blocks --
# Finished prefill legs whose blocks are held for a peer, and which legs answer the same client
# request.


@dataclass(frozen=True, slots=True)
class _Held:
    num_blocks: int
    family: str | None


@dataclass(slots=True)
class HeldBlocks:
    """The blocks held for peers, counted, and grouped by request family."""

    num_blocks: int = 0
    _held: dict[RequestId, _Held] = field(default_factory=dict)
    _families: dict[str, set[RequestId]] = field(default_factory=dict)

    @property
    def requests(self) -> list[RequestId]:
        return list(self._held)

    def hold(self, request: RequestId, num_blocks: int, family: str | None) -> None:
        self._held[request] = _Held(num_blocks, family)
        self.num_blocks += num_blocks
        if family is not None:
            self._families.setdefault(family, set()).add(request)

    def free(self, request: RequestId) -> set[RequestId]:
        """Remove a request whose lease has ended and return the requests that no peer will fetch
        any more.

        Requests of one family answer one client request together, and only one request's parameters
        reach the client. So when the lease of one request ends, no peer can come for the rest of
        the family.
        """
        held = self._held.pop(request, None)
        if held is None:
            return set()
        self.num_blocks -= held.num_blocks
        return (
            self._families.pop(held.family, set()) - {request} if held.family is not None else set()
        )


# -- retained turns --
# Blocks of finished turns that are retained for the next turn until the engine needs the blocks.
#
# Retained turns are soft pins: the engine reports how many blocks are missing, and the table evicts
# the oldest turns until enough blocks are on the way back. The blocks of a turn are free when the
# turn's lease has ended on every rank. A turn that a peer is still reading frees its blocks later,
# so `evict` does not count that turn and evicts the next oldest as well.


@dataclass(frozen=True, slots=True)
class _RetainedTurn:
    num_blocks: int
    turn_id: str


@dataclass(slots=True)
class RetainedTurns:
    """Retained turns, oldest first, and turns being evicted."""

    _retained: dict[RequestId, _RetainedTurn] = field(default_factory=dict)
    """Retained turns by request, oldest first."""
    _evicting: dict[RequestId, _RetainedTurn] = field(default_factory=dict)
    """Evicted turns whose blocks are not free yet."""
    _being_read: set[RequestId] = field(default_factory=set)
    """The subset of `_evicting` that a peer is still reading."""

    def __len__(self) -> int:
        return len(self._retained) + len(self._evicting)

    @property
    def num_blocks(self) -> int:
        """The number of retained blocks; a block shared by several turns counts once per turn."""
        return sum(
            turn.num_blocks for turns in (self._retained, self._evicting) for turn in turns.values()
        )

    @property
    def has_evicting(self) -> bool:
        return bool(self._evicting)

    def retain(self, request: RequestId, num_blocks: int, turn_id: str) -> None:
        self._retained[request] = _RetainedTurn(num_blocks, turn_id)

    def evict(self, num_blocks: int) -> list[RequestId]:
        """Choose the turns to evict so that `num_blocks` blocks become free, counting the turns
        already being evicted.
        """
        lacking = num_blocks - sum(
            turn.num_blocks
            for request, turn in self._evicting.items()
            if request not in self._being_read
        )
        chosen = []
        while lacking > 0 and self._retained:
            request = next(iter(self._retained))
            turn = self._evicting[request] = self._retained.pop(request)
            lacking -= turn.num_blocks
            chosen.append(request)
        return chosen

    def evict_all(self) -> list[RequestId]:
        """Evict all turns; also returns the turns already being evicted."""
        self._evicting |= self._retained
        self._retained.clear()
        return list(self._evicting)

    def note_being_read(self, request: RequestId) -> None:
        if request in self._evicting:
            self._being_read.add(request)

    def end(self, request: RequestId) -> str | None:
        """Remove a turn whose blocks are free and return its turn id, which may be empty; None if
        the request was not a retained turn.
        """
        turn = self._retained.pop(request, None) or self._evicting.pop(request, None)
        self._being_read.discard(request)
        return None if turn is None else turn.turn_id
