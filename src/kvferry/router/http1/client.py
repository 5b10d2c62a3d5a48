"""Requests to instances over keep-alive connections. Belongs to one event loop."""

import asyncio
import ssl
from collections.abc import Sequence

from kvferry.router.http1.answer import UpstreamResponse
from kvferry.router.http1.errors import ConnectFailed, UpstreamDisconnected, UpstreamError
from kvferry.router.http1.parting import AbandonedConnections, OnLateResponse
from kvferry.router.http1.pool import Target, TargetPool
from kvferry.router.http1.sweep import DeadlineTimer
from kvferry.router.http1.upstream_connection import UpstreamConnection
from kvferry.router.http1.wire import Fields, request_head

__all__ = ["KEEPALIVE_S", "OnLateResponse", "Target", "UpstreamPool", "UpstreamResponse"]

KEEPALIVE_S = 4.0
"""vLLM's server closes a connection that was idle for 5 s; a request sent just then would be lost."""

_MAX_POOLS = 4096
_SETTLE_S = 1.0


class UpstreamPool:
    """Keep-alive connections per target."""

    def __init__(self, keepalive_s: float = KEEPALIVE_S) -> None:
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._deadline_timer = DeadlineTimer(self._loop)
        self._pools: dict[Target, TargetPool] = {}
        self._connections: set[UpstreamConnection] = set()
        self._abandoned = AbandonedConnections()

    @property
    def num_connections(self) -> int:
        """Idle ones and busy ones, and those that are being left."""
        return len(self._connections)

    async def send(
        self,
        target: Target,
        method: str,
        path: str,
        headers: Fields,
        body: bytes | Sequence[bytes] = b"",
        *,
        connect_timeout_s: float,
        head_timeout_s: float,
        on_late_response: OnLateResponse | None = None,
    ) -> UpstreamResponse:
        """Send a request and wait for the head of its answer. UpstreamError. `on_late_response` hears of an answer that comes whole
        although it was left before its end, here or later, for whatever reason.

        A keep-alive connection may have been closed by the instance at this very moment: when it ends without a byte of an answer,
        the request is sent once more, over a fresh one.
        """
        pool = self._pools.get(target) or self._add_pool(target)
        if isinstance(body, bytes):
            data = request_head(method, path, pool.host, headers, len(body)) + body
        else:
            data = b"".join((request_head(method, path, pool.host, headers, sum(map(len, body))), *body))
        connection = pool.take(self._loop.time())
        if connection is not None:
            try:
                head = await connection.send_request(method, data, head_timeout_s, on_late_response)
            except UpstreamDisconnected as error:
                connection.abort()
                if error.has_answered:
                    raise
            except BaseException:
                connection.abort()
                raise
            else:
                return UpstreamResponse(connection, head, self, pool)
        try:
            connection = await self._connect(pool, connect_timeout_s)
        except ConnectFailed:
            if connection is None:
                raise
            # It was sent, by the warm one: whoever got it may have died of it.
            raise UpstreamDisconnected("it closed the connection before it had answered", has_answered=False) from None
        try:
            head = await connection.send_request(method, data, head_timeout_s, on_late_response)
        except BaseException:
            connection.abort()
            raise
        return UpstreamResponse(connection, head, self, pool)

    async def close(self) -> None:
        """Close every connection, busy ones too. Those that are being left get a moment for what is on its way."""
        for connection in list(self._connections):
            connection.abort()
        await self._abandoned.wait_idle(_SETTLE_S)
        for connection in list(self._connections):
            connection.abort_transport()
        await self._abandoned.wait_idle(_SETTLE_S)
        self._deadline_timer.close()

    def num_received(self, target: Target) -> int:
        """How often something has come from there: that it grows shows that somebody is alive."""
        pool = self._pools.get(target)
        return 0 if pool is None else pool.num_received

    def fail_pending(self, target: Target, error: UpstreamError) -> int:
        """Fail every request sent there of whose answer nothing has been passed on; how many that were."""
        pool = self._pools.get(target)
        waiting = [] if pool is None else [one for one in self._connections if one.pool is pool and one.is_pending]
        for connection in waiting:
            connection.fail(error)
        return len(waiting)

    def release(self, pool: TargetPool, connection: UpstreamConnection) -> None:
        """An exchange has ended cleanly."""
        if connection.is_clean:
            connection.set_idle(self._loop.time() + self._keepalive_s)
            pool.put(connection)
        else:
            connection.abort()

    def _add_pool(self, target: Target) -> TargetPool:
        if len(self._pools) >= _MAX_POOLS:  # addresses come and go with instances; keep-alive connections of a forgotten one grow old
            self._pools.clear()
        pool = self._pools[target] = TargetPool(target)
        return pool

    async def _connect(self, pool: TargetPool, timeout_s: float) -> UpstreamConnection:
        target, address = pool.target, pool.target.address
        connection = UpstreamConnection(self._loop, pool, self._forget, self._abandoned)
        try:
            async with asyncio.timeout(timeout_s):
                await self._loop.create_connection(
                    lambda: connection,
                    address.host,
                    address.port,
                    ssl=target.tls,
                    server_hostname=address.host if target.tls is not None else None,
                )
        except asyncio.CancelledError:
            connection.abort()
            raise
        except TimeoutError:
            connection.abort()
            raise ConnectFailed(f"no connection within {timeout_s:g} s") from None
        except ssl.SSLError as error:
            raise ConnectFailed(f"no connection by TLS ({error.reason or error})") from None
        except (OSError, UnicodeError) as error:
            raise ConnectFailed(f"no connection ({getattr(error, 'strerror', None) or error})") from None
        self._connections.add(connection)
        self._deadline_timer.add(connection)
        return connection

    def _forget(self, connection: UpstreamConnection) -> None:
        self._connections.discard(connection)
        self._deadline_timer.discard(connection)
        connection.pool.forget(connection)
