"""Tests engines that copy their KV through host buffers, on one side or both, over every transport:
a single engine's tokens, and all blocks free afterwards.

The embedded engine's cache is already in host memory, so `force_host_buffer` is set: the copies,
messages and waits are those of a cache on a device.
"""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

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

GREEDY = random_prompts(40, seed=41, longest=500)
STAGED = {"force_host_buffer": True}
SIDES = {
    "prefill": ("staged", "direct"),
    "decode": ("direct", "staged"),
    "both": ("staged", "staged too"),
}
"""Which of the three engines prefills and which decodes, in each pair."""


@dataclass(frozen=True)
class Trio:
    transport: str
    sides: str
    p: Engine
    d: Engine
    router: Engine


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[Answer]:
    return asyncio.run(ask_all(plain, GREEDY))


@dataclass(frozen=True)
class Three:
    cluster: Cluster
    transport: str
    engines: dict[str, Engine]
    _pairs: dict[str, Trio] = field(default_factory=dict)

    def pair(self, sides: str) -> Trio:
        if sides not in self._pairs:
            p, d = (self.engines[name] for name in SIDES[sides])
            self._pairs[sides] = Trio(
                self.transport, sides, p, d, self.cluster.proxy([p], [d]).ready()
            )
        return self._pairs[sides]


@pytest.fixture(scope="module", params=["shm", "nixl"])
def three(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Three]:
    transport: str = request.param
    with Cluster(tmp_path_factory.mktemp(transport), model) as cluster:
        ways = {"direct": {}, "staged": STAGED, "staged too": STAGED}
        starting = {
            name: cluster.serve(name, extra={"transports": [transport], **PATIENT, **extra})
            for name, extra in ways.items()
        }
        engines = {name: process.ready() for name, process in starting.items()}
        for name, engine in engines.items():
            assert any(
                "host buffer allocated" in line for line in engine.process.tail(1000)
            ) == bool(ways[name])
        yield Three(cluster, transport, engines)


@pytest.fixture(params=SIDES)
def trio(request: pytest.FixtureRequest, three: Three) -> Trio:
    return three.pair(request.param)


def test_greedy_tokens_equal_a_single_engines_and_blocks_are_free_long_before_the_lease_ends(
    trio: Trio, expected: list[Answer]
) -> None:
    async def check() -> None:
        async with new_session() as session:
            before = await metrics(session, trio.d)
            # The salt keeps D from using KV that these engines computed or received before.
            answers = await ask_all(trio.router, GREEDY, cache_salt=trio.sides)
            assert [answer.status for answer in answers] == [200] * len(GREEDY)
            assert answers == expected
            after = await metrics(session, trio.d)
            moved, pulled = (
                f"kvferry:transfer_bytes_total/{trio.transport}",
                "kvferry:finished_loads_total",
            )
            assert after[moved] > before.get(moved, 0)
            assert after[pulled] - before.get(pulled, 0) >= 20
            assert after["kvferry:failed_loads_total"] == before.get(
                "kvferry:failed_loads_total", 0
            )
            await assert_quiescent(session, trio.p, trio.d)

    asyncio.run(check())


def test_clients_that_leave_at_any_moment_leave_nothing_behind(trio: Trio) -> None:
    asyncio.run(
        assert_leaving_costs_nothing(
            trio.router, trio.p, trio.d, num_tokens=400, cache_salt=trio.sides
        )
    )


def test_siblings_share_one_prefill(trio: Trio, plain: Engine) -> None:
    prompt = Prompt(tuple(range(20, 220)), n=4, temperature=0.9, seed=5)

    async def check() -> None:
        async with new_session() as session:
            answer = await ask(session, trio.router, prompt, cache_salt=trio.sides)
            assert answer == await ask(session, plain, prompt)
            await assert_quiescent(session, trio.p, trio.d)

    asyncio.run(check())


def test_bytes_that_are_corrupted_on_their_way_to_a_host_buffer_change_the_tokens(
    cluster: Cluster, plain: Engine
) -> None:
    """The negative control of the comparisons above: D's tokens come from the KV in its host
    buffer.
    """
    faults = {"KVFERRY_FAULTS": "corrupt:every=1"}
    starting = [
        cluster.serve("prefill", extra=STAGED),
        cluster.serve("decode", extra=STAGED, environment=faults),
    ]
    p, d = (process.ready() for process in starting)
    router = cluster.proxy([p], [d]).ready()
    prompts = [
        Prompt(tuple(random.Random(n).randrange(10, 500) for _ in range(200))) for n in range(4)
    ]
    assert asyncio.run(ask_all(router, prompts)) != asyncio.run(ask_all(plain, prompts))


def test_ranks_of_both_sides_wait_for_each_other(cluster: Cluster, expected: list[Answer]) -> None:
    """Every rank of P copies its own heads; a rank of D reads when all P ranks that it reads from
    are ready.
    """
    sizes = (("prefill", 2), ("decode", 1))
    starting = [
        cluster.serve(name, "--tensor-parallel-size", str(size), extra={**PATIENT, **STAGED})
        for name, size in sizes
    ]
    p, d = (process.ready() for process in starting)
    router = cluster.proxy([p], [d]).ready()

    async def check() -> None:
        assert await ask_all(router, GREEDY) == expected
        async with new_session() as session:
            assert (await metrics(session, d))["kvferry:failed_loads_total"] == 0
            await assert_quiescent(session, p, d)

    asyncio.run(check())
