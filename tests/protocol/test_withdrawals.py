"""Tests that a message that crosses a withdrawal, or comes from a rank that does not know of the
withdrawal yet, does not fail the request.
"""

import pytest
from tests.protocol import test_consumer as pull
from tests.protocol import test_consumer_ranks as ranks
from tests.protocol.test_consumer import (
    CONTROL,
    PEER,
    R1,
    SIDE,
    failures,
    make_consumer,
    of,
    reply,
    sent,
)
from tests.protocol.test_consumer_push import OWN, READER, expect, pushed_by
from tests.protocol.test_consumer_streaming import WHOLE, ended, offer, waiting

from kvferry.events import HandshakeFailed
from kvferry.protocol.actions import StartRead, StopRead
from kvferry.protocol.consumer.consumer import Consumer
from kvferry.protocol.consumer.transfer import PushInfo
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.messages import (
    Confirm,
    HandshakeRequest,
    HeartbeatReply,
    PushRegistration,
    PushWithdrawal,
    Ready,
)


def reading_from_two_ranks() -> Consumer:
    """Return a consumer that reads a prompt of 8 tokens, which both ranks have offered in full."""
    consumer = ranks.make_consumer()
    push_info = PushInfo("h1", fingerprint(range(8), 4, ""), OWN, "PT")
    consumer.track(R1, pushed_by(PEER.epoch, push_info, tp_size=2), 0)
    ranks.connect(consumer, 2)
    consumer.start(R1, [[5, 6]], range(0, 8), now=0)
    for rank in (0, 1):
        consumer.offered(ranks.control(rank), READER, ranks.ticket(2), "T1", 8, 0)
    assert len(of(consumer.outbox.take_actions(), StartRead)) == 2
    return consumer


def test_reads_from_two_ranks_that_a_withdrawal_has_cancelled_are_begun_again() -> None:
    consumer = reading_from_two_ranks()
    consumer.receive(ranks.control(0), PushWithdrawal(READER, 1), now=1)
    assert len(of(consumer.outbox.take_actions(), StopRead)) == 2
    consumer.read_ended(R1, ranks.peer(0), "cancelled", now=1)
    assert sent(consumer.outbox.take_actions(), PushRegistration) == [], (
        "the other may still write into our blocks"
    )
    consumer.read_ended(R1, ranks.peer(1), "cancelled", now=1)
    assert len(sent(consumer.outbox.take_actions(), PushRegistration)) == 2
    assert failures(consumer) == []
    for rank in (0, 1):
        consumer.offered(ranks.control(rank), READER, ranks.ticket(2, serial=2), "T2", 8, 2)
    assert len(of(consumer.outbox.take_actions(), StartRead)) == 2


def test_a_read_from_one_of_two_ranks_that_fails_by_itself_fails_the_request() -> None:
    consumer = reading_from_two_ranks()
    consumer.read_ended(R1, ranks.peer(0), "broken", now=1)
    consumer.read_ended(R1, ranks.peer(1), "cancelled", now=1)
    assert failures(consumer) == ["reading from the producer failed: broken"]


def test_a_read_that_fails_after_its_producer_was_lost_reports_the_loss_once() -> None:
    consumer = reading_from_two_ranks()
    consumer.read_ended(R1, ranks.peer(0), "broken", now=1)
    consumer.disconnected(ranks.control(0), now=1)
    consumer.read_ended(R1, ranks.peer(1), "cancelled", now=1)
    losses = [
        event for event in consumer.outbox.take_events() if isinstance(event, HandshakeFailed)
    ]
    assert losses == [
        HandshakeFailed(PEER.engine, f"the connection to {ranks.control(0)} was lost")
    ]


@pytest.mark.parametrize("is_withdrawn", [True, False])
def test_a_heartbeat_that_crossed_the_withdrawal_is_answered_by_what_we_know(
    is_withdrawn: bool,
) -> None:
    consumer = waiting()
    offer(consumer, 4)
    if is_withdrawn:
        consumer.receive(CONTROL, PushWithdrawal(READER, 1), now=1)
    consumer.receive(CONTROL, HeartbeatReply("e1", 1, ["a"]), now=1)
    ended(consumer, "cancelled")
    assert failures(consumer) == ([] if is_withdrawn else ["the producer's lease ran out"])


@pytest.mark.parametrize("lease", ["a", READER])
def test_a_staged_producer_that_says_ready_of_what_it_has_withdrawn_is_not_believed(
    lease: str,
) -> None:
    consumer = make_consumer()
    expect(consumer, tokens=WHOLE)
    for request in sent(consumer.outbox.take_actions(), HandshakeRequest):
        assert isinstance(request, HandshakeRequest)
        consumer.receive(SIDE, reply(request.nonce, uses_host_buffer=True), now=0)
        consumer.peer_opened(PEER, "memory", now=0)
    consumer.start(R1, [[1, 2, 3, 4]], range(16), now=0)
    offer(consumer, 16)
    consumer.receive(CONTROL, PushWithdrawal(READER, 1), now=1)
    consumer.outbox.take_actions()
    consumer.receive(CONTROL, Ready(lease, READER), now=1)
    assert consumer.outbox.take_actions() == []
    offer(consumer, 16, serial=2)
    consumer.receive(CONTROL, Ready("a", READER), now=2)
    assert len(of(consumer.outbox.take_actions(), StartRead)) == 1


def test_a_ticket_that_was_not_offered_by_push_cannot_be_withdrawn() -> None:
    consumer = pull.reading(make_consumer())
    consumer.outbox.take_actions()
    consumer.receive(CONTROL, PushWithdrawal(READER, 1), now=2)
    assert consumer.outbox.take_actions() == []
    ended(consumer)
    assert len(sent(consumer.outbox.take_actions(), Confirm)) == 1
