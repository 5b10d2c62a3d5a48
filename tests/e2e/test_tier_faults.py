"""Tests faults of disks, and kill -9, under a running embedded engine. Always: right tokens, no
hang, a counter, one line in the log, and the engine serves on as without tiers.

Faults of object stores are in test_object_store_faults.py.
"""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import aiohttp
import psutil
import pytest
from tests.e2e.conftest import random_prompts
from tests.e2e.harness import SETTLE_S, Answer, Cluster, Engine, Host, Prompt, ask_all, until
from tests.e2e.jumping_clock import jumping_clock
from tests.e2e.test_tiers import num_chunks, objects
from tests.e2e.tiered_engine import (
    BLOCK_TOKENS,
    HIT_TOKENS,
    assert_free_of_requests,
    counters,
    prompt_of,
    serve,
    start,
    troubles,
    until_counted,
    until_hit,
    until_stored,
)
from tests.tiers.s3_server import ErrorServer, s3_server
from tests.tiers.s3_server import request as ask_s3
from tests.tiers.storages import mounted, throttled_disk

from kvferry.tiers.base import EntryKey
from kvferry.tiers.envelope import HEADER_BYTES, Envelope
from kvferry.tiers.pool.reader import list_segments

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(12, seed=33, longest=600)
OTHERS = random_prompts(4, seed=34, longest=600)
MANY = 20
"""Chunks of a prompt."""
LONG = [prompt_of(100, number) for number in range(4)]
NUM_CHUNKS = 400
"""Of `LONG`."""
YEAR_S = 365 * 24 * 3600.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    made = Path(mkdtemp(prefix="kvferry-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def on_disk(folder: Path, size: str = "64MiB") -> list[dict[str, Any]]:
    return [{"disk": {"path": str(folder), "size": size}}]


def ask(engine: Engine, *prompts: Prompt) -> list[Answer]:
    return asyncio.run(ask_all(engine, prompts))


# -- objects that are not what they seem --


def sealed(secret: bytes, namespace: bytes, key: bytes, stored: bytes) -> bytes:
    """An object with another payload: if it were used, the tokens would be wrong."""
    payload = stored[HEADER_BYTES:][::-1]
    return Envelope(secret, namespace).seal(EntryKey(key), memoryview(payload)) + payload


def test_objects_that_are_truncated_forged_or_of_other_engines_are_refused(
    cluster: Cluster, folder: Path, plain: Engine
) -> None:
    """A flipped bit, another model and another format version are in test_tiers.py."""
    known = prompt_of(MANY)
    right = ask(plain, known)
    engine = serve(cluster, "engine", on_disk(folder))
    assert ask(engine, known) == right
    secret, other_key, other_namespace = cluster.secret, bytes(32), bytes(16)
    kinds: dict[str, Callable[[bytes, bytes, bytes], bytes]] = {
        "truncated": lambda namespace, key, stored: stored[: len(stored) // 2],
        "forged": lambda namespace, key, stored: sealed(b"guessed", namespace, key, stored),
        "of another namespace": lambda _, key, stored: sealed(secret, other_namespace, key, stored),
        "of another key": lambda space, _, stored: sealed(secret, space, other_key, stored),
    }
    for number, (kind, damaged) in enumerate(kinds.items(), 1):
        # What was refused is computed, and stored again.
        asyncio.run(until_stored(engine, "disk", number * MANY))
        for path in objects(folder):
            namespace, key = bytes.fromhex(path.parents[1].name), bytes.fromhex(path.name)
            path.write_bytes(damaged(namespace, key, path.read_bytes()))
        assert ask(engine, known) == right, kind
        asyncio.run(until_counted(engine, "kvferry:tier_refused_total/disk", number * MANY))
    assert asyncio.run(counters(engine))["kvferry:tier_loads_total/disk"] == 0
    assert len(asyncio.run(troubles(engine))) == 1
    asyncio.run(until_hit(engine, known, right[0]))


# -- disks --


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def remount(disk: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], check=True)


def test_a_full_and_a_read_only_disk_serve_loads_and_take_stores_again_later(
    cluster: Cluster, folder: Path, plain: Engine
) -> None:
    """Two disks with an engine each, because a disk is tried again after 5 s."""
    known, new = (prompt_of(MANY, number) for number in range(2))
    right = ask(plain, known, new)
    with ExitStack() as stack:
        full, read_only = (
            stack.enter_context(mounted(folder / name, "tmpfs", "size=8m,mode=700"))
            for name in ("full", "read-only")
        )
        starting = [start(cluster, disk.name, on_disk(disk)) for disk in (full, read_only)]
        engines = [each.ready() for each in starting]
        for engine in engines:
            assert ask(engine, known) == right[:1]
            asyncio.run(until_stored(engine, "disk", MANY))
        fill(full)
        remount(read_only, "ro")
        for engine, reason in zip(engines, ("No space left", "Read-only"), strict=True):
            assert ask(engine, new) == right[1:]
            asyncio.run(until_counted(engine, "kvferry:tier_failed_stores_total/disk", 1))
            (line,) = asyncio.run(troubles(engine))
            assert reason in line
            assert ask(engine, known) == right[:1]
            assert asyncio.run(counters(engine))[HIT_TOKENS] == len(known.token_ids)
        (full / "filler").unlink()
        remount(read_only, "rw")
        for engine in engines:
            asyncio.run(until_hit(engine, new, right[1]))
            asyncio.run(assert_free_of_requests(engine))
            cluster.dismiss(engine.process)


def test_a_slow_disk_costs_a_request_its_deadline(
    cluster: Cluster, folder: Path, plain: Engine
) -> None:
    known, new = (prompt_of(MANY, number) for number in range(2))
    right = ask(plain, known, new)
    with throttled_disk(folder) as disk:
        engine = serve(cluster, "engine", on_disk(disk.folder / "kv"), load_timeout=0.5)
        assert ask(engine, known) == right[:1]
        asyncio.run(until_stored(engine, "disk", MANY))
        with disk.throttled((member.pid for member in engine.family()), bytes_per_s=4096):
            assert ask(engine, known, new) == right
            found = asyncio.run(counters(engine))
            assert found["kvferry:offload_failed_loads_total"] == 1
            lines = [line for line in engine.process.tail(50) if "load from tiers failed" in line]
            assert len(lines) == 1
            assert "the load took longer than 0.5 s" in lines[0]
        asyncio.run(until_hit(engine, known, right[0]))
        asyncio.run(until_stored(engine, "disk", 2 * MANY))
        asyncio.run(assert_free_of_requests(engine))
        cluster.dismiss(engine.process)


def test_a_folder_that_is_removed_while_the_engine_runs_costs_only_time(
    cluster: Cluster, folder: Path, plain: Engine
) -> None:
    right, right_others = (asyncio.run(ask_all(plain, each)) for each in (PROMPTS, OTHERS))
    engine = serve(cluster, "engine", on_disk(folder / "disk"))
    assert asyncio.run(ask_all(engine, PROMPTS)) == right
    asyncio.run(until_stored(engine, "disk", 1))
    shutil.rmtree(folder / "disk")
    assert asyncio.run(ask_all(engine, PROMPTS)) == right
    assert asyncio.run(ask_all(engine, OTHERS)) == right_others
    asyncio.run(until_counted(engine, "kvferry:tier_failed_stores_total/disk", 1))
    (line,) = asyncio.run(troubles(engine))
    assert "No such file or directory" in line
    asyncio.run(assert_free_of_requests(engine))


# -- kill -9 --


def test_an_engine_that_is_killed_while_it_loads_from_disk_finds_everything_again(
    cluster: Cluster, folder: Path, plain: Engine
) -> None:
    """The load also promotes chunks into the host pool: half a promotion must not be visible."""
    tiers = [{"cpu": "64MiB"}, *on_disk(folder / "disk")]
    right = ask(plain, *LONG)
    pool = folder / "pool"
    engine = serve(cluster, "first", tiers, pool_path=str(pool))
    assert asyncio.run(ask_all(engine, LONG)) == right
    asyncio.run(until_stored(engine, "disk", NUM_CHUNKS))
    engine.kill()
    cluster.dismiss(engine.process)
    shutil.rmtree(pool)
    num_promoted = 0
    for attempt in range(2):
        # One thread that reads: most of the promotion is still to come when the first row is seen.
        engine = serve(cluster, f"attempt {attempt}", tiers, pool_path=str(pool), io_threads=1)
        assert num_rows(pool) == num_promoted
        asyncio.run(kill_when_more(lambda: num_rows(pool), engine, LONG))
        cluster.dismiss(engine.process)
        assert num_promoted < num_rows(pool) < NUM_CHUNKS
        num_promoted = num_rows(pool)
    engine = serve(cluster, "last", tiers, pool_path=str(pool))
    assert asyncio.run(ask_all(engine, LONG)) == right
    found = asyncio.run(counters(engine))
    assert found.get("kvferry:tier_refused_total", 0) == 0
    assert found[HIT_TOKENS] == NUM_CHUNKS * BLOCK_TOKENS
    assert found["kvferry:tier_loads_total/cpu"] == num_promoted
    assert found["kvferry:tier_loads_total/disk"] == NUM_CHUNKS - num_promoted


def num_rows(pool: Path) -> int:
    """How many chunks a host pool holds."""
    return sum(segment.num_objects for segment in list_segments(pool))


async def kill_when_more(
    count: Callable[[], int], engine: Engine, prompts: Sequence[Prompt]
) -> None:
    """Kill the engine in the middle of these requests, as soon as the count rises."""
    before, family = count(), engine.family()
    asking = asyncio.create_task(ask_all(engine, prompts))
    while count() == before:
        assert not asking.done(), "too late"
        await asyncio.sleep(0)
    kill(family)
    with suppress(aiohttp.ClientError, OSError):
        await asking


def kill(family: list[psutil.Process]) -> None:
    for member in family:
        member.kill()
    _, alive = psutil.wait_procs(family, 60)
    assert not alive


def test_an_engine_that_is_killed_while_it_stores_leaves_only_whole_objects(
    cluster: Cluster, folder: Path, plain: Engine
) -> None:
    prompts = [prompt_of(60, number) for number in range(2)]
    right = ask(plain, *prompts)
    engine = serve(cluster, "killed", on_disk(folder), io_threads=1)
    asyncio.run(kill_when_more(lambda: num_objects(folder), engine, prompts))
    cluster.dismiss(engine.process)
    num_stored = num_objects(folder)
    assert 0 < num_stored < 120
    engine = serve(cluster, "next", on_disk(folder))
    assert ask(engine, *prompts) == right
    asyncio.run(until_stored(engine, "disk", 120 - num_stored))
    assert ask(engine, *prompts) == right
    found = asyncio.run(counters(engine))
    assert found["kvferry:tier_refused_total"] == 0
    assert found["kvferry:tier_stores_total/disk"] == 120 - num_stored
    assert found["kvferry:tier_loads_total/disk"] >= 120


def num_objects(folder: Path) -> int:
    return sum(len(path.name) == 64 for path in folder.glob("*/*/*"))


def test_an_engine_that_is_killed_while_it_evicts_from_disk_is_followed_by_one_that_goes_on(
    cluster: Cluster, folder: Path, plain: Engine
) -> None:
    """The folder is far above the limit of the second engine, which evicts as soon as it starts."""
    known = prompt_of(MANY)
    right = ask(plain, known)
    engine = serve(cluster, "first", on_disk(folder))
    assert ask(engine, known) == right
    asyncio.run(until_stored(engine, "disk", MANY))
    cluster.dismiss(engine.process)
    old = add_old_objects(folder, 10_000)
    limit_bytes = 2 * MANY * old[0].stat().st_size
    small = on_disk(folder, str(limit_bytes))
    killed = start(cluster, "killed", small)
    kill(family_when(lambda: not old[0].exists(), killed.child.pid))
    cluster.dismiss(killed.child)
    assert old[-1].exists(), "too late"
    engine = serve(cluster, "last", small)

    async def is_small() -> bool:
        return num_objects(folder) <= 2 * MANY

    asyncio.run(until("the old objects are evicted", is_small))
    assert ask(engine, known) == right
    found = asyncio.run(counters(engine))
    assert found["kvferry:tier_evictions_total/disk"] > 0
    assert found["kvferry:tier_refused_total"] == 0
    assert found[HIT_TOKENS] == len(known.token_ids)


def add_old_objects(folder: Path, count: int) -> list[Path]:
    """Make objects that were last used a year ago, all of them links to one file. Returns them in
    the order in which they are evicted.
    """
    first = objects(folder)[0]
    source = folder / "source"
    shutil.copyfile(first, source)
    at = time.time() - YEAR_S
    os.utime(source, (at, at))
    # These names come after those of the objects in the same folder, and are distinct.
    paths = [first.parent / f"{number:064x}" for number in range(count)]
    for path in paths:
        path.hardlink_to(source)
    return paths


def family_when(condition: Callable[[], bool], pid: int) -> list[psutil.Process]:
    """The process and its children as of the moment when the condition begins to hold."""
    deadline = time.monotonic() + SETTLE_S
    parent = psutil.Process(pid)
    while True:
        family = [parent, *parent.children(recursive=True)]
        if condition():
            return family
        assert time.monotonic() < deadline


# -- several engines, and clocks --


def test_two_engines_that_store_the_same_keys_at_once_store_each_key_whole(
    cluster: Cluster, folder: Path, plain: Engine
) -> None:
    right = ask(plain, *PROMPTS)
    starting = [start(cluster, name, on_disk(folder)) for name in ("a", "b")]
    engines = [each.ready() for each in starting]

    async def ask_both() -> list[list[Answer]]:
        return await asyncio.gather(*(ask_all(engine, PROMPTS) for engine in engines))

    for _ in range(2):
        assert asyncio.run(ask_both()) == [right, right]

    async def are_stored() -> bool:
        return num_objects(folder) == num_chunks(PROMPTS)

    asyncio.run(until("each chunk is stored", are_stored))
    for engine in engines:
        found = asyncio.run(counters(engine))
        assert found[HIT_TOKENS] > 0
        for trouble in ("refused", "failed_loads", "failed_stores"):
            assert found.get(f"kvferry:tier_{trouble}_total", 0) == 0


@pytest.mark.exhaustive
def test_a_clock_that_jumps_changes_nothing(
    cluster: Cluster, folder: Path, plain: Engine, tmp_path: Path
) -> None:
    """Times of files and signatures for object stores come from the wall clock; all deadlines come
    from the monotonic clock. Short runs have the tests of file times in tests/tiers/test_disk.py.
    """
    prompts = [prompt_of(MANY, number) for number in range(4)]
    right = ask(plain, *prompts)
    clock, year = jumping_clock(tmp_path), datetime.now(UTC).year
    with s3_server() as server, closing(ErrorServer(server)) as store:
        store.start()
        assert ask_s3(server, "PUT", "/bucket")[0] == 200
        bucket = {"bucket": "bucket", "endpoint": f"http://{store.address}", "store_after": 1}
        tiers = [*on_disk(folder), {"object": bucket}]
        engine = start(
            cluster, "engine", tiers, at=Host(clock.command), lookup_timeout=20.0
        ).ready()
        for number, years in enumerate((0, 1, -1, 0), 1):
            clock.jump(int(years * YEAR_S))
            store.seen.clear()
            # The prompts from before the jump come from the disk.
            assert ask(engine, *prompts[:number]) == right[:number]
            for tier in ("disk", "object"):
                asyncio.run(until_stored(engine, tier, number * MANY))
            signed_in = {seen.authorization.split("/")[1][:4] for seen in store.seen}
            assert signed_in == {str(year + years)}
        for path in objects(folder):
            path.unlink()

        async def jump_while_it_loads() -> list[Answer]:
            store.gets.clear()
            asking = asyncio.create_task(ask_all(engine, prompts[:1]))

            async def is_loading() -> bool:
                return any(seen.method == "GET" for seen in store.seen)

            await until("the engine loads from the object store", is_loading)
            clock.jump(int(YEAR_S))
            store.gets.set()
            return await asking

        assert asyncio.run(jump_while_it_loads()) == right[:1]
        found = asyncio.run(counters(engine))
        assert found["kvferry:tier_loads_total/disk"] == (1 + 2 + 3) * MANY
        assert found["kvferry:tier_loads_total/object"] == MANY
        for trouble in ("tier_refused", "tier_failed_stores", "offload_failed_loads"):
            assert found[f"kvferry:{trouble}_total"] == 0
        asyncio.run(assert_free_of_requests(engine))
