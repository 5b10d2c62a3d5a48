"""Leaving an instance before it has answered, without losing an answer that is on its way.

A connection that is closed loses what its peer has sent and we have not read, and nobody learns of it. So the leaver only says that it
has nothing more to say (a half-close), which an engine takes for a client that is gone, and reads on until the instance closes its side:
either there is a whole answer among what came, or there will never be one.
"""

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING

from kvferry.router.http1.errors import NotHttp
from kvferry.router.http1.framing import NotFramed, make_body
from kvferry.router.http1.parsing import read_answer_head

if TYPE_CHECKING:
    from kvferry.router.http1.upstream_connection import UpstreamConnection

__all__ = ["PARTING_S", "Partings", "half_close", "whole_answer"]

PARTING_S = 5.0
"""How long an instance may take to close its side. One that runs does so at once."""
_MAX_PARTING = 256


class Partings:
    """Connections that are being left. Bounded: what is too much is closed at once, and with it what it would have brought."""

    __slots__ = ("_idle", "_members")

    def __init__(self) -> None:
        self._members: set[UpstreamConnection] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._members)

    def admit(self, connection: "UpstreamConnection") -> bool:
        if len(self._members) >= _MAX_PARTING:
            return False
        self._members.add(connection)
        self._idle.clear()
        return True

    def discard(self, connection: "UpstreamConnection") -> None:
        self._members.discard(connection)
        if not self._members:
            self._idle.set()

    async def settle(self, timeout_s: float) -> None:
        """Until none is left, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()


def half_close(transport: asyncio.Transport) -> None:
    """Below TLS too, whose own transports have no such thing; what has not been sent yet never will be."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as ours:
        ours.shutdown(socket.SHUT_WR)


def whole_answer(raw: bytes, method: str) -> tuple[int, bytes] | None:
    """Status and body of an answer whose connection is closed; None: it is not whole, or is no answer. Pure."""
    status = 0
    while status < 200:
        end = raw.find(b"\r\n\r\n")
        if end < 0:
            return None
        try:
            head = read_answer_head(raw[: end + 4], method)
        except NotHttp:
            return None
        status, raw = head.status, raw[end + 4 :]
    body, decoded = make_body(head.body, head.length), list[bytes]()
    try:
        body.advance(raw, decoded)
    except NotFramed:
        return None
    return (status, b"".join(decoded)) if body.is_ended or body.is_whole_at_close else None
