"""Calls to instances: the client that sends a leg, its time limits, and its error reports.

Runs on the event loop.
"""

import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from math import inf
from types import TracebackType
from typing import Any, Self

from kvferry.errors import RemoteProtocolError
from kvferry.router.fleet.fleet import Fleet
from kvferry.router.fleet.instances import Instance, Outcome, Role
from kvferry.router.fleet.members import Leg, RoutingHints
from kvferry.router.fleet.registration import ROUTER_ID_HEADER
from kvferry.router.http.messages import (
    AnswerTooLong,
    ConnectFailed,
    Headers,
    InstanceSilent,
    InvalidResponse,
    UpstreamDisconnected,
    UpstreamError,
    UpstreamTimeout,
)
from kvferry.router.http.pool import UpstreamPool, UpstreamResponse
from kvferry.router.http.upstream_connection import Target
from kvferry.router.http.via import LOOP_DETECTED, via
from kvferry.router.metrics import RouterMetrics
from kvferry.router.options import RouterOptions
from kvferry.router.serving.aborted_answers import Refusal
from kvferry.router.serving.client_request import LegBody
from kvferry.router.serving.context import (
    HttpResponse,
    LegFailure,
    RequestContext,
    build_error_response,
    forwarded_headers,
    with_details,
)
from kvferry.router.serving.side_channel import PrefilledBlocks
from kvferry.router.time_series import TimeSeries
from kvferry.router.timeline import RequestEvent, Timeline
from kvferry.web.errors import error_kind, error_message

UNAVAILABLE = 503
"""The HTTP status by which an instance refuses a leg."""
NOT_FOUND = 404
"""The HTTP status by which an instance says that it does not have the model."""
LEADS_BACK = "its address leads back to this router; remove it from the fleet"
_DEFAULT_RETRY_AFTER_S = 1
_EXCERPT_CHARS = 300
_PAUSED = "Generation is paused"
"""How the 503 of a paused vLLM begins. It releases P's blocks, so no other D can take them."""
_MAX_TARGETS = 4096
_SILENT = "it answered neither the request nor health checks"
_OF_THE_REQUEST = (UpstreamTimeout, AnswerTooLong)
"""Errors that the request causes by asking for too much. They say nothing about the instance's
health, unless its engine has computed nothing all the while (`Fleet.has_stalled`).
"""


@dataclass(slots=True)
class InstanceClient:
    """Sends HTTP requests to instances on behalf of client requests."""

    options: RouterOptions
    fleet: Fleet
    upstreams: UpstreamPool
    metrics: RouterMetrics
    time_series: TimeSeries
    router_id: str
    """The mark in `Via` that shows a loop."""
    tls: ssl.SSLContext | None = None
    """TLS settings for instances with an https URL."""

    _targets: dict[Instance, Target] = field(default_factory=dict, init=False)

    def target(self, instance: Instance) -> Target:
        target = self._targets.get(instance)
        if target is None or (target.tls is not None) is not instance.tls:
            if len(self._targets) >= _MAX_TARGETS:  # bounds the cache while instances change
                self._targets.clear()
            target = self._targets[instance] = Target(
                instance.address, self.tls if instance.tls else None
            )
        return target

    def track_leg(
        self, instance: Instance, hints: RoutingHints, held: PrefilledBlocks | None = None
    ) -> "TrackedLeg":
        """Context manager around one leg that records the instance's load and health. `held`: the
        blocks that a decode leg needs.
        """
        if self.fleet.get(instance) is None:
            raise ConnectFailed("it was removed from the fleet")
        return TrackedLeg(self, self.fleet.begin(instance, time.monotonic(), hints), held)

    def post(
        self, context: RequestContext, instance: Instance, body: LegBody
    ) -> Coroutine[Any, Any, UpstreamResponse]:
        """Send one leg with the leg's path and headers."""
        timeouts = self.options.timeouts
        return self.upstreams.send(
            self.target(instance),
            "POST",
            context.path,
            context.leg_headers,
            body,
            connect_timeout_s=timeouts.connect,
            head_timeout_s=timeouts.answer,
        )

    async def get(
        self,
        instance: Instance,
        path: str,
        headers: Sequence[tuple[str, str]],
        client: Headers | None = None,
    ) -> UpstreamResponse:
        """Fetch a page of an instance that is quick to produce; the probe timeout applies.
        `client`: the headers of the client's request, if there is one.
        """
        timeouts = self.options.timeouts
        return await self.upstreams.send(
            self.target(instance),
            "GET",
            path,
            [*headers, via(self.router_id, client)],
            connect_timeout_s=timeouts.connect,
            head_timeout_s=timeouts.probe,
        )

    def note_first_token(self, timeline: Timeline, now: float) -> None:
        timeline.mark(RequestEvent.FIRST_TOKEN, now)
        self.metrics.ttft.observe(now - timeline.arrived)
        self.time_series.note_ttft(now - timeline.arrived, now)

    def num_received(self, instance: Instance) -> int:
        return self.upstreams.num_received(self.target(instance))

    def fail_pending(self, instance: Instance, is_suspect: Callable[[float], bool]) -> int:
        """Fail the requests for which the instance has not begun an answer; return their number.
        `is_suspect` tells from the time at which a request was sent whether the request may have
        made the instance silent; no other instance gets such a request.
        """

        def make_error(sent_at: float) -> InstanceSilent:
            if not is_suspect(sent_at):
                return InstanceSilent(_SILENT, is_suspect=False)
            return InstanceSilent(
                f"{_SILENT}; no other instance gets the request, because it may be the cause",
                is_suspect=True,
            )

        return self.upstreams.fail_pending(self.target(instance), make_error)

    def read(self, answer: UpstreamResponse) -> Coroutine[Any, Any, bytes]:
        return answer.read(self.options.limits.max_body_bytes, self.options.timeouts.answer)

    async def read_error_body(self, answer: UpstreamResponse) -> bytes | None:
        """Read the body of an error response within the short probe timeout.

        None if the body did not arrive completely.
        """
        try:
            return await answer.read(
                self.options.limits.max_body_bytes, self.options.timeouts.probe
            )
        except UpstreamError:
            return None

    async def refusal(
        self, answer: UpstreamResponse, instance: Instance, call: "TrackedLeg"
    ) -> LegFailure:
        """Turn a 503 into a `LegFailure`; the client always gets a `Retry-After` header."""
        call.outcome = Outcome.REFUSED
        body = await self.read_error_body(answer)
        self.metrics.refusals.add(instance.role, instance.url)
        message, headers = f"{instance} accepts no requests now", forwarded_headers(answer.headers)
        if body is None:
            return LegFailure(
                instance,
                message,
                build_error_response(UNAVAILABLE, message, _DEFAULT_RETRY_AFTER_S),
                True,
            )
        if answer.headers.get("retry-after") is None:
            headers.append(("Retry-After", str(_DEFAULT_RETRY_AFTER_S)))
        return LegFailure(
            instance,
            message,
            HttpResponse(answer.status, headers, body),
            is_refusal=True,
            needs_prefill=(
                instance.role is Role.DECODE and error_message(body).startswith(_PAUSED)
            ),
        )

    def lacks_model(self, answer: UpstreamResponse, body: bytes, instance: Instance) -> LegFailure:
        """Turn a 404 into a `LegFailure`. LoRA adapters are loaded while engines serve, so engines
        of one fleet may have different ones.
        """
        return LegFailure(
            instance,
            f"{instance} does not have the model: {error_kind(body)}",
            HttpResponse(answer.status, forwarded_headers(answer.headers), body),
            is_lacking=True,
        )

    def refused_late(self, instance: Instance, call: "TrackedLeg", refusal: Refusal) -> LegFailure:
        """Turn an answer without a token into a refusal (`find_refusal`). D may have taken or
        released P's blocks, so a retry starts with the prefill leg.
        """
        call.outcome = Outcome.REFUSED
        self.metrics.refusals.add(instance.role, instance.url)
        message = f"{instance} {refusal.what}"
        shown = with_details(message, refusal.details)
        answer = build_error_response(UNAVAILABLE, shown, _DEFAULT_RETRY_AFTER_S)
        needs_prefill = instance.role is Role.DECODE
        return LegFailure(instance, message, answer, is_refusal=True, needs_prefill=needs_prefill)

    def failure(self, instance: Instance, error: Exception) -> LegFailure:
        if isinstance(error, _OF_THE_REQUEST):
            message = f"{instance} failed: {describe_error(error)}; ask for less, or for a stream"
            status = 504 if isinstance(error, UpstreamTimeout) else 502
            return LegFailure(
                instance, message, build_error_response(status, message), is_final=True
            )
        self.metrics.failures.add(instance.role, instance.url)
        return LegFailure(
            instance,
            f"{instance} failed: {describe_error(error)}",
            details=client_details(error),
            is_unsent=isinstance(error, ConnectFailed),
            is_final=isinstance(error, InstanceSilent) and error.is_suspect,
        )

    async def server_error(
        self, answer: UpstreamResponse, instance: Instance, call: "TrackedLeg"
    ) -> LegFailure:
        """Turn a 5xx that is not a refusal into a `LegFailure`.

        D's error response is passed on to the client; P's is not, because the client does not
        know about P.
        """
        whole = await self.read_error_body(answer)
        body = whole or b""
        refused_by = answer.headers.get(ROUTER_ID_HEADER.lower())
        if answer.status == LOOP_DETECTED and refused_by is not None:
            return self._loop(instance, call, refused_by, body)
        call.error = f"it answered with status {answer.status}"
        self.metrics.failures.add(instance.role, instance.url)
        response = (
            HttpResponse(answer.status, forwarded_headers(answer.headers), body)
            if whole is not None and instance.role is Role.DECODE
            else None
        )
        return LegFailure(
            instance,
            f"{instance} failed: {call.error}, {error_kind(body)}",
            response,
            needs_prefill=True,
            details=excerpt(body),
        )

    def _loop(
        self, instance: Instance, call: "TrackedLeg", refused_by: str, body: bytes
    ) -> LegFailure:
        """Turn the 508 of a router into a `LegFailure`. If this router has refused its own leg, the
        instance's address is wrong, because a client that forges the mark gets no further. The
        marks of other routers may be the client's, and say nothing about the instance.
        """
        if refused_by == self.router_id:
            call.error = LEADS_BACK
            self.metrics.failures.add(instance.role, instance.url)
            return LegFailure(instance, f"{instance} failed: {call.error}")
        call.outcome = Outcome.ABANDONED
        headers = [("Content-Type", "application/json"), (ROUTER_ID_HEADER, refused_by)]
        answer = HttpResponse(LOOP_DETECTED, headers, body)
        message = f"{instance} refused the request: {error_kind(body)}"
        return LegFailure(instance, message, answer, is_final=True)


class TrackedLeg:
    """One leg from begin to end, as a context manager that reports to fleet and metrics.

    `outcome` and `error` describe the instance's part in the result. A cancelled leg counts as
    abandoned and does not affect the health of the instance.
    """

    __slots__ = ("_calls", "_held", "error", "leg", "outcome")

    def __init__(
        self, instance_client: InstanceClient, leg: Leg, held: PrefilledBlocks | None
    ) -> None:
        self._calls = instance_client
        self._held = held
        self.leg = leg
        self.outcome = Outcome.FAILED
        self.error = ""

    def __enter__(self) -> Self:
        return self

    def note_transfer_failed(self, prefiller: Instance, num_failed: int) -> None:
        """D answered with an error because it could not use the KV of P. `num_failed`: transfers of
        the same request that have failed. Only the first may count against its D, because the
        request itself may be what no D can load.
        """
        now = time.monotonic()
        is_at_fault = self._calls.fleet.note_transfer_failed(self.leg, prefiller, now)
        self.outcome = Outcome.FAILED if is_at_fault and num_failed == 1 else Outcome.ABANDONED

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        now = time.monotonic()
        is_own = isinstance(error, _OF_THE_REQUEST) and not self._has_stalled(now)
        if isinstance(error, UpstreamError | RemoteProtocolError) and not is_own:
            self.error = describe_error(error)
        elif error is not None:
            self.outcome = Outcome.ABANDONED
        self._calls.fleet.end(self.leg, self.outcome, now, self.error)
        self._calls.metrics.leg(self.leg.instance, self.outcome)

    def _has_stalled(self, now: float) -> bool:
        ready_at = -inf if self._held is None else self._held.ready_at
        return self._calls.fleet.has_stalled(self.leg, now, ready_at)


def describe_error(error: Exception) -> str:
    if isinstance(error, ConnectFailed):
        return f"it cannot be reached: {error}"
    if isinstance(error, UpstreamTimeout):
        return f"it did not answer in time: {error}"
    if isinstance(error, UpstreamDisconnected):
        return "it closed the connection in the middle of an answer"
    return str(error)


def client_details(error: Exception) -> str:
    """What the instance wrote, for the client only; empty if the error has none of it."""
    return error.details if isinstance(error, InvalidResponse) else ""


def excerpt(body: bytes) -> str:
    """The start of a body as one printable line, for the client."""
    text = "".join(
        sign if sign.isprintable() else " "
        for sign in body[: 4 * _EXCERPT_CHARS].decode(errors="replace")
    ).strip()
    return text if len(text) <= _EXCERPT_CHARS else text[:_EXCERPT_CHARS] + "…"
