"""Tests requests that are abandoned before the instance has answered: the instance is notified at
once, and an answer that it had sent by then is not lost.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.router.http.kit import Talk, chunked, instance, post, read_request, run, upstreams
from tests.router.http.test_client import CHUNKED, OK, settles
from tests.router.http.test_tls import cert, client_side, server_side

from kvferry.logs import RepeatFilter
from kvferry.router.http import pool as client
from kvferry.router.http import upstream_connection
from kvferry.router.http import upstream_connection as parting
from kvferry.router.http.messages import UpstreamDisconnected, UpstreamTimeout
from kvferry.router.http.pool import Target, TargetPool, UpstreamPool, UpstreamResponse
from kvferry.router.http.upstream_connection import (
    AbandonedConnections,
    UpstreamConnection,
    parse_complete_response,
)

__all__ = ["cert"]


@dataclass
class Late:
    """Records the answers that arrive after their request was abandoned."""

    answers: list[tuple[int, bytes]] = field(default_factory=list)
    happened: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, status: int, body: bytes) -> None:
        self.answers.append((status, body))
        self.happened.set()


async def ask(
    made: UpstreamPool,
    target: Target,
    late: Late,
    body: bytes = b"hello",
    head_timeout_s: float = 60,
) -> UpstreamResponse:
    return await made.send(
        target,
        "POST",
        "/x",
        [],
        body,
        connect_timeout_s=60,
        head_timeout_s=head_timeout_s,
        on_late_response=late.hear,
    )


async def ask_and_read(made: UpstreamPool, target: Target, late: Late) -> bytes:
    with await ask(made, target, late) as answer:
        return await answer.read(1000, 5)


def in_two(raw: bytes, cut: int, asked: asyncio.Event) -> Talk:
    """Sends the first `cut` bytes of the answer at once, and the rest after the request was
    abandoned.
    """

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(raw[:cut])
        await asyncio.sleep(0.01)
        asked.set()
        assert await reader.read() == b""
        writer.write(raw[cut:])

    return talk


async def left_after(raw: bytes, cut: int, tls: Path | None = None) -> Late:
    asked, late = asyncio.Event(), Late()
    async with (
        instance(in_two(raw, cut, asked), None if tls is None else server_side(tls)) as plain,
        upstreams() as made,
    ):
        target = plain if tls is None else Target(plain.address, client_side(tls))
        asking = asyncio.create_task(ask_and_read(made, target, late))
        await asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await settles(lambda: made.num_connections == 0)
    return late


@pytest.mark.parametrize(
    "raw", [OK, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"HTTP/1.1 200 OK\r\n\r\nhello"]
)
def test_an_answer_that_comes_after_all_is_heard_of_wherever_it_was_cut(raw: bytes) -> None:
    async def story() -> None:
        for cut in [0, 5, raw.index(b"\r\n\r\n") + 4, len(raw) - 6, len(raw) - 1]:
            assert (await left_after(raw, cut)).answers == [(200, b"hello")], cut

    run(story())


def test_an_answer_by_tls_that_comes_after_all_is_heard_of(cert: Path) -> None:
    """With TLS, the instance treats the end of the data it can read as the end of the connection,
    so it must have answered by then.
    """

    async def story() -> None:
        asked, late = asyncio.Event(), Late()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            asked.set()
            # The client abandons the request now. The event loop learns only at its next poll that
            # there is something to read.
            writer.write(OK)
            await reader.read()

        async with instance(talk, server_side(cert)) as plain, upstreams() as made:
            asking = asyncio.create_task(
                ask_and_read(made, Target(plain.address, client_side(cert)), late)
            )
            await asked.wait()
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            await late.happened.wait()
            assert late.answers == [(200, b"hello")]

    run(story())


def test_an_instance_that_closes_with_its_answer_loses_nothing_either() -> None:
    """The whole answer has arrived, but the task that waits for it has not run since."""

    async def story() -> None:
        asked, late = asyncio.Event(), Late()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(OK[:-1])
            asked.set()
            await asyncio.sleep(0.01)
            writer.write(OK[-1:])
            writer.close()

        async with instance(talk) as target, upstreams() as made:
            answer = await ask(made, target, late)
            await asked.wait()
            assert await settles(lambda: made.num_connections == 0)
            answer.close()
            assert late.answers == [(200, b"hello")]
            answer.close()
            assert len(late.answers) == 1

    run(story())


def test_an_answer_that_was_read_is_not_heard_of_again() -> None:
    async def story() -> None:
        for raw in (
            OK,
            CHUNKED,
            OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"),
            b"HTTP/1.1 200 OK\r\n\r\nhello",
        ):
            late = Late()

            async def talk(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, raw: bytes = raw
            ) -> None:
                await read_request(reader)
                writer.write(raw)

            async with instance(talk) as target, upstreams() as made:
                assert await ask_and_read(made, target, late) == b"hello"
            assert late.answers == []

    run(story())


def test_one_that_took_too_long_is_heard_of_when_it_comes() -> None:
    async def story() -> None:
        late = Late()
        async with instance(in_two(OK, 0, asyncio.Event())) as target, upstreams() as made:
            with pytest.raises(UpstreamTimeout):
                await ask(made, target, late, head_timeout_s=0.1)
            await late.happened.wait()
            assert late.answers == [(200, b"hello")]
        late = Late()
        async with (
            instance(in_two(OK, len(OK) - 2, asyncio.Event())) as target,
            upstreams() as made,
        ):
            with await ask(made, target, late) as answer, pytest.raises(UpstreamTimeout):
                await answer.read(1000, 0.1)
            await late.happened.wait()
            assert late.answers == [(200, b"hello")]

    run(story())


async def stays(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ignores that the request was abandoned."""
    await read_request(reader)
    await reader.read()
    await asyncio.Event().wait()


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_SETTLE_S", 0.05)


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("after_s", [0.2, 1000.0])
def test_one_that_stays_is_closed_when_its_time_is_up_or_with_everything(
    after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_connection, "ABANDON_TIMEOUT_S", after_s)

    async def story() -> None:
        late = Late()
        async with instance(stays) as target, upstreams() as made:
            with pytest.raises(UpstreamTimeout):
                await ask(made, target, late, head_timeout_s=0.1)
            assert made.num_connections == 1
            if after_s < 1:
                assert await settles(lambda: made.num_connections == 0)
        assert await settles(lambda: made.num_connections == 0)
        assert late.answers == []

    run(story())


@pytest.mark.parametrize("bound", ["_MAX_ABANDONED", "_MAX_ABANDONED_PER_TARGET"])
def test_no_more_are_waited_for_than_so_many_and_the_log_says_so(
    bound: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parting, bound, 2)
    monkeypatch.setattr(client, "_SETTLE_S", 0.05)

    async def story() -> None:
        async with instance(stays) as target, upstreams() as made:
            askings = [asyncio.create_task(ask(made, target, Late())) for _ in range(5)]
            assert await settles(lambda: made.num_connections == 5)
            for asking in askings:
                asking.cancel()
            await asyncio.gather(*askings, return_exceptions=True)
            assert await settles(lambda: made.num_connections == 2)
        assert made.num_connections == 0

    run(story())
    repeats = RepeatFilter()
    shown = [record.message for record in caplog.records if repeats.filter(record)]
    assert ["too many abandoned requests" in message for message in shown] == [True]


@pytest.mark.usefixtures("_soon")
def test_one_whose_rest_and_deadline_come_in_one_turn_has_come() -> None:
    """The event loop does not run until the rest of the answer and the deadline are both due, as on
    an overloaded machine.
    """

    async def story() -> None:
        late, sent = Late(), asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(OK[:-4])
            await sent.wait()
            writer.write(OK[-4:])
            # The bytes are in the kernel's buffers; the blocked event loop has not read them.
            time.sleep(0.5)
            await reader.read()

        async with instance(talk) as target, upstreams() as made:
            with await ask(made, target, late) as answer:
                reading = asyncio.create_task(answer.read(1000, 0.2))
                await asyncio.sleep(0.05)
                sent.set()
                assert await reading == b"hello"
        assert late.answers == []

    run(story())


async def connected(target: Target) -> UpstreamConnection:
    loop = asyncio.get_running_loop()
    connection = UpstreamConnection(
        loop, TargetPool(target), lambda connection: None, AbandonedConnections()
    )
    await loop.create_connection(
        lambda: connection, target.address.host, target.address.port, ssl=target.tls
    )
    return connection


def test_a_tls_connection_that_is_lost_in_the_turn_of_the_leaving_is_lost(cert: Path) -> None:
    async def story(num_turns: int) -> None:
        asked, late = asyncio.Event(), Late()
        async with instance(in_two(OK, 5, asked), server_side(cert)) as plain:
            connection = await connected(Target(plain.address, client_side(cert)))
            asking = connection.send_request("POST", [post(b"hello")], 5, late.hear)
            await asked.wait()
            assert connection.transport is not None
            connection.transport.abort()
            for _ in range(num_turns):
                await asyncio.sleep(0)
            connection.abort()
            assert await settles(lambda: connection.is_lost)
            with pytest.raises(UpstreamDisconnected):
                await asking
        assert late.answers == []

    for num_turns in range(4):
        run(story(num_turns))


def test_whoever_looks_for_more_of_one_that_was_left_hears_it() -> None:
    async def story() -> None:
        async with instance(stays) as target:
            connection = await connected(target)
            asking = connection.send_request("POST", [post(b"hello")], 5, Late().hear)
            connection.abort()
            with pytest.raises(UpstreamDisconnected):
                await asking
            with pytest.raises(UpstreamDisconnected):
                await connection.wait_readable(connection.loop.time() + 5)
            connection.abort_transport()
            assert await settles(lambda: connection.is_lost)

    run(story())


def test_a_request_that_was_not_sent_whole_never_will_be() -> None:
    async def story() -> None:
        heard = asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            heard.set()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(50_000_000)
            over.set()

        over = asyncio.Event()
        async with instance(talk) as target, upstreams() as made:
            asking = asyncio.create_task(ask(made, target, Late(), body=b"x" * 50_000_000))
            await heard.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await over.wait()

    run(story())


@pytest.mark.parametrize(
    ("raw", "answer"),
    [
        (b"", None),
        (b"HTTP/1.1 200 OK\r\n", None),
        (b"HTTP/1.1 100 Continue\r\n\r\n", None),
        (b"nonsense\r\n\r\n", None),
        (OK[:-1], None),
        (CHUNKED[:-1], None),
        (CHUNKED.replace(b"3\r\n", b"g\r\n"), None),
        (OK, (200, b"hello")),
        (OK + b"more", (200, b"hello")),
        (CHUNKED, (200, b"hello")),
        (
            b"HTTP/1.1 503 No\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked([b"a", b"b"]),
            (503, b"ab"),
        ),
        (b"HTTP/1.1 204 None\r\n\r\n", (204, b"")),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 80_000, None),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", None),
    ],
)
def test_what_a_whole_answer_is(raw: bytes, answer: tuple[int, bytes] | None) -> None:
    assert parse_complete_response(raw, "POST") == answer
