"""Tests push in vLLM's own scheduler: both legs of a request at once, in either order. After each
test neither engine may hold anything.

Engines, prompts and `settle` are those of the pull tests, and every slot that a forward would read
is checked in the same way.
"""

from collections.abc import Callable
from typing import Any

import pytest
from tests.sampling import sampled
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import run_until
from tests.vllm.inside.legs import PUSH, Legs
from tests.vllm.inside.test_life_cycle import (
    LENGTHS,
    check_outcome,
    finish,
    greedy,
    prompt,
    settle,
    wait_for_load,
)

StartLegs = Callable[..., Legs]
FIRST = pytest.mark.parametrize("first", ["p", "d"])
POLICY = pytest.mark.parametrize("policy", ["fail", "recompute"])


@pytest.fixture
def start_legs(start_engine: StartEngine) -> StartLegs:
    """Start both engines. `p` and `d` are settings of one side, all others apply to both sides."""

    def start(
        *,
        p: dict[str, Any] | None = None,
        d: dict[str, Any] | None = None,
        kv: dict[str, Any] | None = None,
        **both: Any,
    ) -> Legs:
        def side(name: str, own: dict[str, Any]) -> Any:
            return start_engine(
                name, **{**both, **own, "kv": {**PUSH, **(kv or {}), **own.get("kv", {})}}
            )

        return Legs(side("p", p or {}), side("d", d or {}))

    return start


@pytest.fixture
def legs(start_legs: StartLegs) -> Legs:
    return start_legs()


def ask_both(legs: Legs, first: str, tokens: list[int], of: str = "", **at_d: Any) -> None:
    """Send request `a` to P and `b` to D. The second is sent when the first waits for it, or has
    ended without it.
    """
    ticket = legs.ticket()
    if first == "p":
        legs.ask_p(f"a{of}", tokens, ticket)
        legs.computed(f"a{of}")
        legs.ask_d(f"b{of}", tokens, ticket, **at_d)
    else:
        legs.ask_d(f"b{of}", tokens, ticket, **at_d)
        run_until(
            lambda: (
                legs.p.transfer_worker.registrations == 1
                or legs.d.answers[f"b{of}"].finish is not None
            ),
            legs.d,
        )
        legs.ask_p(f"a{of}", tokens, ticket)


# -- transfer --


@pytest.mark.parametrize(
    ("is_async", "length", "first"), sampled([False, True], LENGTHS, ["p", "d"])
)
def test_a_prompt_is_handed_over_whole(
    start_legs: StartLegs, first: str, length: int, is_async: bool
) -> None:
    legs = start_legs(is_async=is_async)
    ask_both(legs, first, prompt(length))
    assert finish(legs.d, "b", legs.p) == greedy(prompt(length), 4)
    assert legs.d.loaded_tokens == length
    settle(legs.p, legs.d)


def test_a_corrupted_read_is_seen_by_the_made_up_forward(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of all equality checks here."""
    p = start_engine("p", kv=PUSH)
    monkeypatch.setenv("KVFERRY_FAULTS", "corrupt:every=1")
    legs = Legs(p, start_engine("d", kv=PUSH))
    ask_both(legs, "d", prompt(100))
    finish(legs.d, "b", legs.p)
    assert {request for request, _ in legs.d.wrong_slots} == {"b"}


def test_a_decode_side_that_waits_shows_as_left(legs: Legs) -> None:
    """The control of `settle`: P shows the registration, and D shows the request that waits."""
    legs.ask_d("b", prompt(100), legs.ticket())
    legs.registered()
    assert legs.p.remains() == {"registrations": 1}
    assert {"requests", "used blocks", "loads", "transfers"} <= legs.d.remains().keys()
    legs.d.abort("b")
    settle(legs.p, legs.d)


@FIRST
@pytest.mark.parametrize(
    ("length", "known", "loaded"), [(100, 64, 36), (64, 64, 32), (65, 64, 1), (100, 31, 100)]
)
def test_only_what_d_lacks_is_loaded(
    legs: Legs, first: str, length: int, known: int, loaded: int
) -> None:
    legs.d.add("warm", prompt(known), max_tokens=1)
    finish(legs.d, "warm")
    ask_both(legs, first, prompt(length))
    assert finish(legs.d, "b", legs.p) == greedy(prompt(length), 4)
    assert legs.d.loaded_tokens == loaded
    settle(legs.p, legs.d)


@FIRST
def test_a_request_that_must_not_read_caches_computes_and_frees_p(legs: Legs, first: str) -> None:
    """vLLM sets this flag for prompt logprobs, and then ignores the connector's offer."""
    ticket = legs.ticket()
    if first == "p":
        legs.ask_p("a", prompt(100), ticket)
        legs.computed("a")
    legs.ask_d("b", prompt(100), ticket, skip_reading_prefix_cache=True)
    assert finish(legs.d, "b") == greedy(prompt(100), 4)
    if first == "d":
        legs.ask_p("a", prompt(100), ticket)
        finish(legs.p, "a", legs.d)
    assert legs.d.loaded_tokens == 0
    settle(legs.p, legs.d)


@FIRST
@pytest.mark.parametrize("is_async", [False, True])
def test_chunked_prefill_is_handed_over_whole(
    start_legs: StartLegs, first: str, is_async: bool
) -> None:
    legs = start_legs(p={"max_num_batched_tokens": 48, "max_num_seqs": 4}, is_async=is_async)
    ask_both(legs, first, prompt(200))
    assert finish(legs.d, "b", legs.p) == greedy(prompt(200), 4)
    assert legs.d.loaded_tokens == 200
    settle(legs.p, legs.d)


@FIRST
@pytest.mark.parametrize(
    "kind", ["MLA", "windows beside full attention", "chunks beside full attention"]
)
def test_caches_of_other_kinds(start_legs: StartLegs, kind: str, first: str) -> None:
    """With windows, P frees a block that D needs for one prompt length in every block length; with
    chunks, for one in every chunk length. D computes those prompts. The lease lasts longer than
    every wait here, so P's blocks are free because D released them.
    """
    patient = {"kv_connector_extra_config": {"kv_lease_duration": 600}}
    legs = start_legs(kind=kind, kv=patient, p={"max_num_batched_tokens": 48, "max_num_seqs": 4})
    expected = 0
    for length in (32, 33, 63, 64, 79, 100, 111, 128, 200):
        tokens = prompt(length, start=length)
        ask_both(legs, first, tokens, of=f" of {length}")
        assert finish(legs.d, f"b of {length}", legs.p) == greedy(tokens, 4), length
        finish(legs.p, f"a of {length}", legs.d)
        is_gone = {
            "MLA": False,
            "windows beside full attention": length in (79, 111),
            "chunks beside full attention": length in (64, 128),
        }
        expected += 0 if is_gone[kind] else length - (kind != "MLA")
    assert legs.d.loaded_tokens == expected
    settle(legs.p, legs.d)


# -- transfer during prefill --


CHUNKS = {"max_num_batched_tokens": 64, "max_num_seqs": 4}


BYTES_PER_TOKEN = 4 * 2 * 2 * 64 * 4
"""For the generated model: layers, KV heads, K and V, head size, float32."""


STAGED = {"kv": {"kv_connector_extra_config": {"force_host_buffer": True}}}


@pytest.mark.parametrize("uses_host_buffer", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_each_chunk_moves_while_the_next_is_computed(
    start_legs: StartLegs, is_async: bool, uses_host_buffer: bool
) -> None:
    """With async scheduling, vLLM plans a step before it has the output of the last one, so a chunk
    is known to be computed one step later.
    """
    legs = start_legs(p={**CHUNKS, **(STAGED if uses_host_buffer else {})}, is_async=is_async)
    p, d, ticket = legs.p, legs.d, legs.ticket()
    legs.ask_d("b", prompt(300), ticket)
    legs.registered()
    legs.ask_p("a", prompt(300), ticket)
    for num_chunks in range(1, 5):
        while p.computed.get("a", 0) < 64 * num_chunks:
            p.step()
        num_tokens = 64 * max(0, num_chunks - 1 - is_async)
        run_until(
            lambda expected=num_tokens * BYTES_PER_TOKEN: (  # type: ignore[misc]
                d.moved_bytes == expected
            ),
            d,
        )
    assert p.answers["a"].finish is None
    assert finish(d, "b", p) == greedy(prompt(300), 4)
    assert d.loaded_tokens == 300
    assert d.moved_bytes == 320 * BYTES_PER_TOKEN, "whole blocks, each of them once"
    settle(p, d)


@FIRST
@pytest.mark.parametrize("sides", ["p", "d", "pd"])
def test_host_buffers(start_legs: StartLegs, sides: str, first: str) -> None:
    legs = start_legs(p=STAGED if "p" in sides else None, d=STAGED if "d" in sides else None)
    ask_both(legs, first, prompt(100))
    assert finish(legs.d, "b", legs.p) == greedy(prompt(100), 4)
    assert legs.d.loaded_tokens == 100
    settle(legs.p, legs.d)


def test_four_children_share_a_push_ticket(legs: Legs) -> None:
    """n=4: vLLM gives every child the parent's parameters; one child loads, the others find its
    blocks in D's cache.
    """
    ticket = legs.ticket()
    for number in range(4):
        legs.ask_d(f"{number}_b", prompt(100), ticket)
    run_until(lambda: legs.p.transfer_worker.registrations > 0, legs.d)
    legs.ask_p("a", prompt(100), ticket)
    for number in range(4):
        assert finish(legs.d, f"{number}_b", legs.p) == greedy(prompt(100), 4)
    settle(legs.p, legs.d)


@FIRST
def test_one_engine_for_both_legs_keeps_nothing(start_engine: StartEngine, first: str) -> None:
    p = start_engine("p", kv=PUSH)
    legs = Legs(p, p)
    ticket = legs.ticket()
    if first == "p":
        legs.ask_p("a", prompt(100), ticket)
        legs.computed("a")
        legs.ask_d("b", prompt(100), ticket)
    else:
        legs.ask_d("b", prompt(100), ticket)
        legs.ask_p("a", prompt(100), ticket)
    assert finish(p, "b") == greedy(prompt(100), 4)
    finish(p, "a")
    settle(p)


def test_a_router_that_asks_p_first_is_served_as_in_pull(legs: Legs) -> None:
    legs.d.add("b", prompt(100), legs.p.prefill("a", prompt(100)))
    assert finish(legs.d, "b", legs.p) == greedy(prompt(100), 4)
    assert legs.d.loaded_tokens == 100
    settle(legs.p, legs.d)


def test_a_producer_and_a_consumer_will_do(start_legs: StartLegs) -> None:
    legs = start_legs(p={"kv": {"kv_role": "kv_producer"}}, d={"kv": {"kv_role": "kv_consumer"}})
    ask_both(legs, "d", prompt(100))
    assert finish(legs.d, "b", legs.p) == greedy(prompt(100), 4)
    assert legs.d.loaded_tokens == 100
    settle(legs.p, legs.d)


# -- requests that end early --


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "moment", ["queued", "registered", "matched", "arrived", "running", "finished"]
)
def test_d_aborts(start_legs: StartLegs, moment: str, is_async: bool) -> None:
    legs = start_legs(is_async=is_async)
    ticket = legs.ticket()
    legs.ask_d("b", prompt(100), ticket, max_tokens=50)
    if moment != "queued":
        legs.registered()
    if moment not in ("queued", "registered"):
        legs.ask_p("a", prompt(100), ticket)
        # D may have read everything before this thread sees the lease.
        leg = legs.p.answers["a"]
        run_until(lambda: legs.p.transfer_worker.leases > 0 or leg.finish is not None, legs.p)
    if moment == "arrived":
        run_until(lambda: "b" in legs.d.scheduler.finished_recving_kv_req_ids, legs.p, legs.d)
    elif moment == "running":
        run_until(lambda: len(legs.d.answers["b"].tokens) > 2, legs.p, legs.d)
    elif moment == "finished":
        finish(legs.d, "b", legs.p)
    legs.d.abort("b")
    if "a" not in legs.p.answers:
        settle(legs.d)
        legs.ask_p("a", prompt(100), ticket)
    finish(legs.p, "a", legs.d)
    settle(legs.p, legs.d)
    legs.d.add("c", prompt(100), max_tokens=2)
    assert finish(legs.d, "c") == greedy(prompt(100), 2)
    settle(legs.p, legs.d)


@pytest.mark.parametrize(
    ("policy", "first", "is_async"),
    sampled(["fail", "recompute"], ["p", "d"], [False, True]),
)
def test_p_aborts(start_legs: StartLegs, policy: str, first: str, is_async: bool) -> None:
    """The client of the prefill leg leaves: D's failure policy applies, and the error gives the
    reason.
    """
    legs = start_legs(d={"kv": {"kv_load_failure_policy": policy}}, is_async=is_async)
    ticket = legs.ticket()
    if first == "d":
        legs.ask_d("b", prompt(100), ticket)
        legs.registered()
    legs.ask_p("a", prompt(100), ticket, max_tokens=50)
    legs.p.step()
    legs.p.abort("a")
    run_until(lambda: not legs.p.scheduler.requests, legs.p)
    if first == "p":
        legs.ask_d("b", prompt(100), ticket)
    check_outcome(legs.d, policy, "b", prompt(100), legs.p)


@FIRST
def test_d_preempts_after_the_load(legs: Legs, first: str) -> None:
    ask_both(legs, first, prompt(100), max_tokens=8)
    run_until(lambda: len(legs.d.answers["b"].tokens) == 3, legs.p, legs.d)
    legs.d.preempt("b")
    assert legs.d.scheduler.kv_cache_manager.reset_prefix_cache()
    assert finish(legs.d, "b", legs.p) == greedy(prompt(100), 8)
    settle(legs.p, legs.d)


@pytest.mark.parametrize(
    ("is_async", "uses_host_buffer"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_p_preempts_while_it_computes_a_long_prompt(
    start_legs: StartLegs, steps: int, is_async: bool, uses_host_buffer: bool
) -> None:
    small = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "enable_prefix_caching": False}
    legs = start_legs(p={**small, **(STAGED if uses_host_buffer else {})}, is_async=is_async)
    ticket = legs.ticket()
    legs.ask_d("b", prompt(200), ticket)
    legs.registered()
    legs.ask_p("a", prompt(200), ticket)
    for _ in range(steps):
        legs.p.step()
    legs.p.preempt("a")
    # Another request writes its tokens into the freed blocks.
    legs.p.add("other", prompt(60, start=5), max_tokens=1)
    assert finish(legs.d, "b", legs.p) == greedy(prompt(200), 4)
    finish(legs.p, "other", legs.d)
    assert legs.d.loaded_tokens == 200
    settle(legs.p, legs.d)


# -- faults --


@POLICY
@FIRST
def test_a_read_that_fails(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, policy: str, first: str
) -> None:
    """The transport reports failure after it has written: D must not use the blocks' contents."""
    p = start_engine("p", kv={**PUSH, "kv_connector_extra_config": {"kv_lease_duration": 2.0}})
    monkeypatch.setenv("KVFERRY_FAULTS", "corrupt:every=1;fail:every=1")
    legs = Legs(p, start_engine("d", kv={**PUSH, "kv_load_failure_policy": policy}))
    ask_both(legs, first, prompt(100))
    check_outcome(legs.d, policy, "b", prompt(100), legs.p)


@POLICY
@pytest.mark.parametrize("moment", ["before", "registered"])
def test_p_dies(start_legs: StartLegs, policy: str, moment: str) -> None:
    legs = start_legs(
        d={
            "kv": {
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {"handshake_timeout": 1.0},
            }
        }
    )
    if moment == "before":
        legs.p.close()
    legs.ask_d("b", prompt(100), legs.ticket())
    if moment == "registered":
        legs.registered()
        wait_for_load(legs.d, "b")
        legs.p.close()
    check_outcome(legs.d, policy, "b", prompt(100))


@POLICY
def test_p_never_comes(start_legs: StartLegs, policy: str) -> None:
    extra = {"push_registration_timeout": 1.0}
    legs = start_legs(
        d={"kv": {"kv_load_failure_policy": policy, "kv_connector_extra_config": extra}}
    )
    legs.ask_d("b", prompt(100), legs.ticket())
    check_outcome(legs.d, policy, "b", prompt(100), legs.p)


@POLICY
@FIRST
@pytest.mark.parametrize(
    "other",
    [{"cache_salt": "tenant 2", "seed": 2}, {"tokens": prompt(60) + prompt(40, start=200)}],
    ids=["salt", "tokens"],
)
def test_kv_of_another_prompt_is_not_used(
    start_legs: StartLegs, policy: str, first: str, other: dict[str, Any]
) -> None:
    """A router's mistake: the two legs do not belong together."""
    legs = start_legs(d={"kv": {"kv_load_failure_policy": policy}})
    ticket, theirs = legs.ticket(), {"tokens": prompt(100), **other}
    if first == "p":
        legs.ask_p("a", ticket=ticket, **theirs)
        legs.computed("a")
    legs.ask_d("b", prompt(100), ticket)
    if first == "d":
        legs.registered()
        legs.ask_p("a", ticket=ticket, **theirs)
    check_outcome(legs.d, policy, "b", prompt(100), legs.p)


@POLICY
@pytest.mark.parametrize("ticket", ["forged", 7, ["a", "list"], "", None])
def test_forged_push_tickets(start_engine: StartEngine, policy: str, ticket: Any) -> None:
    d = start_engine("d", kv={**PUSH, "kv_load_failure_policy": policy})
    params = {
        "do_remote_prefill": True,
        "push_ticket": ticket,
        "remote_host": "203.0.113.1",
        "remote_port": 1,
        "remote_engine_id": "x",
    }
    for name in ("gone", "gone later"):
        d.add(name, prompt(100), params)
    d.abort("gone")
    d.step()
    d.abort("gone later")
    settle(d)
    d.add("b", prompt(100), params)
    check_outcome(d, policy, "b", prompt(100))


@pytest.mark.parametrize("ticket", ["forged", 7, ["a", "list"], "", None])
def test_a_prefill_with_a_forged_push_ticket_is_an_ordinary_one(
    start_engine: StartEngine, ticket: Any
) -> None:
    p, d = start_engine("p", kv=PUSH), start_engine("d", kv=PUSH)
    p.add("a", prompt(100), {"do_remote_decode": True, "push_ticket": ticket}, max_tokens=1)
    finish(p, "a")
    d.add("b", prompt(100), p.answers["a"].params)
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    settle(p, d)


@pytest.mark.parametrize(("of_p", "of_d"), [({}, PUSH), (PUSH, {})])
def test_one_that_pushes_and_one_that_pulls_meet_by_the_prefill_sides_ticket(
    start_engine: StartEngine, of_p: dict[str, Any], of_d: dict[str, Any]
) -> None:
    p, d = start_engine("p", kv=of_p), start_engine("d", kv=of_d)
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    settle(p, d)


def test_more_requests_than_blocks(start_legs: StartLegs) -> None:
    """D preempts by itself and cannot load all requests at once; P cannot prefill more until D has
    read the blocks that P holds.
    """
    legs = start_legs(p={"num_gpu_blocks_override": 24}, d={"num_gpu_blocks_override": 18})
    prompts = {f"r{number}": prompt(100 + number, start=10 + number) for number in range(12)}
    for number, (name, tokens) in enumerate(prompts.items()):
        ticket = legs.ticket()
        asks = [
            lambda t=ticket, n=name, k=tokens: legs.ask_p(n, k, t),
            lambda t=ticket, n=name, k=tokens: legs.ask_d(n, k, t, max_tokens=60),
        ]
        for ask in asks if number % 2 else reversed(asks):
            ask()
    run_until(lambda: all(answer.finish for answer in legs.d.answers.values()), legs.p, legs.d)
    assert {name: answer.tokens for name, answer in legs.d.answers.items()} == {
        name: greedy(tokens, 60) for name, tokens in prompts.items()
    }
    settle(legs.p, legs.d)
