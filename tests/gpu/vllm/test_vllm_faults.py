"""Tests real vLLM on a GPU when either side is stopped or killed in the middle of transfers: D's
tokens are right, blocks become free, and the side that lives goes on.

D recomputes what it cannot fetch, and P's leases are short.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest
from tests.e2e.harness import (
    Answer,
    Engine,
    Prompt,
    ask,
    ask_all,
    metrics,
    new_session,
    prefill,
    until,
)
from tests.gpu.vllm.gpu_fleet import GpuFleet, on_gpu
from tests.vllm.abused_cluster import kill
from tests.vllm.fleet import ready
from tests.vllm.vllm_asking import assert_free

from kvferry.cli.cluster.http_client import is_healthy
from kvferry.engine.make_model.writer import make_model

pytestmark = on_gpu

NUM_REQUESTS = 16
DEADLINE_S = 60.0
BRIEF = {"kv_lease_duration": 4}
A_MOMENT_S = 0.02
"""Requests are sent before and after it. How many transfers are under way then is not checked."""

_rng = random.Random(71)


@dataclass
class Servers:
    fleet: GpuFleet
    plain: Engine
    p: Engine
    d: Engine
    second_d: Engine


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    directory = tmp_path_factory.mktemp("faults")
    make_model(directory / "tiny")
    with GpuFleet(directory / "fleet", directory / "tiny") as fleet:
        made = Servers(
            fleet,
            fleet.start("plain", mode=None),
            fleet.start("P", extra=BRIEF),
            fleet.start("D", extra=BRIEF, policy="recompute"),
            fleet.start("second D", extra=BRIEF, policy="recompute"),
        )
        ready(made.plain, made.p, made.d, made.second_d)
        yield made


def fresh() -> list[Prompt]:
    """Return prompts that no engine has seen."""
    return [
        Prompt(tuple(_rng.randrange(10, 500) for _ in range(1500)), max_tokens=8)
        for _ in range(NUM_REQUESTS)
    ]


@asynccontextmanager
async def under_way(
    p: Engine, d: Engine, prompts: list[Prompt]
) -> AsyncIterator[tuple[aiohttp.ClientSession, list[asyncio.Task[Answer]]]]:
    """Yield when P has computed the prompts and D has begun with half of them; D is asked for the
    other half a moment later, while the body runs.
    """
    async with new_session(DEADLINE_S) as session:
        tickets = await asyncio.gather(*(prefill(session, p, prompt) for prompt in prompts))

        async def ask_d(number: int) -> Answer:
            await asyncio.sleep(0 if number % 2 else 3 * A_MOMENT_S)
            return await ask(session, d, prompts[number], kv_transfer_params=tickets[number])

        tasks = [asyncio.create_task(ask_d(number)) for number in range(len(prompts))]
        await asyncio.sleep(A_MOMENT_S)
        yield session, tasks


async def assert_right(
    servers: Servers, prompts: list[Prompt], tasks: list[asyncio.Task[Answer]]
) -> None:
    right = await ask_all(servers.plain, prompts, timeout_s=DEADLINE_S)
    assert await asyncio.gather(*tasks) == right


async def assert_hands_over(
    session: aiohttp.ClientSession, servers: Servers, p: Engine, d: Engine
) -> None:
    """Wait until D takes P's KV (again), with the right tokens each time."""

    async def is_loaded() -> bool:
        before = (await metrics(session, d))["kvferry:finished_loads_total"]
        prompt = fresh()[0]
        params = await prefill(session, p, prompt)
        answer = await ask(session, d, prompt, kv_transfer_params=params)
        assert answer == await ask(session, servers.plain, prompt)
        return (await metrics(session, d))["kvferry:finished_loads_total"] > before

    await until("D takes P's KV", is_loaded, DEADLINE_S)


def test_a_stopped_p_costs_d_no_right_token(servers: Servers) -> None:
    async def check() -> None:
        prompts = fresh()
        async with under_way(servers.p, servers.d, prompts) as (session, tasks):
            servers.p.pause()
            try:
                await assert_right(servers, prompts, tasks)
            finally:
                servers.p.resume()
            await assert_hands_over(session, servers, servers.p, servers.d)
            await assert_free(session, servers.p, servers.d)

    asyncio.run(check())


def test_a_stopped_d_holds_no_block_of_p_and_goes_on_with_right_tokens(servers: Servers) -> None:
    async def check() -> None:
        prompts = fresh()
        async with under_way(servers.p, servers.d, prompts) as (session, tasks):
            servers.d.pause()
            try:
                await assert_free(session, servers.p)
            finally:
                servers.d.resume()
            await assert_right(servers, prompts, tasks)
            await assert_hands_over(session, servers, servers.p, servers.d)
            await assert_free(session, servers.p, servers.d)

    asyncio.run(check())


def test_a_killed_d_holds_no_block_of_p(servers: Servers) -> None:
    async def check() -> None:
        async with under_way(servers.p, servers.d, fresh()) as (session, tasks):
            kill(servers.d)
            await asyncio.gather(*tasks, return_exceptions=True)
            assert is_healthy(servers.p.address)
            await assert_free(session, servers.p)
            await assert_hands_over(session, servers, servers.p, servers.second_d)

    asyncio.run(check())


def test_all_requests_behind_the_router_survive_a_killed_p(servers: Servers) -> None:
    router = servers.fleet.kvferry_router([servers.p], [servers.second_d])
    ready(router)

    async def check() -> None:
        prompts = fresh()
        async with new_session(DEADLINE_S) as session:
            tasks = [asyncio.create_task(ask(session, router, prompt)) for prompt in prompts]
            await asyncio.sleep(A_MOMENT_S)
            kill(servers.p)
            await assert_right(servers, prompts, tasks)
            assert is_healthy(servers.second_d.address)
            await assert_free(session, servers.second_d)

    asyncio.run(check())
