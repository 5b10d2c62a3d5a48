"""Tests hybrid models in vLLM's own scheduler. Their state-space or linear-attention layers keep a
state, which is valid after one number of tokens only: P must stop before the last token of the
prompt, and D loads exactly what P computed or nothing.

vLLM has two modes. `none` keeps one block per request for a state. `align`, which prefix caching
needs, moves a state on to a new block at every block boundary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.sampling import sampled, seeds
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import BLOCK, Engine, run_until
from tests.vllm.inside.legs import PUSH, Legs
from tests.vllm.inside.test_fuzz import ACTIONS, World
from tests.vllm.inside.test_life_cycle import (
    check_outcome,
    finish,
    greedy,
    prompt,
    settle,
    wait_for_load,
)
from tests.vllm.inside.test_push_fuzz import PushWorld
from tests.vllm.inside.test_reuse import (
    ANSWER,
    goes_on,
    let_all_go,
    retained_turns,
    take_turn,
    told,
)
from tests.vllm.inside.test_reuse import settings as reuse_settings
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

import vllm
from kvferry.errors import ConfigError
from kvferry.vllm.engine.states import UNSERVED_RELEASES
from kvferry.vllm.release import release

pytestmark = pytest.mark.skipif(
    release(vllm.__version__) in UNSERVED_RELEASES, reason="hybrid models need vLLM 0.32"
)

KIND = "states beside full attention"
MODES = ["none", "align"]
LENGTHS = [2, 3, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK + 1, 103]


def state_settings(mode: str) -> dict[str, Any]:
    return {"kind": KIND, "state_mode": mode, "enable_prefix_caching": mode == "align"}


def start_pair(
    start_engine: StartEngine, at_p: str = "align", at_d: str = "align", **both: Any
) -> tuple[Engine, Engine]:
    return (
        start_engine("p", **state_settings(at_p), **both),
        start_engine("d", **state_settings(at_d), **both),
    )


# -- pull --


@pytest.mark.parametrize(
    ("is_async", "at_p", "at_d", "length"), sampled([False, True], MODES, MODES, LENGTHS)
)
def test_a_prompt_is_handed_over(
    start_engine: StartEngine, is_async: bool, at_p: str, at_d: str, length: int
) -> None:
    p, d = start_pair(start_engine, at_p, at_d, is_async=is_async)
    tokens = prompt(length)
    # P stops after one token, whatever number the client asks for: each token replaces the states.
    d.add("b", tokens, p.prefill("a", tokens, max_tokens=3))
    assert finish(d, "b", p) == greedy(tokens, 4)
    assert p.computed["a"] == d.loaded_tokens == length - 1
    settle(p, d)


def test_a_prompt_of_one_token_is_computed_by_d(start_engine: StartEngine) -> None:
    p, d = start_pair(start_engine)
    d.add("b", prompt(1), p.prefill("a", prompt(1)))
    assert finish(d, "b", p) == greedy(prompt(1), 4)
    assert d.loaded_tokens == 0
    settle(p, d)


@pytest.mark.parametrize("chunk", [16, BLOCK, 48, 100])
@pytest.mark.parametrize("mode", MODES)
def test_p_may_compute_the_prompt_in_any_chunks(
    start_engine: StartEngine, mode: str, chunk: int
) -> None:
    small = {"max_num_batched_tokens": chunk, "max_num_seqs": 4}
    p = start_engine("p", **state_settings(mode), **small)
    d = start_engine("d", **state_settings(mode))
    d.add("b", prompt(150), p.prefill("a", prompt(150)))
    assert finish(d, "b", p) == greedy(prompt(150), 4)
    assert d.loaded_tokens == 149
    settle(p, d)


def test_d_loads_only_what_follows_its_own_prefix_and_always_the_states(
    start_engine: StartEngine,
) -> None:
    p, d = start_pair(start_engine)
    d.add("first", prompt(2 * BLOCK + 5))
    finish(d, "first")
    d.add("b", prompt(150), p.prefill("a", prompt(150)))
    assert finish(d, "b", p) == greedy(prompt(150), 4)
    assert d.loaded_tokens == 149 - 2 * BLOCK
    settle(p, d)


def test_p_continues_from_its_own_prefix(start_engine: StartEngine) -> None:
    p, d = start_pair(start_engine)
    for number, length in enumerate([90, 120, 120, 150]):
        d.add(f"b{number}", prompt(length), p.prefill(f"a{number}", prompt(length)))
        assert finish(d, f"b{number}", p) == greedy(prompt(length), 4)
    settle(p, d)


def test_every_choice_of_one_request_loads_the_states(start_engine: StartEngine) -> None:
    p, d = start_pair(start_engine)
    params = p.prefill("a", prompt(100))
    for name in ("0_b", "1_b", "2_b"):
        d.add(name, prompt(100), params)
    for name in ("0_b", "1_b", "2_b"):
        assert finish(d, name, p) == greedy(prompt(100), 4)
    assert d.loaded_tokens == 3 * 99
    settle(p, d)


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_a_choice_that_arrives_after_another_has_loaded_is_computed(
    start_engine: StartEngine, push: bool
) -> None:
    """The lease may have ended, and the failure policy here is `fail`."""
    legs = start_legs(start_engine, "align") if push else None
    p, d = (legs.p, legs.d) if legs is not None else start_pair(start_engine)
    if legs is not None:
        ticket = legs.ticket()
        legs.ask_p("a", prompt(100), ticket)
        params = {"do_remote_prefill": True, "push_ticket": ticket}
    else:
        params = p.prefill("a", prompt(100))
    for name in ("0_b", "1_b"):
        d.add(name, prompt(100), params)
        assert finish(d, name, p) == greedy(prompt(100), 4)
        run_until(lambda: not p.transfer_worker.leases, p, d)
    assert d.loaded_tokens == 99
    settle(p, d)


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_prompts_of_embeddings_are_computed_by_d(start_engine: StartEngine, push: bool) -> None:
    embeds: dict[str, Any] = {"prompt_embeds": torch.arange(60.0).view(15, 4), "seed": 7}
    legs = start_legs(start_engine, "none") if push else None
    p, d = (legs.p, legs.d) if legs is not None else start_pair(start_engine, "none", "none")
    if legs is not None:
        ticket = legs.ticket()
        legs.ask_p("a", None, ticket, **embeds)
        legs.ask_d("b", None, ticket, **embeds)
    else:
        p.add("a", None, {"do_remote_decode": True}, max_tokens=1, **embeds)
        finish(p, "a")
        assert p.answers["a"].params is None
        d.add("b", None, None, **embeds)
    assert finish(d, "b", p) == greedy([0] * 15, 4, seed=7)
    settle(p, d)


# -- another boundary --


@pytest.mark.parametrize(
    ("of_p", "loaded"),
    [(prompt(60), 59), (prompt(101), 0), (prompt(140), 0), (prompt(60) + prompt(41, 99), 0)],
    ids=["shorter", "one token more", "longer", "other tokens"],
)
def test_states_of_another_number_of_tokens_are_used_only_if_the_prompt_goes_on_from_them(
    start_engine: StartEngine, of_p: list[int], loaded: int
) -> None:
    p, d = start_pair(start_engine)
    d.add("b", prompt(100), p.prefill("a", of_p))
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    assert d.loaded_tokens == loaded
    settle(p, d)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("mode", MODES)
def test_a_failed_load_gets_the_failure_policy(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, mode: str, policy: str
) -> None:
    p = start_engine("p", **state_settings(mode))
    monkeypatch.setenv("KVFERRY_FAULTS", "fail:every=1")
    d = start_engine("d", **state_settings(mode), kv={"kv_load_failure_policy": policy})
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    check_outcome(d, policy, "b", prompt(100), p)


@pytest.mark.parametrize("mode", MODES)
def test_an_abort_while_the_states_are_loaded_leaves_nothing(
    start_engine: StartEngine, mode: str
) -> None:
    p, d = start_pair(start_engine, mode, mode)
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    wait_for_load(d, "b")
    d.abort("b")
    settle(p, d)


def test_a_request_that_is_preempted_after_its_load_computes_its_states_again(
    start_engine: StartEngine,
) -> None:
    p, d = start_pair(start_engine)
    d.add("b", prompt(100), p.prefill("a", prompt(100)), max_tokens=20)
    run_until(lambda: len(d.answers["b"].tokens) > 3, p, d)
    d.preempt("b")
    assert finish(d, "b", p) == greedy(prompt(100), 20)
    settle(p, d)


@pytest.mark.parametrize("side", ["p", "d"])
def test_states_pass_through_a_host_buffer(start_engine: StartEngine, side: str) -> None:
    staged = {"kv": {"kv_connector_extra_config": {"force_host_buffer": True}}}
    p, d = (
        start_engine(name, **state_settings("align"), **(staged if name == side else {}))
        for name in ("p", "d")
    )
    for number, length in enumerate(LENGTHS):
        tokens = prompt(length, start=10 + number)
        d.add(f"b{number}", tokens, p.prefill(f"a{number}", tokens))
        assert finish(d, f"b{number}", p) == greedy(tokens, 4)
    settle(p, d)


@pytest.fixture
def order_convolutions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the order of rows and columns for engines that start from then on."""

    def order(layout: str) -> None:
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", layout)
        get_conv_state_layout.cache_clear()

    yield order
    get_conv_state_layout.cache_clear()


def test_engines_whose_convolutions_lie_in_another_order_refuse_each_other(
    start_engine: StartEngine, order_convolutions: Callable[[str], None]
) -> None:
    order_convolutions("DS")
    p = start_engine("p", **state_settings("none"))
    params = p.prefill("a", prompt(100))
    order_convolutions("SD")
    d = start_engine("d", **state_settings("none"))
    d.add("b", prompt(100), params)
    assert (finish(d, "b", p), d.answers["b"].finish) == ([], "error")
    run_until(lambda: not d.remains(), p, d)


@pytest.mark.parametrize("layout", ["DS", "SD"])
def test_either_order_of_a_convolution_is_handed_over(
    start_engine: StartEngine, order_convolutions: Callable[[str], None], layout: str
) -> None:
    order_convolutions(layout)
    p, d = start_pair(start_engine)
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    settle(p, d)


@pytest.mark.parametrize(
    "kv",
    [
        {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
        },
        {"kv_connector": "ExampleConnector"},
        {"kv_connector": "DecodeBenchConnector"},
    ],
    ids=lambda kv: kv["kv_connector"],
)
def test_connectors_that_store_blocks_refuse_states(
    start_engine: StartEngine, kv: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="state-space or linear-attention layers"):
        start_engine("e", **state_settings("none"), kv=kv)


@pytest.mark.parametrize("part", ["conv.x", "conv.B", "recurrent", "layers.1"])
def test_each_part_of_a_state_counts(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The control of all equality checks here, for each kind of state and for KV."""
    p = start_engine("p", **state_settings("align"))
    monkeypatch.setenv("KVFERRY_FAULTS", f"corrupt:every=1;corrupt:regions={part}")
    d = start_engine("d", **state_settings("align"))
    d.add("b", prompt(50), p.prefill("a", prompt(50)))
    finish(d, "b", p)
    assert {request for request, _ in d.wrong_slots} == {"b"}


def test_a_lease_that_no_reader_uses_ends_and_frees_the_states(start_engine: StartEngine) -> None:
    short = {"kv_connector_extra_config": {"kv_lease_duration": 0.5}}
    p = start_engine("p", **state_settings("align"), kv=short)
    p.prefill("a", prompt(100))
    assert p.remains()["used blocks"] == 4 + 1, "four blocks of KV and one with the states"
    settle(p)


# -- push --


def start_legs(start_engine: StartEngine, mode: str, **of_p: Any) -> Legs:
    return Legs(
        start_engine("p", **state_settings(mode), kv=PUSH, **of_p),
        start_engine("d", **state_settings(mode), kv=PUSH),
    )


@pytest.mark.parametrize(("mode", "length", "first"), sampled(MODES, LENGTHS, ["p", "d"]))
def test_a_prompt_is_pushed(start_engine: StartEngine, mode: str, length: int, first: str) -> None:
    legs = start_legs(start_engine, mode)
    ticket, tokens = legs.ticket(), prompt(length)
    if first == "p":
        legs.ask_p("a", tokens, ticket)
        legs.ask_d("b", tokens, ticket)
    else:
        legs.ask_d("b", tokens, ticket)
        legs.ask_p("a", tokens, ticket)
    assert finish(legs.d, "b", legs.p) == greedy(tokens, 4)
    assert legs.d.loaded_tokens == length - 1
    settle(legs.p, legs.d)


@pytest.mark.parametrize("mode", MODES)
def test_blocks_move_while_p_computes_and_the_states_move_last(
    start_engine: StartEngine, mode: str
) -> None:
    chunks = {"max_num_batched_tokens": BLOCK, "max_num_seqs": 4}
    legs = start_legs(start_engine, mode, **chunks)
    ticket, tokens = legs.ticket(), prompt(5 * BLOCK + 9)
    legs.ask_d("b", tokens, ticket)
    legs.registered()
    legs.ask_p("a", tokens, ticket)
    run_until(lambda: legs.p.computed.get("a", 0) >= 3 * BLOCK, legs.p)
    # P computes nothing more until bytes have landed at D.
    run_until(lambda: legs.d.moved_bytes > 0, legs.d)
    assert legs.p.answers["a"].finish is None
    assert finish(legs.d, "b", legs.p) == greedy(tokens, 4)
    settle(legs.p, legs.d)


# -- reuse --


@pytest.mark.parametrize("mode", MODES)
def test_p_goes_on_from_the_states_of_the_last_turn(start_engine: StartEngine, mode: str) -> None:
    p, d = start_pair(start_engine, "none", mode, **reuse_settings())
    tokens: Sequence[int] = prompt(70)
    kept, num_kept = None, 0
    for number in range(3):
        loaded = p.loaded_tokens
        kept = take_turn(p, d, f"turn {number}", tokens, kept)
        assert p.loaded_tokens - loaded == num_kept
        num_kept = len(tokens) + ANSWER - 1
        assert kept["remote_num_tokens"] == num_kept
        tokens = goes_on(tokens)
        run_until(lambda: retained_turns(d) == 1, p, d)
    let_all_go(p, d)


def test_a_turn_that_goes_on_from_an_earlier_token_is_computed(start_engine: StartEngine) -> None:
    p, d = start_pair(start_engine, "none", "none", **reuse_settings())
    kept = take_turn(p, d, "first", prompt(70))
    take_turn(p, d, "second", [*prompt(70), *prompt(40, start=99)], kept)
    assert p.loaded_tokens == 0
    let_all_go(p, d)


def test_states_that_a_step_in_flight_replaces_are_not_retained(
    start_engine: StartEngine,
) -> None:
    """With async scheduling, vLLM learns that a token ends the answer when the next step, which
    replaces the states, has been scheduled.
    """
    p, d = start_pair(start_engine, "none", "none", is_async=True, **reuse_settings())
    tokens = prompt(70)
    said = greedy(tokens, ANSWER)
    d.add("b", tokens, p.prefill("a", tokens), max_tokens=ANSWER, stop_token_ids=[said[5]])
    assert finish(d, "b", p) == said[:6]
    assert d.answers["b"].params is None
    d.add("c", tokens, p.prefill("c", tokens), max_tokens=ANSWER)
    assert finish(d, "c", p) == said
    assert told(d, "c")["remote_num_tokens"] == len(tokens) + ANSWER - 1
    let_all_go(p, d)


# -- random actions --


class StateWorld(World):
    """Two engines of a hybrid model, each with a cache mode of its own."""

    def _start(self, name: str, num_blocks: int, **more: Any) -> Engine:
        mode = self.rng.choice(MODES)
        return super()._start(name, 2 * num_blocks, **state_settings(mode), **more)

    def continued(self, engine: Engine, name: str) -> list[int]:
        tokens = super().continued(engine, name)
        # P's requests are all prefill legs.
        return tokens[:-1] if engine is self.p and len(tokens) > 1 else tokens


class StatePushWorld(StateWorld, PushWorld):
    pass


@pytest.mark.parametrize("seed", seeds(4, exhaustively=16))
@pytest.mark.parametrize("world_class", [StateWorld, StatePushWorld])
def test_whatever_happens_nothing_is_left(
    start_engine: StartEngine,
    world_class: type[World],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_class(start_engine, seed, monkeypatch)
    for _ in range(ACTIONS):
        world.act()
    world.end()
    served = world.check_answers()
    print(
        f"{world.policy} {world.faults} is_async={world.is_async} deaths={world.deaths} "
        f"served={served} loaded={world.d.loaded_tokens}"
    )
