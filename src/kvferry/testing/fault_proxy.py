"""A TCP proxy that injects network faults on command: delay, stall, reset, half-open connections, a
cut after a number of bytes.

One thread, with its own event loop, owns the sockets. Any other thread may give commands; a command
has taken effect when it returns. The proxy forwards bytes unchanged, so any protocol, encrypted or
not, sees a bad network and nothing else. See docs/decisions/017-faults-are-made-outside.md.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Self

from kvferry.types import Address

__all__ = ["BOTH", "FaultProxy", "ProxyDirection", "ProxySide"]

_CALL_S = 10.0
_CHUNK_BYTES = 65536
_QUEUED_CHUNKS = 64
# SO_LINGER with a timeout of 0: closing the socket sends a reset.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class ProxyDirection(Enum):
    """The direction of bytes through the proxy."""

    TO_SERVER = "to the server"
    TO_CLIENT = "to the client"


class ProxySide(Enum):
    """One end of a proxied connection."""

    CLIENT = "client"
    SERVER = "server"


BOTH = (ProxyDirection.TO_SERVER, ProxyDirection.TO_CLIENT)


@dataclass(slots=True)
class _DirectionState:
    """The faults and counters of one direction."""

    delay_s: float = 0.0
    flows: asyncio.Event = field(default_factory=asyncio.Event)
    bytes_left: int | None = None
    """How many more bytes may pass; None for no limit."""
    carried_bytes: int = 0

    def __post_init__(self) -> None:
        self.flows.set()

    def allowance(self, size_bytes: int) -> int:
        """How many of these bytes may pass; the result is subtracted from the limit."""
        allowed = size_bytes if self.bytes_left is None else min(size_bytes, self.bytes_left)
        if self.bytes_left is not None:
            self.bytes_left -= allowed
        self.carried_bytes += allowed
        return allowed


class FaultProxy:
    """Listens from `start` to `close` and forwards every connection to `upstream`."""

    def __init__(self, upstream: Address, listen: Address) -> None:
        """Prepare a proxy; port 0 in `listen` is any free port."""
        self._upstream = upstream
        self._listen = listen
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-proxy")
        self._ways = {direction: _DirectionState() for direction in ProxyDirection}
        self._connections: set[_ProxiedConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._num_accepted = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        self._thread.start()
        self.accept()

    def close(self) -> None:
        """Reset every connection and stop the thread. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(_CALL_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_S)
        self._loop.close()

    # -- observations --

    @property
    def address(self) -> Address:
        """The address that clients connect to."""
        return self._listen

    @property
    def num_accepted(self) -> int:
        """The number of connections accepted so far."""
        return self._num_accepted

    def carried_bytes(self, direction: ProxyDirection) -> int:
        return self._ways[direction].carried_bytes

    # -- faults --

    def flow(self) -> None:
        """Undo `delay`, `stall` and `cut_after`. Bytes that were held back are forwarded."""
        self._call(self._flow)

    def delay(self, seconds: float, *directions: ProxyDirection) -> None:
        """Forward the bytes that arrive from now on this much later."""

        def act() -> None:
            for each in directions or BOTH:
                self._ways[each].delay_s = seconds

        self._call(act)

    def stall(self, *directions: ProxyDirection) -> None:
        """Keep accepting connections and keep them open, but forward nothing."""

        def act() -> None:
            for each in directions or BOTH:
                self._ways[each].flows.clear()

        self._call(act)

    def cut_after(self, size_bytes: int, direction: ProxyDirection) -> None:
        """Forward this many more bytes in this direction, then reset every connection that sends
        more.
        """

        def act() -> None:
            self._ways[direction].bytes_left = size_bytes

        self._call(act)

    def reset(self) -> None:
        """Reset both sides of every connection at once."""
        self._call(self._reset_all)

    def vanish(self, side: ProxySide) -> None:
        """Close one side of every connection. The other side stays open without notice, and its
        bytes are discarded.
        """

        def act() -> None:
            for connection in self._connections:
                connection.vanish(side)

        self._call(act)

    def refuse(self) -> None:
        """Stop listening. Existing connections stay open."""
        self._call(self._stop_listening)

    def accept(self) -> None:
        """Listen, for the first time or again."""
        asyncio.run_coroutine_threadsafe(self._start_listening(), self._loop).result(_CALL_S)

    # -- on the event loop's thread --

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, action: Callable[[], None]) -> None:
        """Run an action on the event loop's thread and wait for it."""

        async def act() -> None:
            action()

        asyncio.run_coroutine_threadsafe(act(), self._loop).result(_CALL_S)

    def _flow(self) -> None:
        for way in self._ways.values():
            way.delay_s, way.bytes_left = 0.0, None
            way.flows.set()

    def _reset_all(self) -> None:
        for connection in list(self._connections):
            connection.reset()

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _start_listening(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(
                self._accepted, self._listen.host, self._listen.port
            )
            self._listen = Address(self._listen.host, self._server.sockets[0].getsockname()[1])

    async def _shut(self) -> None:
        self._stop_listening()
        self._reset_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_accepted += 1
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(
                self._upstream.host, self._upstream.port
            )
        except OSError:
            _abort(writer)
            return
        connection = _ProxiedConnection(writer, upstream_writer)
        self._connections.add(connection)
        try:
            await asyncio.gather(
                self._pump(reader, upstream_writer, ProxyDirection.TO_SERVER, connection),
                self._pump(upstream_reader, writer, ProxyDirection.TO_CLIENT, connection),
            )
        finally:
            self._connections.discard(connection)
            connection.reset()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        direction: ProxyDirection,
        connection: "_ProxiedConnection",
    ) -> None:
        """Forward one direction until the sender ends. Reading and writing are separate tasks, so
        that a delay does not limit the rate.
        """
        way = self._ways[direction]
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_CHUNKS)
        writing = asyncio.create_task(self._write(queue, writer, way, connection))
        try:
            chunk = b"start"
            while chunk:
                try:
                    chunk = await reader.read(_CHUNK_BYTES)
                except OSError:
                    chunk = b""
                await queue.put((self._loop.time() + way.delay_s, chunk))
            await writing
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(
        self,
        queue: "asyncio.Queue[tuple[float, bytes]]",
        writer: asyncio.StreamWriter,
        way: _DirectionState,
        connection: "_ProxiedConnection",
    ) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, chunk = await queue.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                await way.flows.wait()
                if connection.is_half_open:
                    continue
                if not chunk:
                    writer.write_eof()
                    return
                allowed = way.allowance(len(chunk))
                writer.write(chunk[:allowed])
                await writer.drain()
                if allowed < len(chunk):
                    connection.reset()
                    return


class _ProxiedConnection:
    """The two sockets of one proxied connection."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._writers = {ProxySide.CLIENT: client, ProxySide.SERVER: server}
        self.is_half_open = False

    def reset(self) -> None:
        for writer in self._writers.values():
            _abort(writer)

    def vanish(self, side: ProxySide) -> None:
        self.is_half_open = True
        _abort(self._writers[side])


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with a reset, without sending the remaining bytes."""
    raw = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # closed already
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
