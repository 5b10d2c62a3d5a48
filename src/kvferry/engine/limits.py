"""What a scheduler must respect: the sizes of cache, model and batch. Plain data, fixed at start."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from kvferry.connectors.contract import KVCacheGroup
from kvferry.types import FailurePolicy

__all__ = ["SchedulerLimits"]


@dataclass(frozen=True)  # without slots, for the cached properties: they are asked for at every token
class SchedulerLimits:
    num_blocks: int
    """Of all groups together."""
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    seed: int = 0
    load_failure_policy: FailurePolicy = FailurePolicy.FAIL
    groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(()),)

    @cached_property
    def max_total_tokens(self) -> int:
        """A sequence ends when it has this many tokens: the model's limit, or what the whole cache holds and one (the last needs no KV)."""
        places = range(self.blocks_for(self.max_model_len) + 1)
        most = bisect_right(places, self.num_blocks, key=lambda count: sum(min(count, held) for held in self.max_held_blocks)) - 1
        return min(self.max_model_len, most * self.block_size + 1)

    @cached_property
    def max_held_blocks(self) -> tuple[int, ...]:
        """Per group, the blocks that one sequence can hold, however long it is: during a step, all that its first token looks at and all
        that the step computes."""
        return tuple(self._max_held_blocks(group) for group in self.groups)

    @cached_property
    def windowed_groups(self) -> tuple[tuple[int, KVCacheGroup], ...]:
        """Those whose attention does not look back for ever, with their numbers."""
        return tuple((number, group) for number, group in enumerate(self.groups) if group.has_local_attention)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_needed(self, group: KVCacheGroup, position: int) -> int:
        """The first block that a token from `position` on looks at."""
        return group.first_visible_token(position) // self.block_size

    def _max_held_blocks(self, group: KVCacheGroup) -> int:
        whole = self.blocks_for(self.max_model_len)
        reach = group.attention_chunk or group.sliding_window
        if reach is None or not self.enable_chunked_prefill:
            return whole
        span = reach - 1 + self.max_num_batched_tokens
        # At worst the span begins with the last token of a block.
        return min(whole, self.blocks_for(span - 1) + 1)
