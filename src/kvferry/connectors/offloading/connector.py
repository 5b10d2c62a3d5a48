"""`OffloadingConnector`: its two halves, put together."""

from collections.abc import Iterable
from typing import Any

from kvferry.config import OffloadingExtraConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVConnectorMetadata,
    KVConnectorRole,
)
from kvferry.connectors.offloading.events import DescribeBlocks, KVEvent
from kvferry.connectors.offloading.metadata import OffloadingMetadata, OffloadStats
from kvferry.connectors.offloading.scheduler import OffloadingScheduler
from kvferry.connectors.offloading.worker import OffloadingWorker
from kvferry.connectors.stats import KVConnectorStats
from kvferry.connectors.two_halves import TwoHalvesConnector
from kvferry.errors import ConfigError


class OffloadingConnector(TwoHalvesConnector[OffloadingScheduler, OffloadingWorker]):
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

    # -- scheduler --

    @property
    def requires_kv_delivery(self) -> bool:
        # Stores are best effort: those of a preempted request are void.
        return False

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

    def publish_events(self, describe: DescribeBlocks) -> None:
        """Make KV events, which the engine takes by `take_events`."""
        self._scheduler.publish_events(describe)

    def take_events(self) -> Iterable[KVEvent]:
        return self._scheduler.take_events()

    def has_pending_push_work(self) -> bool:
        # Steps without tokens carry the counters of slow writes to the engine's metrics.
        return self._scheduler.has_pending_commands() or self._scheduler.is_worker_busy

    @property
    def has_pending_commands(self) -> bool:
        """Whether the workers wait for a command."""
        return self._scheduler.has_pending_commands()

    # -- worker --

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, OffloadingMetadata)
        self._worker.start_load_kv(metadata)

    # -- class methods --

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return OffloadStats(data or {})
