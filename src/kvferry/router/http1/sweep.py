"""One timer for all connections of a side. Setting a deadline is an attribute; whoever is past it is told within `PERIOD_S`.

A timer handle per wait would be made and cancelled several times in every request, and hardly one in a million ever fires.
"""

import asyncio
from typing import Protocol

__all__ = ["NEVER", "PERIOD_S", "DeadlineTimer", "HasDeadline"]

NEVER = float("inf")
PERIOD_S = 0.1


class HasDeadline(Protocol):
    deadline: float
    """On the loop's clock."""

    def on_deadline(self, now: float) -> None: ...


class DeadlineTimer:
    """Runs while there is anybody to look at."""

    __slots__ = ("_loop", "_members", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._members: set[HasDeadline] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, member: HasDeadline) -> None:
        self._members.add(member)
        if self._timer is None:
            self._timer = self._loop.call_later(PERIOD_S, self._check_deadlines)

    def discard(self, member: HasDeadline) -> None:
        self._members.discard(member)

    def close(self) -> None:
        self._members.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_deadlines(self) -> None:
        self._timer = self._loop.call_later(PERIOD_S, self._check_deadlines) if self._members else None
        now = self._loop.time()
        for member in [member for member in self._members if member.deadline <= now]:
            member.on_deadline(now)
