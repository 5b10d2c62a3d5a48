import asyncio
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.router.http.kit import answering, ask, chunked, instance, read_request, run, upstreams

from kvferry.router.http.messages import (
    AnswerTooLong,
    ConnectFailed,
    InstanceSilent,
    InvalidResponse,
    UpstreamDisconnected,
    UpstreamError,
    UpstreamTimeout,
)
from kvferry.router.http.pool import UpstreamPool
from kvferry.router.http.upstream_connection import Target
from kvferry.types import Address

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked([b"hel", b"lo"])


async def assert_says(raw: bytes, body: bytes, *, is_kept: bool, method: str = "POST") -> None:
    async with instance(answering(raw, raw)) as target, upstreams() as made:
        for _ in range(2):
            with await ask(made, target, method) as answer:
                assert await answer.read(1000, 5) == body
                assert await answer.read_some(5) == b""
            assert (
                made.num_connections == 1
                if is_kept
                else await settles(lambda: made.num_connections == 0)
            )


async def settles(is_so: Callable[[], bool]) -> bool:
    for _ in range(1000):
        if is_so():
            return True
        await asyncio.sleep(0.001)
    return False


@pytest.mark.parametrize(
    ("raw", "is_kept"),
    [
        (OK, True),
        (CHUNKED, True),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK, True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", False),
        (OK + b"something nobody asked for", False),
        (CHUNKED + b"x", False),
    ],
)
def test_a_body_is_read_whole_and_its_connection_kept_only_when_it_ended_cleanly(
    raw: bytes, is_kept: bool
) -> None:
    run(assert_says(raw, b"hello", is_kept=is_kept))


def test_an_answer_until_close_is_read_to_the_end() -> None:
    async def story() -> None:
        async with (
            instance(answering(b"HTTP/1.1 200 OK\r\n\r\nhello")) as target,
            upstreams() as made,
        ):
            with await ask(made, target) as answer:
                assert await answer.read(1000, 5) == b"hello"

    run(story())


@pytest.mark.parametrize(
    ("method", "raw"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"),
        ("POST", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("POST", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n"),
        ("POST", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
    ],
)
def test_an_answer_without_a_body_ends_with_its_head(method: str, raw: bytes) -> None:
    run(assert_says(raw, b"", is_kept=True, method=method))


def test_an_answer_byte_by_byte_is_the_same() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(0)
        for raw in (CHUNKED, OK):
            await read_request(reader)
            for byte in raw:
                writer.write(bytes([byte]))
                await asyncio.sleep(0)

    async def story() -> None:
        async with instance(talk) as target, upstreams() as made:
            for _ in range(2):
                with await ask(made, target) as answer:
                    parts = []
                    while part := await answer.read_some(5):
                        parts.append(part)
                    assert b"".join(parts) == b"hello"
            assert made.num_connections == 1

    run(story())


def test_the_request_is_framed_by_the_client_whatever_headers_it_is_given() -> None:
    heard: list[tuple[bytes, bytes]] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await read_request(reader))
        writer.write(OK)

    async def story() -> None:
        async with instance(talk) as target, upstreams() as made:
            headers = [
                ("Host", "evil"),
                ("Content-Length", "99"),
                ("Transfer-Encoding", "chunked"),
                ("Expect", "100-continue"),
                ("X-A", "b"),
            ]
            with await made.send(
                target,
                "POST",
                "/p?q",
                headers,
                [b"one", b"two"],
                connect_timeout_s=60,
                head_timeout_s=60,
            ) as answer:
                await answer.read(100, 5)
            assert heard == [
                (
                    b"POST /p?q HTTP/1.1\r\nHost: %b\r\nX-A: b\r\nContent-Length: 6\r\n\r\n"
                    % str(target.address).encode(),
                    b"onetwo",
                )
            ]
            for path, value in (
                ("/p HTTP/1.1\r\nX: y", ""),
                ("/p\r\n", ""),
                ("/", "a\r\nb"),
                ("/", "a\nb"),
            ):
                with pytest.raises(ValueError, match="cannot be sent"):
                    await made.send(
                        target,
                        "GET",
                        path,
                        [("X-A", value)],
                        b"",
                        connect_timeout_s=60,
                        head_timeout_s=60,
                    )

    run(story())


def test_the_connection_used_last_is_used_first_and_old_ones_are_closed() -> None:
    peers: list[int] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            peers.append(writer.get_extra_info("peername")[1])
            writer.write(OK)

    async def story() -> None:
        async with instance(talk) as target, upstreams(keepalive_s=0.5) as made:
            first, second = await ask(made, target), await ask(made, target)
            await first.read(100, 5)
            await second.read(100, 5)
            for _ in range(3):
                with await ask(made, target) as answer:
                    await answer.read(100, 5)
            assert peers[0] != peers[1]
            assert peers[2:] == [peers[1]] * 3
            assert made.num_connections == 2
            assert await settles(lambda: made.num_connections == 0)

    run(story())


def test_a_warm_connection_that_was_closed_meanwhile_is_replaced_once() -> None:
    """The instance closes the connection after it has read the second request, so only a fresh
    connection helps.
    """
    requests: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append((await read_request(reader))[1])
        writer.write(OK)
        requests.append((await read_request(reader))[1])

    async def story() -> None:
        async with instance(talk) as target, upstreams() as made:
            for body in (b"one", b"two"):
                with await ask(made, target, body=body) as answer:
                    assert await answer.read(100, 5) == b"hello"
            assert requests == [b"one", b"two", b"two"]

    run(story())


def test_a_fresh_connection_that_is_closed_is_not_tried_again() -> None:
    num_connections = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await read_request(reader)

    async def story() -> None:
        async with instance(talk) as target, upstreams() as made:
            with pytest.raises(UpstreamDisconnected) as caught:
                await ask(made, target)
            assert caught.value.has_answered is False
            assert num_connections == 1

    run(story())


@pytest.mark.parametrize("sent", [b"H", b"HTTP/1.1 200 OK\r\nContent-Le"])
def test_an_answer_that_ends_in_its_head_is_not_asked_for_again(sent: bytes) -> None:
    async def story() -> None:
        async with instance(answering(OK, sent)) as target, upstreams() as made:
            with await ask(made, target) as answer:
                await answer.read(100, 5)
            with pytest.raises(UpstreamDisconnected) as caught:
                await ask(made, target)
            assert caught.value.has_answered is True

    run(story())


@pytest.mark.parametrize("raw", [OK[:-1], CHUNKED[:-1], CHUNKED[:-7], CHUNKED[:-12]])
def test_a_body_that_ends_too_early_is_broken_off(raw: bytes) -> None:
    async def story() -> None:
        async with instance(answering(raw)) as target, upstreams() as made:
            with await ask(made, target) as answer:
                with pytest.raises(UpstreamDisconnected) as caught:
                    await answer.read(100, 5)
                assert caught.value.has_answered is True

    run(story())


@pytest.mark.parametrize(
    "raw",
    [
        b"\x15\x03\x03\x00\x02\x02\x0a",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000,
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_answer_is_said_to_be_none(raw: bytes) -> None:
    async def story() -> None:
        async with instance(answering(raw)) as target, upstreams() as made:
            with pytest.raises(InvalidResponse):
                await ask(made, target)
            assert await settles(lambda: made.num_connections == 0)

    run(story())


def test_a_body_that_is_not_chunked_as_it_says_is_not_http() -> None:
    async def story() -> None:
        async with (
            instance(
                answering(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n")
            ) as target,
            upstreams() as made,
        ):
            with await ask(made, target) as answer, pytest.raises(InvalidResponse):
                await answer.read(100, 5)

    run(story())


def test_a_body_longer_than_is_wanted_is_not_read() -> None:
    async def story() -> None:
        async with instance(answering(OK)) as target, upstreams() as made:
            with (
                await ask(made, target) as answer,
                pytest.raises(AnswerTooLong, match="longer than 4 bytes"),
            ):
                await answer.read(4, 5)

    run(story())


def test_an_instance_that_is_not_there_is_not_reached() -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            gone = Target(Address("127.0.0.1", sock.getsockname()[1]))
        async with upstreams() as made:
            with pytest.raises(ConnectFailed, match="no connection"):
                await ask(made, gone)
            with pytest.raises(ConnectFailed):
                await ask(made, Target(Address("no.such.host.invalid", 80)))
            with pytest.raises(ConnectFailed):
                await ask(made, Target(Address("a" * 300, 80)))

    run(story())


def test_an_instance_that_does_not_accept_is_not_reached_in_time() -> None:
    async def story() -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen(0)
            target = Target(Address("127.0.0.1", sock.getsockname()[1]))
            fillers = [socket.socket() for _ in range(4)]
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(sock.getsockname())
            async with upstreams() as made:
                with pytest.raises(ConnectFailed, match="within"):
                    await made.send(
                        target, "GET", "/", [], b"", connect_timeout_s=0.2, head_timeout_s=60
                    )
            for filler in fillers:
                filler.close()

    run(story())


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 20"])
def test_an_instance_that_falls_silent_before_its_head_has_timed_out(sent: bytes) -> None:
    closed = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(sent)
        await reader.read()
        closed.set()

    async def story() -> None:
        async with instance(talk) as target, upstreams() as made:
            with pytest.raises(UpstreamTimeout):
                await ask(made, target, head_timeout_s=0.1)
            await closed.wait()  # the instance sees that the connection is closed

    run(story())


def test_an_instance_that_falls_silent_in_its_body_has_timed_out() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK[:-2])
        await reader.read()

    async def story() -> None:
        async with instance(talk) as target, upstreams() as made:
            for is_whole in (True, False):
                with await ask(made, target) as answer:
                    if not is_whole:
                        assert await answer.read_some(5) == b"hel"
                    with pytest.raises(UpstreamTimeout):
                        await (answer.read(100, 0.1) if is_whole else answer.read_some(0.1))

    run(story())


def test_leaving_before_the_end_closes_the_connection() -> None:
    closed = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED[:-8])
        await reader.read()
        closed.set()

    async def story() -> None:
        async with instance(talk) as target, upstreams() as made:
            with await ask(made, target) as answer:
                assert await answer.read_some(5)
            await closed.wait()
            assert await settles(lambda: made.num_connections == 0)

    run(story())


def test_a_request_that_was_not_sent_whole_never_will_be() -> None:
    async def story() -> None:
        heard, over = asyncio.Event(), asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            heard.set()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(50_000_000)
            over.set()

        async with instance(talk) as target, upstreams() as made:
            asking = asyncio.create_task(ask(made, target, body=b"x" * 50_000_000))
            await heard.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await over.wait()

    run(story())


def test_an_answer_whose_end_and_deadline_come_in_one_turn_has_come() -> None:
    """The event loop does not run until the rest of the answer and the deadline are both due, as on
    an overloaded machine.
    """

    async def story() -> None:
        sent = asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(OK[:-4])
            await sent.wait()
            writer.write(OK[-4:])
            # The bytes are in the kernel's buffers; the blocked event loop has not read them.
            time.sleep(0.5)
            await reader.read()

        async with instance(talk) as target, upstreams() as made:
            with await ask(made, target) as answer:
                reading = asyncio.create_task(answer.read(1000, 0.2))
                await asyncio.sleep(0.05)
                sent.set()
                assert await reading == b"hello"

    run(story())


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_cancelled_request_closes_the_connection(is_answered: bool) -> None:
    async def story() -> None:
        entered, closed = asyncio.Event(), asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            if is_answered:
                writer.write(OK[:-2])
            entered.set()
            await reader.read()
            closed.set()

        async def asks() -> None:
            with await ask(made, target) as answer:
                await answer.read(100, 10)

        async with instance(talk) as target, upstreams() as made:
            task = asyncio.create_task(asks())
            await entered.wait()
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await closed.wait()
            assert await settles(lambda: made.num_connections == 0)

    run(story())


@pytest.mark.parametrize("is_reset", [False, True])
def test_an_answer_that_comes_before_the_body_was_sent_is_read(is_reset: bool) -> None:
    """The instance refuses a large body: it answers and closes the connection without reading the
    rest. The kernel turns that into a reset.
    """

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await writer.drain()
        if is_reset:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            await reader.read(1000)

    async def story() -> None:
        async with instance(talk) as target, upstreams() as made:
            for _ in range(20):
                with await ask(made, target, body=b"x" * 20_000_000) as answer:
                    assert (answer.status, await answer.read(100, 5)) == (413, b"big")
            assert await settles(lambda: made.num_connections == 0)

    run(story())


ANSWERS = [
    OK,
    CHUNKED,
    b"HTTP/1.1 200 OK\r\n\r\nhello",
    b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
    b"HTTP/1.1 204 No Content\r\n\r\n",
]


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """A valid answer with some bytes replaced, removed or inserted, or plain noise."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=200))
    data = bytearray(draw(st.sampled_from(ANSWERS)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        data[at : at + draw(st.integers(0, 3))] = draw(
            st.one_of(st.binary(max_size=4), st.sampled_from([b"\r\n", b"\n", b"\0", b":", b"0"]))
        )
    return bytes(data)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(spoilt(), min_size=1, max_size=15))
def test_whatever_bytes_an_instance_sends_are_an_answer_or_an_error_of_the_instance(
    sent: list[bytes],
) -> None:
    async def read(made: UpstreamPool, raw: bytes) -> None:
        async with instance(answering(raw)) as target:
            with suppress(UpstreamError), await ask(made, target) as answer:
                await answer.read(1000, 5)

    async def story() -> None:
        async with upstreams() as made:
            await asyncio.gather(*(read(made, raw) for raw in sent))
            assert await settles(lambda: made.num_connections == 0)

    run(story())


def test_an_answer_that_nobody_reads_is_not_taken_from_the_instance() -> None:
    num_sent = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
        while num_sent < 100:
            writer.write(b"x" * 1_000_000)
            await writer.drain()
            num_sent += 1
        await reader.read()

    async def story() -> None:
        async with instance(talk) as target, upstreams() as made:
            with await ask(made, target) as answer:
                before = -1
                while num_sent != before or not before:
                    before = num_sent
                    await asyncio.sleep(0.1)
                assert num_sent < 40
                assert len(await answer.read(100_000_000, 10)) == 100_000_000

    run(story())


def test_an_answer_that_comes_before_the_question_is_read() -> None:
    """A server that has too many connections refuses before it reads the request, and closes."""

    async def story() -> None:
        async with upstreams() as made:
            with socket.create_server(("127.0.0.1", 0)) as server:
                target = Target(Address("127.0.0.1", server.getsockname()[1]))

                def accept_and_refuse() -> None:
                    sock, _ = server.accept()
                    sock.sendall(
                        b"HTTP/1.1 503 Full\r\nConnection: close\r\nContent-Length: 4\r\n\r\nfull"
                    )
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.close()

                num_read = 0
                for _ in range(20):
                    refused = asyncio.create_task(asyncio.to_thread(accept_and_refuse))
                    # On a busy machine the reset may arrive before the router has read a byte.
                    with suppress(UpstreamError):
                        with await ask(made, target, body=b"x" * 1_000_000) as answer:
                            assert (answer.status, await answer.read(100, 5)) == (503, b"full")
                        num_read += 1
                    await refused
                assert num_read >= 10

    run(story())


def test_errors_of_instances_have_one_parent() -> None:
    assert all(
        issubclass(kind, UpstreamError)
        for kind in (
            ConnectFailed,
            UpstreamTimeout,
            UpstreamDisconnected,
            AnswerTooLong,
            InstanceSilent,
            InvalidResponse,
        )
    )
