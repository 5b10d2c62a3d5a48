"""The contract between an engine and a KV connector: its two sides (`sides.py`), what they see of
the engine (`engine_types.py`), and both sides as one class, `KVConnectorBase_V1`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from kvferry.connectors.engine_types import (
    ConnectorConfig,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheGroup,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    KVTensor,
    ModelIdentity,
    ParallelConfig,
    Request,
    RequestStatus,
    ScheduledSlice,
    StateLayout,
    Step,
)
from kvferry.connectors.sides import BlockTables, ConnectorDescription, SchedulerSide, WorkerSide
from kvferry.errors import LocalProtocolError

if TYPE_CHECKING:
    from kvferry.connectors.stats import KVConnectorPromMetrics, KVConnectorStats

__all__ = [
    "BlockTables",
    "ConnectorConfig",
    "ConnectorDescription",
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
    "SchedulerSide",
    "StateLayout",
    "Step",
    "SupportsHMA",
    "WorkerSide",
    "supports_hma",
]


class SupportsHMA(ABC):
    """The mark of connector classes that understand several KV-cache groups."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: Request, block_ids: BlockTables
    ) -> tuple[bool, dict[str, Any] | None]: ...


def supports_hma(connector: object) -> bool:
    """Whether a connector, or a connector class, accepts several KV-cache groups."""
    return (
        issubclass(connector, SupportsHMA)
        if isinstance(connector, type)
        else isinstance(connector, SupportsHMA)
    )


class KVConnectorBase_V1(SchedulerSide, WorkerSide, ABC):
    """Both sides as one class, like vLLM's base class. Each role has an instance of its own."""

    # The facts of `ConnectorDescription`; kvferry only.
    honours_token_range: ClassVar[bool] = False
    loads_are_optional: ClassVar[bool] = False
    moves_states: ClassVar[bool] = False
    opens_side_channel: ClassVar[bool] = False
    provides_dummy_kv: bool = False

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

    @property
    def needs_polling(self) -> bool:
        return type(self).set_wakeup is KVConnectorBase_V1.set_wakeup

    # -- scheduler --

    @property
    def requires_kv_delivery(self) -> bool:
        return self._config.kv_transfer.is_kv_producer

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return False

    def bind_kv_cache_manager(self, manager: Any) -> None:
        self.bind_gpu_block_pool(getattr(manager, "block_pool", None))

    def bind_gpu_block_pool(self, pool: Any) -> None:
        return None

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, for an engine with one KV-cache group."""
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: BlockTables
    ) -> tuple[bool, dict[str, Any] | None]:
        if len(block_ids) != 1:
            raise LocalProtocolError(f"{type(self).__name__} supports one KV-cache group only")
        return self.request_finished(request, block_ids[0])

    def get_finished_count(self) -> int | None:
        """How many ranks report each id; None for all ranks."""
        return None

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The handshake data keyed by (PP rank, TP rank)."""
        later = sorted(pp for pp, _ in metadata if pp > 0)
        if later:
            raise ValueError(
                f"{type(self).__name__} does not support pipeline parallelism, but got metadata of "
                f"pipeline rank {later[0]}; use tensor parallelism"
            )
        self.set_xfer_handshake_metadata({tp: value for (_, tp), value in metadata.items()})

    # -- worker --

    def get_mem_pool_context(self) -> AbstractContextManager[None]:
        """The context in which the engine allocates its cache."""
        return nullcontext()

    def register_cross_layers_kv_cache(self, kv_cache: KVTensor, attn_backend: Any = None) -> None:
        """Called in place of `register_kv_caches` when all layers of a block lie together."""
        raise NotImplementedError(f"{type(self).__name__} does not support cross-layer caches")

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return False

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
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

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests that finished sending and receiving since the last call."""
        return None, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sending, recving = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(sending or set(), recving or set())

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
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> "KVConnectorPromMetrics | None":
        return None
