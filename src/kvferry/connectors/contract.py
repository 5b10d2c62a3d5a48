"""The contract between an engine and a KV connector: `KVConnectorBase_V1`.

The names, call order and return values are those of vLLM 0.33, so that an engine written against
vLLM's or kvferry's base class can drive connectors of both. A connector has one instance per role:
one SCHEDULER in the process that schedules, one WORKER in each tensor-parallel rank. Per step an
engine calls, in this order:

    scheduler  on_new_request* -> get_num_new_matched_tokens -> update_state_after_alloc
               -> build_connector_meta
    worker     handle_preemptions -> bind_connector_metadata -> start_load_kv
               -> (per layer: wait_for_layer_load, save_kv_layer) -> wait_for_save
               -> get_transfer_results -> get_kv_connector_stats -> clear_connector_metadata
    scheduler  update_connector_output (aggregated over ranks) -> request_finished

Steps without tokens make the same calls. If vLLM drafts tokens, `wait_for_save` follows after the
results, because the drafter's layers run between them. Members that vLLM does not have are marked
"kvferry only" and have a default.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from kvferry.protocol.tickets import HOLE

if TYPE_CHECKING:
    from kvferry.config import KVTransferConfig, SideChannelConfig
    from kvferry.connectors.stats import KVConnectorPromMetrics, KVConnectorStats
    from kvferry.events import TransferTimes
    from kvferry.protocol.messages import Factor
    from kvferry.transports.base import CacheMemory, TransportKit

__all__ = [
    "ConnectorConfig",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "KVTensor",
    "ModelIdentity",
    "ParallelConfig",
    "Request",
    "RequestStatus",
    "ScheduledSlice",
    "StateLayout",
    "SupportsHMA",
    "supports_hma",
]


class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1


class RequestStatus(IntEnum):
    """The states of a request in an engine; every state after PREEMPTED is finished."""

    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED


class Request(Protocol):
    """The fields of an engine's request that a connector may read."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def status(self) -> RequestStatus: ...
    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """The parameters as the client or router sent them: untrusted."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The token ids of the prompt and the output."""

    @property
    def cache_salt(self) -> str | None:
        """Everything besides the token ids that decides the KV (LoRA, multimodal hashes, a tenant's
        salt); empty for nothing. None: the engine cannot tell, so the KV must not be exchanged.
        """

    @property
    def family(self) -> str | None:
        """kvferry only: equal in all requests that answer one client request together. Only one
        request's parameters reach the client.
        """


class KVCacheBlocks(Protocol):
    """The blocks a request holds, per KV-cache group."""

    def get_block_ids(self) -> tuple[list[int], ...]: ...


class ScheduledSlice(Protocol):
    """kvferry only: the tokens of one request that one step computes. `scheduler_output.slices`
    lists the slices of a step; `preempted_req_ids` and `total_num_scheduled_tokens` beside it mean
    the same as in vLLM.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def start(self) -> int:
        """How many tokens of the request earlier steps computed."""

    @property
    def num_tokens(self) -> int:
        """How many tokens of the request this step computes."""

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        """The request's block table of each KV-cache group, from token 0."""


class KVTensor(Protocol):
    """The part of a torch tensor's interface that a connector needs of one layer's cache. Dimension
    0 is the block.
    """

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def device(self) -> Any: ...
    def data_ptr(self) -> int: ...
    def stride(self, dim: int) -> int: ...
    def element_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The states of a group's layers. A state-space or linear-attention layer keeps one state per
    request, which each token replaces, instead of KV for each token.
    """

    block_size: int
    """The number of tokens that one entry of the engine's block table stands for. The block of the
    last computed token holds the state.
    """
    heads: Mapping[str, int]
    """The number of heads over all ranks, by which ranks divide a part of a layer's state. The
    group's `layer_names` name such parts.
    """


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share a block table, and how far back their attention looks: without limit, over
    a sliding window, or within chunks. The layers of a group with a `state` have no attention.
    """

    layer_names: tuple[str, ...]
    sliding_window: int | None = None
    attention_chunk: int | None = None
    state: StateLayout | None = None

    @property
    def has_local_attention(self) -> bool:
        return self.sliding_window is not None or self.attention_chunk is not None

    @property
    def is_state(self) -> bool:
        return self.state is not None

    def tokens_per_entry(self, block_size: int) -> int:
        """How many tokens one entry of the engine's block table stands for."""
        return block_size if self.state is None else self.state.block_size

    def block_list(self, table: Sequence[int], num_tokens: int, block_size: int) -> list[int]:
        """The blocks that hold the KV of the first `num_tokens` tokens, one entry per `block_size`
        tokens. The state after these tokens is in the last block; all others are holes.
        """
        num_blocks = -(-num_tokens // block_size)
        if self.state is None or not num_tokens:
            return list(table[:num_blocks])
        index = (num_tokens - 1) // self.state.block_size
        return [HOLE] * (num_blocks - 1) + [table[index] if index < len(table) else HOLE]

    def first_visible_token(self, position: int) -> int:
        """The first token that the token at `position` attends to. For a state, the token before
        `position`: the block of that token holds the state that `position` continues.
        """
        if self.state is not None:
            return max(0, position - 1)
        if self.attention_chunk is not None:
            return position // self.attention_chunk * self.attention_chunk
        return max(0, position - self.sliding_window + 1) if self.sliding_window is not None else 0


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The shape of one worker's cache."""

    num_blocks: int
    block_size: int
    groups: tuple[KVCacheGroup, ...]
    layout: str
    num_kv_heads: int
    """The number of KV heads held by this worker."""
    head_dim: int
    cache_dtype: str
    """The dtype as torch spells it, without the prefix: `float32`."""
    has_token_rows: bool = True
    """kvferry only: within a block, each token's bytes lie where `layout` says. False if the
    attention kernel packs the tokens in its own way.
    """
    hides_partial_loads: bool = False
    """kvferry only: the engine never shares a loaded block with another request if a sliding-window
    group may have loaded only a part of the block, and never reads the part that was not loaded.
    """
    keeps_last_token_window: bool = True
    """kvferry only: when a prompt finishes, the engine keeps every block that the prompt's last
    token attends to, not only the blocks that the next token would attend to.
    """
    admits_second_load: bool = True
    """kvferry only: a request whose load has failed may load again before it has run."""

    @property
    def has_states(self) -> bool:
        return any(group.is_state for group in self.groups)

    @property
    def leaves_last_token(self) -> bool:
        """Whether a load must leave out the last token of a prompt, which the engine computes
        itself in any case.
        """
        return any(group.has_local_attention or group.is_state for group in self.groups)

    def block_lists(
        self, tables: Iterable[Sequence[int]], num_tokens: int
    ) -> tuple[list[int], ...]:
        """The blocks of each group that hold the KV of the first `num_tokens` tokens."""
        return tuple(
            group.block_list(table, num_tokens, self.block_size)
            for group, table in zip(self.groups, tables, strict=True)
        )


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    tp_size: int = 1
    tp_rank: int = 0


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The properties that decide whether the KV of two engines is interchangeable."""

    architecture: str
    weights: str
    """Hash of samples of every tensor; differs between revisions and quantisations."""
    num_layers: int
    total_kv_heads: int
    head_dim: int
    dtype: str
    cache_format: str = "kvferry"
    """The owner of the byte arrangement within a block: caches of equal shape from two attention
    kernels are not interchangeable.
    """
    settings: Mapping[str, "Factor"] = field(default_factory=dict)
    """Every other setting that changes the bytes of KV, by name (`handshake.named_factors`)."""


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Everything a connector is built from; an engine makes one per process."""

    kv_transfer: "KVTransferConfig"
    model: ModelIdentity
    parallel: ParallelConfig
    side_channel: "SideChannelConfig"
    secret: bytes
    epoch: str
    """Random id of this incarnation, made once per engine start and equal in all processes of the
    engine.
    """
    kit: "TransportKit"
    cache_memory: "CacheMemory | None" = None
    """WORKER only: the buffer that holds the cache tensors, if the kit allocated the buffer."""
    max_model_len: int = 0
    publishes_kv_events: bool = False
    """Whether the engine publishes what `take_events` returns."""


class KVConnectorMetadata:
    """The scheduler's message to the workers for one step. Picklable and small."""


class KVConnectorHandshakeMetadata:
    """A worker's message to its own scheduler, sent once; the side channel serves the contents to
    peers.
    """


class KVConnectorWorkerMetadata(ABC):
    """A worker's message to the scheduler, sent each step."""

    @abstractmethod
    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "KVConnectorWorkerMetadata": ...


@dataclass(slots=True)
class KVConnectorTransferResults:
    """What one rank reports of its transfers. Every failed receive is in `finished_recving` too."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    failure_reasons: dict[str, str] = field(default_factory=dict)
    """kvferry only: one sentence per failed receive."""
    given_up_recving: dict[str, str] = field(default_factory=dict)
    """kvferry only: receives that will fail, with the reason, but whose blocks may still be
    written. `failed_recving` names the same requests later.
    """
    recving_times: "dict[str, list[TransferTimes]]" = field(default_factory=dict)
    """kvferry only: timings of receives that ended, one entry per rank that reports timings."""


@dataclass(slots=True)
class KVConnectorOutput:
    """The workers' report of one step, of one rank or aggregated over ranks."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    failure_reasons: dict[str, str] = field(default_factory=dict)
    given_up_recving: dict[str, str] = field(default_factory=dict)
    recving_times: "dict[str, list[TransferTimes]]" = field(default_factory=dict)
    invalid_block_ids: set[int] = field(default_factory=set)
    kv_connector_stats: "KVConnectorStats | None" = None
    kv_cache_events: Any = None
    kv_connector_worker_meta: KVConnectorWorkerMetadata | None = None
    expected_finished_count: int = 0

    @property
    def is_empty(self) -> bool:
        return not (
            self.finished_sending
            or self.finished_recving
            or self.failed_recving
            or self.given_up_recving
            or self.invalid_block_ids
            or self.kv_connector_stats
            or self.kv_cache_events
            or self.kv_connector_worker_meta
            or self.expected_finished_count
        )


class SupportsHMA(ABC):
    """The mark of connectors that understand several KV-cache groups."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]: ...


def supports_hma(connector: object) -> bool:
    """Whether a connector, or a connector class, accepts several KV-cache groups."""
    return (
        issubclass(connector, SupportsHMA)
        if isinstance(connector, type)
        else isinstance(connector, SupportsHMA)
    )


class KVConnectorBase_V1(ABC):
    """One connector in one role. The module docstring gives the order of calls."""

    honours_token_range: ClassVar[bool] = False
    """kvferry only. The connector loads exactly the tokens that `update_state_after_alloc` counts,
    from the `num_computed_tokens` of the last lookup on, even while another connector still loads
    the tokens before or after them.
    """
    loads_are_optional: ClassVar[bool] = False
    """kvferry only. Loads only save computation: if one fails, the engine computes the request
    whatever the failure policy says.
    """
    provides_dummy_kv: bool = False
    """kvferry only. The connector fills blocks with values that no model computed; no other
    connector may save them, and the engine must not share them between requests.
    """
    moves_states: ClassVar[bool] = False
    """kvferry only. The connector supports groups whose layers keep a state (`StateLayout`)."""
    opens_side_channel: ClassVar[bool] = False
    """kvferry only. The connector opens the engine's side channel, so an engine has at most one
    such connector.
    """

    def __init__(
        self, config: ConnectorConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        self._config = config
        self._role = role
        self._kv_cache_config = kv_cache_config
        self._connector_metadata: KVConnectorMetadata | None = None

    @property
    def role(self) -> KVConnectorRole:
        return self._role

    # -- both roles --

    def shutdown(self) -> None:
        """Stop all threads and release all resources. Idempotent."""
        return None

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        """kvferry only. Set the callback that asks the engine to step soon and collect results. Any
        thread may call `wake`.
        """
        return None

    @property
    def needs_polling(self) -> bool:
        """kvferry only. Whether the connector never calls the function of `set_wakeup`, so that the
        engine must step in order to learn of finished transfers.
        """
        return type(self).set_wakeup is KVConnectorBase_V1.set_wakeup

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        """The stats since the last call."""
        return None

    # -- scheduler --

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether the engine must drop a preempted request's output in flight because the request's
        blocks are to be transferred.
        """
        return self._config.kv_transfer.is_kv_producer

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return False

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Called once, when the engine's block manager exists."""
        self.bind_gpu_block_pool(getattr(manager, "block_pool", None))

    def bind_gpu_block_pool(self, pool: Any) -> None:
        return None

    def on_new_request(self, request: Request) -> None:
        """A request has entered the engine but is not scheduled yet. Called once per request."""
        return None

    def expect_request(self, request: Request) -> None:
        """kvferry only. A request has entered the engine while the version of the weights is
        unknown. `on_new_request` follows when the version is known or the request ends.
        """
        return None

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond `num_computed_tokens` can be loaded, and whether the load happens
        between steps.

        None: ask again later. Called at every scheduling attempt, so the call must be safe to
        repeat. An asynchronous answer is > 0.
        """

    def get_loaded_kv_cache_group_ids(self, request: Request) -> set[int] | None:
        """The KV-cache groups that a load fills; None for all groups."""
        return None

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The engine has allocated the blocks of a request. Called for every admitted request, with
        0 external tokens too, and again (with 0) after an asynchronous load.
        """

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> Mapping[str, int]:
        return {}

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Build this step's message to the workers and reset all per-step state."""

    def has_pending_block_frees(self) -> bool:
        """Whether blocks will be freed soon, so that waiting is better than preempting."""
        return False

    def reclaim_blocks(self, num_blocks: int) -> None:
        """kvferry only. The engine lacks `num_blocks` blocks for a request: evict retained blocks
        that no peer has asked for. Called before `build_connector_meta`, at every attempt that
        fails. `has_pending_block_frees` reports whether blocks are on the way back.
        """
        return None

    def is_load_optional(self, request_id: str) -> bool:
        """kvferry only. Whether the engine must compute a request whose load has failed, regardless
        of the failure policy.
        """
        return self.loads_are_optional

    def has_pending_push_work(self) -> bool:
        """Whether the engine must take a step although no request is scheduled."""
        return False

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        return None

    def take_events(self) -> Iterable[Any]:
        return ()

    def register_finished_partial_tail(
        self, request: Request, block_ids: tuple[list[int], ...], tails: Any
    ) -> bool:
        return False

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Called once per request, for every way to finish. (True, …): the engine keeps the blocks
        until `finished_sending` names the request.
        """
        return False, None

    def request_abandoned(self, request_id: str) -> None:
        """kvferry only. The parameters of a finished request reached no client, so no peer will
        fetch the request's blocks.
        """
        return None

    def get_finished_count(self) -> int | None:
        """How many ranks report each id; None for all ranks."""
        return None

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Accept the workers' handshake data by TP rank. Called after registration, and again after
        `restore_kv_caches`; may repeat what was accepted before.
        """
        return None

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The same handshake data keyed by (PP rank, TP rank)."""
        later = sorted(pp for pp, _ in metadata if pp > 0)
        if later:
            raise ValueError(
                f"{type(self).__name__} does not support pipeline parallelism, but got metadata of "
                f"pipeline rank {later[0]}; use tensor parallelism"
            )
        self.set_xfer_handshake_metadata({tp: value for (_, tp), value in metadata.items()})

    def reset_cache(self) -> bool | None:
        """Drop all cached KV. False if dropping failed."""
        return None

    def set_weights_version(self, version: str) -> None:
        """kvferry only. Exchange KV only with engines whose weights have this version."""
        return None

    # -- worker --

    def get_mem_pool_context(self) -> AbstractContextManager[None]:
        """The context in which the engine allocates its cache."""
        return nullcontext()

    def register_kv_caches(self, kv_caches: Mapping[str, KVTensor]) -> None:
        """Accept the cache tensors by layer name. Called once, before any transfer."""
        return None

    def unregister_kv_caches(self) -> None:
        """The memory of the caches is about to be freed, because the engine goes to sleep. No
        request holds blocks. Steps without tokens may follow before `restore_kv_caches`.
        Idempotent.
        """
        return None

    def restore_kv_caches(self) -> None:
        """The caches have memory again, at the same addresses and with undefined content.
        Idempotent.
        """
        return None

    def register_cross_layers_kv_cache(self, kv_cache: KVTensor, attn_backend: Any = None) -> None:
        """Called in place of `register_kv_caches` when all layers of a block lie together."""
        raise NotImplementedError(f"{type(self).__name__} does not support cross-layer caches")

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return False

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        return None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None

    def handle_preemptions(self, metadata: KVConnectorMetadata) -> None:
        return None

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        self._connector_metadata = metadata

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads. Never blocks."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None: ...

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    @abstractmethod
    def wait_for_save(self) -> None: ...

    def finish_forward(self) -> None:
        return None

    def reset_capture_state(self) -> None:
        return None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests that finished sending and receiving since the last call."""
        return None, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The results since the last call. Each rank reports each id once; failed receives also
        count as finished.
        """
        sending, recving = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(sending or set(), recving or set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def get_kv_connector_kv_cache_events(self) -> Any:
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return None

    # -- class methods --

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Whether `unregister_kv_caches` ends every use of the caches' memory."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, config: ConnectorConfig) -> str | None:
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        return False

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> "KVConnectorStats | None":
        return None

    @classmethod
    def build_prom_metrics(
        cls,
        config: ConnectorConfig,
        metric_types: Mapping[type, type],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> "KVConnectorPromMetrics | None":
        return None
