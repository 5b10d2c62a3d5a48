"""Keeps what D said at the end of a conversation's turn until the next one, for P. Runs on the
event loop.

Where D's answer could not say it (vLLM leaves it out of streams), D's side channel is asked, by the
word that the turn was given. The next turn may come before the answer does: it waits a moment for
it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from uuid import uuid4

import msgspec

from kvferry.router.conversations.store import Conversations, LastTurn
from kvferry.router.fleet.fleet import Fleet, Leg
from kvferry.router.fleet.instances import Instance
from kvferry.router.fleet.watcher import InstanceWatcher
from kvferry.router.metrics import RouterMetrics
from kvferry.router.serving.context import RequestContext
from kvferry.types import Address

__all__ = ["TurnTracker", "make_turn_query_by"]


QUERY_WAIT_S = 0.5
"""For an answer of D's side channel that the next turn waits for."""

TurnQuery = Callable[[Instance, str], Awaitable[bytes | None]]
"""D's params for the turn of this word; None: it does not say. Takes a bounded time."""


class _TurnParams(msgspec.Struct):
    ttl_s: float | None = None
    ticket: str | None = None


@dataclass(slots=True)
class TurnTracker:
    conversations: Conversations
    fleet: Fleet
    metrics: RouterMetrics
    ttl_s: float
    """At most."""
    ask: TurnQuery | None = None
    _queries: dict[tuple[str, str], "asyncio.Task[None]"] = field(default_factory=dict)

    async def take(self, context: RequestContext) -> LastTurn | None:
        """The conversation's last turn; from now on it is this request's."""
        name = context.client.conversation_id
        if name is None:
            return None
        context.turn_id = uuid4().hex
        query = self._queries.get((context.tenant, name))
        if query is not None:
            await asyncio.wait([query], timeout=QUERY_WAIT_S)
        turn = self.conversations.take(context.tenant, name, time.monotonic())
        self.metrics.turns.add("yes" if turn is not None and turn.params else "no")
        return turn

    def retain(self, context: RequestContext, leg: Leg, params: bytes | None) -> None:
        """The turn is over. `leg`: D's. `params`: what its answer said of its blocks."""
        name, turn_id = context.client.conversation_id, context.turn_id
        if name is None or turn_id is None:
            return
        key = (context.tenant, name)
        earlier = self._queries.get(key)
        if earlier is not None:
            earlier.cancel()  # of a turn before this one: its answer would take the place of ours
        if params is not None or self.ask is None or not context.client.is_streamed:
            self._put(key, leg, params, context.prefiller)
            return
        task = asyncio.create_task(self._ask(key, leg, turn_id, context.prefiller))
        self._queries[key] = task
        task.add_done_callback(
            lambda done: self._queries.pop(key) if self._queries.get(key) is done else None
        )

    async def close(self) -> None:
        query = list(self._queries.values())
        for task in query:
            task.cancel()
        await asyncio.gather(*query, return_exceptions=True)

    async def _ask(
        self, key: tuple[str, str], leg: Leg, turn_id: str, prefiller: Instance | None
    ) -> None:
        assert self.ask is not None
        self._put(key, leg, await self.ask(leg.instance, turn_id), prefiller)

    def _put(
        self, key: tuple[str, str], leg: Leg, params: bytes | None, prefiller: Instance | None
    ) -> None:
        """Also where D keeps nothing: whom the conversation was with is worth knowing."""
        ttl_s, params_read = self.ttl_s, _read(params) if params else None
        if params_read is None or params_read.ticket is None:
            params = b""
        elif params_read.ttl_s is not None:
            ttl_s = min(ttl_s, params_read.ttl_s)
        if self.fleet.is_current(leg):
            self.conversations.put(
                *key, LastTurn(params or b"", leg.instance, prefiller), ttl_s, time.monotonic()
            )


def _read(params: bytes) -> _TurnParams | None:
    try:
        return msgspec.json.decode(params, type=_TurnParams)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


# -------------------- turn questions -------------------- Asks a decode instance's side channel
# what it has kept of a turn, where its stream could not say. Runs on the event loop.


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
