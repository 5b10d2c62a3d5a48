"""Tests both sides of bounce-buffer transfers: every byte arrives, slots are freed, and no transfer
ever uses bytes from a slot that belongs to another transfer.
"""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transports.bounce_world import RECLAIM_S, Bytes, Party, World, scattered

from kvferry.transports.base import Segments
from kvferry.transports.nixl.bounce.messages import (
    BounceMessage,
    InitiatorProgress,
    OffsetTable,
    OwnerProgress,
    SegmentGroup,
    SegmentPart,
    SlotGranted,
    SlotRequest,
    ToOwner,
    TransferEnded,
    TransferStopped,
)

SIZES = (40_000, 60_000)


def pair(buffer_pages: int = 4, chunk_bytes: int = 3000) -> tuple[World, Party, Party]:
    near, far = (
        Party("near", SIZES, buffer_pages, chunk_bytes, seed=1),
        Party("far", SIZES, buffer_pages, chunk_bytes, seed=2),
    )
    return World.of(near, far), near, far


def expected(
    target: Party, source: Party, plans: Sequence[Segments], *, is_read: bool
) -> list[Bytes]:
    """Return the expected content of the target's memories after these transfers."""
    memories = [memory.copy() for memory in target.memories]
    for part in plans:
        for local, remote in zip(
            part.local_offsets.tolist(), part.remote_offsets.tolist(), strict=True
        ):
            (to, at), (origin, start) = ((part.local_region, local), (part.remote_region, remote))[
                :: 1 if is_read else -1
            ]
            memories[to][at : at + part.segment_bytes] = source.memories[origin][
                start : start + part.segment_bytes
            ]
    return memories


def same(party: Party, memories: Sequence[Bytes]) -> bool:
    return all(
        np.array_equal(ours, theirs) for ours, theirs in zip(party.memories, memories, strict=True)
    )


@given(
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from([1, 7, 256, 999, 4096]), st.integers(1, 9)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 6),
    st.integers(100, 9000),
)
@settings(deadline=None)
def test_exactly_the_named_bytes_move(
    is_read: bool, sizes: list[tuple[int, int]], buffer_pages: int, chunk_bytes: int
) -> None:
    world, near, far = pair(buffer_pages, chunk_bytes)
    # Each part has its own place in the target, because the order of two writes to one place is
    # undefined.
    plan = []
    for number, (segment_bytes, count) in enumerate(sizes):
        part = scattered(
            0,
            0,
            segment_bytes,
            min(40, 9000 // segment_bytes),
            min(count, 9000 // segment_bytes),
            seed=number,
        )
        shifts = (number * 9000, 0) if is_read else (0, number * 9000)
        plan.append(
            Segments(
                0, 0, segment_bytes, part.local_offsets + shifts[0], part.remote_offsets + shifts[1]
            )
        )
    target, source = (near, far) if is_read else (far, near)
    wanted, untouched = (
        expected(target, source, plan, is_read=is_read),
        [memory.copy() for memory in source.memories],
    )
    handle = near.start(far, plan, is_read=is_read)
    world.run()
    assert near.ended == {handle: None}
    assert same(target, wanted)
    assert same(source, untouched)
    assert near.is_quiet
    assert far.is_quiet


def test_a_plan_that_differs_in_one_offset_gives_other_bytes() -> None:
    """The negative control of the test above."""
    world, near, far = pair()
    plan = scattered(0, 0, 256, 100, 50, seed=1)
    other = plan.remote_offsets.copy()
    other[7] += 256 * 101
    wanted = expected(near, far, [Segments(0, 0, 256, plan.local_offsets, other)], is_read=True)
    near.start(far, [plan], is_read=True)
    world.run()
    assert not same(near, wanted)


@pytest.mark.parametrize("is_read", [True, False])
def test_many_transfers_pass_a_bounce_buffer_that_holds_one_each_in_turn(is_read: bool) -> None:
    world, near, far = pair(buffer_pages=2, chunk_bytes=1000)
    plans = [scattered(0, 1, 500, 4, 4, seed=number) for number in range(12)]
    shifted = [
        Segments(0, 1, 500, part.local_offsets + 2000 * n, part.remote_offsets + 2000 * n)
        for n, part in enumerate(plans)
    ]
    target, source = (near, far) if is_read else (far, near)
    wanted = expected(target, source, shifted, is_read=is_read)
    handles = [near.start(far, [part], is_read=is_read) for part in shifted]
    world.run()
    assert near.ended == dict.fromkeys(handles)
    assert near.fallbacks == []
    assert same(target, wanted)
    assert near.is_quiet
    assert far.is_quiet


@pytest.mark.parametrize("is_read", [True, False])
def test_of_a_transfer_that_fits_its_slots_is_said_only_what_is_waited_for(is_read: bool) -> None:
    world, near, far = pair()
    near.start(far, [scattered(0, 1, 500, 40, 20, seed=3)], is_read=is_read)
    said: list[type] = []
    for _ in range(12):
        world.turn()
        said += [type(message) for _, _, message in world.mail]
        world.deliver()
    told = (
        [each for each in said if each is not OwnerProgress]
        if is_read
        else [each for each in said if each is not InitiatorProgress]
    )
    assert told == (
        [SlotRequest, SegmentPart, SlotGranted, InitiatorProgress]
        if is_read
        else [SlotRequest, SegmentPart, SlotGranted, OwnerProgress]
    )
    assert near.is_quiet
    assert far.is_quiet


def test_an_owner_sends_its_metadata_with_the_first_slot_and_again_after_a_new_connection() -> None:
    world, near, far = pair()
    for _ in range(2):
        near.start(far, [scattered(0, 1, 500, 40, 20, seed=3)], is_read=True)
        world.run()
    assert near.mover.metadata == [b"with the buffer"]
    near.transfers.fail_peer(far.peer, "connected again", world.now)
    near.start(far, [scattered(0, 1, 500, 40, 20, seed=3)], is_read=True)
    world.run()
    assert near.mover.metadata == [b"with the buffer"] * 2


def test_a_slot_that_is_larger_than_asked_for_fails_the_transfer() -> None:
    world, near, far = pair()
    handle = near.start(far, [scattered(0, 1, 500, 40, 20, seed=3)], is_read=True)
    world.turn("near")
    world.mail.clear()
    world.hand_over("far", "near", SlotGranted(handle, 4096, 1 << 40, world.now))
    world.turn("near")
    assert "were asked for" in (near.ended[handle] or "")
    assert near.is_quiet


def test_two_that_read_from_each_other_do_not_wait_for_each_other() -> None:
    world, near, far = pair(buffer_pages=1, chunk_bytes=1000)
    handles = [
        (side, side.start(other, [scattered(0, 1, 500, 60, 60, seed=3)], is_read=True))
        for side, other in ((near, far), (far, near))
    ]
    world.run()
    assert [side.ended[handle] for side, handle in handles] == [None, None]


def test_a_short_transfer_does_not_wait_for_long_ones_that_stand_still() -> None:
    """One peer reads from us slowly, and we are reading from a peer that has stopped; the transfer
    with a third, healthy peer must succeed.
    """
    buffer_pages, slots = 32, 512
    reader, we, stopped, healthy = (
        Party(name, [slots * 4096] * 2, buffer_pages, 16384, seed)
        for seed, name in enumerate("abcd")
    )
    world = World.of(reader, we, stopped, healthy)
    long, short = (
        [scattered(0, 0, 4096, slots, slots, seed=1)],
        [scattered(1, 1, 4096, slots, 8, seed=2)],
    )
    reader.mover.is_broken = True  # simulates a slow peer, which still sends messages
    reader.start(we, long, is_read=True)
    for _ in range(3):
        world.turn()
        world.deliver()
    we.start(stopped, long, is_read=True)
    for _ in range(3):
        world.turn()
        world.deliver()
    assert not we.own.is_free
    assert not we.served_slots.is_free
    handle = we.start(healthy, short, is_read=True)
    wanted = expected(we, healthy, short, is_read=True)
    for _ in range(60):
        world.turn(*"abd")
        world.mail = [each for each in world.mail if "c" not in each[:2]]
        world.deliver()
    assert we.ended == {handle: None}, "it did not have to wait: no time has passed"
    assert np.array_equal(we.memories[1], wanted[1])


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("turns", range(12))
def test_a_cancelled_transfer_gives_everything_back_and_nothing_is_copied_afterwards(
    is_read: bool, turns: int
) -> None:
    world, near, far = pair(buffer_pages=1, chunk_bytes=1000)
    handle = near.start(far, [scattered(0, 1, 500, 60, 60, seed=3)], is_read=is_read)
    for _ in range(turns):
        world.turn()
        world.deliver()
    near.transfers.cancel(handle, world.now)
    world.run()
    assert near.ended[handle] in ("cancelled", None)
    assert near.ended[handle] == "cancelled" or turns > 5
    for party in (near, far):
        for memory in party.memories:
            memory[:] = 9
    world.wait(3)
    assert all(np.all(memory == 9) for party in (near, far) for memory in party.memories)
    assert near.is_quiet
    assert far.is_quiet


def test_a_reader_that_stood_still_does_not_take_what_is_now_in_its_slot() -> None:
    world, near, far = pair(buffer_pages=1, chunk_bytes=1000)
    third = Party("third", SIZES, 1, 1000, seed=3)
    world.parties["third"] = third
    late = near.start(far, [scattered(0, 1, 500, 60, 4, seed=3)], is_read=True)
    for _ in range(2):
        world.turn()
        world.deliver()
    # From here on `near` does not run; the messages to it wait.
    waiting: list[tuple[str, str, BounceMessage]] = []
    other = None
    for _ in range(8 * (int(RECLAIM_S) + 20)):
        world.now += 0.125
        world.turn("far", "third")
        waiting += [each for each in world.mail if each[1] == "near"]
        world.mail = [each for each in world.mail if each[1] != "near"]
        world.deliver()
        if world.now > 1000 + RECLAIM_S + 5 and other is None:
            other = third.start(far, [scattered(0, 0, 500, 60, 4, seed=4)], is_read=True)
    assert third.ended == {other: None}
    for each in waiting:
        world.hand_over(*each)
    for _ in range(10):  # its messages now come too late
        world.turn("near")
    error = near.ended[late]
    assert error is not None
    assert "been silent" in error
    assert far.is_quiet


def test_a_read_that_lands_when_its_slot_may_be_anothers_has_failed() -> None:
    world, near, far = pair()
    late = near.start(far, [scattered(0, 1, 500, 60, 4, seed=3)], is_read=True)
    near.mover.is_broken = True
    for _ in range(4):
        world.turn()
        world.deliver()
    assert near.mover.posted
    world.now += RECLAIM_S / 2 + 1
    near.mover.is_broken = False
    world.run()
    assert near.ended[late] is not None


def test_a_silent_reader_costs_its_slot_for_a_while_and_a_silent_writer_for_ever() -> None:
    for is_read in (True, False):
        world, near, far = pair()
        near.start(far, [scattered(0, 1, 500, 60, 60, seed=3)], is_read=is_read)
        for _ in range(3):
            world.turn()
            world.deliver()
        assert not far.served_slots.is_free
        for _ in range(int(2 * RECLAIM_S)):
            world.now += 1.0
            world.turn("far")
            world.mail.clear()
        assert far.served_slots.is_free == is_read


def test_the_slot_of_a_writer_whose_link_has_failed_comes_back_after_a_while() -> None:
    world, near, far = pair()
    near.start(far, [scattered(0, 1, 500, 60, 60, seed=3)], is_read=False)
    for _ in range(3):
        world.turn()
        world.deliver()
    far.slot_server.lost("near", world.now)
    world.now += RECLAIM_S - 1
    world.turn("far")
    assert not far.served_slots.is_free
    world.now += 2
    world.turn("far")
    assert far.is_quiet


def test_an_owner_that_stood_still_writes_nothing_that_came_meanwhile() -> None:
    world, near, far = pair()
    handle = near.start(far, [scattered(0, 1, 500, 60, 60, seed=3)], is_read=False)
    for _ in range(3):
        world.turn()
        world.deliver()
    world.turn("near")
    world.turn("near")
    for memory in far.memories:
        memory[:] = 9  # the memory has another owner by now
    world.now += 20
    world.run()
    world.wait(3)
    assert near.ended[handle] is not None
    assert all(np.all(memory == 9) for memory in far.memories)
    assert near.is_quiet
    assert far.is_quiet


def test_without_a_slot_for_a_while_a_transfer_goes_without() -> None:
    world, near, far = pair(buffer_pages=1)
    slow = Party("slow", SIZES, 1, 1000, seed=3)
    world.parties["slow"] = slow
    slow.mover.is_broken = True
    slow.start(far, [scattered(0, 1, 500, 60, 60, seed=3)], is_read=True)
    world.wait(3)
    handle = near.start(far, [scattered(0, 1, 500, 60, 60, seed=3)], is_read=True)
    world.wait(4)
    assert near.fallbacks == []
    world.wait(4)
    assert near.fallbacks == [handle]
    assert near.is_quiet
    assert far.slot_server.senders() == {"slow"}
    assert near.transfers.can_request("far", world.now)


def test_a_peer_that_does_not_answer_at_all_is_not_asked_again_for_a_while() -> None:
    world, near, far = pair()
    handle = near.start(far, [scattered(0, 1, 500, 60, 60, seed=3)], is_read=True)
    del world.parties["far"]
    for _ in range(8):
        world.now += 1.0
        world.turn()
    assert near.fallbacks == [handle]
    assert not near.transfers.can_request("far", world.now)
    assert near.transfers.can_request("another", world.now)
    assert near.transfers.can_request("far", world.now + 100)


def test_a_bounce_buffer_that_is_held_by_the_silent_is_not_waited_for() -> None:
    world, near, far = pair(buffer_pages=1)
    silent = Party("silent", SIZES, 1, 1000, seed=3)
    world.parties["silent"] = silent
    silent.start(far, [scattered(0, 1, 500, 60, 60, seed=3)], is_read=True)
    for _ in range(3):
        world.turn()
        world.deliver()
    del world.parties["silent"]
    for _ in range(6):
        world.now += 1.0
        world.turn()
        world.mail.clear()
    handle = near.start(far, [scattered(0, 1, 500, 60, 60, seed=3)], is_read=True)
    for _ in range(3):
        world.turn()
        world.mail = [each for each in world.mail if each[1] != "silent"]
        world.deliver()
    assert near.fallbacks == [handle]


def test_a_second_transfer_begins_in_what_the_first_has_left() -> None:
    world, near, far = pair(buffer_pages=8)
    for region in (0, 1):
        near.start(far, [scattered(region, region, 500, 80, 80, seed=3)], is_read=True)
    for _ in range(2):
        world.turn()
        world.deliver()
    assert far.served_slots.take(4096) is None
    world.run()
    assert list(near.ended.values()) == [None, None]


def test_an_owner_that_says_nothing_at_all_fails_what_moves() -> None:
    world, near, far = pair(buffer_pages=1, chunk_bytes=1000)
    handle = near.start(far, [scattered(0, 1, 500, 60, 60, seed=3)], is_read=True)
    for _ in range(4):
        world.turn()
        world.deliver()
    for _ in range(int(RECLAIM_S)):
        world.now += 1.0
        world.turn("near")
        world.mail.clear()
    assert near.ended[handle] is not None
    assert near.is_quiet


NUMBERS = st.integers(0, 3) | st.integers(0, 5000) | st.integers(0, (1 << 62) - 1)
CLOCKS = st.floats()
TABLES = st.builds(OffsetTable, st.integers(2, 8), st.integers(0, 31), st.binary(max_size=64))
GROUPS = st.builds(
    SegmentGroup,
    st.integers(0, 3),
    st.integers(1, 5000) | st.integers(1, (1 << 62) - 1),
    st.integers(0, 3),
)
COUNTS = NUMBERS.map(lambda number: number + 1)
TO_OWNER = st.one_of(
    st.builds(
        SlotRequest,
        NUMBERS,
        CLOCKS,
        st.booleans(),
        COUNTS,
        COUNTS,
        COUNTS,
        st.binary(max_size=9),
        st.booleans(),
    ),
    st.builds(
        SegmentPart,
        NUMBERS,
        NUMBERS,
        st.lists(TABLES, max_size=3).map(tuple),
        st.lists(GROUPS, max_size=4).map(tuple),
    ),
    st.builds(InitiatorProgress, NUMBERS, NUMBERS, CLOCKS),
    st.builds(TransferStopped, NUMBERS, st.booleans()),
)
TO_INITIATOR = st.one_of(
    st.builds(SlotGranted, NUMBERS, NUMBERS, COUNTS, CLOCKS, st.binary(max_size=9)),
    st.builds(OwnerProgress, NUMBERS, NUMBERS, CLOCKS),
    st.builds(TransferEnded, NUMBERS, st.text(max_size=20)),
)


@given(st.lists(st.tuples(TO_OWNER | TO_INITIATOR, st.booleans()), max_size=30))
@settings(deadline=None)
def test_whatever_a_member_says_nothing_breaks_and_others_are_served(
    said: list[tuple[BounceMessage, bool]],
) -> None:
    world, near, far = pair(buffer_pages=2, chunk_bytes=1000)
    liar = Party("liar", SIZES, 1, 1000, seed=3)
    world.parties["liar"] = liar
    plan = scattered(0, 1, 500, 60, 60, seed=3)
    wanted = expected(near, far, [plan], is_read=True)
    handle = near.start(far, [plan], is_read=True)
    for message, is_turn in said:
        world.hand_over("liar", "far" if isinstance(message, ToOwner) else "near", message)
        if is_turn:
            world.turn()
            world.deliver()
    for _ in range(80):
        world.turn()
        world.deliver()
        world.now += 0.1
    assert (
        near.ended.get(handle, "not ended") is None and same(near, wanted)
    ) or near.fallbacks == [handle]


@given(st.lists(TO_INITIATOR, max_size=12), st.booleans())
@settings(deadline=None)
def test_an_owner_that_lies_fails_its_own_transfers_only(
    said: list[BounceMessage], is_read: bool
) -> None:
    world, near, far = pair(buffer_pages=2, chunk_bytes=1000)
    plan = scattered(0, 1, 500, 60, 60, seed=3)
    outside = near.memories[1].copy()
    near.start(far, [plan], is_read=is_read)
    world.turn("near")
    world.mail.clear()
    for message in said:
        world.hand_over("far", "near", message)
        near.mover.posted.clear()
        world.turn("near")
        world.mail.clear()
    assert np.array_equal(near.memories[1], outside)


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("turns", range(4))
def test_a_lost_peer_ends_whatever_was_asked_of_it_however_far_it_is(
    is_read: bool, turns: int
) -> None:
    """This includes transfers that still wait for a slot on our side."""
    world, near, far = pair(buffer_pages=2, chunk_bytes=1000)
    handles = [
        near.start(far, [scattered(0, 1, 500, 60, 60, seed=number)], is_read=is_read)
        for number in range(3)
    ]
    for _ in range(turns):
        world.turn()
        world.deliver()
    near.transfers.fail_peer(far.peer, "it is gone", world.now)
    world.wait(10)
    assert set(near.ended) == set(handles)
    assert all(error is not None for error in near.ended.values())
    assert near.own.is_free
    assert not len(near.transfers)


def test_a_write_ends_with_its_link_only_when_its_owner_has_had_time_to_put_it_into_place() -> None:
    world, near, far = pair()
    handle = near.start(far, [scattered(0, 1, 500, 60, 60, seed=3)], is_read=False)
    while not any(isinstance(message, InitiatorProgress) for _, _, message in world.mail):
        world.deliver()
        world.turn()
    near.transfers.fail_peer(far.peer, "the link has failed", world.now)
    world.turn("near")
    assert handle not in near.ended
    world.deliver()
    world.turn("far")
    world.mail.clear()
    while handle not in near.ended:
        assert world.now < 1100
        world.now += 1
        world.turn("near")
        world.mail.clear()
    assert near.ended[handle] is not None


def test_what_a_writer_has_moved_may_be_ahead_of_its_segments() -> None:
    world, near, far = pair()
    plan = scattered(0, 1, 100, 200, 200, seed=3)
    wanted = expected(far, near, [plan], is_read=False)
    handle = near.start(far, [plan], is_read=False)
    late: list[tuple[str, str, BounceMessage]] = []
    for _ in range(6):
        world.turn()
        late += [each for each in world.mail if isinstance(each[2], SegmentPart)]
        world.mail = [each for each in world.mail if not isinstance(each[2], SegmentPart)]
        world.deliver()
    assert late
    world.mail = late + world.mail
    world.run()
    assert near.ended == {handle: None}
    assert same(far, wanted)


def test_a_write_that_its_owner_has_ended_is_spoken_of_until_its_writer_has_stopped() -> None:
    world, near, far = pair()
    near.start(far, [scattered(0, 1, 500, 60, 60, seed=3)], is_read=False)
    for _ in range(3):
        world.turn()
        world.deliver()
    world.now += 20  # the owner stalled
    words = 0
    for _ in range(60):
        world.now += 1
        world.turn("far")
        words += sum(isinstance(message, TransferEnded) for _, _, message in world.mail)
        world.mail.clear()
    assert words > 2
    assert not far.served_slots.is_free


def test_a_writer_that_does_not_know_its_transfer_any_more_says_so() -> None:
    world, _, _ = pair()
    world.hand_over("far", "near", OwnerProgress(77, 0, world.now))
    world.turn("near")
    assert [(to, message) for _, to, message in world.mail] == [
        ("far", TransferStopped(77, is_certain=False))
    ]
