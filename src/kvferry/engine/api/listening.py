"""Listening sockets for a host name and a port, one per address that the name has on this machine.

`localhost` is two addresses, and one of them (IPv6, in many containers) may not exist: what exists is used, all on the same port.
The caller owns the sockets.
"""

import asyncio
import errno
import socket
from typing import Any

from kvferry.errors import ConfigError
from kvferry.types import Address

__all__ = ["address_of", "open_listeners"]

_BACKLOG = 1024
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


async def open_listeners(host: str, port: int) -> list[socket.socket]:
    """ConfigError when the name is unknown, nothing can be bound, or a port is taken; no socket is left open then."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be from 0 to 65535, got {port}")
    listeners: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, where in await _addresses(host, port):
            try:
                listeners.append(_listen(family, (where[0], address_of(listeners[0]).port, *where[2:]) if listeners else where))
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
        raise ConfigError(f"cannot listen on {host or '*'} port {port} ({why}): choose another --host or --port") from error
    return listeners


def address_of(listener: socket.socket) -> Address:
    host, port, *_ = listener.getsockname()
    return Address(host, port)


async def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Without repeats, IPv4 first: it is what most people type."""
    infos = await asyncio.get_running_loop().getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return sorted({(family, where) for family, _, _, _, where in infos}, key=lambda entry: entry[0] != socket.AF_INET)


def _listen(family: int, where: tuple[Any, ...]) -> socket.socket:
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
