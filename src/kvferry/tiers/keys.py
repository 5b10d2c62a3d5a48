"""Names of stored KV: namespaces and keys. Pure.

Everything that changes the bytes of KV is part of its name. What is fixed while an engine runs
(model, weights, dtype, layout, rank) makes the namespace. What differs between requests (tokens,
tenant, LoRA adapter, images, the version of replaced weights) makes the key. So two engines that
differ in anything that matters never find each other's objects, and a changed checkpoint at the
same path is another namespace.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

from kvferry.tiers.base import KEY_BYTES, ObjectKey

__all__ = ["FORMAT_VERSION", "NAMESPACE_FILE", "KeyChain", "Namespace"]

FORMAT_VERSION = 2
"""The version of the object format and of the order of bytes in a payload. Part of every namespace.
"""
NAMESPACE_BYTES = 16
NAMESPACE_FILE = "namespace.json"
"""The file or object that describes a namespace for people, beside its objects."""


@dataclass(frozen=True)
class Namespace:
    """Everything that two engines must have in common to use each other's objects."""

    factors: Mapping[str, Any]
    """Plain JSON values by name, rank and parallel size among them."""

    @cached_property
    def text(self) -> str:
        """The factors as canonical JSON, to be read by people and by `kvferry store`."""
        return json.dumps({**self.factors, "format": FORMAT_VERSION}, sort_keys=True, indent=1)

    @cached_property
    def digest(self) -> bytes:
        return blake2b(
            self.text.encode(), digest_size=NAMESPACE_BYTES, person=b"kvferry space"
        ).digest()

    @property
    def hex(self) -> str:
        return self.digest.hex()


@dataclass(slots=True)
class KeyChain:
    """The keys of the full chunks of one growing token sequence, in each KV-cache group. Each key
    is a hash of the salt and of all tokens up to the end of the chunk, so it also stands for the
    tokens' positions.
    """

    chunk_tokens: int
    salt: str
    num_groups: int = 1
    keys: tuple[list[ObjectKey], ...] = field(init=False)
    """By group."""
    _state: Any = field(init=False)

    def __post_init__(self) -> None:
        self.keys = tuple([] for _ in range(self.num_groups))
        self._state = blake2b(digest_size=KEY_BYTES, person=b"kvferry chunks")
        # The length of the salt comes first, so that no salt can be confused with leading tokens.
        salt = self.salt.encode("utf-8", "surrogatepass")
        self._state.update(len(salt).to_bytes(8, "little") + salt)

    def __len__(self) -> int:
        """The number of chunks whose keys are known."""
        return len(self.keys[0])

    def extend(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Add the keys of all full chunks of the first `num_tokens` tokens. The tokens of earlier
        calls must not have changed.
        """
        size = self.chunk_tokens
        # After a stop token in the middle of accepted draft tokens, vLLM has computed more tokens
        # than it has kept.
        first, end = len(self) * size, min(num_tokens, len(token_ids)) // size * size
        if end > first:
            # `struct` takes a third of the time of `array` and numpy for a list of integers.
            tokens = struct.pack(f"<{end - first}q", *token_ids[first:end])
            for start in range(0, len(tokens), 8 * size):
                self._state.update(tokens[start : start + 8 * size])
                digest = self._state.copy().digest()
                self.keys[0].append(ObjectKey(digest))
                for group in range(1, self.num_groups):
                    self.keys[group].append(_group_key(digest, group))


def _group_key(digest: bytes, group: int) -> ObjectKey:
    """The key of a chunk's KV in another KV-cache group than the first."""
    return ObjectKey(
        blake2b(digest, digest_size=KEY_BYTES, person=b"kvferry group", salt=b"%d" % group).digest()
    )
