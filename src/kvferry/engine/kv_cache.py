"""One layer's paged KV cache: writing the tokens of a step into their slots and gathering whole sequences out of it.

HND: [num_blocks, kv_heads, block_size, 2 * head_dim]      the last dimension is K, then V
NHD: [num_blocks, block_size, kv_heads, 2 * head_dim]
"""

from dataclasses import dataclass

import torch

from kvferry.types import KVLayout

__all__ = ["LayerCache", "block_shape"]


def block_shape(layout: KVLayout, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[int, int, int]:
    inner = (num_kv_heads, block_size) if layout is KVLayout.HND else (block_size, num_kv_heads)
    return (*inner, 2 * head_dim)


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    name: str
    tensor: torch.Tensor
    layout: KVLayout

    def write(self, blocks: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Token i, [kv_heads, head_dim] each of `keys` and `values`, goes into slot `offsets[i]` of block `blocks[i]`."""
        by_token = self.tensor.transpose(1, 2) if self.layout is KVLayout.HND else self.tensor
        by_token[blocks, offsets] = torch.cat((keys, values), dim=-1).to(self.tensor.dtype)

    def gather(self, block_tables: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[sequences, blocks] of block ids -> a copy, [sequences, kv_heads, blocks * block_size, 2 * head_dim]."""
        num_sequences, num_blocks = block_tables.shape
        blocks = self.tensor.index_select(0, block_tables.reshape(-1)).unflatten(0, (num_sequences, num_blocks))
        by_head = blocks.transpose(1, 2) if self.layout is KVLayout.HND else blocks.permute(0, 3, 1, 2, 4)
        copied: torch.Tensor = by_head.to(dtype, memory_format=torch.contiguous_format)
        return copied.flatten(2, 3)
