"""Authentication: API keys of tenants, the admin key, and the CORS headers for browsers.

Pure: everything is decided from a request's head. Conversations, queue positions and limits are
separate per tenant. Keys are looked up by digest, so that the lookup time reveals nothing about a
key.
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
    """Raise ConfigError at start-up for a key that cannot be sent in a header."""
    if not key or not all("!" <= sign <= "~" for sign in key):
        raise ConfigError(f"{name} must be one word of printable ASCII characters")


def tenant_of_header(authorization: str | None) -> str:
    """Tenant of a client if the router has no API keys: clients with different credentials are
    different tenants.
    """
    return "" if not authorization else _digest(authorization).hex()[:16]


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Maps API keys to tenants. Without keys every client is admitted."""

    _tenants: Mapping[bytes, str] = field(default_factory=dict)

    @classmethod
    def of(cls, keys: Iterable[tuple[str, str]]) -> "ApiKeys":
        """Make the table from pairs of tenant and key."""
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
        """The tenant of the key in an Authorization header; None if the key is unknown."""
        if authorization is None or authorization[: len(_BEARER)].lower() != _BEARER:
            return None
        return self._tenants.get(_digest(authorization[len(_BEARER) :].strip()))


def read_key_file(text: str) -> list[tuple[str, str]]:
    """Parse lines of `TENANT KEY` or `KEY`; # starts a comment. A key without a tenant is a tenant
    of its own.
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


# -- access policy --


_OPEN_PATHS = frozenset({"/health", "/healthcheck", "/healthz", "/readyz", "/metrics"})
_ADMIN_PREFIXES = ("/admin", "/dashboard")
# The page and its files contain no data; the page fetches data with a key. The files are directly
# below /dashboard: deeper paths contain request ids.
_PAGE = ("/dashboard", "/dashboard/")
_PAGE_FILES = (".js", ".css")
_PREFLIGHT_AGE_S = 600
# A reverse proxy on this machine looks like a local client, but adds such a header.
_FORWARDING_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip")


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Decides which requests one router accepts."""

    access: AccessOptions
    keys: ApiKeys

    @classmethod
    def of(cls, access: AccessOptions) -> "AccessPolicy":
        return cls(access, ApiKeys.of(access.api_keys))

    def tenant(self, headers: Headers) -> str | None:
        """The tenant of a request; None if the request has no valid key."""
        authorization = headers.get("authorization")
        return self.keys.find(authorization) if self.keys else tenant_of_header(authorization)

    def needs_key(self, path: str) -> bool:
        """Whether a path requires an API key."""
        return bool(self.keys) and path not in _OPEN_PATHS and not path.startswith(_ADMIN_PREFIXES)

    def is_admin_path(self, path: str) -> bool:
        """Whether a path requires the admin key; the dashboard page and its files do not."""
        is_file = path.rpartition("/")[0] == "/dashboard" and path.endswith(_PAGE_FILES)
        return path.startswith(_ADMIN_PREFIXES) and path not in _PAGE and not is_file

    def is_admin(self, headers: Headers, peer: str) -> bool:
        """Whether a request may use admin paths.

        With an admin key, the request must contain the key. Without an admin key, the client must
        be on this machine, must not be a proxy, and must not be a web page of another site.
        """
        if self.access.admin_key:
            sent = (headers.get("authorization") or "").partition(" ")[2].strip()
            return hmac.compare_digest(
                sent.encode("utf-8", "surrogateescape"), self.access.admin_key.encode()
            )
        if any(headers.get(name) is not None for name in _FORWARDING_HEADERS):
            return False
        host = headers.get("host") or ""
        # DNS rebinding: another site can let a host name resolve to this machine, but the
        # Host header still contains the name.
        return (
            _is_loopback(peer)
            and _names_loopback(host)
            and headers.get("origin") in (None, f"http://{host}", f"https://{host}")
        )

    # -- browsers --

    def cors_headers(self, headers: Headers) -> list[tuple[str, str]]:
        """Headers that let a page of an allowed origin read the response."""
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
        """Headers that answer a CORS preflight request."""
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
