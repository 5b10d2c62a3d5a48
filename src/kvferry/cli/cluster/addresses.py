"""Addresses for users and child processes: checks, example requests and announcements.

The functions open sockets only for a moment.
"""

import errno
import json
import shlex
import socket
from collections.abc import Mapping, MutableMapping

from kvferry.config.fields import read_number
from kvferry.config.side_channel import LOOPBACK, is_wildcard
from kvferry.errors import ConfigError
from kvferry.types import Address

# Errors of an address that does not exist on this machine.
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def check_listenable(address: Address) -> None:
    """Raise ConfigError if a server could not listen on this address now.

    Called before anything slow is started, because the server itself binds only after the model is
    loaded.
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
    # `localhost` has two addresses, and a container may have only one of the two.
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
            f"port {address.port} cannot be used ({refused.strerror}); stop the process that "
            "listens there or choose another --port"
        )


def dialable(address: Address) -> Address:
    """Return an address that a client can connect to: loopback in place of a wildcard address."""
    if not is_wildcard(address.host):
        return address
    return Address("::1" if ":" in address.host else LOOPBACK, address.port)


def curl_command(address: Address, request: Mapping[str, object]) -> str:
    """Return a request that the user can copy into a shell."""
    return (
        f"curl -N http://{dialable(address)}{completion_path(request)} "
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(request))}"
    )


def completion_path(request: Mapping[str, object]) -> str:
    """Return the path that takes this request: a chat has messages, a completion has a prompt."""
    return "/v1/chat/completions" if "messages" in request else "/v1/completions"


def _refusal(family: socket.AddressFamily, where: tuple[object, ...]) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # The IPv4 address of the same name is checked separately.
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(where)
    except OSError as error:
        return error
    return None


# -- announcements --
# A child process announces its address to the parent with one line on a pipe; the file descriptor
# of the pipe is in the environment. The child binds port 0 itself, so there is no port that the
# parent picks and another process takes first.


ANNOUNCE_FD_VARIABLE = "KVFERRY_ANNOUNCE_FD"


def announce_address(address: Address, environ: MutableMapping[str, str]) -> None:
    """In the child: announce the address once, when the server accepts connections.

    Without a waiting parent the function does nothing.
    """
    text = environ.pop(ANNOUNCE_FD_VARIABLE, "")
    descriptor = read_number(text)
    if not isinstance(descriptor, int) or not 0 <= descriptor < 2**31:
        return
    try:
        with open(descriptor, "w", encoding="ascii", errors="replace") as pipe:
            pipe.write(f"{address}\n")
    except OSError:
        # The parent has closed the pipe and will stop this process too.
        return


def parse_announcement(line: bytes) -> Address | None:
    """In the parent: parse the line; None if the child closed the pipe without an address, that is,
    failed.
    """
    return Address.parse(line.decode("ascii", errors="replace").strip())
