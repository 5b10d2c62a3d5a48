"""Tests transfer workers with several ranks on each side: every rank gets the right bytes, and the
lease of every rank ends when the last reader has finished.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.world import BLOCK_BYTES, LAYERS, RankedWorld

from kvferry.events import BytesMoved
from kvferry.types import KVLayout, RequestId
from kvferry.worker.commands import (
    AbandonLease,
    AbortLoad,
    GrantLease,
    PrepareLoad,
    SkipLoad,
    StartLoad,
)

A, R = RequestId("a"), RequestId("r")
PAIRS = [
    (2, 1, 4),
    (1, 2, 4),
    (2, 2, 4),
    (4, 2, 4),
    (1, 4, 4),
    (3, 2, 6),
    (4, 1, 2),
    (1, 4, 2),
    (4, 2, 1),
    (2, 4, 1),
    (4, 4, 2),
]
"""The number of P's ranks, of D's ranks and of KV heads."""


@contextmanager
def ranked(
    p_size: int, d_size: int, total_heads: int = 4, layout: KVLayout = KVLayout.HND
) -> Iterator[RankedWorld]:
    world = RankedWorld(p_size, d_size, total_heads, layout)
    try:
        yield world
    finally:
        world.close()


@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize("sizes", PAIRS)
def test_every_rank_gets_its_heads_and_every_lease_ends_at_once(
    sizes: tuple[int, int, int], layout: KVLayout
) -> None:
    with ranked(*sizes, layout) as world:
        ticket = world.issue("a", [3, 4, 9])
        world.tell(world.d, PrepareLoad(R, ticket), StartLoad(R, ((20, 7, 8),), 0, 12))
        world.run()
        assert [side.finished() for side in world.d] == [["r"]] * len(world.d)
        assert all(world.holds(side, [20, 7, 8], [3, 4, 9]) for side in world.d)
        assert world.freed() == [[("a", "confirmed")]] * len(world.p)
        for side in world.d:
            moved = sum(event.total_bytes for event in side.events if isinstance(event, BytesMoved))
            assert moved == 3 * LAYERS * BLOCK_BYTES * len(side.place.heads)
        world.assert_quiescent()


def test_a_wrong_byte_would_be_seen() -> None:
    with ranked(2, 1) as world:
        world.p[1].view()[0, 4, 0, 0, 0] ^= 1
        ticket = world.issue("a", [3, 4, 9])
        world.tell(world.d, PrepareLoad(R, ticket), StartLoad(R, ((20, 7, 8),), 0, 12))
        world.run()
        assert world.d[0].finished() == ["r"]
        assert not world.holds(world.d[0], [20, 7, 8], [3, 4, 9])


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_comes_much_later_finds_the_lease_alive(first: int) -> None:
    with ranked(1, 2) as world:
        early, late = world.d[first], world.d[1 - first]
        ticket = world.issue("a", [3])
        world.tell(world.d, PrepareLoad(R, ticket), StartLoad(R, ((5,),), 0, 4))
        world.run(sides=[*world.p, early])
        assert early.finished() == ["r"]
        assert world.freed() == [[]]
        world.run()
        assert late.finished() == ["r"]
        assert world.freed() == [[("a", "confirmed")]]
        world.assert_quiescent()


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_the_lease() -> None:
    with ranked(1, 2) as world:
        ticket = world.issue("a", [3])
        world.tell(world.d, PrepareLoad(R, ticket), StartLoad(R, ((5,),), 0, 4))
        present = [*world.p, world.d[0]]
        world.run(sides=present)
        world.clock.advance(29)
        world.run(sides=present)
        assert world.freed() == [[]]
        world.clock.advance(1)
        world.run(sides=present)
        assert world.freed() == [[("a", "confirmed")]]
        world.run()
        assert ["the lease has ended" in reason for reason in world.d[1].failed()] == [True]
        world.assert_quiescent()


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_come_before_the_grant_are_all_waited_for(first: int) -> None:
    """One rank asks for confirmation before the grant; the other rank attaches only afterwards."""
    with ranked(1, 2) as world:
        ticket = world.p[0].issue("a", [3])
        world.tell(world.d, PrepareLoad(R, ticket), StartLoad(R, ((5,),), 0, 4))
        world.run(sides=[*world.p, world.d[first]])
        world.tell(world.p, GrantLease(A, 1))
        world.run(sides=[*world.p, world.d[first]])
        assert world.d[first].finished() == ["r"]
        assert world.freed() == [[]]
        world.run()
        assert world.d[1 - first].finished() == ["r"]
        assert world.freed() == [[("a", "confirmed")]]
        world.assert_quiescent()


@pytest.mark.parametrize("sizes", PAIRS)
def test_siblings_share_a_lease_on_every_rank(sizes: tuple[int, int, int]) -> None:
    with ranked(*sizes) as world:
        ticket = world.issue("a", [3, 4])
        world.tell(world.d, *(PrepareLoad(RequestId(f"r{n}"), ticket) for n in range(4)))
        world.run()
        for n in range(4):
            assert world.freed() == [[]] * len(world.p)
            world.tell(world.d, StartLoad(RequestId(f"r{n}"), ((10 + 2 * n, 11 + 2 * n),), 0, 8))
            world.run()
        assert [side.finished() for side in world.d] == [["r0", "r1", "r2", "r3"]] * len(world.d)
        assert world.freed() == [[("a", "confirmed")]] * len(world.p)
        world.assert_quiescent()


@pytest.mark.parametrize("command", [SkipLoad(R), AbortLoad(R)])
@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("sizes", PAIRS)
def test_a_request_that_needs_nothing_frees_every_rank(
    sizes: tuple[int, int, int], turns: int, command: SkipLoad | AbortLoad
) -> None:
    """This also holds if the ranks of D are at different points of the handshake."""
    with ranked(*sizes) as world:
        ticket = world.issue("a", [3])
        world.tell(world.d, PrepareLoad(R, ticket))
        world.run(turns, sides=[*world.p, *world.d[:1]])
        world.tell(world.d, command)
        world.run()
        assert world.freed() == [[("a", "released")]] * len(world.p)
        world.assert_quiescent()


def test_a_silent_rank_is_not_covered_by_its_neighbour() -> None:
    with ranked(2, 1) as world:
        ticket = world.issue("a", [3])
        world.tell(world.d, PrepareLoad(R, ticket))
        world.run()
        for _ in range(8):
            world.clock.advance(4)
            world.run(3, sides=[world.p[0], *world.d])
        world.tell(world.d, StartLoad(R, ((5,),), 0, 4))
        world.run(sides=[world.p[0], *world.d])
        assert world.d[0].failed() == ["the producer no longer answers heartbeats"]
        world.run()
        world.clock.advance(60)
        world.run()
        world.assert_quiescent()


@pytest.mark.parametrize("turns", range(8))
def test_one_rank_of_the_producer_that_dies_fails_the_request_and_leaves_nothing(
    turns: int,
) -> None:
    with ranked(2, 1) as world:
        ticket = world.issue("a", [3])
        world.tell(world.d, PrepareLoad(R, ticket), StartLoad(R, ((5,),), 0, 4))
        world.run(turns)
        world.p[1].close()
        alive = [world.p[0], *world.d]
        for _ in range(40):
            world.clock.advance(1)
            world.run(2, sides=alive)
        assert len(world.d[0].finished()) + len(world.d[0].failed()) == 1
        assert len(world.p[0].freed()) == 1
        for side in alive:
            held = side.transfer_worker.snapshot()
            assert (held.leases, held.transfers, held.reads) == (0, 0, 0)


def test_a_read_that_fails_on_one_rank_frees_the_blocks_on_all_of_them_at_once() -> None:
    with ranked(2, 1) as world:
        ticket = world.issue("a", [3])
        world.tell(world.d, PrepareLoad(R, ticket))
        world.run()
        world.p[1].transport.close()
        world.tell(world.d, StartLoad(R, ((5,),), 0, 4))
        world.run()
        assert len(world.d[0].failed()) == 1
        assert world.freed() == [[("a", "released")]] * 2
        world.assert_quiescent()


def test_sizes_that_do_not_fit_the_heads_are_refused_by_name() -> None:
    with ranked(3, 1, total_heads=4) as world:
        ticket = world.issue("a", [3])
        world.tell(world.d, PrepareLoad(R, ticket), StartLoad(R, ((5,),), 0, 4))
        world.run()
        assert ["tp_size: ours 1, theirs 3" in reason for reason in world.d[0].failed()] == [True]


def test_ranks_that_say_another_size_than_the_ticket_are_not_read() -> None:
    with ranked(2, 1) as world, ranked(1, 1) as other:
        world.p[0].layouts.update(other.p[0].layouts)
        ticket = world.issue("a", [3])
        world.tell(world.d, PrepareLoad(R, ticket), StartLoad(R, ((5,),), 0, 4))
        world.run()
        assert world.d[0].failed() == ["rank 0 reports 1 ranks, but its engine's tickets report 2"]


@given(st.data())
def test_whatever_order_the_ranks_run_in_nothing_is_left_behind_and_no_rank_is_cheated(
    data: st.DataObject,
) -> None:
    """Random ticks of random ranks; in between, requests share a ticket or leave, or the router
    hands the ticket back. The clock stands still, so every lease is ended by a message and not by a
    timeout.
    """
    sizes = data.draw(st.sampled_from(PAIRS), "sizes")
    with ranked(*sizes) as world:
        ticket = world.p[0].issue("a", [3, 4])
        requests = [RequestId(f"r{n}") for n in range(data.draw(st.integers(1, 3), "requests"))]
        world.tell(world.d, *(PrepareLoad(request, ticket) for request in requests))
        left: set[RequestId] = set()
        is_granted = is_handed_back = False
        for _ in range(data.draw(st.integers(0, 40), "steps")):
            side = world.sides[data.draw(st.integers(0, len(world.sides) - 1))]
            side.step()
            match data.draw(st.sampled_from(["", "", "", "grant", "leave", "hand back"])):
                case "grant" if not is_granted:
                    is_granted = True
                    world.tell(world.p, GrantLease(A, 1))
                case "leave":
                    left.add(requests[0])
                    world.tell(world.d, AbortLoad(requests[0]))
                case "hand back" if is_granted:
                    is_handed_back = True
                    world.tell(world.p, AbandonLease(A))
        if not is_granted:
            world.tell(world.p, GrantLease(A, 1))
        for number, request in enumerate(requests):
            if request not in left:
                world.tell(world.d, StartLoad(request, ((10 + 2 * number, 11 + 2 * number),), 0, 8))
        world.run(40)
        for side in world.d:
            stayed = [request for request in requests if request not in left]
            assert sorted(side.finished()) == stayed or is_handed_back
        assert [len(freed) for freed in world.freed()] == [1] * len(world.p)
        world.assert_quiescent()
