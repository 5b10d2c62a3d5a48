"""Tests that a completion with several prompts is answered as by one engine: every prompt goes to P
and D by itself, and the client gets one answer, one stream or one error.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import uvloop
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.router.stubs import PARAMS, Stage, completes, hangs, prefills, stage, streams

from kvferry.errors import RemoteProtocolError
from kvferry.router.serving.client_request import MAX_PROMPTS
from kvferry.router.serving.event_splitter import EventSplitter
from kvferry.router.serving.several_prompts import MAX_AT_ONCE, JoinedAnswer

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def choices(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of an engine's answer to one prompt; the text repeats the prompt."""
    n, prompt = body.get("n", 1), body["prompt"]
    return [{"index": number, "text": f"{prompt}.{number}"} for number in range(n)]


def events(body: dict[str, Any]) -> list[bytes]:
    """The events of an engine's stream: two for each choice, the usage if requested, the end."""
    sent: list[dict[str, Any]] = [
        {"id": "d", "choices": [choice]} for choice in choices(body) for _ in range(2)
    ]
    if body.get("stream_options"):
        sent.append({"id": "d", "choices": [], "usage": USAGE})
    return [*(b"data: %b\n\n" % json.dumps(event).encode() for event in sent), b"data: [DONE]\n\n"]


async def echoes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if body.get("stream"):
        return await streams(events(body))(request, body)
    return web.json_response({"id": "d", "model": "m", "choices": choices(body), "usage": USAGE})


class Numbered:
    """A P whose tickets name the prompt that they belong to."""

    async def __call__(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = PARAMS | {"ticket": f"ticket of {body['prompt']}"}
        return web.json_response({"id": "p", "choices": [], "kv_transfer_params": params})


def joined(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream, without the end, which must be there once."""
    *found, end, rest = data.split(b"\n\n")
    assert (end, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in found]


async def until_idle(s: Stage) -> None:
    """Wait until no leg runs; the stage has a deadline."""
    while await s.metric("kvferry:router_instance_legs"):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("prompts", [["a", "b", "c"], [[1, 2], [3], [4, 5, 6]]])
@pytest.mark.parametrize("n", [1, 2])
def test_the_answers_are_joined_in_the_order_of_the_prompts(prompts: list[Any], n: int) -> None:
    async def scene() -> None:
        is_last_answered = asyncio.Event()

        async def first_answers_last(
            request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            if body["prompt"] == prompts[0]:
                await is_last_answered.wait()
            elif body["prompt"] == prompts[-1]:
                is_last_answered.set()
            return await echoes(request, body)

        async with stage(prefills, first_answers_last) as s:
            status, headers, body = await s.post({"prompt": prompts, "n": n}, X_Request_Id="mine")
            answer = json.loads(body)
            assert (status, headers["X-Request-Id"], answer["id"]) == (200, "mine", "cmpl-mine")
            assert answer["choices"] == [
                {"index": number * n + choice, "text": f"{prompt}.{choice}"}
                for number, prompt in enumerate(prompts)
                for choice in range(n)
            ]
            assert answer["usage"] == {name: 3 * value for name, value in USAGE.items()}
            assert answer["model"] == "m"
            for engine in (s.p, s.d):
                assert {
                    call.headers["X-Request-Id"]: call.body["prompt"] for call in engine.calls
                } == {f"mine-{number}": prompt for number, prompt in enumerate(prompts)}
            assert all(call.body["kv_transfer_params"]["ticket"] for call in s.d.calls)

    uvloop.run(scene())


@pytest.mark.parametrize("n", [1, 2])
def test_the_streams_of_all_prompts_become_one_stream(n: int) -> None:
    async def scene() -> None:
        async with stage(prefills, echoes) as s:
            body = {"prompt": ["a", "b", "c"], "n": n, "stream": True}
            status, headers, data = await s.post(
                body | {"stream_options": {"include_usage": True}}, X_Request_Id="mine"
            )
            assert (status, headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
            *found, last = joined(data)
            assert {event["id"] for event in [*found, last]} == {"cmpl-mine"}
            assert (last["choices"], last["usage"]) == (
                [],
                {name: 3 * value for name, value in USAGE.items()},
            )
            assert Counter(
                (choice["index"], choice["text"]) for event in found for choice in event["choices"]
            ) == {
                (number * n + choice, f"{prompt}.{choice}"): 2
                for number, prompt in enumerate("abc")
                for choice in range(n)
            }
            # Without the option no event has usage.
            _, _, data = await s.post(body)
            assert not any("usage" in event for event in joined(data))

    uvloop.run(scene())


@pytest.mark.parametrize("stream", [1, "true", "yes"])
def test_streams_are_joined_in_every_spelling_of_true(stream: object) -> None:
    async def scene() -> None:
        async with stage(prefills, echoes) as s:
            status, _, data = await s.post({"prompt": ["a", "b"], "stream": stream})
            assert status == 200
            assert sorted(event["choices"][0]["index"] for event in joined(data)) == [0, 0, 1, 1]

    uvloop.run(scene())


@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_error_of_one_prompt_ends_the_request_and_frees_the_others(is_streamed: bool) -> None:
    async def scene() -> None:
        async def refuses_b(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if body["prompt"] != "b":
                return await hangs(request, body)
            while len(s.d.calls) < 3:
                await asyncio.sleep(0)
            return web.json_response({"error": {"message": "too long"}}, status=400)

        async with stage(Numbered(), refuses_b) as s:
            status, _, body = await s.post({"prompt": ["a", "b", "c"], "stream": is_streamed})
            assert (status, json.loads(body)["error"]["message"]) == (400, "prompt 1: too long")
            await s.d.cancelled.wait()
            await until_idle(s)
            # D answered for b, with an error that leaves its blocks to the router.
            assert sorted(map(str, s.releases.tickets)) == [f"ticket of {name}" for name in "abc"]

    uvloop.run(scene())


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ([b'data: {"error":{"message":"out of blocks"}}\n\n'], "out of blocks"),
        ([b"data: no json\n\n"], "not a completion"),
        ([], "closed the connection"),
        (None, "ended before its last event"),
    ],
)
def test_a_stream_that_has_begun_ends_with_the_error_of_the_prompt_that_failed(
    last: list[bytes] | None, reason: str
) -> None:
    async def scene() -> None:
        async def fails_at_b(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            behave = (
                streams(
                    [*events(body)[:1], *(last or [])],
                    then="hang" if last else "end" if last is None else "drop",
                )
                if body["prompt"] == "b"
                else streams(events(body)[:1], then="hang")
            )
            return await behave(request, body)

        async with stage(prefills, fails_at_b) as s:
            status, _, data = await s.post({"prompt": ["a", "b"], "stream": True})
            *found, last_event, end = data.split(b"\n\n")
            message = json.loads(last_event.removeprefix(b"data: "))["error"]["message"]
            assert (status, end) == (200, b"")
            assert message.startswith("prompt 1: ")
            assert reason in message
            assert b"[DONE]" not in data
            assert b"b.0" in b"".join(found)
            await until_idle(s)

    uvloop.run(scene())


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_frees_the_blocks_of_all_prompts(is_streamed: bool) -> None:
    async def scene() -> None:
        async with stage(Numbered(), hangs) as s:
            leaving = asyncio.create_task(
                s.post({"prompt": ["a", "b", "c"], "stream": is_streamed})
            )
            while len(s.d.calls) < 3:
                await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await until_idle(s)
            assert sorted(map(str, s.releases.tickets)) == [f"ticket of {name}" for name in "abc"]

    uvloop.run(scene())


def test_a_prompt_whose_d_fails_is_retried_by_itself() -> None:
    async def scene() -> None:
        async def fails_once(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if body["prompt"] == "b" and sum(c.body["prompt"] == "b" for c in s.d.calls) == 1:
                return web.json_response({"error": {"message": "down"}}, status=500)
            return await echoes(request, body)

        async with stage(prefills, fails_once, max_retries=1) as s:
            status, _, body = await s.post({"prompt": ["a", "b", "c"]})
            assert status == 200
            assert [choice["text"] for choice in json.loads(body)["choices"]] == [
                "a.0",
                "b.0",
                "c.0",
            ]
            assert Counter(call.body["prompt"] for call in s.d.calls) == {"a": 1, "b": 2, "c": 1}

    uvloop.run(scene())


def test_a_refusal_of_one_prompt_says_when_to_try_again() -> None:
    async def scene() -> None:
        async def is_full(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            text = {"error": {"message": "full"}}
            return web.json_response(text, status=503, headers={"Retry-After": "7"})

        async with stage(prefills, is_full) as s:
            status, headers, body = await s.post({"prompt": ["a", "b"]})
            assert (status, headers["Retry-After"]) == (503, "7")
            assert json.loads(body)["error"]["message"].endswith(": full")

    uvloop.run(scene())


@pytest.mark.parametrize("max_running", [1, 3, 1000])
def test_prompts_run_at_once_while_there_are_places_and_give_them_back(max_running: int) -> None:
    async def scene() -> None:
        num_running = most = 0
        expected = min(max_running, MAX_AT_ONCE)

        async def counts(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            nonlocal num_running, most
            num_running += 1
            most = max(most, num_running)
            while most < expected:  # the stage has a deadline
                await asyncio.sleep(0.001)
            num_running -= 1
            return await echoes(request, body)

        async with stage(prefills, counts, max_running=max_running, max_waiting=0) as s:
            for _ in range(2):  # the second request finds all places free
                status, _, body = await s.post({"prompt": [f"p{n}" for n in range(40)]})
                assert (status, len(json.loads(body)["choices"])) == (200, 40)
            assert most == expected

    uvloop.run(scene())


def test_there_is_a_limit_on_prompts_which_the_error_names() -> None:
    async def scene() -> None:
        async with stage(prefills, echoes) as s:
            status, _, body = await s.post({"prompt": ["a"] * (MAX_PROMPTS + 1)})
            assert status == 400
            assert str(MAX_PROMPTS) in json.loads(body)["error"]["message"]
            assert not s.p.calls
            status, _, body = await s.post({"prompt": ["a"] * MAX_PROMPTS})
            assert (status, len(json.loads(body)["choices"])) == (200, MAX_PROMPTS)

    uvloop.run(scene())


def test_there_is_a_limit_on_the_bytes_that_all_prompts_repeat() -> None:
    """Each prompt goes to P and to D with all other fields of the request."""

    async def scene() -> None:
        async with stage(prefills, echoes, max_body_bytes=100_000) as s:
            for num_prompts, expected in ((9, 200), (11, 413)):
                for engine in (s.p, s.d):
                    engine.calls.clear()
                prompts = [f"p{number}" for number in range(num_prompts)]
                status, _, body = await s.post({"prompt": prompts, "documents": "z" * 10_000})
                assert status == expected
                assert sum(len(call.raw) for call in s.p.calls + s.d.calls) < 3 * 100_000
            assert "send fewer prompts" in json.loads(body)["error"]["message"]
            assert not s.p.calls
            # A single prompt is sent once.
            assert (await s.post({"prompt": ["p"], "documents": "z" * 90_000}))[0] == 200

    uvloop.run(scene())


def test_answers_that_are_too_long_together_end_the_request() -> None:
    async def scene() -> None:
        async def talks(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"choices": [{"index": 0, "text": "x" * 700}]})

        async with stage(prefills, talks, max_body_bytes=1000) as s:
            status, _, body = await s.post({"prompt": ["a", "b"]})
            assert status == 502
            assert "longer than 1000 bytes" in json.loads(body)["error"]["message"]

    uvloop.run(scene())


def test_an_answer_that_is_no_completion_is_the_fault_of_its_engine() -> None:
    async def scene() -> None:
        async def mumbles(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"choices": body["prompt"]})

        async with stage(prefills, mumbles) as s:
            status, _, body = await s.post({"prompt": ["a", "b"]})
            assert status == 502
            assert "not a completion" in json.loads(body)["error"]["message"]

    uvloop.run(scene())


def test_the_control_a_single_prompt_is_passed_on_as_it_is() -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            for prompt in ("a", ["a"], [[1, 2]]):
                _, _, body = await s.post({"prompt": prompt})
                assert json.loads(body) == {"id": "d", "choices": [{"text": "hello"}]}
                assert s.d.calls[-1].body["prompt"] == prompt

    uvloop.run(scene())


# -- pure functions --


@given(st.permutations([0, 1, 2]), st.integers(1, 3))
def test_in_whatever_order_answers_arrive_the_joined_answer_is_the_same(
    order: list[int], n: int
) -> None:
    answer = JoinedAnswer("id", n)
    for number in order:
        body = {"choices": choices({"prompt": number, "n": n}), "usage": {**USAGE, "x": None}}
        answer.add(number, json.dumps(body).encode())
    whole = json.loads(answer.body())
    assert [choice["index"] for choice in whole["choices"]] == list(range(3 * n))
    assert whole["usage"] == {**{name: 3 * value for name, value in USAGE.items()}, "x": None}


def test_details_of_the_usage_are_summed_too() -> None:
    answer = JoinedAnswer("id", 1)
    for number, details in enumerate([None, {"cached_tokens": 2}, {"cached_tokens": 3}]):
        body = {"choices": [], "usage": {"prompt_tokens_details": details}}
        answer.add(number, json.dumps(body).encode())
    assert json.loads(answer.body())["usage"] == {"prompt_tokens_details": {"cached_tokens": 5}}


@pytest.mark.parametrize("index", [-1, 10**400, True, None, "0", 0.5], ids=lambda i: repr(i)[:9])
def test_a_choice_whose_index_is_no_count_is_an_error_of_the_instance(index: object) -> None:
    with pytest.raises(RemoteProtocolError):
        JoinedAnswer("id", 1).add(0, json.dumps({"choices": [{"index": index}]}).encode())


def test_numbers_that_cannot_be_added_are_left_out_of_the_usage() -> None:
    answer = JoinedAnswer("id", 1)
    for number, tokens in enumerate([10**400, 0.5, 1]):
        answer.add(number, json.dumps({"choices": [], "usage": {"t": tokens}}).encode())
    assert json.loads(answer.body())["usage"] == {"t": 10**400 + 1}


@given(st.binary(max_size=60))
def test_any_bytes_are_an_event_or_an_error(event: bytes) -> None:
    for data in (event, b"data: " + event, b'data: {"choices":' + event):
        try:
            JoinedAnswer("id", 1).event(0, data)
        except RemoteProtocolError:
            continue


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(data) + 1) for place in cuts}), len(data)]
    return [data[start:end] for start, end in pairwise(edges) if end > start]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("cuts", [[1], list(range(0, 400, 3)), [60, 61, 62, 63, 64]])
def test_however_a_stream_is_cut_its_events_stay_whole(cuts: list[int], line_end: bytes) -> None:
    async def scene() -> None:
        async def cuts_it(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            whole = b": ping\n\n" + b"".join(events(body))
            return await streams(cut(whole.replace(b"\n", line_end), cuts))(request, body)

        async with stage(prefills, cuts_it) as s:
            _, _, data = await s.post({"prompt": ["a", "b"], "stream": True})
            assert sorted(event["choices"][0]["index"] for event in joined(data)) == [0, 0, 1, 1]

    uvloop.run(scene())


MB = 1024 * 1024


def long_event(num_bytes: int) -> bytes:
    """The first event of a stream with `echo` and `logprobs`: it has those of the whole prompt."""
    choice = {"index": 0, "text": "x", "logprobs": "y" * num_bytes}
    return b"data: " + json.dumps({"id": "d", "choices": [choice]}).encode() + b"\n\n"


def test_a_long_event_is_joined_like_a_short_one() -> None:
    """If the event were searched again with every segment, the stage's deadline would pass."""

    async def scene() -> None:
        event = long_event(15 * MB)

        async def echoes_logprobs(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            cuts = list(range(0, len(event), 65536))
            return await streams([*cut(event, cuts), b"data: [DONE]\n\n"])(request, body)

        async with stage(prefills, echoes_logprobs) as s:
            status, _, data = await s.post({"prompt": ["a", "b"], "stream": True})
            assert status == 200
            assert [len(e["choices"][0]["logprobs"]) for e in joined(data)] == [15 * MB] * 2

    uvloop.run(scene())


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_event_that_is_too_long_to_join_is_the_requests_own_failure(has_begun: bool) -> None:
    """No other D gets the request, and no D is ejected for it."""

    async def scene() -> None:
        first = [long_event(1)] if has_begun else []
        too_long = streams([*first, long_event(17 * MB)], then="hang")
        async with stage(prefills, [too_long] * 2, failures_in_a_row=1, max_retries=2) as s:
            for _ in range(2):
                status, _, data = await s.post({"prompt": ["a", "b"], "stream": True})
                assert status == (200 if has_begun else 502)
                *_, last = data.strip().split(b"\n\n")
                message = json.loads(last.removeprefix(b"data: "))["error"]["message"]
                assert "an event is longer than 16777216 bytes" in message
            assert sum(len(engine.calls) for engine in s.decoders) == 4
            for engine in s.decoders:
                engine.behaviour = echoes
            assert [(await s.post({"prompt": "a"}))[0] for _ in range(2)] == [200, 200]
            assert [len(engine.calls) for engine in s.decoders] == [3, 3], "both are in the fleet"
            assert await s.metric("kvferry:router_instance_failures_total") == 0

    uvloop.run(scene())


def test_the_bytes_of_an_event_are_searched_once_however_the_stream_is_cut() -> None:
    num_searched = num_segments = 0
    end = re.compile(rb"\n\r?\n")

    def counts(data: bytearray, start: int) -> Iterable[re.Match[bytes]]:
        nonlocal num_searched
        num_searched += len(data) - start
        return end.finditer(data, start)

    stream = long_event(100_000) * 3
    splitter, found = EventSplitter(counts), []
    for segment in cut(stream, list(range(0, len(stream), 100))):
        found += splitter.feed(segment)
        num_segments += 1
    assert found == stream.split(b"\n\n")[:-1]
    # A few bytes are searched twice: the end of an event may be cut.
    assert num_searched <= len(stream) + 4 * num_segments


@given(
    st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"data: x", b"y"]), max_size=40).map(b"".join),
    st.lists(st.integers(0, 300), max_size=20),
)
def test_events_are_the_same_however_the_stream_is_cut(stream: bytes, cuts: list[int]) -> None:
    def split(segments: list[bytes]) -> list[bytes]:
        splitter = EventSplitter()
        return [event for segment in segments for event in splitter.feed(segment)] + (
            splitter.finish()
        )

    assert split(cut(stream, cuts)) == split([stream])
