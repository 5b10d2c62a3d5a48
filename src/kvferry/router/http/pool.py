"""HTTP client for instances: pools of keep-alive connections, and responses.

Belongs to one event loop. The connection used last is reused first, so that surplus connections
grow old and are closed.
"""

import asyncio
import ssl
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

from kvferry.router.http.deadlines import DeadlineTimer
from kvferry.router.http.framing import FramingError, LengthBody, first_chunk, make_body
from kvferry.router.http.messages import (
    AnswerTooLong,
    ConnectFailed,
    Fields,
    InvalidResponse,
    UpstreamDisconnected,
    UpstreamError,
    request_head,
)
from kvferry.router.http.parsing import BodyKind, ResponseHead
from kvferry.router.http.relay import Relay
from kvferry.router.http.upstream_connection import Target, TargetPool, UpstreamConnection
from kvferry.router.http.writer import ResponseWriter

# -- response --
# The head of the response has arrived; its body is read or relayed.


_CHUNKED = BodyKind.CHUNKED


class UpstreamResponse:
    """Response of an instance, as a context manager. Leaving the context before the end of the body
    closes the connection, so that the instance stops working on the request.
    """

    __slots__ = (
        "_body",
        "_connection",
        "_has_extra_bytes",
        "_head",
        "_is_over",
        "_owner",
        "_pool",
        "headers",
        "is_chunked",
        "status",
    )

    def __init__(
        self,
        connection: UpstreamConnection,
        head: ResponseHead,
        owner: "UpstreamPool",
        pool: TargetPool,
    ) -> None:
        self._connection = connection
        self._head = head
        self._owner = owner
        self._pool = pool
        self._body = make_body(head.body, head.length)
        self._is_over = False
        self._has_extra_bytes = False
        self.status = head.status
        self.headers = head.headers
        self.is_chunked = head.body is _CHUNKED
        if self._body.is_ended:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the rest of the response. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._connection.abort()

    async def read(self, limit: int, timeout_s: float) -> bytes:
        """Read the whole body, decoded.

        Raises UpstreamError, also if the body exceeds `limit` bytes or takes more than `timeout_s`.
        """
        body = self._body
        # Fast path: the whole body has arrived, and nothing else.
        if isinstance(body, LengthBody) and 0 < body.left == self._connection.num_waiting <= limit:
            return self._take_complete()
        deadline = self._connection.loop.time() + timeout_s
        segments: list[bytes] = []
        size = 0
        while segment := await self._next(deadline):
            segments.append(segment)
            size += len(segment)
            if size > limit:
                self.close()
                raise AnswerTooLong(f"its answer is longer than {limit} bytes")
        return segments[0] if len(segments) == 1 else b"".join(segments)

    async def read_some(self, timeout_s: float) -> bytes:
        """Read the next decoded bytes of the body; b"" at its end. Raises UpstreamError."""
        return await self._next(self._connection.loop.time() + timeout_s)

    async def peek(self, is_enough: Callable[[bytes], bool], timeout_s: float) -> bytes:
        """Return the decoded start of the body without consuming bytes, once `is_enough` returns
        True or the body has ended. Raises UpstreamError.

        `is_enough` is called with the first chunk, and with everything that has arrived.
        """
        connection, deadline = self._connection, self._connection.loop.time() + timeout_s
        num_seen = 0
        while not self._body.is_ended:
            data = connection.peek()
            if len(data) > num_seen:
                num_seen = len(data)
                first = first_chunk(data) if self.is_chunked else data
                if first is not None and is_enough(first):
                    return first
                decoded, is_ended = self._decode_peeked(data)
                if is_ended or is_enough(decoded):
                    return decoded
            if connection.is_lost:
                if self._body.is_complete_at_close and connection.error is None:
                    return data
                self._is_over = True
                raise UpstreamDisconnected(
                    "it closed the connection in the middle of its answer", has_answered=True
                )
            await self._wait(deadline)
        return b""

    async def relay(
        self,
        reply: ResponseWriter,
        headers: Iterable[tuple[str, str]],
        *,
        idle_timeout_s: float,
        start: bytes = b"",
        on_first: Callable[[], None] | None = None,
        filter: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """Relay the response to the client: status, `headers`, and the body.

        `start` is the part of the body that was already read. Without a filter the raw bytes pass
        unchanged, chunk framing included. A filter gets decoded bytes, and b"" at the end, and
        returns the bytes for the client. `on_first` is called before the first byte of the body is
        sent.

        Raises UpstreamError if the instance fails: the reply was started, and `reply.can_write`
        tells whether the reply can continue (between two chunks) or only be aborted. Raises
        ConnectionError if the client does not read.
        """
        relay = Relay(self._connection, self._body, reply, filter)
        try:
            relay.begin(self._head, headers, start, on_first)
            if not relay.is_over:
                await relay.run(idle_timeout_s)
            relay.check()
        except BaseException:
            reply.out.uncork()
            self.close()
            raise
        self._has_extra_bytes = relay.has_extra_bytes
        self._end()

    def _take_complete(self) -> bytes:
        """Take the rest of the body, which has arrived completely."""
        data = self._connection.take()
        self._body.advance(data, None)
        self._end()
        return data

    async def _next(self, deadline: float) -> bytes:
        connection, body = self._connection, self._body
        while not body.is_ended:
            data = connection.take()
            if data:
                segment = self._decode(data)
                if body.is_ended:
                    self._end()
                if segment:
                    return segment
            elif connection.is_lost:
                self._is_over = True
                if body.is_complete_at_close and connection.error is None:
                    return b""
                raise UpstreamDisconnected(
                    "it closed the connection in the middle of its answer", has_answered=True
                )
            else:
                await self._wait(deadline)
        return b""

    def _decode_peeked(self, data: bytes) -> tuple[bytes, bool]:
        """Decode raw bytes from the start of the body; also return whether the body is complete."""
        body, decoded = make_body(self._head.body, self._head.length), list[bytes]()
        try:
            body.advance(data, decoded)
        except FramingError as error:
            self.close()
            raise InvalidResponse(f"its chunked answer is not valid: {error}") from None
        return b"".join(decoded), body.is_ended

    async def _wait(self, deadline: float) -> None:
        try:
            await self._connection.wait_readable(deadline)
        except BaseException:
            self.close()
            raise

    def _decode(self, data: bytes) -> bytes:
        decoded: list[bytes] = []
        try:
            used = self._body.advance(data, decoded)
        except FramingError as error:
            self.close()
            raise InvalidResponse(f"its chunked answer is not valid: {error}") from None
        self._has_extra_bytes = used < len(data)
        return decoded[0] if len(decoded) == 1 else b"".join(decoded)

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        # Bytes after the body: the connection is out of step and cannot be reused.
        if self._has_extra_bytes or not self._head.keeps_alive:
            self._connection.abort()
        else:
            self._owner.release(self._pool, self._connection)


# -- client --


KEEPALIVE_S = 4.0
"""How long an idle connection is kept. vLLM's server closes connections after 5 s of idle time; a
request sent at that moment would be lost.
"""

_MAX_POOLS = 4096


class UpstreamPool:
    """Sends requests to instances over keep-alive connections, pooled per target."""

    def __init__(self, keepalive_s: float = KEEPALIVE_S) -> None:
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._deadline_timer = DeadlineTimer(self._loop)
        self._pools: dict[Target, TargetPool] = {}
        self._connections: set[UpstreamConnection] = set()

    @property
    def num_connections(self) -> int:
        """Number of connections, idle and busy."""
        return len(self._connections)

    async def send(
        self,
        target: Target,
        method: str,
        path: str,
        headers: Fields,
        body: bytes | Sequence[bytes | memoryview] = b"",
        *,
        connect_timeout_s: float,
        head_timeout_s: float,
    ) -> UpstreamResponse:
        """Send a request and wait for the head of the response. Raises UpstreamError.

        An instance may close a keep-alive connection at the moment of reuse. If a reused connection
        ends without a byte of an answer, the request is sent again over a new connection.
        """
        pool = self._pools.get(target) or self._add_pool(target)
        body = [body] if isinstance(body, bytes) else body
        data = [request_head(method, path, pool.host, headers, sum(map(len, body))), *body]
        connection = pool.take(self._loop.time())
        if connection is not None:
            try:
                head = await connection.send_request(method, data, head_timeout_s)
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
            # The reused connection had sent the request: the request may have crashed the
            # instance.
            raise UpstreamDisconnected(
                "it closed the connection before answering", has_answered=False
            ) from None
        try:
            head = await connection.send_request(method, data, head_timeout_s)
        except BaseException:
            connection.abort()
            raise
        return UpstreamResponse(connection, head, self, pool)

    async def close(self) -> None:
        """Close all connections, busy ones too."""
        for connection in list(self._connections):
            connection.abort()
        self._deadline_timer.close()

    def num_received(self, target: Target) -> int:
        """How many times data has arrived from the target; growth shows a live target."""
        pool = self._pools.get(target)
        return 0 if pool is None else pool.num_received

    def fail_pending(self, target: Target, make_error: Callable[[float], UpstreamError]) -> int:
        """Fail the requests to the target whose answer was not passed on; return how many.
        `make_error` gets the time at which a request was sent.
        """
        pool = self._pools.get(target)
        waiting = (
            []
            if pool is None
            else [one for one in self._connections if one.pool is pool and one.is_pending]
        )
        for connection in waiting:
            connection.fail(make_error(connection.sent_at))
        return len(waiting)

    def release(self, pool: TargetPool, connection: UpstreamConnection) -> None:
        """Return a connection after a complete response; unclean connections are closed."""
        if connection.is_clean:
            connection.set_idle(self._loop.time() + self._keepalive_s)
            pool.put(connection)
        else:
            connection.abort()

    def _add_pool(self, target: Target) -> TargetPool:
        if (
            len(self._pools) >= _MAX_POOLS
            # bounds the dict while instances change; connections of dropped pools expire by
            # themselves
        ):
            self._pools.clear()
        pool = self._pools[target] = TargetPool(target)
        return pool

    async def _connect(self, pool: TargetPool, timeout_s: float) -> UpstreamConnection:
        target, address = pool.target, pool.target.address
        connection = UpstreamConnection(self._loop, pool, self._forget)
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
            raise ConnectFailed(f"the TLS handshake failed ({error.reason or error})") from None
        except (OSError, UnicodeError) as error:
            raise ConnectFailed(
                f"no connection ({getattr(error, 'strerror', None) or error})"
            ) from None
        self._connections.add(connection)
        self._deadline_timer.add(connection)
        return connection

    def _forget(self, connection: UpstreamConnection) -> None:
        self._connections.discard(connection)
        self._deadline_timer.discard(connection)
        connection.pool.forget(connection)
