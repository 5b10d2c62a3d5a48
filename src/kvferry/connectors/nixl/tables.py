"""Tables of the connector's scheduler: held blocks, retained turns.

Pure: no clock, no I/O. The scheduler owns every table and uses the tables on the engine's main
thread.
"""

from dataclasses import dataclass, field

from kvferry.types import RequestId

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
