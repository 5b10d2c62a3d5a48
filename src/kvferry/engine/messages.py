"""Messages between scheduler and workers, and between the engine core and the API process.

Plain data. A `StepPlan` holds everything that a worker needs for one step, so workers keep no state
per request.

    API -> core   AddRequest, AbortRequest, GetStatus, GetTransferRecords, Drain, Shutdown
    core -> API   CoreProgress (any number), then CoreReady or CoreFailed once, then
                  Outputs (one per step, a batch of RequestOutput), CoreStatus,
                  TransferRecordsReply, Remaining while draining,
                  and CoreFailed if the core dies with a reason
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.connectors.contract import KVConnectorMetadata, KVConnectorOutput
from kvferry.engine.model.config import SamplingDefaults
from kvferry.tracing.context import TraceContext
from kvferry.web.transfer_records import TransferRecord


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; the API checks the values, and engine code trusts them."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Sample from the k most likely tokens; 0 means no limit."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of alternatives per token; None: no logprobs, 0: only the chosen token's logprob."""
    include_stop_str_in_output: bool = False


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's share of a step: compute `token_ids` at the positions from `start` on."""

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[tuple[int, ...], ...]
    """The whole block table of the sequence per KV-cache group, from token 0 on.

    Each table has room for `start + len(token_ids)` tokens. `NO_BLOCK` marks a block that was freed
    because no token from `start` on attends to it.
    """
    sampling: SamplingParams | None
    """The sampling parameters; None if the next token is already known and need not be sampled."""
    draw_seed: int = 0
    """Seed of the random stream of this sequence."""
    draw_index: int = 0
    """Number of tokens that this sequence has generated.

    The same (seed, index) draws the same random number in every batch.
    """
    banned_token_ids: tuple[int, ...] = ()
    """Token ids that must not be chosen in this step (end of sequence, before `min_tokens`)."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_written(self) -> int:
        """The tokens whose KV is written before this step; the name is the contract's."""
        return self.start


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step, for all ranks."""

    step: int
    slices: tuple[SequenceSlice, ...] = ()
    finished_request_ids: frozenset[str] = frozenset()
    connector_metadata: KVConnectorMetadata | None = None
    preempted_req_ids: frozenset[str] = frozenset()
    """The requests whose blocks this step took away; the name is vLLM's."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(len(part.token_ids) for part in self.slices)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One generated token."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class StepResult:
    """What one rank did with a `StepPlan`."""

    tokens: dict[str, SampledToken] = field(default_factory=dict)
    """The sampled tokens by request id; only TP rank 0 returns any."""
    connector_output: KVConnectorOutput | None = None
    extra: Any = None


# -- API process and core --
# msgspec structs over one pipe.


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """One sequence to generate.

    For `n > 1` the API sends n requests in one `list` frame, with the ids `<id>-0`, `<id>-1`, …
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str = ""
    family: str | None = None
    """An id that all choices of one prompt share."""
    draw_seed: int | None = None
    """Seed of the random stream; None lets the engine choose a seed."""
    trace: TraceContext | None = None
    """The caller's span; None if the client sent no trace context."""


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """End a request without an output.

    For a finished request whose blocks wait for a peer, the message means that no peer will fetch
    the blocks. Unknown ids are ignored.
    """

    request_id: str


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    """Ask for a `CoreStatus` with the same nonce."""

    nonce: int


class GetTransferRecords(msgspec.Struct, frozen=True, tag=True):
    """Ask for a `TransferRecordsReply` with the same nonce."""

    nonce: int
    name: str = ""
    """A request id, in the client's or the engine's spelling; empty selects the newest requests."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Report the remaining work, now and after every change, because the engine is to end.

    The core also evicts all retained turns; nothing else changes in the core.
    """


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop the core."""

    pass


class CoreReady(msgspec.Struct, frozen=True, tag=True):
    """The core serves requests from now on."""

    max_model_len: int
    num_blocks: int
    block_size: int
    eos_token_ids: list[int]
    vocab_size: int
    engine_id: str = ""
    epoch: str = ""
    samples_first_tokens: bool = False
    """Whether the token that a prefill leg samples is the first token of the answer. It is not if
    the model has states (see `shorten_prefill_leg`).
    """
    sampling: SamplingDefaults = SamplingDefaults()


class CoreFailed(msgspec.Struct, frozen=True, tag=True):
    """The core cannot start or go on.

    `reason` is one sentence for the operator; `is_config` is True when a setting is wrong.
    """

    reason: str
    is_config: bool = False


class CoreProgress(msgspec.Struct, frozen=True, tag=True):
    """The stage of the start that the core has reached, to be shown to the operator."""

    stage: str


class RequestOutput(msgspec.Struct, frozen=True):
    """New tokens of one request, and the reason when the request has ended."""

    request_id: str
    tokens: list[SampledToken] = []
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error` on the last output of a request; None before."""
    stop_reason: int | None = None
    """The stop token id that ended the request, if a stop token did."""
    error: str | None = None
    """The cause as one sentence, when `finish_reason` is `error`."""
    error_status: int = 500
    kv_transfer_params: dict[str, Any] | None = None
    num_cached_tokens: int = 0
    """Number of prompt tokens that were not computed here (local prefix or remote KV)."""


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """The outputs of one step, or of requests that were refused between steps."""

    outputs: list[RequestOutput]


class TransferSummary(msgspec.Struct, frozen=True):
    """Totals of one transport since start, summed over ranks."""

    transport: str
    transfers: int = 0
    total_bytes: int = 0
    seconds: float = 0.0
    segments: int = 0
    planned_segments: int = 0


class CoreStatus(msgspec.Struct, frozen=True, tag=True):
    """A snapshot of the core for /metrics and for `assert_quiescent`."""

    nonce: int
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_remote_kvs: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Blocks held by a request or a lease; cached blocks without a holder do not count."""
    num_delayed_frees: int = 0
    """Number of finished requests whose blocks a peer may still read or a load may still write."""
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prompt_tokens_by_source: dict[str, int] = {}
    """Prompt tokens by `local_compute`, `local_cache_hit` and `external_kv_transfer`."""
    preemptions_total: int = 0
    requests_finished_by_reason: dict[str, int] = {}
    transfers: list[TransferSummary] = []
    connector_stats: dict[str, Any] = {}
    """The connector's own statistics since start, as returned by its `to_dict`."""
    device_bytes: int = 0
    """GPU memory that torch holds for rank 0; 0 on CPUs."""
    device_used_bytes: int = 0
    """Memory of the same GPU that all processes together use."""


class TransferRecordsReply(msgspec.Struct, frozen=True, tag=True):
    """The transfer records that a `GetTransferRecords` asked for."""

    nonce: int
    records: list[TransferRecord] = []


class Remaining(msgspec.Struct, frozen=True, tag=True):
    """The remaining work of a draining engine.

    The core sends this message before the outputs of the same step, so a client that has seen a
    request end already knows how many leases and blocks the request left behind.
    """

    num_requests: int = 0
    """Number of requests that are running, queued or loading."""
    num_leases: int = 0
    """Number of finished requests whose blocks a peer may still read or a load may still write."""
    num_blocks: int = 0
    """Number of blocks that the requests and leases hold."""

    @property
    def is_drained(self) -> bool:
        return not (self.num_requests or self.num_leases)


ToCore = list[AddRequest | AbortRequest | GetStatus | GetTransferRecords | Drain | Shutdown]
"""One frame is a batch of messages; its requests enter the engine before the next step."""

FromCore = (
    CoreProgress | CoreReady | CoreFailed | Outputs | CoreStatus | TransferRecordsReply | Remaining
)
