"""Tests fleets in which not every instance pushes: both legs start together only if both instances
push, and every request is served.
"""

import asyncio
from typing import Any

import pytest
import uvloop
from aiohttp import web
from tests.router.stubs import KEEP_NOTHING, Behaviour, answers, completes, prefills, stage
from tests.router.test_concurrent_legs import KEY, ONE, PUSHED, after, first_then, leg, pushes

from kvferry.router.fleet.instance_metrics import read_metrics


@pytest.mark.parametrize("mode", ["pull", ""])
def test_p_is_asked_first_where_d_does_not_say_that_it_pushes(mode: str) -> None:
    async def scene() -> None:
        async with stage(pushes, completes, push_key=KEY, modes=[mode]) as s:
            for _ in range(3):
                assert (await s.post(ONE))[0] == 200
                assert ("push_ticket" in leg(s)[0], leg(s)[1]) == (False, PUSHED | KEEP_NOTHING)
            assert await s.metric("kvferry:router_legs_at_once_total") == 0
            assert s.d.num_looks == 1

    uvloop.run(scene())


def test_each_d_of_a_mixed_fleet_gets_what_it_can_use() -> None:
    async def scene() -> None:
        async with stage(pushes, [completes, completes], push_key=KEY, modes=["pull", "push"]) as s:
            for _ in range(7):
                assert (await s.post(ONE))[0] == 200
            pulls, pushing = (
                [call.body["kv_transfer_params"] for call in d.calls] for d in s.decoders
            )
            assert pulls == [PUSHED | KEEP_NOTHING] * 4
            assert ["push_ticket" in params for params in pushing] == [True] * 3
            assert ["push_ticket" in call.body["kv_transfer_params"] for call in s.p.calls] == [
                False,
                True,
            ] * 3 + [False]

    uvloop.run(scene())


def test_a_pull_p_and_a_push_p_before_a_d_that_pushes() -> None:
    async def scene() -> None:
        async with stage([prefills, pushes], completes, push_key=KEY) as s:
            for _ in range(4):
                assert (await s.post(ONE))[0] == 200
            carried = [call.body["kv_transfer_params"] for call in s.d.calls]
            assert [params.get("ticket") for params in carried] == ["ticket-1"] * 3 + [None]
            assert "push_ticket" in carried[3]

    uvloop.run(scene())


def test_a_d_that_pulls_and_steps_in_for_one_that_refuses_waits_for_p_s_ticket() -> None:
    async def scene() -> None:
        released = asyncio.Event()
        refused = answers(503, "{}")

        async def refuses(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            released.set()
            return await refused(request, body)

        slow = first_then(pushes, first_then(pushes, after(released, pushes)))
        async with stage(
            slow, [first_then(completes, refuses), completes], push_key=KEY, modes=["push", "pull"]
        ) as s:
            assert [(await s.post(ONE))[0] for _ in range(3)] == [200] * 3
            assert "push_ticket" in s.decoders[0].calls[-1].body["kv_transfer_params"]
            assert s.decoders[1].calls[-1].body["kv_transfer_params"] == PUSHED | KEEP_NOTHING
            assert s.releases.handovers == []

    uvloop.run(scene())


@pytest.mark.parametrize("max_retries", [0, 2])
def test_p_that_push_and_refuse_cost_no_try(max_retries: int) -> None:
    """As in the case where P is asked first, a P that refuses has done nothing. One accepting P of
    five is enough.
    """

    async def scene() -> None:
        is_warm, computes = False, asyncio.Event()

        async def refuses_when_warm(
            request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            return await (answers(503, "{}") if is_warm else pushes)(request, body)

        async def computes_at_last(
            request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            if is_warm:
                computes.set()
            return await pushes(request, body)

        async def answers_what_was_computed(
            request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            return await (after(computes, completes) if is_warm else completes)(request, body)

        prefillers: list[Behaviour] = [*[refuses_when_warm] * 4, computes_at_last]
        async with stage(
            prefillers, answers_what_was_computed, push_key=KEY, max_retries=max_retries
        ) as s:
            for _ in prefillers:
                assert (await s.post(ONE))[0] == 200
            is_warm = True
            assert (await s.post(ONE))[0] == 200
            assert [len(p.calls) for p in s.prefillers] == [2] * 5
            assert await s.metric("kvferry:router_legs_at_once_total") == 5

    uvloop.run(scene())


def test_a_d_that_pulls_and_waits_for_p_is_not_asked_when_p_objects() -> None:
    async def scene() -> None:
        refused = asyncio.Event()

        async def refuses(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            refused.set()
            return await answers(503, "{}")(request, body)

        objects = first_then(pushes, first_then(pushes, after(refused, answers(400, "{}"))))
        async with stage(
            objects,
            [first_then(completes, refuses), completes],
            push_key=KEY,
            modes=["push", "pull"],
        ) as s:
            assert [(await s.post(ONE))[0] for _ in range(3)] == [200, 200, 400]
            assert len(s.decoders[1].calls) == 1

    uvloop.run(scene())


def test_a_d_that_fails_is_looked_at_again() -> None:
    """D may be another incarnation, with another connector."""

    async def scene() -> None:
        fails = answers(500, '{"error":{"message":"given a push ticket"}}')
        async with stage(
            pushes, first_then(completes, first_then(fails, completes)), push_key=KEY
        ) as s:
            assert (await s.post(ONE))[0] == 200
            s.d.mode = "push"
            assert (await s.post(ONE))[0] == 500
            s.d.mode = "pull"
            for _ in range(2):
                assert (await s.post(ONE))[0] == 200
                assert leg(s)[1] == PUSHED | KEEP_NOTHING
            assert s.d.num_looks == 2

    uvloop.run(scene())


def test_a_d_restarted_with_another_connector_is_noticed_in_time() -> None:
    async def scene() -> None:
        async with stage(pushes, completes, push_key=KEY, probe_interval_s=0.01) as s:
            for _ in range(2):
                await s.post(ONE)
            assert "push_ticket" in leg(s)[1]
            s.d.mode = "pull"
            while "push_ticket" in leg(s)[1]:
                assert (await s.post(ONE))[0] == 200
            assert s.d.num_looks > 1

    uvloop.run(scene())


@pytest.mark.parametrize(
    ("page", "is_push"),
    [
        (b'kvferry:transfer_mode{mode="push",model_name="m"} 1.0\n', True),
        (
            b'# HELP x\nkvferry:transfer_mode{engine="0",model_name="m",mode="push"} 1\nother 2\n',
            True,
        ),
        (b'kvferry:transfer_mode{model_name="m",mode="pull"} 1.0\n', False),
        (b'kvferry:transfer_mode{model_name="mode=\\"push\\"",mode="pull"} 1.0\n', False),
        (b'kvferry:transfer_mode{model_name="m",mode="push"} 0.0\n', False),
        (b'# kvferry:transfer_mode{mode="push"} 1.0\n', False),
        (b"", False),
    ],
)
def test_what_a_page_of_metrics_says(page: bytes, is_push: bool) -> None:
    assert read_metrics(page).is_push is is_push
