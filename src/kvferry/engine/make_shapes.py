"""The families and sizes of generated models, and the config.json of each. Pure."""

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from kvferry.engine.make_tokenizer import BOS_TOKEN, EOS_TOKEN, PAD_TOKEN, VOCAB_SIZE, token_id
from kvferry.errors import ConfigError

__all__ = ["FAMILIES", "SIZES", "AttentionKind", "Family", "Size", "make_config"]

MAX_HEADS = 128
WINDOW = 48
"""Tokens: three blocks, so that short prompts outgrow it."""
FULL_EVERY = 3
"""Of a model with windows every third layer looks at everything."""


class AttentionKind(Enum):
    HEADS = auto()
    WINDOWS = auto()
    LATENT = auto()


@dataclass(frozen=True, slots=True)
class Family:
    architecture: str
    model_type: str
    kind: AttentionKind
    has_qk_norm: bool


@dataclass(frozen=True, slots=True)
class LatentSize:
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64


@dataclass(frozen=True, slots=True)
class Size:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    latent: LatentSize = field(default_factory=LatentSize)
    """Instead of KV heads, in families that have latents."""

    def with_heads(self, num_heads: int) -> "Size":
        """The same with other heads: half as many for KV if that is a whole number, and a feed-forward part that so many ranks divide."""
        if not 1 <= num_heads <= MAX_HEADS:
            raise ConfigError(f"--heads must be from 1 to {MAX_HEADS}, got {num_heads}")
        num_kv_heads = num_heads // 2 if num_heads % 2 == 0 else num_heads
        inner = -(-self.intermediate_size // num_kv_heads) * num_kv_heads
        return replace(self, num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=inner)

    def for_family(self, family: Family) -> "Size":
        """With windows half as many layers more, so that there are several of each kind and more than two groups."""
        return replace(self, num_layers=self.num_layers * 3 // 2) if family.kind is AttentionKind.WINDOWS else self


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", AttentionKind.HEADS, has_qk_norm=True),
    "llama": Family("LlamaForCausalLM", "llama", AttentionKind.HEADS, has_qk_norm=False),
    "mla": Family("DeepseekV2ForCausalLM", "deepseek_v2", AttentionKind.LATENT, has_qk_norm=False),
    "window": Family("Gemma3ForCausalLM", "gemma3_text", AttentionKind.WINDOWS, has_qk_norm=True),
}
SIZES = {"tiny": Size(4, 256, 256, 4, 2, 64, 4096), "middle": Size(16, 1024, 4096, 16, 8, 64, 4096)}
"""The middle one, of 1 GB, is for measurements on GPUs: its answers are not as sensitive."""


def make_config(family: Family, size: Size) -> dict[str, Any]:
    parts = {AttentionKind.HEADS: _head_config, AttentionKind.WINDOWS: _window_config, AttentionKind.LATENT: _latent_config}
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
    return {"hidden_act": "silu", "num_key_value_heads": size.num_kv_heads, "head_dim": size.head_dim}


def _window_config(size: Size) -> dict[str, Any]:
    is_full = [(layer + 1) % FULL_EVERY == 0 for layer in range(size.num_layers)]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "query_pre_attn_scalar": size.head_dim,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention" if full else "sliding_attention" for full in is_full],
        # Fast rotation: where position counts for little, greedy text soon repeats itself.
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
        # Only part of a key is rotated, so that part turns faster: where position counts for little, greedy text soon repeats itself.
        "rope_theta": 500.0,
    }
