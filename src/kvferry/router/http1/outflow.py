"""The sending half of a client's connection: what is written, whether there is room, and who is told when there is again."""

import asyncio
import socket
import struct
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvferry.router.http1.server import HttpServer

__all__ = ["Flow", "Outflow"]


class Flow(Protocol):
    """Whoever produces what the client reads, without a coroutine that could wait."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def fail(self, error: Exception) -> None: ...


class Outflow:
    """All of its methods may be called when the client is gone; `put` then says so."""

    __slots__ = ("_held", "_room", "_server", "flow", "is_paused", "keeps_alive", "num_sent", "num_unread", "transport")

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._room: asyncio.Future[None] | None = None
        self._held: list[bytes] | None = None
        self.num_unread = 0
        """Bytes that the client's kernel had not taken, when that was looked at last."""
        self.num_sent = 0
        """Bytes, over all answers of this connection."""
        self.transport: asyncio.Transport | None = None
        self.flow: Flow | None = None
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
        if self._held is None:
            transport.write(data)
        else:
            self._held.append(data)

    def hold(self) -> None:
        """Gather what is put until `let_go`, which sends it by one call: a loop writes each piece by a call of its own."""
        if self._held is None:
            self._held = []

    def let_go(self) -> None:
        held, self._held = self._held, None
        if held and self.transport is not None and not self.transport.is_closing():
            self.transport.write(held[0] if len(held) == 1 else b"".join(held))

    async def wait_for_room(self) -> None:
        """ConnectionError when the client reads nothing for too long."""
        room = self._room
        if room is None or room.done():
            room = self._room = self._server.loop.create_future()
        await room

    def pause(self) -> None:
        self.is_paused = True
        self.num_unread = self.transport.get_write_buffer_size() if self.transport is not None else 0
        if self.flow is not None:
            self.flow.pause()

    def resume(self) -> None:
        self.is_paused = False
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        if self.flow is not None:
            self.flow.resume()

    def has_progressed(self) -> bool:
        """Whether the client has read anything since it was asked last."""
        size = self.transport.get_write_buffer_size() if self.transport is not None else 0
        before, self.num_unread = self.num_unread, size
        return size < before

    def fail(self, error: Exception) -> bool:
        """Tell whoever waits for room; whether there was anybody."""
        if self._room is not None and not self._room.done():
            self._room.set_exception(error)
            return True
        if self.flow is not None:
            self.flow.fail(error)
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
