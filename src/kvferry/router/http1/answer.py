"""An instance's answer: its head is there, its body is read or passed on."""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvferry.router.http1.errors import InvalidResponse, UpstreamDisconnected
from kvferry.router.http1.framing import FramingError, LengthBody, first_chunk, make_body
from kvferry.router.http1.parsing import BodyKind, ResponseHead
from kvferry.router.http1.pool import TargetPool
from kvferry.router.http1.relay import Relay
from kvferry.router.http1.reply import ResponseWriter
from kvferry.router.http1.upstream_connection import UpstreamConnection

if TYPE_CHECKING:
    from kvferry.router.http1.client import UpstreamPool

__all__ = ["UpstreamResponse"]

_CHUNKED = BodyKind.CHUNKED


class UpstreamResponse:
    """A context manager: left before the end of the body, it closes the connection; so the instance learns that nobody wants the rest."""

    __slots__ = ("_body", "_connection", "_has_extra_bytes", "_head", "_is_over", "_owner", "_pool", "headers", "is_chunked", "status")

    def __init__(self, connection: UpstreamConnection, head: ResponseHead, owner: "UpstreamPool", pool: TargetPool) -> None:
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Nothing more is wanted. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._connection.abort()

    async def read(self, limit: int, timeout_s: float) -> bytes:
        """The whole body, decoded. UpstreamError, also when it is longer than `limit` bytes or takes longer than `timeout_s`."""
        body = self._body
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
                raise InvalidResponse(f"its answer is longer than {limit} bytes")
        return segments[0] if len(segments) == 1 else b"".join(segments)

    async def read_some(self, timeout_s: float) -> bytes:
        """The next segment of the body, decoded; b"" at its end. UpstreamError."""
        return await self._next(self._connection.loop.time() + timeout_s)

    async def peek(self, is_enough: Callable[[bytes], bool], timeout_s: float) -> bytes:
        """The beginning of the body, decoded, as soon as there is enough of it, or it has ended; nothing is taken by that. UpstreamError.

        What is enough is asked of the first chunk and of all that is there."""
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
                raise UpstreamDisconnected("it closed the connection in the middle of its answer", has_answered=True)
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
        """Pass the answer on: its status, `headers`, and the body from `start` (what was read of it already) to its end.

        Without a filter raw bytes pass, chunk framing included. A filter gets decoded segments and b"" at the end, and returns what the
        client gets. `on_first` is called before the first byte of the body goes out.

        UpstreamError when the instance fails: the reply was started, `reply.can_write` says whether it can be continued (between two
        chunks) or only aborted. ConnectionError when the client does not read.
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
        """All that is left has come, and nothing else."""
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
                raise UpstreamDisconnected("it closed the connection in the middle of its answer", has_answered=True)
            else:
                await self._wait(deadline)
        return b""

    def _decode_peeked(self, data: bytes) -> tuple[bytes, bool]:
        """What these raw bytes hold, from the beginning of the body, and whether that is all of it."""
        body, decoded = make_body(self._head.body, self._head.length), list[bytes]()
        try:
            body.advance(data, decoded)
        except FramingError as error:
            self.close()
            raise InvalidResponse(f"its answer is not chunked as it says: {error}") from None
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
            raise InvalidResponse(f"its answer is not chunked as it says: {error}") from None
        self._has_extra_bytes = used < len(data)
        return decoded[0] if len(decoded) == 1 else b"".join(decoded)

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._connection.mark_complete()
        if self._has_extra_bytes or not self._head.keeps_alive:
            self._connection.abort()
        else:
            self._owner.release(self._pool, self._connection)
