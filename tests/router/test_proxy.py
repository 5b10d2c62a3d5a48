import asyncio
import json
from typing import Any

import pytest
import uvloop
from tests.ports import reserve_port
from tests.router.stubs import (
    KEEP_NOTHING,
    PARAMS,
    Behaviour,
    RecordedReleases,
    Stage,
    answers,
    completes,
    drops_connection,
    hangs,
    prefills,
    prefills_without_blocks,
    router,
    stage,
    streams,
)

from kvferry.router.serving.client_request import read_prefill_answer
from kvferry.router.serving.side_channel import PrefilledBlocks
from kvferry.types import FailurePolicy

EVENTS = [
    b'data: {"text":"a"}\n\n',
    b"data: {",
    b'"text":"\xc3',
    b'\xa9"}\n',
    b"\n",
    b": comment\n\n",
    b"data: [DONE]\n\n",
]
ONE = {"prompt": "hello", "max_tokens": 4}
STREAMED = {**ONE, "stream": True}


def message(body: bytes) -> str:
    text = json.loads(body)["error"]["message"]
    assert isinstance(text, str)
    return text


# -- requests that succeed --


def test_a_request_becomes_a_prefill_leg_and_a_decode_leg_with_its_blocks() -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            status, _, body = await s.post(ONE)
            assert (status, json.loads(body)["choices"]) == (200, [{"text": "hello"}])
            assert s.p.calls[0].body["kv_transfer_params"]["do_remote_decode"] is True
            assert s.p.calls[0].body["max_tokens"] == 1
            assert s.d.calls[0].body == ONE | {"kv_transfer_params": PARAMS | KEEP_NOTHING}
            assert s.releases.handovers == []

    uvloop.run(scene())


def test_chat_goes_to_chat() -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            status, _, _ = await s.post({"messages": []}, "/v1/chat/completions")
            assert status == 200
            assert [s.p.calls[0].path, s.d.calls[0].path] == ["/v1/chat/completions"] * 2

    uvloop.run(scene())


def test_a_stream_arrives_byte_for_byte_with_the_status_and_type_of_d() -> None:
    async def scene() -> None:
        async with stage(prefills, streams(EVENTS)) as s:
            status, headers, body = await s.post(STREAMED)
            assert status == 200
            assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert body == b"".join(EVENTS)
            assert body != b"".join(EVENTS[:-1])

    uvloop.run(scene())


def test_the_first_segment_of_a_stream_does_not_wait_for_the_last() -> None:
    async def scene() -> None:
        async with (
            stage(prefills, streams(EVENTS[:1], then="hang")) as s,
            s.session.post(f"{s.url}/v1/completions", json=STREAMED) as answer,
        ):
            assert await answer.content.readany() == EVENTS[0]

    uvloop.run(scene())


def test_a_body_of_megabytes_passes_both_ways_unchanged() -> None:
    async def scene() -> None:
        text = "é☃" * 500_000
        async with stage(prefills, answers(200, json.dumps({"text": text}))) as s:
            status, headers, body = await s.post({"prompt": text})
            assert status == 200
            assert json.loads(body) == {"text": text}
            assert int(headers["Content-Length"]) == len(body)
            assert s.p.calls[0].body["prompt"] == text
            assert s.d.calls[0].body["prompt"] == text

    uvloop.run(scene())


def test_a_compressed_answer_is_passed_on_compressed() -> None:
    async def scene() -> None:
        async with stage(prefills, answers(200, "not really gzip", Content_Encoding="gzip")) as s:
            _, headers, body = await s.post(ONE)
            assert (headers["Content-Encoding"], body) == ("gzip", b"not really gzip")

    uvloop.run(scene())


def test_instances_take_turns() -> None:
    async def scene() -> None:
        async with stage([prefills] * 2, [completes] * 3) as s:
            for _ in range(6):
                assert (await s.post(ONE))[0] == 200
            assert [len(engine.calls) for engine in s.prefillers] == [3, 3]
            assert [len(engine.calls) for engine in s.decoders] == [2, 2, 2]

    uvloop.run(scene())


def test_when_p_keeps_no_blocks_d_computes() -> None:
    async def scene() -> None:
        async with stage(prefills_without_blocks, completes) as s:
            assert (await s.post(ONE))[0] == 200
            assert s.d.calls[0].body == ONE
            assert await s.metric("kvferry:router_prefills_without_blocks_total") == 1

    uvloop.run(scene())


# -- headers --


def test_both_legs_and_the_client_see_the_clients_request_id_and_both_legs_its_authorization() -> (
    None
):
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            _, headers, _ = await s.post(
                ONE, X_Request_Id="mine-1", Authorization="Bearer key", Cookie="a=b", X_Other="1"
            )
            for call in (s.p.calls[0], s.d.calls[0]):
                assert call.headers["X-Request-Id"] == "mine-1"
                assert call.headers["Authorization"] == "Bearer key"
                assert "Cookie" not in call.headers
                assert "X-Other" not in call.headers
            assert headers["X-Request-Id"] == "mine-1"

    uvloop.run(scene())


@pytest.mark.parametrize("sent", [{}, {"X_Request_Id": "bad id"}, {"X_Request_Id": "x" * 500}])
def test_a_missing_or_unfit_request_id_is_replaced_by_one_for_both_legs(
    sent: dict[str, str],
) -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            _, headers, _ = await s.post(ONE, **sent)
            made = headers["X-Request-Id"]
            assert made not in sent.values()
            assert [s.p.calls[0].headers["X-Request-Id"], s.d.calls[0].headers["X-Request-Id"]] == [
                made,
                made,
            ]

    uvloop.run(scene())


# -- requests that an instance rejects --


def test_an_objection_of_p_is_the_clients_answer_and_d_is_not_asked() -> None:
    async def scene() -> None:
        async with stage(
            answers(422, '{"error":{"message":"no such model"}}', Retry_After="7"), completes
        ) as s:
            status, headers, body = await s.post(ONE)
            assert (status, body) == (422, b'{"error":{"message":"no such model"}}')
            assert headers["Retry-After"] == "7"
            assert s.d.calls == []

    uvloop.run(scene())


def test_an_objection_of_d_is_passed_on_and_the_blocks_of_p_are_released() -> None:
    async def scene() -> None:
        async with stage(prefills, answers(400, '{"error":{"message":"bad max_tokens"}}')) as s:
            status, _, body = await s.post(ONE)
            assert (status, body) == (400, b'{"error":{"message":"bad max_tokens"}}')
            assert s.releases.tickets == ["ticket-1"]

    uvloop.run(scene())


# -- instances that take no requests --

STOPPING = answers(503, '{"error":{"message":"the server is stopping"}}', Retry_After="1")


def test_while_one_of_two_drains_every_request_is_served_and_it_is_hardly_asked() -> None:
    async def scene() -> None:
        async with stage([STOPPING, prefills], [completes, STOPPING]) as s:
            assert [(await s.post(ONE))[0] for _ in range(12)] == [200] * 12
            assert [len(engine.calls) for engine in (s.prefillers[1], s.decoders[0])] == [12, 12]
            # Without a cooldown, the router would ask the draining instance whenever its turn
            # comes. If each request took as long as a cooldown, the stage's deadline would have
            # passed.
            assert 1 <= len(s.prefillers[0].calls) < 12
            assert 1 <= len(s.decoders[1].calls) < 6
            assert s.releases.handovers == []
            assert await s.metric("kvferry:router_instance_failures_total") == 0
            assert await s.metric("kvferry:router_instance_refusals_total") == len(
                s.prefillers[0].calls
            ) + len(s.decoders[1].calls)

    uvloop.run(scene())


@pytest.mark.parametrize(
    ("request_body", "behaviour", "answer"),
    [(ONE, answers(200, "{}"), b"{}"), (STREAMED, streams(EVENTS), b"".join(EVENTS))],
)
def test_when_a_d_refuses_another_gets_the_same_ticket_and_nothing_is_released(
    request_body: dict[str, Any], behaviour: Behaviour, answer: bytes
) -> None:
    async def scene() -> None:
        async with stage(prefills, [STOPPING, behaviour]) as s:
            status, _, body = await s.post(request_body)
            assert (status, body) == (200, answer)
            first, second = (engine.calls[0] for engine in s.decoders)
            assert second.body == first.body | {"kv_transfer_params": PARAMS | KEEP_NOTHING}
            assert first.body == request_body | {"kv_transfer_params": PARAMS | KEEP_NOTHING}
            assert second.headers["X-Request-Id"] == first.headers["X-Request-Id"]
            assert len(s.p.calls) == 1
            assert s.releases.handovers == []

    uvloop.run(scene())


@pytest.mark.parametrize("request_body", [ONE, STREAMED])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_when_all_of_a_role_refuse_the_client_hears_it_from_them_and_no_blocks_are_kept(
    role: str, request_body: dict[str, Any]
) -> None:
    async def scene() -> None:
        async with stage(
            [STOPPING] * 3 if role == "prefill" else prefills,
            [STOPPING] * 3 if role == "decode" else completes,
        ) as s:
            status, headers, body = await s.post(request_body, X_Request_Id="mine")
            assert (status, message(body)) == (503, "the server is stopping")
            assert (headers["Retry-After"], headers["X-Request-Id"]) == ("1", "mine")
            refusing = s.prefillers if role == "prefill" else s.decoders
            assert [len(engine.calls) for engine in refusing] == [1, 1, 1]
            assert s.releases.tickets == ([] if role == "prefill" else ["ticket-1"])
            assert role == "decode" or s.d.calls == []

    uvloop.run(scene())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_only_a_503_makes_the_router_ask_another(role: str) -> None:
    async def scene() -> None:
        prefill: list[Behaviour] = [drops_connection, prefills] if role == "prefill" else [prefills]
        decode: list[Behaviour] = [drops_connection, completes] if role == "decode" else [completes]
        async with stage(prefill, decode) as s:
            assert (await s.post(ONE))[0] == 502
            assert (s.prefillers if role == "prefill" else s.decoders)[1].calls == []
            assert s.releases.tickets == ([] if role == "prefill" else ["ticket-1"])

    uvloop.run(scene())


def test_a_client_that_leaves_while_the_second_d_is_asked_has_its_blocks_released_once() -> None:
    async def scene() -> None:
        async with stage(prefills, [STOPPING, hangs]) as s:
            await leave(s, s.decoders[1].entered, ONE)
            await s.decoders[1].cancelled.wait()
            await s.releases.happened.wait()
            assert s.releases.tickets == ["ticket-1"]

    uvloop.run(scene())


def test_a_client_that_leaves_while_the_second_p_computes_cancels_it() -> None:
    async def scene() -> None:
        async with stage([STOPPING, hangs], completes) as s:
            await leave(s, s.prefillers[1].entered, ONE)
            await s.prefillers[1].cancelled.wait()
            assert s.d.calls == []

    uvloop.run(scene())


# -- instances that fail --


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        (answers(500, "boom"), "it answered with status 500, bytes=4: boom"),
        (answers(302, "", Location="http://127.0.0.1:1/"), "it answered with status 302"),
        (answers(200, "{<html>}"), "its answer cannot be decoded"),
        (answers(200, '{"kv_transfer_params": 3}'), "its answer cannot be decoded"),
        (drops_connection, "it closed the connection"),
        (
            streams([b"{"], then="drop", content_type="application/json"),
            "it closed the connection in the middle of an answer",
        ),
    ],
)
def test_a_p_that_fails_is_named_in_a_502(behaviour: Behaviour, sentence: str) -> None:
    async def scene() -> None:
        async with stage(behaviour, completes) as s:
            status, _, body = await s.post(ONE)
            assert status == 502
            assert f"prefill instance http://127.0.0.1:{s.p.port} failed" in message(body)
            assert sentence in message(body)
            assert s.d.calls == []

    uvloop.run(scene())


@pytest.mark.parametrize("request_body", [ONE, STREAMED])
def test_a_d_that_fails_before_it_answers_is_named_in_a_502_and_the_blocks_are_released(
    request_body: dict[str, Any],
) -> None:
    async def scene() -> None:
        async with stage(prefills, drops_connection) as s:
            status, _, body = await s.post(request_body)
            assert status == 502
            assert (
                f"decode instance http://127.0.0.1:{s.d.port} failed: it closed the connection"
                in message(body)
            )
            assert s.releases.tickets == ["ticket-1"]

    uvloop.run(scene())


@pytest.mark.parametrize(
    ("behaviour", "status", "sentence"),
    [
        (hangs, 504, "it did not answer in time"),
        (streams([b"{"], "hang", "application/json"), 504, "it did not answer in time"),
        (answers(200, " " * 70_000), 502, "its answer is longer than 65536 bytes"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_answer_that_is_too_long_or_too_slow_is_the_requests_own_failure(
    behaviour: Behaviour, status: int, sentence: str, role: str
) -> None:
    """No other instance gets such a request, and no instance is ejected for it."""

    async def scene() -> None:
        legs: tuple[list[Behaviour], list[Behaviour]] = (
            ([behaviour] * 2, [completes]) if role == "prefill" else ([prefills], [behaviour] * 2)
        )
        async with stage(
            *legs,
            answer=0.1,
            idle=0.1,
            max_body_bytes=65536,
            failures_in_a_row=1,
            max_retries=2,
            without_prefill=FailurePolicy.RECOMPUTE,
        ) as s:
            engines = s.prefillers if role == "prefill" else s.decoders
            for _ in range(4):
                got, _, body = await s.post(ONE)
                assert (got, sentence in message(body)) == (status, True)
            assert [len(engine.calls) for engine in engines] == [2, 2]
            assert await s.metric("kvferry:router_instance_failures_total") == 0
            assert await s.metric("kvferry:router_retries_total") == 0
            for engine in engines:
                engine.behaviour = prefills if role == "prefill" else completes
            assert [(await s.post(ONE))[0] for _ in range(2)] == [200, 200]
            assert [len(engine.calls) for engine in engines] == [3, 3]

    uvloop.run(scene())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_instance_that_cannot_be_reached_is_named_in_a_502(role: str) -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            dead = s.p if role == "prefill" else s.d
            # A second router, whose instance list names a port without a listener.
            ports = (reserve_port(), s.d.port) if role == "prefill" else (s.p.port, reserve_port())
            async with router(*ports) as (url, releases):
                async with s.session.post(f"{url}/v1/completions", json=ONE) as answer:
                    body = await answer.read()
                assert answer.status == 502
                assert f"{role} instance http://127.0.0.1:" in message(body)
                assert "it cannot be reached: no connection (Connection refused)" in message(body)
                assert dead.calls == []
                assert releases.tickets == ([] if role == "prefill" else ["ticket-1"])

    uvloop.run(scene())


def test_the_stream_of_a_d_that_dies_ends_with_an_error_event_and_the_blocks_are_released() -> None:
    async def scene() -> None:
        async with stage(prefills, streams([EVENTS[0], b'data: {"te'], then="drop")) as s:
            status, _, body = await s.post(STREAMED)
            assert status == 200
            assert body.startswith(EVENTS[0])
            last = body.rstrip(b"\n").rsplit(b"\n\n", 1)[1]
            assert last.startswith(b"data: ")
            assert f"instance http://127.0.0.1:{s.d.port} did not complete its answer" in message(
                last.removeprefix(b"data: ")
            )
            assert s.releases.tickets == ["ticket-1"]

    uvloop.run(scene())


def test_a_stream_that_stands_still_ends_with_an_error_event() -> None:
    async def scene() -> None:
        async with stage(prefills, streams(EVENTS[:1], then="hang"), idle=0.3) as s:
            _, _, body = await s.post(STREAMED)
            assert body.startswith(EVENTS[0])
            assert b"it did not answer in time" in body
            await s.d.cancelled.wait()

    uvloop.run(scene())


def test_an_answer_of_another_kind_that_breaks_off_is_a_502() -> None:
    """The router relays such an answer only when it is complete, so that it can still ask another
    D.
    """

    async def scene() -> None:
        async with stage(
            prefills, streams([b'{"text":'], then="drop", content_type="application/json")
        ) as s:
            status, _, body = await s.post(ONE)
            assert (status, "decode instance" in message(body)) == (502, True)
            await s.releases.happened.wait()

    uvloop.run(scene())


def test_after_every_failure_the_next_good_request_is_served() -> None:
    async def scene() -> None:
        async with stage([drops_connection, prefills], [completes]) as s:
            assert [(await s.post(ONE))[0] for _ in range(4)] == [502, 200, 502, 200]
            assert await s.metric("kvferry:router_instance_failures_total") == 2
            assert await s.metric('kvferry:router_requests_total{route="/v1/completions"') == 4

    uvloop.run(scene())


# -- clients that leave --


async def leave(s: Stage, until: asyncio.Event, body: dict[str, Any]) -> None:
    """Send a request and close the connection once `until` has happened."""
    request = asyncio.create_task(s.post(body))
    await until.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


def test_a_client_that_leaves_during_prefill_cancels_it_and_d_is_never_asked() -> None:
    async def scene() -> None:
        async with stage(hangs, completes) as s:
            await leave(s, s.p.entered, ONE)
            await s.p.cancelled.wait()
            assert s.d.calls == []
            assert s.releases.handovers == []

    uvloop.run(scene())


@pytest.mark.parametrize("body", [ONE, STREAMED])
def test_a_client_that_leaves_before_d_answers_cancels_d_and_the_blocks_are_released(
    body: dict[str, Any],
) -> None:
    async def scene() -> None:
        async with stage(prefills, hangs) as s:
            await leave(s, s.d.entered, body)
            await s.d.cancelled.wait()
            await s.releases.happened.wait()
            assert s.releases.tickets == ["ticket-1"]

    uvloop.run(scene())


def test_a_client_that_leaves_during_the_stream_cancels_d_which_releases_by_itself() -> None:
    async def scene() -> None:
        async with stage(prefills, streams(EVENTS[:1], then="hang")) as s:
            async with s.session.post(f"{s.url}/v1/completions", json=STREAMED) as answer:
                assert await answer.content.readany() == EVENTS[0]
                answer.close()
            await s.d.cancelled.wait()
            assert s.releases.handovers == []
            assert await s.metric("kvferry:router_client_aborts_total") == 1

    uvloop.run(scene())


def test_a_client_that_stops_reading_is_dropped_after_the_idle_limit() -> None:
    async def scene() -> None:
        flood = streams([b"data: " + b"x" * 65536 + b"\n\n"] * 400, then="hang")
        async with stage(prefills, flood, idle=0.5) as s:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(s.url.rsplit(":", 1)[1]), limit=1024
            )
            body = json.dumps(STREAMED).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            await s.d.cancelled.wait()
            writer.close()

    uvloop.run(scene())


# -- PrefilledBlocks itself --


def test_blocks_are_released_once_unless_handed_over() -> None:
    async def scene() -> None:
        handover = read_prefill_answer(json.dumps({"kv_transfer_params": PARAMS}).encode())
        releases = RecordedReleases()
        with PrefilledBlocks(releases, handover) as held:
            held.mark_handed_over()
        assert releases.handovers == []
        with PrefilledBlocks(releases, handover):
            pass
        with PrefilledBlocks(releases, None):
            pass
        assert releases.handovers == [handover]

    uvloop.run(scene())
