"""Tests requests that can do without the remote KV: the consumer learns whether the KV is available
before the request has blocks, and until then no request fails.
"""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule
from tests.protocol.test_consumer import (
    CONTROL,
    PEER,
    R1,
    ConsumerMachine,
    connect,
    make_consumer,
    of,
    sent,
    ticket,
)

from kvferry.events import (
    Event,
    HandshakeFailed,
    ReservationGranted,
    ReservationRefused,
    RetainedBlocksFetched,
    TransferFailed,
    TransferFinished,
)
from kvferry.protocol.actions import StartRead
from kvferry.protocol.consumer.consumer import Consumer
from kvferry.protocol.consumer.transfer import Origin
from kvferry.protocol.messages import (
    Attach,
    Confirmed,
    Detach,
    Heartbeat,
    HeartbeatReply,
    Ready,
    Refused,
)
from kvferry.types import RequestId

READY = Ready("a", "d/r1/0")


def asking() -> Consumer:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1", is_optional=True), now=0)
    assert sent(connect(consumer), Attach) == [Attach("T1", "d/r1/0", "memory", wants_ready=True)]
    assert consumer.outbox.take_events() == []
    return consumer


def promised() -> Consumer:
    consumer = asking()
    consumer.receive(CONTROL, READY, now=1)
    assert consumer.outbox.take_events() == [ReservationGranted(R1)]
    return consumer


def test_the_whole_way_from_the_question_to_the_bytes() -> None:
    consumer = promised()
    consumer.start(R1, [[5, 6]], range(0, 8), now=2)
    assert len(of(consumer.outbox.take_actions(), StartRead)) == 1
    consumer.read_ended(R1, PEER, None, now=3)
    consumer.receive(CONTROL, Confirmed("a", "d/r1/0"), now=4)
    assert consumer.outbox.take_events() == [
        RetainedBlocksFetched(R1, 8, 128),
        TransferFinished(R1),
    ]
    assert consumer.num_transfers == 0


def test_heartbeats_go_by_what_readers_have_to_keep_to_not_by_how_long_it_is_kept() -> None:
    consumer = promised()
    consumer.start(R1, [[5, 6]], range(0, 8), now=2)
    consumer.outbox.take_actions()
    consumer.advance(now=5)
    assert sent(consumer.outbox.take_actions(), Heartbeat) == [Heartbeat("e1", 1, ["a"])]


def refused(consumer: Consumer) -> str:
    [reason] = [
        event.reason
        for event in consumer.outbox.take_events()
        if isinstance(event, ReservationRefused)
    ]
    return reason


def test_a_refusal_is_told_before_there_are_blocks_and_nothing_fails() -> None:
    consumer = asking()
    consumer.receive(CONTROL, Refused("a", "d/r1/0", "the lease has ended"), now=1)
    assert refused(consumer) == "the producer refused: the lease has ended"
    consumer.receive(CONTROL, Refused("a", "d/r1/0", "again"), now=2)
    consumer.settle(R1, now=2)
    assert consumer.outbox.take_events() == []
    assert (consumer.num_transfers, consumer.next_deadline()) == (0, None)


def test_a_keeper_that_does_not_answer_is_done_without() -> None:
    consumer = asking()
    consumer.advance(now=5)
    assert refused(consumer) == "the producer did not answer within 5 s"
    assert sent(consumer.outbox.take_actions(), Detach) == [Detach("e1", "a", "d/r1/0")]


def test_one_that_cannot_be_reached_is_done_without_at_once_the_second_time() -> None:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1", is_optional=True), now=0)
    consumer.advance(now=5)
    events = consumer.outbox.take_events()
    assert [type(event) for event in events] == [HandshakeFailed, ReservationRefused]
    consumer.settle(R1, now=5)
    consumer.track(R1, Origin.of(ticket(), "T1", is_optional=True), now=5)
    assert refused(consumer)


def test_one_that_is_lost_after_its_promise_is_told_too() -> None:
    consumer = promised()
    consumer.disconnected(CONTROL, now=2)
    assert refused(consumer)
    consumer.start(R1, [[5, 6]], range(0, 8), now=3)
    assert [type(event) for event in consumer.outbox.take_events()] == [TransferFailed], (
        "the engine's blocks had crossed the news"
    )


def test_a_promise_is_given_back_when_no_blocks_come() -> None:
    consumer = promised()
    consumer.advance(now=5)
    assert consumer.outbox.take_events() == []
    consumer.receive(CONTROL, HeartbeatReply("e1", 1, []), now=5)
    consumer.advance(now=6)
    assert refused(consumer) == "the decode engine allocated no blocks within 5 s"
    assert sent(consumer.outbox.take_actions(), Detach) == [Detach("e1", "a", "d/r1/0")]


@pytest.mark.parametrize("consumer", [asking, promised])
def test_who_needs_it_no_more_says_so(consumer: object) -> None:
    made = asking() if consumer is asking else promised()
    made.settle(R1, now=2)
    assert sent(made.outbox.take_actions(), Detach) == [Detach("e1", "a", "d/r1/0")]
    assert made.outbox.take_events() == []


class PromiseMachine(ConsumerMachine):
    """`ConsumerMachine` with requests that can do without the remote KV. Such a request gets a
    reservation, which may be lost later, or a refusal, and never waits forever for either.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unsure: set[RequestId] = set()
        self.promised: set[RequestId] = set()

    @rule()
    def track_optional(self) -> None:
        self.count += 1
        self.unsure.add(RequestId(f"r{self.count}"))
        self.consumer.track(
            RequestId(f"r{self.count}"),
            Origin.of(ticket(f"a{self.count}", self.count), "T", is_optional=True),
            self.now,
        )

    @rule(request=ConsumerMachine.requests)
    def start(self, request: RequestId) -> None:
        """Start the request, but not before it has its reservation."""
        if request not in self.unsure:
            super().start(request)

    @rule(request=ConsumerMachine.requests)
    def abort(self, request: RequestId) -> None:
        self.unsure.discard(request)
        super().abort(request)

    @rule(request=ConsumerMachine.requests)
    def promise(self, request: RequestId) -> None:
        self.consumer.receive(CONTROL, Ready(f"a{request[1:]}", f"d/{request}/0"), self.now)

    @rule(seconds=st.floats(5, 6))
    def wait_for_answers(self, seconds: float) -> None:
        """Wait long enough for a handshake to time out, and then for an answer to time out."""
        for _ in range(2):
            self.now += seconds
            self.consumer.advance(self.now)
            self.every_request_with_blocks_ends_once()
        if not self.opening:
            assert not self.unsure, "nobody waits for an answer for ever"

    def is_by_the_way(self, event: Event) -> bool:
        match event:
            case ReservationGranted(request):
                assert request in self.unsure
                self.unsure.discard(request)
                self.promised.add(request)
            case ReservationRefused(request):
                assert request in self.unsure | self.promised
                self.unsure.discard(request)
                self.promised.discard(request)
            case RetainedBlocksFetched(request):
                assert request in self.promised
            case _:
                return super().is_by_the_way(event)
        return True


TestPromiseMachine = PromiseMachine.TestCase
