"""Blocks of ended turns that are kept for the next ones, as long as nobody needs them more. Pure.

They are soft pins: the engine says how many blocks it lacks, and the oldest turns are let go, as many as it takes. A turn's blocks come
back when its lease has ended on every rank. One that somebody is reading comes back later, so it is not counted on, and the next oldest
goes too.
"""

from dataclasses import dataclass, field

from kvferry.types import RequestId

__all__ = ["KeptTurns"]


@dataclass(frozen=True, slots=True)
class _Turn:
    num_blocks: int
    word: str


@dataclass(slots=True)
class KeptTurns:
    _kept: dict[RequestId, _Turn] = field(default_factory=dict)
    """The oldest first."""
    _leaving: dict[RequestId, _Turn] = field(default_factory=dict)
    """Those let go whose blocks are not back yet."""
    _lingering: set[RequestId] = field(default_factory=set)
    """Of these, those that somebody reads."""

    def __len__(self) -> int:
        return len(self._kept) + len(self._leaving)

    @property
    def num_blocks(self) -> int:
        """Shared ones counted as often as they are kept."""
        return sum(turn.num_blocks for turns in (self._kept, self._leaving) for turn in turns.values())

    @property
    def has_leaving(self) -> bool:
        return bool(self._leaving)

    def keep(self, request: RequestId, num_blocks: int, word: str) -> None:
        self._kept[request] = _Turn(num_blocks, word)

    def let_go(self, num_blocks: int) -> list[RequestId]:
        """So many blocks are lacking: which turns are to be let go, beside those that are already leaving."""
        lacking = num_blocks - sum(turn.num_blocks for request, turn in self._leaving.items() if request not in self._lingering)
        chosen = []
        while lacking > 0 and self._kept:
            request = next(iter(self._kept))
            turn = self._leaving[request] = self._kept.pop(request)
            lacking -= turn.num_blocks
            chosen.append(request)
        return chosen

    def note_lingering(self, request: RequestId) -> None:
        if request in self._leaving:
            self._lingering.add(request)

    def end(self, request: RequestId) -> str | None:
        """Its blocks are back. The word it was kept under, perhaps empty; None: it was no turn."""
        turn = self._kept.pop(request, None) or self._leaving.pop(request, None)
        self._lingering.discard(request)
        return None if turn is None else turn.word
