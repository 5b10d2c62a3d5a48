"""Opens pools and tiers from the settings of `OffloadingConnector`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvferry.config import (
    DiskTierConfig,
    MooncakeTierConfig,
    ObjectTierConfig,
    OffloadingExtraConfig,
)
from kvferry.connectors.contract import ConnectorConfig, KVCacheConfig
from kvferry.connectors.geometry import compatibility_factors
from kvferry.connectors.offloading.lookup import TierLookup
from kvferry.errors import ConfigError
from kvferry.host_memory import available_bytes, check_fits
from kvferry.protocol.planning.geometry import Geometry
from kvferry.tiers.base import Tier
from kvferry.tiers.disk.tier import DiskTier
from kvferry.tiers.keys import Namespace
from kvferry.tiers.pool.host_pool import HostPool
from kvferry.tiers.pool.policies import POLICIES
from kvferry.tiers.pool.reader import PoolReader
from kvferry.tiers.pool.segment_files import default_folder

STAGING_BYTES = 256 * 1024 * 1024
"""The most host memory of a rank without a tier `cpu`, for chunks on their way to slower tiers."""
MIN_STAGING_ROWS = 16
MIN_LENT_BYTES = 16 * 1024 * 1024
"""The least memory that Mooncake accepts from a client that lends any."""
PAGE_BYTES = 4096


def chunk_namespace(
    config: ConnectorConfig, cache: KVCacheConfig, geometry: Geometry, blocks_per_chunk: int
) -> Namespace:
    """Everything that decides the bytes of a chunk of this rank, except the tokens and the salt."""
    factors: dict[str, Any] = dict(compatibility_factors(config, cache))
    factors |= {
        "tp_rank": geometry.tp_rank,
        "tp_size": geometry.tp_size,
        "block_size": geometry.block_size,
        "blocks_per_chunk": blocks_per_chunk,
        "layout": str(geometry.layout),
        "heads_of_rank": geometry.num_kv_heads,
        "has_token_rows": cache.has_token_rows,
        "regions": [
            [region.group, region.block_bytes, list(region.layer_names)]
            for region in geometry.regions
        ],
        "windows": [[group.sliding_window, group.attention_chunk] for group in cache.groups],
    }
    return Namespace(factors)


def pool_folder(extra: OffloadingExtraConfig) -> Path:
    return Path(extra.pool_path) if extra.pool_path else default_folder()


def open_pool(
    extra: OffloadingExtraConfig,
    namespace: Namespace,
    row_bytes: int,
    bytes_per_block: int,
    tp_size: int,
) -> HostPool:
    """Open this rank's part of the tier `cpu`, or private memory if there is no such tier."""
    row_bytes = -(-row_bytes // PAGE_BYTES) * PAGE_BYTES
    policy = POLICIES[extra.eviction_policy]
    total = extra.cpu_bytes(bytes_per_block * tp_size)
    if not total:
        num_rows = max(MIN_STAGING_ROWS, STAGING_BYTES // row_bytes)
        return HostPool.private(row_bytes, num_rows, policy)
    num_rows = total // tp_size // row_bytes
    if not num_rows:
        raise ConfigError(
            f"the tier cpu has {total} bytes for {tp_size} ranks, but one chunk of one rank has "
            f"{row_bytes} bytes; make the tier larger"
        )
    return HostPool.open(pool_folder(extra), namespace, row_bytes, num_rows, policy)


def open_lookup(
    config: ConnectorConfig,
    extra: OffloadingExtraConfig,
    cache: KVCacheConfig,
    namespaces: Sequence[Namespace],
    clock: Callable[[], float],
) -> TierLookup:
    """Open the tiers of all ranks, whose namespaces are given, for lookups."""
    has_pool = extra.cpu_bytes(1) > 0
    readers = [PoolReader(pool_folder(extra), each) for each in namespaces] if has_pool else []
    opened = [open_tiers(extra, space, config.secret) for space in namespaces]
    return TierLookup(
        cache.groups,
        extra.blocks_of_chunk(cache.block_size) * cache.block_size,
        readers,
        {name: [rank[name] for rank in opened] for name in opened[0]},
        extra.lookup_timeout,
        clock,
    )


def open_tiers(
    extra: OffloadingExtraConfig, namespace: Namespace, secret: bytes, tp_size: int | None = None
) -> dict[str, Tier]:
    """Open the tiers behind the host pool, the fastest first; without `tp_size` for a process that
    stores nothing, and so need neither evict nor lend memory.
    """
    tiers: dict[str, Tier] = {}
    mooncake, bucket = extra.tier(MooncakeTierConfig), extra.tier(ObjectTierConfig)
    lent_bytes = mooncake.size // tp_size if mooncake and tp_size else 0
    if 0 < lent_bytes < MIN_LENT_BYTES:
        raise ConfigError(
            f"the tier mooncake lends {lent_bytes} bytes of each rank, but Mooncake takes at least "
            f"{MIN_LENT_BYTES}; make its size larger, or 0"
        )
    check_fits(lent_bytes, available_bytes())
    if disk := extra.tier(DiskTierConfig):
        max_bytes = disk.size if tp_size else None
        tiers["disk"] = DiskTier(Path(disk.path), namespace, secret, max_bytes)
    # The others are imported on demand: the packages that they need are extras.
    if mooncake:
        from kvferry.tiers.mooncake.agent import MooncakePlace
        from kvferry.tiers.mooncake.tier import MooncakeTier

        pool = MooncakePlace(
            master=mooncake.master_address,
            metadata_server=mooncake.metadata_server,
            protocol=mooncake.protocol,
            device_name=mooncake.device_name or "",
            host=mooncake.host or "",
            lent_bytes=lent_bytes,
        )
        tiers["mooncake"] = MooncakeTier(pool, namespace, secret)
    if bucket:
        from kvferry.tiers.object_store import Bucket, ObjectTier

        place = Bucket(bucket.bucket, bucket.prefix, bucket.endpoint, bucket.region, bucket.profile)
        tiers["object"] = ObjectTier(place, namespace, secret)
    return tiers
