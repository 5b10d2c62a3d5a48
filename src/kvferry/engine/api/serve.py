"""Serving one engine over HTTP until a signal or the engine's death: what `kvferry serve` runs. Owns the sockets, not the engine."""

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvferry.engine.api.app import build_app
from kvferry.engine.api.context import CONTEXT, ApiSettings
from kvferry.engine.api.engine import Engine
from kvferry.engine.api.listening import address_of, open_listeners
from kvferry.engine.api.metrics import MetricSource
from kvferry.engine.api.signals import StopSignals, stop_signals
from kvferry.engine.options import EngineOptions
from kvferry.errors import KVFerryError
from kvferry.types import Address
from kvferry.web.malformed import JsonErrorRunner

__all__ = ["announce", "fast_loop_factory", "make_runner", "run_on_fast_loop", "serve"]

_CANCEL_TIMEOUT_S = 0.1
"""How long aiohttp waits, twice, before it cancels handlers; draining has given them their time already."""

_ERROR_REPLY_TIMEOUT_S = 2.0
"""For running requests to be answered with the reason when the core has died, or when their time is up."""

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


async def serve(
    client: Engine,
    options: EngineOptions,
    host: str,
    port: int,
    *,
    signals: StopSignals | None = None,
    settings: ApiSettings | None = None,
    metric_sources: Sequence[MetricSource] = (),
    on_listening: Callable[[str, Address], None] | None = None,
) -> None:
    """Serve until a signal, then let what is under way finish, for a while (a second signal cuts it short), and end the rest with an error
    that says so. After SIGINT that is running requests, for `shutdown_timeout_s`; after SIGTERM also what peers may still fetch, for
    `drain_timeout_s`, while newcomers and /health hear of it. `signals`: those of a caller who has been listening for longer.

    KVFerryError with the reason when the core dies; ConfigError when the address cannot be bound. The caller closes the client."""
    app = build_app(client, options, settings, metric_sources)
    runner = make_runner(app)
    with stop_signals() if signals is None else nullcontext(signals) as signals:
        try:
            await runner.setup()
            address = await _listen(runner, host, port)
            (on_listening or announce)(app[CONTEXT].model_name, address)
            exit_reason = await _until_stopped(client, signals)
            grace_s = options.shutdown_timeout_s
            if exit_reason is None and signals.asks_to_drain:
                exit_reason, grace_s = await _drain(app, client, signals, options.drain_timeout_s), 0.0
            await _finish(runner, app, signals, grace_s if exit_reason is None else _ERROR_REPLY_TIMEOUT_S)
        finally:
            await runner.cleanup()
    if exit_reason is not None:
        raise KVFerryError(f"the engine core died: {exit_reason}")


def make_runner(app: web.Application) -> web.AppRunner:
    """Handlers are cancelled when their client leaves, which aborts the client's requests; malformed HTTP is no traceback in the log."""
    logger = logging.getLogger(f"{__name__}.http")
    logger.addFilter(_is_server_fault)
    return JsonErrorRunner(app, handler_cancellation=True, access_log=None, logger=logger, shutdown_timeout=_CANCEL_TIMEOUT_S)


def _is_server_fault(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))


def announce(model_name: str, address: Address) -> None:
    print(f"kvferry: serving {model_name} on http://{address}", flush=True)


def run_on_fast_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run`, on uvloop where it is installed."""
    with asyncio.Runner(loop_factory=fast_loop_factory()) as runner:
        return runner.run(main)


def fast_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, or None for asyncio's own where it is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _listen(runner: web.AppRunner, host: str, port: int) -> Address:
    """Start serving; the first address, for people to use."""
    listeners = await open_listeners(host, port)
    address = address_of(listeners[0])
    for listener in listeners:
        await web.SockSite(runner, listener).start()
    return address


async def _until_stopped(client: Engine, signals: StopSignals) -> str | None:
    """Why the core died, or None when a signal came first."""
    died = asyncio.ensure_future(client.died())
    stopped = asyncio.ensure_future(signals.first.wait())
    try:
        await asyncio.wait({died, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return None if stopped.done() else died.result()
    finally:
        await _cancel(died, stopped)


async def _drain(app: web.Application, client: Engine, signals: StopSignals, grace_s: float) -> str | None:
    """Refuse new requests; wait for those under way and for peers that may still come for their blocks, for the grace period or until the
    second signal. Why the core died, if it did."""
    drain = app[CONTEXT].drain
    drain.close()
    client.drain()
    _log.info("draining for up to %g s", grace_s)
    drained = asyncio.ensure_future(_until_drained(app, client))
    second_signal = asyncio.ensure_future(signals.second.wait())
    died = asyncio.ensure_future(client.died())
    try:
        done, _ = await asyncio.wait({drained, second_signal, died}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        if died in done:
            return died.result()
        left = client.remaining
        if drained not in done and left is not None and left.num_leases:
            _log.warning("stopping with blocks that peers have not fetched leases=%d blocks=%d", left.num_leases, left.num_blocks)
        return None
    finally:
        await _cancel(drained, second_signal, died)


async def _until_drained(app: web.Application, client: Engine) -> None:
    # One after the other: no request comes in any more, and the core counts what a request leaves before its last output is seen here.
    await app[CONTEXT].drain.wait_idle()
    await client.drained()


async def _finish(runner: web.AppRunner, app: web.Application, signals: StopSignals, grace_s: float) -> None:
    """Take no new requests; wait for the running ones, for the grace period or until the second signal; then end those that are left."""
    for site in list(runner.sites):
        await site.stop()
    drain = app[CONTEXT].drain
    drain.close()
    idle = asyncio.ensure_future(drain.wait_idle())
    second_signal = asyncio.ensure_future(signals.second.wait())
    try:
        await asyncio.wait({idle, second_signal}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        if drain.num_live:
            print("kvferry: stopping with requests unfinished", file=sys.stderr, flush=True)
            drain.cancel_all()
            await asyncio.wait({idle}, timeout=_ERROR_REPLY_TIMEOUT_S)
    finally:
        await _cancel(idle, second_signal)


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
