"""Tests vLLM's own OffloadingConnector and ExampleConnector beside NixlConnector in kvferry's
MultiConnector, in real vLLM: right tokens, controls that the children's KV is used, and killed
engines.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.harness import Engine, ask_all, metrics, new_session
from tests.ports import reserve_ports
from tests.vllm.fleet import BY_MODULE_PATH, Fleet, ready
from tests.vllm.right import PROMPTS, Right
from tests.vllm.test_lmcache import (
    DEV_MODE,
    FEW,
    expected,
    first_answers,
    forget,
    loaded_tokens,
)
from tests.vllm.test_multi import NIXL, OFFLOADING, example, multi
from tests.vllm.vllm_asking import assert_free

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.exhaustive,
]

BLOCK = 32
EXAMPLE_FLAGS = ("--no-async-scheduling", "--max-num-batched-tokens", "8192")
"""Loads within a step and `recompute` exclude async scheduling. Prompts that vLLM computes in
several steps are not saved; with these steps there are none.
"""


@dataclass
class Pair:
    """P and D, which have NixlConnector and one of vLLM's own connectors, and a router."""

    kind: str
    fleet: Fleet
    folder: Path
    engines: dict[str, Engine] = field(default_factory=dict)
    ports: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def p(self) -> Engine:
        return self.engines["p"]

    @property
    def d(self) -> Engine:
        return self.engines["d"]

    @property
    def router(self) -> Engine:
        return self.engines["router"]

    @property
    def damage(self) -> Path:
        """While this file exists, vLLM's OffloadingConnector loads other values."""
        return self.folder / "damage"

    def start(self, name: str) -> Engine:
        http, side_channel = reserve_ports(2)
        ports = self.ports.setdefault(name, (http, side_channel))
        child, flags = example(self.folder / name), list(EXAMPLE_FLAGS)
        if self.kind == "offloading":
            settings: Any = OFFLOADING["kv_connector_extra_config"]
            settings = {**settings, "cpu_bytes_to_use": 1 << 29, "damage": str(self.damage)}
            child, flags = {**OFFLOADING, "kv_connector_extra_config": settings}, []
        self.engines[name] = self.fleet.vllm(
            name,
            "--disable-hybrid-kv-cache-manager",
            *flags,
            transfer=multi(NIXL, child),
            policy="recompute",
            cores="1" if name == "d" else "0",
            environment=DEV_MODE,
            ports=ports,
        )
        return self.engines[name]

    def replace(self, name: str) -> None:
        """Kill all processes of P or D with SIGKILL, and start another at the same ports."""
        self.engines[name].kill(is_stopped=True)
        self.fleet.dismiss(self.engines[name].process)
        ready(self.start(name))
        ready(self.router)


@pytest.fixture(scope="module", params=["offloading", "example"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Pair]:
    with Fleet(tmp_path_factory.mktemp("fleet"), model) as fleet:
        pair = Pair(request.param, fleet, tmp_path_factory.mktemp("stores"))
        p, d = pair.start("p"), pair.start("d")
        pair.engines["router"] = fleet.kvferry_router([p], [d])
        ready(p, d, pair.router)
        yield pair


def num_saved(kind: str, num_tokens: int) -> int:
    """How many tokens of a prompt the child saves and finds again. vLLM's ExampleConnector saves
    prompts with one token more than whole blocks under another name than it looks for.
    """
    if kind == "example" and num_tokens % BLOCK == 1:
        return 0
    return (
        num_tokens // BLOCK * BLOCK if kind == "offloading" else (num_tokens - 2) // BLOCK * BLOCK
    )


def test_tokens_of_100_prompts_computed_and_loaded_equal_a_vllms_without_a_connector(
    pair: Pair, right: Right
) -> None:
    saved = sum(num_saved(pair.kind, len(prompt.token_ids)) for prompt in PROMPTS)

    async def check() -> None:
        async with new_session(240) as session:
            for num_expected in (0, saved):
                before = await loaded_tokens(session, pair.p)
                answers = await ask_all(pair.router, PROMPTS, concurrency=8, timeout_s=240)
                assert answers == right.vllm
                assert await loaded_tokens(session, pair.p) - before == num_expected
                for engine in (pair.p, pair.d):
                    await forget(session, engine)
            for engine in (pair.p, pair.d):
                assert not (await metrics(session, engine)).get("kvferry:child_failures_total")

    asyncio.run(check())


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_killed_engine_costs_only_its_own_requests(pair: Pair, right: Right, side: str) -> None:
    async def check() -> None:
        async with new_session(240) as session:
            await ask_all(pair.p, FEW, timeout_s=240)
            for engine in (pair.p, pair.d):
                await forget(session, engine)
            asking = asyncio.create_task(
                ask_all(pair.router, PROMPTS, concurrency=8, timeout_s=240)
            )
            await first_answers(session, pair.engines[side])
            await asyncio.to_thread(pair.replace, side)
            for answer, right_answer in zip(await asking, right.vllm, strict=True):
                assert answer == right_answer or (not answer.is_ok and answer.message)
            if side == "p":
                # The folder outlives the engine; the host memory does not.
                before = await loaded_tokens(session, pair.p)
                await forget(session, pair.p)
                assert await ask_all(pair.p, FEW[:2], timeout_s=240) == expected(right, FEW[:2])
                if pair.kind == "example":
                    assert await loaded_tokens(session, pair.p) > before
            await forget(session, pair.p)
            before = await loaded_tokens(session, pair.p)
            answers = await ask_all(pair.router, FEW, concurrency=8, timeout_s=240)
            assert answers == expected(right, FEW)
            assert await loaded_tokens(session, pair.p) > before
            await assert_free(session, pair.p, pair.d)

    asyncio.run(check())


def test_damaged_kv_gives_other_tokens(pair: Pair, right: Right) -> None:
    """The control: what the child loads is used; neither connector has checksums. This is the last
    test of a pair, because the files stay damaged.
    """

    async def check() -> None:
        async with new_session(240) as session:
            await ask_all(pair.p, FEW, timeout_s=240)
            await forget(session, pair.p)
            pair.damage.touch()
            for path in (pair.folder / "p").rglob("*.safetensors"):
                change_values(path)
            before = await loaded_tokens(session, pair.p)
            assert await ask_all(pair.p, FEW, timeout_s=240) != expected(right, FEW)
            assert await loaded_tokens(session, pair.p) > before
            pair.damage.unlink()

    asyncio.run(check())


def change_values(path: Path) -> None:
    """Change every value in a file of vLLM's ExampleConnector, and leave the file valid."""
    data = np.fromfile(path, np.uint8)
    header_bytes = 8 + int.from_bytes(data[:8].tobytes(), "little")
    data[header_bytes:] ^= 1
    data.tofile(path)


# -- made-up KV --


def stores(folder: Path) -> list[dict[str, Any]]:
    """kvferry's OffloadingConnector with a disk tier, and vLLM's ExampleConnector."""
    tiers: list[dict[str, Any]] = [
        {"cpu": "256MiB"},
        {"disk": {"path": str(folder / "disk"), "size": "512MiB"}},
    ]
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "tiers": tiers,
            "break_even": False,
            "pool_path": str(folder / "pool"),
        },
    }
    return [offloading, example(folder / "example")]


def stored(folder: Path) -> list[Path]:
    """The objects of the disk tier, and the files of vLLM's ExampleConnector."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if len(path.name) == 64 or path.suffix == ".safetensors"]


async def kill_while_asking(fleet: Fleet, engine: Engine) -> None:
    asking = asyncio.create_task(ask_all(engine, PROMPTS, concurrency=8, timeout_s=240))
    async with new_session(60) as session:
        await first_answers(session, engine)
    engine.kill(is_stopped=True)
    await asyncio.gather(asking, return_exceptions=True)
    fleet.dismiss(engine.process)


def test_no_made_up_kv_outlives_a_killed_engine_and_real_kv_does(
    tmp_path: Path, model: Path, right: Right
) -> None:
    for name in ("fleet", "stores"):
        (tmp_path / name).mkdir()
    dummy = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}
    flags = ("--disable-hybrid-kv-cache-manager", "--no-enable-prefix-caching")

    async def check_tokens(engine: Engine, *, is_loaded: bool) -> None:
        async with new_session(240) as session:
            before = await loaded_tokens(session, engine)
            assert await ask_all(engine, FEW, timeout_s=240) == expected(right, FEW)
            assert (await loaded_tokens(session, engine) > before) == is_loaded

    with Fleet(tmp_path / "fleet", model) as fleet:
        alone = fleet.vllm("alone", *flags, transfer={**BY_MODULE_PATH, **dummy})
        beside = fleet.vllm(
            "beside", *flags, transfer=multi(dummy, *stores(tmp_path / "stores")), cores="1"
        )
        ready(alone, beside)
        for engine in (alone, beside):
            answers = asyncio.run(ask_all(engine, FEW, timeout_s=240))
            # Made-up KV gives other tokens: the control that it was used.
            assert answers != expected(right, FEW)
            asyncio.run(kill_while_asking(fleet, engine))
        assert not stored(tmp_path / "stores")
        for name, is_loaded in (("second", False), ("third", True)):
            engine = fleet.vllm(name, *flags, transfer=multi(*stores(tmp_path / "stores")))
            ready(engine)
            asyncio.run(check_tokens(engine, is_loaded=is_loaded))
            asyncio.run(kill_while_asking(fleet, engine))
        assert stored(tmp_path / "stores")
