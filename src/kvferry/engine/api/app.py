"""The aiohttp application of the embedded engine, and the handlers of all routes that generate no
text.

Those routes are health, models, version, metrics, transfer records, tokenize and detokenize; the
routes that generate are in `kvferry.engine.api.completions`. Runs on the event loop of the API
process.
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
from kvferry.engine.api.chat_template import ChatTemplate
from kvferry.engine.api.completions import handle_chat, handle_completion
from kvferry.engine.api.context import (
    CONTEXT,
    REQUEST_ID,
    UPLOAD,
    ApiContext,
    ApiSettings,
    Engine,
    RequestDrain,
    Upload,
    context_of,
    read_body,
)
from kvferry.engine.api.errors import error_response
from kvferry.engine.api.metrics import ApiMetrics, MetricSource
from kvferry.engine.api.prompts import PromptReader
from kvferry.engine.api.schema import DetokenizeRequest, TokenizeRequest
from kvferry.engine.api.tokenizer import ModelTokenizer, SpecialTokens
from kvferry.engine.messages import Remaining
from kvferry.engine.options import EngineOptions
from kvferry.errors import KVFerryError, RequestRefused
from kvferry.web.bodies import BodyBudget
from kvferry.web.transfer_records import TransferRecords

_log = logging.getLogger(__name__)


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of GET /v1/models."""

    id: str
    max_model_len: int
    created: int
    object: str = "model"
    owned_by: str = "kvferry"
    root: str = ""
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True):
    """The body of GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"


class Draining(msgspec.Struct, frozen=True):
    """The body of GET /health while the server drains.

    This body is not an OpenAI error: the reader is a router, which polls until the counts reach 0.
    """

    requests: int
    """The number of HTTP requests that the server is still answering."""
    leases: int
    """The number of finished requests whose blocks a peer may still read."""
    blocks: int
    """The number of blocks that the requests and leases hold."""
    status: str = "draining"


class Tokenized(msgspec.Struct, frozen=True):
    """The body of the answer to POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


async def handle_health(http: web.Request) -> web.Response:
    """Answer 200 while the engine serves; 503 while the server drains or after the core has
    died.
    """
    context = context_of(http)
    if not context.engine.is_alive:
        raise RequestRefused("the engine core is not running", status=503)
    if context.drain.is_closed:
        left = context.engine.remaining or Remaining()
        state = Draining(
            requests=context.drain.num_live, leases=left.num_leases, blocks=left.num_blocks
        )
        shown = state if _has_key(http) else {"status": state.status}
        return web.Response(
            status=503, body=msgspec.json.encode(shown), content_type="application/json"
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
        # A scrape must not fail because the core is busy or dead: exactly then the operator needs
        # the metrics of the front-end.
        _log.warning("/metrics lacks the values of the engine core: %s", error)
        status = None
    return web.Response(
        body=context.metrics.render(status),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )


async def handle_transfers(http: web.Request) -> web.Response:
    """Return the timing records of requests whose KV came from a peer.

    With a request id in the path (the id that the client sent), return the records of that request,
    else the newest records.
    """
    name = http.match_info.get("request_id", "")
    try:
        records = await context_of(http).engine.transfer_records(name)
    except KVFerryError as error:
        raise RequestRefused(str(error), status=503) from error
    if name and not records:
        raise RequestRefused("no transfer of a request with this id is on record", status=404)
    return _json(TransferRecords(records))


async def handle_tokenize(http: web.Request) -> web.Response:
    context = context_of(http)
    raw = await read_body(http)
    request = await context.decode(raw, TokenizeRequest)
    context.check_model(request.model)
    if request.messages is not None:
        tokens = await context.prompts.chat(request, len(raw))
    elif request.prompt is not None:
        special = (
            SpecialTokens.WITHOUT if request.add_special_tokens is False else SpecialTokens.WITH
        )
        tokens = await context.prompts.text(request.prompt, special)
    else:
        raise RequestRefused(
            "the request has no text to tokenize: send prompt or messages", param="prompt"
        )
    names = (
        await context.prompts.off_loop(
            len(tokens), lambda: [context.tokenizer.text_of(token) for token in tokens]
        )
        if request.return_token_strs
        else None
    )
    return _json(Tokenized(len(tokens), context.engine.ready.max_model_len, tokens, names))


async def handle_detokenize(http: web.Request) -> web.Response:
    context = context_of(http)
    request = await context.decode(await read_body(http), DetokenizeRequest)
    context.check_model(request.model)
    check_token_ids(request.tokens, context.engine.ready.vocab_size, "tokens")
    text = await context.prompts.off_loop(
        len(request.tokens), lambda: context.tokenizer.decode(request.tokens, SpecialTokens.WITH)
    )
    return _json({"prompt": text})


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


# -- app --
# The routes, one middleware around every request, and the clean-up at the end. The middleware gives
# each request its id and turns every exception into an OpenAI-style error, so that no handler can
# answer with a traceback and no client can take the server down.


_MAX_REQUEST_ID_CHARS = 256


def build_app(
    engine: Engine,
    options: EngineOptions,
    settings: ApiSettings | None = None,
    metric_sources: Sequence[MetricSource] = (),
) -> web.Application:
    """Build an application that serves one engine; call from the event loop that will run the
    application.

    Raise ConfigError when the model folder has no usable tokenizer or chat template.
    """
    settings = settings or ApiSettings()
    tokenizer = ModelTokenizer.load(options.model)
    model_name = options.served_model_name or str(options.model)
    app = web.Application(middlewares=[_guard])
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
        bodies=BodyBudget(settings.max_unfinished_bytes),
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
            web.get("/ping", handle_health),
            web.post("/ping", handle_health),
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
    """Return `pull` or `push`; empty without a connector, or if the connector has no mode."""
    if options.kv_transfer is None:
        return ""
    return KVConnectorFactory.describe(options.kv_transfer).transfer_mode


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: answer a request, and close the connection if its body has not arrived."""
    response = await _answer(request, handler)
    if not request.content.is_eof():
        response.force_close()
    return response


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Set the request id, admit the request, and turn every exception into an error body."""
    REQUEST_ID.set("")
    try:
        REQUEST_ID.set(_request_id(request))
        # Load balancers, which have no key, ask for the health.
        if request.path not in ("/health", "/ping") and not _has_key(request):
            return error_response(
                RequestRefused("the API key is missing or unknown", status=401),
                {"WWW-Authenticate": "Bearer"},
            )
        if request.method in ("GET", "HEAD"):
            # Health checks and scrapes must still work while the server stops, and must not delay
            # the stop.
            return await handler(request)
        return await _serve_body(request, handler)
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
        # The client is gone, so there is no connection to send an error on; aiohttp handles the
        # exception.
        raise
    except Exception:
        _log.exception("request failed method=%s path=%s", request.method, request.path)
        return error_response(
            RequestRefused("the server failed to serve this request; its log says why", status=500)
        )


async def _serve_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Admit a request that may have a body, and count the body's memory until the request ends."""
    context = context_of(request)
    upload = request[UPLOAD] = Upload(context.bodies)
    try:
        async with context.drain.admit():
            return await handler(request)
    finally:
        upload.end()


def _has_key(http: web.Request) -> bool:
    """Return whether the client may use this server: it sent a key, or the server has no keys."""
    keys = context_of(http).settings.api_keys
    return not keys or keys.find(http.headers.get("Authorization")) is not None


def _shown_route(request: web.Request) -> str:
    """Return method and path for an error message; a path may hold bytes that are not valid
    text.
    """
    return f"{request.method} {request.path}".encode(errors="replace").decode()


def _request_id(http: web.Request) -> str:
    """Return the client's X-Request-Id if the id is fit for logs and headers, else a random id.

    A client id need not be unique: each engine request id gets a random suffix (see
    `RequestAdmission`).
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
    """Signal handler of aiohttp: copy the request id into the response headers."""
    if request_id := REQUEST_ID.get(""):
        response.headers["X-Request-Id"] = request_id


async def _close_prompt_reader(app: web.Application) -> AsyncIterator[None]:
    """Clean-up context of aiohttp: close the prompt reader when the application ends."""
    yield
    app[CONTEXT].prompts.close()
