"""The dialling side of the `tcp` transport: each active transfer has a connection of its own.

The transport's socket thread owns everything in this module. A cancelled transfer closes its
connection, so bytes that the peer still sends cannot reach local memory. A connection whose
transfer has completed is reused for the next transfer.
"""

import contextlib
import errno
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvferry.errors import RemoteProtocolError, TransportError
from kvferry.transports.base import Completion, Operation
from kvferry.transports.linked import BatchedTransfer, Link
from kvferry.transports.tcp import wire
from kvferry.transports.tcp.loop import (
    ConnectionHandler,
    IoVector,
    SocketLoop,
    SocketStream,
    TcpConnection,
    tune,
)
from kvferry.types import PeerId, Region

MAX_CONNECTIONS = 4
"""Most connections to one peer; further transfers wait in a queue."""
MAX_POSTED = 4
"""Most outstanding requests of one transfer: the peer always knows the next request in advance."""
STALL_TIMEOUT_S = 60.0
"""A transfer fails if no byte moves for this long. Requests have deadlines of their own, which are
mostly shorter; this timeout is for callers that set no deadline.
"""
IDLE_TIMEOUT_S = 60.0
"""An unused connection is closed after this long."""

SocketAddress = tuple[int, Any]
"""Family and address, in the form that `socket.connect` takes."""


@dataclass(frozen=True, slots=True, eq=False)
class TcpBatch:
    """The segments that one request moves: in the peer (`rows`) and in local memory (`views`)."""

    rows: wire.Rows
    views: list[memoryview]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def total_bytes(self) -> int:
        return int(self.rows[:, 1].sum())


class TcpLink(Link):
    """One peer: dials it, and assigns transfers to the connections. Made by the transport's owner;
    the loop's thread makes all calls.
    """

    def __init__(
        self,
        peer: PeerId,
        regions: tuple[Region, ...],
        offer: wire.TcpOffer,
        loop: SocketLoop,
        ended: Callable[[Completion], None],
    ) -> None:
        """`ended` is called once for each transfer, when none of the transfer's bytes can move any
        more.
        """
        super().__init__(peer, regions)
        self.offer = offer
        self.waiting: deque[TcpTransfer] = deque()
        self.failed_dials = 0
        """Number of dials that have failed since the last successful dial."""
        self._loop = loop
        self._ended = ended
        self._connections: list[_ClientConnection] = []
        self._addresses = deque(_numeric_addresses(offer))
        """Addresses of the peer's host, next address to dial first; empty until the name is
        resolved.
        """
        self._drop_reason = ""
        """Why the link is no longer used; empty while the link is in use."""

    def open(self) -> None:
        """Dial at once, so that the first transfer does not wait for the connection."""
        if self._addresses:
            self._dial()
            return
        # A name server may be slow, and transfers with other peers must not wait for it.
        try:
            threading.Thread(target=self._resolve, name="kvferry-resolve", daemon=True).start()
        except RuntimeError as error:
            self.drop(f"the name {self.offer.host} cannot be resolved ({error})")

    def start(self, transfer: "TcpTransfer") -> None:
        if self._drop_reason:
            self.end(transfer, self._drop_reason)
            return
        self.waiting.append(transfer)
        self._assign()

    def stop(self, transfer: "TcpTransfer", why: str) -> None:
        if transfer in self.waiting:
            self.waiting.remove(transfer)
            self.end(transfer, why)
        for connection in list(self._connections):
            if connection.transfer is transfer:
                self._loop.drop(connection, why)

    def drop(self, why: str) -> None:
        self._drop_reason = self._drop_reason or why
        for connection in list(self._connections):
            self._loop.drop(connection, why)
        self._fail_waiting(why)

    def end(self, transfer: "TcpTransfer", error: str | None) -> None:
        transfer.error = error
        self._ended(transfer.completion())

    def closed(self, connection: "_ClientConnection", why: str) -> None:
        self._connections.remove(connection)
        if connection.transfer is not None:
            self.end(connection.transfer, why)
        elif not connection.is_ready:
            self._addresses.rotate(-1)
            self.failed_dials += 1
        if self._loop.is_closing or (
            not self._connections and self.failed_dials >= max(1, len(self._addresses))
        ):
            # No address answers: waiting transfers would wait for ever.
            self._fail_waiting(why)
        elif not self._drop_reason:
            self._assign()

    def _resolve(self) -> None:
        try:
            addresses, error = _addresses(self.offer), None
        # top of the thread: a malformed name makes the resolver raise more than OSError
        except Exception as failure:
            addresses, error = [], str(failure)
        self._loop.call(partial(self._resolved, addresses, error))

    def _resolved(self, addresses: list[SocketAddress], error: str | None) -> None:
        if self._drop_reason:
            return
        if not addresses:
            why = error or "none was found"
            self.drop(f"the name {self.offer.host} has no address here ({why})")
            return
        self._addresses.extend(addresses)
        self._dial()
        self._assign()

    def _assign(self) -> None:
        for connection in list(self._connections):
            if self.waiting and connection.is_ready and connection.transfer is None:
                try:
                    connection.begin(self.waiting.popleft())
                    self._loop.update(connection)
                # top of a transfer: only this transfer and its connection fail
                except Exception as error:
                    self._loop.drop(connection, f"{type(error).__name__}: {error}")
        num_coming = sum(1 for connection in self._connections if not connection.is_ready)
        for _ in range(
            min(len(self.waiting) - num_coming, MAX_CONNECTIONS - len(self._connections))
        ):
            self._dial()

    def _dial(self) -> None:
        if not self._addresses or self._drop_reason:
            return
        dialling: socket.socket | None = None
        try:
            family, address = self._addresses[0]
            dialling = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            tune(dialling)
            error = dialling.connect_ex(address)
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
        except OSError as failure:
            if dialling is not None:
                dialling.close()
            if not self._connections:  # otherwise the waiting transfers use these connections
                self._fail_waiting(f"{self.peer} cannot be dialled ({failure})")
            return
        connection = _ClientConnection(SocketStream(dialling), self)
        self._connections.append(connection)
        self._loop.add(connection)

    def _fail_waiting(self, why: str) -> None:
        while self.waiting:
            self.end(self.waiting.popleft(), why)


TcpTransfer = BatchedTransfer[TcpLink, TcpBatch]


class _ClientConnection(TcpConnection):
    """A connection to a peer, with at most one active transfer."""

    def __init__(self, stream: SocketStream, link: TcpLink) -> None:
        self.link = link
        self.transfer: TcpTransfer | None = None
        self.is_ready = False
        self._posted: deque[TcpBatch] = deque()
        super().__init__(stream)

    def handler(self) -> ConnectionHandler:
        # The order of messages is that of the drawing in `tcp/wire.py`.
        received = bytearray(wire.GREETING_BYTES)
        yield IoVector([memoryview(received)])
        token, nonce = self.link.offer.token, secrets.token_bytes(wire.NONCE_BYTES)
        nonces = wire.nonce_in(bytes(received)) + nonce
        self.stream.send(nonce, wire.prove(token, wire.HandshakeRole.DIALLER, nonces))
        proof = bytearray(wire.PROOF_BYTES)
        yield IoVector([memoryview(proof)])
        if not wire.is_proof(bytes(proof), token, wire.HandshakeRole.PRODUCER, nonces):
            raise RemoteProtocolError(
                f"the process at {self.link.offer.host}:{self.link.offer.port} is not "
                f"{self.link.peer}"
            )
        self.is_ready = True
        self.link.failed_dials = 0
        if self.link.waiting:
            self.begin(self.link.waiting.popleft())
        while True:
            reply = bytearray(wire.REPLY_BYTES)
            yield IoVector([memoryview(reply)])
            text = bytearray(wire.text_bytes_in(bytes(reply)))
            if text:
                yield IoVector([memoryview(text)])
                if self.transfer is not None and self.transfer.operation is Operation.WRITE:
                    self.transfer.keeps_link = wire.is_not_granted(bytes(reply))
                raise TransportError(
                    f"{self.link.peer} refused a transfer: {text.decode(errors='replace')}"
                )
            yield from self._take_reply()

    def begin(self, transfer: TcpTransfer) -> None:
        self.transfer = transfer
        self.last_moved = time.monotonic()
        self._post()

    def is_overdue(self, now: float) -> str | None:
        is_waiting = self.transfer is not None or not self.is_ready
        if now <= self.last_moved + (STALL_TIMEOUT_S if is_waiting else IDLE_TIMEOUT_S):
            return None
        return (
            f"no byte came from {self.link.peer} for {STALL_TIMEOUT_S:g} s"
            if is_waiting
            else "not needed"
        )

    def explain(self, error: Exception) -> str:
        if not isinstance(error, OSError):
            return str(error)
        return (
            f"the tcp connection to {self.link.peer} at "
            f"{self.link.offer.host}:{self.link.offer.port} failed: {error.strerror or error}"
        )

    def ended(self, why: str) -> None:
        self._posted.clear()
        self.link.closed(self, why)

    def _take_reply(self) -> ConnectionHandler:
        if not self._posted or self.transfer is None:
            raise RemoteProtocolError(f"{self.link.peer} sent a reply without a request")
        batch = self._posted[0]
        if self.transfer.operation is Operation.READ:
            yield IoVector(batch.views)
        self._posted.popleft()
        self.transfer.count(batch)
        self._post()

    def _post(self) -> None:
        """Send requests until `MAX_POSTED` are outstanding. If no batch is left and no request is
        outstanding, end the transfer and begin the next one on this connection.
        """
        while (transfer := self.transfer) is not None:
            batch = transfer.next_batch() if len(self._posted) < MAX_POSTED else None
            if batch is not None:
                self._posted.append(batch)
                payload = batch.views if transfer.operation is Operation.WRITE else []
                self.stream.send(
                    wire.pack_header(transfer.operation, batch.rows, transfer.grant_id),
                    batch.rows.data.cast("B"),
                    *payload,
                )
            elif self._posted:
                return
            else:
                self.transfer = self.link.waiting.popleft() if self.link.waiting else None
                self.link.end(transfer, None)


def _numeric_addresses(offer: wire.TcpOffer) -> list[SocketAddress]:
    """Return the addresses of a numeric host without asking a name server. Empty for a name."""
    with contextlib.suppress(OSError, ValueError):
        return _addresses(offer, socket.AI_NUMERICHOST)
    return []


def _addresses(offer: wire.TcpOffer, flags: int = 0) -> list[SocketAddress]:
    found = socket.getaddrinfo(offer.host, offer.port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]
