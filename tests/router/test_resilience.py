"""Tests retries: a leg that fails on one instance is retried on another while the client has
received nothing, and the client sees the failure only when no instance is left to try.
"""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvloop
from aiohttp import web
from tests.ports import reserve_port
from tests.router.stubs import (
    AS_ADMIN,
    Behaviour,
    Stage,
    StubEngine,
    answers,
    completes,
    drops_connection,
    hangs,
    prefills,
    stage,
    streams,
    stub_engine,
)
from tests.router.test_proxy import ONE, STREAMED, message

from kvferry.router.serving.instance_client import excerpt
from kvferry.types import FailurePolicy

GOOD = [b'data: {"text":"a"}\n\n', b"data: [DONE]\n\n"]
SPEAKS_OF_FAILURE = [
    b'data: {"error":{"message":"KV load failed","code":500}}\n\n',
    b"data: [DONE]\n\n",
]
FAILING = {
    "drops": drops_connection,
    "500": answers(500, '{"error":{"message":"boom"}}'),
    "502": answers(502, '{"error":{"message":"P is gone"}}'),
    "no json": answers(200, "no json"),
}
PERSISTENT: dict[str, Any] = {"max_retries": 2}


async def add_instance(s: Stage, role: str, port: int) -> None:
    new = {"role": role, "url": f"http://127.0.0.1:{port}"}
    async with s.session.post(f"{s.url}/admin/instances", json=new, headers=AS_ADMIN) as answer:
        assert answer.status == 201


@pytest.mark.parametrize("way", ["drops", "500", "no json"])
def test_a_prefill_that_fails_is_tried_on_another(way: str) -> None:
    async def scene() -> None:
        async with stage([FAILING[way], prefills], completes, **PERSISTENT) as s:
            for _ in range(4):
                status, _, body = await s.post(ONE)
                assert (status, json.loads(body)["choices"]) == (200, [{"text": "hello"}])
            assert s.releases.handovers == []
            assert len(s.d.calls) == 4

    uvloop.run(scene())


@pytest.mark.parametrize("way", ["drops", "500", "502"])
@pytest.mark.parametrize("request_body", [ONE, STREAMED])
def test_a_decode_that_fails_before_its_first_token_is_tried_on_another(
    way: str, request_body: dict[str, Any]
) -> None:
    async def scene() -> None:
        good: Behaviour = streams(GOOD) if request_body is STREAMED else completes
        async with stage(prefills, [FAILING[way], good], **PERSISTENT) as s:
            for _ in range(4):
                assert (await s.post(request_body))[0] == 200
            assert s.releases.tickets == ["ticket-1"] * len(s.releases.tickets)

    uvloop.run(scene())


def test_a_stream_that_begins_with_an_error_is_tried_on_another() -> None:
    """vLLM answers 200 before it knows whether it can serve the request."""

    async def scene() -> None:
        async with stage(prefills, [streams(SPEAKS_OF_FAILURE), streams(GOOD)], **PERSISTENT) as s:
            for _ in range(4):
                status, _, body = await s.post(STREAMED)
                assert (status, body) == (200, b"".join(GOOD))

    uvloop.run(scene())


def test_an_answer_that_is_no_stream_and_breaks_off_is_tried_on_another() -> None:
    async def scene() -> None:
        part = streams([b'{"text":'], then="drop", content_type="application/json")
        async with stage(prefills, [part, completes], **PERSISTENT) as s:
            for _ in range(4):
                status, _, body = await s.post(ONE)
                assert (status, json.loads(body)["choices"]) == (200, [{"text": "hello"}])

    uvloop.run(scene())


@pytest.mark.parametrize("cut", range(1, len(SPEAKS_OF_FAILURE[0])))
def test_an_error_is_seen_however_its_event_is_cut(cut: int) -> None:
    async def scene() -> None:
        event = SPEAKS_OF_FAILURE[0]
        async with stage(
            prefills,
            [streams([b": hello\n\n", event[:cut], event[cut:]]), streams(GOOD)],
            **PERSISTENT,
        ) as s:
            for _ in range(2):
                assert (await s.post(STREAMED))[2] == b"".join(GOOD)

    uvloop.run(scene())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_instances_that_cannot_be_reached_cost_no_try(role: str) -> None:
    """Nothing was sent to such an instance, so nothing is repeated: no request fails although there
    are more such instances than tries.
    """

    async def scene() -> None:
        async with stage(prefills, completes, max_retries=1, failures_in_a_row=100) as s:
            for _ in range(4):
                await add_instance(s, role, reserve_port())
            for _ in range(10):
                status, _, body = await s.post(ONE)
                assert (status, body[:40]) == (200, b'{"id": "d", "choices": [{"text": "hello"')
            assert await s.metric(f'kvferry:router_retries_total{{role="{role}"}}') > 4

    uvloop.run(scene())


def test_a_decode_instance_that_failed_for_its_p_is_asked_again_when_no_other_can_be_reached() -> (
    None
):
    async def scene() -> None:
        is_first = True

        async def could_not_get_the_blocks_at_first(
            request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            nonlocal is_first
            was_first, is_first = is_first, False
            return await (FAILING["502"] if was_first else completes)(request, body)

        async with stage(
            prefills, could_not_get_the_blocks_at_first, max_retries=2, failures_in_a_row=100
        ) as s:
            await add_instance(s, "decode", reserve_port())
            assert (await s.post(ONE))[0] == 200
            assert [len(s.p.calls), len(s.d.calls)] == [2, 2]
            assert await s.metric("kvferry:router_instance_failures_total") == 2, (
                "the other was tried in between"
            )

    uvloop.run(scene())


def test_decode_instances_that_cannot_be_reached_are_asked_last_when_all_have_failed() -> None:
    """They have no load, so the policy alone would choose them until no retry is left."""

    async def scene() -> None:
        num_failures = 2
        fails = FAILING["502"]

        async def could_not_get_the_blocks_twice(
            request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            nonlocal num_failures
            num_failures -= 1
            return await (fails if num_failures >= 0 else completes)(request, body)

        async with stage(
            prefills, could_not_get_the_blocks_twice, max_retries=2, failures_in_a_row=100
        ) as s:
            for _ in range(2):
                await add_instance(s, "decode", reserve_port())
            assert (await s.post(ONE))[0] == 200
            assert len(s.d.calls) == 3

    uvloop.run(scene())


@pytest.mark.parametrize("num_asked_before", [0, 1])
def test_a_refusal_by_one_d_is_told_rather_than_that_another_is_down(num_asked_before: int) -> None:
    """In either order of asking: the client learns when to come back."""

    async def scene() -> None:
        full = answers(503, "{}", Retry_After="7")
        async with stage(prefills, full, max_retries=2, failures_in_a_row=100) as s:
            await add_instance(s, "decode", reserve_port())
            for _ in range(num_asked_before + 1):
                status, headers, _ = await s.post(ONE)
            assert (status, headers.get("Retry-After")) == (503, "7")

    uvloop.run(scene())


def test_a_d_that_dies_is_replaced_by_one_that_has_come_back_meanwhile() -> None:
    """All Ds have failed the request by then, but one of them only because it was restarting."""

    async def scene() -> None:
        port = reserve_port()

        async def dies_when_the_other_is_back(
            request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            if len(s.d.calls) != 2:
                return await (completes if len(s.d.calls) == 1 else drops_connection)(request, body)
            await back.enter_async_context(stub_engine(StubEngine(completes), port))
            return await drops_connection(request, body)

        async with (
            AsyncExitStack() as back,
            stage(prefills, dies_when_the_other_is_back, max_retries=1, failures_in_a_row=100) as s,
        ):
            await add_instance(s, "decode", port)
            # The second request tries the other D first, because it is its turn.
            assert [(await s.post(ONE))[0] for _ in range(2)] == [200, 200]

    uvloop.run(scene())


@pytest.mark.parametrize("num_decoders", [2, 4])
def test_blocks_that_went_with_the_d_that_fetched_them_cost_one_retry(num_decoders: int) -> None:
    """D dies after it has fetched P's blocks, and the next D finds none: the request can still
    survive the death of another D.
    """

    async def scene() -> None:
        behaviours = iter([drops_connection, FAILING["502"], drops_connection, completes])

        async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await next(behaviours)(request, body)

        async with stage(
            prefills, [behave] * num_decoders, max_retries=2, failures_in_a_row=100
        ) as s:
            assert (await s.post(ONE))[0] == 200
            assert len(s.p.calls) == 2, "fresh blocks once, after the D that found none"

    uvloop.run(scene())


def begins(
    status: int, body: bytes, then: str, content_type: str = "application/json"
) -> Behaviour:
    """Sends the status and a part of the body, then hangs or drops the connection."""

    async def behave(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Type": content_type})
        await response.prepare(request)
        await response.write(body)
        return await (hangs if then == "hangs" else drops_connection)(request, {})

    return behave


UNFINISHED = [
    (500, b'{"error":', "application/json"),
    (503, b'{"error":', "application/json"),
    (200, SPEAKS_OF_FAILURE[0], "text/event-stream"),
]


@pytest.mark.parametrize("then", ["hangs", "drops"])
@pytest.mark.parametrize(("status", "body", "content_type"), UNFINISHED)
def test_who_says_that_it_failed_need_not_end_its_sentence(
    status: int, body: bytes, content_type: str, then: str
) -> None:
    """The router asks the next instance long before `timeouts.answer` has passed, and gives it
    fresh blocks if the first instance may have used up the old ones.
    """

    async def scene() -> None:
        failing = begins(status, body, then, content_type)
        async with stage(prefills, [failing, streams(GOOD)], probe=0.2, **PERSISTENT) as s:
            for _ in range(2):
                assert (await s.post(STREAMED))[2] == b"".join(GOOD)
            num_failed = len(s.d.calls)
            assert num_failed > 0
            assert len(s.p.calls) == 2 + (0 if status == 503 else num_failed)
        async with stage(prefills, failing, probe=0.2) as s:
            status_then, headers, said = await s.post(STREAMED)
            assert status_then == (502 if status == 500 else status)
            assert said == body if status == 200 else message(said)
            assert ("Retry-After" in headers) is (status == 503)

    uvloop.run(scene())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_503_always_says_when_to_come_back(role: str) -> None:
    async def scene() -> None:
        for said, heard in ((answers(503, "{}"), "1"), (answers(503, "{}", Retry_After="7"), "7")):
            async with stage(
                said if role == "prefill" else prefills, completes if role == "prefill" else said
            ) as s:
                status, headers, body = await s.post(ONE)
                assert (status, headers["Retry-After"], body) == (503, heard, b"{}")

    uvloop.run(scene())


def test_without_retries_the_client_hears_the_error_itself() -> None:
    async def scene() -> None:
        async with stage(prefills, streams(SPEAKS_OF_FAILURE)) as s:
            _, _, body = await s.post(STREAMED)
            assert b"KV load failed" in body

    uvloop.run(scene())


def test_a_stream_that_has_begun_is_never_tried_again() -> None:
    """The counterpart of the tests above: what the client has received cannot be taken back."""

    async def scene() -> None:
        async with stage(
            prefills, [streams(GOOD[:1], then="drop"), streams(GOOD[:1], then="drop")], **PERSISTENT
        ) as s:
            status, _, body = await s.post(STREAMED)
            assert (status, body[: len(GOOD[0])]) == (200, GOOD[0])
            assert b"did not complete its answer" in body
            assert sum(len(engine.calls) for engine in s.decoders) == 1

    uvloop.run(scene())


def test_a_request_is_not_tried_for_ever() -> None:
    """A request that kills engines must not kill the fleet."""

    async def scene() -> None:
        async with stage([drops_connection] * 6, completes, max_retries=2) as s:
            status, _, body = await s.post(ONE)
            assert (status, "prefill instance" in message(body)) == (502, True)
            assert sum(len(engine.calls) for engine in s.prefillers) == 3

    uvloop.run(scene())


def test_an_objection_is_not_tried_again() -> None:
    async def scene() -> None:
        objects = answers(400, '{"error":{"message":"too long"}}')
        async with stage([objects, objects], [completes, completes], **PERSISTENT) as s:
            assert (await s.post(ONE))[0] == 400
            assert sum(len(engine.calls) for engine in s.prefillers) == 1

    uvloop.run(scene())


@pytest.mark.parametrize("is_reachable", [True, False])
def test_without_a_prefill_instance_a_decode_instance_computes_the_prompt(
    is_reachable: bool,
) -> None:
    async def scene() -> None:
        behaviours: list[Behaviour] = [drops_connection] if is_reachable else []
        async with stage(behaviours, completes, without_prefill=FailurePolicy.RECOMPUTE) as s:
            for _ in range(5):
                assert (await s.post(ONE))[0] == 200
            assert all("kv_transfer_params" not in call.body for call in s.d.calls)
            assert await s.metric("kvferry:router_fallbacks_total") == 5

    uvloop.run(scene())


def test_a_prefill_side_that_is_full_is_no_reason_to_burden_the_decode_side() -> None:
    async def scene() -> None:
        async with stage(
            answers(503, "{}", Retry_After="7"), completes, without_prefill=FailurePolicy.RECOMPUTE
        ) as s:
            status, headers, _ = await s.post(ONE)
            assert (status, headers["Retry-After"], s.d.calls) == (503, "7", [])

    uvloop.run(scene())


def test_a_dead_instance_is_asked_a_few_times_and_then_no_more() -> None:
    async def scene() -> None:
        async with stage(
            [drops_connection, prefills],
            completes,
            max_retries=1,
            without_prefill=FailurePolicy.RECOMPUTE,
        ) as s:
            for _ in range(30):
                assert (await s.post(ONE))[0] == 200
            dead, alive = (len(engine.calls) for engine in s.prefillers)
            assert dead < 10
            assert alive == 30

    uvloop.run(scene())


def test_an_instance_that_comes_back_is_given_requests_again() -> None:
    async def scene() -> None:
        is_up = asyncio.Event()

        async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await (prefills if is_up.is_set() else drops_connection)(request, body)

        quick: dict[str, Any] = {
            "first_ejection_s": 0.01,
            "probe_interval_s": 0.01,
            "probe_ejected_s": 0.01,
        }
        async with stage(
            [behave, prefills],
            completes,
            max_retries=1,
            without_prefill=FailurePolicy.RECOMPUTE,
            **quick,
        ) as s:
            for _ in range(10):
                await s.post(ONE)
            is_up.set()
            before = len(s.p.calls)
            while len(s.p.calls) < before + 5:
                assert (await s.post(ONE))[0] == 200

    uvloop.run(scene())


def test_a_request_that_takes_too_long_in_all_is_a_504() -> None:
    async def scene() -> None:
        async with stage(prefills, hangs, request=0.2) as s:
            status, _, body = await s.post(ONE)
            assert (status, message(body)) == (504, "the request took longer than 0.2 s")
            await s.d.cancelled.wait()
            await s.releases.happened.wait()

    uvloop.run(scene())


def test_beyond_the_queue_requests_are_refused_at_once_and_told_when_to_come_back() -> None:
    async def scene() -> None:
        async with stage(hangs, completes, max_running=1, max_waiting=1, tenant_waiting=None) as s:
            first = asyncio.create_task(s.post(ONE))
            await s.p.entered.wait()
            second = asyncio.create_task(s.post(ONE))
            while await s.metric("kvferry:router_queued_requests") < 1:
                await asyncio.sleep(0)
            status, headers, _ = await s.post(ONE)
            assert (status, int(headers["Retry-After"]) >= 1) == (503, True)
            assert len(s.p.calls) == 1
            for task in (first, second):
                task.cancel()
            await asyncio.gather(first, second, return_exceptions=True)
            await s.p.cancelled.wait()

    uvloop.run(scene())


def test_one_tenant_that_sends_too_much_is_told_so_and_others_are_served() -> None:
    async def scene() -> None:
        async def holds_one(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await (hangs if request.headers["Authorization"] == "Bearer busy" else prefills)(
                request, body
            )

        async with stage(
            holds_one, completes, max_running=8, tenant_running=1, tenant_waiting=0
        ) as s:
            first = asyncio.create_task(s.post(ONE, Authorization="Bearer busy"))
            await s.p.entered.wait()
            assert (await s.post(ONE, Authorization="Bearer busy"))[0] == 429
            assert (await s.post(ONE, Authorization="Bearer other"))[0] == 200
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    uvloop.run(scene())


def test_an_instance_that_cannot_be_reached_costs_nobody_an_answer() -> None:
    async def scene() -> None:
        async with stage(prefills, completes, **PERSISTENT) as s:
            gone = f"http://127.0.0.1:{reserve_port()}"
            async with s.session.post(
                f"{s.url}/admin/instances",
                json={"role": "decode", "url": gone},
                headers=AS_ADMIN,
            ) as answer:
                assert answer.status == 201
            for _ in range(6):
                assert (await s.post(ONE))[0] == 200

    uvloop.run(scene())


def test_what_an_instance_says_is_one_line_for_the_client() -> None:
    assert (
        excerpt(b"no\r\nINFO all is well\x1b[2J\xe2\x80\xa8\xff")
        == "no  INFO all is well [2J \ufffd"
    )
    assert excerpt(b"x" * 5000) == "x" * 300 + "…"
