"""Tests many producers, dead, restarted and idle ones, over real sockets: no transfer waits for
another producer, and no socket stays open.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from tests.ports import reserve_port
from tests.worker.world import NUM_BLOCKS, SECRET, Side

from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.tickets import Ticket, TicketKey, runs_from_blocks
from kvferry.testing.local import ManualClock
from kvferry.transports.base import ControlEvent, ControlTransport, Route
from kvferry.transports.memory import MemoryNetwork
from kvferry.transports.zmq import CurveKeys, ZmqTransport

KEYS = CurveKeys.from_secret(b"of these tests")
DEADLINE_S = 60.0
CROWD = 200
PEER_TTL_S = 3600
"""The peer TTL of the sides that `PeerWorld` makes; the tests advance the clock."""


class PrefillCounts:
    """A control transport that counts the messages its owner sends and receives."""

    def __init__(self, inner: ControlTransport) -> None:
        self._inner = inner
        self.sent = self.received = 0

    @property
    def address(self) -> str:
        return self._inner.address

    def send(self, address: str, frame: bytes) -> None:
        self.sent += 1
        self._inner.send(address, frame)

    def reply(self, route: Route, frame: bytes) -> None:
        self._inner.reply(route, frame)

    def poll(self, timeout_s: float | None) -> list[ControlEvent]:
        events = self._inner.poll(timeout_s)
        self.received += len(events)
        return events

    def wake(self) -> None:
        self._inner.wake()

    def forget(self, address: str) -> None:
        self._inner.forget(address)

    def close(self) -> None:
        self._inner.close()


class PeerWorld:
    """One consumer and as many producers as a test adds, each with its own sockets. `run` waits in
    real time for the sockets; protocol deadlines pass only when a test advances the clock.
    """

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._network = MemoryNetwork()
        self._sides: list[Side] = []
        self.wire = PrefillCounts(opened())
        self.d = self._add(
            Side("d", "f1", self._network, self.clock, channels=(self.wire, opened()))
        )

    def producer(self, name: str, epoch: str = "e1", port: int = 0) -> Side:
        """Add a producer whose side channel listens on this port."""
        side = self._add(
            Side(name, epoch, self._network, self.clock, channels=(opened(), opened(port)))
        )
        side.memory[:] = np.random.default_rng(len(self._sides)).integers(
            1, 256, side.memory.shape, dtype=np.uint8
        )
        return side

    def _add(self, side: Side) -> Side:
        self._sides.append(side)
        return side

    def end(self, side: Side) -> None:
        self._sides.remove(side)
        side.close()

    def hand_over(self, side: Side, request: str, block: int) -> None:
        """Transfer one block of the producer to the block with the same number in the consumer."""
        self.announce(side, request, block)
        self.d.start(request, [block], range(0, 4))

    def announce(self, side: Side, request: str, block: int) -> None:
        ticket = side.issue(f"{request} at {side.name}", [block])
        side.grant(f"{request} at {side.name}")
        self.d.track(request, ticket)

    def run(self, is_done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_done():
            assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
            for side in self._sides:
                side.step()

    def finish(self, *requests: str) -> None:
        self.run(lambda: set(requests) <= set(self.d.finished()), f"{len(requests)} transfers")

    def close(self) -> None:
        for side in self._sides:
            side.close()


def opened(port: int = 0) -> ZmqTransport:
    return ZmqTransport("127.0.0.1", "127.0.0.1", port, KEYS)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def peer_world() -> Iterator[PeerWorld]:
    with contextlib.closing(PeerWorld()) as made:
        yield made


# -- many producers --


@pytest.mark.slow
def test_two_hundred_producers_at_once_are_all_served_with_as_many_messages_each_as_one(
    peer_world: PeerWorld,
) -> None:
    alone = peer_world.producer("alone")
    peer_world.hand_over(alone, "first", 0)
    peer_world.finish("first")
    sent, received = peer_world.wire.sent, peer_world.wire.received
    crowd = [peer_world.producer(f"p{number}") for number in range(CROWD)]
    for number, side in enumerate(crowd):
        peer_world.announce(side, f"r{number}", number % NUM_BLOCKS)
    peer_world.run(
        lambda: (
            peer_world.d.transfer_worker.snapshot().peers == CROWD + 1
            and peer_world.wire.sent >= sent + 2 * CROWD
        ),
        "all are greeted and attached to",
    )
    for first in range(0, CROWD, NUM_BLOCKS):
        wave = list(enumerate(crowd))[first : first + NUM_BLOCKS]
        for number, _ in wave:
            peer_world.d.start(f"r{number}", [number % NUM_BLOCKS], range(0, 4))
        peer_world.finish(*(f"r{number}" for number, _ in wave))
        assert all(
            (
                peer_world.d.memory[:, number % NUM_BLOCKS] == side.memory[:, number % NUM_BLOCKS]
            ).all()
            for number, side in wave
        )
    assert peer_world.d.failed() == []
    assert (peer_world.wire.sent, peer_world.wire.received) == (
        sent * (CROWD + 1),
        received * (CROWD + 1),
    )
    peer_world.run(lambda: all(len(side.freed()) == 1 for side in crowd), "every lease has ended")


# -- dead producers --


def refused(stack: ExitStack) -> int:
    """Return a port on which no process listens."""
    return reserve_port()


def silent(stack: ExitStack) -> int:
    """Return a port on which the kernel accepts connections, but no process ever answers."""
    return int(
        stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=16)).getsockname()[1]
    )


def black_hole(stack: ExitStack) -> int:
    """Return a port whose accept queue is full: the first packet of a connection is dropped."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    for _ in range(4):
        filler = stack.enter_context(socket.socket())
        filler.setblocking(False)
        filler.connect_ex(listener.getsockname())
    return int(listener.getsockname()[1])


def dead_ticket(port: int) -> str:
    """Return a genuine ticket of an engine that does not exist."""
    tokens = fingerprint(range(4), 4, "")
    return TicketKey(SECRET).sign(
        Ticket(
            "dead", "e9", "lost", 1, "127.0.0.1", port, 1, 4, [runs_from_blocks([0])], tokens, 30.0
        )
    )


@pytest.mark.parametrize("death", [refused, silent, black_hole])
def test_one_dead_producer_delays_nobody(
    peer_world: PeerWorld, death: Callable[[ExitStack], int]
) -> None:
    with ExitStack() as stack:
        port = death(stack)
        peer_world.d.track("lost", dead_ticket(port))
        peer_world.d.start("lost", [31], range(0, 4))
        peer_world.run(lambda: peer_world.wire.sent == 1, "the dead one is greeted")
        living = [peer_world.producer(f"p{number}") for number in range(10)]
        for number, side in enumerate(living):
            peer_world.hand_over(side, f"r{number}", number)
        peer_world.finish(*(f"r{number}" for number in range(10)))
        assert peer_world.d.failed() == [], (
            "the dead one's handshake was over before the others' transfers"
        )
        for number, side in enumerate(living):
            assert (peer_world.d.memory[:, number] == side.memory[:, number]).all()
        peer_world.clock.advance(5)
        peer_world.run(lambda: bool(peer_world.d.failed()), "the dead one's deadline")
        assert (
            f"the producer did not answer the handshake within 5 s (tcp://127.0.0.1:{port})"
            in peer_world.d.failed()[0]
        )
        assert not peer_world.d.memory[:, 31].any()


def test_a_dead_producer_that_is_asked_for_again_and_again_leaves_no_file(
    peer_world: PeerWorld,
) -> None:
    with ExitStack() as stack:
        text = dead_ticket(refused(stack))
        files = num_files()
        for turn in range(50):
            peer_world.d.track(f"r{turn}", text)
            peer_world.d.start(f"r{turn}", [31], range(0, 4))
            peer_world.d.step()
            peer_world.clock.advance(5)
            peer_world.d.step()
            assert len(peer_world.d.failed()) == turn + 1
            peer_world.clock.advance(11)
        assert peer_world.wire.sent == 50
        peer_world.run(lambda: num_files() <= files, f"as few open files as before ({files})")


# -- producers that come back --


def test_a_producer_restarted_at_its_address_is_used_at_once_fifty_times_and_leaves_no_file(
    peer_world: PeerWorld,
) -> None:
    port, files = reserve_port(), 0
    for incarnation in range(51):
        p = peer_world.producer("p", f"life {incarnation}", port)
        peer_world.hand_over(p, f"r{incarnation}", incarnation % NUM_BLOCKS)
        peer_world.finish(f"r{incarnation}")
        assert (
            peer_world.d.memory[:, incarnation % NUM_BLOCKS]
            == p.memory[:, incarnation % NUM_BLOCKS]
        ).all()
        peer_world.end(p)
        peer_world.run(
            lambda: peer_world.d.transfer_worker.snapshot().peers == 0, "the old life is forgotten"
        )
        files = files or num_files()
    peer_world.run(
        lambda: num_files() <= files, f"as many open files as after the first life ({files})"
    )


def test_a_ticket_of_an_engine_that_was_replaced_fails_by_name_and_the_new_one_is_used(
    peer_world: PeerWorld,
) -> None:
    port = reserve_port()
    old = peer_world.producer("old", port=port)
    ticket = old.issue("a", [3])
    peer_world.end(old)
    new = peer_world.producer("new", port=port)
    peer_world.d.track("late", ticket)
    peer_world.d.start("late", [5], range(0, 4))
    peer_world.hand_over(new, "r", 7)
    peer_world.run(
        lambda: bool(peer_world.d.failed()) and bool(peer_world.d.finished()),
        "one fails, one is served",
    )
    assert peer_world.d.finished() == ["r"]
    assert "old" in peer_world.d.failed()[0]
    assert "new" in peer_world.d.failed()[0]
    assert not peer_world.d.memory[:, 5].any()


# -- idle producers --


def test_idle_producers_are_forgotten_with_their_sockets_and_come_back_fifty_times(
    peer_world: PeerWorld,
) -> None:
    p = peer_world.producer("p")
    files = num_files()
    for turn in range(50):
        peer_world.hand_over(p, f"r{turn}", 3)
        peer_world.finish(f"r{turn}")
        assert num_files() > files, "a connection is open, or closing it proves nothing"
        peer_world.clock.advance(PEER_TTL_S - 1)
        peer_world.d.step()
        assert peer_world.d.transfer_worker.snapshot().peers == 1, (
            "it was used less than its time ago"
        )
        peer_world.clock.advance(1)
        peer_world.d.step()
        assert peer_world.d.transfer_worker.snapshot().peers == 0
        peer_world.run(lambda: num_files() <= files, f"as few open files as before ({files})")


# -- transfers in both directions --


def test_two_engines_take_from_each_other_at_the_same_time(peer_world: PeerWorld) -> None:
    a, b = peer_world.d, peer_world.producer("b")
    a.memory[:] = np.random.default_rng(7).integers(1, 256, a.memory.shape, dtype=np.uint8)
    before_a, before_b = a.memory.copy(), b.memory.copy()
    theirs: dict[str, Any] = {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}
    for source, sink in ((a, b), (b, a)):
        for block in theirs[source.name.replace("d", "a")]:
            request = f"{block} of {source.name}"
            ticket = source.issue(request, [block])
            source.grant(request)
            sink.track(request, ticket)
            sink.start(request, [block], range(0, 4))
    peer_world.run(lambda: len(a.finished()) == len(b.finished()) == 4, "four transfers each way")
    assert (b.memory[:, 0:4] == before_a[:, 0:4]).all()
    assert (a.memory[:, 4:8] == before_b[:, 4:8]).all()
    assert (a.memory[:, 0:4] == before_a[:, 0:4]).all()
    assert not (before_a[:, 0:8] == before_b[:, 0:8]).all(axis=(0, 2)).any(), (
        "both held the same, so equality proves nothing"
    )
    assert a.failed() == b.failed() == []
    peer_world.run(lambda: len(a.freed()) == len(b.freed()) == 4, "every lease has ended")
    for side in (a, b):
        held = side.transfer_worker.snapshot()
        assert (held.leases, held.transfers, held.reads) == (0, 0, 0)
