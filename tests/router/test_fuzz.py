"""Tests that any input over HTTP is answered with 2xx, or with 4xx and an error message, and that
the next good request is served.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
import uvloop
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.fuzzing import (
    ADMIN,
    DEADLINE_S,
    GENERATING,
    Fuzzed,
    Seen,
    any_request,
    bodies,
    check,
    framed,
    send,
    soups,
    values,
    wrong_chunks,
)
from tests.router.stubs import (
    AS_ADMIN,
    PARAMS,
    RecordedReleases,
    changed,
    instance,
    listening,
    serving,
)

from kvferry.router.fleet.instances import Instance, Role
from kvferry.router.fleet.registration import Registrar
from kvferry.router.options import RouterOptions

GOOD = (
    b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 14\r\n\r\n{"prompt":"x"}'
)
MANY = settings(max_examples=150)


@dataclass(frozen=True)
class Standing:
    """A router in front of stub engines, on an event loop in another thread."""

    port: int
    members: tuple[Instance, ...]

    def assert_serves(self) -> None:
        seen = send(self.port, GOOD)
        assert seen is not None
        assert (seen.status, json.loads(seen.body)["choices"]) == (200, [{"text": "ok"}])

    def admin(self, method: str, path: str, body: bytes = b"") -> bytes:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: {AS_ADMIN['Authorization']}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        seen = send(self.port, head.encode() + body)
        assert seen is not None
        assert seen.status < 300, seen
        return seen.body


async def _engine(request: web.Request) -> web.StreamResponse:
    """Accepts any request without looking at it."""
    await request.read()
    return web.json_response({"id": "x", "choices": [{"text": "ok"}], "kv_transfer_params": PARAMS})


async def _stand(
    started: "Future[tuple[Standing, asyncio.AbstractEventLoop, asyncio.Event]]",
) -> None:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{tail:.*}", _engine)
    over = asyncio.Event()
    async with listening(app) as p, listening(app) as d:
        members = (instance(Role.PREFILL, p), instance(Role.DECODE, d))
        options = changed(RouterOptions(members[:1], members[1:]), {})
        async with serving(options, RecordedReleases(), registrar=Registrar(b"s" * 32)) as port:
            started.set_result((Standing(port, members), asyncio.get_running_loop(), over))
            await over.wait()


@pytest.fixture(scope="module")
def standing() -> Iterator[Standing]:
    started: Future[tuple[Standing, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    thread = threading.Thread(target=lambda: uvloop.run(_stand(started)))
    thread.start()
    made, loop, over = started.result(DEADLINE_S)
    yield made
    loop.call_soon_threadsafe(over.set)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def answered(standing: Standing, fuzzed: Fuzzed) -> int:
    seen = send(standing.port, fuzzed.data, fuzzed.method)
    assert seen is not None
    check(seen, fuzzed.method)
    standing.assert_serves()
    return seen.status


@MANY
@given(framed(st.just("POST"), st.sampled_from(GENERATING), bodies))
def test_generations_of_any_body(standing: Standing, fuzzed: Fuzzed) -> None:
    answered(standing, fuzzed)


@MANY
@given(any_request)
def test_any_method_path_headers_and_body(standing: Standing, fuzzed: Fuzzed) -> None:
    answered(standing, fuzzed)


named = st.tuples(
    st.sampled_from(['"prefill"', '"decode"', '"both"', "5", "null"]),
    st.one_of(
        st.text(max_size=30).map(json.dumps),
        st.sampled_from(
            ["http://", "https://", "", "http://[", "http://[::1]:", "http://u:p@", "ftp://"]
        ).flatmap(
            lambda start: st.text("abc0123456789.:/?#@[]%é \\", max_size=20).map(
                lambda end: json.dumps(start + end)
            )
        ),
        st.sampled_from(
            ['"http://127.0.0.1:1"', '"http://localhost:65535/"', '"https://[::1]:9"', "5"]
        ),
    ),
).map(lambda pair: f'{{"role":{pair[0]},"url":{pair[1]}}}'.encode())
statements = values.map(lambda value: f'{{"statement":{value}}}'.encode("latin-1"))


@MANY
@given(
    framed(
        st.sampled_from(["GET", "POST", "DELETE", "PUT"]),
        st.sampled_from(ADMIN),
        st.one_of(named, named, statements, bodies),
    )
)
def test_the_admin_api_with_any_body(standing: Standing, fuzzed: Fuzzed) -> None:
    """The instances that a fuzzed request adds do not exist; they cost a good request no more than
    another try.
    """
    answered(standing, fuzzed)
    ours = {(member.role.value, member.url) for member in standing.members}
    found = {
        (each["role"], each["url"])
        for each in json.loads(standing.admin("GET", "/admin/instances"))["instances"]
    }
    for role, url in found - ours:
        standing.admin(
            "DELETE", "/admin/instances", json.dumps({"role": role, "url": url}).encode()
        )
    assert ours <= found


@MANY
@given(st.one_of(soups, wrong_chunks))
def test_bytes_that_are_no_request(standing: Standing, data: bytes) -> None:
    seen = send(standing.port, data, is_whole=False)
    if seen is not None:
        check(seen)
    standing.assert_serves()


KINDS = {
    b'{"prompt":"x"}': 200,
    b"{": 400,
    b"[" * 100_000: 400,
    b'{"prompt":NaN}': 400,
    b'{"conversation_id":[]}': 400,
    b"\xff": 400,
}


@pytest.mark.parametrize(("body", "status"), list(KINDS.items()), ids=lambda each: str(each)[:20])
def test_good_and_bad_are_told_apart(standing: Standing, body: bytes, status: int) -> None:
    """If the router gave the same answer to every request, the tests above would detect nothing."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert answered(standing, Fuzzed("POST", head + body)) == status


@pytest.mark.parametrize(
    "seen",
    [
        Seen(500, "application/json", b'{"error":{"message":"a bug","type":"x"}}'),
        Seen(400, "text/plain", b'{"error":{"message":"no","type":"x"}}'),
        Seen(400, "application/json", b'{"detail":"no"}'),
        Seen(400, "application/json", b'{"error":{"message":"","type":"x"}}'),
    ],
)
def test_an_answer_that_is_not_as_it_should_be_is_seen(seen: Seen) -> None:
    with pytest.raises((AssertionError, KeyError)):
        check(seen)
