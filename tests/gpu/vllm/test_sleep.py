"""Tests real vLLM on a GPU in sleep mode: P and D sleep and wake up, their memory comes back to the
GPU meanwhile, and afterwards they move KV again with the tokens of a vLLM without a connector.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from tests.e2e.harness import Engine, Prompt, ask, ask_all, metrics, new_session, prefill
from tests.gpu.vllm.gpu_fleet import CONNECTORS, GpuFleet, on_gpu
from tests.vllm.fleet import ready
from tests.vllm.vllm_asking import assert_free, random_prompts

from kvferry.engine.make_model.writer import make_model

pytestmark = on_gpu

MODES = ("pull", "push")
WAYS: dict[str, dict[str, Any]] = {
    "nixl": {"kv_connector_extra_config": {"transports": ["nixl"]}},
    "nixl without bounce buffers": {
        "kv_connector_extra_config": {"transports": ["nixl"], "bounce_max_segment_bytes": 0}
    },
    "shm": {"kv_buffer_device": "cpu", "kv_connector_extra_config": {"transports": ["shm"]}},
}
LOADS = "kvferry:finished_loads_total"
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
CACHE_BYTES = 256 << 20
"""`GPU_FLAGS` gives each server a cache of this size."""


@dataclass
class Servers:
    plain: Engine
    pairs: dict[tuple[str, str], tuple[Engine, Engine, Engine]]
    """P, D and router, by way and mode."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sleep") / "tiny"
    make_model(directory)
    return directory


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Servers]:
    with GpuFleet(tmp_path_factory.mktemp("fleet"), model) as fleet:

        def start(name: str, way: str, mode: str) -> Engine:
            return fleet.start(
                f"{name}, {way}, {mode}",
                "--enable-sleep-mode",
                transfer={**CONNECTORS[mode], **WAYS[way]},
                environment=DEV_MODE,
            )

        plain = fleet.start("plain", mode=None)
        pairs = {
            (way, mode): (start("P", way, mode), start("D", way, mode))
            for way in WAYS
            for mode in MODES
        }
        engines = [engine for pair in pairs.values() for engine in pair]
        ready(plain, *engines)
        routed = {key: (p, d, fleet.kvferry_router([p], [d])) for key, (p, d) in pairs.items()}
        ready(*(router for _, _, router in routed.values()))
        yield Servers(plain, routed)


async def call(session: aiohttp.ClientSession, engine: Engine, path: str, **body: object) -> None:
    async with session.post(f"{engine.url}{path}", json=body or None) as response:
        assert response.status == 200, await response.text()


async def sleep(session: aiohttp.ClientSession, engine: Engine, level: int) -> None:
    before = torch.cuda.mem_get_info()[0]
    await call(session, engine, f"/sleep?level={level}")
    assert torch.cuda.mem_get_info()[0] >= before + CACHE_BYTES // 2


async def wake(session: aiohttp.ClientSession, engine: Engine, *tags: Sequence[str]) -> None:
    for part in tags or ((),):
        query = "&".join(f"tags={tag}" for tag in part)
        await call(session, engine, f"/wake_up?{query}")


async def assert_moves(
    session: aiohttp.ClientSession, servers: Servers, way: str, mode: str, seed: int
) -> None:
    """Check the tokens of prompts that no engine has seen, and that D has loaded all of them."""
    p, d, router = servers.pairs[way, mode]
    # From this answer a router learns what P is now.
    await ask_all(router, random_prompts(1, seed=1000 + seed))
    prompts = random_prompts(8, seed=seed)
    before = (await metrics(session, d))[LOADS]
    answers = await ask_all(router, prompts, concurrency=4, timeout_s=120)
    assert answers == await ask_all(servers.plain, prompts, concurrency=4, timeout_s=120)
    assert (await metrics(session, d))[LOADS] - before == len(prompts)
    await assert_free(session, p, d)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_a_pair_moves_kv_after_every_sleep(servers: Servers, way: str, mode: str) -> None:
    p, d, _ = servers.pairs[way, mode]

    async def check() -> None:
        async with new_session(120) as session:
            seed = 10 * list(servers.pairs).index((way, mode))
            await assert_moves(session, servers, way, mode, seed)
            await sleep(session, p, level=1)
            await wake(session, p)
            await assert_moves(session, servers, way, mode, seed + 1)
            await sleep(session, d, level=1)
            await wake(session, d, ["weights"], ["kv_cache"])
            await assert_moves(session, servers, way, mode, seed + 2)
            for engine in (p, d):
                await sleep(session, engine, level=1)
            for engine in (p, d):
                await wake(session, engine)
            await assert_moves(session, servers, way, mode, seed + 3)

    asyncio.run(check())


def test_a_ticket_of_before_the_sleep_is_refused(servers: Servers) -> None:
    p, d, _ = servers.pairs["nixl", "pull"]
    prompt = Prompt(tuple(range(20, 320)), max_tokens=8)

    async def check() -> None:
        async with new_session(120) as session:
            params = await prefill(session, p, prompt)
            # vLLM waits until the lease has ended.
            await sleep(session, p, level=1)
            await wake(session, p)
            answer = await ask(session, d, prompt, kv_transfer_params=params)
            assert answer.status != 200
            await assert_free(session, p, d)

    asyncio.run(check())


def test_new_weights_after_the_second_level_are_exchanged_when_both_have_them(
    servers: Servers, model: Path, tmp_path: Path
) -> None:
    """As trainers do: drop the weights, load new ones, and then make the cache again."""
    p, d, router = servers.pairs["nixl", "pull"]
    other = tmp_path / "other"
    make_model(other, seed=1)
    prompts = random_prompts(4, seed=99)

    async def load(session: aiohttp.ClientSession, engine: Engine, folder: Path) -> None:
        await sleep(session, engine, level=2)
        await wake(session, engine, ["weights"])
        arguments = {"weights_path": str(folder)}
        await call(session, engine, "/collective_rpc", method="reload_weights", kwargs=arguments)
        await wake(session, engine, ["kv_cache"])

    async def check() -> None:
        async with new_session(240) as session:
            try:
                await load(session, p, other)
                # D refuses the KV of other weights.
                params = await prefill(session, p, prompts[0])
                answer = await ask(session, d, prompts[0], kv_transfer_params=params)
                assert answer.status != 200
                await load(session, d, other)
                before = (await metrics(session, d))[LOADS]
                moved = await ask_all(router, prompts[1:], timeout_s=120)
                assert (await metrics(session, d))[LOADS] - before == len(prompts) - 1
                own = [await ask(session, d, each, cache_salt="own") for each in prompts[1:]]
                assert moved == own
                assert moved != await ask_all(servers.plain, prompts[1:], timeout_s=120)
            finally:
                for engine in (p, d):
                    await load(session, engine, model)
            await assert_moves(session, servers, "nixl", "pull", seed=98)

    asyncio.run(check())
