"""What a scheduler must respect: the sizes of cache, model and batch. Plain data, fixed at
start.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from kvferry.connectors.contract import KVCacheGroup, RequestStatus
from kvferry.engine.messages import AddRequest
from kvferry.engine.sequence import Sequence
from kvferry.types import FailurePolicy

__all__ = [
    "FINISH_REASONS",
    "SchedulerLimits",
    "Stop",
    "banned_token_ids",
    "choose_draw_seed",
    "find_length_error",
    "find_stop",
    "find_validation_error",
]


@dataclass(
    frozen=True
)  # without slots, for the cached properties: they are asked for at every token
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
        """A sequence ends when it has this many tokens: the model's limit, or what the whole cache
        holds and one (the last needs no KV).
        """
        places = range(self.blocks_for(self.max_model_len) + 1)
        most = (
            bisect_right(
                places,
                self.num_blocks,
                key=lambda count: sum(min(count, held) for held in self.max_held_blocks),
            )
            - 1
        )
        return min(self.max_model_len, most * self.block_size + 1)

    @cached_property
    def max_held_blocks(self) -> tuple[int, ...]:
        """Per group, the blocks that one sequence can hold, however long it is: during a step, all
        that its first token looks at and all that the step computes.
        """
        return tuple(self._max_held_blocks(group) for group in self.groups)

    @cached_property
    def windowed_groups(self) -> tuple[tuple[int, KVCacheGroup], ...]:
        """Those whose attention does not look back for ever, with their numbers."""
        return tuple(
            (number, group) for number, group in enumerate(self.groups) if group.has_local_attention
        )

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


# -------------------- intake --------------------
# Which requests can never be served, and why; and the random seed of those that can. Pure.


def find_validation_error(request: AddRequest, limits: SchedulerLimits) -> str | None:
    """A sentence when the request makes no sense to any engine of this model."""
    tokens = request.prompt_token_ids
    if not tokens:
        return "the prompt is empty; it must have at least one token"
    if min(tokens) < 0 or max(tokens) >= limits.vocab_size:
        return (
            f"the prompt has token ids outside of 0 to {limits.vocab_size - 1}, the model's "
            "vocabulary"
        )
    if request.sampling.max_tokens < 1:
        return f"max_tokens must be at least 1, got {request.sampling.max_tokens}"
    return None


def find_length_error(request: AddRequest, limits: SchedulerLimits) -> str | None:
    """A sentence when the prompt does not fit into this engine, however long it waited."""
    count, most = len(request.prompt_token_ids), limits.max_total_tokens - 1
    if count <= most:
        return None
    if limits.max_total_tokens == limits.max_model_len:
        return (
            f"the prompt has {count} tokens, the model's limit of {limits.max_model_len} leaves "
            f"room for {most}; shorten it"
        )
    return (
        f"the prompt has {count} tokens, the whole KV cache holds {most}; shorten it or start the "
        "engine with more blocks"
    )


def choose_draw_seed(request: AddRequest, engine_seed: int, arrival: int) -> int:
    """The request's own seed, or one that no other request of this engine has."""
    for seed in (request.draw_seed, request.sampling.seed):
        if seed is not None:
            return seed
    digest = blake2b(f"{engine_seed}/{arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


# -------------------- stopping -------------------- When a sequence ends by itself. Pure. Stop
# strings are the API's business: it sees text and aborts.


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class Stop:
    status: RequestStatus
    token_id: int | None = None
    """The requested stop token that ended the sequence; None for end of sequence and for
    lengths.
    """


def find_stop(seq: Sequence, limits: SchedulerLimits) -> Stop | None:
    """Whether the last token of a sequence ends it, and how. Of several reasons a stop token comes
    first.
    """
    sampling, last = seq.sampling, seq.token_ids[-1]
    if seq.num_output_tokens >= sampling.min_tokens:
        if last in sampling.stop_token_ids:
            return Stop(RequestStatus.FINISHED_STOPPED, last)
        if not sampling.ignore_eos and last in limits.eos_token_ids:
            return Stop(RequestStatus.FINISHED_STOPPED)
    if seq.num_output_tokens >= sampling.max_tokens or seq.num_tokens >= limits.max_total_tokens:
        return Stop(RequestStatus.FINISHED_LENGTH_CAPPED)
    return None


def banned_token_ids(seq: Sequence, limits: SchedulerLimits) -> tuple[int, ...]:
    """The tokens that would end a sequence, while it must not end."""
    if seq.num_output_tokens >= seq.sampling.min_tokens:
        return ()
    eos = () if seq.sampling.ignore_eos else limits.eos_token_ids
    return tuple(dict.fromkeys((*seq.sampling.stop_token_ids, *eos)))
