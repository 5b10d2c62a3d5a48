"""Tests the tcp transport against strangers and peers that dial it: no peer can read or write
memory that was not offered, and no resource remains.
"""

import contextlib
import os
import secrets
import select
import socket
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.transports.tcp_peers import (
    BLOCK,
    BLOCKS,
    DEADLINE_S,
    PEER,
    Memory,
    all_blocks,
    assert_still_serves,
    dial,
    introduce,
    memory,
    receive,
    request,
    rest_of,
)

from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.transports.base import Operation
from kvferry.transports.tcp import server as tcp_server
from kvferry.transports.tcp import wire
from kvferry.transports.tcp.transport import TcpTransport
from kvferry.types import EngineId, Epoch, MemoryKind, PeerId, Region


def test_a_stranger_reads_nothing_and_is_sent_away(
    near: Memory, far: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "PROOF_TIMEOUT_S", 0.2)
    for said in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        secrets.token_bytes(32),
        secrets.token_bytes(48) + request(Operation.READ, (far.first, 64)),
    ):
        with dial(far.offer) as connection:
            connection.sendall(said)
            assert len(rest_of(connection)) <= wire.GREETING_BYTES
    assert_still_serves(near, far)


def test_only_so_many_strangers_are_listened_to_and_peers_come_through(
    near: Memory, far: Memory
) -> None:
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(dial(far.offer)) for _ in range(tcp_server.MAX_UNAUTHENTICATED + 40)
        ]
        assert_still_serves(near, far)
        assert sum(has_been_closed(each) for each in strangers) >= 40


def has_been_closed(connection: socket.socket, within_s: float = 0.0) -> bool:
    """Whether the other side has closed the connection, even if unread bytes remain."""
    poller = select.poll()
    poller.register(connection, select.POLLRDHUP)
    return bool(poller.poll(within_s * 1000))


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("shift", [-1, BLOCKS * BLOCK - 63, BLOCKS * BLOCK, 1 << 40, -(1 << 40)])
def test_a_peer_touches_only_what_was_offered(
    near: Memory, far: Memory, operation: Operation, shift: int
) -> None:
    before = far.bytes.copy()
    with introduce(far.offer) as connection:
        connection.sendall(request(operation, (far.first, 64), (far.first + shift, 64)))
        reply = receive(connection, wire.REPLY_BYTES)
        text = receive(connection, wire.text_bytes_in(reply))
        assert b"memory that was offered" in text
        assert rest_of(connection) == b""
    assert np.array_equal(far.bytes, before)
    assert_still_serves(near, far)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(said=st.binary(min_size=1, max_size=400))
def test_whatever_a_peer_says_the_transport_goes_on(near: Memory, far: Memory, said: bytes) -> None:
    with introduce(far.offer) as connection:
        with contextlib.suppress(OSError):  # the transport may have closed it already
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
        rest_of(connection)
    assert np.all(far.bytes == 7)
    assert_still_serves(near, far)


def test_a_peer_that_takes_nothing_of_what_it_asked_for_is_sent_away(
    near: Memory, far: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "STALL_TIMEOUT_S", 0.3)
    whole = [(far.first, BLOCKS * BLOCK)]
    with introduce(far.offer) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(ConnectionError, TimeoutError):
            for _ in range(200):
                connection.sendall(request(Operation.READ, *whole))
        assert has_been_closed(connection, within_s=DEADLINE_S)
        assert len(rest_of(connection)) < 200 * BLOCKS * BLOCK
    assert_still_serves(near, far)


def test_closing_with_transfers_in_the_queue_leaves_no_socket(far: Memory) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with memory() as near:
        near.transport.connect(PEER, far.transport.offer(), far.regions)
        for _ in range(50):
            near.transport.read(PEER, all_blocks())
        near.transport.poll()
    deadline = time.monotonic() + DEADLINE_S
    while (
        len(os.listdir("/proc/self/fd")) > before
    ):  # the far side closes its sockets when it notices
        assert time.monotonic() < deadline, "sockets were left open"
        time.sleep(0.02)


def test_only_memory_of_the_host_is_carried() -> None:
    transport = TcpTransport("127.0.0.1", "127.0.0.1")
    assert not transport.register([Region("kv", 4096, 64, 64, 1, MemoryKind.VRAM)])
    with pytest.raises(LocalProtocolError):
        transport.offer()
    transport.close()


def test_an_address_that_is_not_ours_is_a_mistake_of_the_operator() -> None:
    content = np.zeros(4096, np.uint8)
    transport = TcpTransport("192.0.2.1", "192.0.2.1")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        transport.register([Region("kv", content.ctypes.data, 64, 64, 64)])
    transport.close()


def test_a_thousand_peers_come_and_go_and_leave_nothing(near: Memory, far: Memory) -> None:
    assert_still_serves(near, far)
    near.transport.disconnect(PEER)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1000):
        peer = PeerId(EngineId(f"far{number}"), Epoch("1"), 0)
        near.transport.connect(peer, far.transport.offer(), far.regions)
        near.transport.disconnect(peer)
    assert_still_serves(near, far)
    near.transport.disconnect(PEER)
    deadline = time.monotonic() + DEADLINE_S
    while len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < deadline, "files were left open"
        time.sleep(0.02)
