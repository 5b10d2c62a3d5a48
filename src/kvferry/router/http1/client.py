"""Requests to instances over connections that are kept warm. Belongs to one event loop."""

import asyncio
import ssl
from collections.abc import Sequence

from kvferry.router.http1.answer import UpstreamAnswer
from kvferry.router.http1.errors import BrokenOff, NotReached, UpstreamError
from kvferry.router.http1.parting import OnLeft, Partings
from kvferry.router.http1.pool import Site, Target
from kvferry.router.http1.sweep import Sweep
from kvferry.router.http1.upstream_connection import UpstreamConnection
from kvferry.router.http1.wire import Fields, request_head

__all__ = ["KEEPALIVE_S", "OnLeft", "Target", "UpstreamAnswer", "Upstreams"]

KEEPALIVE_S = 4.0
"""vLLM's server closes a connection that was idle for 5 s; a request sent just then would be lost."""

_MAX_SITES = 4096
_SETTLE_S = 1.0


class Upstreams:
    """Warm connections per target."""

    def __init__(self, keepalive_s: float = KEEPALIVE_S) -> None:
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._sweep = Sweep(self._loop)
        self._sites: dict[Target, Site] = {}
        self._connections: set[UpstreamConnection] = set()
        self._partings = Partings()

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
        on_left: OnLeft | None = None,
    ) -> UpstreamAnswer:
        """Send a request and wait for the head of its answer. UpstreamError. `on_left` hears of an answer that comes whole although it was
        left before its end, here or later, for whatever reason.

        A connection that was kept warm may have been closed by the instance at this very moment: when it ends without a byte of an answer,
        the request is sent once more, over a fresh one.
        """
        site = self._sites.get(target) or self._add_site(target)
        if isinstance(body, bytes):
            data = request_head(method, path, site.host, headers, len(body)) + body
        else:
            data = b"".join((request_head(method, path, site.host, headers, sum(map(len, body))), *body))
        connection = site.take(self._loop.time())
        if connection is not None:
            try:
                head = await connection.ask(method, data, head_timeout_s, on_left)
            except BrokenOff as error:
                connection.abort()
                if error.has_answered:
                    raise
            except BaseException:
                connection.abort()
                raise
            else:
                return UpstreamAnswer(connection, head, self, site)
        try:
            connection = await self._connect(site, connect_timeout_s)
        except NotReached:
            if connection is None:
                raise
            # It was sent, by the warm one: whoever got it may have died of it.
            raise BrokenOff("it closed the connection before it had answered", has_answered=False) from None
        try:
            head = await connection.ask(method, data, head_timeout_s, on_left)
        except BaseException:
            connection.abort()
            raise
        return UpstreamAnswer(connection, head, self, site)

    async def close(self) -> None:
        """Close every connection, busy ones too. Those that are being left get a moment for what is on its way."""
        for connection in list(self._connections):
            connection.abort()
        await self._partings.settle(_SETTLE_S)
        for connection in list(self._connections):
            connection.cut()
        await self._partings.settle(_SETTLE_S)
        self._sweep.close()

    def num_heard(self, target: Target) -> int:
        """How often something has come from there: that it grows shows that somebody is alive."""
        site = self._sites.get(target)
        return 0 if site is None else site.num_heard

    def give_up(self, target: Target, error: UpstreamError) -> int:
        """Fail every request sent there of whose answer nothing has been passed on; how many that were."""
        site = self._sites.get(target)
        waiting = [] if site is None else [one for one in self._connections if one.site is site and one.is_awaited]
        for connection in waiting:
            connection.fail(error)
        return len(waiting)

    def give_back(self, site: Site, connection: UpstreamConnection) -> None:
        """An exchange has ended cleanly."""
        if connection.is_clean:
            connection.rest(self._loop.time() + self._keepalive_s)
            site.put(connection)
        else:
            connection.abort()

    def _add_site(self, target: Target) -> Site:
        if len(self._sites) >= _MAX_SITES:  # addresses come and go with instances; warm connections of a forgotten one grow old
            self._sites.clear()
        site = self._sites[target] = Site(target)
        return site

    async def _connect(self, site: Site, timeout_s: float) -> UpstreamConnection:
        target, address = site.target, site.target.address
        connection = UpstreamConnection(self._loop, site, self._forget, self._partings)
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
        connection.site.forget(connection)
