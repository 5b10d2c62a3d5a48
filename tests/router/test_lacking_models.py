"""Tests fleets whose instances do not have the same models: an adapter was loaded before one of
them joined, or on some of them only.
"""

import asyncio
from typing import Any

import pytest
import uvloop
from aiohttp import web
from tests.router.stubs import (
    PARAMS,
    Behaviour,
    answers,
    completes,
    drops_connection,
    prefills,
    stage,
)
from tests.router.test_concurrent_legs import KEY, pushes
from tests.router.test_proxy import message

from kvferry.types import FailurePolicy

ADAPTER = {"model": "adapter", "prompt": "hello", "max_tokens": 4}
BASE = {**ADAPTER, "model": "base"}
FULL = answers(503, '{"error":{"message":"full"}}')
RECOMPUTE: dict[str, Any] = {"without_prefill": FailurePolicy.RECOMPUTE}


def only_base(behaviour: Behaviour) -> Behaviour:
    """Behaves as `behaviour` for requests that name the base model, and has no other."""

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["model"] == "base":
            return await behaviour(request, body)
        error = {"message": "The model `adapter` does not exist.", "code": 404}
        return web.json_response({"error": error}, status=404)

    return behave


def test_a_request_reaches_the_p_and_the_d_that_have_its_model() -> None:
    async def scene() -> None:
        async with stage([only_base(prefills), prefills], [only_base(completes), completes]) as s:
            for _ in range(4):
                assert (await s.post(ADAPTER))[0] == 200
            for call in s.decoders[1].calls:
                assert call.body["kv_transfer_params"]["ticket"] == PARAMS["ticket"]
            assert (len(s.prefillers[1].calls), len(s.decoders[1].calls)) == (4, 4)
            assert s.releases.tickets == [], "D uses the blocks of P"

    uvloop.run(scene())


def test_a_model_that_no_instance_has_is_a_404_and_nothing_else() -> None:
    async def scene() -> None:
        async with stage(
            [only_base(prefills), only_base(prefills)], [only_base(completes)] * 2, **RECOMPUTE
        ) as s:
            status, _, text = await s.post(ADAPTER)
            assert (status, message(text)) == (404, "The model `adapter` does not exist.")
            asked = [len(engine.calls) for engine in (*s.prefillers, *s.decoders)]
            assert asked == [1, 1, 1, 1]
            assert await s.metric("kvferry:router_fallbacks_total") == 0
            assert await s.metric('kvferry:router_outcomes_total{outcome="invalid"') == 1
            assert await s.metric("kvferry:router_instance_failures") == 0

    uvloop.run(scene())


def test_d_computes_the_prompt_if_no_p_has_the_model() -> None:
    async def scene() -> None:
        async with stage(only_base(prefills), completes, **RECOMPUTE) as s:
            assert (await s.post(ADAPTER))[0] == 200
            assert "kv_transfer_params" not in s.d.calls[0].body
            assert await s.metric("kvferry:router_fallbacks_total") == 1
        async with stage(only_base(prefills), completes) as s:
            assert ((await s.post(ADAPTER))[0], s.d.calls) == (404, [])

    uvloop.run(scene())


def test_p_frees_its_blocks_if_no_d_has_the_model() -> None:
    async def scene() -> None:
        async with stage(prefills, only_base(completes)) as s:
            assert (await s.post(ADAPTER))[0] == 404
            assert s.releases.tickets == [PARAMS["ticket"]]

    uvloop.run(scene())


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("behaviour", "status"), [(FULL, 503), (drops_connection, 502)])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_instance_that_may_have_the_model_decides_what_the_client_gets(
    is_first: bool, behaviour: Behaviour, status: int, role: str
) -> None:
    """A 404 would be final for the client, and the other instance may be back in a moment."""

    async def scene() -> None:
        lacks = only_base(prefills if role == "prefill" else completes)
        pair = [behaviour, lacks] if is_first else [lacks, behaviour]
        behaviours = (pair, [completes]) if role == "prefill" else ([prefills], pair)
        async with stage(*behaviours) as s:
            assert (await s.post(ADAPTER))[0] == status

    uvloop.run(scene())


class PushingPair:
    """A P that pushes and a D that answers when P has pushed, or when it shall compute alone."""

    def __init__(self) -> None:
        self._has_pushed = asyncio.Event()

    async def prefill(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self._has_pushed.set()
        return await pushes(request, body)

    async def decode(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if "kv_transfer_params" in body:
            await self._has_pushed.wait()
            self._has_pushed.clear()
        return await completes(request, body)


@pytest.mark.parametrize(("lacks_p", "lacks_d"), [(True, True), (True, False), (False, True)])
def test_legs_in_parallel_reach_the_instances_that_have_the_model(
    lacks_p: bool, lacks_d: bool
) -> None:
    async def scene() -> None:
        pair = PushingPair()
        prefillers = [only_base(pair.prefill) if lacks_p else pair.prefill, pair.prefill]
        decoders = [only_base(pair.decode) if lacks_d else pair.decode, pair.decode]
        async with stage(prefillers, decoders, push_key=KEY) as s:
            for _ in range(2):
                assert (await s.post(BASE))[0] == 200
            for body in (ADAPTER, BASE, BASE, ADAPTER):
                assert (await s.post(body))[0] == 200
            num_asked = sum(len(engine.calls) for engine in s.prefillers)
            assert await s.metric("kvferry:router_legs_at_once_total") == num_asked - 2

    uvloop.run(scene())


def test_d_computes_the_prompt_if_no_p_that_pushes_has_the_model() -> None:
    async def scene() -> None:
        pair = PushingPair()
        async with stage(only_base(pair.prefill), pair.decode, push_key=KEY, **RECOMPUTE) as s:
            assert (await s.post(BASE))[0] == 200
            assert (await s.post(ADAPTER))[0] == 200
            assert "kv_transfer_params" not in s.d.calls[-1].body

    uvloop.run(scene())
