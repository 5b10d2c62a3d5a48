"""Server-sent events to one client.

Headers go out with the first event, so that whatever fails before it can still be answered with a status. A client that does not
read holds up nobody but itself, and only until the stall deadline.
"""

import asyncio
from collections.abc import Awaitable

from aiohttp import web

__all__ = ["EventStream"]

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class EventStream:
    """One response. ConnectionResetError from any method means that the client is gone."""

    def __init__(self, http: web.Request, stall_timeout_s: float) -> None:
        self._http = http
        self._stall_timeout_s = stall_timeout_s
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def has_started(self) -> bool:
        return self.response.prepared

    async def send(self, *payloads: bytes) -> None:
        """Write events, in one segment; returns when the client's buffer has room again."""
        if not self.response.prepared:
            await self.response.prepare(self._http)
        await self._bounded(self.response.write(b"".join(b"data: " + payload + b"\n\n" for payload in payloads)))

    async def finish(self) -> None:
        await self.send(b"[DONE]")
        await self._bounded(self.response.write_eof())

    async def _bounded(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await writing
        except TimeoutError:
            if self._http.transport is not None:
                self._http.transport.abort()
            raise ConnectionResetError(f"the client has not read for {self._stall_timeout_s:g} s") from None
