"""One connection to an instance, and the idle ones to an address. Belongs to one event loop."""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.router.http.deadlines import NEVER
from kvferry.router.http.messages import InvalidResponse, UpstreamDisconnected, UpstreamTimeout
from kvferry.router.http.parsing import ResponseHead, read_response_head
from kvferry.types import Address

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
# unexpected.
_FRESH, _HEAD, _BODY, _IDLE = range(4)


class UpstreamConnection(asyncio.Protocol):
    """An asyncio protocol for one connection. `on_lost` is called once, at its end."""

    __slots__ = (
        "_head_waiter",
        "_is_paused",
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
    ) -> None:
        self.loop = loop
        self.pool = pool
        self._on_lost = on_lost
        self._method = ""
        self._phase = _FRESH
        self._segments: list[bytes] = []
        self._size = 0
        self._unsent: deque[bytes | memoryview] = deque()
        self._is_paused = False
        self._head_waiter: asyncio.Future[ResponseHead] | None = None
        self._waiter: asyncio.Future[None] | None = None
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
        self, method: str, data: Sequence[bytes | memoryview], timeout_s: float
    ) -> "asyncio.Future[ResponseHead]":
        """Send a request; the future gets the head of the response."""
        self._method = method
        self._phase = _HEAD
        self.has_answered = False
        self.sent_at = time.monotonic()
        self.deadline = self.loop.time() + timeout_s
        waiter = self._head_waiter = self.loop.create_future()
        # Data that arrived before the request was sent: see FRESH.
        if self._segments:
            self.has_answered = True
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
        self.deadline = deadline
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            self.deadline = NEVER

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
        """End the request and close the connection: an engine aborts a request whose client has
        disconnected. Idempotent.
        """
        self.receiver = None
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
        if self.receiver is not None:
            self.receiver.on_connection_lost()
        elif self._phase == _HEAD:
            self._fail(
                UpstreamDisconnected("it closed the connection before answering", self.has_answered)
            )
        elif self._phase == _BODY:
            self._wake()

    def on_deadline(self, now: float) -> None:
        if not self._is_response_ready:  # else the caller has data and has not run yet
            self.fail(UpstreamTimeout("it was silent for too long"))

    # -- helpers --

    def _send_more(self) -> None:
        """Write until the transport has enough. Handing over a large request at once would copy or
        encrypt all of it in one step of the event loop.
        """
        while self._unsent and not self._is_paused and self.transport is not None:
            self.transport.write(self._unsent.popleft())

    def _read_head(self) -> None:
        segments = self._segments
        data = segments[0] if len(segments) == 1 else b"".join(segments)
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0 or end > _MAX_HEAD:
                self._segments = [data]
                if len(data) > _MAX_HEAD or data[:7] != b"HTTP/1."[: len(data)]:
                    self._fail(InvalidResponse("its answer is not HTTP"))
                    self.abort()
                return
            try:
                head = read_response_head(data[: end + 4], self._method)
            except InvalidResponse as error:
                self._fail(error)
                self.abort()
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


# -- the idle connections --


@dataclass(frozen=True, slots=True)
class Target:
    """Address of an instance. `tls`: settings to verify the instance's certificate."""

    address: Address
    tls: ssl.SSLContext | None = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.address, self.tls)))

    def __hash__(self) -> int:
        return self._hash


class TargetPool:
    """The idle connections to one target. The deadline of an idle connection ends its keep-alive
    time.
    """

    __slots__ = ("_idle", "host", "num_received", "target")

    def __init__(self, target: Target) -> None:
        self.target = target
        self.host = str(target.address)
        self.num_received = 0
        """How many times data has arrived from the target."""
        self._idle: list[UpstreamConnection] = []

    def take(self, now: float) -> UpstreamConnection | None:
        """Take the connection used last that is still usable; None if there is none."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.deadline > now and connection.is_clean:
                return connection
            connection.abort()
        return None

    def put(self, connection: UpstreamConnection) -> None:
        self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """Drop a lost connection, idle or not."""
        if connection in self._idle:
            self._idle.remove(connection)
