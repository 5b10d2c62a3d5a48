"""Sockets for the handshake of vLLM's own NixlConnector: plain ZeroMQ, without keys.

Used only if `interop` is set; kvferry's own messages never travel here. The listener only ever
sends what every stock peer may read. Both sockets bound the size of a frame and the number of
messages, but ZeroMQ cannot bound the frames of one message (docs/interop.md). Each object is owned
by one thread.
"""

import contextlib
import math

import zmq

from kvferry.types import Address

Socket = zmq.Socket[bytes]

MAX_QUESTION_BYTES = 1024
MAX_REPLY_BYTES = 4 * 1024 * 1024
MAX_QUEUED_FRAMES = 1000
CONNECT_MS = 5000


class StockListener:
    """The side channel that stock consumers ask. Port 0 means any free port."""

    def __init__(self, bind_host: str, advertised_host: str, port: int) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _limit(self._socket, MAX_QUESTION_BYTES)
        try:
            self._socket.bind(f"tcp://{Address(bind_host.strip('[]') or '*', port)}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(f"{Address(bind_host, port)}: {error}") from error
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.address = Address(advertised_host.strip("[]"), int(bound))

    def poll(self, timeout_s: float) -> tuple[bytes, bytes] | None:
        """Wait for a question; return the asker's identity and the question, or None."""
        if not self._socket.poll(math.ceil(timeout_s * 1000)):
            return None
        parts = self._socket.recv_multipart()
        # A REQ socket puts an empty frame between the identity and the question.
        return (parts[0], parts[2]) if len(parts) == 3 and not parts[1] else (parts[0], b"")

    def reply(self, identity: bytes, *frames: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the asker is gone, or reads nothing
            self._socket.send_multipart([identity, b"", *frames], zmq.DONTWAIT)

    def close(self) -> None:
        self._context.destroy(linger=0)


class StockDialer:
    """Asks the side channels of stock producers, one question at a time for each address."""

    def __init__(self) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._sockets: dict[Address, Socket] = {}

    def ask(self, address: Address, question: bytes) -> None:
        """Send a question, and forget an earlier one to the same address. Never waits. ZMQError if
        the process has no socket left.
        """
        self.forget(address)
        socket = self._sockets[address] = self._context.socket(zmq.DEALER)
        _limit(socket, MAX_REPLY_BYTES)
        with contextlib.suppress(zmq.ZMQError):  # no reply will come: the asker has a deadline
            socket.connect(f"tcp://{address}")
            socket.send_multipart([b"", question], zmq.DONTWAIT)

    def poll(self) -> list[tuple[Address, bytes]]:
        """Return the replies so far, without the producer's clock; empty if malformed."""
        replies = []
        for address, socket in list(self._sockets.items()):
            with contextlib.suppress(zmq.Again):
                parts = socket.recv_multipart(zmq.DONTWAIT)
                replies.append((address, parts[1] if len(parts) == 3 and not parts[0] else b""))
                self.forget(address)
        return replies

    def forget(self, address: Address) -> None:
        socket = self._sockets.pop(address, None)
        if socket is not None:
            socket.close(0)

    def close(self) -> None:
        self._context.destroy(linger=0)


def _limit(socket: Socket, max_bytes: int) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.sndhwm = socket.rcvhwm = MAX_QUEUED_FRAMES
    socket.linger = 0
    socket.ipv6 = True
    socket.handshake_ivl = socket.connect_timeout = CONNECT_MS
