"""Deadlines: one coarse timer for all connections of a server or of a client.

Setting a deadline is one attribute assignment; a member whose deadline has passed is notified
within `PERIOD_S`. A timer handle per wait would be created and cancelled several times in every
request, although hardly one in a million fires.
"""

import asyncio
from typing import Protocol

NEVER = float("inf")
PERIOD_S = 0.1


class HasDeadline(Protocol):
    """An object watched by a `DeadlineTimer`."""

    deadline: float
    """Time on the event loop's clock; `NEVER` if there is no deadline."""

    def on_deadline(self, now: float) -> None: ...


class DeadlineTimer:
    """Checks all members every `PERIOD_S`; the timer runs only while there are members."""

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
        self._timer = (
            self._loop.call_later(PERIOD_S, self._check_deadlines) if self._members else None
        )
        now = self._loop.time()
        for member in [member for member in self._members if member.deadline <= now]:
            member.on_deadline(now)


# -- time limits --
# How long a whole request may take. Like `asyncio.timeout`, but cheaper: all limits share the
# coarse `DeadlineTimer`, because a timer per request would be set and cancelled thousands of times
# for each one that fires.


class TimeLimit:
    """Time limit of one task; cancels the task when the time is over."""

    __slots__ = ("_deadline_timer", "_is_expired", "_num_cancelled", "_task", "deadline")

    def __init__(
        self, deadline_timer: DeadlineTimer, task: "asyncio.Task[object]", deadline: float
    ) -> None:
        self._deadline_timer = deadline_timer
        self._task = task
        self._num_cancelled = task.cancelling()
        self._is_expired = False
        self.deadline = deadline
        deadline_timer.add(self)

    def on_deadline(self, now: float) -> None:
        self._deadline_timer.discard(self)
        self._is_expired = True
        self._task.cancel()

    def end(self) -> bool:
        """End the limit; True if it expired and nothing else has cancelled the task.

        Idempotent; further calls return False.
        """
        self._deadline_timer.discard(self)
        if not self._is_expired:
            return False
        self._is_expired = False
        # As in `asyncio.timeout`: a higher count means that the task was also cancelled elsewhere.
        return self._task.uncancel() <= self._num_cancelled


class TimeLimits:
    """Makes time limits. Must be created on the event loop."""

    __slots__ = ("_deadline_timer", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_timer = DeadlineTimer(self._loop)

    def begin(self, limit_s: float) -> TimeLimit:
        """Limit the current task. The task is cancelled within `PERIOD_S` after the limit and must
        call `end`.
        """
        task = asyncio.current_task(self._loop)
        assert task is not None
        return TimeLimit(self._deadline_timer, task, self._loop.time() + limit_s)

    def close(self) -> None:
        self._deadline_timer.close()
