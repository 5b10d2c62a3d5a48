"""The first leg: P computes the prompt and keeps its blocks. Runs on the event loop.

Computing a prompt has no side effect but one, so whatever fails here may be tried on another P. That one: P keeps the blocks, and only its
answer has the ticket for them. A leg that is left, whatever for, lets P abort; if its answer was on its way, `on_late_handover` hears of
the ticket.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import RemoteProtocolError
from kvferry.router.calls import UNAVAILABLE, InstanceClient
from kvferry.router.exchange import HttpResponse, LegFailure, RequestContext, forwarded_headers
from kvferry.router.http1.errors import UpstreamError
from kvferry.router.instances import Instance, Outcome
from kvferry.router.legs import Handover, read_prefill_answer
from kvferry.router.push_sources import PushSources
from kvferry.router.timeline import RequestEvent

__all__ = ["PrefillLeg"]


@dataclass(slots=True)
class PrefillLeg:
    instance_client: InstanceClient
    push_sources: PushSources

    async def run(
        self,
        context: RequestContext,
        instance: Instance,
        on_late_handover: Callable[[Handover], None],
        push_ticket: str = "",
        last_turn: bytes | None = None,
    ) -> Handover | HttpResponse | LegFailure | None:
        """P's blocks (None: it kept none); or its objection to the request, which is the client's answer; or why it came to nothing."""
        context.mark(RequestEvent.PREFILL_BEGAN, instance)
        try:
            result = await self._ask(context, instance, context.client.prefill_body(push_ticket, last_turn), on_late_handover)
        except (UpstreamError, RemoteProtocolError) as error:
            self.push_sources.forget(instance)
            result = self.instance_client.failure(instance, error)
        if isinstance(result, LegFailure):
            context.mark(RequestEvent.PREFILL_FAILED, result.message)
        else:
            context.mark(RequestEvent.PREFILL_ENDED, instance)
        return result

    async def _ask(
        self, context: RequestContext, instance: Instance, body: bytes, on_late_handover: Callable[[Handover], None]
    ) -> Handover | HttpResponse | LegFailure | None:
        def take_late(status: int, text: bytes) -> None:
            handover = _late_handover(status, text)
            if handover is not None:
                on_late_handover(handover)

        with (
            self.instance_client.track_leg(instance, context.hints) as call,
            await self.instance_client.post(context, instance, body, take_late) as answer,
        ):
            if answer.status == UNAVAILABLE:
                return await self.instance_client.refusal(answer, instance, call)
            if answer.status >= 500:
                return await self.instance_client.server_error(answer, instance, call)
            text = await self.instance_client.read(answer)
            if 400 <= answer.status < 500:
                call.outcome = Outcome.ANSWERED
                return HttpResponse(answer.status, forwarded_headers(answer.headers), text)
            if answer.status != 200:
                raise RemoteProtocolError(f"it answered with status {answer.status}")
            handover = read_prefill_answer(text)
            call.outcome = Outcome.ANSWERED
        self.push_sources.learn(instance, handover)
        if handover is None:
            self.instance_client.metrics.without_blocks.add()
        return handover


def _late_handover(status: int, text: bytes) -> Handover | None:
    if status != 200:
        return None
    try:
        return read_prefill_answer(text)
    except RemoteProtocolError:
        return None
