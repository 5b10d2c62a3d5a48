"""Tests that the ZeroMQ control transport accepts no peer without the cluster's secret, survives
all such peers, and leaves no resource behind.
"""

import contextlib
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from tests.ports import reserve_port

from kvferry.errors import ConfigError, TransportError
from kvferry.testing.control_conformance import gather
from kvferry.transports.base import ControlEvent, Disconnected, Received
from kvferry.transports.zmq import CurveKeys, ZmqTransport

KEYS = CurveKeys.from_secret(b"of this test")
DEADLINE_S = 60.0


def opened(keys: CurveKeys = KEYS, silence_s: float = 6.0) -> ZmqTransport:
    return ZmqTransport("127.0.0.1", "127.0.0.1", 0, keys, bind_timeout_s=0.2, silence_s=silence_s)


@pytest.fixture
def transport() -> Iterator[ZmqTransport]:
    made = opened()
    yield made
    made.close()


@pytest.fixture
def friend() -> Iterator[ZmqTransport]:
    made = opened()
    yield made
    made.close()


def port_of(transport: ZmqTransport) -> int:
    return int(transport.address.rpartition(":")[2])


def still_works(transport: ZmqTransport, friend: ZmqTransport) -> bool:
    friend.send(transport.address, b"still there?")
    events = gather(transport, 1, friend)
    return [event.frame for event in events if isinstance(event, Received)] == [b"still there?"]


def events_of_both(
    transport: ZmqTransport, stranger: ZmqTransport
) -> tuple[list[ControlEvent], list[ControlEvent]]:
    """Return the events of both sides up to the first event of the stranger."""
    ours: list[ControlEvent] = []
    theirs: list[ControlEvent] = []
    deadline = time.monotonic() + DEADLINE_S
    while not theirs:
        assert time.monotonic() < deadline
        ours += transport.poll(0.01)
        theirs += stranger.poll(0.01)
    return ours, theirs


def test_keys_follow_from_the_secret_and_from_nothing_else() -> None:
    assert CurveKeys.from_secret(b"a") == CurveKeys.from_secret(b"a")
    assert CurveKeys.from_secret(b"a") != CurveKeys.from_secret(b"b")
    keys = CurveKeys.from_secret(b"a")
    assert (
        len({keys.server_public, keys.server_secret, keys.client_public, keys.client_secret}) == 4
    )
    assert keys.server_secret.decode() not in repr(keys)
    assert keys.client_secret.decode() not in repr(keys)


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="KVFERRY_SECRET_FILE"):
        CurveKeys.from_secret(b"")


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "::", "[::]", ""])
def test_a_wildcard_is_never_advertised(host: str) -> None:
    with pytest.raises(ConfigError, match="advertised"):
        ZmqTransport("127.0.0.1", host, 0, KEYS)


def test_an_address_that_is_not_ours_is_a_mistake_of_the_operator() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.77"):
        ZmqTransport("192.0.2.77", "192.0.2.77", 0, KEYS, bind_timeout_s=0.2)


@pytest.mark.parametrize(
    "keys",
    [
        CurveKeys.from_secret(b"another"),
        CurveKeys(KEYS.server_public, KEYS.server_secret, *zmq.curve_keypair()),
    ],
    ids=["of another cluster", "with the server's key alone"],
)
def test_a_stranger_hears_nothing_and_is_not_heard(
    keys: CurveKeys, transport: ZmqTransport, friend: ZmqTransport
) -> None:
    stranger = opened(keys)
    stranger.send(transport.address, b"let me in")
    ours, theirs = events_of_both(transport, stranger)
    assert ours == []
    assert theirs == [Disconnected(transport.address)]
    stranger.close()
    assert still_works(transport, friend)


def test_a_client_without_encryption_is_not_heard(
    transport: ZmqTransport, friend: ZmqTransport
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(transport.address)
        plain.send(b"let me in")
        assert transport.poll(0.3) == []
        assert still_works(transport, friend)


def test_a_thousand_rapid_connects_and_garbage_neither_kill_nor_block(
    transport: ZmqTransport, friend: ZmqTransport
) -> None:
    garbage = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 8,
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f",
        b"\xff" * 64,
        b"\x00" * 5000,
    ]
    for number in range(1000):
        with (
            socket.create_connection(("127.0.0.1", port_of(transport)), timeout=DEADLINE_S) as raw,
            contextlib.suppress(OSError),
        ):
            raw.sendall(garbage[number % len(garbage)])
        assert transport.poll(0.0) == []
    assert still_works(transport, friend)


def test_half_open_connections_do_not_keep_others_out(
    transport: ZmqTransport, friend: ZmqTransport
) -> None:
    with contextlib.ExitStack() as open_ones:
        for _ in range(100):
            open_ones.enter_context(
                socket.create_connection(("127.0.0.1", port_of(transport)), timeout=DEADLINE_S)
            ).sendall(b"\xff\x00\x00")
        assert still_works(transport, friend)


def test_a_message_of_several_parts_is_dropped_and_counted(
    transport: ZmqTransport, friend: ZmqTransport
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as member:
        member.linger = 0
        member.curve_serverkey, member.curve_publickey, member.curve_secretkey = (
            KEYS.server_public,
            KEYS.client_public,
            KEYS.client_secret,
        )
        member.connect(transport.address)
        member.send_multipart([b"two", b"parts"])
        member.send(b"one")
        assert [event.frame for event in gather(transport, 1) if isinstance(event, Received)] == [
            b"one"
        ]
        assert transport.dropped_frames == 1
    assert still_works(transport, friend)


def test_a_successor_waits_for_the_port_of_a_dying_predecessor() -> None:
    port = reserve_port()
    first = ZmqTransport("127.0.0.1", "127.0.0.1", port, KEYS)
    dying = threading.Timer(0.3, first.close)
    dying.start()
    second = ZmqTransport("127.0.0.1", "127.0.0.1", port, KEYS)
    dying.join()
    assert port_of(second) == port
    second.close()


def test_ipv6_works_where_the_host_has_it() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    near, far = (ZmqTransport("::1", "::1", 0, KEYS) for _ in range(2))
    near.send(far.address, b"six")
    assert far.address.startswith("tcp://[::1]:")
    assert [event.frame for event in gather(far, 1, near) if isinstance(event, Received)] == [
        b"six"
    ]
    near.close()
    far.close()


def test_a_silent_peer_counts_as_gone(transport: ZmqTransport) -> None:
    near, relay = opened(silence_s=0.6), Relay(port_of(transport))
    near.send(relay.address, b"one")
    gather(transport, 1, near)
    relay.freeze()
    assert gather(near, 1, transport) == [Disconnected(relay.address)]
    near.close()
    relay.close()


def test_close_leaves_no_file_and_no_thread() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = held()
    near, far = opened(), opened()
    near.send(far.address, b"one")
    far.send(near.address, b"two")
    near.send("tcp://127.0.0.1:1", b"to nobody")
    gather(far, 1, near)
    files, threads = held()
    assert files > before[0]
    assert threads > before[1]
    near.close()
    far.close()
    deadline = (
        time.monotonic() + DEADLINE_S
    )  # the kernel lists a thread for a short time after it can be joined
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < deadline, (
            f"(files, threads) were {before} before and are {held()}"
        )
        time.sleep(0.01)


class Relay:
    """Forwards the bytes of one connection until it is frozen; then it keeps the connection open
    and sends nothing.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_over = threading.Event()
        self._frozen = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def freeze(self) -> None:
        self._frozen.set()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(DEADLINE_S)

    def _run(self) -> None:
        with (
            self._listener,
            self._listener.accept()[0] as one,
            socket.create_connection(("127.0.0.1", self._port)) as two,
        ):
            while not self._is_over.is_set():
                readable, _, _ = select.select([one, two], [], [], 0.02)
                for end in [] if self._frozen.is_set() else readable:
                    (two if end is one else one).sendall(end.recv(65536))


def test_a_process_without_file_descriptors_left_cannot_dial_and_goes_on(
    transport: ZmqTransport,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit applies to the descriptor number, not to the count of open descriptors: with the
    # limit at the lowest free number, no new socket can be opened.
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(TransportError, match="cannot be dialled"):
            transport.send("tcp://127.0.0.1:9", b"frame")
        assert transport.poll(0) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    transport.send("tcp://127.0.0.1:9", b"frame")
