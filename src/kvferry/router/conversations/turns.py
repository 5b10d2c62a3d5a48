"""Remembers which blocks D retains after a conversation's turn, for the P of the next turn.

Runs on the event loop. vLLM before 0.33 omits the parameters from streams; the tracker then asks
D's side channel with the id of the turn. The question stays open until D knows, because a busy D
may need a while. The next turn may arrive before D's reply and then waits a moment.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from uuid import uuid4

import msgspec

from kvferry.router.conversations.store import Conversations, LastTurn
from kvferry.router.fleet.fleet import Fleet
from kvferry.router.fleet.instances import Instance
from kvferry.router.fleet.members import Leg
from kvferry.router.metrics import RouterMetrics
from kvferry.router.serving.context import RequestContext
from kvferry.router.serving.side_channel import QUESTION_S, wait_for_answer
from kvferry.types import Address
from kvferry.web.errors import MALFORMED_JSON

QUERY_WAIT_S = 2.0
"""How long the next turn waits for a pending query to D's side channel. D replies as soon as its
side channel runs, so the next turn waits only if it is faster than D's reply.
"""

TurnQuery = Callable[[Instance, str], Awaitable[bytes | None]]
"""Returns D's parameters for a turn id; None if D reports none. Takes a bounded time."""


class _TurnParams(msgspec.Struct):
    ttl_s: float | None = None
    ticket: str | None = None


@dataclass(slots=True)
class TurnTracker:
    """Takes the last turn of a conversation for a request, and stores the new turn at the end."""

    conversations: Conversations
    fleet: Fleet
    metrics: RouterMetrics
    ttl_s: float
    """Longest time that a turn is stored."""
    ask: TurnQuery | None = None
    """Queries D's side channel; None: streams without parameters are stored without blocks."""
    _queries: dict[tuple[str, str], "asyncio.Task[None]"] = field(default_factory=dict)
    """Running queries by tenant and conversation id."""

    async def take(self, context: RequestContext) -> LastTurn | None:
        """Take the conversation's last turn, which from now on belongs to this request."""
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
        """Store the turn that has ended. `leg`: the decode leg; `params`: from D's answer."""
        name, turn_id = context.client.conversation_id, context.turn_id
        if name is None or turn_id is None:
            return
        key = (context.tenant, name)
        earlier = self._queries.get(key)
        if earlier is not None:
            earlier.cancel()  # an older turn's reply would overwrite this turn
        if params is not None or self.ask is None or not context.client.is_streamed:
            self._put(key, leg, params, context.prefiller)
            return
        # Until D replies, the next turn at least goes to the same instances.
        self._put(key, leg, None, context.prefiller)
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
        """Store the turn, even without blocks: which instances served it is useful for routing."""
        ttl_s, params_read = self.ttl_s, _read(params) if params else None
        if params_read is None or params_read.ticket is None:
            params = b""
        elif params_read.ttl_s is not None:
            ttl_s = min(ttl_s, params_read.ttl_s)
        # A restarted or removed D has lost the blocks.
        if self.fleet.is_current(leg):
            self.conversations.put(
                *key, LastTurn(params or b"", leg.instance, prefiller), ttl_s, time.monotonic()
            )


def _read(params: bytes) -> _TurnParams | None:
    try:
        return msgspec.json.decode(params, type=_TurnParams)
    except MALFORMED_JSON:
        return None


# -- turn queries --
# Ask D's side channel which blocks of a turn D retains.


ASK_TIMEOUT_S = QUESTION_S + 2.0
"""How long the router waits for a reply: longer than D keeps the question open."""


def make_turn_query_by(
    query_turn: Callable[[Address, str], "Future[str]"],
    find_side_channel: Callable[[Instance], Awaitable[Address | None]],
) -> TurnQuery:
    """Make a `TurnQuery` from `SideChannelSender.query_turn` and the known addresses."""

    async def ask(instance: Instance, turn_id: str) -> bytes | None:
        side_channel = await find_side_channel(instance)
        if side_channel is None:
            return None
        params = await wait_for_answer(query_turn(side_channel, turn_id), ASK_TIMEOUT_S)
        return params.encode() if params else None

    return ask
