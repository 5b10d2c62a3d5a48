"""The routes that generate nothing: health, models, version, metrics, transfers, tokenize and detokenize."""

import logging
import time

import msgspec
from aiohttp import web

import kvferry
from kvferry.engine.api.admission import check_token_ids
from kvferry.engine.api.context import context_of, read_body
from kvferry.engine.api.schema import DetokenizeRequest, TokenizeRequest, decode_body
from kvferry.engine.api.tokenizer import SpecialTokens
from kvferry.engine.messages import Remaining
from kvferry.errors import KVFerryError, RequestRefused
from kvferry.web.handover_records import TransferRecords

__all__ = [
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
        state = Draining(requests=context.drain.num_live, leases=left.num_leases, blocks=left.num_blocks)
        return web.Response(status=503, body=msgspec.json.encode(state), content_type="application/json")
    return web.Response()


async def handle_models(http: web.Request) -> web.Response:
    context = context_of(http)
    card = ModelCard(
        id=context.model_name, root=context.model_name, max_model_len=context.engine.ready.max_model_len, created=int(time.time())
    )
    return _json(ModelList([card]))


async def handle_version(http: web.Request) -> web.Response:
    return _json({"version": kvferry.__version__})


async def handle_metrics(http: web.Request) -> web.Response:
    context = context_of(http)
    try:
        status = await context.engine.status()
    except KVFerryError as error:
        # A scrape must not fail because the core is busy or dead: that is when its other numbers matter.
        _log.warning("metrics without the core's part: %s", error)
        status = None
    return web.Response(body=context.metrics.render(status), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def handle_transfers(http: web.Request) -> web.Response:
    """Where the time of requests went whose KV came from a peer: of one, by the id that its client sent, or of the newest."""
    name = http.match_info.get("request_id", "")
    try:
        records = await context_of(http).engine.transfer_records(name)
    except KVFerryError as error:
        raise RequestRefused(str(error), status=503) from error
    if name and not records:
        raise RequestRefused("no transfer for a request of that id is known here, or no longer", status=404)
    return _json(TransferRecords(records))


async def handle_tokenize(http: web.Request) -> web.Response:
    context = context_of(http)
    request = decode_body(await read_body(http), TokenizeRequest)
    context.check_model(request.model)
    if request.messages is not None:
        tokens = await context.prompts.chat(request)
    elif request.prompt is not None:
        special = SpecialTokens.WITHOUT if request.add_special_tokens is False else SpecialTokens.WITH
        tokens = await context.prompts.text(request.prompt, special)
    else:
        raise RequestRefused("there is nothing to tokenize: send prompt or messages", param="prompt")
    names = [context.tokenizer.text_of(token) for token in tokens] if request.return_token_strs else None
    return _json(Tokenized(len(tokens), context.engine.ready.max_model_len, tokens, names))


async def handle_detokenize(http: web.Request) -> web.Response:
    context = context_of(http)
    request = decode_body(await read_body(http), DetokenizeRequest)
    context.check_model(request.model)
    check_token_ids(request.tokens, context.engine.ready.vocab_size, "tokens")
    return _json({"prompt": context.tokenizer.decode(request.tokens, SpecialTokens.WITH)})


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
