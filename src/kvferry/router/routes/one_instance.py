"""Requests that one instance serves alone: it gets the client's body, and its answer goes back.

Runs on the event loop. The router asks a decode instance first, because prefill instances are kept
for prompts; then every other instance that may have the route. Which routes an instance has depends
on its model, its version and its flags, so the router learns them from answers: an instance that
lacks a route says so before it does any work. The router then asks the next instance, and does not
ask this one for the same path for a while. A 5xx answer on these routes never ejects an instance:
the request may be the cause, and the instance may still generate well.
"""

import re
import time
from dataclasses import dataclass, field

from kvferry.errors import RemoteProtocolError
from kvferry.router.fleet.instances import Instance, Outcome, Role
from kvferry.router.fleet.members import RoutingHints
from kvferry.router.http.messages import ServerRequest, UpstreamError
from kvferry.router.http.pool import UpstreamResponse
from kvferry.router.routes.response_ids import find_holder
from kvferry.router.routes.table import Route, Service
from kvferry.router.serving.aborted_answers import Refusal, find_refusal
from kvferry.router.serving.context import (
    HttpResponse,
    LegFailure,
    RequestContext,
    build_error_response,
    forwarded_headers,
)
from kvferry.router.serving.instance_client import (
    NOT_FOUND,
    UNAVAILABLE,
    InstanceClient,
    TrackedLeg,
    describe_error,
)
from kvferry.router.serving.stream_start import is_event_stream, peek_start
from kvferry.router.timeline import RequestEvent
from kvferry.web.errors import error_message

_LACKING_S = 30.0
"""Seconds for which an instance is not asked for a path that it lacks. It is asked again then,
because it may have restarted with other flags.
"""
_MAX_LACKING = 4096
_NOT_IMPLEMENTED = 501
_UNKNOWN_ROUTE = re.compile(r'(?:.*: )?Not Found|\{"detail":"Not Found"\}', re.DOTALL)
"""The message of a 404 for an unknown path. The message of a 404 for an unknown model differs."""
_UNSUPPORTED = "The model does not support"
"""How vLLM's message begins if its model lacks a route. The status 501 alone may also mean that the
model lacks one feature of the route.
"""
_RESPONSE_ID = re.compile(r"/v1/responses/([^/]+)")


def needs_no_parsing(route: Route, request: ServerRequest) -> bool:
    """Whether an instance gets the body unchanged: a form, or an empty body.

    All other bodies must be JSON objects, because the router removes the client's
    `kv_transfer_params` from them.
    """
    if route.service is Service.BOTH_LEGS:
        return False
    kind = (request.headers.get("content-type") or "").partition(";")[0].strip().lower()
    return not request.body or kind == "multipart/form-data"


@dataclass(slots=True)
class OneInstanceHandler:
    """Lets one instance serve each request, and remembers which instances lack which paths."""

    instance_client: InstanceClient
    _lacking_until: dict[tuple[Instance, str], float] = field(default_factory=dict, init=False)
    """Until when an instance is not asked for a path. The key is the path, not the pattern of the
    route: else a client could ask for a made-up path of `/v1/audio/*`, and all other paths of that
    pattern would be unavailable to all clients.
    """

    async def serve(self, context: RequestContext, route: Route) -> None:
        """Serve the request until the client has received the response."""
        holder = self._holder(context, route)
        if isinstance(holder, HttpResponse):
            context.error = "no instance stores this response"
            context.send(holder)
            return
        context.retries_left = self.instance_client.options.routing.max_retries
        failure: LegFailure | None = None
        while (instance := self._choose(context, holder)) is not None:
            result = await self._run(context, route, instance)
            if result is None:
                return
            context.note_failure(instance, result)
            # "This one failed" says more than "that one lacks the model", and this says more than
            # "that one lacks the route".
            without_route = self._lacking(context)
            says_little = result.is_lacking or instance in without_route
            if failure is None or failure.instance in without_route or not says_little:
                failure = result
            if not self._may_retry(context, route, result):
                break
        failure = failure or self._no_instance(context, route)
        context.error = failure.message
        context.send(failure.response())

    def _holder(self, context: RequestContext, route: Route) -> Instance | HttpResponse | None:
        """The instance that stores the response that the request names; None if the request names
        no response. An HttpResponse is the error for the client: no instance stores the response.
        """
        response_id = context.client.previous_response_id
        if route.service is Service.STORED_RESPONSE:
            match = _RESPONSE_ID.match(context.http.path)
            response_id = match[1] if match is not None else ""
        if response_id is None:
            return None
        members = self.instance_client.fleet.members(Role.DECODE)
        holder = find_holder(response_id, context.tenant, (member.instance for member in members))
        return holder or build_error_response(
            404, f"Response with id {response_id[:100]!r} not found on any instance of the fleet"
        )

    def _choose(self, context: RequestContext, holder: Instance | None) -> Instance | None:
        if holder is not None:
            return None if holder in context.tried else holder
        excluded = [*context.tried, *self._lacking(context)]
        # An instance stores the responses that it makes, and `_holder` searches decode instances.
        roles = (Role.DECODE,) if context.client.needs_one_instance else (Role.DECODE, Role.PREFILL)
        for role in roles:
            now = time.monotonic()
            chosen = self.instance_client.fleet.choose(role, context.hints, now, excluded)
            if chosen is not None:
                return chosen
        return None

    def _may_retry(self, context: RequestContext, route: Route, failure: LegFailure) -> bool:
        """Whether another instance gets the request. A retry after an instance that did no work is
        not counted.
        """
        if failure.is_final:
            return False
        if failure.is_refusal or failure.is_unsent or failure.is_lacking:
            return True
        if not route.is_repeatable:
            return False
        context.retries_left -= 1
        return context.retries_left >= 0

    def _no_instance(self, context: RequestContext, route: Route) -> LegFailure:
        if self._lacking(context):
            return _lacks_route(None, route)
        message = "no instance is available; try again"
        return LegFailure(None, message, build_error_response(UNAVAILABLE, message, 1))

    async def _run(
        self, context: RequestContext, route: Route, instance: Instance
    ) -> LegFailure | None:
        """Ask one instance. Returns None once the client has a response, which may be an error."""
        context.mark(RequestEvent.DECODE_BEGAN, instance)
        try:
            result = await self._ask(context, route, instance)
        except (UpstreamError, RemoteProtocolError) as error:
            if context.is_started:
                raise
            result = self.instance_client.failure(instance, error)
        if result is not None:
            context.mark(RequestEvent.DECODE_FAILED, result.message)
        return result

    async def _ask(
        self, context: RequestContext, route: Route, instance: Instance
    ) -> LegFailure | None:
        with (
            self.instance_client.track_leg(instance, RoutingHints()) as call,
            await self._send(context, route, instance) as answer,
        ):
            if answer.status == UNAVAILABLE:
                return await self.instance_client.refusal(answer, instance, call)
            if answer.status >= 500 and answer.status != _NOT_IMPLEMENTED:
                failure = await self.instance_client.server_error(answer, instance, call)
                # The request may be the cause, so the error does not count against the instance.
                call.outcome = Outcome.ABANDONED
                return failure
            is_generation = route.service is Service.BOTH_LEGS and answer.status == 200
            if answer.status == 200 and answer.headers.get("content-length") is None:
                if is_generation and (refusal := await self._find_refusal(route, answer)):
                    return self.instance_client.refused_late(instance, call, refusal)
                call.outcome = Outcome.ANSWERED
                await self._relay(context, instance, answer, call)
                return None
            body = await self.instance_client.read(answer)
            call.outcome = Outcome.ANSWERED
            if _is_unknown_route(answer.status, body):
                return self._note_lacking(context, instance, route)
            if answer.status == NOT_FOUND:
                return self.instance_client.lacks_model(answer, body, instance)
            if is_generation and (refusal := find_refusal(route.api, body)):
                return self.instance_client.refused_late(instance, call, refusal)
            context.send(HttpResponse(answer.status, forwarded_headers(answer.headers), body))
        return None

    async def _find_refusal(self, route: Route, answer: UpstreamResponse) -> Refusal | None:
        """Why a stream ends without a token; None if it shows that the instance generates."""
        if not is_event_stream(answer):
            return None
        start = await peek_start(answer, self.instance_client.options.timeouts.idle)
        return find_refusal(route.api, start.data)

    async def _send(
        self, context: RequestContext, route: Route, instance: Instance
    ) -> UpstreamResponse:
        http, timeouts = context.http, self.instance_client.options.timeouts
        client = context.client_for(instance)
        return await self.instance_client.upstreams.send(
            self.instance_client.target(instance),
            http.method,
            f"{http.path}?{http.query}" if http.query else http.path,
            context.leg_headers,
            [memoryview(http.body)] if needs_no_parsing(route, http) else client.decode_body(None),
            connect_timeout_s=timeouts.connect,
            head_timeout_s=timeouts.answer,
        )

    async def _relay(
        self,
        context: RequestContext,
        instance: Instance,
        answer: UpstreamResponse,
        call: TrackedLeg,
    ) -> None:
        """Pass the segments of a stream on to the client as they arrive."""
        try:
            await context.relay(answer, self.instance_client.options.timeouts.idle, None)
        except UpstreamError as error:
            call.outcome = Outcome.FAILED
            self.instance_client.metrics.failures.add(instance.role, instance.url)
            message = f"{instance} did not complete its answer: {describe_error(error)}"
            if is_event_stream(answer):
                await context.interrupt(502, message)
            else:
                # The client would take an error event for data.
                context.stream_error = message
                context.reply.abort()

    def _note_lacking(
        self, context: RequestContext, instance: Instance, route: Route
    ) -> LegFailure:
        if len(self._lacking_until) >= _MAX_LACKING:  # clients choose the paths
            self._lacking_until.clear()
        self._lacking_until[instance, context.http.path] = time.monotonic() + _LACKING_S
        return _lacks_route(instance, route)

    def _lacking(self, context: RequestContext) -> list[Instance]:
        """The instances that are known to lack the path of the request."""
        now = time.monotonic()
        return [
            instance
            for (instance, path), until in self._lacking_until.items()
            if path == context.http.path and until > now
        ]


def _is_unknown_route(status: int, body: bytes) -> bool:
    if status == _NOT_IMPLEMENTED:
        return error_message(body).startswith(_UNSUPPORTED)
    return status == 404 and _UNKNOWN_ROUTE.fullmatch(error_message(body)) is not None


def _lacks_route(instance: Instance | None, route: Route) -> LegFailure:
    message = f"no instance of the fleet has the route {route.pattern}"
    return LegFailure(instance, message, build_error_response(404, message), is_unsent=True)
