"""The layout of a rank's KV cache: KV-cache groups, the cache tensor of each layer, and the memory.

A KV-cache group is a set of layers that share a block table. All groups draw blocks from one pool.
Each block has as many slots of memory as the largest group has layers, layer j of every group uses
slot j, and a block belongs to one group at a time. Groups therefore have the size of the scarcest
kind of layer, and few slots stay unused.

    layers     w0 w1 f2 w3 w4 f5        (f: full attention, w: with a window)
    groups     0: f2 f5    1: w0 w1    2: w3 w4
    slot 0        f2          w0          w3         the same memory, different blocks
    slot 1           f5          w1          w4

Layers that keep a state per sequence form groups of their own. A sequence holds one block per such
group, and the block holds the states of the group's layers. A slot has the size of the larger of
the two, a block of KV or a state, so the rest of a smaller one is unused.

Pure, except that `LayerCache.write` and `StateCache` change the cache tensors.
"""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from kvferry.connectors.contract import (
    KVCacheConfig,
    KVCacheGroup,
    ParallelConfig,
    StateLayout,
)
from kvferry.engine.model.config import ModelConfig, StateShape
from kvferry.engine.options import EngineOptions
from kvferry.errors import ConfigError
from kvferry.protocol.planning.heads import heads_of
from kvferry.types import KVLayout

STATE_DTYPE = torch.float32
"""The format of states, whatever format the cache of K and V has."""


def form_groups(config: ModelConfig) -> tuple[KVCacheGroup, ...]:
    """Return the groups of a model: full attention first, then windows, the widest first, then
    states.
    """
    return tuple(_group(config, layers) for layers in _layers_of_groups(config))


def _layers_of_groups(config: ModelConfig) -> list[list[int]]:
    kinds: dict[tuple[bool, int], list[int]] = {}
    for number, layer in enumerate(config.layers):
        reach = layer.window or config.max_position_embeddings
        kinds.setdefault((layer.has_state, -reach), []).append(number)
    size = min(len(numbers) for numbers in kinds.values())
    return [
        kinds[kind][first : first + size]
        for kind in sorted(kinds)
        for first in range(0, len(kinds[kind]), size)
    ]


def _group(config: ModelConfig, layers: Sequence[int]) -> KVCacheGroup:
    names = [config.layer_name(layer) for layer in layers]
    if not config.layers[layers[0]].has_state:
        return KVCacheGroup(tuple(names), sliding_window=config.layers[layers[0]].window)
    assert config.state is not None
    parts = _state_parts(config.state, ParallelConfig())
    heads = {f"{name}.{part.name}": part.heads for name in names for part in parts}
    # One entry of the block table, and so one block, stands for all tokens of a sequence.
    return KVCacheGroup(tuple(heads), state=StateLayout(config.max_position_embeddings, heads))


@dataclass(frozen=True, slots=True)
class StatePart:
    """A part of a layer's state that is divided over ranks by its own heads."""

    name: str
    heads: int
    """The number of heads over all ranks."""
    shape: tuple[int, ...]
    """The shape on this rank, with the heads outermost."""


def _state_parts(state: StateShape, parallel: ParallelConfig) -> tuple[StatePart, ...]:
    heads, groups = (
        len(heads_of(parallel.tp_rank, parallel.tp_size, total))
        for total in (state.num_heads, state.num_groups)
    )
    saved = state.kernel - 1
    return (
        StatePart("recurrent", state.num_heads, (heads, state.head_dim, state.state_size)),
        StatePart("conv.x", state.num_heads, (heads * state.head_dim, saved)),
        StatePart("conv.B", state.num_groups, (groups * state.state_size, saved)),
        StatePart("conv.C", state.num_groups, (groups * state.state_size, saved)),
    )


# -- layer cache --
# One layer's paged KV cache: writes the tokens of a step into their slots and gathers whole
# sequences.
#
#  HND:     [num_blocks, kv_heads, block_size, 2 * head_dim]   the last dimension is K, then V
#  NHD:     [num_blocks, block_size, kv_heads, 2 * head_dim]
#  latent:  [num_blocks, block_size, width]                    K is the whole, V its first part
#
# The format of the cache may be narrower than the format of the arithmetic. A value beyond the
# range of the cache's format is stored as the largest finite value: an infinite key would turn
# everything that its sequence computes into NaN.


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """The cache tensor of one layer; here a slot is the space of one token in a block."""

    name: str
    group: int
    """Index of the KV-cache group whose block tables apply."""
    tensor: torch.Tensor
    layout: KVLayout
    value_width: int

    def write(self, blocks: torch.Tensor, offsets: torch.Tensor, content: torch.Tensor) -> None:
        """Write token i, [kv_heads, width], into slot `offsets[i]` of block `blocks[i]`."""
        largest = torch.finfo(self.tensor.dtype).max
        if largest < torch.finfo(content.dtype).max:
            # Clamp in float32 or wider: bfloat16 would round the largest float16 up to a value that
            # becomes infinite.
            content = content.to(torch.promote_types(content.dtype, torch.float32)).clamp(
                -largest, largest
            )
        by_token = self._bits.transpose(1, 2) if self.layout is KVLayout.HND else self._bits
        by_token[blocks, offsets] = content.to(self.tensor.dtype).view(by_token.dtype)

    def gather(self, block_tables: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copy the given blocks, [sequences, blocks] of block ids.

        The result is [sequences, kv_heads, blocks * block_size, width].
        """
        chosen = self._bits.index_select(0, block_tables.reshape(-1)).view(self.tensor.dtype)
        blocks = chosen.unflatten(0, block_tables.shape)
        by_head = (
            blocks.transpose(1, 2) if self.layout is KVLayout.HND else blocks.permute(0, 3, 1, 2, 4)
        )
        copied: torch.Tensor = by_head.to(dtype, memory_format=torch.contiguous_format)
        return copied.flatten(2, 3)

    def keys_and_values(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split the result of `gather` into keys and values."""
        if self._is_latent:
            return context, context[..., : self.value_width]
        return context[..., : -self.value_width], context[..., -self.value_width :]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The cache tensor under the name that connectors know."""
        return {self.name: self.tensor}

    @property
    def _is_latent(self) -> bool:
        return self.tensor.dim() == 3

    @property
    def _bits(self) -> torch.Tensor:
        """The tensor with a head dimension, viewed as bytes if its elements have 8 bits.

        torch cannot index 8-bit floating-point tensors, only 8-bit integers.
        """
        with_heads = self.tensor.unsqueeze(1) if self._is_latent else self.tensor
        return with_heads.view(torch.uint8) if self.tensor.dtype.itemsize == 1 else with_heads


@dataclass(frozen=True, slots=True, eq=False)
class StateCache:
    """The states of one layer: one state per block.

    recurrent    [num_blocks, heads, head_dim, state_size]
    conv         [num_blocks, columns, kernel - 1]           one tensor each for x, B and C
    """

    group: int
    """Index of the KV-cache group whose block tables apply."""
    tensors: dict[str, torch.Tensor]
    """The parts of the state under the names that connectors know: recurrent, x, B, C."""

    @property
    def recurrent(self) -> torch.Tensor:
        return next(iter(self.tensors.values()))

    @property
    def _conv(self) -> list[torch.Tensor]:
        return list(self.tensors.values())[1:]

    def read_conv(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return a copy of the last inputs of the convolution, [blocks, columns, kernel - 1]."""
        return torch.cat([part[blocks] for part in self._conv], dim=1)

    def write_conv(self, blocks: torch.Tensor, inputs: torch.Tensor) -> None:
        widths = [part.shape[1] for part in self._conv]
        for part, columns in zip(self._conv, inputs.split(widths, dim=1), strict=True):
            part[blocks] = columns


# -- cache layout --
# The shape of one rank's whole cache, and how its memory is split into tensors. There is one tensor
# per slot; layers of different groups share a tensor (see the module docstring), so `kv_caches`
# contains the same tensor several times.
#
#  separate       | slot 0: block 0, 1, 2 ... | pad to a page | slot 1: block 0, 1, 2 ... |
#  cross-layer    | block 0: slot 0, slot 1, ... | block 1: slot 0, slot 1, ... |
#                 one segment moves a block of all layers


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The shape of one rank's whole cache; here a slot is the memory of one layer in each block."""

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
    layers: tuple[tuple[str, ...], ...]
    """The names of the layers of each group."""
    state_parts: tuple[StatePart, ...] = ()

    @property
    def num_slots(self) -> int:
        """Number of layers that have their own memory in each block."""
        return max(map(len, self.layers))

    @property
    def page_bytes(self) -> int:
        """The memory of one slot in one block."""
        return _page_bytes(self.layer_block, self.dtype, self.state_parts)

    @property
    def size_bytes(self) -> int:
        return self.num_slots * (
            self.num_blocks * self.page_bytes if self.is_cross_layer else self._slot_bytes
        )

    def layer_caches(self, memory: torch.Tensor) -> Mapping[str, LayerCache | StateCache]:
        """Return the cache of each layer, by name; `memory` is `size_bytes` bytes on any device."""
        slots = (
            self._cross_layer_slots(memory) if self.is_cross_layer else self._separate_slots(memory)
        )
        return {
            name: self._state_cache(name, index, slots[slot])
            if self.groups[index].is_state
            else LayerCache(
                name,
                index,
                _tensor_in(slots[slot], 0, self.layer_block, self.dtype),
                self.layout,
                self.value_width,
            )
            for index, names in enumerate(self.layers)
            for slot, name in enumerate(names)
        }

    def _state_cache(self, name: str, group: int, pages: torch.Tensor) -> StateCache:
        """Return the parts of a layer's state, which lie one behind the other in each page."""
        tensors, first = {}, 0
        for part in self.state_parts:
            tensors[f"{name}.{part.name}"] = _tensor_in(pages, first, part.shape, STATE_DTYPE)
            first += prod(part.shape) * STATE_DTYPE.itemsize
        return StateCache(group, tensors)

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
        return -(-self.num_blocks * self.page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def _separate_slots(self, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the pages of each slot, [num_blocks, page_bytes]."""
        used_bytes = self.num_blocks * self.page_bytes
        return [
            memory[first : first + used_bytes].view(self.num_blocks, self.page_bytes)
            for first in range(0, self.num_slots * self._slot_bytes, self._slot_bytes)
        ]

    def _cross_layer_slots(self, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        return memory.view(self.num_blocks, self.num_slots, self.page_bytes).unbind(1)


def plan_cache_layout(
    config: ModelConfig,
    parallel: ParallelConfig,
    options: EngineOptions,
    dtype: torch.dtype,
    memory_bytes: int,
) -> CacheLayout:
    """Plan the cache; `memory_bytes` applies only if the options do not set the number of blocks.

    Raises ConfigError if the cache would have fewer blocks than groups: the shortest prompt needs
    one block per group.
    """
    attention, block_size = config.attention, options.block_size
    num_kv_heads = len(heads_of(parallel.tp_rank, parallel.tp_size, attention.num_kv_heads))
    layer_block: tuple[int, ...]
    if attention.latent is not None:
        # With one head, both layouts are the same bytes; one name for both lets engines of either
        # layout exchange KV.
        layout, layer_block, value_width = (
            KVLayout.HND,
            (block_size, attention.head_dim),
            attention.latent.kv_lora_rank,
        )
    else:
        layout, value_width = options.kv_cache_layout, attention.head_dim
        inner = (num_kv_heads, block_size) if layout is KVLayout.HND else (block_size, num_kv_heads)
        layer_block = (*inner, 2 * attention.head_dim)
    groups = form_groups(config)
    layers = tuple(tuple(map(config.layer_name, numbers)) for numbers in _layers_of_groups(config))
    state_parts = () if config.state is None else _state_parts(config.state, parallel)
    num_blocks = options.num_blocks or _blocks_that_fit(
        memory_bytes, _page_bytes(layer_block, dtype, state_parts) * max(map(len, layers))
    )
    if num_blocks < len(groups):
        raise ConfigError(
            f"the KV cache would have {num_blocks} blocks, but this model needs at least "
            f"{len(groups)}, one for each group of its layers; raise --num-gpu-blocks-override or "
            "--kv-cache-memory-bytes"
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
        layers,
        state_parts,
    )


def _page_bytes(
    layer_block: tuple[int, ...], dtype: torch.dtype, state_parts: Sequence[StatePart]
) -> int:
    state_bytes = sum(prod(part.shape) for part in state_parts) * STATE_DTYPE.itemsize
    largest = max(prod(layer_block) * dtype.itemsize, state_bytes)
    # Whole elements of both formats.
    return -(-largest // STATE_DTYPE.itemsize) * STATE_DTYPE.itemsize if state_parts else largest


def _blocks_that_fit(total_bytes: int, block_bytes: int) -> int:
    if total_bytes < block_bytes:
        raise ConfigError(
            f"--kv-cache-memory-bytes {total_bytes} is too small for one block, which takes "
            f"{block_bytes} bytes in all layers"
        )
    return total_bytes // block_bytes


def _tensor_in(
    pages: torch.Tensor, first: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return the tensor of `shape` that begins at byte `first` of each page."""
    used = pages[:, first : first + prod(shape) * dtype.itemsize]
    return used.view(dtype).view(len(pages), *shape)
