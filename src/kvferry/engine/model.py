"""The forward pass of one tensor-parallel rank: a batch in, logits of the sampled rows out.

    tokens -> embedding -> layers x (norm, qkv, rotate, write cache, attend, o, sum; norm, gate * up, down, sum) -> norm -> logits

Stateless but for the weights; the caller owns the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvferry.connectors.contract import ParallelConfig
from kvferry.engine.attention import attend
from kvferry.engine.flat_batch import AttentionPlan, FlatBatch
from kvferry.engine.kv_cache import LayerCache
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.parallel import TensorParallelGroup
from kvferry.engine.precision import Precision
from kvferry.engine.rope import RotaryTable, make_rotary_table
from kvferry.engine.weights import LayerWeights, ModelWeights

__all__ = ["LayerHooks", "Model"]


class LayerHooks(Protocol):
    """What a worker does around each layer of a forward pass (a connector's `wait_for_layer_load` and `save_kv_layer`)."""

    def before_layer(self, layer_name: str) -> None:
        """Called before the layer's cache is read or written."""

    def after_layer(self, layer_name: str, cache: torch.Tensor) -> None:
        """Called when this step's K and V of the layer are in its cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    config: ModelConfig
    weights: ModelWeights
    precision: Precision
    parallel: ParallelConfig
    group: TensorParallelGroup
    rotary: RotaryTable

    @classmethod
    def build(
        cls, config: ModelConfig, weights: ModelWeights, precision: Precision, parallel: ParallelConfig, group: TensorParallelGroup
    ) -> "Model":
        rotary = make_rotary_table(config.attention.rope, config.attention.head_dim, config.max_position_embeddings, precision.compute)
        return cls(config, weights, precision, parallel, group, rotary)

    def forward(self, batch: FlatBatch, caches: Sequence[LayerCache], hooks: LayerHooks | None = None) -> torch.Tensor:
        """[sampled rows, vocabulary], the same on every rank. Writes K and V of every row into `caches`, one per layer."""
        hidden = self.weights.embedding[batch.token_ids]
        rotary = self.rotary.at(batch.positions)
        for index, (layer, cache) in enumerate(zip(self.weights.layers, caches, strict=True)):
            if hooks is not None:
                hooks.before_layer(cache.name)
            queries = self._project_and_store(layer, cache, batch, self._norm(hidden, layer.input_norm), rotary)
            plan = batch.plan
            if index == len(caches) - 1:
                # Only sampled rows go on from here; nobody looks at what the last layer makes of the others.
                plan, hidden, queries = batch.sampled_plan, hidden[batch.sampled_rows], queries[batch.sampled_rows]
            if len(hidden):
                hidden = self._finish_layer(layer, cache, plan, queries, hidden)
            if hooks is not None:
                hooks.after_layer(cache.name, cache.tensor)
        return self._logits(hidden)

    def _project_and_store(
        self, layer: LayerWeights, cache: LayerCache, batch: FlatBatch, inputs: torch.Tensor, rotary: RotaryTable
    ) -> torch.Tensor:
        """Write K and V of every row; return the rotated queries, [rows, heads, head_dim]."""
        shape, ranks = self.config.attention, self.parallel.tp_size
        heads = layer.qkv(inputs).view(len(inputs), -1, shape.head_dim)
        num_queries, num_keys = shape.num_heads // ranks, shape.num_kv_heads // ranks
        queries, keys, values = heads.split((num_queries, num_keys, num_keys), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = self._norm(queries, layer.q_norm), self._norm(keys, layer.k_norm)
        cache.write(batch.blocks, batch.offsets, rotary.rotate(keys), values)
        return rotary.rotate(queries)

    def _finish_layer(
        self, layer: LayerWeights, cache: LayerCache, plan: AttentionPlan, queries: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        attended = attend(queries, cache, plan, self.precision.attention).flatten(1).to(hidden.dtype)
        hidden = hidden + self.group.sum(layer.output(attended))
        gate, up = layer.gate_up(self._norm(hidden, layer.post_norm)).chunk(2, dim=-1)
        return hidden + self.group.sum(layer.down(torch.nn.functional.silu(gate) * up))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not len(hidden):
            return hidden.new_empty((0, self.config.vocab_size))
        share = self.weights.lm_head(self._norm(hidden, self.weights.norm))
        return self.group.concatenate(share)[:, : self.config.vocab_size]

    def _norm(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Root mean square norm over the last dimension, in at least float32."""
        wide = values.to(self.precision.attention)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return (wide * scale).to(values.dtype) * weight
