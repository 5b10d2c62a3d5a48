"""Turns of conversations that have ended here: what was kept of each, by the word that its router gave it. Pure.

For routers that cannot see in an answer what was kept of it. Bounded in number and in bytes, the oldest forgotten first.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

__all__ = ["MAX_TURN_ID_CHARS", "EndedTurns"]

MAX_TURN_ID_CHARS = 64


@dataclass(slots=True)
class EndedTurns:
    max_turns: int = 10_000
    max_chars: int = 64 * 1024 * 1024
    _turns: OrderedDict[str, tuple[float, str]] = field(default_factory=OrderedDict, init=False)
    """By word: until when it is kept, and its parameters."""
    _num_chars: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, turn_id: str, params: str, until: float) -> None:
        """A word that was given twice means the later turn."""
        self.forget(turn_id)
        self._turns[turn_id] = (until, params)
        self._num_chars += len(params)
        while len(self._turns) > self.max_turns or self._num_chars > self.max_chars:
            self.forget(next(iter(self._turns)))

    def forget(self, turn_id: str) -> None:
        _, params = self._turns.pop(turn_id, (0.0, ""))
        self._num_chars -= len(params)

    def find(self, turn_id: str, now: float) -> str:
        """Empty: nothing is kept."""
        until, params = self._turns.get(turn_id, (0.0, ""))
        return params if now < until else ""
