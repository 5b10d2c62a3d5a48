"""Tests the tcp transport against producers that it dials: for any behaviour of a producer, an
ended read stays ended, and only the transfers of that producer fail.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from tests.transports.sides import tcp_side
from tests.transports.tcp_peers import (
    BLOCK,
    BLOCKS,
    DEADLINE_S,
    PEER,
    Liar,
    Memory,
    all_blocks,
    assert_still_serves,
    prove_to,
    receive,
    rest_of,
    take_request,
    wait,
)

from kvferry.errors import TransportError
from kvferry.testing.transport_pairs import SpawnedFarSide
from kvferry.transports.base import Segments, TransportOffer
from kvferry.transports.tcp import client as tcp_client
from kvferry.transports.tcp import wire
from kvferry.transports.tcp.transport import TcpTransport
from kvferry.types import Region


def test_a_cancelled_read_has_ended_whatever_its_producer_sends_later(near: Memory) -> None:
    """Half of the bytes arrive before the cancellation; the later half is discarded."""
    has_sent_half, may_go_on, is_over = threading.Event(), threading.Event(), threading.Event()

    def send_in_halves(connection: socket.socket) -> None:
        total = take_request(connection)
        connection.sendall(wire.pack_reply() + b"\7" * (total // 2))
        has_sent_half.set()
        assert may_go_on.wait(DEADLINE_S)
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"\7" * (total - total // 2))
            rest_of(connection)
        is_over.set()

    with Liar(send_in_halves).offered() as offer:
        near.transport.connect(PEER, offer, near.regions)
        handle = near.transport.read(PEER, all_blocks())
        assert has_sent_half.wait(DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        while np.count_nonzero(near.bytes == 7) < BLOCKS * BLOCK // 2:
            assert time.monotonic() < deadline
            assert near.transport.poll() == []
        near.transport.cancel(handle)
        assert wait(near.transport, handle).error == "cancelled"
        near.bytes[:] = 99
        may_go_on.set()
        assert is_over.wait(DEADLINE_S)
        assert np.all(near.bytes == 99)


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (lambda connection: None, "closed|reset"),
        (
            lambda connection: connection.sendall(wire.pack_reply()),
            "without a request|closed|reset",
        ),
        (
            lambda connection: (
                take_request(connection),
                connection.sendall(wire.pack_reply("go away")),
            ),
            "go away",
        ),
        (
            lambda connection: (take_request(connection), connection.sendall(b"\xff" * 64)),
            "not possible",
        ),
        (
            lambda connection: (
                take_request(connection),
                connection.sendall(wire.pack_reply() + b"\7" * 5000),
            ),
            "closed|reset",
        ),
    ],
    ids=["silent", "eager", "refusing", "babbling", "dying"],
)
def test_a_producer_that_lies_fails_its_transfers_and_no_others(
    near: Memory, far: Memory, does: Callable[[socket.socket], None], why: str
) -> None:
    with Liar(does).offered() as offer:
        near.transport.connect(PEER, offer, near.regions)
        with contextlib.suppress(TransportError):  # the peer may already be known as bad
            completion = wait(near.transport, near.transport.read(PEER, all_blocks()))
            assert completion.error is not None
            assert any(word in completion.error.lower() for word in why.split("|")), (
                completion.error
            )
        near.transport.disconnect(PEER)
        assert_still_serves(near, far)


def test_whoever_answers_with_another_greeting_is_no_peer(near: Memory) -> None:
    """Every connection sends the wrong greeting, because the first connection may fail before a
    transfer waits for it.
    """
    with Liar(
        lambda connection: None, greeting=b"220 mail.example.com ESMTP ready\r\n"
    ).offered() as offer:
        near.transport.connect(PEER, offer, near.regions)
        assert "not kvferry" in str(
            wait(near.transport, near.transport.read(PEER, all_blocks())).error
        )


def test_whoever_took_the_port_of_a_producer_is_not_believed(near: Memory) -> None:
    """The impostor has copied the greeting from another connection, but does not know the token."""
    with Liar(
        lambda connection: connection.sendall(b"\7" * 1000), known=b"u" * wire.TOKEN_BYTES
    ).offered() as offer:
        near.transport.connect(PEER, offer, near.regions)
        assert "is not far" in str(
            wait(near.transport, near.transport.read(PEER, all_blocks())).error
        )
        assert not near.bytes.any()


def test_one_connection_that_fails_leaves_the_others_alone(near: Memory) -> None:
    """The producer serves only the first connection, so the other transfers wait for it."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        offer = wire.TcpOffer("127.0.0.1", listener.getsockname()[1], b"t" * wire.TOKEN_BYTES)
        near.transport.connect(
            PEER, TransportOffer("tcp", "", msgspec.msgpack.encode(offer)), near.regions
        )
        handles = {near.transport.read(PEER, all_blocks()) for _ in range(6)}
        listener.settimeout(DEADLINE_S)
        first = stack.enter_context(listener.accept()[0])
        first.settimeout(DEADLINE_S)
        assert prove_to(first, offer.token)
        thread = threading.Thread(target=serve_all, args=(first,), daemon=True)
        thread.start()
        listener.setblocking(False)
        deadline = time.monotonic() + DEADLINE_S
        while handles:
            assert time.monotonic() < deadline
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
            for completion in near.transport.poll():
                assert completion.ok, completion.error
                handles.remove(completion.handle)
        near.transport.disconnect(PEER)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "host",
    ["fe80::1%nope", "fe80::1%" + "a" * 70, "a" * 64 + ".example", "a..b", "no-such-host.invalid"],
)
def test_a_host_that_cannot_be_resolved_fails_its_own_transfers(
    near: Memory, far: Memory, host: str
) -> None:
    unknown = msgspec.msgpack.encode(wire.TcpOffer(host, 9, b"t" * wire.TOKEN_BYTES))
    near.transport.connect(PEER, TransportOffer("tcp", "", unknown), near.regions)
    assert host in str(wait(near.transport, near.transport.read(PEER, all_blocks())).error)
    assert_still_serves(near, far)


def test_a_producer_that_says_nothing_is_given_up(
    near: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_client, "STALL_TIMEOUT_S", 0.3)
    is_over = threading.Event()

    def say_nothing(connection: socket.socket) -> None:
        take_request(connection)
        assert is_over.wait(DEADLINE_S)

    with Liar(say_nothing).offered() as offer:
        near.transport.connect(PEER, offer, near.regions)
        assert "no byte came" in str(
            wait(near.transport, near.transport.read(PEER, all_blocks())).error
        )
        is_over.set()


def test_a_producer_that_was_stopped_sends_nothing_into_memory_of_another() -> None:
    """The same with a real producer: SIGSTOP stops it while it sends, and SIGCONT resumes it when
    our memory has another owner.
    """
    far, side = SpawnedFarSide(tcp_side), tcp_side()
    try:
        far.fill(1)
        side.memory[:] = 0
        side.transport.connect(PEER, far.offer, far.regions)
        region = len(side.regions) - 1
        blocks = np.arange(640, dtype=np.int64) * 65536
        handle = side.transport.read(
            PEER, [Segments(region, region, 65536, blocks, blocks[::-1].copy())]
        )
        deadline = time.monotonic() + DEADLINE_S
        while not side.memory[
            ::65536
        ].any():  # scanning all bytes would take as long as receiving many of them
            assert time.monotonic() < deadline
        os.kill(far.pid, signal.SIGSTOP)
        try:
            side.transport.cancel(handle)
            assert wait(side.transport, handle).error == "cancelled"
            side.memory[:] = 77
        finally:
            os.kill(far.pid, signal.SIGCONT)
        # The producer serves again, on another connection, and no other byte was written.
        few = np.zeros(1, np.int64)
        assert wait(side.transport, side.transport.read(PEER, [Segments(0, 0, 64, few, few)])).ok
        assert np.count_nonzero(side.memory != 77) in range(1, 65)
    finally:
        far.close()
        side.close()


def test_more_transfers_than_connections_all_arrive(near: Memory, far: Memory) -> None:
    near.transport.connect(PEER, far.transport.offer(), far.regions)
    offsets = np.arange(BLOCKS, dtype=np.int64) * BLOCK
    handles = {
        near.transport.read(PEER, [Segments(0, 0, BLOCK, offsets[n : n + 1], offsets[n : n + 1])])
        for n in range(BLOCKS)
    }
    deadline = time.monotonic() + DEADLINE_S
    while handles:
        assert time.monotonic() < deadline
        for completion in near.transport.poll():
            assert completion.ok, completion.error
            handles.remove(completion.handle)
    assert np.all(near.bytes[BLOCK:-BLOCK] == 7)


def test_a_host_may_be_named(near: Memory) -> None:
    content = np.full(BLOCK, 7, np.uint8)
    regions = [Region("kv", content.ctypes.data, 64, 64, 64)]
    named = TcpTransport("localhost", "localhost")
    assert named.register(regions)
    near.transport.connect(PEER, named.offer(), regions)
    zero = np.zeros(1, np.int64)
    assert wait(near.transport, near.transport.read(PEER, [Segments(0, 0, 64, zero, zero)])).ok
    named.close()


@pytest.mark.parametrize(
    "offer",
    [
        ("", 5, b"t" * 32),
        ("h", 0, b"t" * 32),
        ("h", 1 << 16, b"t" * 32),
        ("h", 5, b"short"),
        ("h", 5),
        "text",
    ],
)
def test_offers_that_lead_nowhere_are_refused(near: Memory, offer: object) -> None:
    with pytest.raises(TransportError):
        near.transport.connect(
            PEER, TransportOffer("tcp", "", msgspec.msgpack.encode(offer)), near.regions
        )


def test_connections_that_are_no_longer_needed_are_closed(
    near: Memory, far: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_client, "IDLE_TIMEOUT_S", 0.2)
    before = len(os.listdir("/proc/self/fd"))
    assert_still_serves(near, far)
    deadline = time.monotonic() + DEADLINE_S
    while len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < deadline, "connections were kept"
        time.sleep(0.02)
    assert_still_serves(near, far)


def serve_all(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while header := receive(connection, wire.HEADER_BYTES):
            request = wire.unpack_header(header)
            receive(connection, request.num_descriptors * 16)
            connection.sendall(wire.pack_reply() + b"\7" * request.total_bytes)
