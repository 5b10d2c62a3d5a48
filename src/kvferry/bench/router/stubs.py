"""Stub engines of the router benchmark: P answers at once with parameters, D with a stream.

All answers are bytes made in advance. The stubs run on the event loop of the load client, so that
no time is lost by switching processes. A wrong request is answered with status 400 and the reason,
which reaches the client through the router as a failed request.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from kvferry.bench.router.http1 import HttpRequest, MalformedHttp, StubRequestReader
from kvferry.bench.router.messages import BenchMessages, PrefillLedger, json_answer
from kvferry.types import Address

LOOPBACK = "127.0.0.1"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_ANSWER = json_answer(
    200,
    json.dumps(
        {"status": "ok", "object": "list", "data": [{"id": "stub", "object": "model"}]}
    ).encode(),
)
"""The answer to all other requests of a router: health, models, metrics."""

StubReply = Callable[[HttpRequest], Sequence[bytes]]
"""A function that returns the answer in parts, which are written one by one."""


@dataclass(slots=True)
class Stubs:
    """Both stub engines; `ledger` holds the messages of the current run."""

    ledger: PrefillLedger
    prefill: Address
    decode: Address

    def set_messages(self, messages: BenchMessages) -> None:
        self.ledger = PrefillLedger(messages)

    def answer_prefill(self, request: HttpRequest) -> Sequence[bytes]:
        mismatch = self.ledger.prefill_mismatch(request.body)
        return [_refusal(mismatch) if mismatch else self.ledger.next_answer()]

    def answer_decode(self, request: HttpRequest) -> Sequence[bytes]:
        mismatch = self.ledger.decode_mismatch(request.body)
        return [_refusal(mismatch)] if mismatch else self.ledger.messages.stream


class _StubConnection(asyncio.Protocol):
    """One connection from a router to a stub engine."""

    def __init__(self, reply: StubReply, connections: set["_StubConnection"]) -> None:
        self._reply = reply
        self._reader = StubRequestReader()
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
        except MalformedHttp:
            self._transport.abort()
            return
        for request in requests:
            self._write(
                self._reply(request) if request.line.startswith(b"POST") else [_STATUS_ANSWER]
            )
        if self._reader.wants_continue:
            self._reader.wants_continue = False
            self._transport.write(_CONTINUE)

    def _write(self, chunks: Sequence[bytes]) -> None:
        """Write the first part now and each further part in the next tick of the event loop.

        The loop joins all writes of one tick, so parts written at once would arrive together.
        """
        assert self._transport is not None
        self._transport.write(chunks[0])
        if len(chunks) > 1:
            asyncio.get_running_loop().call_soon(self._write, chunks[1:])

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@asynccontextmanager
async def start_stubs(messages: BenchMessages) -> AsyncIterator[Stubs]:
    """Start both stub engines on free ports of this event loop."""
    loop = asyncio.get_running_loop()
    stubs = Stubs(PrefillLedger(messages), Address(LOOPBACK, 0), Address(LOOPBACK, 0))
    connections: set[_StubConnection] = set()
    prefill = await loop.create_server(
        lambda: _StubConnection(stubs.answer_prefill, connections), LOOPBACK, 0, backlog=1024
    )
    decode = await loop.create_server(
        lambda: _StubConnection(stubs.answer_decode, connections), LOOPBACK, 0, backlog=1024
    )
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


def _refusal(mismatch: str) -> bytes:
    return json_answer(
        400,
        json.dumps(
            {"error": {"message": mismatch, "type": "BadRequestError", "code": 400}}
        ).encode(),
    )
