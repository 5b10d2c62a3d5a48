"""Tests turns of conversations in vLLM's own scheduler: what D retains, what P fetches, and what
happens if D needs the blocks or P cannot fetch them. Every slot that a forward would read is
checked.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.adapters import write_adapter
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import BLOCK, Engine, next_token, run_until
from tests.vllm.inside.legs import PUSH, push_ticket
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

REUSE = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}
ANSWER = 20


def settings(policy: str = "fail", **extra: Any) -> dict[str, Any]:
    return {
        "kv": {"kv_load_failure_policy": policy, "kv_connector_extra_config": {**REUSE, **extra}}
    }


def start_pair(
    start_engine: StartEngine, d: dict[str, Any] | None = None, **more: Any
) -> tuple[Engine, Engine]:
    """Start a P without a prefix cache, and a D."""
    return start_engine("p", enable_prefix_caching=False, **settings(), **more), start_engine(
        "d", **(d or settings()), **more
    )


def prompt(length: int, start: int = 10) -> list[int]:
    return [start + (index * 7) % 300 for index in range(length)]


def greedy(tokens: Sequence[int], count: int, seed: int = 0) -> list[int]:
    said = list(tokens)
    for _ in range(count):
        said.append(next_token(said, seed))
    return said[len(tokens) :]


def finish(engine: Engine, name: str, *others: Engine) -> list[int]:
    run_until(lambda: engine.answers[name].finish is not None, engine, *others)
    return engine.answers[name].tokens


def told(d: Engine, name: str) -> dict[str, Any]:
    params = d.answers[name].params
    assert params is not None
    return params


def take_turn(
    p: Engine,
    d: Engine,
    name: str,
    tokens: Sequence[int],
    kept: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Send both legs as a router does, check the answer, and return D's parameters for the next
    turn.
    """
    p.add(
        name,
        tokens,
        {**(kept or {}), "do_remote_decode": True, "do_remote_prefill": False},
        max_tokens=1,
        **more,
    )
    finish(p, name, d)
    d.add(name, tokens, told(p, name), max_tokens=ANSWER, **more)
    assert finish(d, name, p) == greedy(tokens, ANSWER, more.get("seed", 0))
    return told(d, name)


def goes_on(tokens: Sequence[int], seed: int = 0) -> list[int]:
    """Return the prompt of the next turn."""
    return [*tokens, *greedy(tokens, ANSWER, seed), *prompt(15, start=40 + len(tokens))]


def retained_turns(engine: Engine) -> int:
    # Only tests read this private state.
    return len(engine.scheduler.connector.scheduler_side._retained)  # noqa: SLF001


def let_all_go(*engines: Engine) -> None:
    """Evict all retained turns, and check that the engines then hold nothing."""
    for engine in engines:
        engine.scheduler.connector.scheduler_side.reclaim_blocks(1000)
    run_until(lambda: not any(engine.remains() for engine in engines), *engines)
    assert [engine.wrong_slots for engine in engines] == [[]] * len(engines)


# -- what D retains and P fetches --


@pytest.mark.parametrize("kind", ["full attention", "windows beside full attention", "MLA"])
@pytest.mark.parametrize("is_async", [False, True])
def test_p_fetches_what_was_said_and_computes_what_is_new(
    start_engine: StartEngine, kind: str, is_async: bool
) -> None:
    p, d = start_pair(start_engine, kind=kind, is_async=is_async)
    tokens, kept, num_kept = prompt(70), None, 0
    for number in range(4):
        loaded = p.loaded_tokens
        kept = take_turn(p, d, f"turn {number}", tokens, kept)
        assert p.loaded_tokens - loaded == num_kept
        num_kept = len(tokens) + ANSWER - 1
        assert kept["remote_num_tokens"] == num_kept
        tokens = goes_on(tokens)
        # P has fetched the turn before, so D retains only the last one.
        run_until(lambda: retained_turns(d) == 1, p, d)
    let_all_go(p, d)


def test_p_fetches_while_d_is_registered_for_what_it_computes(start_engine: StartEngine) -> None:
    """Push: both legs of the second turn start together, and P's leg begins with a fetch from D."""
    p, d = (
        start_engine(name, enable_prefix_caching=name == "d", kv={**PUSH, **settings()["kv"]})
        for name in ("p", "d")
    )
    kept = take_turn(p, d, "first", prompt(70))
    tokens, source = goes_on(prompt(70)), p.prefill("source", prompt(3))
    ticket = push_ticket(source, "a handover")
    d.add("second", tokens, {"do_remote_prefill": True, "push_ticket": ticket}, max_tokens=ANSWER)
    p.add("second", tokens, {**kept, "push_ticket": ticket}, max_tokens=1)
    assert finish(d, "second", p) == greedy(tokens, ANSWER)
    assert p.loaded_tokens == 70 + ANSWER - 1
    p.scheduler.connector.scheduler_side.request_abandoned("source")
    let_all_go(p, d)


@pytest.mark.parametrize("cut", [0, 20, BLOCK, 60, 75])
def test_only_what_both_texts_have_in_common_is_fetched(
    start_engine: StartEngine, cut: int
) -> None:
    p, d = start_pair(start_engine)
    kept = take_turn(p, d, "first", prompt(70))
    tokens = [*goes_on(prompt(70))[:cut], *prompt(50, start=5)]
    take_turn(p, d, "second", tokens, kept)
    assert p.loaded_tokens == cut // BLOCK * BLOCK
    let_all_go(p, d)


def test_what_was_said_under_another_adapter_or_salt_is_not_fetched(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    p, d = start_pair(start_engine)
    adapter = str(write_adapter(tmp_path / "x"))
    kinds: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a tenant's", "seed": 1},
        {"lora_request": LoRARequest("x", 1, adapter), "seed": 2},
    ]
    for made, more in enumerate(kinds):
        for used, others in enumerate(kinds):
            kept = take_turn(p, d, f"{made} {used} first", prompt(70), **more)
            before = p.loaded_tokens
            take_turn(
                p,
                d,
                f"{made} {used} second",
                goes_on(prompt(70), others.get("seed", 0)),
                kept,
                **others,
            )
            assert (p.loaded_tokens > before) is (made == used)
    let_all_go(p, d)


def test_several_choices_aborts_and_those_who_say_so_leave_nothing(
    start_engine: StartEngine,
) -> None:
    p, d = start_pair(start_engine)
    for name, wish in {"0_both": {}, "1_both": {}, "unwanted": {"conversation": None}}.items():
        d.add(name, prompt(70), p.prefill(name, prompt(70)) | wish)
        finish(d, name, p)
        assert d.answers[name].params is None
    d.add("left", prompt(70), p.prefill("left", prompt(70)), max_tokens=100)
    run_until(lambda: len(d.answers["left"].tokens) > 2, p, d)
    d.abort("left")
    run_until(lambda: not d.remains() and not p.remains(), p, d)
    assert retained_turns(d) == 0


def test_a_p_without_the_setting_computes_and_gives_the_blocks_back(
    start_engine: StartEngine,
) -> None:
    p, d = start_engine("p", enable_prefix_caching=False), start_engine("d", **settings())
    kept = take_turn(p, d, "first", prompt(70))
    p.add("second", goes_on(prompt(70)), kept, max_tokens=1)
    finish(p, "second", d)
    assert p.loaded_tokens == 0
    run_until(lambda: not d.remains(), p, d)
    p.scheduler.connector.scheduler_side.request_abandoned("second")
    let_all_go(p, d)


# -- D needs its blocks --

FEW = {"num_gpu_blocks_override": 17, "max_model_len": 512}
"""16 of the 17 blocks are usable; one of these turns takes 3."""


def keep_turns(p: Engine, d: Engine, num: int) -> None:
    for number in range(num):
        take_turn(p, d, f"kept {number}", prompt(70, start=20 + 10 * number))
    assert retained_turns(d) == num


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("source", ["computed", "loaded", "loaded in part"])
def test_a_new_request_has_as_many_of_the_oldest_let_go_as_it_needs(
    start_engine: StartEngine, source: str, is_async: bool
) -> None:
    p = start_engine("p", enable_prefix_caching=False, is_async=is_async, **settings())
    d = start_engine("d", is_async=is_async, **settings(), **FEW)
    keep_turns(p, d, 5)
    tokens = prompt(200, start=7)
    params = (
        {}
        if source == "computed"
        else p.prefill("new", tokens if source == "loaded" else [*tokens[:100], *prompt(20)])
    )
    d.add("new", tokens, params, max_tokens=4)
    assert finish(d, "new", p) == greedy(tokens, 4)
    # The request takes 7 blocks, and 1 was free.
    run_until(lambda: retained_turns(d) == 3 + (source != "computed"), p, d)
    let_all_go(p, d)


def test_one_that_needs_the_whole_cache_is_served(start_engine: StartEngine) -> None:
    p, d = start_engine("p", **settings()), start_engine("d", **settings(), **FEW)
    keep_turns(p, d, 5)
    d.add("large", prompt(500, start=7), max_tokens=8)
    assert finish(d, "large", p) == greedy(prompt(500, start=7), 8)
    assert retained_turns(d) == 0
    let_all_go(p, d)


@pytest.mark.parametrize("is_async", [False, True])
def test_who_runs_waits_for_a_kept_turn_and_is_not_preempted(
    start_engine: StartEngine, is_async: bool
) -> None:
    """Three requests grow block by block while D also retains turns."""
    p = start_engine("p", is_async=is_async, **settings())
    d = start_engine("d", is_async=is_async, **settings(), **FEW)
    keep_turns(p, d, 4)
    names = [f"runs {number}" for number in range(3)]
    requests = [
        d.add(name, prompt(20, start=7 + number), max_tokens=120)
        for number, name in enumerate(names)
    ]
    for number, name in enumerate(names):
        assert finish(d, name, p) == greedy(prompt(20, start=7 + number), 120)
    assert [request.num_preemptions for request in requests] == [0, 0, 0]
    assert retained_turns(d) < 4
    let_all_go(p, d)


def test_without_kept_turns_they_are_preempted(start_engine: StartEngine) -> None:
    """The control: vLLM does preempt if there is no retained turn to evict."""
    d = start_engine("d", **settings(), **FEW)
    requests = [
        d.add(f"runs {number}", prompt(100, start=7 + number), max_tokens=150)
        for number in range(3)
    ]
    for number in range(3):
        assert finish(d, f"runs {number}") == greedy(prompt(100, start=7 + number), 150)
    assert sum(request.num_preemptions for request in requests) > 0
    let_all_go(d)


def test_a_kept_turn_runs_out(start_engine: StartEngine) -> None:
    p, d = start_engine("p", **settings()), start_engine("d", **settings(decoder_kv_blocks_ttl=1))
    kept = take_turn(p, d, "first", prompt(70))
    assert kept["ttl_s"] == 1
    run_until(lambda: not d.remains(), p, d)
    assert retained_turns(d) == 0
    # The ticket is no longer valid.
    take_turn(p, d, "second", goes_on(prompt(70)), kept)
    let_all_go(p, d)


def test_caches_that_are_reset_keep_no_turns(start_engine: StartEngine) -> None:
    p, d = start_pair(start_engine)
    kept = take_turn(p, d, "first", prompt(70))
    assert not d.scheduler.reset_prefix_cache(reset_connector=True)
    run_until(lambda: not d.remains(), p, d)
    assert d.scheduler.reset_prefix_cache()
    p.add("second", goes_on(prompt(70)), kept, max_tokens=1)
    finish(p, "second", d)
    assert p.loaded_tokens == 0
    p.scheduler.connector.scheduler_side.request_abandoned("second")
    let_all_go(p, d)


# -- P cannot fetch the turn --


def test_a_request_that_cannot_be_told_yet_holds_up_no_other(start_engine: StartEngine) -> None:
    """D does not answer: P asks D, serves other requests meanwhile, and finally computes the prompt
    itself.
    """
    p = start_engine(
        "p", enable_prefix_caching=False, **settings(confirm_timeout=1.0, handshake_timeout=1.0)
    )
    d = start_engine("d", **settings())
    kept = take_turn(p, d, "first", prompt(70))
    d.close()
    tokens = goes_on(prompt(70))
    p.add("second", tokens, {**kept, "do_remote_decode": True}, max_tokens=1)
    p.add("other", prompt(50), max_tokens=8)
    assert finish(p, "other") == greedy(prompt(50), 8)
    assert p.answers["second"].finish is None
    assert finish(p, "second") == greedy(tokens, 1)
    p.scheduler.connector.scheduler_side.request_abandoned("second")
    let_all_go(p)


@pytest.mark.parametrize("moment", ["asking", "loading"])
def test_one_that_leaves_while_d_is_asked_or_read_gives_the_turn_back(
    start_engine: StartEngine, moment: str
) -> None:
    p, d = start_pair(start_engine)
    kept = take_turn(p, d, "first", prompt(70))
    request = p.add("second", goes_on(prompt(70)), kept, max_tokens=1)
    if moment == "asking":
        p.step()
        assert request.status == RequestStatus.WAITING
    else:
        run_until(lambda: request.status == RequestStatus.WAITING_FOR_REMOTE_KVS, p, d)
    p.abort("second")
    run_until(lambda: not p.remains() and not d.remains(), p, d)
    let_all_go(p, d)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_fetch_that_fails_is_computed_whatever_the_policy(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """The transport reports failure after it has written: P must not use the blocks' contents."""
    d = start_engine("d", **settings())
    monkeypatch.setenv("KVFERRY_FAULTS", "corrupt:every=1;fail:every=1")
    p = start_engine("p", enable_prefix_caching=False, **settings(policy))
    kept = take_turn(p, d, "first", prompt(70))
    tokens = goes_on(prompt(70))
    p.add("second", tokens, kept, max_tokens=1)
    assert finish(p, "second", d) == greedy(tokens, 1)
    assert p.answers["second"].finish == "length"
    # For a request that P decodes, a failed load still follows the failure policy.
    p.add("pulled", prompt(90), d.prefill("pulled", prompt(90)))
    finish(p, "pulled", d)
    assert p.answers["pulled"].finish == ("error" if policy == "fail" else "length")
    for engine, name in ((p, "second"), (d, "pulled")):
        # vLLM has no call that reports an abandoned request.
        engine.scheduler.connector.scheduler_side.request_abandoned(name)
    let_all_go(p, d)
