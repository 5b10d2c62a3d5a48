"""Tests the leases of retained turns: they have their own duration, and they are evicted when the
engine that owns the blocks needs them.
"""

import pytest
from tests.protocol.caches import no_writers, producer_settings, take_copies, take_replies
from tests.protocol.test_producer import KEY, A, D, ended, make_producer, ticket

from kvferry.events import EvictionDeferred, LeaseEnded
from kvferry.protocol.actions import CopyToHostBuffer, Reply
from kvferry.protocol.messages import Attach, Confirm, Confirmed, Detach, Heartbeat, Ready, Refused
from kvferry.protocol.producer.leases import LeaseTable
from kvferry.protocol.producer.producer import Producer
from kvferry.protocol.tickets import PushTicketKey
from kvferry.types import LeaseEnd, RequestId


def make_table() -> LeaseTable:
    return LeaseTable(lease_ttl_s=30, extension_s=20)


def test_a_kept_lease_has_a_time_of_its_own_and_lapses() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0, lease_ttl_s=480)
    assert leases.renew_all([A], now=100) == []
    assert leases.expire(now=479) == []
    assert leases.next_deadline() == 480
    assert leases.expire(now=480) == [LeaseEnded(A, LeaseEnd.LAPSED)]


def test_a_kept_lease_that_is_let_go_ends_at_once_when_nobody_reads() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0, lease_ttl_s=480)
    leases.evict(A, now=1)
    assert leases.take_ended() == [LeaseEnded(A, LeaseEnd.RELEASED)]
    leases.evict(A, now=2)
    assert leases.take_ended() == []


def test_a_reader_of_what_was_let_go_has_to_be_heard_of_as_usual() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0, lease_ttl_s=480)
    assert leases.attach(A, "p", now=1)
    for now in (10, 11):
        leases.evict(A, now)
    assert leases.take_ended() == []
    assert leases.expire(now=39) == []
    leases.renew_all([A], now=39)
    assert leases.expire(now=58) == []
    assert leases.expire(now=59) == [LeaseEnded(A, LeaseEnd.RELEASED)]
    assert leases.num_entries <= 64


def test_what_was_let_go_may_still_be_confirmed_by_who_reads_it() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0, lease_ttl_s=480)
    leases.attach(A, "p", now=1)
    leases.evict(A, now=2)
    assert leases.confirm(A, "p", now=3)
    assert leases.take_ended() == [LeaseEnded(A, LeaseEnd.CONFIRMED)]


def test_a_short_lease_is_not_prolonged_by_being_let_go() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0, lease_ttl_s=5)
    leases.attach(A, "p", now=0)
    leases.evict(A, now=1)
    assert leases.expire(now=20) == [LeaseEnded(A, LeaseEnd.RELEASED)]


def test_a_producer_tells_a_reader_that_asks_that_it_may_read() -> None:
    producer = make_producer()
    producer.grant(A, 1, now=0, lease_ttl_s=480)
    producer.receive(D, Attach(ticket(), "p/1", wants_ready=True), now=100)
    assert take_replies(producer.outbox) == [Reply(D, Ready("a", "p/1"))]
    producer.receive(D, Confirm("e1", "a", "p/1"), now=101)
    assert take_replies(producer.outbox) == [Reply(D, Confirmed("a", "p/1"))]
    assert ended(producer) == [("a", LeaseEnd.CONFIRMED)]


def test_a_reader_that_overtakes_the_grant_is_told_when_it_has_come() -> None:
    producer = make_producer()
    producer.receive(D, Attach(ticket(), "p/1", wants_ready=True), now=0)
    assert take_replies(producer.outbox) == []
    producer.grant(A, 1, now=1, lease_ttl_s=480)
    assert take_replies(producer.outbox) == [Reply(D, Ready("a", "p/1"))]


def test_what_was_let_go_lingers_while_it_is_read() -> None:
    producer = make_producer()
    producer.grant(A, 1, now=0, lease_ttl_s=480)
    producer.grant(RequestId("b"), 2, now=0, lease_ttl_s=480)
    producer.receive(D, Attach(ticket(), "p/1", wants_ready=True), now=1)
    producer.evict(A, now=2)
    assert producer.outbox.take_events() == [EvictionDeferred(A)]
    producer.evict(RequestId("b"), now=2)
    producer.evict(RequestId("nobody's"), now=2)
    assert producer.outbox.take_events() == [LeaseEnded(RequestId("b"), LeaseEnd.RELEASED)]
    producer.receive(D, Detach("e1", "a", "p/1"), now=3)
    assert ended(producer) == [("a", LeaseEnd.RELEASED)]


def test_a_reader_that_died_holds_nothing_up_for_longer_than_a_lease() -> None:
    producer = make_producer()
    producer.grant(A, 1, now=0, lease_ttl_s=480)
    producer.receive(D, Attach(ticket(), "p/1", wants_ready=True), now=1)
    producer.receive(D, Heartbeat("e1", 1, ["a"]), now=2)
    producer.evict(A, now=10)
    assert producer.outbox.take_events() == [EvictionDeferred(A)]
    producer.advance(now=39.9)
    assert ended(producer) == []
    producer.advance(now=40)
    assert ended(producer) == [("a", LeaseEnd.RELEASED)]


def test_who_comes_too_late_is_refused() -> None:
    producer = make_producer()
    producer.grant(A, 1, now=0, lease_ttl_s=480)
    producer.advance(now=480)
    assert ended(producer) == [("a", LeaseEnd.LAPSED)]
    producer.receive(D, Attach(ticket(), "p/1", wants_ready=True), now=481)
    [reply] = take_replies(producer.outbox)
    assert isinstance(reply.message, Refused)


@pytest.mark.parametrize("error", [None, "no memory"])
def test_a_staged_producer_says_so_when_its_copy_is_there(error: str | None) -> None:
    settings = producer_settings(uses_host_buffer=True)
    producer = Producer(settings, KEY, PushTicketKey(b"secret"), no_writers())
    producer.grant(A, 1, now=0, lease_ttl_s=480, blocks=((3,),))
    [copy] = take_copies(producer.outbox)
    assert isinstance(copy, CopyToHostBuffer)
    producer.receive(D, Attach(ticket(), "p/1", wants_ready=True), now=1)
    assert take_replies(producer.outbox) == []
    producer.copied_to_host_buffer(copy.copy, error, now=2)
    assert [type(reply.message) for reply in take_replies(producer.outbox)] == [
        Ready if error is None else Refused
    ]
