"""One connection to an instance, and how a request is abandoned without losing its answer.

Belongs to one event loop. Closing a connection loses bytes that the peer has sent and we have
not read, and neither side notices. A request with `on_late_response` is therefore abandoned by a
half-close, which an engine treats as a client that has disconnected. The connection is then read
until the instance closes its side: either the bytes contain a complete answer, or no answer
will ever arrive.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from kvferry.logs import repeats_of
from kvferry.router.http.deadlines import NEVER
from kvferry.router.http.framing import FramingError, make_body
from kvferry.router.http.messages import InvalidResponse, UpstreamDisconnected, UpstreamTimeout
from kvferry.router.http.parsing import ResponseHead, read_response_head

if TYPE_CHECKING:
    from kvferry.router.http.pool import TargetPool

OnLateResponse = Callable[[int, bytes], None]
"""Gets status and body of a response that arrived completely after its request was abandoned."""

ABANDON_TIMEOUT_S = 5.0
"""How long an instance may take to close its side. A running instance closes at once."""
_MAX_ABANDONED, _MAX_ABANDONED_PER_TARGET = 4096, 2048
"""Bounds on abandoned connections, in total and per target: all clients may leave at once, and an
instance that hangs must not use up the places of the other instances.
"""
_MAX_LATE_HEAD = 64 * 1024
_MAX_KEPT = 2 * 1024 * 1024
"""Longest answer that is stored: the block ids of a million tokens take half a megabyte."""

_log = logging.getLogger(__name__)


class AbandonedConnections:
    """The abandoned connections. Bounded: beyond the bound a connection is closed at once, and its
    late answer is lost.
    """

    __slots__ = ("_idle", "_members")

    def __init__(self) -> None:
        self._members: set[UpstreamConnection] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def admit(self, connection: "UpstreamConnection") -> bool:
        """Add a connection; False if the bound is reached."""
        pool = connection.pool
        if len(self._members) >= _MAX_ABANDONED or pool.num_abandoned >= _MAX_ABANDONED_PER_TARGET:
            self._warn(str(pool.target.address))
            return False
        self._members.add(connection)
        pool.num_abandoned += 1
        self._idle.clear()
        return True

    def discard(self, connection: "UpstreamConnection") -> None:
        if connection in self._members:
            self._members.remove(connection)
            connection.pool.num_abandoned -= 1
        if not self._members:
            self._idle.set()

    def _warn(self, where: str) -> None:
        _log.warning(
            "too many abandoned requests: late answers are dropped instance=%s",
            where,
            extra=repeats_of(where),
        )

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until no connection is left, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()


class LateResponse:
    """Records all bytes of a response, for a caller that needs late responses too."""

    __slots__ = ("_method", "_on_late_response", "_segments", "_size")

    def __init__(self, method: str, on_late_response: OnLateResponse) -> None:
        self._method = method
        self._on_late_response = on_late_response
        self._segments: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> bool:
        """Store bytes; False if the response is too long to be stored."""
        self._segments.append(data)
        self._size += len(data)
        return self._size <= _MAX_KEPT

    def deliver(self) -> None:
        """Deliver the response if it is complete; the request was abandoned and has ended."""
        answer = parse_complete_response(b"".join(self._segments), self._method)
        if answer is not None:
            self._on_late_response(*answer)


def half_close(transport: asyncio.Transport) -> bool:
    """Shut down the sending side of the socket; False if that fails.

    Works below TLS too, where asyncio transports have no half-close. Unsent data is lost.
    """
    raw = transport.get_extra_info("socket")
    if raw is None:  # the connection is lost; connection_lost follows
        return False
    try:
        # A duplicate descriptor: closing the wrapper must not close the transport's socket.
        with socket.socket(fileno=os.dup(raw.fileno())) as ours:
            ours.shutdown(socket.SHUT_WR)
    except OSError:
        return False
    return True


def parse_complete_response(raw: bytes, method: str) -> tuple[int, bytes] | None:
    """Parse status and body from all bytes of a closed connection; None if incomplete or invalid.

    Pure.
    """
    status = start = 0
    # Skip interim responses (1xx).
    while status < 200:
        end = raw.find(b"\r\n\r\n", start, start + _MAX_LATE_HEAD) + 4
        if end < 4:
            return None
        try:
            head = read_response_head(raw[start:end], method)
        except InvalidResponse:
            return None
        status, start = head.status, end
    body, decoded = make_body(head.body, head.length), list[bytes]()
    try:
        body.advance(raw[start:], decoded)
    except FramingError:
        return None
    return (status, b"".join(decoded)) if body.is_ended or body.is_complete_at_close else None


# -- connection --
# One request at a time: send the request, receive the head, then the raw bytes of the body.
#
# An instance may answer before it has read the whole request, and then reset the connection. The
# loop reads before it writes, so the answer has arrived before the failed write ends the
# connection.


_MAX_HEAD = 64 * 1024
_MAX_WAITING = 256 * 1024
"""Bytes of a body that may wait to be taken; above this the connection is not read."""

_MAX_WRITE = 256 * 1024
"""Bytes of a request that are written in one step."""


def _segments(data: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The request in segments for one write each, without a copy of large parts."""
    if sum(map(len, data)) <= _MAX_WRITE:
        yield b"".join(data)
        return
    for part in data:
        for start in range(0, len(part), _MAX_WRITE):
            yield memoryview(part)[start : start + _MAX_WRITE]


class Receiver(Protocol):
    """Gets the bytes of a body as they arrive."""

    def receive(self, data: bytes) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def on_connection_lost(self) -> None:
        """The connection is lost; its `error` is the reason."""


# State of a connection. FRESH: no request was sent yet; data is stored anyway, because a server
# with too many connections answers before the request. IDLE: between two requests; data is
# unexpected. ABANDONED: the caller has left, and only the late response is recorded.
_FRESH, _HEAD, _BODY, _IDLE, _ABANDONED = range(5)


class UpstreamConnection(asyncio.Protocol):
    """An asyncio protocol for one connection. `on_lost` is called once, at its end."""

    __slots__ = (
        "_abandoned",
        "_head_waiter",
        "_is_paused",
        "_late",
        "_method",
        "_on_lost",
        "_phase",
        "_segments",
        "_size",
        "_unsent",
        "_waiter",
        "deadline",
        "error",
        "has_answered",
        "loop",
        "pool",
        "receiver",
        "sent_at",
        "transport",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: "TargetPool",
        on_lost: Callable[["UpstreamConnection"], None],
        abandoned: AbandonedConnections,
    ) -> None:
        self.loop = loop
        self.pool = pool
        self._abandoned = abandoned
        self._on_lost = on_lost
        self._method = ""
        self._phase = _FRESH
        self._segments: list[bytes] = []
        self._size = 0
        self._unsent: deque[bytes | memoryview] = deque()
        self._is_paused = False
        self._head_waiter: asyncio.Future[ResponseHead] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._late: LateResponse | None = None
        self.transport: asyncio.Transport | None = None
        self.deadline = NEVER
        self.error: Exception | None = None
        """Why the connection was lost; None also if the instance closed it in an orderly way."""
        self.has_answered = False
        """Whether any byte of the current response has arrived."""
        self.sent_at = 0.0
        """When the current request was handed to the kernel completely (`time.monotonic`)."""
        self.receiver: Receiver | None = None
        """Gets the bytes of the body directly; None: bytes are stored until `take`."""

    @property
    def is_lost(self) -> bool:
        return self.transport is None

    @property
    def num_waiting(self) -> int:
        """Bytes of the body that were not taken yet."""
        return self._size

    @property
    def is_pending(self) -> bool:
        """True if a caller waits for a response of which nothing has been passed on."""
        return self.receiver is None and self._phase in (_HEAD, _BODY)

    @property
    def is_clean(self) -> bool:
        """True if another request can be sent: no data is left in either direction."""
        transport = self.transport
        return (
            transport is not None
            and not self._size
            and not self._unsent
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    # -- one request --

    def send_request(
        self,
        method: str,
        data: Sequence[bytes | memoryview],
        timeout_s: float,
        on_late_response: OnLateResponse | None = None,
    ) -> "asyncio.Future[ResponseHead]":
        """Send a request; the future gets the head of the response."""
        self._method = method
        self._late = (
            LateResponse(method, on_late_response) if on_late_response is not None else None
        )
        self._phase = _HEAD
        self.has_answered = False
        self.sent_at = time.monotonic()
        self.deadline = self.loop.time() + timeout_s
        waiter = self._head_waiter = self.loop.create_future()
        # Data that arrived before the request was sent: see FRESH.
        if self._segments:
            self.has_answered = True
            if self._late is not None:
                self._late.add(b"".join(self._segments))
            self._read_head()
        if self.transport is not None and not self.transport.is_closing():
            self._unsent.extend(_segments(data))
            self._send_more()
        elif not waiter.done():
            waiter.set_exception(
                UpstreamDisconnected("it closed the connection before answering", self.has_answered)
            )
        return waiter

    def take(self) -> bytes:
        """Take the raw bytes of the body that have arrived."""
        segments = self._segments
        if not segments:
            return b""
        data = segments[0] if len(segments) == 1 else b"".join(segments)
        self._segments = []
        if self._size > _MAX_WAITING:
            self.resume_reading()
        self._size = 0
        return data

    def peek(self) -> bytes:
        """Return the same bytes as `take` without removing them."""
        segments = self._segments
        if len(segments) > 1:
            segments[:] = [b"".join(segments)]
        return segments[0] if segments else b""

    async def wait_readable(self, deadline: float) -> None:
        """Wait until there are bytes to take, or the connection is lost. On timeout the connection
        is closed and UpstreamTimeout is raised.
        """
        if self._phase == _ABANDONED:
            raise UpstreamDisconnected(
                "the request was abandoned before it answered", self.has_answered
            )
        self.deadline = deadline
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            if self._phase != _ABANDONED:
                self.deadline = NEVER

    def mark_complete(self) -> None:
        """Record that the caller has the complete response."""
        self._late = None

    def set_idle(self, deadline: float) -> None:
        """Mark the connection as reusable until the deadline."""
        self._phase = _IDLE
        self.deadline = deadline
        self.resume_reading()

    def pause_reading(self) -> None:
        if (
            self.transport is not None
            and not self.transport.is_closing()
            and self.transport.is_reading()
        ):
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if (
            self.transport is not None
            and not self.transport.is_closing()
            and not self.transport.is_reading()
        ):
            self.transport.resume_reading()

    def fail(self, error: Exception) -> None:
        """Raise the error in the waiting caller and close the connection."""
        receiver = self.receiver
        self._fail(error)
        self.abort()
        if receiver is not None:
            receiver.fail(error)

    def abort(self) -> None:
        """End the request: abandon the connection or close the connection. Idempotent."""
        self.receiver = None
        if self._phase == _ABANDONED:
            return
        if self._late is not None and self._phase in (_HEAD, _BODY) and self._abandoned.admit(self):
            self._abandon()
        else:
            self.abort_transport()

    def abort_transport(self) -> None:
        """Close the connection at once; a late response is lost."""
        self.deadline = NEVER
        self._unsent.clear()
        if self.transport is not None:
            self.transport.abort()

    # -- asyncio --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's is no asyncio.Transport

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        """Go on with a large request: asyncio calls this when its buffer is nearly empty."""
        self._is_paused = False
        self.sent_at = time.monotonic()
        self._send_more()

    def data_received(self, data: bytes) -> None:
        self.pool.num_received += 1
        if self._late is not None and not self._late.add(data):
            self._late = None
            if self._phase == _ABANDONED:
                self.abort_transport()
        if self._phase == _ABANDONED:
            return
        if self.receiver is not None:
            self.receiver.receive(data)
            return
        self._segments.append(data)
        self._size += len(data)
        if self._phase == _HEAD:
            self.has_answered = True
            self._read_head()
        elif self._phase == _IDLE:
            self.abort()  # data without a request
        else:
            if self._size > _MAX_WAITING:
                self.pause_reading()
            if self._phase == _BODY:
                self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.error = error
        self.transport = None
        self._unsent.clear()
        self.deadline = NEVER
        self._on_lost(self)
        if self._phase == _ABANDONED:
            self._finish_abandoned()
        elif self.receiver is not None:
            self.receiver.on_connection_lost()
        elif self._phase == _HEAD:
            self._fail(
                UpstreamDisconnected("it closed the connection before answering", self.has_answered)
            )
        elif self._phase == _BODY:
            self._wake()

    def on_deadline(self, now: float) -> None:
        """Fail the request, or close an abandoned connection."""
        if self._phase == _ABANDONED:
            self.abort_transport()
        elif not self._is_response_ready:  # else the caller has data and has not run yet
            self.fail(UpstreamTimeout("it was silent for too long"))

    # -- helpers --

    def _send_more(self) -> None:
        """Write until the transport has enough. Handing over a large request at once would copy or
        encrypt all of it in one step of the event loop.
        """
        while self._unsent and not self._is_paused and self.transport is not None:
            self.transport.write(self._unsent.popleft())

    def _abandon(self) -> None:
        self._unsent.clear()
        self._fail(
            UpstreamDisconnected("the request was abandoned before it answered", self.has_answered)
        )
        self._phase = _ABANDONED
        self._segments = []
        self._size = 0
        if self.transport is None:
            self._finish_abandoned()  # no further bytes can arrive
            return
        self.deadline = self.loop.time() + ABANDON_TIMEOUT_S
        self.resume_reading()
        if not half_close(self.transport):
            self.abort_transport()

    def _finish_abandoned(self) -> None:
        self._abandoned.discard(self)
        late, self._late = self._late, None
        if late is not None:
            late.deliver()

    def _read_head(self) -> None:
        segments = self._segments
        data = segments[0] if len(segments) == 1 else b"".join(segments)
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0 or end > _MAX_HEAD:
                self._segments = [data]
                if len(data) > _MAX_HEAD or data[:7] != b"HTTP/1."[: len(data)]:
                    self._fail(InvalidResponse("its answer is not HTTP"))
                    self.abort_transport()
                return
            try:
                head = read_response_head(data[: end + 4], self._method)
            except InvalidResponse as error:
                self._fail(error)
                self.abort_transport()
                return
            data = data[end + 4 :]
            if head.status >= 200:
                break
        self._phase = _BODY
        self.deadline = NEVER
        self._segments = [data] if data else []
        self._size = len(data)
        asker = self._head_waiter
        if asker is not None and not asker.done():
            asker.set_result(head)

    @property
    def _is_response_ready(self) -> bool:
        """True if the waiting caller was woken in this tick and has not run yet."""
        waiter = (
            self._head_waiter
            if self._phase == _HEAD
            else self._waiter
            if self._phase == _BODY
            else None
        )
        return self.receiver is None and waiter is not None and waiter.done()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        waiter = self._head_waiter if self._phase == _HEAD else self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
