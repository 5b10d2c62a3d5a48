"""P's leg beside D's may still be under way when D is through: P's answer is on its way, or nobody needs it any more.

Runs on the event loop. Such a leg gets a moment to end by itself, which leaves P a warm connection, and is cancelled then.
"""

import asyncio
from typing import Any

__all__ = ["LastLook"]

GRACE_S = 0.25


class LastLook:
    def __init__(self) -> None:
        self._looking: set[asyncio.Task[None]] = set()

    def look_after(self, leg: "asyncio.Task[Any]") -> None:
        looking = asyncio.create_task(_look_after(leg))
        self._looking.add(looking)
        looking.add_done_callback(self._looking.discard)

    async def close(self) -> None:
        """Wait for what is still being looked after; each takes a bounded time."""
        await asyncio.gather(*self._looking, return_exceptions=True)


async def _look_after(leg: "asyncio.Task[Any]") -> None:
    await asyncio.wait([leg], timeout=GRACE_S)
    leg.cancel()
    # Whatever came of it has been told already.
    await asyncio.gather(leg, return_exceptions=True)
