"""Attention of one tensor-parallel rank: rotary positions, projections, scores over the cache.

Pure, except that `attend` reads the cache.
"""

import math
from dataclasses import dataclass

import torch

from kvferry.engine.cache.layout import LayerCache
from kvferry.engine.model.config import (
    AttentionShape,
    LatentShape,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
)
from kvferry.engine.model.flat_batch import AttentionPlan, DecodeTile, PrefillRange
from kvferry.engine.model.weights import HeadWeights, LatentWeights


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTable:
    """The cosine and sine of every position, [positions, rotary_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, positions: torch.Tensor) -> "RotaryTable":
        """Return the rows of `positions`, shaped to broadcast over heads."""
        return RotaryTable(self.cos[positions, None], self.sin[positions, None])

    def on(self, device: torch.device) -> "RotaryTable":
        return RotaryTable(self.cos.to(device), self.sin.to(device))

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate `heads`, [tokens, heads, head_dim].

        Of the first `rotary_dim` dimensions, i pairs with i + rotary_dim / 2. The others stay.
        """
        rotary_dim = 2 * self.cos.shape[-1]
        first, second = heads[..., :rotary_dim].chunk(2, dim=-1)
        return torch.cat((*self._rotated(first, second), heads[..., rotary_dim:]), dim=-1)

    def rotate_interleaved(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate as `rotate` does, but dimension 2i pairs with dimension 2i + 1."""
        return torch.stack(self._rotated(heads[..., 0::2], heads[..., 1::2]), dim=-1).flatten(-2)

    def _rotated(
        self, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return first * self.cos - second * self.sin, second * self.cos + first * self.sin


def make_rotary_table(
    rope: RopeConfig, rotary_dim: int, positions: int, dtype: torch.dtype
) -> RotaryTable:
    """Return the table of `positions` positions.

    Angles are computed in float32 even when the arithmetic is wider: exact angles would differ at
    far positions by up to 1e-4 from the angles with which the checkpoint was trained and other
    engines serve it.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case LinearScaling(factor):
            frequencies = frequencies / factor
        case Llama3Scaling():
            frequencies = _scaled(frequencies, rope.scaling)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype))


def _scaled(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Keep short wavelengths, stretch long wavelengths by `factor`, and blend in between.

    turns = number of rotations of a frequency within the original training context:
        turns > high_freq_factor          unchanged
        turns < low_freq_factor           divided by factor
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return blend * frequencies + (1 - blend) * frequencies / scaling.factor


# -- projection --
# From a layer's input to queries and cache content, and from the attention result to the input of
# the output projection.
#
# Latent attention never builds K and V. The query is projected into the latent space instead
# (`keys` absorbed), and the weighted mean of the latents is projected to the head's values
# afterwards (`values` absorbed). So all heads attend to one shared vector per token.


def project(
    weights: HeadWeights | LatentWeights,
    shape: AttentionShape,
    inputs: torch.Tensor,
    rotary: RotaryTable,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and cache content of this rank's heads, both rotated.

    The queries are [rows, heads, key width], the cache content is [rows, kv_heads, width].
    """
    if isinstance(weights, HeadWeights):
        return _project_heads(weights, shape, inputs, rotary)
    assert shape.latent is not None
    return _project_latent(weights, shape.latent, inputs, rotary)


def merge_heads(weights: HeadWeights | LatentWeights, attended: torch.Tensor) -> torch.Tensor:
    """Return the input of the output projection, [rows, this rank's columns].

    `attended` is [rows, heads, value width of the cache].
    """
    if isinstance(weights, LatentWeights):
        attended = torch.einsum("rhl,hvl->rhv", attended, weights.values)
    return attended.flatten(1)


def _project_heads(
    weights: HeadWeights, shape: AttentionShape, inputs: torch.Tensor, rotary: RotaryTable
) -> tuple[torch.Tensor, torch.Tensor]:
    heads = weights.qkv(inputs).unflatten(1, (-1, shape.head_dim))
    num_keys = weights.num_kv_heads
    queries, keys, values = heads.split((heads.shape[1] - 2 * num_keys, num_keys, num_keys), dim=1)
    if weights.q_norm is not None and weights.k_norm is not None:
        queries, keys = weights.q_norm(queries), weights.k_norm(keys)
    return rotary.rotate(queries), torch.cat((rotary.rotate(keys), values), dim=-1)


def _project_latent(
    weights: LatentWeights, latent: LatentShape, inputs: torch.Tensor, rotary: RotaryTable
) -> tuple[torch.Tensor, torch.Tensor]:
    narrow = inputs
    if weights.query_down is not None and weights.query_norm is not None:
        narrow = weights.query_norm(weights.query_down(inputs))
    plain, rotated = (
        weights.query(narrow)
        .unflatten(1, (-1, latent.query_dim))
        .split((latent.qk_nope_head_dim, latent.qk_rope_head_dim), -1)
    )
    # Absorb the key projection into the query: one product per query instead of one per cached
    # token.
    in_latent_space = torch.einsum("rhn,hnl->rhl", plain, weights.keys)
    queries = torch.cat((in_latent_space, rotary.rotate_interleaved(rotated)), dim=-1)
    compressed, key = (
        weights.down(inputs).unsqueeze(1).split((latent.kv_lora_rank, latent.qk_rope_head_dim), -1)
    )
    return queries, torch.cat((weights.norm(compressed), rotary.rotate_interleaved(key)), dim=-1)


# -- attention --
# Attention of a step's queries over the paged cache, with K and V as the cache stores them.
# Attention reads the values back that the step has just written, instead of using the unrounded
# values. So a token's result is the same whether its context was computed in this step, in an
# earlier step or by another engine.
#
# Slots that a query must not see (before its window, after its last token, or written by an earlier
# owner of the block) are set to 0, because a NaN or an infinity would survive a weight of 0. Blocks
# that no query sees are not read at all.


QUERY_TILE_ROWS = 128
"""Number of prefill rows that attend at once.

Keys that none of these rows sees are skipped, and the matrix of scores stays small.
"""


def attend(
    queries: torch.Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return the attention result, [rows, heads, value width], in `dtype`.

    `queries` is [rows, heads, key width]; `scale` multiplies the scores.
    """
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
    context = cache.gather(part.block_table, queries.dtype)[
        0, :, part.first_slot : part.first_row_slot + part.num_rows
    ]
    keys, values = cache.keys_and_values(context)
    kv_heads, group = len(keys), queries.shape[1] // len(keys)
    # [kv_heads, rows * group, width]: all queries that share a KV head form one matrix.
    grouped = queries.view(part.num_rows, kv_heads, group, -1).transpose(0, 1).flatten(1, 2)
    result = queries.new_empty((kv_heads, part.num_rows * group, cache.value_width))
    own = part.first_row_slot - part.first_slot
    for first in range(0, part.num_rows, QUERY_TILE_ROWS):
        last = min(first + QUERY_TILE_ROWS, part.num_rows)
        rows = slice(first * group, last * group)
        seen = slice(
            0 if part.window is None else max(0, own + first - part.window + 1), own + last
        )
        scores = torch.bmm(grouped[:, rows], keys[:, seen].transpose(1, 2))
        _hide(scores, own + first - seen.start, group, part.window)
        torch.bmm(torch.softmax(scores, dim=-1), values[:, seen], out=result[:, rows])
    return result.view(kv_heads, part.num_rows, group, -1).transpose(0, 1).flatten(1, 2)


def _hide(scores: torch.Tensor, own: int, group: int, window: int | None) -> None:
    """Set the scores of invisible keys to minus infinity.

    `scores` is [kv_heads, rows * group, keys]. Row i is at key `own + i` and sees that key and the
    window before it.
    """
    num_rows, num_keys = scores.shape[1] // group, scores.shape[2]
    at = torch.arange(own, own + num_rows, device=scores.device).repeat_interleave(group)[:, None]
    if window is None:
        # Every row sees all keys before the first row's key, so only the keys after it need a mask.
        scores[:, :, own:].masked_fill_(
            torch.arange(own, num_keys, device=scores.device) > at, -torch.inf
        )
        return
    keys = torch.arange(num_keys, device=scores.device)
    scores.masked_fill_((keys > at) | (keys <= at - window), -torch.inf)
