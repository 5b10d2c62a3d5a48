"""What every handler works with: the engine, the model's text side, settings and metrics; and how a body is read.

Owned by the application; one per process, used on its loop.
"""

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass

from aiohttp import web

from kvferry.engine.api.drain import RequestDrain
from kvferry.engine.api.engine import Engine
from kvferry.engine.api.metrics import ApiMetrics
from kvferry.engine.api.prompts import PromptReader
from kvferry.engine.api.tokenizer import ModelTokenizer
from kvferry.engine.api.unused_transfers import IgnoredTransfers
from kvferry.errors import RequestRefused

__all__ = ["CONTEXT", "REQUEST_ID", "ApiContext", "ApiSettings", "context_of", "read_body"]


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
            raise RequestRefused(f"the model {model!r} does not exist here; this server has {self.model_name!r}", status=404, param="model")


CONTEXT: web.AppKey[ApiContext] = web.AppKey("context", ApiContext)
REQUEST_ID: ContextVar[str] = ContextVar("kvferry_request_id")
"""The id of the HTTP request that the current task serves, as in its X-Request-Id header."""


def context_of(http: web.Request) -> ApiContext:
    return http.app[CONTEXT]


async def read_body(http: web.Request) -> bytes:
    """The raw body, whatever its content type says. RequestRefused when it is too large, broken or does not arrive in time."""
    settings = context_of(http).settings
    too_large = RequestRefused(f"the request body is larger than {settings.max_body_bytes} bytes", status=413)
    if (http.content_length or 0) > settings.max_body_bytes:
        raise too_large
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            return await http.read()
    except TimeoutError:
        raise RequestRefused(f"the request body did not arrive within {settings.body_timeout_s:g} s", status=408) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except web.RequestPayloadError as error:
        # Its text quotes the bytes at fault.
        raise RequestRefused("the request body cannot be read: it is cut short, or its chunks or its compression are broken") from error
