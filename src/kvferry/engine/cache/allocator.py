"""The block allocator: every operation that changes which blocks a sequence holds.

    group 0, full attention   | 4 5 6 7 8 9 |   table entries 0, 1, ...: one per block of tokens,
    group 1, with a window    | . . . . 2 3 |   equally many in all groups with attention
    group 2, with states      | 1 |             . is a hole: no later token attends to this block

Each operation covers all KV-cache groups of the sequence at once
(docs/decisions/015-groups-in-the-embedded-engine.md).

Pure. Each operation happens completely or changes nothing.
"""

from collections.abc import Sequence as ReadOnlySequence
from dataclasses import dataclass

from kvferry.engine.cache.blocks import BlockPool, BlockRequest, GroupTable
from kvferry.engine.cache.prefix import CachedPrefix, find_prefix
from kvferry.engine.limits import SchedulerLimits
from kvferry.engine.sequence import Match, Sequence
from kvferry.protocol.tickets import NO_BLOCK


@dataclass(frozen=True, slots=True)
class BlockAllocation:
    """The blocks that a sequence would start with; nothing is held yet."""

    match: Match
    tables: tuple[GroupTable, ...]
    """One table per group, with holes and with cached blocks shared between sequences."""
    missing: tuple[int, ...]
    """Number of new blocks per group, which follow the blocks of the table."""

    @property
    def shared(self) -> list[int]:
        return [block for table in self.tables for block in table.held]


@dataclass(slots=True)
class BlockAllocator:
    """Changes the blocks of sequences; the scheduler owns the allocator."""

    limits: SchedulerLimits
    pool: BlockPool

    # -- admission --

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
        """Plan how a sequence would hold `num_tokens` tokens, of which `match` need no computation.

        The plan holds no blocks.
        """
        # Even if the whole prompt is cached, the last token is computed. The window of the last
        # token begins earlier than the window of the token after it.
        first_computed = min(match.total_tokens, seq.num_tokens - 1)
        tables = []
        for group, blocks in zip(self.limits.groups, cached.tables, strict=True):
            first = self.limits.first_needed(group, first_computed)
            # The producer may have filled only a part of the block at the edge of a load. The block
            # must not be published, because a sequence whose window reaches further back would read
            # the missing part.
            edge = self.limits.blocks_for(group.first_visible_token(match.total_tokens))
            tables.append(
                GroupTable([NO_BLOCK] * first + blocks[first:], first, max(len(blocks), edge))
            )
        return BlockAllocation(match, tuple(tables), self._num_missing(tables, num_tokens))

    def _num_missing(
        self, tables: ReadOnlySequence[GroupTable], num_tokens: int
    ) -> tuple[int, ...]:
        """Return how many blocks each group's table lacks for `num_tokens` tokens."""
        return tuple(
            max(0, self.limits.table_length(group, num_tokens) - len(table.block_ids))
            for group, table in zip(self.limits.groups, tables, strict=True)
        )

    def num_left(self, allocation: BlockAllocation) -> int:
        """Return how many blocks would stay free; negative when the allocation does not fit."""
        return self.pool.num_free_beside(allocation.shared) - sum(allocation.missing)

    def allocate(self, seq: Sequence, allocation: BlockAllocation) -> None:
        """Give an allocation that fits to a sequence that holds no blocks."""
        block_requests = [
            BlockRequest(table.last, count)
            for table, count in zip(allocation.tables, allocation.missing, strict=True)
        ]
        fresh = self.pool.acquire(allocation.shared, block_requests)
        assert fresh is not None, "the caller has checked that a block is free"
        for table, blocks in zip(allocation.tables, fresh, strict=True):
            table.block_ids += blocks
        seq.tables = allocation.tables
        seq.matched = allocation.match
        if not seq.num_output_tokens:
            seq.num_cached_tokens = min(allocation.match.total_tokens, seq.num_prompt_tokens)

    # -- running --

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """Extend the tables to `num_tokens` tokens.

        Returns False, with nothing changed, if too few blocks are free.
        """
        if self.limits.blocks_for(num_tokens) <= seq.table_length:
            return True
        missing = self._num_missing(seq.tables, num_tokens)
        fresh = self.pool.acquire(
            (),
            [
                BlockRequest(table.last, count)
                for table, count in zip(seq.tables, missing, strict=True)
            ],
        )
        if fresh is None:
            return False
        for table, blocks in zip(seq.tables, fresh, strict=True):
            table.block_ids += blocks
        return True

    def num_missing_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many blocks must be freed before the tables can hold `num_tokens` tokens."""
        return max(0, sum(self._num_missing(seq.tables, num_tokens)) - self.pool.num_free)

    def free_unseen_blocks(self, seq: Sequence, position: int) -> None:
        """Free the blocks that no token at or after `position` attends to.

        A freed block becomes a hole and is not needed again.
        """
        for number, group in self.limits.windowed_groups:
            table = seq.tables[number]
            first = min(self.limits.first_needed(group, position), seq.table_length)
            if first > table.num_holes:
                gone = slice(table.num_holes, first)
                self.pool.release(table.block_ids[gone])
                table.block_ids[gone] = [NO_BLOCK] * (first - table.num_holes)
                table.num_holes = first

    def num_still_needed(self, seq: Sequence) -> int:
        """Return an upper bound of the additional blocks for the known tokens of a sequence."""
        table_length = self.limits.blocks_for(seq.num_tokens)
        return sum(
            max(0, min(table_length - table.num_holes, most) - table.num_held)
            for table, most in zip(seq.tables, self.limits.max_held_blocks, strict=True)
        )

    def publish(self, seq: Sequence) -> None:
        """Publish the blocks that are full and will not be written again (computed or loaded)."""
        if not self.limits.enable_prefix_caching:
            return
        num_full = seq.num_computed_tokens // self.limits.block_size
        hashes = seq.block_hashes(self.limits.block_size)
        for number, table in enumerate(seq.tables):
            for index in range(table.num_published, num_full):
                self.pool.publish(table.block_ids[index], hashes[index], number)
            table.num_published = max(table.num_published, num_full)

    # -- release --

    def release(self, seq: Sequence) -> None:
        """Free all blocks of a sequence."""
        for table in seq.tables:
            self.pool.release(table.held)
        seq.tables = ()
