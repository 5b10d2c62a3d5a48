"""The limits of a scheduler (sizes of cache, model and batch), and checks of requests.

Pure. `SchedulerLimits` is plain data, fixed at start. The functions decide which requests can never
be served, which random seed a request gets, and when a sequence ends.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b

import msgspec

from kvferry.connectors.contract import KVCacheGroup, RequestStatus
from kvferry.connectors.nixl.params import PrefillForPeer, read_params
from kvferry.engine.messages import AddRequest
from kvferry.engine.sequence import Sequence
from kvferry.types import FailurePolicy


@dataclass(
    frozen=True
)  # no slots: cached_property needs a __dict__, and the scheduler reads the properties per token
class SchedulerLimits:
    """Sizes of cache, model and batch that the scheduler must respect."""

    num_blocks: int
    """Number of blocks in the pool that all groups share."""
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
    serves_peers: bool = False
    """Whether the engine holds the KV of prefill legs for peers."""

    @cached_property
    def max_total_tokens(self) -> int:
        """The number of tokens at which a sequence ends.

        The minimum of the model's limit and the capacity of the whole cache plus one token: the
        last token needs no KV.
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
        """The largest number of blocks per group that one sequence can hold at once.

        During a step a sequence holds the blocks that the step's first token attends to and the
        blocks that the step computes.
        """
        return tuple(self._max_held_blocks(group) for group in self.groups)

    @cached_property
    def has_states(self) -> bool:
        return any(group.is_state for group in self.groups)

    @cached_property
    def windowed_groups(self) -> tuple[tuple[int, KVCacheGroup], ...]:
        """The groups with local attention (a sliding window or chunks), each with its index."""
        return tuple(
            (number, group) for number, group in enumerate(self.groups) if group.has_local_attention
        )

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table_length(self, group: KVCacheGroup, num_tokens: int) -> int:
        """Return how many entries the block table of a group has for `num_tokens` tokens."""
        return -(-num_tokens // group.tokens_per_entry(self.block_size))

    def first_needed(self, group: KVCacheGroup, position: int) -> int:
        """Return the index of the first block that a token at or after `position` attends to."""
        return group.first_visible_token(position) // group.tokens_per_entry(self.block_size)

    def _max_held_blocks(self, group: KVCacheGroup) -> int:
        whole = self.table_length(group, self.max_model_len)
        reach = group.attention_chunk or group.sliding_window
        if reach is None or not self.enable_chunked_prefill:
            return whole
        span = reach - 1 + self.max_num_batched_tokens
        # In the worst case the span begins with the last token of a block.
        return min(whole, self.blocks_for(span - 1) + 1)


# -- intake --
# Checks for requests that can never be served, and the random seed of the accepted requests.


def find_validation_error(request: AddRequest, limits: SchedulerLimits) -> str | None:
    """Return why no engine of this model can serve the request, as one sentence, or None."""
    tokens = request.prompt_token_ids
    if not tokens:
        return "the prompt is empty; it must have at least one token"
    if min(tokens) < 0 or max(tokens) >= limits.vocab_size:
        return (
            "the prompt has token ids outside of the model's vocabulary, 0 to "
            f"{limits.vocab_size - 1}"
        )
    if request.sampling.max_tokens < 1:
        return f"max_tokens must be at least 1, got {request.sampling.max_tokens}"
    return None


def find_length_error(request: AddRequest, limits: SchedulerLimits) -> str | None:
    """Return why the prompt can never fit into this engine, as one sentence, or None."""
    count, most = len(request.prompt_token_ids), limits.max_total_tokens - 1
    if count <= most:
        return None
    if limits.max_total_tokens == limits.max_model_len:
        return (
            f"the prompt has {count} tokens, but the model's limit of {limits.max_model_len} "
            f"leaves room for {most}; shorten it"
        )
    return (
        f"the prompt has {count} tokens, but the whole KV cache holds {most}; shorten it or start "
        "the engine with more blocks"
    )


def shorten_prefill_leg(request: AddRequest, limits: SchedulerLimits) -> AddRequest:
    """Return the request as this engine computes it.

    With states, a prefill leg computes all tokens of the prompt but the last, and generates one
    token. The decode side computes the last token of a prompt itself, because it needs the token's
    logits. It continues from the states after the token before, and no token can be taken back out
    of a state.
    """
    prompt = request.prompt_token_ids
    if (
        not (limits.has_states and limits.serves_peers)
        or len(prompt) < 2
        or not isinstance(read_params(request.kv_transfer_params), PrefillForPeer)
    ):
        return request
    sampling = replace(request.sampling, max_tokens=1)
    return msgspec.structs.replace(request, prompt_token_ids=prompt[:-1], sampling=sampling)


def choose_draw_seed(request: AddRequest, engine_seed: int, arrival: int) -> int:
    """Return the request's own seed, or a seed that no other request of this engine has."""
    for seed in (request.draw_seed, request.sampling.seed):
        if seed is not None:
            return seed
    digest = blake2b(f"{engine_seed}/{arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


# -- stopping --
# When a sequence ends by itself. Stop strings are handled by the API, which sees the text and
# aborts the request.


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a sequence ends."""

    status: RequestStatus
    token_id: int | None = None
    """The requested stop token that ended the sequence; None for any other reason."""


def find_stop(seq: Sequence, limits: SchedulerLimits) -> Stop | None:
    """Return how the last token ends the sequence, or None if the sequence goes on.

    If several reasons apply, a stop token takes precedence.
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
    """Return the end and stop tokens, which must not be sampled before `min_tokens`."""
    if seq.num_output_tokens >= seq.sampling.min_tokens:
        return ()
    eos = () if seq.sampling.ignore_eos else limits.eos_token_ids
    return tuple(dict.fromkeys((*seq.sampling.stop_token_ids, *eos)))
