"""Tests bytes that are not a request: the server answers with a 4xx in JSON or closes the
connection, never logs a traceback, and serves the next request.
"""

import asyncio
import json
import socket
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.router.http.kit import Served, echo, post, run, serving

TLS_HELLO = bytes.fromhex("160301020001000001fc0303") + bytes(range(200))


async def assert_refused(served: Served, data: bytes, *statuses: int) -> None:
    answer = await served.say(data)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split(b" ")[1]) in statuses, answer
    assert b"Connection: close" in head
    error = json.loads(body)["error"]
    assert error["code"] in statuses
    assert error["message"]


async def assert_alive(served: Served) -> None:
    client = await served.connect()
    client.send(post(b"alive"))
    assert (await client.answer())[2] == b"alive"
    client.close()


REFUSED = {
    "tls": (TLS_HELLO, 400),
    "a length and chunks": (
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\n",
        400,
    ),
    "two lengths": (
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        400,
    ),
    "another coding": (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
    "a bad chunk": (
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n",
        400,
    ),
    "a bare LF": (b"GET / HTTP/1.1\nHost: h\n\n", 400),
    "a long head": (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 40_000, 431),
    "a long path": (b"GET /" + b"a" * 40_000, 431),
    "many headers": (b"GET / HTTP/1.1\r\nHost: h\r\n" + b"X: 1\r\n" * 200 + b"\r\n", 431),
    "a large body": (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2000000\r\n\r\n", 413),
    "a large body in chunks": (
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"fffff\r\n"
        + b"a" * 0xFFFFF
        + b"\r\nff\r\n"
        + b"a" * 255,
        413,
    ),
    "an unknown expectation": (
        b"POST / HTTP/1.1\r\nHost: h\r\nExpect: tea\r\nContent-Length: 1\r\n\r\n",
        417,
    ),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
}


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_request_is_refused_in_json(data: bytes, status: int) -> None:
    async def story() -> None:
        async with serving(echo, body_bytes=1_000_000) as served:
            await assert_refused(served, data, status)
            assert served.refusals == [status]
            await assert_alive(served)

    run(story())


def test_a_refused_client_that_is_still_sending_gets_its_answer() -> None:
    """If the server closed at once, the connection would be reset, and the kernel would discard the
    answer that the client has not read.
    """

    def talk(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 8000000\r\n\r\n")
            sock.sendall(b"x" * 8_000_000)
            return sock.makefile("rb").read()

    async def story() -> None:
        async with serving(echo, body_bytes=1000) as served:
            assert (await asyncio.to_thread(talk, served.port)).startswith(b"HTTP/1.1 413 ")

    run(story())


def test_what_follows_a_refused_request_is_never_served() -> None:
    served_paths: list[str] = []

    async def story() -> None:
        async with serving(echo, admit=lambda request: served_paths.append(request.path)) as served:
            smuggled = b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
            head = (
                b"POST /first HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n" % len(smuggled)
            )
            answer = await served.say(head + smuggled)
            assert answer.count(b"HTTP/1.1 ") == 1

    run(story())
    assert served_paths == []


@pytest.mark.parametrize(
    ("data", "limits"),
    [
        (b"GET / HTT", {"head_timeout_s": 0.1}),
        (
            b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nabc",
            {"body_idle_timeout_s": 0.1},
        ),
        (
            b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
            {"body_idle_timeout_s": 0.1},
        ),
    ],
)
def test_a_client_that_stops_in_the_middle_is_told_that_it_was_too_slow(
    data: bytes, limits: dict[str, float]
) -> None:
    async def story() -> None:
        async with serving(echo, **limits) as served:  # type: ignore[arg-type]
            await assert_refused(served, data, 408)
            await assert_alive(served)

    run(story())


def test_one_byte_now_and_then_does_not_hold_a_connection_for_ever() -> None:
    async def story() -> None:
        async with serving(echo, head_timeout_s=0.3, body_timeout_s=0.3) as served:
            for begun in (
                b"GET / HTTP/1.1\r\nX: ",
                b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 500000\r\n\r\n",
            ):
                client = await served.connect()
                client.send(begun)
                answer = asyncio.create_task(client.rest())
                while not answer.done():
                    client.send(b"a")
                    await asyncio.sleep(0.01)
                assert (await answer).startswith(b"HTTP/1.1 408 ")
                client.close()

    run(story())


def test_an_idle_connection_is_closed_without_a_word() -> None:
    async def story() -> None:
        async with serving(echo, keepalive_s=0.1) as served:
            assert await served.say(b"") == b""
            client = await served.connect()
            client.send(post(b"x"))
            await client.answer()
            assert await client.rest() == b""
            client.close()
            assert served.refusals == []

    run(story())


def test_clients_that_leave_at_any_byte_leave_nothing_behind() -> None:
    request = post(b"hello", "/", b"X-A: b")

    async def story() -> None:
        async with serving(echo) as served:
            for cut in range(len(request) + 1):
                for is_reset in (False, True):
                    client = await served.connect()
                    client.send(request[:cut])
                    if is_reset:
                        sock = client.writer.get_extra_info("socket")
                        sock.setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                        )
                    client.close()
            await assert_alive(served)
            while served.server.num_connections:
                await asyncio.sleep(0.01)

    run(story())


VALID = [
    post(b"hello"),
    b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
]


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """Valid requests with some bytes replaced, removed or inserted, or plain noise."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=300))
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(VALID), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        data[at : at + draw(st.integers(0, 3))] = draw(
            st.one_of(st.binary(max_size=4), st.sampled_from([b"\r\n", b"\n", b"\0", b":", b" "]))
        )
    return bytes(data)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(spoilt(), min_size=1, max_size=20))
def test_no_bytes_make_the_server_fail_or_fall_silent(sent: list[bytes]) -> None:
    """Every answer is 100, 200 or a 4xx, and the next client is served."""

    async def story() -> None:
        async with serving(
            echo, head_timeout_s=0.1, body_idle_timeout_s=0.1, keepalive_s=0.1, linger_s=0.1
        ) as served:
            answers = await asyncio.gather(*(served.say(data) for data in sent))
            for answer in answers:
                for part in answer.split(b"HTTP/1.1 ")[1:]:
                    assert part[:1] == b"4" or part[:3] in (b"100", b"200"), answer
            await assert_alive(served)

    run(story())
