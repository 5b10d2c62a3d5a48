"""Tests how the scheduler handles loads, delayed frees, and all other reports of a connector."""

import pytest
from tests.engine.scripted import (
    GARBAGE,
    PROMPT,
    Rig,
    Script,
    assert_quiescent,
    make_limits,
    make_request,
    predict,
)

from kvferry.connectors.contract import RequestStatus
from kvferry.engine.messages import AddRequest, SamplingParams, StepResult
from kvferry.types import FailurePolicy

# -- loads --


def test_a_load_takes_no_tokens_of_a_step_and_blocks_nobody() -> None:
    rig = Rig(make_limits())
    rig.add(make_request("far", PROMPT), Script(available_tokens=10))
    rig.add(make_request("near", [30, *PROMPT]))
    assert [part.request_id for part in rig.step().slices] == ["near"]
    rig.run()
    assert rig.is_done("near")
    assert rig.scheduler.status().num_waiting_for_remote_kvs == 1
    rig.end_load("far")
    rig.run()
    assert rig.tokens_of("far") == predict(rig.requests["far"])
    assert rig.last["far"].num_cached_tokens == 9, "the last token is computed here"
    assert rig.scheduler.status().prompt_tokens_by_source["external_kv_transfer"] == 10
    assert_quiescent(rig)


def test_after_a_load_only_the_last_token_is_computed_and_the_connector_hears_again() -> None:
    rig = Rig(make_limits())
    rig.add(make_request("a", PROMPT), Script(available_tokens=10))
    rig.step()
    rig.end_load("a")
    rig.step()
    (part,) = rig.step().slices
    assert (part.start, len(part.token_ids)) == (9, 1)
    alloc = [call[2] for call in rig.connector.calls if call[0] == "update_state_after_alloc"]
    assert alloc == [10, 0]
    assert rig.connector.times("get_num_new_matched_tokens", "a") == 1


def test_loaded_blocks_are_shared_only_after_the_load_has_ended_well() -> None:
    rig = Rig(make_limits())
    rig.add(make_request("a", PROMPT), Script(available_tokens=10))
    rig.step()
    rig.add(make_request("during", PROMPT))
    (part,) = rig.step().slices
    assert part.start == 0
    rig.run()
    rig.end_load("a")
    rig.run()
    rig.add(make_request("after", PROMPT))
    (part,) = rig.step().slices
    assert part.start == 8
    rig.run()
    assert_quiescent(rig)


def test_only_what_is_lacking_is_loaded() -> None:
    rig = Rig(make_limits())
    rig.add(make_request("a", PROMPT, max_tokens=1))
    rig.run()
    rig.add(make_request("b", [*PROMPT[:8], 20, 21]), Script(available_tokens=10))
    rig.step()
    assert ("update_state_after_alloc", "b", 2) in rig.connector.calls
    rig.end_load("b")
    rig.run()
    assert rig.tokens_of("b") == predict(rig.requests["b"])
    assert_quiescent(rig)


def test_a_prompt_that_is_cached_whole_loads_nothing() -> None:
    rig = Rig(make_limits())
    rig.add(make_request("a", PROMPT[:8], max_tokens=1))
    rig.run()
    rig.add(make_request("b", PROMPT[:8], max_tokens=1), Script(available_tokens=8))
    rig.run()
    assert ("get_num_new_matched_tokens", "b", 8) in rig.connector.calls
    assert ("update_state_after_alloc", "b", 0) in rig.connector.calls
    assert rig.tokens_of("b") == predict(rig.requests["b"])


def test_the_rest_of_a_prompt_that_is_loaded_in_part_is_computed() -> None:
    rig = Rig(make_limits(max_num_batched_tokens=4))
    rig.add(make_request("a", PROMPT), Script(available_tokens=5))
    rig.step()
    rig.end_load("a")
    rig.step()
    assert [(part.start, len(part.token_ids)) for part in rig.step().slices] == [(5, 4)]
    rig.run()
    assert rig.tokens_of("a") == predict(rig.requests["a"])


def test_a_failed_load_fails_the_request_with_the_reason() -> None:
    rig = Rig(make_limits())
    rig.add(make_request("a", PROMPT), Script(available_tokens=10))
    rig.step()
    rig.end_load("a", failure="the lease ran out")
    rig.run()
    assert (rig.last["a"].finish_reason, rig.last["a"].error_status) == ("error", 502)
    assert "the lease ran out" in (rig.last["a"].error or "")
    assert rig.tokens_of("a") == []
    assert_quiescent(rig)


def test_a_failed_load_is_computed_here_when_the_policy_says_so() -> None:
    rig = Rig(make_limits(load_failure_policy=FailurePolicy.RECOMPUTE))
    rig.add(make_request("a", PROMPT), Script(available_tokens=10))
    rig.step()
    rig.end_load("a", failure="the peer died")
    rig.run()
    assert rig.tokens_of("a") == predict(rig.requests["a"])
    assert rig.connector.times("get_num_new_matched_tokens", "a") == 1, "asked again"
    assert rig.last["a"].num_cached_tokens == 0
    assert any("the peer died" in note for note in rig.scheduler.take_warnings())
    assert_quiescent(rig)


@pytest.mark.parametrize("policy", FailurePolicy)
def test_a_load_that_failed_half_way_never_gets_into_the_prefix_cache(
    policy: FailurePolicy,
) -> None:
    rig = Rig(make_limits(load_failure_policy=policy, num_blocks=4))
    rig.add(make_request("a", PROMPT), Script(available_tokens=10))
    rig.step()
    assert GARBAGE in rig.cells.values()
    rig.abort("a") if policy is FailurePolicy.RECOMPUTE else None
    rig.end_load("a", failure="half way")
    rig.run()
    rig.add(make_request("b", PROMPT))
    (part,) = rig.step().slices
    assert part.start == 0
    rig.run()
    assert rig.tokens_of("b") == predict(rig.requests["b"])


def test_a_failure_that_is_named_before_the_end_of_the_load_counts_at_its_end() -> None:
    rig = Rig(make_limits())
    rig.add(make_request("a", PROMPT), Script(available_tokens=10))
    rig.step()
    rig.news.failed_recving.add("a")
    rig.step()
    assert not rig.is_done("a")
    rig.end_load("a")
    rig.run()
    assert rig.last["a"].finish_reason == "error"


def test_an_aborted_load_keeps_its_blocks_until_it_has_ended() -> None:
    rig = Rig(make_limits(num_blocks=4))
    rig.add(make_request("a", PROMPT), Script(available_tokens=10))
    rig.step()
    rig.abort("a")
    rig.add(make_request("b", PROMPT, max_tokens=2))
    rig.run()
    status = rig.scheduler.status()
    assert (
        status.num_used_blocks,
        status.num_delayed_frees,
        status.num_waiting_for_remote_kvs,
        status.num_waiting,
    ) == (3, 1, 0, 1)
    rig.end_load("a")
    rig.run()
    assert rig.tokens_of("b") == predict(rig.requests["b"])
    assert rig.tokens_of("a") == []
    assert_quiescent(rig)


def test_a_connector_that_does_not_know_yet_is_asked_again_and_others_go_first() -> None:
    rig = Rig(make_limits())
    rig.add(make_request("unsure", PROMPT), Script(available_tokens=None))
    rig.add(make_request("sure", [20, 21]))
    assert [part.request_id for part in rig.step().slices] == ["sure"]
    rig.run()
    assert rig.scheduler.is_lookup_pending
    assert not rig.scheduler.wants_step, "that would spin"
    rig.connector.scripts["unsure"] = Script(available_tokens=10)
    rig.step()
    rig.end_load("unsure")
    rig.run()
    assert not rig.scheduler.is_lookup_pending
    assert rig.tokens_of("unsure") == predict(rig.requests["unsure"])
    assert_quiescent(rig)


def test_a_synchronous_load_is_used_in_the_same_step() -> None:
    rig = Rig(make_limits())
    rig.add(make_request("a", PROMPT), Script(available_tokens=8, is_async=False))
    rig.scheduler.schedule()
    assert ("update_state_after_alloc", "a", 8) in rig.connector.calls


@pytest.mark.parametrize(
    ("policy", "finish_reason"),
    [(FailurePolicy.FAIL, "error"), (FailurePolicy.RECOMPUTE, "length")],
)
def test_blocks_that_a_synchronous_load_did_not_fill_count_for_nothing(
    policy: FailurePolicy, finish_reason: str
) -> None:
    rig = Rig(make_limits(load_failure_policy=policy))
    rig.add(make_request("a", PROMPT), Script(available_tokens=8, is_async=False))
    plan = rig.scheduler.schedule()
    rig.connector.loads.clear()
    rig.news.invalid_block_ids = {plan.slices[0].block_ids[0][1]}
    (output,) = rig.scheduler.update(
        plan,
        StepResult({"a": None}, rig.news),  # type: ignore[dict-item]
    ) or [None]  # type: ignore[list-item]
    rig.news.invalid_block_ids = set()
    assert output is None or output.finish_reason == "error"
    rig.scheduler.check()
    rig.run()
    assert rig.tokens_of("a") == (
        predict(rig.requests["a"]) if policy is FailurePolicy.RECOMPUTE else []
    )
    assert rig.scheduler.status().requests_finished_by_reason[finish_reason] == 1
    assert_quiescent(rig)


def test_loads_that_fill_the_whole_cache_deadlock_nobody() -> None:
    rig = Rig(make_limits(num_blocks=6))
    for number in range(4):
        rig.add(make_request(f"r{number}", [number, *range(20)]), Script(available_tokens=9))
    for _ in range(20):
        rig.run()
        for request_id in list(rig.connector.loads):
            rig.end_load(request_id)
    assert all(rig.tokens_of(name) == predict(request) for name, request in rig.requests.items())
    assert_quiescent(rig)


def test_a_running_request_waits_for_a_load_rather_than_lose_its_work() -> None:
    rig = Rig(make_limits(num_blocks=4))
    rig.add(make_request("run", PROMPT[:4], max_tokens=12))
    rig.step()
    rig.add(make_request("load", [30, 31, 32, 33, 34]), Script(available_tokens=5))
    rig.run()
    assert rig.scheduler.status().num_waiting_for_remote_kvs == 1
    assert not rig.is_done("run")
    assert rig.scheduler.counters.preemptions == 0
    rig.end_load("load")
    rig.run()
    assert rig.tokens_of("run") == predict(rig.requests["run"])
    rig.end_load("load")  # the younger request gave up its blocks before it ran, and loads again
    rig.run()
    assert rig.tokens_of("load") == predict(rig.requests["load"])
    assert_quiescent(rig)


# -- delayed frees --


def test_a_delayed_free_holds_its_blocks_until_they_are_sent() -> None:
    rig = Rig(make_limits())
    request = AddRequest(
        "p", PROMPT, SamplingParams(max_tokens=1), kv_transfer_params={"do_remote_decode": True}
    )
    rig.add(request, Script(is_delayed=True, params={"ticket": "t"}))
    rig.run()
    assert rig.last["p"].kv_transfer_params == {"ticket": "t"}
    assert ("request_finished", "p", 3) in rig.connector.calls
    status = rig.scheduler.status()
    assert (status.num_used_blocks, status.num_delayed_frees) == (3, 1)
    rig.end_sending("p")
    rig.step()
    assert_quiescent(rig)


def test_aborting_a_finished_request_tells_the_connector_that_nobody_will_come() -> None:
    rig = Rig(make_limits())
    rig.add(make_request("p", PROMPT, max_tokens=1), Script(is_delayed=True))
    rig.add(make_request("q", PROMPT, max_tokens=1))
    rig.run()
    for request in ("p", "q", "stranger"):
        rig.scheduler.abort(request)
    assert [call for call in rig.connector.calls if call[0] == "request_abandoned"] == [
        ("request_abandoned", "p", 0)
    ]
    assert rig.scheduler.status().num_delayed_frees == 1
    rig.end_sending("p")
    rig.step()
    assert_quiescent(rig)


def test_blocks_that_a_peer_reads_can_be_shared_meanwhile() -> None:
    rig = Rig(make_limits())
    rig.add(make_request("p", PROMPT, max_tokens=1), Script(is_delayed=True))
    rig.run()
    rig.add(make_request("q", PROMPT, max_tokens=1))
    (part,) = rig.step().slices
    assert part.start == 8
    rig.end_sending("p")
    rig.run()
    assert_quiescent(rig)


def test_requests_wait_for_blocks_that_a_peer_reads() -> None:
    rig = Rig(make_limits(num_blocks=4))
    rig.add(make_request("p", PROMPT, max_tokens=1), Script(is_delayed=True))
    rig.add(make_request("q", range(20, 30), max_tokens=1))
    rig.run()
    assert rig.is_done("p")
    assert not rig.is_done("q")
    assert not rig.scheduler.wants_step
    rig.end_sending("p")
    rig.run()
    assert rig.tokens_of("q") == predict(rig.requests["q"])
    assert_quiescent(rig)


def test_a_load_that_is_given_up_fails_at_once_and_keeps_its_blocks_until_it_has_ended() -> None:
    rig = Rig(make_limits())
    rig.add(make_request("a", PROMPT), Script(available_tokens=10))
    rig.step()
    rig.news.given_up_recving |= {"a": "too slow", "stranger": "?"}
    rig.step()
    assert rig.last["a"].finish_reason == "error"
    assert "too slow" in (rig.last["a"].error or "")
    assert rig.scheduler.status().num_used_blocks == 3
    rig.news.given_up_recving |= {"a": "again"}
    rig.step()
    rig.end_load("a")
    rig.run()
    assert_quiescent(rig)


def test_an_aborted_load_with_a_delayed_free_needs_both_to_end() -> None:
    rig = Rig(make_limits())
    rig.add(make_request("a", PROMPT), Script(available_tokens=10, is_delayed=True))
    rig.step()
    rig.abort("a")
    rig.lent["a"] = []
    rig.end_sending("a")
    rig.run()
    assert rig.scheduler.status().num_used_blocks == 3
    rig.end_load("a")
    rig.run()
    assert_quiescent(rig)


def test_unknown_and_repeated_ids_are_counted_and_change_nothing() -> None:
    rig = Rig(make_limits())
    rig.add(make_request("a", PROMPT))
    rig.add(make_request("b", PROMPT[:5], max_tokens=1), Script(is_delayed=True))
    rig.step()
    rig.news.finished_recving |= {"a", "stranger"}
    rig.news.failed_recving |= {"a", "nobody"}
    rig.news.finished_sending |= {"a", "stranger"}
    rig.step()
    assert rig.scheduler.counters.unknown_transfers == 4
    assert len(rig.scheduler.take_warnings()) == 4
    for _ in range(2):
        rig.news.finished_sending.add("b")
        rig.step()
    assert rig.scheduler.counters.unknown_transfers == 5
    rig.run()
    assert rig.tokens_of("a") == predict(rig.requests["a"])
    assert_quiescent(rig)


def test_a_load_hands_over_the_status_the_contract_names() -> None:
    rig = Rig(make_limits())
    rig.add(make_request("a", PROMPT), Script(available_tokens=10))
    rig.step()
    request = rig.connector.loads["a"].request
    statuses = [request.status]
    rig.end_load("a")
    for _ in range(2):
        rig.step()
        statuses.append(request.status)
    assert statuses == [
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        RequestStatus.WAITING,
        RequestStatus.RUNNING,
    ]
    assert list(request.all_token_ids) == [*PROMPT, *rig.tokens_of("a")]
