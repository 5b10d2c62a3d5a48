"""The tcp plane among strangers, liars and the dead: nobody reads or writes what was not offered, and a read that ended has ended."""

import contextlib
import os
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.planes.sides import tcp_side

from kvferry.errors import ConfigError, LocalProtocolError, TransportError
from kvferry.planes import tcp_client, tcp_server
from kvferry.planes import tcp_wire as wire
from kvferry.planes.tcp import TcpDataPlane
from kvferry.ports.data import Completion, DataPlane, Handle, Pieces, PlaneOffer
from kvferry.testing.plane_sides import SpawnedFar
from kvferry.types import EngineId, Epoch, MemoryKind, PeerId, Region

PEER = PeerId(EngineId("far"), Epoch("1"), 0)
DEADLINE_S = 20.0
BLOCK = 4096
BLOCKS = 64


@dataclass
class Memory:
    """A plane over memory of its own, with some bytes on either side that nobody may touch."""

    plane: TcpDataPlane
    bytes: np.ndarray[tuple[int], np.dtype[np.uint8]]
    regions: list[Region]

    @property
    def offer(self) -> wire.Offer:
        return msgspec.msgpack.decode(self.plane.offer().blob, type=wire.Offer)

    @property
    def first(self) -> int:
        return self.regions[0].address


@contextlib.contextmanager
def memory(fill: int = 0) -> Iterator[Memory]:
    content = np.full((BLOCKS + 2) * BLOCK, fill, np.uint8)
    regions = [Region("kv", content.ctypes.data + BLOCK, BLOCK, BLOCK, BLOCKS)]
    plane = TcpDataPlane("127.0.0.1", "127.0.0.1")
    assert plane.register(regions)
    try:
        yield Memory(plane, content, regions)
    finally:
        plane.close()


@pytest.fixture
def near() -> Iterator[Memory]:
    with memory() as made:
        yield made


@pytest.fixture
def far() -> Iterator[Memory]:
    with memory(fill=7) as made:
        yield made


def all_blocks() -> list[Pieces]:
    offsets = np.arange(BLOCKS, dtype=np.int64) * BLOCK
    return [Pieces(0, 0, BLOCK, offsets, offsets[::-1].copy())]


def wait(plane: DataPlane, handle: Handle) -> Completion:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        for completion in plane.poll():
            assert completion.handle == handle
            return completion
        assert time.monotonic() < deadline, "the transfer has not ended"
        time.sleep(0.001)


def dial(offer: wire.Offer) -> socket.socket:
    connection = socket.create_connection((offer.host, offer.port), DEADLINE_S)
    connection.settimeout(DEADLINE_S)
    return connection


def introduce(offer: wire.Offer) -> socket.socket:
    """A connection of somebody who has seen the offer."""
    connection = dial(offer)
    ours = secrets.token_bytes(wire.NONCE_BYTES)
    nonces = wire.nonce_in(receive(connection, wire.GREETING_BYTES)) + ours
    connection.sendall(ours + wire.prove(offer.token, wire.Role.DIALLER, nonces))
    assert wire.is_proof(receive(connection, wire.PROOF_BYTES), offer.token, wire.Role.PRODUCER, nonces)
    return connection


def receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count and (part := connection.recv(count - len(received))):
        received += part
    return received


def rest_of(connection: socket.socket) -> bytes:
    """Until the other side closes, however it does that."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            received += part
    return received


def request(operation: wire.Operation, *runs: tuple[int, int]) -> bytes:
    rows = np.array(runs, np.int64)
    return wire.pack_header(operation, rows) + rows.tobytes()


def assert_still_serves(near: Memory, far: Memory) -> None:
    near.plane.connect(PEER, far.plane.offer(), far.regions)
    near.bytes[:] = 0
    handle = near.plane.read(PEER, all_blocks())
    assert wait(near.plane, handle).ok
    assert np.all(near.bytes[BLOCK:-BLOCK] == 7)
    assert not near.bytes[:BLOCK].any()
    assert not near.bytes[-BLOCK:].any()


def test_a_stranger_reads_nothing_and_is_sent_away(near: Memory, far: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "PROOF_TIMEOUT_S", 0.2)
    for said in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        secrets.token_bytes(32),
        secrets.token_bytes(48) + request(wire.Operation.READ, (far.first, 64)),
    ):
        with dial(far.offer) as connection:
            connection.sendall(said)
            assert len(rest_of(connection)) <= wire.GREETING_BYTES
    assert_still_serves(near, far)


def test_only_so_many_strangers_are_listened_to_and_peers_come_through(near: Memory, far: Memory) -> None:
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(dial(far.offer)) for _ in range(tcp_server.MAX_STRANGERS + 40)]
        assert_still_serves(near, far)
        sent_away = [each for each in strangers if len(rest_of_ready(each)) > wire.GREETING_BYTES or is_closed(each)]
        assert len(sent_away) >= 40


def rest_of_ready(connection: socket.socket) -> bytes:
    return connection.recv(wire.GREETING_BYTES)


def is_closed(connection: socket.socket) -> bool:
    ready, _, _ = select.select([connection], [], [], 0.0)
    if not ready:
        return False
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("operation", list(wire.Operation))
@pytest.mark.parametrize("shift", [-1, BLOCKS * BLOCK - 63, BLOCKS * BLOCK, 1 << 40, -(1 << 40)])
def test_a_peer_touches_only_what_was_offered(near: Memory, far: Memory, operation: wire.Operation, shift: int) -> None:
    before = far.bytes.copy()
    with introduce(far.offer) as connection:
        connection.sendall(request(operation, (far.first, 64), (far.first + shift, 64)))
        reply = receive(connection, wire.REPLY_BYTES)
        text = receive(connection, wire.text_bytes_in(reply))
        assert b"memory that was offered" in text
        assert rest_of(connection) == b""
    assert np.array_equal(far.bytes, before)
    assert_still_serves(near, far)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.binary(min_size=1, max_size=400))
def test_whatever_a_peer_says_the_plane_goes_on(near: Memory, far: Memory, said: bytes) -> None:
    with introduce(far.offer) as connection:
        with contextlib.suppress(OSError):  # it may have hung up already
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
        rest_of(connection)
    assert np.all(far.bytes == 7)
    assert_still_serves(near, far)


def test_a_peer_that_takes_nothing_of_what_it_asked_for_is_sent_away(near: Memory, far: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "STALL_TIMEOUT_S", 0.3)
    whole = [(far.first, BLOCKS * BLOCK)]
    with introduce(far.offer) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(ConnectionError, TimeoutError):
            for _ in range(200):
                connection.sendall(request(wire.Operation.READ, *whole))
        time.sleep(1.5)
        assert len(rest_of(connection)) < 200 * BLOCKS * BLOCK
    assert_still_serves(near, far)


@dataclass
class Liar:
    """A producer that greets as it should and then does what a test says, on each connection."""

    does: Callable[[socket.socket], None]
    token: bytes = b"t" * wire.TOKEN_BYTES
    known: bytes = b""
    """Another token than it offers."""

    @contextlib.contextmanager
    def offered(self) -> Iterator[PlaneOffer]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=self._serve, args=(listener,), daemon=True)
            thread.start()
            offer = wire.Offer("127.0.0.1", listener.getsockname()[1], self.token)
            yield PlaneOffer("tcp", "", msgspec.msgpack.encode(offer))
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(DEADLINE_S)
            assert not thread.is_alive()

    def _serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(ConnectionError):
                    connection.settimeout(DEADLINE_S)
                    prove_to(connection, self.known or self.token)
                    self.does(connection)


def take_request(connection: socket.socket) -> int:
    header = wire.unpack_header(receive(connection, wire.HEADER_BYTES))
    receive(connection, header.num_runs * 16)
    return header.total_bytes


def test_a_cancelled_read_has_ended_whatever_its_producer_sends_later(near: Memory) -> None:
    """Half of the bytes come before, half after: those find nobody."""
    has_sent_half, may_go_on, is_over = threading.Event(), threading.Event(), threading.Event()

    def send_in_halves(connection: socket.socket) -> None:
        total = take_request(connection)
        connection.sendall(wire.pack_refusal("") + b"\7" * (total // 2))
        has_sent_half.set()
        assert may_go_on.wait(DEADLINE_S)
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"\7" * (total - total // 2))
            rest_of(connection)
        is_over.set()

    with Liar(send_in_halves).offered() as offer:
        near.plane.connect(PEER, offer, near.regions)
        handle = near.plane.read(PEER, all_blocks())
        assert has_sent_half.wait(DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        while np.count_nonzero(near.bytes == 7) < BLOCKS * BLOCK // 2:
            assert time.monotonic() < deadline
            assert near.plane.poll() == []
        near.plane.cancel(handle)
        assert wait(near.plane, handle).error == "cancelled"
        near.bytes[:] = 99
        may_go_on.set()
        assert is_over.wait(DEADLINE_S)
        assert np.all(near.bytes == 99)


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (lambda connection: None, "closed|reset"),
        (lambda connection: connection.sendall(wire.pack_refusal("")), "nobody has asked|closed|reset"),
        (lambda connection: (take_request(connection), connection.sendall(wire.pack_refusal("go away"))), "go away"),
        (lambda connection: (take_request(connection), connection.sendall(b"\xff" * 64)), "not possible"),
        (lambda connection: (take_request(connection), connection.sendall(wire.pack_refusal("") + b"\7" * 5000)), "closed|reset"),
    ],
    ids=["silent", "eager", "refusing", "babbling", "dying"],
)
def test_a_producer_that_lies_fails_its_transfers_and_no_others(
    near: Memory, far: Memory, does: Callable[[socket.socket], None], why: str
) -> None:
    with Liar(does).offered() as offer:
        near.plane.connect(PEER, offer, near.regions)
        with contextlib.suppress(TransportError):  # it may be known as bad already
            completion = wait(near.plane, near.plane.read(PEER, all_blocks()))
            assert completion.error is not None
            assert any(word in completion.error.lower() for word in why.split("|")), completion.error
        near.plane.disconnect(PEER)
        assert_still_serves(near, far)


def test_whoever_answers_with_another_greeting_is_no_peer(near: Memory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        offer = wire.Offer("127.0.0.1", listener.getsockname()[1], b"t" * wire.TOKEN_BYTES)
        near.plane.connect(PEER, PlaneOffer("tcp", "", msgspec.msgpack.encode(offer)), near.regions)
        handle = near.plane.read(PEER, all_blocks())
        listener.settimeout(DEADLINE_S)
        with listener.accept()[0] as connection:
            connection.sendall(b"220 mail.example.com ESMTP ready\r\n")
            assert "no kvferry" in str(wait(near.plane, handle).error)


def test_whoever_took_the_port_of_a_producer_is_not_believed(near: Memory) -> None:
    """It has read the greeting off another connection, but never saw the token."""
    with Liar(lambda connection: connection.sendall(b"\7" * 1000), known=b"u" * wire.TOKEN_BYTES).offered() as offer:
        near.plane.connect(PEER, offer, near.regions)
        assert "is not far" in str(wait(near.plane, near.plane.read(PEER, all_blocks())).error)
        assert not near.bytes.any()


def test_one_connection_that_fails_leaves_the_others_alone(near: Memory) -> None:
    """The producer serves the first that dials, and nobody else: other transfers wait for that connection."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        offer = wire.Offer("127.0.0.1", listener.getsockname()[1], b"t" * wire.TOKEN_BYTES)
        near.plane.connect(PEER, PlaneOffer("tcp", "", msgspec.msgpack.encode(offer)), near.regions)
        handles = {near.plane.read(PEER, all_blocks()) for _ in range(6)}
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
            for completion in near.plane.poll():
                assert completion.ok, completion.error
                handles.remove(completion.handle)
        near.plane.disconnect(PEER)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def prove_to(connection: socket.socket, token: bytes) -> bool:
    nonce = b"n" * wire.NONCE_BYTES
    connection.sendall(wire.greeting(nonce))
    nonces = nonce + receive(connection, wire.NONCE_BYTES + wire.PROOF_BYTES)[: wire.NONCE_BYTES]
    connection.sendall(wire.prove(token, wire.Role.PRODUCER, nonces))
    return len(nonces) == 2 * wire.NONCE_BYTES


def serve_all(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while header := receive(connection, wire.HEADER_BYTES):
            request = wire.unpack_header(header)
            receive(connection, request.num_runs * 16)
            connection.sendall(wire.pack_refusal("") + b"\7" * request.total_bytes)


@pytest.mark.parametrize("host", ["fe80::1%nope", "fe80::1%" + "a" * 70, "a" * 64 + ".example", "a..b", "no-such-host.invalid"])
def test_a_host_that_cannot_be_resolved_fails_its_own_transfers(near: Memory, far: Memory, host: str) -> None:
    unknown = msgspec.msgpack.encode(wire.Offer(host, 9, b"t" * wire.TOKEN_BYTES))
    near.plane.connect(PEER, PlaneOffer("tcp", "", unknown), near.regions)
    assert host in str(wait(near.plane, near.plane.read(PEER, all_blocks())).error)
    assert_still_serves(near, far)


def test_closing_with_transfers_in_the_queue_leaves_no_socket(far: Memory) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with memory() as near:
        near.plane.connect(PEER, far.plane.offer(), far.regions)
        for _ in range(50):
            near.plane.read(PEER, all_blocks())
        near.plane.poll()
    deadline = time.monotonic() + DEADLINE_S
    while len(os.listdir("/proc/self/fd")) > before:  # those of the far side close when it has noticed
        assert time.monotonic() < deadline, "sockets were left open"
        time.sleep(0.02)


def test_a_producer_that_says_nothing_is_given_up(near: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_client, "STALL_TIMEOUT_S", 0.3)
    is_over = threading.Event()

    def say_nothing(connection: socket.socket) -> None:
        take_request(connection)
        assert is_over.wait(DEADLINE_S)

    with Liar(say_nothing).offered() as offer:
        near.plane.connect(PEER, offer, near.regions)
        assert "no byte came" in str(wait(near.plane, near.plane.read(PEER, all_blocks())).error)
        is_over.set()


def test_a_producer_that_was_stopped_sends_nothing_into_memory_of_another() -> None:
    """The same with a real one: SIGSTOP in the middle of its bytes, and on with it when our memory has another owner."""
    far, side = SpawnedFar(tcp_side), tcp_side()
    try:
        far.fill(1)
        side.memory[:] = 0
        side.plane.connect(PEER, far.offer, far.regions)
        region = len(side.regions) - 1
        blocks = np.arange(640, dtype=np.int64) * 65536
        handle = side.plane.read(PEER, [Pieces(region, region, 65536, blocks, blocks[::-1].copy())])
        deadline = time.monotonic() + DEADLINE_S
        while not side.memory.any():
            assert time.monotonic() < deadline
        os.kill(far.pid, signal.SIGSTOP)
        try:
            side.plane.cancel(handle)
            assert wait(side.plane, handle).error == "cancelled"
            side.memory[:] = 77
        finally:
            os.kill(far.pid, signal.SIGCONT)
        # It serves again, on another connection, and nothing else was written.
        few = np.zeros(1, np.int64)
        assert wait(side.plane, side.plane.read(PEER, [Pieces(0, 0, 64, few, few)])).ok
        assert np.count_nonzero(side.memory != 77) in range(1, 65)
    finally:
        far.close()
        side.close()


def test_more_transfers_than_connections_all_arrive(near: Memory, far: Memory) -> None:
    near.plane.connect(PEER, far.plane.offer(), far.regions)
    offsets = np.arange(BLOCKS, dtype=np.int64) * BLOCK
    handles = {near.plane.read(PEER, [Pieces(0, 0, BLOCK, offsets[n : n + 1], offsets[n : n + 1])]) for n in range(BLOCKS)}
    deadline = time.monotonic() + DEADLINE_S
    while handles:
        assert time.monotonic() < deadline
        for completion in near.plane.poll():
            assert completion.ok, completion.error
            handles.remove(completion.handle)
    assert np.all(near.bytes[BLOCK:-BLOCK] == 7)


def test_a_host_may_be_named(near: Memory) -> None:
    content = np.full(BLOCK, 7, np.uint8)
    regions = [Region("kv", content.ctypes.data, 64, 64, 64)]
    named = TcpDataPlane("localhost", "localhost")
    assert named.register(regions)
    near.plane.connect(PEER, named.offer(), regions)
    zero = np.zeros(1, np.int64)
    assert wait(near.plane, near.plane.read(PEER, [Pieces(0, 0, 64, zero, zero)])).ok
    named.close()


@pytest.mark.parametrize(
    "offer", [("", 5, b"t" * 32), ("h", 0, b"t" * 32), ("h", 1 << 16, b"t" * 32), ("h", 5, b"short"), ("h", 5), "text"]
)
def test_offers_that_lead_nowhere_are_refused(near: Memory, offer: object) -> None:
    with pytest.raises(TransportError):
        near.plane.connect(PEER, PlaneOffer("tcp", "", msgspec.msgpack.encode(offer)), near.regions)


def test_only_memory_of_the_host_is_carried() -> None:
    plane = TcpDataPlane("127.0.0.1", "127.0.0.1")
    assert not plane.register([Region("kv", 4096, 64, 64, 1, MemoryKind.VRAM)])
    with pytest.raises(LocalProtocolError):
        plane.offer()
    plane.close()


def test_an_address_that_is_not_ours_is_a_mistake_of_the_operator() -> None:
    content = np.zeros(4096, np.uint8)
    plane = TcpDataPlane("192.0.2.1", "192.0.2.1")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        plane.register([Region("kv", content.ctypes.data, 64, 64, 64)])
    plane.close()


def test_connections_that_are_no_longer_needed_are_closed(near: Memory, far: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_client, "IDLE_TIMEOUT_S", 0.2)
    before = len(os.listdir("/proc/self/fd"))
    assert_still_serves(near, far)
    deadline = time.monotonic() + DEADLINE_S
    while len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < deadline, "connections were kept"
        time.sleep(0.02)
    assert_still_serves(near, far)


def test_a_thousand_peers_come_and_go_and_leave_nothing(near: Memory, far: Memory) -> None:
    assert_still_serves(near, far)
    near.plane.disconnect(PEER)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1000):
        peer = PeerId(EngineId(f"far{number}"), Epoch("1"), 0)
        near.plane.connect(peer, far.plane.offer(), far.regions)
        near.plane.disconnect(peer)
    assert_still_serves(near, far)
    near.plane.disconnect(PEER)
    deadline = time.monotonic() + DEADLINE_S
    while len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < deadline, "files were left open"
        time.sleep(0.02)
