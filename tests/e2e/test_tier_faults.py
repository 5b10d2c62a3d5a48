"""Tests faults of storage tiers under a running embedded engine. Always: right tokens, no hang, a
counter, and the engine serves on as without tiers.
"""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import aiohttp
import psutil
import pytest
from tests.e2e.conftest import random_prompts
from tests.e2e.harness import (
    Cluster,
    Engine,
    Prompt,
    ask_all,
    assert_quiescent,
    metrics,
    new_session,
    until,
)
from tests.tiers.s3_server import request as ask_s3
from tests.tiers.s3_server import s3_server

from kvferry.testing.fault_proxy import FaultProxy
from kvferry.tiers.pool_reader import list_segments
from kvferry.types import Address

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BUCKET = "faults"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
PROMPTS = random_prompts(12, seed=33, longest=600)
OTHERS = random_prompts(4, seed=34, longest=600)
NO_PREFIX_CACHE = ("--no-enable-prefix-caching",)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    made = Path(mkdtemp(prefix="kvferry-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def serve(cluster: Cluster, name: str, tiers: list[dict[str, Any]], **more: Any) -> Engine:
    extra = {"tiers": tiers, "break_even": False, "load_timeout": 2.0, **more}
    return cluster.serve(
        name,
        *NO_PREFIX_CACHE,
        connector="OffloadingConnector",
        extra=extra,
        environment=CREDENTIALS,
    ).ready()


async def until_counted(engine: Engine, name: str, count: float) -> None:
    async def is_counted() -> bool:
        async with new_session() as session:
            return (await metrics(session, engine)).get(name, 0) >= count

    await until(f"{name} is {count}", is_counted)


async def assert_free_of_requests(engine: Engine) -> None:
    async with new_session() as session:
        await assert_quiescent(session, engine)


def test_a_folder_that_is_removed_while_the_engine_runs_costs_only_time(
    cluster: Cluster, folder: Path, plain: Engine
) -> None:
    right, right_others = (asyncio.run(ask_all(plain, each)) for each in (PROMPTS, OTHERS))
    engine = serve(cluster, "engine", [{"disk": {"path": str(folder / "disk"), "size": "64MiB"}}])
    assert asyncio.run(ask_all(engine, PROMPTS)) == right
    asyncio.run(until_counted(engine, "kvferry:tier_stores_total/disk", 1))
    shutil.rmtree(folder / "disk")
    assert asyncio.run(ask_all(engine, PROMPTS)) == right
    assert asyncio.run(ask_all(engine, OTHERS)) == right_others
    asyncio.run(until_counted(engine, "kvferry:tier_failed_stores_total/disk", 1))
    asyncio.run(assert_free_of_requests(engine))


def test_an_object_store_that_falls_silent_costs_a_request_its_deadline(
    cluster: Cluster, plain: Engine
) -> None:
    prompt = max(PROMPTS, key=lambda each: len(each.token_ids))
    right = asyncio.run(ask_all(plain, [prompt]))
    listen = Address("127.0.0.1", 0)
    with s3_server() as server, FaultProxy(server, listen) as proxy:
        assert ask_s3(server, "PUT", f"/{BUCKET}")[0] == 200
        tier = {"bucket": BUCKET, "endpoint": f"http://{proxy.address}", "store_after": 1}
        engine = serve(cluster, "engine", [{"object": tier}])
        assert asyncio.run(ask_all(engine, [prompt])) == right
        count = len(prompt.token_ids) // 16
        asyncio.run(until_counted(engine, "kvferry:tier_stores_total/object", count))
        timeouts = "kvferry:offload_lookup_timeouts_total"
        before = asyncio.run(counters(engine))[timeouts]
        proxy.stall()
        assert asyncio.run(ask_all(engine, [prompt])) == right
        asyncio.run(until_counted(engine, timeouts, before + 1))
        assert asyncio.run(ask_all(engine, [prompt])) == right
    asyncio.run(assert_free_of_requests(engine))


def test_an_engine_that_is_killed_while_it_loads_from_disk_finds_everything_again(
    cluster: Cluster, folder: Path, plain: Engine
) -> None:
    """The load also promotes chunks into the host pool: half a promotion must not be visible."""
    tiers: list[dict[str, Any]] = [
        {"cpu": "64MiB"},
        {"disk": {"path": str(folder / "disk"), "size": "64MiB"}},
    ]
    prompts = [Prompt(tuple((17 * n + k) % 400 + 10 for n in range(1600))) for k in range(8)]
    num_chunks = 8 * 100
    right = asyncio.run(ask_all(plain, prompts))
    pool = folder / "pool"
    engine = serve(cluster, "first", tiers, pool_path=str(pool))
    assert asyncio.run(ask_all(engine, prompts)) == right
    asyncio.run(until_counted(engine, "kvferry:tier_stores_total/disk", num_chunks))
    engine.kill()
    cluster.dismiss(engine.process)
    shutil.rmtree(pool)
    num_promoted = 0
    for attempt in range(3):
        # One thread that reads: most of the promotion is still to come when the first row is seen.
        engine = serve(cluster, f"attempt {attempt}", tiers, pool_path=str(pool), io_threads=1)
        assert num_rows(pool) == num_promoted
        asyncio.run(kill_while_it_promotes(engine, prompts, pool))
        cluster.dismiss(engine.process)
        assert num_promoted < num_rows(pool) < num_chunks
        num_promoted = num_rows(pool)
    engine = serve(cluster, "last", tiers, pool_path=str(pool))
    assert asyncio.run(ask_all(engine, prompts)) == right
    found = asyncio.run(counters(engine))
    assert found.get("kvferry:tier_refused_total", 0) == 0
    assert found["kvferry:offload_hit_tokens_total"] == 8 * 1600
    assert found["kvferry:tier_loads_total/cpu"] == num_promoted
    assert found["kvferry:tier_loads_total/disk"] == num_chunks - num_promoted


def num_rows(pool: Path) -> int:
    """How many chunks a host pool holds."""
    return sum(segment.num_objects for segment in list_segments(pool))


async def kill_while_it_promotes(engine: Engine, prompts: list[Prompt], pool: Path) -> None:
    """Kill the engine as soon as the pool has one chunk more."""
    before, family = num_rows(pool), engine.family()
    asking = asyncio.create_task(ask_all(engine, prompts))
    while num_rows(pool) == before:
        assert not asking.done(), "nothing was promoted"
        await asyncio.sleep(0)
    for member in family:
        member.kill()
    _, alive = psutil.wait_procs(family, 20)
    assert not alive
    with suppress(aiohttp.ClientError, OSError):
        await asking


async def counters(engine: Engine) -> dict[str, float]:
    async with new_session() as session:
        return await metrics(session, engine)


def test_a_bucket_that_does_not_exist_is_no_error_for_clients(
    cluster: Cluster, plain: Engine
) -> None:
    right = asyncio.run(ask_all(plain, PROMPTS[:3]))
    with s3_server() as server:
        tier = {"bucket": "missing", "endpoint": f"http://{server}", "store_after": 1}
        engine = serve(cluster, "engine", [{"object": tier}])
        for _ in range(2):
            assert asyncio.run(ask_all(engine, PROMPTS[:3])) == right
        asyncio.run(until_counted(engine, "kvferry:tier_failed_stores_total/object", 1))
    asyncio.run(assert_free_of_requests(engine))


def test_an_object_store_that_is_not_there_at_the_start_does_not_stop_the_engine(
    cluster: Cluster, plain: Engine
) -> None:
    right = asyncio.run(ask_all(plain, PROMPTS[:3]))
    nowhere = Address("127.0.0.1", 9)
    tier = {"bucket": "missing", "endpoint": f"http://{nowhere}", "store_after": 1}
    engine = serve(cluster, "engine", [{"object": tier}])
    assert asyncio.run(ask_all(engine, PROMPTS[:3])) == right
    asyncio.run(until_counted(engine, "kvferry:tier_failed_stores_total/object", 1))
    asyncio.run(assert_free_of_requests(engine))
