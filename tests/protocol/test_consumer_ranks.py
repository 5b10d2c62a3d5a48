"""Tests a consumer that reads from several ranks of a producer: a transfer succeeds only if all
ranks confirm it, and the consumer leaves no rank waiting.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.protocol.test_consumer import CONTROL, FACTORS, R1, R2, SIDE, failures, of, reply, sent

from kvferry.events import HandshakeFailed, TransferAbandoned, TransferFailed, TransferFinished
from kvferry.protocol.actions import Action, ClosePeer, OpenPeer, Send, StartRead, StopRead
from kvferry.protocol.consumer.consumer import Consumer
from kvferry.protocol.consumer.context import ConsumerSettings
from kvferry.protocol.consumer.transfer import Origin
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.messages import (
    Attach,
    Confirm,
    Confirmed,
    Detach,
    HandshakeRefused,
    HandshakeReply,
    HandshakeRequest,
    Heartbeat,
    HeartbeatReply,
    Refused,
    TransportOffer,
)
from kvferry.protocol.peers import PeerSettings
from kvferry.protocol.planning.axes import dense_axes
from kvferry.protocol.planning.geometry import Geometry
from kvferry.protocol.tickets import Ticket
from kvferry.types import Axis, AxisKind, EngineId, Epoch, KVLayout, PeerId, Region, RequestId

HEADS = 2


def axes(heads: int) -> tuple[Axis, ...]:
    return dense_axes([(AxisKind.HEAD, heads), (AxisKind.TOKEN, 4)], 16)


def make_consumer(
    tp_rank: int = 0,
    tp_size: int = 1,
    engine_ttl_s: float = 3600,
    writable_transports: frozenset[str] = frozenset(),
) -> Consumer:
    """Return a consumer whose blocks hold 64 bytes per head."""
    heads = max(1, HEADS // tp_size)
    region = Region("l0", 4096, 64 * heads, 64 * heads, 8, axes=axes(heads))
    geometry = Geometry(tp_rank, tp_size, 4, 8, KVLayout.HND, heads, 8, (region,), HEADS)
    peers = PeerSettings(
        factors=FACTORS,
        geometry=geometry,
        offers=(TransportOffer("memory", "", b"us"),),
        pinned_transports=(),
        handshake_timeout_s=5,
        engine_ttl_s=engine_ttl_s,
    )
    return Consumer(
        ConsumerSettings(
            engine=EngineId("d"),
            peers=peers,
            read_timeout_s=30,
            confirm_timeout_s=5,
            receive_timeout_s=100,
            writable_transports=writable_transports,
        )
    )


def ticket(tp_size: int, request: str = "a", serial: int = 1) -> Ticket:
    return Ticket(
        "p",
        "e1",
        request,
        serial,
        "p-host",
        5600,
        tp_size,
        4,
        [[(3, 2)]],
        fingerprint(range(8), 4, ""),
        30.0,
    )


def control(rank: int) -> str:
    return f"{CONTROL}{rank}"


def peer(rank: int) -> PeerId:
    return PeerId(EngineId("p"), Epoch("e1"), rank)


def answer(request: HandshakeRequest, tp_size: int) -> HandshakeReply:
    heads = max(1, HEADS // tp_size)
    return reply(
        request.nonce,
        tp_rank=request.tp_rank,
        tp_size=tp_size,
        num_kv_heads=heads,
        total_kv_heads=HEADS,
        control_address=control(request.tp_rank),
        regions=[Region("l0", 0, 64 * heads, 64 * heads, 16, axes=axes(heads))],
    )


def connect(consumer: Consumer, tp_size: int) -> list[Action]:
    """Answer all pending handshake requests and open the transports."""
    for request in sent(consumer.outbox.take_actions(), HandshakeRequest):
        assert isinstance(request, HandshakeRequest)
        consumer.receive(SIDE, answer(request, tp_size), now=0)
        consumer.peer_opened(peer(request.tp_rank), "memory", now=0)
    return consumer.outbox.take_actions()


def tracked(tp_size: int, consumer: Consumer | None = None) -> tuple[Consumer, list[Action]]:
    consumer = consumer or make_consumer()
    consumer.track(R1, Origin.of(ticket(tp_size), "T1"), now=0)
    return consumer, connect(consumer, tp_size)


def reading(tp_size: int) -> Consumer:
    consumer, _ = tracked(tp_size)
    consumer.start(R1, [[5, 6]], range(0, 8), now=1)
    return consumer


def addresses(actions: list[Action], kind: type) -> list[str]:
    return [
        action.address
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, kind)
    ]


def test_each_rank_is_attached_read_and_asked_to_confirm() -> None:
    consumer, actions = tracked(2)
    assert addresses(actions, Attach) == [control(0), control(1)]
    assert sent(actions, Attach) == [Attach("T1", "d/r1/0", "memory")] * 2
    consumer.start(R1, [[5, 6]], range(0, 8), now=1)
    reads = [action for action in consumer.outbox.take_actions() if isinstance(action, StartRead)]
    found = {
        (r.peer.tp_rank, p.segment_bytes, *p.local_offsets, *p.remote_offsets)
        for r in reads
        for p in r.segments
    }
    assert found == {(0, 64, 640, 768, 192, 256), (1, 64, 704, 832, 192, 256)}
    consumer.read_ended(R1, peer(1), None, now=2)
    assert addresses(consumer.outbox.take_actions(), Confirm) == []
    consumer.read_ended(R1, peer(0), None, now=2)
    assert addresses(consumer.outbox.take_actions(), Confirm) == [control(0), control(1)]
    consumer.receive(control(0), Confirmed("a", "d/r1/0"), now=3)
    consumer.receive(control(0), Confirmed("a", "d/r1/0"), now=3)
    assert consumer.outbox.take_events() == []
    consumer.receive(control(1), Confirmed("a", "d/r1/0"), now=3)
    assert consumer.outbox.take_events() == [TransferFinished(R1)]
    assert consumer.next_deadline() is None


def test_a_rank_that_has_nothing_for_us_is_visited_and_not_read() -> None:
    consumer = reading(4)
    reads = [action for action in consumer.outbox.take_actions() if isinstance(action, StartRead)]
    assert [(read.peer.tp_rank, bool(read.segments)) for read in reads] == [
        (0, True),
        (1, False),
        (2, True),
        (3, False),
    ]


def test_several_of_us_at_one_rank_name_each_other() -> None:
    for rank in range(4):
        _, actions = tracked(2, make_consumer(rank, 4))
        [attach] = sent(actions, Attach)
        neighbour = rank ^ 1
        assert attach == Attach("T1", f"d/r1/{rank}", "memory", [f"d/r1/{neighbour}"])
        assert addresses(actions, Attach) == [control(rank // 2)]


def test_one_rank_that_refuses_fails_the_request_and_the_others_are_told() -> None:
    consumer = reading(2)
    for rank in range(2):
        consumer.read_ended(R1, peer(rank), None, now=2)
    consumer.outbox.take_actions()
    consumer.receive(control(0), Confirmed("a", "d/r1/0"), now=3)
    consumer.receive(control(1), Refused("a", "d/r1/0", "over"), now=3)
    assert failures(consumer) == ["the producer refused: over"]
    assert addresses(consumer.outbox.take_actions(), Detach) == [control(0), control(1)]


def test_a_read_that_fails_on_one_rank_stops_the_other_and_says_goodbye_to_both() -> None:
    consumer = reading(2)
    consumer.outbox.take_actions()
    consumer.read_ended(R1, peer(0), "broken", now=2)
    assert of(consumer.outbox.take_actions(), StopRead) == [StopRead(R1, peer(1))]
    assert failures(consumer) == []
    consumer.read_ended(R1, peer(1), "cancelled", now=3)
    assert failures(consumer) == ["reading from the producer failed: broken"]
    actions = consumer.outbox.take_actions()
    assert addresses(actions, Detach) == [control(0), control(1)]
    assert of(actions, ClosePeer) == [ClosePeer(peer(rank), control(rank)) for rank in range(2)]
    consumer.track(R2, Origin.of(ticket(2, "b", 2), "T2"), now=3)
    assert len(sent(consumer.outbox.take_actions(), HandshakeRequest)) == 2


def test_a_connection_lost_to_one_rank_ends_the_reads_from_all() -> None:
    consumer = reading(2)
    consumer.outbox.take_actions()
    consumer.disconnected(control(1), now=2)
    actions = consumer.outbox.take_actions()
    assert of(actions, ClosePeer) == [ClosePeer(peer(rank), control(rank)) for rank in range(2)]
    assert {action.peer for action in actions if isinstance(action, StopRead)} == {peer(0), peer(1)}
    for rank in range(2):
        assert failures(consumer) == []
        consumer.read_ended(R1, peer(rank), "gone", now=2)
    assert failures(consumer) == [f"the connection to {control(1)} was lost"]


def test_every_rank_has_to_answer_heartbeats() -> None:
    consumer, _ = tracked(2)
    for now in (5, 10, 15, 20):
        consumer.advance(now)
        beats = sent(consumer.outbox.take_actions(), Heartbeat)
        consumer.receive(control(0), HeartbeatReply("e1", now // 5, []), now)
        assert beats == ([Heartbeat("e1", now // 5, ["a"])] * 2 if now < 20 else [])
    consumer.start(R1, [[5, 6]], range(0, 8), now=21)
    assert failures(consumer) == ["the producer no longer answers heartbeats"]


def test_one_that_leaves_during_the_handshake_says_goodbye_to_every_rank_and_names_its_companions(
) -> None:  # fmt: skip
    consumer = make_consumer(0, 2)
    consumer.track(R1, Origin.of(ticket(1), "T1"), now=0)
    consumer.abort(R1, now=0)
    actions = connect(consumer, 1)
    assert sent(actions, Attach) == [Attach("T1", "d/r1/0", "memory", ["d/r1/1"])]
    assert sent(actions, Detach) == [Detach("e1", "a", "d/r1/0")]


class RanksMachine(RuleBasedStateMachine):
    """Random faults of single ranks: the consumer never raises, and each request with blocks ends
    exactly once and never during a read. A request succeeds only if every rank confirmed it after
    the bytes of that rank had arrived.
    """

    SIZE = 2

    def __init__(self) -> None:
        super().__init__()
        self.consumer = make_consumer(engine_ttl_s=50)
        self.now = 0.0
        self.count = 0
        self.asked: list[HandshakeRequest] = []
        self.opening: list[int] = []
        self.started: set[RequestId] = set()
        self.ended: set[RequestId] = set()
        self.reads: set[tuple[RequestId, int]] = set()
        self.confirms: set[tuple[RequestId, int]] = set()
        self.confirmed: set[tuple[RequestId, int]] = set()

    requests = st.integers(1, 5).map(lambda n: RequestId(f"r{n}"))
    ranks = st.integers(0, 1)

    @rule()
    def track(self) -> None:
        self.count += 1
        self.consumer.track(
            RequestId(f"r{self.count}"),
            Origin.of(ticket(self.SIZE, f"a{self.count}", self.count), "T"),
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

    @rule(is_good=st.sampled_from([True, True, True, False]))
    def answer_handshake(self, is_good: bool) -> None:
        if self.asked:
            request = self.asked.pop(0)
            message = (
                answer(request, self.SIZE) if is_good else HandshakeRefused(request.nonce, "no")
            )
            self.consumer.receive(SIDE, message, self.now)

    @rule(is_good=st.sampled_from([True, True, True, False]))
    def open_transport(self, is_good: bool) -> None:
        if self.opening:
            rank = self.opening.pop(0)
            if is_good:
                self.consumer.peer_opened(peer(rank), "memory", self.now)
            else:
                self.consumer.peer_unreachable(peer(rank), "no", self.now)

    @rule()
    def meet(self) -> None:
        """Let all pending handshakes succeed."""
        while self.asked or self.opening:
            self.answer_handshake(True)
            self.every_request_with_blocks_ends_once()
            self.open_transport(True)
            self.every_request_with_blocks_ends_once()

    @rule()
    def deliver(self) -> None:
        """Add a request, and let every running read succeed."""
        self.track()
        self.start(RequestId(f"r{self.count}"))
        self.every_request_with_blocks_ends_once()
        self.meet()
        for request, rank in sorted(self.reads):
            self.finish_read(request, rank, None)

    @rule(rank=ranks)
    def confirm(self, rank: int) -> None:
        """Let one rank confirm every request that asked it for a confirmation."""
        for request, asked in sorted(self.confirms):
            if asked == rank:
                self.answer_confirm(request, rank, True)

    @rule(error=st.sampled_from([None, None, None, "broken"]), data=st.data())
    def end_read(self, error: str | None, data: st.DataObject) -> None:
        if self.reads:
            request, rank = data.draw(st.sampled_from(sorted(self.reads)))
            self.finish_read(request, rank, error)

    def finish_read(self, request: RequestId, rank: int, error: str | None) -> None:
        self.reads.discard((request, rank))
        self.consumer.read_ended(request, peer(rank), error, self.now)

    @rule(request=requests, rank=ranks, is_good=st.sampled_from([True, True, True, False]))
    def answer_confirm(self, request: RequestId, rank: int, is_good: bool) -> None:
        lease, reader = f"a{request[1:]}", f"d/{request}/0"
        if is_good and (request, rank) in self.confirms:
            self.confirmed.add((request, rank))
        self.consumer.receive(
            control(rank),
            Confirmed(lease, reader) if is_good else Refused(lease, reader, "over"),
            self.now,
        )

    @rule(gone=st.lists(requests, max_size=2), rank=ranks, beat=st.integers(1, 5))
    def answer_heartbeat(self, gone: list[RequestId], rank: int, beat: int) -> None:
        self.consumer.receive(
            control(rank),
            HeartbeatReply("e1", beat, [f"a{request[1:]}" for request in gone]),
            self.now,
        )

    @rule(rank=ranks)
    def disconnect(self, rank: int) -> None:
        self.consumer.disconnected(control(rank), self.now)

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.consumer.advance(self.now)

    @invariant()
    def every_request_with_blocks_ends_once(self) -> None:
        for action in self.consumer.outbox.take_actions():
            match action:
                case StartRead(request=request, peer=PeerId(tp_rank=rank)):
                    self.reads.add((request, rank))
                case Send(message=HandshakeRequest() as request):
                    self.asked.append(request)
                case Send(address=address, message=Confirm(lease=lease)):
                    self.confirms.add(
                        (RequestId(f"r{lease[1:]}"), int(address.removeprefix(CONTROL)))
                    )
                case OpenPeer(peer=PeerId(tp_rank=rank)):
                    self.opening.append(rank)
        for event in self.consumer.outbox.take_events():
            if isinstance(event, HandshakeFailed | TransferAbandoned):
                continue
            assert isinstance(event, TransferFinished | TransferFailed)
            assert event.request in self.started - self.ended
            assert not any(request == event.request for request, _ in self.reads)
            if isinstance(event, TransferFinished):
                assert {(event.request, rank) for rank in range(self.SIZE)} <= self.confirmed
            self.ended.add(event.request)

    def teardown(self) -> None:
        for number in range(1, self.count + 1):
            self.abort(RequestId(f"r{number}"))
            self.every_request_with_blocks_ends_once()
        for request, rank in sorted(self.reads):
            self.finish_read(request, rank, "cancelled")
            self.every_request_with_blocks_ends_once()
        assert self.consumer.num_transfers == 0
        assert self.ended == self.started
        for _ in range(2):
            self.now += 1000
            self.consumer.advance(self.now)
        assert len(self.consumer.peers) == 0
        assert self.consumer.next_deadline() is None


TestRanksMachine = RanksMachine.TestCase
