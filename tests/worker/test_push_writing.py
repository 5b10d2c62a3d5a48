"""Tests push by writing with random events in random order, on real transfer workers that move real
bytes.

Transfers move one layer per tick, so that any other event can happen in the middle of a transfer.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from tests.sampling import exhaustive
from tests.worker.push_world import Load, Mode, Prefill, PushWorld

from kvferry.events import Event
from kvferry.types import RequestId
from kvferry.worker.commands import AbandonLease, WorkerCommand
from kvferry.worker.worker import TransferWorker

FENCED, SLOWLY_FENCED, UNFENCED, READ = (
    Mode(),
    Mode(fence_polls=4),
    Mode(fence_polls=None),
    Mode(lends=False),
)
PICK = st.integers(0, 99)
TURNS = st.integers(0, 14)
# One example is long, and shrinking it takes minutes. Add `Phase.shrink` here to debug a failure.
SETTINGS = settings(
    max_examples=10, stateful_step_count=60, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)


@pytest.fixture(autouse=True)
def _one_layer_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.transports.copying.SLICE_BYTES", 1)


class Storm(RuleBasedStateMachine):
    def __init__(self, mode: Mode, p_size: int, d_size: int) -> None:
        super().__init__()
        self.world = PushWorld(mode, p_size, d_size)
        self.stopped: set[int] = set()
        self.num_handovers = 0
        self.left: set[str] = set()
        """Requests of D that were aborted or settled."""
        self.given_up: set[str] = set()
        # At the start, two requests have their blocks and wait for P to write or for D to read.
        for num_tokens in (12, 16):
            self.arrive(pick=2, num_tokens=num_tokens, prefix=0, legs="b", turns=4)

    # -- requests by state

    def running(self) -> list[Prefill]:
        return [each for each in self.world.prefills.values() if each.computed < each.num_tokens]

    def held(self) -> list[Prefill]:
        return [
            each
            for each in self.world.prefills.values()
            if each.held_by and each.request not in self.given_up
        ]

    def waiting(self) -> list[Load]:
        return [
            each
            for each in self.world.loads.values()
            if not each.blocks and not each.ended_on and each.request not in self.left
        ]

    def loading(self) -> list[Load]:
        return [each for each in self.world.unended() if each.request not in self.left]

    def done(self) -> list[Load]:
        return [
            each
            for each in self.world.loads.values()
            if each.blocks and len(each.ended_on) == len(self.world.d)
        ]

    # -- both legs

    @rule(
        pick=PICK,
        num_tokens=st.integers(1, 16),
        prefix=st.integers(-1, 2),
        legs=st.sampled_from("pdbbbbbb"),
        turns=TURNS,
    )
    def arrive(self, pick: int, num_tokens: int, prefix: int, legs: str, turns: int) -> None:
        """Start a request with P's leg, D's leg or both. In some cases the legs have different
        prompts, or D wants a shorter prefix.
        """
        self.num_handovers += 1
        match_id = f"h{self.num_handovers}"
        if legs in "db":
            wanted = num_tokens // 2 if pick % 4 == 1 and num_tokens > 8 else num_tokens
            load = self.world.expect(
                match_id, self.num_handovers + (pick == 0), wanted // 4 * 4 or wanted
            )
            if prefix >= 0:
                self.world.start(load, prefix)
        if legs in "pb":
            self.world.begin(match_id, self.num_handovers, num_tokens)
        self.run_on(turns)

    @precondition(lambda self: self.world.loads)
    @rule(pick=PICK, is_started=st.booleans())
    def share(self, pick: int, is_started: bool) -> None:
        """Add another sample of a request, which shares the prefill of the first one."""
        first = [*self.world.loads.values()][pick % len(self.world.loads)]
        load = self.world.expect(first.match_id, first.prompt, first.num_tokens)
        if is_started:
            self.world.start(load)

    @precondition(lambda self: self.world.loads)
    @rule(pick=PICK)
    def begin_late(self, pick: int) -> None:
        load = [*self.world.loads.values()][pick % len(self.world.loads)]
        if all(prefill.match_id != load.match_id for prefill in self.world.prefills.values()):
            self.world.begin(load.match_id, load.prompt, load.num_tokens)

    # -- P

    @precondition(lambda self: self.running())
    @rule(pick=PICK, num_blocks=st.integers(1, 4), turns=TURNS)
    def compute(self, pick: int, num_blocks: int, turns: int) -> None:
        self.world.compute(self.running()[pick % len(self.running())], num_blocks)
        self.run_on(turns)

    @precondition(lambda self: self.running())
    @rule(turns=TURNS)
    def compute_all(self, turns: int) -> None:
        for prefill in self.running():
            self.world.compute(prefill, 2)
        self.run_on(turns)

    @precondition(lambda self: self.running())
    @rule(pick=PICK)
    def preempt(self, pick: int) -> None:
        self.world.preempt(self.running()[pick % len(self.running())])

    @precondition(lambda self: self.running())
    @rule(pick=PICK)
    def preempt_within_a_turn(self, pick: int) -> None:
        prefill = self.running()[pick % len(self.running())]
        transport = self.world.transport(self.world.p[pick % len(self.world.p)])
        transport.meanwhile = lambda: (
            self.world.preempt(prefill) if prefill in self.running() else None
        )

    @precondition(lambda self: self.running())
    @rule(pick=PICK)
    def fail_prefill(self, pick: int) -> None:
        if pick % 3 == 0:
            self.world.fail_prefill(self.running()[pick % len(self.running())])

    @precondition(lambda self: self.held())
    @rule(pick=PICK)
    def abandon(self, pick: int) -> None:
        prefill = self.held()[pick % len(self.held())]
        self.given_up.add(prefill.request)
        self.world.tell(self.world.p, AbandonLease(RequestId(prefill.request)))

    # -- D

    @precondition(lambda self: self.waiting())
    @rule(pick=PICK, prefix=st.integers(0, 2))
    def start(self, pick: int, prefix: int) -> None:
        self.world.start(self.waiting()[pick % len(self.waiting())], prefix)

    @precondition(lambda self: self.waiting())
    @rule(pick=PICK)
    def settle(self, pick: int) -> None:
        load = self.waiting()[pick % len(self.waiting())]
        if pick % 3 == 0:
            self.left.add(load.request)
            self.world.settle(load)

    @precondition(lambda self: self.loading() or self.waiting())
    @rule(pick=PICK)
    def abort(self, pick: int) -> None:
        loads = [*self.loading(), *self.waiting()]
        self.left.add(loads[pick % len(loads)].request)
        self.world.abort(loads[pick % len(loads)])

    @precondition(lambda self: self.done())
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        self.world.release(self.done()[pick % len(self.done())])

    # -- time and faults

    @rule(pick=PICK, turns=st.integers(1, 4))
    def step_one(self, pick: int, turns: int) -> None:
        side = self.world.sides[pick % len(self.world.sides)]
        for _ in range(turns):
            self.world.step(side)

    @rule(turns=TURNS)
    def run_on(self, turns: int) -> None:
        for _ in range(turns):
            for number, side in enumerate(self.world.sides):
                if number not in self.stopped:
                    self.world.step(side)

    @rule(seconds=st.sampled_from([0.2, 0.5, 1.0, 1.0, 5.0, 5.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(
        what=st.sampled_from(
            ["wait", "stop", "stop", "drop", "cut", "cut", "replace", "", "", "", "", ""]
        ),
        pick=PICK,
        turns=TURNS,
    )
    def trouble(self, what: str, pick: int, turns: int) -> None:
        """Faults must be much rarer than the other events, or no transfer would ever succeed."""
        world = self.world
        match what:
            case "wait":
                world.wait(31.0 if pick % 2 else 120.0)
            case "stop":
                self.stopped = {pick % len(world.sides)} if pick % 2 else set()
            case "drop":
                world.drop_connections(world.sides[pick % len(world.sides)])
            case "cut":
                world.cut(world.p[pick % len(world.p)])
            case "replace":
                world.replace_p()
        self.run_on(turns)

    @precondition(lambda self: self.running() and self.loading())
    @rule(what=st.sampled_from(["drop", "abort", "wait", "preempt"]), pick=PICK, turns=TURNS)
    def cross(self, what: str, pick: int, turns: int) -> None:
        """Something happens to D or to P's engine while P is stopped with bytes in flight."""
        world = self.world
        for prefill in self.running():
            world.compute(prefill, 1 + pick % 2)
        for _ in range(1 + pick % 3):
            for side in world.p:
                world.step(side)
        match what:
            case "drop":
                world.drop_connections(world.d[pick % len(world.d)])
            case "abort":
                self.abort(pick)
            case "wait":
                world.wait(31.0)
            case "preempt" if self.running():
                self.preempt(pick)
        for _ in range(turns):
            for side in world.d:
                world.step(side)
        for side in world.p:
            world.step(side)

    @rule(pick=PICK, num_slices=st.sampled_from([0, 0, 1, 1, 2, 20]))
    def be_fast(self, pick: int, num_slices: int) -> None:
        self.world.transport(
            self.world.sides[pick % len(self.world.sides)]
        ).slices_per_poll = num_slices

    def teardown(self) -> None:
        world = self.world
        try:
            for prefill in self.running():
                world.fail_prefill(prefill)
            for load in self.waiting():
                world.abort(load)
            for side in world.sides:
                world.transport(side).slices_per_poll = 1
            for _ in range(50):
                world.run(4)
                world.wait(20.0)
            assert not [load.request for load in world.unended()]
            assert not [prefill.request for prefill in world.prefills.values() if prefill.held_by]
            for _ in range(24):
                world.run(2)
                world.wait(190.0)
            world.run(2)
            for side in world.sides:
                held = side.transfer_worker.snapshot()
                assert held == type(held)(), (side.name, side.place, held)
        finally:
            world.close()


@pytest.mark.parametrize(
    "sizes",
    [*(pytest.param(size, marks=exhaustive) for size in [(1, 1), (2, 2)]), (2, 1), (1, 2)],
    ids=str,
)
@pytest.mark.parametrize(
    "mode", [FENCED, SLOWLY_FENCED, UNFENCED, READ], ids=["fenced", "slowly", "unfenced", "read"]
)
def test_no_storm_makes_a_wrong_byte_or_leaves_anything_behind(
    mode: Mode, sizes: tuple[int, int]
) -> None:
    class Made(Storm):
        def __init__(self) -> None:
            super().__init__(mode, *sizes)

    run_state_machine_as_test(Made, settings=SETTINGS)


# -- negative controls, and events that the random test would hardly meet --


def filling(world: PushWorld, num_tokens: int = 8, of_tokens: int = 8) -> tuple[Load, Prefill]:
    """Grant P writes into D's blocks, and let P compute the tokens that D wants."""
    load = world.expect("h", 1, num_tokens)
    world.start(load)
    world.run(8)
    prefill = world.begin("h", 1, of_tokens)
    world.compute(prefill, num_tokens // 4)
    return load, prefill


def steps(world: PushWorld, name: str, turns: int) -> None:
    for _ in range(turns):
        for side in world.p if name == "p" else world.d:
            world.step(side)


@pytest.fixture
def make_world() -> Iterator[Callable[..., PushWorld]]:
    worlds: list[PushWorld] = []

    def make(*args: Any) -> PushWorld:
        worlds.append(PushWorld(*args))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def write_after_the_consumer_has_given_up(world: PushWorld, turns: int) -> None:
    """P is in the middle of a write, and does not learn that D has lost the connection."""
    filling(world)
    steps(world, "p", 1)
    world.drop_connections(world.d[0])
    steps(world, "d", turns)
    steps(world, "p", 8)


@pytest.mark.parametrize("turns", range(1, 9))
@pytest.mark.parametrize("mode", [FENCED, SLOWLY_FENCED, UNFENCED], ids=str)
def test_what_lands_late_lands_in_blocks_that_are_lent(
    make_world: Callable[..., PushWorld], mode: Mode, turns: int
) -> None:
    world = make_world(mode)
    write_after_the_consumer_has_given_up(world, turns)
    world.run()
    assert world.failed == ["d0-h"]


def test_a_fence_that_lies_is_found_out(make_world: Callable[..., PushWorld]) -> None:
    with pytest.raises(AssertionError, match="something was written into blocks"):
        write_after_the_consumer_has_given_up(make_world(Mode(fence_polls=20, lies=True)), 3)


class HastyWorker(TransferWorker):
    """A wrong worker: it settles finished writes and does all its other work before it handles the
    commands that the engine sent in the meantime.
    """

    def step(
        self,
        commands: Sequence[WorkerCommand],
        *,
        wait_s: float | None = None,
        late_commands: Callable[[], Sequence[WorkerCommand]] = tuple,
        engine_seen_at: float = math.inf,
    ) -> list[Event]:
        return [*super().step((), wait_s=0), *super().step((*commands, *late_commands()), wait_s=0)]


def preempt_while_all_is_copied(world: PushWorld) -> None:
    """P's engine preempts and reuses the blocks in the same tick that copies them."""
    _, prefill = filling(world, 8, 12)
    for side in world.p:
        world.transport(side).slices_per_poll = 20
    world.transport(world.p[0]).meanwhile = lambda: world.preempt(prefill)
    steps(world, "p", 3)
    world.run()
    assert world.finished == []
    world.compute(prefill, 3)
    world.run()
    assert world.finished == ["d0-h"]


@pytest.mark.parametrize("mode", [FENCED, UNFENCED], ids=str)
def test_what_was_copied_while_the_engine_took_it_back_is_not_settled(
    make_world: Callable[..., PushWorld], mode: Mode
) -> None:
    preempt_while_all_is_copied(make_world(mode))


def preempt_at_every_moment(make_world: Callable[..., PushWorld], mode: Mode) -> list[list[str]]:
    """Let P preempt its blocks, and use them for another request, after each number of ticks.
    Return for each number the requests that had received all their tokens.
    """
    finished = []
    for turns in range(8):
        world = make_world(mode)
        _, prefill = filling(world, 8, 12)
        steps(world, "p", turns)
        world.preempt(prefill)
        world.run()
        finished.append(list(world.finished))
        world.compute(prefill, 3)
        world.run()
        assert world.finished == ["d0-h"]
    return finished


@pytest.mark.parametrize("mode", [FENCED, SLOWLY_FENCED, UNFENCED, READ], ids=str)
def test_blocks_that_are_taken_back_at_any_moment_hand_over_nothing_wrong(
    make_world: Callable[..., PushWorld], mode: Mode
) -> None:
    finished = preempt_at_every_moment(make_world, mode)
    assert finished[0] == []
    assert finished[-1] == ([] if mode is READ else ["d0-h"]), (
        "that late it had been settled; a reader waits for its own turns"
    )


def test_a_ferry_that_settles_before_it_obeys_is_found_out(
    make_world: Callable[..., PushWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.worker.world.TransferWorker", HastyWorker)
    with pytest.raises(AssertionError, match=r"token \d+ of d0-h is wrong"):
        preempt_while_all_is_copied(make_world(FENCED))


@pytest.mark.parametrize("turns", range(1, 8))
def test_a_heartbeat_that_comes_as_the_last_byte_is_settled_does_no_harm(
    make_world: Callable[..., PushWorld], turns: int
) -> None:
    world = make_world(FENCED)
    filling(world)
    steps(world, "p", turns)
    world.wait(5.0)
    steps(world, "d", 1)
    world.run()
    assert (world.finished, world.failed) == (["d0-h"], [])


def test_after_a_data_connection_has_broken_the_next_requests_are_written_again(
    make_world: Callable[..., PushWorld],
) -> None:
    world = make_world(FENCED)
    written = []
    for number in range(4):
        if number == 1:
            world.cut(world.p[0])
        load = world.expect(f"h{number}", number, 8)
        world.start(load)
        world.run(8)
        world.compute(world.begin(f"h{number}", number, 8), 2)
        world.run()
        written.append(world.written_bytes)
    assert (len(world.finished), world.failed) == (4, [])
    assert written == [written[0], written[0], 2 * written[0], 3 * written[0]]
    assert world.read_bytes == written[0]
