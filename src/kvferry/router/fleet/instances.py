"""An instance is one engine in one role; this module parses and names instances. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import AddressValueError, IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from kvferry.config.fields import HOST_NAME
from kvferry.errors import ConfigError, without_password
from kvferry.types import Address

COOLDOWN_S = 1.0
"""Cooldown after a refusal: the `Retry-After` that a draining engine sends. The cooldown is short,
because an instance that was only full is needed again soon.
"""


class Role(StrEnum):
    """What the router uses an instance for."""

    PREFILL = "prefill"
    DECODE = "decode"


class Outcome(StrEnum):
    """How a leg on an instance ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    FAILED = "failed"
    ABANDONED = "abandoned"
    """The client or the other leg ended this leg; the outcome says nothing about the instance."""


@dataclass(frozen=True, slots=True)
class Instance:
    """HTTP address of one engine, and the role in which the router uses the engine."""

    role: Role
    address: Address
    tls: bool = field(default=False, compare=False)
    """Whether the instance is called by https. Not part of the identity: an operator drains or
    removes an address without naming the scheme.
    """
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.role, self.address)))

    def __hash__(self) -> int:
        """The cached hash: each request looks an instance up a dozen times."""
        return self._hash

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.address}"

    def __str__(self) -> str:
        return f"{self.role} instance {self.url}"


def pair_instances(role: Role, hosts: Sequence[str], ports: Sequence[int]) -> tuple[Instance, ...]:
    """Combine host i with port i; a single host is combined with every port."""
    if len(hosts) == 1:
        hosts = [hosts[0]] * len(ports)
    if len(hosts) != len(ports) or not ports:
        raise ConfigError(
            f"there are {len(hosts)} {role} hosts but {len(ports)} {role} ports; give one port "
            "per host"
        )
    for host, port in zip(hosts, ports, strict=True):
        if not _is_host(host) or not 0 < port < 65536:
            raise ConfigError(
                f"{host!r} port {port} is not the address of a {role} instance; give a host name "
                "and a port from 1 to 65535"
            )
    return tuple(
        Instance(role, Address(host, port)) for host, port in zip(hosts, ports, strict=True)
    )


def parse_instance(role: Role, url: str) -> Instance:
    """Parse `http://HOST:PORT`, `https://HOST:PORT` or `HOST:PORT`; ConfigError otherwise."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = (
            parts.hostname,
            parts.port if parts.port is not None else 443 if parts.scheme == "https" else 80,
        )
    except ValueError:
        host, port, parts = None, 0, urlsplit("")
    is_plain = (
        parts.scheme in ("http", "https")
        and parts.path in ("", "/")
        and not parts.query
        and not parts.fragment
        and "@" not in parts.netloc
    )
    if not host or not port or not _is_host(host) or not is_plain:
        raise ConfigError(
            f"{shown_url(url)} is not the address of a {role} instance; give http://HOST:PORT"
        )
    return Instance(role, Address(host, port), parts.scheme == "https")


def shown_url(url: str) -> str:
    """The URL as messages show it: quoted, of bounded length, without user and password."""
    return repr(without_password(url))[:200]


def reaches(target: Address, listening: Address) -> bool:
    """Whether a connection to `target` certainly reaches the socket that listens at `listening` on
    this machine. Looks up no name but localhost.
    """
    if target.port != listening.port:
        return False
    [here] = _ips(listening.host)
    for there in _ips(target.host):
        if there == here or (here.is_unspecified and there.is_loopback):
            return True
        # The system connects to the loopback address in place of 0.0.0.0 and [::].
        if there.is_unspecified and (here.is_loopback or here.is_unspecified):
            return True
    return False


def _ips(host: str) -> list[IPv4Address | IPv6Address]:
    """The addresses that a host certainly has; none if it is another name than localhost."""
    if host.rstrip(".") == "localhost":
        return [IPv4Address("127.0.0.1"), IPv6Address("::1")]
    try:
        found = ip_address(host)
    except ValueError:
        return []
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return [mapped or found]


def _is_host(host: str) -> bool:
    """Whether `host` is a well-formed host name or IPv6 address. A malformed host would fail every
    request.
    """
    if ":" not in host:
        return HOST_NAME.fullmatch(host) is not None
    try:
        IPv6Address(host)
    except AddressValueError:
        return False
    return True
