"""What crosses between scheduler and workers in one step, and between engine core and API process.

Plain data. A `StepPlan` holds all a worker needs, so workers keep no per-request state.
"""

from dataclasses import dataclass, field
from typing import Any

from kvferry.connectors.contract import KVConnectorMetadata, KVConnectorOutput

__all__ = ["SampledToken", "SamplingParams", "SequenceSlice", "StepPlan", "StepResult"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Checked where requests come in; engine code trusts it."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Alternatives reported per token; None: no logprobs at all, 0: only the chosen token's."""
    include_stop_str_in_output: bool = False


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's share of a step: compute `token_ids` at positions `start`, `start + 1`, … into its blocks."""

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[tuple[int, ...], ...]
    """The sequence's whole block table so far per KV-cache group, each from token 0 on and enough for `start + len(token_ids)` tokens;
    `HOLE` where a block was given back because no token from `start` on looks at it."""
    sampling: SamplingParams | None
    """None: these are not the last known tokens, nothing is sampled."""
    draw_seed: int = 0
    """Seed of this sequence's random stream."""
    draw_index: int = 0
    """How many tokens this sequence has generated: the same (seed, index) draws the same number, whatever the batch."""
    banned_token_ids: tuple[int, ...] = ()
    """Not to be chosen this time (end of sequence, while under `min_tokens`)."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    slices: tuple[SequenceSlice, ...] = ()
    finished_request_ids: frozenset[str] = frozenset()
    connector_metadata: KVConnectorMetadata | None = None


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class StepResult:
    tokens: dict[str, SampledToken] = field(default_factory=dict)
    """By request id, only from TP rank 0."""
    connector_output: KVConnectorOutput | None = None
    extra: Any = None
