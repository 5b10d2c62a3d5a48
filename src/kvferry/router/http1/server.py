"""The HTTP/1.1 server: accepts connections, bounds them, and lets them end in good order. Belongs to one event loop."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable

from kvferry.errors import RequestRefused
from kvferry.router.http1.connection import Handler, ServerConnection
from kvferry.router.http1.limits import ServerLimits
from kvferry.router.http1.messages import ServerRequest
from kvferry.router.http1.reply import ResponseWriter
from kvferry.router.http1.sweep import DeadlineTimer

__all__ = ["Admit", "Handler", "HttpServer", "ResponseParts", "ResponseWriter"]

ResponseParts = tuple[int, Iterable[tuple[str, str]], bytes]
Admit = Callable[[ServerRequest], ResponseParts | None]

_BACKLOG = 1024


class HttpServer:
    """Calls `handler` for every request that is whole, in a task that is cancelled when the client leaves.

    `admit` sees a request before its body is read, and may answer it in the handler's place. `on_malformed` hears of everything that was
    refused because it is not HTTP, too large, too slow or one connection too many.
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
        """Accept nothing more, close idle connections, let the requests under way finish. Returns when all are gone, or it is time."""
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

    # -- what connections tell -----------------------------------------------------------------------------------------

    def add(self, connection: ServerConnection) -> int:
        """By how many there are too many now. One that is turned away is ours too until it is gone."""
        self._connections.add(connection)
        self._deadline_timer.add(connection)
        return len(self._connections) - self.limits.num_connections

    def remove(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        self._deadline_timer.discard(connection)
        if not self._connections and self._is_empty is not None and not self._is_empty.done():
            self._is_empty.set_result(None)
