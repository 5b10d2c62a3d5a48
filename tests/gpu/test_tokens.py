"""Tests P and D as real processes on one GPU: their tokens equal those of a single engine, for
every transport and every cache layout; in a negative control the tokens must differ.

All engines start together, once: starting an engine takes many seconds, mostly for imports.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from tests.e2e.conftest import random_prompts
from tests.e2e.harness import (
    Answer,
    Engine,
    Prompt,
    Starting,
    ask_all,
    assert_quiescent,
    metrics,
    new_session,
)
from tests.gpu.gpu_cluster import DTYPES, TRANSPORTS, GpuCluster, Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

GREEDY = random_prompts(200, seed=1)
FEW = random_prompts(40, seed=4, longest=600)
SPOILT = [
    Prompt(prompt.token_ids + tuple(range(100, 120)))
    for prompt in random_prompts(8, seed=3, longest=200)[2:]
]
MODES = ("pull", "push")
SMALL_HND, LARGE_NHD = Shape(16, "HND"), Shape(32, "NHD")
CONCURRENCY = 48
PATIENT: dict[str, Any] = {"kv_lease_duration": 600}
"""With so long a lease, blocks that are free soon afterwards were released and did not expire."""
FINISHED, FAILED = "kvferry:finished_loads_total", "kvferry:failed_loads_total"


@dataclass(frozen=True)
class Fleet:
    """The starting engines by name; a router is started when a test asks for a pair."""

    cluster: GpuCluster
    starting: dict[str, Starting]
    _ready: dict[str, Engine] = field(default_factory=dict)
    _expected: dict[str, dict[str, list[Answer]]] = field(default_factory=dict)

    def engine(self, name: str) -> Engine:
        if name not in self._ready:
            self._ready[name] = self.starting[name].ready()
        return self._ready[name]

    def pair(self, prefill: str, decode: str) -> tuple[Engine, Engine, Engine]:
        """Return P, D and a new router in front of them."""
        p, d = self.engine(prefill), self.engine(decode)
        return p, d, self.cluster.proxy([p], [d]).ready()

    def expected(self, dtype: str) -> dict[str, list[Answer]]:
        """Return the answers of a single engine without a connector."""
        if dtype not in self._expected:
            plain = self.engine(f"plain {dtype}")
            asked = {"greedy": GREEDY, "few": FEW}
            self._expected[dtype] = {
                name: asyncio.run(ask_all(plain, prompts, CONCURRENCY))
                for name, prompts in asked.items()
            }
        return self._expected[dtype]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Fleet]:
    with GpuCluster(tmp_path_factory.mktemp("fleet"), model) as cluster:
        starting = {f"plain {dtype}": cluster.plain_on_gpu(dtype) for dtype in DTYPES.values()}
        for transport in TRANSPORTS:
            for mode in MODES:
                of = f"{transport} {mode}"
                # In push mode P writes into D's blocks if D grants it; otherwise D reads them.
                writing: dict[str, Any] = {"push_write": "always"} if mode == "push" else {}
                settings = {**PATIENT, **writing}
                starting[f"small {of}"] = cluster.serve_on_gpu(
                    "small", transport, mode, shape=SMALL_HND, **settings
                )
                starting[f"large {of}"] = cluster.serve_on_gpu(
                    "large", transport, mode, shape=LARGE_NHD, **settings
                )
                starting[f"spoilt {of}"] = cluster.serve_on_gpu(
                    "spoilt", transport, mode, shape=SMALL_HND, faults="corrupt:every=1", **PATIENT
                )
            starting[f"two ranks {transport}"] = cluster.serve_on_gpu(
                "two ranks", transport, "pull", "-tp", "2", shape=SMALL_HND, **PATIENT
            )
        yield Fleet(cluster, starting)


@pytest.mark.parametrize(("prefill", "decode"), [("small", "large"), ("large", "small")])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_greedy_tokens_of_200_prompts_equal_a_single_engines(
    fleet: Fleet, transport: str, mode: str, prefill: str, decode: str
) -> None:
    """One side has blocks of 16 tokens in layout HND, the other has 32 in layout NHD."""
    p, d, router = fleet.pair(f"{prefill} {transport} {mode}", f"{decode} {transport} {mode}")
    expected = fleet.expected(DTYPES[transport])["greedy"]

    async def check() -> None:
        async with new_session() as session:
            before = await moved(session, transport, p, d)
            # The salt prevents hits on KV that these engines computed or received in the other
            # direction.
            answers = await ask_all(router, GREEDY, CONCURRENCY, cache_salt=prefill)
            assert [answer.status for answer in answers] == [200] * len(GREEDY), next(
                a.body for a in answers if not a.is_ok
            )
            assert answers == expected
            moved_bytes, finished, failed = (
                now - then
                for now, then in zip(await moved(session, transport, p, d), before, strict=True)
            )
            assert (moved_bytes > 0, finished > 100, failed) == (True, True, 0)
            assert await all_moved(session, p, d) == await moved_by(session, transport, p, d), (
                "another transport has carried some"
            )
            await assert_quiescent(session, p, d)

    asyncio.run(check())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_share_the_gpu_fetch_their_heads_and_give_the_same_tokens(
    fleet: Fleet, transport: str
) -> None:
    p, d, router = fleet.pair(f"small {transport} pull", f"two ranks {transport}")
    expected = fleet.expected(DTYPES[transport])["few"]

    async def check() -> None:
        async with new_session() as session:
            answers = await ask_all(router, FEW, CONCURRENCY, cache_salt="two ranks")
            assert answers == expected
            assert await moved_by(session, transport, d) > 0
            await assert_quiescent(session, p, d)

    asyncio.run(check())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_corrupted_block_in_transit_changes_the_tokens(
    fleet: Fleet, transport: str, mode: str
) -> None:
    """The negative control of all tests above: the same comparison must detect a wrong byte."""
    p, d, router = fleet.pair(f"small {transport} {mode}", f"spoilt {transport} {mode}")

    async def check() -> None:
        async with new_session() as session:
            spoilt = await ask_all(router, SPOILT, cache_salt="spoilt")
            right = await ask_all(p, SPOILT)
            assert [answer.status for answer in spoilt] == [200] * len(SPOILT)
            assert all(a.token_ids != b.token_ids for a, b in zip(spoilt, right, strict=True))
            assert await moved_by(session, transport, d) > 0
            await assert_quiescent(session, p, d)

    asyncio.run(check())


async def moved(
    session: aiohttp.ClientSession, transport: str, p: Engine, d: Engine
) -> tuple[float, float, float]:
    """Return the bytes that either side moved over the transport, and the numbers of D's successful
    and failed transfers.
    """
    ended = await metrics(session, d)
    return await moved_by(session, transport, p, d), ended.get(FINISHED, 0), ended.get(FAILED, 0)


async def moved_by(session: aiohttp.ClientSession, transport: str, *engines: Engine) -> float:
    return sum(
        [
            (await metrics(session, engine)).get(f"kvferry:transfer_bytes_total/{transport}", 0)
            for engine in engines
        ]
    )


async def all_moved(session: aiohttp.ClientSession, *engines: Engine) -> float:
    return sum(
        [
            (await metrics(session, engine)).get("kvferry:transfer_bytes_total", 0)
            for engine in engines
        ]
    )
