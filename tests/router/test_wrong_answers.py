"""Tests answers of another kind than the one that the router asked for: the client gets an error
that names the instance and what it sent, P's blocks are released, and the next request is served.
"""

from typing import Any

import pytest
import uvloop
from aiohttp import web
from tests.router.stubs import Behaviour, Stage, answers, completes, hangs, prefills, stage, streams
from tests.router.test_concurrent_legs import KEY, pushes
from tests.router.test_first_token import continues, samples
from tests.router.test_proxy import message
from tests.router.test_several_prompts import echoes, until_idle
from tests.sampling import sampled

EVENT = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
ONE: dict[str, Any] = {"prompt": "a"}
SEVERAL: dict[str, Any] = {"prompt": ["a", "b", "c"]}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
REQUESTS = {"one": ONE, "several": SEVERAL, "chat": CHAT}


async def without_type(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    request.transport.close()
    return web.Response()


NO_JSON: dict[str, tuple[Behaviour, str]] = {
    "stream": (streams([EVENT, DONE]), "'text/event-stream; charset=utf-8' where JSON"),
    "stream in capitals": (
        streams([EVENT, DONE], content_type="Text/Event-Stream"),
        "'Text/Event-Stream' where JSON",
    ),
    "endless stream": (streams([EVENT], then="hang"), "where JSON was expected"),
    "page": (answers(200, "<html>", "text/html"), "'text/html' and a body of 6 bytes where"),
    "no type": (without_type, "none and an empty body where a JSON object"),
    "empty": (answers(200, ""), "'application/json' and an empty body where a JSON object"),
    "list": (answers(200, "[]"), "address is that of an engine: the body begins with b'[]'"),
    "null": (answers(200, "null"), "a body of 4 bytes where a JSON object was expected"),
    "cut off": (answers(200, '{"choices":[{'), "where a JSON object was expected"),
}
NO_STREAM: dict[str, tuple[Behaviour, str]] = {
    "json": (completes, "'application/json; charset=utf-8' where an event stream was expected"),
    "page": (answers(200, "<html>", "text/html"), "'text/html' where an event stream"),
    "no type": (without_type, "none where an event stream"),
    "empty stream": (streams([]), "its event stream ended before the first event"),
    "comments": (streams([b": hello\n\n"]), "its event stream ended before the first event"),
}


def path_of(asked: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in asked else "/v1/completions"


def good(asked: dict[str, Any]) -> Behaviour:
    return echoes if asked is SEVERAL else completes


async def check_refused(s: Stage, asked: dict[str, Any], role: str, reason: str) -> None:
    status, _, body = await s.post(asked, path_of(asked))
    engine = s.p if role == "prefill" else s.d
    assert status == 502
    assert f"{role} instance http://127.0.0.1:{engine.port} failed: " in message(body)
    assert reason in message(body)
    await until_idle(s)


@pytest.mark.parametrize(
    ("name", "kind", "mode"),
    sampled(list(REQUESTS), list(NO_JSON), ["pull", "push", "first token"]),
)
def test_a_d_that_answers_something_else_than_json(name: str, kind: str, mode: str) -> None:
    async def scene() -> None:
        asked = REQUESTS[name]
        behaviour, reason = NO_JSON[kind]
        is_early = mode == "first token" and asked is not SEVERAL
        async with stage(
            samples if is_early else pushes if mode == "push" else prefills,
            good(asked),
            push_key=KEY if mode == "push" else None,
            first_token_from_prefill=mode == "first token",
        ) as s:
            if mode == "push":  # the first answer of P shows that P pushes
                assert (await s.post(asked, path_of(asked)))[0] == 200
            s.d.behaviour = behaviour
            await check_refused(s, asked, "decode", reason)
            assert s.releases.push_tickets if mode == "push" else s.releases.tickets
            s.d.behaviour = continues if is_early else good(asked)
            assert (await s.post(asked, path_of(asked)))[0] == 200

    uvloop.run(scene())


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("kind", NO_STREAM)
def test_a_d_that_answers_something_else_than_a_stream(name: str, kind: str) -> None:
    async def scene() -> None:
        asked = REQUESTS[name]
        behaviour, reason = NO_STREAM[kind]
        async with stage(prefills, behaviour) as s:
            await check_refused(s, asked | {"stream": True}, "decode", reason)
            assert set(s.releases.tickets) == {"ticket-1"}
            s.d.behaviour = good(asked)
            assert (await s.post(asked, path_of(asked)))[0] == 200

    uvloop.run(scene())


@pytest.mark.parametrize(
    ("name", "kind", "is_push"), sampled(list(REQUESTS), list(NO_JSON), [False, True])
)
def test_a_p_that_answers_something_else_than_json(name: str, kind: str, is_push: bool) -> None:
    async def scene() -> None:
        asked = REQUESTS[name]
        behaviour, reason = NO_JSON[kind]
        async with stage(pushes if is_push else prefills, good(asked), push_key=KEY) as s:
            s.d.mode, s.p.side_channel = "push", "127.0.0.1:5600"
            if is_push:
                assert (await s.post(asked, path_of(asked)))[0] == 200
                s.d.behaviour = hangs  # it waits for P's blocks
            good_p, s.p.behaviour = s.p.behaviour, behaviour
            await check_refused(s, asked, "prefill", reason)
            s.p.behaviour, s.d.behaviour = good_p, good(asked)
            assert (await s.post(asked, path_of(asked)))[0] == 200

    uvloop.run(scene())
