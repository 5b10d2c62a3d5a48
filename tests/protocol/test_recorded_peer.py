"""Replays a peer of the wire version before, recorded by `record_peer.py`, against real engines of
this version: as the consumer of a P, and as the producer of a D.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.connectors.pair import DEADLINE_S, Blocks, EngineRequest, EngineSide, step_until
from tests.connectors.test_push import D_ID, P_ID, Legs, closed, push_side

from kvferry.protocol import messages as codec
from kvferry.protocol.messages import (
    OLDEST_WIRE_VERSION,
    WIRE_VERSION,
    Attach,
    Confirm,
    Confirmed,
    HandshakeReply,
    HandshakeRequest,
    Message,
    PushOffer,
    PushRegistration,
)
from kvferry.protocol.planning.geometry import geometry_from_layout
from kvferry.transports.base import Received
from kvferry.transports.memory import MemoryControlTransport, MemoryNetwork, MemoryTransport

FILE = Path(__file__).parent / "recorded" / f"wire_{WIRE_VERSION - 1}.msgpack"
RECORDING: dict[str, Any] = msgspec.msgpack.decode(FILE.read_bytes())
TOKENS = list(range(100, 110))
PULL, PUSH = "pull", "read"
MODES = [PULL, "read", "written", "written without a fence"]


def frames(mode: str, sender: str) -> list[tuple[Message, bytes]]:
    return [(codec.decode(f), f) for who, f in RECORDING[mode]["frames"] if who == sender]


def frame(mode: str, kind: type[Message]) -> bytes:
    """Return the only recorded frame of this kind. P and D send different kinds."""
    [found] = [f for _, f in RECORDING[mode]["frames"] if isinstance(codec.decode(f), kind)]
    return bytes(found)


def layout_of(reply: bytes) -> dict[str, Any]:
    """Return the layout in a HandshakeReply, as the peer wrote it."""
    layout = msgspec.msgpack.decode(reply)["layout"]
    assert isinstance(layout, dict)
    return layout


def test_the_recording_is_of_the_version_before() -> None:
    assert RECORDING["wire_version"] == OLDEST_WIRE_VERSION == WIRE_VERSION - 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sender", ["P", "D"])
def test_each_frame_has_the_meaning_that_it_had(mode: str, sender: str) -> None:
    """This version writes the same bytes for each message, except that layouts have new fields."""
    for message, recorded in frames(mode, sender):
        if isinstance(message, HandshakeReply):
            layout = codec.decode_layout(bytes(message.layout))
            written = msgspec.msgpack.decode(codec.encode_layout(layout))
            for region in written["regions"]:
                assert region.pop("state_heads") == 0
            assert written == layout_of(recorded)
        else:
            assert codec.encode(message) == recorded


# -- the old peer is D --


class OldConsumer:
    """Sends a recorded D's frames and returns P's answers."""

    def __init__(self, mode: str, network: MemoryNetwork, port: int) -> None:
        self.mode = mode
        self.transport = MemoryControlTransport(network)
        self.side = f"tcp://memory:{port}"
        self.control = ""

    def send(self, kind: type[Message]) -> None:
        to = self.side if kind is HandshakeRequest else self.control
        self.transport.send(to, frame(self.mode, kind))

    def receive(self, *sides: EngineSide) -> bytes:
        received: list[bytes] = []

        def has_come() -> bool:
            received.extend(
                event.frame for event in self.transport.poll(0) if isinstance(event, Received)
            )
            return bool(received)

        step_until(has_come, *sides)
        [found] = received
        return found

    def shake_hands(self, *sides: EngineSide) -> None:
        """Check that this P's answer is the old P's, apart from addresses and new fields."""
        self.send(HandshakeRequest)
        answer, old = self.receive(*sides), frame(self.mode, HandshakeReply)
        found, expected = layout_of(answer), layout_of(old)
        self.control = found["control_address"]
        for layout in (found, expected):
            del layout["control_address"], layout["offers"]
            for region in layout["regions"]:
                del region["address"]
                region.pop("state_heads", None)
        assert found == expected
        replies = [msgspec.msgpack.decode(each) | {"layout": None} for each in (answer, old)]
        assert replies[0] == replies[1]


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


def test_an_old_d_pulls_from_this_p(network: MemoryNetwork) -> None:
    p = EngineSide("p", network, kv_lease_duration=600)
    params = p.prefill(EngineRequest("a", TOKENS), [5, 6, 7])
    assert params == RECORDING[PULL]["params"]
    old = OldConsumer(PULL, network, params["remote_port"])
    with closing(old.transport):
        old.shake_hands(p)
        old.send(Attach)
        old.send(Confirm)
        assert old.receive(p) == frame(PULL, Confirmed)
        step_until(lambda: "a" in p.seen.finished_sending, p)
    closed(p)


def test_an_old_d_registers_with_this_p_and_reads_while_p_computes(network: MemoryNetwork) -> None:
    p = push_side("p", network, kv_lease_duration=600)
    first = p.prefill(EngineRequest("first", [1, 2, 3, 4]), [31])
    p.scheduler.request_abandoned("first")
    step_until(lambda: "first" in p.seen.finished_sending, p)
    old = OldConsumer(PUSH, network, int(first["remote_port"]))
    with closing(old.transport):
        old.shake_hands(p)
        old.send(PushRegistration)
        legs = Legs(p, p, int(first["remote_port"]))
        legs.registered()
        assert legs.ticket() == RECORDING[PUSH]["ticket"]
        legs.compute(legs.ticket())
        assert old.receive(p) == frame(PUSH, PushOffer)
        old.send(Attach)
        old.send(Confirm)
        assert old.receive(p) == frame(PUSH, Confirmed)
        step_until(lambda: P_ID in p.seen.finished_sending, p)
    closed(p)


# -- the old peer is P --


class OldProducer:
    """Answers each frame of D as a recorded P did. The recorded addresses, which are of another
    process, are replaced by those of this process's memory.
    """

    def __init__(self, mode: str, network: MemoryNetwork, port: int) -> None:
        recording = RECORDING[mode]
        reply = msgspec.msgpack.decode(recording["reply"])
        layout = reply["layout"]
        self.arrays = {}
        for number, region in enumerate(layout["regions"]):
            array = np.random.default_rng(number).integers(
                1, 256, (region["num_blocks"], region["stride_bytes"]), dtype=np.uint8
            )
            region["address"] = array.ctypes.data
            self.arrays[region["name"]] = array
        data = MemoryTransport(network)
        info = codec.decode_layout(msgspec.msgpack.encode(layout))
        assert data.register(geometry_from_layout(info).regions)
        offer = data.offer()
        layout["offers"] = [{"transport": "memory", "reach": offer.reach, "blob": offer.blob}]
        self.side = MemoryControlTransport(network, port)
        self.control = MemoryControlTransport(
            network, int(layout["control_address"].rpartition(":")[2])
        )
        # The recorded P used these numbers; D must get the ports that it had.
        network.next_id()
        network.next_id()
        self.answers: dict[bytes, bytes | None] = {
            codec.encode(HandshakeRequest(1, WIRE_VERSION, 0)): recording["refusal"],
            codec.encode(HandshakeRequest(2, WIRE_VERSION - 1, 0)): msgspec.msgpack.encode(reply),
            frame(mode, Attach): None,
            frame(mode, Confirm): frame(mode, Confirmed),
        }
        if mode == PUSH:
            self.answers[frame(mode, PushRegistration)] = frame(mode, PushOffer)

    def answer(self) -> bool:
        """Answer what has arrived; return whether D has sent every recorded frame."""
        for transport in (self.side, self.control):
            for event in transport.poll(0):
                if isinstance(event, Received):
                    assert event.frame in self.answers, codec.decode(event.frame)
                    answer = self.answers.pop(event.frame)
                    if answer is not None:
                        transport.reply(event.route, answer)
        return not self.answers

    def close(self) -> None:
        self.side.close()
        self.control.close()


def check_arrived(d: EngineSide, old: OldProducer) -> None:
    """Check that the old P's blocks 5, 6, 7 are in D's blocks 1, 2, 3."""
    for layer, ours in d.memory.items():
        assert (ours[[1, 2, 3]].reshape(3, -1) == old.arrays[layer][[5, 6, 7]]).all()
        assert not ours[4:].any()


@pytest.fixture
def old(network: MemoryNetwork, request: pytest.FixtureRequest) -> Iterator[OldProducer]:
    mode = request.param
    port = RECORDING[PULL]["params"]["remote_port"] if mode == PULL else RECORDING[mode]["port"]
    with closing(OldProducer(mode, network, port)) as made:
        yield made


@pytest.mark.parametrize("old", [PULL], indirect=True)
def test_this_d_pulls_from_an_old_p(network: MemoryNetwork, old: OldProducer) -> None:
    d = EngineSide("d", network)
    request = EngineRequest("r", TOKENS, RECORDING[PULL]["params"])
    d.scheduler.on_new_request(request)
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (10, True)
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 10)
    step_until(lambda: old.answer() and "r" in d.seen.finished_recving, d)
    assert d.seen.failed_recving == set()
    check_arrived(d, old)
    closed(d)


@pytest.mark.parametrize("old", [PUSH], indirect=True)
def test_this_d_registers_with_an_old_p(network: MemoryNetwork, old: OldProducer) -> None:
    d = push_side("d", network, kv_lease_duration=600)
    Legs(d, d, 0).begin(RECORDING[PUSH]["ticket"])
    step_until(lambda: old.answer() and D_ID in d.seen.finished_recving, d)
    assert d.seen.failed_recving == set()
    check_arrived(d, old)
    closed(d)


def test_the_deadline_of_a_replay_is_shorter_than_a_heartbeat() -> None:
    """The recording has no heartbeats."""
    assert DEADLINE_S < 600 / 6
