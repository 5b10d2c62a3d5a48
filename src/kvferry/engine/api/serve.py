"""SIGINT and SIGTERM as events of the running loop, from before the engine core is started until
the last request has been answered.
"""

import asyncio
import errno
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvferry.engine.api.app import build_app
from kvferry.engine.api.context import CONTEXT, ApiSettings, Engine
from kvferry.engine.api.metrics import MetricSource
from kvferry.engine.options import EngineOptions
from kvferry.errors import ConfigError, KVFerryError
from kvferry.types import Address
from kvferry.web.errors import JsonErrorRunner

__all__ = [
    "StopSignals",
    "StoppedBySignal",
    "address_of",
    "announce",
    "fast_loop_factory",
    "make_runner",
    "open_listeners",
    "run_on_fast_loop",
    "serve",
    "stop_signals",
]


WorkResult = TypeVar("WorkResult")


@dataclass(frozen=True, slots=True)
class StoppedBySignal:
    """A signal came before the work was done."""

    number: int

    @property
    def exit_code(self) -> int:
        """As shells report a signal."""
        return 128 + self.number


class StopSignals:
    """Counts them. SIGTERM, a supervisor's, asks to drain; SIGINT is a person at the keyboard, who
    waits.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._number = signal.SIGTERM

    @property
    def asks_to_drain(self) -> bool:
        """What the first signal means."""
        return self._number == signal.SIGTERM

    def on_signal(self, number: signal.Signals) -> None:
        if self.first.is_set():
            self.second.set()
            return
        self._number = number
        self.first.set()

    async def run_unless_stopped(
        self, work: Coroutine[Any, Any, WorkResult]
    ) -> WorkResult | StoppedBySignal:
        """The result of `work`; Stopped when a signal comes first, after `work` has been cancelled
        and has cleaned up.
        """
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self.first.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            return StoppedBySignal(self._number)
        finally:
            for waiting in (task, stopped):
                waiting.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    loop = asyncio.get_running_loop()
    signals = StopSignals()
    caught = (signal.SIGINT, signal.SIGTERM)
    for number in caught:
        loop.add_signal_handler(number, signals.on_signal, number)
    try:
        yield signals
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


# -------------------- listening --------------------
# Listening sockets for a host name and a port, one per address that the name has on this machine.
#
# `localhost` is two addresses, and one of them (IPv6, in many containers) may not exist: what
# exists is used, all on the same port. The caller owns the sockets.


_BACKLOG = 1024
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


async def open_listeners(host: str, port: int) -> list[socket.socket]:
    """ConfigError when the name is unknown, nothing can be bound, or a port is taken; no socket is
    left open then.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be from 0 to 65535, got {port}")
    listeners: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, where in await _addresses(host, port):
            try:
                listeners.append(
                    _bind_listener(
                        family,
                        (where[0], address_of(listeners[0]).port, *where[2:])
                        if listeners
                        else where,
                    )
                )
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent = error
        if not listeners:
            raise absent or OSError("it has no address")
    except (OSError, UnicodeError) as error:
        for listener in listeners:
            listener.close()
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"cannot listen on {host or '*'} port {port} ({why}): choose another --host or --port"
        ) from error
    return listeners


def address_of(listener: socket.socket) -> Address:
    host, port, *_ = listener.getsockname()
    return Address(host, port)


async def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Without repeats, IPv4 first: it is what most people type."""
    infos = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return sorted(
        {(family, where) for family, _, _, _, where in infos},
        key=lambda entry: entry[0] != socket.AF_INET,
    )


def _bind_listener(family: int, where: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Its own IPv4 twin has its own socket.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


# -------------------- serve -------------------- Serving one engine over HTTP until a signal or the
# engine's death: what `kvferry serve` runs. Owns the sockets, not the engine.


_CANCEL_TIMEOUT_S = 0.1
"""How long aiohttp waits, twice, before it cancels handlers; draining has given them their time
already.
"""

_ERROR_REPLY_TIMEOUT_S = 2.0
"""For running requests to be answered with the reason when the core has died, or when their time is
up.
"""

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
    """Serve until a signal, then let what is under way finish, for a while (a second signal cuts it
    short), and end the rest with an error that says so. After SIGINT that is running requests, for
    `shutdown_timeout_s`; after SIGTERM also what peers may still fetch, for `drain_timeout_s`,
    while newcomers and /health hear of it. `signals`: those of a caller who has been listening for
    longer.

    KVFerryError with the reason when the core dies; ConfigError when the address cannot be bound.
    The caller closes the client.
    """
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
                exit_reason, grace_s = (
                    await _drain(app, client, signals, options.drain_timeout_s),
                    0.0,
                )
            await _finish(
                runner, app, signals, grace_s if exit_reason is None else _ERROR_REPLY_TIMEOUT_S
            )
        finally:
            await runner.cleanup()
    if exit_reason is not None:
        raise KVFerryError(f"the engine core died: {exit_reason}")


def make_runner(app: web.Application) -> web.AppRunner:
    """Handlers are cancelled when their client leaves, which aborts the client's requests;
    malformed HTTP is no traceback in the log.
    """
    logger = logging.getLogger(f"{__name__}.http")
    logger.addFilter(_is_server_fault)
    return JsonErrorRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=logger,
        shutdown_timeout=_CANCEL_TIMEOUT_S,
    )


def _is_server_fault(record: logging.LogRecord) -> bool:
    return not (
        record.exc_info
        and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError)
    )


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


async def _drain(
    app: web.Application, client: Engine, signals: StopSignals, grace_s: float
) -> str | None:
    """Refuse new requests; wait for those under way and for peers that may still come for their
    blocks, for the grace period or until the second signal. Why the core died, if it did.
    """
    drain = app[CONTEXT].drain
    drain.close()
    client.drain()
    _log.info("draining for up to %g s", grace_s)
    drained = asyncio.ensure_future(_until_drained(app, client))
    second_signal = asyncio.ensure_future(signals.second.wait())
    died = asyncio.ensure_future(client.died())
    try:
        done, _ = await asyncio.wait(
            {drained, second_signal, died}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED
        )
        if died in done:
            return died.result()
        left = client.remaining
        if drained not in done and left is not None and left.num_leases:
            _log.warning(
                "stopping with blocks that peers have not fetched leases=%d blocks=%d",
                left.num_leases,
                left.num_blocks,
            )
        return None
    finally:
        await _cancel(drained, second_signal, died)


async def _until_drained(app: web.Application, client: Engine) -> None:
    # One after the other: no request comes in any more, and the core counts what a request leaves
    # before its last output is seen here.
    await app[CONTEXT].drain.wait_idle()
    await client.drained()


async def _finish(
    runner: web.AppRunner, app: web.Application, signals: StopSignals, grace_s: float
) -> None:
    """Take no new requests; wait for the running ones, for the grace period or until the second
    signal; then end those that are left.
    """
    for site in list(runner.sites):
        await site.stop()
    drain = app[CONTEXT].drain
    drain.close()
    idle = asyncio.ensure_future(drain.wait_idle())
    second_signal = asyncio.ensure_future(signals.second.wait())
    try:
        await asyncio.wait(
            {idle, second_signal}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED
        )
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
