"""Conformance cases for control transports: the contract of `kvferry.transports.base`, which any
implementation can run.

    for case in CONTROL_CASES:
        case(make_transport)

`make_transport(port)` opens a transport of the same cluster each time; port 0 is any free port.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvferry.errors import ConfigError, TransportError
from kvferry.transports.base import (
    MAX_MESSAGE_BYTES,
    ControlEvent,
    ControlTransport,
    Disconnected,
    Received,
    Route,
)

__all__ = ["CONTROL_CASES", "TransportMaker", "gather"]

TransportMaker = Callable[[int], ControlTransport]

DEADLINE_S = 20.0
POLL_S = 0.02
MANY = 200


def gather(
    transport: ControlTransport, count: int, *others: ControlTransport
) -> list[ControlEvent]:
    """Poll until `count` events have arrived. The other transports are polled too, and their events
    are discarded.
    """
    events: list[ControlEvent] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(events) < count:
        assert time.monotonic() < deadline, (
            f"only {len(events)} of {count} events came within {DEADLINE_S:g} s: {events[-3:]}"
        )
        events += transport.poll(POLL_S)
        for other in others:
            other.poll(0.0)
    return events


def frames_arrive_whole_and_in_order_and_get_replies(make: TransportMaker) -> None:
    with _two(make) as (near, far):
        sent = [f"{number}".encode() * (number + 1) for number in range(MANY)]
        for frame in sent:
            near.send(far.address, frame)
        arrived = _received(gather(far, MANY, near))
        assert [event.frame for event in arrived] == sent
        assert len({event.route for event in arrived}) == 1
        for event in arrived:
            far.reply(event.route, event.frame[:7])
        answers = _received(gather(near, MANY, far))
        assert [event.frame for event in answers] == [frame[:7] for frame in sent]
        assert {event.route.dialled for event in answers} == {far.address}
        near.reply(answers[0].route, b"and back")
        assert _received(gather(far, 1, near))[0].frame == b"and back"


def addresses_can_be_dialled_and_are_not_wildcards(make: TransportMaker) -> None:
    with _two(make) as (near, far):
        for transport in (near, far):
            assert transport.address.startswith("tcp://")
            assert "*" not in transport.address
            assert "0.0.0.0" not in transport.address
        assert near.address != far.address


def frames_wait_for_a_peer_that_is_not_there_yet(make: TransportMaker) -> None:
    with _two(make) as (near, far):
        address, port = far.address, int(far.address.rpartition(":")[2])
        far.close()
        near.send(address, b"early")
        late = make(port)
        try:
            assert _received(gather(late, 1, near))[0].frame == b"early"
        finally:
            late.close()


def a_queue_that_is_full_refuses(make: TransportMaker) -> None:
    with _two(make) as (near, far):
        address = far.address
        far.close()
        try:
            for _ in range(100_000):
                near.send(address, b"x" * 100)
        except TransportError:
            return
    raise AssertionError("frames for a peer that is not there are queued without end")


def a_lost_peer_is_reported_once_and_can_be_dialled_again(make: TransportMaker) -> None:
    with _two(make) as (near, far):
        address, port = far.address, int(far.address.rpartition(":")[2])
        near.send(address, b"one")
        gather(far, 1, near)
        far.close()
        assert gather(near, 1) == [Disconnected(address)]
        again = make(port)
        try:
            assert near.poll(0.3) == [], (
                "a frame was sent twice, or a disconnect was reported twice"
            )
            near.send(address, b"two")
            assert [event.frame for event in _received(gather(again, 1, near))] == [b"two"]
        finally:
            again.close()


def a_forgotten_peer_is_not_reported_and_can_be_dialled_again(make: TransportMaker) -> None:
    with _two(make) as (near, far):
        near.send(far.address, b"one")
        gather(far, 1, near)
        near.forget(far.address)
        near.forget("tcp://nobody:1")
        assert near.poll(0.2) == []
        near.send(far.address, b"two")
        assert _received(gather(far, 1, near))[0].frame == b"two"


def replies_to_disconnected_peers_are_ignored(make: TransportMaker) -> None:
    with _two(make) as (near, far):
        near.send(far.address, b"one")
        route = _received(gather(far, 1, near))[0].route
        near.close()
        far.poll(0.2)
        far.reply(route, b"too late")
        far.reply(Route(b"nobody"), b"never there")
        far.reply(Route(b"", "tcp://nobody:1"), b"never dialled")
        assert far.poll(0.05) == []


def the_longest_frame_arrives_and_a_longer_one_is_dropped(make: TransportMaker) -> None:
    with _two(make) as (near, far):
        near.send(far.address, b"y" * (MAX_MESSAGE_BYTES + 1))
        near.send(far.address, b"z" * MAX_MESSAGE_BYTES)
        arrived = _received(gather(far, 1, near))
        assert [len(event.frame) for event in arrived] == [MAX_MESSAGE_BYTES]


def waking_ends_a_poll(make: TransportMaker) -> None:
    transport = make(0)
    waker = threading.Timer(0.05, transport.wake)
    waker.start()
    try:
        began = time.monotonic()
        assert transport.poll(DEADLINE_S) == []
        assert time.monotonic() - began < DEADLINE_S / 2, "wake did not end a poll"
        transport.wake()
        assert transport.poll(None) == [], "a wake before the poll was lost"
    finally:
        waker.join()
        transport.close()


def a_port_in_use_is_a_config_error(make: TransportMaker) -> None:
    transport = make(0)
    port = transport.address.rpartition(":")[2]
    refusal = ""
    try:
        make(int(port)).close()
    except ConfigError as error:
        refusal = str(error)
    finally:
        transport.close()
    assert port in refusal, "two transports were bound to one port, or the refusal does not name it"


def nonsense_addresses_are_refused(make: TransportMaker) -> None:
    transport = make(0)
    try:
        for address in ("", "nonsense", "ipc:///etc/passwd", "inproc://x"):
            try:
                transport.send(address, b"x")
            except TransportError:
                continue
            raise AssertionError(f"{address!r} was dialled")
    finally:
        transport.close()


def closing_twice_is_closing_once(make: TransportMaker) -> None:
    transport = make(0)
    transport.close()
    transport.close()
    transport.wake()
    transport.forget("tcp://nobody:1")
    assert transport.poll(0.0) == []


CONTROL_CASES: tuple[Callable[[TransportMaker], None], ...] = (
    frames_arrive_whole_and_in_order_and_get_replies,
    addresses_can_be_dialled_and_are_not_wildcards,
    frames_wait_for_a_peer_that_is_not_there_yet,
    a_queue_that_is_full_refuses,
    a_lost_peer_is_reported_once_and_can_be_dialled_again,
    a_forgotten_peer_is_not_reported_and_can_be_dialled_again,
    replies_to_disconnected_peers_are_ignored,
    the_longest_frame_arrives_and_a_longer_one_is_dropped,
    waking_ends_a_poll,
    a_port_in_use_is_a_config_error,
    nonsense_addresses_are_refused,
    closing_twice_is_closing_once,
)


@contextmanager
def _two(make: TransportMaker) -> Iterator[tuple[ControlTransport, ControlTransport]]:
    near, far = make(0), make(0)
    try:
        yield near, far
    finally:
        near.close()
        far.close()


def _received(events: list[ControlEvent]) -> list[Received]:
    assert all(isinstance(event, Received) for event in events), events
    return [event for event in events if isinstance(event, Received)]
