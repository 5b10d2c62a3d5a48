"""The state that all HTTP handlers share: the engine, the tokenizer, settings, metrics and the
drain.

The module also has the `Engine` protocol, through which handlers use the engine core
(`kvferry.engine.client.EngineClient` implements the protocol), and `read_body`. One `ApiContext`
exists per process; the application owns the context, and only the event loop of the API uses it.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import StreamReader, web

from kvferry.engine.api.admission import IgnoredTransfers
from kvferry.engine.api.metrics import ApiMetrics
from kvferry.engine.api.prompts import INLINE_BYTES, PromptReader
from kvferry.engine.api.schema import Body, decode_body, max_values
from kvferry.engine.api.tokenizer import ModelTokenizer
from kvferry.engine.client import OutputStream
from kvferry.engine.messages import AddRequest, CoreReady, CoreStatus, Remaining
from kvferry.errors import RequestRefused
from kvferry.web.api_keys import ApiKeys
from kvferry.web.bodies import FREE_BODY_BYTES, BodyBudget
from kvferry.web.transfer_records import TransferRecord


class Engine(Protocol):
    """The engine core, as the front-end sees it."""

    @property
    def ready(self) -> CoreReady: ...

    @property
    def is_alive(self) -> bool: ...

    async def died(self) -> str:
        """Wait until the core has died; return the reason."""

    def add(self, requests: Sequence[AddRequest]) -> list[OutputStream]:
        """Submit requests; all enter the core before the same step.

        Closing a stream that has not ended aborts its request.
        """

    def abandon(self, request_id: str) -> None:
        """Report that the answer to this request did not reach the client; unknown ids are
        ignored.
        """

    async def status(self, timeout_s: float = 5.0) -> CoreStatus: ...

    async def transfer_records(
        self, name: str = "", timeout_s: float = 5.0
    ) -> list[TransferRecord]:
        """Return records of requests whose KV came from a peer: of the request `name`, else the
        newest.
        """

    def drain(self) -> None:
        """Ask the core to count, from now on, the requests and leases that still need the core."""

    @property
    def remaining(self) -> Remaining | None:
        """The latest count from the core; None before the first count arrives."""

    async def drained(self) -> None:
        """Wait until no request and no lease needs the core."""


# -- uploads --


class Upload:
    """The body of one request. `BodyBudget` counts its bytes until the request ends."""

    def __init__(self, bodies: BodyBudget) -> None:
        self.num_counted = 0
        self._bodies = bodies
        self._scope: asyncio.Timeout | None = None
        self._refusal: RequestRefused | None = None

    @property
    def is_arriving(self) -> bool:
        return self._scope is not None

    def refuse(self, refusal: RequestRefused) -> None:
        """End `read`, which raises the refusal."""
        self._refusal = refusal
        self.end()
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    def end(self) -> None:
        """Count the body no more, because its request has ended."""
        self._bodies.count(self, 0)

    async def read(self, content: StreamReader, settings: "ApiSettings") -> bytes:
        """Return the whole body; raise RequestRefused if it is too large, does not arrive in time,
        or is refused.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + settings.body_timeout_s
        body = bytearray()
        try:
            async with asyncio.timeout_at(until) as self._scope:
                while self._refusal is None:
                    self._scope.reschedule(min(until, clock() + settings.body_idle_timeout_s))
                    num_before = len(body)
                    body += await content.readany()
                    if len(body) == num_before and self._refusal is None:
                        return bytes(body)
                    if len(body) > settings.max_body_bytes:
                        raise settings.too_large
                    self._bodies.count(self, len(body))
                    if len(body) > FREE_BODY_BYTES:
                        await asyncio.sleep(0)  # `readany` inflates the next piece without a pause
        except TimeoutError:
            if self._refusal is None:
                self._refusal = RequestRefused(
                    "the request body did not arrive in time", status=408
                )
        finally:
            self._scope = None
            body.clear()  # the traceback of a refusal would keep the bytes
        raise self._pop_refusal()

    def _pop_refusal(self) -> RequestRefused:
        """Return the refusal and forget it: with its traceback it would keep the whole request."""
        assert self._refusal is not None
        refusal, self._refusal = self._refusal, None
        return refusal


# -- drain --
# The requests that the server is answering. A stopping server waits for these requests to finish
# and cancels the remaining requests at the end. Runs on the event loop of the API.


_RETRY_AFTER_S = 1
"""The Retry-After of a refused request: another instance can serve the request at once.

This instance does not serve again until its replacement has started.
"""


class RequestDrain:
    """Holds the live requests; after `close`, admits no more requests."""

    def __init__(self) -> None:
        self._live: set[asyncio.Timeout] = set()
        self.uploads: set[Upload] = set()
        """The bodies that are arriving; `close` refuses them, because they would delay the stop."""
        self._is_closed = False
        self._is_cancelling = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_cancelling(self) -> bool:
        """Whether a cancellation means that the server is stopping; a stream then ends with that
        error.
        """
        return self._is_cancelling

    @property
    def refusal(self) -> RequestRefused:
        """The 503 error for requests that arrive, or are cancelled, while the server stops."""
        return RequestRefused(
            "the server is stopping: send the request to another one",
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
        """Hold this context around one request.

        Raise RequestRefused with status 503 when the server is stopping; after `cancel_all`, also
        raise in the middle of a request.
        """
        if self._is_closed:
            raise self.refusal
        # A timeout without a deadline. `cancel_all` sets the deadline to now, which cancels this
        # request and nothing else, however deep the handler waits.
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._live.add(scope)
                self._idle.clear()
                yield
        except TimeoutError:
            # A TimeoutError of the handler's own must pass through unchanged.
            if not scope.expired():
                raise
            raise self.refusal from None
        finally:
            self._live.discard(scope)
            if not self._live:
                self._idle.set()

    def close(self) -> None:
        """Admit no more requests, and refuse those whose body has not arrived; the other live
        requests go on.
        """
        self._is_closed = True
        for upload in self.uploads:
            upload.refuse(self.refusal)

    def cancel_all(self) -> None:
        """Cancel the requests that are still live."""
        self._is_cancelling = True
        for scope in self._live:
            scope.reschedule(asyncio.get_running_loop().time())

    async def wait_idle(self) -> None:
        """Wait until no request is live."""
        await self._idle.wait()


# -- context --
# The settings of the front-end, the shared context, and how a handler reads a body.


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Limits of the HTTP front-end, and who may use it."""

    max_body_bytes: int = 64 * 1024 * 1024
    max_unfinished_bytes: int = 256 * 1024 * 1024
    """Memory for the bodies of all requests together, until the requests end; 64 KiB of each do not
    count.
    """
    body_timeout_s: float = 60.0
    """The time a client has to send its body."""
    body_idle_timeout_s: float = 30.0
    """The longest pause within a body."""
    keepalive_s: float = 75.0
    """The time a connection may wait for the end of its next request's head."""
    stall_timeout_s: float = 120.0
    """The time a client may leave the sent data unread before its request is aborted."""
    api_keys: ApiKeys = field(default_factory=ApiKeys)
    """The keys of which a client must send one; without keys every client is served."""

    @property
    def too_large(self) -> RequestRefused:
        """The 413 error for a body over the limit."""
        return RequestRefused(
            f"the request body is larger than {self.max_body_bytes} bytes", status=413
        )


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The objects that every handler uses."""

    engine: Engine
    model_name: str
    tokenizer: ModelTokenizer
    prompts: PromptReader
    settings: ApiSettings
    metrics: ApiMetrics
    drain: RequestDrain
    bodies: BodyBudget
    ignored_transfers: IgnoredTransfers | None
    """The rate limit for warnings, set only for an engine without a connector."""

    async def decode(self, raw: bytes, kind: type[Body]) -> Body:
        """Decode and check a request body; a large body does not delay other clients."""
        limit = max_values(self.engine.ready.max_model_len)
        return await self.prompts.off_loop(
            len(raw), lambda: decode_body(raw, kind, limit), INLINE_BYTES
        )

    def check_model(self, model: str | None) -> None:
        """Raise RequestRefused with status 404 if the request names another model."""
        if model is not None and model != self.model_name:
            raise RequestRefused(
                f"the model {model!r} does not exist here; this server serves {self.model_name!r}",
                status=404,
                param="model",
            )


CONTEXT: web.AppKey[ApiContext] = web.AppKey("context", ApiContext)
UPLOAD: web.RequestKey[Upload] = web.RequestKey("upload", Upload)
REQUEST_ID: ContextVar[str] = ContextVar("kvferry_request_id")
"""The id of the HTTP request that the current task serves, as in the X-Request-Id header."""


def context_of(http: web.Request) -> ApiContext:
    return http.app[CONTEXT]


async def read_body(http: web.Request) -> bytes:
    """Return the raw body, whatever the content type is.

    Raise RequestRefused when the body is too large, is malformed, does not arrive in time, takes
    too much memory together with other bodies, or has not arrived when the server stops.
    """
    context, upload = context_of(http), http[UPLOAD]
    settings = context.settings
    if (http.content_length or 0) > settings.max_body_bytes:
        raise settings.too_large
    context.drain.uploads.add(upload)
    try:
        return await upload.read(http.content, settings)
    except web.RequestPayloadError as error:
        # The text of this exception quotes the malformed bytes, so the answer does not include that
        # text.
        raise RequestRefused(
            "the request body cannot be read: it is truncated, or its chunks or its compression "
            "are malformed"
        ) from error
    finally:
        context.drain.uploads.discard(upload)
