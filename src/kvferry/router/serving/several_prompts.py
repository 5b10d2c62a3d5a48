"""Serves a completion that has several prompts, and joins the answers as a single engine would.

Runs on the event loop; `JoinedAnswer` is pure. Each prompt is served like a request of its own: it
has two legs, retries, and a request id that begins with the client's. The choices of a prompt get
the index that an engine would give them: number of the prompt times choices per prompt, plus number
of the choice. The first prompt that fails ends the request: the legs of the other prompts are
cancelled, which frees their blocks. The same happens when the client disconnects.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.config.fields import Natural
from kvferry.errors import RemoteProtocolError
from kvferry.router.http.messages import InvalidResponse
from kvferry.router.http.pool import UpstreamResponse
from kvferry.router.serving.admission import AdmissionController
from kvferry.router.serving.context import (
    HttpResponse,
    RequestContext,
    build_error_response,
    relay_events,
    stream_headers,
    with_details,
)
from kvferry.router.serving.event_splitter import event_data
from kvferry.router.timeline import RequestEvent, Timeline
from kvferry.web.errors import MALFORMED_JSON, error_kind, error_message

MAX_AT_ONCE = 16
"""Prompts of one request that run at the same time."""
_JSON = ("Content-Type", "application/json")
_DONE = b"[DONE]"

_Fields = dict[str, msgspec.Raw]
_decoder: msgspec.json.Decoder[_Fields] = msgspec.json.Decoder(_Fields)
_choices_decoder: msgspec.json.Decoder[list[_Fields]] = msgspec.json.Decoder(list[_Fields])
_index_decoder: msgspec.json.Decoder[int] = msgspec.json.Decoder(Natural)
_encode = msgspec.json.Encoder().encode


# -- joined answer --


@dataclass(slots=True)
class JoinedAnswer:
    """Joins the answers to several prompts, as complete bodies or event by event.

    Everything except ids, indices and totals stays the JSON text that the engine wrote.
    """

    answer_id: str
    num_choices: int
    """Choices of each prompt."""
    num_bytes: int = field(default=0, init=False)
    """Length of all bodies so far."""
    _answers: dict[int, tuple[_Fields, list[_Fields]]] = field(default_factory=dict, init=False)
    """The fields and the choices of each answer, by number of the prompt."""
    _usage: dict[str, Any] = field(default_factory=dict, init=False)
    _usage_event: _Fields = field(default_factory=dict, init=False)
    """The last event that contained only usage; empty if there was none."""

    def add(self, number: int, body: bytes) -> None:
        """Add the complete answer to a prompt. RemoteProtocolError if it is not a completion."""
        self._answers[number] = self._read(number, body)
        self.num_bytes += len(body)

    def body(self) -> bytes:
        """The joined answer, once `add` has been called for every prompt."""
        answers = [self._answers[number] for number in sorted(self._answers)]
        for fields, _ in answers:
            self._add_usage(fields)
        joined: dict[str, object] = dict(answers[0][0])
        joined["choices"] = [choice for _, choices in answers for choice in choices]
        if self._usage:
            joined["usage"] = self._usage
        return _encode(joined)

    def event(self, number: int, event: bytes) -> bytes:
        """One event of a prompt's stream as an event of the joined stream; empty if the joined
        stream has no such event. InvalidResponse if the event is an error, RemoteProtocolError if
        it is malformed.
        """
        data = event_data(event)
        if not data or data == _DONE:
            return b""
        fields, choices = self._read(number, data)
        if not choices and "usage" in fields:
            self._add_usage(fields)
            self._usage_event = fields
            return b""
        return b"data: " + _encode({**fields, "choices": choices}) + b"\n\n"

    def end_of_stream(self) -> bytes:
        """The last events of the joined stream: the usage of all prompts, if requested, and the
        end.
        """
        usage = (
            b"data: " + _encode({**self._usage_event, "usage": self._usage}) + b"\n\n"
            if self._usage_event
            else b""
        )
        return usage + b"data: [DONE]\n\n"

    def _read(self, number: int, data: bytes) -> tuple[_Fields, list[_Fields]]:
        try:
            fields = _decoder.decode(data)
            if "error" in fields:
                raise InvalidResponse(
                    f"an event is an error, {error_kind(data)}", error_message(data)
                )
            choices = _choices_decoder.decode(fields.get("choices", b""))
            for choice in choices:
                index = _index_decoder.decode(choice.get("index", b"0"))
                choice["index"] = msgspec.Raw(b"%d" % (number * self.num_choices + index))
        except MALFORMED_JSON as error:
            raise RemoteProtocolError(f"its answer is not a completion: {error}") from None
        fields["id"] = msgspec.Raw(_encode(self.answer_id))
        return fields, choices

    def _add_usage(self, fields: _Fields) -> None:
        try:
            usage = msgspec.json.decode(fields.get("usage", b"null"), type=dict[str, Any] | None)
            _add_counts(self._usage, usage or {})
        except (*MALFORMED_JSON, OverflowError, ValueError):
            return  # also for a number of hundreds of digits, to which no fraction can be added


def _add_counts(into: dict[str, Any], more: dict[str, Any]) -> None:
    """Add numbers to numbers, at any depth; any other value is set if there is none yet."""
    for name, value in more.items():
        known = into.get(name)
        if isinstance(value, dict):
            into[name] = known if isinstance(known, dict) else {}
            _add_counts(into[name], value)
        elif isinstance(value, int | float) and isinstance(known, int | float):
            into[name] = known + value
        elif known is None:
            into[name] = value


# -- prompts --


class _PromptFailed(Exception):
    """One prompt has failed, and with it the request."""

    def __init__(self, number: int, answer: HttpResponse, error: str) -> None:
        super().__init__(number)
        self.status = answer.status if answer.status >= 400 else 502
        self.message = f"prompt {number}: {error_message(answer.body)}"
        self.error = f"prompt {number}: {error}"
        """The message for logs, without text that an engine wrote."""
        self.retry = [pair for pair in answer.headers if pair[0].lower() == "retry-after"]


@dataclass(slots=True, kw_only=True)
class _PromptContext(RequestContext):
    """One prompt of a request; its answer becomes part of the joined answer."""

    number: int
    joined: JoinedAnswer
    max_bytes: int
    """Largest joined answer that is not streamed."""
    write: Callable[[bytes, Iterable[tuple[str, str]]], Awaitable[None]]
    """Writes events to the client."""
    failure: HttpResponse | None = None
    has_written: bool = False

    @property
    def is_started(self) -> bool:
        return self.has_written

    @property
    def may_begin_early(self) -> bool:
        return False

    def send(self, answer: HttpResponse) -> None:
        if answer.status != 200:
            self.note_error(answer)
            self.failure = answer
            return
        self.joined.add(self.number, answer.body)
        if self.joined.num_bytes > self.max_bytes:
            self.failure = build_error_response(
                502, f"the answers to all prompts are longer than {self.max_bytes} bytes"
            )

    async def relay(
        self,
        answer: UpstreamResponse,
        idle_timeout_s: float,
        filter: Callable[[bytes], bytes] | None,
    ) -> None:
        headers, is_complete = stream_headers(answer.headers), False

        async def pass_on(events: list[bytes]) -> None:
            nonlocal is_complete
            is_complete = is_complete or any(event.rstrip().endswith(_DONE) for event in events)
            joined = b"".join(self.joined.event(self.number, event) for event in events)
            if joined:
                self.has_written = True
                await self.write(joined, headers)

        await relay_events(answer, idle_timeout_s, filter, pass_on)
        if not is_complete:  # the joined stream would end as if all of it had arrived
            raise InvalidResponse("its stream ended before its last event")

    async def interrupt(self, status: int, message: str, details: str = "") -> None:
        self.error = message
        self.failure = build_error_response(status, with_details(message, details))


@dataclass(slots=True)
class PromptsServer:
    """Serves the prompts of one request, at most `MAX_AT_ONCE` at the same time.

    The request's own admission slot serves one prompt after the other. Further prompts run beside
    it in slots that are free for the tenant, so a request with many prompts delays no other request
    that waits.
    """

    context: RequestContext
    """The client's request."""
    serve: Callable[[RequestContext], Awaitable[None]]
    """Serves a request with one prompt."""
    admission: AdmissionController
    leg_headers: Callable[[str], bytes]
    """Encodes the headers of both legs for a request id."""
    max_bytes: int
    _joined: JoinedAnswer = field(init=False)
    _waiting: deque[int] = field(init=False)
    """Numbers of the prompts that no task has begun to serve."""
    _num_beside: int = field(default=0, init=False)
    """Tasks that serve prompts in slots of their own."""
    _write_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        client = self.context.client
        self._joined = JoinedAnswer(f"cmpl-{self.context.request_id}", client.num_choices)
        self._waiting = deque(range(len(client.prompts)))

    async def run(self) -> None:
        """Serve all prompts until the client has the joined answer, or an error. Raises
        ConnectionError if the client has disconnected or does not read.
        """
        context = self.context
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._serve_waiting(tasks))
        except BaseExceptionGroup as group:
            await self._end_with(_first_error(group))
            return
        if context.client.is_streamed:
            await self._write(self._joined.end_of_stream(), ())
            await context.reply.finish()
        else:
            context.send(HttpResponse(200, [_JSON], self._joined.body()))

    async def _end_with(self, error: BaseException) -> None:
        """Report why the request ended: one of its prompts failed."""
        if not isinstance(error, _PromptFailed):
            raise error
        if self.context.is_started:
            await self.context.interrupt(error.status, error.message)
            self.context.stream_error = error.error
        else:
            self.context.error = error.error
            self.context.send(
                build_error_response(error.status, error.message, headers=error.retry)
            )

    async def _serve_waiting(self, tasks: asyncio.TaskGroup) -> None:
        """Serve prompts one after the other, in a slot that the caller has."""
        while self._waiting:
            number = self._waiting.popleft()
            if self._waiting and self._num_beside < MAX_AT_ONCE - 1:
                self._num_beside += 1
                tasks.create_task(self._serve_beside(tasks))
            await self._serve_prompt(number)

    async def _serve_beside(self, tasks: asyncio.TaskGroup) -> None:
        """Serve prompts in a further slot, if one is free for the tenant."""
        # The slot is taken here and not by the caller: the body of a task that is cancelled before
        # it starts never runs, and the slot would never be given back.
        slot = self.admission.enter_if_free(self.context.tenant)
        try:
            if slot is not None:
                await self._serve_waiting(tasks)
        finally:
            self._num_beside -= 1
            if slot is not None:
                self.admission.leave(slot)

    async def _serve_prompt(self, number: int) -> None:
        whole = self.context
        request_id = f"{whole.request_id}-{number}"
        timeline = Timeline(request_id, whole.http.path, time.monotonic())
        context = _PromptContext(
            http=whole.http,
            reply=whole.reply,
            client=whole.client.with_prompt(whole.client.prompts[number]),
            request_id=request_id,
            tenant=whole.tenant,
            timeline=timeline,
            leg_headers=self.leg_headers(request_id),
            facts=whole.facts,
            number=number,
            joined=self._joined,
            max_bytes=self.max_bytes,
            write=self._write,
        )
        context.mark(RequestEvent.ADMITTED)
        try:
            await self.serve(context)
        finally:
            whole.timeline.fallback = whole.timeline.fallback or timeline.fallback
            for mark in timeline.marks:
                whole.timeline.mark(*mark)
        if context.failure is not None:
            raise _PromptFailed(number, context.failure, context.error)

    async def _write(self, events: bytes, headers: Iterable[tuple[str, str]]) -> None:
        # One prompt at a time: while the client does not read, the others wait for the lock and
        # read nothing from their instances.
        async with self._write_lock:
            reply = self.context.reply
            if not reply.is_started:
                reply.start(200, self.context.client_headers(headers))
            await reply.write(events)


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ends the request: a prompt that failed, a client that left, or a bug."""
    errors = group.exceptions
    return next((error for error in errors if isinstance(error, _PromptFailed)), errors[0])
