"""A tiny checkpoint from nothing, whose output is sensitive to its KV: one wrong block anywhere changes the tokens.

A complete Hugging Face folder that transformers and vLLM load too. Random weights alone would not do: attention of an untrained model is
close to a plain mean, so its output barely depends on any one token, and greedy decoding soon repeats itself. The scales in `WeightScales`
are chosen so that attention decides the hidden state. The same seed gives the same bytes on every machine. Writes files; no other effect.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from kvferry.engine.make_tokenizer import (
    BOS_TOKEN,
    CHAT_TEMPLATE,
    END_OF_TURN_TOKEN,
    EOS_TOKEN,
    PAD_TOKEN,
    VOCAB_SIZE,
    make_tokenizer_json,
    readable_token_ids,
    token_id,
)
from kvferry.engine.model_config import read_json_object
from kvferry.errors import ConfigError

__all__ = ["FAMILIES", "SIZES", "make_model"]

MARKER = "kvferry_make_model"
"""The key in config.json by which a folder is known as one of ours, which may be made anew."""


@dataclass(frozen=True, slots=True)
class Family:
    architecture: str
    model_type: str
    has_qk_norm: bool


@dataclass(frozen=True, slots=True)
class Size:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int

    def with_heads(self, num_heads: int) -> "Size":
        """The same with other heads: half as many for KV if that is a whole number, and a feed-forward part that so many ranks divide."""
        if not 1 <= num_heads <= MAX_HEADS:
            raise ConfigError(f"--heads must be from 1 to {MAX_HEADS}, got {num_heads}")
        num_kv_heads = num_heads // 2 if num_heads % 2 == 0 else num_heads
        inner = -(-self.intermediate_size // num_kv_heads) * num_kv_heads
        return replace(self, num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=inner)


MAX_HEADS = 128
FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", has_qk_norm=True),
    "llama": Family("LlamaForCausalLM", "llama", has_qk_norm=False),
}
SIZES = {"tiny": Size(4, 256, 256, 4, 2, 64, 4096)}


@dataclass(frozen=True, slots=True)
class WeightScales:
    """How strong each part is: a compromise, since what amplifies a wrong block amplifies rounding errors too.

    Measured on 5 models (4 of them, and all prompts, not used to choose the values), 20 to 1,500 tokens, 32 greedy tokens, one block
    replaced: in all layers, 0 of 120 changes went unseen; in one layer only, 5 of 480 (33 within the first 16 tokens).
    transformers in float32 differs by up to 8e-5 (12 models, 72 prompts of 300 tokens), in float64 by 1.5e-5. Shares of 0.7 and 1 with
    logits of 2.5 saw about as much (3 of 480) but float32 was off by up to 1.3e-4. Sharpness 1.5 made decoding repeat one token.
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


LONG_CONTEXT_MEAN = 0.4
"""Standard deviation of attention's weighted mean of unit values over about 1,500 tokens at sharpness 2.5."""
PRODUCT_DEVIATION = 0.5
"""About the standard deviation of silu(x) * y for independent unit x and y."""


def make_model(directory: Path, *, family: str = "qwen3", seed: int = 0, size: str = "tiny", heads: int | None = None) -> None:
    """Write the checkpoint, over an older one made here if need be. Any other folder that is not empty is refused.

    `heads` is the number of attention heads; None: the size's own."""
    if family not in FAMILIES:
        raise ConfigError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    if size not in SIZES:
        raise ConfigError(f"size must be one of {', '.join(SIZES)}, got {size!r}")
    if not 0 <= seed < 2**64:
        raise ConfigError(f"seed must be from 0 to 2**64 - 1, got {seed}")
    shape = SIZES[size] if heads is None else SIZES[size].with_heads(heads)
    config = _config(FAMILIES[family], shape)
    config[MARKER] = {"family": family, "seed": seed, "size": size}
    tensors = dict(_tensors(FAMILIES[family], shape, seed))
    try:
        _claim(directory)
        # config.json first: a folder left half written is then known as ours.
        _write(directory / "config.json", _json(config))
        _write(directory / "model.safetensors", save(tensors, metadata={"format": "pt"}))
        _write(directory / "tokenizer.json", make_tokenizer_json().encode())
        _write(directory / "tokenizer_config.json", _json(_tokenizer_config(shape)))
        _write(directory / "generation_config.json", _json(_generation_config()))
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from None


def _claim(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    # Hidden files may be those of another process that is just making the same model, or was killed doing so.
    if all(path.name.startswith(".") for path in directory.iterdir()):
        return
    path = directory / "config.json"
    if not path.exists() or MARKER not in read_json_object(path):
        raise ConfigError(f"{directory} is not empty and was not made by make-model; choose another directory")


def _write(path: Path, content: bytes) -> None:
    """All or nothing, so that an engine that starts meanwhile never reads half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _config(family: Family, size: Size) -> dict[str, Any]:
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
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": size.max_position_embeddings,
        "hidden_act": "silu",
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
    }


def _generation_config() -> dict[str, Any]:
    return {
        "bos_token_id": token_id(BOS_TOKEN),
        "eos_token_id": [token_id(EOS_TOKEN), token_id(END_OF_TURN_TOKEN)],
        "pad_token_id": token_id(PAD_TOKEN),
    }


def _tokenizer_config(size: Size) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "model_max_length": size.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


Array = npt.NDArray[np.float32]


def _tensors(family: Family, size: Size, seed: int) -> Iterator[tuple[str, Array]]:
    scales = WeightScales()
    numbers = np.random.Generator(np.random.PCG64(seed))
    hidden = size.hidden_size
    yield "model.embed_tokens.weight", _matrix(numbers, (VOCAB_SIZE, hidden), 1.0)
    for layer, gains in enumerate(scales.layer_gains(size.num_layers)):
        for name, tensor in _layer_tensors(numbers, family, size, scales.attention_logits**0.5, gains):
            yield f"model.layers.{layer}.{name}", tensor
    yield "model.norm.weight", np.ones(hidden, np.float32)
    head = _matrix(numbers, (VOCAB_SIZE, hidden), scales.output_logits * hidden**-0.5)
    # Logit 0 where the likeliest has about 6: no special token ends a greedy text, and one sampled token in 1,200 ends another (measured at
    # temperature 1); single bytes that would print as garbage are as rare.
    readable = np.zeros((VOCAB_SIZE, 1), np.float32)
    readable[readable_token_ids()] = 1.0
    yield "lm_head.weight", head * readable


def _layer_tensors(
    numbers: np.random.Generator, family: Family, size: Size, sharpness: float, gains: tuple[float, float]
) -> Iterator[tuple[str, Array]]:
    """q and k of standard deviation `sharpness` give scaled products of its square."""
    hidden, inner = size.hidden_size, size.intermediate_size
    query_width, kv_width = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    unit = hidden**-0.5
    yield "self_attn.q_proj.weight", _matrix(numbers, (query_width, hidden), sharpness * unit)
    yield "self_attn.k_proj.weight", _matrix(numbers, (kv_width, hidden), sharpness * unit)
    yield "self_attn.v_proj.weight", _matrix(numbers, (kv_width, hidden), unit)
    yield "self_attn.o_proj.weight", _matrix(numbers, (hidden, query_width), gains[0] * query_width**-0.5)
    if family.has_qk_norm:
        yield "self_attn.q_norm.weight", np.full(size.head_dim, sharpness, np.float32)
        yield "self_attn.k_norm.weight", np.full(size.head_dim, sharpness, np.float32)
    yield "input_layernorm.weight", np.ones(hidden, np.float32)
    yield "post_attention_layernorm.weight", np.ones(hidden, np.float32)
    yield "mlp.gate_proj.weight", _matrix(numbers, (inner, hidden), unit)
    yield "mlp.up_proj.weight", _matrix(numbers, (inner, hidden), unit)
    yield "mlp.down_proj.weight", _matrix(numbers, (hidden, inner), gains[1] * inner**-0.5)


def _matrix(numbers: np.random.Generator, shape: tuple[int, int], deviation: float) -> Array:
    """Uniform numbers: they need no transcendental function, whose last bit differs between machines."""
    width = np.sqrt(12.0) * deviation
    return np.asarray((numbers.random(shape) - 0.5) * width, dtype=np.float32)
