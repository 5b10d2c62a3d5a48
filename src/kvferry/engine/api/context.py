"""What the front-end needs of an engine core; `kvferry.engine.client.EngineClient` is one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from kvferry.engine.api.admission import IgnoredTransfers
from kvferry.engine.api.metrics import ApiMetrics
from kvferry.engine.api.prompts import PromptReader
from kvferry.engine.api.tokenizer import ModelTokenizer
from kvferry.engine.client import OutputStream
from kvferry.engine.messages import AddRequest, CoreReady, CoreStatus, Remaining
from kvferry.errors import RequestRefused
from kvferry.web.transfer_records import TransferRecord

__all__ = [
    "CONTEXT",
    "REQUEST_ID",
    "ApiContext",
    "ApiSettings",
    "Engine",
    "RequestDrain",
    "context_of",
    "read_body",
]


class Engine(Protocol):
    @property
    def ready(self) -> CoreReady: ...

    @property
    def is_alive(self) -> bool: ...

    async def died(self) -> str:
        """Wait until the core is gone; the reason."""

    def add(self, requests: Sequence[AddRequest]) -> list[OutputStream]:
        """All requests enter before the same step. Closing a stream that has not ended aborts its
        request.
        """

    def abandon(self, request_id: str) -> None:
        """The answer of this request reached nobody. Harmless for unknown ones."""

    async def status(self, timeout_s: float = 5.0) -> CoreStatus: ...

    async def transfer_records(
        self, name: str = "", timeout_s: float = 5.0
    ) -> list[TransferRecord]:
        """Of requests of that name whose KV came from a peer; of the newest, without one."""

    def drain(self) -> None:
        """Keep count, from now on, of who still needs the core."""

    @property
    def remaining(self) -> Remaining | None:
        """The count; None before the first."""

    async def drained(self) -> None:
        """Wait until nobody does."""


# -------------------- drain -------------------- Which requests are being served, so that a
# stopping server can let them finish or, at last, break them off. Runs on the API's loop.


_RETRY_AFTER_S = 1
"""Another instance can serve it at once; this one will not come back before its replacement
does.
"""


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
        """Whether a cancellation means that the server is stopping: a stream then says so before it
        ends.
        """
        return self._is_cancelling

    @property
    def refusal(self) -> RequestRefused:
        return RequestRefused(
            "the server is stopping: send the request to another",
            status=503,
            retry_after_s=_RETRY_AFTER_S,
        )

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def num_live(self) -> int:
        return len(self._live)

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Around one generation. RequestRefused with 503 when the server is stopping, once
        `cancel_all` was called also in the middle.
        """
        if self._is_closed:
            raise self.refusal
        # A deadline that is set when there is one: it cancels this request and nothing else,
        # however deep it waits.
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


# -------------------- context -------------------- What every handler works with: the engine, the
# model's text side, settings and metrics; and how a body is read.
#
# Owned by the application; one per process, used on its loop.


@dataclass(frozen=True, slots=True)
class ApiSettings:
    max_body_bytes: int = 64 * 1024 * 1024
    body_timeout_s: float = 60.0
    """For a client to send its body."""
    stall_timeout_s: float = 120.0
    """For a client to read what was sent, before its request is aborted."""


@dataclass(frozen=True, slots=True)
class ApiContext:
    engine: Engine
    model_name: str
    tokenizer: ModelTokenizer
    prompts: PromptReader
    settings: ApiSettings
    metrics: ApiMetrics
    drain: RequestDrain
    ignored_transfers: IgnoredTransfers | None
    """For an engine without a connector; others use what they are sent."""

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.model_name:
            raise RequestRefused(
                f"the model {model!r} does not exist here; this server has {self.model_name!r}",
                status=404,
                param="model",
            )


CONTEXT: web.AppKey[ApiContext] = web.AppKey("context", ApiContext)
REQUEST_ID: ContextVar[str] = ContextVar("kvferry_request_id")
"""The id of the HTTP request that the current task serves, as in its X-Request-Id header."""


def context_of(http: web.Request) -> ApiContext:
    return http.app[CONTEXT]


async def read_body(http: web.Request) -> bytes:
    """The raw body, whatever its content type says. RequestRefused when it is too large, broken or
    does not arrive in time.
    """
    settings = context_of(http).settings
    too_large = RequestRefused(
        f"the request body is larger than {settings.max_body_bytes} bytes", status=413
    )
    if (http.content_length or 0) > settings.max_body_bytes:
        raise too_large
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            return await http.read()
    except TimeoutError:
        raise RequestRefused(
            f"the request body did not arrive within {settings.body_timeout_s:g} s", status=408
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except web.RequestPayloadError as error:
        # Its text quotes the bytes at fault.
        raise RequestRefused(
            "the request body cannot be read: it is cut short, or its chunks or its compression "
            "are broken"
        ) from error
