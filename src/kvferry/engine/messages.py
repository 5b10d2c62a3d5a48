"""What crosses between scheduler and workers in one step, and between engine core and API process.

Plain data. A `StepPlan` holds all a worker needs, so workers keep no per-request state.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.connectors.contract import KVConnectorMetadata, KVConnectorOutput
from kvferry.web.transfer_records import TransferRecord

__all__ = [
    "AbortRequest",
    "AddRequest",
    "CoreFailed",
    "CoreProgress",
    "CoreReady",
    "CoreStatus",
    "Drain",
    "FromCore",
    "GetStatus",
    "GetTransferRecords",
    "Outputs",
    "Remaining",
    "RequestOutput",
    "SampledToken",
    "SamplingParams",
    "SequenceSlice",
    "Shutdown",
    "StepPlan",
    "StepResult",
    "ToCore",
    "TransferRecordsReply",
    "TransferSummary",
]


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
    """One sequence's share of a step: compute `token_ids` at positions `start`, `start + 1`, … into
    its blocks.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[tuple[int, ...], ...]
    """The sequence's whole block table so far per KV-cache group, each from token 0 on and enough
    for `start + len(token_ids)` tokens; `HOLE` where a block was given back because no token from
    `start` on looks at it.
    """
    sampling: SamplingParams | None
    """None: these are not the last known tokens, nothing is sampled."""
    draw_seed: int = 0
    """Seed of this sequence's random stream."""
    draw_index: int = 0
    """How many tokens this sequence has generated: the same (seed, index) draws the same number,
    whatever the batch.
    """
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


# -------------------- messages --------------------
# What the API process and the engine core say to each other, as msgspec structs over one pipe.
#
# API -> core: `AddRequest`, `AbortRequest`, `GetStatus`, `GetTransferRecords`, `Drain`, `Shutdown`. Core -> API: `CoreProgress`*, `CoreReady` or
# `CoreFailed` once, then `RequestOutput`s in batches (one `Outputs` per step), `CoreStatus`, `TransferRecordsReply`, `Remaining` once it drains, and
# `CoreFailed` if the core dies with a reason.


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """One sequence to generate. For `n > 1` the API sends n of these, in one `list` frame, ids
    `<id>-0`, `<id>-1`, …
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str = ""
    family: str | None = None
    """Equal in the choices of one prompt."""
    draw_seed: int | None = None
    """Seed of the random stream; None: the engine picks one."""


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """Ends a request without an output. For one that has finished, and whose blocks wait for a
    peer: nobody will come for them.

    Unknown ids are ignored.
    """

    request_id: str


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    nonce: int


class GetTransferRecords(msgspec.Struct, frozen=True, tag=True):
    nonce: int
    name: str = ""
    """A request's id, as its client sent it or as the engine has it; empty: the newest, whosever
    they are.
    """


class Drain(msgspec.Struct, frozen=True, tag=True):
    """The engine is to end once nobody needs it: say what is left, now and whenever that changes.
    Nothing else changes in the core.
    """


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


class CoreReady(msgspec.Struct, frozen=True, tag=True):
    max_model_len: int
    num_blocks: int
    block_size: int
    eos_token_ids: list[int]
    vocab_size: int
    engine_id: str = ""
    epoch: str = ""


class CoreFailed(msgspec.Struct, frozen=True, tag=True):
    """The core cannot start or go on. `reason` is one sentence for the operator; `is_config` when a
    setting is to blame.
    """

    reason: str
    is_config: bool = False


class CoreProgress(msgspec.Struct, frozen=True, tag=True):
    """What the core is doing on its way to `CoreReady`, for people who wait."""

    stage: str


class RequestOutput(msgspec.Struct, frozen=True):
    request_id: str
    tokens: list[SampledToken] = []
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error` on the last output of a request; None before."""
    stop_reason: int | None = None
    """The stop token id, when one ended it."""
    error: str | None = None
    """Why, when finish_reason is `error`."""
    error_status: int = 500
    kv_transfer_params: dict[str, Any] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed here (local prefix or remote KV)."""


class Outputs(msgspec.Struct, frozen=True, tag=True):
    outputs: list[RequestOutput]


class TransferSummary(msgspec.Struct, frozen=True):
    """What one transport has carried so far, summed over ranks."""

    transport: str
    transfers: int = 0
    total_bytes: int = 0
    seconds: float = 0.0
    segments: int = 0
    planned_segments: int = 0


class CoreStatus(msgspec.Struct, frozen=True, tag=True):
    """A snapshot for /metrics and for `assert_quiescent`."""

    nonce: int
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_remote_kvs: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Blocks held by a request or a lease; cached but unheld blocks are not in use."""
    num_delayed_frees: int = 0
    """Finished requests whose blocks a peer may still read."""
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prompt_tokens_by_source: dict[str, int] = {}
    """`local_compute`, `local_cache_hit`, `external_kv_transfer`."""
    preemptions_total: int = 0
    requests_finished_by_reason: dict[str, int] = {}
    transfers: list[TransferSummary] = []
    connector_stats: dict[str, Any] = {}
    """The connector's own stats since start, as its `to_dict` gives them."""
    device_bytes: int = 0
    """What rank 0 holds of its GPU's memory by way of torch; 0 on CPUs."""
    device_used_bytes: int = 0
    """What all processes together use of that GPU."""


class TransferRecordsReply(msgspec.Struct, frozen=True, tag=True):
    nonce: int
    records: list[TransferRecord] = []


class Remaining(msgspec.Struct, frozen=True, tag=True):
    """Who still needs a draining engine. Sent before the outputs of the same step: whoever has seen
    a request end knows what it left.
    """

    num_requests: int = 0
    """Running, queued or loading."""
    num_leases: int = 0
    """Finished requests whose blocks a peer may still read, or a load may still write."""
    num_blocks: int = 0
    """Blocks that either of them hold."""

    @property
    def is_drained(self) -> bool:
        return not (self.num_requests or self.num_leases)


ToCore = list[AddRequest | AbortRequest | GetStatus | GetTransferRecords | Drain | Shutdown]
"""One frame holds a batch; requests in one frame enter the engine before its next step."""

FromCore = (
    CoreProgress | CoreReady | CoreFailed | Outputs | CoreStatus | TransferRecordsReply | Remaining
)
