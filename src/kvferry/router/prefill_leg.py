"""The first leg: P computes the prompt and keeps its blocks. Runs on the event loop.

Computing a prompt has no side effect but one, so whatever fails here may be tried on another P. That one: P keeps the blocks, and only its
answer has the ticket for them. A leg that is left, whatever for, lets P abort; if its answer was on its way, `on_late` hears of the ticket.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import RemoteProtocolError
from kvferry.router.calls import UNAVAILABLE, Calls
from kvferry.router.exchange import Answer, Exchange, Setback, passed_headers
from kvferry.router.http1.errors import UpstreamError
from kvferry.router.instances import Instance, Outcome
from kvferry.router.legs import Handover, read_prefill_answer
from kvferry.router.push_sources import PushSources
from kvferry.router.timeline import Mark

__all__ = ["PrefillLeg"]


@dataclass(slots=True)
class PrefillLeg:
    calls: Calls
    push_sources: PushSources

    async def run(
        self,
        exchange: Exchange,
        instance: Instance,
        on_late: Callable[[Handover], None],
        push_ticket: str = "",
        last_turn: bytes | None = None,
    ) -> Handover | Answer | Setback | None:
        """P's blocks (None: it kept none); or its objection to the request, which is the client's answer; or why it came to nothing."""
        exchange.mark(Mark.PREFILL_BEGAN, instance)
        try:
            result = await self._ask(exchange, instance, exchange.client.prefill_body(push_ticket, last_turn), on_late)
        except (UpstreamError, RemoteProtocolError) as error:
            self.push_sources.forget(instance)
            result = self.calls.failure(instance, error)
        if isinstance(result, Setback):
            exchange.mark(Mark.PREFILL_FAILED, result.sentence)
        else:
            exchange.mark(Mark.PREFILL_ENDED, instance)
        return result

    async def _ask(
        self, exchange: Exchange, instance: Instance, body: bytes, on_late: Callable[[Handover], None]
    ) -> Handover | Answer | Setback | None:
        def take_late(status: int, text: bytes) -> None:
            handover = _late_handover(status, text)
            if handover is not None:
                on_late(handover)

        with self.calls.counted(instance, exchange.wish) as call, await self.calls.post(exchange, instance, body, take_late) as answer:
            if answer.status == UNAVAILABLE:
                return await self.calls.refusal(answer, instance, call)
            if answer.status >= 500:
                return await self.calls.fault(answer, instance, call)
            text = await self.calls.read(answer)
            if 400 <= answer.status < 500:
                call.outcome = Outcome.ANSWERED
                return Answer(answer.status, passed_headers(answer.headers), text)
            if answer.status != 200:
                raise RemoteProtocolError(f"it answered with status {answer.status}")
            handover = read_prefill_answer(text)
            call.outcome = Outcome.ANSWERED
        self.push_sources.learn(instance, handover)
        if handover is None:
            self.calls.metrics.without_blocks.add()
        return handover


def _late_handover(status: int, text: bytes) -> Handover | None:
    if status != 200:
        return None
    try:
        return read_prefill_answer(text)
    except RemoteProtocolError:
        return None
