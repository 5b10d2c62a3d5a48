"""Which chunks of waiting requests are stored: questions that vLLM repeats until they are answered.

Pure: the caller passes `now`, asks the storage what `take_questions` returns, and reports the
answers. A question and its answer belong to one generation; `forget` begins a new one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

__all__ = ["Answer", "Lookups", "Question"]


class Answer(Enum):
    STORED = auto()
    ABSENT = auto()
    UNKNOWN = auto()
    """Ask again later."""


@dataclass(frozen=True, slots=True)
class Question:
    """The chunks of one request that were first asked for in one step, in vLLM's order."""

    request_id: str
    names: tuple[bytes, ...]
    generation: int


@dataclass(slots=True)
class _RequestLookups:
    known: dict[bytes, bool] = field(default_factory=dict)
    waiting_since: dict[bytes, float] = field(default_factory=dict)
    unasked: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Lookups:
    timeout_s: float
    """A question that has no answer by then counts as answered with no."""
    _requests: dict[str, _RequestLookups] = field(default_factory=dict, init=False)
    _generation: int = field(default=0, init=False)

    def ask(self, request_id: str, name: bytes, now: float) -> Answer:
        request = self._requests.setdefault(request_id, _RequestLookups())
        if name in request.known:
            return Answer.STORED if request.known[name] else Answer.ABSENT
        since = request.waiting_since.get(name)
        if since is None:
            request.waiting_since[name] = now
            request.unasked.append(name)
        elif now - since > self.timeout_s:
            request.known[name] = False
            return Answer.ABSENT
        return Answer.UNKNOWN

    def take_questions(self) -> list[Question]:
        """Remove and return what has to be asked."""
        questions = []
        for request_id, request in self._requests.items():
            if request.unasked:
                questions.append(Question(request_id, tuple(request.unasked), self._generation))
                request.unasked = []
        return questions

    def answer(self, question: Question, found: Sequence[bool]) -> None:
        request = self._requests.get(question.request_id)
        if request is None or question.generation != self._generation:
            return
        for name, is_stored in zip(question.names, found, strict=True):
            # A load that failed in between has the last word.
            request.known.setdefault(name, is_stored)

    def mark_absent(self, names: Iterable[bytes]) -> None:
        """Let no waiting request ask again for chunks that could not be loaded: vLLM would start
        the same load over and over.
        """
        for name in names:
            for request in self._requests.values():
                if name in request.known or name in request.waiting_since:
                    request.known[name] = False

    def end_request(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def forget(self) -> None:
        """Forget all answers, because the same names now mean other objects."""
        self._generation += 1
        self._requests.clear()
