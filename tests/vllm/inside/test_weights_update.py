"""Tests in vLLM's own scheduler that engines whose weights are replaced while they run never use KV
of other weights, and exchange KV again as soon as both sides have the same weights.

The made-up forward compares every slot with the number that the engine's weights give, so KV of
other weights shows as a wrong slot and as wrong tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import Engine, run_until
from tests.vllm.inside.legs import PUSH, Legs
from tests.vllm.inside.test_life_cycle import finish, greedy, prompt, settle, wait_for_load
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
from vllm.model_executor.utils import set_weight_attrs
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore

from kvferry.vllm.identity.loaded_weights import LoadedWeights, WeightsSample

OLD, NEW = 0, 1000
POLICIES = ["fail", "recompute"]


def start_pair(start_engine: StartEngine, policy: str, **kv: Any) -> tuple[Engine, Engine]:
    return start_engine("p", kv=kv), start_engine("d", kv={"kv_load_failure_policy": policy, **kv})


def reset_until_done(engine: Engine, *others: Engine) -> None:
    """Reset the caches as a caller does that repeats the call until vLLM has reset its own."""
    run_until(engine.reset, engine, *others)


def update(engine: Engine, *others: Engine) -> None:
    engine.load_weights(NEW)
    reset_until_done(engine, *others)


def assert_answered(engine: Engine, name: str, policy: str, weights: int, *others: Engine) -> None:
    """Check the tokens of a request without usable KV: by policy, it fails or is computed."""
    tokens = finish(engine, name, *others)
    if policy == "fail":
        assert (engine.answers[name].finish, tokens) == ("error", [])
    else:
        assert tokens == greedy(prompt(100), 4, weights)


def assert_plain(engine: Engine, weights: int) -> None:
    """Check that the engine keeps no KV of other weights for later requests."""
    engine.add("plain", prompt(100))
    assert finish(engine, "plain") == greedy(prompt(100), 4, weights)


# -- requests that arrived before the reset --


@pytest.mark.parametrize("policy", POLICIES)
def test_a_queued_request_loads_no_kv_of_the_old_weights(
    start_engine: StartEngine, policy: str
) -> None:
    p, d = start_pair(start_engine, policy)
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    d.load_weights(NEW)
    assert d.reset()
    assert_answered(d, "b", policy, NEW, p)
    assert d.loaded_tokens == 0 or policy == "fail"
    assert_plain(d, NEW)
    settle(p, d)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_is_loading_uses_no_kv_of_the_old_weights(
    start_engine: StartEngine, policy: str, is_async: bool
) -> None:
    p = start_engine("p", is_async=is_async)
    d = start_engine("d", is_async=is_async, kv={"kv_load_failure_policy": policy})
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    wait_for_load(d, "b")
    d.load_weights(NEW)
    assert not d.reset()
    assert_answered(d, "b", policy, NEW, p)
    reset_until_done(d, p)
    assert_plain(d, NEW)
    settle(p, d)


def test_a_request_whose_kv_has_just_arrived_does_not_use_it(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    run_until(lambda: "b" in d.scheduler.finished_recving_kv_req_ids, p, d)
    d.load_weights(NEW)
    assert not d.reset()
    assert finish(d, "b", p) == greedy(prompt(100), 4, NEW)
    reset_until_done(d, p)
    assert_plain(d, NEW)
    settle(p, d)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_load_that_ends_before_the_worker_learns_of_the_reset_is_not_used(
    start_engine: StartEngine, policy: str
) -> None:
    p, d = start_pair(start_engine, policy)
    params = p.prefill("a", prompt(100))
    run_until(lambda: p.transfer_worker.leases == 1, p)
    d.add("b", prompt(100), params)
    wait_for_load(d, "b")
    # D's transfer worker ends the load and with it P's lease, but no step of D takes its report.
    run_until(lambda: p.transfer_worker.leases == d.transfer_worker.transfers == 0, p)
    d.load_weights(NEW)
    assert not d.reset()
    assert finish(d, "b", p) == greedy(prompt(100), 4, NEW)
    reset_until_done(d, p)
    assert_plain(d, NEW)
    settle(p, d)


def test_a_request_that_was_aborted_while_it_loaded_leaves_nothing(
    pair: tuple[Engine, Engine],
) -> None:
    p, d = pair
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    wait_for_load(d, "b")
    d.abort("b")
    d.reset()
    settle(p, d)


def test_a_prefill_that_runs_over_a_reset_is_not_handed_over(start_engine: StartEngine) -> None:
    """The first blocks are computed with the old weights, the last one with the new weights."""
    p = start_engine("p", max_num_batched_tokens=48, max_num_seqs=4)
    p.add("a", prompt(100), {"do_remote_decode": True}, max_tokens=1)
    p.step()
    assert 0 < p.computed["a"] < 100
    p.load_weights(NEW)
    assert not p.reset()
    finish(p, "a")
    assert p.answers["a"].params is None
    p.wrong_slots.clear()
    settle(p)


# -- what an engine holds for peers --


def test_a_reset_ends_leases_even_if_a_reader_is_attached(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    params = p.prefill("c", prompt(80))
    # D attaches to the lease of "a", and has no blocks for the request yet.
    d.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    run_until(lambda: d.transfer_worker.transfers == 1, d)
    assert not p.reset()
    run_until(lambda: not p.remains(), p)
    assert p.reset()
    d.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert finish(d, "b", p) == []
    assert d.answers["b"].finish == "error"
    d.add("e", prompt(80), params)
    finish(d, "e", p)
    assert d.answers["e"].finish == "error"
    settle(p, d)


def test_all_turns_that_share_blocks_are_dropped(start_engine: StartEngine) -> None:
    reuse = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}
    d = start_engine("d", kv={"kv_connector_extra_config": reuse}, num_gpu_blocks_override=20)
    for number in range(5):
        d.add(f"turn {number}", prompt(160), {"conversation": f"{number}"})
        finish(d, f"turn {number}")
    run_until(lambda: d.transfer_worker.leases == 5, d)
    assert not d.reset()
    settle(d)


@pytest.mark.parametrize("is_push", [False, True])
def test_p_fetches_no_turn_that_d_retained_with_other_weights(
    start_engine: StartEngine, is_push: bool
) -> None:
    reuse = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}
    kv = {"kv_connector_extra_config": reuse, **(PUSH if is_push else {})}
    p, d = start_pair(start_engine, "fail", **kv)
    d.add("turn", prompt(100), {"conversation": "c"}, max_tokens=1)
    finish(d, "turn", p)
    update(p)
    p.add("next", prompt(120), {**(d.answers["turn"].params or {}), "do_remote_decode": True})
    assert finish(p, "next", d) == greedy(prompt(120), 4, NEW)
    assert p.loaded_tokens == 0
    reset_until_done(p, d)
    settle(p, d)


# -- both sides agree again --


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_first", ["p", "d"])
def test_kv_is_exchanged_again_when_both_sides_have_the_new_weights(
    start_engine: StartEngine, policy: str, is_first: str
) -> None:
    p, d = start_pair(start_engine, policy)
    first, second = (p, d) if is_first == "p" else (d, p)
    update(first)
    d.add("between", prompt(100), p.prefill("a", prompt(100)))
    assert_answered(d, "between", policy, NEW if first is d else OLD, p)
    run_until(lambda: not p.remains(), p, d)
    update(second, first)
    loaded = d.loaded_tokens
    d.add("after", prompt(90), p.prefill("b", prompt(90)))
    assert finish(d, "after", p) == greedy(prompt(90), 4, NEW)
    assert d.loaded_tokens > loaded
    settle(p, d)


def test_the_number_of_resets_does_not_matter(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    p.prefill("held", prompt(40))
    p.load_weights(NEW)
    assert not p.reset()
    reset_until_done(p)
    assert p.reset()
    update(d)
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    assert finish(d, "b", p) == greedy(prompt(100), 4, NEW)
    assert d.loaded_tokens == 100
    settle(p, d)


@pytest.mark.parametrize("is_of_start", [True, False])
def test_weights_with_the_same_elements_in_other_places_are_other_weights(
    start_engine: StartEngine, is_of_start: bool
) -> None:
    p, d = start_pair(start_engine, "recompute")
    if not is_of_start:
        update(p)
        update(d)
        d.add("first", prompt(80), p.prefill("updated", prompt(80)))
        assert finish(d, "first", p) == greedy(prompt(80), 4, NEW)
        run_until(lambda: not p.remains(), p, d)
    loaded = d.loaded_tokens
    p.reorder_weights(2 * NEW)
    reset_until_done(p)
    d.add("between", prompt(100), p.prefill("a", prompt(100)))
    assert finish(d, "between", p) == greedy(prompt(100), 4, OLD if is_of_start else NEW)
    assert d.loaded_tokens == loaded
    run_until(lambda: not p.remains(), p, d)
    d.reorder_weights(2 * NEW)
    reset_until_done(d, p)
    d.add("after", prompt(90), p.prefill("b", prompt(90)))
    assert finish(d, "after", p) == greedy(prompt(90), 4, 2 * NEW)
    assert d.loaded_tokens == loaded + 90
    settle(p, d)


def test_a_reset_without_new_weights_ends_no_exchange(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    assert p.reset()
    p.add("running", prompt(20), max_tokens=50)
    run_until(lambda: p.computed.get("running", 0) > 20, p)
    assert not p.reset()
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    assert d.loaded_tokens == 100
    settle(p, d)


def test_kv_of_a_prefix_cache_that_could_not_be_reset_is_not_handed_over(
    start_engine: StartEngine,
) -> None:
    """P's prefix cache still has KV of the old weights, and P uses that KV for new requests."""
    p, d = start_pair(start_engine, "recompute")
    p.add("warm", prompt(100), max_tokens=200)
    p.step()
    p.load_weights(NEW)
    assert not p.reset()
    update(d)
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    assert finish(d, "b", p) == greedy(prompt(100), 4, NEW)
    assert d.loaded_tokens == 0
    p.abort("warm")
    reset_until_done(p, d)
    p.wrong_slots.clear()
    d.add("after", prompt(90), p.prefill("c", prompt(90)))
    assert finish(d, "after", p) == greedy(prompt(90), 4, NEW)
    assert p.wrong_slots == []
    settle(p, d)


def test_weights_may_be_replaced_after_the_reset_of_a_paused_engine(
    pair: tuple[Engine, Engine],
) -> None:
    """vLLM's `pause` resets the caches, then the caller replaces the weights and resumes. Requests
    that arrive in between wait.
    """
    p, d = pair
    update(p)
    params = p.prefill("a", prompt(100))
    d.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert d.reset()
    d.add("b", prompt(100), params)
    d.step()
    d.load_weights(NEW)
    d.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert finish(d, "b", p) == greedy(prompt(100), 4, NEW)
    assert d.loaded_tokens == 100
    settle(p, d)


def test_a_request_that_is_aborted_before_the_weights_are_sampled_leaves_nothing(
    pair: tuple[Engine, Engine],
) -> None:
    p, d = pair
    params = p.prefill("a", prompt(100))
    assert d.reset()
    d.add("b", prompt(100), params)
    d.abort("b")
    d.add("c", prompt(100), params)
    assert finish(d, "c", p) == greedy(prompt(100), 4)
    settle(p, d)


@pytest.mark.parametrize("is_push", [False, True])
def test_p_keeps_no_blocks_for_a_request_that_is_aborted_before_the_weights_are_sampled(
    start_engine: StartEngine, is_push: bool
) -> None:
    kv = {"kv_connector_extra_config": {"kv_lease_duration": 600}, **(PUSH if is_push else {})}
    p, d = start_pair(start_engine, "fail", **kv)
    if is_push:
        legs = Legs(p, d)
        ticket = legs.ticket()
        assert d.reset()
        legs.ask_p("a", prompt(100), ticket)
        legs.ask_d("b", prompt(100), ticket)
        legs.computed("a")
    else:
        assert d.reset()
        d.add("b", prompt(100), p.prefill("a", prompt(100)))
    d.abort("b")
    settle(p, d)


def test_a_request_that_waits_for_the_weights_of_d_keeps_its_lease(
    start_engine: StartEngine,
) -> None:
    """P's lease would run out while D's weights are replaced, as the lease of another request
    does.
    """
    p, d = start_pair(start_engine, "fail", kv_connector_extra_config={"kv_lease_duration": 2})
    d.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert d.reset()
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    p.prefill("without a reader", prompt(80))
    run_until(lambda: p.transfer_worker.leases == 2, p, d)
    run_until(lambda: p.transfer_worker.leases < 2, p, d)
    d.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    assert d.loaded_tokens == 100
    settle(p, d)


# -- push --


def test_a_push_waits_for_a_p_whose_weights_are_being_replaced(start_engine: StartEngine) -> None:
    """P has the prefill leg, and computes it when its weights are complete. The control is a leg
    that never comes to P.
    """
    legs = Legs(
        *start_pair(start_engine, "fail", kv_connector_extra_config={"leg_wait": 1}, **PUSH)
    )
    p, d, ticket = legs.p, legs.d, legs.ticket()
    p.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert p.reset()
    legs.ask_p("a", prompt(100), ticket)
    legs.ask_d("b", prompt(100), ticket)
    legs.registered()
    legs.ask_d("never", prompt(80), legs.ticket())
    assert finish(d, "never", p) == []
    p.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    assert d.loaded_tokens >= 100
    settle(p, d)


@pytest.mark.parametrize("is_reset", ["p", "d"])
def test_a_push_between_weights_that_differ_is_refused(
    start_engine: StartEngine, is_reset: str
) -> None:
    legs = Legs(*start_pair(start_engine, "fail", **PUSH))
    ticket = legs.ticket()
    legs.ask_d("b", prompt(100), ticket)
    legs.registered()
    engine = legs.p if is_reset == "p" else legs.d
    engine.load_weights(NEW)
    engine.reset()
    legs.ask_p("a", prompt(100), ticket)
    assert finish(legs.d, "b", legs.p) == []
    assert legs.d.answers["b"].finish == "error"
    other = legs.d if is_reset == "p" else legs.p
    finish(legs.p, "a", legs.d)
    reset_until_done(engine, other)
    update(other, engine)
    ticket = legs.ticket()
    legs.ask_d("after", prompt(100), ticket)
    legs.ask_p("c", prompt(100), ticket)
    assert finish(legs.d, "after", legs.p) == greedy(prompt(100), 4, NEW)
    settle(legs.p, legs.d)


def test_a_push_whose_prefill_runs_over_a_reset_fails(start_engine: StartEngine) -> None:
    p = start_engine("p", kv=PUSH, max_num_batched_tokens=48, max_num_seqs=4)
    legs = Legs(p, start_engine("d", kv=PUSH))
    ticket = legs.ticket()
    legs.ask_d("b", prompt(200), ticket)
    legs.registered()
    legs.ask_p("a", prompt(200), ticket)
    run_until(lambda: 100 < p.computed.get("a", 0) < 200, p, legs.d)
    p.load_weights(NEW)
    assert not p.reset()
    assert finish(legs.d, "b", p) == []
    assert legs.d.answers["b"].finish == "error"
    finish(p, "a", legs.d)
    p.wrong_slots.clear()
    settle(p, legs.d)


# -- checksums --


def shards(layers: dict[str, torch.Tensor], tp_size: int) -> list[dict[str, torch.Tensor]]:
    """The part of each rank: Q, K and V of 4, 2 and 2 heads of 8 rows, two merged matrices, rows of
    a vocabulary of 60 with 4 rows of padding, columns, and a norm that every rank has.
    """
    qkv, merged, down, embedding = (layers[name] for name in ("qkv", "merged", "down", "embedding"))
    kv_ranks = min(tp_size, 2)
    found = []
    for rank in range(tp_size):
        kv_rank = rank * kv_ranks // tp_size
        q, k, v = qkv.split([32, 16, 16])
        heads = [q.chunk(tp_size)[rank], k.chunk(kv_ranks)[kv_rank], v.chunk(kv_ranks)[kv_rank]]
        found.append(
            {
                "qkv": torch.cat(heads),
                "merged": torch.cat([part.chunk(tp_size)[rank] for part in merged.split([24, 48])]),
                "down": down.chunk(tp_size, dim=1)[rank],
                "embedding": torch.cat([embedding, torch.full((4, 16), 9.0)]).chunk(tp_size)[rank],
                "norm": layers["norm"],
                "everywhere": merged,
            }
        )
    return found


def one_rank(weights: dict[str, torch.Tensor], rank: int, tp_size: int) -> torch.nn.Module:
    """vLLM's layers as they are on one rank of an engine, with these weights."""
    model = torch.nn.Module()
    model.norm = torch.nn.Parameter(weights["norm"], requires_grad=False)
    group = get_tp_group()
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(VllmConfig()):
        # The layers ask vLLM's group for these numbers, and send nothing.
        patch.setattr(group, "rank_in_group", rank)
        patch.setattr(group, "world_size", tp_size)
        model.qkv = QKVParallelLinear(16, 8, 4, 2, bias=False)
        model.merged = MergedColumnParallelLinear(16, [24, 48], bias=False)
        model.down = RowParallelLinear(24, 16, bias=False)
        model.embedding = VocabParallelEmbedding(60, 16, padding_size=64)
        model.everywhere = MergedColumnParallelLinear(16, [24, 48], bias=False, disable_tp=True)
    for name in ("qkv", "merged", "down", "embedding", "everywhere"):
        getattr(model, name).weight.data.copy_(weights[name])
    return model


def ranks_of(layers: dict[str, torch.Tensor], tp_size: int) -> WeightsSample:
    samples = []
    for rank, weights in enumerate(shards(layers, tp_size)):
        LAYERWISE_INFO.clear()
        model = one_rank(weights, rank, tp_size)
        get_layerwise_info(model)
        loaded = LoadedWeights.find()
        samples.append(replace(loaded.sample(1), has_changed=True))
    return reduce(WeightsSample.aggregate, samples)


def test_the_sample_of_the_last_reset_replaces_an_earlier_one() -> None:
    """vLLM passes on the report of a step that has failed with that of the next step."""
    earlier, later = (WeightsSample(number, {"norm": (number,)}, True) for number in (1, 2))
    assert earlier.aggregate(later) == later.aggregate(earlier) == later


@pytest.fixture
def layers(start_engine: StartEngine) -> dict[str, torch.Tensor]:
    start_engine("first")  # It initialises vLLM's groups.
    torch.manual_seed(0)
    sizes = {"qkv": (64, 16), "merged": (72, 16), "down": (16, 24), "embedding": (60, 16)}
    return {"norm": torch.ones(16), **{name: torch.randn(*size) for name, size in sizes.items()}}


def test_engines_of_different_parallel_sizes_agree(layers: dict[str, torch.Tensor]) -> None:
    versions = {ranks_of(layers, tp_size).version() for tp_size in (1, 2, 4)}
    assert len(versions) == 1
    assert "tp_size" not in versions.pop()


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", ["qkv", "merged", "down", "embedding", "norm"])
def test_a_changed_element_and_elements_that_have_moved_are_other_weights(
    layers: dict[str, torch.Tensor], name: str, tp_size: int
) -> None:
    layers["norm"] = torch.randn(16)
    versions = [ranks_of(layers, 1).version()]
    changed = layers[name].clone()
    changed[-1] += 1
    versions += [
        ranks_of({**layers, name: other}, tp_size).version()
        for other in (changed, layers[name].flip(0), layers[name].roll(1, -1))
    ]
    assert len(set(versions)) == 4


def test_weights_that_a_model_divides_in_its_own_way_agree_with_the_same_size_only(
    layers: dict[str, torch.Tensor],
) -> None:
    def version(parts: Sequence[torch.Tensor]) -> str:
        samples = []
        for part in parts:
            LAYERWISE_INFO.clear()
            model = torch.nn.Module()
            model.weight = torch.nn.Parameter(part, requires_grad=False)
            set_weight_attrs(model.weight, {"weight_loader": print})
            get_layerwise_info(model)
            samples.append(replace(LoadedWeights.find().sample(1), has_changed=True))
        return reduce(WeightsSample.aggregate, samples).version()

    whole = layers["qkv"]
    assert version([whole]) == version([whole]) != version(whole.chunk(2))
    assert version(whole.chunk(2)) == version(whole.chunk(2)) != version(whole.flip(0).chunk(2))


@pytest.mark.parametrize(
    "reorder",
    [
        lambda matrix: matrix.flip(0),
        lambda matrix: matrix.T,
        # The checksum reads the two halves one after the other.
        lambda matrix: matrix.roll(2048, 0),
    ],
    ids=["rows reversed", "transposed", "halves swapped"],
)
def test_weights_whose_elements_have_moved_have_changed(
    reorder: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    numbers = torch.arange(1 << 23, dtype=torch.int32)
    model = torch.nn.Module()
    model.vector = torch.nn.Parameter(numbers.clone(), requires_grad=False)
    LAYERWISE_INFO.clear()
    get_layerwise_info(model)
    weights = LoadedWeights.find()
    model.vector.data.copy_(reorder(numbers.view(4096, 2048)).reshape(-1))
    assert weights.sample(1).version() != ""
    model.vector.data.copy_(numbers)
    assert weights.sample(1).version() == ""


# -- updates without a reset --


class Core(EngineCore):  # type: ignore[misc]
    """The engine core around a scheduler: its workers replace their weights when they are asked."""

    def __init__(self, start_engine: StartEngine) -> None:
        self.engine = start_engine("d", kv={"kv_load_failure_policy": "recompute"})
        self.scheduler = self.engine.scheduler

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method == "train":
            self.engine.load_weights(NEW)
        return method


@pytest.mark.parametrize("call", ["train", "unknown", "list_loras"])
def test_weights_that_a_remote_call_may_have_changed_are_sampled(
    start_engine: StartEngine, call: str
) -> None:
    core = Core(start_engine)
    p, d = start_engine("p"), core.engine
    assert core.collective_rpc(call) == call
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    weights = NEW if call == "train" else OLD
    assert finish(d, "b", p) == greedy(prompt(100), 4, weights)
    assert d.loaded_tokens == (0 if call == "train" else 100)
    settle(p, d)


def test_kv_in_the_prefix_cache_is_not_handed_over_after_an_update_without_a_reset(
    start_engine: StartEngine,
) -> None:
    core = Core(start_engine)
    p, d = core.engine, start_engine("other", kv={"kv_load_failure_policy": "recompute"})
    p.prefill("first", prompt(100))
    core.collective_rpc("train")
    update(d)
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    assert finish(d, "b", p) == greedy(prompt(100), 4, NEW)
    assert d.loaded_tokens == 0
    p.wrong_slots.clear()
    reset_until_done(p, d)
    d.add("c", prompt(90), p.prefill("e", prompt(90)))
    assert finish(d, "c", p) == greedy(prompt(90), 4, NEW)
    settle(p, d)
