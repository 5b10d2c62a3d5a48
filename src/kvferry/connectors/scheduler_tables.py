"""Which tickets this engine reads, and which it has read: requests that share one read it once.
Pure.
"""

from dataclasses import dataclass, field

from kvferry.types import RequestId

__all__ = ["HeldBlocks", "LoadOffer", "RetainedTurns", "SharedTicketKey", "SharedTickets"]


MAX_READ_TICKETS = 10_000

SharedTicketKey = tuple[str, str, int | str]
"""Engine, epoch and serial: one lease of one engine incarnation; or the handover that its push
ticket names, where the lease is yet to come.
"""


@dataclass(slots=True)
class SharedTickets:
    _loading: dict[RequestId, SharedTicketKey | None] = field(default_factory=dict)
    """None: a request that only waits to be told of its failure."""
    _reading: set[SharedTicketKey] = field(default_factory=set)
    # In the order they were read, the oldest forgotten first.
    _read: dict[SharedTicketKey, None] = field(default_factory=dict)

    def is_loading(self, request: RequestId) -> bool:
        return request in self._loading

    def is_being_read(self, ticket: SharedTicketKey | None) -> bool:
        return ticket in self._reading

    def was_read(self, ticket: SharedTicketKey | None) -> bool:
        return ticket in self._read

    def begin(self, request: RequestId, ticket: SharedTicketKey | None) -> None:
        self._loading[request] = ticket
        if ticket is not None:
            self._reading.add(ticket)

    def end(self, request: RequestId, is_good: bool) -> None:
        ticket = self._loading.pop(request)
        if ticket is None:
            return
        self._reading.discard(ticket)
        if is_good:
            self._read[ticket] = None
            while len(self._read) > MAX_READ_TICKETS:
                del self._read[next(iter(self._read))]


# -------------------- offers --------------------
# What a connector offers an engine for a request that waits. Plain data.


@dataclass(frozen=True, slots=True)
class LoadOffer:
    """What a waiting request may load: the first `num_tokens` tokens of its prompt, or nothing, for
    this reason.
    """

    num_tokens: int
    ticket: SharedTicketKey | None = None
    refusal: str | None = None
    min_tokens: int = 1
    """With fewer than so many tokens to load, nothing is loaded."""
    is_optional: bool = False
    """It only saves computing: whatever goes wrong, the request is computed."""
    unchecked_ticket: str = ""
    """The ticket with which the producer is asked whether it can be had, once it is the request's
    turn.
    """
    num_pending_ranks: int = 0
    """So many ranks have yet to hear from it."""


# -------------------- held blocks --------------------
# Finished requests whose blocks are kept for peers, and which of them belong together. Pure.


@dataclass(frozen=True, slots=True)
class _Held:
    num_blocks: int
    family: str | None


@dataclass(slots=True)
class HeldBlocks:
    num_blocks: int = 0
    _held: dict[RequestId, _Held] = field(default_factory=dict)
    _families: dict[str, set[RequestId]] = field(default_factory=dict)

    def hold(self, request: RequestId, num_blocks: int, family: str | None) -> None:
        self._held[request] = _Held(num_blocks, family)
        self.num_blocks += num_blocks
        if family is not None:
            self._families.setdefault(family, set()).add(request)

    def free(self, request: RequestId) -> set[RequestId]:
        """Its lease has ended. Returns those nobody will come for any more.

        Of the requests that answer one client's request together, one's parameters have reached
        somebody; the others' have not.
        """
        held = self._held.pop(request, None)
        if held is None:
            return set()
        self.num_blocks -= held.num_blocks
        return (
            self._families.pop(held.family, set()) - {request} if held.family is not None else set()
        )


# -------------------- kept turns --------------------
# Blocks of ended turns that are kept for the next ones, as long as nobody needs them more. Pure.
#
# They are soft pins: the engine says how many blocks it lacks, and the oldest turns are let go, as
# many as it takes. A turn's blocks come back when its lease has ended on every rank. One that
# somebody is reading comes back later, so it is not counted on, and the next oldest goes too.


@dataclass(frozen=True, slots=True)
class _RetainedTurn:
    num_blocks: int
    turn_id: str


@dataclass(slots=True)
class RetainedTurns:
    _retained: dict[RequestId, _RetainedTurn] = field(default_factory=dict)
    """The oldest first."""
    _evicting: dict[RequestId, _RetainedTurn] = field(default_factory=dict)
    """Those let go whose blocks are not back yet."""
    _being_read: set[RequestId] = field(default_factory=set)
    """Of these, those that somebody reads."""

    def __len__(self) -> int:
        return len(self._retained) + len(self._evicting)

    @property
    def num_blocks(self) -> int:
        """Shared ones counted as often as they are kept."""
        return sum(
            turn.num_blocks for turns in (self._retained, self._evicting) for turn in turns.values()
        )

    @property
    def has_evicting(self) -> bool:
        return bool(self._evicting)

    def retain(self, request: RequestId, num_blocks: int, turn_id: str) -> None:
        self._retained[request] = _RetainedTurn(num_blocks, turn_id)

    def evict(self, num_blocks: int) -> list[RequestId]:
        """So many blocks are lacking: which turns are to be let go, beside those that are already
        leaving.
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

    def note_being_read(self, request: RequestId) -> None:
        if request in self._evicting:
            self._being_read.add(request)

    def end(self, request: RequestId) -> str | None:
        """Its blocks are back. The word it was kept under, perhaps empty; None: it was no turn."""
        turn = self._retained.pop(request, None) or self._evicting.pop(request, None)
        self._being_read.discard(request)
        return None if turn is None else turn.turn_id
