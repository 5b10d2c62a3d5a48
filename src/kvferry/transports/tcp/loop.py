"""The socket thread of a transport, and the non-blocking connections that it drives.

`SocketLoop` is the thread: it owns every socket. `SocketStream` sends and fills buffers on one
connection without blocking. Bytes move directly between the socket and the memory they belong to,
and no other code writes to that memory: once a connection is closed, no more bytes arrive.
"""

import contextlib
import logging
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial

from kvferry.errors import ConfigError, KVFerryError
from kvferry.sleep import Wakeup

MAX_VIEWS = 1024
"""Most buffers that one system call takes (IOV_MAX)."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 10, 5, 3
RESET = struct.pack("ii", 1, 0)
"""Value of SO_LINGER that makes `close` reset the connection."""
BACKLOG = 512
UNACKNOWLEDGED_S = 25
"""Seconds until a connection fails if the peer's host acknowledges no data; same as keep-alive
(10 s + 3 x 5 s). The kernel's default is about a quarter of an hour.
"""


class IoVector:
    """Views of memory that are sent or filled in order, and how far that has progressed."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = list(views)
        self._next = 0
        self.left_bytes = sum(len(view) for view in self._views)

    def pending(self) -> list[memoryview]:
        """The next views to send or fill; the first view has been cut to its remaining bytes."""
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
    """One non-blocking connection. `flush` and `fill` raise OSError if the connection has failed,
    and ConnectionError if the other side closed the connection.
    """

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
        """Append bytes to the outgoing queue; `flush` sends them."""
        self._outgoing.append(IoVector([memoryview(view) for view in views]))

    def flush(self, max_bytes: int) -> int:
        """Send as much as the socket takes; returns the number of bytes."""
        moved = 0
        while self._outgoing and moved < max_bytes:
            vector = self._outgoing[0]
            try:
                sent = (
                    self._socket.sendmsg(vector.pending(), (), socket.MSG_NOSIGNAL)
                    if vector.left_bytes
                    else 0
                )
            except BlockingIOError:
                break
            vector.advance(sent)
            moved += sent
            if not vector.left_bytes:
                self._outgoing.popleft()
        return moved

    def fill(self, vector: IoVector) -> int:
        """Receive available bytes into a vector; returns their number, 0 if no byte is available
        now.
        """
        try:
            received = self._socket.recvmsg_into(vector.pending())[0]
        except BlockingIOError:
            return 0
        if not received:
            raise ConnectionError("the other side has closed the connection")
        vector.advance(received)
        return received

    def close(self) -> None:
        """Close the connection and discard unsent bytes: an abandoned connection must not go on in
        the kernel or in a forked child process.
        """
        if self._outgoing:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._outgoing.clear()
        with contextlib.suppress(OSError):  # the socket is not connected
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def tune(connection: socket.socket) -> None:
    """Make a socket non-blocking, disable Nagle's algorithm, and detect a dead host within half a
    minute.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_S * 1000)


def listening_on(host: str, advertised_host: str, transport: str) -> socket.socket:
    """Open a listening socket. A wildcard listens on IPv4 and IPv6 if the advertised address is an
    IPv6 address.
    """
    if host in ("", "*"):
        host = "::" if ":" in advertised_host else "0.0.0.0"
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            if host == "::":
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"the {transport} transport cannot listen on {host} ({error}); name an address of this "
            "host"
        ) from error
    return listener


# -- connections and the loop --
# The transport's owner passes calls to the loop (`call`); the two threads share nothing else. Each
# connection has a handler: a generator that yields the vector to fill next, so that the code reads
# from top to bottom in the order of the messages in `tcp/wire.py`.


TICK_BYTES = 4 * 1024 * 1024
"""Most bytes that one connection moves before the next connection is served."""
SWEEP_S = 0.5
"""Interval at which the loop looks for overdue connections."""
MAX_ACCEPTED = 64
"""Most connections accepted in one tick, so that a burst of new peers and the bytes of connected
peers do not delay each other.
"""
ACCEPT_PAUSE_S = 0.5
"""Pause after `accept` has failed, most likely because this process has no file descriptor left."""
CLOSE_TIMEOUT_S = 5.0

ConnectionHandler = Generator[IoVector, None, None]

_log = logging.getLogger(__name__)


class TcpConnection:
    """One side of a connection. `handler` sends and receives the messages; when `handler` returns,
    the loop closes the connection as soon as everything is sent.
    """

    def __init__(self, stream: SocketStream) -> None:
        self.stream = stream
        self.last_moved = time.monotonic()
        self._is_handler_done = False
        self._handler = self.handler()
        self._vector = next(self._handler)

    def handler(self) -> ConnectionHandler:
        """Yield the vectors to fill. A KVFerryError or OSError closes the connection."""
        raise NotImplementedError

    def may_receive(self) -> bool:
        return True

    def is_overdue(self, now: float) -> str | None:
        """Return why the connection should be closed now; None if it should stay open."""
        raise NotImplementedError

    def explain(self, error: Exception) -> str:
        return str(error)

    def ended(self, why: str) -> None:
        """Called after the connection was closed: none of its bytes can move any more."""
        raise NotImplementedError

    @property
    def is_finished(self) -> bool:
        return self._is_handler_done and not self.stream.is_sending

    def events(self) -> int:
        reads = selectors.EVENT_READ if self.may_receive() and not self._is_handler_done else 0
        return reads | (selectors.EVENT_WRITE if self.stream.is_sending else 0)

    def tick(self) -> None:
        """Send and receive as much as possible, for a bounded time."""
        moved = self._send()
        while (
            moved < TICK_BYTES
            and not self._is_handler_done
            and self.may_receive()
            and (received := self.stream.fill(self._vector))
        ):
            moved += received
            if not self._vector.left_bytes:
                self._resume_handler()
                moved += self._send()
        if moved:
            self.last_moved = time.monotonic()

    def switch_handler(self, handler: ConnectionHandler) -> None:
        """Replace the running handler. Must not be called from within a handler. The vector that
        was being filled receives no further byte.
        """
        self._handler.close()
        self._handler, self._vector = handler, next(handler)

    def _send(self) -> int:
        try:
            return self.stream.flush(TICK_BYTES)
        except OSError:
            # The peer may have sent its reason before it closed the connection: read that first.
            while not self._is_handler_done and self.stream.fill(self._vector):
                if not self._vector.left_bytes:
                    self._resume_handler()
            raise

    def _resume_handler(self) -> None:
        following = next(self._handler, None)
        if following is None:
            self._is_handler_done = True
        else:
            self._vector = following


class SocketLoop:
    """Runs a thread from `start` to `close`. The transport's owner calls these two, and any thread
    may use `call`; every other method is for code that runs on the loop's thread.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup()
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._wakeup)
        self._calls: deque[Callable[[], None]] = deque()
        self._connections: dict[TcpConnection, int] = {}
        self._listener: socket.socket | None = None
        self._accept: Callable[[socket.socket], None] = socket.socket.close
        self._next_sweep = 0.0
        self.is_closing = False
        self.failure: str | None = None
        """Why the thread has stopped because of a bug; None while the thread is fine."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, listener: socket.socket, accept: Callable[[socket.socket], None]) -> None:
        """Start the thread. The loop owns the listener, and `accept` owns accepted connections."""
        self._listener, self._accept = listener, accept
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread.start()

    def call(self, what: Callable[[], None]) -> None:
        """Make a call on the loop's thread. Calls after the loop has closed are not made."""
        self._calls.append(what)
        self._wakeup.wake()

    def add(self, connection: TcpConnection) -> None:
        self._connections[connection] = 0
        self.update(connection)

    def update(self, connection: TcpConnection) -> None:
        """Update the watched events of a connection after bytes were added to its queue."""
        before, wanted = self._connections[connection], connection.events()
        if wanted == before:
            return
        if not before:
            self._selector.register(connection.stream.fd, wanted, connection)
        elif wanted:
            self._selector.modify(connection.stream.fd, wanted, connection)
        else:
            self._selector.unregister(connection.stream.fd)
        self._connections[connection] = wanted

    def drop(self, connection: TcpConnection, why: str) -> None:
        """Close a connection. Unknown connections are ignored."""
        events = self._connections.pop(connection, None)
        if events is None:
            return
        if events:
            self._selector.unregister(connection.stream.fd)
        connection.stream.close()
        connection.ended(why)

    def close(self) -> None:
        """Stop the thread and close every socket. Idempotent."""
        self.is_closing = True
        if self._thread.ident is None:
            self._release()
            return
        self._wakeup.wake()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise KVFerryError(
                f"the thread {self._thread.name} did not stop within {CLOSE_TIMEOUT_S:g} s"
            )

    def _run(self) -> None:
        try:
            while not self.is_closing:
                self._tick()
            failure = None
        except (
            Exception
        ) as error:  # top of the thread: owners of transfers must learn of the failure
            _log.exception("%s was stopped by an internal error", self._thread.name)
            failure = f"{type(error).__name__}: {error}"
        self.is_closing = True
        self._release()
        # Set last: `poll` takes this as a sign that every known transfer has been ended.
        self.failure = failure

    def _tick(self) -> None:
        timeout = SWEEP_S if self._connections or self._is_listener_paused() else None
        for key, _ in self._selector.select(timeout):
            if self.is_closing:
                return
            if key.data is self._wakeup:
                self._wakeup.clear()
            elif isinstance(key.data, TcpConnection):
                self._drive(key.data)
            else:
                self._accept_pending()
        for _ in range(len(self._calls)):
            self._run_call(self._calls.popleft())
        if time.monotonic() >= self._next_sweep:
            self._sweep()

    def _run_call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # top of a call: all other transfers go on
            _log.exception("a call of %s failed with an internal error", self._thread.name)

    def _drive(self, connection: TcpConnection) -> None:
        if connection not in self._connections:
            return  # dropped by another connection in this tick
        try:
            connection.tick()
        except (KVFerryError, OSError) as error:
            self.drop(connection, connection.explain(error))
            return
        except (
            Exception
        ) as error:  # top of a connection: whatever a peer has sent, other connections go on
            _log.exception("a connection of %s was closed by an internal error", self._thread.name)
            self.drop(connection, f"{type(error).__name__}: {error}")
            return
        if connection.is_finished:
            self.drop(connection, "the last reply has been sent")
        else:
            self.update(connection)

    def _accept_pending(self) -> None:
        for _ in range(MAX_ACCEPTED):
            if self._listener is None:
                return
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                _log.warning(
                    "%s cannot accept a connection (%s); trying again in %g s",
                    self._thread.name,
                    error,
                    ACCEPT_PAUSE_S,
                )
                # `_sweep` watches the listener again.
                self._selector.unregister(self._listener)
                return
            self._run_call(partial(self._accept, accepted))

    def _is_listener_paused(self) -> bool:
        return self._listener is not None and self._listener not in self._selector.get_map()

    def _sweep(self) -> None:
        now = time.monotonic()
        self._next_sweep = now + SWEEP_S
        for connection in list(self._connections):
            why = connection.is_overdue(now)
            if why is not None:
                self.drop(connection, why)
        if self._listener is not None and self._is_listener_paused():
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _release(self) -> None:
        while self._connections:
            self._run_call(
                partial(self.drop, next(iter(self._connections)), "the transport was closed")
            )
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        self._wakeup.close()
