"""Finds the longest prefix of a sequence that the prefix cache holds for all KV-cache groups.

Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.connectors.contract import KVCacheGroup
from kvferry.connectors.prefix_search import usable_prefix
from kvferry.protocol.tickets import NO_BLOCK


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The cached prefix of one sequence."""

    num_blocks: int
    tables: tuple[list[int], ...]
    """Per group, `num_blocks` entries; `NO_BLOCK` where no token will attend."""
    is_whole: bool = False
    """True if the cache also holds the last block of the sequence.

    The last block is still computed again, because the logits of its last token are needed.
    """


def find_prefix(
    published: Sequence[Mapping[bytes, int]],
    groups: Sequence[KVCacheGroup],
    hashes: Sequence[bytes],
    num_tokens: int,
    block_size: int,
) -> CachedPrefix:
    """Return the longest usable prefix of a sequence of `num_tokens` tokens.

    `hashes` are the hashes of its full blocks. At least one token is left to compute.
    """
    most = (num_tokens - 1) // block_size
    count = usable_prefix(
        groups,
        block_size,
        min(most, len(hashes)),
        lambda number, index: hashes[index] in published[number],
    )
    firsts = [group.first_visible_token(count * block_size) // block_size for group in groups]
    tables = tuple(
        _seen(published[number], 0 if not group.has_local_attention else first, hashes[:count])
        for number, (group, first) in enumerate(zip(groups, firsts, strict=True))
    )
    is_whole = count == most < len(hashes) and all(hashes[most] in known for known in published)
    return CachedPrefix(count, tables, is_whole)


def _seen(known: Mapping[bytes, int], first: int, hashes: Sequence[bytes]) -> list[int]:
    return [NO_BLOCK] * first + [known[block_hash] for block_hash in hashes[first:]]
