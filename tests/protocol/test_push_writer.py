"""Tests a producer that has a write grant: which blocks it writes, which messages it sends about
them, and which events stop it.
"""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.caches import producer_settings, take_actions, take_replies
from tests.protocol.test_consumer import PEER, SIDE, connect, make_consumer

from kvferry.protocol.actions import StartWrite, StopWrite
from kvferry.protocol.consumer.consumer import Consumer
from kvferry.protocol.fingerprints import Fingerprint, fingerprint
from kvferry.protocol.messages import (
    OLDEST_WIRE_VERSION,
    HandshakeRefused,
    PushRegistration,
    Revoke,
    Revoked,
    WriteFailed,
    WriteGrantInfo,
    Written,
)
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.producer.push_writer import Landed, PushWriter
from kvferry.protocol.tickets import Ticket
from kvferry.types import EngineId, Region, RequestId, Route

READER, ROUTE = "p/r/0", Route(b"route")
A = RequestId("a")
LEASE = WriteGrantInfo(7, "memory", 0, [[9, 2]], 0, 8, [], fingerprint(range(8), 4, ""))
REGISTRATION = PushRegistration(
    "e0", READER, "r", "p", "p-host", 5600, 1, 30.0, "h1", "PT", "e1", LEASE
)
BLOCK_BYTES = 64


def ticket(serial: int = 1, tokens: int = 8, blocks: tuple[int, int] = (3, 2)) -> Ticket:
    return Ticket(
        "us",
        "e0",
        "a",
        serial,
        "host",
        5600,
        1,
        4,
        [[blocks]],
        fingerprint(range(tokens), 4, ""),
        30.0,
    )


class Side:
    """A `PushWriter` and the consumer whose peer table it shares."""

    def __init__(self, group: int = 0) -> None:
        self.consumer: Consumer = make_consumer(group=group)
        self.writers = PushWriter(
            producer_settings(engine=EngineId("us"), write_timeout_s=20),
            self.consumer.peers,
            Outbox(),
        )
        self.consumer.add_peer_user(self.writers)

    def register(self, **changes: Any) -> "Side":
        self.writers.register(ROUTE, msgspec.structs.replace(REGISTRATION, **changes), now=0)
        return self

    def connected(self) -> "Side":
        self.register()
        connect(self.consumer)
        return self

    def offer(self, ready: int, is_over: bool = False, serial: int = 1, now: float = 1) -> "Side":
        self.writers.offer(READER, ticket(serial), ready, is_over, now)
        return self

    def started(self) -> StartWrite:
        [action] = take_actions(self.writers.outbox)
        assert isinstance(action, StartWrite)
        return action

    def said(self) -> list[object]:
        replies = take_replies(self.writers.outbox)
        assert {reply.route for reply in replies} <= {ROUTE}
        return [reply.message for reply in replies]


def failed(reason: str) -> list[object]:
    return [WriteFailed(READER, 7, reason)]


def test_what_is_there_is_written_chunk_by_chunk_and_settled_when_all_has_landed() -> None:
    side = Side().connected().offer(4)
    first = side.started()
    assert (first.peer, first.transport, first.grant_id) == (PEER, "memory", 7)
    assert [(list(p.local_offsets), list(p.remote_offsets)) for p in first.segments] == [
        ([3 * 64], [9 * 64])
    ]
    side.writers.write_ended(first.write, None, now=2)
    assert side.said() == [Written(READER, 7, 4, is_last=False)]
    side.offer(8, is_over=True, now=3)
    second = side.started()
    assert [(list(p.local_offsets), list(p.remote_offsets)) for p in second.segments] == [
        ([4 * 64], [2 * 64])
    ]
    side.writers.write_ended(second.write, None, now=4)
    assert (side.said(), side.writers.take_landed()) == ([], [Landed(A, READER)])
    side.writers.finish(READER)
    assert side.said() == [
        Written(READER, 7, 8, is_last=True, left_tokens=4, early_bytes=BLOCK_BYTES)
    ]
    assert (len(side.writers), side.writers.num_posted, side.writers.next_deadline()) == (
        0,
        0,
        None,
    )


def test_what_comes_while_a_write_is_under_way_is_written_after_it() -> None:
    side = Side().connected().offer(4)
    first = side.started()
    side.offer(8, is_over=True)
    assert take_actions(side.writers.outbox) == []
    side.writers.write_ended(first.write, None, now=2)
    assert side.started().segments[0].total_bytes == BLOCK_BYTES


def test_an_offer_that_comes_before_the_handshake_is_over_waits_for_it() -> None:
    side = Side().register().offer(8, is_over=True)
    assert take_actions(side.writers.outbox) == []
    connect(side.consumer)
    assert side.started().segments[0].total_bytes == 2 * BLOCK_BYTES


def test_only_what_was_asked_for_is_written() -> None:
    side = (
        Side().register(write=msgspec.structs.replace(LEASE, first_token=4)).offer(8, is_over=True)
    )
    connect(side.consumer)
    assert [(list(p.local_offsets), list(p.remote_offsets)) for p in side.started().segments] == [
        ([4 * 64], [2 * 64])
    ]


def test_a_decode_side_that_cannot_be_reached_is_told_to_read() -> None:
    side = Side().register()
    for nonce in (1, 2):
        side.consumer.receive(SIDE, HandshakeRefused(nonce, "no"), now=1)
    assert side.said() == failed(
        "the decode engine cannot be reached: the producer refused the handshake with wire version "
        f"{OLDEST_WIRE_VERSION}: no"
    )
    assert len(side.writers) == 0
    assert side.writers.incarnations() == set()
    side.register()
    assert [type(message) for message in side.said()] == [WriteFailed], (
        "it is known to be out of reach for a while"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"transport": "shm"}, "shm does not reach rank 0 of the decode engine"),
        ({"local_block_ids": [[9, 99]]}, "our block list names blocks outside 0..15"),
        ({"local_block_ids": [[9]]}, "our block list of group 0 has 1 blocks, but 2 are needed"),
        ({"needed_from": [0, 0]}, "the write grant names other groups than it has blocks for"),
        (
            {"tokens": fingerprint(range(1, 9), 4, "")},
            "the prefill was of another prompt or of other weights: 0 tokens are known to be the "
            "same, but 8 are needed",
        ),
    ],
)
def test_what_cannot_be_written_is_told(changes: dict[str, Any], reason: str) -> None:
    side = Side().register(write=msgspec.structs.replace(LEASE, **changes))
    connect(side.consumer)
    side.offer(8)
    assert (side.said(), take_actions(side.writers.outbox)) == (failed(reason), [])


@pytest.mark.parametrize("needed_from", [[], [0]])
def test_a_lease_without_blocks_of_a_group_is_not_written(needed_from: list[int]) -> None:
    side = Side(group=1).register(write=msgspec.structs.replace(LEASE, needed_from=needed_from))
    connect(side.consumer, regions=[Region("l0", 0, 64, 64, 16, group=1)])
    side.offer(8)
    assert [type(message) for message in side.said()] == [WriteFailed]


@pytest.mark.parametrize(
    "changes",
    [
        {"decode_engine_id": "us"},
        {"decode_epoch": ""},
        {"decode_tp_size": 0},
        {"decode_tp_size": 1 << 40},
        {"write": msgspec.structs.replace(LEASE, tp_rank=1)},
        {"write": msgspec.structs.replace(LEASE, tokens=Fingerprint(1, 1 << 40, b""))},
    ],
)
def test_a_lease_that_makes_no_sense_is_refused_and_nobody_is_dialled(
    changes: dict[str, Any],
) -> None:
    side = Side().register(**changes)
    assert side.said() == failed("this producer cannot write to the decode engine")
    assert side.consumer.outbox.take_actions() == []


def test_a_write_that_fails_is_told_and_nothing_is_written_after_it() -> None:
    side = Side().connected().offer(4)
    side.writers.write_ended(side.started().write, "the link broke", now=2)
    assert side.said() == failed("the write failed: the link broke")
    assert not side.writers.has(READER)


def test_a_write_that_takes_too_long_is_stopped() -> None:
    side = Side().connected().offer(4, now=1)
    write = side.started().write
    side.writers.renew([READER], now=20)
    assert side.writers.advance(now=21) == []
    assert take_actions(side.writers.outbox) == [StopWrite(write)]
    side.writers.write_ended(write, "cancelled", now=22)
    assert side.said() == failed("the write failed: cancelled")


def test_a_preempted_prefill_is_written_anew_from_its_first_token() -> None:
    side = Side().connected().offer(4)
    side.writers.write_ended(side.started().write, None, now=2)
    side.said()
    side.writers.withdraw(READER)
    side.offer(4, serial=2)
    assert side.started().segments[0].total_bytes == BLOCK_BYTES
    assert side.said() == []


def test_a_write_that_a_preemption_cuts_off_is_not_followed_by_another_into_the_same_blocks() -> (
    None
):
    side = Side().connected().offer(4)
    write = side.started().write
    side.writers.withdraw(READER)
    assert take_actions(side.writers.outbox) == [StopWrite(write)]
    assert side.said() == failed("the prefill was preempted while its blocks were being written")
    side.writers.revoke(ROUTE, Revoke("e0", READER, 7))
    assert side.said() == []
    side.writers.write_ended(write, "cancelled", now=3)
    assert side.said() == [Revoked(READER, 7)]


def test_all_that_landed_of_a_prefill_that_is_then_preempted_is_not_settled() -> None:
    side = Side().connected().offer(8)
    side.writers.write_ended(side.started().write, None, now=2)
    assert side.writers.has_landed
    side.writers.withdraw(READER)
    assert side.writers.take_landed() == []


@pytest.mark.parametrize("grant_id", [7, 6])
def test_a_revocation_is_answered_once_nothing_of_that_lease_is_under_way(grant_id: int) -> None:
    side = Side().connected().offer(4)
    write = side.started().write
    side.writers.revoke(ROUTE, Revoke("e0", READER, grant_id))
    if grant_id == 6:
        assert side.said() == [Revoked(READER, 6)]
        assert side.writers.has(READER), "an earlier lease is not this one"
        return
    assert (side.said(), take_actions(side.writers.outbox)) == ([], [StopWrite(write)])
    side.writers.write_ended(write, "cancelled", now=2)
    assert side.said() == [Revoked(READER, 7)]
    side.writers.revoke(ROUTE, Revoke("e0", READER, 7))
    assert side.said() == [Revoked(READER, 7)], "asked again, for the answer may have been lost"


def test_a_lease_that_is_not_renewed_ends_what_is_written_under_it() -> None:
    side = Side().connected().offer(4)
    write = side.started().write
    side.writers.renew([READER, "a stranger"], now=10)
    assert side.writers.advance(now=39.9) == []
    assert side.writers.advance(now=40) == [READER]
    assert StopWrite(write) in take_actions(side.writers.outbox)
    assert not side.writers.has(READER)


def test_a_registration_anew_replaces_what_was_lent() -> None:
    side = Side().connected().offer(4)
    write = side.started().write
    side.register(write=None)
    assert take_actions(side.writers.outbox) == [StopWrite(write)]
    assert not side.writers.has(READER)


LEASES = st.builds(
    WriteGrantInfo,
    grant_id=st.integers(1, 1 << 62),
    transport=st.sampled_from(["memory", "", "shm"]),
    tp_rank=st.integers(0, 3),
    local_block_ids=st.lists(
        st.lists(st.integers(-1, (1 << 31) - 1) | st.integers(-1, 20), max_size=4), max_size=3
    ),
    first_token=st.integers(0, 1 << 40) | st.integers(0, 9),
    end_token=st.integers(0, 1 << 40) | st.integers(0, 9),
    needed_from=st.lists(st.integers(0, 1 << 40), max_size=2),
    tokens=st.builds(
        Fingerprint,
        st.integers(-1, 9),
        st.integers(-1, 1 << 40) | st.integers(0, 9),
        st.binary(max_size=48),
    )
    | st.just(LEASE.tokens),
)


@given(lease=LEASES, tp_size=st.integers(-2, 5000), ready=st.sampled_from([0, 4, 8]))
def test_no_lease_raises_anything_whatever_it_says(
    lease: WriteGrantInfo, tp_size: int, ready: int
) -> None:
    side = Side().connected()
    side.register(write=lease, decode_tp_size=tp_size)
    if side.writers.has(READER):
        side.offer(ready, is_over=True)
        for action in take_actions(side.writers.outbox):
            if isinstance(action, StartWrite):
                side.writers.write_ended(action.write, None, now=2)
        side.writers.advance(now=1000)
    assert (len(side.writers), side.writers.num_posted) == (0, 0)
