"""From a layer's input to queries and what is cached of each token, and from attention's result to the output projection's input.

Latent attention never builds K and V: the query is turned into the latent's space instead (`keys` absorbed), and the weighted mean of
latents into the head's values afterwards (`values` absorbed). Then all heads attend to one shared vector per token. Pure.
"""

import torch

from kvferry.engine.model_config import AttentionShape, LatentShape
from kvferry.engine.rope import RotaryTable
from kvferry.engine.weights import HeadWeights, LatentWeights

__all__ = ["merge_heads", "project"]


def project(
    weights: HeadWeights | LatentWeights, shape: AttentionShape, inputs: torch.Tensor, rotary: RotaryTable
) -> tuple[torch.Tensor, torch.Tensor]:
    """(queries, [rows, heads, key width]; content of the cache, [rows, kv_heads, width]), both rotated, of this rank's heads."""
    if isinstance(weights, HeadWeights):
        return _project_heads(weights, shape, inputs, rotary)
    assert shape.latent is not None
    return _project_latent(weights, shape.latent, inputs, rotary)


def merge_heads(weights: HeadWeights | LatentWeights, attended: torch.Tensor) -> torch.Tensor:
    """[rows, heads, value width of the cache] -> [rows, this rank's columns of the output projection]"""
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
        weights.query(narrow).unflatten(1, (-1, latent.query_dim)).split((latent.qk_nope_head_dim, latent.qk_rope_head_dim), -1)
    )
    in_latent_space = torch.einsum("rhn,hnl->rhl", plain, weights.keys)
    queries = torch.cat((in_latent_space, rotary.rotate_interleaved(rotated)), dim=-1)
    compressed, key = weights.down(inputs).unsqueeze(1).split((latent.kv_lora_rank, latent.qk_rope_head_dim), -1)
    return queries, torch.cat((weights.norm(compressed), rotary.rotate_interleaved(key)), dim=-1)
