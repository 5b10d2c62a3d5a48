"""Tests storage tiers in the embedded engine: the tokens of prompts whose KV comes from a tier are
those of an engine without tiers. Controls must differ.
"""

import asyncio
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from tests.checkpoints import put_checkpoint
from tests.e2e.conftest import random_prompts
from tests.e2e.harness import (
    Answer,
    Cluster,
    Engine,
    Prompt,
    Starting,
    ask_all,
    assert_quiescent,
    metrics,
    new_session,
    until,
)
from tests.tiers.mooncake_store import MooncakeStorage, lender, mooncake_master
from tests.tiers.s3_server import request as ask_s3
from tests.tiers.s3_server import s3_server

from kvferry.tiers.base import EntryKey
from kvferry.tiers.envelope import HEADER_BYTES, Envelope
from kvferry.tiers.keys import FORMAT_VERSION
from kvferry.types import Address

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(200, seed=21)
LONG = Prompt(tuple(10 + (7 * n) % 480 for n in range(1400)), max_tokens=8)
BUCKET = "tiers"
NO_PREFIX_CACHE = ("--no-enable-prefix-caching",)
"""So that every prompt that is asked twice comes from a tier."""


@dataclass(frozen=True)
class TierSetup:
    """The settings of one combination of tiers, each in a place of its own."""

    names: tuple[str, ...]
    folder: Path
    sizes: tuple[str, str] = ("256MiB", "256MiB")
    """Of the tiers `cpu` and `disk`."""
    server: Address | None = None
    mooncake: MooncakeStorage | None = None

    @property
    def extra(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "cpu": {"cpu": self.sizes[0]},
            "disk": {"disk": {"path": str(self.folder / "disk"), "size": self.sizes[1]}},
        }
        if self.server is not None:
            settings["object"] = {
                "object": {
                    "bucket": BUCKET,
                    "endpoint": f"http://{self.server}",
                    "prefix": self.folder.name,
                    "store_after": 1,
                }
            }
        if self.mooncake is not None:
            settings["mooncake"] = {"mooncake": {"master": str(self.mooncake.master.address)}}
        return {
            "tiers": [settings[name] for name in self.names],
            "pool_path": str(self.folder / "pool"),
            # Tests must load what was stored, also where this model computes faster.
            "break_even": False,
            # The server of the tests is slow.
            "lookup_timeout": 20.0,
            "load_timeout": 60.0,
        }

    def read_objects(self) -> dict[str, bytes]:
        """All objects of the slowest tier, which is persistent."""
        if self.mooncake is not None:
            names = self.mooncake.master.object_names()
            found = {name: self.mooncake.read_object(name) for name in names}
            return {name: stored for name, stored in found.items() if stored is not None}
        if self.server is not None:
            listing = ask_s3(self.server, "GET", f"/{BUCKET}?prefix={self.folder.name}")[1].decode()
            names = re.findall(r"<Key>([^<]*/[0-9a-f]{64})</Key>", listing)
            return {name: ask_s3(self.server, "GET", f"/{BUCKET}/{name}")[1] for name in names}
        return {str(path): path.read_bytes() for path in objects(self.folder / "disk")}

    def write_object(self, name: str, stored: bytes) -> None:
        if self.mooncake is not None:
            self.mooncake.write_object(name, stored)
        elif self.server is not None:
            assert ask_s3(self.server, "PUT", f"/{BUCKET}/{name}", stored)[0] == 200
        else:
            Path(name).write_bytes(stored)

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}

    def serve(self, cluster: Cluster, name: str, *flags: str, **changes: Any) -> Engine:
        return cluster.serve(
            name,
            *flags,
            connector="OffloadingConnector",
            extra={**self.extra, **changes},
            environment=self.environment,
        ).ready()


@pytest.fixture(scope="module")
def object_server() -> Iterator[Address]:
    with s3_server() as address:
        assert ask_s3(address, "PUT", f"/{BUCKET}")[0] == 200
        yield address


@pytest.fixture
def setup(
    request: pytest.FixtureRequest, tmp_path: Path, object_server: Address
) -> Iterator[TierSetup]:
    names = tuple(request.param.split("+"))
    # The pool belongs in memory: its rows are mapped, and the disk of a test machine is slow.
    folder = Path(mkdtemp(prefix="kvferry-test-", dir="/dev/shm"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        mooncake = None
        if "mooncake" in names:
            master = stack.enter_context(mooncake_master())
            client = stack.enter_context(lender(master.address, 256 * 2**20))
            mooncake = MooncakeStorage(master, client)
        server = object_server if "object" in names else None
        yield TierSetup(names, folder, server=server, mooncake=mooncake)


async def loads(engine: Engine) -> dict[str, float]:
    async with new_session() as session:
        found = await metrics(session, engine)
    prefix = "kvferry:tier_loads_total/"
    return {name.removeprefix(prefix): n for name, n in found.items() if name.startswith(prefix)}


async def settled(engine: Engine) -> dict[str, float]:
    """Wait until nothing is in progress, and return the engine's metrics."""
    async with new_session() as session:
        await assert_quiescent(session, engine)
        return await metrics(session, engine)


@pytest.fixture(scope="module")
def expected(plain: Engine, pytestconfig: pytest.Config) -> list[Answer]:
    """The answers of an engine without tiers: to 30 prompts, or to all of them."""
    count = len(PROMPTS) if pytestconfig.getoption("--exhaustive") else 30
    return asyncio.run(ask_all(plain, PROMPTS[:count]))


@pytest.mark.parametrize("setup", ["cpu", "disk", "object", "mooncake"], indirect=True)
def test_tokens_from_tiers_equal_an_engines_without_tiers(
    setup: TierSetup, cluster: Cluster, expected: list[Answer]
) -> None:
    engine = setup.serve(cluster, "engine", *NO_PREFIX_CACHE)
    prompts = PROMPTS[: len(expected)]
    first = asyncio.run(ask_all(engine, prompts))
    asyncio.run(until_stored(engine, setup.names[-1], num_chunks(prompts)))
    before = asyncio.run(settled(engine))
    second = asyncio.run(ask_all(engine, prompts))
    after = asyncio.run(settled(engine))
    assert first == expected
    assert second == expected
    hit = after["kvferry:offload_hit_tokens_total"] - before["kvferry:offload_hit_tokens_total"]
    whole_blocks = sum(len(prompt.token_ids) // 16 * 16 for prompt in prompts)
    assert hit >= 0.95 * whole_blocks
    assert after.get("kvferry:offload_failed_loads_total", 0) == 0


@pytest.mark.parametrize(
    "setup",
    [
        "cpu+disk+object",
        *(
            pytest.param(names, marks=pytest.mark.exhaustive)
            for names in ("cpu+disk", "cpu+object", "disk+object", "cpu+disk+mooncake")
        ),
    ],
    indirect=True,
)
def test_tokens_are_right_if_each_tier_has_a_part_of_the_kv(
    setup: TierSetup, cluster: Cluster, expected: list[Answer]
) -> None:
    """The faster tiers are too small for all prompts. The prompts that were asked last are asked
    first, while the faster tiers still have them.
    """
    engine = replace(setup, sizes=("4MiB", "8MiB")).serve(cluster, "engine", *NO_PREFIX_CACHE)
    prompts = PROMPTS[: len(expected)]
    assert asyncio.run(ask_all(engine, prompts)) == expected
    asyncio.run(settled(engine))  # all stores have ended
    assert asyncio.run(ask_all(engine, prompts[::-1])) == expected[::-1]
    found = asyncio.run(settled(engine))
    assert all(found[f"kvferry:tier_loads_total/{tier}"] for tier in setup.names), found
    assert found["kvferry:tier_refused_total"] == 0


@pytest.mark.parametrize("setup", ["cpu", "disk", "object", "mooncake"], indirect=True)
def test_a_killed_engine_finds_its_kv_again(
    setup: TierSetup, cluster: Cluster, plain: Engine
) -> None:
    right = asyncio.run(ask_all(plain, [LONG]))
    engine = setup.serve(cluster, "first")
    assert asyncio.run(ask_all(engine, [LONG])) == right
    asyncio.run(until_stored(engine, setup.names[-1], len(LONG.token_ids) // 16))
    engine.kill()
    cluster.dismiss(engine.process)
    again = setup.serve(cluster, "second")
    assert asyncio.run(ask_all(again, [LONG])) == right
    found = asyncio.run(settled(again))
    assert found["kvferry:offload_hit_tokens_total"] == len(LONG.token_ids) // 16 * 16
    assert found[f"kvferry:tier_loads_total/{setup.names[-1]}"] == len(LONG.token_ids) // 16


def num_chunks(prompts: Sequence[Prompt]) -> int:
    """How many different chunks these prompts have."""
    ends = (range(16, len(prompt.token_ids) + 1, 16) for prompt in prompts)
    return len(
        {
            prompt.token_ids[:end]
            for prompt, ends_of in zip(prompts, ends, strict=True)
            for end in ends_of
        }
    )


async def until_stored(engine: Engine, tier: str, count: int) -> None:
    await until_counted(engine, f"kvferry:tier_stores_total/{tier}", count)


async def until_counted(engine: Engine, name: str, count: int) -> None:
    async def is_counted() -> bool:
        async with new_session() as session:
            return (await metrics(session, engine)).get(name, 0) >= count

    # The object store of the tests takes 10 ms and more for an object.
    await until(f"{name} is {count}", is_counted, timeout_s=120)


@pytest.mark.parametrize("setup", ["cpu"], indirect=True)
def test_another_engine_of_this_host_finds_what_one_has_stored(
    setup: TierSetup, cluster: Cluster, plain: Engine
) -> None:
    right = asyncio.run(ask_all(plain, [LONG]))
    p, d = (setup.serve(cluster, name) for name in ("p", "d"))
    assert asyncio.run(ask_all(p, [LONG])) == right
    asyncio.run(until_stored(p, "cpu", len(LONG.token_ids) // 16))
    assert asyncio.run(ask_all(d, [LONG])) == right
    assert asyncio.run(loads(d)) == {"cpu": len(LONG.token_ids) // 16}


@pytest.mark.parametrize("setup", ["cpu+disk"], indirect=True)
def test_a_tier_stores_only_what_was_needed_often_enough(
    setup: TierSetup, cluster: Cluster, plain: Engine
) -> None:
    """The host pool stores everything, the disk what a second request needs."""
    once, twice = (Prompt(LONG.token_ids[start : start + 320]) for start in (0, 320))
    right = asyncio.run(ask_all(plain, [once, twice]))
    cpu, disk = setup.extra["tiers"]
    disk["disk"]["store_after"] = 2
    engine = setup.serve(cluster, "engine", *NO_PREFIX_CACHE, tiers=[cpu, disk])
    assert asyncio.run(ask_all(engine, [once, twice])) == right
    assert asyncio.run(ask_all(engine, [twice])) == right[1:]
    asyncio.run(until_stored(engine, "disk", 20))
    found = asyncio.run(settled(engine))
    assert found["kvferry:tier_stores_total/cpu"] == 40
    assert found["kvferry:tier_stores_total/disk"] == 20
    cluster.dismiss(engine.process)
    engine = setup.serve(cluster, "next", tiers=[disk])
    assert asyncio.run(ask_all(engine, [once, twice])) == right
    assert asyncio.run(settled(engine))["kvferry:offload_hit_tokens_total"] == 320
    assert asyncio.run(loads(engine)) == {"disk": 20}


@pytest.mark.parametrize(
    "setup",
    ["disk", "object", pytest.param("mooncake", marks=pytest.mark.exhaustive)],
    indirect=True,
)
def test_one_flipped_bit_in_each_object_is_refused(
    setup: TierSetup, cluster: Cluster, plain: Engine
) -> None:
    """The control: objects that were damaged and sealed again give other tokens."""
    right = asyncio.run(ask_all(plain, [LONG]))
    tier, count = setup.names[-1], len(LONG.token_ids) // 16
    engine = setup.serve(cluster, "first", *NO_PREFIX_CACHE)
    assert asyncio.run(ask_all(engine, [LONG])) == right
    asyncio.run(until_stored(engine, tier, count))
    kept = setup.read_objects()
    assert len(kept) == count

    for number, (name, stored) in enumerate(kept.items()):
        setup.write_object(name, flipped(stored, number))
    assert asyncio.run(ask_all(engine, [LONG])) == right
    asyncio.run(until_counted(engine, f"kvferry:tier_refused_total/{tier}", count))
    found = asyncio.run(settled(engine))
    assert found[f"kvferry:tier_refused_total/{tier}"] == count
    assert found[f"kvferry:tier_loads_total/{tier}"] == 0
    cluster.dismiss(engine.process)

    for name, stored in kept.items():
        setup.write_object(name, resealed(stored, name, cluster.secret))
    engine = setup.serve(cluster, "second")
    assert asyncio.run(ask_all(engine, [LONG])) != right


@pytest.mark.parametrize("setup", ["disk"], indirect=True)
def test_objects_of_an_older_format_are_refused(
    setup: TierSetup, cluster: Cluster, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their MAC fits, and their payload would give other tokens."""
    right = asyncio.run(ask_all(plain, [LONG]))
    engine = setup.serve(cluster, "engine", *NO_PREFIX_CACHE)
    assert asyncio.run(ask_all(engine, [LONG])) == right
    count = len(LONG.token_ids) // 16
    asyncio.run(until_stored(engine, "disk", count))
    monkeypatch.setattr("kvferry.tiers.envelope.FORMAT_VERSION", FORMAT_VERSION - 1)
    for name, stored in setup.read_objects().items():
        setup.write_object(name, resealed(stored, name, cluster.secret))
    assert asyncio.run(ask_all(engine, [LONG])) == right
    found = asyncio.run(settled(engine))
    assert found["kvferry:tier_refused_total/disk"] == count
    assert found["kvferry:tier_loads_total/disk"] == 0


def objects(root: Path) -> list[Path]:
    found = sorted(path for path in root.rglob("*") if path.is_file() and len(path.name) == 64)
    assert found
    return found


def flipped(stored: bytes, number: int) -> bytes:
    """An object with one other bit in its payload; which one depends on `number`."""
    changed = bytearray(stored)
    offset = HEADER_BYTES + 64 * number % (len(stored) - HEADER_BYTES)
    changed[offset] ^= 1 << (number % 8)
    return bytes(changed)


def resealed(stored: bytes, name: str, secret: bytes) -> bytes:
    """An object with another payload and a MAC that fits. `name` has its namespace and its key."""
    payload = stored[HEADER_BYTES:][::-1]
    named = re.search(r"([0-9a-f]{32})/(?:[0-9a-f]{2}/)?([0-9a-f]{64})$", name)
    assert named is not None
    namespace, key = map(bytes.fromhex, named.groups())
    return Envelope(secret, namespace).seal(EntryKey(key), memoryview(payload)) + payload


@pytest.mark.parametrize("setup", ["cpu"], indirect=True)
def test_a_d_that_has_a_prefix_in_its_tier_fetches_only_the_rest_from_p(
    setup: TierSetup, cluster: Cluster, plain: Engine
) -> None:
    """P and D have a pool of their own; neither has a prefix cache."""
    head = LONG.token_ids[: 50 * 16]
    first, second = Prompt(head, max_tokens=4), replace(LONG, max_tokens=8)
    right = asyncio.run(ask_all(plain, [first, second]))

    def serve(name: str) -> Starting:
        pool = str(setup.folder / f"pool of {name}")
        children = [
            {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {**setup.extra, "pool_path": pool},
            },
        ]
        return cluster.serve(
            name, *NO_PREFIX_CACHE, connector="MultiConnector", extra={"connectors": children}
        )

    p, d = (starting.ready() for starting in (serve("p"), serve("d")))
    router = cluster.proxy([p], [d]).ready()
    assert asyncio.run(ask_all(router, [first])) == right[:1]
    asyncio.run(until_stored(d, "cpu", 50))
    before = asyncio.run(settled(d))
    assert asyncio.run(ask_all(router, [second])) == right[1:]
    after = asyncio.run(settled(d))
    num_blocks = -(-len(second.token_ids) // 16)
    bytes_per_block = before["kvferry:transfer_bytes_total"] / 50
    moved = after["kvferry:transfer_bytes_total"] - before["kvferry:transfer_bytes_total"]
    assert after["kvferry:tier_loads_total/cpu"] == 50
    assert moved <= (num_blocks - 50) * bytes_per_block
    assert asyncio.run(settled(p))["kvferry:num_used_blocks"] == 0


@pytest.mark.parametrize(
    "setup",
    ["cpu+disk+object", pytest.param("mooncake", marks=pytest.mark.exhaustive)],
    indirect=True,
)
def test_another_checkpoint_at_the_same_path_finds_nothing(
    setup: TierSetup, tmp_path: Path
) -> None:
    """Fill every tier, put weights at the same path that differ in 40 rows, and restart."""
    model = tmp_path / "model"
    put_checkpoint(model, seed=1)
    with Cluster(tmp_path, model) as cluster:
        engine = setup.serve(cluster, "first")
        old = asyncio.run(ask_all(engine, [LONG]))
        for tier in setup.names:
            asyncio.run(until_stored(engine, tier, len(LONG.token_ids) // 16))
        cluster.dismiss(engine.process)
        put_checkpoint(model, seed=2)
        plain = cluster.serve("plain", is_plain=True).ready()
        right = asyncio.run(ask_all(plain, [LONG]))
        assert right != old
        engine = setup.serve(cluster, "second")
        assert asyncio.run(ask_all(engine, [LONG])) == right
        assert asyncio.run(settled(engine)).get("kvferry:offload_hit_tokens_total", 0) == 0
