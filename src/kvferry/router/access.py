"""Who a client is, by its API key: conversations, places in the queue and limits are kept apart by
tenant. Pure.

Keys are looked up by their digest, so that the time it takes tells nothing of a key.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address

from kvferry.errors import ConfigError
from kvferry.router.http.messages import Headers
from kvferry.router.options import AccessOptions

__all__ = ["AccessPolicy", "ApiKeys", "check_key", "read_key_file", "tenant_of_header"]


_BEARER = "bearer "


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def check_key(key: str, name: str) -> None:
    """ConfigError for one that could not be sent: found at the start, it fails no request."""
    if not key or not all("!" <= sign <= "~" for sign in key):
        raise ConfigError(f"{name} must be one word of printable ASCII characters")


def tenant_of_header(authorization: str | None) -> str:
    """Where the router has no keys of its own, clients with different credentials are different
    tenants all the same.
    """
    return "" if not authorization else _digest(authorization).hex()[:16]


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Key -> tenant. Without any, everybody is let in."""

    _tenants: Mapping[bytes, str] = field(default_factory=dict)

    @classmethod
    def of(cls, keys: Iterable[tuple[str, str]]) -> "ApiKeys":
        """Pairs of tenant and key."""
        tenants: dict[bytes, str] = {}
        for tenant, key in keys:
            check_key(key, f"the API key of {tenant!r}")
            if tenants.setdefault(_digest(key), tenant) != tenant:
                raise ConfigError(
                    f"tenants {tenants[_digest(key)]!r} and {tenant!r} have the same API key"
                )
        return cls(tenants)

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def find(self, authorization: str | None) -> str | None:
        """The tenant whose key was sent; None for nobody's."""
        if authorization is None or authorization[: len(_BEARER)].lower() != _BEARER:
            return None
        return self._tenants.get(_digest(authorization[len(_BEARER) :].strip()))


def read_key_file(text: str) -> list[tuple[str, str]]:
    """`TENANT KEY` or `KEY` in each line; # begins a comment. A key without a tenant is one of its
    own.
    """
    pairs = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2:
            raise ConfigError(
                f"line {number} of the key file has {len(words)} words; write TENANT KEY, or KEY "
                "alone"
            )
        pairs.append(
            (words[0], words[1]) if len(words) == 2 else (_digest(words[0]).hex()[:16], words[0])
        )
    return pairs


# -------------------- access --------------------
# Who is let in, and what browsers are told about it. Pure: decides from a request's head.


_OPEN_PATHS = frozenset({"/health", "/healthcheck", "/healthz", "/readyz", "/metrics"})
_ADMIN_PREFIXES = ("/admin", "/dashboard")
# The page itself holds nothing; what it shows is asked for with a key. Its files lie right below
# it: deeper down, names are requests'.
_PAGE = ("/dashboard", "/dashboard/")
_PAGE_FILES = (".js", ".css")
_PREFLIGHT_AGE_S = 600
# A web server on this machine that passes on what it gets looks like a neighbour, but says for whom
# it asks.
_FORWARDING_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip")


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """The keeper of one router."""

    access: AccessOptions
    keys: ApiKeys

    @classmethod
    def of(cls, access: AccessOptions) -> "AccessPolicy":
        return cls(access, ApiKeys.of(access.api_keys))

    def tenant(self, headers: Headers) -> str | None:
        """Whose request it is; None: nobody's who may ask."""
        authorization = headers.get("authorization")
        return self.keys.find(authorization) if self.keys else tenant_of_header(authorization)

    def needs_key(self, path: str) -> bool:
        return bool(self.keys) and path not in _OPEN_PATHS and not path.startswith(_ADMIN_PREFIXES)

    def is_admin_path(self, path: str) -> bool:
        is_file = path.rpartition("/")[0] == "/dashboard" and path.endswith(_PAGE_FILES)
        return path.startswith(_ADMIN_PREFIXES) and path not in _PAGE and not is_file

    def is_admin(self, headers: Headers, peer: str) -> bool:
        """With a key, whoever has it; without one, whoever is on this machine, asks for itself, and
        is no page of another site.
        """
        if self.access.admin_key:
            sent = (headers.get("authorization") or "").partition(" ")[2].strip()
            return hmac.compare_digest(
                sent.encode("utf-8", "surrogateescape"), self.access.admin_key.encode()
            )
        if any(headers.get(name) is not None for name in _FORWARDING_HEADERS):
            return False
        host = headers.get("host") or ""
        # A page of another site may have its name resolved to this machine; the name it asks for
        # still gives it away.
        return (
            _is_loopback(peer)
            and _names_loopback(host)
            and headers.get("origin") in (None, f"http://{host}", f"https://{host}")
        )

    # -- browsers --

    def cors_headers(self, headers: Headers) -> list[tuple[str, str]]:
        """What lets a page of an allowed origin read the answer."""
        origin = headers.get("origin")
        if origin is None or not self.access.cors_origins:
            return []
        if "*" in self.access.cors_origins:
            return [
                ("Access-Control-Allow-Origin", "*"),
                ("Access-Control-Expose-Headers", "X-Request-Id"),
            ]
        if origin not in self.access.cors_origins:
            return []
        return [
            ("Access-Control-Allow-Origin", origin),
            ("Vary", "Origin"),
            ("Access-Control-Expose-Headers", "X-Request-Id"),
        ]

    def preflight_headers(self, headers: Headers, methods: Iterable[str]) -> list[tuple[str, str]]:
        allowed = self.cors_headers(headers)
        if not allowed:
            return []
        wanted = headers.get("access-control-request-headers")
        return [
            *allowed,
            ("Access-Control-Allow-Methods", ", ".join(methods)),
            *([("Access-Control-Allow-Headers", wanted)] if wanted else []),
            ("Access-Control-Max-Age", str(_PREFLIGHT_AGE_S)),
        ]


def _names_loopback(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return name == "localhost" or _is_loopback(name.strip("[]"))


def _is_loopback(peer: str) -> bool:
    try:
        address = ip_address(peer)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
