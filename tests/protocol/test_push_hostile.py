"""Tests that broken or lying cluster members get no KV of other requests, crash no engine, and
cannot fill a producer's memory.
"""

import msgspec
import pytest
from tests.protocol.caches import no_writers, producer_settings, take_ended
from tests.protocol.test_producer_push import (
    KEY,
    PUSH_KEY,
    ROUTE,
    TICKET,
    A,
    granted,
    make_producer,
    opened,
    push_ticket,
    registration,
    said,
)
from tests.protocol.test_push_matcher import answers

from kvferry.protocol.messages import PushCancel, PushOffer, PushRegistration, Refused
from kvferry.protocol.producer import push_matcher as push_desk
from kvferry.protocol.producer.producer import Producer
from kvferry.protocol.producer.push_matcher import PushMatcher
from kvferry.types import RequestId, Route

EVIL = Route(b"evil")


def evil(reader: str, request: str, match_id: str = "", shown: str = "") -> PushRegistration:
    return PushRegistration("e1", reader, request, "evil", "h", 1, 1, 30.0, match_id, shown)


@pytest.mark.parametrize(
    ("match_id", "shown"),
    [
        ("", ""),
        ("h1", ""),
        ("h1", "forged"),
        ("h1", TICKET),
        ("h1", push_ticket("h2")),
        ("h1", push_ticket("h1", engine="q")),
        ("h1", push_ticket("h1", epoch="e0")),
    ],
)
def test_who_was_not_sent_here_for_a_prefill_neither_gets_it_nor_has_it_freed(
    match_id: str, shown: str
) -> None:
    producer = granted(make_producer())
    producer.receive(EVIL, evil("evil", "a", match_id, shown), now=0)
    [refused] = said(producer)
    assert isinstance(refused, Refused)
    producer.receive(EVIL, PushCancel("e1", "evil", "a", "evil", match_id, shown), now=0)
    assert (producer.outbox.take_events(), producer.num_registrations) == ([], 0)
    producer.receive(ROUTE, registration(), now=1)
    assert said(producer) == [PushOffer("d/r/0", TICKET, 8)]


def believing(*peers: str) -> Producer:
    producer = Producer(
        producer_settings(peer_addresses=frozenset(peers)),
        KEY,
        PUSH_KEY,
        no_writers(),
    )
    producer.grant(A, 1, 0)
    producer.publish(A, "", TICKET, 8, now=0)
    return producer


@pytest.mark.parametrize(
    ("peers", "match_id", "shown", "count"),
    [
        (["h:1"], "", "", 1),
        (["h:2"], "", "", 0),
        ([], "", "", 0),
        (["h:1"], "h1", push_ticket(), 0),
        (["h:1"], "h1", "", 0),
    ],
)
def test_a_request_id_is_worth_something_only_to_those_who_are_believed(
    peers: list[str], match_id: str, shown: str, count: int
) -> None:
    producer = believing(*peers)
    producer.receive(ROUTE, evil("d/a/0", "a", match_id, shown), now=0)
    assert [isinstance(message, PushOffer) for message in said(producer)].count(True) == count


def test_what_was_registered_without_a_ticket_is_cancelled_without_one_and_nothing_else_is() -> (
    None
):
    producer = believing("h:1")
    producer.receive(EVIL, PushCancel("e1", "other", "a", "evil"), now=0)
    assert producer.outbox.take_events() == []
    producer.receive(ROUTE, evil("d/a/0", "a"), now=0)
    producer.receive(ROUTE, PushCancel("e1", "d/a/0", "a", "evil"), now=1)
    assert [ended.request for ended in take_ended(producer.outbox)] == [A]


def test_a_retry_with_an_old_id_has_nothing_to_do_with_the_first_attempt() -> None:
    matcher = PushMatcher(30.0)
    matcher.cancel(PushCancel("e1", "d/x/0", "cmpl-x-0-11111111", "d", "h1"), now=0)
    retry = RequestId("cmpl-x-0-33333333")
    matcher.publish(retry, "", "T", 8)
    assert matcher.results == [], "asked alone: its ticket goes another way"
    matcher.register(
        ROUTE,
        PushRegistration("e1", "d/y/0", "cmpl-x-0-44444444", "d", "h", 1, 1, 30.0, "h2"),
        now=0,
    )
    assert matcher.results == []
    matcher.publish(RequestId("cmpl-x-0-55555555"), "h2", "mine", 8)
    assert [message for _, message in answers(matcher)] == [PushOffer("d/y/0", "mine", 8)]


def test_a_reader_that_registers_for_two_requests_breaks_nothing() -> None:
    matcher = PushMatcher(30.0)
    matcher.register(EVIL, evil("r", "q1"), now=0)
    matcher.register(EVIL, evil("r2", "a"), now=0)
    matcher.publish(A, "", "T", 4)
    matcher.register(EVIL, evil("r", "a"), now=0)
    matcher.withdraw(A, 1, now=1)
    matcher.advance(now=100)
    assert matcher.num_entries == 0
    matcher.register(EVIL, evil("r", "q1"), now=100)
    answers(matcher)
    matcher.publish(RequestId("q1"), "", "T", 4)
    assert [message for _, message in answers(matcher)] == [PushOffer("r", "T", 4)]


def test_readers_of_one_prefill_are_bounded_and_so_are_those_who_wait_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(push_desk, "MAX_READERS", 50)
    producer = opened()
    said(producer)
    for number in range(100):
        producer.receive(ROUTE, registration(f"x{number}"), now=0)
    refused = [message for message in said(producer) if isinstance(message, Refused)]
    assert (len(refused), refused[0].reason) == (
        51,
        "more than 50 readers are registered with this engine",
    )
    producer.publish(A, "h1", TICKET, 8, now=0)
    assert len(said(producer)) == 50
    producer.withdraw(A, 1, now=1)
    assert producer.num_registrations == 50


def test_a_registration_without_heartbeats_is_forgotten_however_long_it_asked_for() -> None:
    producer = make_producer()
    producer.expect_prefill(A, "h1")
    producer.receive(ROUTE, msgspec.structs.replace(registration(), lease_ttl_s=1e6), now=0)
    producer.advance(now=push_desk.MAX_LEASES_WAITED * 30 - 1)
    assert producer.num_registrations == 1
    producer.advance(now=push_desk.MAX_LEASES_WAITED * 30)
    assert producer.num_registrations == 0
