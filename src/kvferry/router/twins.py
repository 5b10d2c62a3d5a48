"""Both legs of one request at once: whichever fails while the client has got nothing yet ends the other. Runs on the event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["run_both_legs"]

D = TypeVar("D")
P = TypeVar("P")


async def run_both_legs(
    prefill: Coroutine[Any, Any, P | None],
    decode: Coroutine[Any, Any, D],
    has_begun: Callable[[], bool],
    finish_leg: Callable[["asyncio.Task[Any]"], None],
) -> D | P:
    """D's answer; or P's objection, if it has one and the client has got nothing of D's answer.

    D's leg does not outlive this call. P's is handed to `finish_leg`, however it stands: its answer may be on its way. It is cancelled with
    this call."""
    first, second = asyncio.create_task(prefill), asyncio.create_task(decode)
    try:
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        if not second.done() and not has_begun():
            objection = await first
            if objection is not None:
                return objection
        return await second
    except asyncio.CancelledError:
        first.cancel()
        raise
    finally:
        finish_leg(first)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
