"""Tests kvferry's OffloadingConnector in real vLLM servers: the tokens of prompts whose KV comes
from a tier are those of a vLLM without a connector, and KV of other weights is never used.
"""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from tests.checkpoints import put_checkpoint
from tests.e2e.conftest import random_prompts
from tests.e2e.harness import Answer, Engine, Prompt, ask_all, metrics, new_session, until
from tests.e2e.test_tiers import flipped, objects, resealed
from tests.tiers.s3_server import request as ask_s3
from tests.tiers.s3_server import s3_server
from tests.vllm.fleet import BY_MODULE_PATH, Fleet, ready
from tests.vllm.right import PROMPTS
from tests.vllm.test_weights_update import load, reset
from tests.vllm.vllm_asking import assert_free

from kvferry.types import Address

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

OFFLOADING = {**BY_MODULE_PATH, "kv_connector": "OffloadingConnector"}
ENVIRONMENT = {
    # vLLM then serves the pages that replace weights and reset caches.
    "VLLM_SERVER_DEV_MODE": "1",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
}
ALL_TIERS = ("cpu", "disk", "object")
BUCKET = "tiers"
LONG = Prompt(tuple(10 + (7 * n) % 480 for n in range(4040)), max_tokens=8)
"""vLLM computes it in two steps of 2,048 tokens."""


@dataclass(frozen=True)
class Storage:
    """Places for the tiers of one test."""

    folder: Path
    server: Address

    sizes: tuple[str, str] = ("256MiB", "512MiB")
    """Of the tiers `cpu` and `disk`."""

    def extra(self, *tiers: str) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "cpu": self.sizes[0],
            "disk": {"path": str(self.folder / "disk"), "size": self.sizes[1]},
            "object": {
                "bucket": BUCKET,
                "endpoint": f"http://{self.server}",
                "prefix": self.folder.name,
                "store_after": 1,
            },
        }
        return {
            "tiers": [{tier: settings[tier]} for tier in tiers],
            "pool_path": str(self.folder / "pool"),
            # Tests must load what was stored, also where this model computes faster.
            "break_even": False,
            # The server of the tests is slow.
            "lookup_timeout": 20.0,
            "load_timeout": 60.0,
        }


@pytest.fixture(scope="module")
def object_server() -> Iterator[Address]:
    with s3_server() as address:
        assert ask_s3(address, "PUT", f"/{BUCKET}")[0] == 200
        yield address


@pytest.fixture
def storage(tmp_path: Path, object_server: Address) -> Iterator[Storage]:
    folder = Path(mkdtemp(prefix="kvferry-test-", dir="/dev/shm"))
    yield Storage(folder, object_server)
    shutil.rmtree(folder)


def serve(fleet: Fleet, storage: Storage, name: str, *tiers: str, **more: Any) -> Engine:
    flags = ("--max-model-len", "4096", *more.pop("flags", ()))
    engine = fleet.vllm(
        name,
        *flags,
        transfer=OFFLOADING,
        extra=storage.extra(*tiers),
        environment=ENVIRONMENT,
        **more,
    )
    ready(engine)
    return engine


async def until_stored(engine: Engine, tier: str, count: int) -> None:
    async with new_session(60) as session:

        async def is_stored() -> bool:
            found = await metrics(session, engine)
            return found.get(f"kvferry:tier_stores_total/{tier}", 0) >= count

        await until(f"{count} chunks stored in {tier}", is_stored)


def num_chunks(prompt: Prompt) -> int:
    """vLLM's CPU build has blocks of 32 tokens here."""
    return len(prompt.token_ids) // 32


async def fill(engine: Engine, *tiers: str, num_ranks: int = 1) -> list[Answer]:
    """Ask one long prompt, wait until these tiers have it, and return the answer."""
    answer = await ask_all(engine, [LONG])
    for tier in tiers:
        await until_stored(engine, tier, num_ranks * num_chunks(LONG))
    return answer


async def ask_and_count(engine: Engine) -> tuple[list[Answer], float]:
    """Ask the prompt, and return the answer and how many tokens came from tiers."""
    answer = await ask_all(engine, [LONG])
    async with new_session(60) as session:
        found = await metrics(session, engine)
    return answer, found["kvferry:offload_hit_tokens_total"]


def end(fleet: Fleet, engine: Engine) -> None:
    """Kill all processes of a server with SIGKILL."""
    engine.kill(is_stopped=True)
    fleet.dismiss(engine.process)


@dataclass(frozen=True)
class Asked:
    prompts: list[Prompt]
    right: list[Answer]


@pytest.fixture(scope="module")
def asked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Asked:
    """Prompts, and the answers of a vLLM without a connector: 200 with shared prefixes in
    exhaustive runs.
    """
    if not request.config.getoption("--exhaustive"):
        return Asked(PROMPTS, request.getfixturevalue("right").vllm)
    prompts = random_prompts(200, seed=21)
    with Fleet(tmp_path_factory.mktemp("plain"), model) as fleet:
        plain = fleet.vllm("plain", transfer=None)
        ready(plain)
        return Asked(prompts, asyncio.run(ask_all(plain, prompts, concurrency=8, timeout_s=240)))


@pytest.mark.parametrize(
    "tiers",
    [
        ALL_TIERS,
        *(
            pytest.param(tiers, marks=pytest.mark.exhaustive)
            for tiers in [
                ("cpu",),
                ("disk",),
                ("object",),
                ("cpu", "disk"),
                ("cpu", "object"),
                ("disk", "object"),
            ]
        ),
    ],
    ids="+".join,
)
def test_tokens_from_tiers_equal_a_vllms_without_a_connector(
    tmp_path: Path, model: Path, storage: Storage, asked: Asked, tiers: tuple[str, ...]
) -> None:
    """Every prompt is asked twice, without a prefix cache. Of several tiers, the faster ones are
    too small for all prompts; the prompts that were asked last are asked first, while the faster
    tiers still have them.
    """
    if len(tiers) > 1:
        storage = replace(storage, sizes=("16MiB", "32MiB"))
    with Fleet(tmp_path / "fleet", model) as fleet:
        engine = serve(fleet, storage, "engine", *tiers, flags=("--no-enable-prefix-caching",))

        async def check() -> None:
            for step in (1, -1):
                prompts, right = asked.prompts[::step], asked.right[::step]
                assert await ask_all(engine, prompts, concurrency=8, timeout_s=240) == right
            async with new_session(60) as session:
                await assert_free(session, engine)
                found = await metrics(session, engine)
            for tier in tiers:
                assert found[f"kvferry:tier_loads_total/{tier}"] > 0, tier
            assert found["kvferry:offload_hit_tokens_total"] > 1000
            assert found.get("kvferry:tier_refused_total", 0) == 0

        asyncio.run(check())


def test_a_killed_server_finds_its_kv_again(tmp_path: Path, model: Path, storage: Storage) -> None:
    """First in the host pool, then with each persistent tier alone."""
    with Fleet(tmp_path / "fleet", model) as fleet:
        engine = serve(fleet, storage, "first", *ALL_TIERS)
        right = asyncio.run(fill(engine, "disk", "object"))
        end(fleet, engine)
        for tiers in (ALL_TIERS, ("disk",), ("object",)):
            engine = serve(fleet, storage, " and ".join(tiers), *tiers)
            assert asyncio.run(ask_and_count(engine)) == (right, num_chunks(LONG) * 32)
            found = asyncio.run(read_metrics(engine))
            assert found[f"kvferry:tier_loads_total/{tiers[0]}"] == num_chunks(LONG)
            num_computed = found["vllm:request_prefill_kv_computed_tokens_sum"]
            assert num_computed == len(LONG.token_ids) % 32
            end(fleet, engine)


@pytest.mark.exhaustive
def test_two_ranks_find_what_two_ranks_have_stored_and_one_rank_finds_nothing(
    tmp_path: Path, model: Path, storage: Storage
) -> None:
    two_ranks: dict[str, Any] = {"flags": ("--tensor-parallel-size", "2"), "cores": "0|1"}
    with Fleet(tmp_path / "fleet", model) as fleet:
        engine = serve(fleet, storage, "first", "cpu", "disk", **two_ranks)
        right = asyncio.run(fill(engine, "disk", num_ranks=2))
        end(fleet, engine)
        for tier in ("cpu", "disk"):
            engine = serve(fleet, storage, tier, tier, **two_ranks)
            assert asyncio.run(ask_and_count(engine)) == (right, num_chunks(LONG) * 32)
            end(fleet, engine)
        engine = serve(fleet, storage, "one rank", "cpu", "disk")
        assert asyncio.run(ask_and_count(engine)) == (right, 0)


def test_one_flipped_bit_in_each_object_is_refused(
    tmp_path: Path, model: Path, storage: Storage
) -> None:
    """The control: objects that were damaged and sealed again give other tokens."""
    disk, kept = storage.folder / "disk", storage.folder / "kept"
    with Fleet(tmp_path / "fleet", model) as fleet:
        engine = serve(fleet, storage, "first", "disk")
        right = asyncio.run(fill(engine, "disk"))
        end(fleet, engine)
        shutil.copytree(disk, kept)
        for number, path in enumerate(objects(disk)):
            path.write_bytes(flipped(path.read_bytes(), number))
        engine = serve(fleet, storage, "second", "disk")
        assert asyncio.run(ask_all(engine, [LONG])) == right
        found = asyncio.run(read_metrics(engine))
        assert found["kvferry:tier_refused_total/disk"] == num_chunks(LONG)
        assert found.get("kvferry:tier_loads_total/disk", 0) == 0
        end(fleet, engine)

        shutil.rmtree(disk)
        shutil.copytree(kept, disk)
        for path in objects(disk):
            path.write_bytes(resealed(path.read_bytes(), str(path), fleet.secret))
        engine = serve(fleet, storage, "third", "disk")
        assert asyncio.run(ask_all(engine, [LONG])) != right


async def read_metrics(engine: Engine) -> dict[str, float]:
    async with new_session(60) as session:
        return await metrics(session, engine)


@dataclass(frozen=True)
class OtherCheckpoint:
    path: Path
    right: list[Answer]
    """The answer of a vLLM without a connector to `LONG`."""


OTHER_SEED = 1


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, model: Path) -> OtherCheckpoint:
    """The configuration of `model`, with other weights."""
    folder = tmp_path_factory.mktemp("other")
    put_checkpoint(folder / "model", OTHER_SEED)
    with Fleet(folder / "fleet", folder / "model") as fleet:
        plain = fleet.vllm("plain", "--max-model-len", "4096", transfer=None)
        ready(plain)
        return OtherCheckpoint(folder / "model", asyncio.run(ask_all(plain, [LONG])))


def test_another_checkpoint_at_the_same_path_finds_nothing(
    tmp_path: Path, storage: Storage, other: OtherCheckpoint
) -> None:
    path = tmp_path / "model"
    put_checkpoint(path, seed=0)
    with Fleet(tmp_path / "fleet", path) as fleet:
        engine = serve(fleet, storage, "first", *ALL_TIERS)
        assert asyncio.run(fill(engine, "disk", "object")) != other.right
        end(fleet, engine)
        put_checkpoint(path, OTHER_SEED)
        engine = serve(fleet, storage, "second", *ALL_TIERS)
        assert asyncio.run(ask_and_count(engine)) == (other.right, 0)


def test_weights_that_are_replaced_in_a_running_server_find_only_their_own_kv(
    tmp_path: Path, storage: Storage, other: OtherCheckpoint
) -> None:
    model = tmp_path / "model"
    put_checkpoint(model, seed=0)
    with Fleet(tmp_path / "fleet", model) as fleet:
        engine = serve(fleet, storage, "engine", *ALL_TIERS)

        async def check() -> None:
            old = await fill(engine, "disk", "object")
            assert old != other.right
            async with new_session(60) as session:
                before = (await metrics(session, engine))["kvferry:offload_hit_tokens_total"]
                await load(session, engine, other.path)
                await reset(session, engine)
                assert await ask_all(engine, [LONG]) == other.right
                found = await metrics(session, engine)
                assert found["kvferry:offload_hit_tokens_total"] == before
                # Back to the first weights: their KV is still on the disk, and right.
                await load(session, engine, model)
                await reset(session, engine)
                assert await ask_all(engine, [LONG]) == old
                found = await metrics(session, engine)
                assert found["kvferry:offload_hit_tokens_total"] > before

        asyncio.run(check())
