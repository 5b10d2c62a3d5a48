"""Runs an HTTP application until it is told to stop. Owns the event loop (uvloop) of the calling thread, which must be the main one."""

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvferry.errors import ConfigError
from kvferry.types import Address
from kvferry.web.malformed import JsonErrorRunner

__all__ = ["make_runner", "run_app"]

_STOP_TIMEOUT_S = 6.0
"""aiohttp waits twice as long, more than an engine's `--shutdown-timeout`: one that ends with us has the last word of its streams."""


def run_app(app: web.Application, address: Address, on_ready: Callable[[Address], None]) -> None:
    """Serve until SIGINT or SIGTERM. `on_ready` gets the address really bound. ConfigError when it cannot be bound."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(app, address, on_ready))


def make_runner(app: web.Application) -> web.AppRunner:
    """Handlers are cancelled when their client leaves, and malformed HTTP is answered without a traceback in the log."""
    logger = logging.getLogger(f"{__name__}.http")
    logger.addFilter(_is_our_fault)
    return JsonErrorRunner(app, handler_cancellation=True, access_log=None, logger=logger, shutdown_timeout=_STOP_TIMEOUT_S)


def _is_our_fault(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))


async def _serve(app: web.Application, address: Address, on_ready: Callable[[Address], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    runner = make_runner(app)
    await runner.setup()
    try:
        sock = _bind(address)
        await web.SockSite(runner, sock).start()
        on_ready(Address(address.host, sock.getsockname()[1]))
        await stop.wait()
    finally:
        await runner.cleanup()


def _bind(address: Address) -> socket.socket:
    """One listening socket, so that port 0 is one port."""
    family, where = _resolve(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(1024)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {address.port} on {address.host} is taken; stop what listens there or choose another --port") from None
        raise ConfigError(f"cannot listen on {address} ({error.strerror}); choose another --host or --port") from None
    return sock


def _resolve(address: Address) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """IPv4 first: `localhost` is both, and most people then type 127.0.0.1."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"host {address.host!r} cannot be resolved; give an address of this machine") from None
    family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, where
