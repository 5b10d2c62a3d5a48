"""Tests that a consumer reads from a producer's host buffer only blocks that the producer reported
as ready, and that a consumer with a host buffer copies to the engine exactly the blocks it read.
"""

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule
from tests.protocol.test_consumer import (
    CONTROL,
    PEER,
    R1,
    SIDE,
    ConsumerMachine,
    failures,
    make_consumer,
    of,
    reply,
    sent,
    ticket,
)

from kvferry.events import TransferFailed, TransferFinished
from kvferry.protocol.actions import PlaceBlocks, StartRead
from kvferry.protocol.consumer.consumer import Consumer
from kvferry.protocol.consumer.context import ConsumerSettings
from kvferry.protocol.consumer.transfer import Origin
from kvferry.protocol.messages import (
    Attach,
    Confirmed,
    Detach,
    HandshakeReply,
    HandshakeRequest,
    HeartbeatReply,
    Ready,
    Refused,
    TransportOffer,
)
from kvferry.protocol.peers import PeerSettings
from kvferry.protocol.planning.geometry import Geometry
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.types import EngineId, KVLayout, Region, RequestId

READY = Ready("a", "d/r1/0")


def meet(consumer: Consumer) -> None:
    """Complete the handshake with a producer that uses a host buffer."""
    [request] = sent(consumer.outbox.take_actions(), HandshakeRequest)
    assert isinstance(request, HandshakeRequest)
    consumer.receive(SIDE, reply(request.nonce, uses_host_buffer=True), now=0)
    consumer.outbox.take_actions()
    consumer.peer_opened(PEER, "memory", now=0)


def waiting() -> Consumer:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    consumer.start(R1, [[5, 6]], range(0, 8), now=0)
    meet(consumer)
    actions = consumer.outbox.take_actions()
    assert len(sent(actions, Attach)) == 1
    assert of(actions, StartRead) == []
    return consumer


def test_nothing_is_read_before_the_producer_says_that_it_is_there() -> None:
    consumer = waiting()
    consumer.receive(CONTROL, READY, now=1)
    assert len(of(consumer.outbox.take_actions(), StartRead)) == 1


def test_what_is_there_before_the_blocks_is_read_when_they_come() -> None:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    meet(consumer)
    consumer.receive(CONTROL, READY, now=1)
    consumer.receive(CONTROL, READY, now=1)
    assert of(consumer.outbox.take_actions(), StartRead) == []
    consumer.start(R1, [[5, 6]], range(0, 8), now=2)
    assert len(of(consumer.outbox.take_actions(), StartRead)) == 1


@pytest.mark.parametrize("message", [Ready("b", "d/r1/0"), Ready("a", "d/nobody/0")])
def test_news_of_other_leases_or_readers_is_ignored(message: Ready) -> None:
    consumer = waiting()
    consumer.receive(CONTROL, message, now=1)
    consumer.receive("tcp://elsewhere:1", READY, now=1)
    assert of(consumer.outbox.take_actions(), StartRead) == []


def test_news_that_comes_twice_or_late_changes_nothing() -> None:
    consumer = waiting()
    for _ in range(2):
        consumer.receive(CONTROL, READY, now=1)
    assert len(of(consumer.outbox.take_actions(), StartRead)) == 1
    consumer.read_ended(R1, PEER, None, now=2)
    consumer.receive(CONTROL, READY, now=2)
    consumer.receive(CONTROL, Confirmed("a", "d/r1/0"), now=3)
    assert consumer.outbox.take_events() == [TransferFinished(R1)]
    consumer.outbox.take_actions()
    consumer.receive(CONTROL, READY, now=4)
    assert (consumer.outbox.take_actions(), consumer.outbox.take_events()) == ([], [])


def test_a_producer_that_never_says_so_is_given_up_in_time() -> None:
    consumer = waiting()
    for now in range(5, 100, 5):
        consumer.advance(now)
        consumer.receive(CONTROL, HeartbeatReply("e1", now // 5, []), now)
    assert failures(consumer) == []
    consumer.advance(now=100)
    assert failures(consumer) == ["the KV did not arrive within 100 s"]
    assert sent(consumer.outbox.take_actions(), Detach) == [Detach("e1", "a", "d/r1/0")]


def test_one_that_refuses_or_is_lost_fails_the_request_as_ever() -> None:
    consumer = waiting()
    consumer.receive(CONTROL, Refused("a", "d/r1/0", "no memory"), now=1)
    assert failures(consumer) == ["the producer refused: no memory"]
    consumer = waiting()
    consumer.disconnected(CONTROL, now=1)
    assert len(failures(consumer)) == 1


def make_staged() -> Consumer:
    """Return a consumer with a host buffer and two KV cache groups."""
    regions = tuple(
        Region(f"l{group}", 4096 * (group + 1), 64, 64, 8, group=group) for group in range(2)
    )
    geometry = Geometry(0, 1, 4, 8, KVLayout.HND, 1, 8, regions, 1)
    peers = PeerSettings(
        factors={"dtype": "float32"},
        geometry=geometry,
        offers=(TransportOffer("memory", "", b"us"),),
        pinned_transports=(),
        handshake_timeout_s=5,
        engine_ttl_s=3600,
    )
    return Consumer(
        ConsumerSettings(
            engine=EngineId("d"),
            peers=peers,
            read_timeout_s=30,
            confirm_timeout_s=5,
            receive_timeout_s=100,
            uses_host_buffer=True,
        )
    )


def test_the_blocks_that_were_filled_and_no_others_go_to_a_staged_engine() -> None:
    """The first block is a local prefix: the engine holds it, and the host buffer does not."""
    consumer = staged_placing(range(4, 8), [[5, 6], [2, NO_BLOCK]])
    [place] = of(consumer.outbox.take_actions(), PlaceBlocks)
    assert isinstance(place, PlaceBlocks)
    assert (place.request, place.permutations, place.blocks) == (R1, (), ((6,), ()))
    assert consumer.outbox.take_events() == []
    consumer.placed(R1, None, now=4)
    assert consumer.outbox.take_events() == [TransferFinished(R1)]


def test_a_staged_engine_whose_copy_fails_gets_nothing() -> None:
    consumer = staged_placing(range(0, 8), [[5, 6], [2, 3]])
    consumer.placed(R1, "no memory", now=4)
    [failed] = consumer.outbox.take_events()
    assert isinstance(failed, TransferFailed)
    assert "no memory" in failed.reason


def staged_placing(tokens: range, blocks: list[list[int]]) -> Consumer:
    consumer = make_staged()
    consumer.track(
        R1,
        Origin.of(msgspec.structs.replace(ticket(), block_runs=[[(3, 2)], [(3, 2)]]), "T1"),
        now=0,
    )
    [request] = sent(consumer.outbox.take_actions(), HandshakeRequest)
    assert isinstance(request, HandshakeRequest)
    regions = [Region(f"l{group}", 0, 64, 64, 16, group=group) for group in range(2)]
    consumer.receive(SIDE, reply(request.nonce, regions=regions), now=0)
    consumer.peer_opened(PEER, "memory", now=0)
    consumer.start(R1, blocks, tokens, now=1)
    consumer.read_ended(R1, PEER, None, now=2)
    consumer.receive(CONTROL, Confirmed("a", "d/r1/0"), now=3)
    return consumer


class StagedMachine(ConsumerMachine):
    """Producers that use a host buffer: the consumer reads nothing before a `Ready` arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.told: set[RequestId] = set()

    def good_reply(self, nonce: int) -> HandshakeReply:
        return reply(nonce, uses_host_buffer=True)

    @rule(request=ConsumerMachine.requests)
    def tell(self, request: RequestId) -> None:
        self.told.add(request)
        self.consumer.receive(CONTROL, Ready(f"a{request[1:]}", f"d/{request}/0"), self.now)

    @rule()
    def tell_all(self) -> None:
        for number in range(1, self.count + 1):
            self.tell(RequestId(f"r{number}"))

    def every_request_with_blocks_ends_once(self) -> None:
        super().every_request_with_blocks_ends_once()
        assert self.reads <= self.told

    @rule(seconds=st.floats(90, 120))
    def wait_long(self, seconds: float) -> None:
        self.wait(seconds)


TestStagedMachine = StagedMachine.TestCase
