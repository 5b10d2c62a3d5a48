"""Test kit with real sockets on a real event loop: a server with a handler, and clients and
instances that speak raw bytes.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import uvloop

from kvferry.router.http.messages import ServerLimits, ServerRequest
from kvferry.router.http.pool import UpstreamPool, UpstreamResponse
from kvferry.router.http.server import Admit, Handler, HttpServer
from kvferry.router.http.upstream_connection import Target
from kvferry.router.http.writer import ResponseWriter
from kvferry.types import Address

DEADLINE_S = 120.0
LIMITS = ServerLimits(
    head_timeout_s=60, body_idle_timeout_s=60, keepalive_s=60, stall_timeout_s=60, linger_s=5
)

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(story: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine on the loop that the router uses; it must end within the deadline."""

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await story

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


@dataclass
class Served:
    server: HttpServer
    port: int
    refusals: list[int]

    async def connect(self) -> "RawClient":
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        return RawClient(reader, writer)

    async def say(self, data: bytes) -> bytes:
        """Everything that the server sends in reply to these bytes until it closes the connection;
        the server must close it by itself.
        """
        client = await self.connect()
        try:
            client.send(data)
            return await client.rest()
        finally:
            client.close()


@dataclass
class RawClient:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, bytes, bytes]:
        """One answer that has a Content-Length or is chunked: status, head, and the body as it
        arrived.
        """
        head = await self.reader.readuntil(b"\r\n\r\n")
        status, lowered = int(head.split(b" ", 2)[1]), head.lower()
        if b"transfer-encoding: chunked" in lowered:
            return status, head, await self.reader.readuntil(b"0\r\n\r\n")
        length = int(lowered.partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0")
        return status, head, await self.reader.readexactly(length)

    async def rest(self) -> bytes:
        """Everything up to the end of the connection, however it ends."""
        received = bytearray()
        try:
            while data := await self.reader.read(65536):
                received += data
        except ConnectionError:
            pass
        return bytes(received)

    def close(self) -> None:
        self.writer.close()


@asynccontextmanager
async def serving(
    handler: Handler,
    *,
    admit: Admit | None = None,
    tls: ssl.SSLContext | None = None,
    **limits: float,
) -> AsyncIterator[Served]:
    refusals: list[int] = []
    bounds: ServerLimits = replace(LIMITS, **limits)  # type: ignore[arg-type]
    server = HttpServer(
        handler, bounds, admit=admit, on_malformed=lambda refusal: refusals.append(refusal.status)
    )
    sock = socket.create_server(("127.0.0.1", 0))
    await server.start(sock, tls)
    try:
        yield Served(server, sock.getsockname()[1], refusals)
    finally:
        await server.close()


async def echo(request: ServerRequest, reply: ResponseWriter) -> None:
    """Replies with the request as the server understood it."""
    reply.send(
        200,
        [("X-Method", request.method), ("X-Path", request.path), ("X-Query", request.query)],
        bytes(request.body),
    )


@asynccontextmanager
async def instance(talk: Talk, tls: ssl.SSLContext | None = None) -> AsyncIterator[Target]:
    """A server of raw bytes: it runs `talk` for every connection and then closes the connection."""

    tasks = set()  # asyncio holds only a weak reference to a pending task

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield Target(Address("127.0.0.1", server.sockets[0].getsockname()[1]))
    finally:
        server.close()


def answering(*answers: bytes) -> Talk:
    """Sends one of these answers for every request on the connection, and then closes the
    connection.
    """

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await read_request(reader)
            writer.write(answer)
            await writer.drain()

    return talk


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0")
    return head, await reader.readexactly(length)


@asynccontextmanager
async def upstreams(keepalive_s: float = 4.0) -> AsyncIterator[UpstreamPool]:
    made = UpstreamPool(keepalive_s)
    try:
        yield made
    finally:
        await made.close()


async def ask(
    made: UpstreamPool,
    target: Target,
    method: str = "POST",
    body: bytes = b"hello",
    connect_timeout_s: float = 60,
    head_timeout_s: float = 60,
) -> UpstreamResponse:
    return await made.send(
        target,
        method,
        "/v1/x",
        [("X-A", "1")],
        body,
        connect_timeout_s=connect_timeout_s,
        head_timeout_s=head_timeout_s,
    )


def post(body: bytes, path: str = "/v1/x", *lines: bytes) -> bytes:
    head = b"".join(line + b"\r\n" for line in lines)
    return b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n%b\r\n%b" % (
        path.encode(),
        len(body),
        head,
        body,
    )


def chunked(chunks: list[bytes]) -> bytes:
    return (
        b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks if chunk) + b"0\r\n\r\n"
    )
