"""Authentication: API keys of tenants, the admin key, and the CORS headers for browsers.

Pure: everything is decided from a request's head. Conversations, queue positions and limits are
separate per tenant. Keys are looked up by digest, so that the lookup time reveals nothing about a
key.
"""

import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.router.http.messages import Headers, ServerRequest
from kvferry.router.options import AccessOptions
from kvferry.web.api_keys import ApiKeys, key_digest


def credentials(headers: Headers) -> str | None:
    """The Authorization header of a client; clients of Anthropic's API send `X-Api-Key` instead."""
    sent, key = headers.get("authorization"), headers.get("x-api-key")
    return f"Bearer {key}" if sent is None and key is not None else sent


def tenant_without_keys(authorization: str | None, peer: str) -> str:
    """Tenant of a client if the router has no API keys: clients with different credentials, or
    without credentials from different addresses, are different tenants.
    """
    return key_digest(authorization).hex()[:16] if authorization else peer


# -- access policy --


# Load balancers, which have no key, ask for the health.
_OPEN_PATHS = frozenset({"/health", "/healthcheck", "/healthz", "/ping", "/readyz"})
# An adapter is loaded for all tenants.
_ADMIN_PREFIXES = ("/admin", "/dashboard", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
# The page and its files contain no data; the page fetches data with a key. The files are directly
# below /dashboard: deeper paths contain request ids.
_PAGE = ("/dashboard", "/dashboard/")
_PAGE_FILES = (".js", ".css")
_PREFLIGHT_AGE_S = 600


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Decides which requests one router accepts."""

    access: AccessOptions
    keys: ApiKeys

    @classmethod
    def of(cls, access: AccessOptions) -> "AccessPolicy":
        return cls(access, ApiKeys.of(access.api_keys))

    def tenant(self, request: ServerRequest) -> str | None:
        """The tenant of a request; None if the request has no valid key."""
        authorization = credentials(request.headers)
        if self.keys:
            return self.keys.find(authorization)
        return tenant_without_keys(authorization, request.peer)

    def is_refused(self, request: ServerRequest, *, is_page: bool) -> bool:
        """Whether the path requires an API key that the request does not have. `is_page`: the
        router itself serves the path; what engines serve always requires a key.
        """
        if not self.keys:
            return False
        if not is_page:
            return self.tenant(request) is None
        if request.path == "/metrics":
            return not self.sees_details(request)
        return (
            request.path not in _OPEN_PATHS
            and not request.path.startswith(_ADMIN_PREFIXES)
            and self.tenant(request) is None
        )

    def sees_details(self, request: ServerRequest) -> bool:
        """Whether a request may see counts and instances: with an API key or the admin key, or if
        there are no API keys.
        """
        return self.tenant(request) is not None or self.is_admin(request.headers)

    def is_admin_path(self, path: str) -> bool:
        """Whether a path requires the admin key; the dashboard page and its files do not."""
        is_file = path.rpartition("/")[0] == "/dashboard" and path.endswith(_PAGE_FILES)
        return path.startswith(_ADMIN_PREFIXES) and path not in _PAGE and not is_file

    def is_admin(self, headers: Headers) -> bool:
        """Whether a request contains the admin key. Without an admin key no request does.

        The client's address decides nothing: a reverse proxy on this machine has the same address
        as an operator, and so has every other user of this machine.
        """
        sent = (credentials(headers) or "").partition(" ")[2].strip()
        return self.access.admin_key != "" and hmac.compare_digest(
            sent.encode("utf-8", "surrogateescape"), self.access.admin_key.encode()
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
