"""`serve` runs one engine's HTTP front-end until a signal arrives or the engine core dies.

The module also has the signal handling and the listening sockets, which other commands use too. All
code runs on the event loop of the calling process. `serve` owns the sockets, not the engine.
"""

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvferry.engine.api.app import build_app
from kvferry.engine.api.context import CONTEXT, ApiSettings, Engine
from kvferry.engine.api.errors import JsonErrorRunner
from kvferry.engine.api.metrics import MetricSource
from kvferry.engine.options import EngineOptions
from kvferry.errors import ConfigError, KVFerryError
from kvferry.logs import show
from kvferry.types import Address

# -- stop signals --
# SIGINT and SIGTERM as events of the running loop, from before the engine core is started until the
# last request has been answered.


WorkResult = TypeVar("WorkResult")


@dataclass(frozen=True, slots=True)
class StoppedBySignal:
    """The outcome when a signal arrived before the work was done."""

    number: int

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for a signal."""
        return 128 + self.number


class StopSignals:
    """Holds the first and second stop signal as events.

    SIGTERM is sent by a supervisor and asks to drain; SIGINT is sent by a person at the keyboard,
    who waits for the exit.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.on_first: list[Callable[[], None]] = []
        """Called once, on the event loop, when the first signal arrives."""
        self._number = signal.SIGTERM

    @property
    def asks_to_drain(self) -> bool:
        """Whether the first signal was SIGTERM."""
        return self._number == signal.SIGTERM

    def on_signal(self, number: signal.Signals) -> None:
        if self.first.is_set():
            self.second.set()
            return
        self._number = number
        self.first.set()
        for callback in self.on_first:
            callback()

    async def run_unless_stopped(
        self, work: Coroutine[Any, Any, WorkResult]
    ) -> WorkResult | StoppedBySignal:
        """Return the result of `work`, or StoppedBySignal when a signal arrives first.

        In the second case `work` has been cancelled and has cleaned up.
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
    """Catch SIGINT and SIGTERM on the running loop for the duration of the context."""
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


# -- listening --
# Listening sockets for a host name and a port, one per local address of the name. `localhost` has
# two addresses, and one of the two (IPv6, in many containers) may not exist: every address that
# exists is bound, all on the same port. The caller owns the sockets.


_BACKLOG = 1024
# Errors of an address that does not exist on this machine.
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


async def open_listeners(host: str, port: int) -> list[socket.socket]:
    """Bind every address of `host` and return the listening sockets.

    Raise ConfigError when the name is unknown, no address can be bound, or the port is taken; no
    socket is left open then.
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
                        # With port 0 the kernel chooses the port of the first socket; the other
                        # sockets reuse that port.
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
            raise absent or OSError("the host has no address")
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
    """Resolve the host without duplicates, IPv4 first: most people type an IPv4 address."""
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
            # The IPv4 address of the same name has its own socket, so this socket must not take
            # IPv4 too.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


# -- serve --


_CANCEL_TIMEOUT_S = 0.1
"""How long aiohttp waits, twice, before aiohttp cancels handlers.

The value is small because draining has already given the handlers their time.
"""

_ERROR_REPLY_TIMEOUT_S = 2.0
"""How long running requests have to be answered with an error when the core has died or the grace
period is over.
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
    """Serve until a signal arrives, then let running work finish, and end the rest with an error.

    After SIGINT the server waits up to `shutdown_timeout_s` for running requests. After SIGTERM the
    server waits up to `drain_timeout_s` for running requests and for blocks that peers may still
    fetch; meanwhile new requests and /health are answered with 503. A second signal ends the wait.
    A caller that has caught signals since before the start passes `signals`.

    Raise KVFerryError with the reason when the core dies, and ConfigError when the address cannot
    be bound. The caller closes the client.
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
    """Return a runner that cancels a handler when its client leaves, which aborts the engine
    requests.

    Malformed HTTP from a client leaves no traceback in the log.
    """
    logger = logging.getLogger(f"{__name__}.http")
    logger.addFilter(_is_server_fault)
    return JsonErrorRunner(
        app,
        handler_cancellation=True,
        keepalive_timeout=app[CONTEXT].settings.keepalive_s,
        access_log=None,
        logger=logger,
        shutdown_timeout=_CANCEL_TIMEOUT_S,
    )


def _is_server_fault(record: logging.LogRecord) -> bool:
    """Log filter: drop records about malformed HTTP, which is the client's fault."""
    return not (
        record.exc_info
        and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError)
    )


def announce(model_name: str, address: Address) -> None:
    """Print the address for the user."""
    show(f"kvferry: serving {model_name} on http://{address}")


def run_on_fast_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` as `asyncio.run` does, on uvloop where uvloop is installed."""
    with asyncio.Runner(loop_factory=fast_loop_factory()) as runner:
        return runner.run(main)


def fast_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory, or None (asyncio's own loop) where uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _listen(runner: web.AppRunner, host: str, port: int) -> Address:
    """Start serving; return the first address, which is shown to the user."""
    listeners = await open_listeners(host, port)
    address = address_of(listeners[0])
    for listener in listeners:
        await web.SockSite(runner, listener).start()
    return address


async def _until_stopped(client: Engine, signals: StopSignals) -> str | None:
    """Wait for a signal or the core's death; return the reason of the death, or None after a
    signal.
    """
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
    """Refuse new requests and wait for running requests and for blocks that peers may still fetch.

    The wait ends with the grace period or with the second signal. Return the reason if the core
    died, else None.
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
                "stopping although peers have not read all blocks leases=%d blocks=%d",
                left.num_leases,
                left.num_blocks,
            )
        return None
    finally:
        await _cancel(drained, second_signal, died)


async def _until_drained(app: web.Application, client: Engine) -> None:
    # The order matters: after the first wait no request can arrive any more, and the core counts
    # the leases of a request before the front-end sees the request's last output.
    await app[CONTEXT].drain.wait_idle()
    await client.drained()


async def _finish(
    runner: web.AppRunner, app: web.Application, signals: StopSignals, grace_s: float
) -> None:
    """Stop listening; wait for running requests, for the grace period or until the second signal;
    then cancel the remaining requests.
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
            show("kvferry: stopping with unfinished requests", logging.ERROR)
            drain.cancel_all()
            await asyncio.wait({idle}, timeout=_ERROR_REPLY_TIMEOUT_S)
    finally:
        await _cancel(idle, second_signal)


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
