"""The forward pass of one tensor-parallel rank: a batch in, logits of the sampled rows out.

    tokens -> embedding -> layers -> norm -> logits
    layer:  norm, q and KV, rotate, write cache, attend, o, sum over ranks;
            norm, gate * up, down, sum over ranks
    A state-space layer replaces attention by its own steps (`state_space.py`).

Stateless except for the weights; the caller owns the cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import gelu, silu

from kvferry.engine.cache.layout import LayerCache, StateCache
from kvferry.engine.model.attention import (
    RotaryTable,
    attend,
    make_rotary_table,
    merge_heads,
    project,
)
from kvferry.engine.model.config import ModelConfig, RopeConfig
from kvferry.engine.model.flat_batch import FlatBatch, GroupBatch, StateBatch
from kvferry.engine.model.state_space import mix
from kvferry.engine.model.tensor_parallel import TensorParallelGroup
from kvferry.engine.model.weights import LayerWeights, ModelWeights, Precision, StateWeights


class LayerHooks(Protocol):
    """Callbacks around each layer of a forward pass.

    The worker uses them for the connector's `wait_for_layer_load` and `save_kv_layer`.
    """

    def before_layer(self, layer_name: str) -> None:
        """Called before the layer's cache is read or written."""

    def after_layer(self, layer_name: str, cache: torch.Tensor) -> None:
        """Called when the K and V of this step are in the layer's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """The weights and rotary tables of one rank, and the group of its ranks."""

    config: ModelConfig
    weights: ModelWeights
    precision: Precision
    group: TensorParallelGroup
    rotary: Mapping[RopeConfig, RotaryTable]

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        weights: ModelWeights,
        precision: Precision,
        group: TensorParallelGroup,
    ) -> "Model":
        rotary = {
            rope: make_rotary_table(
                rope, config.attention.rotary_dim, config.max_position_embeddings, precision.compute
            ).on(weights.device)
            for rope in {layer.rope for layer in config.layers}
        }
        return cls(config, weights, precision, group, rotary)

    def forward(
        self,
        batch: FlatBatch,
        caches: Sequence[LayerCache | StateCache],
        hooks: LayerHooks | None = None,
    ) -> torch.Tensor:
        """Return logits, [sampled rows, vocabulary], the same on every rank.

        Writes K and V of every row, and the states after it, into `caches`, which has one cache per
        layer.
        """
        hidden = self._embed(batch.token_ids)
        rotary = {rope: table.at(batch.positions) for rope, table in self.rotary.items()}
        for index, (layer, cache) in enumerate(zip(self.weights.layers, caches, strict=True)):
            for name in cache.tensors:
                if hooks is not None:
                    hooks.before_layer(name)
            is_last = index == len(caches) - 1
            inputs = layer.input_norm(hidden)
            if isinstance(cache, StateCache):
                mixed = self._mix_states(layer, cache, batch, inputs)
                mixed = mixed[batch.sampled_rows] if is_last else mixed
            else:
                rope = rotary[self.config.layers[index].rope]
                mixed = self._attend(layer, cache, batch, inputs, rope, is_last)
            if is_last:
                # Only the sampled rows continue: no later layer reads the last layer's result for
                # the other rows.
                hidden = hidden[batch.sampled_rows]
            if len(hidden):
                hidden = self._finish_layer(layer, mixed.to(hidden.dtype), hidden)
            for name, tensor in cache.tensors.items():
                if hooks is not None:
                    hooks.after_layer(name, tensor)
        return self._logits(hidden)

    def _mix_states(
        self, layer: LayerWeights, cache: StateCache, batch: FlatBatch, inputs: torch.Tensor
    ) -> torch.Tensor:
        weights, group, shape = layer.attention, batch.groups[cache.group], self.config.state
        assert isinstance(weights, StateWeights)
        assert isinstance(group, StateBatch)
        assert shape is not None
        return mix(weights, shape, inputs, cache, group, self.group, self.config.norm_eps)

    def _attend(
        self,
        layer: LayerWeights,
        cache: LayerCache,
        batch: FlatBatch,
        inputs: torch.Tensor,
        rotary: RotaryTable,
        is_last: bool,
    ) -> torch.Tensor:
        """Return the input of the output projection; in the last layer, of the sampled rows."""
        weights, group, shape = layer.attention, batch.groups[cache.group], self.config.attention
        assert not isinstance(weights, StateWeights)
        assert isinstance(group, GroupBatch)
        queries, content = project(weights, shape, inputs, rotary)
        cache.write(group.blocks, batch.offsets, content)
        plan = group.plan
        if is_last:
            plan, queries = group.sampled_plan, queries[batch.sampled_rows]
        attended = attend(queries, cache, plan, shape.scale, self.precision.attention)
        return merge_heads(weights, attended.to(inputs.dtype))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.weights.embedding[token_ids]
        if not self.config.is_gemma:
            return hidden
        # The factor is rounded to the format of the weights, as in training.
        return (
            hidden
            * torch.tensor(
                self.config.hidden_size**0.5, dtype=self.precision.weights, device="cpu"
            ).item()
        )

    def _finish_layer(
        self, layer: LayerWeights, mixed: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Return the layer's result; `mixed` is the input of the output projection."""
        output = self.group.sum(layer.output(mixed))
        hidden = hidden + (output if layer.output_norm is None else layer.output_norm(output))
        gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
        activated = gelu(gate, approximate="tanh") if self.config.is_gemma else silu(gate)
        output = self.group.sum(layer.down(activated * up))
        return hidden + (output if layer.down_norm is None else layer.down_norm(output))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not len(hidden):
            return hidden.new_empty((0, self.config.vocab_size))
        share = self.weights.lm_head(self.weights.norm(hidden))
        return self.group.concatenate(share)[:, : self.config.vocab_size]
