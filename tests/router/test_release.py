import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

import msgspec
import pytest

from kvferry.errors import TransportError
from kvferry.protocol.messages import (
    Release,
    RetainedTurnReply,
    RetainedTurnRequest,
    decode,
    encode,
)
from kvferry.router.serving.client_request import Handover
from kvferry.router.serving.side_channel import SideChannelSender
from kvferry.transports.base import ControlEvent, ControlTransport, Disconnected, Received, Route
from kvferry.transports.zmq import CurveKeys, ZmqTransport
from kvferry.types import Address

SIDE_CHANNEL = Address("127.0.0.1", 5600)


@dataclass
class WatchedControl:
    """A control transport without a peer: it records what its one thread does with it."""

    refuses: bool = False
    gate: threading.Event = field(default_factory=threading.Event)
    """`send` waits for this event, so that a test can block the thread."""
    sent: list[tuple[str, bytes]] = field(default_factory=list)
    events: list[ControlEvent] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    is_closed: bool = False
    _woken: threading.Event = field(default_factory=threading.Event)

    @property
    def address(self) -> str:
        return "tcp://127.0.0.1:1"

    def send(self, address: str, frame: bytes) -> None:
        self.gate.wait(60)
        self.threads.add(threading.current_thread().name)
        if self.refuses:
            raise TransportError("the queue is full")
        self.sent.append((address, frame))

    def reply(self, route: Route, frame: bytes) -> None:
        raise AssertionError("a router answers nobody")

    def poll(self, timeout_s: float | None) -> list[ControlEvent]:
        self.threads.add(threading.current_thread().name)
        self._woken.wait(timeout_s)
        self._woken.clear()
        events, self.events = self.events, []
        return events

    def wake(self) -> None:
        self._woken.set()

    def forget(self, address: str) -> None:
        return

    def close(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.is_closed = True


def handover(ticket: str | None = "t", side_channel: Address | None = SIDE_CHANNEL) -> Handover:
    return Handover(msgspec.Raw(b"{}"), ticket, side_channel)


def eventually(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not claim():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.005)


def open_control(refuses: bool = False) -> WatchedControl:
    control = WatchedControl(refuses)
    control.gate.set()
    return control


def started(control: ControlTransport, capacity: int = 1024) -> SideChannelSender:
    sender = SideChannelSender(control, capacity)
    sender.start()
    return sender


def test_a_release_presents_the_ticket_at_the_side_channel_it_came_from() -> None:
    control = open_control()
    sender = started(control)
    sender.release(handover("ticket-7", Address("10.0.0.1", 5601)))
    eventually(lambda: sender.sent == 1)
    sender.close()
    [(address, frame)] = control.sent
    assert address == "tcp://10.0.0.1:5601"
    assert decode(frame) == Release(ticket="ticket-7")


def test_one_thread_touches_the_transport_and_closes_it() -> None:
    control = open_control()
    sender = started(control)
    sender.release(handover())
    sender.close()
    assert control.is_closed
    assert control.threads == {"kvferry-release"}
    sender.close()


def test_what_is_queued_is_sent_before_the_end() -> None:
    control = WatchedControl()
    sender = started(control)
    for number in range(50):
        sender.release(handover(f"t{number}"))
    control.gate.set()
    sender.close()
    assert len(control.sent) == 50


def test_a_full_inbox_drops_and_counts_and_never_waits() -> None:
    control = WatchedControl()
    sender = started(control, capacity=4)
    for number in range(100):
        sender.release(handover(f"t{number}"))
    assert sender.dropped >= 94
    control.gate.set()
    sender.close()
    assert sender.sent + sender.dropped == 100


@pytest.mark.parametrize("params", [handover(ticket=None), handover(side_channel=None)])
def test_without_a_ticket_or_an_address_there_is_nothing_to_send(params: Handover) -> None:
    control = open_control()
    sender = started(control)
    sender.release(params)
    sender.close()
    assert (control.sent, sender.dropped) == ([], 1)


def test_a_transport_that_refuses_a_frame_does_not_stop_the_next() -> None:
    control = open_control(refuses=True)
    sender = started(control)
    sender.release(handover())
    eventually(lambda: sender.dropped == 1)
    control.refuses = False
    control.events = [Disconnected("tcp://127.0.0.1:5600")]
    sender.release(handover())
    eventually(lambda: sender.sent == 1)
    sender.close()


def test_a_question_that_was_lost_with_its_connection_is_asked_again() -> None:
    control = open_control()
    sender = started(control)
    answer = sender.query_turn(SIDE_CHANNEL, "w")
    other = sender.query_turn(Address("10.0.0.1", 5601), "x")
    eventually(lambda: len(control.sent) == 2)
    control.events = [Disconnected(f"tcp://{SIDE_CHANNEL}")]
    control.wake()
    eventually(lambda: len(control.sent) == 3)
    (_, first), _, (address, again) = control.sent
    assert (address, again) == (f"tcp://{SIDE_CHANNEL}", first)
    asked = decode(again)
    assert isinstance(asked, RetainedTurnRequest)
    assert asked.wait_s > 0
    control.events = [
        Received(Route(b"", address), encode(RetainedTurnReply(asked.nonce, "w", "params")))
    ]
    control.wake()
    assert answer.result(10) == "params"
    # An answered question is not asked again.
    other.cancel()
    control.events = [Disconnected(address), Disconnected("tcp://10.0.0.1:5601")]
    control.wake()
    sender.close()
    assert len(control.sent) == 3


def test_a_release_arrives_at_a_real_side_channel() -> None:
    keys = CurveKeys.from_secret(b"the secret of this cluster")
    with closing(ZmqTransport("127.0.0.1", "127.0.0.1", 0, keys)) as side_channel:
        host, port = side_channel.address.removeprefix("tcp://").rsplit(":", 1)
        with closing(started(ZmqTransport("127.0.0.1", "127.0.0.1", 0, keys))) as sender:
            sender.release(handover("ticket-8", Address(host, int(port))))
            arrived: list[ControlEvent] = []
            deadline = time.monotonic() + 10
            while not arrived and time.monotonic() < deadline:
                arrived = side_channel.poll(0.1)
    [event] = arrived
    assert isinstance(event, Received)
    assert decode(event.frame) == Release(ticket="ticket-8")


def test_a_release_of_the_last_moment_arrives_too() -> None:
    keys = CurveKeys.from_secret(b"the secret of this cluster")
    with closing(ZmqTransport("127.0.0.1", "127.0.0.1", 0, keys)) as side_channel:
        host, port = side_channel.address.removeprefix("tcp://").rsplit(":", 1)
        sender = started(ZmqTransport("127.0.0.1", "127.0.0.1", 0, keys))
        sender.release(handover("ticket-9", Address(host, int(port))))
        closing_thread = threading.Thread(target=sender.close)
        closing_thread.start()
        arrived: list[ControlEvent] = []
        deadline = time.monotonic() + 10
        while not arrived and time.monotonic() < deadline:
            arrived = side_channel.poll(0.1)
        closing_thread.join(60)
    [event] = arrived
    assert isinstance(event, Received)
    assert decode(event.frame) == Release(ticket="ticket-9")
