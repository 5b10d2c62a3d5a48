"""Tests push behind a router that signs nothing, such as vLLM's own: the legs meet by their request
ids, and only between engines that list each other in `peers`.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.connectors.pair import Blocks, EngineRequest, step_until
from tests.connectors.test_push import D_ID, P_ID, TOKENS, Legs, closed, legs_between, push_side

from kvferry.transports.memory import MemoryNetwork

ALL = [f"memory:{port}" for port in range(50_000, 50_032)]


@pytest.fixture
def legs() -> Iterator[Legs]:
    network = MemoryNetwork()
    p, d = (push_side(name, network, kv_lease_duration=600, peers=ALL) for name in ("p", "d"))
    yield legs_between(p, d)
    closed(p, d)


def named(legs: Legs, **changes: Any) -> dict[str, Any]:
    """Return what vLLM's push proxy sends to D: P's address, and a request id unknown to P."""
    source = {
        "remote_engine_id": "p",
        "remote_host": "memory",
        "remote_port": legs.port,
        "tp_size": 1,
        "pp_size": 1,
    }
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": "x",
        **source,
        **changes,
    }


def arrive(
    legs: Legs, name: str = D_ID, tokens: list[int] = TOKENS, **changes: Any
) -> EngineRequest:
    request = EngineRequest(name, tokens, named(legs, **changes))
    legs.d.scheduler.on_new_request(request)
    return request


def begin(
    legs: Legs, name: str = D_ID, tokens: list[int] = TOKENS, **changes: Any
) -> EngineRequest:
    request = arrive(legs, name, tokens, **changes)
    assert legs.d.scheduler.get_num_new_matched_tokens(request, 0) == (len(tokens), True)
    legs.d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), len(tokens))
    return request


@pytest.mark.parametrize("first", ["p", "d"])
@pytest.mark.parametrize(
    ("of_p", "of_d"), [(P_ID, D_ID), ("cmpl-x-0", "cmpl-x-0"), ("cmpl-deadbeef", "cmpl-deadbeef")]
)
def test_legs_meet_whichever_is_first_by_equal_ids_or_by_ids_without_their_tails(
    legs: Legs, first: str, of_p: str, of_d: str
) -> None:
    if first == "p":
        # vllm-router starts both legs at once behind a P that says so.
        assert legs.compute(None, name=of_p)["transfer_mode"] == "push"
        legs.until("num_leases", 1)
        begin(legs, of_d)
    else:
        begin(legs, of_d)
        legs.registered()
        legs.compute(None, name=of_p)
    step_until(
        lambda: of_d in legs.d.seen.finished_recving and of_p in legs.p.seen.finished_sending,
        legs.p,
        legs.d,
    )
    assert legs.d.seen.failed_recving == set()
    assert legs.has_arrived([1, 2, 3], [5, 6, 7])


def test_an_equal_id_comes_before_one_with_another_tail(legs: Legs) -> None:
    """These request ids happen to end in eight hexadecimal digits; the engines append no suffix."""
    legs.compute(None, name="cmpl-00000001")
    legs.p.fill([8, 9, 10], seed=2)
    legs.p.prefill(EngineRequest("cmpl-00000002", TOKENS), [8, 9, 10])
    legs.until("num_leases", 2)
    begin(legs, "cmpl-00000002")
    step_until(lambda: "cmpl-00000002" in legs.d.seen.finished_recving, legs.p, legs.d)
    assert legs.has_arrived([1, 2, 3], [8, 9, 10])


def test_two_prefills_of_one_id_are_an_error_and_not_a_guess(legs: Legs) -> None:
    for tail in ("aaaaaaaa", "bbbbbbbb"):
        legs.compute(None, name=f"cmpl-x-0-{tail}")
    legs.until("num_leases", 2)
    begin(legs)
    assert "2 prefills match this request" in legs.failure()


def test_two_requests_of_one_id_are_refused_when_their_prefill_comes(legs: Legs) -> None:
    begin(legs, "cmpl-x-0-cccccccc")
    begin(legs, D_ID)
    legs.until("num_registrations", 2)
    legs.compute(None)
    step_until(lambda: {"cmpl-x-0-cccccccc", D_ID} <= legs.d.seen.failed_recving, legs.p, legs.d)
    assert "2 requests of decode engines match prefill" in legs.d.seen.failure_reasons[D_ID]


@pytest.mark.parametrize(
    "of", [("cmpl-x-0-11111111", "cmpl-x-0-22222222"), ("cmpl-x-0", "cmpl-x-0")]
)
def test_a_client_that_tries_again_with_its_old_id_is_served(
    legs: Legs, of: tuple[str, str]
) -> None:
    """D's first attempt needed no remote KV."""
    first = arrive(legs, of[1])
    legs.registered()
    legs.d.scheduler.update_state_after_alloc(first, Blocks(([],)), 0)
    legs.until("num_registrations", 0)
    begin(legs, of[1])
    legs.compute(None, name=of[0])
    step_until(lambda: of[1] in legs.d.seen.finished_recving, legs.p, legs.d)
    assert legs.d.seen.failed_recving == set()


def test_the_kv_of_another_prompt_with_the_same_id_is_not_used(legs: Legs) -> None:
    legs.compute(None, tokens=[7] * 10)
    legs.until("num_leases", 1)
    begin(legs)
    assert "tokens" in legs.failure()
    assert legs.has_arrived([], [])


def test_a_second_request_needs_no_second_handshake(legs: Legs) -> None:
    for number in range(3):
        begin(legs, f"cmpl-{number}-0-dddddddd")
        legs.compute(None, name=f"cmpl-{number}-0-aaaaaaaa")
        step_until(
            lambda name=f"cmpl-{number}-0-dddddddd": (  # type: ignore[misc]
                name in legs.d.seen.finished_recving
            ),
            legs.p,
            legs.d,
        )
    assert legs.d.seen.failed_recving == set()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"remote_port": 49_999}, "memory:49999 is not among this engine's `peers`"),
        ({"remote_host": "evil"}, "is not among this engine's `peers`"),
        ({"remote_host": None}, "ticket"),
        ({"remote_port": "5600"}, "ticket"),
        ({"remote_port": True}, "ticket"),
        ({"tp_size": 0}, "ticket"),
        ({"remote_engine_id": ["p"]}, "ticket"),
        (
            {"remote_engine_id": "q"},
            "engine p answers at this address, but the router named engine q",
        ),
        ({"tp_size": 2}, "rank 0 reports 1 ranks"),
    ],
)
def test_a_source_that_is_not_believed_gets_the_failure_policy(
    legs: Legs, changes: dict[str, Any], reason: str
) -> None:
    begin(legs, **changes)
    assert reason in legs.failure()


def test_an_engine_that_was_told_of_nobody_believes_nobody() -> None:
    network = MemoryNetwork()
    p, d = push_side("p", network, peers=ALL), push_side("d", network)
    legs = legs_between(p, d)
    begin(legs)
    assert "ticket" in legs.failure()
    closed(p, d)


def test_a_prefill_side_that_was_not_told_of_the_decode_side_refuses_it() -> None:
    network = MemoryNetwork()
    p, d = push_side("p", network, kv_lease_duration=600), push_side("d", network, peers=ALL)
    legs = legs_between(p, d)
    legs.compute(None)
    begin(legs)
    assert "is not among this engine's `peers`" in legs.failure()
    closed(p, d)


def test_one_engine_for_both_legs_dials_nobody(legs: Legs) -> None:
    request = arrive(legs, remote_engine_id="d")
    assert legs.d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
