"""One client's connection: requests in, one after the other, each answered by a task of its own
before the next is looked at.

A client that closes its sending half counts as gone, as with most servers: the two cannot be told
apart before something is written to it. Bytes of further requests that come meanwhile are kept, and
from `_MAX_PIPELINED` on not read; a client that leaves then is noticed at the next write.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from kvferry.errors import RequestRefused
from kvferry.router.http.deadlines import NEVER, DeadlineTimer
from kvferry.router.http.framing import RequestReader
from kvferry.router.http.messages import ServerLimits, ServerRequest
from kvferry.router.http.parsing import RequestHead
from kvferry.router.http.writer import ConnectionWriter, ResponseWriter
from kvferry.web.errors import error_body

if TYPE_CHECKING:
    pass

__all__ = ["Admit", "Handler", "HttpServer", "ResponseParts", "ResponseWriter", "ServerConnection"]


Handler = Callable[[ServerRequest, ResponseWriter], Awaitable[None]]

logger = logging.getLogger(__name__)

_MAX_PIPELINED = 64 * 1024
_MAX_REFUSED_CONNECTIONS = 256
"""So many connections too many get an answer that says so; it takes a moment each. More are just
closed.
"""
_SERVER_ERROR = "the server failed to serve this request; its log says why"
_JSON = ("Content-Type", "application/json")


# Where a connection is. Plain numbers: in Python 3.11 reading a member of an enum costs as much as
# a dictionary.
_IDLE, _HEAD, _BODY, _BUSY, _LEAVING = range(
    5
)  # leaving: the last word was said, what still comes is dropped


class ServerConnection(asyncio.Protocol):
    """Owned by the server it came to; everything happens on the loop's thread."""

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
        self.out = ConnectionWriter(server)

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read or served, or its answer still on the way."""
        return self._state == _IDLE

    # -- asyncio --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.out.transport = transport  # type: ignore[assignment]  # uvloop's is no subclass of asyncio.Transport
        address = transport.get_extra_info("peername")
        self._peer = str(address[0]) if isinstance(address, tuple) and address else ""
        self.deadline = self._server.loop.time() + self._server.limits.keepalive_s
        num_over = self._server.add(self)
        if num_over > _MAX_REFUSED_CONNECTIONS:
            self._state = _LEAVING
            self.out.abort()
        elif num_over > 0:
            self._refuse(
                RequestRefused(
                    "the server has as many connections as it takes", status=503, retry_after_s=1
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
        if self._task is None:
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
        """The deadline has passed."""
        if self._state == _IDLE:
            self.close()
        elif self._state == _HEAD:
            self._refuse(RequestRefused("the request's head did not come in time", status=408))
        elif self._state == _BODY:
            self._refuse(RequestRefused("the request's body did not come in time", status=408))
        elif self.out.has_progressed():
            self.deadline = now + self._close_timeout()
        else:
            if self.out.fail(ConnectionAbortedError("the client has not read for too long")):
                self._state = _LEAVING
            self.out.abort()

    # -- requests --

    def _advance(self) -> None:
        """Go on with what the client has sent, up to a request that is whole."""
        try:
            while self._state < _BODY and not self.out.is_paused:
                head = self._reader.take_head()
                if head is None:
                    self._await_head()
                    return
                self._accept(head)
            body = self._reader.take_body() if self._state == _BODY else None
        except RequestRefused as refusal:
            self._refuse(refusal)
            return
        except Exception:  # of `admit`: the top of a request
            logger.exception("a request was not admitted")
            self._refuse(RequestRefused(_SERVER_ERROR, status=500))
            return
        if self._state != _BODY:
            return
        if body is None:
            now = self._server.loop.time()
            self.deadline = min(now + self._server.limits.body_idle_timeout_s, self._body_until)
        else:
            self._begin(body)

    def _await_head(self) -> None:
        if self._state == _IDLE and self._reader.num_waiting:
            self._state = _HEAD
            self.deadline = self._server.loop.time() + self._server.limits.head_timeout_s

    def _accept(self, head: RequestHead) -> None:
        """The head of a request is there: it is refused at once, or its body is read."""
        request = self._request = ServerRequest(
            head.method, head.path, head.query, head.headers, b"", self._peer
        )
        self._reply = ResponseWriter(self.out, head)
        self._state = _BODY
        refused = self._server.admit(request) if self._server.admit is not None else None
        if refused is not None:
            is_whole = self._reader.take_body() is not None
            self.out.keeps_alive = self.out.keeps_alive and is_whole
            self._reply.send(*refused)
            self._end()
        elif head.has_body:
            self._body_until = self._server.loop.time() + self._server.limits.body_timeout_s
            if head.expects_continue and not self._reader.num_waiting:
                self.out.put(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _begin(self, body: bytes) -> None:
        assert self._request is not None
        assert self._reply is not None
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
            self.out.abort()  # the client left, or the server closes
        except ConnectionError:
            self.out.abort()
        except Exception:
            logger.exception("a request was not served: %s %s", request.method, request.path)
        self._task = None
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
        """With what the client has sent meanwhile; but one that does not read its answers gets no
        more of them.
        """
        if self.out.is_paused:
            return
        self.out.resume_reading()
        if self._reader.num_waiting:
            self._advance()

    def _end(self) -> None:
        """A request was answered: the next one, or the end of the connection."""
        self._request = self._reply = None
        if not self.out.keeps_alive or self._server.is_draining:
            self._close_gracefully()
            return
        self._state = _IDLE
        self.deadline = self._server.loop.time() + self._server.limits.keepalive_s

    # -- the end --

    def close(self) -> None:
        """What was written still goes out, if the client reads it."""
        self._state = _LEAVING
        self.out.has_progressed()
        self.deadline = self._server.loop.time() + self._close_timeout()
        self.out.close()

    def _close_timeout(self) -> float:
        """How long to wait for a client that has, or has not, everything it was sent."""
        return (
            self._server.limits.stall_timeout_s
            if self.out.num_unread
            else self._server.limits.linger_s
        )

    def abort(self) -> None:
        """Now, whatever is under way; the handler's task is cancelled."""
        self.out.abort()
        if self._task is not None:
            self._task.cancel()

    @property
    def task(self) -> "asyncio.Task[None] | None":
        return self._task

    def _refuse(self, refusal: RequestRefused) -> None:
        """Answer what is no request, and close: where the next one would begin is not known."""
        self._server.on_malformed(refusal)
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
        """Closing while the client still sends would reset the connection and destroy our last log
        lines: say that we end, drop the rest.
        """
        if self.out.end_writing():
            self._state = _LEAVING
            self.out.has_progressed()
            self.deadline = self._server.loop.time() + self._close_timeout()
        else:
            self.close()


# -------------------- server -------------------- The HTTP/1.1 server: accepts connections, bounds
# them, and lets them end in good order. Belongs to one event loop.


ResponseParts = tuple[int, Iterable[tuple[str, str]], bytes]
Admit = Callable[[ServerRequest], ResponseParts | None]

_BACKLOG = 1024


class HttpServer:
    """Calls `handler` for every request that is whole, in a task that is cancelled when the client
    leaves.

    `admit` sees a request before its body is read, and may answer it in the handler's place.
    `on_malformed` hears of everything that was refused because it is not HTTP, too large, too slow
    or one connection too many.
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

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def start(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Listen on a bound socket, which is ours from now on. May be called for several."""
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
        """Accept nothing more, close idle connections, let the requests under way finish. Returns
        when all are gone, or it is time.
        """
        self.is_draining = True
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            if connection.is_idle:
                connection.close()
        if not self._connections:
            return
        self._is_empty = self.loop.create_future()
        await asyncio.wait((self._is_empty,), timeout=timeout_s)

    async def close(self) -> None:
        """End everything now. Returns when no handler runs any more."""
        self.is_draining = True
        for server in self._servers:
            server.close()
        tasks = [connection.task for connection in self._connections if connection.task is not None]
        for connection in list(self._connections):
            connection.abort()
        if tasks:
            await asyncio.wait(tasks)
        self._deadline_timer.close()

    # -- what connections tell --

    def add(self, connection: ServerConnection) -> int:
        """By how many there are too many now. One that is turned away is ours too until it is
        gone.
        """
        self._connections.add(connection)
        self._deadline_timer.add(connection)
        return len(self._connections) - self.limits.num_connections

    def remove(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        self._deadline_timer.discard(connection)
        if not self._connections and self._is_empty is not None and not self._is_empty.done():
            self._is_empty.set_result(None)
