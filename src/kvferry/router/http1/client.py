"""Requests to instances over connections that are kept warm. Belongs to one event loop."""

import asyncio
import ssl
from collections.abc import Iterable, Sequence

from kvferry.router.http1.answer import UpstreamAnswer
from kvferry.router.http1.errors import BrokenOff, NotReached
from kvferry.router.http1.parsing import AnswerHead
from kvferry.router.http1.pool import Pool, Target
from kvferry.router.http1.sweep import Sweep
from kvferry.router.http1.upstream_connection import UpstreamConnection
from kvferry.router.http1.wire import request_head

__all__ = ["KEEPALIVE_S", "Target", "UpstreamAnswer", "Upstreams"]

KEEPALIVE_S = 4.0
"""vLLM's server closes a connection that was idle for 5 s; a request sent just then would be lost."""


class Upstreams:
    """Warm connections per target."""

    def __init__(self, keepalive_s: float = KEEPALIVE_S) -> None:
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._sweep = Sweep(self._loop)
        self._pool = Pool()
        self._connections: set[UpstreamConnection] = set()

    @property
    def num_connections(self) -> int:
        """Idle ones and busy ones."""
        return len(self._connections)

    async def send(
        self,
        target: Target,
        method: str,
        path: str,
        headers: Iterable[tuple[str, str]],
        body: bytes | Sequence[bytes] = b"",
        *,
        connect_timeout_s: float,
        head_timeout_s: float,
    ) -> UpstreamAnswer:
        """Send a request and wait for the head of its answer. UpstreamError.

        A connection that was kept warm may have been closed by the instance at this very moment: when it ends without a byte of an answer,
        the request is sent once more, over a fresh one.
        """
        pieces = (body,) if isinstance(body, bytes) else body
        head = request_head(method, path, str(target.address), headers, sum(map(len, pieces)))
        data = (head, *pieces)
        connection = self._pool.take(target, self._loop.time())
        if connection is not None:
            try:
                return self._answer(target, connection, await self._ask(connection, method, data, head_timeout_s))
            except BrokenOff as error:
                if error.has_answered:
                    raise
        connection = await self._connect(target, connect_timeout_s)
        return self._answer(target, connection, await self._ask(connection, method, data, head_timeout_s))

    async def close(self) -> None:
        """Close every connection, busy ones too."""
        for connection in list(self._connections):
            connection.abort()
        self._sweep.close()

    async def _ask(self, connection: UpstreamConnection, method: str, data: Iterable[bytes], timeout_s: float) -> AnswerHead:
        try:
            head = await connection.ask(method, data, timeout_s)
        except BaseException:
            connection.abort()
            raise
        assert head is not None
        return head

    def _answer(self, target: Target, connection: UpstreamConnection, head: AnswerHead) -> UpstreamAnswer:
        return UpstreamAnswer(connection, head, lambda: self._give_back(target, connection))

    def _give_back(self, target: Target, connection: UpstreamConnection) -> None:
        if connection.is_clean:
            connection.rest(self._loop.time() + self._keepalive_s)
            self._pool.put(target, connection)
        else:
            connection.abort()

    async def _connect(self, target: Target, timeout_s: float) -> UpstreamConnection:
        address = target.address
        connection = UpstreamConnection(self._loop, self._forget)
        try:
            async with asyncio.timeout(timeout_s):
                await self._loop.create_connection(
                    lambda: connection,
                    address.host,
                    address.port,
                    ssl=target.tls,
                    server_hostname=address.host if target.tls is not None else None,
                )
        except TimeoutError:
            raise NotReached(f"no connection within {timeout_s:g} s") from None
        except ssl.SSLError as error:
            raise NotReached(f"no connection by TLS ({error.reason or error})") from None
        except (OSError, UnicodeError) as error:
            raise NotReached(f"no connection ({getattr(error, 'strerror', None) or error})") from None
        self._connections.add(connection)
        self._sweep.add(connection)
        return connection

    def _forget(self, connection: UpstreamConnection) -> None:
        self._connections.discard(connection)
        self._sweep.discard(connection)
        self._pool.forget(connection)
