"""Tests which instance a failed leg counts against.

A P whose KV no D can use gets no D ejected, and an engine that hangs is ejected although its API
server answers probes.
"""

from typing import Any

import pytest
import uvloop
from aiohttp import web
from tests.router.stubs import (
    AS_ADMIN,
    PARAMS,
    Behaviour,
    Stage,
    completes,
    hangs,
    prefills,
    stage,
)

from kvferry.router.fleet.instances import Instance
from kvferry.router.options import RouterOptions

NEW_WEIGHTS = "new weights"
DEFAULT = RouterOptions().routing
AS_BY_DEFAULT: dict[str, Any] = {
    name: getattr(DEFAULT, name) for name in ("prefill_policy", "decode_policy", "max_retries")
}


def computes_with(weights: str) -> Behaviour:
    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"id": "p", "kv_transfer_params": PARAMS | {"ticket": weights}})

    return behave


async def has_old_weights(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answers as vLLM does if KV cannot be loaded."""
    if body["kv_transfer_params"]["ticket"] == NEW_WEIGHTS:
        return web.json_response({"error": {"message": "Internal server error"}}, status=500)
    return await completes(request, body)


async def states(s: Stage) -> list[str]:
    async with s.session.get(f"{s.url}/admin/instances", headers=AS_ADMIN) as answer:
        return [found["state"] for found in (await answer.json())["instances"]]


async def is_known(_: Instance, leg_id: str) -> str:
    return "P computed the KV with other weights"


async def is_unknown(_: Instance, leg_id: str) -> str:
    return ""


def test_a_p_that_no_d_understands_costs_a_retry_and_ejects_no_d() -> None:
    """One P has got new weights before all others, and some prompts prefer it."""

    async def scene() -> None:
        async with stage(
            [computes_with(NEW_WEIGHTS), computes_with("old weights")],
            [has_old_weights] * 3,
            ask_failure=is_known,
            **AS_BY_DEFAULT,
        ) as s:
            prompts = [f"{number} hello " * 50 for number in range(12)] + ["the same " * 200] * 6
            assert [(await s.post({"prompt": prompt}))[0] for prompt in prompts] == [200] * 18
            assert len(s.p.calls) > 3, "some requests went to the P with new weights first"
            assert set(await states(s)) == {"healthy"}

    uvloop.run(scene())


def test_the_control_an_error_without_such_a_reason_counts_against_d() -> None:
    async def scene() -> None:
        async with stage(
            computes_with(NEW_WEIGHTS), [has_old_weights] * 3, ask_failure=is_unknown
        ) as s:
            for _ in range(12):
                await s.post({"prompt": "a"})
            assert (await states(s)).count("ejected") == 2

    uvloop.run(scene())


def test_a_d_that_can_use_no_ps_kv_is_ejected() -> None:
    async def scene() -> None:
        async with stage(
            [computes_with(NEW_WEIGHTS)] * 3,
            [has_old_weights, completes],
            ask_failure=is_known,
            max_retries=3,
        ) as s:
            assert [(await s.post({"prompt": "a"}))[0] for _ in range(12)] == [200] * 12
            assert (await states(s)).count("ejected") == 1

    uvloop.run(scene())


@pytest.mark.parametrize("computes", [False, True])
def test_an_engine_that_computes_nothing_while_requests_time_out_is_ejected(computes: bool) -> None:
    """The control: an engine that computes is busy, and keeps its place."""

    async def scene() -> None:
        async with stage(
            [hangs, prefills], completes, answer=0.5, stall_s=0.4, probe_interval_s=0.05
        ) as s:
            for engine in s.prefillers:
                engine.num_tokens = 0

            async def hang_or_compute(
                request: web.Request, body: dict[str, Any]
            ) -> web.StreamResponse:
                s.p.num_tokens = (s.p.num_tokens or 0) + (1000 if computes else 0)
                return await hangs(request, body)

            s.p.behaviour = hang_or_compute
            num_requests = 0
            while "ejected" not in await states(s) and num_requests < 16:
                num_requests += 1
                await s.post({"prompt": "a"})
            assert (num_requests < 16) is not computes

    uvloop.run(scene())
