"""Handles a generation: parse, wait for admission, serve within the deadline, record the outcome.

Runs on the event loop.
"""

import asyncio
import logging
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.router.access import AccessPolicy, credentials
from kvferry.router.access_log import AccessLog
from kvferry.router.http.deadlines import TimeLimits
from kvferry.router.http.messages import ServerRequest
from kvferry.router.http.writer import ResponseWriter
from kvferry.router.options import RouterOptions
from kvferry.router.routes.error_shapes import error_event
from kvferry.router.routes.one_instance import OneInstanceHandler, needs_no_parsing
from kvferry.router.routes.table import Route, Service
from kvferry.router.serving.admission import AdmissionController, AdmissionRefused, RefusalReason
from kvferry.router.serving.client_request import (
    ClientRequest,
    InvalidRequest,
)
from kvferry.router.serving.context import (
    HttpResponse,
    RequestContext,
    build_error_response,
    choose_request_id,
    leg_headers,
    shaped_answer,
)
from kvferry.router.serving.dispatch import Dispatcher
from kvferry.router.serving.large_bodies import BodyReader
from kvferry.router.serving.several_prompts import PromptsServer
from kvferry.router.time_series import TimeSeries
from kvferry.router.timeline import RecentRequests, RequestEvent, RequestOutcome
from kvferry.tracing.context import read_trace_context

if TYPE_CHECKING:
    from kvferry.router.tracing import RouterTracer

_log = logging.getLogger(__name__)

_STEP_BYTES = 1024 * 1024
_TRANSFER = b"kv_transfer_params"
_MAX_NAME_BYTES = 6 * len(_TRANSFER)
"""Length of the name with all characters escaped: parts of a form overlap by it."""
_ESCAPE = b"\\u00"
_MAX_ESCAPES = 1000
"""Replacing an escape takes a microsecond of the event loop, and a body has room for millions."""
_ASCII_ESCAPE = re.compile(rb"\\u00([0-7][0-9a-fA-F])")
_OTHER_CHARSET = re.compile(r"charset(?!=\"?utf-8\"?\s*(?:;|$))", re.IGNORECASE)
_SENTENCES = {
    RefusalReason.TENANT: "your tenant has reached its limit of open requests; try again later",
    RefusalReason.FULL: "the router's queue is full; try again later",
    RefusalReason.LATE: "the request waited too long in the router's queue; try again later",
    RefusalReason.CLOSING: "the router is stopping: send the request to another one",
}


@dataclass(slots=True)
class GenerateHandler:
    """Handles one request to an engine's route from its headers to its log line."""

    options: RouterOptions
    access_policy: AccessPolicy
    admission: AdmissionController
    serving: Dispatcher
    one_instance: OneInstanceHandler
    recent: RecentRequests
    time_series: TimeSeries
    access_log: AccessLog
    bodies: BodyReader = field(default_factory=BodyReader)
    limits: TimeLimits = field(default_factory=TimeLimits)
    tracer: "RouterTracer | None" = None
    """Writes the spans of requests; None: the router writes none."""

    async def generate(self, route: Route, request: ServerRequest, reply: ResponseWriter) -> None:
        """Serve a request to one of the routes of engines."""
        arrived, headers = time.monotonic(), request.headers
        request_id = choose_request_id(headers.get("x-request-id"))
        cors = self.access_policy.cors_headers(headers)
        is_opaque = needs_no_parsing(route, request)
        read = _read_opaque if is_opaque else self._read
        client = await read(route, request)
        if isinstance(client, InvalidRequest):
            refusal = build_error_response(client.status, client.message)
            _answer(reply, shaped_answer(route.api, refusal), request_id, cors)
            self.access_log.note_page(request_id, request.method, request.path, client.status)
            return
        timeline = self.recent.begin(request_id, request.path, arrived)
        traced = None if self.tracer is None else self.tracer.begin(route, request, timeline)
        trace = None if traced is None else traced.context
        content_type = headers.get("content-type") if is_opaque else None
        fields = leg_headers(
            headers,
            request_id,
            self._authorization(request),
            self.serving.instance_client.router_id,
            content_type or "application/json",
            trace,
        )
        timeline.conversation = client.conversation_id or ""
        context = RequestContext(
            request,
            reply,
            client,
            request_id,
            self.access_policy.tenant(request) or "",
            timeline,
            fields,
            cors=cors,
            facts=self.access_log.new_facts(),
            trace=trace,
        )
        outcome = RequestOutcome.ABANDONED
        try:
            entry = await self.admission.enter(context.tenant, self.options.timeouts.queue)
            if isinstance(entry, AdmissionRefused):
                context.error = _SENTENCES[entry.reason]
                context.send(
                    build_error_response(
                        entry.status, _SENTENCES[entry.reason], entry.retry_after_s
                    )
                )
            else:
                try:
                    timeline.mark(RequestEvent.ADMITTED, time.monotonic())
                    await self._serve_in_time(context, route)
                finally:
                    self.admission.leave(entry)
            outcome = _ending(context)
        except ConnectionError:
            # The client has disconnected, or does not read.
            reply.abort()
        finally:
            self._note_end(context, outcome)
            if traced is not None:
                traced.end(timeline)

    async def _read(self, route: Route, request: ServerRequest) -> ClientRequest | InvalidRequest:
        client = await self.bodies.read(request.body, route.api)
        if isinstance(client, ClientRequest) and client.prompts:
            return _check_repeated_bytes(client, self.options.limits.max_body_bytes)
        return client

    async def _serve_in_time(self, context: RequestContext, route: Route) -> None:
        limit = self.limits.begin(self.options.timeouts.request)
        try:
            await self._serve(context, route)
        except asyncio.CancelledError:
            # `end` is True if the deadline cancelled the task; else the client or the server did.
            if not limit.end():
                raise
            await self._out_of_time(context)
        except ConnectionError:
            raise
        except Exception:
            _log.exception("request failed because of a bug request=%s", context.request_id)
            if context.reply.is_started:
                context.stream_error = "the router failed"
                context.reply.abort()
            else:
                context.error = "the router failed to serve this request; its log says why"
                context.send(build_error_response(500, context.error))
        finally:
            limit.end()

    async def _serve(self, context: RequestContext, route: Route) -> None:
        if route.service is not Service.BOTH_LEGS or context.client.needs_one_instance:
            await self.one_instance.serve(context, route)
            return
        if not context.client.prompts:
            await self.serving.serve(context)
            return
        headers, authorization = context.http.headers, self._authorization(context.http)
        router_id = self.serving.instance_client.router_id
        await PromptsServer(
            context,
            self.serving.serve,
            self.admission,
            lambda request_id: leg_headers(
                headers, request_id, authorization, router_id, trace=context.trace
            ),
            self.options.limits.max_body_bytes,
        ).run()

    async def _out_of_time(self, context: RequestContext) -> None:
        message = f"the request took longer than {self.options.timeouts.request:g} s"
        reply = context.reply
        if not reply.is_started:
            context.error = message
            context.send(build_error_response(504, message))
            return
        context.stream_error = message
        if context.client.is_streamed and reply.can_write:
            await reply.write(error_event(504, message, context.client.api))
            await reply.finish()
        else:
            reply.abort()

    def _authorization(self, request: ServerRequest) -> str | None:
        """Authorization header for instances: the instance key if there is one.

        Otherwise the client's header is passed on, unless the router itself checks client keys.
        """
        if self.options.access.instance_key:
            return f"Bearer {self.options.access.instance_key}"
        return None if self.access_policy.keys else credentials(request.headers)

    def _note_end(self, context: RequestContext, outcome: RequestOutcome) -> None:
        now, timeline, status = time.monotonic(), context.timeline, context.reply.status
        timeline.relayed_bytes = context.reply.num_sent
        self.recent.end(timeline, outcome, status, now, context.stream_error or context.error)
        self.time_series.note_end(now, timeline.relayed_bytes, outcome.is_error)
        self.serving.instance_client.metrics.outcome(outcome)
        if outcome is RequestOutcome.ABANDONED:
            self.serving.instance_client.metrics.aborts.add()
        self.access_log.note_generation(
            timeline,
            context.facts,
            context.client.fields.get("model"),
            trace=_trace_id(context),
            tenant=context.tenant,
            is_streamed=context.client.is_streamed,
            num_prompts=len(context.client.prompts) or 1,
            received_bytes=len(context.http.body),
        )


async def _read_opaque(route: Route, request: ServerRequest) -> ClientRequest | InvalidRequest:
    # vLLM also reads parameters from JSON in a field of a form, and Starlette decodes the fields of
    # a form by the charset of its content type.
    body, num_escapes = request.body, 0
    for start in range(0, len(body), _STEP_BYTES):
        if start:
            await asyncio.sleep(0)  # a step takes about 5 ms, in which all other clients wait
        num_escapes += body.count(_ESCAPE, start, start + _STEP_BYTES + len(_ESCAPE) - 1)
        if num_escapes > _MAX_ESCAPES:
            message = f"a form must not have more than {_MAX_ESCAPES} JSON escapes such as \\u0041"
            return InvalidRequest(400, message)
        part = body[start : start + _STEP_BYTES + _MAX_NAME_BYTES]
        if _TRANSFER in _ASCII_ESCAPE.sub(_unescaped, part):
            return InvalidRequest(400, "a form must not contain kv_transfer_params")
    if _OTHER_CHARSET.search(request.headers.get("content-type") or ""):
        return InvalidRequest(400, "a form must have the charset utf-8")
    return ClientRequest({}, api=route.api)


def _unescaped(escape: re.Match[bytes]) -> bytes:
    return bytes([int(escape[1], 16)])


def _check_repeated_bytes(client: ClientRequest, limit: int) -> ClientRequest | InvalidRequest:
    """Check a request with several prompts: each of its prompts is sent to P and D with all other
    fields, so a few megabytes of `documents` would become gigabytes.
    """
    num_bytes = client.num_repeated_bytes
    if num_bytes <= limit:
        return client
    return InvalidRequest(
        413,
        f"prompt is a list of {len(client.prompts)} prompts, and each is sent with all other "
        f"fields: for all prompts these take {num_bytes} bytes, more than the limit of {limit}; "
        "send fewer prompts in one request",
    )


def _answer(
    reply: ResponseWriter, answer: HttpResponse, request_id: str, cors: list[tuple[str, str]]
) -> None:
    reply.send(answer.status, [*answer.headers, ("X-Request-Id", request_id), *cors], answer.body)


def _ending(context: RequestContext) -> RequestOutcome:
    status = context.reply.status
    if context.stream_error:
        return RequestOutcome.ABORTED
    if status in (429, 503):
        return RequestOutcome.REFUSED
    if status >= 500:
        return RequestOutcome.FAILED
    return RequestOutcome.INVALID if status >= 400 else RequestOutcome.ANSWERED


def _trace_id(context: RequestContext) -> str:
    trace = context.trace or read_trace_context(context.http.headers.get)
    return "" if trace is None else trace.trace_id
