"""The sending side of a client connection: `ConnectionWriter`, and the response of one request.

Belongs to the event loop's thread. `ConnectionWriter` tracks back-pressure and notifies the
producer; `ResponseWriter` is what a handler writes to.
"""

import asyncio
import socket
import struct
from collections.abc import Iterable
from typing import Protocol

from kvferry.router.http.framing import Framing, chunk
from kvferry.router.http.messages import response_head
from kvferry.router.http.parsing import RequestHead


class Server(Protocol):
    """What the server of a connection tells its writer."""

    loop: asyncio.AbstractEventLoop
    is_draining: bool


class BodySource(Protocol):
    """Produces the client's data by callbacks, without a coroutine that could wait."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def fail(self, error: Exception) -> None: ...


class ConnectionWriter:
    """Writes to one client. Every method may be called after the client has disconnected; only
    `put` then raises.
    """

    __slots__ = (
        "_corked",
        "_server",
        "_writable",
        "is_paused",
        "keeps_alive",
        "num_sent",
        "num_unread",
        "source",
        "transport",
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self._writable: asyncio.Future[None] | None = None
        self._corked: list[bytes] | None = None
        self.num_unread = 0
        """Unsent bytes in the write buffer at the last check."""
        self.num_sent = 0
        """Bytes sent in all responses of this connection."""
        self.transport: asyncio.Transport | None = None
        self.source: BodySource | None = None
        """Producer that is paused and resumed with the write buffer."""
        self.is_paused = False
        self.keeps_alive = True
        """Whether another request may follow on this connection."""

    @property
    def is_closing(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    @property
    def is_draining(self) -> bool:
        return self._server.is_draining

    def put(self, data: bytes) -> None:
        """Write bytes. ConnectionResetError if the client has disconnected."""
        transport = self.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        self.num_sent += len(data)
        if self._corked is None:
            transport.write(data)
        else:
            self._corked.append(data)

    def cork(self) -> None:
        """Collect writes until `uncork`, which sends all data in one call; the event loop would
        make one call per write.
        """
        if self._corked is None:
            self._corked = []

    def uncork(self) -> None:
        corked, self._corked = self._corked, None
        if corked and self.transport is not None and not self.transport.is_closing():
            self.transport.write(corked[0] if len(corked) == 1 else b"".join(corked))

    async def wait_writable(self) -> None:
        """Wait for space in the buffer. ConnectionError if the client stalls for too long."""
        writable = self._writable
        if writable is None or writable.done():
            writable = self._writable = self._server.loop.create_future()
        await writable

    def pause(self) -> None:
        self.is_paused = True
        self.num_unread = (
            self.transport.get_write_buffer_size() if self.transport is not None else 0
        )
        if self.source is not None:
            self.source.pause()

    def resume(self) -> None:
        self.is_paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        if self.source is not None:
            self.source.resume()

    def has_progressed(self) -> bool:
        """Whether the client has read anything since the last check."""
        size = self.transport.get_write_buffer_size() if self.transport is not None else 0
        before, self.num_unread = self.num_unread, size
        return size < before

    def fail(self, error: Exception) -> bool:
        """Pass the error to the coroutine or source that waits for space; False if none waits."""
        if self._writable is not None and not self._writable.done():
            self._writable.set_exception(error)
            return True
        if self.source is not None:
            self.source.fail(error)
            return True
        return False

    def pause_reading(self) -> None:
        if self.transport is not None and self.transport.is_reading():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if (
            self.transport is not None
            and not self.transport.is_closing()
            and not self.transport.is_reading()
        ):
            self.transport.resume_reading()

    def end_writing(self) -> bool:
        """Send all data and then a FIN; False if that is not possible (TLS)."""
        transport = self.transport
        if transport is None or transport.is_closing() or not transport.can_write_eof():
            return False
        self.resume_reading()
        transport.write_eof()
        return True

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def reset(self) -> None:
        """Abort with a TCP reset, which the client can distinguish from a regular end."""
        if self.transport is not None:
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


# -- response --


_WHOLE, _CHUNKED, _UNTIL_CLOSE = Framing.WHOLE, Framing.CHUNKED, Framing.UNTIL_CLOSE
# Smaller bodies are joined with the head into one write.
_JOINED_BYTES = 64 * 1024
_BODILESS = (204, 304)


class ResponseWriter:
    """The response to one request: one `send`, or `start`, `write` any number of times, `finish`.

    `abort` may be called at any time. A raw relayed response (`UpstreamResponse.relay`) that breaks
    off cannot always be continued: within a chunk, or within a body of known length, further bytes
    would become part of the data. In that case `can_write` is False, and only `abort` is possible.
    """

    __slots__ = (
        "_framing",
        "_sent_before",
        "can_write",
        "has_body",
        "is_finished",
        "is_http11",
        "out",
        "status",
    )

    def __init__(self, out: ConnectionWriter, head: RequestHead | None) -> None:
        self.out = out
        self._sent_before = out.num_sent
        out.keeps_alive = head is not None and head.keeps_alive and not out.is_draining
        self.is_http11 = head is None or head.is_http11
        self._framing = _WHOLE
        self.has_body = head is None or head.method != "HEAD"
        self.status = 0
        self.can_write = False
        """Whether `write` and `finish` can continue the bytes sent so far."""
        self.is_finished = False

    @property
    def num_sent(self) -> int:
        """Bytes of this response so far, head and framing included."""
        return self.out.num_sent - self._sent_before

    @property
    def is_started(self) -> bool:
        return self.status != 0

    def send(self, status: int, headers: Iterable[tuple[str, str]], body: bytes = b"") -> None:
        """Send a complete response."""
        out = self.out
        length = f"Content-Length: {len(body)}\r\n" if status not in _BODILESS else ""
        head = self._begin(status, headers, length)
        if self.has_body and body:
            if len(body) < _JOINED_BYTES:
                out.put(head + body)
            else:
                out.put(head)
                out.put(body)
        else:
            out.put(head)
        self.is_finished = True

    def start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        """Start a stream: chunked, or until the connection ends for HTTP/1.0."""
        self.start_framed(status, headers, _CHUNKED if self.is_http11 else _UNTIL_CLOSE, 0)
        self.can_write = True

    def start_framed(
        self, status: int, headers: Iterable[tuple[str, str]], framing: Framing, length: int
    ) -> None:
        """Send only a head; the body follows by `put_raw`."""
        self._framing = framing
        if framing is _CHUNKED:
            field = "Transfer-Encoding: chunked\r\n" if status not in _BODILESS else ""
        elif framing is not _UNTIL_CLOSE:
            field = f"Content-Length: {length}\r\n" if status not in _BODILESS else ""
        else:
            field = ""
            self.out.keeps_alive = False
        self.out.put(self._begin(status, headers, field))

    async def write(self, data: bytes) -> None:
        """Write part of the stream and wait for space in the buffer. ConnectionError if the client
        has disconnected or does not read for too long.
        """
        self.put(data)
        if self.out.is_paused:
            await self.out.wait_writable()

    async def finish(self) -> None:
        """End the stream. Idempotent."""
        if not self.is_finished:
            self.end()

    def abort(self) -> None:
        """Close the connection; the bytes sent never look like a complete response."""
        self.is_finished = True
        self.can_write = False
        self.out.keeps_alive = False
        if self._framing is _UNTIL_CLOSE:
            self.out.reset()  # a regular close would look like the end of the body
        elif self.is_started:
            self.out.close()
        else:
            self.out.abort()

    def put(self, data: bytes) -> None:
        """Write part of the stream without waiting."""
        if not self.can_write:
            raise ConnectionError("this response cannot be continued")
        if data and self.has_body:
            self.out.put(chunk(data) if self._framing is _CHUNKED else data)

    def put_raw(self, data: bytes) -> None:
        """Write bytes that already have the framing of the response."""
        if data and self.has_body:
            self.out.put(data)

    def end(self) -> None:
        """End the stream without waiting."""
        if not self.can_write:
            raise ConnectionError("this response cannot be continued")
        self.can_write = False
        self.is_finished = True
        if self._framing is _CHUNKED and self.has_body:
            self.out.put(b"0\r\n\r\n")

    def end_raw(self) -> None:
        """Mark the response as complete: the raw bytes contained the end."""
        self.can_write = False
        self.is_finished = True

    def _begin(self, status: int, headers: Iterable[tuple[str, str]], framing: str) -> bytes:
        if self.status:
            raise ConnectionError("this response has already started")
        self.has_body = self.has_body and status not in _BODILESS
        if self.out.is_draining:
            self.out.keeps_alive = False
        if not self.out.keeps_alive:
            framing += "Connection: close\r\n"
        elif not self.is_http11:
            framing += "Connection: keep-alive\r\n"
        head = response_head(status, headers, framing)
        self.status = status
        return head
