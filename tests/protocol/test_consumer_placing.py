"""Tests blocks that arrive in the producer's memory order: the consumer permutes them into its own
order after the confirmation, and returns them to the engine only after the permutation.
"""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule
from tests.protocol.test_consumer import (
    CONTROL,
    R1,
    R2,
    ConsumerMachine,
    confirming,
    connect,
    failures,
    make_consumer,
    of,
    reading,
    sent,
    ticket,
)

from kvferry.errors import LocalProtocolError, RemoteProtocolError
from kvferry.events import HandshakeFailed, TransferAbandoned, TransferFailed, TransferFinished
from kvferry.protocol.actions import PlaceBlocks
from kvferry.protocol.consumer import receiving
from kvferry.protocol.consumer.consumer import Consumer
from kvferry.protocol.consumer.transfer import Origin
from kvferry.protocol.messages import Attach, Confirmed, Detach, Heartbeat, HeartbeatReply, Refused
from kvferry.protocol.planning.plan import BlockPermutation
from kvferry.types import RequestId

PLACEMENT = BlockPermutation(0, 64, np.array([5 * 64, 6 * 64]), 8, (4, 2), (8, 32), (16, 8))


@pytest.fixture
def _other_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the producer's blocks differ from ours in memory order."""
    monkeypatch.setattr(receiving, "plan_permutations", lambda *_: [PLACEMENT])


def placing(consumer: Consumer) -> Consumer:
    confirming(consumer).receive(CONTROL, Confirmed("a", "d/r1/0"), now=3)
    return consumer


@pytest.mark.usefixtures("_other_order")
def test_confirmed_blocks_are_put_into_our_order_before_they_are_used() -> None:
    consumer = placing(make_consumer())
    [place] = of(consumer.outbox.take_actions(), PlaceBlocks)
    assert isinstance(place, PlaceBlocks)
    assert (place.request, place.permutations) == (R1, (PLACEMENT,))
    assert consumer.outbox.take_events() == []
    consumer.placed(R1, None, now=4)
    assert consumer.outbox.take_events() == [TransferFinished(R1)]
    assert consumer.num_transfers == 0


def test_blocks_that_came_in_our_order_are_used_at_once() -> None:
    consumer = placing(make_consumer())
    assert of(consumer.outbox.take_actions(), PlaceBlocks) == []
    assert consumer.outbox.take_events() == [TransferFinished(R1)]


@pytest.mark.usefixtures("_other_order")
def test_nothing_is_placed_before_all_is_confirmed() -> None:
    consumer = confirming(make_consumer())
    assert of(consumer.outbox.take_actions(), PlaceBlocks) == []


@pytest.mark.usefixtures("_other_order")
def test_an_aborted_request_gives_its_blocks_back_when_nothing_writes_into_them_any_more() -> None:
    consumer = placing(make_consumer())
    consumer.outbox.take_actions()
    consumer.abort(R1, now=4)
    assert consumer.outbox.take_events() == [TransferAbandoned(R1, "the request was aborted")]
    consumer.placed(R1, None, now=5)
    assert consumer.outbox.take_events() == [TransferFailed(R1, "the request was aborted")]
    assert sent(consumer.outbox.take_actions(), Detach) == [], (
        "the producer has forgotten this reader with its confirmation"
    )


@pytest.mark.usefixtures("_other_order")
def test_a_producer_that_is_lost_or_changes_its_mind_takes_no_confirmed_bytes_back() -> None:
    consumer = placing(make_consumer())
    consumer.receive(CONTROL, Refused("a", "d/r1/0", "over"), now=4)
    consumer.receive(CONTROL, HeartbeatReply("e1", 1, ["a"]), now=4)
    consumer.disconnected(CONTROL, now=4)
    consumer.advance(now=1000)
    assert all(isinstance(event, HandshakeFailed) for event in consumer.outbox.take_events())
    consumer.placed(R1, None, now=1000)
    assert consumer.outbox.take_events() == [TransferFinished(R1)]


@pytest.mark.usefixtures("_other_order")
def test_a_placement_that_fails_is_the_reason_whatever_happened_before() -> None:
    consumer = placing(make_consumer())
    consumer.disconnected(CONTROL, now=4)
    consumer.placed(R1, "no memory", now=5)
    assert failures(consumer) == [
        "rearranging the blocks into this engine's layout failed: no memory"
    ]


@pytest.mark.usefixtures("_other_order")
def test_a_confirmed_request_needs_no_heartbeats_and_says_no_farewell_to_a_producer_that_came_back(
) -> None:  # fmt: skip
    consumer = placing(make_consumer())
    consumer.outbox.take_actions()
    consumer.advance(now=10)
    assert sent(consumer.outbox.take_actions(), Heartbeat) == []
    consumer.disconnected(CONTROL, now=10)
    consumer.track(R2, Origin.of(ticket("b", 2), "T2"), now=10)
    consumer.abort(R1, now=10)
    consumer.placed(R1, None, now=10)
    assert [
        message.ticket
        for message in sent(connect(consumer, now=10), Attach)
        if isinstance(message, Attach)
    ] == ["T2"]


def test_ranks_that_disagree_about_their_order_fail_the_request_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def disagree(*_: object) -> list[BlockPermutation]:
        raise RemoteProtocolError("the ranks disagree")

    monkeypatch.setattr(receiving, "plan_permutations", disagree)
    assert failures(reading(make_consumer())) == ["the ranks disagree"]


def test_what_was_placed_for_a_request_that_was_never_asked_for_is_our_own_bug() -> None:
    consumer = make_consumer()
    with pytest.raises(LocalProtocolError):
        reading(consumer).placed(R1, None, now=2)
    consumer.placed(RequestId("nobody"), None, now=2)


class PlacingMachine(ConsumerMachine):
    """`ConsumerMachine` with blocks to be permuted: none is returned during the permutation."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(receiving, "plan_permutations", lambda *_: [PLACEMENT])

    @rule()
    def deliver(self) -> None:
        """Add a request and let every step succeed until its blocks must be permuted."""
        self.track()
        request = RequestId(f"r{self.count}")
        self.start(request)
        self.every_request_with_blocks_ends_once()
        while self.asked or self.opening:
            self.answer_handshake(True)
            self.every_request_with_blocks_ends_once()
            self.open_transport(True)
            self.every_request_with_blocks_ends_once()
        self.end_read(request, None)
        self.every_request_with_blocks_ends_once()
        self.answer_confirm(request, True)

    @rule(request=ConsumerMachine.requests, error=st.sampled_from([None, None, "broken"]))
    def end_placing(self, request: RequestId, error: str | None) -> None:
        if request in self.places:
            self.places.discard(request)
            self.consumer.placed(request, error, self.now)

    def finish(self) -> None:
        for request in sorted(self.places):
            self.end_placing(request, None)
            self.every_request_with_blocks_ends_once()

    def teardown(self) -> None:
        super().teardown()
        self.patch.undo()


TestPlacingMachine = PlacingMachine.TestCase
