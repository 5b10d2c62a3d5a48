"""One TCP connection that never blocks: spans of memory to be sent in their order, and one to be
filled.

Owned by the transport's own thread. Bytes go straight between the socket and the memory they belong
to; nothing else writes there, so a connection that is closed has certainly stopped.
"""

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial

from kvferry.errors import KVFerryError

__all__ = ["ConnectionHandler", "IoVector", "SocketLoop", "SocketStream", "TcpConnection", "tune"]


MAX_VIEWS = 1024
"""Buffers that one system call takes (IOV_MAX)."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 10, 5, 3
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that closes with a reset."""
UNACKNOWLEDGED_S = 25
"""A peer whose host no longer answers is gone after this long, as with keep-alive; the kernel's own
patience is a quarter of an hour.
"""


class IoVector:
    """Views of memory, to be sent or filled from the first byte of the first to the last of the
    last.
    """

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
    """Raises OSError from `flush` and `fill` when the connection has failed, ConnectionError when
    the other side closed it.
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
        """Put bytes into the queue; `flush` sends them."""
        self._outgoing.append(IoVector([memoryview(view) for view in views]))

    def flush(self, max_bytes: int) -> int:
        """Send what the socket takes. How many bytes that were."""
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
        """Receive into a span what has arrived. How many bytes that were; 0: nothing is there
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
        """What is not sent yet is thrown away: a connection that is given up shall not go on in the
        kernel, or in a child process.
        """
        if self._outgoing:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._outgoing.clear()
        with contextlib.suppress(OSError):  # it was never connected, or is no longer
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def tune(connection: socket.socket) -> None:
    """Never blocks, never waits to send, and notices within half a minute that the other host is
    gone.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_S * 1000)


# -------------------- tcp loop -------------------- The thread of the `tcp` transport: it owns
# every socket, and moves bytes whenever a socket is ready.
#
# Whoever owns the transport hands it calls to make (`call`); nothing else is shared. A conversation
# is a generator that yields the span it wants filled next, so it reads from top to bottom like the
# wire's description.


TICK_BYTES = 4 * 1024 * 1024
"""What one connection moves before it is another's turn."""
SWEEP_S = 0.5
MAX_ACCEPTED = 64
"""In one turn: peers that come all at once shall not wait for the bytes of others, nor the other
way round.
"""
ACCEPT_PAUSE_S = 0.5
"""After the system gave us no connection that had come in: no more files, most likely."""
CLOSE_TIMEOUT_S = 5.0

ConnectionHandler = Generator[IoVector, None, None]

_log = logging.getLogger(__name__)


class TcpConnection:
    """One side of a conversation. What it is about is in `handler`; when that returns, the
    connection is closed as soon as all is sent.
    """

    def __init__(self, stream: SocketStream) -> None:
        self.stream = stream
        self.last_moved = time.monotonic()
        self._is_handler_done = False
        self._handler = self.handler()
        self._vector = next(self._handler)

    def handler(self) -> ConnectionHandler:
        """KVFerryError or OSError: the conversation is over."""
        raise NotImplementedError

    def may_receive(self) -> bool:
        return True

    def is_overdue(self, now: float) -> str | None:
        """Why the connection should be closed by now."""
        raise NotImplementedError

    def explain(self, error: Exception) -> str:
        return str(error)

    def ended(self, why: str) -> None:
        """It has been closed: nothing of it moves any more."""
        raise NotImplementedError

    @property
    def is_finished(self) -> bool:
        return self._is_handler_done and not self.stream.is_sending

    def events(self) -> int:
        reads = selectors.EVENT_READ if self.may_receive() and not self._is_handler_done else 0
        return reads | (selectors.EVENT_WRITE if self.stream.is_sending else 0)

    def tick(self) -> None:
        """Send and receive what is possible, for a bounded time."""
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
        """Break off what is being said, and say this. Not from within a talk. What was being filled
        is filled no further.
        """
        self._handler.close()
        self._handler, self._vector = handler, next(handler)

    def _send(self) -> int:
        try:
            return self.stream.flush(TICK_BYTES)
        except OSError:
            # Why nobody takes our bytes may have been said before the connection was closed.
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
    """Runs from `start` to `close`. `call` may be used by any thread, all else only by what the
    loop itself calls.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._calls: deque[Callable[[], None]] = deque()
        self._connections: dict[TcpConnection, int] = {}
        self._listener: socket.socket | None = None
        self._accept: Callable[[socket.socket], None] = socket.socket.close
        self._next_sweep = 0.0
        self.is_closing = False
        self._lock = threading.Lock()
        """For the one file that other threads use."""
        self._is_closed = False
        self.failure: str | None = None
        """Why the thread has stopped by itself: an error of our own."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, listener: socket.socket, accept: Callable[[socket.socket], None]) -> None:
        """The loop owns the listener from here on; `accept` owns what comes in."""
        self._listener, self._accept = listener, accept
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread.start()

    def call(self, what: Callable[[], None]) -> None:
        """Calls that come after the loop has closed are not made."""
        self._calls.append(what)
        with self._lock, contextlib.suppress(BlockingIOError):  # it has been woken often enough
            if not self._is_closed:
                os.eventfd_write(self._wake, 1)

    def add(self, connection: TcpConnection) -> None:
        self._connections[connection] = 0
        self._watch(connection)

    def update(self, connection: TcpConnection) -> None:
        """After something was put into its queue."""
        self._watch(connection)

    def drop(self, connection: TcpConnection, why: str) -> None:
        """Close a connection. Unknown ones are ignored."""
        events = self._connections.pop(connection, None)
        if events is None:
            return
        if events:
            self._selector.unregister(connection.stream.fd)
        connection.stream.close()
        connection.ended(why)

    def close(self) -> None:
        """Every socket is closed when this returns. Idempotent."""
        self.is_closing = True
        if self._thread.ident is None:
            if not self._is_closed:
                self._release()
            return
        self.call(_nothing)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise KVFerryError(
                f"the thread of the tcp transport did not stop within {CLOSE_TIMEOUT_S:g} s"
            )

    def _run(self) -> None:
        try:
            while not self.is_closing:
                self._tick()
            failure = None
        except (
            Exception
        ) as error:  # top of the thread: whoever waits for a transfer must learn of it
            _log.exception("the thread of the tcp transport was stopped by an error of its own")
            failure = f"{type(error).__name__}: {error}"
        self.is_closing = True
        self._release()
        self.failure = failure

    def _tick(self) -> None:
        timeout = SWEEP_S if self._connections or self._is_listener_paused() else None
        for key, _ in self._selector.select(timeout):
            if self.is_closing:
                return
            if key.fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
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
        except Exception:  # top of a call: the others' transfers go on
            _log.exception("a call of the tcp transport failed by an error of our own")

    def _drive(self, connection: TcpConnection) -> None:
        if connection not in self._connections:
            return  # dropped by what another connection did in this turn
        try:
            connection.tick()
        except (KVFerryError, OSError) as error:
            self.drop(connection, connection.explain(error))
            return
        except (
            Exception
        ) as error:  # top of a connection: whatever a peer has sent, the others go on
            _log.exception("a connection of the tcp transport was closed by an error of our own")
            self.drop(connection, f"{type(error).__name__}: {error}")
            return
        if connection.is_finished:
            self.drop(connection, "all was said")
        else:
            self._watch(connection)

    def _watch(self, connection: TcpConnection) -> None:
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
                    "tcp transport cannot accept a connection (%s); trying again in %g s",
                    error,
                    ACCEPT_PAUSE_S,
                )
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
        with self._lock:
            self._is_closed = True
            os.close(self._wake)


def _nothing() -> None:
    return None
