"""Prefill instances that push, as their answers have shown them: what a push ticket for them says.
Pure but for the random names.

An instance is asked alone at first, as in pull; its answer says how it hands over and where its
side channel is. From then on both legs start together. One that has failed may come back as another
incarnation, so it is asked alone again.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from kvferry.protocol.tickets import PushTicket, PushTicketKey
from kvferry.router.fleet.instances import Instance
from kvferry.router.serving.client_request import Handover, PushSource

__all__ = ["LegFinisher", "PushSources", "run_both_legs"]


@dataclass(slots=True)
class PushSources:
    key: PushTicketKey | None
    """None: without the cluster's secret nothing can be signed, and P is always asked first."""
    _known: dict[Instance, PushSource] = field(default_factory=dict, init=False)

    def learn(self, instance: Instance, handover: Handover | None) -> None:
        """What its latest answer says."""
        if handover is None or handover.push_source is None:
            self._known.pop(instance, None)
        else:
            self._known[instance] = handover.push_source

    def forget(self, instance: Instance) -> None:
        self._known.pop(instance, None)

    def push_handover_for(self, instance: Instance) -> Handover | None:
        """What the decode leg carries when both start together; None: ask this instance first."""
        source = self._known.get(instance)
        if source is None or self.key is None:
            return None
        address = source.side_channel
        ticket = PushTicket(
            uuid4().hex, source.engine, source.epoch, address.host, address.port, source.tp_size
        )
        return source.push_handover(self.key.sign(ticket))


# -------------------- twins -------------------- Both legs of one request at once: whichever fails
# while the client has got nothing yet ends the other. Runs on the event loop.


D = TypeVar("D")
P = TypeVar("P")


async def run_both_legs(
    prefill: Coroutine[Any, Any, P | None],
    decode: Coroutine[Any, Any, D],
    has_begun: Callable[[], bool],
    finish_leg: Callable[["asyncio.Task[Any]"], None],
) -> D | P:
    """D's answer; or P's objection, if it has one and the client has got nothing of D's answer.

    D's leg does not outlive this call. P's is handed to `finish_leg`, however it stands: its answer
    may be on its way. It is cancelled with this call.
    """
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


# -------------------- last look -------------------- P's leg beside D's may still be under way when
# D is through: P's answer is on its way, or nobody needs it any more.
#
# Runs on the event loop. Such a leg gets a moment to end by itself, which leaves P a keep-alive
# connection, and is cancelled then.


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
