"""What a `tcp` transport has lent, and which connections are receiving into it.

The transport's owner lends and takes back; the loop's thread admits writes and is the only one that
receives. A number that is taken back while something is received under it has ended once that
thread has turned those connections away.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial

import numpy as np

from kvferry.errors import RemoteProtocolError
from kvferry.transports.base import Completion, Handle
from kvferry.transports.copy.gather import AddressedMemory
from kvferry.transports.tcp import wire
from kvferry.transports.tcp.loop import (
    ConnectionHandler,
    IoVector,
    SocketLoop,
    SocketStream,
    TcpConnection,
    tune,
)
from kvferry.transports.tcp.wire import Rows
from kvferry.transports.write_grants import WriteGrantTable, grant_not_active, write_outside_grant
from kvferry.types import Region

__all__ = ["TcpServer", "TcpWriteGrants", "WriterConnection"]


class WriterConnection(TcpConnection):
    """A connection on which a peer writes."""

    def reject(self, why: str) -> None:
        """Tell the peer, and let whatever else it sends land nowhere."""
        raise NotImplementedError


class TcpWriteGrants:
    def __init__(
        self, loop: SocketLoop, regions: tuple[Region, ...], ended: Callable[[Completion], None]
    ) -> None:
        """`ended` may be called by either thread."""
        self._loop = loop
        self._ended = ended
        self._lock = threading.Lock()
        """For what both threads use: these two."""
        self._granted = WriteGrantTable(regions)
        self._receiving: dict[WriterConnection, int] = {}

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        with self._lock:
            self._granted.grant_writes(grant_id, blocks)

    def revoke_writes(self, grant_id: int, handle: Handle) -> None:
        with self._lock:
            self._granted.remove(grant_id)
            is_received = grant_id in self._receiving.values()
        if is_received:
            self._loop.call(partial(self._reject_writers, grant_id, handle))
        else:
            self._ended(_completion(handle))

    # -- on the loop's thread --

    def admit(self, writer: WriterConnection, grant_id: int, rows: Rows) -> str:
        """Why a write may not be received; empty when it may: from now on, and until `release`, it
        is under way.
        """
        with self._lock:
            granted = self._granted.get(grant_id)
        if granted is not None and not granted.covers(rows[:, 0], rows[:, 1]):
            return write_outside_grant(grant_id)
        with self._lock:
            if granted is None or self._granted.get(grant_id) is not granted:
                return grant_not_active(grant_id)
            self._receiving[writer] = grant_id
        return ""

    def release(self, writer: WriterConnection) -> None:
        """Nothing more is received there, or its connection is closed."""
        with self._lock:
            self._receiving.pop(writer, None)

    def _reject_writers(self, grant_id: int, handle: Handle) -> None:
        with self._lock:
            writers = [writer for writer, under in self._receiving.items() if under == grant_id]
        for writer in writers:
            writer.reject(grant_not_active(grant_id))
            self.release(writer)
            self._loop.update(writer)
        self._ended(_completion(handle))


def _completion(handle: Handle) -> Completion:
    return Completion(handle, None, 0, 0, 0.0, 0.0)


# -------------------- tcp server -------------------- The side of the `tcp` transport that is
# dialled: it checks every request and serves it from registered memory.
#
# Owned by the transport's own thread. Whoever does not prove within seconds that it has seen the
# offer is sent away; what a known peer asks for must lie in registered memory, and what it writes
# in blocks that were lent (`tcp_fence`).


MAX_CONNECTIONS = 4096
MAX_UNAUTHENTICATED = 256
"""Connections that have not proved anything yet."""
PROOF_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 60.0
"""A peer that takes none of the bytes it asked for, or does not go on with its request, for so long
has lost interest.
"""
IDLE_TIMEOUT_S = 600.0
MAX_OUTGOING = 4
"""Replies waiting to be sent; no further request is read before."""
SINK_BYTES = 1024 * 1024
MAX_SINKS = 4 * wire.MAX_BATCH_BYTES // SINK_BYTES + 4
"""What is read of a writer that was turned away: all it can have under way. Were it closed at once,
the reset would reach it before the reason does.
"""


class TcpServer:
    def __init__(
        self,
        loop: SocketLoop,
        token: bytes,
        ranges: wire.Ranges,
        memory: AddressedMemory,
        write_grants: TcpWriteGrants,
    ) -> None:
        self._loop = loop
        self._token = token
        self._ranges = ranges
        self._memory = memory
        self.write_grants = write_grants
        self.sink = memoryview(bytearray(SINK_BYTES))
        """For all who were turned away: nobody reads it."""
        self._known: set[_ServerConnection] = set()
        self._unauthenticated: dict[_ServerConnection, None] = {}
        """In the order they came."""

    def accept(self, connection: socket.socket) -> None:
        if len(self._known) >= MAX_CONNECTIONS:
            connection.close()
            return
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            self._loop.drop(next(iter(self._unauthenticated)), "newer strangers came")
        try:
            tune(connection)
        except OSError:  # it has gone again
            connection.close()
            return
        served = _ServerConnection(SocketStream(connection), self, self._token)
        self._unauthenticated[served] = None
        self._loop.add(served)

    def known(self, served: "_ServerConnection") -> None:
        """It has proved that it may ask."""
        self._unauthenticated.pop(served, None)
        self._known.add(served)

    def forget(self, served: "_ServerConnection") -> None:
        self._unauthenticated.pop(served, None)
        self._known.discard(served)
        self.write_grants.release(served)

    def views(self, rows: wire.Rows, total_bytes: int) -> list[memoryview]:
        """RemoteProtocolError unless all of it is registered."""
        self._ranges.check(rows, total_bytes)
        return self._memory.views(rows[:, 0].tolist(), rows[:, 1].tolist())


class _ServerConnection(WriterConnection):
    """One dialler and what it asks for."""

    def __init__(self, stream: SocketStream, server: TcpServer, token: bytes) -> None:
        self._server = server
        self._token = token
        self._accepted_at = time.monotonic()
        self._is_amid_request = False
        self.is_known = False
        super().__init__(stream)

    def handler(self) -> ConnectionHandler:
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self.stream.send(wire.greeting(nonce))
        answer = bytearray(wire.NONCE_BYTES + wire.PROOF_BYTES)
        yield IoVector([memoryview(answer)])
        nonces = nonce + bytes(answer[: wire.NONCE_BYTES])
        if not wire.is_proof(
            bytes(answer[wire.NONCE_BYTES :]), self._token, wire.HandshakeRole.DIALLER, nonces
        ):
            raise RemoteProtocolError("the dialler does not know this transport's token")
        self.stream.send(wire.prove(self._token, wire.HandshakeRole.PRODUCER, nonces))
        self.is_known = True
        self._server.known(self)
        try:
            while not (why := (yield from self._serve_one())):
                pass
        except RemoteProtocolError as error:
            self.stream.send(wire.pack_reply(str(error)))
        else:
            yield from self._reject_all(why)

    def reject(self, why: str) -> None:
        self.switch_handler(self._reject_all(why))

    def may_receive(self) -> bool:
        return self.stream.num_outgoing < MAX_OUTGOING

    def is_overdue(self, now: float) -> str | None:
        if not self.is_known:
            return "it proved nothing" if now > self._accepted_at + PROOF_TIMEOUT_S else None
        is_stalled = self._is_amid_request or self.stream.is_sending
        timeout_s = STALL_TIMEOUT_S if is_stalled else IDLE_TIMEOUT_S
        return "it has been silent" if now > self.last_moved + timeout_s else None

    def ended(self, why: str) -> None:
        self._server.forget(self)

    def _reject_all(self, why: str) -> ConnectionHandler:
        self.stream.send(wire.pack_reply(why, wire.ReplyStatus.NOT_GRANTED))
        for _ in range(MAX_SINKS):
            yield IoVector([self._server.sink])

    def _serve_one(self) -> Generator[IoVector, None, str]:
        """Why nothing more is received of this dialler; empty when it may go on."""
        header = bytearray(wire.HEADER_BYTES)
        yield IoVector([memoryview(header)])
        self._is_amid_request = True
        request = wire.unpack_header(bytes(header))
        rows = np.empty((request.num_descriptors, 2), "<i8")
        yield IoVector([rows.data.cast("B")])
        views = self._server.views(rows, request.total_bytes)
        if request.operation is wire.Operation.READ:
            self.stream.send(wire.pack_reply(), *views)
        elif why := self._server.write_grants.admit(self, request.grant_id, rows):
            return why
        else:
            yield IoVector(views)
            self._server.write_grants.release(self)
            self.stream.send(wire.pack_reply())
        self._is_amid_request = False
        return ""
