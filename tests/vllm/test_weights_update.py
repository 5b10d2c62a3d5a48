"""Tests that the weights of real vLLM servers can be replaced while they run: no request uses KV of
other weights, and the servers exchange KV again when both have the same weights.
"""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest
from safetensors.numpy import load_file, save_file
from tests.checkpoints import put_checkpoint
from tests.e2e.harness import (
    Engine,
    Prompt,
    ask,
    ask_all,
    assert_said,
    metrics,
    new_session,
    prefill,
    until,
)
from tests.vllm.conftest import Trio
from tests.vllm.fleet import Fleet, ready
from tests.vllm.vllm_asking import assert_free, random_prompts

from kvferry.engine.make_model.writer import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


async def load(session: aiohttp.ClientSession, engine: Engine, weights: Path) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
    async with session.post(f"{engine.url}/collective_rpc", json=body) as response:
        assert response.status == 200, await response.text()


async def reset(session: aiohttp.ClientSession, engine: Engine) -> int:
    """Repeat the reset until vLLM has reset its own prefix cache too; return how many it took."""
    num_resets = 0

    async def is_done() -> bool:
        nonlocal num_resets
        num_resets += 1
        url = f"{engine.url}/reset_prefix_cache?reset_external=true"
        async with session.post(url) as response:
            return bool((await response.json())["success"])

    await until(f"the caches of {engine.process.name} are reset", is_done, 30)
    return num_resets


async def reset_equally_often(
    session: aiohttp.ClientSession, p: Engine, d: Engine, num_resets_of_p: int
) -> None:
    """Reset D for the first time, then whichever engine was reset less often, until the numbers are
    equal.
    """
    num_resets_of_d = await reset(session, d)
    while num_resets_of_p != num_resets_of_d:
        if num_resets_of_p < num_resets_of_d:
            num_resets_of_p += await reset(session, p)
        else:
            num_resets_of_d += await reset(session, d)


@pytest.fixture
def shared(trio: Trio, model: Path) -> Iterator[Trio]:
    """The servers that other tests use too, so they get their weights back."""
    yield trio

    async def restore() -> None:
        async with new_session(60) as session:
            for engine in (trio.p, trio.d):
                await load(session, engine, model)
                await reset(session, engine)

    asyncio.run(restore())


def test_weights_are_replaced_while_requests_come(
    shared: Trio, model: Path, tmp_path: Path
) -> None:
    make_model(tmp_path / "other", seed=1)
    p, d, router = shared.p, shared.d, shared.router
    prompts = random_prompts(6, seed=31, shortest=40, longest=300)

    async def check() -> None:
        async with new_session(60) as session:
            old = await ask_all(router, prompts, concurrency=2)
            assert {answer.status for answer in old} == {200}
            kept = await prefill(session, p, prompts[0])
            await load(session, p, tmp_path / "other")
            num_resets = await reset(session, p)
            # P no longer has the KV that the ticket names.
            assert (await ask(session, d, prompts[0], kv_transfer_params=kept)).status == 500
            # P has KV of weights that D does not have. The number of resets does not show it, and
            # D has no KV of the prompt in its own cache.
            await reset_equally_often(session, p, d, num_resets)
            foreign = await prefill(session, p, prompts[1])
            assert (await ask(session, d, prompts[1], kv_transfer_params=foreign)).status == 500
            await assert_said(d, "computed the KV with other weights")
            assert await ask(session, d, prompts[1]) == old[1]
            new = await ask_all(p, prompts, concurrency=2)
            assert all(answer != before for answer, before in zip(new, old, strict=True))
            await load(session, d, tmp_path / "other")
            # Now D has the same weights, and was reset more often.
            await reset(session, d)
            loads = (await metrics(session, d))["kvferry:finished_loads_total"]
            assert await ask_all(router, prompts, concurrency=2) == new
            assert (await metrics(session, d))["kvferry:finished_loads_total"] == loads + 6
            for engine in (d, p):
                await load(session, engine, model)
                await reset(session, engine)
            assert await ask_all(router, prompts, concurrency=2) == old
            assert (await metrics(session, d))["kvferry:finished_loads_total"] == loads + 12
            await assert_free(session, p, d)

    asyncio.run(check())


def test_servers_whose_weights_differ_in_40_rows_exchange_no_kv(tmp_path: Path) -> None:
    """P and D have the same configuration and 40 of 4,096 rows of the embedding of their own. The
    control is a P with D's weights in other files.
    """
    prompts = [Prompt(tuple(range(100 + first, 300))) for first in range(4)]
    for name, seed in (("p", 1), ("d", 2)):
        put_checkpoint(tmp_path / name, seed)
    shutil.copytree(tmp_path / "d", tmp_path / "same")
    file = tmp_path / "same" / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "saved": "again"})
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(tmp_path / "fleet d", tmp_path / "d"))
        d = fleet.vllm("d", cores="1")
        others = [
            stack.enter_context(
                Fleet(tmp_path / f"fleet {name}", tmp_path / name, fleet.secret)
            ).vllm(name)
            for name in ("p", "same")
        ]
        routers = [fleet.kvferry_router([other], [d]) for other in others]
        ready(d, *others, *routers)

        async def check() -> None:
            async with new_session(60) as session:
                right = await ask_all(d, prompts, cache_salt="alone")
                assert right != await ask_all(others[0], prompts, cache_salt="alone")
                refused = await ask_all(routers[0], prompts, cache_salt="nearly equal")
                assert {answer.status for answer in refused} == {502}
                await assert_said(d, "weights: ours")
                assert await ask_all(routers[1], prompts, cache_salt="equal") == right
                found = await metrics(session, d)
                assert found["kvferry:finished_loads_total"] == len(prompts)
                await assert_free(session, d, *others)

        asyncio.run(check())
