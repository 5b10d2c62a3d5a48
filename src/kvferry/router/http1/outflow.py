"""The sending half of a client's connection: what is written, whether there is room, and who is told when there is again."""

import asyncio
import socket
import struct
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvferry.router.http1.server import HttpServer

__all__ = ["BodySource", "ConnectionWriter"]


class BodySource(Protocol):
    """Whoever produces what the client reads, without a coroutine that could wait."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def fail(self, error: Exception) -> None: ...


class ConnectionWriter:
    """All of its methods may be called when the client is gone; `put` then says so."""

    __slots__ = ("_corked", "_server", "_writable", "is_paused", "keeps_alive", "num_sent", "num_unread", "source", "transport")

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
        """Gather what is put until `uncork`, which sends it by one call: a loop writes each segment by a call of its own."""
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
        self.num_unread = self.transport.get_write_buffer_size() if self.transport is not None else 0
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
        if self.transport is not None and not self.transport.is_closing() and not self.transport.is_reading():
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
