"""One TCP connection that never blocks: spans of memory to be sent in their order, and one to be filled.

Owned by the transport's own thread. Bytes go straight between the socket and the memory they belong to; nothing else writes there, so a
connection that is closed has certainly stopped.
"""

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Sequence

__all__ = ["IoVector", "SocketStream", "tune"]

MAX_VIEWS = 1024
"""Buffers that one system call takes (IOV_MAX)."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 10, 5, 3
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that closes with a reset."""
UNACKNOWLEDGED_S = 25
"""A peer whose host no longer answers is gone after this long, as with keep-alive; the kernel's own patience is a quarter of an hour."""


class IoVector:
    """Views of memory, to be sent or filled from the first byte of the first to the last of the last."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = list(views)
        self._next = 0
        self.left_bytes = sum(len(view) for view in self._views)

    def pending(self) -> list[memoryview]:
        """The views to go on with; the first has been cut to what is left of it."""
        return self._views[self._next : self._next + MAX_VIEWS]

    def advance(self, moved: int) -> None:
        self.left_bytes -= moved
        while moved:
            view = self._views[self._next]
            if moved < len(view):
                self._views[self._next] = view[moved:]
                return
            moved -= len(view)
            self._next += 1


class SocketStream:
    """Raises OSError from `flush` and `fill` when the connection has failed, ConnectionError when the other side closed it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._outgoing: deque[IoVector] = deque()

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    @property
    def is_sending(self) -> bool:
        return bool(self._outgoing)

    @property
    def num_outgoing(self) -> int:
        return len(self._outgoing)

    def send(self, *views: memoryview | bytes) -> None:
        """Put bytes into the queue; `flush` sends them."""
        self._outgoing.append(IoVector([memoryview(view) for view in views]))

    def flush(self, max_bytes: int) -> int:
        """Send what the socket takes. How many bytes that were."""
        moved = 0
        while self._outgoing and moved < max_bytes:
            vector = self._outgoing[0]
            try:
                sent = self._socket.sendmsg(vector.pending(), (), socket.MSG_NOSIGNAL) if vector.left_bytes else 0
            except BlockingIOError:
                break
            vector.advance(sent)
            moved += sent
            if not vector.left_bytes:
                self._outgoing.popleft()
        return moved

    def fill(self, vector: IoVector) -> int:
        """Receive into a span what has arrived. How many bytes that were; 0: nothing is there now."""
        try:
            received = self._socket.recvmsg_into(vector.pending())[0]
        except BlockingIOError:
            return 0
        if not received:
            raise ConnectionError("the other side has closed the connection")
        vector.advance(received)
        return received

    def close(self) -> None:
        """What is not sent yet is thrown away: a connection that is given up shall not go on in the kernel, or in a child process."""
        if self._outgoing:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._outgoing.clear()
        with contextlib.suppress(OSError):  # it was never connected, or is no longer
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def tune(connection: socket.socket) -> None:
    """Never blocks, never waits to send, and notices within half a minute that the other host is gone."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_S * 1000)
