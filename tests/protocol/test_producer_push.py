"""Tests a producer whose readers register before a ticket exists: which readers get an offer, for
which readers a lease waits, and when the lease ends.
"""

import msgspec
import pytest
from tests.protocol.caches import no_writers, producer_settings, take_replies

from kvferry.events import LeaseEnded
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.messages import (
    Attach,
    Confirm,
    Confirmed,
    Detach,
    Heartbeat,
    HeartbeatReply,
    PushCancel,
    PushOffer,
    PushRegistration,
    PushWithdrawal,
    Refused,
    WriteGrantInfo,
)
from kvferry.protocol.producer.producer import Producer
from kvferry.protocol.tickets import PushTicket, PushTicketKey, Ticket, TicketKey
from kvferry.types import LeaseEnd, RequestId, Route

KEY, PUSH_KEY = TicketKey(b"secret"), PushTicketKey(b"secret")
A = RequestId("a")
ROUTE = Route(b"d")
TICKET = KEY.sign(
    Ticket("p", "e1", "a", 1, "host", 5600, 1, 4, [[(3, 2)]], fingerprint(range(8), 4, ""), 30.0)
)


def make_producer() -> Producer:
    return Producer(
        producer_settings(),
        KEY,
        PUSH_KEY,
        no_writers(),
    )


def push_ticket(match_id: str = "h1", engine: str = "p", epoch: str = "e1") -> str:
    return PUSH_KEY.sign(PushTicket(match_id, engine, epoch, "p-host", 5600, 1))


def registration(
    request: str = "r", rank: int = 0, epoch: str = "e1", engine: str = "d"
) -> PushRegistration:
    reader = f"{engine}/{request}/{rank}"
    return PushRegistration(
        epoch, reader, request, engine, "d-host", 5600, 1, 30.0, "h1", push_ticket()
    )


def cancel(request: str = "r", rank: int = 0, engine: str = "d") -> PushCancel:
    return PushCancel("e1", f"{engine}/{request}/{rank}", request, engine, "h1", push_ticket())


def granted(producer: Producer, now: float = 0) -> Producer:
    producer.grant(A, 1, now)
    producer.publish(A, "h1", TICKET, 8, now=0)
    return producer


def said(producer: Producer) -> list[object]:
    return [reply.message for reply in take_replies(producer.outbox)]


def offered(*requests: str) -> Producer:
    producer = make_producer()
    for request in requests:
        producer.receive(ROUTE, registration(request), now=0)
    granted(producer)
    assert said(producer) == [PushOffer(f"d/{request}/0", TICKET, 8) for request in requests]
    return producer


def test_a_registration_becomes_a_reader_and_its_confirmation_ends_the_lease() -> None:
    producer = offered("r")
    producer.receive(ROUTE, Attach(TICKET, "d/r/0"), now=1)
    producer.receive(ROUTE, Confirm("e1", "a", "d/r/0"), now=2)
    assert said(producer) == [Confirmed("a", "d/r/0")]
    assert producer.outbox.take_events() == [LeaseEnded(A, LeaseEnd.CONFIRMED)]
    assert producer.num_registrations == 0


def test_the_lease_waits_for_everybody_it_was_offered_to() -> None:
    producer = offered("r", "s")
    producer.receive(ROUTE, Attach(TICKET, "d/r/0"), now=1)
    producer.receive(ROUTE, Confirm("e1", "a", "d/r/0"), now=2)
    assert producer.outbox.take_events() == []
    producer.receive(ROUTE, Attach(TICKET, "d/s/0"), now=3)
    producer.receive(ROUTE, Detach("e1", "a", "d/s/0"), now=4)
    assert producer.outbox.take_events() == [LeaseEnded(A, LeaseEnd.CONFIRMED)]


def test_what_was_read_with_a_withdrawn_ticket_is_not_confirmed_by_the_next_lease() -> None:
    producer = offered("r")
    producer.receive(ROUTE, Attach(TICKET, "d/r/0"), now=1)
    producer.receive(ROUTE, Confirm("e1", "a", "d/r/0", serial=7), now=2)
    assert said(producer) == [
        Refused("a", "d/r/0", "the lease ended before the read was confirmed", 7)
    ]
    producer.receive(ROUTE, Confirm("e1", "a", "d/r/0", serial=1), now=2)
    assert said(producer) == [Confirmed("a", "d/r/0")]


def test_one_that_leaves_without_having_come_ends_the_lease_when_it_is_the_last() -> None:
    producer = offered("r", "s")
    producer.receive(ROUTE, cancel("r"), now=1)
    assert producer.outbox.take_events() == []
    producer.receive(ROUTE, cancel("s"), now=1)
    assert producer.outbox.take_events() == [LeaseEnded(A, LeaseEnd.RELEASED)]


def test_nothing_is_kept_for_one_that_left_before() -> None:
    producer = make_producer()
    producer.receive(ROUTE, cancel(), now=0)
    granted(producer)
    assert producer.outbox.take_events() == [LeaseEnded(A, LeaseEnd.RELEASED)]


def test_one_that_was_offered_something_and_died_costs_one_lease() -> None:
    producer = offered("r")
    assert producer.next_deadline() == 30
    producer.advance(now=30)
    assert producer.outbox.take_events() == [LeaseEnded(A, LeaseEnd.EXPIRED)]


def test_heartbeats_renew_registrations_and_say_which_are_gone() -> None:
    producer = make_producer()
    producer.expect_prefill(A, "h1")
    producer.receive(ROUTE, registration(), now=0)
    producer.receive(ROUTE, Heartbeat("e1", 1, ["d/r/0", "d/gone/0"]), now=20)
    assert said(producer) == [HeartbeatReply("e1", 1, ["d/gone/0"])]
    producer.advance(now=49)
    assert producer.num_registrations == 1
    producer.advance(now=50)
    assert (producer.num_registrations, producer.next_deadline()) == (0, None)


def test_a_registration_meant_for_an_earlier_life_is_refused() -> None:
    producer = make_producer()
    producer.receive(ROUTE, registration(epoch="e0"), now=0)
    assert said(producer) == [
        Refused("", "d/r/0", "the producer has restarted since the router chose it")
    ]
    assert producer.num_registrations == 0


def test_who_waits_for_a_prefill_that_failed_is_told() -> None:
    producer = make_producer()
    producer.receive(ROUTE, registration(), now=0)
    producer.fail_prefill(A, "h1", "it was aborted", now=1)
    assert said(producer) == [Refused("", "d/r/0", "it was aborted")]


def test_a_lease_that_a_reader_ahead_of_its_grant_has_ended_is_not_offered() -> None:
    producer = make_producer()
    producer.receive(ROUTE, Attach(TICKET, "x"), now=0)
    producer.receive(ROUTE, Confirm("e1", "a", "x"), now=0)
    granted(producer)
    assert producer.outbox.take_events() == [LeaseEnded(A, LeaseEnd.CONFIRMED)]
    said(producer)
    producer.receive(ROUTE, registration(), now=1)
    assert said(producer) == []


def opened(ready: int = 4) -> Producer:
    """Return a producer with an open prefill and a reader that was offered it and has attached."""
    producer = make_producer()
    producer.receive(ROUTE, registration(), now=0)
    producer.open(A, 1, now=0)
    producer.publish(A, "h1", TICKET, ready, now=0)
    assert said(producer) == [PushOffer("d/r/0", TICKET, ready)]
    producer.receive(ROUTE, Attach(TICKET, "d/r/0"), now=0)
    return producer


def test_readers_of_an_open_prefill_hear_of_all_that_comes_and_are_confirmed_when_it_is_closed(
) -> None:  # fmt: skip
    producer = opened()
    producer.publish(A, "h1", TICKET, 8, now=0)
    assert said(producer) == [PushOffer("d/r/0", TICKET, 8)]
    producer.advance(now=1000)
    assert producer.outbox.take_events() == [], "it has no end while it is computed"
    producer.close(A, now=1000)
    producer.receive(ROUTE, Confirm("e1", "a", "d/r/0"), now=1001)
    assert said(producer) == [Confirmed("a", "d/r/0")]
    assert producer.outbox.take_events() == [LeaseEnded(A, LeaseEnd.CONFIRMED)]


def test_an_open_prefill_that_nobody_needs_ends_when_it_is_closed() -> None:
    producer = opened()
    producer.receive(ROUTE, Detach("e1", "a", "d/r/0"), now=1)
    producer.publish(A, "h1", TICKET, 8, now=0)
    assert (said(producer), producer.outbox.take_events()) == ([], [])
    producer.close(A, now=2)
    assert producer.outbox.take_events() == [LeaseEnded(A, LeaseEnd.RELEASED)]


def test_nobody_is_confirmed_who_has_read_what_was_withdrawn() -> None:
    producer = opened()
    producer.withdraw(A, 1, now=1)
    assert said(producer) == [PushWithdrawal("d/r/0", 1)]
    producer.receive(ROUTE, Confirm("e1", "a", "d/r/0"), now=1)
    assert [type(message) for message in said(producer)] == [Refused]
    assert producer.outbox.take_events() == [], (
        "the engine did not keep its blocks, so none are to be given back"
    )
    producer.open(A, 2, now=2)
    producer.publish(A, "h1", TICKET, 4, now=0)
    assert said(producer) == [PushOffer("d/r/0", TICKET, 4)]


def test_readers_ahead_of_an_open_lease_are_served_when_it_is_there() -> None:
    producer = make_producer()
    producer.receive(ROUTE, Attach(TICKET, "d/r/0"), now=0)
    producer.open(A, 1, now=1)
    producer.close(A, now=2)
    producer.receive(ROUTE, Confirm("e1", "a", "d/r/0"), now=3)
    assert said(producer) == [Confirmed("a", "d/r/0")]


def test_an_open_prefill_that_is_aborted_is_refused_to_its_readers() -> None:
    producer = opened()
    producer.fail_prefill(A, "h1", "it was aborted", now=1)
    assert said(producer) == [Refused("", "d/r/0", "it was aborted")]
    assert (producer.num_leases, producer.outbox.take_events()) == (0, [])


@pytest.mark.parametrize("is_open", [False, True])
def test_a_reader_that_was_written_to_and_falls_silent_lets_the_lease_run_out(
    is_open: bool,
) -> None:
    producer = make_producer()
    lease = WriteGrantInfo(1, "memory", 0, [[1, 2]], 0, 8, [], fingerprint(range(8), 4, ""))
    producer.receive(
        ROUTE, msgspec.structs.replace(registration(), decode_epoch="d1", write=lease), now=0
    )
    if is_open:
        producer.open(A, 1, now=1)
        producer.publish(A, "h1", TICKET, 4, now=1)
    else:
        granted(producer, now=1)
    assert said(producer) == [], "it is written to, so nothing is offered"
    producer.receive(ROUTE, Heartbeat("e1", 1, ["d/r/0"]), now=20)
    assert said(producer) == [HeartbeatReply("e1", 1, [])]
    producer.advance(now=39.9)
    assert producer.outbox.take_events() == []
    producer.advance(now=50)
    if is_open:
        assert producer.outbox.take_events() == [], "the engine still computes it"
        producer.close(A, now=51)
    assert producer.outbox.take_events() == [LeaseEnded(A, LeaseEnd.EXPIRED)]
