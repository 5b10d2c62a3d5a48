"""Tests the life cycle of requests in vLLM's own scheduler, with real tickets, reads and leases.
After each test neither engine may hold anything.

The engines compare every slot that a forward would read with the right number; `settle` is the
check at the end of a test.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import BLOCK, Engine, next_token, run_until
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import RequestStatus

import vllm
from kvferry.vllm.release import release

LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100]


def prompt(length: int, start: int = 10) -> list[int]:
    return [start + (index * 7) % 300 for index in range(length)]


def greedy(tokens: list[int], count: int, seed: int = 0) -> list[int]:
    """Return the tokens that an engine generates after `tokens` if it computes everything
    itself.
    """
    said = list(tokens)
    for _ in range(count):
        said.append(next_token(said, seed))
    return said[len(tokens) :]


def finish(engine: Engine, request_id: str, *others: Engine) -> list[int]:
    run_until(lambda: engine.answers[request_id].finish is not None, engine, *others)
    return engine.answers[request_id].tokens


def settle(*engines: Engine) -> None:
    run_until(lambda: not any(engine.remains() for engine in engines), *engines)
    for engine in engines:
        assert engine.wrong_slots == []


def wait_for_load(d: Engine, request_id: str) -> None:
    run_until(
        lambda: d.scheduler.requests[request_id].status == RequestStatus.WAITING_FOR_REMOTE_KVS, d
    )


def test_what_is_held_for_a_peer_shows_as_left(start_engine: StartEngine) -> None:
    """The control of `settle`: an engine that holds blocks for a peer is not empty, and that is the
    only reason.
    """
    p = start_engine("p")
    assert p.remains() == {}
    p.prefill("a", prompt(100))
    run_until(lambda: p.transfer_worker.leases == 1, p)
    assert p.remains()["used blocks"] == 4
    assert p.remains().keys() == {"requests", "used blocks", "block tables", "leases"}


# -- transfer --


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_prompt_is_handed_over_whole(
    start_engine: StartEngine, length: int, is_async: bool
) -> None:
    p, d = start_engine("p", is_async=is_async), start_engine("d", is_async=is_async)
    d.add("b", prompt(length), p.prefill("a", prompt(length)))
    assert finish(d, "b", p) == greedy(prompt(length), 4)
    assert d.loaded_tokens == length
    settle(p, d)


def test_the_bytes_in_ds_blocks_are_ps(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    params = p.prefill("a", prompt(100))
    d.add("b", prompt(100), params)
    wait_for_load(d, "b")
    (ours,) = d.scheduler.kv_cache_manager.get_block_ids("b")
    before = {layer: tensor[ours].clone() for layer, tensor in d.tensors.items()}
    run_until(lambda: "b" in d.scheduler.finished_recving_kv_req_ids, p, d)
    for layer, tensor in d.tensors.items():
        assert torch.equal(tensor[ours], p.tensors[layer][params["remote_block_ids"][0]])
        assert not torch.equal(tensor[ours], before[layer])
    finish(d, "b", p)
    settle(p, d)


def test_a_corrupted_read_is_seen_by_the_made_up_forward(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of all equality checks here."""
    p = start_engine("p")
    monkeypatch.setenv("KVFERRY_FAULTS", "corrupt:every=1")
    d = start_engine("d")
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    finish(d, "b", p)
    assert {request for request, _ in d.wrong_slots} == {"b"}


@pytest.mark.parametrize(
    ("length", "known", "loaded"), [(100, 64, 36), (64, 64, 32), (65, 64, 1), (100, 31, 100)]
)
def test_only_what_d_lacks_is_loaded(
    pair: tuple[Engine, Engine], length: int, known: int, loaded: int
) -> None:
    p, d = pair
    d.add("warm", prompt(known), max_tokens=1)
    finish(d, "warm")
    d.add("b", prompt(length), p.prefill("a", prompt(length)))
    assert finish(d, "b", p) == greedy(prompt(length), 4)
    assert d.loaded_tokens == loaded
    settle(p, d)


def test_a_full_local_hit_moves_nothing_and_frees_p(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    d.add("warm", prompt(100), max_tokens=1)
    finish(d, "warm")
    d.add("b", prompt(100), p.prefill("a", prompt(64)))
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    assert d.loaded_tokens == 0
    settle(p, d)


@pytest.mark.parametrize("length", [80, 120])
def test_a_prompt_that_differs_from_ps_uses_the_common_prefix_only(
    pair: tuple[Engine, Engine], length: int
) -> None:
    """D's prompt is shorter or longer, or differs from block 1 on (the longer one is T6 of the
    conformance list).
    """
    p, d = pair
    d.add("b", prompt(length), p.prefill("a", prompt(100)))
    other = prompt(40) + prompt(60, start=200)
    d.add("c", other, p.prefill("a2", prompt(100)))
    assert finish(d, "b", p) == greedy(prompt(length), 4)
    assert finish(d, "c", p) == greedy(other, 4)
    settle(p, d)


def test_max_tokens_1_on_both_sides(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    d.add("b", prompt(100), p.prefill("a", prompt(100)), max_tokens=1)
    assert finish(d, "b", p) == greedy(prompt(100), 1)
    settle(p, d)


def test_without_prefix_caching_on_d(start_engine: StartEngine) -> None:
    p, d = start_engine("p"), start_engine("d", enable_prefix_caching=False)
    for number in range(2):
        d.add(f"b{number}", prompt(100), p.prefill(f"a{number}", prompt(100)))
        assert finish(d, f"b{number}", p) == greedy(prompt(100), 4)
    assert d.loaded_tokens == 200
    settle(p, d)


def test_a_request_that_must_not_read_caches_computes_and_frees_p(
    pair: tuple[Engine, Engine],
) -> None:
    """vLLM sets this flag for prompt logprobs, and then ignores the connector's offer."""
    p, d = pair
    d.add("b", prompt(100), p.prefill("a", prompt(100)), skip_reading_prefix_cache=True)
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    assert d.loaded_tokens == 0
    settle(p, d)


def test_a_load_that_ends_in_a_paused_engine_is_used(pair: tuple[Engine, Engine]) -> None:
    """Since 0.32, an engine that is paused for new requests goes on with those that have loaded.
    Before, they wait until it resumes.
    """
    p, d = pair
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    wait_for_load(d, "b")
    d.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    run_until(lambda: p.transfer_worker.leases == 0, p, d)
    if release(vllm.__version__) == "0.31":
        for _ in range(10):
            d.step()
        assert d.answers["b"].tokens == []
        d.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    assert d.loaded_tokens == 100
    settle(p, d)


def test_a_ticket_that_comes_back_to_its_own_engine_is_handed_back(
    start_engine: StartEngine,
) -> None:
    p = start_engine("p")
    p.add("b", prompt(100), p.prefill("a", prompt(100)))
    assert finish(p, "b") == greedy(prompt(100), 4)
    settle(p)


def test_chunked_prefill_is_handed_over_whole(start_engine: StartEngine) -> None:
    p, d = start_engine("p", max_num_batched_tokens=48, max_num_seqs=4), start_engine("d")
    d.add("b", prompt(200), p.prefill("a", prompt(200)))
    assert finish(d, "b", p) == greedy(prompt(200), 4)
    assert d.loaded_tokens == 200
    settle(p, d)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_ticket_covers_no_token_that_is_not_computed(
    start_engine: StartEngine, is_async: bool
) -> None:
    """P ends at a stop token. With async scheduling, vLLM is ahead of its worker and already counts
    the token of the current step as computed.
    """
    p, d = start_engine("p", is_async=is_async), start_engine("d", is_async=is_async)
    stop = next_token(prompt(63))
    params = p.prefill("a", prompt(63), max_tokens=8, stop_token_ids=[stop])
    assert params["remote_num_tokens"] == p.computed["a"] == 63
    d.add("b", [*prompt(63), stop, 77], params)
    assert finish(d, "b", p) == greedy([*prompt(63), stop, 77], 4)
    settle(p, d)


def test_four_children_share_a_ticket(pair: tuple[Engine, Engine]) -> None:
    """n=4: vLLM gives every child the parent's parameters."""
    p, d = pair
    params = p.prefill("a", prompt(100))
    for number in range(4):
        d.add(f"{number}_b", prompt(100), params)
    for number in range(4):
        assert finish(d, f"{number}_b", p) == greedy(prompt(100), 4)
    settle(p, d)


# -- other KV of the same tokens --


@pytest.mark.parametrize(
    ("at_p", "at_d"),
    [
        ({"cache_salt": "tenant 1", "seed": 1}, {"cache_salt": "tenant 2", "seed": 2}),
        ({"cache_salt": "tenant 1", "seed": 1}, {}),
        ({}, {"lora_request": LoRARequest("adapter", 1, "/nowhere"), "seed": 3}),
        (
            {"lora_request": LoRARequest("adapter", 1, "/nowhere"), "seed": 3},
            {"lora_request": LoRARequest("b", 2, "/no"), "seed": 4},
        ),
        ({"prompt_embeds": torch.ones(100, 4), "seed": 5}, {}),
        (
            {"prompt_embeds": torch.ones(100, 4), "seed": 5},
            {"prompt_embeds": torch.zeros(100, 4), "seed": 6},
        ),
    ],
)
def test_kv_of_another_tenant_adapter_or_embedding_is_not_used(
    pair: tuple[Engine, Engine], at_p: dict[str, Any], at_d: dict[str, Any]
) -> None:
    p, d = pair
    tokens = {
        "p": None if "prompt_embeds" in at_p else prompt(100),
        "d": None if "prompt_embeds" in at_d else prompt(100),
    }
    if tokens["p"] is None and tokens["d"] is not None:
        tokens["d"] = [0] * 100  # vLLM uses zeros where a prompt of embeddings needs token ids
    p.add("a", tokens["p"], {"do_remote_decode": True}, max_tokens=1, **at_p)
    finish(p, "a")
    d.add("b", tokens["d"], p.answers["a"].params, **at_d)
    assert finish(d, "b", p) == greedy(tokens["d"] or [0] * 100, 4, at_d.get("seed", 0))
    assert d.loaded_tokens == 0
    settle(p, d)


def test_kv_of_the_same_tenant_is_used(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    same: dict[str, Any] = {"cache_salt": "tenant 1", "seed": 1}
    d.add("b", prompt(100), p.prefill("a", prompt(100), **same), **same)
    assert finish(d, "b", p) == greedy(prompt(100), 4, 1)
    assert d.loaded_tokens == 100
    settle(p, d)


# -- requests that end early --


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "moment", ["queued", "allocated", "loading", "arrived", "running", "finished"]
)
def test_d_aborts(start_engine: StartEngine, moment: str, is_async: bool) -> None:
    p, d = start_engine("p", is_async=is_async), start_engine("d", is_async=is_async)
    d.add("b", prompt(100), p.prefill("a", prompt(100)), max_tokens=50)
    scheduler = d.scheduler
    if moment == "allocated":
        d.step()
    elif moment == "loading":
        wait_for_load(d, "b")
        d.step()
    elif moment == "arrived":
        run_until(lambda: "b" in scheduler.finished_recving_kv_req_ids, p, d)
    elif moment == "running":
        run_until(lambda: len(d.answers["b"].tokens) > 2, p, d)
    elif moment == "finished":
        finish(d, "b", p)
    d.abort("b")
    settle(p, d)
    d.add("c", prompt(100), max_tokens=2)
    assert finish(d, "c") == greedy(prompt(100), 2)
    settle(p, d)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_p_aborts_before_its_end(start_engine: StartEngine, steps: int, is_async: bool) -> None:
    p = start_engine("p", is_async=is_async)
    p.add("a", prompt(100), {"do_remote_decode": True}, max_tokens=50)
    for _ in range(steps):
        p.step()
    p.abort("a")
    assert p.answers["a"].params is None
    settle(p)


def test_an_abort_after_ps_end_changes_nothing(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    params = p.prefill("a", prompt(100))
    p.abort("a")
    d.add("b", prompt(100), params)
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    assert d.loaded_tokens == 100
    settle(p, d)


@pytest.mark.parametrize("params", [{"do_remote_decode": True}, {"do_remote_prefill": True}, None])
def test_a_request_rejected_on_arrival_leaves_nothing(
    pair: tuple[Engine, Engine], params: dict[str, Any] | None
) -> None:
    """vLLM's front-end passes on invalid requests this way, so that connectors release what they
    hold.
    """
    p, d = pair
    d.add("b", prompt(100), params or p.prefill("a", prompt(100)), abort_immediately=True)
    settle(p, d)


@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPushConnector"])
@pytest.mark.parametrize("is_asleep", ["p", "d"])
def test_a_request_that_a_paused_engine_rejects_leaves_nothing(
    start_engine: StartEngine, connector: str, is_asleep: str
) -> None:
    """Since 0.33, the engine core itself rejects requests that arrive in a pause. It lets the
    connector release what a peer holds for them.
    """
    kv = {"kv_connector": connector}
    p, d = start_engine("p", kv=kv), start_engine("d", kv=kv)
    paused = {"p": p, "d": d}[is_asleep]
    paused.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    if paused is p:
        reject(p, "a", {"do_remote_decode": True})
    else:
        params = p.prefill("a", prompt(100))
        run_until(lambda: p.transfer_worker.leases == 1, p)
        for _ in range(20):
            p.step()
            d.step()
        assert p.remains()["used blocks"] == 4
        reject(d, "b", params)
    settle(p, d)
    assert paused.scheduler.pause_state is PauseState.PAUSED_NEW


def reject(engine: Engine, request_id: str, params: dict[str, Any]) -> None:
    """Let a request arrive at an engine whose core rejects new requests."""
    request = engine.request(request_id, prompt(100), params)
    if hasattr(EngineCoreProc, "_reject_add_while_paused"):
        said: list[Any] = []
        core = SimpleNamespace(
            reject_new_requests=True,
            scheduler=engine.scheduler,
            add_request=engine.admit,
            _send_finish_outputs_to_client=lambda *output: said.append(output[-1]),
        )
        assert EngineCoreProc._reject_add_while_paused(core, request)  # noqa: SLF001
        assert [error.code for error in said] == ["engine_paused"]
    else:
        request.abort_immediately = True
        engine.admit(request)
    assert engine.answers[request_id].finish == "abort"


def test_a_request_that_is_asked_for_often_loads_once(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks again in every step in which it could not schedule the request."""
    p, d = pair
    commands: list[str] = []
    bind = d.worker.bind_connector_metadata

    def bind_and_note(metadata: Any) -> None:
        commands.extend(type(command).__name__ for command in metadata.inner.commands)
        bind(metadata)

    monkeypatch.setattr(d.worker, "bind_connector_metadata", bind_and_note)
    for name, num_asked in (("b", 1), ("c", 100)):
        request = d.add(name, prompt(100), p.prefill(f"p of {name}", prompt(100)))
        for _ in range(num_asked):
            assert d.scheduler.connector.get_num_new_matched_tokens(request, 0) == (100, True)
        assert finish(d, name, p) == greedy(prompt(100), 4)
        settle(p, d)
        assert commands == ["PrepareLoad", "StartLoad"]
        commands.clear()
        assert d.scheduler.reset_prefix_cache()


@pytest.mark.skipif(
    not hasattr(KVOutputAggregator, "ft_defer_kv_connector_outputs"), reason="before vLLM 0.33"
)
def test_a_report_that_vllm_passes_on_with_that_of_the_next_step_is_used(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So vLLM saves the report of a rank when another rank has failed in the step."""
    p, d = pair
    aggregate, held = d.aggregator.aggregate, list[Any]()

    def hold_the_end_of_the_load(outputs: list[Any]) -> Any:
        news = outputs[0].kv_connector_output
        if held or not news.finished_recving:
            return aggregate(outputs)
        held.append(news)
        outputs[0].kv_connector_output = None
        whole = aggregate(outputs)
        d.aggregator.ft_defer_kv_connector_outputs(held)
        return whole

    monkeypatch.setattr(d.aggregator, "aggregate", hold_the_end_of_the_load)
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    assert d.loaded_tokens == 100
    assert [news.finished_recving for news in held] == [{"b"}]
    settle(p, d)


def test_d_preempts_after_the_load(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    d.add("b", prompt(100), p.prefill("a", prompt(100)), max_tokens=8)
    run_until(lambda: len(d.answers["b"].tokens) == 3, p, d)
    d.preempt("b")
    assert finish(d, "b", p) == greedy(prompt(100), 8)
    settle(p, d)


def test_d_preempts_after_the_load_and_its_blocks_are_gone(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    d.add("b", prompt(100), p.prefill("a", prompt(100)), max_tokens=8)
    run_until(lambda: len(d.answers["b"].tokens) == 3, p, d)
    d.preempt("b")
    assert d.scheduler.kv_cache_manager.reset_prefix_cache()
    assert finish(d, "b", p) == greedy(prompt(100), 8)
    settle(p, d)


@pytest.mark.parametrize("is_async", [False, True])
def test_p_preempts_before_its_end(start_engine: StartEngine, is_async: bool) -> None:
    p, d = start_engine("p", is_async=is_async), start_engine("d", is_async=is_async)
    p.add("a", prompt(100), {"do_remote_decode": True}, max_tokens=3)
    run_until(lambda: len(p.answers["a"].tokens) == 1, p)
    p.preempt("a")
    finish(p, "a")
    d.add("b", prompt(100), p.answers["a"].params)
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    # The ticket also covers tokens that P generated, and a fingerprint can be compared only at
    # block boundaries and at its end.
    assert d.loaded_tokens == 96
    settle(p, d)


# -- faults --


def check_outcome(
    d: Engine, policy: str, request_id: str, tokens: list[int], *others: Engine
) -> None:
    """Check for an error under `fail` and the right tokens under `recompute`; then check that the
    same prompt finds no wrong block in D's cache.
    """
    said = finish(d, request_id, *others)
    assert (d.answers[request_id].finish, said) == (
        ("length", greedy(tokens, 4)) if policy == "recompute" else ("error", [])
    )
    settle(d, *others)
    d.add(f"{request_id} again", tokens)
    assert finish(d, f"{request_id} again") == greedy(tokens, 4)
    settle(d, *others)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("known", [0, 64])
def test_a_read_that_fails(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, policy: str, known: int
) -> None:
    """The transport reports failure after it has written: D must not use the blocks' new contents,
    but may use blocks that it had before.
    """
    p = start_engine("p")
    monkeypatch.setenv("KVFERRY_FAULTS", "corrupt:every=1;fail:every=1")
    d = start_engine("d", kv={"kv_load_failure_policy": policy})
    if known:
        d.add("warm", prompt(known), max_tokens=1)
        finish(d, "warm")
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    check_outcome(d, policy, "b", prompt(100), p)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("moment", ["before", "connected", "allocated"])
def test_p_dies(start_engine: StartEngine, policy: str, moment: str) -> None:
    extra = {"handshake_timeout": 1.0}
    p, d = (
        start_engine("p"),
        start_engine(
            "d", kv={"kv_load_failure_policy": policy, "kv_connector_extra_config": extra}
        ),
    )
    if moment == "connected":
        d.add("first", prompt(50), p.prefill("a0", prompt(50)))
        finish(d, "first", p)
    params = p.prefill("a", prompt(100))
    if moment == "allocated":
        d.add("b", prompt(100), params)
        wait_for_load(d, "b")
    p.close()
    if moment != "allocated":
        d.add("b", prompt(100), params)
    check_outcome(d, policy, "b", prompt(100))


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_ticket_used_again_after_its_lease_ended(start_engine: StartEngine, policy: str) -> None:
    """P's blocks have other contents by then: D must answer with right tokens or a clear error, and
    load nothing.
    """
    p, d = (
        start_engine("p"),
        start_engine("d", kv={"kv_load_failure_policy": policy}, enable_prefix_caching=False),
    )
    params = p.prefill("a", prompt(100))
    d.add("b", prompt(100), params)
    finish(d, "b", p)
    settle(p, d)
    p.add("other", prompt(300, start=5), max_tokens=1)
    finish(p, "other")
    d.add("c", prompt(100), params)
    said = finish(d, "c", p)
    assert (d.answers["c"].finish, said) in [("length", greedy(prompt(100), 4))] + [
        ("error", [])
    ] * (policy == "fail")
    settle(p, d)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_ticket_of_a_life_before_a_restart(start_engine: StartEngine, policy: str) -> None:
    p, d = (
        start_engine("p"),
        start_engine(
            "d",
            kv={
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {"handshake_timeout": 1.0},
            },
        ),
    )
    params = p.prefill("a", prompt(100))
    p.close()
    start_engine("p", seed=1)
    d.add("b", prompt(100), params)
    check_outcome(d, policy, "b", prompt(100))


FORGED: list[Any] = [
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "ticket": "forged"},
    {"do_remote_prefill": True, "ticket": ["a", "list"]},
    {
        "do_remote_prefill": True,
        "ticket": None,
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_block_ids": [[1, 2, 3, 4]],
    },
    {
        "do_remote_prefill": True,
        "remote_block_ids": [[1, 2, 3, 4]],
        "remote_engine_id": "p",
        "remote_request_id": "a",
    },
    {"do_remote_prefill": True, "remote_host": 5, "remote_port": "x", "tp_size": -1},
    {"do_remote_prefill": True, "do_remote_decode": True},
    {"do_remote_prefill": "yes"},
    {"do_remote_decode": 1},
]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("params", FORGED, ids=str)
def test_forged_parameters(start_engine: StartEngine, policy: str, params: Any) -> None:
    d = start_engine("d", kv={"kv_load_failure_policy": policy})
    d.add("gone", prompt(100), params)
    d.add("gone later", prompt(100), params)
    d.abort("gone")
    d.step()
    d.abort("gone later")
    settle(d)
    d.add("b", prompt(100), params)
    check_outcome(d, policy, "b", prompt(100))


@pytest.mark.parametrize(
    "params",
    [{}, {"anything": 1}, {"do_remote_prefill": False, "do_remote_decode": False}, {"ticket": "x"}],
)
def test_parameters_that_ask_for_nothing(start_engine: StartEngine, params: Any) -> None:
    d = start_engine("d")
    d.add("b", prompt(100), params)
    assert finish(d, "b") == greedy(prompt(100), 4)
    assert d.answers["b"].params is None
    settle(d)


def test_a_genuine_ticket_beside_forged_addresses_is_followed(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    forged = {
        "remote_host": "203.0.113.1",
        "remote_port": 1,
        "remote_block_ids": [[60, 61, 62, 63]],
        "remote_engine_id": "x",
        "tp_size": 7,
    }
    d.add("b", prompt(100), p.prefill("a", prompt(100)) | forged)
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    assert d.loaded_tokens == 100
    settle(p, d)


@pytest.mark.parametrize("side", ["p", "d"])
def test_token_ids_that_no_vocabulary_has_do_not_stop_the_engine(
    pair: tuple[Engine, Engine], side: str
) -> None:
    p, d = pair
    odd = [-1, *prompt(60)]
    d.add("b", odd, p.prefill("a", odd if side == "p" else prompt(100)))
    finish(d, "b", p)
    settle(p, d)


def test_ids_are_used_again(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    for number in range(3):
        tokens = prompt(100, start=10 + number)
        d.add("same", tokens, p.prefill("same", tokens))
        assert finish(d, "same", p) == greedy(tokens, 4)
        settle(p, d)
    tokens = prompt(100, start=50)
    params = p.prefill("same", tokens)
    d.add("same", tokens, params)
    d.abort("same")
    d.add("same", tokens, params)
    finish(d, "same", p)
    settle(p, d)


def test_more_requests_than_blocks(start_engine: StartEngine) -> None:
    """D preempts by itself; P cannot prefill more until D has read the blocks that P holds."""
    p, d = (
        start_engine("p", num_gpu_blocks_override=24),
        start_engine("d", num_gpu_blocks_override=18),
    )
    prompts = {f"r{number}": prompt(100 + number, start=10 + number) for number in range(12)}
    for name, tokens in prompts.items():
        p.add(name, tokens, {"do_remote_decode": True}, max_tokens=1)
    sent: set[str] = set()

    def is_done() -> bool:
        for name, answer in p.answers.items():
            if answer.params is not None and name not in sent:
                sent.add(name)
                d.add(name, prompts[name], answer.params, max_tokens=60)
        return len(d.answers) == len(prompts) and all(
            answer.finish for answer in d.answers.values()
        )

    run_until(is_done, p, d)
    assert {name: answer.tokens for name, answer in d.answers.items()} == {
        name: greedy(tokens, 60) for name, tokens in prompts.items()
    }
    settle(p, d)
