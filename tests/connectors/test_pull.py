"""Tests `NixlConnector` with the calls an engine makes: how many tokens it claims, what it reports,
and that no state remains.
"""

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.connectors.pair import DEADLINE_S, Blocks, EngineRequest, EngineSide, step_until

from kvferry.connectors.contract import KVCacheGroup, RequestStatus
from kvferry.connectors.nixl.metadata import NixlHandshakeMetadata
from kvferry.errors import ConfigError, KVFerryError
from kvferry.protocol import messages as codec
from kvferry.protocol.messages import FailureReply, FailureRequest, Release, ReleaseLeg
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.transports.base import Received
from kvferry.transports.memory import MemoryControlTransport, MemoryNetwork

TOKENS = list(range(100, 110))


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def pair(network: MemoryNetwork) -> Iterator[tuple[EngineSide, EngineSide]]:
    p, d = EngineSide("p", network, kv_lease_duration=600), EngineSide("d", network)
    yield p, d
    for side in (p, d):
        side.shutdown()
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry")
    ]


def arrive(
    d: EngineSide, params: Any, tokens: list[int] = TOKENS, name: str = "r"
) -> EngineRequest:
    request = EngineRequest(name, tokens, params)
    d.scheduler.on_new_request(request)
    return request


def failure_reason(d: EngineSide, leg_id: str, network: MemoryNetwork) -> str:
    """Ask D's side channel, as a router does, why the transfer of a leg failed."""
    own = d.prefill(EngineRequest(f"asked for {leg_id}", TOKENS), [11, 12, 13])
    with closing(MemoryControlTransport(network)) as router:
        router.send(
            f"tcp://{own['remote_host']}:{own['remote_port']}",
            codec.encode(FailureRequest(7, leg_id)),
        )
        for _ in range(100):
            for news in router.poll(DEADLINE_S / 100):
                assert isinstance(news, Received)
                answer = codec.decode(news.frame)
                assert isinstance(answer, FailureReply)
                assert (answer.nonce, answer.leg_id) == (7, leg_id)
                return answer.reason
    raise AssertionError("no answer")


def test_a_prompt_is_handed_over_whole(pair: tuple[EngineSide, EngineSide]) -> None:
    p, d = pair
    p.fill([5, 6, 7], seed=1)
    request = arrive(d, p.prefill(EngineRequest("a", TOKENS), [5, 6, 7]))
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (10, True)
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 10)
    step_until(lambda: "r" in d.seen.finished_recving and "a" in p.seen.finished_sending, p, d)
    assert d.seen.failed_recving == set()
    for layer, array in d.memory.items():
        assert (array[[1, 2, 3]] == p.memory[layer][[5, 6, 7]]).all()
        assert not array[4:].any()
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 0)
    request.status = RequestStatus.FINISHED_STOPPED
    assert d.scheduler.request_finished(request, [1, 2, 3]) == (False, None)
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_what_the_params_say_is_what_vllms_routers_expect(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    p, _ = pair
    params = p.prefill(EngineRequest("a", TOKENS), [5, 6, 9, 30])
    assert {key: params[key] for key in params if key not in ("ticket", "remote_port")} == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[5, 6, 9]],
        "remote_engine_id": "p",
        "remote_request_id": "a",
        "remote_host": "memory",
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 10,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
    }
    p.step()


@pytest.mark.parametrize(
    ("tokens", "matched"),
    [
        (TOKENS, 10),
        ([*TOKENS, 1, 2, 3], 10),
        (TOKENS[:9], 8),
        ([*TOKENS[:5], 1, 2, 3], 4),
        ([1, *TOKENS], 0),
    ],
)
def test_only_the_common_prefix_is_claimed(
    pair: tuple[EngineSide, EngineSide], tokens: list[int], matched: int
) -> None:
    p, d = pair
    request = arrive(d, p.prefill(EngineRequest("a", TOKENS), [5, 6, 7]), tokens)
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (matched, matched > 0)
    assert d.scheduler.get_num_new_matched_tokens(request, 4) == (max(0, matched - 4), matched > 4)


def test_only_who_needs_a_ticket_waits_for_the_one_who_reads_it(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    p, d = pair
    params = p.prefill(EngineRequest("a", TOKENS), [5, 6, 7])
    first = arrive(d, params)
    d.scheduler.update_state_after_alloc(first, Blocks(([1, 2, 3],)), 10)
    assert d.scheduler.get_num_new_matched_tokens(arrive(d, params, name="same"), 0) == (
        None,
        False,
    )
    assert d.scheduler.get_num_new_matched_tokens(arrive(d, params, [1, *TOKENS], "other"), 0) == (
        0,
        False,
    )
    step_until(lambda: "r" in d.seen.finished_recving, p, d)


def test_a_ticket_that_matches_nothing_is_counted_and_logged(
    pair: tuple[EngineSide, EngineSide], caplog: pytest.LogCaptureFixture
) -> None:
    p, d = pair
    request = arrive(d, p.prefill(EngineRequest("a", TOKENS), [5, 6, 7]), [1, *TOKENS], "mine")
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 0)
    step_until(lambda: "a" in p.seen.finished_sending, p, d)
    stats = d.scheduler.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["unmatched_tickets"] == 1
    [line] = [text for text in caplog.messages if "ticket not used" in text]
    assert "request=mine" in line
    # The control: a ticket with a common prefix is neither counted nor logged.
    arrive(d, p.prefill(EngineRequest("b", TOKENS), [8, 9, 10]), name="other")
    assert d.scheduler.get_kv_connector_stats() is None


def test_a_router_is_told_why_the_transfer_of_its_leg_failed(
    pair: tuple[EngineSide, EngineSide], network: MemoryNetwork
) -> None:
    p, d = pair
    reason_of = partial(failure_reason, d, network=network)
    genuine = p.prefill(EngineRequest("a", TOKENS), [5, 6, 7])
    for name, ticket in (("forged", "forged"), ("good", genuine["ticket"])):
        params = {"do_remote_prefill": True, "ticket": ticket, "leg_id": f"leg {name}"}
        request = arrive(d, params, name=name)
        matched, _ = d.scheduler.get_num_new_matched_tokens(request, 0)
        assert matched == len(TOKENS)
        d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), matched)
        if name == "forged":
            # vLLM ends the request before it shows the connector the failure.
            request.status = RequestStatus.FINISHED_ERROR
            d.scheduler.request_finished(request, [1, 2, 3])
    step_until(lambda: d.seen.finished_recving == {"forged", "good"}, p, d)
    assert d.seen.failed_recving == {"forged"}
    assert reason_of("leg forged") == d.seen.failure_reasons["forged"] != ""
    assert reason_of("leg good") == reason_of("leg of another router") == ""


def test_a_router_is_told_that_an_engine_that_computes_the_prompt_has_not_used_the_kv(
    pair: tuple[EngineSide, EngineSide], network: MemoryNetwork
) -> None:
    """The engine answers the request, so its answer does not show that P's KV is good."""
    p, d = pair[0], EngineSide("recomputes", network, policy="recompute")
    genuine = p.prefill(EngineRequest("a", TOKENS), [5, 6, 7])
    for name, ticket in (("forged", "forged"), ("other", genuine["ticket"]), ("good", None)):
        params = {**genuine, "ticket": ticket or genuine["ticket"], "leg_id": f"leg {name}"}
        request = arrive(d, params, [1, *TOKENS] if name == "other" else TOKENS, name)
        matched, _ = d.scheduler.get_num_new_matched_tokens(request, 0)
        assert matched == (len(TOKENS) if name == "good" else 0)
    assert "ticket" in failure_reason(d, "leg forged", network)
    assert "was not used" in failure_reason(d, "leg other", network)
    assert failure_reason(d, "leg good", network) == ""
    d.shutdown()


def test_an_engine_whose_sleep_has_failed_ends_with_its_next_load(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    """vLLM does not restore the cache of such an engine, so the load would wait for ever."""
    p, d = pair
    request = arrive(d, p.prefill(EngineRequest("a", TOKENS), [5, 6, 7]))
    matched, _ = d.scheduler.get_num_new_matched_tokens(request, 0)
    assert matched
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), matched)
    d.worker.unregister_kv_caches()
    with pytest.raises(KVFerryError, match="restart the engine"):
        d.step()


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_router_is_told_that_a_reset_has_ended_the_transfer_of_its_leg(
    pair: tuple[EngineSide, EngineSide], network: MemoryNetwork, is_reset: bool
) -> None:
    p, d = pair
    params = p.prefill(EngineRequest("a", TOKENS), [5, 6, 7])
    request = arrive(d, {**params, "leg_id": "leg"})
    if is_reset:
        d.scheduler.reset_cache()
    matched, _ = d.scheduler.get_num_new_matched_tokens(request, 0)
    assert matched == len(TOKENS)
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), matched)
    step_until(lambda: d.seen.finished_recving == {"r"}, p, d)
    reason = failure_reason(d, "leg", network)
    assert ("weights may have changed" in reason) == is_reset
    assert reason == d.seen.failure_reasons.get("r", "")


def test_another_salt_matches_nothing(pair: tuple[EngineSide, EngineSide]) -> None:
    p, d = pair
    params = p.prefill(EngineRequest("a", TOKENS, cache_salt="tenant 1"), [5, 6, 7])
    request = EngineRequest("r", TOKENS, params, cache_salt="tenant 2")
    d.scheduler.on_new_request(request)
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_full_local_hit_frees_the_producer_without_a_read(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    p, d = pair
    request = arrive(d, p.prefill(EngineRequest("a", TOKENS[:8]), [5, 6]), TOKENS[:8])
    assert d.scheduler.get_num_new_matched_tokens(request, 8) == (0, False)
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2],)), 0)
    step_until(lambda: "a" in p.seen.finished_sending, p, d)
    assert d.seen.finished_recving == set()
    assert not any(array.any() for array in d.memory.values())


@pytest.mark.parametrize("moment", ["queued", "tracked", "started"])
def test_an_aborted_request_frees_both_sides(
    pair: tuple[EngineSide, EngineSide], moment: str
) -> None:
    p, d = pair
    request = arrive(d, p.prefill(EngineRequest("a", TOKENS), [5, 6, 7]))
    p.step()
    if moment != "queued":
        d.step()
    if moment == "started":
        d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 10)
        d.step()
    request.status = RequestStatus.FINISHED_ABORTED
    assert d.scheduler.request_finished(request, []) == (False, None)
    step_until(lambda: "a" in p.seen.finished_sending, p, d)
    if moment == "started":
        step_until(lambda: "r" in d.seen.finished_recving, p, d)
    else:
        assert d.seen.finished_recving == set()


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": "yes"},
        {"do_remote_prefill": True, "ticket": 3},
    ],
)
def test_bad_params_fail_the_request_in_the_way_the_engine_knows(
    pair: tuple[EngineSide, EngineSide], params: Any
) -> None:
    _, d = pair
    request = arrive(d, params)
    assert d.scheduler.get_num_new_matched_tokens(request, 4) == (6, True)
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 6)
    step_until(lambda: "r" in d.seen.finished_recving, d)
    assert d.seen.failed_recving == {"r"}
    assert d.seen.failure_reasons["r"]


def test_bad_params_are_computed_locally_when_the_policy_says_so(network: MemoryNetwork) -> None:
    d = EngineSide("d", network, policy="recompute")
    request = arrive(d, {"do_remote_prefill": True, "ticket": "forged"})
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 0)
    d.step()
    assert d.seen.finished_recving == set()
    stats = d.scheduler.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["rejected_params"] == 1
    d.shutdown()


def test_an_engine_does_not_dial_itself(pair: tuple[EngineSide, EngineSide]) -> None:
    p, _ = pair
    request = arrive(p, p.prefill(EngineRequest("a", TOKENS), [5, 6, 7]))
    assert p.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    step_until(lambda: "a" in p.seen.finished_sending, p)


def test_a_router_hands_a_ticket_back(
    pair: tuple[EngineSide, EngineSide], network: MemoryNetwork
) -> None:
    p, _ = pair
    params = p.prefill(EngineRequest("a", TOKENS), [5, 6, 7])
    p.step()
    woken = threading.Event()
    p.scheduler.set_wakeup(woken.set)
    router = MemoryControlTransport(network)
    for ticket in ("forged", params["ticket"]):
        router.send(
            f"tcp://{params['remote_host']}:{params['remote_port']}", codec.encode(Release(ticket))
        )
    assert woken.wait(60)
    step_until(lambda: "a" in p.seen.finished_sending, p)
    router.close()


@pytest.mark.parametrize("is_early", [False, True])
def test_a_router_that_lost_the_answer_of_p_releases_the_leg(
    pair: tuple[EngineSide, EngineSide], network: MemoryNetwork, is_early: bool
) -> None:
    """The message may arrive before the prefill ends. Ids of other legs free and wake nothing."""
    p, _ = pair
    own = p.prefill(
        EngineRequest("other", TOKENS, {"do_remote_decode": True, "leg_id": "l"}), [8, 9, 10]
    )
    p.step()
    num_woken = 0

    def wake() -> None:
        nonlocal num_woken
        num_woken += 1

    p.scheduler.set_wakeup(wake)

    def compute() -> None:
        request = EngineRequest("a", TOKENS, {"do_remote_decode": True, "leg_id": "lost"})
        p.prefill(request, [5, 6, 7])

    with closing(MemoryControlTransport(network)) as router:
        address = f"tcp://{own['remote_host']}:{own['remote_port']}"
        if not is_early:
            compute()
        for leg_id in ("unknown", "lost"):
            router.send(address, codec.encode(ReleaseLeg(leg_id)))
        # The side channel answers in order: it has taken both messages.
        router.send(address, codec.encode(FailureRequest(7, "unknown")))
        assert any(isinstance(event, Received) for event in router.poll(DEADLINE_S))
        if is_early:
            assert num_woken == 0
            compute()
        step_until(lambda: "a" in p.seen.finished_sending, p)
    assert num_woken == 1
    assert "other" not in p.seen.finished_sending


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_an_unfinished_prefill_is_not_handed_over(
    pair: tuple[EngineSide, EngineSide], status: RequestStatus
) -> None:
    p, _ = pair
    request = EngineRequest("a", TOKENS, {"do_remote_decode": True}, status, 10)
    assert p.scheduler.request_finished(request, [1, 2, 3]) == (False, None)


def test_ordinary_requests_pass_untouched(pair: tuple[EngineSide, EngineSide]) -> None:
    _, d = pair
    request = arrive(d, None)
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    d.scheduler.update_state_after_alloc(request, Blocks(([1],)), 0)
    request.status = RequestStatus.FINISHED_STOPPED
    request.num_computed_tokens = 10
    assert d.scheduler.request_finished(request, [1]) == (False, None)
    assert not d.scheduler.has_pending_push_work()


def test_the_engine_is_woken_when_there_is_news(pair: tuple[EngineSide, EngineSide]) -> None:
    p, d = pair
    woken = threading.Event()
    d.worker.set_wakeup(woken.set)
    request = arrive(d, p.prefill(EngineRequest("a", TOKENS), [5, 6, 7]))
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 10)
    assert d.scheduler.has_pending_push_work()
    p.step()
    d.step()
    assert woken.wait(60)
    d.step()
    assert d.seen.finished_recving == {"r"}
    of_scheduler, of_worker = (
        d.scheduler.get_kv_connector_stats(),
        d.worker.get_kv_connector_stats(),
    )
    assert of_scheduler is not None
    assert of_worker is not None
    assert of_scheduler.data["finished_loads"] == 1
    assert of_worker.data["transports"]["memory"]["bytes"] == 3 * 3 * 4 * 16


def test_at_debug_level_the_log_shows_the_stages_of_a_load_in_their_order(
    pair: tuple[EngineSide, EngineSide], caplog: pytest.LogCaptureFixture
) -> None:
    p, d = pair
    caplog.set_level("DEBUG", logger="kvferry.connectors.nixl.worker")
    request = arrive(d, p.prefill(EngineRequest("a", TOKENS), [5, 6, 7]))
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 10)
    step_until(lambda: "r" in d.seen.finished_recving, p, d)
    (line,) = [line for line in caplog.messages if line.startswith("load ended request=r ")]
    stages = dict(word.split("=") for word in line.split()[3:])
    assert (stages.pop("bytes"), stages.pop("transport")) == (str(3 * 3 * 4 * 16), "memory")
    assert list(stages) == [
        *("attached_ms", "allocated_ms", "began_ms", "moved_ms", "confirmed_ms"),
    ]
    assert float(stages["began_ms"]) <= float(stages["moved_ms"]) <= float(stages["confirmed_ms"])


def test_requests_that_share_a_ticket_read_it_once(pair: tuple[EngineSide, EngineSide]) -> None:
    p, d = pair
    params = p.prefill(EngineRequest("a", TOKENS), [5, 6, 7])
    first, second = (arrive(d, params, name=name) for name in ("r", "s"))
    d.scheduler.update_state_after_alloc(first, Blocks(([1, 2, 3],)), 10)
    assert d.scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
    step_until(lambda: "r" in d.seen.finished_recving, p, d)
    assert d.scheduler.get_num_new_matched_tokens(second, 8) == (0, False)
    d.scheduler.update_state_after_alloc(second, Blocks(([1, 2, 4],)), 0)
    late = arrive(d, params, name="t")
    assert d.scheduler.get_num_new_matched_tokens(late, 0) == (0, False)
    d.scheduler.update_state_after_alloc(late, Blocks(([1, 2, 4],)), 0)
    step_until(lambda: "a" in p.seen.finished_sending, p, d)
    assert d.seen.finished_recving == {"r"}


def test_when_the_first_reader_of_a_ticket_leaves_the_next_one_reads(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    p, d = pair
    params = p.prefill(EngineRequest("a", TOKENS), [5, 6, 7])
    first, second = (arrive(d, params, name=name) for name in ("r", "s"))
    d.scheduler.update_state_after_alloc(first, Blocks(([1, 2, 3],)), 10)
    first.status = RequestStatus.FINISHED_ABORTED
    d.scheduler.request_finished(first, [])
    # P has not granted the lease yet, so the first request certainly fails.
    step_until(lambda: "r" in d.seen.failed_recving, d)
    assert d.scheduler.get_num_new_matched_tokens(second, 0) == (10, True)
    d.scheduler.update_state_after_alloc(second, Blocks(([1, 2, 3],)), 10)
    step_until(lambda: "s" in d.seen.finished_recving and "a" in p.seen.finished_sending, p, d)
    assert d.seen.failed_recving == {"r"}


def test_of_a_family_whose_one_member_was_read_the_others_are_given_up(
    pair: tuple[EngineSide, EngineSide],
) -> None:
    p, d = pair
    family = [
        p.prefill(EngineRequest(f"{number}_a", TOKENS, family="a"), [5, 6, 7 + number])
        for number in range(3)
    ]
    stranger = p.prefill(EngineRequest("0_b", TOKENS, family="b"), [10, 11, 12])
    request = arrive(d, family[1])
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 0)
    step_until(lambda: {"0_a", "1_a", "2_a"} <= p.seen.finished_sending, p, d)
    assert stranger
    assert "0_b" not in p.seen.finished_sending
    stats = p.scheduler.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["levels"]["num_held_blocks"] == {"scheduler": 3}


WINDOWED = (KVCacheGroup(("layer.0",)), KVCacheGroup(("layer.1",), sliding_window=5))


def test_of_a_group_with_a_window_only_what_is_seen_is_moved(network: MemoryNetwork) -> None:
    p, d = EngineSide("p", network, groups=WINDOWED), EngineSide("d", network, groups=WINDOWED)
    p.fill([5, 6, 7, 8, 9], seed=1)
    # Ten tokens in three blocks. D computes the last token itself; that token attends back to token
    # 5, which is in the second block.
    request = arrive(d, p.prefill(EngineRequest("a", TOKENS), [5, 6, 7], [NO_BLOCK, 8, 9]))
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (9, True)
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3], [NO_BLOCK, 4, 5])), 9)
    step_until(lambda: "r" in d.seen.finished_recving and "a" in p.seen.finished_sending, p, d)
    assert d.seen.failed_recving == set()
    for layer, ours, theirs in (("layer.0", [1, 2, 3], [5, 6, 7]), ("layer.1", [4, 5], [8, 9])):
        assert (d.memory[layer][ours] == p.memory[layer][theirs]).all()
        assert not np.delete(d.memory[layer], ours, axis=0).any()
    for side in (p, d):
        side.shutdown()


@pytest.mark.parametrize(
    ("tokens", "kept", "matched"),
    [
        (TOKENS, [NO_BLOCK, NO_BLOCK, 9], 0),
        ([*TOKENS[:8], 1, 2], [NO_BLOCK, NO_BLOCK, 9], 0),
        ([*TOKENS[:8], 1, 2], [7, 8, 9], 8),
        ([*TOKENS, 1], [NO_BLOCK, 8, 9], 10),
    ],
)
def test_what_the_producer_no_longer_keeps_is_not_claimed(
    network: MemoryNetwork, tokens: list[int], kept: list[int], matched: int
) -> None:
    p, d = EngineSide("p", network, groups=WINDOWED), EngineSide("d", network, groups=WINDOWED)
    request = arrive(d, p.prefill(EngineRequest("a", TOKENS), [5, 6, 7], kept), tokens)
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (matched, matched > 0)
    for side in (p, d):
        side.shutdown()


def test_how_far_back_a_token_looks() -> None:
    assert [KVCacheGroup(()).first_visible_token(position) for position in (0, 100)] == [0, 0]
    assert [
        KVCacheGroup((), sliding_window=4).first_visible_token(position)
        for position in (0, 3, 4, 7)
    ] == [0, 0, 1, 4]
    assert [
        KVCacheGroup((), attention_chunk=8).first_visible_token(position) for position in (7, 8, 13)
    ] == [0, 8, 8]


def test_an_engine_that_takes_no_kv_refuses_tickets(
    pair: tuple[EngineSide, EngineSide], network: MemoryNetwork
) -> None:
    p, _ = pair
    only_p = EngineSide("q", network, role="kv_producer")
    request = arrive(only_p, p.prefill(EngineRequest("a", TOKENS), [5, 6, 7]))
    assert only_p.scheduler.get_num_new_matched_tokens(request, 0) == (10, True)
    only_p.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 10)
    step_until(lambda: "r" in only_p.seen.failed_recving, only_p)
    assert "kv_role" in only_p.seen.failure_reasons["r"]
    only_p.shutdown()


def test_an_engine_that_gives_no_kv_refuses_to_prefill_for_others(network: MemoryNetwork) -> None:
    only_d = EngineSide("d", network, role="kv_consumer")
    request = arrive(only_d, {"do_remote_decode": True})
    assert only_d.scheduler.get_num_new_matched_tokens(request, 0) == (10, True)
    only_d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 10)
    step_until(lambda: "r" in only_d.seen.failed_recving, only_d)
    assert "kv_role kv_both or kv_producer" in only_d.seen.failure_reasons["r"]
    plain = arrive(only_d, None)
    assert only_d.scheduler.get_num_new_matched_tokens(plain, 0) == (0, False)
    only_d.shutdown()


def test_a_role_that_does_not_fit_is_computed_here_and_counted_when_the_policy_says_so(
    network: MemoryNetwork,
) -> None:
    only_d = EngineSide("d", network, role="kv_consumer", policy="recompute")
    request = arrive(only_d, {"do_remote_decode": True})
    assert only_d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    request.status, request.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 10
    assert only_d.scheduler.request_finished(request, [1, 2, 3]) == (False, None)
    stats = only_d.scheduler.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["rejected_params"] == 1
    only_d.shutdown()


def test_an_engine_may_take_less_than_it_was_offered(pair: tuple[EngineSide, EngineSide]) -> None:
    p, d = pair
    p.fill([5, 6, 7], seed=1)
    request = arrive(d, p.prefill(EngineRequest("a", TOKENS), [5, 6, 7]))
    assert d.scheduler.get_num_new_matched_tokens(request, 4) == (6, True)
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 4)
    step_until(lambda: "r" in d.seen.finished_recving, p, d)
    for layer, array in d.memory.items():
        assert (array[2] == p.memory[layer][6]).all()
        assert not np.delete(array, 2, axis=0).any()


def test_ranks_of_another_engine_life_are_refused_at_the_start(network: MemoryNetwork) -> None:
    side = EngineSide("p", network)
    metadata = side.worker.get_handshake_metadata()
    assert isinstance(metadata, NixlHandshakeMetadata)
    with pytest.raises(ConfigError, match=r"ranks \[1\] have another epoch"):
        side.scheduler.set_xfer_handshake_metadata(
            {0: metadata, 1: replace(metadata, tp_rank=1, epoch="another")}
        )
    side.shutdown()
