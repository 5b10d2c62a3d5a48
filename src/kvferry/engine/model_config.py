"""What a checkpoint is, read from the config.json of a Hugging Face folder and checked once.

Supported: decoders of the Llama shape (Llama, Mistral, Qwen2, Qwen3) with full attention, dense SwiGLU layers and rotary positions, plain
or scaled as Llama 3 does. Whatever would need other arithmetic is refused with a ConfigError that names the key.
Reads two small files; otherwise pure.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError

__all__ = ["AttentionShape", "Llama3Scaling", "ModelConfig", "RopeConfig", "read_json_object", "read_model_config"]

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequencies are divided by `factor` where the wavelength is long against the context the model was first trained on."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    directory: Path
    architecture: str
    dtype: str
    """Of the checkpoint, as torch spells it: `float32`, `bfloat16` or `float16`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    attention: AttentionShape
    norm_eps: float
    max_position_embeddings: int
    has_tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    """From config.json and generation_config.json; any of them ends a sequence."""

    def layer_name(self, layer: int) -> str:
        """The name of a layer's cache, the same in every engine."""
        return f"model.layers.{layer}.self_attn"

    def max_model_len(self, requested: int) -> int:
        """The limit on prompt and output together; `requested` 0 means the checkpoint's own."""
        if requested > self.max_position_embeddings:
            limit = self.max_position_embeddings
            raise ConfigError(f"--max-model-len {requested} is more than the model's {limit} positions; ask for at most {limit}")
        return requested or self.max_position_embeddings

    def check_tensor_parallel(self, tp_size: int) -> None:
        """ConfigError unless every rank gets the same whole number of heads and columns."""
        parts = {
            "num_attention_heads": self.attention.num_heads,
            "num_key_value_heads": self.attention.num_kv_heads,
            "intermediate_size": self.intermediate_size,
        }
        for key, value in parts.items():
            if value % tp_size:
                raise ConfigError(f"--tensor-parallel-size {tp_size} does not divide the model's {key} {value}; choose a divisor of it")


def read_model_config(directory: Path) -> ModelConfig:
    """The checked configuration of the checkpoint in `directory`."""
    config = _Keys(directory / "config.json", read_json_object(directory / "config.json"))
    architecture = _architecture(config)
    _refuse_unsupported(config, architecture)
    return ModelConfig(
        directory=directory,
        architecture=architecture,
        dtype=_dtype(config),
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        intermediate_size=config.count("intermediate_size"),
        num_layers=config.count("num_hidden_layers"),
        attention=_attention(config, architecture),
        norm_eps=config.positive("rms_norm_eps", 1e-6),
        max_position_embeddings=config.count("max_position_embeddings"),
        has_tied_embeddings=config.flag("tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(config, directory / "generation_config.json"),
    )


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the folder of a Hugging Face checkpoint") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True)
class _Keys:
    """Typed access to one JSON object; every complaint names file and key."""

    path: Path
    values: Mapping[str, Any]

    def fail(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}: {key} {problem}")

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fail(key, f"must be a whole number of at least 1, got {value!r}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.fail(key, f"must be a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, got {value!r}")
        return bool(value)

    def section(self, key: str) -> "_Keys | None":
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, f"must be an object, got {value!r}")
        return _Keys(self.path, value)


def _architecture(config: _Keys) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise config.fail("architectures", f"must be one of {', '.join(ARCHITECTURES)}, got {names!r}")
    return str(names[0])


def _refuse_unsupported(config: _Keys, architecture: str) -> None:
    if config.get("quantization_config") is not None:
        raise config.fail("quantization_config", "is set, and quantised checkpoints are not supported; use an unquantised one")
    activation = config.get("hidden_act")
    if activation not in (None, "silu"):
        raise config.fail("hidden_act", f"must be silu, got {activation!r}")
    if config.flag("mlp_bias"):
        raise config.fail("mlp_bias", "is true, and biases in feed-forward layers are not supported")
    window = _sliding_window(config, architecture)
    if window is not None and window < config.count("max_position_embeddings"):
        raise config.fail("sliding_window", f"of {window} tokens is in use, and only full attention is supported")


def _sliding_window(config: _Keys, architecture: str) -> int | None:
    """The window if some layer really uses one: Qwen files carry a number even when no layer does."""
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise config.fail("layer_types", f"must be a list, got {layer_types!r}")
    unknown = [kind for kind in layer_types if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise config.fail("layer_types", f"has {unknown[0]!r}, and only full attention is supported")
    if config.get("sliding_window") is None:
        return None
    window = config.count("sliding_window")
    if layer_types:
        return window if "sliding_attention" in layer_types else None
    if architecture == "MistralForCausalLM":
        return window
    full_layers = config.count("max_window_layers", 0) if config.get("max_window_layers") else 0
    in_use = config.flag("use_sliding_window") and full_layers < config.count("num_hidden_layers")
    return window if in_use else None


def _dtype(config: _Keys) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in DTYPES:
        raise config.fail("dtype", f"must be one of {', '.join(DTYPES)}, got {value!r}")
    return str(name)


def _attention(config: _Keys, architecture: str) -> AttentionShape:
    num_heads = config.count("num_attention_heads")
    num_kv_heads = config.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.fail("num_key_value_heads", f"must divide the {num_heads} attention heads, got {num_kv_heads}")
    # Qwen3 files may leave head_dim out when it is 128, whatever hidden_size / heads gives.
    usual = 128 if architecture == "Qwen3ForCausalLM" else max(config.count("hidden_size") // num_heads, 1)
    head_dim = config.count("head_dim", usual)
    if head_dim % 2:
        raise config.fail("head_dim", f"must be even, got {head_dim}")
    has_bias = config.flag("attention_bias")
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=_rope(config),
        has_qk_norm=architecture == "Qwen3ForCausalLM",
        has_qkv_bias=has_bias or architecture == "Qwen2ForCausalLM",
        has_output_bias=has_bias and architecture != "Qwen2ForCausalLM",
    )


def _rope(config: _Keys) -> RopeConfig:
    """Old files have rope_theta beside rope_scaling, new ones both in rope_parameters."""
    section = config.section("rope_parameters") or config.section("rope_scaling") or _Keys(config.path, {})
    theta = section.positive("rope_theta", config.positive("rope_theta", 10000.0))
    if section.positive("partial_rotary_factor", config.positive("partial_rotary_factor", 1.0)) != 1.0:
        raise config.fail("partial_rotary_factor", "must be 1: partial rotation is not supported")
    kind = section.get("rope_type") or section.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind != "llama3":
        raise config.fail("rope_type", f"must be default or llama3, got {kind!r}")
    scaling = Llama3Scaling(
        factor=section.positive("factor"),
        low_freq_factor=section.positive("low_freq_factor"),
        high_freq_factor=section.positive("high_freq_factor"),
        original_max_position_embeddings=section.count("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise config.fail("high_freq_factor", f"must be more than low_freq_factor {scaling.low_freq_factor}")
    return RopeConfig(theta, scaling)


def _eos_token_ids(config: _Keys, generation_path: Path) -> tuple[int, ...]:
    sources = [config]
    if generation_path.exists():
        sources.append(_Keys(generation_path, read_json_object(generation_path)))
    found: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise source.fail("eos_token_id", f"must be a token id or a list of them, got {value!r}")
            found[token] = None
    return tuple(found)
