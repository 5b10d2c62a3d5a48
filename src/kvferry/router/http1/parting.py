"""Leaving an instance before it has answered, without losing an answer that is on its way.

A connection that is closed loses what its peer has sent and we have not read, and nobody learns of it. So the leaver only says that it
has nothing more to say (a half-close), which an engine takes for a client that is gone, and reads on until the instance closes its side:
either there is a whole answer among what came, or there will never be one.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from kvferry.router.http1.errors import InvalidResponse
from kvferry.router.http1.framing import FramingError, make_body
from kvferry.router.http1.parsing import read_response_head

if TYPE_CHECKING:
    from kvferry.router.http1.upstream_connection import UpstreamConnection

__all__ = ["ABANDON_TIMEOUT_S", "AbandonedConnections", "LateResponse", "OnLateResponse", "half_close", "parse_complete_response"]

OnLateResponse = Callable[[int, bytes], None]
"""Hears status and body of an answer that came whole after its asker had left."""

ABANDON_TIMEOUT_S = 5.0
"""How long an instance may take to close its side. One that runs does so at once."""
_MAX_ABANDONED, _MAX_ABANDONED_PER_TARGET = 4096, 2048
"""All clients of a router may leave at once, and an instance that stands still must not take what the others need."""
_MAX_HEAD = 64 * 1024
_MAX_KEPT = 2 * 1024 * 1024
"""Of an answer: block ids of a million tokens are half a megabyte."""
_WARN_S = 60.0

_log = logging.getLogger(__name__)


class AbandonedConnections:
    """Connections that are being left. Bounded: what is too much is closed at once, and with it what it would have brought."""

    __slots__ = ("_idle", "_members", "_warned_at")

    def __init__(self) -> None:
        self._members: set[UpstreamConnection] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._warned_at = -inf

    def admit(self, connection: "UpstreamConnection") -> bool:
        pool = connection.pool
        if len(self._members) >= _MAX_ABANDONED or pool.num_abandoned >= _MAX_ABANDONED_PER_TARGET:
            self._warn(str(pool.target.address))
            return False
        self._members.add(connection)
        pool.num_abandoned += 1
        self._idle.clear()
        return True

    def discard(self, connection: "UpstreamConnection") -> None:
        if connection in self._members:
            self._members.remove(connection)
            connection.pool.num_abandoned -= 1
        if not self._members:
            self._idle.set()

    def _warn(self, where: str) -> None:
        if time.monotonic() >= self._warned_at + _WARN_S:
            self._warned_at = time.monotonic()
            _log.warning("too many requests are being left at once: what their answers would bring is lost instance=%s", where)

    async def wait_idle(self, timeout_s: float) -> None:
        """Until none is left, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()


class LateResponse:
    """An answer from its first byte on, for somebody who wants it even when its asker has left."""

    __slots__ = ("_method", "_on_late_response", "_segments", "_size")

    def __init__(self, method: str, on_late_response: OnLateResponse) -> None:
        self._method = method
        self._on_late_response = on_late_response
        self._segments: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> bool:
        """False: it is too long to be kept."""
        self._segments.append(data)
        self._size += len(data)
        return self._size <= _MAX_KEPT

    def deliver(self) -> None:
        """Its asker has left, and nothing more will come."""
        answer = parse_complete_response(b"".join(self._segments), self._method)
        if answer is not None:
            self._on_late_response(*answer)


def half_close(transport: asyncio.Transport) -> bool:
    """Below TLS too, whose own transports have no such thing; what has not been sent yet never will be. False: it could not be done."""
    raw = transport.get_extra_info("socket")
    if raw is None:  # it is lost, and about to say so
        return False
    try:
        with socket.socket(fileno=os.dup(raw.fileno())) as ours:
            ours.shutdown(socket.SHUT_WR)
    except OSError:
        return False
    return True


def parse_complete_response(raw: bytes, method: str) -> tuple[int, bytes] | None:
    """Status and body of an answer whose connection is closed; None: it is not whole, or is no answer. Pure."""
    status = start = 0
    while status < 200:
        end = raw.find(b"\r\n\r\n", start, start + _MAX_HEAD) + 4
        if end < 4:
            return None
        try:
            head = read_response_head(raw[start:end], method)
        except InvalidResponse:
            return None
        status, start = head.status, end
    body, decoded = make_body(head.body, head.length), list[bytes]()
    try:
        body.advance(raw[start:], decoded)
    except FramingError:
        return None
    return (status, b"".join(decoded)) if body.is_ended or body.is_complete_at_close else None
