"""Generated models: families, sizes, the config.json of each, and the random weights.

Pure. The weights are scaled so that attention decides the hidden state and no special token ends a
text.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.engine.make_model.tokenizer import (
    BOS_TOKEN,
    EOS_TOKEN,
    PAD_TOKEN,
    VOCAB_SIZE,
    readable_token_ids,
    token_id,
)
from kvferry.engine.model.config import tensor_name
from kvferry.errors import ConfigError

MAX_HEADS = 128
WINDOW = 48
"""Window in tokens: three blocks, so that short prompts exceed it."""
FULL_EVERY = 3
"""In a model with windows, every third layer has full attention."""


class AttentionKind(Enum):
    """The kind of attention of a family."""

    HEADS = auto()
    WINDOWS = auto()
    LATENT = auto()
    STATES = auto()
    """Attention in every second layer; the others keep a state."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model architecture that can be generated."""

    architecture: str
    model_type: str
    kind: AttentionKind
    has_qk_norm: bool


@dataclass(frozen=True, slots=True)
class LatentSize:
    """The dimensions of latent attention."""

    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64


@dataclass(frozen=True, slots=True)
class StateSize:
    """The dimensions of layers that keep a state; the heads together are as wide as the model."""

    num_heads: int = 8
    num_groups: int = 2
    state_size: int = 8
    kernel: int = 4


@dataclass(frozen=True, slots=True)
class Size:
    """The dimensions of a generated model."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    latent: LatentSize = field(default_factory=LatentSize)
    """Dimensions that replace the KV heads in families with latent attention."""
    state: StateSize = field(default_factory=StateSize)
    """Dimensions of the layers without attention in families with states."""

    def with_heads(self, num_heads: int) -> "Size":
        """Return the size with `num_heads` heads.

        There are half as many KV heads if `num_heads` is even, else equally many. The feed-forward
        width becomes a multiple of the number of KV heads, so that as many ranks can divide the
        width.
        """
        if not 1 <= num_heads <= MAX_HEADS:
            raise ConfigError(f"--heads must be from 1 to {MAX_HEADS}, got {num_heads}")
        num_kv_heads = num_heads // 2 if num_heads % 2 == 0 else num_heads
        inner = -(-self.intermediate_size // num_kv_heads) * num_kv_heads
        return replace(
            self, num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=inner
        )

    def for_family(self, family: Family) -> "Size":
        """Return the size for a family; models with windows get half as many layers more.

        So there are several layers of each kind and more than two groups.
        """
        return (
            replace(self, num_layers=self.num_layers * 3 // 2)
            if family.kind is AttentionKind.WINDOWS
            else self
        )


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", AttentionKind.HEADS, has_qk_norm=True),
    "llama": Family("LlamaForCausalLM", "llama", AttentionKind.HEADS, has_qk_norm=False),
    "mla": Family("DeepseekV2ForCausalLM", "deepseek_v2", AttentionKind.LATENT, has_qk_norm=False),
    "window": Family("Gemma3ForCausalLM", "gemma3_text", AttentionKind.WINDOWS, has_qk_norm=True),
    "hybrid": Family("BambaForCausalLM", "bamba", AttentionKind.STATES, has_qk_norm=False),
}
SIZES = {"tiny": Size(4, 256, 256, 4, 2, 64, 4096), "middle": Size(16, 1024, 4096, 16, 8, 64, 4096)}
"""The sizes by name.

"middle", with 1 GB, is for measurements on GPUs; its answers are less sensitive to wrong KV.
"""


def make_config(family: Family, size: Size) -> dict[str, Any]:
    parts = {
        AttentionKind.HEADS: _head_config,
        AttentionKind.WINDOWS: _window_config,
        AttentionKind.LATENT: _latent_config,
        AttentionKind.STATES: _state_config,
    }
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": "float32",
        "torch_dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "max_position_embeddings": size.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "initializer_range": 0.02,
        "bos_token_id": token_id(BOS_TOKEN),
        "eos_token_id": token_id(EOS_TOKEN),
        "pad_token_id": token_id(PAD_TOKEN),
    } | parts[family.kind](size)


def _head_config(size: Size) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
    }


def _window_config(size: Size) -> dict[str, Any]:
    is_full = [(layer + 1) % FULL_EVERY == 0 for layer in range(size.num_layers)]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "query_pre_attn_scalar": size.head_dim,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention" if full else "sliding_attention" for full in is_full],
        # Fast rotation: if positions matter little, greedy text soon repeats itself.
        "rope_theta": 1000.0,
        "rope_local_base_freq": 300.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    }


def _latent_config(size: Size) -> dict[str, Any]:
    latent = size.latent
    return {
        "hidden_act": "silu",
        "num_key_value_heads": size.num_heads,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_nope_head_dim": latent.qk_nope_head_dim,
        "qk_rope_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "first_k_dense_replace": size.num_layers,
        # Only a part of a key is rotated, so that part rotates faster: if positions matter little,
        # greedy text soon repeats itself.
        "rope_theta": 500.0,
    }


def _state_config(size: Size) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "attn_layer_indices": [n for n in range(size.num_layers) if _has_attention(n)],
        "mamba_expand": 1,
        "mamba_n_heads": size.state.num_heads,
        "mamba_d_head": size.hidden_size // size.state.num_heads,
        "mamba_n_groups": size.state.num_groups,
        "mamba_d_state": size.state.state_size,
        "mamba_d_conv": size.state.kernel,
        "mamba_conv_bias": True,
        # Only a part of a key is rotated, as in `_latent_config`.
        "rope_theta": 500.0,
    }


def _has_attention(layer: int) -> bool:
    """Return whether a layer of a family with states has attention."""
    return layer % 2 == 1


# -- weights --
# Random weights, scaled.


@dataclass(frozen=True, slots=True)
class WeightScales:
    """The strength of each part of the model.

    The values are a compromise, because everything that amplifies a wrong block also amplifies
    rounding errors.

    Measured on 5 models (4 of them, and all prompts, not used to choose the values), 20 to 1,500
    tokens, 32 greedy tokens, one block replaced: in all layers, 0 of 120 changes went unnoticed; in
    one layer only, 5 of 480 (33 within the first 16 tokens). transformers in float32 differs by up
    to 8e-5 (12 models, 72 prompts of 300 tokens), in float64 by 1.5e-5. Shares of 0.7 and 1 with
    logits of 2.5 detected about as much (3 of 480), but float32 was off by up to 1.3e-4. Sharpness
    1.5 made decoding repeat one token. `test_make_model` holds the models with latents and windows
    to the same limits.
    """

    attention_logits: float = 2.5
    """Standard deviation of a query's scores."""
    attention_share: float = 0.6
    """Size of attention's contribution in a long context, relative to the hidden state.

    In a short context the contribution is larger.
    """
    mlp_share: float = 0.8
    """Size of the feed-forward contribution, relative to the hidden state."""
    last_layer: float = 2.0
    """Factor on both shares in the last layer, because no later layer amplifies it."""
    output_logits: float = 2.0
    """Standard deviation of the logits."""

    def layer_gains(self, num_layers: int) -> list[tuple[float, float]]:
        """Return the output gains of (attention, feed-forward) per layer.

        The gains grow from layer to layer, as the hidden state does.
        """
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
    """Return the scales of a family; models with windows have their own.

    Norms after both halves of a layer, and half as many layers more, amplify rounding errors
    further.
    """
    if family.kind is AttentionKind.WINDOWS:
        return WeightScales(attention_logits=1.8, mlp_share=0.9, last_layer=1.5, output_logits=1.4)
    return WeightScales()


LONG_CONTEXT_MEAN = 0.4
"""Standard deviation of attention's weighted mean of unit values.

The value applies to about 1,500 tokens at sharpness 2.5.
"""
PRODUCT_DEVIATION = 0.5
"""Approximate standard deviation of silu(x) * y for independent unit x and y."""
TIED_EMBEDDING = 0.25
"""Length of embeddings that are also output weights.

A token's own embedding in the hidden state raises the token's own logit: at length 1, greedy text
repeats two tokens.
"""


Array = npt.NDArray[np.float32]
Tensors = Iterator[tuple[str, Array]]


def make_tensors(family: Family, size: Size, seed: int) -> Tensors:
    """Yield every tensor under the name that the family's architecture gives it."""
    for name, tensor in _tensors(family, size, seed):
        yield tensor_name(family.architecture, name), tensor


def _tensors(family: Family, size: Size, seed: int) -> Tensors:
    scales = scales_of(family)
    numbers = np.random.Generator(np.random.PCG64(seed))
    is_tied = family.kind is AttentionKind.WINDOWS
    yield (
        "model.embed_tokens.weight",
        _tied_embedding(numbers, size)
        if is_tied
        else _matrix(numbers, (VOCAB_SIZE, size.hidden_size), 1.0),
    )
    for layer, gains in enumerate(scales.layer_gains(size.num_layers)):
        kind = family.kind
        if kind is AttentionKind.STATES and _has_attention(layer):
            kind = AttentionKind.HEADS
        for name, tensor in _layer_tensors(
            numbers, replace(family, kind=kind), size, scales.attention_logits**0.5, gains
        ):
            yield f"model.layers.{layer}.{name}", tensor
    if is_tied:
        yield (
            "model.norm.weight",
            np.full(size.hidden_size, scales.output_logits / TIED_EMBEDDING - 1, np.float32),
        )
        return
    yield "model.norm.weight", np.ones(size.hidden_size, np.float32)
    head = _matrix(
        numbers, (VOCAB_SIZE, size.hidden_size), scales.output_logits * size.hidden_size**-0.5
    )
    # Logit 0 where the most likely token has about 6: no special token ends a greedy text, and one
    # sampled token in 1,200 ends a sampled text (measured at temperature 1). Single bytes that
    # would print as garbage are equally rare.
    yield "lm_head.weight", head * _readable(0.0)


def _tied_embedding(numbers: np.random.Generator, size: Size) -> Array:
    """Return the embedding, with shorter rows for tokens that should not be chosen.

    The input norm evens out the lengths.
    """
    return _matrix(
        numbers, (VOCAB_SIZE, size.hidden_size), TIED_EMBEDDING * size.hidden_size**-0.5
    ) * _readable(0.25)


def _readable(otherwise: float) -> Array:
    factors = np.full((VOCAB_SIZE, 1), otherwise, np.float32)
    factors[readable_token_ids()] = 1.0
    return factors


def _layer_tensors(
    numbers: np.random.Generator,
    family: Family,
    size: Size,
    sharpness: float,
    gains: tuple[float, float],
) -> Tensors:
    hidden, inner = size.hidden_size, size.intermediate_size
    unit = hidden**-0.5
    if family.kind is AttentionKind.LATENT:
        yield from _latent_tensors(numbers, size, sharpness, gains[0])
    elif family.kind is AttentionKind.STATES:
        yield from _state_tensors(numbers, size, gains[0])
    else:
        yield from _head_tensors(numbers, family, size, sharpness, gains[0])
    if family.kind is AttentionKind.WINDOWS:
        # The norms after both halves set the size of each contribution in every context; weights
        # count from 1.
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


def _head_tensors(
    numbers: np.random.Generator, family: Family, size: Size, sharpness: float, gain: float
) -> Tensors:
    """Yield q and k with standard deviation `sharpness`, so scaled products have its square."""
    query_width, kv_width = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    unit = size.hidden_size**-0.5
    yield (
        "self_attn.q_proj.weight",
        _matrix(numbers, (query_width, size.hidden_size), sharpness * unit),
    )
    yield (
        "self_attn.k_proj.weight",
        _matrix(numbers, (kv_width, size.hidden_size), sharpness * unit),
    )
    yield "self_attn.v_proj.weight", _matrix(numbers, (kv_width, size.hidden_size), unit)
    yield (
        "self_attn.o_proj.weight",
        _matrix(numbers, (size.hidden_size, query_width), gain * query_width**-0.5),
    )
    if family.has_qk_norm:
        weight = sharpness - 1 if family.kind is AttentionKind.WINDOWS else sharpness
        yield "self_attn.q_norm.weight", np.full(size.head_dim, weight, np.float32)
        yield "self_attn.k_norm.weight", np.full(size.head_dim, weight, np.float32)


def _latent_tensors(
    numbers: np.random.Generator, size: Size, sharpness: float, gain: float
) -> Tensors:
    """Yield the tensors of latent attention; the latents are normalised."""
    latent, hidden, heads = size.latent, size.hidden_size, size.num_heads
    unit, inner = hidden**-0.5, latent.kv_lora_rank**-0.5
    yield "self_attn.q_a_proj.weight", _matrix(numbers, (latent.q_lora_rank, hidden), unit)
    yield "self_attn.q_a_layernorm.weight", np.ones(latent.q_lora_rank, np.float32)
    query_width = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    yield (
        "self_attn.q_b_proj.weight",
        _matrix(numbers, (query_width, latent.q_lora_rank), sharpness * latent.q_lora_rank**-0.5),
    )
    compressed = _matrix(numbers, (latent.kv_lora_rank, hidden), unit)
    rotated = _matrix(numbers, (latent.qk_rope_head_dim, hidden), sharpness * unit)
    yield "self_attn.kv_a_proj_with_mqa.weight", np.concatenate((compressed, rotated))
    yield "self_attn.kv_a_layernorm.weight", np.ones(latent.kv_lora_rank, np.float32)
    keys = [
        _matrix(numbers, (latent.qk_nope_head_dim, latent.kv_lora_rank), sharpness * inner)
        for _ in range(heads)
    ]
    values = [
        _matrix(numbers, (latent.v_head_dim, latent.kv_lora_rank), inner) for _ in range(heads)
    ]
    yield (
        "self_attn.kv_b_proj.weight",
        np.concatenate([part for pair in zip(keys, values, strict=True) for part in pair]),
    )
    value_width = heads * latent.v_head_dim
    yield (
        "self_attn.o_proj.weight",
        _matrix(numbers, (hidden, value_width), gain * value_width**-0.5),
    )


def _state_tensors(numbers: np.random.Generator, size: Size, gain: float) -> Tensors:
    """Yield the tensors of a layer with a state.

    The heads forget at different speeds: half of a state is gone after about 5 to 100 tokens.
    """
    state, hidden = size.state, size.hidden_size
    columns = hidden + 2 * state.num_groups * state.state_size
    yield (
        "mamba.in_proj.weight",
        _matrix(numbers, (hidden + columns + state.num_heads, hidden), hidden**-0.5),
    )
    taps = _matrix(numbers, (columns, state.kernel), state.kernel**-0.5)
    yield "mamba.conv1d.weight", taps[:, None]
    yield "mamba.conv1d.bias", np.zeros(columns, np.float32)
    yield "mamba.A_log", np.linspace(-4.0, -1.0, state.num_heads, dtype=np.float32)
    yield "mamba.D", np.full(state.num_heads, 0.25, np.float32)
    yield "mamba.dt_bias", np.zeros(state.num_heads, np.float32)
    yield "mamba.norm.weight", np.ones(hidden, np.float32)
    # The norm evens out the size of the result, so no long context makes it smaller.
    yield (
        "mamba.out_proj.weight",
        _matrix(numbers, (hidden, hidden), gain * LONG_CONTEXT_MEAN * hidden**-0.5),
    )


def _matrix(numbers: np.random.Generator, shape: tuple[int, int], deviation: float) -> Array:
    """Return uniform random numbers.

    Uniform numbers need no transcendental function, whose last bit differs between machines.
    """
    width = np.sqrt(12.0) * deviation
    return np.asarray((numbers.random(shape) - 0.5) * width, dtype=np.float32)
