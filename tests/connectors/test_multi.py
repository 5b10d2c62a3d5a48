"""Tests `MultiConnector` with real children: our peer-to-peer connector between two engines, and a
store in this process. Every test ends with nothing outstanding on either side.
"""

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from tests.connectors.pair import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Blocks,
    EngineRequest,
    EngineSide,
    Step,
    step_until,
)
from tests.connectors.store_connector import DUMMY, STORES, Store, StoreStats, child

from kvferry.connectors.contract import (
    KVConnectorOutput,
    KVConnectorTransferResults,
    RequestStatus,
)
from kvferry.connectors.multi.stats import MultiStats
from kvferry.engine.transfer_log import ConnectorTotals
from kvferry.errors import ConfigError
from kvferry.transports.memory import MemoryNetwork

TOKENS = list(range(100, 118))
"""Four full blocks and a half."""
PULL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
PUSH = {"kv_connector": "NixlPushConnector", "kv_role": "kv_both"}


@pytest.fixture
def store() -> Iterator[Store]:
    """The store of D's storage child."""
    STORES.clear()
    STORES["d"] = Store()
    yield STORES["d"]
    STORES.clear()


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


class Sides:
    """P with the pull connector alone, and D with a `MultiConnector`."""

    def __init__(self, network: MemoryNetwork, *children: dict[str, Any], **settings: Any) -> None:
        self.p = EngineSide("p", network, kv_lease_duration=600)
        self.d = EngineSide(
            "d", network, connector="MultiConnector", connectors=list(children), **settings
        )

    def __enter__(self) -> "Sides":
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.assert_settled()
        self.d.shutdown()
        self.p.shutdown()

    def assert_settled(self) -> None:
        for _ in range(2):
            self.d.step()
        assert cast(Any, self.d.scheduler).scheduler_side.num_requests == 0
        assert cast(Any, self.d.worker).worker_side.num_transfers == 0

    def arrive(self, params: Any = None, name: str = "r") -> EngineRequest:
        request = EngineRequest(name, TOKENS, params)
        self.d.scheduler.on_new_request(request)
        return request

    def prefill(self, name: str = "a") -> dict[str, Any]:
        """P's parameters for D; P's cache holds the prompt in blocks 5 to 9."""
        self.p.fill([5, 6, 7, 8, 9], seed=1)
        return self.p.prefill(EngineRequest(name, TOKENS), [5, 6, 7, 8, 9])

    def finish(
        self,
        request: EngineRequest,
        blocks: list[int],
        status: RequestStatus = RequestStatus.FINISHED_STOPPED,
        num_computed_tokens: int | None = None,
    ) -> tuple[bool, dict[str, Any] | None]:
        request.status = status
        request.num_computed_tokens = (
            len(TOKENS) if num_computed_tokens is None else num_computed_tokens
        )
        return self.d.scheduler.request_finished(request, blocks)

    def run(self) -> None:
        for _ in range(3):
            self.p.step()
            self.d.step()


def put(store: Store, side: EngineSide, num_blocks: int, seed: int = 9) -> None:
    """Fill a store with the first blocks of the prompt by saving a request of its own engine."""
    side.fill(list(range(20, 20 + num_blocks)), seed)
    request = EngineRequest(f"put {num_blocks}", TOKENS)
    side.scheduler.on_new_request(request)
    request.status = RequestStatus.FINISHED_STOPPED
    request.num_computed_tokens = num_blocks * BLOCK_SIZE
    is_delayed, _ = side.scheduler.request_finished(request, list(range(20, 20 + num_blocks)))
    assert is_delayed
    step_until(lambda: request.request_id in side.seen.finished_sending, side)
    assert len(store.blocks) == num_blocks


def assert_equal_blocks(
    ours: dict[str, Any], blocks: list[int], theirs: dict[str, Any], sources: list[int]
) -> None:
    for layer, array in ours.items():
        assert (array[blocks] == theirs[layer][sources]).all()
        assert array[blocks].any()


# -- loads --


@pytest.mark.parametrize("peer", [PULL, PUSH])
@pytest.mark.parametrize("order", ["peer first", "store first"])
def test_the_store_gives_the_prefix_and_the_peer_the_rest(
    network: MemoryNetwork, store: Store, peer: dict[str, Any], order: str
) -> None:
    listed = [peer, child("StoreConnector", "d")]
    if order == "store first":
        listed.reverse()
    with Sides(network, *listed) as sides:
        p, d = sides.p, sides.d
        put(store, d, 2)
        request = sides.arrive(sides.prefill())
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (18, True)
        d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4, 10],)), 18)
        assert d.scheduler.get_external_cache_hit_sources(request, 18) == {"store": 8}
        step_until(
            lambda: {"r"} <= d.seen.finished_recving and "a" in p.seen.finished_sending, p, d
        )
        assert d.seen.failed_recving == set()
        # The store's blocks differ from P's, so it shows who wrote where.
        assert_equal_blocks(d.memory, [1, 2], d.memory, [20, 21])
        assert_equal_blocks(d.memory, [3, 4, 10], p.memory, [7, 8, 9])
        assert store.num_loaded_blocks == 2
        d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4, 10],)), 0)
        is_delayed, _ = sides.finish(request, [1, 2, 3, 4, 10])
        assert is_delayed
        step_until(lambda: "r" in d.seen.finished_sending, d)


def test_what_came_from_the_store_is_not_stored_again(network: MemoryNetwork, store: Store) -> None:
    with Sides(network, PULL, child("StoreConnector", "d")) as sides:
        put(store, sides.d, 4)
        request = sides.arrive()
        assert sides.d.scheduler.get_num_new_matched_tokens(request, 0) == (16, True)
        sides.d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4, 5],)), 16)
        step_until(lambda: "r" in sides.d.seen.finished_recving, sides.d)
        assert sides.finish(request, [1, 2, 3, 4, 5]) == (False, None)


def test_p_is_released_at_once_if_the_store_has_everything(
    network: MemoryNetwork, store: Store
) -> None:
    with Sides(network, PULL, child("StoreConnector", "d")) as sides:
        p, d = sides.p, sides.d
        put(store, d, 4)
        params = sides.prefill()
        request = EngineRequest("r", TOKENS[:17], params)
        d.scheduler.on_new_request(request)
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (16, True)
        d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4, 5],)), 16)
        step_until(lambda: "r" in d.seen.finished_recving and "a" in p.seen.finished_sending, p, d)
        assert_equal_blocks(d.memory, [1, 2, 3, 4], d.memory, [20, 21, 22, 23])
        stats = d.worker.get_kv_connector_stats()
        assert stats is not None
        assert stats.to_dict().get("transfers", 0) == 0
        sides.finish(request, [], RequestStatus.FINISHED_ABORTED, 0)


def test_a_load_has_ended_when_the_last_child_has_finished(
    network: MemoryNetwork, store: Store
) -> None:
    with Sides(network, PULL, child("StoreConnector", "d")) as sides:
        p, d = sides.p, sides.d
        put(store, d, 2)
        store.holds_loads = True
        request = sides.arrive(sides.prefill())
        d.scheduler.get_num_new_matched_tokens(request, 0)
        d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4, 10],)), 18)
        step_until(lambda: "a" in p.seen.finished_sending, p, d)
        sides.run()
        assert d.seen.finished_recving == set()
        store.holds_loads = False
        step_until(lambda: "r" in d.seen.finished_recving, d)
        sides.finish(request, [], RequestStatus.FINISHED_ABORTED, 0)


@pytest.mark.parametrize(
    ("broken", "is_optional"), [("store", True), ("peer", False), ("both", False)]
)
def test_only_the_failure_of_a_required_part_follows_the_policy(
    network: MemoryNetwork, store: Store, broken: str, is_optional: bool
) -> None:
    with Sides(network, PULL, child("StoreConnector", "d")) as sides:
        p, d = sides.p, sides.d
        put(store, d, 2)
        params = sides.prefill()
        store.fails_loads = broken in ("store", "both")
        if broken in ("peer", "both"):
            params["ticket"] = params["ticket"][:-2]
        request = sides.arrive(params)
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (18, True)
        d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4, 10],)), 18)
        step_until(lambda: "r" in d.seen.finished_recving, p, d)
        assert d.seen.failed_recving == {"r"}
        assert ("r" in d.seen.optional_failures) == is_optional
        assert ("StoreConnector" in d.seen.failure_reasons["r"]) == store.fails_loads
        # A request whose load failed is computed: it must not fail for ever.
        store.fails_loads = False
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4, 10],)), 0)
        sides.finish(request, [], RequestStatus.FINISHED_ABORTED, 0)
        p.scheduler.request_abandoned("a")
        step_until(lambda: "a" in p.seen.finished_sending, p, d)


def test_a_child_that_never_answers_does_not_keep_a_request_waiting(
    network: MemoryNetwork, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with Sides(network, PULL, child("StoreConnector", "d"), lookup_timeout=0.05) as sides:
        p, d = sides.p, sides.d
        put(store, d, 2)
        store.is_looking = True
        request = sides.arrive(sides.prefill())
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        answers = [d.scheduler.get_num_new_matched_tokens(request, 0)]

        def has_answered() -> bool:
            answers.append(d.scheduler.get_num_new_matched_tokens(request, 0))
            return answers[-1][0] is not None

        step_until(has_answered, p, d)
        assert answers[-1] == (18, True)
        d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4, 10],)), 18)
        step_until(lambda: "r" in d.seen.finished_recving, p, d)
        assert_equal_blocks(d.memory, [1, 2, 3, 4, 10], p.memory, [5, 6, 7, 8, 9])
        stats = d.scheduler.get_kv_connector_stats()
        assert stats is not None
        assert stats.to_dict()["child_lookup_timeouts"] == {"StoreConnector": 1}
        assert len([line for line in caplog.messages if "lookup timed out" in line]) == 1
        store.is_looking = False
        sides.finish(request, [], RequestStatus.FINISHED_ABORTED, 0)


# -- saves --


def test_blocks_are_free_when_every_child_has_reported(
    network: MemoryNetwork, store: Store
) -> None:
    with Sides(network, PULL, child("StoreConnector", "d")) as sides:
        d = sides.d
        store.holds_saves = True
        request = sides.arrive({"do_remote_decode": True})
        is_delayed, params = sides.finish(request, [1, 2, 3, 4, 5])
        assert is_delayed
        assert params is not None
        d.step()
        d.scheduler.request_abandoned("r")
        sides.run()
        assert d.seen.finished_sending == set()
        store.holds_saves = False
        step_until(lambda: "r" in d.seen.finished_sending, d)


@pytest.mark.parametrize("reports_twice", [False, True])
def test_a_child_that_reports_twice_or_unasked_frees_nothing_early(
    network: MemoryNetwork, store: Store, reports_twice: bool
) -> None:
    with Sides(network, PULL, child("StoreConnector", "d")) as sides:
        d = sides.d
        store.reports_twice = reports_twice
        request = sides.arrive({"do_remote_decode": True})
        assert sides.finish(request, [1, 2, 3, 4, 5])[0]
        sides.run()
        assert store.saved_requests == ["r"]
        assert d.seen.finished_sending == set()
        d.scheduler.request_abandoned("r")
        step_until(lambda: "r" in d.seen.finished_sending, d)
        assert d.seen.finished_recving == set()


def test_the_first_child_wins_if_parameters_differ(
    network: MemoryNetwork, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    STORES["other"] = Store(params={"stored": 2, "other": True})
    store.params = {"stored": 1}
    listed = [child("StoreConnector", "d"), child("StoreConnector", "other"), PULL]
    with Sides(network, *listed) as sides:
        for name in ("r", "s"):
            request = EngineRequest(name, [*TOKENS, len(name)], None)
            request.prompt_token_ids[0] = ord(name)
            sides.d.scheduler.on_new_request(request)
            is_delayed, params = sides.finish(request, [1, 2, 3, 4, 5])
            assert is_delayed
            assert params == {"stored": 1, "other": True}
        step_until(lambda: {"r", "s"} <= sides.d.seen.finished_sending, sides.d)
        lines = [line for line in caplog.messages if "two children differ" in line]
        assert len(lines) == 1
        assert "key=stored ignored_child=StoreConnector[1]" in lines[0]


@pytest.mark.parametrize("first", ["load", "save"])
def test_a_request_that_ends_while_it_loads_is_reported_once(
    network: MemoryNetwork, store: Store, first: str
) -> None:
    """The store saves the local prefix, the other store still loads behind it."""
    STORES["other"] = Store()
    listed = [child("StoreConnector", "d"), child("StoreConnector", "other")]
    with Sides(network, PULL, *listed) as sides:
        d = sides.d
        put(store, d, 4)
        for key in list(STORES["other"].blocks):
            del STORES["other"].blocks[key]
        store.holds_loads = STORES["other"].holds_saves = True
        request = sides.arrive()
        # The engine has the first block itself.
        assert d.scheduler.get_num_new_matched_tokens(request, 4) == (12, True)
        d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4],)), 12)
        d.step()
        # vLLM counts the tokens of the load as computed although they have not arrived.
        is_delayed, _ = sides.finish(request, [1, 2, 3, 4], RequestStatus.FINISHED_ABORTED, 16)
        assert not is_delayed
        sides.run()
        if first == "load":
            store.holds_loads = False
        else:
            STORES["other"].holds_saves = False
        sides.run()
        assert (d.seen.finished_recving, "r" in d.seen.finished_sending) == (set(), False)
        store.holds_loads = STORES["other"].holds_saves = False
        step_until(lambda: "r" in d.seen.finished_recving, d)
        assert "r" not in d.seen.finished_sending
        # Only what was there when the request ended was saved.
        assert len(STORES["other"].blocks) == 1


# -- dummy KV --


def test_dummy_kv_is_never_saved_by_another_child(network: MemoryNetwork, store: Store) -> None:
    STORES["dummy"] = Store()
    listed = [PULL, child("StoreConnector", "d"), child("DummyConnector", "dummy")]
    with Sides(network, *listed) as sides:
        d = sides.d
        request = sides.arrive({"do_remote_decode": True})
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (17, False)
        d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4, 5],)), 17)
        d.step()
        assert (d.memory["layer.0"][1:5] == DUMMY).all()
        assert sides.finish(request, [1, 2, 3, 4, 5]) == (False, None)
        # The same blocks come from the engine's own prefix cache now.
        again = sides.arrive({"do_remote_decode": True}, "s")
        assert d.scheduler.get_num_new_matched_tokens(again, 16) == (1, False)
        d.scheduler.update_state_after_alloc(again, Blocks(([1, 2, 3, 4, 6],)), 0)
        assert sides.finish(again, [1, 2, 3, 4, 6]) == (False, None)
        sides.run()
        assert store.blocks == {}
        # The control: a request without dummy KV is saved.
        real = EngineRequest("t", [1, *TOKENS], None)
        d.scheduler.on_new_request(real)
        d.scheduler.get_num_new_matched_tokens(real, 0)
        d.scheduler.update_state_after_alloc(real, Blocks(([1, 2, 3, 4, 6],)), 0)
        assert sides.finish(real, [1, 2, 3, 4, 6])[0]
        step_until(lambda: "t" in d.seen.finished_sending, d)
        assert len(store.blocks) == 4


# -- isolation --

SCHEDULER_CALLS = [
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "has_pending_push_work",
    "has_pending_block_frees",
    "reclaim_blocks",
    "update_connector_output",
    "take_events",
    "request_finished_all_groups",
    "request_abandoned",
    "get_kv_connector_stats",
    "reset_cache",
    "set_weights_version",
]
WORKER_CALLS = [
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "finish_forward",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "clear_connector_metadata",
]


def serve(sides: Sides, name: str, params: Any) -> None:
    """Serve one request from its arrival to the end of all transfers, as an engine does."""
    d = sides.d
    request = sides.arrive(params, name)
    num_tokens, is_async = d.scheduler.get_num_new_matched_tokens(request, 0)
    assert num_tokens is not None
    table = [1, 2, 3, 4, 10]
    if is_async:
        d.scheduler.update_state_after_alloc(request, Blocks((table,)), num_tokens)
        d.scheduler.get_external_cache_hit_sources(request, num_tokens)
        step_until(lambda: name in d.seen.finished_recving, sides.p, d)
        if name in d.seen.failed_recving:
            assert name in d.seen.optional_failures
    d.scheduler.update_state_after_alloc(request, Blocks((table,)), 0)
    full_step(d)
    is_delayed, _ = sides.finish(request, table)
    d.scheduler.request_abandoned(name)
    if is_delayed:
        step_until(lambda: name in d.seen.finished_sending, d)


def full_step(side: EngineSide) -> None:
    """Make the calls of a step that `EngineSide.step` leaves out."""
    scheduler, worker = side.scheduler, side.worker
    scheduler.has_pending_push_work()
    scheduler.has_pending_block_frees()
    scheduler.reclaim_blocks(1)
    metadata = scheduler.build_connector_meta(Step())
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)
    worker.wait_for_layer_load("layer.0")
    worker.save_kv_layer("layer.0", side.memory["layer.0"], None)
    worker.finish_forward()
    worker.wait_for_save()
    worker.clear_connector_metadata()
    list(scheduler.take_events())
    scheduler.get_kv_connector_stats()


@pytest.mark.parametrize("is_fatal_once", [True, False])
@pytest.mark.parametrize("call", [*SCHEDULER_CALLS, *WORKER_CALLS])
def test_a_child_that_raises_harms_no_request(
    network: MemoryNetwork,
    store: Store,
    call: str,
    is_fatal_once: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Sides(network, PULL, child("StoreConnector", "d")) as sides:
        p, d = sides.p, sides.d
        put(store, d, 2)
        store.raising, store.is_fatal_once = {call}, is_fatal_once
        store.calls.clear()
        if call == "reset_cache":
            assert d.scheduler.reset_cache() is False
        if call == "set_weights_version":
            d.scheduler.set_weights_version("")
        for name in ("r", "s", "t", "u", "v"):
            params = sides.prefill(f"p of {name}")
            serve(sides, name, params)
            step_until(lambda: f"p of {name}" in p.seen.finished_sending, p, d)  # noqa: B023
        assert call in store.calls, "the engine never made this call"
        line = f"child connector failed child=StoreConnector call={call}"
        assert caplog.messages.count(line) == 1
        # The peer still works: the last request loaded from it.
        assert "v" in d.seen.finished_recving
        assert "v" not in d.seen.failed_recving


class Unclear:
    """A value that is neither true nor false."""

    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")


def results(**changes: Any) -> KVConnectorTransferResults:
    made = KVConnectorTransferResults()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


WRONG_RESULTS: dict[str, list[Any]] = {
    "get_num_new_matched_tokens": [None, 7, (7,), ("7", True), (2.7, True), (float("nan"), True)],
    "get_transfer_results": [
        None,
        (set(), set()),
        results(finished_recving=None),
        results(finished_sending=7),
        results(failed_recving=7),
        results(failure_reasons=None),
        results(given_up_recving=["r"]),
        results(recving_times={"r": 7}),
        results(recving_times={"r": [7]}),
    ],
    "get_block_ids_with_load_errors": [None, 7, {"a"}, {1.5}],
    "get_external_cache_hit_sources": [None, 7, {"a": "b"}, [("a", 1)]],
    "request_finished_all_groups": [
        None,
        (True, 7),
        (False, {"x": object()}),
        (False, {"x": 10**30}),
    ],
    "get_kv_connector_stats": [7, {}, StoreStats({"x": object()})],
    "build_connector_meta": [None],
    "has_pending_push_work": [Unclear()],
    "has_pending_block_frees": [Unclear()],
    "take_events": [7],
}


@pytest.mark.parametrize(
    ("call", "answer"),
    [(call, answer) for call, answers in WRONG_RESULTS.items() for answer in answers],
)
def test_a_child_whose_results_are_of_the_wrong_type_harms_no_request(
    network: MemoryNetwork, store: Store, call: str, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with Sides(network, PULL, child("StoreConnector", "d")) as sides:
        put(store, sides.d, 2)
        store.answers = {call: answer}
        for name in ("r", "s", "t", "u"):
            serve(sides, name, sides.prefill(f"p of {name}"))
            step_until(lambda: f"p of {name}" in sides.p.seen.finished_sending, sides.p, sides.d)  # noqa: B023
            sides.d.worker.get_kv_connector_stats()
        line = f"child connector failed child=StoreConnector call={call}"
        assert line in caplog.messages
        # The peer still works: the last request loaded from it.
        assert "u" in sides.d.seen.finished_recving
        assert "u" not in sides.d.seen.failed_recving


@pytest.mark.parametrize("call", ["build_connector_meta", "get_transfer_results"])
def test_what_a_disabled_child_still_owes_is_settled(
    network: MemoryNetwork, store: Store, call: str
) -> None:
    """One request loads from the child and from P, another is being saved by the child."""
    with Sides(network, PULL, child("StoreConnector", "d")) as sides:
        p, d = sides.p, sides.d
        put(store, d, 2)
        store.holds_loads = store.holds_saves = True
        loading = sides.arrive(sides.prefill())
        d.scheduler.get_num_new_matched_tokens(loading, 0)
        d.scheduler.update_state_after_alloc(loading, Blocks(([1, 2, 3, 4, 10],)), 18)
        saved = sides.arrive(None, "s")
        assert sides.finish(saved, [11, 12, 13, 14, 15])[0]
        step_until(lambda: "a" in p.seen.finished_sending, p, d)
        assert (d.seen.finished_recving, "s" in d.seen.finished_sending) == (set(), False)
        store.raising = {call}
        step_until(lambda: "r" in d.seen.failed_recving and "s" in d.seen.finished_sending, p, d)
        assert d.seen.optional_failures == {"r"}
        assert "StoreConnector failed in" in d.seen.failure_reasons["r"]
        sides.finish(loading, [], RequestStatus.FINISHED_ABORTED, 0)


def test_a_disabled_child_is_called_no_more_and_counted(
    network: MemoryNetwork, store: Store
) -> None:
    with Sides(network, PULL, child("StoreConnector", "d")) as sides:
        put(store, sides.d, 2)
        store.raising = {"build_connector_meta"}
        sides.d.step()
        sides.run()
        store.calls.clear()
        serve(sides, "r", None)
        assert set(store.calls) <= {"shutdown"}
        stats = sides.d.scheduler.get_kv_connector_stats()
        assert stats is None or "child_disabled" not in stats.to_dict()


def test_failures_are_in_the_stats_by_child(network: MemoryNetwork, store: Store) -> None:
    STORES["other"] = Store(raising={"build_connector_meta"})
    listed = [PULL, child("StoreConnector", "d"), child("StoreConnector", "other")]
    with Sides(network, *listed) as sides:
        sides.d.step()
        stats = sides.d.scheduler.get_kv_connector_stats()
        assert isinstance(stats, MultiStats)
        assert stats.counts == {
            "child_failures": {"StoreConnector[2]": 1},
            "child_disabled": {"StoreConnector[2]": 1},
        }


def test_blocks_that_a_failed_child_did_not_fill_within_a_step_are_invalid(
    network: MemoryNetwork, store: Store
) -> None:
    with Sides(network, child("StepConnector", "d"), PULL) as sides:
        d = sides.d
        put(store, d, 4)
        request = sides.arrive()
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (16, False)
        d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4, 10],)), 16)
        store.raising = {"start_load_kv"}
        store.calls.clear()
        full_step(d)
        report = KVConnectorOutput()
        report.invalid_block_ids = d.worker.get_block_ids_with_load_errors()
        assert report.invalid_block_ids == {1, 2, 3, 4}
        assert d.worker.get_block_ids_with_load_errors() == set()
        # What the forward pass computed from these blocks is saved nowhere.
        assert "save_kv_layer" not in store.calls
        d.scheduler.update_connector_output(report)
        assert report.optional_failures == {"r"}
        sides.finish(request, [], RequestStatus.FINISHED_ABORTED, 0)


# -- start --


def test_two_connectors_between_engines_are_refused(network: MemoryNetwork) -> None:
    with pytest.raises(ConfigError, match="NixlConnector and NixlPushConnector, but an engine has"):
        EngineSide("d", network, connector="MultiConnector", connectors=[PULL, PUSH])


def test_two_layouts_are_refused(network: MemoryNetwork, store: Store) -> None:
    listed = [PULL, child("OtherLayoutConnector", "d")]
    with pytest.raises(
        ConfigError, match=r"NixlConnector requires .* HND and OtherLayoutConnector requires NHD"
    ):
        EngineSide("d", network, connector="MultiConnector", connectors=listed)


def test_children_without_wakeups_make_the_engine_poll(
    network: MemoryNetwork, store: Store
) -> None:
    with Sides(network, PULL, child("StoreConnector", "d")) as sides:
        assert sides.d.worker.needs_polling
        assert not sides.p.worker.needs_polling
    with Sides(network, PULL) as sides:
        assert not sides.d.worker.needs_polling


def test_the_stats_of_two_equal_children_stay_apart(network: MemoryNetwork, store: Store) -> None:
    STORES["other"] = Store()
    listed = [child("StoreConnector", "d"), child("StoreConnector", "other"), PULL]
    with Sides(network, *listed) as sides:
        d = sides.d
        put(store, d, 4)
        for key in list(store.blocks)[2:]:
            del store.blocks[key]
        request = sides.arrive()
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (16, True)
        d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3, 4, 10],)), 16)
        step_until(lambda: "r" in d.seen.finished_recving, d)
        assert (store.num_loaded_blocks, STORES["other"].num_loaded_blocks) == (2, 2)
        stats = d.worker.get_kv_connector_stats()
        assert isinstance(stats, MultiStats)
        assert stats.to_dict()["children"]["StoreConnector[0]"] == {"store_loads": 1}
        assert stats.to_dict()["children"]["StoreConnector[1]"] == {"store_loads": 1}
        more = MultiStats().aggregate(stats).aggregate(stats).to_dict()
        assert more["children"]["StoreConnector[1]"] == {"store_loads": 2}
        assert_equal_blocks(d.memory, [1, 2, 3, 4], d.memory, [20, 21, 22, 23])
        sides.finish(request, [], RequestStatus.FINISHED_ABORTED, 0)


@pytest.mark.parametrize(
    "data",
    [
        {"transports": 3},
        {"transports": {"shm": 3}},
        {"levels": 7},
        {"samples": {"of_its_own": [1, "x"]}},
        {"transfers": "many"},
        {"children": 7, "counts": []},
    ],
    ids=str,
)
def test_the_stats_of_a_child_cannot_change_the_engines_own(
    network: MemoryNetwork, store: Store, data: dict[str, Any]
) -> None:
    with Sides(network, PULL, child("StoreConnector", "d")) as sides:
        totals = ConnectorTotals()
        for answer in (data, dict.fromkeys(data, 1), data):
            store.answers = {"get_kv_connector_stats": StoreStats(answer)}
            totals.add(sides.d.worker.get_kv_connector_stats())
        assert totals.summaries() == []
        assert totals.to_dict()["children"]["StoreConnector"].keys() <= data.keys()
        assert not totals.to_dict().keys() & data.keys() - {"children"}


def test_the_fill_of_the_tests_is_not_uniform(network: MemoryNetwork, store: Store) -> None:
    """The control of the comparisons of blocks."""
    with Sides(network, PULL) as sides:
        sides.d.fill(list(range(NUM_BLOCKS)), 1)
        rows = sides.d.memory["layer.0"].reshape(NUM_BLOCKS, -1)
        assert len(np.unique(rows, axis=0)) == NUM_BLOCKS
