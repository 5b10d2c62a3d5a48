"""From an engine's cache tensors to the geometry that planning works on. Pure but for reading tensor addresses."""

import re
from collections.abc import Mapping
from math import prod

from kvferry.connectors.contract import ConnectorConfig, KVCacheConfig, KVTensor
from kvferry.errors import ConfigError
from kvferry.protocol.messages import Factor
from kvferry.protocol.planning import Geometry
from kvferry.types import KVLayout, MemoryKind, Region

__all__ = ["compatibility_factors", "geometry_of"]


def geometry_of(config: ConnectorConfig, cache: KVCacheConfig, kv_caches: Mapping[str, KVTensor]) -> Geometry:
    """One region per layer, in the natural order of the layer names so that both sides count alike."""
    groups = {layer: index for index, group in enumerate(cache.groups) for layer in group.layer_names}
    unknown = sorted(set(kv_caches) - set(groups))
    if unknown:
        raise ConfigError(f"layer {unknown[0]} has a cache tensor but belongs to no KV-cache group")
    return Geometry(
        config.parallel.tp_rank,
        config.parallel.tp_size,
        cache.block_size,
        cache.num_blocks,
        KVLayout(cache.layout),
        cache.num_kv_heads,
        cache.head_dim,
        tuple(_region(name, kv_caches[name], groups[name], cache.num_blocks) for name in sorted(kv_caches, key=_natural)),
    )


def compatibility_factors(config: ConnectorConfig, cache: KVCacheConfig, transfer_mode: str) -> dict[str, Factor]:
    """What must be equal on both sides. Sizes that planning can bridge (TP, block size, layout) are not here."""
    model = config.model
    return {
        "architecture": model.architecture,
        "model": model.fingerprint,
        "num_layers": model.num_layers,
        "num_kv_heads": model.total_kv_heads,
        "head_dim": model.head_dim,
        "dtype": model.dtype,
        "cache_dtype": cache.cache_dtype,
        "cache_format": model.cache_format,
        "transfer_mode": transfer_mode,
    }


def _region(name: str, tensor: KVTensor, group: int, num_blocks: int) -> Region:
    """Dimension 0 counts blocks, or equal parts of blocks that follow each other."""
    item, parts = tensor.element_size(), tensor.shape[0]
    part_elements = prod(tensor.shape[1:])
    per_block = parts // num_blocks if num_blocks and parts % num_blocks == 0 else 0
    is_dense = 1 + sum((size - 1) * tensor.stride(dim) for dim, size in enumerate(tensor.shape) if dim > 0) == part_elements
    if not per_block or not is_dense or (per_block > 1 and tensor.stride(0) != part_elements):
        raise ConfigError(f"the cache of {name} cannot be cut into {num_blocks} blocks of adjacent bytes (shape {tuple(tensor.shape)})")
    is_host = str(getattr(tensor.device, "type", tensor.device)) == "cpu"
    return Region(
        name,
        tensor.data_ptr(),
        per_block * part_elements * item,
        per_block * tensor.stride(0) * item,
        num_blocks,
        MemoryKind.DRAM if is_host else MemoryKind.VRAM,
        0 if is_host else int(getattr(tensor.device, "index", 0) or 0),
        group,
    )


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]
