"""The name a request has in both legs and in every log: the client's, if it is fit to be one. Pure
but for randomness.
"""

import random
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.errors import RequestRefused
from kvferry.router.fleet.instances import Instance
from kvferry.router.fleet.members import RoutingHints
from kvferry.router.http.messages import Headers, ServerRequest, request_fields
from kvferry.router.http.server import ResponseWriter
from kvferry.router.serving.client_request import ClientRequest
from kvferry.router.timeline import RequestEvent, Timeline
from kvferry.web.errors import error_body

__all__ = [
    "HttpResponse",
    "LegFailure",
    "RequestContext",
    "build_error_response",
    "choose_request_id",
    "error_event",
    "forwarded_headers",
    "leg_headers",
]


_FIT = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
# Names must differ, and nobody is let in for knowing one: a system call for each would be wasted.
_draw = random.Random(random.SystemRandom().getrandbits(128)).getrandbits


def choose_request_id(sent: str | None) -> str:
    return sent if sent is not None and _FIT.fullmatch(sent) else f"{_draw(128):032x}"


# -------------------- exchange --------------------
# One client's request on its way through the router, and what an instance's leg of it may come to.


_TRACE_HEADERS = ("traceparent", "tracestate", "baggage")
_TO_CLIENTS = (
    "content-type",
    "content-encoding",
    "cache-control",
    "retry-after",
    "www-authenticate",
)


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A whole answer that is to be the client's."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True, slots=True)
class LegFailure:
    """A leg that came to nothing while the client has got nothing: it may be tried elsewhere."""

    instance: Instance | None
    """None: there was nobody to ask."""
    message: str
    answer: HttpResponse | None = None
    """What the instance said, if it said anything."""
    is_refusal: bool = False
    """It takes no requests now (503): it has done nothing, and another may."""
    is_unsent: bool = False
    """It could not be reached: nobody has done anything yet, so that asking another costs none of
    the tries.
    """
    needs_prefill: bool = False
    """D could not use P's blocks, or had used them up: trying again begins with P."""


@dataclass(slots=True)
class RequestContext:
    http: ServerRequest
    reply: ResponseWriter
    client: ClientRequest
    request_id: str
    tenant: str
    timeline: Timeline
    leg_headers: bytes
    """Headers of both legs, as they are sent."""
    turn_id: str | None = None
    """D is asked to keep this turn's blocks under this word."""
    hints: RoutingHints = field(default_factory=RoutingHints)
    retries_left: int = 0
    tried: list[Instance] = field(default_factory=list)
    """Of either role: they have refused or failed this request."""
    cors: list[tuple[str, str]] = field(default_factory=list)
    error: str = ""
    """Why it failed."""
    stream_error: str = ""
    """Why the client's stream ended before its end."""
    prefiller: Instance | None = None
    """Whose blocks the decode leg is given."""

    def mark(self, mark: RequestEvent, about: object = None) -> None:
        self.timeline.mark(mark, time.monotonic(), about)

    def send(self, answer: HttpResponse) -> None:
        self.reply.send(
            answer.status,
            [*answer.headers, ("X-Request-Id", self.request_id), *self.cors],
            answer.body,
        )


def leg_headers(headers: Headers, request_id: str, authorization: str | None) -> bytes:
    """What both legs of a client's request say beside their body. `authorization`: for
    instances.
    """
    fields = [("X-Request-Id", request_id), ("Content-Type", "application/json")]
    if authorization is not None:
        fields.append(("Authorization", authorization))
    for name in _TRACE_HEADERS:
        value = headers.get(name)
        if value is not None:
            fields.append((name, value))
    return request_fields(fields)


def forwarded_headers(headers: Headers) -> list[tuple[str, str]]:
    """What of an instance's answer reaches the client."""
    passed = []
    for name in _TO_CLIENTS:
        value = headers.get(name)
        if value is not None:
            passed.append((name, value))
    return passed


# -------------------- failures --------------------
# The router's own errors, as a whole answer or as the last event of a stream. Pure.
#
# They look like an engine's, because an engine's refusals are passed on as they are.


_JSON = ("Content-Type", "application/json; charset=utf-8")


def build_error_response(
    status: int,
    message: str,
    retry_after_s: int | None = None,
    headers: Iterable[tuple[str, str]] = (),
) -> HttpResponse:
    retry = [] if retry_after_s is None else [("Retry-After", str(retry_after_s))]
    return HttpResponse(
        status, [_JSON, *retry, *headers], error_body(RequestRefused(message, status=status))
    )


def error_event(status: int, message: str) -> bytes:
    """A server-sent event that says why the stream ends here. What was sent before may have ended
    inside an event: empty lines close it, and mean nothing otherwise.
    """
    return b"\n\ndata: " + error_body(RequestRefused(message, status=status)) + b"\n\n"
