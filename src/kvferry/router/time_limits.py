"""How long a request may take as a whole. Runs on the event loop.

As `asyncio.timeout`, at a fraction of its price: a timer for each request would be set and cancelled thousands of times for one that fires,
so all share the coarse one of `Sweep`.
"""

import asyncio

from kvferry.router.http1.sweep import Sweep

__all__ = ["TimeLimit", "TimeLimits"]


class TimeLimit:
    """Of the task that began it: cancels it when the time is over."""

    __slots__ = ("_has_run_out", "_num_cancelled", "_sweep", "_task", "deadline")

    def __init__(self, sweep: Sweep, task: "asyncio.Task[object]", deadline: float) -> None:
        self._sweep = sweep
        self._task = task
        self._num_cancelled = task.cancelling()
        self._has_run_out = False
        self.deadline = deadline
        sweep.add(self)

    def run_out(self, now: float) -> None:
        self._sweep.discard(self)
        self._has_run_out = True
        self._task.cancel()

    def end(self) -> bool:
        """Whether the time was over, and nobody else has cancelled the task. Once more is nothing, and False."""
        self._sweep.discard(self)
        if not self._has_run_out:
            return False
        self._has_run_out = False
        return self._task.uncancel() <= self._num_cancelled


class TimeLimits:
    """Made on the loop."""

    __slots__ = ("_loop", "_sweep")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sweep = Sweep(self._loop)

    def begin(self, limit_s: float) -> TimeLimit:
        """For the task that runs. It is told within `PERIOD_S` after the limit, and must `end` it."""
        task = asyncio.current_task(self._loop)
        assert task is not None
        return TimeLimit(self._sweep, task, self._loop.time() + limit_s)

    def close(self) -> None:
        self._sweep.close()
