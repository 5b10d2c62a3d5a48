"""The authenticated connection beside each process group of the `dist` transport.

Requests, refusals, the rendezvous of the group and the tags of the bytes travel here; only the
bytes travel in the group. Both sides prove that they know the producer's token, with the messages
of `tcp/wire.py`. One thread owns a channel; any thread may `shut` it. Every wait has a deadline.
"""

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

from kvferry.errors import RemoteProtocolError, TransportError
from kvferry.transports.tcp import wire
from kvferry.transports.tcp.loop import tune

STALL_TIMEOUT_S = 10.0
"""A transfer fails if one batch does not arrive within this time. Requests have deadlines of their
own; a cancelled transfer does not wait for this timeout.
"""
PROOF_TIMEOUT_S = 5.0
TAG_BYTES = 32
MAX_FRAME_BYTES = 65536
"""Most bytes of a key or value of the rendezvous: gloo needs 200, NCCL needs 128."""
_FRAME = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class DistSettings:
    """How much memory the `dist` transport uses, and which library moves the bytes."""

    host_pool_bytes: int = 1 << 30
    """Most memory of all staging buffers, if the cache is in host memory. Two buffers are always
    allowed.
    """
    device_pool_bytes: int = 1 << 30
    """The same, if the cache is on a GPU."""
    backend: str = "gloo"
    """gloo, or nccl between GPUs."""
    num_channels: int = 0
    """The channels of an NCCL group; 0: NCCL decides."""


class DistOffer(wire.TcpOffer, frozen=True, array_like=True):
    nccl_device: str = ""
    """Identity of the GPU that holds the cache; empty if the side can only use gloo."""


class Channel:
    """One connection. Each message must be sent or arrive within a time: TransportError if not."""

    def __init__(self, connection: socket.socket, key: bytes = b"") -> None:
        """`key` is that of the tags; the sides agree on it when they authenticate."""
        self._socket = connection
        self._key = key
        self._timeout_s = STALL_TIMEOUT_S
        self._num_tags = 0

    @classmethod
    def dial(cls, offer: wire.TcpOffer) -> "Channel":
        """OSError if the peer cannot be reached, RemoteProtocolError if it is not the peer."""
        channel = cls(socket.create_connection((offer.host, offer.port), PROOF_TIMEOUT_S))
        with channel._authenticating():
            nonce = secrets.token_bytes(wire.NONCE_BYTES)
            nonces = wire.nonce_in(channel.receive(wire.GREETING_BYTES)) + nonce
            channel.send(nonce, wire.prove(offer.token, wire.HandshakeRole.DIALLER, nonces))
            answer = channel.receive(wire.PROOF_BYTES)
            if not wire.is_proof(answer, offer.token, wire.HandshakeRole.PRODUCER, nonces):
                raise RemoteProtocolError(
                    f"the process at {offer.host}:{offer.port} does not know the token of its offer"
                )
            channel._key = _tag_key(offer.token, nonces)
        return channel

    def authenticate_client(self, token: bytes) -> None:
        """OSError or RemoteProtocolError if the client does not authenticate in time."""
        with self._authenticating():
            nonce = secrets.token_bytes(wire.NONCE_BYTES)
            self.send(wire.greeting(nonce))
            answer = self.receive(wire.NONCE_BYTES + wire.PROOF_BYTES)
            nonces, proof = nonce + answer[: wire.NONCE_BYTES], answer[wire.NONCE_BYTES :]
            if not wire.is_proof(proof, token, wire.HandshakeRole.DIALLER, nonces):
                raise RemoteProtocolError("the client does not know this transport's token")
            self.send(wire.prove(token, wire.HandshakeRole.PRODUCER, nonces))
            self._key = _tag_key(token, nonces)

    @property
    def local_host(self) -> str:
        """The address of this host at which the other side of the channel can reach it."""
        return str(self._socket.getsockname()[0]).removeprefix("::ffff:")

    def send(self, *parts: bytes | memoryview) -> None:
        with self._waiting(time.monotonic() + self._timeout_s):
            self._socket.sendall(b"".join(parts))

    def receive(self, size: int) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        received = bytearray(size)
        view = memoryview(received)
        while view:
            with self._waiting(deadline):
                moved = self._socket.recv_into(view)
            if not moved:
                raise ConnectionError("the other side has closed the connection")
            view = view[moved:]
        return bytes(received)

    def receive_next(self, size: int) -> bytes | None:
        """Wait without a deadline for the peer's next request; None if the peer has closed the
        channel. TCP keepalive ends the wait if the peer's host is gone.
        """
        self._socket.settimeout(None)
        first = self._socket.recv(1)
        return first + self.receive(size - 1) if first else None

    def send_frame(self, key: str, value: bytes | memoryview) -> None:
        name = key.encode()
        self.send(_FRAME.pack(len(name), len(memoryview(value))), name, value)

    def receive_frame(self) -> tuple[str, bytes]:
        name_bytes, value_bytes = _FRAME.unpack(self.receive(_FRAME.size))
        if max(name_bytes, value_bytes) > MAX_FRAME_BYTES:
            raise RemoteProtocolError(f"a frame has {max(name_bytes, value_bytes)} bytes: too many")
        name = self.receive(name_bytes)
        return name.decode(errors="replace"), self.receive(value_bytes)

    def receive_reply(self) -> str:
        """Return why the peer does not grant a write; empty if it has accepted the request.
        TransportError if the peer refuses the request for any other reason.
        """
        reply = self.receive(wire.REPLY_BYTES)
        text = self.receive(wire.text_bytes_in(reply)).decode(errors="replace")
        if text and not wire.is_not_granted(reply):
            raise TransportError(f"the peer refused a transfer: {text}")
        return text

    def next_tag(self, data: bytes | memoryview) -> bytes:
        """Compute the tag of the next batch. Both sides count the batches, so that the bytes of one
        batch are not valid as another.
        """
        self._num_tags += 1
        number = self._num_tags.to_bytes(8, "little")
        return blake3(data, key=self._key).update(number).digest()

    def shut(self) -> None:
        """End every wait on the channel, also one in another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self._socket.close()

    @contextlib.contextmanager
    def _authenticating(self) -> Iterator[None]:
        """Give each message less time than later ones; close the channel if a proof fails."""
        try:
            tune(self._socket)
            self._timeout_s = PROOF_TIMEOUT_S
            yield
            self._timeout_s = STALL_TIMEOUT_S
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _waiting(self, deadline: float) -> Iterator[None]:
        """Bound the one call inside the block. TransportError if it does not return in time."""
        left_s = deadline - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            yield
        except TimeoutError:
            raise TransportError("the other side was silent for too long") from None


def _tag_key(token: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, b"tags" + nonces, hashlib.sha256)
