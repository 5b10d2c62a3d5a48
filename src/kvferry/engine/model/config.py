"""The configuration of a model, read from a Hugging Face config.json and checked once.

Supported are decoders with dense feed-forward layers and rotary positions. Llama, Mistral, Qwen2
and Qwen3 have the Llama shape; Gemma 3 (text) alternates windows; DeepSeek-V2 without experts has
latent attention; Bamba alternates attention with state-space (Mamba2) layers. A file that needs
different arithmetic is refused.

Every error is a ConfigError that names the file and the key. Reads two small files; otherwise pure.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from kvferry.config.fields import converted, span
from kvferry.errors import ConfigError
from kvferry.protocol.planning.heads import can_divide


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; give the folder of a Hugging Face checkpoint"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


MAX_COUNT = 1 << 24
"""Larger numbers of layers, heads, tokens or columns are mistakes: a model with them would not fit
into any memory, and even their lists would not.
"""


_Positive = Annotated[float, Meta(gt=0, le=1e300, description="a positive number")]


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """One JSON object of a file, with typed access; `null` counts as absent, except for `has`."""

    path: Path
    values: Mapping[str, Any]

    def fail(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}: {key} {problem}")

    def has(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        return int(self._number(key, Annotated[int, span("a whole number", least, MAX_COUNT)]))

    def positive(self, key: str, default: float | None = None) -> float:
        if self.get(key) is None and default is not None:
            return default
        return float(self._number(key, _Positive))

    def _number(self, key: str, kind: Any) -> Any:
        return converted(f"{self.path}: {key}", self.get(key), kind)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, got {value!r}")
        return default if value is None else value

    def section(self, key: str) -> "ConfigKeys | None":
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, f"must be an object, got {value!r}")
        return ConfigKeys(self.path, value)


# -- layers --
# The properties that may differ from layer to layer: the attention window and the rotation of
# positions. Windows are read as transformers reads them, with defaults that differ by family. A
# file is refused if it contradicts itself, or if it has a setting that transformers ignores and
# other engines apply.


GEMMA = "Gemma3ForCausalLM"
BAMBA = "BambaForCausalLM"
MISTRAL = "MistralForCausalLM"
QWENS = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
SLIDING, FULL = "sliding_attention", "full_attention"
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28
DEFAULT_GEMMA_PATTERN = 6
BAMBA_ROTARY_FACTOR = 0.5
"""The share of a head's dimensions that Bamba rotates, whatever the file states."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Divides frequencies by `factor` where the wavelength is long.

    Long is relative to the context with which the model was first trained.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides all frequencies by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary base and the scaling of frequencies."""

    theta: float
    scaling: Llama3Scaling | LinearScaling | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The properties of one layer."""

    rope: RopeConfig
    window: int | None = None
    """Token i sees the tokens i - window + 1 to i; None means all tokens up to i."""
    has_state: bool = False
    """Whether the layer keeps a state per sequence instead of attending to earlier tokens."""


def read_layers(config: ConfigKeys, architecture: str) -> tuple[LayerConfig, ...]:
    """Return one configuration per layer; a window over all positions counts as none."""
    if architecture == BAMBA:
        return _bamba_layers(config)
    is_sliding = _sliding_layers(config, architecture)
    window = None
    if any(is_sliding):
        width = config.count("sliding_window") if config.has("sliding_window") else DEFAULT_WINDOW
        window = width if width < config.count("max_position_embeddings") else None
    full_rope, sliding_rope = (
        _gemma_ropes(config) if architecture == GEMMA else (_rope(config),) * 2
    )
    kinds = {True: LayerConfig(sliding_rope, window), False: LayerConfig(full_rope)}
    return tuple(kinds[each] for each in is_sliding)


def _bamba_layers(config: ConfigKeys) -> tuple[LayerConfig, ...]:
    num_layers, indices = config.count("num_hidden_layers"), config.get("attn_layer_indices")
    if (
        not isinstance(indices, list)
        or not indices
        or not all(type(index) is int and 0 <= index < num_layers for index in indices)
        or len(set(indices)) == num_layers
    ):
        raise config.fail(
            "attn_layer_indices",
            f"must name some of the {num_layers} layers, but not all, got {indices!r:.80}",
        )
    rope, with_attention = _rope(config, BAMBA_ROTARY_FACTOR), set(indices)
    kinds = {has_state: LayerConfig(rope, has_state=has_state) for has_state in (True, False)}
    return tuple(kinds[n not in with_attention] for n in range(num_layers))


def _sliding_layers(config: ConfigKeys, architecture: str) -> list[bool]:
    num_layers = config.count("num_hidden_layers")
    named = _layer_types(config, num_layers)
    if architecture == MISTRAL:
        every = not config.has("sliding_window") or config.get("sliding_window") is not None
        if named is not None and named != [every] * num_layers:
            raise config.fail(
                "layer_types",
                "contradicts sliding_window, which a Mistral has in all layers or in none",
            )
        return [every] * num_layers
    if architecture in QWENS:
        return _qwen_layers(config, named, num_layers)
    if architecture == GEMMA:
        pattern = config.count("sliding_window_pattern", DEFAULT_GEMMA_PATTERN)
        return (
            [bool((layer + 1) % pattern) for layer in range(num_layers)] if named is None else named
        )
    if config.flag("use_sliding_window") or (named is not None and any(named)):
        key = "layer_types" if named else "use_sliding_window"
        raise config.fail(
            key, f"asks for sliding windows, which a {architecture} does not have in transformers"
        )
    return [False] * num_layers


def _qwen_layers(config: ConfigKeys, named: list[bool] | None, num_layers: int) -> list[bool]:
    """Return which layers slide; Qwen files contain a window even when no layer uses the window."""
    is_used = config.flag("use_sliding_window") and (
        not config.has("sliding_window") or config.get("sliding_window") is not None
    )
    if named is None:
        first = config.count("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, least=0)
        return [is_used and layer >= first for layer in range(num_layers)]
    if any(named) and not is_used:
        raise config.fail(
            "layer_types",
            "has sliding_attention, but use_sliding_window is not true or sliding_window is null",
        )
    return named


def _layer_types(config: ConfigKeys, num_layers: int) -> list[bool] | None:
    """Return whether each layer is named as sliding, or None if the file names no layer types."""
    names = config.get("layer_types")
    if names is None:
        return None
    if not isinstance(names, list):
        raise config.fail("layer_types", f"must be a list, got {names!r}")
    unknown = [name for name in names if name not in (FULL, SLIDING)]
    if unknown:
        raise config.fail(
            "layer_types", f"has {unknown[0]!r}, but only full and sliding attention are supported"
        )
    if len(names) != num_layers:
        raise config.fail(
            "layer_types", f"names {len(names)} layers, but num_hidden_layers is {num_layers}"
        )
    return [name == SLIDING for name in names]


def _rope(config: ConfigKeys, rotary_factor: float = 1.0) -> RopeConfig:
    """Return the rotation.

    Old files have rope_theta and rope_scaling, new files have both in rope_parameters.
    """
    section = (
        config.section("rope_parameters")
        or config.section("rope_scaling")
        or ConfigKeys(config.path, {})
    )
    if section.has(FULL) or section.has(SLIDING):
        raise config.fail(
            "rope_parameters", "differ between layer types, which is supported for Gemma 3 only"
        )
    return _rope_of(
        config,
        section,
        section.positive("rope_theta", config.positive("rope_theta", 10000.0)),
        rotary_factor,
    )


def _gemma_ropes(config: ConfigKeys) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotations of full and of sliding layers.

    Old files have rope_local_base_freq for sliding layers; their rope_scaling applies to full
    layers only.
    """
    parameters = config.section("rope_parameters")
    nothing = ConfigKeys(config.path, {})
    if parameters is None:
        scaling = config.section("rope_scaling") or nothing
        full = _rope_of(config, scaling, config.positive("rope_theta", 1_000_000.0))
        return full, _rope_of(config, nothing, config.positive("rope_local_base_freq", 10_000.0))
    sections = parameters.section(FULL), parameters.section(SLIDING)
    if None in sections:
        raise config.fail("rope_parameters", f"must have {FULL} and {SLIDING}")
    full_part, sliding_part = (section or nothing for section in sections)
    full = _rope_of(config, full_part, full_part.positive("rope_theta", 1_000_000.0))
    return full, _rope_of(config, sliding_part, sliding_part.positive("rope_theta", 10_000.0))


def _rope_of(
    config: ConfigKeys, section: ConfigKeys, theta: float, rotary_factor: float = 1.0
) -> RopeConfig:
    stated = config.positive("partial_rotary_factor", rotary_factor)
    if section.positive("partial_rotary_factor", stated) != rotary_factor:
        raise config.fail(
            "partial_rotary_factor",
            f"must be {rotary_factor:g}: other partial rotation is not supported",
        )
    kind = section.get("rope_type") or section.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, LinearScaling(section.positive("factor")))
    if kind != "llama3":
        raise config.fail("rope_type", f"must be default, linear or llama3, got {kind!r}")
    scaling = Llama3Scaling(
        factor=section.positive("factor"),
        low_freq_factor=section.positive("low_freq_factor"),
        high_freq_factor=section.positive("high_freq_factor"),
        original_max_position_embeddings=section.count("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise config.fail(
            "high_freq_factor", f"must be more than low_freq_factor {scaling.low_freq_factor}"
        )
    return RopeConfig(theta, scaling)


# -- model --
# The whole model.


DEEPSEEK = "DeepseekV2ForCausalLM"
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    GEMMA,
    DEEPSEEK,
    BAMBA,
)
DTYPES = ("float32", "bfloat16", "float16")
BAMBA_NAMES = {
    ".mlp.": ".feed_forward.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    "model.norm.": "model.final_layernorm.",
}
"""What Bamba calls a tensor, by its name in Llama."""
NO_TIME_STEP_LIMITS = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""How files of older and newer releases of transformers spell that time steps have no limits."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The dimensions of latent attention (MLA).

    One vector per token is cached, and each head derives its own K and V from the vector.

        cached   | kv_lora_rank: normalised latent | qk_rope_head_dim: rotated key of all heads |
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    """Dimension of the query latent; None means that queries are projected directly."""

    @property
    def query_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def width(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The dimensions of attention."""

    num_heads: int
    num_kv_heads: int
    """KV heads in the cache; 1 with latent attention, because all heads share the cached vector."""
    head_dim: int
    """Dimension of a cached key; with latent attention the dimension of the whole cached vector."""
    scale: float
    """Factor on the product of query and key."""
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    """Whether q, k and v have biases; with latent attention, the down projections."""
    has_output_bias: bool = False
    latent: LatentShape | None = None
    rotary_factor: float = 1.0
    """The share of a head's dimensions that is rotated: the first ones."""

    @property
    def rotary_dim(self) -> int:
        if self.latent is not None:
            return self.latent.qk_rope_head_dim
        return int(self.head_dim * self.rotary_factor)


@dataclass(frozen=True, slots=True)
class StateShape:
    """The dimensions of state-space layers (Mamba2).

    Each head keeps a matrix per sequence, which every token changes. The heads of one of the
    `num_groups` groups share B and C. A convolution, whose result the heads read, mixes each column
    with its values at the last `kernel` - 1 tokens.

        columns of the convolution   | x: num_heads * head_dim | B: num_groups * state_size | C |
        matrix of a head             [head_dim, state_size]
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int
    has_conv_bias: bool

    @property
    def width(self) -> int:
        """Width of x, of the gate and of the layer's result."""
        return self.num_heads * self.head_dim

    @property
    def num_columns(self) -> int:
        return self.width + 2 * self.num_groups * self.state_size


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """How a request samples that does not say it, from generation_config.json, as in vLLM."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The checked configuration of one checkpoint."""

    directory: Path
    architecture: str
    dtype: str
    """Format of the checkpoint in torch's spelling: `float32`, `bfloat16` or `float16`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    attention: AttentionShape
    norm_eps: float
    max_position_embeddings: int
    has_tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    """Token ids that end a sequence, from config.json and generation_config.json."""
    state: StateShape | None = None
    """The dimensions of the layers that keep a state; None if every layer has attention."""
    sampling: SamplingDefaults = SamplingDefaults()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_gemma(self) -> bool:
        """True for Gemma 3, which differs from Llama in several operations.

        Embeddings are scaled, norms add 1 to their weights, both halves of a layer also end with a
        norm, and GELU replaces SiLU.
        """
        return self.architecture == GEMMA

    def layer_name(self, layer: int) -> str:
        """Return the name of a layer's cache, which is the same in every engine."""
        return f"model.layers.{layer}.{'mamba' if self.layers[layer].has_state else 'self_attn'}"

    def max_model_len(self, requested: int) -> int:
        """Return the limit on prompt and output together; 0 requests the checkpoint's own limit."""
        if requested > self.max_position_embeddings:
            limit = self.max_position_embeddings
            raise ConfigError(
                f"--max-model-len {requested} is more than the model's {limit} positions; ask for "
                f"at most {limit}"
            )
        return requested or self.max_position_embeddings

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Raise ConfigError unless all ranks get equal shares.

        Every rank needs the same whole number of query heads, columns and heads with a state, and
        the same number of KV heads and of groups of B and C.
        """
        counts = {
            "num_attention_heads": self.attention.num_heads,
            "intermediate_size": self.intermediate_size,
        }
        shared = {"num_key_value_heads": self.attention.num_kv_heads}
        if self.state is not None:
            counts["mamba_n_heads"] = self.state.num_heads
            shared["mamba_n_groups"] = self.state.num_groups
        for key, value in counts.items():
            if value % tp_size:
                raise ConfigError(
                    f"--tensor-parallel-size {tp_size} does not divide the model's {key} {value}; "
                    "choose a divisor of it"
                )
        for key, value in shared.items():
            if not can_divide(value, tp_size):
                raise ConfigError(
                    f"--tensor-parallel-size {tp_size} and the model's {key} {value} do not fit: "
                    "one must divide the other"
                )


def tensor_name(architecture: str, name: str) -> str:
    """Return the name that an architecture gives to a tensor which Llama calls `name`."""
    if architecture == BAMBA:
        for usual, own in BAMBA_NAMES.items():
            name = name.replace(usual, own)
    return name


def llama_name(architecture: str, name: str) -> str:
    """Return what Llama calls a tensor that an architecture calls `name`."""
    if architecture == BAMBA:
        for usual, own in BAMBA_NAMES.items():
            name = name.replace(own, usual)
    return name


def read_model_config(directory: Path) -> ModelConfig:
    """Return the checked configuration of the checkpoint in `directory`."""
    config = ConfigKeys(directory / "config.json", read_json_object(directory / "config.json"))
    architecture = _architecture(config)
    _refuse_unsupported(config, architecture)
    layers = read_layers(config, architecture)
    generation = _generation_config(directory / "generation_config.json")
    return ModelConfig(
        directory=directory,
        architecture=architecture,
        dtype=_dtype(config),
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        intermediate_size=config.count("intermediate_size"),
        layers=layers,
        attention=_latent_attention(config)
        if architecture == DEEPSEEK
        else _attention(config, architecture),
        norm_eps=config.positive("rms_norm_eps", 1e-5 if architecture == BAMBA else 1e-6),
        max_position_embeddings=config.count("max_position_embeddings"),
        has_tied_embeddings=config.flag("tie_word_embeddings", default=architecture == GEMMA),
        eos_token_ids=_eos_token_ids(config, generation),
        state=_state(config) if architecture == BAMBA else None,
        sampling=_sampling(generation),
    )


def _architecture(config: ConfigKeys) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise config.fail(
            "architectures", f"must be one of {', '.join(ARCHITECTURES)}, got {names!r}"
        )
    return str(names[0])


def _refuse_unsupported(config: ConfigKeys, architecture: str) -> None:
    if config.get("quantization_config") is not None:
        raise config.fail(
            "quantization_config",
            "is set, but quantised checkpoints are not supported; use an unquantised one",
        )
    key, only = (
        ("hidden_activation", "gelu_pytorch_tanh")
        if architecture == GEMMA
        else ("hidden_act", "silu")
    )
    if config.get(key) not in (None, only):
        raise config.fail(key, f"must be {only}, got {config.get(key)!r}")
    if config.flag("mlp_bias"):
        raise config.fail(
            "mlp_bias", "is true, but biases in feed-forward layers are not supported"
        )
    if architecture == GEMMA:
        for key in (
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "use_bidirectional_attention",
        ):
            if config.get(key):
                raise config.fail(
                    key, f"is {config.get(key)!r}, but only Gemma 3 without it is supported"
                )
    if architecture == DEEPSEEK:
        num_layers, dense = (
            config.count("num_hidden_layers"),
            config.count("first_k_dense_replace", 0, least=0),
        )
        if dense < num_layers:
            raise config.fail(
                "first_k_dense_replace",
                f"leaves {num_layers - dense} layers with experts, which are not supported",
            )


def _dtype(config: ConfigKeys) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in DTYPES:
        raise config.fail("dtype", f"must be one of {', '.join(DTYPES)}, got {value!r}")
    return str(name)


def _attention(config: ConfigKeys, architecture: str) -> AttentionShape:
    num_heads = config.count("num_attention_heads")
    num_kv_heads = config.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.fail(
            "num_key_value_heads",
            f"must divide the {num_heads} attention heads, got {num_kv_heads}",
        )
    # Files of some families may omit head_dim although it differs from hidden_size / heads.
    usual = {"Qwen3ForCausalLM": 128, GEMMA: 256}.get(
        architecture, max(config.count("hidden_size") // num_heads, 1)
    )
    head_dim = config.count("head_dim", usual)
    # The part of a head that rotates must be even.
    divisor = 4 if architecture == BAMBA else 2
    if head_dim % divisor:
        raise config.fail("head_dim", f"must be a multiple of {divisor}, got {head_dim}")
    has_bias = config.flag("attention_bias")
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=(
            config.positive("query_pre_attn_scalar", 256.0) if architecture == GEMMA else head_dim
        )
        ** -0.5,
        has_qk_norm=architecture in ("Qwen3ForCausalLM", GEMMA),
        has_qkv_bias=has_bias or architecture == "Qwen2ForCausalLM",
        has_output_bias=has_bias and architecture != "Qwen2ForCausalLM",
        rotary_factor=BAMBA_ROTARY_FACTOR if architecture == BAMBA else 1.0,
    )


def _latent_attention(config: ConfigKeys) -> AttentionShape:
    num_heads = config.count("num_attention_heads")
    if config.count("num_key_value_heads", num_heads) != num_heads:
        raise config.fail(
            "num_key_value_heads",
            f"must equal the {num_heads} attention heads, because each has its own part of the "
            "latent",
        )
    latent = LatentShape(
        kv_lora_rank=config.count("kv_lora_rank", 512),
        qk_nope_head_dim=config.count("qk_nope_head_dim", 128),
        qk_rope_head_dim=config.count("qk_rope_head_dim", 64),
        v_head_dim=config.count("v_head_dim", 128),
        q_lora_rank=_query_rank(config),
    )
    if latent.qk_rope_head_dim % 2:
        raise config.fail("qk_rope_head_dim", f"must be even, got {latent.qk_rope_head_dim}")
    has_bias = config.flag("attention_bias")
    return AttentionShape(
        num_heads,
        1,
        latent.width,
        latent.query_dim**-0.5,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        latent=latent,
    )


def _state(config: ConfigKeys) -> StateShape:
    if config.flag("mamba_proj_bias"):
        raise config.fail("mamba_proj_bias", "is true, but biases there are not supported")
    if config.get("time_step_limit") not in (None, *NO_TIME_STEP_LIMITS):
        raise config.fail("time_step_limit", "is set, but limited time steps are not supported")
    num_heads, num_groups = config.count("mamba_n_heads", 128), config.count("mamba_n_groups", 1)
    width = config.count("mamba_expand", 2) * config.count("hidden_size")
    if width % num_heads or config.get("mamba_d_head") not in (None, "auto", width // num_heads):
        raise config.fail(
            "mamba_n_heads",
            f"times mamba_d_head must be mamba_expand * hidden_size {width}, got {num_heads} * "
            f"{config.get('mamba_d_head')!r}",
        )
    if num_heads % num_groups:
        raise config.fail("mamba_n_groups", f"must divide the {num_heads} heads, got {num_groups}")
    return StateShape(
        num_heads=num_heads,
        head_dim=width // num_heads,
        num_groups=num_groups,
        state_size=config.count("mamba_d_state", 256),
        kernel=config.count("mamba_d_conv", 4, least=2),
        has_conv_bias=config.flag("mamba_conv_bias", default=True),
    )


def _query_rank(config: ConfigKeys) -> int | None:
    """Return q_lora_rank; an absent key means the large model's value, null means None."""
    is_null = config.has("q_lora_rank") and config.get("q_lora_rank") is None
    return None if is_null else config.count("q_lora_rank", 1536)


def _generation_config(path: Path) -> ConfigKeys:
    return ConfigKeys(path, read_json_object(path) if path.exists() else {})


def _eos_token_ids(*sources: ConfigKeys) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise source.fail(
                    "eos_token_id", f"must be a token id or a list of them, got {value!r}"
                )
            found[token] = None
    return tuple(found)


def _sampling(generation: ConfigKeys) -> SamplingDefaults:
    top_p = generation.positive("top_p", 1.0)
    if top_p > 1:
        raise generation.fail("top_p", f"must be at most 1, got {top_p:g}")
    # Some files state a temperature of 0 for greedy decoding.
    is_greedy = generation.get("temperature") in (0, 0.0)
    return SamplingDefaults(
        temperature=0.0 if is_greedy else generation.positive("temperature", 1.0),
        top_p=top_p,
        top_k=generation.count("top_k", 0, least=-1),
    )
