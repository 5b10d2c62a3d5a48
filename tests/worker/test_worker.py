"""Tests two real transfer workers in short scenarios: the right bytes arrive or the request fails
with a reason, and no state remains.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from tests.worker.world import BLOCK_BYTES, LAYERS, Side, World

from kvferry.events import BytesMoved, HandshakeFailed, MessageDropped, PeerConnected
from kvferry.protocol import messages as codec
from kvferry.protocol.messages import Confirmed, Release
from kvferry.transports import copying
from kvferry.transports.base import Handle, Segments, TransportOffer
from kvferry.transports.faulty import FaultyTransport, parse_faults
from kvferry.transports.memory import MemoryNetwork, MemoryTransport
from kvferry.types import PeerId, Region, RequestId
from kvferry.worker.commands import AbandonLease, AbortLoad, RejectLoad, SkipLoad


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for side in made.sides:
        side.close()


def test_the_bytes_arrive_in_the_right_blocks_and_no_others(world: World) -> None:
    ticket = world.p.issue("a", [3, 4, 9])
    world.p.grant("a")
    world.d.track("r", ticket)
    world.d.start("r", [20, 7, 8], range(0, 12))
    world.run()
    assert world.d.finished() == ["r"]
    assert (world.d.memory[:, [20, 7, 8]] == world.p.memory[:, [3, 4, 9]]).all()
    others = np.delete(world.d.memory, [20, 7, 8], axis=1)
    assert not others.any()
    assert world.p.freed() == [("a", "confirmed")]
    [moved] = [event for event in world.d.events if isinstance(event, BytesMoved)]
    assert (moved.transport, moved.total_bytes, moved.is_ok) == (
        "memory",
        3 * LAYERS * BLOCK_BYTES,
        True,
    )
    assert (moved.planned_segments, moved.segments) == (3 * LAYERS, 3 * LAYERS)
    assert [event.transport for event in world.d.events if isinstance(event, PeerConnected)] == [
        "memory"
    ]
    world.assert_quiescent()


def test_joined_neighbours_are_told_beside_what_was_asked_for(world: World) -> None:
    ticket = world.p.issue("a", [3, 4, 9])
    world.p.grant("a")
    world.d.track("r", ticket)
    world.d.start("r", [7, 8, 20], range(0, 12))
    world.run()
    [moved] = [event for event in world.d.events if isinstance(event, BytesMoved)]
    assert (moved.planned_segments, moved.segments) == (3 * LAYERS, 2 * LAYERS)


def test_a_local_prefix_leaves_only_the_suffix_to_move(world: World) -> None:
    ticket = world.p.issue("a", [3, 4, 9])
    world.p.grant("a")
    world.d.track("r", ticket)
    world.d.start("r", [20, 7, 8], range(8, 12))
    world.run()
    assert world.d.finished() == ["r"]
    assert not world.d.memory[:, [20, 7]].any()
    assert (world.d.memory[:, 8] == world.p.memory[:, 9]).all()


def test_a_request_that_needs_nothing_frees_the_producer(world: World) -> None:
    ticket = world.p.issue("a", [3])
    world.p.grant("a")
    world.d.track("r", ticket)
    world.d.inbox.append(SkipLoad(RequestId("r")))
    world.run()
    assert world.p.freed() == [("a", "released")]
    assert world.d.events == [event for event in world.d.events if isinstance(event, PeerConnected)]
    world.assert_quiescent()


def test_a_queued_request_is_kept_alive_far_beyond_the_first_lease(world: World) -> None:
    ticket = world.p.issue("a", [3])
    world.p.grant("a")
    world.d.track("r", ticket)
    world.run()
    for _ in range(40):
        world.clock.advance(4.9)
        world.run(3)
    assert world.p.freed() == []
    world.d.start("r", [5], range(0, 4))
    world.run()
    assert world.d.finished() == ["r"]
    world.assert_quiescent()


def test_a_lease_that_ran_out_before_the_read_is_refused(world: World) -> None:
    """D does not run while P does: P's blocks have another owner when D resumes and reads."""
    first = world.p.issue("warm", [1])
    world.p.grant("warm")
    world.d.track("w", first)
    world.d.start("w", [1], range(0, 4))
    world.run()
    ticket = world.p.issue("a", [3])
    world.p.grant("a")
    world.p.step()
    world.clock.advance(31)
    world.p.step()
    assert world.p.freed()[-1] == ("a", "expired")
    world.p.memory[:, 3] = 255
    world.d.track("r", ticket)
    world.d.start("r", [5], range(0, 4))
    world.run()
    assert world.d.finished() == ["w"]
    assert "the lease has ended" in world.d.failed()[0]
    world.assert_quiescent()


def test_a_lease_that_runs_out_between_read_and_confirmation_is_refused(world: World) -> None:
    ticket = world.p.issue("a", [3])
    world.p.grant("a")
    world.d.track("r", ticket)
    world.run()
    world.d.start("r", [5], range(0, 4))
    world.d.step()
    world.d.step()
    world.clock.advance(31)
    world.run()
    assert world.d.finished() == []
    assert len(world.d.failed()) == 1
    world.assert_quiescent()


def test_a_ticket_that_overtakes_its_grant_is_served_at_once_and_freed_after_it(
    world: World,
) -> None:
    ticket = world.p.issue("a", [3])
    world.d.track("r", ticket)
    world.d.start("r", [5], range(0, 4))
    world.run()
    assert world.d.finished() == ["r"]
    assert world.p.freed() == []
    world.p.grant("a")
    world.run()
    assert world.p.freed() == [("a", "confirmed")]
    world.assert_quiescent()


def test_several_readers_share_one_lease(world: World) -> None:
    ticket = world.p.issue("a", [3, 4])
    world.p.grant("a")
    for number in range(4):
        world.d.track(f"r{number}", ticket)
    world.run()
    for number in range(4):
        assert world.p.freed() == []
        world.d.start(f"r{number}", [10 + 2 * number, 11 + 2 * number], range(0, 8))
        world.run()
    assert world.d.finished() == ["r0", "r1", "r2", "r3"]
    assert world.p.freed() == [("a", "confirmed")]
    for number in range(4):
        assert (
            world.d.memory[:, [10 + 2 * number, 11 + 2 * number]] == world.p.memory[:, [3, 4]]
        ).all()
    world.assert_quiescent()


@pytest.mark.parametrize("turns", range(12))
def test_an_abort_at_any_moment_frees_both_sides(world: World, turns: int) -> None:
    ticket = world.p.issue("a", [3])
    world.p.grant("a")
    world.d.track("r", ticket)
    world.run(turns // 2)
    world.d.start("r", [5], range(0, 4))
    world.run(turns - turns // 2)
    is_over = bool(world.d.finished())
    world.d.inbox.append(AbortLoad(RequestId("r")))
    world.run()
    assert len(world.d.finished()) + len(world.d.failed()) == 1
    assert world.d.finished() or not is_over
    assert len(world.p.freed()) == 1
    world.assert_quiescent()


def test_an_abort_stops_a_read_that_is_under_way(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = world.p.issue("a", [3])
    world.p.grant("a")
    world.d.track("r", ticket)
    world.d.start("r", [5], range(0, 4))
    with monkeypatch.context() as slow:
        # Copy one layer per slice.
        slow.setattr(copying, "SLICE_BYTES", 1)
        for _ in range(20):
            if world.d.transfer_worker.snapshot().reads:
                break
            world.run(1)
        world.d.inbox.append(AbortLoad(RequestId("r")))
        world.run()
    [moved] = [event for event in world.d.events if isinstance(event, BytesMoved)]
    assert not moved.is_ok
    assert moved.total_bytes < LAYERS * BLOCK_BYTES
    world.assert_quiescent()


@pytest.mark.parametrize("turns", range(1, 10))
def test_the_death_of_the_producer_at_any_moment_is_a_failure_or_a_confirmed_read(
    world: World, turns: int
) -> None:
    ticket = world.p.issue("a", [3])
    world.p.grant("a")
    world.d.track("r", ticket)
    world.d.start("r", [5], range(0, 4))
    world.run(turns)
    world.p.close()
    for _ in range(30):
        world.clock.advance(1)
        world.d.step()
    assert len(world.d.finished()) + len(world.d.failed()) == 1
    held = world.d.transfer_worker.snapshot()
    assert (held.transfers, held.reads, held.peers) == (0, 0, 0)


def test_a_restarted_producer_is_used_at_once_and_its_old_tickets_are_not(world: World) -> None:
    old = world.p.issue("a", [3])
    world.p.grant("a")
    world.d.track("warm", old)
    world.d.start("warm", [5], range(0, 4))
    world.run()
    stale = world.p.issue("b", [3])
    world.p.close()
    world.p = Side("p", "e2", world.network, world.clock)
    world.p.memory[:] = 7
    fresh = world.p.issue("a", [3])
    world.p.grant("a")
    world.d.track("r", fresh)
    world.d.track("late", stale)
    world.d.start("r", [6], range(0, 4))
    world.d.start("late", [7], range(0, 4))
    world.run()
    for _ in range(8):
        world.clock.advance(1)
        world.run(2)
    assert world.d.finished() == ["warm", "r"]
    assert (world.d.memory[:, 6] == 7).all()
    assert len(world.d.failed()) == 1
    world.assert_quiescent()


def test_the_death_of_the_consumer_frees_the_blocks_when_the_lease_ends(world: World) -> None:
    ticket = world.p.issue("a", [3])
    world.p.grant("a")
    world.d.track("r", ticket)
    world.run()
    world.d.close()
    world.p.step()
    world.clock.advance(29)
    world.p.step()
    assert world.p.freed() == []
    world.clock.advance(1)
    world.p.step()
    assert world.p.freed() == [("a", "expired")]


def test_a_ticket_handed_back_frees_the_blocks_at_once(world: World) -> None:
    world.p.issue("a", [3])
    world.p.grant("a")
    world.p.inbox.append(AbandonLease(RequestId("a")))
    world.run()
    assert world.p.freed() == [("a", "released")]
    world.assert_quiescent()


def test_refused_parameters_are_reported_as_a_failed_load(world: World) -> None:
    world.d.inbox.append(RejectLoad(RequestId("r"), "no ticket"))
    world.run()
    assert world.d.failed() == ["no ticket"]
    world.assert_quiescent()


def test_what_does_not_belong_here_is_dropped_and_counted(world: World) -> None:
    for frame in (
        b"",
        b"\xc1",
        b"\x00" * 100,
        codec.encode(Confirmed("a", "d/r")),
        codec.encode(Release("x")),
    ):
        world.d.control.send(world.p.control.address, frame)
    world.run()
    assert len([event for event in world.p.events if isinstance(event, MessageDropped)]) == 5
    test_the_bytes_arrive_in_the_right_blocks_and_no_others(world)


def test_a_transport_that_fails_fails_the_request_only() -> None:
    network = MemoryNetwork()
    world = World(FaultyTransport(MemoryTransport(network), parse_faults("fail:every=2")), network)
    for number in range(4):
        ticket = world.p.issue(f"a{number}", [3])
        world.p.grant(f"a{number}")
        world.d.track(f"r{number}", ticket)
        world.d.start(f"r{number}", [5 + number], range(0, 4))
        world.run()
    assert len(world.d.finished()) == 2
    assert len(world.d.failed()) == 2
    assert len(world.p.freed()) == 4
    world.assert_quiescent()


@pytest.mark.parametrize("moment", ["connect", "read"])
def test_whatever_a_transport_raises_fails_that_request_and_the_next_one_works(moment: str) -> None:
    network = MemoryNetwork()
    transport = RaisingTransport(network, moment)
    world = World(transport, network)
    for name in ("first", "second"):
        ticket = world.p.issue(name, [3])
        world.p.grant(name)
        world.d.track(name, ticket)
        world.d.start(name, [5], range(0, 4))
        world.run()
        transport.is_broken = False
        world.clock.advance(1)
    assert ["OverflowError" in reason for reason in world.d.failed()] == [True]
    assert world.d.finished() == ["second"]
    world.clock.advance(60)
    world.run()
    world.assert_quiescent()


class RaisingTransport(MemoryTransport):
    """Raises an exception that the transport contract does not name, as libraries do."""

    def __init__(self, network: MemoryNetwork, moment: str) -> None:
        super().__init__(network)
        self.moment = moment
        self.is_broken = True

    def connect(self, peer: PeerId, offer: TransportOffer, regions: Sequence[Region]) -> None:
        if self.is_broken and self.moment == "connect":
            raise OverflowError("a number that is too large")
        super().connect(peer, offer, regions)

    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle:
        if self.is_broken and self.moment == "read":
            raise OverflowError("a number that is too large")
        return super().read(peer, segments)


def test_an_unknown_producer_is_given_up_after_the_handshakes_deadline(world: World) -> None:
    ticket = world.p.issue("a", [3])
    world.p.side_channel.close()
    world.d.track("r", ticket)
    world.d.start("r", [5], range(0, 4))
    for _ in range(6):
        world.clock.advance(1)
        world.d.step()
    assert "handshake" in world.d.failed()[0]
    assert any(isinstance(event, HandshakeFailed) for event in world.d.events)


def test_an_idle_ferry_sleeps(world: World) -> None:
    assert world.d.transfer_worker.idle_s() >= 1.0
    ticket = world.p.issue("a", [3])
    world.p.grant("a")
    world.d.track("r", ticket)
    world.run()
    assert world.p.transfer_worker.idle_s() >= 1.0
    assert world.d.transfer_worker.idle_s() >= 1.0
