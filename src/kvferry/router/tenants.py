"""Who a client is, by its API key: conversations, places in the queue and limits are kept apart by tenant. Pure.

Keys are looked up by their digest, so that the time it takes tells nothing of a key.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvferry.errors import ConfigError

__all__ = ["ApiKeys", "check_key", "read_key_file", "tenant_of_header"]

_BEARER = "bearer "


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def check_key(key: str, name: str) -> None:
    """ConfigError for one that could not be sent: found at the start, it fails no request."""
    if not key or not all("!" <= sign <= "~" for sign in key):
        raise ConfigError(f"{name} must be one word of printable ASCII characters")


def tenant_of_header(authorization: str | None) -> str:
    """Where the router has no keys of its own, clients with different credentials are different tenants all the same."""
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
                raise ConfigError(f"tenants {tenants[_digest(key)]!r} and {tenant!r} have the same API key")
        return cls(tenants)

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def find(self, authorization: str | None) -> str | None:
        """The tenant whose key was sent; None for nobody's."""
        if authorization is None or authorization[: len(_BEARER)].lower() != _BEARER:
            return None
        return self._tenants.get(_digest(authorization[len(_BEARER) :].strip()))


def read_key_file(text: str) -> list[tuple[str, str]]:
    """`TENANT KEY` or `KEY` in each line; # begins a comment. A key without a tenant is one of its own."""
    pairs = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2:
            raise ConfigError(f"line {number} of the key file has {len(words)} words; write TENANT KEY, or KEY alone")
        pairs.append((words[0], words[1]) if len(words) == 2 else (_digest(words[0]).hex()[:16], words[0]))
    return pairs
