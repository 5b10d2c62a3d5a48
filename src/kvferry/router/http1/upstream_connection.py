"""One connection to an instance: a request out, the head and then the raw bytes of its answer in.

A request whose answer matters to somebody even after its asker has left (`on_late_response`) is left in good order: see `parting`.

An instance may answer before it has read the whole request, and then reset the connection. The loop reads before it writes, so the
answer is there before the failed write ends the connection.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from kvferry.router.http1.errors import InvalidResponse, UpstreamDisconnected, UpstreamTimeout
from kvferry.router.http1.parsing import ResponseHead, read_response_head
from kvferry.router.http1.parting import ABANDON_TIMEOUT_S, AbandonedConnections, LateResponse, OnLateResponse, half_close
from kvferry.router.http1.sweep import NEVER

if TYPE_CHECKING:
    from kvferry.router.http1.pool import TargetPool

__all__ = ["Receiver", "UpstreamConnection"]

_MAX_HEAD = 64 * 1024
_MAX_WAITING = 256 * 1024
"""Bytes of a body that nobody has taken; the instance is not read while there are more."""


class Receiver(Protocol):
    """Gets the bytes of a body as they come."""

    def receive(self, data: bytes) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def on_connection_lost(self) -> None:
        """The connection is gone; its `error` says how."""


# Where an exchange is. Not asked anything yet: what comes is kept all the same, as a server with too many connections answers before it is
# asked. Idle, after an exchange: what comes is an answer to nothing. Parting: the asker has left.
_FRESH, _HEAD, _BODY, _IDLE, _ABANDONED = range(5)


class UpstreamConnection(asyncio.Protocol):
    """Belongs to the loop's thread. `on_lost` hears of its end once."""

    __slots__ = (
        "_abandoned",
        "_head_waiter",
        "_late",
        "_method",
        "_on_lost",
        "_phase",
        "_segments",
        "_size",
        "_waiter",
        "deadline",
        "error",
        "has_answered",
        "loop",
        "pool",
        "receiver",
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
        self._head_waiter: asyncio.Future[ResponseHead] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._late: LateResponse | None = None
        self.transport: asyncio.Transport | None = None
        self.deadline = NEVER
        self.error: Exception | None = None
        """Why it was lost; None also when the instance closed it in good order."""
        self.has_answered = False
        self.receiver: Receiver | None = None

    @property
    def is_lost(self) -> bool:
        return self.transport is None

    @property
    def num_waiting(self) -> int:
        """Bytes of the body that nobody has taken."""
        return self._size

    @property
    def is_pending(self) -> bool:
        """Somebody waits for an answer of which nothing has been passed on."""
        return self.receiver is None and self._phase in (_HEAD, _BODY)

    @property
    def is_clean(self) -> bool:
        """Whether another request could follow: nothing is left over on either side."""
        transport = self.transport
        return transport is not None and not self._size and not transport.is_closing() and not transport.get_write_buffer_size()

    # -- the exchange --------------------------------------------------------------------------------------------------

    def send_request(
        self, method: str, data: bytes, timeout_s: float, on_late_response: OnLateResponse | None = None
    ) -> "asyncio.Future[ResponseHead]":
        """Send a request; the head of its answer comes by the future."""
        self._method = method
        self._late = LateResponse(method, on_late_response) if on_late_response is not None else None
        self._phase = _HEAD
        self.has_answered = False
        self.deadline = self.loop.time() + timeout_s
        waiter = self._head_waiter = self.loop.create_future()
        if self._segments:
            self.has_answered = True
            if self._late is not None:
                self._late.add(b"".join(self._segments))
            self._read_head()
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)
        elif not waiter.done():
            waiter.set_exception(UpstreamDisconnected("it closed the connection before it had answered", self.has_answered))
        return waiter

    def take(self) -> bytes:
        """The raw bytes of the body that have come and that nobody has taken."""
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
        """The same, and they stay."""
        segments = self._segments
        if len(segments) > 1:
            segments[:] = [b"".join(segments)]
        return segments[0] if segments else b""

    async def wait_readable(self, deadline: float) -> None:
        """Until there is something to take, or the connection is lost. UpstreamTimeout, and then it is closed."""
        if self._phase == _ABANDONED:
            raise UpstreamDisconnected("it was left before it had answered", self.has_answered)
        self.deadline = deadline
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            if self._phase != _ABANDONED:
                self.deadline = NEVER

    def mark_complete(self) -> None:
        """The answer is whole and its asker has it."""
        self._late = None

    def set_idle(self, deadline: float) -> None:
        """The exchange is over; until the deadline another may begin."""
        self._phase = _IDLE
        self.deadline = deadline
        self.resume_reading()

    def pause_reading(self) -> None:
        if self.transport is not None and not self.transport.is_closing() and self.transport.is_reading():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.transport is not None and not self.transport.is_closing() and not self.transport.is_reading():
            self.transport.resume_reading()

    def fail(self, error: Exception) -> None:
        """Whoever waits gets the error; the connection is closed."""
        receiver = self.receiver
        self._fail(error)
        self.abort()
        if receiver is not None:
            receiver.fail(error)

    def abort(self) -> None:
        """Whoever asked wants nothing more from it. Idempotent."""
        self.receiver = None
        if self._phase == _ABANDONED:
            return
        if self._late is not None and self._phase in (_HEAD, _BODY) and self._abandoned.admit(self):
            self._abandon()
        else:
            self.abort_transport()

    def abort_transport(self) -> None:
        """Nobody wants anything more from it."""
        self.deadline = NEVER
        if self.transport is not None:
            self.transport.abort()

    # -- asyncio -------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's is no subclass of asyncio.Transport

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
            self.abort()  # nobody asked
        else:
            if self._size > _MAX_WAITING:
                self.pause_reading()
            if self._phase == _BODY:
                self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.error = error
        self.transport = None
        self.deadline = NEVER
        self._on_lost(self)
        if self._phase == _ABANDONED:
            self._finish_abandoned()
        elif self.receiver is not None:
            self.receiver.on_connection_lost()
        elif self._phase == _HEAD:
            self._fail(UpstreamDisconnected("it closed the connection before it had answered", self.has_answered))
        elif self._phase == _BODY:
            self._wake()

    def on_deadline(self, now: float) -> None:
        """The deadline has passed."""
        if self._phase == _ABANDONED:
            self.abort_transport()
        elif not self._is_response_ready:  # whoever has some has not looked yet
            self.fail(UpstreamTimeout("it was silent for too long"))

    # -- its own -------------------------------------------------------------------------------------------------------

    def _abandon(self) -> None:
        self._fail(UpstreamDisconnected("it was left before it had answered", self.has_answered))
        self._phase = _ABANDONED
        self._segments = []
        self._size = 0
        if self.transport is None:
            self._finish_abandoned()  # all that would come has come
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
        """Of an answer, for its asker: in this very turn."""
        waiter = self._head_waiter if self._phase == _HEAD else self._waiter if self._phase == _BODY else None
        return self.receiver is None and waiter is not None and waiter.done()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        waiter = self._head_waiter if self._phase == _HEAD else self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
