"""Decides whether a retry could have saved a failed request. Pure.

A request may fail for two reasons only:

- its client had already received tokens from a decode instance that was then killed: those tokens
  cannot be taken back;
- it was refused with 429 or 503 while a role had no usable instance.

A retry could have saved every other failed request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tests.chaos.judge import Attempt, Outcome, judge

SLACK_S = 2.0
"""Time from a kill until the client sees the broken connection, on a busy machine."""


class Verdict(StrEnum):
    RIGHT = "a single engine's tokens"
    BROKEN = "aborted by the death of its decode instance, right so far"
    DESERTED = "refused while a role had nobody"
    LEFT = "client left, right so far"
    WRONG = "WRONG TOKENS"
    HUNG = "NO END"
    SILENT = "ENDED WITHOUT A WORD"
    LOST = "FAILED, AND A RETRY COULD HAVE SAVED IT"


FAULTS = (Verdict.WRONG, Verdict.HUNG, Verdict.SILENT, Verdict.LOST)
_PLAIN = {
    Outcome.RIGHT: Verdict.RIGHT,
    Outcome.LEFT: Verdict.LEFT,
    Outcome.WRONG: Verdict.WRONG,
    Outcome.HUNG: Verdict.HUNG,
    Outcome.SILENT: Verdict.SILENT,
}


@dataclass
class Happened:
    """The faults injected into the fleet, with times of one clock."""

    kills: list[tuple[float, str]] = field(default_factory=list)
    """Time of each kill and URL of the killed instance; decode instances only."""
    deserted: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each period in which a role had no usable instance."""


def decide(
    attempt: Attempt, right: Sequence[int], began: float, ended: float, happened: Happened
) -> Verdict:
    plain = _PLAIN.get(judge(attempt, right))
    if plain is not None:
        return plain
    if (
        attempt.status == 200
        and attempt.tokens
        and _was_killed(attempt.error, began, ended, happened)
    ):
        return Verdict.BROKEN
    if attempt.status in (429, 503) and any(
        start < ended and began < end for start, end in happened.deserted
    ):
        return Verdict.DESERTED
    return Verdict.LOST


def _was_killed(error: str, began: float, ended: float, happened: Happened) -> bool:
    """True if the error names the URL of a decode instance that was killed during the request."""
    return any(
        began - SLACK_S <= at <= ended and f"{url} " in f"{error} " for at, url in happened.kills
    )
