import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.router.http.kit import (
    Served,
    Talk,
    answering,
    ask,
    chunked,
    instance,
    post,
    read_request,
    run,
    serving,
    upstreams,
)

from kvferry.router.http.framing import ChunkedBody
from kvferry.router.http.messages import (
    InvalidResponse,
    ServerRequest,
    UpstreamDisconnected,
    UpstreamError,
    UpstreamTimeout,
)
from kvferry.router.http.pool import UpstreamPool, UpstreamResponse
from kvferry.router.http.upstream_connection import Target
from kvferry.router.http.writer import ResponseWriter

EVENTS = [b"data: a\n\n", b"data: b\n\n", b"data: [DONE]\n\n"]
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
FIRST = b"9\r\ndata: a\n\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"


@dataclass
class Passing:
    """A handler that relays an instance's answer and records how the relay ended."""

    made: UpstreamPool
    target: Target
    num_read: int = 0
    """Number of body reads before the relay; the data read is passed as `start`."""
    filter: Callable[[bytes], bytes] | None = None
    idle_timeout_s: float = 10
    errors: list[Exception] = field(default_factory=list)
    firsts: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: ServerRequest, reply: ResponseWriter) -> None:
        try:
            with await ask(self.made, self.target, request.method) as answer:
                start = b"".join([await answer.read_some(5) for _ in range(self.num_read)])
                try:
                    await answer.relay(
                        reply,
                        [("Content-Type", answer.headers.get("content-type") or "")],
                        idle_timeout_s=self.idle_timeout_s,
                        start=start,
                        on_first=self.note_first,
                        filter=self.filter,
                    )
                except UpstreamError as error:
                    self.errors.append(error)
                    if not reply.can_write:
                        reply.abort()
                        return
                    await reply.write(b"data: sorry\n\n")
                    await reply.finish()
                except ConnectionError as error:
                    self.errors.append(error)
                    raise
        finally:
            self.ended.set()

    def note_first(self) -> None:
        self.firsts += 1


def decoded(raw: bytes) -> bytes:
    body, parts = ChunkedBody(), list[bytes]()
    assert body.advance(raw, parts) == len(raw)
    assert body.is_ended
    return b"".join(parts)


async def passed_on(talk: Talk, request: bytes = GET, **settings: object) -> tuple[bytes, Passing]:
    """What a client receives up to the end of its connection, and the handler."""
    async with instance(talk) as target, upstreams() as made:
        passing = Passing(made, target, **settings)  # type: ignore[arg-type]
        async with serving(passing.handle) as served:
            client = await served.connect()
            client.send(request)
            if b"HTTP/1.0" in request:
                received = await client.rest()
            else:
                try:
                    status, head, body = await client.answer()
                    received = head + body
                    client.send(GET.replace(b"/ ", b"/again "))
                    assert await client.answer() == (
                        status,
                        head,
                        body,
                    )  # both connections can be used for another request
                except asyncio.IncompleteReadError as error:
                    received = b"\r\n\r\n" + error.partial
            client.close()
        return received, passing


def test_chunks_pass_untouched() -> None:
    raw = b"5;ext=1\r\nhello\r\n0003\r\nyou\r\n0\r\nTrailer: x\r\n0: 0\r\n\r\n"

    async def story() -> None:
        received, passing = await passed_on(answering(STREAM + raw, STREAM + raw))
        assert (
            received == b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n" + raw
        )
        assert (passing.errors, passing.firsts) == ([], 2)

    run(story())


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (b"HTTP/1.1 201 Created\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b""),
    ],
)
def test_an_answer_of_known_length_keeps_it(raw: bytes, body: bytes) -> None:
    async def story() -> None:
        received, passing = await passed_on(answering(raw, raw))
        status_line = raw.partition(b"\r\n")[0]
        assert (
            received
            == status_line + b"\r\nContent-Type: \r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        assert passing.errors == []

    run(story())


def test_an_answer_until_close_becomes_chunks() -> None:
    async def story() -> None:
        received, _ = await passed_on(answering(b"HTTP/1.1 200 OK\r\n\r\nhello"))
        head, _, body = received.partition(b"\r\n\r\n")
        assert b"chunked" in head
        assert decoded(body) == b"hello"

    run(story())


@pytest.mark.parametrize(
    "raw", [STREAM + chunked(EVENTS), b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(EVENTS)]
)
def test_http_1_0_gets_no_chunks(raw: bytes) -> None:
    async def story() -> None:
        received, passing = await passed_on(answering(raw), b"GET / HTTP/1.0\r\n\r\n")
        head, _, body = received.partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == b"".join(EVENTS)
        assert passing.errors == []

    run(story())


@pytest.mark.parametrize("head", [STREAM, b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n"])
def test_head_gets_the_head_alone(head: bytes) -> None:
    async def story() -> None:
        talk = answering(head, head, head)
        async with (
            instance(talk) as target,
            upstreams() as made,
            serving(Passing(made, target).handle) as served,
        ):
            client = await served.connect()
            client.send(b"HEAD / HTTP/1.1\r\nHost: h\r\n\r\n" * 2 + GET.replace(b"GET", b"BAD?"))
            received = await client.rest()
            client.close()
            assert received.count(b"HTTP/1.1 200 OK") == 2
            assert received.partition(b"HTTP/1.1 400")[0].count(b"\r\n\r\n") == 2
            assert made.num_connections == 1

    run(story())


def test_a_filter_sees_decoded_chunks_and_the_end() -> None:
    seen: list[bytes] = []

    def shout(chunk: bytes) -> bytes:
        seen.append(chunk)
        return chunk.upper() if chunk else b"THE END"

    async def story() -> None:
        stream = STREAM + chunked(EVENTS)
        received, _ = await passed_on(answering(stream, stream), filter=shout)
        assert decoded(received.partition(b"\r\n\r\n")[2]) == b"".join(EVENTS).upper() + b"THE END"
        assert b"".join(seen) == b"".join(EVENTS) * 2
        assert seen.count(b"") == 2

    run(story())


def test_a_filter_that_fails_ends_the_answer_so_that_it_does_not_look_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(chunk: bytes) -> bytes:
        raise ZeroDivisionError

    async def story() -> None:
        received, _ = await passed_on(answering(STREAM + chunked(EVENTS)), filter=fails)
        assert not received.endswith(b"0\r\n\r\n")

    run(story())
    assert "ZeroDivisionError" in caplog.text
    caplog.clear()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    chunks=st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    num_read=st.integers(0, 3),
    is_filtered=st.booleans(),
    version=st.sampled_from([b"1.0", b"1.1"]),
    kind=st.sampled_from(["chunked", "length", "close"]),
)
def test_any_body_cut_anywhere_and_read_in_part_arrives_whole(
    chunks: list[bytes],
    cuts: list[int],
    num_read: int,
    is_filtered: bool,
    version: bytes,
    kind: str,
) -> None:
    said = b"".join(chunks)
    raw = {
        "chunked": STREAM + chunked(chunks),
        "length": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(said) + said,
        "close": b"HTTP/1.1 200 OK\r\n\r\n" + said,
    }[kind]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        start = 0
        for edge in [*sorted(position % (len(raw) + 1) for position in cuts), len(raw)]:
            writer.write(raw[start:edge])
            start = edge
            await asyncio.sleep(0.001)

    async def story() -> None:
        filter = (lambda chunk: chunk) if is_filtered else None
        async with instance(talk) as target, upstreams() as made:
            passing = Passing(made, target, num_read=num_read, filter=filter)
            async with serving(passing.handle) as served:
                received = await served.say(
                    b"GET / HTTP/%b\r\nHost: h\r\nConnection: close\r\n\r\n" % version
                )
        head, _, body = received.partition(b"\r\n\r\n")
        assert (decoded(body) if b"chunked" in head else body) == said
        assert passing.errors == []

    run(story())


def test_a_body_that_was_read_whole_is_passed_on_though_its_connection_serves_another_by_now() -> (
    None
):
    """The connection returned to the pool with the last byte that was read; it now carries the
    answer to the next request.
    """
    half = asyncio.Event()
    seconds: asyncio.Queue[bytes] = asyncio.Queue()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(STREAM + chunked(EVENTS))
        await read_request(reader)
        writer.write(STREAM + FIRST)
        await half.wait()
        writer.write(b"0\r\n\r\n")
        await reader.read()

    async def story() -> None:
        async with instance(talk) as target, upstreams() as made:

            async def handler(request: ServerRequest, reply: ResponseWriter) -> None:
                with await ask(made, target) as first:
                    start = b"".join([part async for part in parts_of(first)])
                    with await ask(made, target) as second:
                        await asyncio.sleep(0.05)
                        assert made.num_connections == 1
                        await first.relay(reply, [], idle_timeout_s=60, start=start)
                        half.set()
                        seconds.put_nowait(b"".join([part async for part in parts_of(second)]))

            async with serving(handler) as served:
                client = await served.connect()
                client.send(GET)
                assert decoded((await client.answer())[2]) == b"".join(EVENTS)
                assert await seconds.get() == b"data: a\n\n"
                client.close()

    run(story())


async def parts_of(answer: UpstreamResponse) -> AsyncIterator[bytes]:
    while part := await answer.read_some(5):
        yield part


# -- instances that fail --


def breaking(raw: bytes, then: str = "close") -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(raw)
        await writer.drain()
        if then == "hang":
            await reader.read()
        elif then == "reset":
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )

    return talk


@pytest.mark.parametrize(
    ("sent", "can_go_on"),
    [
        (b"", True),
        (FIRST, True),
        (FIRST[:-1], False),
        (FIRST[:-2], False),
        (FIRST[:-5], False),
        (FIRST[:1], False),
        (FIRST + b"9\r", False),
        (FIRST + b"0\r\n", False),
        (FIRST + b"0\r\nTrailer: ", False),
    ],
)
@pytest.mark.parametrize("then", ["close", "hang"])
def test_a_stream_that_breaks_off_can_be_continued_between_chunks_only(
    sent: bytes, can_go_on: bool, then: str
) -> None:
    async def story() -> None:
        received, passing = await passed_on(breaking(STREAM + sent, then), idle_timeout_s=0.1)
        assert [type(error) for error in passing.errors] == [
            UpstreamTimeout if then == "hang" else UpstreamDisconnected
        ] * (2 if can_go_on else 1)
        body = received.partition(b"\r\n\r\n")[2]
        if can_go_on:
            assert decoded(body) == (b"data: a\n\n" if sent else b"") + b"data: sorry\n\n"
        else:
            assert body == sent

    run(story())


def test_a_stream_that_is_decoded_can_be_continued_anywhere() -> None:
    async def story() -> None:
        received, passing = await passed_on(
            breaking(STREAM + FIRST[:-5]), filter=lambda chunk: chunk
        )
        assert decoded(received.partition(b"\r\n\r\n")[2]) == b"data: " + b"data: sorry\n\n"
        assert len(passing.errors) == 2

    run(story())


def test_a_body_of_known_length_that_breaks_off_cannot_be_continued() -> None:
    async def story() -> None:
        received, passing = await passed_on(
            breaking(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")
        )
        assert received.endswith(b"abc")
        assert [type(error) for error in passing.errors] == [UpstreamDisconnected]

    run(story())


def test_an_answer_until_close_that_is_reset_is_broken_off() -> None:
    async def story() -> None:
        _, passing = await passed_on(breaking(b"HTTP/1.1 200 OK\r\n\r\nabc", "reset"))
        assert [type(error) for error in passing.errors] == [UpstreamDisconnected] * 2

    run(story())


def test_chunks_that_are_none_are_not_passed_on() -> None:
    async def story() -> None:
        received, passing = await passed_on(breaking(STREAM + FIRST + b"0x9\r\nevil\r\n"))
        assert b"evil" not in received
        assert [type(error) for error in passing.errors] == [InvalidResponse]

    run(story())


def test_what_follows_the_end_of_a_body_is_not_passed_on() -> None:
    async def story() -> None:
        raw = STREAM + chunked(EVENTS) + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
        received, passing = await passed_on(breaking(raw))
        assert received == STREAM + chunked(EVENTS)
        assert passing.errors == []

    run(story())


def test_an_answer_until_close_that_is_given_up_does_not_look_whole() -> None:
    async def story() -> None:
        async with instance(breaking(STREAM + FIRST)) as target, upstreams() as made:

            async def handler(request: ServerRequest, reply: ResponseWriter) -> None:
                with await ask(made, target) as answer:
                    try:
                        await answer.relay(reply, [], idle_timeout_s=60)
                    except UpstreamDisconnected:
                        reply.abort()

            async with serving(handler) as served:
                client = await served.connect()
                client.send(b"GET / HTTP/1.0\r\n\r\n")
                with pytest.raises(ConnectionError):
                    await client.reader.read(-1)
                client.close()

    run(story())


# -- clients that fail --

_MEGABYTE = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"


@dataclass
class Flood:
    """An instance that sends without end and counts the megabytes it has sent."""

    num_sent: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(STREAM)
        try:
            while True:
                writer.write(_MEGABYTE)
                await writer.drain()
                self.num_sent += 1
        finally:
            self.closed.set()


async def comes_to_rest(flood: Flood) -> int:
    """Wait until the instance has sent nothing for a while; returns the megabytes sent so far."""
    before = -1
    while flood.num_sent != before or not before:
        before = flood.num_sent
        await asyncio.sleep(0.2)
    return before


@pytest.mark.parametrize("is_filtered", [False, True])
def test_a_client_that_reads_slowly_slows_the_instance_down(is_filtered: bool) -> None:
    """Only the kernel's buffers and a few hundred kilobytes of ours fill up between the two,
    however much the instance could send.
    """

    async def story() -> None:
        flood = Flood()
        async with instance(flood.talk) as target, upstreams() as made:
            passing = Passing(made, target, filter=(lambda chunk: chunk) if is_filtered else None)
            async with serving(passing.handle) as served:
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1000)
                writer.write(GET)
                num_kept = await comes_to_rest(flood)
                assert num_kept < 40
                await reader.readexactly(100 << 20)
                assert flood.num_sent + 1 >= 100
                assert flood.num_sent < 100 + 40
                writer.close()
                await flood.closed.wait()

    run(story())


def test_a_client_that_reads_nothing_for_too_long_is_given_up() -> None:
    async def story() -> None:
        flood = Flood()
        async with instance(flood.talk) as target, upstreams() as made:
            passing = Passing(made, target)
            async with serving(passing.handle, stall_timeout_s=0.3) as served:
                client = await served.connect()
                client.writer.transport.pause_reading()  # type: ignore[attr-defined]
                client.send(GET)
                await flood.closed.wait()
                await passing.ended.wait()
                assert [isinstance(error, ConnectionError) for error in passing.errors] == [True]
                while served.server.num_connections:
                    await asyncio.sleep(0.01)
                client.close()

    run(story())


def test_a_handler_that_writes_to_a_client_that_reads_nothing_is_told() -> None:
    async def story() -> None:
        told = asyncio.Event()

        async def handler(request: ServerRequest, reply: ResponseWriter) -> None:
            reply.start(200, [])
            try:
                while True:
                    await reply.write(b"x" * 100_000)
            except ConnectionError:
                told.set()
                raise

        async with serving(handler, stall_timeout_s=0.3) as served:
            client = await served.connect()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.send(GET)
            await told.wait()
            client.close()

    run(story())


def test_a_client_that_leaves_ends_the_instances_work() -> None:
    async def story() -> None:
        closed = asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(STREAM + FIRST)
            await reader.read()
            closed.set()

        async with instance(talk) as target, upstreams() as made:
            passing = Passing(made, target)
            async with serving(passing.handle) as served:
                await leave_after_first(served)
                await closed.wait()
                await passing.ended.wait()

    run(story())


async def leave_after_first(served: Served) -> None:
    client = await served.connect()
    client.send(post(b"x"))
    await client.reader.readuntil(b"data: a\n\n")
    client.close()
