"""Sampling: chooses the next token from logits.

Pure: equal logits, parameters, seed and index give equal tokens, regardless of the rest of the
batch.

The order is vLLM's: log-probabilities are computed from the raw logits; then banned tokens are
removed, temperature divides, top-k cuts, top-p cuts, and one uniform number chooses.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvferry.engine.messages import SampledToken, SamplingParams, SequenceSlice

Logits = npt.NDArray[np.float64]

GREEDY_BELOW_TEMPERATURE = 1e-5


def choose_tokens(logits: Logits, slices: Sequence[SequenceSlice]) -> dict[str, SampledToken]:
    """Return one token per row of `logits`, by request id."""
    chosen = {}
    for row, part in zip(logits, slices, strict=True):
        assert part.sampling is not None, part.request_id
        draw = uniform(part.draw_seed, part.draw_index)
        chosen[part.request_id] = choose(row, part.sampling, part.banned_token_ids, draw)
    return chosen


def choose(
    logits: Logits, sampling: SamplingParams, banned_token_ids: Sequence[int], draw: float
) -> SampledToken:
    """Choose a token; `logits` is one row and `draw` is in [0, 1)."""
    allowed = _without(logits, banned_token_ids)
    token = int(np.argmax(allowed))
    if sampling.temperature >= GREEDY_BELOW_TEMPERATURE:
        token = _draw_token(allowed, sampling, draw)
    if sampling.logprobs is None:
        return SampledToken(token)
    logprobs = _log_softmax(logits)
    return SampledToken(token, float(logprobs[token]), _top(logprobs, sampling.logprobs))


def uniform(seed: int, index: int) -> float:
    """Return number `index` of the random stream `seed`, in [0, 1).

    Earlier numbers need not be computed.
    """
    digest = blake2b(struct.pack("<QQ", seed & (2**64 - 1), index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _without(logits: Logits, banned_token_ids: Sequence[int]) -> Logits:
    # Clients name stop tokens, so the list may contain ids outside the vocabulary; such ids cannot
    # be sampled anyway.
    banned = [token for token in banned_token_ids if 0 <= token < len(logits)]
    if not banned:
        return logits
    allowed = logits.copy()
    allowed[banned] = -np.inf
    return allowed


def _draw_token(logits: Logits, sampling: SamplingParams, draw: float) -> int:
    """Choose a token by walking the cumulative probabilities in order of token id.

    With this order, a rounding difference moves a boundary slightly instead of exchanging two
    tokens.
    """
    scaled = (logits - logits.max()) / sampling.temperature
    is_kept = np.isfinite(scaled)
    if 0 < sampling.top_k < len(scaled):
        is_kept &= _is_among_top(scaled, sampling.top_k)
    weights = np.where(is_kept, np.exp(scaled), 0.0)
    if sampling.top_p < 1.0:
        weights = _nucleus(weights, sampling.top_p)
    cumulative = np.cumsum(weights)
    if not 0.0 < cumulative[-1] < np.inf:
        return int(np.argmax(logits))
    # The first token whose cumulative weight exceeds the mark has a weight above 0. Rounding must
    # not move the mark to the very end.
    mark = min(draw * cumulative[-1], np.nextafter(cumulative[-1], 0.0))
    return int(np.searchsorted(cumulative, mark, side="right"))


def _is_among_top(values: Logits, count: int) -> npt.NDArray[np.bool_]:
    """Mark exactly `count` of the largest values; among equal values the lower ids win."""
    threshold = np.partition(values, -count)[-count]
    is_kept: npt.NDArray[np.bool_] = values > threshold
    ties = np.flatnonzero(values == threshold)
    is_kept[ties[: count - int(is_kept.sum())]] = True
    return is_kept


def _nucleus(weights: Logits, top_p: float) -> Logits:
    """Keep the smallest set of most likely tokens with at least `top_p` of the weight.

    At least one token is kept.
    """
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    kept = order[: max(int(np.count_nonzero(before < top_p * weights.sum())), 1)]
    result = np.zeros_like(weights)
    result[kept] = weights[kept]
    return result


def _log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max()
    result: Logits = shifted - np.log(np.exp(shifted).sum())
    return result


def _top(logprobs: Logits, count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` most likely tokens, in order; the chosen token may be missing."""
    if count <= 0:
        return ()
    ids = np.flatnonzero(_is_among_top(logprobs, min(count, len(logprobs))))
    ordered = sorted(ids.tolist(), key=lambda token: (-logprobs[token], token))
    return tuple((token, float(logprobs[token])) for token in ordered)
