"""The weights of one tensor-parallel rank, and the number formats of weights, cache and arithmetic.

Query heads and feed-forward columns are split evenly. Rank r of t holds the output rows [r/t,
(r+1)/t) of q, gate and up, the matching input columns of o and down (the products are summed over
ranks), and its share of the output vocabulary. KV heads are split in the same way; with more ranks
than KV heads, neighbouring ranks hold the same head. Heads that keep a state are split like query
heads, and their groups of B and C like KV heads. Norms, input embeddings and the down
projections of latents are whole on every rank.

Reads files; otherwise pure.
"""

from dataclasses import dataclass

import torch

from kvferry.connectors.contract import ParallelConfig
from kvferry.engine.model.checkpoint import Checkpoint, check_shapes
from kvferry.engine.model.config import LatentShape, ModelConfig, StateShape
from kvferry.engine.options import EngineOptions, first_gpu
from kvferry.errors import ConfigError
from kvferry.protocol.planning.heads import heads_of

FLOAT64_WEIGHTS_LIMIT_BYTES = 256 * 1024 * 1024
"""The largest checkpoint that is computed in float64 (float32 everywhere, half precision on GPUs).

The order of the additions in a matrix product depends on the batch, on chunking and on the number
of ranks. The order moves a logit by about 1e-6 in float32 and by about 1e-3 in half precision,
enough to change a greedy token occasionally; in float64 by about 1e-14. float64 costs time and two
to four times the memory for the weights, so models above the limit are computed in their own
format. On CPUs, users choose half precision for speed, so it stays as it is. The cache keeps its
own format everywhere, so a transfer moves the same bytes as for any other model
(docs/decisions/007-arithmetic-of-small-models.md).
"""

WEIGHT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_DTYPES = {
    **WEIGHT_DTYPES,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
COMPUTE_DTYPES = {**WEIGHT_DTYPES, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class Precision:
    """The number formats of one engine."""

    weights: torch.dtype
    """Weights are rounded to this format and then stored in `compute`."""
    cache: torch.dtype
    """K and V are stored in this format with a scale of 1, and widened before any computation."""
    compute: torch.dtype

    @property
    def attention(self) -> torch.dtype:
        """Format of attention scores and the softmax: at least float32."""
        return torch.promote_types(self.compute, torch.float32)


def choose_precision(
    options: EngineOptions, checkpoint_dtype: str, checkpoint_bytes: int
) -> Precision:
    """Choose the formats; `checkpoint_bytes` is the size of all weights, the same on every rank."""
    weights = _dtype("dtype", options.dtype, WEIGHT_DTYPES, WEIGHT_DTYPES[checkpoint_dtype])
    is_small = checkpoint_bytes <= FLOAT64_WEIGHTS_LIMIT_BYTES
    is_wide = is_small and (weights is torch.float32 or first_gpu(options.device) is not None)
    return Precision(
        weights=weights,
        cache=_dtype("kv_cache_dtype", options.kv_cache_dtype, CACHE_DTYPES, weights),
        compute=_dtype(
            "compute_dtype",
            options.compute_dtype,
            COMPUTE_DTYPES,
            torch.float64 if is_wide else weights,
        ),
    )


def _dtype(key: str, name: str, known: dict[str, torch.dtype], auto: torch.dtype) -> torch.dtype:
    if name == "auto":
        return auto
    if name not in known:
        raise ConfigError(f"{key} must be auto or one of {', '.join(known)}, got {name!r}")
    return known[name]


# -- weights --
# The tensors of one rank.


LATENT_NORM_EPS = 1e-6
"""Epsilon of DeepSeek-V2's latent norms, which do not use rms_norm_eps."""


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A matrix with an optional bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(inputs, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Root mean square norm over the last dimension.

    The mean is computed in at least float32; the product with `weight` is computed in the format of
    `weight`.
    """

    weight: torch.Tensor
    eps: float

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return ((wide * scale).to(self.weight.dtype) * self.weight).to(values.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """Weights of attention with separate K and V per KV head."""

    qkv: Linear
    """The rows of this rank's q heads, then k heads, then v heads."""
    num_kv_heads: int
    q_norm: Norm | None
    k_norm: Norm | None


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """Weights of latent attention; `keys` and `values` project the shared latent for each head."""

    query_down: Linear | None
    query_norm: Norm | None
    query: Linear
    """The query rows of this rank's heads."""
    down: Linear
    """Projection to the latent and to the key that is rotated."""
    norm: Norm
    """Norm of the latent."""
    keys: torch.Tensor
    """[heads, qk_nope_head_dim, kv_lora_rank]"""
    values: torch.Tensor
    """[heads, v_head_dim, kv_lora_rank]"""


@dataclass(frozen=True, slots=True, eq=False)
class StateWeights:
    """Weights of a state-space layer, for this rank's heads."""

    project: Linear
    """The rows of the gate, of the convolution's columns (x, B, C) and of the time step."""
    columns: tuple[int, int, int]
    """How many columns of x, B and C this rank has."""
    conv: torch.Tensor
    """[columns, kernel]"""
    conv_bias: torch.Tensor | None
    decay: torch.Tensor
    """[heads]: how fast a state fades, a negative factor on the time step."""
    skip: torch.Tensor
    """[heads]: the factor on x that is added to the state's result."""
    step_bias: torch.Tensor
    """[heads]"""
    norm: torch.Tensor
    """The weights of the norm, which covers the heads of all ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of one layer."""

    input_norm: Norm
    attention: HeadWeights | LatentWeights | StateWeights
    """The weights of the attention, or of the state-space layer in its place."""
    output: Linear
    """Output projection; only rank 0 has the bias, because the ranks' products are summed."""
    output_norm: Norm | None
    """Norm of the attention sum, before the sum is added to the hidden state."""
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    down_norm: Norm | None
    """Norm of the feed-forward sum, before the sum is added to the hidden state."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """All weights of one rank."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: Norm
    lm_head: Linear
    """This rank's share of the vocabulary, padded with zero rows so that all shares are equal."""

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    parallel: ParallelConfig,
    precision: Precision,
    device: torch.device,
) -> ModelWeights:
    """Load the weights; everything is checked against the configuration before the first read."""
    config.check_tensor_parallel(parallel.tp_size)
    check_shapes(config, checkpoint)
    shard = _ShardReader(
        checkpoint.with_llama_names(config.architecture), config, parallel, precision, device
    )
    embedding = shard.whole("model.embed_tokens.weight")
    is_tied = config.has_tied_embeddings
    lm_head = (
        shard.vocabulary_of(embedding)
        if is_tied
        else shard.vocabulary("lm_head.weight", config.vocab_size)
    )
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_load_layer(config, shard, layer) for layer in range(config.num_layers)),
        norm=shard.norm("model.norm"),
        lm_head=Linear(lm_head),
    )


@dataclass(frozen=True, slots=True)
class _ShardReader:
    """Reads this rank's part of a tensor to the device, in the format of the arithmetic."""

    checkpoint: Checkpoint
    config: ModelConfig
    parallel: ParallelConfig
    precision: Precision
    device: torch.device

    @property
    def kv_heads(self) -> range:
        return heads_of(
            self.parallel.tp_rank, self.parallel.tp_size, self.config.attention.num_kv_heads
        )

    def whole(self, name: str) -> torch.Tensor:
        return self._cast(self.checkpoint.read(name))

    def optional(self, name: str) -> torch.Tensor | None:
        return self.whole(name) if name in self.checkpoint.tensors else None

    def norm(self, prefix: str, eps: float | None = None) -> Norm:
        """Read a norm; Gemma adds 1 to the weights and multiplies before rounding."""
        weight = self.whole(f"{prefix}.weight")
        if self.config.is_gemma:
            weight = weight.to(self.precision.attention) + 1
        return Norm(weight, self.config.norm_eps if eps is None else eps)

    def rows(self, *names: str) -> torch.Tensor:
        """Return this rank's rows of several tensors, concatenated."""
        return self._cast(
            torch.cat([self.checkpoint.read(name, rows=self._rows_of(name)) for name in names])
        )

    def sections(self, name: str, *sections: slice) -> torch.Tensor:
        """Return several ranges of rows of one tensor, concatenated."""
        return self._cast(
            torch.cat([self.checkpoint.read(name, rows=section) for section in sections])
        )

    def columns(self, name: str) -> torch.Tensor:
        return self._cast(
            self.checkpoint.read(name, columns=self._part(self.checkpoint.tensors[name].shape[1]))
        )

    def replicated(self, prefix: str) -> Linear:
        return Linear(self.whole(f"{prefix}.weight"), self.optional(f"{prefix}.bias"))

    def column_parallel(self, *prefixes: str) -> Linear:
        has_bias = f"{prefixes[0]}.bias" in self.checkpoint.tensors
        bias = self.rows(*(f"{prefix}.bias" for prefix in prefixes)) if has_bias else None
        return Linear(self.rows(*(f"{prefix}.weight" for prefix in prefixes)), bias)

    def row_parallel(self, prefix: str) -> Linear:
        bias = self.optional(f"{prefix}.bias") if self.parallel.tp_rank == 0 else None
        return Linear(self.columns(f"{prefix}.weight"), bias)

    def vocabulary(self, name: str, vocab_size: int) -> torch.Tensor:
        rows = self._vocabulary_rows(vocab_size)
        return self._padded(self._cast(self.checkpoint.read(name, rows=rows)), vocab_size)

    def vocabulary_of(self, embedding: torch.Tensor) -> torch.Tensor:
        """Return the vocabulary share of a tied embedding, as a view unless rows must be added."""
        return self._padded(embedding[self._vocabulary_rows(len(embedding))], len(embedding))

    def _rows_of(self, name: str) -> slice:
        if name.endswith((".k_proj.weight", ".v_proj.weight", ".k_proj.bias", ".v_proj.bias")):
            head_dim = self.config.attention.head_dim
            return slice(self.kv_heads.start * head_dim, self.kv_heads.stop * head_dim)
        return self._part(self.checkpoint.tensors[name].shape[0])

    def _part(self, total: int) -> slice:
        step = total // self.parallel.tp_size
        return slice(self.parallel.tp_rank * step, (self.parallel.tp_rank + 1) * step)

    def _vocabulary_rows(self, vocab_size: int) -> slice:
        step = -(-vocab_size // self.parallel.tp_size)
        return slice(
            min(self.parallel.tp_rank * step, vocab_size),
            min((self.parallel.tp_rank + 1) * step, vocab_size),
        )

    def _padded(self, rows: torch.Tensor, vocab_size: int) -> torch.Tensor:
        missing = -(-vocab_size // self.parallel.tp_size) - len(rows)
        return torch.cat((rows, rows.new_zeros(missing, rows.shape[1]))) if missing else rows

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        # Widen on the device, so that the copy to the device moves no more bytes than the file has.
        return tensor.to(self.device).to(self.precision.weights).to(self.precision.compute)


def _load_layer(config: ModelConfig, shard: _ShardReader, layer: int) -> LayerWeights:
    prefix, is_gemma = f"model.layers.{layer}.", config.is_gemma
    attention, output = _load_attention(config, shard, layer)
    return LayerWeights(
        input_norm=shard.norm(f"{prefix}input_layernorm"),
        attention=attention,
        output=output,
        output_norm=shard.norm(f"{prefix}post_attention_layernorm") if is_gemma else None,
        mlp_norm=shard.norm(
            f"{prefix}{'pre_feedforward_layernorm' if is_gemma else 'post_attention_layernorm'}"
        ),
        gate_up=shard.column_parallel(f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"),
        down=shard.row_parallel(f"{prefix}mlp.down_proj"),
        down_norm=shard.norm(f"{prefix}post_feedforward_layernorm") if is_gemma else None,
    )


def _load_attention(
    config: ModelConfig, shard: _ShardReader, layer: int
) -> tuple[HeadWeights | LatentWeights | StateWeights, Linear]:
    """Return the weights of a layer's attention or state, and the output projection."""
    prefix, latent = f"{config.layer_name(layer)}.", config.attention.latent
    if config.layers[layer].has_state:
        assert config.state is not None
        return _load_state(config.state, shard, prefix), shard.row_parallel(f"{prefix}out_proj")
    output = shard.row_parallel(f"{prefix}o_proj")
    if latent is not None:
        return _load_latent(latent, shard, prefix), output
    return _load_heads(config, shard, prefix), output


def _load_state(state: StateShape, shard: _ShardReader, prefix: str) -> StateWeights:
    rank, size = shard.parallel.tp_rank, shard.parallel.tp_size
    heads, groups = heads_of(rank, size, state.num_heads), heads_of(rank, size, state.num_groups)
    x = _rows(0, heads, state.head_dim)
    b = _rows(state.width, groups, state.state_size)
    c = _rows(state.width + state.num_groups * state.state_size, groups, state.state_size)
    step = _rows(state.num_columns, heads, 1)
    # The gate comes before the columns of the convolution.
    rows = (x, *(slice(state.width + s.start, state.width + s.stop) for s in (x, b, c, step)))
    in_wide = shard.precision.attention
    by_head = slice(heads.start, heads.stop)
    return StateWeights(
        project=Linear(shard.sections(f"{prefix}in_proj.weight", *rows)),
        columns=(x.stop - x.start, b.stop - b.start, c.stop - c.start),
        conv=shard.sections(f"{prefix}conv1d.weight", x, b, c).squeeze(1),
        conv_bias=shard.sections(f"{prefix}conv1d.bias", x, b, c) if state.has_conv_bias else None,
        decay=-shard.sections(f"{prefix}A_log", by_head).to(in_wide).exp(),
        skip=shard.sections(f"{prefix}D", by_head).to(in_wide),
        step_bias=shard.sections(f"{prefix}dt_bias", by_head).to(in_wide),
        norm=shard.sections(f"{prefix}norm.weight", x).to(in_wide),
    )


def _rows(first: int, heads: range, width: int) -> slice:
    """Return the rows of `heads` in a part of a tensor that begins at row `first`."""
    return slice(first + heads.start * width, first + heads.stop * width)


def _load_heads(config: ModelConfig, shard: _ShardReader, prefix: str) -> HeadWeights:
    has_norms = config.attention.has_qk_norm
    return HeadWeights(
        qkv=shard.column_parallel(f"{prefix}q_proj", f"{prefix}k_proj", f"{prefix}v_proj"),
        num_kv_heads=len(shard.kv_heads),
        q_norm=shard.norm(f"{prefix}q_norm") if has_norms else None,
        k_norm=shard.norm(f"{prefix}k_norm") if has_norms else None,
    )


def _load_latent(latent: LatentShape, shard: _ShardReader, prefix: str) -> LatentWeights:
    is_direct = latent.q_lora_rank is None
    up = shard.rows(f"{prefix}kv_b_proj.weight").unflatten(
        0, (-1, latent.qk_nope_head_dim + latent.v_head_dim)
    )
    keys, values = up.split((latent.qk_nope_head_dim, latent.v_head_dim), dim=1)
    return LatentWeights(
        query_down=None if is_direct else shard.replicated(f"{prefix}q_a_proj"),
        query_norm=None if is_direct else shard.norm(f"{prefix}q_a_layernorm", LATENT_NORM_EPS),
        query=shard.column_parallel(f"{prefix}q_proj" if is_direct else f"{prefix}q_b_proj"),
        down=shard.replicated(f"{prefix}kv_a_proj_with_mqa"),
        norm=shard.norm(f"{prefix}kv_a_layernorm", LATENT_NORM_EPS),
        keys=keys.contiguous(),
        values=values.contiguous(),
    )
