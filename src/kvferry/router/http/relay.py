"""Relays a response body from an instance to a client, from callback to callback.

Runs on the event loop: bytes are written in the tick in which they arrive, without a coroutine in
between. Back-pressure: while the client's buffer is full, the instance is not read, and the idle
timeout is suspended.
"""

import asyncio
from collections.abc import Callable, Iterable

from kvferry.router.http.deadlines import NEVER
from kvferry.router.http.framing import Body, ChunkedBody, Framing, FramingError, LengthBody
from kvferry.router.http.messages import InvalidResponse, UpstreamDisconnected
from kvferry.router.http.parsing import BodyKind, ResponseHead
from kvferry.router.http.upstream_connection import UpstreamConnection
from kvferry.router.http.writer import ResponseWriter

Filter = Callable[[bytes], bytes]

_LENGTH, _BY_LENGTH, _CHUNKED = BodyKind.LENGTH, Framing.LENGTH, Framing.CHUNKED


class Relay:
    """Relay of one body. Used once: `begin`, then `run` unless `is_over`, then `check`."""

    __slots__ = (
        "_body",
        "_connection",
        "_error",
        "_filter",
        "_idle_s",
        "_is_raw",
        "_on_first",
        "_out",
        "_reply",
        "_waiter",
        "has_extra_bytes",
        "is_over",
    )

    def __init__(
        self,
        connection: UpstreamConnection,
        body: Body,
        reply: ResponseWriter,
        filter: Filter | None,
    ) -> None:
        self._connection = connection
        self._body = body
        self._reply = reply
        self._out = reply.out
        self._filter = filter
        self._is_raw = False
        self._idle_s = 0.0
        self._on_first: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.is_over = False
        self.has_extra_bytes = False
        """True if the instance sent bytes after the body."""

    def begin(
        self,
        head: ResponseHead,
        headers: Iterable[tuple[str, str]],
        start: bytes,
        on_first: Callable[[], None] | None = None,
    ) -> None:
        """Send the head and the bytes of the body that have arrived so far, in one write."""
        out = self._out
        out.cork()
        try:
            self._start(head, headers, start)
            if start and on_first is not None:
                on_first()
            else:
                self._on_first = on_first
            if (
                self._body.is_ended
            ):  # all of it was read before, and the connection may already serve another request
                self._end()
            else:
                data = self._connection.take()
                if data:
                    self.receive(data)
        finally:
            out.uncork()

    async def run(self, idle_timeout_s: float) -> None:
        """Relay until the body ends or fails."""
        connection = self._connection
        if connection.is_lost:
            self.on_connection_lost()
            return
        self._idle_s = idle_timeout_s
        self._waiter = connection.loop.create_future()
        connection.receiver = self
        self._out.source = self
        connection.deadline = connection.loop.time() + idle_timeout_s
        if self._out.is_paused:
            self.pause()
        try:
            await self._waiter
        finally:
            connection.receiver = None
            connection.deadline = NEVER
            self._out.source = None
            self._update_can_write()

    def check(self) -> None:
        """Raise the error that ended the relay, if any."""
        self._update_can_write()
        if self._error is not None:
            raise self._error

    def _update_can_write(self) -> None:
        # Raw bytes can be continued only between two chunks.
        self._reply.can_write = not self._reply.is_finished and (
            not self._is_raw or self._body.is_at_boundary
        )

    def _start(self, head: ResponseHead, headers: Iterable[tuple[str, str]], start: bytes) -> None:
        reply, body = self._reply, self._body
        if self._filter is None and head.body <= _LENGTH:
            reply.start_framed(head.status, headers, _BY_LENGTH, head.length)
            reply.put_raw(start)
            self._is_raw = reply.has_body
            reply.can_write = not reply.has_body
            return
        prefix = (
            body.resume_raw(start)
            if self._filter is None and isinstance(body, ChunkedBody) and reply.is_http11
            else None
        )
        if prefix is not None:
            reply.start_framed(head.status, headers, _CHUNKED, 0)
            reply.put_raw(prefix)
            self._is_raw = reply.has_body
            reply.can_write = not reply.has_body
            return
        reply.start(head.status, headers)
        reply.put(self._filter(start) if self._filter is not None and start else start)

    # -- from the instance --

    def receive(self, data: bytes) -> None:
        if self.is_over:
            return
        try:
            if self._on_first is not None:
                on_first, self._on_first = self._on_first, None
                on_first()
            if self._is_raw:
                used = self._body.advance(data, None)
                self._out.put(data if used == len(data) else data[:used])
            else:
                used = self._convert(data)
        except FramingError as error:
            self._is_raw, self._body = (
                True,
                LengthBody(1),
            )  # the end of the client's current chunk is unknown: nothing can follow
            self.fail(InvalidResponse(f"its chunked answer is not valid: {error}"))
            return
        except Exception as error:
            self.fail(error)
            return
        if self._body.is_ended:
            self.has_extra_bytes = used < len(data)
            self._end()
        elif self._connection.deadline != NEVER:
            self._connection.deadline = self._connection.loop.time() + self._idle_s

    def on_connection_lost(self) -> None:
        """End the body if the connection's end is its end, else fail."""
        if self.is_over:
            return
        if self._body.is_complete_at_close and self._connection.error is None:
            self._end()
        else:
            self.fail(
                UpstreamDisconnected(
                    "it closed the connection in the middle of its answer", has_answered=True
                )
            )

    def fail(self, error: Exception) -> None:
        if not self.is_over:
            self._error = error
            self._finish()

    # -- from the client --

    def pause(self) -> None:
        self._connection.deadline = NEVER
        self._connection.pause_reading()

    def resume(self) -> None:
        self._connection.deadline = self._connection.loop.time() + self._idle_s
        self._connection.resume_reading()

    # -- helpers --

    def _convert(self, data: bytes) -> int:
        decoded: list[bytes] = []
        used = self._body.advance(data, decoded)
        for segment in decoded:
            if segment:
                self._reply.put(self._filter(segment) if self._filter is not None else segment)
        return used

    def _end(self) -> None:
        try:
            if self._is_raw:
                self._reply.end_raw()
            else:
                if self._filter is not None:
                    self._reply.put(self._filter(b""))
                self._reply.end()
        except Exception as error:
            self.fail(error)
            return
        self._finish()

    def _finish(self) -> None:
        self.is_over = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
