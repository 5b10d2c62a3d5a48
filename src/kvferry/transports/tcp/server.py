"""The listening side of the `tcp` transport: serves peers' requests and enforces write grants.

The loop's thread owns this part, and only that thread receives bytes. A peer that does not prove
within seconds that it knows the offer's token is disconnected. A request of an authenticated peer
must lie in registered memory, and a write must lie in granted blocks. If bytes are being received
under a grant when the owner of the transport revokes it, the connections concerned are rejected;
then the revocation is complete.
"""

import secrets
import socket
import time
from collections.abc import Generator

import numpy as np

from kvferry.errors import RemoteProtocolError
from kvferry.transports.base import Operation
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
from kvferry.transports.write_grants import WriteGrants, grant_not_active

MAX_CONNECTIONS = 4096
MAX_UNAUTHENTICATED = 256
"""Most connections that have not proved that they know the token."""
PROOF_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 60.0
"""A connection is closed if the peer takes none of the bytes it asked for, or does not continue its
request, for this long.
"""
IDLE_TIMEOUT_S = 600.0
MAX_OUTGOING = 4
"""Most replies waiting to be sent; the next request is read only below this number."""
SINK_BYTES = 1024 * 1024
MAX_SINKS = 4 * wire.MAX_BATCH_BYTES // SINK_BYTES + 4
"""How much is read and discarded from a rejected writer, in units of `SINK_BYTES`: everything that
the writer can have outstanding. If the connection were closed at once, the reset would reach the
writer before the reason does.
"""


class TcpServer:
    """Accepts connections and gives them access to registered memory."""

    def __init__(
        self,
        loop: SocketLoop,
        token: bytes,
        ranges: wire.Ranges,
        memory: AddressedMemory,
        write_grants: WriteGrants,
    ) -> None:
        self._loop = loop
        self._token = token
        self._ranges = ranges
        self._memory = memory
        self._write_grants = write_grants
        self._writers: dict[_ServerConnection, int] = {}
        """The connections on which a write is being received, with its grant id."""
        self.sink = memoryview(bytearray(SINK_BYTES))
        """Receives the discarded bytes of all rejected writers; never read."""
        self._known: set[_ServerConnection] = set()
        self._unauthenticated: dict[_ServerConnection, None] = {}
        """Connections that have not sent a valid proof, in the order of their arrival."""

    def accept(self, connection: socket.socket) -> None:
        if len(self._known) >= MAX_CONNECTIONS:
            connection.close()
            return
        # Drop the oldest: strangers that never send a proof must not keep peers out.
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            self._loop.drop(
                next(iter(self._unauthenticated)),
                "newer clients connected before this one authenticated",
            )
        try:
            tune(connection)
        except OSError:  # the other side has closed the connection already
            connection.close()
            return
        served = _ServerConnection(SocketStream(connection), self, self._token)
        self._unauthenticated[served] = None
        self._loop.add(served)

    def known(self, served: "_ServerConnection") -> None:
        """The connection has sent a valid proof and may send requests."""
        self._unauthenticated.pop(served, None)
        self._known.add(served)

    def forget(self, served: "_ServerConnection") -> None:
        self._unauthenticated.pop(served, None)
        self._known.discard(served)
        self.written(served)

    def views(self, rows: wire.Rows, total_bytes: int) -> list[memoryview]:
        """Return views of a request's segments. RemoteProtocolError unless all of them lie in
        registered memory.
        """
        self._ranges.check(rows, total_bytes)
        return self._memory.views(rows[:, 0].tolist(), rows[:, 1].tolist())

    def admit(self, served: "_ServerConnection", grant_id: int, rows: wire.Rows) -> str:
        """Return why a write must be refused. If empty, the write is admitted: it counts as being
        received from now on until `written`.
        """
        why = self._write_grants.refusal(grant_id, rows[:, 0], rows[:, 1])
        if not why and not self._write_grants.begin(grant_id):
            why = grant_not_active(grant_id)  # revoked since the line above
        if not why:
            self._writers[served] = grant_id
        return why

    def written(self, served: "_ServerConnection") -> None:
        """The write on this connection is complete, rejected, or the connection is closed."""
        grant_id = self._writers.pop(served, None)
        if grant_id is not None:
            self._write_grants.end(grant_id)

    def reject_writers(self, grant_id: int) -> None:
        for writer in [each for each, under in self._writers.items() if under == grant_id]:
            writer.reject(grant_not_active(grant_id))
            self.written(writer)
            self._loop.update(writer)


class _ServerConnection(TcpConnection):
    """One dialling peer and its requests."""

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
            raise RemoteProtocolError("the client does not know this transport's token")
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
        """Send the reason to the peer and discard every further byte from the peer."""
        self.switch_handler(self._reject_all(why))

    def may_receive(self) -> bool:
        return self.stream.num_outgoing < MAX_OUTGOING

    def is_overdue(self, now: float) -> str | None:
        if not self.is_known:
            return (
                "the client did not authenticate in time"
                if now > self._accepted_at + PROOF_TIMEOUT_S
                else None
            )
        is_stalled = self._is_amid_request or self.stream.is_sending
        timeout_s = STALL_TIMEOUT_S if is_stalled else IDLE_TIMEOUT_S
        return "the client was silent for too long" if now > self.last_moved + timeout_s else None

    def ended(self, why: str) -> None:
        self._server.forget(self)

    def _reject_all(self, why: str) -> ConnectionHandler:
        self.stream.send(wire.pack_reply(why, wire.ReplyStatus.NOT_GRANTED))
        for _ in range(MAX_SINKS):
            yield IoVector([self._server.sink])

    def _serve_one(self) -> Generator[IoVector, None, str]:
        """Serve one request. Returns why nothing more is received from this peer; empty if the peer
        may go on.
        """
        header = bytearray(wire.HEADER_BYTES)
        yield IoVector([memoryview(header)])
        self._is_amid_request = True
        request = wire.unpack_header(bytes(header))
        rows = np.empty((request.num_descriptors, 2), "<i8")
        yield IoVector([rows.data.cast("B")])
        views = self._server.views(rows, request.total_bytes)
        if request.operation is Operation.READ:
            self.stream.send(wire.pack_reply(), *views)
        elif why := self._server.admit(self, request.grant_id, rows):
            return why
        else:
            yield IoVector(views)
            self._server.written(self)
            self.stream.send(wire.pack_reply())
        self._is_amid_request = False
        return ""
