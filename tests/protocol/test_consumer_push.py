"""Tests a push consumer, which receives its ticket late: it registers, waits for the offer, and
from then on reads like any other consumer.
"""

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.protocol.test_consumer import (
    CONTROL,
    PEER,
    R1,
    R2,
    connect,
    failures,
    make_consumer,
    of,
    reply,
    sent,
    ticket,
)

from kvferry.events import PrefillCompleted, TransferAbandoned, TransferFailed, TransferFinished
from kvferry.protocol import messages as codec
from kvferry.protocol.actions import Action, StartRead, StopRead
from kvferry.protocol.consumer.consumer import Consumer
from kvferry.protocol.consumer.transfer import Origin, PushInfo
from kvferry.protocol.fingerprints import Fingerprint, fingerprint
from kvferry.protocol.messages import (
    Attach,
    Confirm,
    Confirmed,
    Detach,
    HandshakeRequest,
    Heartbeat,
    HeartbeatReply,
    PushCancel,
    PushRegistration,
    PushWithdrawal,
    Refused,
)
from kvferry.protocol.peers import UNKNOWN_EPOCH
from kvferry.protocol.tickets import Ticket
from kvferry.types import Address, EngineIncarnation, Epoch, RequestId

READER = "d/r1/0"
OWN = Address("d-host", 5700)
REGISTRATION = PushRegistration("e1", READER, "r1", "d", "d-host", 5700, 1, 30.0, "h1", "PT")
CANCEL = PushCancel("e1", READER, "r1", "d", "h1", "PT")


def pushed_by(epoch: Epoch, push_info: PushInfo, tp_size: int = 1) -> Origin:
    incarnation = EngineIncarnation(PEER.engine, epoch)
    return Origin(incarnation, Address("p-host", 5600), tp_size, push_info=push_info)


def expect(
    consumer: Consumer, request: RequestId = R1, tokens: Fingerprint | None = None, now: float = 0
) -> None:
    push_info = PushInfo("h1", tokens or fingerprint(range(8), 4, ""), OWN, "PT")
    consumer.track(request, pushed_by(PEER.epoch, push_info), now)


def offer(
    consumer: Consumer, offered: Ticket, text: str, now: float, reader: str = READER, ready: int = 8
) -> None:
    consumer.offered(CONTROL, reader, offered, text, ready, now)


def registered(consumer: Consumer) -> list[Action]:
    expect(consumer)
    return connect(consumer)


def test_the_whole_way_from_registration_to_confirmation() -> None:
    consumer = make_consumer()
    assert sent(registered(consumer), PushRegistration) == [REGISTRATION]
    consumer.start(R1, [[5, 6]], range(4, 8), now=1)
    assert consumer.outbox.take_actions() == []
    offer(consumer, ticket(), "T1", now=2)
    actions = consumer.outbox.take_actions()
    assert sent(actions, Attach) == [Attach("T1", READER, "memory")]
    [read] = of(actions, StartRead)
    assert isinstance(read, StartRead)
    assert [(list(p.local_offsets), list(p.remote_offsets)) for p in read.segments] == [
        ([6 * 64], [4 * 64])
    ]
    consumer.read_ended(R1, PEER, None, now=3)
    assert sent(consumer.outbox.take_actions(), Confirm) == [Confirm("e1", "a", READER, 1)]
    consumer.receive(CONTROL, Confirmed("a", READER), now=4)
    assert consumer.outbox.take_events() == [
        PrefillCompleted(R1, num_tokens=4, num_left=4, landed_bytes=0),
        TransferFinished(R1),
    ]
    assert (consumer.num_transfers, consumer.next_deadline()) == (0, None)


def test_a_request_id_that_no_message_can_carry_is_left_to_the_handover() -> None:
    consumer = make_consumer()
    expect(consumer, RequestId("r" * 2000))
    [registration] = sent(connect(consumer), PushRegistration)
    assert isinstance(registration, PushRegistration)
    assert (registration.request_id, registration.match_id) == ("", "h1")
    assert codec.decode(codec.encode(registration)) == registration


def test_a_request_is_registered_and_attached_long_before_it_has_blocks() -> None:
    consumer = make_consumer()
    registered(consumer)
    offer(consumer, ticket(), "T1", now=1)
    assert sent(consumer.outbox.take_actions(), Attach)
    consumer.start(R1, [[5, 6]], range(0, 8), now=50)
    assert of(consumer.outbox.take_actions(), StartRead)


def test_heartbeats_renew_the_registration_and_then_the_lease_by_its_own_name() -> None:
    consumer = make_consumer()
    registered(consumer)
    consumer.advance(now=5)
    assert sent(consumer.outbox.take_actions(), Heartbeat) == [Heartbeat("e1", 1, [READER])]
    consumer.receive(CONTROL, HeartbeatReply("e1", 1, []), now=5)
    offer(consumer, ticket(), "T1", now=6)
    consumer.outbox.take_actions()
    consumer.advance(now=11)
    assert sent(consumer.outbox.take_actions(), Heartbeat) == [Heartbeat("e1", 1, ["a"])]
    consumer.receive(CONTROL, HeartbeatReply("e1", 1, [READER]), now=11)
    consumer.start(R1, [[5, 6]], range(0, 8), now=12)
    assert of(consumer.outbox.take_actions(), StartRead), (
        "that the registration is gone says nothing of the lease"
    )


def test_a_producer_that_stops_answering_while_we_wait_fails_the_request() -> None:
    consumer = make_consumer()
    registered(consumer)
    consumer.start(R1, [[5, 6]], range(0, 8), now=0)
    consumer.advance(now=5)
    consumer.advance(now=20)
    assert failures(consumer) == ["the producer no longer answers heartbeats"]


def test_a_registration_that_the_producer_has_forgotten_fails_the_request() -> None:
    consumer = make_consumer()
    registered(consumer)
    consumer.start(R1, [[5, 6]], range(0, 8), now=0)
    consumer.advance(now=5)
    consumer.receive(CONTROL, HeartbeatReply("e1", 1, [READER]), now=5)
    assert failures(consumer) == ["the producer no longer has the registration"]


def test_a_refused_registration_fails_the_request_with_the_reason() -> None:
    consumer = make_consumer()
    registered(consumer)
    consumer.start(R1, [[5, 6]], range(0, 8), now=0)
    consumer.receive(CONTROL, Refused("", READER, "the prefill was aborted"), now=1)
    assert failures(consumer) == ["the producer refused: the prefill was aborted"]
    assert consumer.num_transfers == 0


@pytest.mark.parametrize("has_blocks", [False, True])
def test_an_abort_before_the_offer_frees_at_once_and_tells_the_producer(has_blocks: bool) -> None:
    consumer = make_consumer()
    registered(consumer)
    if has_blocks:
        consumer.start(R1, [[5, 6]], range(0, 8), now=0)
    consumer.abort(R1, now=1)
    assert sent(consumer.outbox.take_actions(), PushCancel) == [CANCEL]
    assert failures(consumer) == ["the request was aborted"] * has_blocks
    assert (consumer.num_transfers, consumer.next_deadline()) == (0, None)
    offer(consumer, ticket(), "T1", now=2)
    assert consumer.outbox.take_actions() == []


def test_a_full_local_hit_releases_the_producer_at_once_also_before_the_handshake_is_over() -> None:
    consumer = make_consumer()
    registered(consumer)
    consumer.settle(R1, now=1)
    assert sent(consumer.outbox.take_actions(), PushCancel) == [CANCEL]
    consumer = make_consumer()
    expect(consumer)
    consumer.settle(R1, now=0)
    actions = connect(consumer)
    assert sent(actions, PushCancel) == [CANCEL]
    assert sent(actions, PushRegistration) == []


def test_an_abort_after_the_offer_detaches() -> None:
    consumer = make_consumer()
    registered(consumer)
    offer(consumer, ticket(), "T1", now=1)
    consumer.outbox.take_actions()
    consumer.abort(R1, now=2)
    assert sent(consumer.outbox.take_actions(), Detach) == [Detach("e1", "a", READER)]


def test_the_wait_for_the_offer_has_a_deadline_of_its_own_and_the_rest_another() -> None:
    consumer = make_consumer()
    registered(consumer)
    consumer.start(R1, [[5, 6]], range(0, 8), now=0)
    answer_heartbeats(consumer, until=479)
    assert failures(consumer) == []
    consumer.advance(now=480)
    assert failures(consumer) == ["the prefill engine offered no blocks within 480 s"]
    expect(consumer, now=480)
    consumer.start(R1, [[5, 6]], range(0, 8), now=480)
    offer(consumer, ticket(), "T1", now=900)
    consumer.read_ended(R1, PEER, None, now=901)
    assert failures(consumer) == []


def answer_heartbeats(consumer: Consumer, until: int) -> None:
    for second in range(until):
        consumer.advance(now=second)
        for beat in sent(consumer.outbox.take_actions(), Heartbeat):
            assert isinstance(beat, Heartbeat)
            consumer.receive(CONTROL, HeartbeatReply("e1", beat.beat, []), now=second)


@pytest.mark.parametrize(
    ("prompt", "end", "shared"),
    [([*range(7), 99], 8, 4), ([99, *range(1, 8)], 8, 0), (list(range(12)), 12, 8)],
)
def test_the_kv_of_another_prompt_is_never_read(prompt: list[int], end: int, shared: int) -> None:
    consumer = make_consumer()
    expect(consumer, tokens=fingerprint(prompt, 4, ""))
    connect(consumer)
    consumer.start(R1, [[5, 6, 7]], range(0, end), now=0)
    offer(consumer, ticket(), "T1", now=1)
    assert failures(consumer) == [
        f"the prefill was of another prompt or of other weights: {shared} tokens are known to be "
        f"the same, but {end} are needed"
    ]
    assert of(consumer.outbox.take_actions(), StartRead) == []


def test_an_offer_of_another_life_or_to_somebody_else_changes_nothing() -> None:
    consumer = make_consumer()
    registered(consumer)
    offer(consumer, ticket(epoch="e2"), "T1", now=1)
    offer(consumer, ticket(), "T1", now=1, reader="d/other/0")
    assert consumer.outbox.take_actions() == []
    offer(consumer, ticket(), "T1", now=2)
    offer(consumer, ticket("b", 2), "T2", now=3)
    assert sent(consumer.outbox.take_actions(), Attach) == [Attach("T1", READER, "memory")]


# -- behind a router that signs nothing --

UNSIGNED = PushRegistration("e1", READER, "r1", "d", "d-host", 5700, 1, 30.0)


def expect_from(consumer: Consumer, request: RequestId = R1, now: float = 0) -> None:
    """Expect the KV from a producer whose address is known, but not its incarnation."""
    push_info = PushInfo("", fingerprint(range(8), 4, ""), OWN, "")
    consumer.track(request, pushed_by(UNKNOWN_EPOCH, push_info), now)


def test_a_producer_known_by_its_address_says_which_life_it_is() -> None:
    consumer = make_consumer()
    expect_from(consumer)
    assert sent(connect(consumer), PushRegistration) == [UNSIGNED]
    offer(consumer, ticket(), "T1", now=2)
    assert sent(consumer.outbox.take_actions(), Attach) == [Attach("T1", READER, "memory")]
    expect_from(consumer, R2, now=3)
    [second] = sent(consumer.outbox.take_actions(), PushRegistration)
    assert isinstance(second, PushRegistration)
    assert (second.epoch, second.request_id, len(consumer.peers)) == ("e1", "r2", 1), (
        "nobody shakes hands twice"
    )


def test_a_producer_known_by_its_address_may_turn_out_to_be_one_that_is_known_well() -> None:
    consumer = make_consumer()
    expect_from(consumer)
    [asked] = sent(consumer.outbox.take_actions(), HandshakeRequest)
    assert isinstance(asked, HandshakeRequest)
    consumer.track(R2, Origin.of(ticket("b"), "T2"), now=0)
    [other] = sent(consumer.outbox.take_actions(), HandshakeRequest)
    assert isinstance(other, HandshakeRequest)
    consumer.receive("tcp://p-host:5600", reply(other.nonce), now=0)
    consumer.peer_opened(PEER, "memory", now=0)
    assert sent(consumer.outbox.take_actions(), PushRegistration) == []
    consumer.receive("tcp://p-host:5600", reply(asked.nonce), now=1)
    assert sent(consumer.outbox.take_actions(), PushRegistration) == [UNSIGNED]
    assert len(consumer.peers) == 1


def test_a_request_that_ends_before_its_producer_has_said_which_life_it_is_says_farewell_to_that(
) -> None:  # fmt: skip
    consumer = make_consumer()
    expect_from(consumer)
    consumer.settle(R1, now=0)
    assert sent(connect(consumer), PushCancel) == [PushCancel("e1", READER, "r1", "d")]
    assert consumer.num_transfers == 0


def test_a_request_that_was_refused_before_its_producer_has_said_which_life_it_is_cancels_once(
) -> None:  # fmt: skip
    consumer = make_consumer()
    expect_from(consumer)
    consumer.receive(CONTROL, Refused("", READER, "no"), now=0)
    assert sent(connect(consumer), PushCancel) == [PushCancel("e1", READER, "r1", "d")]
    consumer.start(R1, [[5, 6]], range(0, 8), now=0)
    assert failures(consumer) == ["the producer refused: no"]


@pytest.mark.parametrize("changes", [{"engine": "q"}, {"epoch": ""}])
def test_another_engine_at_that_address_fails_the_request_and_is_not_asked_again_at_once(
    changes: dict[str, str],
) -> None:
    consumer = make_consumer()
    expect_from(consumer)
    [asked] = sent(consumer.outbox.take_actions(), HandshakeRequest)
    assert isinstance(asked, HandshakeRequest)
    consumer.receive(
        "tcp://p-host:5600", msgspec.structs.replace(reply(asked.nonce), **changes), now=0
    )
    consumer.start(R1, [[5, 6]], range(0, 8), now=0)
    assert "answers at this address, but the router named engine p" in failures(consumer)[0]
    consumer.outbox.take_actions()
    expect_from(consumer, R2, now=0.1)
    assert sent(consumer.outbox.take_actions(), HandshakeRequest) == []
    assert (len(consumer.peers), consumer.num_transfers) == (0, 1)


class PushMachine(RuleBasedStateMachine):
    """Random messages in random order: every request with blocks ends exactly once, and never while
    a read may still write into its blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.consumer = make_consumer()
        self.now = 0.0
        self.open_reads: set[RequestId] = set()
        self.with_blocks: set[RequestId] = set()
        self.ended: set[RequestId] = set()
        self.begun: set[RequestId] = set()
        expect(self.consumer, RequestId("first"))
        connect(self.consumer)
        self.consumer.settle(RequestId("first"), 0)

    @rule(request=st.sampled_from([R1, R2]))
    def expects(self, request: RequestId) -> None:
        if request not in self.begun:
            self.begun.add(request)
            expect(self.consumer, request, now=self.now)

    @rule(request=st.sampled_from([R1, R2]))
    def starts(self, request: RequestId) -> None:
        if request in self.begun and request not in self.with_blocks | self.ended:
            self.with_blocks.add(request)
            self.consumer.start(request, [[5, 6]], range(0, 8), self.now)

    @rule(
        request=st.sampled_from([R1, R2]),
        serial=st.integers(1, 3),
        ready=st.sampled_from([0, 4, 8]),
    )
    def offers(self, request: RequestId, serial: int, ready: int) -> None:
        offer(self.consumer, ticket("a", serial), "T", self.now, f"d/{request}/0", ready)

    @rule(request=st.sampled_from([R1, R2]), serial=st.integers(1, 3))
    def withdraws(self, request: RequestId, serial: int) -> None:
        self.consumer.receive(CONTROL, PushWithdrawal(f"d/{request}/0", serial), self.now)

    @rule(request=st.sampled_from([R1, R2]), is_ok=st.booleans())
    def read_ends(self, request: RequestId, is_ok: bool) -> None:
        if request in self.open_reads:
            self.open_reads.discard(request)
            self.consumer.read_ended(request, PEER, None if is_ok else "broken", self.now)

    @rule(request=st.sampled_from([R1, R2]), lease=st.sampled_from(["a", "b"]))
    def confirms(self, request: RequestId, lease: str) -> None:
        self.consumer.receive(CONTROL, Confirmed(lease, f"d/{request}/0"), self.now)

    @rule(request=st.sampled_from([R1, R2]))
    def refuses(self, request: RequestId) -> None:
        self.consumer.receive(CONTROL, Refused("", f"d/{request}/0", "no"), self.now)

    @rule(request=st.sampled_from([R1, R2]))
    def aborts(self, request: RequestId) -> None:
        self.consumer.abort(request, self.now)
        if request not in self.with_blocks:
            self.ended.add(request)

    @rule(request=st.sampled_from([R1, R2]))
    def settles(self, request: RequestId) -> None:
        if request in self.begun and request not in self.with_blocks:
            self.consumer.settle(request, self.now)
            self.ended.add(request)

    @rule(seconds=st.sampled_from([1.0, 6.0, 40.0, 500.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.consumer.advance(self.now)

    @invariant()
    def ends_are_right(self) -> None:
        for action in self.consumer.outbox.take_actions():
            if isinstance(action, StartRead):
                self.open_reads.add(action.request)
            assert not isinstance(action, StopRead) or action.request in self.open_reads
        for event in self.consumer.outbox.take_events():
            if isinstance(event, TransferFinished | TransferFailed):
                assert event.request in self.with_blocks - self.ended, (
                    "ended twice, or without blocks"
                )
                assert event.request not in self.open_reads, "its blocks may still be written"
                self.ended.add(event.request)
            elif isinstance(event, TransferAbandoned):
                assert event.request in self.open_reads

    def teardown(self) -> None:
        self.ends_are_right()
        for request in (R1, R2):
            self.consumer.abort(request, self.now)
            self.ends_are_right()
            if request in self.open_reads:
                self.open_reads.discard(request)
                self.consumer.read_ended(request, PEER, "cancelled", self.now)
        self.ends_are_right()
        assert self.with_blocks <= self.ended
        assert self.consumer.num_transfers == 0


TestPushMachine = PushMachine.TestCase
