"""Which tensors a checkpoint must hold, and their shapes, as its config.json says. Pure."""

from collections.abc import Iterator
from fnmatch import fnmatch

from kvferry.engine.checkpoint import Checkpoint
from kvferry.engine.model_config import LatentShape, ModelConfig
from kvferry.errors import ConfigError

__all__ = ["check_shapes"]

IGNORED_TENSORS = ("*.rotary_emb.inv_freq",)
"""Old Llama files carry the rotary frequencies, which follow from the configuration."""

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def check_shapes(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """ConfigError names the first tensor that is missing, has another shape or has no place in the model."""
    expected = dict(_expected_shapes(config))
    for name, shape in expected.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            raise ConfigError(f"{config.directory}: tensor {name} is missing from the weights; copy the whole checkpoint")
        if stored.shape != shape:
            raise ConfigError(f"{stored.path}: tensor {name} has shape {list(stored.shape)} where config.json needs {list(shape)}")
    for name in sorted(checkpoint.tensors.keys() - expected.keys()):
        is_tied_copy = name == "lm_head.weight" and config.has_tied_embeddings
        if not is_tied_copy and not any(fnmatch(name, pattern) for pattern in IGNORED_TENSORS):
            raise ConfigError(
                f"{checkpoint.tensors[name].path}: tensor {name} is not part of a {config.architecture} as config.json describes it"
            )


def _expected_shapes(config: ModelConfig) -> Shapes:
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    yield "model.norm.weight", (config.hidden_size,)
    if not config.has_tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config):
            yield f"model.layers.{layer}.{name}", shape


def _layer_shapes(config: ModelConfig) -> Shapes:
    attention, hidden, inner = config.attention, config.hidden_size, config.intermediate_size
    yield from _head_shapes(config) if attention.latent is None else _latent_shapes(config, attention.latent)
    if attention.has_output_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config.is_gemma:
        yield "pre_feedforward_layernorm.weight", (hidden,)
        yield "post_feedforward_layernorm.weight", (hidden,)
    yield "mlp.gate_proj.weight", (inner, hidden)
    yield "mlp.up_proj.weight", (inner, hidden)
    yield "mlp.down_proj.weight", (hidden, inner)


def _head_shapes(config: ModelConfig) -> Shapes:
    attention, hidden = config.attention, config.hidden_size
    for name, count in {"q": attention.num_heads, "k": attention.num_kv_heads, "v": attention.num_kv_heads}.items():
        yield f"self_attn.{name}_proj.weight", (count * attention.head_dim, hidden)
        if attention.has_qkv_bias:
            yield f"self_attn.{name}_proj.bias", (count * attention.head_dim,)
    yield "self_attn.o_proj.weight", (hidden, attention.num_heads * attention.head_dim)
    if attention.has_qk_norm:
        yield "self_attn.q_norm.weight", (attention.head_dim,)
        yield "self_attn.k_norm.weight", (attention.head_dim,)


def _latent_shapes(config: ModelConfig, latent: LatentShape) -> Shapes:
    heads, hidden, rank = config.attention.num_heads, config.hidden_size, latent.q_lora_rank
    if rank is None:
        yield "self_attn.q_proj.weight", (heads * latent.query_dim, hidden)
    else:
        yield "self_attn.q_a_proj.weight", (rank, hidden)
        yield "self_attn.q_a_layernorm.weight", (rank,)
        yield "self_attn.q_b_proj.weight", (heads * latent.query_dim, rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent.width, hidden)
    yield "self_attn.kv_a_layernorm.weight", (latent.kv_lora_rank,)
    yield "self_attn.kv_b_proj.weight", (heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank)
    yield "self_attn.o_proj.weight", (hidden, heads * latent.v_head_dim)
    if config.attention.has_qkv_bias:
        yield "self_attn.kv_a_proj_with_mqa.bias", (latent.width,)
        if rank is not None:
            yield "self_attn.q_a_proj.bias", (rank,)
