"""Tests a producer with a host buffer that pushes a prefill while computing it: each segment is
copied and then offered, and a withdrawn segment is not offered to any reader.
"""

import pytest
from tests.protocol.caches import no_writers, producer_settings, take_actions
from tests.protocol.test_producer_push import KEY, PUSH_KEY, ROUTE, A, registration, said

from kvferry.events import LeaseEnded
from kvferry.protocol.actions import CopyToHostBuffer
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.messages import (
    Attach,
    Confirm,
    Confirmed,
    Detach,
    PushOffer,
    PushWithdrawal,
    Ready,
    Refused,
)
from kvferry.protocol.producer.producer import Producer
from kvferry.protocol.tickets import NO_BLOCK, Ticket, runs_from_blocks
from kvferry.types import LeaseEnd

READER = "d/r/0"


def ticket(ready: int, serial: int = 1, blocks: tuple[int, ...] = (3, 4, 5)) -> str:
    """Return a ticket for three blocks of four tokens each."""
    table = [*blocks[: ready // 4], *[NO_BLOCK] * (3 - ready // 4)]
    return KEY.sign(
        Ticket(
            "p",
            "e1",
            "a",
            serial,
            "host",
            5600,
            1,
            4,
            [runs_from_blocks(table)],
            fingerprint(range(12), 4, ""),
            30.0,
        )
    )


def make_staged() -> Producer:
    return Producer(
        producer_settings(uses_host_buffer=True),
        KEY,
        PUSH_KEY,
        no_writers(),
    )


def publish(producer: Producer, ready: int, *blocks: int, serial: int = 1) -> None:
    producer.publish(A, "h1", ticket(ready, serial), ready, 0, (blocks,) if blocks else ())


def begun(*requests: str) -> Producer:
    """Return a producer with an open prefill whose first block is being copied."""
    producer = make_staged()
    for request in requests:
        producer.receive(ROUTE, registration(request), now=0)
    producer.open(A, 1, now=0)
    publish(producer, 4, 3)
    assert take_actions(producer.outbox) == [CopyToHostBuffer(A, ((3,),), 1)]
    assert said(producer) == []
    return producer


def offer(ready: int, serial: int = 1, reader: str = READER) -> PushOffer:
    return PushOffer(reader, ticket(ready, serial), ready)


def test_each_segment_is_offered_when_it_is_copied_and_the_reader_reads_on() -> None:
    producer = begun("r")
    producer.copied_to_host_buffer(1, None, now=1)
    assert said(producer) == [offer(4)]
    publish(producer, 8, 4)
    producer.receive(ROUTE, Attach(ticket(4), READER), now=2)
    assert said(producer) == [Ready("a", READER)], (
        "what it was offered is there, whatever is copied meanwhile"
    )
    producer.copied_to_host_buffer(2, None, now=3)
    assert said(producer) == [offer(8)]
    producer.close(A, 4, ((5,),))
    publish(producer, 12)
    assert said(producer) == []
    producer.copied_to_host_buffer(3, None, now=5)
    assert said(producer) == [offer(12)]
    producer.receive(ROUTE, Confirm("e1", "a", READER, 1), now=6)
    assert said(producer) == [Confirmed("a", READER)]
    assert producer.outbox.take_events() == [LeaseEnded(A, LeaseEnd.CONFIRMED)]


def test_a_segment_whose_copy_ends_early_waits_for_those_before_it() -> None:
    producer = begun("r")
    publish(producer, 8, 4)
    producer.copied_to_host_buffer(2, None, now=1)
    assert said(producer) == []
    producer.copied_to_host_buffer(1, None, now=2)
    assert said(producer) == [offer(8)]


def test_every_choice_of_a_request_is_offered_and_told() -> None:
    producer = begun("r", "s")
    producer.copied_to_host_buffer(1, None, now=1)
    assert said(producer) == [offer(4), offer(4, reader="d/s/0")]
    for reader in (READER, "d/s/0"):
        producer.receive(ROUTE, Attach(ticket(4), reader), now=2)
    assert said(producer) == [Ready("a", READER), Ready("a", "d/s/0")]


def test_a_reader_that_another_ranks_offer_has_brought_is_told_with_its_offer() -> None:
    producer = begun("r")
    producer.receive(ROUTE, Attach(ticket(4), READER), now=0)
    assert said(producer) == []
    producer.receive(ROUTE, Confirm("e1", "a", READER, 1), now=0)
    assert [message.reason for message in said(producer) if isinstance(message, Refused)] == [
        "the blocks were not ready to be read"
    ]
    producer.copied_to_host_buffer(1, None, now=1)
    assert said(producer) == [offer(4), Ready("a", READER)]


@pytest.mark.parametrize("comes", ["before the end", "after the end"])
def test_a_reader_with_the_whole_ticket_is_told_when_all_is_copied(comes: str) -> None:
    """The reader got no offer: it was sent by a router that asks the prefill side first."""
    producer = begun()
    producer.copied_to_host_buffer(1, None, now=1)
    if comes == "before the end":
        producer.receive(ROUTE, Attach(ticket(12), "x"), now=1)
    producer.close(A, 2, ((4, 5),))
    publish(producer, 12)
    if comes == "after the end":
        producer.receive(ROUTE, Attach(ticket(12), "x"), now=2)
    assert said(producer) == []
    producer.copied_to_host_buffer(2, None, now=3)
    assert said(producer) == [Ready("a", "x")]


def test_what_was_copied_for_a_withdrawn_prefill_is_offered_to_nobody() -> None:
    producer = begun("r")
    producer.withdraw(A, 1, now=1)
    producer.open(A, 2, now=1)
    publish(producer, 4, 7, serial=2)
    assert take_actions(producer.outbox) == [CopyToHostBuffer(A, ((7,),), 2)]
    producer.copied_to_host_buffer(1, None, now=2)
    assert said(producer) == []
    producer.copied_to_host_buffer(2, None, now=3)
    assert said(producer) == [offer(4, serial=2)]


def test_a_block_that_is_still_copied_for_a_withdrawn_prefill_is_copied_again_after_that() -> None:
    """The old copy may have read the previous content of the block."""
    producer = begun("r")
    producer.withdraw(A, 1, now=1)
    producer.open(A, 2, now=1)
    publish(producer, 4, 3, serial=2)
    assert take_actions(producer.outbox) == []
    assert producer.is_copying([3])
    producer.copied_to_host_buffer(1, None, now=2)
    assert (said(producer), take_actions(producer.outbox)) == (
        [],
        [CopyToHostBuffer(A, ((3,),), 2)],
    )
    producer.copied_to_host_buffer(2, None, now=3)
    assert said(producer) == [offer(4, serial=2)]
    assert not producer.is_copying([3])


def test_a_copy_that_waits_for_its_turn_is_dropped_with_its_lease() -> None:
    producer = begun("r")
    producer.withdraw(A, 1, now=1)
    producer.open(A, 2, now=1)
    publish(producer, 4, 3, serial=2)
    producer.withdraw(A, 2, now=2)
    producer.copied_to_host_buffer(1, None, now=3)
    assert take_actions(producer.outbox) == []
    assert not producer.is_copying([3])


def test_a_withdrawal_of_what_was_offered_is_told_and_nobody_is_confirmed() -> None:
    producer = begun("r")
    producer.copied_to_host_buffer(1, None, now=1)
    producer.receive(ROUTE, Attach(ticket(4), READER), now=2)
    publish(producer, 8, 4)
    said(producer)
    producer.withdraw(A, 1, now=3)
    assert said(producer) == [PushWithdrawal(READER, 1)]
    producer.copied_to_host_buffer(2, None, now=4)
    assert said(producer) == []
    producer.receive(ROUTE, Confirm("e1", "a", READER, 1), now=4)
    assert [type(message) for message in said(producer)] == [Refused]


@pytest.mark.parametrize("how", ["expires", "is abandoned"])
def test_the_end_of_a_lease_is_reported_when_its_last_copy_has_ended(how: str) -> None:
    producer = begun()
    producer.close(A, 1, ((4, 5),))
    publish(producer, 12)
    producer.copied_to_host_buffer(2, None, now=2)
    if how == "expires":
        producer.advance(now=32)
    else:
        producer.abandon(A, now=0)
    assert (producer.outbox.take_events(), producer.num_leases) == ([], 1)
    producer.copied_to_host_buffer(1, None, now=33)
    assert producer.outbox.take_events() == [
        LeaseEnded(A, LeaseEnd.EXPIRED if how == "expires" else LeaseEnd.RELEASED)
    ]
    assert (said(producer), producer.num_leases) == ([], 0)


def test_a_lease_that_ends_with_its_prefill_copies_nothing_more() -> None:
    producer = begun("r")
    producer.copied_to_host_buffer(1, None, now=1)
    producer.receive(ROUTE, Attach(ticket(4), READER), now=2)
    producer.receive(ROUTE, Detach("e1", "a", READER), now=2)
    producer.close(A, 3, ((4, 5),))
    assert (take_actions(producer.outbox), producer.outbox.take_events()) == (
        [],
        [LeaseEnded(A, LeaseEnd.RELEASED)],
    )


def test_a_prefill_that_is_aborted_while_it_is_copied_is_refused_and_nothing_is_reported() -> None:
    """The engine has already freed the blocks."""
    producer = begun("r")
    producer.fail_prefill(A, "h1", "aborted", now=1)
    assert said(producer) == [Refused("", READER, "aborted")]
    producer.copied_to_host_buffer(1, None, now=2)
    assert (said(producer), producer.outbox.take_events(), producer.num_leases) == ([], [], 0)


def test_a_segment_that_cannot_be_copied_fails_the_readers_and_the_blocks_come_back_when_they_are_computed() -> (  # noqa: E501
    None
):
    producer = begun("r")
    producer.copied_to_host_buffer(1, None, now=1)
    producer.receive(ROUTE, Attach(ticket(4), READER), now=1)
    said(producer)
    publish(producer, 8, 4)
    producer.copied_to_host_buffer(2, "no memory", now=2)
    reason = "the blocks could not be copied to the host buffer: no memory"
    assert said(producer) == [Refused("", READER, reason)]
    producer.receive(ROUTE, Attach(ticket(4), "late"), now=3)
    assert said(producer) == [Refused("a", "late", reason)]
    producer.receive(ROUTE, registration("late"), now=3)
    assert said(producer) == [Refused("", "d/late/0", reason)]
    publish(producer, 12, 5)
    assert (producer.outbox.take_events(), said(producer)) == ([], [])
    producer.close(A, 4, ((5,),))
    assert producer.outbox.take_events() == [LeaseEnded(A, LeaseEnd.RELEASED)]
    publish(producer, 12)
    assert (said(producer), producer.num_leases) == ([], 0)


def test_of_two_segments_that_cannot_be_copied_readers_hear_once() -> None:
    producer = begun("r")
    publish(producer, 8, 4)
    producer.close(A, 1, ((5,),))
    producer.copied_to_host_buffer(1, "no memory", now=2)
    assert producer.outbox.take_events() == []
    producer.copied_to_host_buffer(2, "no memory", now=2)
    producer.copied_to_host_buffer(3, None, now=2)
    assert producer.outbox.take_events() == [LeaseEnded(A, LeaseEnd.RELEASED)]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_prefill_that_cannot_be_copied_is_reported_after_its_other_copies_whoever_leaves(
    leaves: bool,
) -> None:
    producer = begun("r")
    publish(producer, 8, 4)
    assert take_actions(producer.outbox) == [CopyToHostBuffer(A, ((4,),), 2)]
    producer.receive(ROUTE, Attach(ticket(4), READER), now=1)
    producer.copied_to_host_buffer(1, "no memory", now=2)
    if leaves:
        producer.receive(ROUTE, Detach("e1", "a", READER), now=3)
    producer.close(A, 4, ((5,),))
    assert (producer.outbox.take_events(), producer.num_leases) == ([], 1)
    producer.copied_to_host_buffer(2, None, now=5)
    assert producer.outbox.take_events() == [LeaseEnded(A, LeaseEnd.RELEASED)]
    assert take_actions(producer.outbox) == []


def test_after_one_segment_has_failed_the_others_bring_nothing() -> None:
    producer = begun("r")
    publish(producer, 8, 4)
    producer.copied_to_host_buffer(1, "no memory", now=2)
    said(producer)
    producer.copied_to_host_buffer(2, None, now=3)
    assert (said(producer), producer.outbox.take_events()) == ([], [])


def test_where_there_is_nothing_new_to_copy_the_offer_goes_at_once() -> None:
    """The step filled only blocks in front of those that the last token attends to."""
    producer = begun("r")
    producer.copied_to_host_buffer(1, None, now=1)
    said(producer)
    publish(producer, 8)
    assert said(producer) == [offer(8)]


def test_a_granted_prefill_is_offered_at_once_and_read_when_it_is_copied() -> None:
    """Without streaming, readers attach while the prefill is being copied."""
    producer = make_staged()
    producer.receive(ROUTE, registration("r"), now=0)
    producer.grant(A, 1, 0, ((3, 4, 5),))
    publish(producer, 12)
    assert said(producer) == [offer(12)]
    producer.receive(ROUTE, Attach(ticket(12), READER), now=1)
    assert said(producer) == []
    producer.copied_to_host_buffer(1, None, now=2)
    assert said(producer) == [Ready("a", READER)]
