"""Tests the access log: one line per request, with the ids by which an operator joins logs."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from tests.router.stubs import (
    AS_ADMIN,
    PARAMS,
    Behaviour,
    Stage,
    answers,
    completes,
    drops_connection,
    prefills,
    stage,
    streams,
)

from kvferry.logs import TextFormatter
from kvferry.router.access_log import AnswerFacts, phase_times
from kvferry.router.fleet.instances import Instance
from kvferry.router.timeline import RequestEvent, Timeline

PROMPT, ANSWER, KEY = "the prompt text", "the answer text", "sk-client-key"
PREFILLED = json.dumps(
    {"id": "cmpl-p1", "kv_transfer_params": PARAMS, "usage": {"prompt_tokens": 7}}
)
WHOLE = json.dumps(
    {
        "id": "cmpl-d1",
        "choices": [{"index": 0, "text": ANSWER}],
        "usage": {"prompt_tokens": 8, "completion_tokens": 3},
    }
)
TIMES = ("queue_s", "prefill_s", "handover_s", "first_token_s", "total_s")


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"id": "cmpl-d1", **fields}).encode() + b"\n\n"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    caplog.set_level(logging.DEBUG, logger="kvferry")
    return lambda: [vars(r) for r in caplog.records if r.name == "kvferry.router.access"]


Lines = Callable[[], list[dict[str, Any]]]


def play(scene: Callable[[Stage], Awaitable[None]], *engines: Any, **settings: Any) -> None:
    async def run() -> None:
        async with stage(*engines, **settings) as s:
            await scene(s)

    uvloop.run(run())


SECRET = "what-the-client-asked"
ECHO = {"message": f"cannot serve {SECRET!r}", "type": "PickyError", "param": None, "code": 422}
ECHO_EVENT = b"data: %b\n\n" % json.dumps({"error": ECHO}).encode()
TOKEN_EVENT = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
CUT_OFF = answers(200, f'["{SECRET}')
TWO = [SECRET, "b"]


def says(status: int, **changed: Any) -> Behaviour:
    return answers(status, json.dumps({"error": ECHO | changed}))


@pytest.mark.parametrize(
    ("p", "d", "more", "logged"),
    [
        (says(400), completes, {}, "answered 400: type=PickyError code=422"),
        (prefills, says(400), {}, "answered 400: type=PickyError code=422"),
        (says(400), completes, {"prompt": TWO}, "answered 400: type=PickyError code=422"),
        (says(500), completes, {}, "status 500, type=PickyError code=422"),
        (prefills, says(500), {}, "status 500, type=PickyError code=422"),
        (prefills, says(500), {"prompt": TWO}, "status 500, type=PickyError code=422"),
        (prefills, says(500, type=SECRET + " ", code=SECRET + "!"), {}, "status 500, bytes="),
        (prefills, says(404), {}, "does not have the model: type=PickyError code=422"),
        (prefills, says(503), {}, "accepts no requests now"),
        (prefills, CUT_OFF, {}, "and a body of 23 bytes where a JSON object was expected"),
        (CUT_OFF, completes, {}, "and a body of 23 bytes where a JSON object was expected"),
        (
            prefills,
            streams([ECHO_EVENT]),
            {"stream": True},
            "begins with an error, type=PickyError",
        ),
        (
            prefills,
            streams([TOKEN_EVENT, ECHO_EVENT]),
            {"stream": True, "prompt": TWO},
            "an event is an error, type=PickyError code=422",
        ),
        (
            prefills,
            streams([ECHO_EVENT.replace(b"422", b"503")]),
            {"stream": True},
            "accepts no requests now",
        ),
    ],
)
def test_an_error_that_repeats_the_prompt_reaches_the_client_and_no_log(
    p: Behaviour,
    d: Behaviour,
    more: dict[str, Any],
    logged: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The control: logs have the status, and the error's type, code and length."""
    caplog.set_level(logging.DEBUG, logger="kvferry")

    async def scene(s: Stage) -> None:
        _, _, body = await s.post({"prompt": SECRET} | more, X_Request_Id="mine")
        assert SECRET in body.decode()
        url = f"{s.url}/dashboard/requests/mine"
        async with s.session.get(url, headers=AS_ADMIN) as page:
            assert (page.status, SECRET in await page.text()) == (200, False)

    play(scene, p, d, access_log=True, max_retries=1)
    formatter = TextFormatter()
    text = "\n".join(formatter.format(record) for record in caplog.records)
    assert SECRET not in text
    assert "outcome=" in text
    assert logged in text


def test_a_line_has_ids_instances_tokens_bytes_and_times(lines: Lines) -> None:
    body = {"model": "tiny", "prompt": PROMPT}
    urls: dict[str, int] = {}

    async def scene(s: Stage) -> None:
        urls.update(prefill=s.p.port, decode=s.d.port)
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        headers = {"X_Request_Id": "mine-1", "traceparent": trace, "Authorization": KEY}
        assert (await s.post(body, **headers))[0] == 200

    play(scene, answers(200, PREFILLED), answers(200, WHOLE), access_log=True)
    (line,) = lines()
    expected = {
        "request": "mine-1",
        "prefill_request": ["cmpl-p1"],
        "decode_request": ["cmpl-d1"],
        "trace": "0af7651916cd43dd8448eb211c80319c",
        "route": "/v1/completions",
        "model": "tiny",
        "status": 200,
        "outcome": "answered",
        "prefill": f"http://127.0.0.1:{urls['prefill']}",
        "decode": f"http://127.0.0.1:{urls['decode']}",
        "retries": 0,
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "is_streamed": False,
        "num_prompts": 1,
        "received_bytes": len(json.dumps(body)),
    }
    assert {name: line[name] for name in expected} == expected
    assert line["sent_bytes"] > len(WHOLE)
    assert all(isinstance(line[name], float) for name in TIMES)
    shown = "".join(map(str, line.values()))
    assert not any(secret in shown for secret in (PROMPT, ANSWER, KEY, "ticket-1"))


def test_a_stream_is_read_for_its_id_and_usage_and_reaches_the_client_unchanged(
    lines: Lines,
) -> None:
    text = event(choices=[{"text": 'data: {"id":"forged","usage":{"prompt_tokens":99}}\n'}])
    usage = event(choices=[], usage={"prompt_tokens": 8, "completion_tokens": 2})
    sent = [text, text, usage, b"data: [DONE]\n\n"]
    received: list[bytes] = []

    async def scene(s: Stage) -> None:
        received.append((await s.post({"prompt": PROMPT, "stream": True}))[2])

    play(scene, answers(200, PREFILLED), streams(sent), access_log=True)
    (line,) = lines()
    assert received == [b"".join(sent)]
    assert line["decode_request"] == ["cmpl-d1"]
    assert (line["prompt_tokens"], line["completion_tokens"]) == (7, 2)


def test_without_usage_the_prompt_has_the_tokens_that_p_counted(lines: Lines) -> None:
    async def scene(s: Stage) -> None:
        await s.post({"prompt": PROMPT, "stream": True})

    stream = streams([event(choices=[]), b"data: [DONE]\n\n"])
    play(scene, answers(200, PREFILLED), stream, access_log=True)
    (line,) = lines()
    assert (line["prompt_tokens"], line["completion_tokens"]) == (7, None)


def test_several_prompts_are_one_line_with_the_sums(lines: Lines) -> None:
    async def scene(s: Stage) -> None:
        assert (await s.post({"prompt": ["a", "b", "c"]}))[0] == 200

    play(scene, answers(200, PREFILLED), answers(200, WHOLE), access_log=True)
    (line,) = lines()
    assert (line["num_prompts"], line["prompt_tokens"], line["completion_tokens"]) == (3, 21, 9)


def test_a_broken_stream_has_a_line_with_its_error(lines: Lines) -> None:
    async def scene(s: Stage) -> None:
        await s.post({"prompt": PROMPT, "stream": True})

    play(scene, answers(200, PREFILLED), streams([event(choices=[])], "drop"), access_log=True)
    (line,) = lines()
    assert (line["outcome"], line["decode_request"]) == ("aborted", ["cmpl-d1"])
    assert "did not complete its answer" in line["error"]


def test_a_bug_of_the_router_is_not_logged_as_an_error_of_an_engine(
    lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(decoder: Instance, leg_id: str) -> str:
        raise AssertionError("a bug")

    async def scene(s: Stage) -> None:
        assert (await s.post({"prompt": PROMPT}))[0] == 500

    play(scene, prefills, says(500), access_log=True, ask_failure=fails)
    (line,) = lines()
    assert "AssertionError: a bug" in caplog.text
    caplog.clear()  # elsewhere in this folder, a logged error is a failed test
    assert (line["outcome"], line["status"]) == ("failed", 500)
    assert line["error"] == "the router failed to serve this request; its log says why"


def test_a_failed_request_has_a_line_with_its_retries(lines: Lines) -> None:
    async def scene(s: Stage) -> None:
        assert (await s.post({"prompt": PROMPT}))[0] == 502

    play(scene, [drops_connection] * 2, completes, access_log=True, max_retries=1)
    (line,) = lines()
    assert (line["outcome"], line["status"], line["retries"]) == ("failed", 502, 2)
    assert line["decode"] == ""
    assert line["handover_s"] is None


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "level"),
    [
        ("POST", "/v1/completions", b"{", 400, logging.INFO),
        ("GET", "/nowhere?key=sk-client-key", b"", 404, logging.INFO),
        ("GET", "/admin/instances", b"", 401, logging.INFO),
        ("GET", "/health", b"", 200, logging.DEBUG),
    ],
)
def test_pages_and_refusals_have_a_line(
    lines: Lines, method: str, path: str, body: bytes, status: int, level: int
) -> None:
    async def scene(s: Stage) -> None:
        headers = {"X-Request-Id": "mine"}
        async with s.session.request(method, s.url + path, data=body, headers=headers) as answer:
            assert answer.status == status

    play(scene, prefills, completes, access_log=True)
    (line,) = lines()
    shown = (line["request"], line["method"], line["route"], line["status"], line["levelno"])
    assert shown == ("mine", method, path.partition("?")[0], status, level)


def test_without_the_setting_there_is_no_line(lines: Lines) -> None:
    async def scene(s: Stage) -> None:
        await s.post({"prompt": PROMPT})
        async with s.session.get(f"{s.url}/metrics", headers=AS_ADMIN):
            pass

    play(scene, prefills, completes)
    assert lines() == []


@pytest.mark.parametrize("forged", ["a\nINFO kvferry: b", "a\r\x1b[2K", "m status=200", "\u2028"])
def test_a_client_cannot_forge_a_line(
    lines: Lines, caplog: pytest.LogCaptureFixture, forged: str
) -> None:
    async def scene(s: Stage) -> None:
        await s.post({"prompt": PROMPT, "model": forged})
        reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rsplit(":", 1)[1]))
        writer.write(b"GET /a\x1b[2K\xff HTTP/1.1\r\nHost: x\r\nX-Request-Id: a b\tc\r\n")
        writer.write(b"Connection: close\r\n\r\n")
        await reader.read()
        writer.close()

    play(scene, prefills, completes, access_log=True)
    formatter = TextFormatter()
    written = [formatter.format(r) for r in caplog.records if r.name == "kvferry.router.access"]
    assert len(written) == 2
    assert all(line.isprintable() for line in written)
    assert lines()[0]["model"] == forged
    assert " status=200 " in written[0].replace(json.dumps(forged), "")


def test_phases_that_did_not_happen_have_no_time() -> None:
    timeline = Timeline("a", "/v1/completions", 10.0)
    timeline.mark(RequestEvent.ADMITTED, 10.5)
    timeline.mark(RequestEvent.PREFILL_BEGAN, 10.5)
    timeline.ended = 12.0
    assert phase_times(timeline) == {
        "queue_s": 0.5,
        "prefill_s": None,
        "handover_s": None,
        "first_token_s": None,
        "total_s": 2.0,
    }
    timeline.mark(RequestEvent.PREFILL_ENDED, 11.0)
    timeline.mark(RequestEvent.FIRST_TOKEN, 11.25)
    times = phase_times(timeline)
    assert (times["prefill_s"], times["handover_s"], times["first_token_s"]) == (0.5, 0.25, 1.25)


def test_a_first_token_of_p_counts_as_part_of_the_answer() -> None:
    facts = AnswerFacts()
    facts.note_prefill("r", b'{"id": "p", "usage": {"prompt_tokens": 7, "completion_tokens": 1}}')
    facts.note_first_token()
    assert (facts.prompt_tokens, facts.completion_tokens) == (7, 1)
    facts.note_decode("r", b'{"id": "d"}')
    assert (facts.prompt_tokens, facts.completion_tokens) == (7, None)
    facts.note_decode("r", b'{"id": "d", "usage": {"prompt_tokens": 8, "completion_tokens": 3}}')
    assert (facts.prompt_tokens, facts.completion_tokens) == (7, 4)
