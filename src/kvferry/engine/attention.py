"""Attention of a step's queries over the paged cache, K and V always as stored there.

Reading back what was just written, instead of using the unrounded values, makes a token's result the same whether its context was
computed in this step, an earlier one or another engine. Pure but for reading the cache.

Slots that a query does not see (before its window, after its last token, of an earlier owner) are set to 0, because a NaN or an infinity
there would survive its weight of 0; blocks that no query sees are not read at all.
"""

import torch

from kvferry.engine.flat_batch import AttentionPlan, DecodeTile, PrefillRange
from kvferry.engine.kv_cache import LayerCache

__all__ = ["attend"]

QUERY_TILE_ROWS = 128
"""Rows of a prefill that attend at once: keys that none of them sees are skipped, and their scores stay small."""


def attend(queries: torch.Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """`queries` is [rows, heads, key width]; the result is [rows, heads, value width], in `dtype`. `scale` is for the scores."""
    scaled = queries.to(dtype) * scale
    result = scaled.new_empty((*queries.shape[:2], cache.value_width))
    for tile in plan.decodes:
        result[tile.rows] = _attend_decodes(scaled[tile.rows], cache, tile)
    for part in plan.prefills:
        rows = slice(part.first_row, part.first_row + part.num_rows)
        result[rows] = _attend_prefill(scaled[rows], cache, part)
    return result


def _attend_decodes(queries: torch.Tensor, cache: LayerCache, tile: DecodeTile) -> torch.Tensor:
    context = cache.gather(tile.block_tables, queries.dtype)
    num_sequences, kv_heads, width, _ = context.shape
    sequences, slots = tile.stale
    context[sequences, :, slots] = 0
    keys, values = cache.keys_and_values(context.flatten(0, 1))
    grouped = queries.reshape(num_sequences * kv_heads, -1, queries.shape[-1])
    scores = torch.bmm(grouped, keys.transpose(1, 2)).view(num_sequences, -1, width)
    scores.masked_fill_(tile.hidden[:, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1).view(num_sequences * kv_heads, -1, width)
    return torch.bmm(weights, values).view(num_sequences, -1, cache.value_width)


def _attend_prefill(queries: torch.Tensor, cache: LayerCache, part: PrefillRange) -> torch.Tensor:
    context = cache.gather(part.block_table, queries.dtype)[0, :, part.first_slot : part.first_row_slot + part.num_rows]
    keys, values = cache.keys_and_values(context)
    kv_heads, group = len(keys), queries.shape[1] // len(keys)
    # [kv_heads, rows * group, width]: all queries that share a KV head are one matrix.
    grouped = queries.view(part.num_rows, kv_heads, group, -1).transpose(0, 1).flatten(1, 2)
    result = queries.new_empty((kv_heads, part.num_rows * group, cache.value_width))
    own = part.first_row_slot - part.first_slot
    for first in range(0, part.num_rows, QUERY_TILE_ROWS):
        last = min(first + QUERY_TILE_ROWS, part.num_rows)
        rows = slice(first * group, last * group)
        seen = slice(0 if part.window is None else max(0, own + first - part.window + 1), own + last)
        scores = torch.bmm(grouped[:, rows], keys[:, seen].transpose(1, 2))
        _hide(scores, own + first - seen.start, group, part.window)
        torch.bmm(torch.softmax(scores, dim=-1), values[:, seen], out=result[:, rows])
    return result.view(kv_heads, part.num_rows, group, -1).transpose(0, 1).flatten(1, 2)


def _hide(scores: torch.Tensor, own: int, group: int, window: int | None) -> None:
    """`scores` is [kv_heads, rows * group, keys]: row i stands at key `own + i` and sees that and the window before it."""
    num_rows, num_keys = scores.shape[1] // group, scores.shape[2]
    at = torch.arange(own, own + num_rows, device=scores.device).repeat_interleave(group)[:, None]
    if window is None:
        # All rows see what is before the first.
        scores[:, :, own:].masked_fill_(torch.arange(own, num_keys, device=scores.device) > at, -torch.inf)
        return
    keys = torch.arange(num_keys, device=scores.device)
    scores.masked_fill_((keys > at) | (keys <= at - window), -torch.inf)
