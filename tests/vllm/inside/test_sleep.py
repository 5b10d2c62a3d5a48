"""Tests vLLM's sleep mode with kvferry's connectors: engines sleep and wake up by vLLM's engine
core, and P and D then exchange KV again. Every slot that a forward would read is checked.
"""

from typing import Any

import pytest
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import Engine, run_until
from tests.vllm.inside.legs import PUSH, Legs
from tests.vllm.inside.sleeping import Core
from tests.vllm.inside.test_life_cycle import finish, greedy, prompt, settle

from kvferry.connectors import scheduler as scheduler_half
from kvferry.connectors import worker as worker_half
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
