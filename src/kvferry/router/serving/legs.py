"""The two legs of a request: P computes the prompt, D takes P's blocks and generates.

Runs on the event loop. `PrefillLeg`: computing a prompt has one side effect. P holds the blocks,
and P's answer contains the ticket to release them. A failed prefill may be retried on another P.
When the router abandons a prefill leg, for whatever reason, P aborts the request; the prefill may
have ended already, so the router also releases the leg by its id. `DecodeLeg`: D's bytes reach the
client as they arrive. Another D may be tried until the client has received a byte; a
stream that starts with an error event counts as no answer.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

import msgspec

from kvferry.errors import RemoteProtocolError
from kvferry.router.conversations.turn_params import TurnParamsFilter, take_turn_params
from kvferry.router.conversations.turns import TurnTracker
from kvferry.router.fleet.instances import Instance, Outcome
from kvferry.router.http.messages import AnswerTooLong, UpstreamDisconnected, UpstreamError
from kvferry.router.http.pool import UpstreamResponse
from kvferry.router.routes.table import Api
from kvferry.router.serving.aborted_answers import find_refusal
from kvferry.router.serving.client_request import Handover, LegBody, read_prefill_answer
from kvferry.router.serving.context import (
    HttpResponse,
    LegFailure,
    RequestContext,
    build_error_response,
    forwarded_headers,
)
from kvferry.router.serving.first_token import may_continue
from kvferry.router.serving.instance_client import (
    NOT_FOUND,
    UNAVAILABLE,
    InstanceClient,
    TrackedLeg,
    client_details,
    describe_error,
)
from kvferry.router.serving.push import LegFinisher, PushSources
from kvferry.router.serving.side_channel import PrefilledBlocks, wait_for_answer
from kvferry.router.serving.stream_start import (
    StreamStart,
    check_kind,
    check_object,
    is_event_stream,
    peek_start,
)
from kvferry.router.timeline import RequestEvent
from kvferry.types import Address
from kvferry.web.errors import error_kind, error_message


@dataclass(slots=True)
class PrefillLeg:
    """Runs prefill legs and learns from the answers which instances push."""

    instance_client: InstanceClient
    push_sources: PushSources
    release_leg: Callable[[Instance, str], None]
    """Lets P free the blocks of the leg with this id; never waits or raises."""
    ask_failure: "FailureQuery | None" = None

    async def run(
        self,
        context: RequestContext,
        instance: Instance,
        push_ticket: str = "",
        last_turn: bytes | None = None,
    ) -> Handover | HttpResponse | LegFailure | None:
        """Run the prefill leg on `instance`.

        Returns P's blocks (None: P holds none), or P's 4xx response (except 404), which becomes the
        client's response, or the failure.
        """
        context.mark(RequestEvent.PREFILL_BEGAN, instance)
        leg_id = _new_leg_id()
        body = context.client.prefill_body(
            push_ticket, last_turn, leg_id, extra=self._token_fields(context)
        )
        try:
            result = await self._ask(context, instance, body, leg_id)
        except asyncio.CancelledError:
            self.release_leg(instance, leg_id)
            raise
        except (UpstreamError, RemoteProtocolError) as error:
            self.push_sources.forget(instance)
            result = self.instance_client.failure(instance, error)
            if not result.is_unsent:
                self.release_leg(instance, leg_id)
        if isinstance(result, LegFailure):
            context.mark(RequestEvent.PREFILL_FAILED, result.message)
        else:
            context.mark(RequestEvent.PREFILL_ENDED, instance)
        return result

    def _token_fields(self, context: RequestContext) -> Mapping[str, msgspec.Raw]:
        """What P is asked for if the client's answer may begin with P's token."""
        is_asked = self._may_begin_early(context) and may_continue(context.client)
        return {"return_token_ids": msgspec.Raw(b"true")} if is_asked else {}

    def _may_begin_early(self, context: RequestContext) -> bool:
        is_allowed = self.instance_client.options.routing.first_token_from_prefill
        return is_allowed and context.may_begin_early

    async def _ask(
        self, context: RequestContext, instance: Instance, body: LegBody, leg_id: str
    ) -> Handover | HttpResponse | LegFailure | None:
        with (
            self.instance_client.track_leg(instance, context.hints) as call,
            await self.instance_client.post(context, instance, body) as answer,
        ):
            if answer.status == UNAVAILABLE:
                return await self.instance_client.refusal(answer, instance, call)
            if answer.status >= 500:
                failure = await self.instance_client.server_error(answer, instance, call)
                return _with_reason(failure, await _ask_reason(failure, leg_id, self.ask_failure))
            check_kind(answer, is_streamed=False)
            text = await self.instance_client.read(answer)
            if 400 <= answer.status < 500:
                call.outcome = Outcome.ANSWERED
                if answer.status == NOT_FOUND:
                    return self.instance_client.lacks_model(answer, text, instance)
                return HttpResponse(answer.status, forwarded_headers(answer.headers), text)
            if answer.status != 200:
                raise RemoteProtocolError(f"it answered with status {answer.status}")
            check_object(answer, text)
            if refusal := find_refusal(context.client.api, text):
                self.release_leg(instance, leg_id)
                return self.instance_client.refused_late(instance, call, refusal)
            handover = read_prefill_answer(text)
            if context.facts is not None:
                context.facts.note_prefill(context.request_id, text)
            call.outcome = Outcome.ANSWERED
        self.push_sources.learn(instance, handover)
        if handover is None:
            self.instance_client.metrics.without_blocks.add()
        elif self._may_begin_early(context):
            return msgspec.structs.replace(handover, answer=text)
        return handover


def _new_leg_id() -> str:
    """A random id that cannot be guessed: a sender who knows it can release the leg's blocks."""
    return os.urandom(16).hex()


# -- why a leg failed --
# vLLM answers `500 Internal server error` for every failed transfer, and the reason is only in its
# log. The engine's side channel knows it.


FAILURE_WAIT_S = 1.0
"""How long the router waits for the reason. The engine knows it before it answers the leg."""

FailureQuery = Callable[[Instance, str], Awaitable[str | None]]
"""Returns why the transfer of a leg failed; empty if the engine knows of no failure, None if it did
not reply. Takes a bounded time.
"""


def make_failure_query_by(
    query_failure: Callable[[Address, str], "Future[str]"],
    find_side_channel: Callable[[Instance], Awaitable[Address | None]],
) -> FailureQuery:
    """Make a `FailureQuery` from `SideChannelSender.query_failure` and the known addresses."""

    async def ask(instance: Instance, leg_id: str) -> str | None:
        side_channel = await find_side_channel(instance)
        if side_channel is None:
            return None
        return await wait_for_answer(query_failure(side_channel, leg_id), FAILURE_WAIT_S)

    return ask


async def _ask_reason(failure: LegFailure, leg_id: str, ask: FailureQuery | None) -> str:
    """Ask the engine that answered with an error why; empty if it does not know.

    What an engine knows is why D could not use P's KV, or why P does not prefill for a D.
    """
    if ask is None or failure.instance is None:
        return ""
    return await ask(failure.instance, leg_id) or ""


def _with_reason(failure: LegFailure, reason: str) -> LegFailure:
    """Add the reason, unless the engine's answer contains it."""
    answer = failure.answer
    if not reason or (answer is not None and reason in error_message(answer.body)):
        return failure
    message = f"{failure.instance} failed: {reason}"
    # The client does not know about P: it gets P's reason only if the router has no other answer.
    return replace(
        failure,
        message=message,
        details="",
        answer=build_error_response(502, message) if answer is not None else None,
    )


# -- decode leg --
# D takes P's blocks and generates; the response is relayed to the client.


_log = logging.getLogger(__name__)

_DONE, _TAIL_BYTES = b"data: [DONE]", 64


@dataclass(slots=True)
class DecodeLeg:
    """Runs decode legs and relays D's answer to the client."""

    instance_client: InstanceClient
    turns: TurnTracker
    leg_finisher: LegFinisher
    ask_failure: "FailureQuery | None" = None

    async def run(
        self,
        context: RequestContext,
        held: PrefilledBlocks,
        instance: Instance,
        handover: Handover | None,
        has_begun: asyncio.Event | None = None,
    ) -> LegFailure | None:
        """Run the decode leg on `instance`; None once the client has its response, good or bad.

        `has_begun` is set as soon as D's answer has content for the client. Until then the error
        response of a prefill leg that runs in parallel takes precedence.
        """
        context.mark(RequestEvent.DECODE_BEGAN, instance)
        leg_id = _new_leg_id()
        client = context.client_for(instance)
        body = client.decode_body(handover, context.turn_id, leg_id)
        try:
            result = await self._ask(context, held, instance, body, leg_id, has_begun)
        except (UpstreamError, RemoteProtocolError) as error:
            if context.is_started:
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
        body: LegBody,
        leg_id: str,
        has_begun: asyncio.Event | None,
    ) -> LegFailure | None:
        with (
            self.instance_client.track_leg(instance, context.hints, held) as call,
            await self.instance_client.post(context, instance, body) as answer,
        ):
            if answer.status == UNAVAILABLE:
                return await self.instance_client.refusal(answer, instance, call)
            if answer.status >= 500:
                failure = await self.instance_client.server_error(answer, instance, call)
                return await self._explain(context, call, failure, leg_id)
            whole, start = await self._read_start(context, answer)
            if whole is not None and answer.status == NOT_FOUND:
                call.outcome = Outcome.ANSWERED
                return self.instance_client.lacks_model(answer, whole, instance)
            begun = start.data if whole is None else whole
            refusal = find_refusal(context.client.api, begun) if answer.status == 200 else None
            if refusal:
                return self.instance_client.refused_late(instance, call, refusal)
            if start.is_error:
                failure = await self._failed_stream(instance, answer, start.event)
                return await self._explain(context, call, failure, leg_id)
            call.outcome = Outcome.ANSWERED
            if has_begun is not None:
                has_begun.set()
            if answer.status == 200:
                self._note_used(context, held, call, leg_id)
            self._note_first(context, call)
            if whole is not None:
                headers = forwarded_headers(answer.headers)
                try:
                    self._send(context, call, HttpResponse(answer.status, headers, whole))
                except (UpstreamError, RemoteProtocolError):
                    call.outcome = Outcome.FAILED
                    held.reclaim()
                    raise
            else:
                await self._relay(context, held, instance, answer, call)
        return None

    async def _read_start(
        self, context: RequestContext, answer: UpstreamResponse
    ) -> tuple[bytes | None, StreamStart]:
        """Wait for a complete body, or for the start of a stream (the body is then None): until the
        client has received a byte, another D can be tried.
        """
        if 200 < answer.status < 400:
            raise RemoteProtocolError(f"it answered with status {answer.status}")
        check_kind(answer, is_streamed=context.client.is_streamed)
        if answer.status == 200 and is_event_stream(answer):
            timeout_s = self.instance_client.options.timeouts.idle
            return None, await peek_start(answer, timeout_s)
        whole = await self.instance_client.read(answer)
        if answer.status == 200:
            check_object(answer, whole)
        return whole, StreamStart()

    async def _failed_stream(
        self, instance: Instance, answer: UpstreamResponse, event: bytes
    ) -> LegFailure:
        """The failure of a stream whose first event with content is an error."""
        error = event + b"\n"
        self.instance_client.metrics.failures.add(instance.role, instance.url)
        body = await self.instance_client.read_error_body(answer) or error
        response = HttpResponse(answer.status, forwarded_headers(answer.headers), body)
        message = f"{instance} failed: its stream begins with an error, {error_kind(error)}"
        return LegFailure(instance, message, response, needs_prefill=True)

    def _note_used(
        self, context: RequestContext, held: PrefilledBlocks, call: TrackedLeg, leg_id: str
    ) -> None:
        """Note that D has begun its answer, with P's KV if it was given any."""
        held.mark_handed_over()
        if context.prefiller is None:
            self.instance_client.metrics.fallbacks.add()
        elif held.handover is not None and self.instance_client.fleet.is_kv_proof_wanted:
            proof = self._prove_used(context.prefiller, call.leg.instance, leg_id)
            self.leg_finisher.finish_leg(asyncio.create_task(proof), FAILURE_WAIT_S)

    async def _prove_used(self, prefiller: Instance, decoder: Instance, leg_id: str) -> None:
        """Ask D whether the transfer of a leg that it answers failed. Tokens alone prove nothing: a
        D with `kv_load_failure_policy` recompute computes the prompt itself.
        """
        if self.ask_failure is not None and await self.ask_failure(decoder, leg_id) == "":
            self.instance_client.fleet.note_kv_used(prefiller, time.monotonic())

    async def _explain(
        self, context: RequestContext, call: TrackedLeg, failure: LegFailure, leg_id: str
    ) -> LegFailure:
        """Ask D why its leg failed; see `Fleet.note_transfer_failed` for whose fault it is."""
        reason = await _ask_reason(failure, leg_id, self.ask_failure)
        if reason and context.prefiller is not None:
            context.num_failed_transfers += 1
            call.note_transfer_failed(context.prefiller, context.num_failed_transfers)
            failure = replace(failure, is_transfer=True)
        return _with_reason(failure, reason)

    def _note_first(self, context: RequestContext, call: TrackedLeg) -> None:
        now = time.monotonic()
        self.instance_client.fleet.note_answer(call.leg, now)
        if context.has_begun_early:
            context.timeline.mark(RequestEvent.CONTINUED, now)
        else:
            self.instance_client.note_first_token(context.timeline, now)
        prefilled = context.timeline.time_of(RequestEvent.PREFILL_ENDED)
        if prefilled is not None:
            self.instance_client.metrics.handover.observe(now - prefilled)
            self.instance_client.time_series.note_handover(now - prefilled, now)

    def _send(self, context: RequestContext, call: TrackedLeg, answer: HttpResponse) -> None:
        """Send a complete response, without the parameters that D added for the router."""
        body = answer.body
        if context.facts is not None:
            context.facts.note_decode(context.request_id, body)
        if context.turn_id is None or answer.status != 200:
            context.send(answer)
            return
        params, body = take_turn_params(body)
        context.send(replace(answer, body=body))
        self.turns.retain(context, call.leg, params)

    async def _relay(
        self,
        context: RequestContext,
        held: PrefilledBlocks,
        instance: Instance,
        answer: UpstreamResponse,
        call: TrackedLeg,
    ) -> None:
        def retain(params: bytes | None) -> None:
            self.turns.retain(context, call.leg, params)

        body_filter: Callable[[bytes], bytes] | None = (
            TurnParamsFilter(retain).feed if context.turn_id is not None else None
        )
        # Without a length or chunks, the end of the body looks like a crash: check for [DONE].
        # The other APIs have no [DONE]; their clients wait for a last event of another kind.
        has_done = context.client.api in (Api.OPENAI, Api.TOKENS)
        is_delimited = answer.is_chunked or answer.headers.get("content-length") is not None
        if has_done and not is_delimited:
            body_filter = _DoneChecker(body_filter).feed
        if context.facts is not None:
            body_filter = context.facts.reading_filter(context.request_id, body_filter)
        try:
            await context.relay(answer, self.instance_client.options.timeouts.idle, body_filter)
        except UpstreamError as error:
            # D failed after all, so P's blocks are released by the router.
            held.reclaim()
            # The request asked for an answer that is too long: this says nothing about D's health.
            if isinstance(error, AnswerTooLong):
                call.outcome = Outcome.ABANDONED
            else:
                call.outcome = Outcome.FAILED
                self.instance_client.metrics.failures.add(instance.role, instance.url)
            await self._interrupt(context, instance, error)

    async def _interrupt(
        self, context: RequestContext, instance: Instance, error: UpstreamError
    ) -> None:
        """Report that D's stream broke off."""
        message = f"{instance} did not complete its answer: {describe_error(error)}"
        _log.warning("stream aborted request=%s: %s", context.request_id, message)
        await context.interrupt(502, message, client_details(error))


class _DoneChecker:
    """Checks that a body which ends with its connection is complete.

    The connection also ends when the instance dies, so the body is complete only if its last event
    is `[DONE]`.
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
