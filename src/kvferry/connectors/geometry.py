"""From an engine's cache tensors to the geometry that planning works on.

Pure, except that `geometry_of` reads the addresses of tensors.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVTensor,
    ParallelConfig,
)
from kvferry.errors import ConfigError
from kvferry.protocol.messages import Factor
from kvferry.protocol.planning.axes import dense_axes
from kvferry.protocol.planning.geometry import Geometry
from kvferry.protocol.planning.heads import heads_of
from kvferry.types import Axis, AxisKind, KVLayout, MemoryKind, Region


def geometry_of(
    config: ConnectorConfig, cache: KVCacheConfig, kv_caches: Mapping[str, KVTensor]
) -> Geometry:
    """The geometry of one rank's cache: one region per layer, or one region for all layers of a
    group if the layers' blocks are interleaved.

    Regions are in the natural order of the layer names, so that both sides count the regions alike.
    """
    groups = {
        layer: index for index, group in enumerate(cache.groups) for layer in group.layer_names
    }
    unknown = sorted(set(kv_caches) - set(groups))
    if unknown:
        raise ConfigError(f"layer {unknown[0]} has a cache tensor but belongs to no KV-cache group")
    regions = [
        _region(name, kv_caches[name], groups[name], cache, config.parallel)
        for name in sorted(kv_caches, key=_natural)
    ]
    return Geometry(
        config.parallel.tp_rank,
        config.parallel.tp_size,
        cache.block_size,
        cache.num_blocks,
        KVLayout(cache.layout),
        cache.num_kv_heads,
        cache.head_dim,
        _bundled(regions),
        _total_kv_heads(config, cache),
        # A block that held a state before may hold numbers that are not finite as KV. vLLM clears
        # new blocks, but not those that a load fills.
        any(group.has_local_attention or group.is_state for group in cache.groups)
        and not cache.hides_partial_loads,
    )


def compatibility_factors(config: ConnectorConfig, cache: KVCacheConfig) -> dict[str, Factor]:
    """The values that must be equal on both sides.

    Sizes that planning can convert (TP, block size, layout) are not included, nor is the transfer
    mode: a side that pushes also accepts and issues ordinary tickets.
    """
    model = config.model
    return {
        "architecture": model.architecture,
        "weights": model.weights,
        "num_layers": model.num_layers,
        "num_kv_heads": model.total_kv_heads,
        "head_dim": model.head_dim,
        "dtype": model.dtype,
        "cache_dtype": cache.cache_dtype,
        "cache_format": model.cache_format,
        **model.settings,
    }


def _total_kv_heads(config: ConnectorConfig, cache: KVCacheConfig) -> int:
    """The number of KV heads over all ranks. Latent attention caches one head, whole on every rank,
    whatever number of heads the model's configuration states.
    """
    total = config.model.total_kv_heads
    is_divided = cache.num_kv_heads == len(
        heads_of(config.parallel.tp_rank, config.parallel.tp_size, total)
    )
    return total if is_divided else cache.num_kv_heads


def _region(
    name: str, tensor: KVTensor, group: int, cache: KVCacheConfig, parallel: ParallelConfig
) -> Region:
    """The region of one layer's tensor. Dimension 0 counts blocks, or equal parts of blocks that
    follow each other in memory.
    """
    num_blocks = cache.num_blocks
    item, parts = tensor.element_size(), tensor.shape[0]
    part_elements = prod(tensor.shape[1:])
    per_block = parts // num_blocks if num_blocks and parts % num_blocks == 0 else 0
    # Dense: the elements of one part fill the part's bytes without gaps.
    is_dense = (
        1 + sum((size - 1) * tensor.stride(dim) for dim, size in enumerate(tensor.shape) if dim > 0)
        == part_elements
    )
    if not per_block or not is_dense or (per_block > 1 and tensor.stride(0) != part_elements):
        raise ConfigError(
            f"the cache of {name} cannot be cut into {num_blocks} blocks of adjacent bytes: its "
            f"shape is {tuple(tensor.shape)}"
        )
    state = cache.groups[group].state
    state_heads = 0 if state is None else state.heads[name]
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
        _state_axes(name, tensor, len(heads_of(parallel.tp_rank, parallel.tp_size, state_heads)))
        if state_heads
        else _axes(tensor, cache, per_block),
        state_heads=state_heads,
    )


def _state_axes(name: str, tensor: KVTensor, heads: int) -> tuple[Axis, ...]:
    """The axes of a state. The heads must be outermost in the tensor's memory."""
    size = prod(tensor.shape[1:])
    if size % heads or any(
        tensor.stride(dim) < tensor.stride(dim + 1) for dim in range(1, len(tensor.shape) - 1)
    ):
        raise ConfigError(
            f"the state {name} cannot be divided into {heads} heads: its shape is "
            f"{tuple(tensor.shape)}"
        )
    return dense_axes([(AxisKind.HEAD, heads)], size // heads * tensor.element_size())


def _axes(tensor: KVTensor, cache: KVCacheConfig, parts: int) -> tuple[Axis, ...] | None:
    """The axes of a block of `parts` parts; None if the tensor does not lie in memory as
    `cache.layout` says.

    Per part, the layout is [heads, tokens, content] or [tokens, heads, content], whatever order the
    tensor's dimensions are named in.
    """
    if cache.block_size % parts:
        return None
    is_hnd = KVLayout(cache.layout) is KVLayout.HND
    heads, tokens = cache.num_kv_heads, cache.block_size // parts
    content = prod(tensor.shape[1:]) // (heads * tokens)
    expected = (heads, tokens, content) if is_hnd else (tokens, heads, content)
    dims = sorted(
        (dim for dim in range(1, len(tensor.shape)) if tensor.shape[dim] > 1),
        key=tensor.stride,
        reverse=True,
    )
    if [tensor.shape[dim] for dim in dims] != [count for count in expected if count > 1]:
        return None
    content_bytes = content * tensor.element_size()
    by_part, by_head, by_token = (
        (AxisKind.TOKEN, parts),
        (AxisKind.HEAD, heads),
        (AxisKind.TOKEN, tokens),
    )
    if cache.has_token_rows:
        return dense_axes(
            [by_part, *((by_head, by_token) if is_hnd else (by_token, by_head))], content_bytes
        )
    # The kernel packs the tokens of a part, so neither tokens nor heads within tokens can be
    # addressed.
    return dense_axes([by_part, by_head], tokens * content_bytes) if is_hnd or heads == 1 else None


def _bundled(regions: list[Region]) -> tuple[Region, ...]:
    """One region per group if the blocks of the group's layers are interleaved in memory, each
    directly behind the previous layer's; otherwise the regions unchanged.
    """
    by_group: dict[int, list[Region]] = {}
    for region in regions:
        by_group.setdefault(region.group, []).append(region)
    if not all(_are_interleaved(members) for members in by_group.values()):
        return tuple(regions)
    return tuple(_bundle(members) for _, members in sorted(by_group.items()))


def _are_interleaved(members: list[Region]) -> bool:
    """Whether the regions have equal shapes and block i of each lies directly behind block i of the
    previous.
    """
    first = members[0]
    size = first.block_bytes
    return first.stride_bytes > size and all(
        replace(region, name=first.name, address=first.address) == first
        and region.address == first.address + index * size
        for index, region in enumerate(members)
    )


def _bundle(members: list[Region]) -> Region:
    """One region that covers interleaved layers, with the layer as its outermost axis."""
    first, count = members[0], len(members)
    layer_axis = (Axis(AxisKind.LAYER, count, first.block_bytes),) if count > 1 else ()
    axes = None if first.axes is None else (*layer_axis, *first.axes)
    return replace(
        first,
        block_bytes=count * first.block_bytes,
        axes=axes,
        layers=tuple(region.name for region in members),
    )


def _natural(name: str) -> list[tuple[int, int, str]]:
    """The sort key that puts layer 2 before layer 10."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]


# -- host buffer --
# Where the regions of an engine's cache lie in its host buffer: the same blocks, densely packed,
# region after region. Pure.


ALIGNMENT = 4096
"""The alignment of each region, so that no region shares a page with the next region."""


def host_buffer_bytes(regions: Sequence[Region]) -> int:
    """The size of a host buffer that holds these regions."""
    num_bytes, _ = _packed(regions)
    return num_bytes


def host_buffer_regions(regions: Sequence[Region], address: int) -> tuple[Region, ...]:
    """The same regions in a host buffer of `host_buffer_bytes` bytes at this address. Regions that
    share memory (groups whose layers use the blocks of one tensor in turn) share their part of the
    host buffer.
    """
    _, places = _packed(regions)
    in_host_memory = [replace(region, memory=MemoryKind.DRAM, device=0) for region in regions]
    return tuple(
        replace(moved, address=address + places[region][0], stride_bytes=places[region][1])
        for region, moved in zip(regions, in_host_memory, strict=True)
    )


def _packed(regions: Sequence[Region]) -> tuple[int, dict[Region, tuple[int, int]]]:
    """The size of a host buffer, and each region's offset in it with the size of its pages. A page
    holds one block of each of the regions that share memory.
    """
    sharing: list[list[Region]] = []
    for region in sorted(regions, key=lambda region: region.address):
        first = sharing[-1][0] if sharing else None
        if (
            first is not None
            and region.stride_bytes == first.stride_bytes
            and region.num_blocks == first.num_blocks
            and region.address + region.block_bytes <= first.address + first.stride_bytes
        ):
            sharing[-1].append(region)
        else:
            sharing.append([region])
    num_bytes, places = 0, {}
    for members in sharing:
        start = members[0].address
        page_bytes = max(region.address + region.block_bytes for region in members) - start
        for region in members:
            places[region] = num_bytes + region.address - start, page_bytes
        num_bytes += -(-page_bytes * members[0].num_blocks // ALIGNMENT) * ALIGNMENT
    return num_bytes, places
