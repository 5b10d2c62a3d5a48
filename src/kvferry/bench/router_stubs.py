"""Stub engines of the router benchmark: P answers with parameters at once, D with a stream, both from bytes made beforehand.

They live on the event loop of the load client, so that no time is spent on switching between processes. What is not as it should be is
answered with 400 and the reason, which reaches the client through the router as a failed request.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from kvferry.bench.router_talk import Exchange, Talk, json_answer
from kvferry.bench.router_wire import Arrived, BadHttp, RequestReader
from kvferry.types import Address

__all__ = ["Stubs", "start_stubs"]

LOOPBACK = "127.0.0.1"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_ABOUT = json_answer(200, json.dumps({"status": "ok", "object": "list", "data": [{"id": "stub", "object": "model"}]}).encode())
"""Whatever else a router asks: health, models, metrics."""

Reply = Callable[[Arrived], Sequence[bytes]]
"""In pieces that are written one by one."""


@dataclass(slots=True)
class Stubs:
    """Both engines. `exchange` is what they talk about now."""

    exchange: Exchange
    prefill: Address
    decode: Address

    def talk_about(self, talk: Talk) -> None:
        self.exchange = Exchange(talk)

    def answer_prefill(self, request: Arrived) -> Sequence[bytes]:
        objection = self.exchange.prefill_objection(request.body)
        return [_refusal(objection) if objection else self.exchange.next_answer()]

    def answer_decode(self, request: Arrived) -> Sequence[bytes]:
        objection = self.exchange.decode_objection(request.body)
        return [_refusal(objection)] if objection else self.exchange.talk.stream


class _Engine(asyncio.Protocol):
    """One connection of a router to an engine."""

    def __init__(self, reply: Reply, connections: set["_Engine"]) -> None:
        self._reply = reply
        self._reader = RequestReader()
        self._connections = connections
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            requests = self._reader.feed(data)
        except BadHttp:
            self._transport.abort()
            return
        for request in requests:
            self._write(self._reply(request) if request.line.startswith(b"POST") else [_ABOUT])
        if self._reader.wants_continue:
            self._reader.wants_continue = False
            self._transport.write(_CONTINUE)

    def _write(self, pieces: Sequence[bytes]) -> None:
        """The loop joins what is written in one turn of it, so every further piece waits for the next."""
        assert self._transport is not None
        self._transport.write(pieces[0])
        if len(pieces) > 1:
            asyncio.get_running_loop().call_soon(self._write, pieces[1:])

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@asynccontextmanager
async def start_stubs(talk: Talk) -> AsyncIterator[Stubs]:
    loop = asyncio.get_running_loop()
    stubs = Stubs(Exchange(talk), Address(LOOPBACK, 0), Address(LOOPBACK, 0))
    connections: set[_Engine] = set()
    prefill = await loop.create_server(lambda: _Engine(stubs.answer_prefill, connections), LOOPBACK, 0, backlog=1024)
    decode = await loop.create_server(lambda: _Engine(stubs.answer_decode, connections), LOOPBACK, 0, backlog=1024)
    try:
        stubs.prefill, stubs.decode = _where(prefill), _where(decode)
        yield stubs
    finally:
        prefill.close()
        decode.close()
        for connection in list(connections):
            connection.abort()


def _where(server: asyncio.Server) -> Address:
    return Address(LOOPBACK, int(server.sockets[0].getsockname()[1]))


def _refusal(objection: str) -> bytes:
    return json_answer(400, json.dumps({"error": {"message": objection, "type": "BadRequestError", "code": 400}}).encode())
