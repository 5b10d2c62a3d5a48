"""Tests push engines and pull engines behind one router: every request is served, and both legs
start together if both engines push.
"""

import asyncio

import aiohttp
import pytest
from tests.e2e.conftest import PATIENT, random_prompts
from tests.e2e.harness import (
    Cluster,
    Engine,
    Prompt,
    ask,
    ask_all,
    assert_quiescent,
    metrics,
    new_session,
)

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(48, seed=52, longest=600)
CONNECTORS = ("NixlPushConnector", "NixlConnector")


def test_a_mixed_fleet_answers_like_a_single_engine_and_starts_both_legs_together_where_both_push(
    cluster: Cluster, plain: Engine
) -> None:
    starting = [
        cluster.serve(f"{role}-{connector}", extra=PATIENT, connector=connector)
        for role in ("prefill", "decode")
        for connector in CONNECTORS
    ]
    engines = [process.ready() for process in starting]
    router = cluster.proxy(engines[:2], engines[2:]).ready()

    async def at_once() -> float:
        async with new_session() as session:
            return (await metrics(session, router))["kvferry:router_legs_at_once_total"]

    async def bring_into_step(session: aiohttp.ClientSession) -> None:
        """Make the router's next P and next D use the same connector. The router selects P and D in
        rotation, and concurrent requests leave both rotations at arbitrary positions. A request for
        /v1/models advances D's rotation by one.
        """
        before = await at_once()
        for start in (10, 20):
            assert (await ask(session, router, Prompt(tuple(range(start, 150 + start))))).is_ok
        if await at_once() == before:
            async with session.get(f"{router.url}/v1/models") as answer:
                assert answer.status == 200

    async def check() -> None:
        expected = await ask_all(plain, PROMPTS)
        answers = await ask_all(router, PROMPTS)
        assert [answer.status for answer in answers] == [200] * len(PROMPTS)
        assert answers == expected
        async with new_session() as session:
            await bring_into_step(session)
            so_far = await at_once()
            # One request at a time: a push P meets a push D, a pull P meets a pull D.
            for number in range(8):
                assert (
                    await ask(session, router, Prompt(tuple(range(number, 200 + number))))
                ).is_ok
            assert await at_once() == so_far + 4
            for engine in engines:
                assert (await metrics(session, engine))["kvferry:failed_loads_total"] == 0
            served = [
                (await metrics(session, engine))["kvferry:finished_loads_total"]
                for engine in engines
            ]
            assert served[:2] == [0, 0]
            assert all(served[2:])
            await assert_quiescent(session, *engines)

    asyncio.run(check())
