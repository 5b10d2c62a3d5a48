"""The aiohttp application: routes, one guard around every request, and what is closed at the end.

The guard gives each request its id and turns whatever goes wrong into an OpenAI-style error, so that no handler can answer with a
traceback and no client can take the server down.
"""

import logging
import uuid
from collections.abc import AsyncIterator, Sequence

from aiohttp import web
from aiohttp.typedefs import Handler

from kvferry.connectors.factory import KVConnectorFactory
from kvferry.engine.api.chat import handle_chat
from kvferry.engine.api.chat_template import ChatTemplate
from kvferry.engine.api.completions import handle_completion
from kvferry.engine.api.context import CONTEXT, REQUEST_ID, ApiContext, ApiSettings, context_of
from kvferry.engine.api.drain import RequestDrain
from kvferry.engine.api.engine import Engine
from kvferry.engine.api.inspection import (
    handle_detokenize,
    handle_health,
    handle_metrics,
    handle_models,
    handle_tokenize,
    handle_transfers,
    handle_version,
)
from kvferry.engine.api.metrics import ApiMetrics, MetricSource
from kvferry.engine.api.prompts import PromptReader
from kvferry.engine.api.tokenizer import ModelTokenizer
from kvferry.engine.api.unused_transfers import IgnoredTransfers
from kvferry.engine.options import EngineOptions
from kvferry.errors import RequestRefused
from kvferry.web.errors import error_response

__all__ = ["build_app"]

_log = logging.getLogger(__name__)

_MAX_REQUEST_ID_CHARS = 256


def build_app(
    engine: Engine, options: EngineOptions, settings: ApiSettings | None = None, metric_sources: Sequence[MetricSource] = ()
) -> web.Application:
    """An application that serves one engine. Call it on the loop it will run on.

    ConfigError when the model folder has no usable tokenizer or chat template."""
    settings = settings or ApiSettings()
    tokenizer = ModelTokenizer.load(options.model)
    model_name = options.served_model_name or str(options.model)
    app = web.Application(middlewares=[_guard], client_max_size=settings.max_body_bytes)
    app[CONTEXT] = ApiContext(
        engine=engine,
        model_name=model_name,
        tokenizer=tokenizer,
        prompts=PromptReader(tokenizer, ChatTemplate.load(options.model), engine.ready.max_model_len),
        settings=settings,
        metrics=ApiMetrics(model_name, metric_sources, _transfer_mode(options)),
        drain=RequestDrain(),
        ignored_transfers=IgnoredTransfers() if options.kv_transfer is None else None,
    )
    app.cleanup_ctx.append(_close_prompt_reader)
    app.on_response_prepare.append(_add_request_id)
    app.add_routes(
        [
            web.post("/v1/completions", handle_completion),
            web.post("/v1/chat/completions", handle_chat),
            web.get("/v1/models", handle_models),
            web.get("/health", handle_health),
            web.get("/metrics", handle_metrics),
            web.get("/version", handle_version),
            web.get("/kvferry/transfers", handle_transfers),
            web.get("/kvferry/transfers/{request_id}", handle_transfers),
            web.post("/tokenize", handle_tokenize),
            web.post("/detokenize", handle_detokenize),
        ]
    )
    return app


def _transfer_mode(options: EngineOptions) -> str:
    """`pull` or `push`; empty without a connector, or with one that knows nothing of it."""
    if options.kv_transfer is None:
        return ""
    return getattr(KVConnectorFactory.get_connector_class(options.kv_transfer), "transfer_mode", "")


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    REQUEST_ID.set("")
    try:
        REQUEST_ID.set(_request_id(request))
        if request.method in ("GET", "HEAD"):
            # Looking at a server that stops must go on working, and must not keep it.
            return await handler(request)
        async with context_of(request).drain.admit():
            return await handler(request)
    except RequestRefused as refusal:
        return error_response(refusal)
    except web.HTTPException as refusal:
        response = error_response(RequestRefused(f"{_shown_route(request)}: {refusal.reason}", status=refusal.status))
        if "Allow" in refusal.headers:
            response.headers["Allow"] = refusal.headers["Allow"]
        return response
    except ConnectionResetError:
        raise
    except Exception:
        _log.exception("a request failed method=%s path=%s", request.method, request.path)
        return error_response(RequestRefused("the server failed to serve this request; its log says why", status=500))


def _shown_route(request: web.Request) -> str:
    """A path may hold bytes that are no text."""
    return f"{request.method} {request.path}".encode(errors="replace").decode()


def _request_id(http: web.Request) -> str:
    """The client's X-Request-Id, if it is fit for logs and headers, or a fresh one. Not unique: the engine's ids get a random tail."""
    given = http.headers.get("X-Request-Id")
    if not given:
        return uuid.uuid4().hex
    if len(given) > _MAX_REQUEST_ID_CHARS or not given.isascii() or not given.isprintable():
        raise RequestRefused(f"X-Request-Id must be at most {_MAX_REQUEST_ID_CHARS} printable ASCII characters")
    return given


async def _add_request_id(http: web.Request, response: web.StreamResponse) -> None:
    if request_id := REQUEST_ID.get(""):
        response.headers["X-Request-Id"] = request_id


async def _close_prompt_reader(app: web.Application) -> AsyncIterator[None]:
    yield
    app[CONTEXT].prompts.close()
