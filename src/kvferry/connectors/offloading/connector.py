"""`OffloadingConnector`: a facade that forwards vLLM's connector calls to the half of its role."""

from collections.abc import Callable, Mapping
from typing import Any

from kvferry.config import OffloadingExtraConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    KVTensor,
    Request,
    SupportsHMA,
)
from kvferry.connectors.offloading.metadata import OffloadingMetadata, OffloadStats
from kvferry.connectors.offloading.scheduler import OffloadingScheduler
from kvferry.connectors.offloading.worker import OffloadingWorker
from kvferry.connectors.stats import KVConnectorStats
from kvferry.errors import ConfigError, LocalProtocolError

__all__ = ["OffloadingConnector"]


class OffloadingConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores the KV of prompts in tiers, and loads it for prompts with the same prefix."""

    honours_token_range = True
    loads_are_optional = True

    def __init__(
        self, config: ConnectorConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(config, role, kv_cache_config)
        extra = config.kv_transfer.extra
        assert isinstance(extra, OffloadingExtraConfig)
        is_windowed = any(group.has_local_attention for group in kv_cache_config.groups)
        if is_windowed and extra.blocks_of_chunk(kv_cache_config.block_size) > 1:
            raise ConfigError(
                "this model has sliding windows, so a chunk must be one block; remove "
                "blocks_per_chunk and block_size from kv_connector_extra_config"
            )
        is_scheduler = role is KVConnectorRole.SCHEDULER
        self._scheduler_half = (
            OffloadingScheduler(config, kv_cache_config, extra) if is_scheduler else None
        )
        self._worker_half = (
            None if is_scheduler else OffloadingWorker(config, kv_cache_config, extra)
        )

    @property
    def _scheduler(self) -> OffloadingScheduler:
        if self._scheduler_half is None:
            raise LocalProtocolError("a worker's connector got a call for the scheduler's")
        return self._scheduler_half

    @property
    def _worker(self) -> OffloadingWorker:
        if self._worker_half is None:
            raise LocalProtocolError("the scheduler's connector got a call for a worker's")
        return self._worker_half

    def shutdown(self) -> None:
        (self._scheduler_half or self._worker).close()

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        if self._worker_half is not None:
            self._worker_half.set_wakeup(wake)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return (self._scheduler_half or self._worker).take_stats()

    # -- scheduler --

    @property
    def requires_kv_delivery(self) -> bool:
        # Stores are best effort: those of a preempted request are void.
        return False

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.build_connector_meta(
            getattr(scheduler_output, "slices", ()),
            getattr(scheduler_output, "preempted_req_ids", None) or (),
            getattr(scheduler_output, "total_num_scheduled_tokens", 0),
        )

    def is_watched(self, request_id: str) -> bool:
        """Whether `build_connector_meta` has a use for a slice of the request."""
        return self._scheduler.is_watched(request_id)

    def withdraw(self, request_id: str) -> None:
        """Load and store nothing of a request any more: its salt may not fit its KV."""
        self._scheduler.withdraw(request_id)

    def reset_cache(self) -> bool | None:
        self._scheduler.reset_cache()
        return None

    def is_load_optional(self, request_id: str) -> bool:
        return True

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.has_pending_block_frees()

    def has_pending_push_work(self) -> bool:
        # Steps without tokens carry the counters of slow writes to the engine's metrics.
        return self._scheduler.has_pending_commands() or self._scheduler.is_worker_busy

    @property
    def has_pending_commands(self) -> bool:
        """Whether the workers wait for a command."""
        return self._scheduler.has_pending_commands()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.take_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids)

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.serve(metadata)

    # -- worker --

    def register_kv_caches(self, kv_caches: Mapping[str, KVTensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.handshake_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, OffloadingMetadata)
        self._worker.start_load_kv(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return None

    def wait_for_save(self) -> None:
        return None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.get_transfer_results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self._worker.get_transfer_results()
        return results.finished_sending, results.finished_recving

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_worker_metadata()

    # -- class methods --

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return OffloadStats(data or {})
