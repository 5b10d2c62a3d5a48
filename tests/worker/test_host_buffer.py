"""Tests transfer workers whose transports use a host buffer: both engines hold the right bytes, no
reader starts before the bytes are in the host buffer, and no block is freed early.
"""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.worker.world import NUM_BLOCKS, Place, Side, World

from kvferry.events import BytesMoved, TransferFailed, TransferFinished
from kvferry.protocol import messages as codec
from kvferry.transports.host_buffer import store as mirror
from kvferry.types import RequestId
from kvferry.worker.commands import AbandonLease, AbortLoad, SkipLoad

STAGED, DIRECT = Place(uses_host_buffer=True), Place()
MakeWorld = Callable[[Place, Place], World]


@pytest.fixture(autouse=True)
def _slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy one region per tick, so that other events can happen while blocks are being copied."""
    monkeypatch.setattr(mirror, "SLICE_BYTES", 1)


@pytest.fixture
def make() -> Iterator[MakeWorld]:
    worlds: list[World] = []

    def world(p: Place, d: Place) -> World:
        worlds.append(World(place_of_p=p, place_of_d=d))
        return worlds[-1]

    yield world
    for made in worlds:
        for side in made.sides:
            side.close()


def moved(side: Side) -> int:
    return sum(event.total_bytes for event in side.events if isinstance(event, BytesMoved))


@pytest.mark.parametrize(("p", "d"), list(product((DIRECT, STAGED), repeat=2)))
def test_the_engines_blocks_are_right_whoever_is_staged(
    make: MakeWorld, p: Place, d: Place
) -> None:
    world = make(p, d)
    ticket = world.p.issue("a", [3, 4, 9])
    world.p.grant("a")
    world.d.track("r", ticket)
    world.d.start("r", [20, 7, 8], range(0, 12))
    world.run()
    assert world.d.finished() == ["r"]
    assert (world.d.memory[:, [20, 7, 8]] == world.p.memory[:, [3, 4, 9]]).all()
    assert not np.delete(world.d.memory, [20, 7, 8], axis=1).any()
    assert world.p.freed() == [("a", "confirmed")]
    world.assert_quiescent()


def test_only_what_was_read_is_copied_to_a_staged_engine(make: MakeWorld) -> None:
    """A local prefix is only in the engine's memory; the host buffer holds old bytes there."""
    world = make(DIRECT, STAGED)
    world.d.memory[:, [20, 7]] = 7
    ticket = world.p.issue("a", [3, 4, 9])
    world.p.grant("a")
    world.d.track("r", ticket)
    world.d.start("r", [20, 7, 8], range(8, 12))
    world.run()
    assert world.d.finished() == ["r"]
    assert (world.d.memory[:, [20, 7]] == 7).all()
    assert (world.d.memory[:, 8] == world.p.memory[:, 9]).all()


def test_only_granted_blocks_are_copied_to_the_mirror(make: MakeWorld) -> None:
    world = make(STAGED, DIRECT)
    world.p.issue("a", [3, 4, 9])
    world.p.grant("a")
    world.run()
    assert (world.p.mirror[:, [3, 4, 9]] == world.p.memory[:, [3, 4, 9]]).all()
    assert not np.delete(world.p.mirror, [3, 4, 9], axis=1).any()


def test_a_reader_that_overtakes_the_grant_waits_until_the_bytes_are_there(make: MakeWorld) -> None:
    world = make(STAGED, DIRECT)
    ticket = world.p.issue("a", [3])
    world.d.track("r", ticket)
    world.d.start("r", [5], range(0, 4))
    world.run()
    assert (world.d.finished(), moved(world.d)) == ([], 0)
    world.p.grant("a")
    world.run()
    assert world.d.finished() == ["r"]
    assert (world.d.memory[:, 5] == world.p.memory[:, 3]).all()
    world.assert_quiescent()


def test_one_that_does_not_wait_reads_old_bytes_and_is_not_confirmed(make: MakeWorld) -> None:
    """The negative control: P hides that it uses a host buffer, so D reads immediately."""
    world = make(STAGED, DIRECT)
    layout = codec.decode_layout(world.p.layouts[0])
    layout = type(layout)(
        **{name: getattr(layout, name) for name in layout.__struct_fields__}
        | {"uses_host_buffer": False}
    )
    world.p.layouts[0] = codec.encode_layout(layout)
    ticket = world.p.issue("a", [3])
    world.d.track("r", ticket)
    world.d.start("r", [5], range(0, 4))
    world.run()
    assert moved(world.d) > 0
    assert not (world.d.memory[:, 5] == world.p.memory[:, 3]).any(axis=1).all(), (
        "the host buffer had the bytes already"
    )
    assert world.d.finished() == []
    assert "not ready" in world.d.failed()[0]


def test_without_the_rule_old_bytes_would_be_used(make: MakeWorld) -> None:
    """The same with a P that confirms as if it had no host buffer: the comparison used by all these
    tests fails.
    """
    world = make(DIRECT, DIRECT)
    fresh = world.p.memory.copy()
    world.p.memory[:] = 0  # simulates a host buffer before the copy
    ticket = world.p.issue("a", [3])
    world.d.track("r", ticket)
    world.d.start("r", [5], range(0, 4))
    world.run()
    world.p.grant("a")
    world.p.memory[:] = fresh
    world.run()
    assert world.d.finished() == ["r"]
    assert not (world.d.memory[:, 5] == world.p.memory[:, 3]).all()


def test_a_grant_that_never_comes_fails_the_request(make: MakeWorld) -> None:
    world = make(STAGED, STAGED)
    ticket = world.p.issue("a", [3])
    world.d.track("r", ticket)
    world.d.start("r", [5], range(0, 4))
    world.run()
    world.clock.advance(5.1)
    world.run()
    assert "no lease was granted within 5 s" in world.d.failed()[0]
    world.assert_quiescent()


@pytest.mark.parametrize("command", [AbandonLease, None], ids=["abandoned", "expired"])
def test_blocks_are_not_freed_while_they_are_copied(
    make: MakeWorld, command: type[AbandonLease] | None
) -> None:
    world = make(STAGED, DIRECT)
    world.p.issue("a", [3])
    world.p.grant("a")
    world.p.step()
    assert world.p.transfer_worker.idle_s() == 0, "the copy wants its next turn"
    if command is None:
        world.clock.advance(31)
    else:
        world.p.inbox.append(command(RequestId("a")))
    world.p.step()
    assert (world.p.freed(), world.p.transfer_worker.snapshot().leases) == ([], 1)
    world.run()
    assert world.p.freed() == [("a", "expired" if command is None else "released")]
    assert (world.p.mirror[:, 3] == world.p.memory[:, 3]).all(), "it was copied to the end"
    world.assert_quiescent()


def test_blocks_that_are_not_there_are_refused_to_the_readers_and_freed(make: MakeWorld) -> None:
    world = make(STAGED, DIRECT)
    ticket = world.p.issue("a", [3])
    world.p.issued["a"] = [NUM_BLOCKS]
    world.d.track("r", ticket)
    world.d.start("r", [5], range(0, 4))
    world.run()
    world.p.grant("a")
    world.run()
    assert "could not be copied to the host buffer" in world.d.failed()[0]
    assert world.p.freed() == [("a", "released")]
    world.assert_quiescent()


def test_a_confirmation_alone_does_not_finish_a_staged_load(make: MakeWorld) -> None:
    world = make(DIRECT, STAGED)
    ticket = world.p.issue("a", [3])
    world.p.grant("a")
    world.d.track("r", ticket)
    world.d.start("r", [5], range(0, 4))
    while not world.p.freed():
        world.run(1)
    world.d.step()
    assert world.d.finished() == []
    assert not world.d.memory[:, 5].all()
    world.run()
    assert world.d.finished() == ["r"]
    assert (world.d.memory[:, 5] == world.p.memory[:, 3]).all()


class Story:
    """Many concurrent requests with random outcomes; freed blocks are used again immediately."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.rng = np.random.default_rng(seed)
        self.free = {"p": list(range(NUM_BLOCKS)), "d": list(range(NUM_BLOCKS))}
        self.held: dict[str, list[int]] = {}
        self.loads: dict[str, tuple[list[int], np.ndarray]] = {}
        self.count = 0

    def begin(self) -> None:
        if len(self.free["p"]) < 2 or len(self.free["d"]) < 2:
            return
        self.count += 1
        name, world = f"{self.count}", self.world
        theirs, ours = ([self.free[side].pop() for _ in range(2)] for side in "pd")
        world.p.memory[:, theirs] = self.rng.integers(
            1, 256, world.p.memory[:, theirs].shape, dtype=np.uint8
        )
        self.held[name] = theirs
        ticket = world.p.issue(name, theirs)
        world.p.grant(name)
        world.d.track(name, ticket)
        match self.rng.integers(4):
            case 0:
                world.d.inbox.append(SkipLoad(RequestId(name)))
                self.free["d"] += ours
            case _:
                self.loads[name] = ours, world.p.memory[:, theirs].copy()
                world.d.start(name, ours, range(0, 8))
                if self.rng.random() < 0.15:
                    self.abort(name)

    def abort(self, name: str) -> None:
        self.world.d.inbox.append(AbortLoad(RequestId(name)))

    def turn(self) -> None:
        self.begin()
        if self.loads and self.rng.random() < 0.03:
            self.abort(str(self.rng.choice(sorted(self.loads))))
        side = self.world.sides[self.rng.integers(2)]
        side.step()
        for name, _ in self.world.p.freed():
            # A reader that still reads these blocks would read these bytes.
            self.world.p.memory[:, self.held.get(name, [])] = 255
            self.free["p"] += self.held.pop(name, [])
        for event in self.world.d.events:
            if isinstance(event, TransferFinished | TransferFailed) and event.request in self.loads:
                ours, content = self.loads.pop(event.request)
                if isinstance(event, TransferFinished):
                    assert (self.world.d.memory[:, ours] == content).all()
                self.world.d.memory[:, ours] = 0
                self.free["d"] += ours


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**32),
    p=st.sampled_from([STAGED, DIRECT]),
    d=st.sampled_from([STAGED, DIRECT]),
)
def test_whatever_comes_in_between_finished_loads_hold_the_right_bytes_and_nothing_is_left(
    seed: int, p: Place, d: Place
) -> None:
    world = World(place_of_p=p, place_of_d=d)
    story = Story(world, seed)
    for _ in range(200):
        story.turn()
    # Every block of D may be waiting for its copy, which moves one slice per tick.
    world.run(400)
    world.clock.advance(31)
    world.run()
    assert len(world.d.finished()) > 0
    assert len(world.p.freed()) == story.count
    world.assert_quiescent()
    for side in world.sides:
        side.close()
