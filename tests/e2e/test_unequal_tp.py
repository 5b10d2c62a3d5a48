"""Tests P and D of different tensor-parallel sizes: a single engine's tokens, blocks free at once,
and all blocks free after the death of either side.
"""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import PATIENT, SHORT, random_prompts
from tests.e2e.harness import (
    Answer,
    Cluster,
    Engine,
    Prompt,
    ask,
    ask_all,
    assert_leaving_costs_nothing,
    assert_quiescent,
    metrics,
    new_session,
    prefill,
    until,
)

pytestmark = pytest.mark.slow

GREEDY = random_prompts(40, seed=31, longest=500)
PAIRS = [((2, 1), "shm"), ((1, 2), "nixl")]
"""tests/compatibility tests all other pairs, with engines in one process."""


@dataclass(frozen=True)
class Trio:
    transport: str
    p: Engine
    d: Engine
    router: Engine


def start(
    cluster: Cluster,
    sizes: tuple[int, int],
    extra: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
) -> list[Engine]:
    starting = [
        cluster.serve(
            name, "--tensor-parallel-size", str(size), extra=extra, environment=surroundings
        )
        for name, size, surroundings in (
            ("prefill", sizes[0], None),
            ("decode", sizes[1], environment),
        )
    ]
    return [process.ready() for process in starting]


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[Answer]:
    return asyncio.run(ask_all(plain, GREEDY))


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def trio(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Trio]:
    sizes, transport = request.param
    with Cluster(tmp_path_factory.mktemp(transport), model) as cluster:
        p, d = start(cluster, sizes, {"transports": [transport], **PATIENT})
        yield Trio(transport, p, d, cluster.proxy([p], [d]).ready())


def test_greedy_tokens_equal_a_single_engines_and_blocks_are_free_long_before_the_lease_ends(
    trio: Trio, expected: list[Answer]
) -> None:
    async def check() -> None:
        answers = await ask_all(trio.router, GREEDY)
        assert [answer.status for answer in answers] == [200] * len(GREEDY)
        assert answers == expected
        async with new_session() as session:
            seen = await metrics(session, trio.d)
            assert seen[f"kvferry:transfer_bytes_total/{trio.transport}"] > 0
            assert seen["kvferry:finished_loads_total"] >= 20
            assert seen["kvferry:failed_loads_total"] == 0
            await assert_quiescent(session, trio.p, trio.d)

    asyncio.run(check())


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
def test_with_tokens_outside_heads_the_tokens_are_the_same(
    cluster: Cluster, sizes: tuple[int, int], expected: list[Answer]
) -> None:
    layout = {"KVFERRY_KV_CACHE_LAYOUT": "NHD"}
    starting = [
        cluster.serve(
            f"tp {size}", "--tensor-parallel-size", str(size), extra=PATIENT, environment=layout
        )
        for size in sizes
    ]
    p, d = (process.ready() for process in starting)
    router = cluster.proxy([p], [d]).ready()

    async def check() -> None:
        assert await ask_all(router, GREEDY) == expected
        async with new_session() as session:
            assert (await metrics(session, d))["kvferry:finished_loads_total"] >= 20
            await assert_quiescent(session, p, d)

    asyncio.run(check())


def test_siblings_share_one_prefill(trio: Trio, plain: Engine) -> None:
    prompt = Prompt(tuple(range(20, 220)), n=4, temperature=0.9, seed=5)

    async def check() -> None:
        async with new_session() as session:
            answer = await ask(session, trio.router, prompt)
            assert answer == await ask(session, plain, prompt)
            assert len(set(answer.token_ids)) == 4
            await assert_quiescent(session, trio.p, trio.d)

    asyncio.run(check())


def test_clients_that_leave_at_any_moment_leave_nothing_behind(trio: Trio) -> None:
    asyncio.run(assert_leaving_costs_nothing(trio.router, trio.p, trio.d, num_tokens=200))


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
def test_one_corrupted_read_changes_the_tokens(cluster: Cluster, sizes: tuple[int, int]) -> None:
    """The negative control of the comparison above."""
    p, d = start(cluster, sizes, environment={"KVFERRY_FAULTS": "corrupt:every=1"})
    router = cluster.proxy([p], [d]).ready()
    rng = random.Random(8)
    prompts = [
        Prompt(tuple(rng.randrange(10, 500) for _ in range(length)), max_tokens=48)
        for length in (20, 40, 60, 80, 100, 120)
    ]

    async def check() -> None:
        moved, alone = await ask_all(router, prompts), await ask_all(p, prompts)
        assert [answer.status for answer in moved] == [200] * len(prompts)
        assert [a.token_ids != b.token_ids for a, b in zip(moved, alone, strict=True)] == [
            True
        ] * len(prompts)

    asyncio.run(check())


@pytest.mark.parametrize(
    "sizes", [(2, 1), pytest.param((1, 2), marks=pytest.mark.exhaustive)], ids=str
)
def test_a_death_on_either_side_leaves_the_other_whole(
    cluster: Cluster, sizes: tuple[int, int]
) -> None:
    p, d = start(cluster, sizes, SHORT)
    rng = random.Random(9)
    prompts = [
        Prompt(tuple(rng.randrange(10, 500) for _ in range(100)), max_tokens=200) for _ in range(8)
    ]

    async def check() -> None:
        async with new_session() as session:
            params = [await prefill(session, p, prompt) for prompt in prompts]
            asking = [
                asyncio.create_task(ask(session, d, prompt, kv_transfer_params=part))
                for prompt, part in zip(prompts, params, strict=True)
            ]
            await until("some have arrived", lambda: _has_pulled(d))
            held = [
                await prefill(session, p, Prompt((*prompt.token_ids, 11))) for prompt in prompts
            ]
            d.kill()
            await asyncio.gather(*asking, return_exceptions=True)
            await assert_quiescent(session, p)
            again = cluster.serve(
                "decode again", "--tensor-parallel-size", str(sizes[1]), extra=SHORT
            ).ready()
            # Leases that have expired meanwhile are refused; new ones are read.
            late = await ask(
                session, again, Prompt((*prompts[0].token_ids, 11)), kv_transfer_params=held[0]
            )
            assert late.status == 502
            good = await ask(
                session, again, prompts[0], kv_transfer_params=await prefill(session, p, prompts[0])
            )
            assert good == await ask(session, p, prompts[0])
            lost = await prefill(session, p, prompts[1])
            p.kill()
            assert (await ask(session, again, prompts[1], kv_transfer_params=lost)).status == 502
            await assert_quiescent(session, again)

    asyncio.run(check())


async def _has_pulled(engine: Engine) -> bool:
    async with new_session() as session:
        return (await metrics(session, engine)).get("kvferry:finished_loads_total", 0) > 0
