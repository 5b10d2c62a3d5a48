"""Finds the longest prefix of a sequence that the prefix cache holds for all KV-cache groups.

A group with full attention needs every block of the prefix. A group with local attention needs only
the blocks that the token after the prefix attends to. Each hash is looked up at most twice per
group.

Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.connectors.contract import KVCacheGroup
from kvferry.protocol.tickets import HOLE

__all__ = ["CachedPrefix", "find_prefix"]


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The cached prefix of one sequence."""

    num_blocks: int
    tables: tuple[list[int], ...]
    """Per group, `num_blocks` entries; `HOLE` where no token will attend."""
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
    prefixes = {
        number: _leading(published[number].get, hashes)
        for number, group in enumerate(groups)
        if not group.has_local_attention
    }
    count = min([most, *map(len, prefixes.values())])
    scans = [
        _Scan(published[n].get, group, hashes, block_size, count)
        for n, group in enumerate(groups)
        if group.has_local_attention
    ]
    count = _common_length(scans, count)
    firsts = [group.first_visible_token(count * block_size) // block_size for group in groups]
    tables = tuple(
        prefixes[n][:count] if n in prefixes else _seen(published[n], first, hashes[:count])
        for n, first in enumerate(firsts)
    )
    is_whole = count == most < len(hashes) and all(hashes[most] in known for known in published)
    return CachedPrefix(count, tables, is_whole)


def _leading(find: Callable[[bytes], int | None], hashes: Sequence[bytes]) -> list[int]:
    found: list[int] = []
    for block_hash in hashes:
        block = find(block_hash)
        if block is None:
            break
        found.append(block)
    return found


def _seen(known: Mapping[bytes, int], first: int, hashes: Sequence[bytes]) -> list[int]:
    return [HOLE] * first + [known[block_hash] for block_hash in hashes[first:]]


def _common_length(scans: Sequence["_Scan"], count: int) -> int:
    """Return the longest prefix of at most `count` blocks that all groups can use."""
    while True:
        # A group may shorten the prefix below what an earlier group accepted, so repeat until all
        # agree.
        before = count
        for scan in scans:
            count = scan.shorten(count)
        if count == before:
            return count


@dataclass(slots=True)
class _Scan:
    """Scans the blocks of one windowed group backwards from the end of the prefix.

    Each block is looked up once.
    """

    find: Callable[[bytes], int | None]
    group: KVCacheGroup
    hashes: Sequence[bytes]
    block_size: int
    low: int
    """All blocks from this index to the end of the prefix are published."""

    def shorten(self, count: int) -> int:
        """Return the longest prefix of at most `count` blocks that this group can use.

        `count` must not grow from call to call.
        """
        self.low = min(self.low, count)
        first = self._first_needed(count)
        while self.low > first:
            self.low -= 1
            if self.find(self.hashes[self.low]) is None:
                # Every prefix that ends after this block, up to `count`, needs the block, because
                # windows only move forward.
                count = self.low
                first = self._first_needed(count)
        return count

    def _first_needed(self, count: int) -> int:
        return self.group.first_visible_token(count * self.block_size) // self.block_size
