"""One layer's paged KV cache: writing the tokens of a step into their slots and gathering whole sequences out of it.

HND:     [num_blocks, kv_heads, block_size, 2 * head_dim]      the last dimension is K, then V
NHD:     [num_blocks, block_size, kv_heads, 2 * head_dim]
latent:  [num_blocks, block_size, width]                       the whole is K, its first part is V too

The format of the cache may be narrower than that of the arithmetic. Values beyond its range are stored as its largest, never as infinite:
an infinite key would make NaN of all that its sequence computes.
"""

from dataclasses import dataclass

import torch

from kvferry.types import KVLayout

__all__ = ["LayerCache"]


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    name: str
    group: int
    """Whose block tables count."""
    tensor: torch.Tensor
    layout: KVLayout
    value_width: int

    def write(self, blocks: torch.Tensor, offsets: torch.Tensor, content: torch.Tensor) -> None:
        """Token i, [kv_heads, width] of `content`, goes into slot `offsets[i]` of block `blocks[i]`."""
        largest = torch.finfo(self.tensor.dtype).max
        if largest < torch.finfo(content.dtype).max:
            # Not in a format that cannot hold the bound: bfloat16 would round that of float16 up, to what becomes infinite.
            content = content.to(torch.promote_types(content.dtype, torch.float32)).clamp(-largest, largest)
        by_token = self._bits.transpose(1, 2) if self.layout is KVLayout.HND else self._bits
        by_token[blocks, offsets] = content.to(self.tensor.dtype).view(by_token.dtype)

    def gather(self, block_tables: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[sequences, blocks] of block ids -> a copy, [sequences, kv_heads, blocks * block_size, width]."""
        chosen = self._bits.index_select(0, block_tables.reshape(-1)).view(self.tensor.dtype)
        blocks = chosen.unflatten(0, block_tables.shape)
        by_head = blocks.transpose(1, 2) if self.layout is KVLayout.HND else blocks.permute(0, 3, 1, 2, 4)
        copied: torch.Tensor = by_head.to(dtype, memory_format=torch.contiguous_format)
        return copied.flatten(2, 3)

    def keys_and_values(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both of them in what `gather` returned."""
        if self._is_latent:
            return context, context[..., : self.value_width]
        return context[..., : -self.value_width], context[..., -self.value_width :]

    @property
    def _is_latent(self) -> bool:
        return self.tensor.dim() == 3

    @property
    def _bits(self) -> torch.Tensor:
        """The tensor with a dimension for heads, in a format that can be copied: torch indexes no numbers of 8 bits but integers."""
        with_heads = self.tensor.unsqueeze(1) if self._is_latent else self.tensor
        return with_heads.view(torch.uint8) if self.tensor.dtype.itemsize == 1 else with_heads
