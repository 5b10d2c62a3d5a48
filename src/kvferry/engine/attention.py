"""Attention of a step's queries over the paged cache, K and V always as stored there.

Reading back what was just written, instead of using the unrounded values, makes a token's result the same whether its context was
computed in this step, an earlier one or another engine. Pure but for reading the cache.
"""

import torch

from kvferry.engine.flat_batch import AttentionPlan, DecodeTile, PrefillRange
from kvferry.engine.kv_cache import LayerCache

__all__ = ["attend"]

QUERY_TILE_ROWS = 128
"""Rows of a prefill that attend at once: keys beyond the last of them are skipped, and their scores stay small."""


def attend(queries: torch.Tensor, cache: LayerCache, plan: AttentionPlan, dtype: torch.dtype) -> torch.Tensor:
    """`queries` is [rows, heads, head_dim]; so is the result, in `dtype`."""
    result = torch.empty(queries.shape, dtype=dtype)
    scaled = queries.to(dtype) * queries.shape[-1] ** -0.5
    for tile in plan.decodes:
        result[tile.rows] = _attend_decodes(scaled[tile.rows], cache, tile)
    for part in plan.prefills:
        rows = slice(part.first_row, part.first_row + part.num_rows)
        result[rows] = _attend_prefill(scaled[rows], cache, part)
    return result


def _attend_decodes(queries: torch.Tensor, cache: LayerCache, tile: DecodeTile) -> torch.Tensor:
    context = cache.gather(tile.block_tables, queries.dtype)
    num_sequences, kv_heads, width, _ = context.shape
    # A NaN that an earlier owner left in the last block would survive its weight of 0.
    sequences, slots = tile.stale
    context[sequences, :, slots] = 0
    keys, values = context.flatten(0, 1).chunk(2, dim=-1)
    grouped = queries.reshape(num_sequences * kv_heads, -1, queries.shape[-1])
    scores = torch.bmm(grouped, keys.transpose(1, 2)).view(num_sequences, -1, width)
    scores.masked_fill_(tile.beyond[:, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1).view(num_sequences * kv_heads, -1, width)
    return torch.bmm(weights, values).view(queries.shape)


def _attend_prefill(queries: torch.Tensor, cache: LayerCache, part: PrefillRange) -> torch.Tensor:
    context = cache.gather(part.block_table, queries.dtype)[0, :, : part.start + part.num_rows]
    keys, values = context.chunk(2, dim=-1)
    kv_heads, head_dim = keys.shape[0], keys.shape[2]
    group = queries.shape[1] // kv_heads
    # [kv_heads, rows * group, head_dim]: all queries that share a KV head are one matrix.
    grouped = queries.view(part.num_rows, kv_heads, group, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
    result = torch.empty_like(grouped)
    for first in range(0, part.num_rows, QUERY_TILE_ROWS):
        last = min(first + QUERY_TILE_ROWS, part.num_rows)
        tile = slice(first * group, last * group)
        visible = part.start + last
        scores = torch.bmm(grouped[:, tile], keys[:, :visible].transpose(1, 2))
        _hide_later_keys(scores[:, :, part.start + first :], group)
        torch.bmm(torch.softmax(scores, dim=-1), values[:, :visible], out=result[:, tile])
    return result.view(kv_heads, part.num_rows, group, head_dim).transpose(0, 1).reshape(queries.shape)


def _hide_later_keys(scores: torch.Tensor, group: int) -> None:
    """`scores` is [kv_heads, rows * group, rows]: query row i sees keys 0 to i."""
    rows = scores.shape[-1]
    is_later = torch.arange(rows) > torch.arange(rows).repeat_interleave(group)[:, None]
    scores.masked_fill_(is_later, -torch.inf)
