"""The shape of one rank's whole cache, and how its memory is cut into a tensor per layer.

Layers of different groups share memory (see `cache_groups`): there is a tensor per slot, and `kv_caches` of several layers are the same.

    apart          | slot 0: block 0, 1, 2 … | pad to a page | slot 1: block 0, 1, 2 … |
    cross-layer    | block 0: slot 0, slot 1, … | block 1: slot 0, slot 1, … |            one segment moves a block of all layers
"""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from kvferry.connectors.contract import KVCacheConfig, KVCacheGroup, ParallelConfig
from kvferry.engine.cache_groups import form_groups
from kvferry.engine.kv_cache import LayerCache
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.options import EngineOptions
from kvferry.errors import ConfigError
from kvferry.protocol.ranks import heads_of
from kvferry.types import KVLayout

__all__ = ["CacheLayout", "plan_cache_layout"]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    layout: KVLayout
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    groups: tuple[KVCacheGroup, ...]
    layer_block: tuple[int, ...]
    """Dimensions of one block of one layer."""
    value_width: int
    is_cross_layer: bool

    @property
    def num_slots(self) -> int:
        """Layers that have memory of their own in each block."""
        return max(len(group.layer_names) for group in self.groups)

    @property
    def layer_block_bytes(self) -> int:
        return prod(self.layer_block) * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        return self.num_slots * (self.num_blocks * self.layer_block_bytes if self.is_cross_layer else self._slot_bytes)

    def layer_caches(self, memory: torch.Tensor) -> Mapping[str, LayerCache]:
        """By layer name. `memory` is `size_bytes` of bytes, on whatever device."""
        slots = self._cross_layer_slots(memory) if self.is_cross_layer else self._separate_slots(memory)
        return {
            name: LayerCache(name, index, slots[slot], self.layout, self.value_width)
            for index, group in enumerate(self.groups)
            for slot, name in enumerate(group.layer_names)
        }

    def to_config(self) -> KVCacheConfig:
        return KVCacheConfig(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            groups=self.groups,
            layout=self.layout.value,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            cache_dtype=str(self.dtype).removeprefix("torch."),
            hides_partial_loads=True,
        )

    @property
    def _slot_bytes(self) -> int:
        return -(-self.num_blocks * self.layer_block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def _separate_slots(self, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        shape = (self.num_blocks, *self.layer_block)
        return [_tensor_at(memory, slot * self._slot_bytes, shape, self.dtype) for slot in range(self.num_slots)]

    def _cross_layer_slots(self, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        return _tensor_at(memory, 0, (self.num_blocks, self.num_slots, *self.layer_block), self.dtype).unbind(1)


def plan_cache_layout(
    config: ModelConfig, parallel: ParallelConfig, options: EngineOptions, dtype: torch.dtype, memory_bytes: int
) -> CacheLayout:
    """`memory_bytes` counts where the options do not say how many blocks there are. ConfigError when the cache would have fewer blocks than
    groups: the shortest prompt needs one of each."""
    attention, block_size = config.attention, options.block_size
    num_kv_heads = len(heads_of(parallel.tp_rank, parallel.tp_size, attention.num_kv_heads))
    layer_block: tuple[int, ...]
    if attention.latent is not None:
        # Of one head both layouts are the same bytes; one name for them lets engines with either meet.
        layout, layer_block, value_width = KVLayout.HND, (block_size, attention.head_dim), attention.latent.kv_lora_rank
    else:
        layout, value_width = options.kv_cache_layout, attention.head_dim
        inner = (num_kv_heads, block_size) if layout is KVLayout.HND else (block_size, num_kv_heads)
        layer_block = (*inner, 2 * attention.head_dim)
    groups = form_groups(config)
    num_slots = max(len(group.layer_names) for group in groups)
    num_blocks = options.num_blocks or _blocks_that_fit(memory_bytes, prod(layer_block) * dtype.itemsize * num_slots)
    if num_blocks < len(groups):
        raise ConfigError(
            f"the KV cache would have {num_blocks} blocks and this model needs at least {len(groups)}, one for each group of its layers; "
            "raise --num-gpu-blocks-override or --kv-cache-memory-bytes"
        )
    return CacheLayout(
        layout,
        num_blocks,
        block_size,
        num_kv_heads,
        attention.head_dim,
        dtype,
        groups,
        layer_block,
        value_width,
        options.cross_layer_blocks,
    )


def _blocks_that_fit(total_bytes: int, block_bytes: int) -> int:
    if total_bytes < block_bytes:
        raise ConfigError(f"--kv-cache-memory-bytes {total_bytes} holds no block; one takes {block_bytes} bytes in all layers")
    return total_bytes // block_bytes


def _tensor_at(memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
