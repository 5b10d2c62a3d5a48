"""The first leg: P computes the prompt and keeps its blocks. Runs on the event loop.

Computing a prompt has no side effect but one, so whatever fails here may be tried on another P.
That one: P keeps the blocks, and only its answer has the ticket for them. A leg that is left,
whatever for, lets P abort; if its answer was on its way, `on_late_handover` hears of the ticket.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import RemoteProtocolError
from kvferry.router.conversations.turn_params import TurnParamsFilter, take_turn_params
from kvferry.router.conversations.turns import TurnTracker
from kvferry.router.fleet.instances import Instance, Outcome
from kvferry.router.http.messages import UpstreamDisconnected, UpstreamError
from kvferry.router.http.pool import UpstreamResponse
from kvferry.router.serving.client_request import Handover, read_prefill_answer
from kvferry.router.serving.context import (
    HttpResponse,
    LegFailure,
    RequestContext,
    error_event,
    forwarded_headers,
)
from kvferry.router.serving.instance_client import (
    UNAVAILABLE,
    InstanceClient,
    TrackedLeg,
    describe_error,
    excerpt,
)
from kvferry.router.serving.push import PushSources
from kvferry.router.serving.side_channel import PrefilledBlocks
from kvferry.router.timeline import RequestEvent

__all__ = ["DecodeLeg", "PrefillLeg"]


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
        """P's blocks (None: it kept none); or its objection to the request, which is the client's
        answer; or why it came to nothing.
        """
        context.mark(RequestEvent.PREFILL_BEGAN, instance)
        try:
            result = await self._ask(
                context,
                instance,
                context.client.prefill_body(push_ticket, last_turn),
                on_late_handover,
            )
        except (UpstreamError, RemoteProtocolError) as error:
            self.push_sources.forget(instance)
            result = self.instance_client.failure(instance, error)
        if isinstance(result, LegFailure):
            context.mark(RequestEvent.PREFILL_FAILED, result.message)
        else:
            context.mark(RequestEvent.PREFILL_ENDED, instance)
        return result

    async def _ask(
        self,
        context: RequestContext,
        instance: Instance,
        body: bytes,
        on_late_handover: Callable[[Handover], None],
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


# -------------------- decode leg -------------------- The second leg: D takes P's blocks and
# answers, and its bytes reach the client as they come. Runs on the event loop.
#
# Until the client has got something another D may be asked: an answer that says nothing but an
# error counts as none.


_log = logging.getLogger(__name__)

_EVENTS = "text/event-stream"
# The first event of a stream, and whether it is an error.
_EVENT = re.compile(rb'(?:^|\n)data:[ \t]*(\{\s*"error"\s*:)?[^\n]*\n')
_MAX_START = 64 * 1024
_DONE, _TAIL_BYTES = b"data: [DONE]", 64


@dataclass(slots=True)
class DecodeLeg:
    instance_client: InstanceClient
    turns: TurnTracker

    async def run(
        self,
        context: RequestContext,
        held: PrefilledBlocks,
        instance: Instance,
        handover: Handover | None,
        has_begun: asyncio.Event | None = None,
    ) -> LegFailure | None:
        """None: the client has its answer, whatever it is. `has_begun` is set as soon as there is
        something for the client: P's leg may be under way too, and its objection is the answer
        until then.
        """
        context.mark(RequestEvent.DECODE_BEGAN, instance)
        try:
            result = await self._ask(context, held, instance, handover, has_begun)
        except (UpstreamError, RemoteProtocolError) as error:
            if context.reply.is_started:
                raise
            result = self.instance_client.failure(instance, error)
        if result is not None:
            context.mark(RequestEvent.DECODE_FAILED, result.message)
        return result

    async def _ask(
        self,
        context: RequestContext,
        held: PrefilledBlocks,
        instance: Instance,
        handover: Handover | None,
        has_begun: asyncio.Event | None,
    ) -> LegFailure | None:
        body = context.client.decode_body(handover, context.turn_id)
        with (
            self.instance_client.track_leg(instance, context.hints) as call,
            await self.instance_client.post(context, instance, body) as answer,
        ):
            if answer.status == UNAVAILABLE:
                return await self.instance_client.refusal(answer, instance, call)
            if answer.status >= 500:
                return await self.instance_client.server_error(answer, instance, call)
            is_stream = (answer.headers.get("content-type") or "").startswith(_EVENTS)
            whole = None if is_stream else await self.instance_client.read(answer)
            error = await self._error_at_start(answer) if is_stream else None
            if error is not None:
                self.instance_client.metrics.failures.add(instance.role, instance.url)
                response = HttpResponse(
                    answer.status,
                    forwarded_headers(answer.headers),
                    await self.instance_client.read_error_body(answer) or error,
                )
                return LegFailure(
                    instance,
                    f"{instance} failed: {excerpt(response.body)}",
                    response,
                    needs_prefill=True,
                )
            call.outcome = Outcome.ANSWERED
            if has_begun is not None:
                has_begun.set()
            if answer.status == 200:
                held.mark_handed_over()
            self._note_first(context, call)
            headers = [
                *forwarded_headers(answer.headers),
                ("X-Request-Id", context.request_id),
                *context.cors,
            ]
            if whole is not None:
                self._send(context, call, HttpResponse(answer.status, headers, whole))
            else:
                await self._relay(context, held, instance, answer, headers, call)
        return None

    async def _error_at_start(self, answer: UpstreamResponse) -> bytes | None:
        """Waits for the first event: an engine may open its answer long before it has anything to
        say. Comments say nothing.
        """
        start = await answer.peek(_has_first_event, self.instance_client.options.timeouts.idle)
        event = _EVENT.search(start)
        return start[: event.end()] + b"\n" if event is not None and event[1] is not None else None

    def _note_first(self, context: RequestContext, call: TrackedLeg) -> None:
        now = time.monotonic()
        self.instance_client.fleet.note_answer(call.leg, now)
        timeline = context.timeline
        timeline.mark(RequestEvent.FIRST_TOKEN, now)
        metrics, time_series = self.instance_client.metrics, self.instance_client.time_series
        metrics.ttft.observe(now - timeline.arrived)
        time_series.note_ttft(now - timeline.arrived, now)
        prefilled = timeline.time_of(RequestEvent.PREFILL_ENDED)
        if prefilled is not None:
            metrics.handover.observe(now - prefilled)
            time_series.note_handover(now - prefilled, now)

    def _send(self, context: RequestContext, call: TrackedLeg, answer: HttpResponse) -> None:
        """A whole answer, which holds D's word for the router where it was asked for one."""
        body = answer.body
        if context.turn_id is not None and answer.status == 200:
            params, body = take_turn_params(body)
            self.turns.retain(context, call.leg, params)
        context.reply.send(answer.status, answer.headers, body)

    async def _relay(
        self,
        context: RequestContext,
        held: PrefilledBlocks,
        instance: Instance,
        answer: UpstreamResponse,
        headers: list[tuple[str, str]],
        call: TrackedLeg,
    ) -> None:
        turn_filter = TurnParamsFilter() if context.turn_id is not None else None
        body_filter = turn_filter.feed if turn_filter is not None else None
        if not answer.is_chunked and answer.headers.get("content-length") is None:
            body_filter = _DoneChecker(body_filter).feed
        try:
            await answer.relay(
                context.reply,
                headers,
                idle_timeout_s=self.instance_client.options.timeouts.idle,
                filter=body_filter,
            )
        except UpstreamError as error:
            call.outcome = Outcome.FAILED
            held.reclaim()
            await self._interrupt(context, instance, describe_error(error))
            return
        if turn_filter is not None:
            self.turns.retain(context, call.leg, turn_filter.params)

    async def _interrupt(self, context: RequestContext, instance: Instance, what: str) -> None:
        """D is gone in the middle: say so where the format allows it, and never let the part look
        like a whole.
        """
        self.instance_client.metrics.failures.add(instance.role, instance.url)
        message = f"{instance} broke off its answer: {what}"
        context.stream_error = message
        _log.warning("stream broken request=%s: %s", context.request_id, message)
        if not context.reply.can_write:
            context.reply.abort()
            return
        await context.reply.write(error_event(502, message))
        await context.reply.finish()


class _DoneChecker:
    """A body that ends with its connection also ends so when its instance dies: it is whole if its
    last event says so.
    """

    def __init__(self, then: Callable[[bytes], bytes] | None) -> None:
        self._then = then
        self._tail = b""

    def feed(self, segment: bytes) -> bytes:
        if segment:
            self._tail = (self._tail + segment)[-_TAIL_BYTES:]
        elif _DONE not in self._tail:
            raise UpstreamDisconnected(
                "it closed the connection in the middle of its answer", has_answered=True
            )
        return segment if self._then is None else self._then(segment)


def _has_first_event(start: bytes) -> bool:
    return _EVENT.search(start) is not None or len(start) > _MAX_START
