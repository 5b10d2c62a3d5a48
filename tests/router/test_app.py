"""Tests the router's pages, and its answers to unknown paths, large bodies and malformed HTTP."""

import asyncio
import json
from typing import Any

import pytest
import uvloop
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.router.stubs import Stage, answers, completes, drops_connection, prefills, stage, streams
from tests.web.malformed import MALFORMED, assert_refused_without_echo

ONE = {"prompt": "hello"}
COUNTS = ("status", "prefill_instances", "decode_instances")


async def raw_exchange(s: Stage, sent: bytes) -> bytes:
    """Everything that the router sends in reply to these bytes until it closes the connection;
    empty if the connection is reset.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rsplit(":", 1)[1]))
    writer.write(sent)
    writer.write_eof()
    try:
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def post(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Connection: close", *headers]
    if not any(
        line.lower().startswith(("content-length", "transfer-encoding")) for line in headers
    ):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def test_health_says_how_many_instances_there_are() -> None:
    async def scene() -> None:
        async with stage([prefills] * 2, completes) as s:
            for path in ("/health", "/healthcheck"):
                async with s.session.get(s.url + path) as answer:
                    shown = await answer.json()
                    assert answer.status == 200
                    assert {key: shown[key] for key in COUNTS} == {
                        "status": "ok",
                        "prefill_instances": 2,
                        "decode_instances": 1,
                    }

    uvloop.run(scene())


def test_health_says_how_many_instances_answered_last_time_and_stays_ok() -> None:
    async def scene() -> None:
        async with stage([prefills, drops_connection], completes) as s:

            async def health() -> tuple[int, list[int]]:
                async with s.session.get(f"{s.url}/health") as answer:
                    shown = await answer.json()
                    assert shown["status"] == "ok"
                    return answer.status, [
                        shown[f"{role}_last_{how}"]
                        for role in ("prefill", "decode")
                        for how in ("answered", "failed")
                    ]

            assert await health() == (200, [0, 0, 0, 0])
            assert (await s.post(ONE))[0] == 200
            assert await health() == (200, [1, 0, 1, 0])
            assert (await s.post(ONE))[0] == 502
            assert await health() == (200, [1, 1, 1, 0])
            s.prefillers[1].behaviour = prefills
            s.d.behaviour = streams([b"data: {}\n\n"], then="drop")
            await s.post(ONE)
            await s.post(ONE | {"stream": True})
            assert await health() == (200, [2, 0, 0, 1])

    uvloop.run(scene())


def test_models_are_those_of_a_decode_instance() -> None:
    async def scene() -> None:
        async with stage(prefills, answers(200, '{"data":[]}')) as s:
            async with s.session.get(
                f"{s.url}/v1/models", headers={"Authorization": "k"}
            ) as answer:
                assert (answer.status, await answer.read()) == (200, b'{"data":[]}')
            assert s.d.calls[0].path == "/v1/models"
            assert s.d.calls[0].headers["Authorization"] == "k"

    uvloop.run(scene())


def test_models_are_asked_of_another_d_when_one_refuses_requests() -> None:
    async def scene() -> None:
        async with stage(prefills, [answers(503, "{}"), answers(200, '{"data":[]}')]) as s:
            async with s.session.get(f"{s.url}/v1/models") as answer:
                assert (answer.status, await answer.read()) == (200, b'{"data":[]}')
            async with s.session.get(f"{s.url}/health") as health:
                shown = await health.json()
            assert (shown["decode_last_refused"], shown["decode_last_answered"]) == (1, 1)

    uvloop.run(scene())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/unknown", 404),
    ],
)
def test_an_unknown_path_or_method_is_a_json_error(method: str, path: str, status: int) -> None:
    async def scene() -> None:
        async with (
            stage(prefills, completes) as s,
            s.session.request(method, s.url + path) as answer,
        ):
            assert answer.status == status
            assert json.loads(await answer.read())["error"]["code"] == status

    uvloop.run(scene())


def test_a_body_over_the_limit_is_a_413_and_one_at_the_limit_is_served() -> None:
    async def scene() -> None:
        async with stage(prefills, completes, max_body_bytes=4096) as s:
            frame = len(json.dumps({"prompt": ""}))
            assert (await s.post({"prompt": "x" * (4096 - frame)}))[0] == 200
            status, _, body = await s.post({"prompt": "x" * (4097 - frame)})
            assert status == 413
            assert (
                json.loads(body)["error"]["message"]
                == "the request body is larger than the limit of 4096 bytes"
            )
            assert len(s.p.calls) == 1

    uvloop.run(scene())


def test_beyond_the_memory_for_uploads_the_largest_is_refused_and_the_others_are_served() -> None:
    """The largest, not the newest: a client with a few huge uploads cannot keep out the others."""

    async def scene() -> None:
        async with stage(
            prefills, completes, max_body_bytes=1_000_000, max_unfinished_bytes=1_000_000
        ) as s:
            port = int(s.url.rsplit(":", 1)[1])
            large, small = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            body = json.dumps({"prompt": "x" * 900_000}).encode()
            for (_, writer), num_bytes in ((large, 800_000), (small, 500_000)):
                writer.write(post(body)[:num_bytes])
            answer = await large[0].read()
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"Retry-After: 1\r\n" in answer
            assert (await s.post(ONE))[0] == 200
            small[1].write(post(body)[500_000:])
            assert (await small[0].read()).startswith(b"HTTP/1.1 200 ")
            assert (await s.post(body))[0] == 200, "requests that have ended take no memory"
            for _, writer in (large, small):
                writer.close()

    uvloop.run(scene())


@pytest.mark.parametrize("max_running", [1, 1024], ids=["waits for admission", "runs"])
@pytest.mark.parametrize("is_left", [True, False])
def test_a_large_request_takes_memory_until_it_ends(max_running: int, is_left: bool) -> None:
    async def scene() -> None:
        is_free = asyncio.Event()

        async def prefills_later(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await is_free.wait()
            return await prefills(request, body)

        async with stage(
            prefills_later,
            completes,
            max_running=max_running,
            max_body_bytes=1_000_000,
            max_unfinished_bytes=1_000_000,
        ) as s:

            async def ask(prompt: str) -> "asyncio.Task[int]":
                """Send a request and wait until the router runs it or lets it wait."""

                async def status() -> int:
                    return (await s.post({"prompt": prompt}))[0]

                num_open = await s.metric("kvferry:router_active_requests") + await s.metric(
                    "kvferry:router_queued_requests"
                )
                asked = asyncio.create_task(status())
                while (
                    await s.metric("kvferry:router_active_requests")
                    + await s.metric("kvferry:router_queued_requests")
                    == num_open
                ):
                    await asyncio.sleep(0.01)
                return asked

            running, large = await ask("small"), await ask("x" * 600_000)
            status, headers, answer = await s.post({"prompt": "y" * 600_000})
            assert (status, headers["Retry-After"]) == (503, "1")
            assert b"too many large requests at once" in answer
            also = await ask("small too")
            if is_left:
                large.cancel()
                while not await s.metric("kvferry:router_client_aborts_total"):
                    await asyncio.sleep(0.01)
                large = await ask("z" * 600_000)
            is_free.set()
            assert [await each for each in (running, large, also)] == [200] * 3
            assert (await s.post({"prompt": "y" * 600_000}))[0] == 200

    uvloop.run(scene())


def test_requests_of_64_kib_are_not_refused_for_memory_however_many_there_are() -> None:
    async def scene() -> None:
        body = {"prompt": "x" * (65536 - len(json.dumps({"prompt": ""})))}
        num_requests = 40

        async def prefills_together(
            request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            while len(s.p.calls) < num_requests:  # the stage has a deadline
                await asyncio.sleep(0.01)
            return await prefills(request, body)

        async with stage(
            prefills_together, completes, max_body_bytes=65536, max_unfinished_bytes=65536
        ) as s:
            answers = await asyncio.gather(*(s.post(body) for _ in range(num_requests)))
            assert [status for status, _, _ in answers] == [200] * num_requests

    uvloop.run(scene())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"prompt":["a",1]}', b"[" * 50_000])
def test_a_bad_body_is_a_400_that_reaches_no_engine(body: bytes) -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            status, _, answer = await s.post(body)
            assert (status, json.loads(answer)["error"]["type"]) == (400, "BadRequestError")
            assert s.p.calls == []

    uvloop.run(scene())


GOOD = json.dumps(ONE).encode()


@pytest.mark.parametrize(
    "sent",
    [
        post(b"", "Transfer-Encoding: chunked") + b"zz\r\n",
        post(b"", "Transfer-Encoding: chunked") + b"5\r\nabc",
        post(b"not gzip", "Content-Encoding: gzip"),
        post(b"not deflate", "Content-Encoding: deflate"),
        post(b"abc", "Content-Length: 100"),
        post(b"abc", "Content-Length: -1"),
        post(b"abc", "Content-Length: 1", "Content-Length: 2"),
        post(GOOD, "X-Request-Id: \x01"),
        post(GOOD, "Content-Type: text/\xff; charset=\xfe"),
        post(GOOD, "X: " + "y" * 100_000),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /%ff%00 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n",
        b"",
    ],
)
def test_after_malformed_bytes_other_clients_are_served(sent: bytes) -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            answer = await raw_exchange(s, sent)
            assert answer == b"" or answer.startswith(
                (b"HTTP/1.1 4", b"HTTP/1.0 4", b"HTTP/1.1 200")
            )
            assert (await s.post(ONE))[0] == 200

    uvloop.run(scene())


@pytest.mark.parametrize(("sent", "status"), MALFORMED)
def test_malformed_http_is_a_json_error_without_an_echo(sent: bytes, status: int | None) -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            await assert_refused_without_echo(s.url, sent, status)
            assert (await s.post(ONE))[0] == 200

    uvloop.run(scene())


def test_an_upload_that_stalls_is_a_408() -> None:
    async def scene() -> None:
        async with stage(prefills, completes, idle=0.3) as s:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(s.url.rsplit(":", 1)[1])
            )
            writer.write(post(b"abc", "Content-Length: 100"))
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
            writer.close()

    uvloop.run(scene())


def test_any_body_gets_an_answer_or_a_400() -> None:
    """Each Hypothesis example is a batch of bodies for one router."""
    event = b'data: {"id":"d","choices":[{"text":"hello"}]}\n\n'

    async def generates(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        is_streamed = body.get("stream") is True
        behave = streams([event, b"data: [DONE]\n\n"]) if is_streamed else completes
        return await behave(request, body)

    async def batch(bodies: list[bytes]) -> None:
        async with stage(prefills, generates) as s:
            for body in bodies:
                assert (await s.post(body))[0] in (200, 400)
            assert (await s.post(ONE))[0] == 200

    value = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(max_size=5)
        | st.lists(st.text(max_size=3), max_size=3)
    )
    keys = st.sampled_from(
        ["prompt", "stream", "n", "max_tokens", "kv_transfer_params", "messages"]
    ) | st.text(max_size=5)
    objects = st.dictionaries(keys, value, max_size=5).map(lambda found: json.dumps(found).encode())

    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(st.binary(max_size=50) | objects, min_size=1, max_size=20))
    def check(bodies: list[bytes]) -> None:
        uvloop.run(batch(bodies))

    check()


def test_malformed_requests_are_counted() -> None:
    async def scene() -> None:
        async with stage(prefills, completes, max_body_bytes=100) as s:
            for sent, status in ((b"\x16\x03\x01", 400), (post(b"x" * 101), 413)):
                assert (await raw_exchange(s, sent)).startswith(b"HTTP/1.1 %d" % status)
                assert (
                    await s.metric(
                        f'kvferry:router_requests_total{{route="malformed",status="{status}"}}'
                    )
                    == 1
                )

    uvloop.run(scene())
