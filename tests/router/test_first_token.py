"""Tests answers that begin with P's token: which requests may, and that the client gets one answer
in which no token is missing, doubled or replaced, whatever fails after the first token.
"""

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest
import uvloop
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.router.stubs import (
    PARAMS,
    Behaviour,
    Stage,
    answers,
    drops_connection,
    prefills,
    stage,
    streams,
)

from kvferry.errors import RemoteProtocolError
from kvferry.router.serving.client_request import ClientRequest, Handover, read_client_request
from kvferry.router.serving.event_splitter import EventSplitter
from kvferry.router.serving.first_token import FirstToken, may_continue, read_first_token

MODEL_LEN = 100
SEED = 4711
PROMPT_IDS = [5, 6, 7]
REST = [*PROMPT_IDS, 11]
"""The prompt of the request for the tokens after P's."""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "hi"}
BOTH = pytest.mark.parametrize("kind", [COMPLETION, CHAT], ids=["completion", "chat"])


def client(**fields: Any) -> ClientRequest:
    read = read_client_request(json.dumps(fields).encode())
    assert isinstance(read, ClientRequest)
    return read


def p_answer(
    is_chat: bool, text: str = "Once", token: int = 11, reason: str = "length", **params: Any
) -> dict[str, Any]:
    """The answer of a P that was asked for token ids."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "token_ids": [token]}
    answer: dict[str, Any] = {"id": "p-1", "created": 17, "model": "m", "choices": [choice]}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        answer["prompt_token_ids"] = PROMPT_IDS
    else:
        choice |= {"text": text, "prompt_token_ids": PROMPT_IDS}
    answer["usage"] = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    note = {"first_token": {"max_model_len": MODEL_LEN}}
    return answer | {"kv_transfer_params": PARAMS | note | params}


def handover(answer: dict[str, Any]) -> Handover:
    params = msgspec.json.encode(answer["kv_transfer_params"])
    return Handover(msgspec.Raw(params), "ticket-1", None, answer=json.dumps(answer).encode())


def first(answer: dict[str, Any] | None = None, **fields: Any) -> FirstToken | None:
    made = handover(answer or p_answer("messages" in fields))
    return read_first_token(client(**fields), made, SEED)


def continued(found: FirstToken | None) -> dict[str, Any]:
    assert found is not None
    assert found.continued is not None
    return {name: json.loads(bytes(text)) for name, text in found.continued.fields.items()}


def events(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream, without the end."""
    parts = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part.strip()]
    return [json.loads(part) for part in parts if part != b"[DONE]"]


# -- which requests --

HARMLESS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "logit_bias": {"5": 1}},
    {"temperature": 0, "seed": 7},
    {"stop": [], "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "min_tokens": 0},
    {"stop_token_ids": [4], "ignore_eos": True, "repetition_penalty": 1.3},
    {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True},
    {"max_tokens": 1},
    {"response_format": {"type": "text"}, "tool_choice": "none", "tools": None},
]
HARMFUL: list[dict[str, Any]] = [
    {"stop": ["a"]},
    {"stop": "a"},
    {"n": 2},
    {"logprobs": 0},
    {"prompt_logprobs": 0},
    {"echo": True},
    {"presence_penalty": 0.1},
    {"frequency_penalty": -1},
    {"min_tokens": 1},
    {"bad_words": ["a"]},
    {"use_beam_search": True},
    {"return_token_ids": 1},
    {"return_token_ids": "true"},
    {"seed": 7},
    {"seed": 7, "temperature": 0.1},
    {"max_tokens": 0},
    {"max_tokens": "5"},
    {"max_tokens": 1.5},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}},
    {"tools": [{}], "tool_choice": "auto"},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": {"include_usage": True}},
    {"truncate_prompt_tokens": 4},
    {"suffix": "x"},
    {"spaces_between_special_tokens": False},
    {"a_field_of_tomorrow": None},
    {"vllm_xargs": {"x": 1}},
]


@BOTH
@pytest.mark.parametrize("fields", HARMLESS, ids=str)
def test_an_answer_may_begin_with_ps_token_if_all_fields_act_on_each_token_alone(
    kind: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert may_continue(client(**kind, **fields))


@BOTH
@pytest.mark.parametrize("fields", HARMFUL, ids=str)
def test_a_request_with_any_other_field_takes_the_usual_path(
    kind: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert not may_continue(client(**kind, **fields))
    assert first(**kind, **fields) is None


def test_a_request_with_a_prompt_and_messages_takes_the_usual_path() -> None:
    # The route decides which of the two an engine reads.
    assert not may_continue(client(**CHAT, **COMPLETION))


def test_false_logprobs_are_none_in_a_chat_and_zero_in_a_completion() -> None:
    assert may_continue(client(**CHAT, logprobs=False))
    assert not may_continue(client(**COMPLETION, logprobs=False))


# -- P's answer --


@BOTH
def test_d_gets_the_tokens_of_the_prompt_and_ps_token(kind: dict[str, Any]) -> None:
    asked = continued(first(**kind, max_tokens=9, temperature=0, stop_token_ids=[4], stream=True))
    assert asked == {
        "prompt": [5, 6, 7, 11],
        "max_tokens": 8,
        "temperature": 0,
        "stop_token_ids": [4],
        "stream": True,
    }


@BOTH
@pytest.mark.parametrize(
    ("fields", "seed"),
    [
        ({}, SEED),
        ({"temperature": 0.7}, SEED),
        ({"temperature": 0.7, "seed": None}, SEED),
        ({"temperature": 0}, None),
        ({"temperature": 0, "seed": 7}, 7),
    ],
    ids=str,
)
def test_d_draws_by_a_seed_of_the_router_if_the_client_named_none(
    kind: dict[str, Any], fields: dict[str, Any], seed: int | None
) -> None:
    assert continued(first(**kind, **fields)).get("seed") == seed


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        (CHAT, MODEL_LEN - 3 - 1),
        (CHAT | {"max_tokens": None}, MODEL_LEN - 3 - 1),
        (CHAT | {"max_completion_tokens": 5, "max_tokens": 9}, 4),
        (CHAT | {"max_completion_tokens": None, "max_tokens": 9}, 8),
        (COMPLETION, 15),
        (COMPLETION | {"max_tokens": 97}, 96),
    ],
    ids=str,
)
def test_d_gets_one_token_less_than_the_limit(fields: dict[str, Any], max_tokens: int) -> None:
    assert continued(first(**fields))["max_tokens"] == max_tokens


@BOTH
def test_a_limit_beyond_the_models_length_takes_the_usual_path(kind: dict[str, Any]) -> None:
    assert first(**kind, max_tokens=98) is None


@BOTH
@pytest.mark.parametrize(
    "changes",
    [
        {"text": ""},
        {"text": "\ufffd"},
        {"text": "a\ufffd"},
        {"first_token": None},
        {"reason": "abort"},
    ],
    ids=str,
)
def test_a_token_that_cannot_begin_the_answer_is_dropped(
    kind: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert first(p_answer("messages" in kind, **changes), **kind) is None


@BOTH
def test_an_answer_without_token_ids_is_dropped(kind: dict[str, Any]) -> None:
    answer = p_answer("messages" in kind)
    for part in (answer, answer["choices"][0]):
        part.pop("prompt_token_ids", None)
    assert first(answer, **kind) is None
    answer = p_answer("messages" in kind)
    del answer["choices"][0]["token_ids"]
    assert first(answer, **kind) is None


@BOTH
@pytest.mark.parametrize(
    "ids", [["a"], [[5, 6, 7]], [5, -6, 7], [5.5, 6, 7], [2**31, 6, 7], [5, 6]]
)
def test_a_prompt_that_is_not_the_counted_token_ids_is_dropped(
    kind: dict[str, Any], ids: list[Any]
) -> None:
    answer = p_answer("messages" in kind)
    part = answer if "messages" in kind else answer["choices"][0]
    part["prompt_token_ids"] = ids
    assert first(answer, **kind) is None


@BOTH
@pytest.mark.parametrize("token", [-1, 2**31, 10**30])
def test_a_token_that_is_no_token_id_is_dropped(kind: dict[str, Any], token: int) -> None:
    assert first(p_answer("messages" in kind, token=token), **kind) is None


@BOTH
@pytest.mark.parametrize("model_len", [-(10**30), 0, 3])
def test_a_model_length_that_leaves_no_room_is_not_believed(
    kind: dict[str, Any], model_len: int
) -> None:
    note: dict[str, Any] = {"first_token": {"max_model_len": model_len}}
    assert first(p_answer("messages" in kind, **note), **kind) is None


ANY_VALUE: st.SearchStrategy[Any] = st.sampled_from(
    [None, 7, -1, "text", "\ufffd", [], [[]], {}, {"content": 7}]
)


@given(st.sampled_from([*p_answer(True), *p_answer(False)["choices"][0], "message"]), ANY_VALUE)
def test_a_malformed_answer_of_p_is_dropped_and_raises_nothing(key: str, value: Any) -> None:
    for is_chat in (True, False):
        answer = p_answer(is_chat)
        (answer if key in answer else answer["choices"][0])[key] = value
        found = first(answer, **(CHAT if is_chat else COMPLETION), stream=True)
        if found is not None:
            assert events(found.events())


def test_an_answer_of_p_that_is_no_json_is_dropped() -> None:
    note = msgspec.Raw(b'{"first_token":{"max_model_len":9}}')
    for text in (b"x", b"[]", b"{}", b'{"choices":[]}'):
        made = Handover(note, "t", None, answer=text)
        assert read_first_token(client(**CHAT), made, SEED) is None


# -- the client's answer --


def d_events(is_streamed: bool = True) -> list[dict[str, Any]]:
    """D's answer to the continued request: two more tokens."""
    head = {"id": "cmpl-d", "object": "text_completion", "created": 99, "model": "m"}
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    ends: dict[str, Any] = {"finish_reason": "stop", "stop_reason": 4}
    if not is_streamed:
        choice = {"index": 0, "text": " upon a", "token_ids": [12, 13]} | ends
        return [head | {"choices": [choice], "usage": usage, "kv_transfer_params": None}]
    going = {"index": 0, "text": " upon", "finish_reason": None, "token_ids": [12]}
    going["prompt_token_ids"] = [*PROMPT_IDS, 11]
    last = {"index": 0, "text": " a", "token_ids": [13]} | ends
    return [
        head | {"choices": [going]},
        head | {"choices": [last]},
        head | {"choices": [], "usage": usage},
    ]


def stream_of(sent: list[dict[str, Any]]) -> bytes:
    return (
        b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in sent)
        + b"data: [DONE]\n\n"
    )


@BOTH
@given(cut=st.integers(1, 200))
def test_the_events_of_p_and_d_form_one_stream_however_it_is_cut(
    kind: dict[str, Any], cut: int
) -> None:
    found = first(
        **kind, stream=True, stream_options={"include_usage": True}, return_token_ids=True
    )
    assert found is not None
    raw = stream_of(d_events())
    data, splitter = found.events(), EventSplitter()
    for start in range(0, len(raw), cut):
        data += b"".join(map(found.translate, splitter.feed(raw[start : start + cut])))
    assert splitter.finish() == []
    assert data.endswith(b"data: [DONE]\n\n")
    assert data.count(b"[DONE]") == 1
    sent = events(data)
    assert {(event["id"], event["created"], event["model"]) for event in sent} == {("p-1", 17, "m")}
    choices = [event["choices"][0] for event in sent[:-1]]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == [11, 12, 13]
    assert [choice["finish_reason"] for choice in choices[-3:]] == [None, None, "stop"]
    assert choices[-1]["stop_reason"] == 4
    assert sent[-1]["choices"] == []
    assert sent[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    if "messages" in kind:
        assert {event["object"] for event in sent} == {"chat.completion.chunk"}
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert sent[0]["prompt_token_ids"] == PROMPT_IDS
        assert [choice["delta"]["content"] for choice in choices[1:]] == ["Once", " upon", " a"]
    else:
        assert {event["object"] for event in sent} == {"text_completion"}
        assert [choice["text"] for choice in choices] == ["Once", " upon", " a"]
        assert [choice.get("prompt_token_ids") for choice in choices] == [PROMPT_IDS, None, None]


@BOTH
@pytest.mark.parametrize("shows_ids", [True, False])
def test_the_bodies_of_p_and_d_form_one_answer(kind: dict[str, Any], shows_ids: bool) -> None:
    asks: dict[str, Any] = {"return_token_ids": True} if shows_ids else {}
    found = first(**kind, **asks)
    assert found is not None
    body = json.loads(found.body(json.dumps(d_events(is_streamed=False)[0]).encode()))
    [choice] = body["choices"]
    assert (body["id"], body["created"], body["kv_transfer_params"]) == ("p-1", 17, None)
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 4)
    is_chat = "messages" in kind
    assert (choice["message"]["content"] if is_chat else choice["text"]) == "Once upon a"
    assert choice.get("token_ids") == ([11, 12, 13] if shows_ids else None)
    prompt = (body if is_chat else choice).get("prompt_token_ids")
    assert prompt == (PROMPT_IDS if shows_ids else None)


@BOTH
@pytest.mark.parametrize(
    ("answer", "fields"),
    [({"reason": "stop", "text": ""}, {}), ({"text": "\ufffd"}, {"max_tokens": 1})],
    ids=["stop token", "one token"],
)
def test_an_answer_may_end_with_ps_token(
    kind: dict[str, Any], answer: dict[str, Any], fields: dict[str, Any]
) -> None:
    made = p_answer("messages" in kind, **answer)
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    found = first(made, **kind, **fields, **streamed)
    assert found is not None
    assert found.continued is None
    *_, last, usage = events(found.events())
    assert last["choices"][0]["finish_reason"] == answer.get("reason", "length")
    assert (usage["choices"], usage["usage"]) == ([], made["usage"])
    whole = json.loads(found.body())
    assert whole["usage"] == made["usage"]
    assert whole["kv_transfer_params"] is None


@pytest.mark.parametrize("event", [b"data: {", b"data: 7", b'data: {"choices": 7}'])
def test_a_malformed_event_of_d_is_an_error(event: bytes) -> None:
    found = first(**CHAT, stream=True)
    assert found is not None
    with pytest.raises(RemoteProtocolError):
        found.translate(event)


# -- in the router --


async def samples(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    # A retry of the rest of the answer needs no token of P.
    assert body.get("return_token_ids") is (True if body.get("prompt") != REST else None)
    return web.json_response(p_answer("messages" in body))


async def continues(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.path == "/v1/completions"
    assert body["prompt"] == REST
    is_streamed = bool(body.get("stream"))
    sent = d_events(is_streamed)
    if not is_streamed:
        return web.json_response(sent[0])
    return await streams([stream_of(sent)])(request, body)


def early(
    prefill: list[Behaviour] | Behaviour, decode: list[Behaviour] | Behaviour, **settings: Any
) -> AbstractAsyncContextManager[Stage]:
    return stage(prefill, decode, first_token_from_prefill=True, **settings)


async def chat(s: Stage, **fields: Any) -> tuple[int, bytes]:
    return await ask(s, "/v1/chat/completions", CHAT | fields)


async def ask(s: Stage, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    async with s.session.post(s.url + path, json=body) as response:
        return response.status, await response.read()


def content(data: bytes) -> str:
    choices = [choice for event in events(data) for choice in event.get("choices", [])]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def errors(data: bytes) -> list[str]:
    return [event["error"]["message"] for event in events(data) if "error" in event]


def test_the_client_has_ps_token_before_d_answers() -> None:
    async def scene() -> None:
        async def waits(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await is_read.wait()
            return await continues(request, body)

        is_read = asyncio.Event()
        async with early(samples, waits) as s:
            body = CHAT | {"stream": True}
            async with s.session.post(s.url + "/v1/chat/completions", json=body) as response:
                data = await response.content.readuntil(b'"Once"')
                is_read.set()
                data += await response.read()
            assert content(data) == "Once upon a"
            assert errors(data) == []
            assert s.releases.tickets == []
            assert await s.metric("kvferry:router_first_tokens_from_prefill_total") == 1

    uvloop.run(scene())


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_without_the_setting_p_is_not_asked_for_its_token(fields: dict[str, Any]) -> None:
    async def scene() -> None:
        async with stage(prefills, answers(200, "{}")) as s:
            await chat(s, **fields)
            assert "return_token_ids" not in s.p.calls[0].body
            assert s.d.calls[0].path == "/v1/chat/completions"

    uvloop.run(scene())


def test_answers_that_are_not_streamed_are_joined() -> None:
    async def scene() -> None:
        async with early(samples, continues) as s:
            _, body = await chat(s)
            assert json.loads(body)["choices"][0]["message"]["content"] == "Once upon a"
            _, body = await ask(s, "/v1/completions", COMPLETION)
            assert json.loads(body)["choices"][0]["text"] == "Once upon a"

    uvloop.run(scene())


def test_an_answer_that_ends_with_ps_token_needs_no_d_and_releases_the_blocks() -> None:
    async def scene() -> None:
        async with early(samples, drops_connection) as s:
            status, data = await chat(s, stream=True, max_tokens=1)
            assert (status, content(data), errors(data)) == (200, "Once", [])
            status, body = await chat(s, max_tokens=1)
            assert json.loads(body)["choices"][0]["message"]["content"] == "Once"
            assert s.d.calls == []
            assert s.releases.tickets == ["ticket-1", "ticket-1"]

    uvloop.run(scene())


@pytest.mark.parametrize("fails", [drops_connection, answers(503, "{}"), answers(500, "{}")])
def test_after_the_first_token_another_d_continues_with_the_same_token(fails: Behaviour) -> None:
    async def scene() -> None:
        async with early(samples, [fails, continues], max_retries=2) as s:
            _, data = await chat(s, stream=True)
            assert (content(data), errors(data)) == ("Once upon a", [])
            assert [len(d.calls) for d in s.decoders] == [1, 1]
            # A retry that starts with the prefill leg computes the same tokens again.
            for call in s.p.calls[1:]:
                assert (call.path, call.body["prompt"]) == ("/v1/completions", REST)

    uvloop.run(scene())


ERROR = '{"error":{"message":"no"}}'


@pytest.mark.parametrize(
    "fails",
    [
        drops_connection,
        answers(400, ERROR),
        streams([b"data: %b\n\n" % ERROR.encode()]),
        streams([b"data: %b\n\n" % ERROR.encode()], status=400),
        streams([stream_of(d_events())], status=400),
    ],
)
def test_when_no_d_can_continue_the_stream_ends_with_an_error(fails: Behaviour) -> None:
    async def scene() -> None:
        async with early(samples, fails) as s:
            status, data = await chat(s, stream=True)
            assert (status, content(data)) == (200, "Once")
            assert len(errors(data)) == 1
            assert events(data)[-1]["error"]["code"] >= 400
            assert b"\ndata: [DONE]" not in data
            # A whole answer has not begun, so it fails with a status.
            status, body = await chat(s)
            assert status >= 400
            assert b"Once" not in body

    uvloop.run(scene())


def whole(**changes: Any) -> str:
    """D's complete answer, with changes to its choice or, by `usage`, to its usage."""
    [answer] = d_events(is_streamed=False)
    answer["usage"] |= changes.pop("usage", {})
    answer["choices"][0] |= changes
    return json.dumps(answer)


@pytest.mark.parametrize(
    ("is_streamed", "fails"),
    [
        (True, answers(200, whole())),
        (True, answers(200, "")),
        (True, answers(204, "")),
        (True, streams([b"data: %b\n\n" % ERROR.encode()])),
        (False, streams([stream_of(d_events())])),
        (False, streams([b"data: %b\n\n" % ERROR.encode()])),
        (False, answers(206, whole())),
        (True, streams([stream_of(d_events())], status=201)),
        (False, answers(200, whole(text=7))),
        (False, answers(200, whole(token_ids="ab"))),
        (False, answers(200, whole(usage={"prompt_tokens": "7"}))),
        (False, answers(200, whole(usage={"completion_tokens": None}))),
    ],
)
def test_after_an_answer_of_d_that_cannot_be_joined_another_d_continues(
    is_streamed: bool, fails: Behaviour
) -> None:
    async def scene() -> None:
        async with early(samples, [fails, continues], max_retries=2) as s:
            status, data = await chat(s, stream=is_streamed)
            joined = json.loads(data)["choices"][0]["message"]["content"] if not is_streamed else ""
            assert (status, joined or content(data)) == (200, "Once upon a")

    uvloop.run(scene())


def test_a_usage_of_d_that_has_no_counts_ends_the_stream_with_an_error() -> None:
    async def scene() -> None:
        *begins, last = d_events()
        last["usage"]["prompt_tokens"] = "7"
        chunks = [b"data: %b\n\n" % json.dumps(event).encode() for event in (*begins, last)]
        async with early(samples, streams(chunks)) as s:
            _, data = await chat(s, stream=True)
            assert content(data).startswith("Once")
            assert len(errors(data)) == 1

    uvloop.run(scene())


def test_a_stream_whose_d_dies_after_its_first_event_ends_with_an_error() -> None:
    async def scene() -> None:
        begins = streams([stream_of(d_events()[:1]).removesuffix(b"data: [DONE]\n\n")], then="drop")
        async with early(samples, [begins, continues], max_retries=2) as s:
            _, data = await chat(s, stream=True)
            assert content(data) == "Once upon"
            assert len(errors(data)) == 1
            assert s.decoders[1].calls == []

    uvloop.run(scene())


def test_without_a_d_the_client_gets_a_status_and_no_token() -> None:
    async def scene() -> None:
        async with early(samples, []) as s:
            status, data = await chat(s, stream=True)
            assert (status, b"Once" in data) == (503, False)

    uvloop.run(scene())


def test_several_prompts_take_the_usual_path() -> None:
    async def scene() -> None:
        async with early(prefills, answers(200, '{"choices":[{"index":0,"text":"x"}]}')) as s:
            status, _ = await ask(s, "/v1/completions", {"prompt": ["a", "b"]})
            assert status == 200
            assert not any("return_token_ids" in call.body for call in s.p.calls)

    uvloop.run(scene())


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_turn_of_a_conversation_is_retained_as_usual(is_streamed: bool) -> None:
    turn = {"do_remote_decode": True, "do_remote_prefill": False, "ticket": "ticket-of-d"}

    async def retains(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert len(body["kv_transfer_params"]["conversation"]) == 32
        if not is_streamed:
            whole = d_events(is_streamed)[0] | {"kv_transfer_params": turn}
            return web.json_response(whole)
        sent = [*d_events(), {"id": "d", "choices": [], "kv_transfer_params": turn}]
        return await streams([stream_of(sent)])(request, body)

    async def scene() -> None:
        async with early(samples, retains) as s:
            for _ in range(2):
                _, data = await chat(s, stream=is_streamed, conversation_id="c1")
                assert b"ticket-of-d" not in data
            tickets = [call.body["kv_transfer_params"].get("ticket") for call in s.p.calls]
            assert tickets == [None, "ticket-of-d"]

    uvloop.run(scene())


def test_a_turn_that_ends_with_ps_token_is_answered_by_d() -> None:
    async def scene() -> None:
        async with early(samples, answers(200, '{"choices":[]}')) as s:
            await chat(s, max_tokens=1, conversation_id="c1")
            assert s.d.calls[0].path == "/v1/chat/completions"

    uvloop.run(scene())
