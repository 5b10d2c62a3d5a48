"""The weights of one tensor-parallel rank, cut out of a checkpoint.

Heads and feed-forward columns are split evenly: rank r of t holds output rows [r/t, (r+1)/t) of q, k, v, gate and up, the matching input
columns of o and down (their products are summed over ranks), and its share of the output vocabulary. Norms and input embeddings are whole
on every rank. Reads files; otherwise pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

import torch

from kvferry.connectors.contract import ParallelConfig
from kvferry.engine.checkpoint import Checkpoint
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.precision import Precision
from kvferry.errors import ConfigError

__all__ = ["LayerWeights", "Linear", "ModelWeights", "load_weights"]

IGNORED_TENSORS = ("*.rotary_emb.inv_freq",)
"""Old Llama files carry the rotary frequencies, which follow from the configuration."""


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(inputs, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    input_norm: torch.Tensor
    qkv: Linear
    """Rows of this rank's q heads, then k heads, then v heads."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    """Its bias is on rank 0 only, because the ranks' products are summed."""
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: Linear
    """This rank's share of the vocabulary, padded with zero rows so that all shares are equal."""


def load_weights(config: ModelConfig, checkpoint: Checkpoint, parallel: ParallelConfig, precision: Precision) -> ModelWeights:
    """Everything is checked against the configuration before the first tensor is read."""
    config.check_tensor_parallel(parallel.tp_size)
    _check_shapes(config, checkpoint)
    share = _Share(checkpoint, parallel, precision)
    embedding = share.whole("model.embed_tokens.weight")
    is_tied = config.has_tied_embeddings
    lm_head = share.vocabulary_of(embedding) if is_tied else share.vocabulary("lm_head.weight", config.vocab_size)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_load_layer(config, share, f"model.layers.{layer}.") for layer in range(config.num_layers)),
        norm=share.whole("model.norm.weight"),
        lm_head=Linear(lm_head),
    )


@dataclass(frozen=True, slots=True)
class _Share:
    """Reads this rank's part of a tensor, in the format of the arithmetic."""

    checkpoint: Checkpoint
    parallel: ParallelConfig
    precision: Precision

    def whole(self, name: str) -> torch.Tensor:
        return self._cast(self.checkpoint.read(name))

    def optional(self, name: str) -> torch.Tensor | None:
        return self.whole(name) if name in self.checkpoint.tensors else None

    def rows(self, *names: str) -> torch.Tensor:
        """This rank's rows of several tensors, one below the other."""
        parts = [self.checkpoint.read(name, rows=self._part(self.checkpoint.tensors[name].shape[0])) for name in names]
        return self._cast(torch.cat(parts))

    def columns(self, name: str) -> torch.Tensor:
        return self._cast(self.checkpoint.read(name, columns=self._part(self.checkpoint.tensors[name].shape[1])))

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
        """The same of tensors that are tied to the embedding; a view of it unless rows must be added."""
        return self._padded(embedding[self._vocabulary_rows(len(embedding))], len(embedding))

    def _part(self, total: int) -> slice:
        step = total // self.parallel.tp_size
        return slice(self.parallel.tp_rank * step, (self.parallel.tp_rank + 1) * step)

    def _vocabulary_rows(self, vocab_size: int) -> slice:
        step = -(-vocab_size // self.parallel.tp_size)
        return slice(min(self.parallel.tp_rank * step, vocab_size), min((self.parallel.tp_rank + 1) * step, vocab_size))

    def _padded(self, rows: torch.Tensor, vocab_size: int) -> torch.Tensor:
        missing = -(-vocab_size // self.parallel.tp_size) - len(rows)
        return torch.cat((rows, rows.new_zeros(missing, rows.shape[1]))) if missing else rows

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.precision.weights).to(self.precision.compute)


def _load_layer(config: ModelConfig, share: _Share, prefix: str) -> LayerWeights:
    attention = f"{prefix}self_attn."
    return LayerWeights(
        input_norm=share.whole(f"{prefix}input_layernorm.weight"),
        qkv=share.column_parallel(f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj"),
        q_norm=share.optional(f"{attention}q_norm.weight"),
        k_norm=share.optional(f"{attention}k_norm.weight"),
        output=share.row_parallel(f"{attention}o_proj"),
        post_norm=share.whole(f"{prefix}post_attention_layernorm.weight"),
        gate_up=share.column_parallel(f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"),
        down=share.row_parallel(f"{prefix}mlp.down_proj"),
    )


def _check_shapes(config: ModelConfig, checkpoint: Checkpoint) -> None:
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


def _expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    yield "model.norm.weight", (config.hidden_size,)
    if not config.has_tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config):
            yield f"model.layers.{layer}.{name}", shape


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    attention, hidden = config.attention, config.hidden_size
    heads = {"q": attention.num_heads, "k": attention.num_kv_heads, "v": attention.num_kv_heads}
    for name, count in heads.items():
        yield f"self_attn.{name}_proj.weight", (count * attention.head_dim, hidden)
        if attention.has_qkv_bias:
            yield f"self_attn.{name}_proj.bias", (count * attention.head_dim,)
    yield "self_attn.o_proj.weight", (hidden, attention.num_heads * attention.head_dim)
    if attention.has_output_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    if attention.has_qk_norm:
        yield "self_attn.q_norm.weight", (attention.head_dim,)
        yield "self_attn.k_norm.weight", (attention.head_dim,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "mlp.gate_proj.weight", (config.intermediate_size, hidden)
    yield "mlp.up_proj.weight", (config.intermediate_size, hidden)
    yield "mlp.down_proj.weight", (hidden, config.intermediate_size)
