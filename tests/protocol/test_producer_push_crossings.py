"""Tests readers that come in any order, from two consumers, or leave early: no reader waits in
vain, and the producer holds no block for a reader that will not come.
"""

import pytest
from tests.protocol.test_producer_push import (
    KEY,
    ROUTE,
    TICKET,
    A,
    cancel,
    granted,
    make_producer,
    opened,
    registration,
    said,
)

from kvferry.events import LeaseEnded
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.messages import (
    Attach,
    Confirm,
    Confirmed,
    Detach,
    Heartbeat,
    HeartbeatReply,
    PushOffer,
    PushWithdrawal,
    Refused,
)
from kvferry.protocol.tickets import Ticket
from kvferry.types import LeaseEnd

OTHER = registration("s", engine="d2")


def ticket(serial: int) -> str:
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
            [[(3, 2)]],
            fingerprint(range(8), 4, ""),
            30.0,
        )
    )


def test_one_that_registers_anew_before_we_have_withdrawn_is_not_forgotten() -> None:
    """The reader already knows of the withdrawal from another rank."""
    producer = opened()
    producer.receive(ROUTE, registration(), now=1)
    producer.receive(ROUTE, Heartbeat("e1", 1, ["d/r/0", "d/nobody/0"]), now=1)
    assert said(producer)[1:] == [HeartbeatReply("e1", 1, ["d/nobody/0"])]
    producer.withdraw(A, 1, now=2)
    assert said(producer) == [PushWithdrawal("d/r/0", 1)]
    assert producer.num_registrations == 1


@pytest.mark.parametrize("is_offered", [False, True])
def test_another_consumer_gets_what_the_first_has_left(is_offered: bool) -> None:
    """The first consumer failed its client request halfway, and the router asked another consumer
    with the same push ticket.
    """
    producer = make_producer()
    producer.receive(ROUTE, registration(), now=0)
    if is_offered:
        producer.open(A, 1, now=0)
        producer.publish(A, "h1", TICKET, 4, now=0)
        producer.receive(ROUTE, Attach(TICKET, "d/r/0"), now=1)
        producer.receive(ROUTE, Detach("e1", "a", "d/r/0"), now=1)
    else:
        producer.receive(ROUTE, cancel(), now=1)
    said(producer)
    producer.receive(ROUTE, OTHER, now=2)
    if is_offered:
        producer.close(A, now=3)
        producer.publish(A, "h1", TICKET, 8, now=0)
    else:
        granted(producer, now=3)
    assert said(producer)[-1] == PushOffer("d2/s/0", TICKET, 8)
    producer.receive(ROUTE, Attach(TICKET, "d2/s/0"), now=4)
    producer.receive(ROUTE, Confirm("e1", "a", "d2/s/0"), now=4)
    assert said(producer) == [Confirmed("a", "d2/s/0")]
    assert producer.outbox.take_events() == [LeaseEnded(A, LeaseEnd.CONFIRMED)]


@pytest.mark.parametrize("is_anew", [False, True])
@pytest.mark.parametrize(
    "moment", ["before P begins", "before D has registered", "offered", "read"]
)
def test_what_nobody_will_come_for_is_freed_at_its_end_also_when_it_was_computed_anew(
    moment: str, is_anew: bool
) -> None:
    """The prefill was preempted, or the engine freed a block that had been published. The prefill
    gets a new lease, and the producer need not ask D again.
    """
    producer = make_producer()
    if moment == "before P begins":
        producer.receive(ROUTE, registration(), now=0)
        producer.receive(ROUTE, cancel(), now=0)
    producer.open(A, 1, now=1)
    producer.publish(A, "h1", ticket(1), 4, now=1)
    if moment in ("offered", "read"):
        producer.receive(ROUTE, registration(), now=1)
    if moment == "read":
        producer.receive(ROUTE, Attach(ticket(1), "d/r/0"), now=1)
        producer.receive(ROUTE, Detach("e1", "a", "d/r/0"), now=1)
    elif moment != "before P begins":
        producer.receive(ROUTE, cancel(), now=1)
    if is_anew:
        producer.withdraw(A, 1, now=2)
        producer.grant(A, 2, now=2)
        producer.publish(A, "h1", ticket(2), 8, now=2)
    else:
        assert producer.outbox.take_events() == [], "its engine is at it"
        producer.close(A, now=2)
    assert producer.outbox.take_events() == [LeaseEnded(A, LeaseEnd.RELEASED)]
    producer.advance(now=3)
    producer.advance(now=40)
    assert (producer.num_leases, producer.num_registrations, producer.next_deadline()) == (
        0,
        0,
        None,
    )


def test_one_that_comes_after_all_is_not_among_those_that_need_nothing() -> None:
    """The negative control: the prefill is computed again, and another reader of the same request
    has registered in the meantime.
    """
    producer = opened()
    producer.receive(ROUTE, cancel(), now=1)
    producer.withdraw(A, 1, now=2)
    producer.receive(ROUTE, registration("r", rank=1), now=2)
    said(producer)
    producer.grant(A, 2, now=3)
    producer.publish(A, "h1", ticket(2), 8, now=3)
    assert said(producer) == [PushOffer("d/r/1", ticket(2), 8)]
    assert (producer.outbox.take_events(), producer.num_leases) == ([], 1)


@pytest.mark.parametrize(
    ("has_read", "reason"),
    [
        (False, "the prefill was released before the reader arrived"),
        (True, "another reader has already received the prefill"),
    ],
)
def test_one_that_comes_after_all_is_over_is_told_at_once(has_read: bool, reason: str) -> None:
    producer = make_producer()
    producer.receive(ROUTE, registration(), now=0)
    granted(producer)
    producer.receive(ROUTE, Attach(TICKET, "d/r/0"), now=1)
    producer.receive(
        ROUTE, Confirm("e1", "a", "d/r/0") if has_read else Detach("e1", "a", "d/r/0"), now=1
    )
    said(producer)
    producer.receive(ROUTE, OTHER, now=2)
    assert said(producer) == [Refused("", "d2/s/0", reason)]
    producer.advance(now=3)
    producer.advance(now=33)
    producer.receive(ROUTE, OTHER, now=34)
    assert (said(producer), producer.num_registrations) == ([], 1), "nothing is remembered for ever"


@pytest.mark.parametrize("is_preempted", [False, True])
def test_one_that_has_all_it_wants_before_the_prefill_is_through_is_offered_no_more(
    is_preempted: bool,
) -> None:
    producer = opened()
    producer.receive(ROUTE, Confirm("e1", "a", "d/r/0"), now=1)
    assert said(producer) == [Confirmed("a", "d/r/0")]
    if is_preempted:
        producer.withdraw(A, 1, now=2)
        assert (said(producer), producer.num_registrations) == ([], 0)
    else:
        producer.close(A, now=2)
        producer.publish(A, "h1", TICKET, 8, now=0)
        assert (said(producer), producer.outbox.take_events()) == (
            [],
            [LeaseEnded(A, LeaseEnd.CONFIRMED)],
        )


def test_one_that_left_because_of_another_ranks_offer_is_not_waited_for_here() -> None:
    producer = make_producer()
    producer.receive(ROUTE, registration(), now=0)
    producer.receive(ROUTE, Attach(TICKET, "d/r/0"), now=1)
    producer.receive(ROUTE, Detach("e1", "a", "d/r/0"), now=1)
    producer.open(A, 1, now=2)
    producer.publish(A, "h1", TICKET, 4, now=0)
    producer.close(A, now=3)
    assert (said(producer), producer.outbox.take_events()) == (
        [],
        [LeaseEnded(A, LeaseEnd.RELEASED)],
    )


def test_a_reader_ahead_by_two_leases_is_served_by_the_one_it_has_a_ticket_for() -> None:
    producer = make_producer()
    producer.receive(ROUTE, registration(), now=0)
    producer.receive(ROUTE, Attach(ticket(2), "d/r/0"), now=1)
    producer.open(A, 1, now=2)
    producer.withdraw(A, 1, now=2)
    producer.open(A, 2, now=3)
    producer.close(A, now=3)
    said(producer)
    producer.receive(ROUTE, Confirm("e1", "a", "d/r/0", 2), now=4)
    assert said(producer) == [Confirmed("a", "d/r/0")]
