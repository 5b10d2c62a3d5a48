"""The side of the `tcp` plane that is dialled: it checks every request and serves it from registered memory.

Owned by the plane's own thread. Whoever does not prove within seconds that it has seen the offer is sent away; what a known peer asks for
must lie in registered memory, and what it writes in blocks that were lent (`tcp_fence`).
"""

import secrets
import socket
import time
from collections.abc import Generator

import numpy as np

from kvferry.errors import RemoteProtocolError
from kvferry.planes import tcp_wire as wire
from kvferry.planes.tcp_fence import WriteFence, Writer
from kvferry.planes.tcp_loop import Loop, Talk
from kvferry.planes.tcp_stream import Span, Stream, tune
from kvferry.planes.views import AddressedMemory

__all__ = ["Server"]

MAX_CONNECTIONS = 4096
MAX_STRANGERS = 256
"""Connections that have not proved anything yet."""
PROOF_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 60.0
"""A peer that takes none of the bytes it asked for, or does not go on with its request, for so long has lost interest."""
IDLE_TIMEOUT_S = 600.0
MAX_OUTGOING = 4
"""Replies waiting to be sent; no further request is read before."""
SINK_BYTES = 1024 * 1024
MAX_SINKS = 4 * wire.MAX_BATCH_BYTES // SINK_BYTES + 4
"""What is read of a writer that was turned away: all it can have under way. Were it closed at once, the reset would reach it before the
reason does."""


class Server:
    def __init__(self, loop: Loop, token: bytes, ranges: wire.Ranges, memory: AddressedMemory, fence: WriteFence) -> None:
        self._loop = loop
        self._token = token
        self._ranges = ranges
        self._memory = memory
        self.fence = fence
        self.sink = memoryview(bytearray(SINK_BYTES))
        """For all who were turned away: nobody reads it."""
        self._known: set[_Served] = set()
        self._strangers: dict[_Served, None] = {}
        """In the order they came."""

    def accept(self, connection: socket.socket) -> None:
        if len(self._known) >= MAX_CONNECTIONS:
            connection.close()
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._loop.drop(next(iter(self._strangers)), "newer strangers came")
        try:
            tune(connection)
        except OSError:  # it has gone again
            connection.close()
            return
        served = _Served(Stream(connection), self, self._token)
        self._strangers[served] = None
        self._loop.add(served)

    def known(self, served: "_Served") -> None:
        """It has proved that it may ask."""
        self._strangers.pop(served, None)
        self._known.add(served)

    def forget(self, served: "_Served") -> None:
        self._strangers.pop(served, None)
        self._known.discard(served)
        self.fence.release(served)

    def views(self, rows: wire.Rows, total_bytes: int) -> list[memoryview]:
        """RemoteProtocolError unless all of it is registered."""
        self._ranges.check(rows, total_bytes)
        return self._memory.views(rows[:, 0].tolist(), rows[:, 1].tolist())


class _Served(Writer):
    """One dialler and what it asks for."""

    def __init__(self, stream: Stream, server: Server, token: bytes) -> None:
        self._server = server
        self._token = token
        self._came_at = time.monotonic()
        self._is_amid_request = False
        self.is_known = False
        super().__init__(stream)

    def talk(self) -> Talk:
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self.stream.send(wire.greeting(nonce))
        answer = bytearray(wire.NONCE_BYTES + wire.PROOF_BYTES)
        yield Span([memoryview(answer)])
        nonces = nonce + bytes(answer[: wire.NONCE_BYTES])
        if not wire.is_proof(bytes(answer[wire.NONCE_BYTES :]), self._token, wire.Role.DIALLER, nonces):
            raise RemoteProtocolError("the dialler does not know this plane's token")
        self.stream.send(wire.prove(self._token, wire.Role.PRODUCER, nonces))
        self.is_known = True
        self._server.known(self)
        try:
            while not (why := (yield from self._serve_one())):
                pass
        except RemoteProtocolError as error:
            self.stream.send(wire.pack_reply(str(error)))
        else:
            yield from self._refuse_all(why)

    def turn_away(self, why: str) -> None:
        self.go_over_to(self._refuse_all(why))

    def may_receive(self) -> bool:
        return self.stream.num_outgoing < MAX_OUTGOING

    def is_overdue(self, now: float) -> str | None:
        if not self.is_known:
            return "it proved nothing" if now > self._came_at + PROOF_TIMEOUT_S else None
        is_stalled = self._is_amid_request or self.stream.is_sending
        patience_s = STALL_TIMEOUT_S if is_stalled else IDLE_TIMEOUT_S
        return "it has been silent" if now > self.last_moved + patience_s else None

    def ended(self, why: str) -> None:
        self._server.forget(self)

    def _refuse_all(self, why: str) -> Talk:
        self.stream.send(wire.pack_reply(why, wire.Status.NOT_LENT))
        for _ in range(MAX_SINKS):
            yield Span([self._server.sink])

    def _serve_one(self) -> Generator[Span, None, str]:
        """Why nothing more is received of this dialler; empty when it may go on."""
        header = bytearray(wire.HEADER_BYTES)
        yield Span([memoryview(header)])
        self._is_amid_request = True
        request = wire.unpack_header(bytes(header))
        rows = np.empty((request.num_runs, 2), "<i8")
        yield Span([rows.data.cast("B")])
        views = self._server.views(rows, request.total_bytes)
        if request.operation is wire.Operation.READ:
            self.stream.send(wire.pack_reply(), *views)
        elif why := self._server.fence.admit(self, request.number, rows):
            return why
        else:
            yield Span(views)
            self._server.fence.release(self)
            self.stream.send(wire.pack_reply())
        self._is_amid_request = False
        return ""
