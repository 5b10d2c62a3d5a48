"""Tests storage tiers of real vLLM on a GPU: the tokens of prompts whose KV comes from a tier are
those of a vLLM without a connector.
"""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.harness import Engine, ask_all, metrics, new_session, until
from tests.gpu.vllm.gpu_fleet import GpuFleet, on_gpu
from tests.vllm.fleet import BY_MODULE_PATH, ready
from tests.vllm.right import PROMPTS
from tests.vllm.vllm_asking import assert_free

from kvferry.engine.make_model.writer import make_model

pytestmark = on_gpu

OFFLOADING = {**BY_MODULE_PATH, "kv_connector": "OffloadingConnector"}


@dataclass
class TierServers:
    fleet: GpuFleet
    folder: Path
    plain: Engine
    cpu: Engine
    both: Engine

    def serve(self, name: str, *tiers: str) -> Engine:
        return serve(self.fleet, self.folder, name, *tiers)


def serve(fleet: GpuFleet, folder: Path, name: str, *tiers: str) -> Engine:
    settings: dict[str, object] = {
        "cpu": "256MiB",
        "disk": {"path": str(folder / "disk"), "size": "1GiB"},
    }
    return fleet.start(
        name,
        "--no-enable-prefix-caching",
        transfer=OFFLOADING,
        extra={
            "tiers": [{tier: settings[tier]} for tier in tiers],
            "pool_path": str(folder / f"pool {'+'.join(tiers)}"),
            "break_even": False,
        },
    )


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierServers]:
    directory = tmp_path_factory.mktemp("tiers")
    make_model(directory / "tiny")
    folder = Path(f"/dev/shm/kvferry-test-{directory.name}")
    folder.mkdir(mode=0o700)
    try:
        with GpuFleet(directory / "fleet", directory / "tiny") as fleet:
            made = TierServers(
                fleet,
                folder,
                fleet.start("plain", mode=None),
                serve(fleet, folder, "cpu", "cpu"),
                serve(fleet, folder, "cpu and disk", "cpu", "disk"),
            )
            ready(made.plain, made.cpu, made.both)
            yield made
    finally:
        shutil.rmtree(folder)


def test_tokens_from_tiers_equal_a_vllms_without_a_connector(servers: TierServers) -> None:
    right = asyncio.run(ask_all(servers.plain, PROMPTS, concurrency=8, timeout_s=240))

    async def check() -> None:
        for engine in (servers.cpu, servers.both):
            for _ in range(2):
                assert await ask_all(engine, PROMPTS, concurrency=8, timeout_s=240) == right
            async with new_session(60) as session:
                await assert_free(session, engine)
                found = await metrics(session, engine)
            assert found["kvferry:offload_hit_tokens_total"] > 0
            assert found["kvferry:tier_loads_total/cpu"] > 0
            assert found.get("kvferry:tier_refused_total/cpu", 0) == 0

    asyncio.run(check())


def test_a_killed_server_finds_its_kv_again(servers: TierServers) -> None:
    prompt = max(PROMPTS, key=lambda each: len(each.token_ids))
    right = asyncio.run(ask_all(servers.plain, [prompt]))
    servers.both.kill(is_stopped=True)
    servers.fleet.dismiss(servers.both.process)
    again = servers.serve("again", "cpu", "disk")
    ready(again)

    async def check() -> None:
        assert await ask_all(again, [prompt]) == right
        async with new_session(60) as session:
            found = await metrics(session, again)
        assert found["kvferry:tier_loads_total/cpu"] > 0

    asyncio.run(check())


def test_a_second_server_finds_what_the_first_has_stored(servers: TierServers) -> None:
    """Its own segment is pinned, the first server's is not."""
    prompt = max(PROMPTS, key=lambda each: len(each.token_ids))
    right = asyncio.run(ask_all(servers.plain, [prompt]))
    other = servers.serve("other", "cpu")
    ready(other)

    async def check() -> None:
        assert await ask_all(other, [prompt]) == right
        async with new_session(60) as session:

            async def is_counted() -> bool:
                found = await metrics(session, other)
                return found.get("kvferry:tier_loads_total/cpu", 0) > 0

            await until("chunks of the first server were loaded", is_counted)

    asyncio.run(check())
