"""Tests kvferry's OffloadingConnector in real vLLM servers: the tokens of prompts whose KV comes
from a tier are those of a vLLM without a connector, and KV of other weights is never used.
"""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.harness import Answer, Engine, Prompt, ask_all, metrics, new_session, until
from tests.vllm.fleet import BY_MODULE_PATH, Fleet, ready
from tests.vllm.right import PROMPTS, Right
from tests.vllm.test_weights_update import load, reset
from tests.vllm.vllm_asking import assert_free

from kvferry.engine.make_model.writer import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

OFFLOADING = {**BY_MODULE_PATH, "kv_connector": "OffloadingConnector"}
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
"""vLLM then serves the pages that replace weights and reset caches."""
LONG = Prompt(tuple(10 + (7 * n) % 480 for n in range(1400)), max_tokens=8)


@dataclass(frozen=True)
class Storage:
    """Folders for the tiers of one test."""

    folder: Path

    def extra(self, *tiers: str) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "cpu": "256MiB",
            "disk": {"path": str(self.folder / "disk"), "size": "512MiB"},
        }
        return {
            "tiers": [{tier: settings[tier]} for tier in tiers],
            "pool_path": str(self.folder / "pool"),
            # Tests must load what was stored, also where this model computes faster.
            "break_even": False,
        }


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    folder = Path(f"/dev/shm/kvferry-test-vllm-{tmp_path.name}")
    folder.mkdir(mode=0o700)
    yield Storage(folder)
    shutil.rmtree(folder)


def serve(
    fleet: Fleet, storage: Storage, name: str, *tiers: str, flags: tuple[str, ...] = ()
) -> Engine:
    engine = fleet.vllm(
        name, *flags, transfer=OFFLOADING, extra=storage.extra(*tiers), environment=DEV_MODE
    )
    ready(engine)
    return engine


async def until_stored(
    session: aiohttp.ClientSession, engine: Engine, tier: str, count: int
) -> None:
    async def is_stored() -> bool:
        found = await metrics(session, engine)
        return found.get(f"kvferry:tier_stores_total/{tier}", 0) >= count

    await until(f"{count} chunks stored in {tier}", is_stored)


def num_chunks(prompt: Prompt) -> int:
    """vLLM's CPU build has blocks of 32 tokens here."""
    return len(prompt.token_ids) // 32


@pytest.mark.parametrize(
    "tiers",
    [
        ("cpu", "disk"),
        pytest.param(("cpu",), marks=pytest.mark.exhaustive),
        pytest.param(("disk",), marks=pytest.mark.exhaustive),
    ],
    ids="+".join,
)
def test_tokens_from_tiers_equal_a_vllms_without_a_connector(
    tmp_path: Path, model: Path, storage: Storage, right: Right, tiers: tuple[str, ...]
) -> None:
    """Every prompt is asked twice, without a prefix cache."""
    with Fleet(tmp_path / "fleet", model) as fleet:
        engine = serve(fleet, storage, "engine", *tiers, flags=("--no-enable-prefix-caching",))

        async def check() -> None:
            for _ in range(2):
                assert await ask_all(engine, PROMPTS, concurrency=8, timeout_s=240) == right.vllm
            async with new_session(60) as session:
                await assert_free(session, engine)
                found = await metrics(session, engine)
            assert found[f"kvferry:tier_loads_total/{tiers[0]}"] > 0
            assert found["kvferry:offload_hit_tokens_total"] > 1000
            assert found.get("kvferry:tier_refused_total", 0) == 0

        asyncio.run(check())


def test_a_killed_server_finds_its_kv_again(tmp_path: Path, model: Path, storage: Storage) -> None:
    with Fleet(tmp_path / "fleet", model) as fleet:
        engine = serve(fleet, storage, "first", "cpu", "disk")
        right = asyncio.run(fill(engine))
        engine.kill(is_stopped=True)
        fleet.dismiss(engine.process)
        again = serve(fleet, storage, "second", "cpu", "disk")
        assert asyncio.run(ask_and_count(again)) == (right, num_chunks(LONG) * 32)
        again.kill(is_stopped=True)
        fleet.dismiss(again.process)
        # Without the pool, the disk alone serves the prompt.
        last = serve(fleet, storage, "third", "disk")
        assert asyncio.run(ask_and_count(last)) == (right, num_chunks(LONG) * 32)


async def fill(engine: Engine) -> list[Answer]:
    """Ask one long prompt, wait until all tiers have it, and return the answer."""
    answer = await ask_all(engine, [LONG])
    async with new_session(60) as session:
        await until_stored(session, engine, "disk", num_chunks(LONG))
    return answer


async def ask_and_count(engine: Engine) -> tuple[list[Answer], float]:
    """Ask the prompt, and return the answer and how many tokens came from tiers."""
    answer = await ask_all(engine, [LONG])
    async with new_session(60) as session:
        found = await metrics(session, engine)
    return answer, found["kvferry:offload_hit_tokens_total"]


def test_another_checkpoint_at_the_same_path_finds_nothing(
    tmp_path: Path, storage: Storage
) -> None:
    """The control, vLLM's own tier, is in tests/vllm/test_stock_tiers.py."""
    path = tmp_path / "model"
    make_model(path, seed=1)
    with Fleet(tmp_path / "old", path) as fleet:
        old = asyncio.run(fill(serve(fleet, storage, "first", "cpu", "disk")))
    shutil.rmtree(path)
    make_model(path, seed=2)
    with Fleet(tmp_path / "new", path) as fleet:
        plain = fleet.vllm("plain", transfer=None)
        engine = serve(fleet, storage, "second", "cpu", "disk")
        ready(plain)
        right = asyncio.run(ask_all(plain, [LONG]))
        assert right != old
        assert asyncio.run(ask_and_count(engine)) == (right, 0)


def test_weights_that_are_replaced_in_a_running_server_find_only_their_own_kv(
    tmp_path: Path, model: Path, storage: Storage
) -> None:
    make_model(tmp_path / "other", seed=1)
    with Fleet(tmp_path / "fleet", model) as fleet:
        engine = serve(fleet, storage, "engine", "cpu", "disk")

        async def check() -> None:
            old = await fill(engine)
            async with new_session(60) as session:
                before = (await metrics(session, engine))["kvferry:offload_hit_tokens_total"]
                await load(session, engine, tmp_path / "other")
                await reset(session, engine)
                new = await ask_all(engine, [LONG])
                assert new != old
                found = await metrics(session, engine)
                assert found["kvferry:offload_hit_tokens_total"] == before
                # Back to the first weights: their KV is still on the disk, and right.
                await load(session, engine, model)
                await reset(session, engine)
                assert await ask_all(engine, [LONG]) == old
                found = await metrics(session, engine)
                assert found["kvferry:offload_hit_tokens_total"] > before

        asyncio.run(check())
