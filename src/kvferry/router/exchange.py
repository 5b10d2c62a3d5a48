"""One client's request on its way through the router, and what an instance's leg of it may come to."""

import time
from dataclasses import dataclass, field

from kvferry.router.http1.messages import Headers, ServerRequest
from kvferry.router.http1.server import ResponseWriter
from kvferry.router.http1.wire import request_fields
from kvferry.router.instances import Instance
from kvferry.router.legs import ClientRequest
from kvferry.router.members import RoutingHints
from kvferry.router.timeline import RequestEvent, Timeline

__all__ = ["HttpResponse", "LegFailure", "RequestContext", "forwarded_headers", "leg_headers"]

_TRACE_HEADERS = ("traceparent", "tracestate", "baggage")
_TO_CLIENTS = ("content-type", "content-encoding", "cache-control", "retry-after", "www-authenticate")


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
    """It could not be reached: nobody has done anything yet, so that asking another costs none of the tries."""
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
        self.reply.send(answer.status, [*answer.headers, ("X-Request-Id", self.request_id), *self.cors], answer.body)


def leg_headers(headers: Headers, request_id: str, authorization: str | None) -> bytes:
    """What both legs of a client's request say beside their body. `authorization`: for instances."""
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
