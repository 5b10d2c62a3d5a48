"""Tests retained turns, which a decode side keeps and a prefill side fetches: how many tokens the
prefill side claims, and when and why the decode side evicts a turn.
"""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.connectors.pair import DEADLINE_S, Blocks, EngineRequest, EngineSide, step_until

from kvferry.connectors.contract import KVCacheGroup, RequestStatus
from kvferry.protocol import messages as codec
from kvferry.protocol.messages import Release, RetainedTurnReply, RetainedTurnRequest
from kvferry.protocol.tickets import NO_BLOCK, TicketKey
from kvferry.transports.base import Received
from kvferry.transports.memory import MemoryControlTransport, MemoryNetwork

TURN = list(range(100, 110))
"""The tokens that D has computed when the turn ends: two full blocks of 4 and half a block."""
NEXT = [*TURN, 1, 2, 3, 4, 5]
WORD = "0123456789abcdef0123456789abcdef"
REUSE: dict[str, Any] = {
    "bidirectional_kv_xfer": True,
    "kv_recompute_threshold": 0,
    "kv_lease_duration": 600,
}


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def sides(network: MemoryNetwork) -> Iterator[list[EngineSide]]:
    """A list for the engines of a test; the fixture shuts them down, and no thread may remain."""
    made: list[EngineSide] = []
    yield made
    for side in made:
        side.shutdown()
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry")
    ]


@pytest.fixture(params=["NixlConnector", "NixlPushConnector"])
def pair(
    request: pytest.FixtureRequest, network: MemoryNetwork, sides: list[EngineSide]
) -> tuple[EngineSide, EngineSide]:
    sides += [EngineSide(name, network, connector=request.param, **REUSE) for name in ("p", "d")]
    return sides[0], sides[1]


def end_turn(
    d: EngineSide, *blocks: list[int], name: str = "turn", tokens: list[int] = TURN, **changes: Any
) -> dict[str, Any] | None:
    """Finish a request that loaded a prefill's KV, and return D's parameters for the next turn."""
    params = {"do_remote_prefill": True, "ticket": "of the prefill", **changes.pop("params", {})}
    request = EngineRequest(
        name,
        tokens,
        params,
        **{"status": RequestStatus.FINISHED_STOPPED, "num_computed_tokens": len(tokens), **changes},
    )
    is_delayed, found = d.scheduler.request_finished_all_groups(request, blocks or ([5, 6, 7],))
    assert is_delayed == (found is not None)
    return found


def kept(d: EngineSide, *blocks: list[int], **changes: Any) -> dict[str, Any]:
    params = end_turn(d, *blocks, **changes)
    assert params is not None
    d.step()
    return params


def arrive(
    p: EngineSide, params: Any, tokens: list[int] = NEXT, name: str = "next", salt: str = ""
) -> EngineRequest:
    request = EngineRequest(name, tokens, params, cache_salt=salt)
    p.scheduler.on_new_request(request)
    return request


def answered(
    p: EngineSide, d: EngineSide, request: EngineRequest, num_local: int = 0
) -> tuple[int | None, bool]:
    """Ask the scheduler until it answers how many tokens it claims."""
    found: list[tuple[int | None, bool]] = []

    def is_sure() -> bool:
        found.append(p.scheduler.get_num_new_matched_tokens(request, num_local))
        return found[-1][0] is not None

    step_until(is_sure, p, d)
    return found[-1]


def settle(p: EngineSide, request: EngineRequest) -> None:
    """Let the engine compute the request itself."""
    p.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4],)), 0)


def counted(side: EngineSide, *names: str) -> list[int]:
    data: dict[str, Any] = {}
    for half in (side.scheduler, side.worker):
        stats = half.get_kv_connector_stats()
        data |= (
            {}
            if stats is None
            else {name: value for name, value in stats.data.items() if isinstance(value, int)}
        )
    return [data.get(name, 0) for name in names]


def test_what_was_kept_is_fetched_and_its_keeper_has_its_blocks_back(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    p, d = pair
    d.fill([5, 6, 7], seed=1)
    request = arrive(p, kept(d))
    assert p.scheduler.get_num_new_matched_tokens(request, 0) == (None, False), (
        "nothing is promised before D has said so"
    )
    assert answered(p, d, request) == (10, True)
    p.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4],)), 10)
    step_until(
        lambda: "next" in p.seen.finished_recving and "turn" in d.seen.finished_sending, p, d
    )
    assert p.seen.failed_recving == set()
    for layer, array in p.memory.items():
        assert (array[[1, 2, 3]] == d.memory[layer][[5, 6, 7]]).all()
        assert not array[4:].any()
    assert counted(p, "reuse_loads", "reuse_loaded_tokens", "reuse_loaded_bytes") == [
        1,
        10,
        3 * 3 * 64,
    ]
    assert counted(
        d, "retained_turns", "retained_turns_evicted", "retained_turns_expired", "kv_expired_reqs"
    ) == [1, 0, 0, 0]


def test_only_what_is_lacking_here_is_fetched(pair: tuple[EngineSide, EngineSide]) -> None:
    p, d = pair
    d.fill([5, 6, 7], seed=1)
    request = arrive(p, kept(d))
    assert answered(p, d, request, num_local=8) == (2, True)
    p.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4],)), 2)
    step_until(lambda: "next" in p.seen.finished_recving, p, d)
    for layer, array in p.memory.items():
        assert (array[3] == d.memory[layer][7]).all()
        assert not array[:3].any()


def test_what_d_says_of_an_ended_turn_names_a_prefill_to_come(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    _, d = pair
    params = kept(d)
    said = {
        key: params[key]
        for key in (
            "do_remote_decode",
            "do_remote_prefill",
            "remote_num_tokens",
            "remote_block_ids",
            "ttl_s",
        )
    }
    assert said == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_num_tokens": 10,
        "remote_block_ids": [[5, 6, 7]],
        "ttl_s": 480,
    }
    ticket = TicketKey(b"a secret of the cluster").open(params["ticket"])
    assert ticket.lease_ttl_s == 600


def test_long_turns_have_a_point_at_every_block(pair: tuple[EngineSide, EngineSide]) -> None:
    _, d = pair
    tokens = list(range(4 * 600))
    ticket = TicketKey(b"a secret of the cluster").open(kept(d, [1] * 600, tokens=tokens)["ticket"])
    assert ticket.tokens.step == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"params": {"conversation": None}},
        {"family": "one of n"},
        {"status": RequestStatus.FINISHED_ABORTED},
        {"status": RequestStatus.FINISHED_ERROR},
        {"params": {"do_remote_prefill": False}},
        {"num_computed_tokens": 0},
    ],
)
def test_nothing_is_kept_of_what_nobody_goes_on_from(
    pair: tuple[EngineSide, EngineSide], changes: dict[str, Any]
) -> None:
    _, d = pair
    assert end_turn(d, **changes) is None


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": False, "conversation": WORD},
        {"conversation": 7},
        {"conversation": "x" * 1000},
    ],
)
def test_a_turn_is_kept_for_whoever_asks_for_it(
    pair: tuple[EngineSide, EngineSide], params: dict[str, Any]
) -> None:
    _, d = pair
    assert end_turn(d, params=params) is not None


def test_engines_without_the_setting_or_the_role_keep_nothing(
    network: MemoryNetwork, sides: list[EngineSide]
) -> None:
    sides += [EngineSide("d", network), EngineSide("e", network, role="kv_consumer", **REUSE)]
    assert [end_turn(side) for side in sides] == [None, None]


@pytest.mark.parametrize(
    ("tokens", "matched"),
    [
        ([*TURN[:9], 1, 2], 8),
        ([*TURN[:5], 1, 2, 3], 4),
        (TURN, 10),
        (TURN[:8], 8),
        ([*TURN, *TURN], 10),
    ],
)
def test_only_the_common_prefix_is_fetched(
    pair: tuple[EngineSide, EngineSide], tokens: list[int], matched: int
) -> None:
    p, d = pair
    request = arrive(p, kept(d), tokens)
    assert answered(p, d, request) == (matched, True)
    settle(p, request)
    step_until(lambda: "turn" in d.seen.finished_sending, p, d)


@pytest.mark.parametrize(
    ("extra", "tokens", "salt", "why"),
    [
        ({}, [1, *TURN], "", "other_tokens"),
        ({}, NEXT, "another tenant", "other_tokens"),
        ({"kv_recompute_threshold": 11}, NEXT, "", "few_tokens"),
        ({"bidirectional_kv_xfer": False}, NEXT, "", "off"),
        ({"role": "kv_producer"}, NEXT, "", "off"),
    ],
)
def test_what_is_not_worth_fetching_is_given_back_at_once(
    network: MemoryNetwork,
    sides: list[EngineSide],
    extra: dict[str, Any],
    tokens: list[int],
    salt: str,
    why: str,
) -> None:
    sides += [EngineSide("p", network, **{**REUSE, **extra}), EngineSide("d", network, **REUSE)]
    p, d = sides
    request = arrive(p, kept(d), tokens, salt=salt)
    assert p.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    settle(p, request)
    step_until(lambda: "turn" in d.seen.finished_sending, p, d)
    assert counted(p, f"reuse_skipped_{why}", "rejected_params") == [1, 0]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_one_that_may_not_prefill_for_others_gives_back_what_was_kept_for_it(
    network: MemoryNetwork, sides: list[EngineSide], policy: str
) -> None:
    """The router gave this engine the conversation's only ticket, and will not present it again."""
    sides += [
        EngineSide("p", network, role="kv_consumer", policy=policy, **REUSE),
        EngineSide("d", network, **REUSE),
    ]
    p, d = sides
    request = arrive(p, kept(d))
    num_claimed = p.scheduler.get_num_new_matched_tokens(request, 0)[0]
    assert num_claimed == (len(NEXT) if policy == "fail" else 0)
    p.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4],)), num_claimed or 0)
    step_until(
        lambda: (
            "turn" in d.seen.finished_sending
            and (policy != "fail" or "next" in p.seen.failed_recving)
        ),
        p,
        d,
    )
    assert counted(p, "rejected_params") == [1]
    assert counted(d, "retained_turns", "retained_turns_expired", "kv_expired_reqs") == [1, 0, 0]


def test_with_a_local_hit_that_leaves_too_little_nobody_is_asked_and_the_blocks_go_back(
    network: MemoryNetwork, sides: list[EngineSide]
) -> None:
    sides += [
        EngineSide("p", network, **{**REUSE, "kv_recompute_threshold": 6}),
        EngineSide("d", network, **REUSE),
    ]
    p, d = sides
    request = arrive(p, kept(d))
    assert p.scheduler.get_num_new_matched_tokens(request, 8) == (0, False)
    settle(p, request)
    step_until(lambda: "turn" in d.seen.finished_sending, p, d)
    assert counted(p, "reuse_skipped_few_tokens") == [1]


@pytest.mark.parametrize("ticket", ["x", "", 7, ["t"], {}, "A" * 200, "é" * 50, "A" * 2_000_000])
def test_a_damaged_ticket_is_no_reason_to_fail(
    pair: tuple[EngineSide, EngineSide], ticket: object
) -> None:
    p, _ = pair
    request = arrive(p, {"do_remote_decode": True, "ticket": ticket})
    assert p.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert counted(p, "reuse_skipped_invalid", "rejected_params") == [1, 0]


def test_a_forged_ticket_reaches_nobody(
    network: MemoryNetwork, pair: tuple[EngineSide, EngineSide]
) -> None:
    p, d = pair
    params = kept(d)
    forged = TicketKey(b"another secret").sign(
        TicketKey(b"a secret of the cluster").open(params["ticket"])
    )
    request = arrive(p, {**params, "ticket": forged})
    assert p.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    settle(p, request)
    for _ in range(20):
        p.step()
        d.step()
    assert "turn" not in d.seen.finished_sending
    assert d.worker.get_kv_connector_stats() is None or counted(d, "dropped_messages") == [0]


def test_who_is_sent_to_himself_gives_the_blocks_free_and_computes(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    _, d = pair
    request = arrive(d, kept(d))
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    settle(d, request)
    step_until(lambda: "turn" in d.seen.finished_sending, d)
    assert counted(d, "reuse_skipped_own") == [1]


def test_a_turn_that_is_gone_is_computed(pair: tuple[EngineSide, EngineSide]) -> None:
    p, d = pair
    params = kept(d)
    d.scheduler.reclaim_blocks(1)
    step_until(lambda: "turn" in d.seen.finished_sending, d)
    request = arrive(p, params)
    assert answered(p, d, request) == (0, False)
    settle(p, request)
    assert counted(p, "reuse_skipped_refused") == [1]


def test_a_keeper_that_is_gone_is_done_without(
    network: MemoryNetwork, sides: list[EngineSide]
) -> None:
    sides += [EngineSide("p", network, **REUSE, handshake_timeout=0.2, confirm_timeout=0.2)]
    d = EngineSide("d", network, **REUSE)
    params = kept(d)
    d.shutdown()
    p = sides[0]
    request = arrive(p, params)
    assert answered(p, p, request) == (0, False)
    assert counted(p, "reuse_skipped_refused") == [1]


def test_of_two_who_come_for_one_turn_both_get_it_or_compute(
    network: MemoryNetwork, sides: list[EngineSide]
) -> None:
    """The router asks a second prefill side because it believes that the first one is lost."""
    sides += [EngineSide(name, network, **REUSE) for name in ("p", "q", "d")]
    p, q, d = sides
    params = kept(d)
    first, second = arrive(p, params), arrive(q, params)
    assert answered(p, d, first) == (10, True)
    assert answered(q, d, second) == (10, True)
    p.scheduler.update_state_after_alloc(first, Blocks(([1, 2, 3, 4],)), 10)
    step_until(lambda: "next" in p.seen.finished_recving, p, d)
    assert "turn" not in d.seen.finished_sending, "the other may still be reading"
    q.scheduler.update_state_after_alloc(second, Blocks(([1, 2, 3, 4],)), 10)
    step_until(
        lambda: "next" in q.seen.finished_recving and "turn" in d.seen.finished_sending, q, d
    )
    assert not p.seen.failed_recving | q.seen.failed_recving
    late = arrive(p, params, name="late")
    assert p.scheduler.get_num_new_matched_tokens(late, 0) == (0, False), (
        "what it has read is in its own cache"
    )


def test_the_oldest_go_first_and_only_as_many_as_it_takes(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    _, d = pair
    for number in range(4):
        kept(d, [3 * number, 3 * number + 1, 3 * number + 2], name=f"turn {number}")
    assert not d.scheduler.has_pending_block_frees()
    d.scheduler.reclaim_blocks(4)
    assert d.scheduler.has_pending_block_frees()
    d.scheduler.reclaim_blocks(4)
    step_until(lambda: not d.scheduler.has_pending_block_frees(), d)
    assert d.seen.finished_sending == {"turn 0", "turn 1"}
    assert counted(d, "retained_turns_evicted") == [2]


def test_a_turn_that_is_being_read_is_waited_for_and_the_next_oldest_goes_too(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    p, d = pair
    request = arrive(p, kept(d))
    kept(d, [10, 11, 12], name="younger")
    assert answered(p, d, request) == (10, True)
    d.scheduler.reclaim_blocks(3)

    def asks_again() -> bool:
        d.scheduler.reclaim_blocks(3)
        return "younger" in d.seen.finished_sending

    step_until(asks_again, d)
    assert "turn" not in d.seen.finished_sending
    assert d.scheduler.has_pending_block_frees()
    p.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4],)), 10)
    step_until(
        lambda: "next" in p.seen.finished_recving and "turn" in d.seen.finished_sending, p, d
    )
    assert p.seen.failed_recving == set()
    assert not d.scheduler.has_pending_block_frees()


def test_a_load_that_fails_late_may_be_made_up_for(pair: tuple[EngineSide, EngineSide]) -> None:
    p, d = pair
    request = arrive(p, kept(d))
    assert answered(p, d, request) == (10, True)
    d.shutdown()
    p.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4],)), 10)
    step_until(lambda: "next" in p.seen.finished_recving, p)
    assert p.seen.failed_recving == {"next"}
    assert (p.seen.optional_failures, p.seen.given_up_recving) == ({"next"}, {})
    assert counted(p, "reuse_failed_loads", "reuse_loads") == [1, 0]
    request.status = RequestStatus.FINISHED_ABORTED
    p.scheduler.request_finished(request, [])


def test_a_client_that_leaves_while_the_keeper_is_asked_leaves_nothing_behind(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    p, d = pair
    request = arrive(p, kept(d))
    assert p.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    p.step()
    request.status = RequestStatus.FINISHED_ABORTED
    p.scheduler.request_finished(request, [])
    step_until(lambda: "turn" in d.seen.finished_sending, p, d)


def test_a_promise_that_the_engine_has_no_use_for_is_given_back_in_time(
    network: MemoryNetwork, sides: list[EngineSide]
) -> None:
    """P may wait for blocks that D's requests hold, while D waits for the blocks reserved for P.
    One of the two must give up its blocks.
    """
    sides += [
        EngineSide("p", network, **REUSE, confirm_timeout=0.2),
        EngineSide("d", network, **REUSE),
    ]
    p, d = sides
    request = arrive(p, kept(d))
    assert answered(p, d, request) == (10, True)
    step_until(lambda: "turn" in d.seen.finished_sending, p, d)
    assert answered(p, d, request) == (0, False)


def test_a_turn_nobody_comes_for_lapses(network: MemoryNetwork, sides: list[EngineSide]) -> None:
    sides += [EngineSide("d", network, **REUSE, decoder_kv_blocks_ttl=0.1)]
    [d] = sides
    kept(d)
    step_until(lambda: "turn" in d.seen.finished_sending, d)
    assert counted(d, "retained_turns_expired", "kv_expired_reqs") == [1, 0]


def test_a_router_can_hand_a_kept_turn_back(
    network: MemoryNetwork, pair: tuple[EngineSide, EngineSide]
) -> None:
    _, d = pair
    params = kept(d)
    control = MemoryControlTransport(network)
    control.send(
        f"tcp://{params['remote_host']}:{params['remote_port']}",
        codec.encode(Release(params["ticket"])),
    )
    step_until(lambda: "turn" in d.seen.finished_sending, d)
    control.close()


def ask(
    control: MemoryControlTransport, params: dict[str, Any], turn_id: str, wait_s: float = 0.0
) -> None:
    control.send(
        f"tcp://{params['remote_host']}:{params['remote_port']}",
        codec.encode(RetainedTurnRequest(1, turn_id, wait_s)),
    )


def told(control: MemoryControlTransport) -> RetainedTurnReply:
    for _ in range(100):
        for news in control.poll(DEADLINE_S / 100):
            assert isinstance(news, Received)
            answer = codec.decode(news.frame)
            assert isinstance(answer, RetainedTurnReply)
            return answer
    raise AssertionError("no answer")


def test_a_router_is_told_what_was_kept_of_its_turn_until_it_is_gone(
    network: MemoryNetwork, pair: tuple[EngineSide, EngineSide]
) -> None:
    _, d = pair
    control = MemoryControlTransport(network)
    params = kept(d, params={"conversation": WORD})
    ask(control, params, WORD)
    assert json.loads(told(control).params) == params
    ask(control, params, "another word")
    assert told(control) == RetainedTurnReply(1, "another word")
    d.scheduler.reclaim_blocks(1)
    step_until(lambda: "turn" in d.seen.finished_sending, d)
    ask(control, params, WORD, DEADLINE_S)
    assert told(control) == RetainedTurnReply(1, WORD), "it is gone, so there is no wait"
    control.close()


@pytest.mark.parametrize("is_retained", [True, False])
def test_a_router_that_asks_before_the_turn_has_ended_is_told_when_it_has(
    network: MemoryNetwork, pair: tuple[EngineSide, EngineSide], is_retained: bool
) -> None:
    _, d = pair
    control = MemoryControlTransport(network)
    address = kept(d, name="earlier")
    ask(control, address, WORD, DEADLINE_S)
    # The reply to a second question shows that D has the first, and leaves it open.
    ask(control, address, "another word")
    assert told(control).turn_id == "another word"
    status = RequestStatus.FINISHED_STOPPED if is_retained else RequestStatus.FINISHED_ABORTED
    params = end_turn(d, [8, 9, 10], status=status, params={"conversation": WORD})
    answer = told(control)
    assert answer.turn_id == WORD
    assert (json.loads(answer.params) if answer.params else None) == params
    control.close()


def test_a_question_about_a_turn_that_does_not_end_is_answered_by_its_deadline(
    network: MemoryNetwork, pair: tuple[EngineSide, EngineSide]
) -> None:
    _, d = pair
    control = MemoryControlTransport(network)
    ask(control, kept(d), WORD, 0.01)
    assert told(control) == RetainedTurnReply(1, WORD)
    control.close()


def test_a_staged_keeper_says_so_when_its_copy_is_there(
    network: MemoryNetwork, sides: list[EngineSide]
) -> None:
    sides += [EngineSide(name, network, **REUSE, force_host_buffer=True) for name in ("p", "d")]
    p, d = sides
    d.fill([5, 6, 7], seed=3)
    request = arrive(p, kept(d))
    assert answered(p, d, request) == (10, True)
    p.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4],)), 10)
    step_until(
        lambda: "next" in p.seen.finished_recving and "turn" in d.seen.finished_sending, p, d
    )
    assert p.seen.failed_recving == set()
    for layer, array in p.memory.items():
        assert (array[[1, 2, 3]] == d.memory[layer][[5, 6, 7]]).all()


@pytest.mark.parametrize(("tokens", "matched"), [(NEXT, 10), ([*TURN[:9], 1, 2], 0)])
def test_where_attention_forgets_only_what_goes_on_at_the_end_is_fetched(
    network: MemoryNetwork, sides: list[EngineSide], tokens: list[int], matched: int
) -> None:
    """D has freed the blocks that an earlier token would attend to."""
    groups = (KVCacheGroup(("layer.0",)), KVCacheGroup(("layer.1",), sliding_window=3))
    sides += [EngineSide(name, network, groups=groups, **REUSE) for name in ("p", "d")]
    p, d = sides
    d.fill([5, 6, 7, 9], seed=1)
    request = arrive(p, kept(d, [5, 6, 7], [NO_BLOCK, NO_BLOCK, 9]), tokens)
    assert answered(p, d, request) == (matched, matched > 0)
    if matched:
        p.scheduler.update_state_after_alloc(
            request, Blocks(([1, 2, 3, 4], [NO_BLOCK, NO_BLOCK, 11, 12])), matched
        )
        step_until(lambda: "next" in p.seen.finished_recving, p, d)
        assert p.seen.failed_recving == set()
        assert (p.memory["layer.0"][[1, 2, 3]] == d.memory["layer.0"][[5, 6, 7]]).all()
        assert (p.memory["layer.1"][11][:, :2] == d.memory["layer.1"][9][:, :2]).all()
