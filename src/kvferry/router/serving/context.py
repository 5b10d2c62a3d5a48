"""State of one client request in the router, and the headers and errors shared by both legs.

Everything here is plain data or pure, except that request ids are random and `RequestContext`
reads the clock and writes to the client.
"""

import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace

from kvferry.errors import RemoteProtocolError, RequestRefused
from kvferry.router.access_log import AnswerFacts
from kvferry.router.fleet.instances import Instance
from kvferry.router.fleet.members import RoutingHints
from kvferry.router.http.messages import (
    AnswerTooLong,
    Headers,
    InvalidResponse,
    ServerRequest,
    request_fields,
)
from kvferry.router.http.pool import UpstreamResponse
from kvferry.router.http.via import via
from kvferry.router.http.writer import ResponseWriter
from kvferry.router.routes.error_shapes import error_event, shape_error
from kvferry.router.routes.response_ids import make_response_id
from kvferry.router.routes.table import Api
from kvferry.router.serving.client_request import ClientRequest
from kvferry.router.serving.event_splitter import EventSplitter
from kvferry.router.serving.first_token import CONTINUED_PATH, FirstToken
from kvferry.router.timeline import RequestEvent, Timeline
from kvferry.tracing.context import TraceContext, read_trace_context
from kvferry.web.errors import error_body, error_kind, error_message

_FIT = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
# Ids that clients see must be unique, not secret: knowing one grants no access. A seeded generator
# therefore suffices, without a system call per request.
_draw = random.Random(random.SystemRandom().getrandbits(128)).getrandbits


def choose_request_id(sent: str | None) -> str:
    """The client's `X-Request-Id` if well formed, else a random id; both legs and logs use it."""
    return sent if sent is not None and _FIT.fullmatch(sent) else new_id()


def new_id() -> str:
    return f"{_draw(128):032x}"


# -- request context --
# One client request on its way through the router, and the possible results of a leg.


_MAX_EVENT_BYTES = 16 * 1024 * 1024
"""Largest event of a stream whose events the router changes."""
_JSON = ("Content-Type", "application/json; charset=utf-8")
_EVENTS = [("Content-Type", "text/event-stream; charset=utf-8"), ("Cache-Control", "no-cache")]
# Without this header nginx collects events until its buffer of 4 KiB is full.
_UNBUFFERED = ("X-Accel-Buffering", "no")
_TO_CLIENTS = (
    "content-type",
    "content-encoding",
    "cache-control",
    "retry-after",
    "www-authenticate",
)


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A complete HTTP response."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True, slots=True)
class LegFailure:
    """A leg failed before the client received anything, so another instance may be tried."""

    instance: Instance | None
    """The instance that failed. None: no instance was available."""
    message: str
    """For the client, the log and the dashboard: without text that the instance wrote."""
    answer: HttpResponse | None = None
    """The instance's response, if there was one."""
    is_refusal: bool = False
    """The instance answered 503 and did no work; another instance may accept the request."""
    is_lacking: bool = False
    """The instance does not have the model (404) and did no work; another instance may have it."""
    is_unsent: bool = False
    """The connection failed, so no instance did any work, and the retry costs none of
    `max_retries`.
    """
    is_consequence: bool = False
    """The failure follows from an earlier one, whose retry was counted: this retry costs none."""
    is_final: bool = False
    """Another instance would fare no better, or must not get this request."""
    is_transfer: bool = False
    """D works, but could not use P's KV: a retry takes another P."""
    needs_prefill: bool = False
    """D could not use P's blocks, or had consumed them: a retry starts with the prefill leg."""
    details: str = ""
    """What the instance wrote, for the client only: engines repeat prompts in their errors."""

    def response(self) -> HttpResponse:
        """The instance's response if there is one for the client, else a 502 with the failure."""
        return self.answer or build_error_response(502, with_details(self.message, self.details))


@dataclass(slots=True)
class RequestContext:
    """One client request, from the parsed body to the end of its response.

    The legs answer through `send`, `relay` and `interrupt`. A request with several prompts has one
    context for the client, and one for each prompt (`several_prompts.py`).
    """

    http: ServerRequest
    reply: ResponseWriter
    client: ClientRequest
    request_id: str
    tenant: str
    timeline: Timeline
    leg_headers: bytes
    """Encoded headers sent with both legs."""
    turn_id: str | None = None
    """Id under which D retains the blocks of this turn. None: D retains nothing."""
    hints: RoutingHints = field(default_factory=RoutingHints)
    retries_left: int = 0
    tried: list[Instance] = field(default_factory=list)
    """Instances of either role that refused or failed this request."""
    unanswered: list[Instance] = field(default_factory=list)
    """Those of `tried` that could not be reached or broke the connection."""
    lacking: dict[Instance, LegFailure] = field(default_factory=dict)
    """Those of `tried` that do not have the model; they are not asked again."""
    cors: list[tuple[str, str]] = field(default_factory=list)
    error: str = ""
    """Why the request failed; empty if it did not."""
    stream_error: str = ""
    """Why the client's stream was cut short; empty if it was not."""
    prefiller: Instance | None = None
    """The prefill instance whose blocks the decode leg receives."""
    facts: AnswerFacts | None = None
    """What the access log shows of the engines' answers; None: the access log is off."""
    num_failed_transfers: int = 0
    """Decode legs that failed because D could not use P's KV."""
    trace: TraceContext | None = None
    """The router's span of this request; None if the router writes no spans."""
    first_token: FirstToken | None = None
    """P's token, if the client's answer begins with it. `client` is then the request for the rest
    of the answer.
    """
    prompt: memoryview = field(init=False)
    """The JSON text of the client's prompt, by which instances are chosen."""

    def __post_init__(self) -> None:
        self.prompt = self.client.prompt

    def mark(self, mark: RequestEvent, about: object = None) -> None:
        self.timeline.mark(mark, time.monotonic(), about)

    def note_failure(self, instance: Instance, failure: LegFailure) -> None:
        """Remember that a leg of this request failed on the instance."""
        self.tried.append(instance)
        if failure.is_lacking:
            self.lacking[instance] = failure
        elif not (failure.needs_prefill or failure.is_refusal):
            self.unanswered.append(instance)
        if failure.is_transfer and not failure.is_consequence and self.prefiller is not None:
            self.tried.append(self.prefiller)

    @property
    def path(self) -> str:
        """The route of both legs."""
        return self.http.path if self.first_token is None else CONTINUED_PATH

    @property
    def is_started(self) -> bool:
        """Whether the client has received a byte that an instance cannot repeat: no leg may be
        retried then. Every D continues after P's token, so that token does not count.
        """
        first = self.first_token
        return self.reply.is_started and (first is None or first.has_continued)

    @property
    def may_begin_early(self) -> bool:
        """Whether the answer may begin before D answers."""
        return self.first_token is None

    @property
    def has_begun_early(self) -> bool:
        """Whether the client has received P's token."""
        return self.first_token is not None and self.reply.is_started

    async def begin_with(self, first: FirstToken) -> None:
        """Begin a stream with P's token, and end the answer if the token is its last. Both legs
        serve the rest of the answer from now on.
        """
        is_last = first.continued is None
        if self.client.is_streamed:
            self.reply.start(200, self.client_headers([*_EVENTS, _UNBUFFERED]))
            await self.reply.write(first.events())
            if is_last:
                await self.reply.finish()
        elif is_last:
            self.send(HttpResponse(200, [_JSON], first.body()))
        self.first_token, self.client = first, first.continued or self.client

    def note_error(self, answer: HttpResponse) -> None:
        """Keep the kind of an engine's error, unless the router knows why the request failed."""
        if answer.status >= 400 and not self.error:
            self.error = f"an engine answered {answer.status}: {error_kind(answer.body)}"

    def send(self, answer: HttpResponse) -> None:
        """Send a complete response to the client, or end a stream that has begun with P's token."""
        first = self.first_token
        self.note_error(answer)
        if self.has_begun_early:
            self.stream_error = self.error or "an engine failed"
            # A stream whose first event is an error has the status 200.
            status = answer.status if answer.status >= 400 else 502
            message = error_message(answer.body) or "an engine failed"
            self.reply.put(error_event(status, message))
            self.reply.end()
            return
        if first is not None and answer.status == 200:
            answer = replace(answer, body=first.body(answer.body))
        answer = shaped_answer(self.client.api, answer)
        self.reply.send(answer.status, self.client_headers(answer.headers), answer.body)

    async def relay(
        self,
        answer: UpstreamResponse,
        idle_timeout_s: float,
        filter: Callable[[bytes], bytes] | None,
    ) -> None:
        """Pass D's stream on to the client. Raises UpstreamError if D fails."""
        if self.first_token is not None:
            await self._relay_rest(self.first_token, answer, idle_timeout_s, filter)
            return
        await answer.relay(
            self.reply,
            self.client_headers(stream_headers(answer.headers)),
            idle_timeout_s=idle_timeout_s,
            filter=filter,
        )

    async def _relay_rest(
        self,
        first: FirstToken,
        answer: UpstreamResponse,
        idle_timeout_s: float,
        filter: Callable[[bytes], bytes] | None,
    ) -> None:
        async def pass_on(events: list[bytes]) -> None:
            translated = b"".join(map(first.translate, events))
            if translated:
                first.has_continued = True
                await self.reply.write(translated)

        await relay_events(answer, idle_timeout_s, filter, pass_on)
        await self.reply.finish()

    async def interrupt(self, status: int, message: str, details: str = "") -> None:
        """End a stream that cannot be completed. `details`: what the instance wrote.

        The client gets an error event if the framing allows one, else the connection is aborted. A
        partial answer never looks complete.
        """
        self.stream_error = message
        if not self.reply.can_write:
            self.reply.abort()
            return
        message = with_details(message, details)
        await self.reply.write(error_event(status, message, self.client.api))
        await self.reply.finish()

    def client_for(self, instance: Instance) -> ClientRequest:
        """The request for this instance: a response gets an id that leads to it."""
        if self.client.api is not Api.RESPONSES:
            return self.client
        return self.client.with_id(make_response_id(new_id(), self.tenant, instance))

    def client_headers(self, headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """The headers of a response, with those that every response to a client has."""
        return [*headers, ("X-Request-Id", self.request_id), *self.cors]


async def relay_events(
    answer: UpstreamResponse,
    idle_timeout_s: float,
    filter: Callable[[bytes], bytes] | None,
    pass_on: Callable[[list[bytes]], Awaitable[None]],
) -> None:
    """Call `pass_on` with the events of D's stream as they arrive. Raises UpstreamError."""
    splitter, is_over = EventSplitter(), False
    while not is_over:
        segment = await answer.read_some(idle_timeout_s)
        is_over = not segment
        events = splitter.feed(segment if filter is None else filter(segment))
        if splitter.num_incomplete > _MAX_EVENT_BYTES:
            raise AnswerTooLong(
                f"an event is longer than {_MAX_EVENT_BYTES} bytes; ask for fewer logprobs, or "
                "send each prompt in a request of its own"
            )
        try:
            await pass_on([*events, *splitter.finish()] if is_over else events)
        except RemoteProtocolError as error:
            raise InvalidResponse(str(error)) from None


def leg_headers(
    headers: Headers,
    request_id: str,
    authorization: str | None,
    router_id: str,
    content_type: str = "application/json",
    trace: TraceContext | None = None,
) -> bytes:
    """Encoded headers of both legs. `authorization`: the credentials sent to instances. `trace`:
    the router's span of the request; without one, the client's context is passed on.
    """
    fields = [
        ("X-Request-Id", request_id),
        ("Content-Type", content_type),
        via(router_id, headers),
    ]
    if authorization is not None:
        fields.append(("Authorization", authorization))
    trace = trace or read_trace_context(headers.get)
    if trace is not None:
        fields += trace.headers()
    baggage = headers.get("baggage")
    if baggage is not None:
        fields.append(("baggage", baggage))
    return request_fields(fields)


def forwarded_headers(headers: Headers) -> list[tuple[str, str]]:
    """Headers of an instance's response that are passed on to the client."""
    passed = []
    for name in _TO_CLIENTS:
        value = headers.get(name)
        if value is not None:
            passed.append((name, value))
    return passed


def stream_headers(headers: Headers) -> list[tuple[str, str]]:
    """Headers of a stream of events that are passed on to the client."""
    return [*forwarded_headers(headers), _UNBUFFERED]


# -- errors --
# The router's own errors as complete responses. Pure. The format is that of an engine, because
# refusals of engines are passed on; `shaped_answer` gives both the shape of the client's API.


def with_details(message: str, details: str) -> str:
    """The message for a client, with what the instance wrote."""
    return f"{message}: {details}" if details else message


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


def shaped_answer(api: Api, answer: HttpResponse) -> HttpResponse:
    """The answer, whose error has the shape of the API."""
    body = shape_error(api, answer.status, answer.body)
    if body is answer.body:
        return answer
    headers = [field for field in answer.headers if field[0].lower() != "content-type"]
    return HttpResponse(answer.status, [_JSON, *headers], body)
