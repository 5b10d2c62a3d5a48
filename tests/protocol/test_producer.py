"""Tests that the producer answers every reader, waits for a grant that its reader has overtaken,
and never confirms a read of blocks it has freed.
"""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.protocol.caches import no_writers, producer_settings, take_ended, take_replies

from kvferry.protocol.actions import Reply
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.heartbeats import READ_BEGINS
from kvferry.protocol.messages import (
    Attach,
    Confirm,
    Confirmed,
    Detach,
    Heartbeat,
    HeartbeatReply,
    Refused,
)
from kvferry.protocol.producer.producer import Producer
from kvferry.protocol.tickets import PushTicketKey, Ticket, TicketKey
from kvferry.types import LeaseEnd, RequestId, Route

KEY = TicketKey(b"secret")
D = Route(b"d")
A = RequestId("a")


def make_producer() -> Producer:
    settings = producer_settings()
    return Producer(settings, KEY, PushTicketKey(b"secret"), no_writers())


def ticket(request: str = "a", serial: int = 1, engine: str = "p", epoch: str = "e1") -> str:
    tokens = fingerprint(range(4), 4, "")
    return KEY.sign(
        Ticket(engine, epoch, request, serial, "127.0.0.1", 1, 1, 4, [[(0, 1)]], tokens, 30.0)
    )


def ended(producer: Producer) -> list[tuple[str, LeaseEnd]]:
    return [(lease.request, lease.end) for lease in take_ended(producer.outbox)]


def test_attach_confirm_frees_the_blocks() -> None:
    producer = make_producer()
    producer.grant(A, 1, now=0)
    producer.receive(D, Attach(ticket(), "d/1"), now=1)
    assert take_replies(producer.outbox) == []
    producer.receive(D, Confirm("e1", "a", "d/1"), now=2)
    assert take_replies(producer.outbox) == [Reply(D, Confirmed("a", "d/1"))]
    assert ended(producer) == [("a", LeaseEnd.CONFIRMED)]
    assert producer.num_leases == 0


def test_a_confirm_after_the_lease_ran_out_is_refused() -> None:
    producer = make_producer()
    producer.grant(A, 1, now=0)
    producer.receive(D, Attach(ticket(), "d/1"), now=1)
    producer.advance(now=30)
    assert ended(producer) == [("a", LeaseEnd.EXPIRED)]
    producer.receive(D, Confirm("e1", "a", "d/1"), now=31)
    [reply] = take_replies(producer.outbox)
    assert isinstance(reply.message, Refused)


def test_a_confirm_that_is_processed_late_is_refused_even_before_the_expiry_was_noticed() -> None:
    producer = make_producer()
    producer.grant(A, 1, now=0)
    producer.receive(D, Attach(ticket(), "d/1"), now=1)
    producer.receive(D, Confirm("e1", "a", "d/1"), now=31)
    [reply] = take_replies(producer.outbox)
    assert isinstance(reply.message, Refused)


def test_a_ticket_that_overtakes_its_grant_is_good() -> None:
    producer = make_producer()
    producer.receive(D, Attach(ticket(), "d/1"), now=0)
    producer.receive(D, Heartbeat("e1", 1, ["a"]), now=1)
    producer.receive(D, Confirm("e1", "a", "d/1"), now=1)
    assert take_replies(producer.outbox) == [
        Reply(D, HeartbeatReply("e1", 1, [])),
        Reply(D, Confirmed("a", "d/1")),
    ]
    assert ended(producer) == []
    producer.grant(A, 1, now=2)
    assert take_replies(producer.outbox) == []
    assert ended(producer) == [("a", LeaseEnd.CONFIRMED)]


def test_whoever_may_be_reading_is_counted_before_and_after_the_grant() -> None:
    producer = make_producer()
    producer.receive(D, Attach(ticket(), "d/1", "nixl"), now=0)
    producer.receive(D, Attach(ticket(), "d/2", "nixl"), now=0)
    assert (producer.num_readers("nixl"), producer.num_readers("shm")) == (2, 0)
    producer.receive(D, Confirm("e1", "a", "d/1"), now=1)
    assert producer.num_readers("nixl") == 1
    producer.grant(A, 1, now=2)
    assert producer.num_readers("nixl") == 1
    producer.receive(D, Confirm("e1", "a", "d/2"), now=3)
    assert producer.num_readers("nixl") == 0


def test_a_grant_that_never_comes_is_waited_for_only_so_long() -> None:
    producer = make_producer()
    producer.receive(D, Attach(ticket(), "d/1"), now=0)
    assert producer.next_deadline() == 5
    producer.advance(now=5)
    [reply] = take_replies(producer.outbox)
    assert isinstance(reply.message, Refused)
    assert "within 5 s" in reply.message.reason
    assert producer.next_deadline() is None


def test_a_grant_that_comes_late_finds_that_its_readers_are_through() -> None:
    producer = make_producer()
    for reader in ("d/1", "d/2"):
        producer.receive(D, Attach(ticket(), reader), now=0)
    producer.receive(D, Confirm("e1", "a", "d/1"), now=1)
    producer.advance(now=5)
    confirmed, refused = take_replies(producer.outbox)
    assert confirmed.message == Confirmed("a", "d/1")
    assert isinstance(refused.message, Refused)
    assert refused.message.reader == "d/2"
    assert producer.next_deadline() is None
    producer.grant(A, 1, now=60)
    assert ended(producer) == [("a", LeaseEnd.CONFIRMED)]


def test_readers_that_left_before_the_grant_do_not_pin_it() -> None:
    producer = make_producer()
    producer.receive(D, Attach(ticket(), "d/1"), now=0)
    producer.receive(D, Detach("e1", "a", "d/1"), now=1)
    producer.grant(A, 1, now=2)
    assert take_replies(producer.outbox) == []
    assert ended(producer) == [("a", LeaseEnd.RELEASED)]


def test_a_ticket_handed_back_before_its_grant_is_remembered_while_a_reader_waits() -> None:
    producer = make_producer()
    producer.receive(D, Attach(ticket(), "d/1"), now=0)
    producer.abandon(A, now=0)
    producer.grant(A, 1, now=1)
    assert ended(producer) == []
    producer.receive(D, Confirm("e1", "a", "d/1"), now=2)
    assert ended(producer) == [("a", LeaseEnd.CONFIRMED)]


def test_a_ticket_handed_back_ends_its_own_lease_and_no_later_one_of_that_name() -> None:
    producer = make_producer()
    producer.grant(A, 1, now=0)
    producer.release_ticket(A, 1, now=0)
    assert ended(producer) == [("a", LeaseEnd.RELEASED)]
    producer.grant(A, 2, now=1)
    producer.release_ticket(A, 1, now=0)
    assert ended(producer) == []
    producer.release_ticket(A, 2, now=0)
    assert ended(producer) == [("a", LeaseEnd.RELEASED)]


def test_a_ticket_handed_back_ends_its_lease_although_a_reader_that_hangs_is_attached() -> None:
    """The router knows that the request is over; only its reader does not."""
    producer = make_producer()
    producer.grant(A, 1, now=0)
    producer.receive(D, Attach(ticket(), "d/1"), now=1)
    producer.release_ticket(A, 1, now=0)
    assert ended(producer) == [("a", LeaseEnd.RELEASED)]
    producer.receive(D, Confirm("e1", "a", "d/1"), now=2)
    [reply] = take_replies(producer.outbox)
    assert isinstance(reply.message, Refused)


def test_a_ticket_is_good_for_its_own_lease_only_though_an_engine_uses_a_name_again() -> None:
    producer = make_producer()
    producer.grant(A, 1, now=0)
    producer.advance(now=30)
    producer.grant(A, 2, now=31)
    producer.receive(D, Attach(ticket(serial=1), "d/1"), now=32)
    producer.receive(D, Confirm("e1", "a", "d/1"), now=33)
    assert all(isinstance(reply.message, Refused) for reply in take_replies(producer.outbox))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        ticket(engine="q"),
        ticket(epoch="e0"),
        TicketKey(b"other").sign(KEY.open(ticket())),
    ],
)
def test_a_ticket_that_is_not_good_here_is_refused(text: str) -> None:
    producer = make_producer()
    producer.grant(A, 1, now=0)
    producer.receive(D, Attach(text, "d/1"), now=1)
    [reply] = take_replies(producer.outbox)
    assert isinstance(reply.message, Refused)
    assert reply.message.reader == "d/1"


def test_a_ticket_of_a_lease_that_is_over_is_refused_at_once() -> None:
    producer = make_producer()
    producer.grant(A, 1, now=0)
    producer.abandon(A, now=0)
    producer.receive(D, Attach(ticket(), "d/1"), now=2)
    assert take_replies(producer.outbox) == [
        Reply(D, Refused("a", "d/1", "the lease has ended", 1))
    ]


def test_heartbeats_name_the_leases_that_are_gone() -> None:
    producer = make_producer()
    producer.grant(A, 1, now=0)
    producer.receive(D, Heartbeat("e1", 1, ["a", "b,c"]), now=25)
    producer.receive(D, Heartbeat("e0", 2, ["a"]), now=25)
    assert take_replies(producer.outbox) == [
        Reply(D, HeartbeatReply("e1", 1, ["b,c"])),
        Reply(D, HeartbeatReply("e1", 2, ["a"])),
    ]
    producer.advance(now=44)
    assert producer.num_leases == 1


def test_messages_for_an_earlier_life_change_nothing() -> None:
    producer = make_producer()
    producer.grant(A, 1, now=0)
    producer.receive(D, Attach(ticket(), "d/1"), now=0)
    producer.receive(D, Detach("e0", "a", "d/1"), now=1)
    producer.receive(D, Confirm("e0", "a", "d/1"), now=1)
    [reply] = take_replies(producer.outbox)
    assert isinstance(reply.message, Refused)
    assert "restarted" in reply.message.reason
    assert producer.num_leases == 1


def test_waiting_claims_and_readers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.protocol.producer.pending.MAX_PENDING_TICKETS", 1)
    monkeypatch.setattr("kvferry.protocol.producer.leases.MAX_READERS", 1)
    producer = make_producer()
    producer.receive(D, Attach(ticket("a", 1), "d/1"), now=0)
    producer.receive(D, Attach(ticket("b", 2), "d/2"), now=0)
    producer.receive(D, Attach(ticket("a", 1), "d/3"), now=0)
    producer.grant(A, 1, now=1)
    reasons = [
        reply.message.reason
        for reply in take_replies(producer.outbox)
        if isinstance(reply.message, Refused)
    ]
    assert [reason.split()[0] for reason in reasons] == ["more", "too"]


def test_a_reader_before_the_grant_brings_its_companions_along() -> None:
    producer = make_producer()
    producer.receive(D, Attach(ticket(), "d/1/0", "", ["d/1/1"]), now=0)
    producer.receive(D, Confirm("e1", "a", "d/1/0"), now=0)
    producer.grant(A, 1, now=1)
    assert take_replies(producer.outbox) == [Reply(D, Confirmed("a", "d/1/0"))]
    assert ended(producer) == []
    producer.receive(D, Attach(ticket(), "d/1/1", "", ["d/1/0"]), now=2)
    producer.receive(D, Confirm("e1", "a", "d/1/1"), now=2)
    assert ended(producer) == [("a", LeaseEnd.CONFIRMED)]


def test_one_that_leaves_before_the_grant_does_not_end_the_lease_of_its_companions() -> None:
    producer = make_producer()
    producer.receive(D, Attach(ticket(), "d/1/0", "", ["d/1/1"]), now=0)
    producer.receive(D, Detach("e1", "a", "d/1/0"), now=0)
    producer.grant(A, 1, now=1)
    assert ended(producer) == []
    producer.receive(D, Attach(ticket(), "d/1/1", "", ["d/1/0"]), now=2)
    producer.receive(D, Detach("e1", "a", "d/1/1"), now=2)
    assert ended(producer) == [("a", LeaseEnd.RELEASED)]


def test_a_reader_that_comes_back_before_the_grant_is_a_reader() -> None:
    producer = make_producer()
    for message in (Attach(ticket(), "d/1"), Detach("e1", "a", "d/1"), Attach(ticket(), "d/1")):
        producer.receive(D, message, now=0)
    producer.grant(A, 1, now=1)
    assert ended(producer) == []
    producer.receive(D, Confirm("e1", "a", "d/1"), now=2)
    assert ended(producer) == [("a", LeaseEnd.CONFIRMED)]


class ProducerMachine(RuleBasedStateMachine):
    """Random messages from readers: the producer confirms a read only while it has not reported the
    end of that lease.
    """

    def __init__(self) -> None:
        super().__init__()
        self.producer = make_producer()
        self.now = 0.0
        self.issued = 0
        self.granted = 0
        self.free: set[str] = set()

    @rule()
    def issue(self) -> None:
        self.issued += 1

    @rule()
    def grant(self) -> None:
        if self.granted < self.issued:
            self.granted += 1
            self.producer.grant(RequestId(f"r{self.granted}"), self.granted, self.now)

    @rule(
        serial=st.integers(1, 6),
        reader=st.sampled_from("xyz"),
        kind=st.sampled_from([Attach, Confirm, Detach, Heartbeat]),
        sibling_ranks=st.lists(st.sampled_from("xyz"), max_size=2),
    )
    def receive(self, serial: int, reader: str, kind: type, sibling_ranks: list[str]) -> None:
        lease = f"r{serial}"
        if kind is Attach and serial <= self.issued:
            self.producer.receive(
                D, Attach(ticket(lease, serial), reader, "", sibling_ranks), self.now
            )
        elif kind is Heartbeat:
            self.producer.receive(D, Heartbeat("e1", 1, [lease]), self.now)
        elif kind is not Attach:
            self.producer.receive(D, kind("e1", lease, reader), self.now)

    @rule(serial=st.integers(1, 6))
    def abandon(self, serial: int) -> None:
        if serial <= self.granted:
            self.producer.release_ticket(RequestId(f"r{serial}"), serial, self.now)

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.producer.advance(self.now)

    @invariant()
    def holds(self) -> None:
        self.confirmations_come_before_the_end()

    def confirmations_come_before_the_end(self) -> None:
        for reply in take_replies(self.producer.outbox):
            assert not (isinstance(reply.message, Confirmed) and reply.message.lease in self.free)
        for lease in take_ended(self.producer.outbox):
            assert lease.request not in self.free
            self.free.add(lease.request)

    def finish(self) -> None:
        """Hook for subclasses: end the operations that still run before `teardown` checks."""

    def teardown(self) -> None:
        while self.granted < self.issued:
            self.grant()
        self.finish()
        self.producer.advance(self.now + 1000)
        self.confirmations_come_before_the_end()
        assert self.producer.num_leases == 0
        assert self.producer.next_deadline() is None
        assert self.free == {f"r{serial}" for serial in range(1, self.issued + 1)}


TestProducerMachine = ProducerMachine.TestCase


def test_a_read_is_likely_after_its_reader_came_or_said_so_but_not_after_beats_of_the_rhythm() -> (
    None
):
    producer = make_producer()
    producer.grant(A, 1, now=0)
    assert producer.serving_interval_s(now=0) is None
    producer.receive(D, Attach(ticket(), "d/1"), now=1)
    assert [producer.serving_interval_s(now) for now in (1.01, 1.5, 2)] == [0.001, 0.01, None]
    producer.receive(D, Heartbeat("e1", 1, ["a"]), now=5)
    assert producer.serving_interval_s(now=5) is None
    producer.receive(D, Heartbeat("e1", READ_BEGINS, ["a"]), now=6)
    assert producer.serving_interval_s(now=6) == 0.001
