"""What a checkpoint is, read from the config.json of a Hugging Face folder and checked once.

Supported: decoders with dense feed-forward layers and rotary positions. Of the Llama shape: Llama, Mistral, Qwen2, Qwen3; with
alternating windows: Gemma 3 (text); with latent attention: DeepSeek-V2 without experts. Whatever would need other arithmetic is refused
with a ConfigError that names the key. Reads two small files; otherwise pure.
"""

from dataclasses import dataclass
from pathlib import Path

from kvferry.engine.config_keys import ConfigKeys, read_json_object
from kvferry.engine.layer_kinds import GEMMA, LayerConfig, read_layers
from kvferry.errors import ConfigError
from kvferry.protocol.ranks import can_divide

__all__ = ["AttentionShape", "LatentShape", "ModelConfig", "read_model_config"]

DEEPSEEK = "DeepseekV2ForCausalLM"
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", GEMMA, DEEPSEEK)
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Latent attention (MLA): what is cached of a token is one vector, from which each head makes its own K and V.

    cached   | kv_lora_rank: normalised latent | qk_rope_head_dim: rotated key, shared by all heads |
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    """Queries are made by way of so many dimensions; None: directly."""

    @property
    def query_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def width(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    """Of the cache; 1 with latent attention, whose vector serves all heads."""
    head_dim: int
    """Of a cached key; the whole vector's with latent attention."""
    scale: float
    """Factor on the product of query and key."""
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    """With latent attention: of the projections down."""
    has_output_bias: bool = False
    latent: LatentShape | None = None

    @property
    def rotary_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class ModelConfig:
    directory: Path
    architecture: str
    dtype: str
    """Of the checkpoint, as torch spells it: `float32`, `bfloat16` or `float16`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    attention: AttentionShape
    norm_eps: float
    max_position_embeddings: int
    has_tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    """From config.json and generation_config.json; any of them ends a sequence."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_gemma(self) -> bool:
        """Embeddings are scaled, norms count their weights from 1 and stand behind both halves of a layer too, GELU instead of SiLU."""
        return self.architecture == GEMMA

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
        """ConfigError unless every rank gets the same whole number of query heads and columns, and the same number of KV heads."""
        for key, value in {"num_attention_heads": self.attention.num_heads, "intermediate_size": self.intermediate_size}.items():
            if value % tp_size:
                raise ConfigError(f"--tensor-parallel-size {tp_size} does not divide the model's {key} {value}; choose a divisor of it")
        kv_heads = self.attention.num_kv_heads
        if not can_divide(kv_heads, tp_size):
            raise ConfigError(
                f"--tensor-parallel-size {tp_size} and the model's num_key_value_heads {kv_heads} do not fit: one must divide the other"
            )


def read_model_config(directory: Path) -> ModelConfig:
    """The checked configuration of the checkpoint in `directory`."""
    config = ConfigKeys(directory / "config.json", read_json_object(directory / "config.json"))
    architecture = _architecture(config)
    _refuse_unsupported(config, architecture)
    layers = read_layers(config, architecture)
    return ModelConfig(
        directory=directory,
        architecture=architecture,
        dtype=_dtype(config),
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        intermediate_size=config.count("intermediate_size"),
        layers=layers,
        attention=_latent_attention(config) if architecture == DEEPSEEK else _attention(config, architecture),
        norm_eps=config.positive("rms_norm_eps", 1e-6),
        max_position_embeddings=config.count("max_position_embeddings"),
        has_tied_embeddings=config.flag("tie_word_embeddings", default=architecture == GEMMA),
        eos_token_ids=_eos_token_ids(config, directory / "generation_config.json"),
    )


def _architecture(config: ConfigKeys) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise config.fail("architectures", f"must be one of {', '.join(ARCHITECTURES)}, got {names!r}")
    return str(names[0])


def _refuse_unsupported(config: ConfigKeys, architecture: str) -> None:
    if config.get("quantization_config") is not None:
        raise config.fail("quantization_config", "is set, and quantised checkpoints are not supported; use an unquantised one")
    key, only = ("hidden_activation", "gelu_pytorch_tanh") if architecture == GEMMA else ("hidden_act", "silu")
    if config.get(key) not in (None, only):
        raise config.fail(key, f"must be {only}, got {config.get(key)!r}")
    if config.flag("mlp_bias"):
        raise config.fail("mlp_bias", "is true, and biases in feed-forward layers are not supported")
    if architecture == GEMMA:
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if config.get(key):
                raise config.fail(key, f"is {config.get(key)!r}, and only Gemma 3 without it is supported")
    if architecture == DEEPSEEK:
        num_layers, dense = config.count("num_hidden_layers"), config.count("first_k_dense_replace", 0, least=0)
        if dense < num_layers:
            raise config.fail("first_k_dense_replace", f"leaves {num_layers - dense} layers with experts, which are not supported")


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
        raise config.fail("num_key_value_heads", f"must divide the {num_heads} attention heads, got {num_kv_heads}")
    # Files of some families may leave head_dim out, whatever hidden_size / heads gives.
    usual = {"Qwen3ForCausalLM": 128, GEMMA: 256}.get(architecture, max(config.count("hidden_size") // num_heads, 1))
    head_dim = config.count("head_dim", usual)
    if head_dim % 2:
        raise config.fail("head_dim", f"must be even, got {head_dim}")
    has_bias = config.flag("attention_bias")
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=(config.positive("query_pre_attn_scalar", 256.0) if architecture == GEMMA else head_dim) ** -0.5,
        has_qk_norm=architecture in ("Qwen3ForCausalLM", GEMMA),
        has_qkv_bias=has_bias or architecture == "Qwen2ForCausalLM",
        has_output_bias=has_bias and architecture != "Qwen2ForCausalLM",
    )


def _latent_attention(config: ConfigKeys) -> AttentionShape:
    num_heads = config.count("num_attention_heads")
    if config.count("num_key_value_heads", num_heads) != num_heads:
        raise config.fail("num_key_value_heads", f"must equal the {num_heads} attention heads, because each has its own part of the latent")
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
        num_heads, 1, latent.width, latent.query_dim**-0.5, has_qkv_bias=has_bias, has_output_bias=has_bias, latent=latent
    )


def _query_rank(config: ConfigKeys) -> int | None:
    """Left out, it is that of the large model; null means none."""
    is_null = config.has("q_lora_rank") and config.get("q_lora_rank") is None
    return None if is_null else config.count("q_lora_rank", 1536)


def _eos_token_ids(config: ConfigKeys, generation_path: Path) -> tuple[int, ...]:
    sources = [config]
    if generation_path.exists():
        sources.append(ConfigKeys(generation_path, read_json_object(generation_path)))
    found: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise source.fail("eos_token_id", f"must be a token id or a list of them, got {value!r}")
            found[token] = None
    return tuple(found)
