"""The sending half of a client's connection: what is written, whether there is room, and who is
told when there is again.
"""

import asyncio
import socket
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from kvferry.router.http.framing import Framing, chunk
from kvferry.router.http.messages import response_head
from kvferry.router.http.parsing import RequestHead

if TYPE_CHECKING:
    from kvferry.router.http.server import HttpServer

__all__ = ["BodySource", "ConnectionWriter", "ResponseWriter"]


class BodySource(Protocol):
    """Whoever produces what the client reads, without a coroutine that could wait."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def fail(self, error: Exception) -> None: ...


class ConnectionWriter:
    """All of its methods may be called when the client is gone; `put` then says so."""

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

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._writable: asyncio.Future[None] | None = None
        self._corked: list[bytes] | None = None
        self.num_unread = 0
        """Bytes that the client's kernel had not taken, when that was looked at last."""
        self.num_sent = 0
        """Bytes, over all answers of this connection."""
        self.transport: asyncio.Transport | None = None
        self.source: BodySource | None = None
        self.is_paused = False
        self.keeps_alive = True
        """Whether another request may follow this one."""

    @property
    def is_closing(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    @property
    def is_draining(self) -> bool:
        return self._server.is_draining

    def put(self, data: bytes) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        self.num_sent += len(data)
        if self._corked is None:
            transport.write(data)
        else:
            self._corked.append(data)

    def cork(self) -> None:
        """Gather what is put until `uncork`, which sends it by one call: a loop writes each segment
        by a call of its own.
        """
        if self._corked is None:
            self._corked = []

    def uncork(self) -> None:
        corked, self._corked = self._corked, None
        if corked and self.transport is not None and not self.transport.is_closing():
            self.transport.write(corked[0] if len(corked) == 1 else b"".join(corked))

    async def wait_writable(self) -> None:
        """ConnectionError when the client reads nothing for too long."""
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
        """Whether the client has read anything since it was asked last."""
        size = self.transport.get_write_buffer_size() if self.transport is not None else 0
        before, self.num_unread = self.num_unread, size
        return size < before

    def fail(self, error: Exception) -> bool:
        """Tell whoever waits for room; whether there was anybody."""
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
        """Send what there is and then our end; False when that is not possible (TLS)."""
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
        """Abort in a way that the client can tell from an end."""
        if self.transport is not None:
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


# -------------------- reply --------------------
# The answer to one request, as its handler writes it.


_WHOLE, _CHUNKED, _UNTIL_CLOSE = Framing.WHOLE, Framing.CHUNKED, Framing.UNTIL_CLOSE
_JOINED_BYTES = 64 * 1024
_BODILESS = (204, 304)


class ResponseWriter:
    """Either one `send`, or `start`, any number of `write`, `finish`. `abort` at any time. Belongs
    to the loop's thread.

    An answer that is passed on raw (`UpstreamResponse.relay`) and breaks off cannot always be
    continued: inside a chunk, or within a body of known length, whatever we write would become part
    of the data. `can_write` says so; then `abort` is all that is left.
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
        """Whether `write` and `finish` would continue what was sent so far."""
        self.is_finished = False

    @property
    def num_sent(self) -> int:
        """Bytes of this answer so far, its head and its framing among them."""
        return self.out.num_sent - self._sent_before

    @property
    def is_started(self) -> bool:
        return self.status != 0

    def send(self, status: int, headers: Iterable[tuple[str, str]], body: bytes = b"") -> None:
        """A whole answer."""
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
        """A stream: chunked, or up to the end of the connection for HTTP/1.0."""
        self.start_framed(status, headers, _CHUNKED if self.is_http11 else _UNTIL_CLOSE, 0)
        self.can_write = True

    def start_framed(
        self, status: int, headers: Iterable[tuple[str, str]], framing: Framing, length: int
    ) -> None:
        """A head alone; the bytes that follow come by `put_raw`."""
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
        """Waits until there is room. ConnectionError when the client is gone, or reads nothing for
        too long.
        """
        self.put(data)
        if self.out.is_paused:
            await self.out.wait_writable()

    async def finish(self) -> None:
        """The end of the stream. Idempotent."""
        if not self.is_finished:
            self.end()

    def abort(self) -> None:
        """Close the connection: what was sent may still arrive, but never looks whole."""
        self.is_finished = True
        self.can_write = False
        self.out.keeps_alive = False
        if self._framing is _UNTIL_CLOSE:
            self.out.reset()  # for the client any other end is the end of the body
        elif self.is_started:
            self.out.close()
        else:
            self.out.abort()

    def put(self, data: bytes) -> None:
        """A segment of the stream, without waiting."""
        if not self.can_write:
            raise ConnectionError("this answer cannot be continued")
        if data and self.has_body:
            self.out.put(chunk(data) if self._framing is _CHUNKED else data)

    def put_raw(self, data: bytes) -> None:
        """Bytes in the framing that was started."""
        if data and self.has_body:
            self.out.put(data)

    def end(self) -> None:
        if not self.can_write:
            raise ConnectionError("this answer cannot be continued")
        self.can_write = False
        self.is_finished = True
        if self._framing is _CHUNKED and self.has_body:
            self.out.put(b"0\r\n\r\n")

    def end_raw(self) -> None:
        """The raw bytes that were put have brought the end with them."""
        self.can_write = False
        self.is_finished = True

    def _begin(self, status: int, headers: Iterable[tuple[str, str]], framing: str) -> bytes:
        if self.status:
            raise ConnectionError("this answer was started before")
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
