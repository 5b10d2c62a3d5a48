"""Tests that what D reports at the end of a turn reaches P with the next turn, but no client and no
other tenant.
"""

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.router.stubs import (
    AS_ADMIN,
    PARAMS,
    Behaviour,
    Stage,
    completes,
    drops_connection,
    prefills,
    stage,
    streams,
)

from kvferry.router.conversations.turn_params import TurnParamsFilter, take_turn_params
from kvferry.router.fleet.instances import Instance

TURN = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "ticket": "ticket-of-d",
    "remote_num_tokens": 40,
    "ttl_s": 60.0,
}
TALK = {"messages": [{"role": "user", "content": "hi"}], "conversation_id": "c1"}
CHAT = "/v1/chat/completions"
EVENTS = [
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"\\"kv_transfer_params\\":"}}]}\n\n',
]
LAST = b'data: {"id":"d","choices":[],"kv_transfer_params":' + json.dumps(TURN).encode() + b"}\n\n"
DONE = b"data: [DONE]\n\n"


async def ends_with_ticket(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if body.get("stream"):
        return await streams([*EVENTS, LAST, DONE])(request, body)
    return web.json_response(
        {"id": "d", "choices": [{"text": "hello"}], "kv_transfer_params": TURN}
    )


def asked_of_p(s: Stage, number: int = -1) -> dict[str, Any]:
    params: dict[str, Any] = s.p.calls[number].body["kv_transfer_params"]
    return params


@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_next_turn_offers_p_what_d_has_kept(is_streamed: bool) -> None:
    async def scene() -> None:
        async with stage(prefills, ends_with_ticket) as s:
            for _ in range(3):
                status, _, body = await s.post(TALK | {"stream": is_streamed}, CHAT)
                assert status == 200
                assert b"ticket-of-d" not in body
                if is_streamed:
                    assert body == b"".join([*EVENTS, DONE])
            assert [asked_of_p(s, turn).get("ticket") for turn in range(3)] == [
                None,
                "ticket-of-d",
                "ticket-of-d",
            ]
            assert (asked_of_p(s)["do_remote_decode"], asked_of_p(s)["do_remote_prefill"]) == (
                True,
                False,
            )
            words = [call.body["kv_transfer_params"]["conversation"] for call in s.d.calls]
            assert (len(set(words)), {len(word) for word in words}) == (3, {32})
            assert all("conversation_id" not in call.body for call in (*s.p.calls, *s.d.calls))

    uvloop.run(scene())


def test_without_a_conversation_nothing_is_kept() -> None:
    async def scene() -> None:
        async with stage(prefills, ends_with_ticket) as s:
            for _ in range(2):
                await s.post({"messages": []}, CHAT)
            assert asked_of_p(s).get("ticket") is None
            assert s.d.calls[0].body["kv_transfer_params"]["conversation"] is None

    uvloop.run(scene())


def test_a_tenant_never_gets_anothers_conversation() -> None:
    async def scene() -> None:
        async with stage(prefills, ends_with_ticket) as s:
            await s.post(TALK, CHAT, Authorization="Bearer one")
            await s.post(TALK, CHAT, Authorization="Bearer two")
            assert asked_of_p(s).get("ticket") is None
            await s.post(TALK, CHAT)
            assert asked_of_p(s).get("ticket") is None
            await s.post(TALK, CHAT, Authorization="Bearer one")
            assert asked_of_p(s)["ticket"] == "ticket-of-d"

    uvloop.run(scene())


def test_what_a_client_claims_of_blocks_is_never_believed() -> None:
    async def scene() -> None:
        async with stage(prefills, ends_with_ticket) as s:
            await s.post(TALK | {"kv_transfer_params": TURN | {"ticket": "stolen"}}, CHAT)
            assert b"stolen" not in s.p.calls[0].raw + s.d.calls[0].raw

    uvloop.run(scene())


def test_what_a_d_says_late_of_an_old_turn_does_not_replace_what_it_says_of_the_next() -> None:
    async def scene() -> None:
        asked: list[str] = []
        is_first_told = asyncio.Event()

        async def ask(instance: Instance, word: str) -> bytes | None:
            asked.append(word)
            number = len(asked)
            if number == 1:
                await is_first_told.wait()
            return json.dumps(TURN | {"ticket": f"ticket-{number}"}).encode()

        async with stage(prefills, streams([*EVENTS, DONE]), ask=ask) as s:
            for turn in (1, 2):
                await s.post(TALK | {"stream": True}, CHAT)
                while len(asked) < turn:
                    await asyncio.sleep(0.01)
            is_first_told.set()
            await s.post(TALK | {"stream": True}, CHAT)
            assert [asked_of_p(s, turn).get("ticket") for turn in range(3)] == [
                None,
                None,
                "ticket-2",
            ]

    uvloop.run(scene())


@pytest.mark.parametrize("is_in_stream", [True, False])
def test_a_turn_that_is_faster_than_the_end_of_the_last_ones_body_finds_it(
    is_in_stream: bool,
) -> None:
    """A client sends its next turn as soon as it has read `[DONE]`; under load the end of the HTTP
    body may reach the router much later.
    """

    async def scene() -> None:
        may_end = asyncio.Event()

        async def ends_late(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for chunk in [*EVENTS, *([LAST] if is_in_stream else []), DONE]:
                await response.write(chunk)
            await may_end.wait()
            return response

        async def ask(instance: Instance, word: str) -> bytes | None:
            return json.dumps(TURN).encode()

        async with stage(prefills, ends_late, ask=None if is_in_stream else ask) as s:
            body = TALK | {"stream": True}
            async with s.session.post(f"{s.url}{CHAT}", json=body) as first:
                while await first.content.readline() != DONE.removesuffix(b"\n"):
                    continue
                next_turn = asyncio.create_task(s.post(body, CHAT))
                while len(s.p.calls) < 2:
                    await asyncio.sleep(0)
                may_end.set()
                await next_turn
            assert asked_of_p(s).get("ticket") == "ticket-of-d"

    uvloop.run(scene())


def test_a_next_turn_waits_for_the_word_of_a_busy_d() -> None:
    async def scene() -> None:
        async def ask(instance: Instance, word: str) -> bytes | None:
            await asyncio.sleep(0.7)
            return json.dumps(TURN).encode()

        async with stage(prefills, streams([*EVENTS, DONE]), ask=ask) as s:
            for _ in range(2):
                await s.post(TALK | {"stream": True}, CHAT)
            assert asked_of_p(s).get("ticket") == "ticket-of-d"

    uvloop.run(scene())


def test_a_turn_whose_d_says_nothing_stays_with_its_d() -> None:
    async def scene() -> None:
        async def ask(instance: Instance, word: str) -> bytes | None:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

        async with stage(
            prefills,
            [streams([*EVENTS, DONE])] * 3,
            ask=ask,
            decode_policy="conversation_affinity",
        ) as s:
            for _ in range(2):
                await s.post(TALK | {"stream": True}, CHAT)
            assert sorted(len(engine.calls) for engine in s.decoders) == [0, 0, 2]

    uvloop.run(scene())


def test_a_conversation_stays_with_the_d_that_has_it() -> None:
    async def scene() -> None:
        async with stage(
            prefills, [ends_with_ticket] * 3, decode_policy="conversation_affinity"
        ) as s:
            for turn in range(6):
                await s.post(TALK | {"turn": turn}, CHAT)
            assert sorted(len(engine.calls) for engine in s.decoders) == [0, 0, 6]

    uvloop.run(scene())


def test_clients_without_a_key_do_not_share_a_conversation_because_they_chose_one_name() -> None:
    async def scene() -> None:
        other = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(local_addr=("127.0.0.2", 0)), auto_decompress=False
        )
        async with stage(prefills, ends_with_ticket) as s, other:
            await s.post(TALK, CHAT)
            await replace(s, session=other).post(TALK, CHAT)
            assert asked_of_p(s).get("ticket") is None
            await s.post(TALK, CHAT)
            assert asked_of_p(s).get("ticket") is not None, "its own turn is still there"

    uvloop.run(scene())


def test_what_a_d_has_kept_is_forgotten_when_it_is_removed() -> None:
    async def scene() -> None:
        async with stage(prefills, [ends_with_ticket] * 2) as s:
            await s.post(TALK, CHAT)
            [used] = [engine for engine in s.decoders if engine.calls]
            order = {"role": "decode", "url": f"http://127.0.0.1:{used.port}"}
            async with s.session.delete(
                f"{s.url}/admin/instances", json=order, headers=AS_ADMIN
            ) as answer:
                assert answer.status == 200
            await s.post(TALK, CHAT)
            assert asked_of_p(s).get("ticket") is None

    uvloop.run(scene())


def test_a_p_that_fails_over_the_last_turns_blocks_is_asked_without_them() -> None:
    async def scene() -> None:
        async def stumbles(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            behave: Behaviour = (
                drops_connection if "ticket" in body["kv_transfer_params"] else prefills
            )
            return await behave(request, body)

        async with stage([stumbles, prefills], ends_with_ticket, max_retries=2) as s:
            for _ in range(4):
                assert (await s.post(TALK, CHAT))[0] == 200

    uvloop.run(scene())


@pytest.mark.parametrize("sent", ["", "x" * 257, 7, None, ["c"], {"a": 1}])
def test_a_conversation_has_a_name_of_some_length(sent: object) -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            status, _, _ = await s.post({"messages": [], "conversation_id": sent}, CHAT)
            assert status == (200 if sent is None else 400)

    uvloop.run(scene())


def test_a_turn_that_its_client_left_keeps_nothing_and_hurts_nobody() -> None:
    async def scene() -> None:
        async with stage(prefills, streams(EVENTS, then="hang")) as s:
            leaving = asyncio.create_task(s.post(TALK | {"stream": True}, CHAT))
            await s.d.entered.wait()
            leaving.cancel()
            await s.d.cancelled.wait()
            again = asyncio.create_task(s.post(TALK | {"stream": True}, CHAT))
            while len(s.d.calls) < 2:
                await asyncio.sleep(0)
            assert asked_of_p(s).get("ticket") is None
            again.cancel()
            await asyncio.gather(leaving, again, return_exceptions=True)

    uvloop.run(scene())


# -- pure functions --


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(data) + 1) for place in cuts}), len(data)]
    return [data[start:end] for start, end in pairwise(edges) if end > start]


@given(st.lists(st.integers(0, 10_000), max_size=20), st.booleans())
def test_however_a_stream_is_cut_only_ds_word_is_taken_out(cuts: list[int], has_crlf: bool) -> None:
    whole, kept = b"".join([*EVENTS, LAST, DONE]), b"".join([*EVENTS, DONE])
    if has_crlf:
        whole, kept = whole.replace(b"\n", b"\r\n"), kept.replace(b"\n", b"\r\n")
    look = TurnParamsFilter()
    passed = b"".join(look.feed(segment) for segment in [*cut(whole, cuts), b""])
    assert passed == kept
    assert look.params is not None
    assert json.loads(look.params) == TURN


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_any_bytes_pass_a_filter_that_finds_nothing(data: bytes, cuts: list[int]) -> None:
    look = TurnParamsFilter()
    assert b"".join(look.feed(segment) for segment in [*cut(data, cuts), b""]) == data
    assert look.params is None


def test_an_event_is_passed_on_as_soon_as_it_is_whole() -> None:
    look = TurnParamsFilter()
    assert look.feed(EVENTS[0] + EVENTS[1][:5]) == EVENTS[0]
    assert look.feed(EVENTS[1][5:]) == EVENTS[1]


def test_an_event_without_end_is_not_kept_for_ever() -> None:
    look = TurnParamsFilter()
    assert len(look.feed(b"data: " + b"x" * (5 << 20))) > 1 << 20


def test_a_last_event_that_says_more_keeps_the_rest() -> None:
    look = TurnParamsFilter()
    event = (
        b'data: {"choices":[],"usage":{"total_tokens":3},"kv_transfer_params":{"ticket":"t"}}\n\n'
    )
    assert json.loads(look.feed(event).removeprefix(b"data: ")) == {
        "choices": [],
        "usage": {"total_tokens": 3},
    }
    assert look.params == b'{"ticket":"t"}'


@pytest.mark.parametrize("body", [b"", b"no json", b"[]", b'{"a":1}', b"\xff"])
def test_a_whole_answer_without_ds_word_is_passed_on_as_it_is(body: bytes) -> None:
    assert take_turn_params(body) == (None, body)


def test_a_null_is_no_word() -> None:
    assert take_turn_params(b'{"a":1,"kv_transfer_params":null}') == (None, b'{"a":1}')


# -- null parameters, which vLLM 0.33 sends in almost every event --

RECORDED = sorted((Path(__file__).parent / "recorded").glob("vllm_0_33_*.sse"))
KEY, NULL = "kv_transfer_params", b',"kv_transfer_params":null}'
HOSTILE = [
    NULL.decode(),
    "\\" + NULL.decode(),
    '"' + NULL.decode(),
    "\\",
    '"',
    "\n\n",
    "é😀\0",
    KEY,
]
TEXTS = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=5), max_size=4).map("".join)
NAMES = st.sampled_from(["id", "choices", "usage", KEY]) | TEXTS
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)


def without_params(event: dict[str, Any]) -> tuple[dict[str, Any] | None, Any]:
    """What a parser leaves of an event (None: nothing), and the parameters that it finds."""
    rest = {name: value for name, value in event.items() if name != KEY}
    params = event.get(KEY) if isinstance(event.get(KEY), dict) else None
    is_made_for_params = params is not None and rest.get("choices") == [] and "usage" not in rest
    return None if is_made_for_params else rest, params


def pass_events(events: list[bytes], cuts: list[int]) -> tuple[list[Any], Any]:
    """The events as a client reads them from the filter's bytes, and the parameters found."""
    look = TurnParamsFilter()
    passed = b"".join(look.feed(part) for part in [*cut(b"".join(events), cuts), b""])
    texts = [event.removeprefix(b"data: ") for event in passed.split(b"\n\n") if event]
    found = None if look.params is None else json.loads(look.params)
    return [text if text == b"[DONE]" else json.loads(text) for text in texts], found


@given(
    sent=st.lists(
        st.tuples(st.dictionaries(NAMES, VALUES, min_size=1, max_size=4), st.booleans()), max_size=4
    ),
    cuts=st.lists(st.integers(0, 10_000), max_size=5),
    is_ascii=st.booleans(),
    is_spaced=st.booleans(),
)
def test_a_null_is_removed_without_parsing_as_a_parser_would_remove_it(
    sent: list[tuple[dict[str, Any], bool]], cuts: list[int], is_ascii: bool, is_spaced: bool
) -> None:
    events = [{**event, KEY: None} if has_null else event for event, has_null in sent]
    separators = (", ", ": ") if is_spaced else (",", ":")
    texts = [json.dumps(each, ensure_ascii=is_ascii, separators=separators) for each in events]
    left = [without_params(event) for event in events]
    assert pass_events([b"data: %b\n\n" % text.encode() for text in texts], cuts) == (
        [rest for rest, _ in left if rest is not None],
        next((params for _, params in reversed(left) if params is not None), None),
    )


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=5))
def test_a_stream_of_vllm_0_33_loses_the_parameters_and_nothing_else(
    path: Path, cuts: list[int]
) -> None:
    events = [event + b"\n\n" for event in path.read_bytes().split(b"\n\n") if event]
    texts = [event.removeprefix(b"data: ") for event in events]
    left = [without_params(json.loads(text)) for text in texts[:-1]]
    passed, params = pass_events(events, cuts)
    assert passed == [*(rest for rest, _ in left), b"[DONE]"]
    assert params == next((params for _, params in left if params), None)
    contents = [each["choices"][0] for each in passed[:-1] if each["choices"]]
    assert [
        choice.get("text") or choice["delta"]["content"] for choice in contents if choice
    ].count(NULL.decode()) == 1


def test_only_the_null_is_missing_from_the_bytes_of_an_event() -> None:
    """The control: an event with parameters is encoded anew, so its spaces are gone."""
    event = b'data: {"id" :1,"choices": [{"a":{"b":1,"kv_transfer_params":null}}]%b}\n\n'
    look = TurnParamsFilter()
    assert look.feed(event % NULL[:-1]) == event % b""
    assert b" :" not in look.feed(event % b',"kv_transfer_params":{"ticket":"t"}')


def test_params_of_p_pass_unchanged() -> None:
    """The control: the router adds the `conversation` and `leg_id` parameters and nothing else."""

    async def scene() -> None:
        async with stage(prefills, completes) as s:
            await s.post(TALK, CHAT)
            given_to_d = s.d.calls[0].body["kv_transfer_params"]
            assert {
                key: value
                for key, value in given_to_d.items()
                if key not in ("conversation", "leg_id")
            } == PARAMS

    uvloop.run(scene())
