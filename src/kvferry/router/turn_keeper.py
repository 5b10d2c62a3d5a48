"""Keeps what D said at the end of a conversation's turn until the next one, for P. Runs on the event loop.

Where D's answer could not say it (vLLM leaves it out of streams), D's side channel is asked, by the word that the turn was given. The next
turn may come before the answer does: it waits a moment for it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from uuid import uuid4

import msgspec

from kvferry.router.conversations import Conversations, Turn
from kvferry.router.exchange import Exchange
from kvferry.router.fleet import Fleet, Leg
from kvferry.router.instances import Instance
from kvferry.router.metrics import RouterMetrics

__all__ = ["TurnKeeper"]

PATIENCE_S = 0.5
"""For an answer of D's side channel that the next turn waits for."""

AskTurn = Callable[[Instance, str], Awaitable[bytes | None]]
"""D's params for the turn of this word; None: it does not say. Takes a bounded time."""


class _Said(msgspec.Struct):
    ttl_s: float | None = None
    ticket: str | None = None


@dataclass(slots=True)
class TurnKeeper:
    conversations: Conversations
    fleet: Fleet
    metrics: RouterMetrics
    ttl_s: float
    """At most."""
    ask: AskTurn | None = None
    _asking: dict[tuple[str, str], "asyncio.Task[None]"] = field(default_factory=dict)

    async def take(self, exchange: Exchange) -> Turn | None:
        """The conversation's last turn; from now on it is this request's."""
        name = exchange.client.conversation_id
        if name is None:
            return None
        exchange.turn_word = uuid4().hex
        asking = self._asking.get((exchange.tenant, name))
        if asking is not None:
            await asyncio.wait([asking], timeout=PATIENCE_S)
        turn = self.conversations.take(exchange.tenant, name, time.monotonic())
        self.metrics.turns.add("yes" if turn is not None and turn.params else "no")
        return turn

    def keep(self, exchange: Exchange, leg: Leg, params: bytes | None) -> None:
        """The turn is over. `leg`: D's. `params`: what its answer said of its blocks."""
        name, word = exchange.client.conversation_id, exchange.turn_word
        if name is None or word is None:
            return
        key = (exchange.tenant, name)
        earlier = self._asking.get(key)
        if earlier is not None:
            earlier.cancel()  # of a turn before this one: its answer would take the place of ours
        if params is not None or self.ask is None or not exchange.client.is_streamed:
            self._put(key, leg, params, exchange.prefiller)
            return
        task = asyncio.create_task(self._ask(key, leg, word, exchange.prefiller))
        self._asking[key] = task
        task.add_done_callback(lambda done: self._asking.pop(key) if self._asking.get(key) is done else None)

    async def close(self) -> None:
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(self, key: tuple[str, str], leg: Leg, word: str, prefiller: Instance | None) -> None:
        assert self.ask is not None
        self._put(key, leg, await self.ask(leg.instance, word), prefiller)

    def _put(self, key: tuple[str, str], leg: Leg, params: bytes | None, prefiller: Instance | None) -> None:
        """Also where D keeps nothing: whom the conversation was with is worth knowing."""
        ttl_s, said = self.ttl_s, _read(params) if params else None
        if said is None or said.ticket is None:
            params = b""
        elif said.ttl_s is not None:
            ttl_s = min(ttl_s, said.ttl_s)
        if self.fleet.is_current(leg):
            self.conversations.put(*key, Turn(params or b"", leg.instance, prefiller), ttl_s, time.monotonic())


def _read(params: bytes) -> _Said | None:
    try:
        return msgspec.json.decode(params, type=_Said)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
