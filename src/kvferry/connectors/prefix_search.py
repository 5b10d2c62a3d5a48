"""How long a prefix all KV-cache groups can use, if some of their blocks are at hand. Pure.

A group with full attention needs every block of the prefix. A group with local attention needs only
the blocks that the token after the prefix attends to. Each block is looked up at most twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.connectors.contract import KVCacheGroup


def usable_prefix(
    groups: Sequence[KVCacheGroup],
    block_size: int,
    max_blocks: int,
    has_block: Callable[[int, int], bool],
) -> int:
    """Return the longest prefix, in blocks of `block_size` tokens, that all groups can use.

    `has_block(group, index)` says whether a block is at hand.
    """
    count = max_blocks
    for number, group in enumerate(groups):
        if not group.has_local_attention:
            count = next((i for i in range(count) if not has_block(number, i)), count)
    scans = [
        _Scan(has_block, number, group, block_size, count)
        for number, group in enumerate(groups)
        if group.has_local_attention
    ]
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
    """Scans the blocks of one group with local attention backwards from the end of the prefix."""

    has_block: Callable[[int, int], bool]
    number: int
    group: KVCacheGroup
    block_size: int
    low: int
    """All blocks from this index to the end of the prefix are at hand."""

    def shorten(self, count: int) -> int:
        """Return the longest prefix of at most `count` blocks that this group can use.

        `count` must not grow from call to call.
        """
        self.low = min(self.low, count)
        first = self._first_needed(count)
        while self.low > first:
            self.low -= 1
            if not self.has_block(self.number, self.low):
                # Every prefix that ends after this block, up to `count`, needs the block, because
                # windows only move forward.
                count = self.low
                first = self._first_needed(count)
        return count

    def _first_needed(self, count: int) -> int:
        return self.group.first_visible_token(count * self.block_size) // self.block_size
