"""The routes that generate nothing: health, models, version, metrics, transfers, tokenize and
detokenize.
"""

import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

import kvferry
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.engine.api.admission import IgnoredTransfers, check_token_ids
from kvferry.engine.api.completions import handle_chat, handle_completion
from kvferry.engine.api.context import (
    CONTEXT,
    REQUEST_ID,
    ApiContext,
    ApiSettings,
    Engine,
    RequestDrain,
    context_of,
    read_body,
)
from kvferry.engine.api.metrics import ApiMetrics, MetricSource
from kvferry.engine.api.prompts import ChatTemplate, PromptReader
from kvferry.engine.api.schema import DetokenizeRequest, TokenizeRequest, decode_body
from kvferry.engine.api.tokenizer import ModelTokenizer, SpecialTokens
from kvferry.engine.messages import Remaining
from kvferry.engine.options import EngineOptions
from kvferry.errors import KVFerryError, RequestRefused
from kvferry.web.errors import error_response
from kvferry.web.transfer_records import TransferRecords

__all__ = [
    "build_app",
    "handle_detokenize",
    "handle_health",
    "handle_metrics",
    "handle_models",
    "handle_tokenize",
    "handle_transfers",
    "handle_version",
]


_log = logging.getLogger(__name__)


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    max_model_len: int
    created: int
    object: str = "model"
    owned_by: str = "kvferry"
    root: str = ""
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"


class Draining(msgspec.Struct, frozen=True):
    """Not an OpenAI error: it is for whoever routes requests, and waits for the end."""

    requests: int
    """HTTP requests that are being served."""
    leases: int
    """Finished prefills whose blocks a peer may still fetch."""
    blocks: int
    status: str = "draining"


class Tokenized(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


async def handle_health(http: web.Request) -> web.Response:
    context = context_of(http)
    if not context.engine.is_alive:
        raise RequestRefused("the engine core is not running", status=503)
    if context.drain.is_closed:
        left = context.engine.remaining or Remaining()
        state = Draining(
            requests=context.drain.num_live, leases=left.num_leases, blocks=left.num_blocks
        )
        return web.Response(
            status=503, body=msgspec.json.encode(state), content_type="application/json"
        )
    return web.Response()


async def handle_models(http: web.Request) -> web.Response:
    context = context_of(http)
    card = ModelCard(
        id=context.model_name,
        root=context.model_name,
        max_model_len=context.engine.ready.max_model_len,
        created=int(time.time()),
    )
    return _json(ModelList([card]))


async def handle_version(http: web.Request) -> web.Response:
    return _json({"version": kvferry.__version__})


async def handle_metrics(http: web.Request) -> web.Response:
    context = context_of(http)
    try:
        status = await context.engine.status()
    except KVFerryError as error:
        # A scrape must not fail because the core is busy or dead: that is when its other numbers
        # matter.
        _log.warning("metrics without the core's part: %s", error)
        status = None
    return web.Response(
        body=context.metrics.render(status),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )


async def handle_transfers(http: web.Request) -> web.Response:
    """Where the time of requests went whose KV came from a peer: of one, by the id that its client
    sent, or of the newest.
    """
    name = http.match_info.get("request_id", "")
    try:
        records = await context_of(http).engine.transfer_records(name)
    except KVFerryError as error:
        raise RequestRefused(str(error), status=503) from error
    if name and not records:
        raise RequestRefused(
            "no transfer for a request of that id is known here, or no longer", status=404
        )
    return _json(TransferRecords(records))


async def handle_tokenize(http: web.Request) -> web.Response:
    context = context_of(http)
    request = decode_body(await read_body(http), TokenizeRequest)
    context.check_model(request.model)
    if request.messages is not None:
        tokens = await context.prompts.chat(request)
    elif request.prompt is not None:
        special = (
            SpecialTokens.WITHOUT if request.add_special_tokens is False else SpecialTokens.WITH
        )
        tokens = await context.prompts.text(request.prompt, special)
    else:
        raise RequestRefused(
            "there is nothing to tokenize: send prompt or messages", param="prompt"
        )
    names = (
        [context.tokenizer.text_of(token) for token in tokens]
        if request.return_token_strs
        else None
    )
    return _json(Tokenized(len(tokens), context.engine.ready.max_model_len, tokens, names))


async def handle_detokenize(http: web.Request) -> web.Response:
    context = context_of(http)
    request = decode_body(await read_body(http), DetokenizeRequest)
    context.check_model(request.model)
    check_token_ids(request.tokens, context.engine.ready.vocab_size, "tokens")
    return _json({"prompt": context.tokenizer.decode(request.tokens, SpecialTokens.WITH)})


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


# -------------------- app --------------------
# The aiohttp application: routes, one guard around every request, and what is closed at the end.
#
# The guard gives each request its id and turns whatever goes wrong into an OpenAI-style error, so
# that no handler can answer with a traceback and no client can take the server down.


_MAX_REQUEST_ID_CHARS = 256


def build_app(
    engine: Engine,
    options: EngineOptions,
    settings: ApiSettings | None = None,
    metric_sources: Sequence[MetricSource] = (),
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
        prompts=PromptReader(
            tokenizer, ChatTemplate.load(options.model), engine.ready.max_model_len
        ),
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
        response = error_response(
            RequestRefused(f"{_shown_route(request)}: {refusal.reason}", status=refusal.status)
        )
        if "Allow" in refusal.headers:
            response.headers["Allow"] = refusal.headers["Allow"]
        return response
    except ConnectionResetError:
        raise
    except Exception:
        _log.exception("a request failed method=%s path=%s", request.method, request.path)
        return error_response(
            RequestRefused("the server failed to serve this request; its log says why", status=500)
        )


def _shown_route(request: web.Request) -> str:
    """A path may hold bytes that are no text."""
    return f"{request.method} {request.path}".encode(errors="replace").decode()


def _request_id(http: web.Request) -> str:
    """The client's X-Request-Id, if it is fit for logs and headers, or a fresh one. Not unique: the
    engine's ids get a random tail.
    """
    given = http.headers.get("X-Request-Id")
    if not given:
        return uuid.uuid4().hex
    if len(given) > _MAX_REQUEST_ID_CHARS or not given.isascii() or not given.isprintable():
        raise RequestRefused(
            f"X-Request-Id must be at most {_MAX_REQUEST_ID_CHARS} printable ASCII characters"
        )
    return given


async def _add_request_id(http: web.Request, response: web.StreamResponse) -> None:
    if request_id := REQUEST_ID.get(""):
        response.headers["X-Request-Id"] = request_id


async def _close_prompt_reader(app: web.Application) -> AsyncIterator[None]:
    yield
    app[CONTEXT].prompts.close()
