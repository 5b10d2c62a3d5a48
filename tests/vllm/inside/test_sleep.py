"""Tests vLLM's sleep mode with kvferry's connectors: engines sleep and wake up by vLLM's engine
core, and P and D then exchange KV again. Every slot that a forward would read is checked.
"""

import logging
import threading
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.faulty import GatedCopier
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import Engine, run_until, vllm_config
from tests.vllm.inside.legs import PUSH, Legs
from tests.vllm.inside.sleeping import GONE, Core
from tests.vllm.inside.store import STORES, Store, StoreConnector
from tests.vllm.inside.test_life_cycle import finish, greedy, prompt, settle
from tests.vllm.inside.test_multi import OFFLOADING, PULL, STOCK_NIXL, kept_in, multi
from tests.vllm.inside.test_offloading import copiers as copiers
from tests.vllm.inside.test_reuse import goes_on, let_all_go, retained_turns, settings, take_turn
from vllm.config import KVTransferConfig, VllmConfig

from kvferry.connectors.nixl import scheduler as scheduler_half
from kvferry.connectors.nixl import worker as worker_half
from kvferry.vllm.release import has_sleep_hooks

pytestmark = pytest.mark.skipif(not has_sleep_hooks(), reason="vLLM has the calls since 0.33")

TRANSPORTS: dict[str, dict[str, Any]] = {
    "tcp": {"transports": ["tcp"]},
    "nixl": {"transports": ["nixl"]},
    "host buffer": {"force_host_buffer": True, "transports": ["shm"]},
    "dist": {"transports": ["dist"]},
}


@pytest.fixture(params=[True, False], ids=["", "control"])
def renewed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the epoch is renewed after a sleep. In the control it is not, and D uses what the
    blocks hold now.
    """
    if not request.param:
        for half in (scheduler_half, worker_half):
            monkeypatch.setattr(half, "registered_epoch", lambda epoch, _: epoch)
    return bool(request.param)


def kv(policy: str = "fail", **extra: Any) -> dict[str, Any]:
    return {"kv": {"kv_load_failure_policy": policy, "kv_connector_extra_config": extra}}


def hand_over(p: Engine, d: Engine, name: str, start: int = 10) -> dict[str, Any]:
    """Move the KV of one prompt, and return P's parameters."""
    tokens, before = prompt(100, start), d.loaded_tokens
    params = p.prefill(f"{name} of p", tokens)
    d.add(name, tokens, params)
    assert finish(d, name, p) == greedy(tokens, 4)
    assert d.loaded_tokens == before + 100
    settle(p, d)
    return params


# -- a pair --


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_pair_moves_kv_after_every_sleep(start_engine: StartEngine, transport: str) -> None:
    p_core = Core(start_engine, "p", **kv(**TRANSPORTS[transport]))
    # Without a prefix cache, D loads every prompt.
    d_core = Core(start_engine, "d", enable_prefix_caching=False, **kv(**TRANSPORTS[transport]))
    p, d = p_core.engine, d_core.engine
    hand_over(p, d, "before")
    p_core.fall_asleep(d)
    assert p_core.wake_up()
    hand_over(p, d, "p slept")
    d_core.fall_asleep(p, level=2)
    assert d_core.wake_up()
    hand_over(p, d, "d slept")
    for core in (p_core, d_core):
        core.fall_asleep(level=2)
    for core in (p_core, d_core):
        assert not core.wake_up(["weights"])
        core.tick()
        assert core.wake_up(["kv_cache"])
    hand_over(p, d, "both slept")


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_a_push_pair_moves_kv_after_every_sleep(start_engine: StartEngine, transport: str) -> None:
    kv = {**PUSH, "kv_connector_extra_config": {"transports": [transport]}}
    p_core, d_core = (Core(start_engine, name, kv=kv) for name in ("p", "d"))
    p, d = p_core.engine, d_core.engine
    legs = Legs(p, d)
    for number, core in enumerate((p_core, d_core, p_core, d_core)):
        legs.ask_d(f"b{number}", prompt(100), ticket := legs.ticket())
        legs.ask_p(f"a{number}", prompt(100), ticket)
        assert finish(d, f"b{number}", p) == greedy(prompt(100), 4)
        assert d.loaded_tokens == 100 * (number + 1)
        d.reset()
        settle(p, d)
        core.fall_asleep(p, d)
        assert core.wake_up()
        if core is p_core:
            # Until P has answered again, a router names the P of before.
            legs.ask_d(f"stale {number}", prompt(50), legs.ticket())
            finish(d, f"stale {number}", p)
            assert d.answers[f"stale {number}"].finish == "error"
            d.loaded_tokens = 100 * (number + 1)
            legs.learn_source()


# -- what was granted before the sleep --


def test_a_ticket_of_before_the_sleep_is_refused(start_engine: StartEngine, renewed: bool) -> None:
    core, d = Core(start_engine, "p", **kv(kv_lease_duration=0.5)), start_engine("d", **kv())
    old = core.engine.prefill("a", prompt(100))
    core.fall_asleep()
    assert core.wake_up()
    d.add("b", prompt(100), old)
    finish(d, "b", core.engine)
    assert d.answers["b"].finish == ("error" if renewed else "length")
    assert bool(d.wrong_slots) != renewed
    d.wrong_slots.clear()
    settle(core.engine, d)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("moment", ["asleep", "awake again"])
@pytest.mark.parametrize("has_met", [False, True])
def test_blocks_that_are_still_leased_cannot_be_read(
    start_engine: StartEngine, policy: str, moment: str, has_met: bool
) -> None:
    """vLLM waits for all leases before it calls the connector; the connector does not rely on
    that.
    """
    core, d = Core(start_engine, "p"), start_engine("d", **kv(policy))
    if has_met:
        hand_over(core.engine, d, "first", start=20)
    old = core.engine.prefill("a", prompt(100))
    run_until(lambda: core.engine.transfer_worker.leases == 1, core.engine)
    core.model_executor.sleep()
    if moment == "awake again":
        core.model_executor.wake_up()
    d.add("b", prompt(100), old)
    tokens = finish(d, "b")
    assert d.wrong_slots == []
    if policy == "fail":
        assert (d.answers["b"].finish, tokens) == ("error", [])
    else:
        assert tokens == greedy(prompt(100), 4)


def test_memory_that_goes_without_a_word_is_noticed(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a connector that stays registered lets D read what is there now."""
    core, d = Core(start_engine, "p"), start_engine("d")
    monkeypatch.setattr(type(core.engine.worker), "unregister_kv_caches", lambda _: None)
    old = core.engine.prefill("a", prompt(100))
    core.model_executor.sleep()
    d.add("b", prompt(100), old)
    finish(d, "b", core.engine)
    assert d.wrong_slots


def test_retained_turns_do_not_delay_a_sleep(start_engine: StartEngine) -> None:
    p, core = (
        start_engine("p", enable_prefix_caching=False, **settings()),
        Core(start_engine, "d", **settings()),
    )
    kept = take_turn(p, core.engine, "first", prompt(70))
    assert retained_turns(core.engine) == 1
    core.fall_asleep(p)
    assert core.wake_up()
    tokens = goes_on(prompt(70))
    p.add("second", tokens, {**kept, "do_remote_decode": True}, max_tokens=1)
    assert finish(p, "second", core.engine) == greedy(tokens, 1)
    assert p.moved_bytes == 0
    p.scheduler.connector.scheduler_side.request_abandoned("second")
    let_all_go(p, core.engine)


# -- requests --


def test_requests_that_arrive_during_a_sleep_are_served_after_it(start_engine: StartEngine) -> None:
    p_core, d_core = Core(start_engine, "p"), Core(start_engine, "d", **kv())
    p, d = p_core.engine, d_core.engine
    params = p.prefill("a", prompt(100))
    d_core.fall_asleep(p)
    d.add("b", prompt(100), params)
    d_core.tick(p)
    assert d_core.wake_up()
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    assert d.loaded_tokens == 100
    p_core.fall_asleep(d)
    p.add("c", prompt(90), {"do_remote_decode": True}, max_tokens=1)
    p_core.tick(d)
    assert p_core.wake_up()
    finish(p, "c")
    d.add("e", prompt(90, start=20), p.prefill("f", prompt(90, start=20)))
    assert finish(d, "e", p) == greedy(prompt(90, 20), 4)
    p.scheduler.connector.scheduler_side.request_abandoned("c")
    settle(p, d)


def test_requests_that_run_are_computed_again_if_they_are_kept(start_engine: StartEngine) -> None:
    p, core = start_engine("p"), Core(start_engine, "d", **kv())
    d = core.engine
    d.add("b", prompt(100), p.prefill("a", prompt(100)), max_tokens=20)
    run_until(lambda: len(d.answers["b"].tokens) > 3, p, d)
    core.fall_asleep(p, mode="keep")
    assert core.wake_up()
    assert finish(d, "b", p) == greedy(prompt(100), 20)
    settle(p, d)


def test_a_wake_up_of_an_engine_that_is_awake_changes_nothing(start_engine: StartEngine) -> None:
    core, d = Core(start_engine, "p"), start_engine("d", **kv())
    held = core.engine.prefill("a", prompt(100))
    core.sleep(level=0)
    assert core.wake_up()
    d.add("b", prompt(100), held)
    assert finish(d, "b", core.engine) == greedy(prompt(100), 4)
    assert d.loaded_tokens == 100
    settle(core.engine, d)


# -- weights --


def test_kv_is_exchanged_again_when_both_have_the_new_weights(start_engine: StartEngine) -> None:
    p_core, d_core = (Core(start_engine, name, **kv("recompute")) for name in ("p", "d"))
    p, d = p_core.engine, d_core.engine
    hand_over(p, d, "before")
    for number, (core, loaded) in enumerate(((p_core, 100), (d_core, 200))):
        core.fall_asleep(p, d, level=2)
        assert not core.wake_up(["weights"])
        core.engine.load_weights(1000)
        assert core.wake_up(["kv_cache"])
        tokens, seed = prompt(100, 30 + number), 0 if number == 0 else 1000
        d.add(f"b{number}", tokens, p.prefill(f"a{number}", tokens))
        assert finish(d, f"b{number}", p) == greedy(tokens, 4, seed)
        assert d.loaded_tokens == loaded
        settle(p, d)


# -- tiers --


@pytest.mark.parametrize("has_new_weights", [False, True])
def test_a_disk_keeps_what_an_engine_with_the_same_weights_has_stored(
    start_engine: StartEngine, tmp_path: Path, has_new_weights: bool
) -> None:
    core = Core(start_engine, "a", enable_prefix_caching=False, kv=tiers(tmp_path))
    engine, seed = core.engine, 1000 if has_new_weights else 0
    engine.add("first", prompt(100))
    assert finish(engine, "first") == greedy(prompt(100), 4)
    core.fall_asleep(level=2)
    engine.load_weights(seed)
    assert core.wake_up()
    for number in range(2):
        engine.add(f"r{number}", prompt(100))
        assert finish(engine, f"r{number}") == greedy(prompt(100), 4, seed)
        settle(engine)
        assert engine.loaded_tokens == 96 * (number + (not has_new_weights))


def test_memory_does_not_go_before_a_store_has_copied_it(
    start_engine: StartEngine, tmp_path: Path, copiers: list[GatedCopier]
) -> None:
    core = Core(start_engine, "a", enable_prefix_caching=False, kv=tiers(tmp_path))
    engine = core.engine
    copiers[0].saves.clear()
    engine.add("first", prompt(100))
    finish(engine, "first")
    run_until(lambda: copiers[0].num_saves_begun > 0, engine)
    # vLLM waits for the store; the connector does not rely on that.
    sleep = threading.Thread(target=core.model_executor.sleep)
    sleep.start()
    sleep.join(0.1)
    assert sleep.is_alive()
    assert all(bool((tensor != GONE).any()) for tensor in engine.tensors.values())
    copiers[0].saves.set()
    sleep.join()
    core.model_executor.wake_up()
    settle(engine)
    engine.add("second", prompt(100))
    assert finish(engine, "second") == greedy(prompt(100), 4)
    assert engine.loaded_tokens == 96
    settle(engine)


def tiers(directory: Path) -> dict[str, Any]:
    extra = {
        "num_cpu_blocks": 60,
        "break_even": False,
        "pool_path": str(directory / "pool"),
        "tiers": [{"disk": {"path": str(directory / "disk"), "size": "64MiB", "store_after": 1}}],
    }
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


# -- several connectors --


def test_every_child_of_a_multi_connector_is_told(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for name in ("unregister_kv_caches", "restore_kv_caches"):
        monkeypatch.setattr(StoreConnector, name, lambda _, name=name: told.append(name))
    STORES["d"] = Store()
    p, core = start_engine("p"), Core(start_engine, "d", kv=multi(PULL, kept_in("d")))
    hand_over(p, core.engine, "before", start=50)
    core.fall_asleep(p)
    assert core.wake_up()
    assert told == ["unregister_kv_caches", "restore_kv_caches"]
    hand_over(p, core.engine, "after")
    STORES.clear()


def sleepy(config: VllmConfig, transfer: dict[str, Any]) -> None:
    """What vLLM checks when it reads a configuration."""
    transfer = {"kv_connector_module_path": "kvferry.vllm", "kv_role": "kv_both", **transfer}
    config.kv_transfer_config = KVTransferConfig(**transfer)
    config.model_config.enable_sleep_mode = True
    config._verify_kv_transfer_compat()  # noqa: SLF001


GPU_ONLY = {**PULL, "kv_connector_extra_config": {"transports": ["cuda_ipc"]}}
STOCK_OVER_GDS = {**STOCK_NIXL, "kv_connector_extra_config": {"backends": ["GDS"]}}


@pytest.mark.parametrize(
    ("transfer", "reason"),
    [
        (GPU_ONLY, "has no CUDA IPC handles"),
        (
            {**PULL, "kv_connector_extra_config": {"backends": ["UCX", "LIBFABRIC"]}},
            "set backends to UCX",
        ),
        (multi(OFFLOADING, GPU_ONLY), "connectors=NixlConnector"),
        (multi(OFFLOADING, STOCK_OVER_GDS), "connectors=NixlConnector"),
    ],
    ids=["cuda_ipc", "backends", "a child", "a child of vLLM's"],
)
def test_what_cannot_sleep_is_refused_when_the_configuration_is_read(
    model: Path, caplog: pytest.LogCaptureFixture, transfer: dict[str, Any], reason: str
) -> None:
    config = deepcopy(vllm_config(str(model), "refused", "{}"))
    logger = logging.getLogger("kvferry")
    logger.addHandler(caplog.handler)
    with pytest.raises(ValueError, match="does not support sleep mode"):
        sleepy(config, transfer)
    logger.removeHandler(caplog.handler)
    assert reason in caplog.text


@pytest.mark.parametrize(
    "transfer",
    [
        PULL,
        {**PULL, "kv_connector_extra_config": {"transports": ["cuda_ipc", "nixl"]}},
        {**PULL, "kv_connector": "NixlPushConnector"},
        {"kv_connector": "MooncakeConnector"},
        {"kv_connector": "P2pNcclConnector", "kv_role": "kv_producer"},
        {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"tiers": [{"cpu": 1}]},
        },
        multi(PULL, OFFLOADING),
    ],
    ids=lambda transfer: transfer["kv_connector"],
)
def test_what_can_sleep_is_not_refused(model: Path, transfer: dict[str, Any]) -> None:
    sleepy(deepcopy(vllm_config(str(model), "refused", "{}")), transfer)
