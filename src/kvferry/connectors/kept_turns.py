"""Blocks of ended turns that are kept for the next ones, as long as nobody needs them more. Pure.

They are soft pins: the engine says how many blocks it lacks, and the oldest turns are let go, as many as it takes. A turn's blocks come
back when its lease has ended on every rank. One that somebody is reading comes back later, so it is not counted on, and the next oldest
goes too.
"""

from dataclasses import dataclass, field

from kvferry.types import RequestId

__all__ = ["RetainedTurns"]


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
        return sum(turn.num_blocks for turns in (self._retained, self._evicting) for turn in turns.values())

    @property
    def has_evicting(self) -> bool:
        return bool(self._evicting)

    def retain(self, request: RequestId, num_blocks: int, turn_id: str) -> None:
        self._retained[request] = _RetainedTurn(num_blocks, turn_id)

    def evict(self, num_blocks: int) -> list[RequestId]:
        """So many blocks are lacking: which turns are to be let go, beside those that are already leaving."""
        lacking = num_blocks - sum(turn.num_blocks for request, turn in self._evicting.items() if request not in self._being_read)
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
