"""P's leg beside D's may still be under way when D is through: P's answer is on its way, or nobody needs it any more.

Runs on the event loop. Such a leg gets a moment to end by itself, which leaves P a keep-alive connection, and is cancelled then.
"""

import asyncio
from typing import Any

__all__ = ["LegFinisher"]

GRACE_S = 0.25


class LegFinisher:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def finish_leg(self, leg: "asyncio.Task[Any]") -> None:
        task = asyncio.create_task(_finish_leg(leg))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for what is still being looked after; each takes a bounded time."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _finish_leg(leg: "asyncio.Task[Any]") -> None:
    await asyncio.wait([leg], timeout=GRACE_S)
    leg.cancel()
    # Whatever came of it has been told already.
    await asyncio.gather(leg, return_exceptions=True)
