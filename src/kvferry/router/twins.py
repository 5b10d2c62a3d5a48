"""Both legs of one request at once: whichever fails while the client has got nothing yet ends the other. Runs on the event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["run_twins"]

GRACE_S = 0.25
"""P's answer may still be on its way when D is through; closing its connection in that moment would cost P an aborted request."""

D = TypeVar("D")
P = TypeVar("P")


async def run_twins(prefill: Coroutine[Any, Any, P | None], decode: Coroutine[Any, Any, D], has_begun: Callable[[], bool]) -> D | P:
    """D's answer; or P's objection, if it has one and D has not begun to answer. Neither leg outlives this call."""
    first, second = asyncio.create_task(prefill), asyncio.create_task(decode)
    try:
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        if not second.done() and not has_begun():
            objection = await first
            if objection is not None:
                return objection
        result = await second
        await asyncio.wait({first}, timeout=GRACE_S)
        return result
    finally:
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
