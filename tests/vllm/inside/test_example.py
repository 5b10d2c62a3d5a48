"""Tests `ExampleConnector` with vLLM's scheduler: named cases first, then random actions on one or
two engines that share a folder, as in `test_offloading.py`.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sampling import seeds
from tests.vllm.adapters import write_adapter
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import BLOCK, Engine, run_until
from tests.vllm.inside.test_life_cycle import finish, greedy, prompt, settle
from tests.vllm.inside.test_offloading import ACTIONS, KINDS, World, run
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState

from kvferry.errors import ConfigError

StartExample = Callable[..., Engine]


@pytest.fixture
def start(start_engine: StartEngine, tmp_path: Path) -> StartExample:
    """Starts engines that share a folder. Without prefix caching, all reuse is by loads."""

    def start(name: str = "a", policy: str = "fail", **settings: Any) -> Engine:
        kv = {
            "kv_connector": "ExampleConnector",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "shared")},
        }
        return start_engine(name, **({"enable_prefix_caching": False} | settings), kv=kv)

    return start


@pytest.mark.parametrize("has_drafter", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 3 * BLOCK, 100])
def test_d_loads_what_p_has_computed(
    start: StartExample, kind: str, length: int, is_async: bool, has_drafter: bool
) -> None:
    p, d = (start(name, kind=kind, is_async=is_async, has_drafter=has_drafter) for name in "pd")
    assert run(p, "a", prompt(length), max_tokens=1) == greedy(prompt(length), 1)
    assert run(d, "b", prompt(length)) == greedy(prompt(length), 4)
    assert d.loaded_tokens == (length - 1) // BLOCK * BLOCK
    settle(p, d)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_prompt_in_chunks_is_stored_and_extended(start: StartExample, is_async: bool) -> None:
    """D loads the first part of a prompt, computes the rest, and stores the whole."""
    p, d, third = (start(name, is_async=is_async, max_num_batched_tokens=64) for name in "pde")
    run(p, "a", prompt(150), max_tokens=1)
    assert run(d, "b", prompt(300)) == greedy(prompt(300), 4)
    assert d.loaded_tokens == 128
    assert run(third, "c", prompt(300)) == greedy(prompt(300), 4)
    assert third.loaded_tokens == 288
    settle(p, d, third)


def test_only_what_the_prefix_cache_lacks_is_loaded(start: StartExample) -> None:
    p, d = start("p"), start("d", enable_prefix_caching=True)
    run(p, "a", prompt(200), max_tokens=1)
    run(d, "warm", prompt(64), max_tokens=1)
    before = d.loaded_tokens
    assert run(d, "b", prompt(200)) == greedy(prompt(200), 4)
    assert d.loaded_tokens - before == 192 - 64
    settle(p, d)


@pytest.mark.parametrize(
    ("policy", "is_async"), [("fail", False), ("fail", True), ("recompute", False)]
)
def test_a_prefix_that_vanishes_before_its_load_follows_the_failure_policy(
    start: StartExample, tmp_path: Path, policy: str, is_async: bool
) -> None:
    d = start("d", policy, is_async=is_async)
    run(d, "a", prompt(70), max_tokens=1)
    settle(d)
    d.add("b", prompt(200), max_tokens=4)
    lookup = d.scheduler.connector.build_connector_meta

    def build_and_remove(output: Any) -> Any:
        metadata = lookup(output)
        shutil.rmtree(tmp_path / "shared")
        d.scheduler.connector.build_connector_meta = lookup
        return metadata

    d.scheduler.connector.build_connector_meta = build_and_remove
    tokens = finish(d, "b")
    finished = d.answers["b"].finish
    if policy == "recompute":
        assert (finished, tokens) == ("length", greedy(prompt(200), 4))
    else:
        assert (finished, tokens) == ("error", [])
    run_until(lambda: not d.remains(), d)
    d.wrong_slots.clear()  # The forward passes that ran before vLLM knew of the failure.
    # Nothing that was computed from the failed load is stored.
    assert run(d, "c", prompt(200)) == greedy(prompt(200), 4)
    settle(d)


def test_kv_of_other_weights_is_not_loaded(start: StartExample) -> None:
    a, b = start("a"), start("b")
    run(a, "r1", prompt(100), max_tokens=1)
    b.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    b.reset()
    b.load_weights(1000)
    b.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert run(b, "r2", prompt(100)) == greedy(prompt(100), 4, seed=1000)
    assert b.loaded_tokens == 0
    assert run(a, "r3", prompt(100)) == greedy(prompt(100), 4)
    settle(a, b)


def test_requests_with_an_adapter_are_neither_stored_nor_loaded(
    start: StartExample, tmp_path: Path
) -> None:
    a = start("a")
    adapter = LoRARequest("adapter", 1, str(write_adapter(tmp_path / "adapter")))
    run(a, "r1", prompt(100), lora_request=adapter, seed=1)
    assert run(a, "r2", prompt(100), lora_request=adapter, seed=1) == greedy(prompt(100), 4, seed=1)
    assert a.loaded_tokens == 0
    settle(a)


def test_tenants_do_not_see_each_other(start: StartExample) -> None:
    a = start("a")
    for number, (salt, seed) in enumerate([("x", 5), ("y", 7), ("x", 5), ("y", 7)]):
        tokens = run(a, f"r{number}", prompt(100), cache_salt=salt, seed=seed)
        assert tokens == greedy(prompt(100), 4, seed=seed)
    assert a.loaded_tokens == 2 * 96
    settle(a)


def test_a_policy_that_gives_wrong_tokens_in_vllm_is_refused(start: StartExample) -> None:
    with pytest.raises(ConfigError, match="use --no-async-scheduling or the policy fail"):
        start(policy="recompute", is_async=True)


def test_made_up_kv_is_refused_beside_a_prefix_cache(start_engine: StartEngine) -> None:
    kv = {"kv_connector": "DecodeBenchConnector"}
    with pytest.raises(ConfigError, match="start vLLM with --no-enable-prefix-caching"):
        start_engine("a", kv=kv, enable_prefix_caching=True)


@pytest.mark.parametrize("kind", [*KINDS, "windows beside full attention"])
def test_made_up_kv_fills_all_but_the_last_token(start_engine: StartEngine, kind: str) -> None:
    kv = {"kv_connector": "DecodeBenchConnector"}
    engine = start_engine("a", kind=kind, kv=kv, enable_prefix_caching=False)
    engine.add("r", prompt(100), max_tokens=4)
    engine.step()
    assert engine.computed["r"] == 100
    blocks = engine.scheduler.kv_cache_manager.get_block_ids("r")[0]
    # The made-up forward pass has computed one token, and fills the rest of its block.
    assert all(
        set(tensor[blocks[1]].flatten().tolist()) == {torch.tensor(0.015).item()}
        for name, tensor in engine.tensors.items()
        if kind != "windows beside full attention"
    )
    finish(engine, "r")
    assert engine.loaded_tokens == 99
    run_until(lambda: not engine.remains(), engine)


def test_models_with_windows_are_refused(start: StartExample) -> None:
    with pytest.raises(ConfigError, match="does not support models with windows"):
        start(kind="windows beside full attention")


class SharedFolder(World):
    """Engines with `ExampleConnector`, and what happens to their files.

    With async scheduling, files stay as they are: a file that changes after the lookup makes the
    made-up forward pass read wrong slots, which here is an error.
    """

    def _settings(self) -> dict[str, Any]:
        self.kind = self.rng.choice(KINDS)
        self.is_windowed = False
        return {"shared_storage_path": str(self.folder / "shared")}

    def _spoil(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine_settings.pop("kv_events_config", None)

    def _start(self, name: str, **more: Any) -> Engine:
        kv = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": self.extra}
        settings = self.engine_settings | more
        return self.start_engine(name, kind=self.kind, kv=kv, **settings)

    def actions(self) -> dict[Callable[[], None], float]:
        changes = () if self.engine_settings["is_async"] else (self.damage_file, self.delete_file)
        kept = {self.step, self.add, self.abort, self.preempt, self.reset, self.reset_running}
        kept |= {self.replace_weights, self.restart, *changes}
        return {action: n for action, n in super().actions().items() if action in kept}

    def _objects(self) -> list[Path]:
        return sorted((self.folder / "shared").glob("*/*/*.*"))


@pytest.mark.parametrize("seed", seeds(8, exhaustively=64))
def test_whatever_happens_nothing_is_left(
    start_engine: StartEngine, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SharedFolder(start_engine, seed, tmp_path, monkeypatch)
    print(world)
    for _ in range(ACTIONS):
        world.act()
    world.end()
    print(f"restarts={world.restarts} loaded={[e.loaded_tokens for e in world.engines]}")
