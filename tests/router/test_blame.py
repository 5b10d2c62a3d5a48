"""Tests which instance a failed leg counts against.

A P whose KV no D can use gets no D ejected, nor does a request that no D can load. An engine that
hangs is ejected although its API server answers probes.
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
    prefills_without_blocks,
    stage,
)

from kvferry.router.fleet.instances import Instance
from kvferry.router.options import RouterOptions
from kvferry.router.serving.legs import FailureQuery

NEW_WEIGHTS = "new weights"
FAILED_LEGS: set[str] = set()
"""The legs whose transfer failed, as the engines' side channels know them."""
DEFAULT = RouterOptions().routing
AS_BY_DEFAULT: dict[str, Any] = {
    name: getattr(DEFAULT, name) for name in ("prefill_policy", "decode_policy", "max_retries")
}


def computes_with(weights: str) -> Behaviour:
    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"id": "p", "kv_transfer_params": PARAMS | {"ticket": weights}})

    return behave


async def fails(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answers as vLLM does if KV cannot be loaded."""
    FAILED_LEGS.add(body["kv_transfer_params"]["leg_id"])
    return web.json_response({"error": {"message": "Internal server error"}}, status=500)


def is_of_new_weights(body: dict[str, Any]) -> bool:
    return bool(body.get("kv_transfer_params", {}).get("ticket") == NEW_WEIGHTS)


async def has_old_weights(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await (fails if is_of_new_weights(body) else completes)(request, body)


async def recomputes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answers as vLLM with the policy `recompute` does: it computes what it cannot load."""
    if is_of_new_weights(body):
        FAILED_LEGS.add(body["kv_transfer_params"]["leg_id"])
    return await completes(request, body)


async def states(s: Stage) -> list[str]:
    async with s.session.get(f"{s.url}/admin/instances", headers=AS_ADMIN) as answer:
        return [found["state"] for found in (await answer.json())["instances"]]


async def is_known(_: Instance, leg_id: str) -> str:
    return "P computed the KV with other weights" if leg_id in FAILED_LEGS else ""


async def is_unknown(_: Instance, leg_id: str) -> str:
    return ""


async def is_known_of_failures(_: Instance, leg_id: str) -> str | None:
    """The other engines' side channels do not reply."""
    return await is_known(_, leg_id) or None


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


@pytest.mark.parametrize(
    ("other", "ask", "num_ejected"),
    [
        (recomputes, is_known, 0),
        # The controls: this D loads the KV, and no D is believed that says nothing about the load.
        (completes, is_known, 1),
        (completes, is_known_of_failures, 0),
    ],
)
def test_only_a_d_that_has_loaded_ps_kv_shows_that_the_kv_is_good(
    other: Behaviour, ask: FailureQuery, num_ejected: int
) -> None:
    """One D has the policy `fail`, the other answers every request."""

    async def scene() -> None:
        async with stage(
            computes_with(NEW_WEIGHTS), [has_old_weights, other], ask_failure=ask, max_retries=1
        ) as s:
            assert [(await s.post({"prompt": "a"}))[0] for _ in range(12)] == [200] * 12
            assert (await states(s)).count("ejected") == num_ejected

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


def test_a_d_that_can_not_use_the_kv_of_the_only_p_is_ejected() -> None:
    """The other D uses the KV of the same P all the time."""

    async def scene() -> None:
        async with stage(
            computes_with(NEW_WEIGHTS),
            [has_old_weights, completes],
            ask_failure=is_known,
            max_retries=1,
        ) as s:
            assert [(await s.post({"prompt": "a"}))[0] for _ in range(12)] == [200] * 12
            assert await states(s) == ["healthy", "ejected", "healthy"]

    uvloop.run(scene())


@pytest.mark.parametrize("num_broken", [1, 2])
def test_without_retries_too_a_d_that_can_use_no_kv_is_ejected(num_broken: int) -> None:
    """No request shows by itself that another D can use the KV: other requests do."""

    async def scene() -> None:
        decode: list[Behaviour] = [has_old_weights] * num_broken + [completes]
        async with stage(computes_with(NEW_WEIGHTS), decode, ask_failure=is_known) as s:
            for _ in range(24):
                await s.post({"prompt": "a"})
            assert (await states(s)).count("ejected") == num_broken
            assert (await s.post({"prompt": "a"}))[0] == 200

    uvloop.run(scene())


def test_prompts_without_kv_do_not_show_that_a_p_is_good() -> None:
    """The KV of the only P is of no use to any D; prompts too short for KV are served."""

    async def computes_long_prompts(
        request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        behave = (
            prefills_without_blocks if body["prompt"] == "short" else computes_with(NEW_WEIGHTS)
        )
        return await behave(request, body)

    async def scene() -> None:
        async with stage(computes_long_prompts, [has_old_weights] * 2, ask_failure=is_known) as s:
            for _ in range(12):
                # Round robin: the first D gets the long prompts, the second the short ones.
                assert (await s.post({"prompt": "a long prompt"}))[0] == 502
                assert (await s.post({"prompt": "short"}))[0] == 200
            assert "ejected" not in await states(s)

    uvloop.run(scene())


@pytest.mark.parametrize("max_retries", [0, 1, 2])
def test_a_request_whose_kv_no_d_can_use_is_retried_once_more_than_max_retries(
    max_retries: int,
) -> None:
    async def scene() -> None:
        async with stage(
            [prefills] * 12, [fails] * 4, ask_failure=is_known, max_retries=max_retries
        ) as s:
            assert (await s.post({"prompt": "a"}))[0] == 502
            for engines in (s.prefillers, s.decoders):
                assert sum(len(engine.calls) for engine in engines) == max_retries + 2

    uvloop.run(scene())


def test_requests_whose_kv_no_d_can_use_eject_no_d() -> None:
    """Every other request is a good one, which shows that the Ps and the Ds work."""

    async def is_good_or_bad(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (fails if body["prompt"] == "bad" else completes)(request, body)

    async def scene() -> None:
        async with stage(
            [prefills] * 12, [is_good_or_bad] * 4, ask_failure=is_known, max_retries=6
        ) as s:
            for _ in range(12):
                assert (await s.post({"prompt": "good"}))[0] == 200
                assert (await s.post({"prompt": "bad"}))[0] == 502
            assert set(await states(s)) == {"healthy"}

    uvloop.run(scene())


@pytest.mark.parametrize("ask", [is_unknown, is_known])
def test_a_p_that_refuses_every_prefill_leg_is_ejected_whether_or_not_it_says_why(
    ask: FailureQuery,
) -> None:
    """A P with the `kv_role` of a consumer refuses every leg, and its side channel says why."""

    async def scene() -> None:
        async with stage([fails, prefills], completes, ask_failure=ask, max_retries=1) as s:
            assert [(await s.post({"prompt": "a"}))[0] for _ in range(12)] == [200] * 12
            assert await states(s) == ["ejected", "healthy", "healthy"]
            assert len(s.p.calls) == 3

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
