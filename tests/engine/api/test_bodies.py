"""Tests the bodies of requests: their size, their time, and the memory that all take together."""

import asyncio
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from tests.engine.api.stage import ScriptedEngine, Stage, counts_up, stage, until

from kvferry.engine.api.context import ApiSettings, Upload
from kvferry.errors import RequestRefused
from kvferry.web.bodies import BodyBudget

COMPLETIONS = "/v1/completions"


def test_a_body_that_is_too_large_is_413_also_when_it_was_compressed(model: Path) -> None:
    async def scene() -> None:
        async with stage(ScriptedEngine(), model, ApiSettings(max_body_bytes=1000)) as s:
            body = json.dumps({"prompt": "x" * 2000}).encode()
            assert (await s.post(COMPLETIONS, body))[0] == 413
            packed = {"Content-Encoding": "deflate", "Content-Type": "application/json"}
            assert (await s.post(COMPLETIONS, zlib.compress(body), **packed))[0] == 413
            assert (await s.post(COMPLETIONS, b"garbage", **packed))[0] == 400

    asyncio.run(scene())


@asynccontextmanager
async def connection(
    s: Stage, *sent: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rsplit(":", 1)[1]))
    try:
        writer.writelines(sent)
        yield reader, writer
    finally:
        writer.close()


def upload(
    s: Stage, sent: bytes, length: int
) -> AbstractAsyncContextManager[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Send the start of a body of `length` bytes; give the connection."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    return connection(s, head % length, sent)


@pytest.mark.parametrize(
    ("limits", "length", "status"),
    [
        ({"body_timeout_s": 0.05}, 100, b"408"),
        ({"body_idle_timeout_s": 0.05}, 100, b"408"),
        ({"max_body_bytes": 50}, 100, b"413"),
    ],
)
def test_a_body_that_cannot_be_read_ends_its_connection(
    model: Path, limits: dict[str, Any], length: int, status: bytes
) -> None:
    async def scene() -> None:
        async with (
            stage(ScriptedEngine(), model, ApiSettings(**limits)) as s,
            upload(s, b"{", length) as (reader, _),
        ):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 " + status)
            assert b"Connection: close" in head

    asyncio.run(scene())


def test_half_a_head_ends_its_connection(model: Path) -> None:
    async def scene() -> None:
        async with (
            stage(ScriptedEngine(), model, ApiSettings(keepalive_s=0.05)) as s,
            connection(s, b"POST /v1/comp") as (reader, _),
        ):
            assert await reader.read() == b""

    asyncio.run(scene())


def test_a_compressed_body_is_inflated_no_further_than_its_limit(model: Path) -> None:
    """Otherwise each of these takes 10 s in which no other client is served."""
    packer = zlib.compressobj(9)
    start = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    more = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: deflate\r\n"
    head += b"Content-Length: 99999999\r\n\r\n"

    async def scene() -> None:
        async with (
            stage(ScriptedEngine(), model, ApiSettings(max_body_bytes=10**8)) as s,
            AsyncExitStack() as bombs,
        ):
            for _ in range(6):
                bomb = connection(s, head + start + more * 4096)
                reader, _ = await bombs.enter_async_context(bomb)
                assert (await reader.readline()).startswith(b"HTTP/1.1 413")
            await s.complete(prompt=[5])

    asyncio.run(scene())


def test_a_body_is_refused_in_the_moment_in_which_its_time_ends() -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        protocol = BaseProtocol(loop)
        protocol.connection_made(asyncio.Transport())
        content = StreamReader(protocol, 2**16, loop=loop)
        body = Upload(BodyBudget(1))
        reading = asyncio.create_task(body.read(content, ApiSettings(body_timeout_s=0)))
        while not reading.done():
            await asyncio.sleep(0)
            body.refuse(RequestRefused("the server is stopping", status=503))
        with pytest.raises(RequestRefused, match="stopping"):
            await reading

    asyncio.run(scene())


def test_bodies_of_all_requests_together_take_bounded_memory(model: Path) -> None:
    """Beyond it the largest that is arriving is refused; small requests and running ones are
    served.
    """
    limits = ApiSettings(max_body_bytes=1_000_000, max_unfinished_bytes=1_000_000)

    async def scene() -> None:
        engine = ScriptedEngine(lambda request: [])
        body, part = {"prompt": [5], "user": "x" * 500_000}, b"x" * 700_000
        async with stage(engine, model, limits) as s:
            running = asyncio.create_task(s.post(COMPLETIONS, body))
            await until(lambda: len(engine.live) == 1)
            engine.script = counts_up
            tracemalloc.start()
            async with AsyncExitStack() as uploads:
                uploads.callback(tracemalloc.stop)
                for _ in range(16):
                    stalled = upload(s, part, 900_000)
                    reader, _ = await uploads.enter_async_context(stalled)
                    head = await reader.readuntil(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 503")
                    assert b"Connection: close" in head
                    assert b"Retry-After: 1" in head
                assert tracemalloc.get_traced_memory()[0] < 5_000_000
                await s.complete(prompt=[5], user="x" * 60_000)
                rest = json.dumps({"prompt": [5], "user": "x" * 200_000}).encode()
                smaller = upload(s, rest[:100_000], len(rest))
                reader, writer = await uploads.enter_async_context(smaller)
                assert (await s.post(COMPLETIONS, {**body, "user": "x" * 700_000}))[0] == 503
                writer.write(rest[100_000:])
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            running.cancel()
            await until(lambda: not engine.live)
            await s.complete(**body)

    asyncio.run(scene())
