"""Which requests are being served, so that a stopping server can let them finish. Runs on the API's loop."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.errors import RequestRefused

__all__ = ["Drain"]


class Drain:
    """Counts live requests; once closed, admits no more."""

    def __init__(self) -> None:
        self._live = 0
        self._is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Around one request. RequestRefused with 503 when the server is stopping."""
        if self._is_closed:
            raise RequestRefused("this server is stopping: send the request to another", status=503)
        self._live += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._live -= 1
            if not self._live:
                self._idle.set()

    def close(self) -> None:
        self._is_closed = True

    async def wait_idle(self) -> None:
        """Until no request is live."""
        await self._idle.wait()
