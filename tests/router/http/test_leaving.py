"""Tests clients that disconnect, and servers that stop."""

import asyncio
import socket
import struct
from dataclasses import dataclass, field

import pytest
from tests.router.http.kit import RawClient, chunked, echo, post, run, serving

from kvferry.router.http.messages import ServerRequest
from kvferry.router.http.writer import ResponseWriter


@dataclass
class Gate:
    """A handler that waits until the test opens the gate, and records whether it was cancelled."""

    entered: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: ServerRequest, reply: ResponseWriter) -> None:
        if request.path == "/stream":
            reply.start(200, [])
            await reply.write(b"first")
        self.entered.set()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if request.path == "/stream":
            await reply.write(b"last")
            await reply.finish()
        else:
            reply.send(200, [], b"whole")


def leave(client: RawClient, how: str) -> None:
    sock = client.writer.get_extra_info("socket")
    if how == "half":
        client.writer.write_eof()
        return
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("how", ["closed", "reset", "half"])
@pytest.mark.parametrize("path", ["/whole", "/stream"])
def test_a_client_that_leaves_cancels_its_handler(how: str, path: str) -> None:
    async def story() -> None:
        gate = Gate()
        async with serving(gate.handle) as served:
            client = await served.connect()
            client.send(post(b"x", path))
            await gate.entered.wait()
            leave(client, how)
            await gate.cancelled.wait()
            while served.server.num_connections:
                await asyncio.sleep(0)
            client.close()

    run(story())


def test_a_client_that_leaves_after_its_answer_cancels_nothing() -> None:
    async def story() -> None:
        answered, left, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def handler(request: ServerRequest, reply: ResponseWriter) -> None:
            reply.send(200, [], b"x")
            answered.set()
            await left.wait()
            ended.set()

        async with serving(handler) as served:
            client = await served.connect()
            client.send(post(b"x"))
            await client.answer()
            client.close()
            for _ in range(20):
                await asyncio.sleep(0)
            left.set()
            await ended.wait()

    run(story())


def test_a_drain_lets_streams_finish_and_waits_for_no_upload() -> None:
    async def story() -> None:
        gate = Gate()
        async with serving(gate.handle) as served:
            idle, busy, late = (
                await served.connect(),
                await served.connect(),
                await served.connect(),
            )
            busy.send(post(b"x", "/stream"))
            await gate.entered.wait()
            late.send(
                b"POST /whole HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n"
                b"Expect: 100-continue\r\n\r\n"
            )
            assert (await late.answer())[0] == 100
            drained = asyncio.create_task(served.server.drain(10))
            assert await idle.rest() == b""
            with pytest.raises(OSError, match=r"refused|reset|Connect"):
                await served.connect()
            status, head, body = await late.answer()
            assert (status, b"stopping" in body) == (503, True)
            assert b"Retry-After: 1\r\n" in head
            assert b"Connection: close" in head
            assert not drained.done()
            gate.opened.set()
            status, _, body = await busy.answer()
            assert (status, body) == (200, chunked([b"first", b"last"]))
            assert await busy.rest() == b""
            for client in (idle, busy, late):
                client.close()
            await drained
            assert served.server.num_connections == 0

    run(story())


def test_a_drain_that_takes_too_long_returns_and_close_ends_what_is_left() -> None:
    async def story() -> None:
        gate = Gate()
        async with serving(gate.handle) as served:
            client = await served.connect()
            client.send(post(b"x", "/stream"))
            await gate.entered.wait()
            await served.server.drain(0.05)
            assert not gate.cancelled.is_set()
            await served.server.close()
            assert gate.cancelled.is_set()
            assert not (await client.rest()).endswith(b"0\r\n\r\n")
            client.close()

    run(story())


def test_a_server_without_clients_is_drained_at_once() -> None:
    async def story() -> None:
        async with serving(echo) as served:
            await served.server.drain(10)

    run(story())
