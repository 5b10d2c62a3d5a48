"""Runs a router until a signal stops it.

Owns the event loop (uvloop) of the calling thread, which must be the main thread.
"""

import asyncio
import errno
import gc
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from kvferry.config.secret import check_private_file
from kvferry.errors import ConfigError
from kvferry.router.app import RouterApp
from kvferry.router.http.messages import ServerLimits
from kvferry.router.http.server import HttpServer
from kvferry.router.options import RouterOptions
from kvferry.types import Address

_log = logging.getLogger(__name__)


def run_router(
    options: RouterOptions, make_app: Callable[[], RouterApp], on_ready: Callable[[Address], None]
) -> None:
    """Serve until SIGINT or SIGTERM, then let streams finish; a second signal ends the streams.

    `make_app` is called on the event loop. `on_ready` gets the address that was bound. Raises
    ConfigError if the address cannot be bound.
    """
    tls = server_tls(options)
    sock = _bind(Address(options.host, options.port))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(options, make_app, sock, tls, on_ready))
    finally:
        sock.close()


def make_server(app: RouterApp) -> HttpServer:
    """Make the HTTP server of a router, with the limits from its options."""
    limits, timeouts = app.options.limits, app.options.timeouts
    server_limits = ServerLimits(
        body_bytes=limits.max_body_bytes,
        unfinished_bytes=limits.max_unfinished_bytes,
        num_connections=limits.max_connections,
        body_idle_timeout_s=timeouts.idle,
        body_timeout_s=max(timeouts.idle, timeouts.answer),
        stall_timeout_s=timeouts.idle,
    )
    return HttpServer(app.handle, server_limits, admit=app.admit, on_malformed=app.note_malformed)


def server_tls(options: RouterOptions) -> ssl.SSLContext | None:
    """TLS settings of the server; None if no certificate is configured."""
    access = options.access
    if not access.ssl_certfile:
        return None
    check_private_file(access.ssl_keyfile or access.ssl_certfile, "the key of the certificate is")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(access.ssl_certfile, access.ssl_keyfile or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the certificate {access.ssl_certfile} with its key cannot be loaded ({error})"
        ) from None
    return context


async def _serve(
    options: RouterOptions,
    make_app: Callable[[], RouterApp],
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    on_ready: Callable[[Address], None],
) -> None:
    stop, force_stop = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (force_stop if stop.is_set() else stop).set())
    app = make_app()
    app.listens_at(Address(*sock.getsockname()[:2]))
    server = make_server(app)
    await app.start()
    try:
        await server.start(sock, tls)
        on_ready(Address(options.host, sock.getsockname()[1]))
        with _rare_gc():
            await stop.wait()
            app.stop_admitting()
            await _drain(server, force_stop, options.timeouts.shutdown)
    finally:
        await server.close()
        await app.close()


@contextmanager
def _rare_gc() -> Iterator[None]:
    """Run the garbage collector rarely.

    Requests leave hardly any reference cycles, but Python searches for cycles after every 700 new
    objects: up to 9 % of the router's time (one noisy run; under 1 % if large prompts arrive one by
    one). Objects that exist now live as long as the process and are excluded by `gc.freeze`.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def _drain(server: HttpServer, force_stop: asyncio.Event, timeout_s: float) -> None:
    if server.num_connections:
        _log.info(
            "stopping: %d connections may finish within %g s", server.num_connections, timeout_s
        )
    waits = [asyncio.create_task(server.drain(timeout_s)), asyncio.create_task(force_stop.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


def _bind(address: Address) -> socket.socket:
    """Open one listening socket, so port 0 yields a single port."""
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
            raise ConfigError(
                f"port {address.port} on {address.host} is in use; stop the process that listens "
                "there or choose another --port"
            ) from None
        raise ConfigError(
            f"cannot listen on {address} ({error.strerror}); choose another --host or --port"
        ) from None
    return sock


def _resolve(address: Address) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Resolve the host, IPv4 first: `localhost` has both, and users then type 127.0.0.1."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError):
        raise ConfigError(
            f"host {address.host!r} cannot be resolved; give an address of this machine"
        ) from None
    family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, where
