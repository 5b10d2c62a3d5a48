"""Who is let in, and what browsers are told about it. Pure: decides from a request's head."""

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address

from kvferry.router.http1.messages import Headers
from kvferry.router.options import AccessOptions
from kvferry.router.tenants import ApiKeys, tenant_of_header

__all__ = ["AccessPolicy"]

_OPEN_PATHS = frozenset({"/health", "/healthcheck", "/healthz", "/readyz", "/metrics"})
_ADMIN_PREFIXES = ("/admin", "/dashboard")
# The page itself holds nothing; what it shows is asked for with a key. Its files lie right below it: deeper down, names are requests'.
_PAGE = ("/dashboard", "/dashboard/")
_PAGE_FILES = (".js", ".css")
_PREFLIGHT_AGE_S = 600
# A web server on this machine that passes on what it gets looks like a neighbour, but says for whom it asks.
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
        """With a key, whoever has it; without one, whoever is on this machine, asks for itself, and is no page of another site."""
        if self.access.admin_key:
            sent = (headers.get("authorization") or "").partition(" ")[2].strip()
            return hmac.compare_digest(sent.encode("utf-8", "surrogateescape"), self.access.admin_key.encode())
        if any(headers.get(name) is not None for name in _FORWARDING_HEADERS):
            return False
        host = headers.get("host") or ""
        # A page of another site may have its name resolved to this machine; the name it asks for still gives it away.
        return _is_loopback(peer) and _names_loopback(host) and headers.get("origin") in (None, f"http://{host}", f"https://{host}")

    # -- browsers --------------------------------------------------------------------------------------------------

    def cors_headers(self, headers: Headers) -> list[tuple[str, str]]:
        """What lets a page of an allowed origin read the answer."""
        origin = headers.get("origin")
        if origin is None or not self.access.cors_origins:
            return []
        if "*" in self.access.cors_origins:
            return [("Access-Control-Allow-Origin", "*"), ("Access-Control-Expose-Headers", "X-Request-Id")]
        if origin not in self.access.cors_origins:
            return []
        return [("Access-Control-Allow-Origin", origin), ("Vary", "Origin"), ("Access-Control-Expose-Headers", "X-Request-Id")]

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
