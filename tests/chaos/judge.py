"""Decides the outcome of one request from what its client received. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

HONEST_STATUSES = (502, 503)


class Outcome(StrEnum):
    RIGHT = "a single engine's tokens"
    REFUSED = "an error that says why"
    BROKEN = "aborted with an error, right so far"
    UNREACHED = "router not reached"
    LEFT = "client left, right so far"
    WRONG = "WRONG TOKENS"
    HUNG = "NO END"
    SILENT = "ENDED WITHOUT A WORD"
    ODD = "ODD ANSWER"


VIOLATIONS = (Outcome.WRONG, Outcome.HUNG, Outcome.SILENT, Outcome.ODD)


@dataclass(slots=True)
class Attempt:
    """One request as its client sees it; filled in while the request runs."""

    status: int | None = None
    tokens: list[int] = field(default_factory=list)
    is_whole: bool = False
    """The response was complete: the whole body arrived, or the stream ended with [DONE]."""
    error: str = ""
    """The error that the response or the connection reported."""
    has_left: bool = False
    is_overdue: bool = False


def judge(attempt: Attempt, right: Sequence[int]) -> Outcome:
    """Return the outcome. A request must end with the same tokens as from a single engine, or with
    an error that gives the reason.
    """
    if attempt.tokens != list(right[: len(attempt.tokens)]):
        return Outcome.WRONG
    if attempt.is_overdue:
        return Outcome.HUNG
    if attempt.has_left:
        return Outcome.LEFT
    if attempt.status is None:
        return Outcome.UNREACHED if attempt.error else Outcome.ODD
    if attempt.status != 200:
        return (
            Outcome.REFUSED if attempt.status in HONEST_STATUSES and attempt.error else Outcome.ODD
        )
    if attempt.error:
        return Outcome.BROKEN
    if not attempt.is_whole:
        return Outcome.SILENT
    return Outcome.RIGHT if len(attempt.tokens) == len(right) else Outcome.WRONG
