"""The side of the `dist` transport that serves peers: a thread that listens, and one thread for
each peer.

A peer that does not prove within seconds that it knows the offer's token is disconnected. A
request must lie in registered memory. Written bytes wait in a staging buffer until their tag is
verified, and are copied to the cache only if their write grant is still active then.
"""

import contextlib
import logging
import socket
import threading
import time

import numpy as np

from kvferry.errors import KVFerryError, RemoteProtocolError
from kvferry.transports.base import Operation
from kvferry.transports.tcp import wire
from kvferry.transports.torch_dist.channel import Channel
from kvferry.transports.torch_dist.group import Backend, Member, PairGroup
from kvferry.transports.torch_dist.staging import StagingPool
from kvferry.transports.write_grants import WriteGrants, grant_not_active

MAX_PEERS = 256
MAX_UNAUTHENTICATED = 64
"""Most connections that have not proved that they know the token; the oldest is dropped."""

ACCEPT_PAUSE_S = 0.5

_log = logging.getLogger(__name__)


class DistServer:
    """Accepts peers and gives them access to registered memory."""

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        ranges: wire.Ranges,
        pool: StagingPool,
        write_grants: WriteGrants,
        num_channels: int,
    ) -> None:
        self._listener = listener
        self._token = token
        self._ranges = ranges
        self._pool = pool
        self._write_grants = write_grants
        self._num_channels = num_channels
        self._lock = threading.Lock()
        """Guards the collections of connections below, and `_is_closing`."""
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._unauthenticated: dict[socket.socket, None] = {}
        """In the order of their arrival."""
        self._authenticated: set[socket.socket] = set()
        self._is_closing = False
        self._accepting = threading.Thread(
            target=self._accept_all, name="kvferry-dist-accept", daemon=True
        )

    def start(self) -> None:
        self._accepting.start()

    def close(self, deadline: float) -> bool:
        """Stop listening and disconnect all peers. Returns whether every thread has ended before
        the deadline.
        """
        with self._lock:
            self._is_closing = True
            connections = dict(self._threads)
        for each in (self._listener, *connections):
            _shut(each)
        threads = (self._accepting, *connections.values())
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._listener.close()
        return not any(thread.is_alive() for thread in threads)

    # -- on the thread that listens --

    def _accept_all(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                with self._lock:
                    if self._is_closing:
                        return
                # Most likely this process has no file descriptor left.
                _log.warning("dist transport cannot accept a connection (%s)", error)
                time.sleep(ACCEPT_PAUSE_S)
                continue
            self._accept(connection)

    def _accept(self, connection: socket.socket) -> None:
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="kvferry-dist-serve", daemon=True
        )
        with self._lock:
            if self._is_closing or len(self._authenticated) >= MAX_PEERS:
                connection.close()
                return
            # Drop the oldest: strangers that never send a proof must not keep peers out.
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                del self._unauthenticated[oldest]
                _shut(oldest)
            self._unauthenticated[connection] = None
            self._threads[connection] = thread
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("dist transport cannot serve a connection (%s)", error)
            self._forget(connection)

    # -- on the thread of one peer --

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._serve_peer(connection)
        except (KVFerryError, OSError) as error:
            _log.debug("dist transport: a peer was disconnected: %s", error)
        except Exception:  # top of the thread: whatever a peer has sent, other peers are served
            _log.exception("dist transport: an internal error has ended the thread of a peer")
        finally:
            self._forget(connection)

    def _serve_peer(self, connection: socket.socket) -> None:
        channel = Channel.accept(connection, self._token)
        with self._lock:
            self._unauthenticated.pop(connection, None)
            self._authenticated.add(connection)
        self._pool.enter_device()
        backend = _backend(channel.receive(1))
        group = PairGroup.meet(channel, backend, Member.PRODUCER, self._num_channels)
        try:
            while (header := channel.receive_next(wire.HEADER_BYTES)) is not None:
                self._serve_request(wire.unpack_header(header), channel, group)
        except RemoteProtocolError as error:
            channel.send(wire.pack_reply(str(error)))
            raise
        finally:
            group.abort()

    def _serve_request(self, request: wire.Header, channel: Channel, group: PairGroup) -> None:
        received = channel.receive(request.num_descriptors * 16)
        rows = np.frombuffer(received, "<i8").reshape(-1, 2).astype(np.int64)
        self._ranges.check(rows, request.total_bytes)
        if request.operation is Operation.READ:
            with self._pool.buffer() as staging:
                staging.gather(rows[:, 0], rows[:, 1])
                channel.send(wire.pack_reply())
                staging.send(channel, group, request.total_bytes)
            return
        why = self._write_grants.refusal(request.grant_id, rows[:, 0], rows[:, 1])
        if not why:
            with self._pool.buffer() as staging:
                channel.send(wire.pack_reply())
                staging.receive(channel, group, request.total_bytes)
                with self._write_grants.receiving(request.grant_id) as is_active:
                    if is_active:
                        staging.scatter(rows[:, 0], rows[:, 1])
                    else:
                        why = grant_not_active(request.grant_id)
        channel.send(wire.pack_reply(why, wire.ReplyStatus.NOT_GRANTED))

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._threads.pop(connection, None)
            self._unauthenticated.pop(connection, None)
            self._authenticated.discard(connection)
        _shut(connection)
        connection.close()


def _backend(received: bytes) -> Backend:
    try:
        return Backend(received[0])
    except ValueError:
        raise RemoteProtocolError(f"the peer asks for backend {received[0]}") from None


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
