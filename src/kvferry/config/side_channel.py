"""The addresses of an engine's side channel: where it listens and where peers connect. Pure; the
caller passes the environment.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from kvferry.config.fields import HOST_NAME, Port, Text, check_fields, parsed, shown
from kvferry.errors import ConfigError
from kvferry.types import Address

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 5600

HOST_NAMES = ("KVFERRY_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_HOST")
PORT_NAMES = ("KVFERRY_SIDE_CHANNEL_PORT", "VLLM_NIXL_SIDE_CHANNEL_PORT")
BIND_NAME = "KVFERRY_SIDE_CHANNEL_BIND"


@dataclass(frozen=True, slots=True)
class SideChannelConfig:
    """Two addresses: one to listen on, and one that peers connect to. The second is never a
    wildcard.
    """

    bind_host: Text = LOOPBACK
    advertised_host: Text = LOOPBACK
    port: Port = DEFAULT_PORT
    """The port; 0 for any free port."""

    def __post_init__(self) -> None:
        check_fields(self)
        if is_wildcard(self.advertised_host):
            raise ConfigError(
                f"advertised_host is {self.advertised_host}, which no peer can dial; use this "
                "machine's address"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """The settings in KVFERRY_SIDE_CHANNEL_HOST and _PORT, else in VLLM_NIXL_SIDE_CHANNEL_HOST
        and _PORT. KVFERRY_SIDE_CHANNEL_BIND sets another address to listen on.
        """
        host_name, host = _first(environ, HOST_NAMES, "localhost")
        port_name, port = _first(environ, PORT_NAMES, str(DEFAULT_PORT))
        if is_wildcard(host):
            raise ConfigError(
                f"{host_name} is {host}, which no peer can dial; set it to this machine's address "
                f"and {BIND_NAME} to {host}"
            )
        bind_name, bind = _first(environ, (BIND_NAME,), host)
        for name, value in ((host_name, host), (bind_name, bind)):
            if not _is_host(value):
                raise ConfigError(
                    f"{name} is {shown(value)}, which is not a host; set it to an address or a "
                    "host name"
                )
        return cls(
            bind_host=numeric_host(bind),
            advertised_host=numeric_host(host),
            port=parsed(port_name, port, Port),
        )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the side channel."""
        return is_loopback(self.bind_host) and is_loopback(self.advertised_host)


def is_wildcard(host: str) -> bool:
    """Whether a host means "every interface"."""
    if host in ("*", "0"):
        return True
    address = _parsed(host)
    return address is not None and address.is_unspecified


def is_loopback(host: str) -> bool:
    """Whether a host can only be this machine. Host names other than localhost are not resolved and
    count as remote.
    """
    address = _parsed(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def _is_host(host: str) -> bool:
    return is_wildcard(host) or _parsed(host) is not None or HOST_NAME.fullmatch(host) is not None


def checked_address(what: str, text: str, example: str) -> Address:
    """The address to dial that a setting names. `what` begins the sentence of the error."""
    address = Address.parse(text)
    if address is None or not _is_host(address.host):
        raise ConfigError(
            f"{what} {shown(text)}, which is not an address; write host:port, for example {example}"
        )
    return address


def numeric_host(host: str) -> str:
    """The host without brackets, and with one spelling of the loopback address: `localhost` may
    resolve to ::1 while the engine listens on 127.0.0.1.
    """
    return LOOPBACK if host == "localhost" else host.removeprefix("[").removesuffix("]")


def _first(environ: Mapping[str, str], names: tuple[str, ...], default: str) -> tuple[str, str]:
    """The first variable that is set and not empty, with its value."""
    return next(
        ((name, environ[name].strip()) for name in names if environ.get(name, "").strip()),
        (names[-1], default),
    )
