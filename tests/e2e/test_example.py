"""Tests `ExampleConnector` in the embedded engine: D's tokens are those of an engine without a
connector, whatever happens to the files, to P and to D. Controls must differ.
"""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import pytest
from tests.e2e.conftest import random_prompts
from tests.e2e.harness import (
    Answer,
    Cluster,
    Engine,
    Prompt,
    ask_all,
    assert_quiescent,
    assert_said,
    metrics,
    new_session,
    until,
)
from tests.tiers.forged_prefixes import forge
from tests.tiers.storages import mounted

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(100, seed=51)
LONG = Prompt(tuple(10 + (7 * n) % 480 for n in range(1400)), max_tokens=8)
NO_PREFIX_CACHE = ("--no-enable-prefix-caching",)


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(mkdtemp(prefix="kvferry-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def right(plain: Engine) -> list[Answer]:
    """The answer of an engine without a connector to the long prompt."""
    return asyncio.run(ask_all(plain, [LONG]))


def serve(cluster: Cluster, name: str, folder: Path, *flags: str, role: str = "kv_both") -> Engine:
    return cluster.serve(
        name,
        *NO_PREFIX_CACHE,
        *flags,
        connector="ExampleConnector",
        extra={"shared_storage_path": str(folder)},
        role=role,
    ).ready()


def prefill(engine: Engine, prompts: list[Prompt]) -> None:
    answers = asyncio.run(ask_all(engine, [replace(prompt, max_tokens=1) for prompt in prompts]))
    assert all(answer.is_ok for answer in answers)


async def counts(engine: Engine) -> dict[str, float]:
    """Wait until the engine is idle, and return its counters of stored prefixes."""
    async with new_session() as session:
        await assert_quiescent(session, engine)
        found = await metrics(session, engine)
    names = {name: name.partition("kvferry:tier_")[2].partition("_total/") for name in found}
    return {
        counter: found[name]
        for name, (counter, _, tier) in names.items()
        if tier == "example" and found[name]
    }


def files(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.safetensors"))
    assert found
    return found


def test_tokens_of_100_prompts_equal_an_engines_without_connector(
    cluster: Cluster, plain: Engine, folder: Path
) -> None:
    expected = asyncio.run(ask_all(plain, PROMPTS))
    p = serve(cluster, "p", folder, role="kv_producer")
    d = serve(cluster, "d", folder, role="kv_consumer")
    prefill(p, PROMPTS)
    assert asyncio.run(ask_all(d, PROMPTS)) == expected
    stored = [prompt for prompt in PROMPTS if len(prompt.token_ids) > 16]
    assert asyncio.run(counts(d)) == {"loads": len(stored)}
    prefixes = {prompt.token_ids[: (len(prompt.token_ids) - 1) // 16 * 16] for prompt in stored}
    assert asyncio.run(counts(p)) == {"stores": len(prefixes)}


def test_two_ranks_store_and_load(cluster: Cluster, folder: Path, right: list[Answer]) -> None:
    ranks = ("--tensor-parallel-size", "2")
    p = serve(cluster, "p", folder, *ranks)
    prefill(p, [LONG])
    cluster.dismiss(p.process)
    d = serve(cluster, "d", folder, *ranks)
    assert asyncio.run(ask_all(d, [LONG])) == right
    assert asyncio.run(counts(d)) == {"loads": 1}


def test_damage_costs_only_time_and_forged_kv_gives_other_tokens(
    cluster: Cluster, folder: Path, right: list[Answer]
) -> None:
    """The control: a file that was changed and sealed again gives other tokens."""
    p, d = serve(cluster, "p", folder), serve(cluster, "d", folder)
    prefill(p, [LONG])
    data = bytearray(files(folder)[0].read_bytes())
    data[-1] ^= 1
    files(folder)[0].write_bytes(data)
    assert asyncio.run(ask_all(d, [LONG])) == right
    assert asyncio.run(counts(d)) == {"refused": 1}
    asyncio.run(assert_said(d, "is damaged, or was not written with this cluster's secret"))

    prefill(p, [LONG])
    for path in files(folder):
        forge(path, cluster.secret)
    assert asyncio.run(ask_all(d, [LONG])) != right
    assert asyncio.run(counts(d)) == {"refused": 1, "loads": 1}


def test_p_that_is_killed_while_it_writes_leaves_whole_prefixes(
    cluster: Cluster, plain: Engine, folder: Path
) -> None:
    prompts = [Prompt(tuple((17 * n + k) % 400 + 10 for n in range(800))) for k in range(12)]
    expected = asyncio.run(ask_all(plain, prompts))
    p = serve(cluster, "p", folder)

    async def kill_while_writing() -> None:
        asking = asyncio.ensure_future(ask_all(p, prompts, max_tokens=1))

        async def has_prefix() -> bool:
            return len(list(folder.glob("prefixes-*/*"))) > 2

        await until("P has stored prefixes", has_prefix)
        p.kill()
        await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(kill_while_writing())
    cluster.dismiss(p.process)
    d = serve(cluster, "d", folder)
    assert asyncio.run(ask_all(d, prompts)) == expected
    found = asyncio.run(counts(d))
    assert found["loads"] >= 1
    assert "refused" not in found


def test_d_that_is_killed_while_it_loads_changes_nothing(
    cluster: Cluster, folder: Path, right: list[Answer]
) -> None:
    p, d = serve(cluster, "p", folder), serve(cluster, "d", folder)
    prefill(p, [LONG])

    async def kill_while_asking() -> None:
        asking = asyncio.ensure_future(ask_all(d, [LONG] * 8, max_tokens=200))
        async with new_session() as session:

            async def has_loaded() -> bool:
                return (await metrics(session, d)).get("kvferry:tier_loads_total/example", 0) > 0

            await until("D loads", has_loaded)
        d.kill()
        await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(kill_while_asking())
    cluster.dismiss(d.process)
    again = serve(cluster, "again", folder)
    assert asyncio.run(ask_all(again, [LONG])) == right
    assert asyncio.run(counts(again)) == {"loads": 1}
    assert asyncio.run(counts(p)) == {"stores": 1}


def test_a_full_or_read_only_disk_costs_only_the_saves(
    cluster: Cluster, tmp_path: Path, right: list[Answer]
) -> None:
    with mounted(tmp_path / "small", "tmpfs", "size=1m,mode=700") as small:
        (small / "filler").write_bytes(bytes(900 << 10))
        engine = serve(cluster, "engine", small)
        assert asyncio.run(ask_all(engine, [LONG])) == right
        assert asyncio.run(counts(engine)) == {"failed_stores": 1}
        asyncio.run(assert_said(engine, "No space left on device"))
        (small / "filler").unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        assert asyncio.run(ask_all(engine, [LONG])) == right
        assert asyncio.run(counts(engine)) == {"failed_stores": 2}
        cluster.dismiss(engine.process)


def test_the_folder_may_be_emptied_at_any_time(
    cluster: Cluster, plain: Engine, folder: Path
) -> None:
    prompts = random_prompts(40, seed=52, longest=600)
    expected = asyncio.run(ask_all(plain, prompts))
    engine = serve(cluster, "engine", folder)
    prefill(engine, prompts)
    emptying = subprocess.Popen(
        ["bash", "-c", f"while true; do rm -rf {folder}/prefixes-*; sleep 0.02; done"],
        start_new_session=True,
    )
    try:
        assert asyncio.run(ask_all(engine, prompts)) == expected
    finally:
        os.killpg(emptying.pid, signal.SIGKILL)
        emptying.wait()
    assert asyncio.run(counts(engine))["stores"] >= 1
