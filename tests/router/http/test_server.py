import asyncio
import json
import logging

import pytest
from tests.router.http.kit import RawClient, Served, chunked, echo, post, run, serving

from kvferry.router.http.messages import ServerRequest
from kvferry.router.http.server import Admit, ResponseParts
from kvferry.router.http.writer import ResponseWriter


def test_a_connection_is_kept_for_request_after_request() -> None:
    async def story() -> None:
        async with serving(echo) as served:
            client = await served.connect()
            for number in range(5):
                client.send(post(b"body %d" % number, f"/{number}?q={number}"))
                status, head, body = await client.answer()
                assert (status, body) == (200, b"body %d" % number)
                assert b"X-Path: /%d\r\nX-Query: q=%d\r\n" % (number, number) in head
            assert served.server.num_connections == 1
            client.close()

    run(story())


def test_pipelined_requests_are_answered_in_order_one_at_a_time() -> None:
    running: list[str] = []
    most = 0

    async def handler(request: ServerRequest, reply: ResponseWriter) -> None:
        nonlocal most
        running.append(request.path)
        most = max(most, len(running))
        await asyncio.sleep(0)
        running.remove(request.path)
        reply.send(200, [], request.path.encode())

    async def story() -> None:
        async with serving(handler) as served:
            client = await served.connect()
            client.send(
                b"".join(post(b"x" * 300, f"/{number}") for number in range(1000))
            )  # far more than the server buffers
            assert [(await client.answer())[2] for _ in range(1000)] == [
                b"/%d" % number for number in range(1000)
            ]
            client.close()

    run(story())
    assert most == 1


def test_a_client_that_asks_and_asks_without_reading_is_answered_only_as_far_as_it_reads() -> None:
    """Otherwise the answers would pile up in the server without bound."""
    num_served = 0

    async def handler(request: ServerRequest, reply: ResponseWriter) -> None:
        nonlocal num_served
        num_served += 1
        reply.send(200, [], b"x" * 10_000)

    async def story() -> None:
        async with serving(handler, admit=None) as served:
            client = await served.connect()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" * 5000)
            before = -1
            while num_served != before or not before:
                before = num_served
                await asyncio.sleep(0.1)
            assert num_served < 2500
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            for _ in range(5000):
                assert len((await client.answer())[2]) == 10_000
            client.close()

    run(story())


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_client_that_reads_slowly_gets_its_last_answer_whole(is_refused: bool) -> None:
    """The server reads from a refused client for only a short time (`linger_s`). That limit must
    not cut off the last answer.
    """
    size = 30_000_000

    async def handler(request: ServerRequest, reply: ResponseWriter) -> None:
        reply.send(200, [], b"x" * size)

    async def story() -> None:
        admit: Admit | None = (lambda request: (403, [], b"x" * size)) if is_refused else None
        async with serving(handler, admit=admit, linger_s=0.1) as served:
            client = await served.connect()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.send(post(b"", "/", b"Connection: close"))
            await asyncio.sleep(0.5)
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert len((await client.rest()).partition(b"\r\n\r\n")[2]) == size
            client.close()

    run(story())


def test_a_request_in_chunks_is_one_body() -> None:
    async def story() -> None:
        async with serving(echo) as served:
            client = await served.connect()
            for part in (
                b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe",
                b"llo\r\n1",
                b"\r\n!\r\n0\r\n",
                b"\r\n",
            ):
                client.send(part)
                await asyncio.sleep(0)
            assert (await client.answer())[2] == b"hello!"
            client.close()

    run(story())


def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    async def story() -> None:
        async with serving(echo) as served:
            client = await served.connect()
            client.send(
                b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
            )
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.send(b"hello")
            assert (await client.answer())[2] == b"hello"
            client.close()

    run(story())


def test_head_gets_the_head_alone_and_the_connection_goes_on() -> None:
    async def story() -> None:
        async with serving(echo) as served:
            client = await served.connect()
            client.send(b"HEAD / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello")
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert b"Content-Length: 5\r\n" in head
            client.send(post(b"next"))
            assert (await client.answer())[2] == b"next"
            client.close()

    run(story())


async def streams(request: ServerRequest, reply: ResponseWriter) -> None:
    reply.start(200, [("Content-Type", "text/event-stream")])
    for number in range(3):
        await reply.write(b"data: %d\n\n" % number)
    await reply.finish()


def test_a_stream_is_chunked_and_for_http_1_0_ends_with_the_connection() -> None:
    events = [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n"]

    async def story() -> None:
        async with serving(streams) as served:
            client = await served.connect()
            for _ in range(2):
                client.send(post(b""))
                assert (await client.answer())[2] == chunked(events)
            client.close()
            head, _, body = (await served.say(b"POST / HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
            assert body == b"".join(events)
            assert b"chunked" not in head
            assert b"Connection: close" in head

    run(story())


def test_http_1_0_is_kept_only_when_it_asks() -> None:
    async def story() -> None:
        async with serving(echo) as served:
            assert (await served.say(b"GET / HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
            client = await served.connect()
            for _ in range(2):
                client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
                assert b"Connection: keep-alive" in (await client.answer())[1]
            client.close()

    run(story())


def test_close_is_answered_with_close() -> None:
    async def story() -> None:
        async with serving(echo) as served:
            answer = await served.say(post(b"x", "/", b"Connection: close"))
            assert b"Connection: close\r\n" in answer
            assert answer.endswith(b"\r\n\r\nx")

    run(story())


def refuses(request: ServerRequest) -> ResponseParts | None:
    return None if request.path == "/yes" else (401, [("X-Why", "no key")], b"{}")


def test_admit_answers_before_the_body_is_read() -> None:
    async def story() -> None:
        async with serving(echo, admit=refuses) as served:
            client = await served.connect()
            client.send(
                post(b"small", "/no")
            )  # the body has arrived already, so the connection can be kept
            assert (await client.answer())[0] == 401
            client.send(post(b"small", "/yes"))
            assert (await client.answer())[2] == b"small"
            client.send(b"POST /no HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\nbegin")
            status, head, _ = await client.answer()
            assert status == 401
            assert b"Connection: close" in head
            client.send(b"x" * 1_000_000)  # the server drops these bytes, which does no harm
            assert await client.rest() == b""
            client.close()
            assert served.refusals == []

    run(story())


def test_admit_refuses_a_client_that_asks_first_without_telling_it_to_go_on() -> None:
    async def story() -> None:
        async with serving(echo, admit=refuses) as served:
            answer = await served.say(
                b"POST /no HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
            )
            assert answer.startswith(b"HTTP/1.1 401 ")

    run(story())


def test_many_refused_requests_in_one_write_are_all_answered() -> None:
    async def story() -> None:
        async with serving(echo, admit=refuses) as served:
            client = await served.connect()
            client.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" * 2000)
            assert {(await client.answer())[0] for _ in range(2000)} == {401}
            client.close()

    run(story())


def test_a_handler_that_fails_is_a_500_with_the_reason_in_the_log_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handler(request: ServerRequest, reply: ResponseWriter) -> None:
        if request.path == "/silent":
            return
        raise ZeroDivisionError("the secret reason")

    async def story() -> None:
        async with serving(handler) as served:
            for path in ("/fails", "/silent"):
                answer = await served.say(post(b"", path, b"Connection: close"))
                assert answer.startswith(b"HTTP/1.1 500 ")
                assert b"secret" not in answer
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 500

    run(story())
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    caplog.clear()


def test_an_admit_that_fails_is_a_500_too(caplog: pytest.LogCaptureFixture) -> None:
    def fails(request: ServerRequest) -> None:
        raise ZeroDivisionError

    async def story() -> None:
        async with serving(echo, admit=fails) as served:
            assert (await served.say(post(b""))).startswith(b"HTTP/1.1 500 ")

    run(story())
    assert "ZeroDivisionError" in caplog.text
    caplog.clear()


def test_a_handler_that_fails_in_the_middle_leaves_an_answer_that_does_not_look_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handler(request: ServerRequest, reply: ResponseWriter) -> None:
        reply.start(200, [])
        await reply.write(b"some")
        if request.path == "/raises":
            raise ZeroDivisionError
        if request.path == "/aborts":
            reply.abort()

    async def story() -> None:
        async with serving(handler) as served:
            for path in ("/raises", "/aborts", "/forgets"):
                assert not (await served.say(post(b"", path))).endswith(b"0\r\n\r\n")

    run(story())
    caplog.clear()


@pytest.mark.parametrize("value", ["a\r\nSet-Cookie: x", "a\nb", "a\rb"])
def test_a_header_cannot_break_out_of_its_line(
    value: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(request: ServerRequest, reply: ResponseWriter) -> None:
        reply.send(200, [("X-A", value)], b"")

    async def story() -> None:
        async with serving(handler) as served:
            answer = await served.say(post(b"", "/", b"Connection: close"))
            assert answer.startswith(b"HTTP/1.1 500 ")
            assert b"Cookie" not in answer

    run(story())
    caplog.clear()


def test_framing_is_the_servers_own_whatever_a_handler_says() -> None:
    async def handler(request: ServerRequest, reply: ResponseWriter) -> None:
        reply.send(
            200,
            [
                ("Content-Length", "99"),
                ("Transfer-Encoding", "chunked"),
                ("connection", "x"),
                ("X-A", "1"),
            ],
            b"four",
        )

    async def story() -> None:
        async with serving(handler) as served:
            client = await served.connect()
            client.send(post(b""))
            status, head, body = await client.answer()
            assert (status, body) == (200, b"four")
            assert head == b"HTTP/1.1 200 OK\r\nX-A: 1\r\nContent-Length: 4\r\n\r\n"
            client.close()

    run(story())


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_without_a_body_has_none(status: int) -> None:
    async def handler(request: ServerRequest, reply: ResponseWriter) -> None:
        reply.send(status, [], b"never sent")

    async def story() -> None:
        async with serving(handler) as served:
            client = await served.connect()
            for _ in range(2):
                client.send(post(b""))
                assert await client.reader.readuntil(b"\r\n\r\n")
            client.close()

    run(story())


async def two_at_once(served: Served) -> list[RawClient]:
    return [await served.connect(), await served.connect()]


def test_far_too_many_connections_are_closed_without_a_word() -> None:
    async def story() -> None:
        async with serving(echo, num_connections=0) as served:
            clients = [await served.connect() for _ in range(300)]
            received = [await client.rest() for client in clients]
            assert {answer[:12] for answer in received} == {b"HTTP/1.1 503", b""}
            for client in clients:
                client.close()

    run(story())


def test_one_connection_too_many_is_told_to_come_back() -> None:
    async def story() -> None:
        async with serving(echo, num_connections=2) as served:
            clients = await two_at_once(served)
            for client in clients:
                client.send(post(b"x"))
                await client.answer()
            answer = await served.say(b"")
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"Retry-After: 1\r\n" in answer
            clients.pop().close()
            while served.server.num_connections > 1:
                await asyncio.sleep(0)
            client = await served.connect()
            client.send(post(b"x"))
            assert (await client.answer())[0] == 200
            client.close()
            clients.pop().close()

    run(story())
