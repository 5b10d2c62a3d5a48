"""Which requests are being served, so that a stopping server can let them finish or, at last, break them off. Runs on the API's loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvferry.errors import RequestRefused

__all__ = ["RequestDrain"]

_RETRY_AFTER_S = 1
"""Another instance can serve it at once; this one will not come back before its replacement does."""


class RequestDrain:
    """Knows the live requests; once closed, admits no more."""

    def __init__(self) -> None:
        self._live: set[asyncio.Timeout] = set()
        self._is_closed = False
        self._is_cancelling = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_cancelling(self) -> bool:
        """Whether a cancellation means that the server is stopping: a stream then says so before it ends."""
        return self._is_cancelling

    @property
    def refusal(self) -> RequestRefused:
        return RequestRefused("the server is stopping: send the request to another", status=503, retry_after_s=_RETRY_AFTER_S)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def num_live(self) -> int:
        return len(self._live)

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Around one generation. RequestRefused with 503 when the server is stopping, once `cancel_all` was called also in the middle."""
        if self._is_closed:
            raise self.refusal
        # A deadline that is set when there is one: it cancels this request and nothing else, however deep it waits.
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._live.add(scope)
                self._idle.clear()
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise self.refusal from None
        finally:
            self._live.discard(scope)
            if not self._live:
                self._idle.set()

    def close(self) -> None:
        self._is_closed = True

    def cancel_all(self) -> None:
        """Cancel what is still live."""
        self._is_cancelling = True
        for scope in self._live:
            scope.reschedule(asyncio.get_running_loop().time())

    async def wait_idle(self) -> None:
        """Until no request is live."""
        await self._idle.wait()
