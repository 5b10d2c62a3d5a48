"""HTTP/1.1 server: accepts connections, reads requests, and runs one handler task per request.

Belongs to one event loop. The requests of a connection are served one after the other. A client
that closes its sending side counts as disconnected, as in most servers: a half-close cannot be
distinguished from a disconnect before the next write. Pipelined requests are buffered; beyond
`_MAX_PIPELINED` bytes the connection is not read, and a disconnect is then noticed at the next
write.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable

from kvferry.errors import RequestRefused
from kvferry.router.http.deadlines import NEVER, DeadlineTimer
from kvferry.router.http.framing import RequestReader
from kvferry.router.http.messages import ServerLimits, ServerRequest
from kvferry.router.http.parsing import RequestHead
from kvferry.router.http.writer import ConnectionWriter, ResponseWriter
from kvferry.web.bodies import BodyBudget
from kvferry.web.errors import error_body

Handler = Callable[[ServerRequest, ResponseWriter], Awaitable[None]]

logger = logging.getLogger(__name__)

_MAX_PIPELINED = 64 * 1024
_MAX_REFUSED_CONNECTIONS = 256
"""Connections over the limit that still get a 503; each takes a moment. Further connections are
closed at once.
"""
_SERVER_ERROR = "the server failed to serve this request; its log says why"
_JSON = ("Content-Type", "application/json")


# State of a connection. Plain integers: in Python 3.11 reading an enum member costs as much as a
# dictionary lookup.
_IDLE, _HEAD, _BODY, _BUSY, _LEAVING = range(
    5
)  # leaving: the last response was sent, and further input is dropped


class ServerConnection(asyncio.Protocol):
    """One client connection, owned by its server. Everything runs on the event loop's thread."""

    __slots__ = (
        "_body_until",
        "_peer",
        "_reader",
        "_reply",
        "_request",
        "_server",
        "_state",
        "_task",
        "deadline",
        "num_counted",
        "out",
    )

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._reader = RequestReader(server.limits)
        self._state = _IDLE
        self._peer = ""
        self._request: ServerRequest | None = None
        self._reply: ResponseWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._body_until = NEVER
        self.deadline = NEVER
        self.num_counted = 0
        self.out = ConnectionWriter(server)

    # -- asyncio --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.out.transport = transport  # type: ignore[assignment]  # uvloop has its own class
        address = transport.get_extra_info("peername")
        self._peer = str(address[0]) if isinstance(address, tuple) and address else ""
        self.deadline = self._server.loop.time() + self._server.limits.keepalive_s
        num_over = self._server.add(self)
        if num_over > _MAX_REFUSED_CONNECTIONS:
            self._state = _LEAVING
            self.out.abort()
        elif num_over > 0:
            self.refuse(
                RequestRefused(
                    "the server has reached its connection limit", status=503, retry_after_s=1
                )
            )

    def data_received(self, data: bytes) -> None:
        if self._state == _LEAVING:
            return
        self._reader.add(data)
        if self._state != _BUSY and not self.out.is_paused:
            self._advance()
        elif self._reader.num_waiting > _MAX_PIPELINED:
            self.out.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.out.transport = None
        self.deadline = NEVER
        # A running task holds the body: `_serve` removes the connection when the task has ended.
        if self._task is None:
            self._server.bodies.count(self, 0)
            self._server.remove(self)
        elif self._state == _BUSY and not (self._reply is not None and self._reply.is_finished):
            self._task.cancel()

    def pause_writing(self) -> None:
        self.out.pause()
        if self._state == _BUSY:
            self.deadline = self._server.loop.time() + self._server.limits.stall_timeout_s

    def resume_writing(self) -> None:
        if self._state == _BUSY:
            self.deadline = NEVER
        self.out.resume()
        if self._state < _BUSY:
            self._resume()

    def on_deadline(self, now: float) -> None:
        """Act on the passed deadline according to the state."""
        if self._state == _IDLE:
            self.close()
        elif self._state == _HEAD:
            self.refuse(RequestRefused("the request head did not arrive in time", status=408))
        elif self._state == _BODY:
            self.refuse(RequestRefused("the request body did not arrive in time", status=408))
        elif self.out.has_progressed():
            self.deadline = now + self._close_timeout()
        else:
            if self.out.fail(ConnectionAbortedError("the client has not read for too long")):
                self._state = _LEAVING
            self.out.abort()

    # -- requests --

    def _advance(self) -> None:
        """Process buffered input until a request is complete."""
        try:
            while self._state < _BODY and not self.out.is_paused:
                head = self._reader.take_head()
                if head is None:
                    self._await_head()
                    return
                self._accept(head)
            body = self._reader.take_body() if self._state == _BODY else None
        except RequestRefused as refusal:
            self.refuse(refusal)
            return
        except Exception:  # raised by `admit`; this is the top of a request
            logger.exception("the admission check of a request failed")
            self.refuse(RequestRefused(_SERVER_ERROR, status=500))
            return
        if self._state != _BODY:
            return
        if body is None:
            self._await_body()
        else:
            self._begin(body)

    def _await_head(self) -> None:
        if self._state == _IDLE and self._reader.num_waiting:
            self._state = _HEAD
            self.deadline = self._server.loop.time() + self._server.limits.head_timeout_s

    def _await_body(self) -> None:
        now, limits = self._server.loop.time(), self._server.limits
        self.deadline = min(now + limits.body_idle_timeout_s, self._body_until)
        self._server.bodies.count(self, self._reader.num_waiting)

    @property
    def is_arriving(self) -> bool:
        """Whether the body of a request is arriving, or has arrived and is not yet served."""
        return self._state == _BODY

    def _accept(self, head: RequestHead) -> None:
        """Process a head: refuse the request at once, or read its body."""
        request = self._request = ServerRequest(
            head.method, head.path, head.query, head.headers, b"", self._peer
        )
        self._reply = ResponseWriter(self.out, head)
        self._state = _BODY
        refused = self._server.admit(request) if self._server.admit is not None else None
        if refused is not None:
            # A body that has not arrived completely would be read as the next request.
            is_whole = self._reader.take_body() is not None
            self.out.keeps_alive = self.out.keeps_alive and is_whole
            self._reply.send(*refused)
            self._end()
        elif head.has_body:
            self._body_until = self._server.loop.time() + self._server.limits.body_timeout_s
            if head.expects_continue and not self._reader.num_waiting:
                self.out.put(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _begin(self, body: bytes | bytearray) -> None:
        assert self._request is not None
        assert self._reply is not None
        self._server.bodies.count(self, len(body))
        if self._state != _BODY:
            return  # refused: the bodies of all requests take too much memory
        self._request.body = body
        self._state = _BUSY
        self.deadline = (
            NEVER
            if not self.out.is_paused
            else self._server.loop.time() + self._server.limits.stall_timeout_s
        )
        self._task = self._server.loop.create_task(self._serve(self._request, self._reply))

    async def _serve(self, request: ServerRequest, reply: ResponseWriter) -> None:
        try:
            await self._server.handler(request, reply)
        except asyncio.CancelledError:
            self.out.abort()  # the client disconnected, or the server closes
        except ConnectionError:
            self.out.abort()
        except Exception:
            logger.exception("the handler of a request failed: %s %s", request.method, request.path)
        self._task = None
        self._server.bodies.count(self, 0)
        if self.out.transport is None:
            self._server.remove(self)
            return
        if not reply.is_started and not self.out.is_closing:
            reply.send(500, (_JSON,), error_body(RequestRefused(_SERVER_ERROR, status=500)))
        if not reply.is_finished:
            reply.abort()
        self._end()
        if self._state == _IDLE:
            self._resume()

    def _resume(self) -> None:
        """Continue with pipelined requests, unless the client does not read its responses."""
        if self.out.is_paused:
            return
        self.out.resume_reading()
        if self._reader.num_waiting:
            self._advance()

    def _end(self) -> None:
        """Continue after a response: wait for the next request, or close the connection."""
        self._request = self._reply = None
        if not self.out.keeps_alive or self._server.is_draining:
            self._close_gracefully()
            return
        self._state = _IDLE
        self.deadline = self._server.loop.time() + self._server.limits.keepalive_s

    # -- closing --

    def drain(self) -> None:
        """Close the connection unless a request is being served. A request that has not arrived
        completely is refused: a slow upload would delay the end of the server.
        """
        if self._state == _IDLE:
            self.close()
        elif self._state in (_HEAD, _BODY):
            self.refuse(
                RequestRefused(
                    "the server is stopping: send the request to another one",
                    status=503,
                    retry_after_s=1,
                )
            )

    def close(self) -> None:
        """Close after the buffered data is sent, if the client reads it."""
        self._state = _LEAVING
        self.out.has_progressed()
        self.deadline = self._server.loop.time() + self._close_timeout()
        self.out.close()

    def _close_timeout(self) -> float:
        """How long to wait: longer if the client has unread data."""
        return (
            self._server.limits.stall_timeout_s
            if self.out.num_unread
            else self._server.limits.linger_s
        )

    def abort(self) -> None:
        """Close at once and cancel the handler's task."""
        self.out.abort()
        if self._task is not None:
            self._task.cancel()

    @property
    def task(self) -> "asyncio.Task[None] | None":
        return self._task

    def refuse(self, refusal: RequestRefused) -> None:
        """Answer an invalid request and close: the start of the next request is unknown."""
        self._server.on_malformed(refusal)
        self._server.bodies.count(self, 0)
        self._reader = RequestReader(self._server.limits)  # frees the bytes that have arrived
        self.out.keeps_alive = False
        reply = (
            self._reply
            if self._reply is not None and not self._reply.is_started
            else ResponseWriter(self.out, None)
        )
        retry = (
            () if refusal.retry_after_s is None else (("Retry-After", str(refusal.retry_after_s)),)
        )
        if not self.out.is_closing:
            reply.send(refusal.status, (_JSON, *retry), error_body(refusal))
        self._close_gracefully()

    def _close_gracefully(self) -> None:
        """Close without destroying the response in flight. Closing while the client still sends
        would reset the connection: send a FIN and drop further input instead.
        """
        if self.out.end_writing():
            self._state = _LEAVING
            self.out.has_progressed()
            self.deadline = self._server.loop.time() + self._close_timeout()
        else:
            self.close()


# -- server --


ResponseParts = tuple[int, Iterable[tuple[str, str]], bytes]
"""Status, headers and body of a response."""
Admit = Callable[[ServerRequest], ResponseParts | None]
"""Decides on a request before its body is read; None admits the request."""

_BACKLOG = 1024


class HttpServer:
    """Calls `handler` for every complete request, in a task that is cancelled when the client
    disconnects.

    `admit` gets a request before the body is read and may answer instead of the handler.
    `on_malformed` is called for refused input: not HTTP, too large, too slow, or over the
    connection limit.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ServerLimits,
        *,
        admit: Admit | None = None,
        on_malformed: Callable[[RequestRefused], None] = lambda refusal: None,
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.admit = admit
        self.on_malformed = on_malformed
        self.is_draining = False
        self.loop = asyncio.get_running_loop()
        self._deadline_timer = DeadlineTimer(self.loop)
        self._connections: set[ServerConnection] = set()
        self._servers: list[asyncio.Server] = []
        self._is_empty: asyncio.Future[None] | None = None
        self.bodies = BodyBudget(limits.unfinished_bytes)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def start(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Listen on a bound socket and take ownership of it. May be called for several sockets."""
        server = await self.loop.create_server(
            lambda: ServerConnection(self),
            sock=sock,
            ssl=tls,
            backlog=_BACKLOG,
            ssl_handshake_timeout=self.limits.head_timeout_s if tls is not None else None,
            ssl_shutdown_timeout=self.limits.stall_timeout_s if tls is not None else None,
        )
        self._servers.append(server)

    async def drain(self, timeout_s: float) -> None:
        """Stop accepting, close idle connections, refuse requests that are still arriving, and let
        running requests finish. Returns when all connections have ended, or after `timeout_s`.
        """
        self.is_draining = True
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.drain()
        if not self._connections:
            return
        self._is_empty = self.loop.create_future()
        await asyncio.wait((self._is_empty,), timeout=timeout_s)

    async def close(self) -> None:
        """Close everything now; returns when no handler runs any more."""
        self.is_draining = True
        for server in self._servers:
            server.close()
        tasks = [connection.task for connection in self._connections if connection.task is not None]
        for connection in list(self._connections):
            connection.abort()
        if tasks:
            await asyncio.wait(tasks)
        self._deadline_timer.close()

    # -- called by connections --

    def add(self, connection: ServerConnection) -> int:
        """Add a connection; return by how many the limit is exceeded. A refused connection counts
        until its end.
        """
        self._connections.add(connection)
        self._deadline_timer.add(connection)
        return len(self._connections) - self.limits.num_connections

    def remove(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        self._deadline_timer.discard(connection)
        if not self._connections and self._is_empty is not None and not self._is_empty.done():
            self._is_empty.set_result(None)
