"""P's answer may be on its way when the client leaves, and with it the only ticket for P's blocks.

Runs on the event loop. The leg of a client that left gets a moment more; a ticket that still comes is handed back, otherwise the leg is
cancelled, which closes its connection and lets P abort. A leg beside D's that is still under way when D is through gets the same moment.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvferry.router.http1.server import Reply
from kvferry.router.legs import Handover
from kvferry.router.release import Releases

__all__ = ["LastLook"]

GRACE_S = 0.25

T = TypeVar("T")


class LastLook:
    def __init__(self, releases: Releases) -> None:
        self._releases = releases
        self._looking: set[asyncio.Task[None]] = set()

    async def run(self, leg: Coroutine[Any, Any, T], reply: Reply) -> T:
        """The leg's result. For a client that has left it is handed back, and the rest of its request is not for anybody."""
        reply.grace_s = GRACE_S
        try:
            result = await leg
        finally:
            reply.grace_s = 0.0
        if reply.is_gone:
            if isinstance(result, Handover):
                self._releases.release(result)
            raise asyncio.CancelledError
        return result

    def look_after(self, task: "asyncio.Task[Any]") -> None:
        looking = asyncio.create_task(self._look_after(task))
        self._looking.add(looking)
        looking.add_done_callback(self._looking.discard)

    async def close(self) -> None:
        """Wait for what is still being looked after; each takes a bounded time."""
        await asyncio.gather(*self._looking, return_exceptions=True)

    async def _look_after(self, task: "asyncio.Task[Any]") -> None:
        await asyncio.wait([task], timeout=GRACE_S)
        task.cancel()
        await asyncio.wait([task])
        result = None if task.cancelled() or task.exception() else task.result()
        if isinstance(result, Handover):
            self._releases.release(result)
