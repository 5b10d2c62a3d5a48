"""For the tests of the tcp and the dist transport: transports with their own memory, and peers that
dial them or answer them by hand.
"""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from kvferry.transports.base import (
    Completion,
    DataTransport,
    Handle,
    Operation,
    Segments,
    TransportOffer,
)
from kvferry.transports.tcp import wire
from kvferry.transports.tcp.transport import TcpTransport
from kvferry.types import EngineId, Epoch, PeerId, Region

PEER = PeerId(EngineId("far"), Epoch("1"), 0)
DEADLINE_S = 60.0
BLOCK = 4096
BLOCKS = 64


@dataclass
class Memory:
    """A transport with its own memory, which has guard bytes on either side of the region."""

    transport: DataTransport
    bytes: np.ndarray[tuple[int], np.dtype[np.uint8]]
    regions: list[Region]

    @property
    def offer(self) -> wire.TcpOffer:
        return msgspec.msgpack.decode(self.transport.offer().blob, type=wire.TcpOffer)

    @property
    def first(self) -> int:
        return self.regions[0].address


@contextlib.contextmanager
def memory(fill: int = 0, transport: DataTransport | None = None) -> Iterator[Memory]:
    """`transport`: tcp, if it is not given."""
    content = np.full((BLOCKS + 2) * BLOCK, fill, np.uint8)
    regions = [Region("kv", content.ctypes.data + BLOCK, BLOCK, BLOCK, BLOCKS)]
    transport = transport or TcpTransport("127.0.0.1", "127.0.0.1")
    assert transport.register(regions)
    try:
        yield Memory(transport, content, regions)
    finally:
        transport.close()


def all_blocks() -> list[Segments]:
    offsets = np.arange(BLOCKS, dtype=np.int64) * BLOCK
    return [Segments(0, 0, BLOCK, offsets, offsets[::-1].copy())]


def wait(transport: DataTransport, handle: Handle) -> Completion:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        for completion in transport.poll():
            assert completion.handle == handle
            return completion
        assert time.monotonic() < deadline, "the transfer has not ended"
        time.sleep(0.001)


def dial(offer: wire.TcpOffer) -> socket.socket:
    connection = socket.create_connection((offer.host, offer.port), DEADLINE_S)
    connection.settimeout(DEADLINE_S)
    return connection


def introduce(offer: wire.TcpOffer) -> socket.socket:
    """Dial and complete the handshake as a peer that knows the offer's token."""
    connection = dial(offer)
    ours = secrets.token_bytes(wire.NONCE_BYTES)
    nonces = wire.nonce_in(receive(connection, wire.GREETING_BYTES)) + ours
    connection.sendall(ours + wire.prove(offer.token, wire.HandshakeRole.DIALLER, nonces))
    assert wire.is_proof(
        receive(connection, wire.PROOF_BYTES), offer.token, wire.HandshakeRole.PRODUCER, nonces
    )
    return connection


def receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count and (part := connection.recv(count - len(received))):
        received += part
    return received


def rest_of(connection: socket.socket) -> bytes:
    """Receive until the other side closes or resets the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            received += part
    return received


def request(operation: Operation, *runs: tuple[int, int], grant_id: int = 0) -> bytes:
    rows = np.array(runs, np.int64)
    return wire.pack_header(operation, rows, grant_id) + rows.tobytes()


def assert_still_serves(near: Memory, far: Memory) -> None:
    near.transport.connect(PEER, far.transport.offer(), far.regions)
    near.bytes[:] = 0
    handle = near.transport.read(PEER, all_blocks())
    assert wait(near.transport, handle).ok
    assert np.all(near.bytes[BLOCK:-BLOCK] == 7)
    assert not near.bytes[:BLOCK].any()
    assert not near.bytes[-BLOCK:].any()


@dataclass
class Liar:
    """A producer that completes each handshake and then does what the test says."""

    does: Callable[[socket.socket], None]
    token: bytes = b"t" * wire.TOKEN_BYTES
    known: bytes = b""
    """The token that it proves, if not the one it offers."""
    greeting: bytes = b""
    """A wrong greeting, after which it sends nothing."""

    @contextlib.contextmanager
    def offered(self) -> Iterator[TransportOffer]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=self._serve, args=(listener,), daemon=True)
            thread.start()
            offer = wire.TcpOffer("127.0.0.1", listener.getsockname()[1], self.token)
            yield TransportOffer("tcp", "", msgspec.msgpack.encode(offer))
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(DEADLINE_S)
            assert not thread.is_alive()

    def _serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(ConnectionError):
                    connection.settimeout(DEADLINE_S)
                    if self.greeting:
                        connection.sendall(self.greeting)
                        continue
                    prove_to(connection, self.known or self.token)
                    self.does(connection)


def take_request(connection: socket.socket) -> int:
    header = wire.unpack_header(receive(connection, wire.HEADER_BYTES))
    receive(connection, header.num_descriptors * 16)
    return header.total_bytes


def prove_to(connection: socket.socket, token: bytes) -> bool:
    nonce = b"n" * wire.NONCE_BYTES
    connection.sendall(wire.greeting(nonce))
    nonces = nonce + receive(connection, wire.NONCE_BYTES + wire.PROOF_BYTES)[: wire.NONCE_BYTES]
    connection.sendall(wire.prove(token, wire.HandshakeRole.PRODUCER, nonces))
    return len(nonces) == 2 * wire.NONCE_BYTES
