"""Which requests can never be served, and why; and the random seed of those that can. Pure."""

from hashlib import blake2b

from kvferry.engine.limits import SchedulerLimits
from kvferry.engine.messages import AddRequest

__all__ = ["choose_draw_seed", "find_length_error", "find_validation_error"]


def find_validation_error(request: AddRequest, limits: SchedulerLimits) -> str | None:
    """A sentence when the request makes no sense to any engine of this model."""
    tokens = request.prompt_token_ids
    if not tokens:
        return "the prompt is empty; it must have at least one token"
    if min(tokens) < 0 or max(tokens) >= limits.vocab_size:
        return f"the prompt has token ids outside of 0 to {limits.vocab_size - 1}, the model's vocabulary"
    if request.sampling.max_tokens < 1:
        return f"max_tokens must be at least 1, got {request.sampling.max_tokens}"
    return None


def find_length_error(request: AddRequest, limits: SchedulerLimits) -> str | None:
    """A sentence when the prompt does not fit into this engine, however long it waited."""
    count, most = len(request.prompt_token_ids), limits.max_total_tokens - 1
    if count <= most:
        return None
    if limits.max_total_tokens == limits.max_model_len:
        return f"the prompt has {count} tokens, the model's limit of {limits.max_model_len} leaves room for {most}; shorten it"
    return f"the prompt has {count} tokens, the whole KV cache holds {most}; shorten it or start the engine with more blocks"


def choose_draw_seed(request: AddRequest, engine_seed: int, arrival: int) -> int:
    """The request's own seed, or one that no other request of this engine has."""
    for seed in (request.draw_seed, request.sampling.seed):
        if seed is not None:
            return seed
    digest = blake2b(f"{engine_seed}/{arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
