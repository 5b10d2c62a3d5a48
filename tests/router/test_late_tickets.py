"""Tests answers of P that arrive after the client has left: their ticket is released, and P is
notified at once that it may stop.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop
from tests.router.http.kit import read_request
from tests.router.stubs import (
    DEADLINE_S,
    PARAMS,
    Behaviour,
    RecordedReleases,
    Stage,
    StubEngine,
    completes,
    drops_connection,
    hangs,
    prefills,
    router,
    stage,
    streams,
    stub_engine,
)
from tests.router.test_concurrent_legs import KEY, PUSHED, first_then
from tests.router.test_proxy import ONE

from kvferry.protocol.tickets import PushTicketKey
from kvferry.types import Address

TICKET = json.dumps({"id": "p", "kv_transfer_params": PARAMS}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(
    TICKET
)
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


async def leave(s: Stage) -> None:
    """Sends a request whose client leaves while P computes."""
    request = asyncio.create_task(s.post(ONE))
    await s.p.entered.wait()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


async def until_probed(s: Stage) -> None:
    """Wait until a probe has begun and ended."""
    num_looks = s.p.num_looks
    while s.p.num_looks < num_looks + 2:
        await asyncio.sleep(0.01)


def test_p_is_told_at_once_and_is_not_asked_again() -> None:
    async def scene() -> None:
        async with stage([hangs, completes], completes, max_retries=2) as s:
            await leave(s)
            await s.p.cancelled.wait()
            while await s.metric("kvferry:router_client_aborts_total") < 1:
                await asyncio.sleep(0)
            assert (s.releases.handovers, s.d.calls, s.prefillers[1].calls) == ([], [], [])

    uvloop.run(scene())


@pytest.mark.parametrize("ending", ["the client leaves", "P breaks off"])
def test_a_leg_without_an_answer_is_released_by_its_id(ending: str) -> None:
    """P's engine may have computed the prompt although its front-end sends no answer."""

    async def scene() -> None:
        behaviour = hangs if ending == "the client leaves" else drops_connection
        async with stage(behaviour, completes, probe_interval_s=0.02) as s:
            s.p.side_channel = "127.0.0.1:5600"
            await until_probed(s)
            if ending == "the client leaves":
                await leave(s)
            else:
                assert (await s.post(ONE))[0] == 502
            while not s.releases.legs:
                await asyncio.sleep(0.01)
            leg_id = s.p.calls[0].body["kv_transfer_params"]["leg_id"]
            assert s.releases.legs == [(Address("127.0.0.1", 5600), leg_id)]
            assert s.releases.handovers == []

    uvloop.run(scene())


def test_what_the_leg_brings_reaches_a_client_that_stays() -> None:
    async def scene() -> None:
        async with stage(prefills, completes, probe_interval_s=0.02) as s:
            s.p.side_channel = "127.0.0.1:5600"
            await until_probed(s)
            assert (await s.post(ONE))[0] == 200
            assert (len(s.d.calls), s.releases.handovers, s.releases.legs) == (1, [], [])

    uvloop.run(scene())


# -- answers that cross with the router's half-close: P writes only after it has seen that --


@asynccontextmanager
async def raw_stage(
    talk: Talk, decode: Behaviour = completes, push_key: PushTicketKey | None = None
) -> AsyncIterator[tuple[str, RecordedReleases]]:
    """A router in front of a P that sends raw bytes as `talk` says."""
    async with asyncio.timeout(DEADLINE_S), stub_engine(StubEngine(decode)) as d:
        over = asyncio.Event()

        async def talk_and_close(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            with suppress(ConnectionError):
                await talk(reader, writer)
                writer.close()
                await writer.wait_closed()
            over.set()

        server = await asyncio.start_server(talk_and_close, "127.0.0.1", 0)
        try:
            async with router(server.sockets[0].getsockname()[1], d.port, push_key) as made:
                yield made
            await over.wait()
        finally:
            server.close()


async def leave_raw(url: str, asked: asyncio.Event) -> None:
    _, writer = await post_raw(url)
    await asked.wait()
    writer.close()


async def post_raw(url: str, **fields: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    body = json.dumps(ONE | fields).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    return reader, writer


def crossing(
    before: list[bytes], after: list[bytes], asked: asyncio.Event, heard: asyncio.Event
) -> Talk:
    """Sends `before`, lets the client leave, and sends `after` once the router has half-closed the
    connection.
    """

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for segment in before:
            writer.write(segment)
            await asyncio.sleep(0.01)
        asked.set()
        assert await reader.read(1) == b""
        heard.set()
        for segment in after:
            writer.write(segment)
            await asyncio.sleep(0.01)

    return talk


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (
    len(TICKET),
    TICKET,
)


@pytest.mark.parametrize(
    "segments",
    [
        [HEAD + TICKET],
        [HEAD, TICKET],
        [HEAD[:9], HEAD[9:] + TICKET[:40], TICKET[40:]],
        [b"HTTP/1.1 100 Continue\r\n\r\n", HEAD + TICKET],
        [CHUNKED[:-7], CHUNKED[-7:]],
        [b"HTTP/1.1 200 OK\r\n\r\n", TICKET],
    ],
)
def test_a_ticket_that_crosses_with_the_leaving_is_handed_back(segments: list[bytes]) -> None:
    async def scene(num_before: int) -> None:
        asked, heard = asyncio.Event(), asyncio.Event()
        async with raw_stage(
            crossing(segments[:num_before], segments[num_before:], asked, heard)
        ) as (url, releases):
            await leave_raw(url, asked)
            await releases.happened.wait()
            assert releases.tickets == ["ticket-1"]

    for num_before in range(len(segments)):
        uvloop.run(scene(num_before))


@pytest.mark.parametrize(
    "segments",
    [
        [],
        [HEAD + TICKET[:-1]],
        [CHUNKED[:-1]],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
        [b"HTTP/1.1 500 Oh\r\nContent-Length: %d\r\n\r\n%b" % (len(TICKET), TICKET)],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"],
        [b"garbage\r\n\r\n"],
        [b"\0" * 9_000_000],
    ],
)
def test_what_is_no_whole_answer_with_a_ticket_hands_nothing_back(segments: list[bytes]) -> None:
    async def scene() -> None:
        asked, heard = asyncio.Event(), asyncio.Event()
        async with raw_stage(crossing([], segments, asked, heard)) as (url, releases):
            await leave_raw(url, asked)
            await heard.wait()
        assert releases.handovers == []

    uvloop.run(scene())


def test_a_router_that_is_closed_while_p_answers_hands_the_ticket_back() -> None:
    async def scene() -> None:
        asked, heard = asyncio.Event(), asyncio.Event()
        async with raw_stage(crossing([], [HEAD, TICKET], asked, heard)) as (url, releases):
            await leave_raw(url, asked)
            await heard.wait()
        assert releases.tickets == ["ticket-1"]

    uvloop.run(scene())


@pytest.mark.parametrize("has_begun", [False, True])
def test_beside_d_s_leg_it_is_handed_back_unless_d_has_taken_over(has_begun: bool) -> None:
    """Once D has answered, D itself releases the blocks that it took over; it may still be reading
    them.
    """
    pushed = json.dumps({"id": "p", "kv_transfer_params": PUSHED}).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(pushed), pushed)

    async def scene() -> None:
        asked, heard = asyncio.Event(), asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(answer)
            await crossing([], [answer], asked, heard)(reader, writer)

        decode = first_then(
            completes, streams([b"data: 1\n\n"], then="hang") if has_begun else hangs
        )
        async with raw_stage(talk, decode, KEY) as (url, releases):
            reader, writer = await post_raw(url)
            await reader.readuntil(b"hello")
            writer.close()
            reader, writer = await post_raw(url, stream=has_begun)
            await asked.wait()
            if has_begun:
                await reader.readuntil(b"data: 1")
            writer.close()
            await heard.wait()
        assert releases.tickets == ([] if has_begun else ["ticket-1"])

    uvloop.run(scene())
