"""The random weights of generated models: scaled so that attention decides the hidden state, and no special token ends a text. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.engine.make_shapes import AttentionKind, Family, Size
from kvferry.engine.make_tokenizer import VOCAB_SIZE, readable_token_ids

__all__ = ["make_tensors"]


@dataclass(frozen=True, slots=True)
class WeightScales:
    """How strong each part is: a compromise, since what amplifies a wrong block amplifies rounding errors too.

    Measured on 5 models (4 of them, and all prompts, not used to choose the values), 20 to 1,500 tokens, 32 greedy tokens, one block
    replaced: in all layers, 0 of 120 changes went unseen; in one layer only, 5 of 480 (33 within the first 16 tokens).
    transformers in float32 differs by up to 8e-5 (12 models, 72 prompts of 300 tokens), in float64 by 1.5e-5. Shares of 0.7 and 1 with
    logits of 2.5 saw about as much (3 of 480) but float32 was off by up to 1.3e-4. Sharpness 1.5 made decoding repeat one token.
    Those of latents and windows are held to the same by `test_make_model`.
    """

    attention_logits: float = 2.5
    """Standard deviation of a query's scores."""
    attention_share: float = 0.6
    """What attention adds to the hidden state in a long context, against what is there already. More in a short one."""
    mlp_share: float = 0.8
    """The same of the feed-forward part."""
    last_layer: float = 2.0
    """Factor on both shares in the last layer, which no other amplifies."""
    output_logits: float = 2.0
    """Standard deviation of the logits."""

    def layer_gains(self, num_layers: int) -> list[tuple[float, float]]:
        """Output gain of (attention, feed-forward) per layer: the hidden state grows from layer to layer, so they do."""
        gains = []
        hidden = 1.0
        for layer in range(num_layers):
            factor = self.last_layer if layer == num_layers - 1 else 1.0
            attention_share, mlp_share = self.attention_share * factor, self.mlp_share * factor
            attention = attention_share * hidden / LONG_CONTEXT_MEAN
            hidden *= (1 + attention_share**2) ** 0.5
            gains.append((attention, mlp_share * hidden / PRODUCT_DEVIATION))
            hidden *= (1 + mlp_share**2) ** 0.5
        return gains


def scales_of(family: Family) -> WeightScales:
    """Norms behind both halves of a layer, and half as many layers more, amplify rounding errors further."""
    if family.kind is AttentionKind.WINDOWS:
        return WeightScales(attention_logits=1.8, mlp_share=0.9, last_layer=1.5, output_logits=1.4)
    return WeightScales()


LONG_CONTEXT_MEAN = 0.4
"""Standard deviation of attention's weighted mean of unit values over about 1,500 tokens at sharpness 2.5."""
PRODUCT_DEVIATION = 0.5
"""About the standard deviation of silu(x) * y for independent unit x and y."""
TIED_EMBEDDING = 0.25
"""Length of embeddings that are output weights too. A token's own embedding in the hidden state speaks for itself there: at length 1
greedy text repeats two tokens."""


Array = npt.NDArray[np.float32]
Tensors = Iterator[tuple[str, Array]]


def make_tensors(family: Family, size: Size, seed: int) -> Tensors:
    scales = scales_of(family)
    numbers = np.random.Generator(np.random.PCG64(seed))
    is_tied = family.kind is AttentionKind.WINDOWS
    yield "model.embed_tokens.weight", _tied_embedding(numbers, size) if is_tied else _matrix(numbers, (VOCAB_SIZE, size.hidden_size), 1.0)
    for layer, gains in enumerate(scales.layer_gains(size.num_layers)):
        for name, tensor in _layer_tensors(numbers, family, size, scales.attention_logits**0.5, gains):
            yield f"model.layers.{layer}.{name}", tensor
    if is_tied:
        yield "model.norm.weight", np.full(size.hidden_size, scales.output_logits / TIED_EMBEDDING - 1, np.float32)
        return
    yield "model.norm.weight", np.ones(size.hidden_size, np.float32)
    head = _matrix(numbers, (VOCAB_SIZE, size.hidden_size), scales.output_logits * size.hidden_size**-0.5)
    # Logit 0 where the likeliest has about 6: no special token ends a greedy text, and one sampled token in 1,200 ends another (measured at
    # temperature 1); single bytes that would print as garbage are as rare.
    yield "lm_head.weight", head * _readable(0.0)


def _tied_embedding(numbers: np.random.Generator, size: Size) -> Array:
    """Shorter rows where a token shall not be chosen; the input norm evens that out."""
    return _matrix(numbers, (VOCAB_SIZE, size.hidden_size), TIED_EMBEDDING * size.hidden_size**-0.5) * _readable(0.25)


def _readable(otherwise: float) -> Array:
    factors = np.full((VOCAB_SIZE, 1), otherwise, np.float32)
    factors[readable_token_ids()] = 1.0
    return factors


def _layer_tensors(numbers: np.random.Generator, family: Family, size: Size, sharpness: float, gains: tuple[float, float]) -> Tensors:
    hidden, inner = size.hidden_size, size.intermediate_size
    unit = hidden**-0.5
    if family.kind is AttentionKind.LATENT:
        yield from _latent_tensors(numbers, size, sharpness, gains[0])
    else:
        yield from _head_tensors(numbers, family, size, sharpness, gains[0])
    if family.kind is AttentionKind.WINDOWS:
        # Norms behind both halves set what they add, whatever the context; the weights are counted from 1.
        shares = (gains[0] * LONG_CONTEXT_MEAN, gains[1] * PRODUCT_DEVIATION)
        yield "input_layernorm.weight", np.zeros(hidden, np.float32)
        yield "post_attention_layernorm.weight", np.full(hidden, shares[0] - 1, np.float32)
        yield "pre_feedforward_layernorm.weight", np.zeros(hidden, np.float32)
        yield "post_feedforward_layernorm.weight", np.full(hidden, shares[1] - 1, np.float32)
    else:
        yield "input_layernorm.weight", np.ones(hidden, np.float32)
        yield "post_attention_layernorm.weight", np.ones(hidden, np.float32)
    yield "mlp.gate_proj.weight", _matrix(numbers, (inner, hidden), unit)
    yield "mlp.up_proj.weight", _matrix(numbers, (inner, hidden), unit)
    yield "mlp.down_proj.weight", _matrix(numbers, (hidden, inner), gains[1] * inner**-0.5)


def _head_tensors(numbers: np.random.Generator, family: Family, size: Size, sharpness: float, gain: float) -> Tensors:
    """q and k of standard deviation `sharpness` give scaled products of its square."""
    query_width, kv_width = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    unit = size.hidden_size**-0.5
    yield "self_attn.q_proj.weight", _matrix(numbers, (query_width, size.hidden_size), sharpness * unit)
    yield "self_attn.k_proj.weight", _matrix(numbers, (kv_width, size.hidden_size), sharpness * unit)
    yield "self_attn.v_proj.weight", _matrix(numbers, (kv_width, size.hidden_size), unit)
    yield "self_attn.o_proj.weight", _matrix(numbers, (size.hidden_size, query_width), gain * query_width**-0.5)
    if family.has_qk_norm:
        weight = sharpness - 1 if family.kind is AttentionKind.WINDOWS else sharpness
        yield "self_attn.q_norm.weight", np.full(size.head_dim, weight, np.float32)
        yield "self_attn.k_norm.weight", np.full(size.head_dim, weight, np.float32)


def _latent_tensors(numbers: np.random.Generator, size: Size, sharpness: float, gain: float) -> Tensors:
    """The same by way of latents, which are normalised."""
    latent, hidden, heads = size.latent, size.hidden_size, size.num_heads
    unit, inner = hidden**-0.5, latent.kv_lora_rank**-0.5
    yield "self_attn.q_a_proj.weight", _matrix(numbers, (latent.q_lora_rank, hidden), unit)
    yield "self_attn.q_a_layernorm.weight", np.ones(latent.q_lora_rank, np.float32)
    query_width = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    yield "self_attn.q_b_proj.weight", _matrix(numbers, (query_width, latent.q_lora_rank), sharpness * latent.q_lora_rank**-0.5)
    compressed = _matrix(numbers, (latent.kv_lora_rank, hidden), unit)
    rotated = _matrix(numbers, (latent.qk_rope_head_dim, hidden), sharpness * unit)
    yield "self_attn.kv_a_proj_with_mqa.weight", np.concatenate((compressed, rotated))
    yield "self_attn.kv_a_layernorm.weight", np.ones(latent.kv_lora_rank, np.float32)
    keys = [_matrix(numbers, (latent.qk_nope_head_dim, latent.kv_lora_rank), sharpness * inner) for _ in range(heads)]
    values = [_matrix(numbers, (latent.v_head_dim, latent.kv_lora_rank), inner) for _ in range(heads)]
    yield "self_attn.kv_b_proj.weight", np.concatenate([part for pair in zip(keys, values, strict=True) for part in pair])
    value_width = heads * latent.v_head_dim
    yield "self_attn.o_proj.weight", _matrix(numbers, (hidden, value_width), gain * value_width**-0.5)


def _matrix(numbers: np.random.Generator, shape: tuple[int, int], deviation: float) -> Array:
    """Uniform numbers: they need no transcendental function, whose last bit differs between machines."""
    width = np.sqrt(12.0) * deviation
    return np.asarray((numbers.random(shape) - 0.5) * width, dtype=np.float32)
