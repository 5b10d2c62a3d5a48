"""API keys of clients: the file that holds them, and the lookup of a key that a client sent.

Pure. The engine and the router share the format of the file. Keys are looked up by digest, so that
the lookup time reveals nothing about a key.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvferry.errors import ConfigError

_BEARER = "bearer "


def key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def check_key(key: str, name: str) -> None:
    """Raise ConfigError at start-up for a key that cannot be sent in a header."""
    if not key or not all("!" <= sign <= "~" for sign in key):
        raise ConfigError(f"{name} must be one word of printable ASCII characters")


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
            if tenants.setdefault(key_digest(key), tenant) != tenant:
                raise ConfigError(
                    f"tenants {tenants[key_digest(key)]!r} and {tenant!r} have the same API key"
                )
        return cls(tenants)

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def find(self, authorization: str | None) -> str | None:
        """The tenant of the key in an Authorization header; None if the key is unknown."""
        if authorization is None or authorization[: len(_BEARER)].lower() != _BEARER:
            return None
        return self._tenants.get(key_digest(authorization[len(_BEARER) :].strip()))


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
            (words[0], words[1]) if len(words) == 2 else (key_digest(words[0]).hex()[:16], words[0])
        )
    return pairs
