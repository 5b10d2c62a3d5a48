"""Tests how the scheduler handles requests; the connector has nothing to load in these tests."""

import pytest
from tests.engine.scripted import (
    GARBAGE,
    PROMPT,
    Rig,
    assert_quiescent,
    make_limits,
    make_request,
    predict,
)

from kvferry.engine.messages import AddRequest, SamplingParams, StepResult
from kvferry.errors import LocalProtocolError


def test_the_rig_notices_one_wrong_cell() -> None:
    rig = Rig(make_limits(), has_connector=False)
    rig.add(make_request("a", PROMPT))
    plan = rig.step()
    rig.cells[plan.slices[0].block_ids[0][1], 2] = GARBAGE
    with pytest.raises(AssertionError, match="not its own"):
        rig.step()


def test_a_request_runs_to_its_length_and_leaves_nothing_behind() -> None:
    rig = Rig(make_limits(), has_connector=False)
    request = make_request("a", PROMPT)
    rig.add(request)
    rig.run()
    assert rig.tokens_of("a") == predict(request)
    assert rig.last["a"].finish_reason == "length"
    assert_quiescent(rig)


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_and_sampled_once() -> None:
    rig = Rig(make_limits(max_num_batched_tokens=4), has_connector=False)
    rig.add(make_request("a", PROMPT, max_tokens=1))
    sizes = [[len(part.token_ids) for part in rig.step().slices] for _ in range(3)]
    assert sizes == [[4], [4], [2]]
    assert rig.is_done("a")


def test_without_chunking_a_long_prompt_gets_a_step_of_its_own() -> None:
    rig = Rig(
        make_limits(max_num_batched_tokens=6, enable_chunked_prefill=False), has_connector=False
    )
    for name in "ab":
        rig.add(make_request(name, [ord(name) % 50, *PROMPT], max_tokens=2))
    assert [part.request_id for part in rig.step().slices] == ["a"]
    assert [part.request_id for part in rig.step().slices] == ["a"]
    rig.run()
    assert rig.is_done("b")


def test_a_step_never_exceeds_its_budget_nor_the_number_of_sequences() -> None:
    rig = Rig(make_limits(max_num_seqs=2, max_num_batched_tokens=7), has_connector=False)
    for number in range(5):
        rig.add(make_request(f"r{number}", [number, *PROMPT]))
    while rig.scheduler.wants_step:
        plan = rig.step()
        assert sum(len(part.token_ids) for part in plan.slices) <= 7
        assert len(plan.slices) <= 2
    assert all(rig.tokens_of(name) == predict(request) for name, request in rig.requests.items())


def test_requests_with_a_common_prefix_share_its_full_blocks() -> None:
    rig = Rig(make_limits(), has_connector=False)
    rig.add(make_request("a", PROMPT, max_tokens=1))
    rig.run()
    rig.add(make_request("b", [*PROMPT[:9], 40], max_tokens=1))
    (part,) = rig.step().slices
    assert part.start == 8
    assert rig.last["b"].num_cached_tokens == 8
    status = rig.scheduler.status()
    assert status.prompt_tokens_by_source == {
        "local_compute": 12,
        "local_cache_hit": 8,
        "external_kv_transfer": 0,
    }


def test_a_prompt_that_is_cached_whole_still_computes_its_last_block_afresh() -> None:
    rig = Rig(make_limits(), has_connector=False)
    for name in "ab":
        rig.add(make_request(name, PROMPT[:8], max_tokens=1))
        rig.run()
    assert rig.last["b"].num_cached_tokens == 4
    assert rig.tokens_of("a") == rig.tokens_of("b")


def test_other_salts_share_nothing() -> None:
    rig = Rig(make_limits(), has_connector=False)
    for name, salt in (("a", "x"), ("b", "y")):
        rig.add(make_request(name, PROMPT, salt=salt))
        rig.run()
    assert rig.last["b"].num_cached_tokens == 0
    assert rig.tokens_of("a") != rig.tokens_of("b")


def test_prefix_caching_can_be_switched_off() -> None:
    rig = Rig(make_limits(enable_prefix_caching=False), has_connector=False)
    for name in "ab":
        rig.add(make_request(name, PROMPT))
        rig.run()
    assert rig.last["b"].num_cached_tokens == 0


def test_under_pressure_the_youngest_yields_and_all_outputs_are_right() -> None:
    rig = Rig(make_limits(num_blocks=6), has_connector=False)
    for number in range(3):
        rig.add(make_request(f"r{number}", [number, *PROMPT[:6]], max_tokens=9))
    rig.run()
    assert rig.scheduler.counters.preemptions > 0
    assert all(rig.tokens_of(name) == predict(request) for name, request in rig.requests.items())
    assert_quiescent(rig)


def test_a_prompt_that_can_never_fit_is_refused_at_once() -> None:
    rig = Rig(make_limits(num_blocks=3, max_model_len=64))
    rig.add(make_request("big", range(13)))
    rig.add(make_request("fits", range(12)))
    rig.run()
    assert (rig.last["big"].finish_reason, rig.last["big"].error_status) == ("error", 400)
    assert "13 tokens" in (rig.last["big"].error or "")
    assert rig.tokens_of("fits") == predict(rig.requests["fits"])[:1]
    assert rig.last["fits"].finish_reason == "length"
    assert_quiescent(rig)


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (make_request("a", []), "empty"),
        (make_request("a", [1, 50]), "vocabulary"),
        (make_request("a", [-1]), "vocabulary"),
        (make_request("a", [1], max_tokens=0), "max_tokens"),
        (make_request("a", [1] * 64), "64 tokens"),
    ],
)
def test_senseless_requests_are_refused_with_a_reason(request_: AddRequest, word: str) -> None:
    rig = Rig(make_limits(num_blocks=100))
    rig.add(request_)
    assert rig.last["a"].error_status == 400
    assert word in (rig.last["a"].error or "")
    assert_quiescent(rig)


def test_an_id_that_is_in_use_is_refused_and_the_first_request_goes_on() -> None:
    rig = Rig(make_limits())
    rig.add(make_request("a", PROMPT))
    refusal = rig.scheduler.add(make_request("a", [1]))
    assert refusal is not None
    assert refusal.error_status == 400
    rig.run()
    assert rig.tokens_of("a") == predict(rig.requests["a"])


def test_generation_ends_at_the_models_limit() -> None:
    rig = Rig(make_limits(max_model_len=12), has_connector=False)
    rig.add(make_request("a", PROMPT, max_tokens=50))
    rig.run()
    assert len(rig.tokens_of("a")) == 2
    assert rig.last["a"].finish_reason == "length"


def stopping_request(first: int, **sampling: object) -> AddRequest:
    return AddRequest(
        "a",
        PROMPT,
        SamplingParams(max_tokens=6, **sampling),  # type: ignore[arg-type]
    )


def test_end_of_sequence_and_stop_tokens_end_a_request() -> None:
    tokens = predict(make_request("a", PROMPT, max_tokens=6))
    third = tokens[2]
    cut = tokens.index(third) + 1
    for limits, request, stop_reason in [
        (make_limits(eos_token_ids=(third,)), stopping_request(third), None),
        (make_limits(), stopping_request(third, stop_token_ids=(third,)), third),
    ]:
        rig = Rig(limits, has_connector=False)
        rig.add(request)
        rig.run()
        assert rig.tokens_of("a") == tokens[:cut]
        assert (rig.last["a"].finish_reason, rig.last["a"].stop_reason) == ("stop", stop_reason)


def test_end_of_sequence_is_ignored_when_asked() -> None:
    tokens = predict(make_request("a", PROMPT, max_tokens=6))
    rig = Rig(make_limits(eos_token_ids=(tokens[2],)), has_connector=False)
    rig.add(stopping_request(tokens[2], ignore_eos=True))
    rig.run()
    assert rig.tokens_of("a") == tokens


def test_stop_tokens_are_banned_while_more_tokens_are_due() -> None:
    rig = Rig(make_limits(eos_token_ids=(7,)), has_connector=False)
    rig.add(stopping_request(7, min_tokens=2, stop_token_ids=(9,)))
    banned = [rig.step().slices[0].banned_token_ids for _ in range(3)]
    assert banned == [(9, 7), (9, 7), ()]


def test_each_token_is_drawn_with_the_requests_seed_and_its_own_index() -> None:
    rig = Rig(make_limits(), has_connector=False)
    rig.add(AddRequest("a", PROMPT, SamplingParams(max_tokens=3, seed=5)))
    rig.add(AddRequest("b", PROMPT, SamplingParams(max_tokens=3, seed=5), draw_seed=6))
    rig.add(make_request("c", PROMPT))
    rig.add(make_request("d", PROMPT))
    first, second = rig.step(), rig.step()
    seeds = {part.request_id: part.draw_seed for part in (*first.slices, *second.slices)}
    assert (seeds["a"], seeds["b"]) == (5, 6)
    assert seeds["c"] != seeds["d"]
    assert [part.draw_index for part in second.slices if part.request_id == "a"] == [1]


def test_a_lost_token_is_a_bug_that_is_not_hidden() -> None:
    rig = Rig(make_limits(), has_connector=False)
    rig.add(make_request("a", PROMPT))
    with pytest.raises(LocalProtocolError):
        rig.scheduler.update(rig.scheduler.schedule(), StepResult())


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_abort_at_any_time_frees_everything(steps: int) -> None:
    rig = Rig(make_limits(max_num_batched_tokens=8))
    rig.add(make_request("a", PROMPT))
    for _ in range(steps):
        rig.step()
    rig.abort("a")
    rig.abort("a")
    rig.abort("stranger")
    assert "a" in rig.step().finished_request_ids
    assert not rig.is_done("a")
    assert rig.scheduler.status().requests_finished_by_reason["abort"] == 1
    assert_quiescent(rig)
