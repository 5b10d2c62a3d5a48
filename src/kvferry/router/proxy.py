"""Serves one client's request with two: P computes the prompt, D takes its blocks and answers. One after the other, or, where P and D are
both known to push, at once.

Runs on the event loop. A client that leaves cancels the handler, which closes the connection of the leg under way; an engine aborts what
lost its connection. What P holds is given back unless D has taken over (`Held`), also when P's answer was on its way (`LastLook`).
An instance that answers 503 has generated nothing, so the others of its role are asked too, each once, with the same ticket.
"""

import asyncio
import io
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp
from aiohttp import web

from kvferry.errors import RemoteProtocolError, TransportError
from kvferry.protocol.push_tickets import PushTicketKey
from kvferry.router.decode_modes import DecodeModes
from kvferry.router.failures import error_event, error_response
from kvferry.router.instances import Instance, InstancePool, Outcome, Role
from kvferry.router.last_look import LastLook
from kvferry.router.legs import ClientRequest, Handover, Refusal, read_client_request, read_prefill_answer
from kvferry.router.metrics import RouterMetrics
from kvferry.router.options import RouterOptions
from kvferry.router.push_sources import PushSources
from kvferry.router.release import Held, Releases
from kvferry.router.request_ids import choose_request_id
from kvferry.router.twins import run_twins

__all__ = ["Proxy"]

_log = logging.getLogger(__name__)

_TO_INSTANCES = ("Authorization",)
_TO_CLIENTS = ("Content-Type", "Content-Length", "Content-Encoding", "Cache-Control", "Retry-After", "WWW-Authenticate")
_EXCERPT_CHARS = 300
_PIECEWISE_ABOVE_BYTES = 1024 * 1024
_UNAVAILABLE = 503

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One client's request on its way."""

    http: web.Request
    client: ClientRequest
    request_id: str

    def leg_headers(self) -> dict[str, str]:
        passed = {name: self.http.headers[name] for name in _TO_INSTANCES if name in self.http.headers}
        return passed | {"X-Request-Id": self.request_id, "Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class _Refused:
    """An instance takes no requests now. `response`: for the client, if nobody else does."""

    response: web.Response


class Proxy:
    def __init__(
        self,
        options: RouterOptions,
        pool: InstancePool,
        session: aiohttp.ClientSession,
        releases: Releases,
        metrics: RouterMetrics,
        push_key: PushTicketKey | None,
    ) -> None:
        self._options = options
        self._pool = pool
        self._session = session
        self._releases = releases
        self._metrics = metrics
        self._last_look = LastLook(releases)
        self._push_sources = PushSources(push_key)
        self._decode_modes = DecodeModes(session)

    async def close(self) -> None:
        await self._decode_modes.close()
        await self._last_look.close()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Completions and chat. TransportError when an instance fails before the client has got anything."""
        client = read_client_request(await self._read_body(request))
        if isinstance(client, Refusal):
            return error_response(client.status, client.message)
        exchange = _Exchange(request, client, choose_request_id(request.headers.get("X-Request-Id")))
        return await self._ask_in_turn(Role.PREFILL, lambda instance: self._serve(exchange, instance))

    async def _serve(self, exchange: _Exchange, prefiller: Instance) -> web.StreamResponse | _Refused:
        promise = self._push_sources.invite(prefiller)
        if promise is not None and await self._decode_modes.pushes(self._pool.peek(Role.DECODE, time.monotonic())):
            return await self._serve_at_once(exchange, prefiller, promise)
        answer = await self._last_look.run(self._prefill(exchange, prefiller))
        if isinstance(answer, web.Response | _Refused):
            return answer
        with Held(self._releases, answer) as held:
            return await self._decode_in_turn(exchange, held, answer)

    async def _serve_at_once(self, exchange: _Exchange, prefiller: Instance, promise: Handover) -> web.StreamResponse | _Refused:
        self._metrics.at_once.inc()
        with Held(self._releases, None) as held:
            twins = _Twins(promise, held)
            answer: web.StreamResponse | _Refused = await run_twins(
                self._prefill_alongside(exchange, prefiller, twins),
                self._ask_in_turn(Role.DECODE, lambda instance: self._decode_alongside(exchange, instance, twins)),
                twins.has_begun.is_set,
                self._last_look.look_after,
            )
        if isinstance(answer, web.StreamResponse) and answer.status >= 500:
            # D could not get P's KV. If P is another life by now, its next answer shows it.
            self._push_sources.forget(prefiller)
        return answer

    async def _prefill_alongside(self, exchange: _Exchange, prefiller: Instance, twins: "_Twins") -> web.Response | _Refused | None:
        """P's objection, if it has one."""
        answer = await self._prefill(exchange, prefiller, twins.promise.push_ticket)
        if isinstance(answer, web.Response | _Refused):
            return answer
        if answer is not None:
            twins.held.receive(answer)
        twins.is_computed.set()
        return None

    async def _decode_alongside(self, exchange: _Exchange, instance: Instance, twins: "_Twins") -> web.StreamResponse | _Refused:
        """One that pushes is asked at once. Where it has refused, the next may pull: that one waits for P's own ticket."""
        if not await self._decode_modes.pushes(instance):
            await twins.is_computed.wait()
            return await self._decode(exchange, twins.held, instance, twins.held.handover, twins.has_begun)
        answer = await self._decode(exchange, twins.held, instance, twins.promise, twins.has_begun)
        if isinstance(answer, web.StreamResponse) and answer.status >= 500:
            self._decode_modes.forget(instance)
        return answer

    async def _decode_in_turn(self, exchange: _Exchange, held: Held, handover: Handover | None) -> web.StreamResponse:
        return await self._ask_in_turn(Role.DECODE, lambda instance: self._decode(exchange, held, instance, handover))

    async def models(self, request: web.Request) -> web.StreamResponse:
        return await self._ask_in_turn(Role.DECODE, lambda instance: self._models(request, instance))

    async def _models(self, request: web.Request, instance: Instance) -> web.StreamResponse | _Refused:
        headers = {name: request.headers[name] for name in _TO_INSTANCES if name in request.headers}
        with self._named(instance):
            async with self._session.get(instance.url + request.path, headers=headers, timeout=self._answer_timeout()) as answer:
                if answer.status == _UNAVAILABLE:
                    return await self._refused(answer, instance, {})
                body = await self._read_answer(answer)
                self._pool.note(instance, Outcome.ANSWERED)
                return _copied(answer, body, {})

    async def _read_body(self, request: web.Request) -> bytes:
        limit = self._options.max_body_bytes
        if (request.content_length or 0) > limit:
            raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
        try:
            async with asyncio.timeout(self._options.idle_timeout_s):
                return await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(reason="the request body did not arrive in time") from None
        except (aiohttp.ClientError, web.RequestPayloadError, ConnectionError) as error:
            raise web.HTTPBadRequest(reason="the request body cannot be read") from error

    # -- prefill leg ---------------------------------------------------------------------------------------------------

    async def _prefill(self, exchange: _Exchange, instance: Instance, push_ticket: str = "") -> Handover | web.Response | _Refused | None:
        """P's blocks, or P's objection to the request, which is the client's answer."""
        with self._named(instance):
            async with self._session.post(
                instance.url + exchange.http.path,
                data=_upload(exchange.client.prefill_body(push_ticket)),
                headers=exchange.leg_headers(),
                timeout=self._answer_timeout(),
                allow_redirects=False,
            ) as answer:
                if answer.status == _UNAVAILABLE:
                    return await self._refused(answer, instance, {"X-Request-Id": exchange.request_id})
                body = await self._read_answer(answer)
                self._pool.note(instance, Outcome.ANSWERED)
                if 400 <= answer.status < 500:
                    return _copied(answer, body, {"X-Request-Id": exchange.request_id})
                if answer.status != 200:
                    raise RemoteProtocolError(f"it answered with status {answer.status}: {_excerpt(body)}")
                handover = read_prefill_answer(body)
        self._push_sources.learn(instance, handover)
        if handover is None:
            self._metrics.without_blocks.inc()
        return handover

    async def _read_answer(self, answer: aiohttp.ClientResponse) -> bytes:
        parts, size = [], 0
        async for part in answer.content.iter_any():
            size += len(part)
            if size > self._options.max_body_bytes:
                raise RemoteProtocolError(f"its answer is over {self._options.max_body_bytes} bytes")
            parts.append(part)
        return b"".join(parts)

    # -- decode leg ----------------------------------------------------------------------------------------------------

    async def _decode(
        self, exchange: _Exchange, held: Held, instance: Instance, handover: Handover | None, has_begun: asyncio.Event | None = None
    ) -> web.StreamResponse | _Refused:
        """`has_begun`: P's leg is under way too, and its objection is the client's answer until this is set."""
        with self._named(instance):
            async with self._session.post(
                instance.url + exchange.http.path,
                data=_upload(exchange.client.decode_body(handover)),
                headers=exchange.leg_headers(),
                timeout=self._stream_timeout() if exchange.client.is_streamed else self._answer_timeout(),
                allow_redirects=False,
            ) as answer:
                if answer.status == _UNAVAILABLE:
                    return await self._refused(answer, instance, {"X-Request-Id": exchange.request_id})
                self._pool.note(instance, Outcome.ANSWERED)
                start = b""
                if has_begun is not None:
                    # An engine may open its answer long before it has anything to say. Until then P may still fail.
                    start = await _read_start(answer)
                    has_begun.set()
                if answer.status == 200:
                    held.hand_over()
                response = web.StreamResponse(status=answer.status, headers=_passed_headers(answer))
                response.headers["X-Request-Id"] = exchange.request_id
                await self._relay(exchange.http, answer, response, _DecodeLeg(instance, held, start))
        return response

    async def _relay(self, request: web.Request, answer: aiohttp.ClientResponse, response: web.StreamResponse, leg: "_DecodeLeg") -> None:
        """Pass the body on as it comes. Raises nothing but cancellation: the client has the status line already."""
        chunk, tail = leg.start, b""
        try:
            await response.prepare(request)
            while True:
                try:
                    chunk = chunk or await answer.content.readany()
                except (aiohttp.ClientError, TimeoutError) as error:
                    await self._break_off(request, response, leg, tail, _described(error))
                    return
                if not chunk:
                    break
                tail = (tail + chunk)[-4:] if len(chunk) < 4 else chunk[-4:]
                async with asyncio.timeout(self._options.idle_timeout_s):
                    await response.write(chunk)
                chunk = b""
            async with asyncio.timeout(self._options.idle_timeout_s):
                await response.write_eof()
        except (ConnectionError, TimeoutError):
            # The client left or stopped reading, before aiohttp had a chance to cancel us. D notices by its closed connection.
            self._metrics.aborts.inc()
            _abort(request)

    async def _break_off(self, request: web.Request, response: web.StreamResponse, leg: "_DecodeLeg", tail: bytes, what: str) -> None:
        """D is gone in the middle: say so where the format allows it, and never let the part look like a whole."""
        leg.held.take_back()
        self._pool.note(leg.instance, Outcome.FAILED)
        self._metrics.failures.labels(leg.instance.role, leg.instance.url).inc()
        message = f"{leg.instance} broke off its answer: {what}"
        _log.warning("stream broken request=%s: %s", response.headers["X-Request-Id"], message)
        if response.content_type != "text/event-stream":
            _abort(request)
            return
        async with asyncio.timeout(self._options.idle_timeout_s):
            await response.write(error_event(502, message, tail))
            await response.write_eof()

    # -- both ----------------------------------------------------------------------------------------------------------

    async def _ask_in_turn(self, role: Role, ask: Callable[[Instance], Awaitable[T | _Refused]]) -> T | web.Response:
        """The first answer that is no refusal; when all refuse, what the last one said."""
        tried: list[Instance] = []
        refusal: _Refused | None = None
        while (instance := self._pool.choose(role, time.monotonic(), tried)) is not None:
            tried.append(instance)
            answer = await ask(instance)
            if not isinstance(answer, _Refused):
                return answer
            refusal = answer
        assert refusal is not None
        return refusal.response

    async def _refused(self, answer: aiohttp.ClientResponse, instance: Instance, headers: Mapping[str, str]) -> _Refused:
        self._pool.note_refusal(instance, time.monotonic())
        self._metrics.refusals.labels(instance.role, instance.url).inc()
        return _Refused(_copied(answer, await self._read_answer(answer), headers))

    @contextmanager
    def _named(self, instance: Instance) -> Iterator[None]:
        """Whatever goes wrong with an instance becomes a TransportError that names it."""
        try:
            yield
        except (aiohttp.ClientError, TimeoutError, RemoteProtocolError) as error:
            self._pool.note(instance, Outcome.FAILED)
            self._push_sources.forget(instance)
            self._decode_modes.forget(instance)
            self._metrics.failures.labels(instance.role, instance.url).inc()
            raise TransportError(f"{instance} failed: {_described(error)}") from error

    def _answer_timeout(self) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=self._options.answer_timeout_s, sock_connect=self._options.connect_timeout_s)

    def _stream_timeout(self) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=None, sock_connect=self._options.connect_timeout_s, sock_read=self._options.idle_timeout_s)


@dataclass(frozen=True, slots=True)
class _Twins:
    """What two legs that run at once know of each other."""

    promise: Handover
    held: Held
    is_computed: asyncio.Event = field(default_factory=asyncio.Event)
    """P has answered."""
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    """The client has got something of D's answer."""


@dataclass(frozen=True, slots=True)
class _DecodeLeg:
    instance: Instance
    held: Held
    start: bytes
    """Of the body, what has been read already."""


def _upload(body: bytes) -> bytes | io.BytesIO:
    # A file is sent in pieces between which the loop does other things; bytes go out at once, which is faster for all but the longest.
    return body if len(body) <= _PIECEWISE_ABOVE_BYTES else io.BytesIO(body)


def _passed_headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in _TO_CLIENTS if name in answer.headers}


async def _read_start(answer: aiohttp.ClientResponse) -> bytes:
    """The body up to the first piece that says something: comments in a stream of events do not."""
    start = b""
    while chunk := await answer.content.readany():
        start += chunk
        if answer.content_type != "text/event-stream" or any(line and not line.startswith(b":") for line in start.splitlines()):
            break
    return start


def _copied(answer: aiohttp.ClientResponse, body: bytes, headers: Mapping[str, str]) -> web.Response:
    return web.Response(
        status=answer.status, body=body, headers=_passed_headers(answer) | {"Content-Length": str(len(body))} | dict(headers)
    )


def _described(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"it cannot be reached ({_plain(error.os_error)})"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "it did not accept a connection in time"
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | aiohttp.ClientPayloadError):
        return "it closed the connection in the middle of an answer"
    if isinstance(error, aiohttp.ClientResponseError):
        return "its answer is not HTTP"
    return str(error)


def _plain(error: OSError) -> str:
    """The loops' own texts name an address that the sentence names already; those of name look-ups have negative numbers."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _excerpt(body: bytes) -> str:
    text = body.decode(errors="replace").strip()
    return text if len(text) <= _EXCERPT_CHARS else text[:_EXCERPT_CHARS] + "…"


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
