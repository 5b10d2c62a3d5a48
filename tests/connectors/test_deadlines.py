"""Tests every deadline of a transfer, from the configuration key that an operator sets to the error
that names it. The tests control the clock.

Each setting has a value of its own, so a deadline that uses the wrong setting fails its test.
"""

import math

import msgspec
import pytest
from tests.protocol.caches import no_writers, take_replies

from kvferry.config import KVTransferConfig, NixlExtraConfig, SideChannelConfig
from kvferry.connectors.contract import ConnectorConfig, ModelIdentity, ParallelConfig
from kvferry.connectors.nixl.worker import transfer_worker_settings
from kvferry.events import LeaseEnded, TransferAbandoned, TransferFailed
from kvferry.protocol import messages as codec
from kvferry.protocol.actions import ClosePeer, Send, StopRead
from kvferry.protocol.consumer.consumer import Consumer
from kvferry.protocol.consumer.transfer import Origin
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.messages import (
    WIRE_VERSION,
    Attach,
    Confirm,
    Detach,
    HandshakeReply,
    HandshakeRequest,
    Heartbeat,
    HeartbeatReply,
    PushRegistration,
    RankLayout,
    Refused,
    TransportOffer,
)
from kvferry.protocol.planning.geometry import Geometry
from kvferry.protocol.producer.producer import Producer
from kvferry.protocol.tickets import PushTicket, PushTicketKey, Ticket, TicketKey
from kvferry.testing.local import LocalTransportKit
from kvferry.types import EngineId, Epoch, KVLayout, LeaseEnd, PeerId, Region, RequestId, Route
from kvferry.worker.worker import TransferWorkerSettings

SECRET = b"a secret of the cluster"
VALUES = {
    "kv_lease_duration": 60,
    "handshake_timeout": 7,
    "read_timeout": 11,
    "confirm_timeout": 13,
    "receive_timeout": 19,
    "grant_wait": 23,
    "engine_ttl": 29,
    "queue_timeout": 31,
    "step_timeout": 37,
    "leg_wait": 41,
}
SIDE, CONTROL = "tcp://p-host:5600", "tcp://p-host:6000"
P, R, A = PeerId(EngineId("p"), Epoch("e1"), 0), RequestId("r"), RequestId("a")
EARLIER = 0.01
"""The tests check that nothing happens this many seconds before a deadline."""


def settings(**changes: float) -> TransferWorkerSettings:
    """Return the settings that the connector derives from the JSON written by an operator."""
    extra = {**VALUES, **changes}
    transfer = KVTransferConfig.from_mapping(
        {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "engine_id": "p",
            "kv_connector_extra_config": extra,
        }
    )
    assert isinstance(transfer.extra, NixlExtraConfig)
    model = ModelIdentity("Tiny", "abc", 1, 1, 8, "float32")
    config = ConnectorConfig(
        transfer,
        model,
        ParallelConfig(),
        SideChannelConfig(port=0),
        SECRET,
        "e1",
        LocalTransportKit(),
    )
    geometry = Geometry(0, 1, 4, 8, KVLayout.HND, 1, 8, (Region("l0", 4096, 64, 64, 8),), 1)
    return transfer_worker_settings(
        config,
        transfer.extra,
        geometry,
        (TransportOffer("memory", "", b"us"),),
        {"dtype": "float32"},
    )


def ticket() -> Ticket:
    return Ticket(
        "p", "e1", "a", 1, "p-host", 5600, 1, 4, [[(3, 2)]], fingerprint(range(8), 4, ""), 60.0
    )


class Reader:
    """A consumer whose producer answers only heartbeats, unless a test sends more."""

    def __init__(self, **changes: float) -> None:
        self.consumer = Consumer(settings(**changes).consumer)
        self.sent: list[tuple[float, object]] = []
        """The messages sent by `advance`, and when."""

    def track(self) -> "Reader":
        self.consumer.track(R, Origin.of(ticket(), "T"), now=0)
        return self

    def shake_hands(self) -> "Reader":
        [nonce] = [
            a.message.nonce
            for a in self.consumer.outbox.take_actions()
            if isinstance(a, Send) and isinstance(a.message, HandshakeRequest)
        ]
        region, offer = Region("l0", 0, 64, 64, 16), TransportOffer("memory", "", b"them")
        layout = codec.encode_layout(
            RankLayout(0, 1, 4, 16, KVLayout.HND, 1, 8, CONTROL, [region], [offer], 1)
        )
        self.consumer.receive(
            SIDE,
            HandshakeReply(
                nonce, WIRE_VERSION, "p", "e1", {"dtype": "float32"}, msgspec.Raw(layout)
            ),
            0,
        )
        self.consumer.peer_opened(P, "memory", 0)
        return self

    def start(self) -> "Reader":
        self.consumer.start(R, [[5, 6]], range(0, 8), now=0)
        return self

    def advance(self, now: float, engine_seen_at: float = math.inf) -> list[str]:
        """Return the reasons for which the request has failed or was abandoned, if any."""
        self.consumer.advance(now, engine_seen_at)
        for action in self.consumer.outbox.take_actions():
            if isinstance(action, Send):
                self.sent.append((now, action.message))
            if isinstance(action, Send) and isinstance(action.message, Heartbeat):
                self.consumer.receive(CONTROL, HeartbeatReply("e1", action.message.beat, []), now)
            elif isinstance(action, StopRead):
                self.consumer.read_ended(R, P, "cancelled", now)
        return list(
            dict.fromkeys(
                e.reason
                for e in self.consumer.outbox.take_events()
                if isinstance(e, TransferFailed | TransferAbandoned)
            )
        )


def test_handshake_timeout_bounds_the_wait_for_a_producers_first_word() -> None:
    reader = Reader().track().start()
    assert reader.advance(7 - EARLIER) == []
    assert reader.advance(7) == [f"the producer did not answer the handshake within 7 s ({SIDE})"]


def test_read_timeout_bounds_one_read() -> None:
    reader = Reader().track().shake_hands().start()
    assert reader.advance(11 - EARLIER) == []
    assert reader.advance(11) == ["the read did not finish within 11 s"]


def test_confirm_timeout_bounds_the_wait_for_the_confirmation() -> None:
    reader = Reader(receive_timeout=100).track().shake_hands().start()
    reader.consumer.read_ended(R, P, None, now=5)
    assert reader.advance(5 + 13 - EARLIER) == []
    assert reader.advance(5 + 13) == ["the producer did not confirm the read within 13 s"]


@pytest.mark.parametrize("stage", ["shaking hands", "reading", "confirming"])
def test_receive_timeout_bounds_the_whole_whatever_the_parts_may_take(stage: str) -> None:
    reader = Reader(handshake_timeout=100, read_timeout=100, confirm_timeout=100).track()
    if stage != "shaking hands":
        reader.shake_hands()
    reader.start()
    if stage == "confirming":
        reader.consumer.read_ended(R, P, None, now=5)
    assert reader.advance(19 - EARLIER) == []
    assert reader.advance(19) == ["the KV did not arrive within 19 s"]
    assert reader.consumer.num_transfers == 0


def test_queue_timeout_bounds_how_long_blocks_are_held_for_a_request_in_the_queue() -> None:
    reader = Reader().track().shake_hands()
    reader.advance(31 - EARLIER)
    assert not any(map(_is_detach, reader.sent))
    reader.advance(31)
    assert any(map(_is_detach, reader.sent))
    reader.start()
    assert reader.advance(32) == ["the decode engine allocated no blocks within 31 s"]


def test_step_timeout_bounds_how_long_leases_are_renewed_for_an_engine_that_hangs() -> None:
    reader = Reader(queue_timeout=1000).track().shake_hands()
    for now in range(10, 100, 10):
        reader.advance(now, engine_seen_at=20)
    # A heartbeat is due every 10 s: a sixth of the lease.
    assert [now for now, message in reader.sent if isinstance(message, Heartbeat)] == [
        10,
        20,
        30,
        40,
        50,
    ]
    reader.advance(100, engine_seen_at=99)
    assert isinstance(reader.sent[-1][1], Heartbeat)


def _is_detach(sent: tuple[float, object]) -> bool:
    return isinstance(sent[1], Detach)


def test_engine_ttl_bounds_how_long_an_idle_producer_is_remembered() -> None:
    reader = Reader().track().shake_hands()
    reader.consumer.settle(R, now=1)
    reader.consumer.outbox.take_actions()
    reader.consumer.advance(29 - EARLIER)
    assert len(reader.consumer.peers) == 1
    reader.consumer.advance(29)
    assert len(reader.consumer.peers) == 0
    assert ClosePeer(P, CONTROL) in reader.consumer.outbox.take_actions()


def test_an_engine_ttl_of_zero_forgets_nobody() -> None:
    reader = Reader(engine_ttl=0).track().shake_hands()
    reader.consumer.settle(R, now=1)
    reader.consumer.advance(10**9)
    assert len(reader.consumer.peers) == 1


def producer() -> Producer:
    return Producer(settings().producer, TicketKey(SECRET), PushTicketKey(SECRET), no_writers())


def test_kv_lease_duration_bounds_how_long_blocks_are_kept_for_nobody() -> None:
    kept = producer()
    kept.grant(A, 1, now=0)
    kept.advance(60 - EARLIER)
    assert kept.outbox.take_events() == []
    kept.advance(60)
    assert kept.outbox.take_events() == [LeaseEnded(A, LeaseEnd.EXPIRED)]


def test_a_heartbeat_keeps_blocks_for_two_thirds_of_the_lease_from_then_on() -> None:
    kept, route = producer(), Route(b"d")
    kept.grant(A, 1, now=0)
    kept.receive(route, Heartbeat("e1", 1, ["a"]), now=50)
    kept.advance(50 + 40 - EARLIER)
    assert kept.outbox.take_events() == []
    kept.receive(route, Confirm("e1", "a", "d/r/0"), now=50 + 40)
    kept.advance(50 + 40)
    assert kept.outbox.take_events() == [LeaseEnded(A, LeaseEnd.EXPIRED)]
    assert [
        reply.message.reason
        for reply in take_replies(kept.outbox)
        if isinstance(reply.message, Refused)
    ] == ["the lease ended before the read was confirmed"]


def test_grant_wait_bounds_how_long_a_reader_is_believed_before_its_lease_begins() -> None:
    kept = producer()
    kept.receive(
        Route(b"d"), Attach(TicketKey(SECRET).sign(ticket()), "d/r/0", "memory", []), now=0
    )
    kept.advance(23 - EARLIER)
    assert take_replies(kept.outbox) == []
    kept.advance(23)
    [reply] = take_replies(kept.outbox)
    assert isinstance(reply.message, Refused)
    assert reply.message.reason == "no lease was granted within 23 s"


def test_leg_wait_bounds_how_long_a_registration_waits_for_its_prefill_leg() -> None:
    push_ticket = PushTicketKey(SECRET).sign(PushTicket("h1", "p", "e1", "p-host", 5600, 1))
    waiting = producer()
    waiting.receive(
        Route(b"d"),
        PushRegistration(
            "e1", "d/r/0", "r", "d", "d-host", 5600, 1, 60, "h1", push_ticket=push_ticket
        ),
        now=0,
    )
    waiting.advance(41 - EARLIER)
    assert take_replies(waiting.outbox) == []
    waiting.advance(41)
    [reply] = take_replies(waiting.outbox)
    assert isinstance(reply.message, Refused)
    assert "no prefill leg for this request arrived within 41 s" in reply.message.reason


def test_every_deadline_is_told_in_time_to_whoever_sleeps_until_it() -> None:
    assert Reader().track().start().consumer.next_deadline() == 7
    # The heartbeat interval is a sixth of the lease, so the next heartbeat is due before the read
    # times out.
    assert Reader().track().shake_hands().start().consumer.next_deadline() == 10
    assert Reader(read_timeout=3).track().shake_hands().start().consumer.next_deadline() == 3
    kept = producer()
    kept.grant(A, 1, now=0)
    assert kept.next_deadline() == 60
