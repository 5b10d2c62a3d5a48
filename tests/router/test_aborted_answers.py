"""Tests answers that vLLM ends before their first token, as it does after SIGTERM and while it is
paused. The router takes such an answer for a refusal: the client gets another engine's answer, or a
clear error.
"""

import json
from typing import Any

import pytest
import uvloop
from aiohttp import web
from tests.router.stubs import (
    DEADLINE_S,
    PARAMS,
    Behaviour,
    answers,
    completes,
    prefills,
    stage,
    streams,
)
from tests.router.test_proxy import ONE, STREAMED, message

from kvferry.router.fleet import health

ABORTED = {"index": 0, "text": "", "finish_reason": "abort", "token_ids": []}
GOOD = [b'data: {"choices":[{"text":"hello","finish_reason":null}]}\n\n', b"data: [DONE]\n\n"]


async def aborts(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    answer = {"id": "a", "choices": [ABORTED], "kv_transfer_params": None}
    return web.json_response(answer)


ABORTS_STREAM = streams(
    [b"data: " + json.dumps({"choices": [ABORTED]}).encode() + b"\n\n", b"data: [DONE]\n\n"]
)


@pytest.mark.parametrize("request_body", [ONE, STREAMED], ids=["whole", "stream"])
def test_a_request_that_d_aborts_is_answered_by_another(request_body: dict[str, Any]) -> None:
    is_whole = request_body is ONE
    bad: Behaviour = aborts if is_whole else ABORTS_STREAM
    good: Behaviour = completes if is_whole else streams(GOOD)

    async def scene() -> None:
        async with stage(prefills, [bad, good], max_retries=0) as s:
            for _ in range(4):
                status, _, body = await s.post(request_body)
                assert (status, b"hello" in body, b"abort" in body) == (200, True, False)
            assert s.decoders[0].calls
            assert await s.metric("kvferry:router_instance_failures_total") == 0

    uvloop.run(scene())


def test_a_prompt_that_p_aborts_is_computed_by_another_p() -> None:
    async def scene() -> None:
        async with stage([aborts, prefills], completes) as s:
            for _ in range(4):
                assert (await s.post(ONE))[0] == 200
            assert s.prefillers[0].calls
            assert all("kv_transfer_params" in call.body for call in s.d.calls)

    uvloop.run(scene())


@pytest.mark.parametrize("request_body", [ONE, STREAMED], ids=["whole", "stream"])
def test_if_every_d_aborts_the_client_gets_503_with_retry_after(
    request_body: dict[str, Any],
) -> None:
    bad: Behaviour = aborts if request_body is ONE else ABORTS_STREAM

    async def scene() -> None:
        async with stage(prefills, [bad, bad]) as s:
            status, headers, body = await s.post(request_body)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert "is stopping: it aborted the request" in message(body)
            assert set(s.releases.tickets) == {"ticket-1"}

    uvloop.run(scene())


# As vLLM 0.33 words it, as the body of a 503 and as the first event of a stream.
PAUSED = {
    "message": "Generation is paused. Please retry after it resumes.",
    "type": "ServiceUnavailableError",
    "param": None,
    "code": 503,
}


def is_paused(is_streamed: bool, **changed: Any) -> Behaviour:
    error = json.dumps({"error": PAUSED | changed})
    if not is_streamed:
        return answers(503, error)
    return streams([b"data: %b\n\n" % error.encode(), b"data: [DONE]\n\n"])


@pytest.mark.parametrize("is_streamed", [False, True])
def test_another_pair_serves_a_request_that_a_paused_d_refuses(is_streamed: bool) -> None:
    """A paused vLLM releases P's blocks, so the next D gets another ticket. No retry is counted."""
    good: Behaviour = streams(GOOD) if is_streamed else completes

    async def scene() -> None:
        async with stage(prefills, [is_paused(is_streamed), good], max_retries=0) as s:
            for _ in range(2):
                status, _, body = await s.post(STREAMED if is_streamed else ONE)
                assert (status, b"hello" in body, b"paused" in body) == (200, True, False)
            assert len(s.decoders[0].calls) == 1
            assert len(s.p.calls) == 3
            assert await s.metric("kvferry:router_instance_failures_total") == 0

    uvloop.run(scene())


def test_a_prompt_that_a_paused_p_refuses_is_computed_by_another_p() -> None:
    async def scene() -> None:
        async with stage([is_paused(False), prefills], completes, max_retries=0) as s:
            for _ in range(2):
                assert (await s.post(ONE))[0] == 200
            assert len(s.prefillers[0].calls) == 1
            assert all("ticket" in call.body["kv_transfer_params"] for call in s.d.calls)

    uvloop.run(scene())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_if_every_d_is_paused_the_client_is_asked_to_retry(is_streamed: bool) -> None:
    async def scene() -> None:
        async with stage(prefills, is_paused(is_streamed), max_retries=0) as s:
            status, headers, body = await s.post(STREAMED if is_streamed else ONE)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert "Please retry after it resumes" in message(body)

    uvloop.run(scene())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_each_paused_d_costs_one_prefill_at_most_and_none_in_its_cooldown(
    is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first request all Ds are in their cooldown, and no prefill leg is repeated."""
    monkeypatch.setattr(health, "COOLDOWN_S", DEADLINE_S)

    async def scene() -> None:
        paused = is_paused(is_streamed)
        async with stage(prefills, [paused] * 3, max_retries=2) as s:
            num_prefills = []
            for _ in range(2):
                assert (await s.post(STREAMED if is_streamed else ONE))[0] == 503
                num_prefills.append(len(s.p.calls))
            assert num_prefills == [3, 4]

    uvloop.run(scene())


def test_each_p_is_asked_once_if_all_are_paused() -> None:
    async def scene() -> None:
        async with stage([is_paused(False)] * 2, completes, max_retries=2) as s:
            status, headers, _ = await s.post(ONE)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert [len(p.calls) for p in s.prefillers] == [1, 1]

    uvloop.run(scene())


def test_an_error_that_cannot_be_retried_is_no_refusal() -> None:
    """The control: the same error with another code counts as a failure of D."""

    async def scene() -> None:
        fails = is_paused(True, code=500, type="InternalServerError")
        async with stage(prefills, fails, max_retries=0) as s:
            status, _, body = await s.post(STREAMED)
            assert (status, b"InternalServerError" in body) == (200, True)
            assert await s.metric("kvferry:router_instance_failures_total") == 1

    uvloop.run(scene())


def test_a_full_d_leaves_ps_blocks_to_the_next_d() -> None:
    """The control: another 503 costs no second prefill leg."""

    async def scene() -> None:
        full = answers(503, json.dumps({"error": PAUSED | {"message": "the queue is full"}}))
        async with stage(prefills, [full, completes]) as s:
            for _ in range(2):
                assert (await s.post(ONE))[0] == 200
            assert (len(s.decoders[0].calls), len(s.p.calls)) == (1, 2)

    uvloop.run(scene())


def test_an_answer_whose_text_contains_an_abort_is_passed_on() -> None:
    text = '{"finish_reason": "abort"}'

    async def speaks(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"choices": [{"text": text, "finish_reason": "stop"}]})

    async def scene() -> None:
        async with stage(prefills, speaks) as s:
            status, _, body = await s.post(ONE)
            assert (status, json.loads(body)["choices"][0]["text"]) == (200, text)

    uvloop.run(scene())


EMPTY_RESPONSE = {"id": "r", "status": "completed", "output": [], "usage": {"output_tokens": 0}}
EMPTY_MESSAGE = {"type": "message", "content": [], "usage": {"input_tokens": 3, "output_tokens": 0}}
OF_OTHER_APIS = [
    ("/v1/responses", {"input": "hi"}, EMPTY_RESPONSE),
    # One instance serves this one alone.
    ("/v1/responses", {"input": "hi", "background": True}, EMPTY_RESPONSE),
    ("/v1/messages", {"max_tokens": 9, "messages": []}, EMPTY_MESSAGE),
]


def event(name: str, **fields: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


STARTS = {
    "/v1/responses": [
        event("response.created", response={"usage": None}),
        event("response.completed", response=EMPTY_RESPONSE),
    ],
    "/v1/messages": [
        event("message_start", message=EMPTY_MESSAGE),
        event("message_delta", delta={"stop_reason": None}, usage={"output_tokens": 0}),
    ],
}


@pytest.mark.parametrize(("path", "body", "empty"), OF_OTHER_APIS)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_answers_of_other_apis_without_a_token_are_refusals(
    path: str, body: dict[str, Any], empty: dict[str, Any], is_streamed: bool
) -> None:
    async def ends(request: web.Request, sent: dict[str, Any]) -> web.StreamResponse:
        if is_streamed:
            return await streams(STARTS[path])(request, sent)
        return web.json_response(empty)

    async def scene() -> None:
        async with stage(prefills, [ends, ends]) as s:
            status, _, text = await s.post({**body, "stream": is_streamed}, path)
            assert (status, "is stopping: it aborted the request" in text.decode()) == (503, True)
            assert len(s.decoders[0].calls) + len(s.decoders[1].calls) >= 2

    uvloop.run(scene())


def test_a_response_that_repeats_the_clients_metadata_is_passed_on() -> None:
    async def echoes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        used = {"metadata": body["metadata"], "usage": {"output_tokens": 1}}
        params = {"kv_transfer_params": PARAMS} if "kv_transfer_params" in body else {}
        return web.json_response({**used, **params})

    async def scene() -> None:
        async with stage(echoes, echoes) as s:
            said = {"finish_reason": "abort", "output_tokens": 0, "usage": {"output_tokens": 0}}
            body = {"input": "hi", "metadata": said}
            assert (await s.post(body, "/v1/responses"))[0] == 200
            assert (len(s.p.calls), len(s.d.calls)) == (1, 1)
            assert "ticket" in s.d.calls[0].body["kv_transfer_params"]

    uvloop.run(scene())
