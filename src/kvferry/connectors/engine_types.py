"""What a connector sees of an engine: requests, blocks, steps and the cache; and the messages
between the two sides of a connector. Plain data and protocols; `contract.py` has the calls.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, Protocol

from kvferry.protocol.tickets import NO_BLOCK

if TYPE_CHECKING:
    from kvferry.config import KVTransferConfig, SideChannelConfig
    from kvferry.connectors.stats import KVConnectorStats
    from kvferry.events import TransferTimes
    from kvferry.protocol.messages import Factor
    from kvferry.transports.base import CacheMemory, TransportKit


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
    """The tokens of one request that one step computes."""

    @property
    def request_id(self) -> str: ...
    @property
    def start(self) -> int:
        """How many tokens of the request earlier steps compute."""

    @property
    def num_written(self) -> int:
        """How many tokens' KV every rank has written; fewer than `start` if the engine schedules a
        step while another step runs.
        """

    @property
    def num_tokens(self) -> int:
        """How many tokens of the request this step computes."""

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        """The request's block table of each KV-cache group, from token 0."""


class Step(Protocol):
    """What a connector reads of a step that the engine has planned. The names are vLLM's, except
    `slices`.
    """

    @property
    def slices(self) -> Sequence[ScheduledSlice]: ...
    @property
    def preempted_req_ids(self) -> Collection[str]:
        """The requests whose blocks this step took away."""

    @property
    def total_num_scheduled_tokens(self) -> int: ...


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
        return [NO_BLOCK] * (num_blocks - 1) + [table[index] if index < len(table) else NO_BLOCK]

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
    optional_failures: set[str] = field(default_factory=set)
    """kvferry only: requests with a failed load that the engine computes whatever the failure
    policy says.
    """
    given_up_recving: dict[str, str] = field(default_factory=dict)
    """kvferry only: receives that will fail the request, with the reason, but whose blocks may
    still be written. `failed_recving` names the same requests later.
    """
    recving_times: "dict[str, list[TransferTimes]]" = field(default_factory=dict)
    """kvferry only: timings of receives that ended, one entry per rank that reports timings."""


@dataclass(slots=True)
class KVConnectorOutput(KVConnectorTransferResults):
    """The workers' report of one step, of one rank or aggregated over ranks."""

    invalid_block_ids: set[int] = field(default_factory=set)
    kv_connector_stats: "KVConnectorStats | None" = None
    kv_cache_events: Any = None
    kv_connector_worker_meta: KVConnectorWorkerMetadata | None = None
    expected_finished_count: int = 0
