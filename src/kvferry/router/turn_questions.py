"""Asks a decode instance's side channel what it has kept of a turn, where its stream could not say. Runs on the event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from kvferry.router.instances import Instance
from kvferry.router.watch import InstanceWatcher
from kvferry.types import Address

__all__ = ["make_turn_query_by"]

ASK_TIMEOUT_S = 2.0
ASK_AGAIN_S = 0.05
"""The turn's end may reach the client before it reaches D's side channel."""
MAX_ASKED = 3


def make_turn_query_by(
    query_turn: Callable[[Address, str], "Future[str]"], watcher: InstanceWatcher
) -> Callable[[Instance, str], Awaitable[bytes | None]]:
    async def ask(instance: Instance, turn_id: str) -> bytes | None:
        side_channel = watcher.side_channel(instance)
        if side_channel is None:
            return None
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                for _ in range(MAX_ASKED):
                    params = await asyncio.wrap_future(query_turn(side_channel, turn_id))
                    if params:
                        return params.encode()
                    await asyncio.sleep(ASK_AGAIN_S)
        except (TimeoutError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
        return None

    return ask


def _is_cancelled() -> bool:
    """We ourselves, not the question that was given up."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
