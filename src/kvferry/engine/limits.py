"""What a scheduler must respect: the sizes of cache, model and batch. Plain data, fixed at start."""

from dataclasses import dataclass

from kvferry.types import FailurePolicy

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    num_blocks: int
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

    @property
    def max_total_tokens(self) -> int:
        """A sequence ends when it has this many tokens: the model's limit, or what the whole cache holds and one (the last needs no KV)."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
