"""Tests the pure part of `MultiConnector`: which child loads which tokens, and who is outstanding.

Hypothesis plays children that own prefixes of a prompt, and ranks whose children report in any
order, twice, or without having been asked.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.connectors.pair import Slice, Step
from tests.connectors.store_connector import StoreWorkerMetadata

from kvferry.connectors.contract import KVConnectorOutput, KVConnectorTransferResults, Request
from kvferry.connectors.multi.children import MAX_FAILURES, SLOW_CALL_S, Children
from kvferry.connectors.multi.children import Child as MultiChild
from kvferry.connectors.multi.connector import check_children, name_children
from kvferry.connectors.multi.lookup import ChildTraits, LoadPlan, TokenRange, find_plan
from kvferry.connectors.multi.metadata import MultiMetadata, MultiWorkerMetadata
from kvferry.connectors.multi.requests import FinishedTransfers, RequestTable
from kvferry.connectors.multi.scheduler import MultiScheduler
from kvferry.connectors.multi.transfers import RankTransfers
from kvferry.connectors.multi.worker import MultiWorker
from kvferry.errors import ConfigError, TransportError

BLOCK = 4


@dataclass
class Child:
    """A child that has the KV of the first `num_tokens` tokens, or is still looking."""

    num_tokens: int = 0
    honours: bool = True
    optional: bool = False
    dummy: bool = False
    is_async: bool = True
    is_looking: bool = False


@dataclass
class World:
    children: list[Child]
    asked: list[tuple[int, int]] = field(default_factory=list)

    def ask(self, child: int, num_computed: int) -> tuple[int | None, bool]:
        self.asked.append((child, num_computed))
        one = self.children[child]
        if one.is_looking:
            return None, False
        count = one.num_tokens - num_computed
        return (count, one.is_async) if count > 0 else (count, False)

    def plan(self, num_local: int, num_tokens: int) -> LoadPlan | None:
        traits = [
            ChildTraits(index, one.honours, one.optional, one.dummy)
            for index, one in enumerate(self.children)
        ]
        return find_plan(traits, self.ask, num_local, num_tokens, BLOCK)


def ranges(plan: LoadPlan | None) -> list[tuple[int, int, int]]:
    assert plan is not None
    return [(part.child, part.start, part.end) for part in plan.ranges]


# -- lookup --


def test_a_peer_is_asked_only_for_what_storage_lacks() -> None:
    world = World([Child(20), Child(8, optional=True)])
    assert ranges(world.plan(4, 20)) == [(1, 4, 8), (0, 8, 20)]
    assert world.asked == [(1, 4), (0, 8)]


def test_a_peer_is_not_asked_if_storage_has_all() -> None:
    world = World([Child(20), Child(20, optional=True)])
    assert ranges(world.plan(0, 20)) == [(1, 0, 20)]
    assert world.asked == [(1, 0)]


def test_no_child_is_asked_for_the_last_token_alone() -> None:
    """The engine computes the last token in any case."""
    world = World([Child(17), Child(16, optional=True)])
    assert ranges(world.plan(0, 17)) == [(1, 0, 16)]


def test_a_child_is_asked_for_the_last_token_if_the_engine_has_all_others() -> None:
    assert ranges(World([Child(17)]).plan(16, 17)) == [(0, 16, 17)]


def test_no_child_begins_inside_a_block_of_another() -> None:
    world = World([Child(20), Child(6, optional=True)])
    assert ranges(world.plan(0, 20)) == [(1, 0, 6)]


def test_the_longest_hit_wins_between_children_that_cannot_share() -> None:
    assert ranges(World([Child(8, honours=False), Child(12, honours=False)]).plan(0, 20)) == [
        (1, 0, 12)
    ]
    assert ranges(World([Child(8, honours=False), Child(8, honours=False)]).plan(0, 20)) == [
        (0, 0, 8)
    ]


def test_a_child_that_ignores_ranges_is_never_part_of_a_chain() -> None:
    world = World([Child(8, honours=False), Child(16), Child(12, optional=True)])
    assert ranges(world.plan(0, 20)) == [(2, 0, 12), (1, 12, 16)]
    world = World([Child(20, honours=False), Child(16), Child(12, optional=True)])
    assert ranges(world.plan(0, 20)) == [(0, 0, 20)]


def test_a_child_that_loads_within_a_step_is_not_joined_with_one_that_loads_between_steps() -> None:
    world = World([Child(20), Child(8, optional=True, is_async=False)])
    assert ranges(world.plan(0, 20)) == [(1, 0, 8)]


def test_a_negative_answer_is_no_hit() -> None:
    """vLLM's ExampleConnector answers so if the engine has more than the connector."""
    assert ranges(World([Child(4, honours=False)]).plan(16, 20)) == []


def test_a_pending_child_is_waited_for_only_if_it_can_change_the_plan() -> None:
    looking = Child(20, honours=False, is_looking=True)
    assert World([looking, Child(8)]).plan(0, 20) is None
    assert ranges(World([looking, Child(20)]).plan(0, 20)) == [(1, 0, 20)]


def test_the_lookups_of_all_storage_children_run_at_once_and_no_peer_is_asked_meanwhile() -> None:
    world = World([Child(20), Child(20, optional=True, is_looking=True), Child(8, optional=True)])
    assert world.plan(0, 20) is None
    assert world.asked == [(1, 0), (2, 0)]


def test_dummy_kv_is_used_only_if_no_child_has_real_kv() -> None:
    assert ranges(World([Child(19, dummy=True), Child(4)]).plan(0, 20)) == [(1, 0, 4)]
    assert ranges(World([Child(19, dummy=True), Child(0)]).plan(0, 20)) == [(0, 0, 19)]
    assert World([Child(19, dummy=True), Child(is_looking=True)]).plan(0, 20) is None


children = st.lists(
    st.builds(
        Child,
        st.integers(0, 6).map(lambda blocks: blocks * BLOCK),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.integers(0, 5).map(lambda dice: dice == 0),
    ),
    min_size=1,
    max_size=4,
)


@given(children, st.integers(0, 3), st.integers(1, 24))
def test_a_plan_has_no_gap_and_only_what_its_children_have(
    members: list[Child], num_local_blocks: int, num_tokens: int
) -> None:
    num_local = min(num_local_blocks * BLOCK, num_tokens)
    world = World(members)
    plan = world.plan(num_local, num_tokens)
    if plan is None:
        assert any(one.is_looking for one in members)
        return
    end = num_local
    for part in plan.ranges:
        assert (part.start, part.child in range(len(members))) == (end, True)
        assert part.end <= members[part.child].num_tokens
        # The last question to each child of the plan was about the range that it loads.
        assert [at for child, at in world.asked if child == part.child][-1] == part.start
        assert members[part.child].is_async == plan.is_async
        end = part.end
    assert end <= num_tokens
    if len(plan.ranges) > 1:
        assert all(members[part.child].honours for part in plan.ranges)
        assert len({part.child for part in plan.ranges}) == len(plan.ranges)
    real = [one for one in members if not one.dummy and not one.is_looking]
    if not any(members[part.child].dummy for part in plan.ranges):
        longest = max((min(one.num_tokens, num_tokens) for one in real), default=0)
        # No single child has more, save for the last token and for joins that are not possible.
        is_uniform = len({one.is_async for one in real}) <= 1
        if is_uniform:
            assert end >= min(longest, num_tokens - 1) or longest <= num_local


@given(st.integers(0, 24))
def test_an_engine_that_takes_fewer_tokens_takes_the_first(taken: int) -> None:
    plan = LoadPlan((TokenRange(1, 4, 12), TokenRange(0, 12, 20)), is_async=True)
    part = plan.first(taken)
    assert part.num_tokens == min(taken, 16)
    assert part.is_async == (taken > 0)
    assert all(one in (TokenRange(1, 4, 12), part.ranges[-1]) for one in part.ranges)


# -- calls --


def several(*sides: Any, clock: Callable[[], float] = time.monotonic) -> Children:
    traits = map(ChildTraits, range(len(sides)))
    return Children([MultiChild(*each, clock) for each in zip(sides, "AB", traits, strict=False)])


def only(side: object, **traits: bool) -> Children:
    return Children([MultiChild(side, type(side).__name__, ChildTraits(0, **traits))])


class Sluggish:
    """A connector whose calls take as long as the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.duration_s = 0.0
        self.error: Exception | None = None

    def wait_for_save(self) -> None:
        self.now += self.duration_s
        if self.error is not None:
            raise self.error

    get_transfer_results = wait_for_save

    def shutdown(self) -> None: ...


def test_calls_that_take_long_are_counted_whether_they_fail_or_not() -> None:
    child = Sluggish()
    children = several(child, clock=lambda: child.now)
    for duration_s, error in ((SLOW_CALL_S / 2, None), (SLOW_CALL_S, None), (9.0, OSError())):
        child.duration_s, child.error = duration_s, error
        children[0].call("wait_for_save")
    assert children.take_counts() == {
        "child_failures": {"A": 1},
        "child_slow_calls": {"A": 2},
    }
    assert children.take_counts() == {}


@pytest.mark.parametrize(
    ("call", "is_harmless", "is_disabled"),
    [
        ("wait_for_save", True, False),
        ("wait_for_save", False, True),
        # What the child would have reported is lost.
        ("get_transfer_results", True, True),
    ],
)
def test_a_harmless_timeout_disables_a_child_only_if_it_comes_again_and_again(
    call: str, is_harmless: bool, is_disabled: bool
) -> None:
    child = Sluggish()
    child.error = TimeoutError()
    children = only(child, store_timeouts_are_harmless=is_harmless)
    children[0].call(call)
    assert bool(children.disabled) == is_disabled
    for _ in range(MAX_FAILURES):
        children[0].call(call)
    assert children.disabled


class Looking:
    """A connector that has no answer until the test gives one."""

    now = 0.0
    answer: int | None = None

    def get_num_new_matched_tokens(self, request: object, count: int) -> tuple[int | None, bool]:
        return self.answer, True


def test_a_child_that_never_answers_runs_out_of_time() -> None:
    sides = Looking(), Looking()
    children = several(*sides)
    scheduler = MultiScheduler(children, BLOCK, 5, clock=lambda: sides[0].now)

    def ask_at(now: float) -> int | None:
        sides[0].now = now
        return scheduler.get_num_new_matched_tokens(cast(Request, Asked()), 0)[0]

    assert [ask_at(10), ask_at(14.9), ask_at(15)] == [None, None, 0]
    assert children.take_counts() == {"child_lookup_timeouts": {"A": 1, "B": 1}}
    sides[0].answer = 8
    assert ask_at(16) == 8
    assert children.take_counts()["child_slow_calls"] == {"A": 1}
    # The next lookup has the whole time again.
    sides[0].answer, sides[1].answer = None, 4
    assert [ask_at(100), ask_at(105)] == [None, 4]


class Synchronous:
    """A connector that loads within a step."""

    def get_num_new_matched_tokens(self, request: object, num_computed: int) -> tuple[int, bool]:
        return 2 * BLOCK, False


class Asked(NamedTuple):
    request_id: str = "r"
    num_tokens: int = 100
    cache_salt: str | None = ""


@pytest.mark.parametrize(
    ("is_safe", "is_dummy", "num_tokens"),
    [(True, False, 2 * BLOCK), (False, False, 0), (False, True, 2 * BLOCK)],
)
def test_a_child_loads_within_a_step_only_if_a_failure_gives_no_wrong_tokens(
    is_safe: bool, is_dummy: bool, num_tokens: int
) -> None:
    children = only(Synchronous(), provides_dummy_kv=is_dummy)
    scheduler = MultiScheduler(children, BLOCK, 1.0, may_load_within_steps=is_safe)
    asked = cast(Request, Asked())
    assert scheduler.get_num_new_matched_tokens(asked, 0) == (num_tokens, False)


class Saver(Synchronous):
    """A connector that is shown the names of a step's requests."""

    def on_new_request(self, request: object) -> None: ...

    def update_state_after_alloc(self, request: object, blocks: object, count: int) -> None: ...

    def build_connector_meta(self, step: Step) -> set[str]:
        return {part.request_id for part in step.slices}


@pytest.mark.parametrize(
    ("request_", "num_tokens"),
    [
        (Asked("plain"), 2 * BLOCK),
        (Asked("salt", cache_salt="salt"), 0),
        (Asked("unknown", cache_salt=None), 0),
    ],
)
def test_a_child_that_names_kv_by_tokens_only_serves_plain_requests_only(
    request_: Asked, num_tokens: int
) -> None:
    scheduler = MultiScheduler(only(Saver(), names_kv_by_tokens_only=True), BLOCK, 1.0)
    scheduler.on_new_request(cast(Request, request_))
    assert scheduler.get_num_new_matched_tokens(cast(Request, request_), 0) == (num_tokens, False)
    shown = {request_.request_id} if num_tokens else set()
    step = Step((Slice(request_.request_id, 0, ()),))
    assert scheduler.build_connector_meta(step).parts == (shown,)


# -- the transfers of a rank --


def test_failed_blocks_fail_the_loads_into_them_when_the_child_reports() -> None:
    rank = RankTransfers()
    rank.begin_load("a", [0, 1], frozenset({1, 2, 3}))
    rank.begin_load("b", [0], frozenset({1, 4}))
    rank.begin_load("c", [1], frozenset({5}))
    assert rank.fail_blocks(0, {2, 3, 9}, "broken") == {9}
    assert rank.fail_blocks(0, {5}, "not the child of that load") == {5}
    assert rank.take_loaded() == []
    for child, request in ((0, "a"), (1, "a"), (0, "b"), (1, "c")):
        rank.end_load(child, request)
    assert {load.request: dict(load.failures) for load in rank.take_loaded()} == {
        "a": {0: "broken"},
        "b": {},
        "c": {},
    }


class Loader:
    """A connector that reports the end of a load, and nothing else."""

    def bind_connector_metadata(self, metadata: object) -> None: ...

    def get_transfer_results(self, finished: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(finished_recving={"r"})

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()


def test_the_end_of_lmcaches_load_is_also_the_end_of_its_send() -> None:
    worker = MultiWorker(only(Loader(), reports_failed_blocks=True), num_groups=1)
    worker.bind_connector_metadata(MultiMetadata((object(),), loads={"r": (0,)}, sends={"r": (0,)}))
    results = worker.get_transfer_results({"r"})
    assert results.finished_recving == results.finished_sending == {"r"}
    assert worker.num_transfers == 0


class Failing(Loader):
    """A connector that fails in one call."""

    def __init__(self, call: str) -> None:
        self._call = call

    def shutdown(self) -> None: ...

    def start_load_kv(self, forward_context: object) -> None:
        self._fail_in("start_load_kv")

    def wait_for_save(self) -> None:
        self._fail_in("wait_for_save")

    def get_transfer_results(self, finished: set[str]) -> KVConnectorTransferResults:
        self._fail_in("get_transfer_results")
        return KVConnectorTransferResults()

    def _fail_in(self, call: str) -> None:
        if call == self._call:
            raise OSError(call)


def end_of_step(call: str, has_drafter: bool) -> set[int]:
    """The blocks that a rank with two KV-cache groups reports as not loaded when a child fails."""
    worker = MultiWorker(only(Failing(call)), num_groups=2)
    worker.bind_connector_metadata(MultiMetadata((object(),), sync_blocks={0: frozenset({3})}))
    worker.start_load_kv(None)
    if not has_drafter:
        worker.wait_for_save()
    worker.get_transfer_results(set())
    invalid = worker.get_block_ids_with_load_errors()
    if has_drafter:
        worker.wait_for_save()
    return invalid


@pytest.mark.parametrize("has_drafter", [False, True])
def test_a_child_that_fails_after_the_forward_pass_does_not_end_the_step(has_drafter: bool) -> None:
    assert end_of_step("get_transfer_results", has_drafter) == {3}
    # With a drafter, the child has said before that it filled the block.
    assert end_of_step("wait_for_save", has_drafter) == (set() if has_drafter else {3})
    with pytest.raises(TransportError, match="cannot take back single blocks"):
        end_of_step("start_load_kv", has_drafter)


def test_a_child_that_follows_lookups_sees_no_request_that_starts_over() -> None:
    table = RequestTable()
    for request in ("failed", "reset", "fine"):
        table.offer(request, 0, LoadPlan((TokenRange(1, 0, 8),), is_async=True))
        table.admit(request, 8)
    table.note_failed("failed", [1])
    table.take_finished(["failed", "fine"], [])
    # The engine goes on with one request before it resets its caches.
    table.admit("fine", 0)
    table.bar_loads()
    assert table.hidden_from(ChildTraits(1, follows_lookups=True)) == {"failed", "reset"}
    assert table.hidden_from(ChildTraits(0)) == set()


@given(st.data())
def test_a_rank_reports_once_and_only_after_the_last_child(data: st.DataObject) -> None:
    members = data.draw(st.sets(st.integers(0, 3), min_size=1))
    failing = data.draw(st.sets(st.sampled_from(sorted(members))))
    begin, end = data.draw(
        st.sampled_from(
            [
                (RankTransfers.begin_load, RankTransfers.end_load),
                (RankTransfers.begin_send, RankTransfers.end_send),
            ]
        )
    )
    rank = RankTransfers()
    begin(rank, "r", members)
    waiting = set(members)
    for child in data.draw(st.lists(st.integers(0, 3), max_size=20)):
        was_waiting = bool(waiting)
        failure = ["failed"] if end is RankTransfers.end_load and child in failing else []
        end(rank, child, "r", *failure)
        waiting.discard(child)
        ended = {load.request for load in rank.take_loaded()} | rank.take_sent()
        assert ended == ({"r"} if was_waiting and not waiting else set())
    for child in waiting:
        rank.drop_child(child, "dropped")
    assert len(rank) == 0


def test_a_load_names_every_child_that_failed() -> None:
    rank = RankTransfers()
    rank.begin_load("r", [0, 1, 2])
    rank.end_load(0, "r")
    rank.end_load(1, "r", "no peer")
    rank.drop_child(2, "disabled")
    (load,) = rank.take_loaded()
    assert load.failures == {1: "no peer", 2: "disabled"}


# -- requests --


def loading(*members: int) -> RequestTable:
    table = RequestTable()
    parts = tuple(TokenRange(child, 4 * at, 4 * at + 4) for at, child in enumerate(members))
    table.offer("r", 0, LoadPlan(parts, is_async=True))
    table.admit("r", 4 * len(members))
    return table


@pytest.mark.parametrize("order", [("load", "send"), ("send", "load")])
def test_one_report_ends_the_load_and_the_sends_of_a_request_that_ended_early(
    order: tuple[str, str],
) -> None:
    """vLLM frees the blocks at the first report and fails on a second one."""
    table = loading(0)
    assert not table.finish("r", [1])
    reports = {"load": (["r"], []), "send": ([], ["r"])}
    told = [table.take_finished(*reports[each])[0] for each in order]
    assert told == [FinishedTransfers(), FinishedTransfers(recving={"r"})]
    assert len(table) == 0


def test_each_child_is_told_of_its_own_failure_only() -> None:
    table = loading(0, 1)
    table.note_failed("r", [1])
    engine, by_child = table.take_finished(["r"], [])
    assert engine == FinishedTransfers(recving={"r"})
    assert by_child == {0: engine, 1: FinishedTransfers(recving={"r"}, failed={"r"})}
    assert not table.get("r").may_load_from(0)
    assert not table.get("r").may_load_from(1)
    assert not table.get("r").is_complete


def test_dummy_kv_hides_a_request_and_all_that_may_have_its_blocks() -> None:
    table = RequestTable(dummies=[1])
    for name, num_local, plan in (
        ("before", 8, LoadPlan()),
        ("dummy", 0, LoadPlan((TokenRange(1, 0, 19),))),
        ("fresh", 0, LoadPlan()),
        ("shares a prefix", 8, LoadPlan()),
    ):
        table.offer(name, num_local, plan)
        table.admit(name, plan.num_tokens)
    assert table.hidden_from(ChildTraits(0)) == {"dummy", "shares a prefix"}
    assert table.hidden_from(ChildTraits(1)) == {"shares a prefix"}


# -- children --


def test_a_child_is_disabled_if_it_keeps_failing_or_fails_decisively() -> None:
    sides, disabled = (Sluggish(), Sluggish()), list[str]()
    children = several(*sides)
    children.watch_disabled(lambda child: disabled.append(child.name))
    too_few = [OSError()] * (MAX_FAILURES - 1)
    for error in (*too_few, None, *too_few):
        sides[0].error = error
        children[0].call("wait_for_save", is_decisive=False)
    assert disabled == []
    children[0].call("wait_for_save", is_decisive=False)
    children[0].disable("once more")
    sides[1].error = OSError("gone")
    children[1].call("get_transfer_results")
    assert disabled == ["A", "B"]
    assert children.disabled[1] == "B failed in get_transfer_results: OSError: gone"


class Listening:
    """A connector that keeps what its ranks have sent."""

    def __init__(self) -> None:
        self.heard: Any = None

    def update_connector_output(self, output: Any) -> None:
        self.heard = output.kv_connector_worker_meta

    def shutdown(self) -> None: ...


@pytest.mark.parametrize("wrong", [7, None, {}])
def test_messages_of_ranks_that_their_class_cannot_join_disable_one_child(wrong: Any) -> None:
    connectors = [Listening(), Listening()]
    children = several(*connectors)
    scheduler = MultiScheduler(children, BLOCK, 1.0)
    ranks = [MultiWorkerMetadata({0: [wrong], 1: [StoreWorkerMetadata(1)]}) for _ in range(3)]
    report = ranks[0].aggregate(ranks[1]).aggregate(ranks[2])
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    assert list(children.disabled) == [0]
    assert connectors[1].heard == StoreWorkerMetadata(3)


def test_equal_children_have_different_names() -> None:
    assert name_children(["A", "B", "A"]) == ["A[0]", "B", "A[2]"]


def test_children_that_cannot_work_together_are_both_named() -> None:
    with pytest.raises(ConfigError, match=r"A and C, but an engine has one side channel"):
        check_children(["A", "B", "C"], [0, 2], [None, None, None])
    with pytest.raises(ConfigError, match=r"A requires .* HND and C requires NHD"):
        check_children(["A", "B", "C"], [0], ["HND", None, "NHD"])
    assert check_children(["A", "B", "C"], [0], ["HND", None, "HND"]) == "HND"
