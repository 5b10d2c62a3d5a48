"""The longest prefix of a sequence that the prefix cache holds for all KV-cache groups at once.
Pure.

A group whose attention looks back for ever needs every block of the prefix; one that forgets needs
only those that the token after the prefix looks at. Each hash is looked up at most twice per group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.connectors.contract import KVCacheGroup
from kvferry.protocol.tickets import HOLE

__all__ = ["CachedPrefix", "find_prefix"]


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    num_blocks: int
    tables: tuple[list[int], ...]
    """Per group `num_blocks` places; `HOLE` where nobody will look."""
    is_whole: bool = False
    """The cache holds the sequence's last block too, which has to be computed again for the logits
    of its last token.
    """


def find_prefix(
    published: Sequence[Mapping[bytes, int]],
    groups: Sequence[KVCacheGroup],
    hashes: Sequence[bytes],
    num_tokens: int,
    block_size: int,
) -> CachedPrefix:
    """`hashes` are those of the full blocks of a sequence of `num_tokens`. At least one token is
    left to compute.
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
    """The longest prefix of at most `count` blocks that all of them can use."""
    while True:
        before = count
        for scan in scans:
            count = scan.shorten(count)
        if count == before:
            return count


@dataclass(slots=True)
class _Scan:
    """One windowed group's blocks, looked at from the end of the prefix backwards, each once."""

    find: Callable[[bytes], int | None]
    group: KVCacheGroup
    hashes: Sequence[bytes]
    block_size: int
    low: int
    """From here to the end of the prefix all blocks are known."""

    def shorten(self, count: int) -> int:
        """The longest prefix of at most `count` blocks that this group can use. Ask for ever
        shorter ones.
        """
        self.low = min(self.low, count)
        first = self._first_needed(count)
        while self.low > first:
            self.low -= 1
            if self.find(self.hashes[self.low]) is None:
                # Every prefix that ends behind this block needs it, for windows only move on.
                count = self.low
                first = self._first_needed(count)
        return count

    def _first_needed(self, count: int) -> int:
        return self.group.first_visible_token(count * self.block_size) // self.block_size
