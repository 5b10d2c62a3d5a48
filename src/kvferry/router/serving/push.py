"""Push: which prefill instances push, and how both legs of a push request run in parallel.

`PushSources` is pure except for random match ids; `run_both_legs` and `LegFinisher` run on the
event loop. The first request to a prefill instance runs as in pull mode: the prefill leg first. P's
answer reports the transfer mode and the side channel. From then on both legs start together. An
instance that failed may have restarted as a new incarnation, so its next prefill leg runs alone
again.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from kvferry.protocol.tickets import PushTicket, PushTicketKey
from kvferry.router.fleet.instances import Instance
from kvferry.router.serving.client_request import Handover, PushSource


@dataclass(slots=True)
class PushSources:
    """Prefill instances known to push, and the key that signs push tickets."""

    key: PushTicketKey | None
    """None: without the cluster secret no ticket can be signed, so the prefill leg runs first."""
    _known: dict[Instance, PushSource] = field(default_factory=dict, init=False)

    def learn(self, instance: Instance, handover: Handover | None) -> None:
        """Record the transfer mode from the instance's latest answer."""
        if handover is None or handover.push_source is None:
            self._known.pop(instance, None)
        else:
            self._known[instance] = handover.push_source

    def forget(self, instance: Instance) -> None:
        self._known.pop(instance, None)

    def push_handover_for(self, instance: Instance) -> Handover | None:
        """Parameters of a decode leg that starts together with the prefill leg.

        None if the instance is not known to push: the prefill leg runs first.
        """
        source = self._known.get(instance)
        if source is None or self.key is None:
            return None
        address = source.side_channel
        ticket = PushTicket(
            uuid4().hex, source.engine, source.epoch, address.host, address.port, source.tp_size
        )
        return source.push_handover(self.key.sign(ticket))


# -- both legs in parallel --
# A leg that fails before the client has received a byte ends the other leg.


D = TypeVar("D")
P = TypeVar("P")


async def run_both_legs(
    prefill: Coroutine[Any, Any, P | None],
    decode: Coroutine[Any, Any, D],
    has_begun: Callable[[], bool],
    finish_leg: Callable[["asyncio.Task[Any]"], None],
) -> D | P:
    """Run both legs; return D's result, or P's error if D's answer has not begun.

    The decode leg never outlives this call. The prefill leg is passed to `finish_leg` in any state,
    because P's answer may be in flight. Cancelling this call cancels the prefill leg.
    """
    first, second = asyncio.create_task(prefill), asyncio.create_task(decode)
    try:
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        if not second.done() and not has_begun():
            # P ended first and D's answer has not begun: an error of P decides the request.
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


# -- leg finisher --
# A prefill leg may still run when its decode leg has ended: P's answer is in flight, or is not
# needed any more. The leg gets `GRACE_S` to end by itself, which keeps P's connection alive for
# reuse, and is then cancelled.


GRACE_S = 0.25


class LegFinisher:
    """Waits in the background for prefill legs that outlive their decode leg, and for questions
    about decode legs.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def finish_leg(self, leg: "asyncio.Task[Any]", grace_s: float = GRACE_S) -> None:
        task = asyncio.create_task(_finish_leg(leg, grace_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for the remaining legs; each takes a bounded time."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _finish_leg(leg: "asyncio.Task[Any]", grace_s: float) -> None:
    await asyncio.wait([leg], timeout=grace_s)
    leg.cancel()
    # The result was already reported by the leg itself.
    await asyncio.gather(leg, return_exceptions=True)
