"""Addresses as people use them: whether one can be listened on, what to dial for it, a request to
try. Opens sockets for a moment.
"""

import errno
import json
import shlex
import socket
from collections.abc import MutableMapping

from kvferry.config.side_channel import LOOPBACK, is_wildcard
from kvferry.errors import ConfigError
from kvferry.types import Address

__all__ = [
    "ANNOUNCE_FD_VARIABLE",
    "announce_address",
    "check_listenable",
    "curl_command",
    "dialable",
    "parse_announcement",
]


ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def check_listenable(address: Address) -> None:
    """ConfigError when a server could not listen there now. Before anything slow is started: the
    server itself binds only at the end.
    """
    try:
        found = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError):
        raise ConfigError(
            f"--host {address.host!a} cannot be resolved; give an address of this machine"
        ) from None
    refusals = [_refusal(socket.AddressFamily(family), where) for family, _, _, _, where in found]
    # `localhost` is two addresses, of which a container may have one.
    absent = [error for error in refusals if error is not None and error.errno in ABSENT]
    refused = next(
        (error for error in refusals if error is not None and error.errno not in ABSENT), None
    )
    if refused is None and len(absent) == len(refusals) and absent:
        raise ConfigError(
            f"--host {address.host!a} is not an address of this machine; give one that is, or "
            "localhost"
        )
    if refused is not None:
        raise ConfigError(
            f"port {address.port} cannot be used ({refused.strerror}); stop what listens there or "
            "choose another --port"
        )


def dialable(address: Address) -> Address:
    """The same, or the loopback for an address that means every interface and that nobody can
    dial.
    """
    if not is_wildcard(address.host):
        return address
    return Address("::1" if ":" in address.host else LOOPBACK, address.port)


def curl_command(address: Address, model_name: str) -> str:
    """A request to copy into a shell."""
    body = json.dumps({"model": model_name, "prompt": "Hello", "max_tokens": 16, "stream": True})
    return (
        f"curl -N http://{dialable(address)}/v1/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(body)}"
    )


def _refusal(family: socket.AddressFamily, where: tuple[object, ...]) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # Its own IPv4 twin is asked for by itself.
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(where)
    except OSError as error:
        return error
    return None


# -------------------- announce -------------------- How a child process tells its parent where it
# listens: one line on a pipe whose number is in the environment.
#
# The child binds port 0 itself, so no port is picked by one process and taken by another.


ANNOUNCE_FD_VARIABLE = "KVFERRY_ANNOUNCE_FD"


def announce_address(address: Address, environ: MutableMapping[str, str]) -> None:
    """Child side, once, when connections are accepted. Without a waiting parent it does nothing."""
    text = environ.pop(ANNOUNCE_FD_VARIABLE, "")
    if not text.isdecimal():
        return
    try:
        with open(int(text), "w", encoding="ascii", errors="replace") as pipe:
            pipe.write(f"{address.host} {address.port}\n")
    except OSError:
        # The parent has stopped listening; it will stop us too.
        return


def parse_announcement(line: bytes) -> Address | None:
    """Parent side. None: the child closed the pipe without an address, so it has failed."""
    host, _, port = line.decode("ascii", errors="replace").strip().partition(" ")
    return Address(host, int(port)) if host and port.isdecimal() and 0 < int(port) < 65536 else None
