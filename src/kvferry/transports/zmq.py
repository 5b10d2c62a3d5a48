"""The control transport over ZeroMQ: one listening socket, one socket for each dialled address, and
CURVE encryption on all sockets. The only module that imports zmq.

One thread owns the transport; only `wake` may be called by other threads. All work happens in
`poll`, including the check of a new peer's key, so the only other threads are libzmq's own. Both
sides prove that they hold the cluster's secret. A client cannot begin a handshake without the
server's public key, which is never sent, and the server accepts a single client key; both keys are
derived from the secret. See docs/decisions/006-curve-from-the-secret.md.
"""

import contextlib
import hashlib
import hmac
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvferry.errors import ConfigError, TransportError
from kvferry.sleep import Wakeup
from kvferry.transports.base import MAX_MESSAGE_BYTES, ControlEvent, Disconnected, Received, Route
from kvferry.types import Address

Socket = zmq.Socket[bytes]

KEY_SALT = b"kvferry control plane keys, version 1"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
MAX_QUEUED_FRAMES = 32_768
"""Most frames that wait for one peer. The bound exceeds the number of requests that an engine
queues for one peer: all of them attach when the handshake ends, while the connection is still being
established.
"""
MAX_EVENTS_PER_SOCKET = 256
"""Most messages taken from one socket in one `poll`, so that a busy peer cannot delay others."""
FRAME_ROOM_BYTES = 64 * 1024
"""Added to `MAX_MESSAGE_BYTES` for libzmq's own limit, as room for the bytes that CURVE adds.
A frame slightly above our limit is then dropped and counted, instead of closing its connection.
"""
BIND_TIMEOUT_S = 5.0
"""How long a restarted engine waits for its dying predecessor to release the port."""
BIND_RETRY_S = 0.1
SILENCE_S = 6.0
"""A peer is gone if nothing arrives from it for this long, although heartbeats are sent three times
as often. A pulled cable cannot be detected in any other way.
"""
HANDSHAKE_MS = 5000
RECONNECT_MS, RECONNECT_MAX_MS = 100, 2000
CLOSE_LINGER_MS = 200
MAX_SOCKETS = 16_384
"""Limit of the ZeroMQ context. Each dialled address needs three sockets."""
FORGET_LINGER_MS = 1000
WILDCARDS = frozenset({"", "*", "0.0.0.0", "::", "[::]"})

MONITORED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The key pairs of a cluster's servers and clients, in ZeroMQ's Z85 encoding."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)

    @classmethod
    def from_secret(cls, secret: bytes) -> "CurveKeys":
        """Derive the keys by HKDF with SHA-256: one key reveals nothing about another key or about
        the secret.
        """
        if not secret:
            raise ConfigError(
                "the cluster secret is empty; set KVFERRY_SECRET_FILE to a file that holds one"
            )
        server, client = (_derived(secret, purpose) for purpose in (b"server", b"client"))
        return cls(zmq.curve_public(server), server, zmq.curve_public(client), client)


class ZmqTransport:
    """Implements `transports.base.ControlTransport`.

    The constructor binds the listening socket. Port 0 means any free port. If the port is in use,
    the constructor waits for up to `bind_timeout_s`.
    """

    def __init__(
        self,
        bind_host: str,
        advertised_host: str,
        port: int,
        keys: CurveKeys,
        *,
        bind_timeout_s: float = BIND_TIMEOUT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        if advertised_host in WILDCARDS:
            raise ConfigError(
                f"{advertised_host!r} cannot be advertised, peers could not dial it; name this "
                "host's own address"
            )
        self._keys = keys
        self._silence_ms = int(silence_s * 1000)
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.max_sockets = MAX_SOCKETS
        self._poller = zmq.Poller()
        self._dialled: dict[str, _DealerConnection] = {}
        self._wakeup = Wakeup()
        self.dropped_frames = 0
        """Number of frames that were dropped: too long, or in a message with several frames."""
        self._is_closed = False
        try:
            self._zap = self._listen_for_zap()
            self._router = self._secured(zmq.ROUTER)
            bound_port = _bind(self._router, bind_host, port, bind_timeout_s)
        except BaseException:
            self._context.destroy(linger=0)
            self._wakeup.close()
            raise
        self.address = f"tcp://{Address(advertised_host.strip('[]'), bound_port)}"
        for source in (self._zap, self._router, self._wakeup.fileno()):
            self._poller.register(source, zmq.POLLIN)

    def send(self, address: str, frame: bytes) -> None:
        if self._is_closed or not self._is_short(frame):
            return
        dialled = self._dialled.get(address) or self._dial(address)
        try:
            dialled.socket.send(frame, zmq.DONTWAIT)
        except zmq.Again as error:
            raise TransportError(
                f"{address} takes no more frames: {MAX_QUEUED_FRAMES} are waiting for it"
            ) from error

    def reply(self, route: Route, frame: bytes) -> None:
        if self._is_closed:
            return
        if route.dialled:
            if route.dialled in self._dialled:
                self.send(route.dialled, frame)
        elif self._is_short(frame):
            # ROUTER itself drops frames for a connection that is gone or whose queue is full.
            with contextlib.suppress(zmq.ZMQError):
                self._router.send_multipart([route.identity, frame], zmq.DONTWAIT)

    def poll(self, timeout_s: float | None) -> list[ControlEvent]:
        if self._is_closed:
            return []
        events: list[ControlEvent] = []
        # Round up: rounding down to 0 ms would make the caller's loop spin before a deadline.
        timeout_ms = None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)
        ready = {source for source, _ in self._poller.poll(timeout_ms)}
        if self._wakeup.fileno() in ready:
            self._wakeup.clear()
        if self._zap in ready:
            _drain(self._zap, self._answer_zap)
        if self._router in ready:
            _drain(self._router, lambda parts: self._arrived(events, Route(parts[0]), parts[1:]))
        for dialled in list(self._dialled.values()):
            if dialled.socket in ready:
                _drain(dialled.socket, partial(self._arrived, events, Route(b"", dialled.address)))
            if dialled.monitor in ready and dialled.has_gone():
                self._hang_up(dialled.address, linger_ms=0)
                events.append(Disconnected(dialled.address))
        return events

    def wake(self) -> None:
        self._wakeup.wake()

    def forget(self, address: str) -> None:
        self._hang_up(address, FORGET_LINGER_MS)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for address in list(self._dialled):
            self._hang_up(address, CLOSE_LINGER_MS)
        self._router.close(CLOSE_LINGER_MS)
        self._zap.close(0)
        self._context.destroy(CLOSE_LINGER_MS)
        self._wakeup.close()

    def _arrived(self, events: list[ControlEvent], route: Route, parts: list[bytes]) -> None:
        if len(parts) == 1 and self._is_short(parts[0]):
            events.append(Received(route, parts[0]))
        elif len(parts) != 1:
            self.dropped_frames += 1

    def _is_short(self, frame: bytes) -> bool:
        self.dropped_frames += len(frame) > MAX_MESSAGE_BYTES
        return len(frame) <= MAX_MESSAGE_BYTES

    def _dial(self, address: str) -> "_DealerConnection":
        if not address.startswith("tcp://"):
            raise TransportError(f"{address!r} cannot be dialled: it is not tcp://host:port")
        with contextlib.ExitStack() as undo:
            # Each of these calls fails if this process has no file descriptor left.
            try:
                socket = self._secured(zmq.DEALER)
                undo.callback(_shut, socket, 0)
                monitor = socket.get_monitor_socket(MONITORED)
                socket.connect(address)
            except zmq.ZMQError as error:
                raise TransportError(f"{address!r} cannot be dialled ({error})") from error
            undo.pop_all()
        dialled = _DealerConnection(address, socket, monitor)
        self._dialled[address] = dialled
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        return dialled

    def _hang_up(self, address: str, linger_ms: int) -> None:
        dialled = self._dialled.pop(address, None)
        if dialled is not None:
            self._poller.unregister(dialled.socket)
            self._poller.unregister(dialled.monitor)
            _shut(dialled.socket, linger_ms)

    def _secured(self, kind: int) -> Socket:
        """Open a socket with keys, and with bounds on what any peer can make this side store or
        wait for.
        """
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + FRAME_ROOM_BYTES)
        socket.sndhwm = socket.rcvhwm = MAX_QUEUED_FRAMES
        socket.linger = CLOSE_LINGER_MS
        socket.ipv6 = True
        socket.backlog = 1024
        socket.handshake_ivl = socket.connect_timeout = HANDSHAKE_MS
        socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS, RECONNECT_MAX_MS
        socket.heartbeat_ivl = self._silence_ms // 3
        socket.heartbeat_timeout = socket.heartbeat_ttl = self._silence_ms
        socket.zap_domain = b"kvferry"
        if kind == zmq.ROUTER:
            socket.curve_server = True
            socket.curve_publickey = self._keys.server_public
            socket.curve_secretkey = self._keys.server_secret
        else:
            socket.curve_serverkey = self._keys.server_public
            socket.curve_publickey = self._keys.client_public
            socket.curve_secretkey = self._keys.client_secret
        return socket

    def _listen_for_zap(self) -> Socket:
        """Open the socket on which libzmq asks whether a new peer may connect (ZeroMQ RFC 27). A
        ROUTER socket, because it may answer requests in any order.
        """
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.bind(ZAP_ENDPOINT)
        return socket

    def _answer_zap(self, parts: list[bytes]) -> None:
        asker, empty, version, request_id, _domain, _host, _identity, mechanism, *credentials = (
            parts
        )
        expected = z85.decode(self._keys.client_public)
        is_member = (
            mechanism == b"CURVE"
            and len(credentials) == 1
            and hmac.compare_digest(credentials[0], expected)
        )
        verdict = [b"200", b"OK"] if is_member else [b"400", b"not a member of this cluster"]
        with contextlib.suppress(zmq.ZMQError):
            self._zap.send_multipart(
                [asker, empty, version, request_id, *verdict, b"", b""], zmq.DONTWAIT
            )


class _DealerConnection:
    """One outgoing connection, and the socket on which libzmq reports its state."""

    def __init__(self, address: str, socket: Socket, monitor: Socket) -> None:
        self.address = address
        self.socket = socket
        self.monitor = monitor
        self._was_connected = False

    def has_gone(self) -> bool:
        """Whether an established connection broke, or the handshake failed because the other side
        refused our key. libzmq retries a connection that was never established.
        """
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self.monitor, zmq.DONTWAIT)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._was_connected = True
                elif event != zmq.EVENT_DISCONNECTED or self._was_connected:
                    return True
        return False


def _bind(socket: Socket, host: str, port: int, timeout_s: float) -> int:
    """Bind and return the port. ConfigError if the port stays in use or the address is wrong."""
    endpoint = f"tcp://{Address(host.strip('[]') or '*', port)}"
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.bind(endpoint)
            return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        except zmq.ZMQError as error:
            is_in_use = error.errno == zmq.EADDRINUSE
            if is_in_use and time.monotonic() < deadline:
                time.sleep(BIND_RETRY_S)
                continue
            fix = (
                f"port {port} is in use, by another engine perhaps; choose another"
                if is_in_use
                else "is that an address of this host?"
            )
            raise ConfigError(
                f"the side channel cannot listen on {endpoint} ({error}): {fix}"
            ) from error


def _drain(socket: Socket, take: Callable[[list[bytes]], None]) -> None:
    for _ in range(MAX_EVENTS_PER_SOCKET):
        try:
            parts = socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
        take(parts)


def _shut(socket: Socket, linger_ms: int) -> None:
    with contextlib.suppress(zmq.ZMQError):  # no monitor was made: no file descriptor was left
        monitor: Any = socket.get_monitor_socket(MONITORED)
        socket.disable_monitor()
        monitor.close(0)
    socket.close(linger_ms)


def _derived(secret: bytes, purpose: bytes) -> bytes:
    extracted = hmac.new(KEY_SALT, secret, hashlib.sha256).digest()
    return z85.encode(hmac.new(extracted, purpose + b"\x01", hashlib.sha256).digest())
