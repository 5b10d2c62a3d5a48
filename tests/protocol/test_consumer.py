"""Tests the consumer against a scripted producer: which messages and actions the consumer emits,
and which events it reports.
"""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.events import (
    Event,
    HandshakeFailed,
    TransferAbandoned,
    TransferFailed,
    TransferFinished,
)
from kvferry.protocol import messages as codec
from kvferry.protocol.actions import (
    Action,
    CloseConnection,
    ClosePeer,
    OpenPeer,
    PlaceBlocks,
    Send,
    StartRead,
    StopRead,
)
from kvferry.protocol.consumer.consumer import Consumer
from kvferry.protocol.consumer.context import ConsumerSettings
from kvferry.protocol.consumer.transfer import Origin
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.heartbeats import READ_BEGINS
from kvferry.protocol.messages import (
    WIRE_VERSION,
    Attach,
    Confirm,
    Confirmed,
    Detach,
    HandshakeRefused,
    HandshakeReply,
    HandshakeRequest,
    Heartbeat,
    HeartbeatReply,
    RankLayout,
    Refused,
    TransportOffer,
)
from kvferry.protocol.peers import PeerSettings
from kvferry.protocol.planning.geometry import Geometry
from kvferry.protocol.tickets import Ticket
from kvferry.types import EngineId, Epoch, KVLayout, PeerId, Region, RequestId

SIDE = "tcp://p-host:5600"
CONTROL = "tcp://p-host:6000"
PEER = PeerId(EngineId("p"), Epoch("e1"), 0)
R1, R2 = RequestId("r1"), RequestId("r2")
FACTORS = {"dtype": "float32"}


def make_consumer(
    engine_ttl_s: float = 3600,
    push_registration_timeout_s: float = 480,
    writable_transports: frozenset[str] = frozenset(),
    fenced: frozenset[str] = frozenset(),
    group: int = 0,
) -> Consumer:
    geometry = Geometry(
        0, 1, 4, 8, KVLayout.HND, 1, 8, (Region("l0", 4096, 64, 64, 8, group=group),), 1
    )
    peers = PeerSettings(
        factors=FACTORS,
        geometry=geometry,
        offers=(TransportOffer("memory", "", b"us"),),
        pinned_transports=(),
        handshake_timeout_s=5,
        engine_ttl_s=engine_ttl_s,
    )
    settings = ConsumerSettings(
        engine=EngineId("d"),
        peers=peers,
        read_timeout_s=30,
        confirm_timeout_s=5,
        receive_timeout_s=100,
        push_registration_timeout_s=push_registration_timeout_s,
    )
    return Consumer(replace(settings, writable_transports=writable_transports, fenced=fenced))


def ticket(request: str = "a", serial: int = 1, epoch: str = "e1", blocks: int = 2) -> Ticket:
    tokens = fingerprint(range(blocks * 4), 4, "")
    return Ticket("p", epoch, request, serial, "p-host", 5600, 1, 4, [[(3, blocks)]], tokens, 30.0)


def reply(nonce: int, **changes: object) -> HandshakeReply:
    layout = {
        "tp_rank": 0,
        "tp_size": 1,
        "block_size": 4,
        "num_blocks": 16,
        "layout": KVLayout.HND,
        "num_kv_heads": 1,
        "head_dim": 8,
        "control_address": CONTROL,
        "regions": [Region("l0", 0, 64, 64, 16)],
        "offers": [TransportOffer("memory", "", b"them")],
        "total_kv_heads": 1,
    } | changes
    return HandshakeReply(
        nonce,
        WIRE_VERSION,
        "p",
        "e1",
        dict(FACTORS),
        msgspec.Raw(codec.encode_layout(RankLayout(**layout))),  # type: ignore[arg-type]
    )


def sent(actions: list[Action], kind: type) -> list[object]:
    return [
        action.message
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, kind)
    ]


def of(actions: list[Action], kind: type) -> list[object]:
    return [action for action in actions if isinstance(action, kind)]


def connect(consumer: Consumer, now: float = 0, **changes: object) -> list[Action]:
    """Answer the pending handshake request and open the transport."""
    [request] = sent(consumer.outbox.take_actions(), HandshakeRequest)
    assert isinstance(request, HandshakeRequest)
    consumer.receive(SIDE, reply(request.nonce, **changes), now)
    actions = consumer.outbox.take_actions()
    assert of(actions, OpenPeer)
    assert of(actions, CloseConnection) == [CloseConnection(SIDE)]
    consumer.peer_opened(PEER, "memory", now)
    return consumer.outbox.take_actions()


def reading(consumer: Consumer) -> Consumer:
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    connect(consumer)
    consumer.start(R1, [[5, 6]], range(0, 8), now=1)
    return consumer


def confirming(consumer: Consumer) -> Consumer:
    reading(consumer).outbox.take_actions()
    consumer.read_ended(R1, PEER, None, now=2)
    return consumer


def failures(consumer: Consumer) -> list[str]:
    return [
        event.reason for event in consumer.outbox.take_events() if isinstance(event, TransferFailed)
    ]


def test_the_whole_way_from_arrival_to_confirmation() -> None:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    assert sent(connect(consumer), Attach) == [Attach("T1", "d/r1/0", "memory")]
    consumer.start(R1, [[5, 6]], range(4, 8), now=1)
    [read] = of(consumer.outbox.take_actions(), StartRead)
    assert isinstance(read, StartRead)
    assert (read.peer, read.transport) == (PEER, "memory")
    assert [(list(p.local_offsets), list(p.remote_offsets)) for p in read.segments] == [
        ([6 * 64], [4 * 64])
    ]
    consumer.read_ended(R1, PEER, None, now=2)
    assert sent(consumer.outbox.take_actions(), Confirm) == [Confirm("e1", "a", "d/r1/0", 1)]
    assert consumer.outbox.take_events() == []
    consumer.receive(CONTROL, Confirmed("a", "d/r1/0"), now=3)
    assert consumer.outbox.take_events() == [TransferFinished(R1)]
    assert consumer.num_transfers == 0
    assert consumer.next_deadline() is None


def test_blocks_that_come_before_the_handshake_wait_for_it() -> None:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    consumer.start(R1, [[5, 6]], range(0, 8), now=0)
    assert of(connect(consumer), StartRead)


def test_a_queued_request_keeps_its_lease_alive_by_heartbeats() -> None:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    consumer.track(R2, Origin.of(ticket("b", 2), "T2"), now=0)
    connect(consumer)
    assert consumer.next_deadline() == 5
    consumer.advance(now=5)
    assert sent(consumer.outbox.take_actions(), Heartbeat) == [Heartbeat("e1", 1, ["a", "b"])]
    consumer.receive(CONTROL, HeartbeatReply("e1", 1, ["b"]), now=6)
    consumer.start(R2, [[5, 6]], range(0, 8), now=7)
    assert failures(consumer) == ["the producer's lease ran out"]


def test_a_silent_producer_is_given_up() -> None:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    connect(consumer)
    for now in (5, 10, 15, 20):
        consumer.advance(now)
    consumer.start(R1, [[5, 6]], range(0, 8), now=21)
    assert failures(consumer) == ["the producer no longer answers heartbeats"]
    assert of(consumer.outbox.take_actions(), ClosePeer) == [ClosePeer(PEER, CONTROL)]


@pytest.mark.parametrize("message", [Refused("a", "d/r1/0", "over"), Refused("a", "d/r1/0", "")])
def test_a_refusal_fails_the_request(message: Refused) -> None:
    consumer = confirming(make_consumer())
    consumer.receive(CONTROL, message, now=3)
    assert len(failures(consumer)) == 1


def test_answers_that_fit_no_transfer_are_ignored() -> None:
    consumer = confirming(make_consumer())
    consumer.receive("tcp://elsewhere:1", Confirmed("a", "d/r1/0"), now=3)
    consumer.receive(CONTROL, Confirmed("b", "d/r1/0"), now=3)
    consumer.receive(CONTROL, Confirmed("a", "d/nobody/0"), now=3)
    consumer.receive(CONTROL, Refused("a", "q/r1", "over"), now=3)
    consumer.receive(CONTROL, HeartbeatReply("e0", 1, ["a"]), now=3)
    consumer.receive("tcp://elsewhere:1", HeartbeatReply("e1", 1, ["a"]), now=3)
    consumer.receive(SIDE, HandshakeRefused(99, "late"), now=3)
    consumer.read_ended(R1, PEER, None, now=3)
    consumer.disconnected("tcp://elsewhere:1", now=3)
    consumer.peer_opened(PeerId(EngineId("q"), Epoch("e"), 0), "memory", now=3)
    assert consumer.outbox.take_events() == []
    consumer.receive(CONTROL, Confirmed("a", "d/r1/0"), now=4)
    assert consumer.outbox.take_events() == [TransferFinished(R1)]


def test_a_confirmation_that_comes_before_the_bytes_is_not_believed() -> None:
    consumer = reading(make_consumer())
    consumer.receive(CONTROL, Confirmed("a", "d/r1/0"), now=2)
    assert consumer.outbox.take_events() == []


def test_blocks_are_not_handed_back_while_bytes_may_still_land() -> None:
    consumer = reading(make_consumer())
    consumer.outbox.take_actions()
    consumer.abort(R1, now=2)
    consumer.abort(R1, now=2)
    actions = consumer.outbox.take_actions()
    assert of(actions, StopRead) == [StopRead(R1, PEER)]
    assert consumer.outbox.take_events() == [TransferAbandoned(R1, "the request was aborted")]
    consumer.read_ended(R1, PEER, "cancelled", now=3)
    assert failures(consumer) == ["the request was aborted"]
    assert sent(consumer.outbox.take_actions(), Detach) == [Detach("e1", "a", "d/r1/0")]


@pytest.mark.parametrize(("now", "says"), [(31.0, "did not finish within 30 s")])
def test_a_read_has_a_deadline(now: float, says: str) -> None:
    consumer = reading(make_consumer())
    assert consumer.next_deadline() == 5
    consumer.receive(CONTROL, HeartbeatReply("e1", 0, []), now=2)
    for at in range(5, 31, 5):
        consumer.advance(at)
        consumer.receive(CONTROL, HeartbeatReply("e1", at // 5, []), at)
    consumer.advance(now)
    assert of(consumer.outbox.take_actions(), StopRead)
    consumer.read_ended(R1, PEER, "cancelled", now)
    assert says in failures(consumer)[0]


def test_a_confirmation_has_a_deadline() -> None:
    consumer = confirming(make_consumer())
    consumer.advance(now=7)
    assert failures(consumer) == ["the producer did not confirm the read within 5 s"]


def test_a_handshake_has_a_deadline_and_a_memory() -> None:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    consumer.start(R1, [[5, 6]], range(0, 8), now=0)
    consumer.advance(now=5)
    assert "the producer did not answer the handshake within 5 s" in failures(consumer)[0]
    consumer.outbox.take_actions()
    consumer.track(R2, Origin.of(ticket("b", 2), "T2"), now=5.1)
    consumer.start(R2, [[5, 6]], range(0, 8), now=5.1)
    assert sent(consumer.outbox.take_actions(), HandshakeRequest) == []
    assert len(failures(consumer)) == 1
    consumer.track(R1, Origin.of(ticket("c", 3), "T3"), now=6)
    assert len(sent(consumer.outbox.take_actions(), HandshakeRequest)) == 1
    consumer.advance(now=11)
    consumer.track(R2, Origin.of(ticket("d", 4), "T4"), now=11.6)
    assert sent(consumer.outbox.take_actions(), HandshakeRequest) == []


def test_a_restarted_engine_is_tried_at_once_although_its_old_life_is_out_of_reach() -> None:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    consumer.disconnected(SIDE, now=1)
    consumer.outbox.take_actions()
    consumer.track(R2, Origin.of(ticket("b", 1, epoch="e2"), "T2"), now=1)
    assert len(sent(consumer.outbox.take_actions(), HandshakeRequest)) == 1


def test_an_incompatible_producer_fails_the_request_with_the_field() -> None:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    consumer.start(R1, [[5, 6]], range(0, 8), now=0)
    consumer.receive(SIDE, reply(1, block_size=8), now=1)
    assert failures(consumer) == ["peer p is not compatible: block_size: ours 4, theirs 8"]


def test_no_common_transport_fails_the_request_with_both_lists() -> None:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    consumer.start(R1, [[5, 6]], range(0, 8), now=0)
    consumer.receive(SIDE, reply(1, offers=[TransportOffer("nixl", "", b"")]), now=1)
    assert failures(consumer) == [
        "no data transport reaches the producer: this engine has memory, the producer has nixl"
    ]


def test_an_unreachable_transport_or_a_refused_handshake_fails_the_request() -> None:
    for bring in ("transport", "refusal"):
        consumer = make_consumer()
        consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
        consumer.start(R1, [[5, 6]], range(0, 8), now=0)
        if bring == "transport":
            consumer.receive(SIDE, reply(1), now=1)
            consumer.peer_unreachable(PEER, "gone", now=1)
            consumer.peer_unreachable(PEER, "gone", now=1)
        else:
            consumer.receive(SIDE, HandshakeRefused(1, "no such rank"), now=1)
            assert failures(consumer) == [], "the version before may be accepted"
            consumer.receive(SIDE, HandshakeRefused(2, "no such rank"), now=1)
        assert len(failures(consumer)) == 1


def test_a_lost_connection_fails_what_used_it_and_the_next_request_tries_again() -> None:
    consumer = reading(make_consumer())
    consumer.track(R2, Origin.of(ticket("b", 2), "T2"), now=1)
    consumer.outbox.take_actions()
    consumer.disconnected(CONTROL, now=2)
    assert of(consumer.outbox.take_actions(), StopRead)
    consumer.read_ended(R1, PEER, "cancelled", now=2)
    assert len(failures(consumer)) == 1
    consumer.track(RequestId("r3"), Origin.of(ticket("c", 3), "T3"), now=2)
    assert sent(connect(consumer, now=2), Attach) == [Attach("T3", "d/r3/0", "memory")]
    consumer.start(R2, [[5, 6]], range(0, 8), now=3)
    assert len(failures(consumer)) == 1


def test_a_request_that_needs_nothing_lets_the_producer_free() -> None:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    connect(consumer)
    consumer.settle(R1, now=1)
    assert sent(consumer.outbox.take_actions(), Detach) == [Detach("e1", "a", "d/r1/0")]
    assert consumer.outbox.take_events() == []
    assert consumer.num_transfers == 0


def test_a_request_that_leaves_during_the_handshake_still_says_goodbye() -> None:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    consumer.abort(R1, now=0)
    consumer.abort(R2, now=0)
    actions = connect(consumer)
    assert sent(actions, Attach) == [Attach("T1", "d/r1/0", "memory")]
    assert sent(actions, Detach) == [Detach("e1", "a", "d/r1/0")]
    assert consumer.outbox.take_events() == []


def test_settling_does_not_touch_a_request_that_is_loading() -> None:
    consumer = reading(make_consumer())
    consumer.settle(R1, now=2)
    assert consumer.num_transfers == 1


def test_a_block_list_that_does_not_fit_fails_the_request_only() -> None:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    connect(consumer)
    consumer.start(R1, [[5, 6, 7]], range(0, 12), now=1)
    assert failures(consumer) == [
        "the ticket's block list of group 0 has 2 blocks, but 3 are needed"
    ]


def test_a_failed_read_fails_the_request_and_the_next_one_shakes_hands_anew() -> None:
    """The transport may have lost its connection for good while the control channel still works."""
    consumer = reading(make_consumer())
    consumer.outbox.take_actions()
    consumer.read_ended(R1, PEER, "broken", now=2)
    assert failures(consumer) == ["reading from the producer failed: broken"]
    assert of(consumer.outbox.take_actions(), ClosePeer) == [ClosePeer(PEER, CONTROL)]
    consumer.track(R2, Origin.of(ticket("b", 2), "T2"), now=2)
    consumer.start(R2, [[5, 6]], range(0, 8), now=2)
    assert of(connect(consumer, now=2), StartRead)


def test_a_failed_read_detaches_every_reader_before_the_peer_is_closed() -> None:
    """Otherwise the producer would hold the blocks of the other requests until their leases end."""
    consumer = reading(make_consumer())
    consumer.track(R2, Origin.of(ticket("b", 2), "T2"), now=1)
    consumer.outbox.take_actions()
    consumer.read_ended(R1, PEER, "broken", now=2)
    actions = consumer.outbox.take_actions()
    detached = [message for message in sent(actions, Detach) if isinstance(message, Detach)]
    assert [message.lease for message in detached] == ["a", "b"]
    assert actions[-1] == ClosePeer(PEER, CONTROL)
    consumer.advance(now=60)
    assert not sent(consumer.outbox.take_actions(), Detach)


def test_a_crowd_of_leases_is_renewed_in_several_beats() -> None:
    consumer = make_consumer()
    for number in range(2500):
        consumer.track(
            RequestId(f"r{number}"), Origin.of(ticket(f"a{number}", number + 1), "T"), now=0
        )
    connect(consumer)
    consumer.advance(now=5)
    beats = sent(consumer.outbox.take_actions(), Heartbeat)
    assert [len(beat.leases) for beat in beats if isinstance(beat, Heartbeat)] == [1000, 1000, 500]
    assert all(
        len(codec.encode(beat)) < codec.MAX_MESSAGE_BYTES
        for beat in beats
        if isinstance(beat, Heartbeat)
    )


def test_a_request_with_an_endless_name_is_confirmed_like_any_other() -> None:
    consumer = make_consumer()
    request = RequestId("r" * 5000)
    consumer.track(request, Origin.of(ticket(), "T1"), now=0)
    [attach] = sent(connect(consumer), Attach)
    assert isinstance(attach, Attach)
    assert codec.decode(codec.encode(attach)) == attach
    consumer.start(request, [[5, 6]], range(0, 8), now=1)
    consumer.read_ended(request, PEER, None, now=2)
    consumer.receive(CONTROL, Confirmed("a", attach.reader), now=3)
    assert consumer.outbox.take_events() == [TransferFinished(request)]


def test_a_lost_peer_is_closed_after_what_was_sent_to_it() -> None:
    """A message sent after the close would open a new connection that is never closed."""
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    connect(consumer)
    consumer.track(R2, Origin.of(ticket("b", 2), "T2"), now=1)
    consumer.disconnected(CONTROL, now=1)
    kinds = [type(action) for action in consumer.outbox.take_actions()]
    assert kinds.index(Send) < kinds.index(ClosePeer)
    assert Send not in kinds[kinds.index(ClosePeer) :]


def test_one_that_leaves_during_the_handshake_does_not_end_the_lease_of_its_siblings() -> None:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    consumer.track(R2, Origin.of(ticket(), "T1"), now=0)
    consumer.abort(R1, now=0)
    messages = [action.message for action in connect(consumer) if isinstance(action, Send)]
    assert messages == [
        Attach("T1", "d/r2/0", "memory"),
        Attach("T1", "d/r1/0", "memory"),
        Detach("e1", "a", "d/r1/0"),
    ]


def test_blocks_for_a_request_never_announced_fail_it() -> None:
    consumer = make_consumer()
    consumer.start(R1, [[5]], range(0, 4), now=0)
    assert len(failures(consumer)) == 1


def test_tracking_twice_is_tracking_once() -> None:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    assert len(sent(connect(consumer), Attach)) == 1


def test_idle_peers_are_forgotten() -> None:
    consumer = make_consumer(engine_ttl_s=10)
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    connect(consumer)
    consumer.advance(now=4)
    assert len(consumer.peers) == 1
    consumer.settle(R1, now=4)
    consumer.advance(now=11)
    assert len(consumer.peers) == 0
    assert of(consumer.outbox.take_actions(), ClosePeer) == [ClosePeer(PEER, CONTROL)]


class ConsumerMachine(RuleBasedStateMachine):
    """Random engine calls, peer messages and faults: the consumer never raises, every request with
    blocks ends exactly once, and no state remains.
    """

    def __init__(self) -> None:
        super().__init__()
        self.consumer = make_consumer(engine_ttl_s=50)
        self.now = 0.0
        self.count = 0
        self.started: set[RequestId] = set()
        self.reads: set[RequestId] = set()
        self.places: set[RequestId] = set()
        self.ended: set[RequestId] = set()
        self.asked: list[int] = []
        self.opening = False

    requests = st.integers(1, 8).map(lambda n: RequestId(f"r{n}"))

    @rule()
    def track(self) -> None:
        self.count += 1
        self.consumer.track(
            RequestId(f"r{self.count}"),
            Origin.of(ticket(f"a{self.count}", self.count), "T"),
            self.now,
        )

    @rule(request=requests)
    def start(self, request: RequestId) -> None:
        if int(request[1:]) <= self.count and request not in self.started:
            self.started.add(request)
            self.consumer.start(request, [[1, 2]], range(0, 8), self.now)

    @rule(request=requests)
    def abort(self, request: RequestId) -> None:
        self.consumer.abort(request, self.now)
        if request not in self.started:
            self.started.add(request)
            self.ended.add(request)

    def good_reply(self, nonce: int) -> HandshakeReply:
        return reply(nonce)

    @rule(is_good=st.booleans())
    def answer_handshake(self, is_good: bool) -> None:
        if self.asked:
            nonce = self.asked.pop()
            self.consumer.receive(
                SIDE, self.good_reply(nonce) if is_good else HandshakeRefused(nonce, "no"), self.now
            )

    @rule(is_good=st.booleans())
    def open_transport(self, is_good: bool) -> None:
        if self.opening and is_good:
            self.consumer.peer_opened(PEER, "memory", self.now)
        elif self.opening:
            self.consumer.peer_unreachable(PEER, "no", self.now)
        self.opening = False

    @rule(request=requests, error=st.sampled_from([None, "broken"]))
    def end_read(self, request: RequestId, error: str | None) -> None:
        if request in self.reads:
            self.reads.discard(request)
            self.consumer.read_ended(request, PEER, error, self.now)

    @rule(request=requests, is_good=st.booleans())
    def answer_confirm(self, request: RequestId, is_good: bool) -> None:
        lease = f"a{request[1:]}"
        message = (
            Confirmed(lease, f"d/{request}/0")
            if is_good
            else Refused(lease, f"d/{request}/0", "over")
        )
        self.consumer.receive(CONTROL, message, self.now)

    @rule(gone=st.lists(requests, max_size=3), beat=st.integers(1, 5))
    def answer_heartbeat(self, gone: list[RequestId], beat: int) -> None:
        self.consumer.receive(
            CONTROL, HeartbeatReply("e1", beat, [f"a{request[1:]}" for request in gone]), self.now
        )

    @rule(address=st.sampled_from([SIDE, CONTROL]))
    def disconnect(self, address: str) -> None:
        self.consumer.disconnected(address, self.now)

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.consumer.advance(self.now)

    @invariant()
    def holds(self) -> None:
        self.every_request_with_blocks_ends_once()

    def every_request_with_blocks_ends_once(self) -> None:
        for action in self.consumer.outbox.take_actions():
            match action:
                case StartRead(request=request):
                    self.reads.add(request)
                case PlaceBlocks(request=request):
                    self.places.add(request)
                case Send(message=HandshakeRequest(nonce=nonce)):
                    self.asked.append(nonce)
                case OpenPeer():
                    self.opening = True
        for event in self.consumer.outbox.take_events():
            if self.is_by_the_way(event):
                continue
            assert isinstance(event, TransferFinished | TransferFailed)
            assert event.request in self.started
            assert event.request not in self.ended
            assert event.request not in self.reads | self.places
            self.ended.add(event.request)

    def is_by_the_way(self, event: Event) -> bool:
        return isinstance(event, HandshakeFailed | TransferAbandoned)

    def finish(self) -> None:
        """Hook for subclasses: end the operations that still run before `teardown` checks."""

    def teardown(self) -> None:
        for number in range(1, self.count + 1):
            self.abort(RequestId(f"r{number}"))
            self.every_request_with_blocks_ends_once()
        for request in sorted(self.reads):
            self.end_read(request, "cancelled")
            self.every_request_with_blocks_ends_once()
        self.finish()
        assert self.consumer.num_transfers == 0
        assert self.ended == self.started
        self.now += 1000
        self.consumer.advance(self.now)
        self.now += 1000
        self.consumer.advance(self.now)
        assert len(self.consumer.peers) == 0
        assert self.consumer.next_deadline() is None


TestConsumerMachine = ConsumerMachine.TestCase


def test_a_read_that_begins_long_after_its_reader_came_is_announced() -> None:
    consumer = make_consumer()
    consumer.track(R1, Origin.of(ticket(), "T1"), now=0)
    consumer.track(R2, Origin.of(ticket("b", 2), "T2"), now=0)
    connect(consumer)
    consumer.start(R1, [[5, 6]], range(0, 8), now=0.1)
    assert sent(consumer.outbox.take_actions(), Heartbeat) == [], "P has just heard of it"
    consumer.start(R2, [[2, 3]], range(0, 8), now=3)
    actions = consumer.outbox.take_actions()
    assert sent(actions, Heartbeat) == [Heartbeat("e1", READ_BEGINS, ["b"])]
    kinds = [type(action) for action in actions]
    assert kinds.index(Send) < kinds.index(StartRead), (
        "P hears of it before the first byte is asked for"
    )
    consumer.receive(CONTROL, HeartbeatReply("e1", READ_BEGINS, []), now=3)
    assert failures(consumer) == []
