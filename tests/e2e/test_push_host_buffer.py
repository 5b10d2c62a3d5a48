"""Tests push from a P with a host buffer: P copies and moves each chunk while it computes the next,
and the tokens are those of a single engine. A control must differ.

The embedded engine's cache is already in host memory, so `force_host_buffer` is set: the copies,
messages and waits are those of a cache on a device.
"""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
import pytest
from tests.e2e.conftest import PATIENT, random_prompts
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
)

pytestmark = pytest.mark.slow

GREEDY = random_prompts(60, seed=53, longest=600)
STAGED = {"force_host_buffer": True}
CHUNK, NUM_CHUNKS = 256, 4


@dataclass(frozen=True)
class Trio:
    p: Engine
    d: Engine
    router: Engine


def start(
    cluster: Cluster,
    transport: str,
    of_d: dict[str, bool],
    *,
    is_streamed: bool = True,
    faults: str = "",
) -> Trio:
    common = {"transports": [transport], "push_streaming": is_streamed, **PATIENT}
    starting = [
        cluster.serve(
            name,
            "--max-num-batched-tokens",
            str(CHUNK),
            extra={**common, **staged},
            environment={"KVFERRY_FAULTS": spec} if spec else None,
            connector="NixlPushConnector",
        )
        for name, staged, spec in (("prefill", STAGED, ""), ("decode", of_d, faults))
    ]
    p, d = (process.ready() for process in starting)
    assert any("host buffer allocated" in line for line in p.process.tail(1000))
    return Trio(p, d, cluster.proxy([p], [d]).ready())


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[Answer]:
    return asyncio.run(ask_all(plain, GREEDY))


@pytest.fixture(
    scope="module", params=[("shm", {}), ("nixl", STAGED)], ids=["shm", "nixl, both staged"]
)
def trio(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Trio]:
    transport, of_d = request.param
    with Cluster(tmp_path_factory.mktemp(transport), model) as cluster:
        yield start(cluster, transport, of_d)


async def tokens_left(session: aiohttp.ClientSession, trio: Trio, plain: Engine) -> list[float]:
    """Return for each of a few prompts how many tokens were not yet moved when P had computed the
    last chunk.
    """
    rng, left = random.Random(9), []
    await ask(session, trio.router, Prompt((1, 2, 3)))
    for _ in range(5):
        prompt = Prompt(
            tuple(rng.randrange(10, 500) for _ in range(CHUNK * NUM_CHUNKS)), max_tokens=4
        )
        before = (await metrics(session, trio.d)).get("kvferry:pushed_tokens_left_total", 0)
        assert await ask(session, trio.router, prompt) == await ask(session, plain, prompt)
        left.append((await metrics(session, trio.d))["kvferry:pushed_tokens_left_total"] - before)
    return left


def test_greedy_tokens_equal_a_single_engines_and_blocks_are_free_long_before_the_lease_ends(
    trio: Trio, expected: list[Answer]
) -> None:
    async def check() -> None:
        answers = await ask_all(trio.router, GREEDY)
        assert [answer.status for answer in answers] == [200] * len(GREEDY)
        assert answers == expected
        async with new_session() as session:
            seen = await metrics(session, trio.d)
            assert seen["kvferry:finished_loads_total"] >= 30
            assert seen["kvferry:failed_loads_total"] == 0
            assert (await metrics(session, trio.router))["kvferry:router_legs_at_once_total"] >= 40
            await assert_quiescent(session, trio.p, trio.d)

    asyncio.run(check())


def test_when_the_last_chunk_is_computed_only_its_own_tokens_are_left_to_move(
    trio: Trio, plain: Engine
) -> None:
    async def check() -> None:
        async with new_session() as session:
            assert median(await tokens_left(session, trio, plain)) == CHUNK
            await assert_quiescent(session, trio.p, trio.d)

    asyncio.run(check())


def test_several_choices_share_one_streamed_prefill(trio: Trio, plain: Engine) -> None:
    prompt = Prompt(tuple(range(20, 220)) * 3, n=4, temperature=0.9, seed=5)

    async def check() -> None:
        async with new_session() as session:
            answer = await ask(session, trio.router, prompt)
            assert answer == await ask(session, plain, prompt)
            assert len(set(answer.token_ids)) == 4
            await assert_quiescent(session, trio.p, trio.d)

    asyncio.run(check())


def test_clients_that_leave_at_any_moment_leave_nothing_behind(trio: Trio) -> None:
    asyncio.run(assert_leaving_costs_nothing(trio.router, trio.p, trio.d, num_tokens=900, count=16))


def test_without_streaming_the_whole_prompt_is_left_and_one_corrupted_block_changes_the_tokens(
    cluster: Cluster, plain: Engine
) -> None:
    """The negative controls of all tests above."""
    made = start(cluster, "shm", STAGED, is_streamed=False, faults="corrupt:every=1")
    rng = random.Random(11)
    long = Prompt(tuple(rng.randrange(10, 500) for _ in range(CHUNK * NUM_CHUNKS)), max_tokens=1)
    short = [Prompt(tuple(rng.randrange(10, 500) for _ in range(200))) for _ in range(4)]

    async def check() -> None:
        async with new_session() as session:
            await ask(session, made.router, Prompt((1, 2, 3)))
            assert (await ask(session, made.router, long)).is_ok
            assert (await metrics(session, made.d))[
                "kvferry:pushed_tokens_left_total"
            ] == CHUNK * NUM_CHUNKS
        moved = await ask_all(made.router, short)
        assert [answer.status for answer in moved] == [200] * len(short)
        assert moved != await ask_all(plain, short)

    asyncio.run(check())
