"""How long a request may take as a whole. Runs on the event loop.

As `asyncio.timeout`, at a fraction of its price: a timer for each request would be set and cancelled thousands of times for one that fires,
so all share the coarse one of `DeadlineTimer`.
"""

import asyncio

from kvferry.router.http1.sweep import DeadlineTimer

__all__ = ["TimeLimit", "TimeLimits"]


class TimeLimit:
    """Of the task that began it: cancels it when the time is over."""

    __slots__ = ("_deadline_timer", "_is_expired", "_num_cancelled", "_task", "deadline")

    def __init__(self, deadline_timer: DeadlineTimer, task: "asyncio.Task[object]", deadline: float) -> None:
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
        """Whether the time was over, and nobody else has cancelled the task. Idempotent, and False."""
        self._deadline_timer.discard(self)
        if not self._is_expired:
            return False
        self._is_expired = False
        return self._task.uncancel() <= self._num_cancelled


class TimeLimits:
    """Made on the loop."""

    __slots__ = ("_deadline_timer", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_timer = DeadlineTimer(self._loop)

    def begin(self, limit_s: float) -> TimeLimit:
        """For the task that runs. It is told within `PERIOD_S` after the limit, and must `end` it."""
        task = asyncio.current_task(self._loop)
        assert task is not None
        return TimeLimit(self._deadline_timer, task, self._loop.time() + limit_s)

    def close(self) -> None:
        self._deadline_timer.close()
