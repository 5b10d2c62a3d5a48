"""`OffloadingConnector`: stores the KV of prompts in tiers, and loads it for prompts with the same
prefix.
"""

from kvferry.config import OffloadingExtraConfig
from kvferry.connectors.contract import ConnectorConfig, ConnectorDescription, KVCacheConfig
from kvferry.connectors.offloading.scheduler import OffloadingScheduler
from kvferry.connectors.offloading.worker import OffloadingWorker
from kvferry.errors import ConfigError


def _make_scheduler(config: ConnectorConfig, cache: KVCacheConfig) -> OffloadingScheduler:
    return OffloadingScheduler(config, cache, _checked_settings(config, cache))


def _make_worker(config: ConnectorConfig, cache: KVCacheConfig) -> OffloadingWorker:
    return OffloadingWorker(config, cache, _checked_settings(config, cache))


def _checked_settings(config: ConnectorConfig, cache: KVCacheConfig) -> OffloadingExtraConfig:
    extra = config.kv_transfer.extra
    assert isinstance(extra, OffloadingExtraConfig)
    is_windowed = any(group.has_local_attention for group in cache.groups)
    if is_windowed and extra.blocks_of_chunk(cache.block_size) > 1:
        raise ConfigError(
            "this model has sliding windows, so a chunk must be one block; remove "
            "blocks_per_chunk and block_size from kv_connector_extra_config"
        )
    return extra


OffloadingConnector = ConnectorDescription(
    _make_scheduler,
    _make_worker,
    honours_token_range=True,
    loads_are_optional=True,
    # Stores are best effort: those of a preempted request are void.
    requires_kv_delivery=False,
)
