"""What changes the blocks a sequence holds, for all its KV-cache groups at once: beginning,
growing, forgetting, publishing, ending.

    group 0, looks back for ever   | 4 5 6 7 8 9 |         places 0, 1, …: one per block of tokens, in all groups equally many
    group 1, with a window         | . . . . 2 3 |         . is a hole: no token from the next one on looks there

Pure. Each operation happens wholly or changes nothing.
"""

from dataclasses import dataclass

from kvferry.engine.cache.blocks import BlockPool, BlockRequest, GroupTable
from kvferry.engine.cache.prefix import CachedPrefix, find_prefix
from kvferry.engine.limits import SchedulerLimits
from kvferry.engine.sequence import Match, Sequence
from kvferry.protocol.tickets import HOLE

__all__ = ["BlockAllocation", "BlockAllocator"]


@dataclass(frozen=True, slots=True)
class BlockAllocation:
    """The blocks a sequence would begin with."""

    match: Match
    tables: tuple[GroupTable, ...]
    """Holes and blocks that are shared with others."""
    missing: tuple[int, ...]
    """Per group, how many new blocks follow them."""

    @property
    def shared(self) -> list[int]:
        return [block for table in self.tables for block in table.held]


@dataclass(slots=True)
class BlockAllocator:
    limits: SchedulerLimits
    pool: BlockPool

    # -- beginning --

    def find_cached(self, seq: Sequence) -> CachedPrefix:
        limits = self.limits
        if not limits.enable_prefix_caching:
            return CachedPrefix(0, tuple([] for _ in limits.groups))
        return find_prefix(
            self.pool.published,
            limits.groups,
            seq.block_hashes(limits.block_size),
            seq.num_tokens,
            limits.block_size,
        )

    def plan_allocation(
        self, seq: Sequence, cached: CachedPrefix, match: Match, num_tokens: int
    ) -> BlockAllocation:
        """How `num_tokens` tokens would be held, of which `match` need no computing. Nothing is
        held by this.
        """
        table_length = self.limits.blocks_for(num_tokens)
        # A prompt that is there as a whole still has its last token computed, which looks further
        # back than the one after it.
        first_computed = min(match.total_tokens, seq.num_tokens - 1)
        tables = []
        for group, blocks in zip(self.limits.groups, cached.tables, strict=True):
            first = self.limits.first_needed(group, first_computed)
            # Of the block that a load's edge falls into, the producer may have had only a part:
            # somebody whose window reaches further back must not find it.
            edge = self.limits.blocks_for(group.first_visible_token(match.total_tokens))
            tables.append(
                GroupTable([HOLE] * first + blocks[first:], first, max(len(blocks), edge))
            )
        return BlockAllocation(
            match, tuple(tables), tuple(table_length - len(table.block_ids) for table in tables)
        )

    def num_left(self, allocation: BlockAllocation) -> int:
        """How many blocks would be free beside it; negative when it does not fit."""
        return self.pool.num_free_beside(allocation.shared) - sum(allocation.missing)

    def allocate(self, seq: Sequence, allocation: BlockAllocation) -> None:
        """Let a sequence that holds nothing have a placement that fits."""
        block_requests = [
            BlockRequest(table.last, count)
            for table, count in zip(allocation.tables, allocation.missing, strict=True)
        ]
        fresh = self.pool.acquire(allocation.shared, block_requests)
        assert fresh is not None, "the caller has looked"
        for table, blocks in zip(allocation.tables, fresh, strict=True):
            table.block_ids += blocks
        seq.tables = allocation.tables
        seq.matched = allocation.match
        if not seq.num_output_tokens:
            seq.num_cached_tokens = min(allocation.match.total_tokens, seq.num_prompt_tokens)

    # -- running --

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """Make place for so many tokens in all; False, and nothing has changed, when there are too
        few blocks.
        """
        missing = self.limits.blocks_for(num_tokens) - seq.table_length
        if missing <= 0:
            return True
        fresh = self.pool.acquire((), [BlockRequest(table.last, missing) for table in seq.tables])
        if fresh is None:
            return False
        for table, blocks in zip(seq.tables, fresh, strict=True):
            table.block_ids += blocks
        return True

    def num_missing_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """How many blocks must come back before there is place for so many tokens."""
        missing = self.limits.blocks_for(num_tokens) - seq.table_length
        return max(0, missing * len(seq.tables) - self.pool.num_free)

    def free_unseen_blocks(self, seq: Sequence, position: int) -> None:
        """Give back the blocks that no token from `position` on looks at. What was given back
        before is not looked at again.
        """
        for number, group in self.limits.windowed_groups:
            table = seq.tables[number]
            first = min(self.limits.first_needed(group, position), seq.table_length)
            if first > table.num_holes:
                gone = slice(table.num_holes, first)
                self.pool.release(table.block_ids[gone])
                table.block_ids[gone] = [HOLE] * (first - table.num_holes)
                table.num_holes = first

    def num_still_needed(self, seq: Sequence) -> int:
        """At most so many blocks more than it holds will a sequence hold at once, until all its
        known tokens are computed.
        """
        table_length = self.limits.blocks_for(seq.num_tokens)
        return sum(
            max(0, min(table_length - table.num_holes, most) - table.num_held)
            for table, most in zip(seq.tables, self.limits.max_held_blocks, strict=True)
        )

    def publish(self, seq: Sequence) -> None:
        """Let others share the blocks that are full and computed, or loaded and not to be written
        again.
        """
        if not self.limits.enable_prefix_caching:
            return
        num_full = seq.num_computed_tokens // self.limits.block_size
        hashes = seq.block_hashes(self.limits.block_size)
        for number, table in enumerate(seq.tables):
            for index in range(table.num_published, num_full):
                self.pool.publish(table.block_ids[index], hashes[index], number)
            table.num_published = max(table.num_published, num_full)

    # -- the end --

    def release(self, seq: Sequence) -> None:
        """Give back everything."""
        for table in seq.tables:
            self.pool.release(table.held)
        seq.tables = ()
