"""Names of stored KV: namespaces and keys. Pure.

Everything that changes the bytes of KV is part of its name. What is fixed while an engine runs
(model, weights, dtype, layout, rank) makes the namespace. What differs between requests (tokens,
tenant, LoRA adapter, images, the version of replaced weights) makes the key. So two engines that
differ in anything that matters never find each other's entries, and a changed checkpoint at the
same path is another namespace.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

from kvferry.tiers.base import KEY_BYTES, EntryKeys
from kvferry.transports.copy.native import native_or

FORMAT_VERSION = 2
"""The version of the entry format and of the order of bytes in a payload. Part of every namespace.
"""
NAMESPACE_BYTES = 16
NAMESPACE_FILE = "namespace.json"
"""The file or object that describes a namespace for people, beside its entries."""


@dataclass(frozen=True)
class Namespace:
    """Everything that two engines must have in common to use each other's entries."""

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
    keys: tuple[EntryKeys, ...] = field(init=False)
    """By group."""

    def __post_init__(self) -> None:
        self.keys = (EntryKeys(),) * self.num_groups

    def __len__(self) -> int:
        """The number of chunks whose keys are known."""
        return len(self.keys[0])

    def extend(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Add the keys of all full chunks of the first `num_tokens` tokens. The tokens of earlier
        calls must not have changed; they are hashed again.
        """
        # After a stop token in the middle of accepted draft tokens, vLLM has computed more tokens
        # than it has kept.
        end = min(num_tokens, len(token_ids)) // self.chunk_tokens * self.chunk_tokens
        if end <= len(self) * self.chunk_tokens:
            return
        salt = self.salt.encode("utf-8", "surrogatepass")
        # The length of the salt comes first, so that no salt can be confused with leading tokens.
        prefix = len(salt).to_bytes(8, "little") + salt
        new = _chunk_keys(prefix, list(token_ids[:end]), self.chunk_tokens, len(self))
        self.keys = tuple(
            EntryKeys(known.joined + (_group_keys(new, group) if group else new))
            for group, known in enumerate(self.keys)
        )


def chunk_keys_by_hashlib(
    prefix: bytes, token_ids: list[int], chunk_tokens: int, first: int
) -> bytes:
    """The keys of all full chunks but the first `first`."""
    tokens = struct.pack(f"<{len(token_ids)}q", *token_ids)
    size = 8 * chunk_tokens
    state = blake2b(prefix, digest_size=KEY_BYTES, person=b"kvferry chunks")
    state.update(tokens[: first * size])
    digests = []
    for start in range(first * size, len(tokens) // size * size, size):
        state.update(tokens[start : start + size])
        digests.append(state.copy().digest())
    return b"".join(digests)


def group_keys_by_hashlib(keys: bytes, group: int) -> bytes:
    """The keys of the same chunks in another KV-cache group than the first."""
    salt = b"%d" % group
    return b"".join(
        blake2b(key, digest_size=KEY_BYTES, person=b"kvferry group", salt=salt).digest()
        for key in EntryKeys(keys)
    )


_chunk_keys: Callable[[bytes, list[int], int, int], bytes] = native_or(
    "chunk_keys", chunk_keys_by_hashlib
)
_group_keys: Callable[[bytes, int], bytes] = native_or("group_keys", group_keys_by_hashlib)
