"""One tensor-parallel rank's model, cache and sampler: a list of sequence slices in, the sampled tokens out.

Not thread-safe: one thread of a worker process makes every call, in the order `load`, `allocate_cache`, `run`*, `close`.
"""

import mmap
from collections.abc import Mapping, Sequence
from math import prod

import torch

from kvferry.connectors.contract import KVCacheConfig, KVCacheGroup, ModelIdentity, ParallelConfig
from kvferry.engine.checkpoint import open_checkpoint
from kvferry.engine.flat_batch import make_flat_batch
from kvferry.engine.identity import model_identity
from kvferry.engine.kv_cache import LayerCache, block_shape
from kvferry.engine.model import LayerHooks, Model
from kvferry.engine.model_config import ModelConfig, read_model_config
from kvferry.engine.options import EngineOptions
from kvferry.engine.parallel import join_group
from kvferry.engine.precision import choose_precision
from kvferry.engine.sampling import choose_tokens
from kvferry.engine.step import SampledToken, SequenceSlice
from kvferry.engine.weights import load_weights
from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.ports.kit import PlaneKit
from kvferry.ports.memory import CacheMemory

__all__ = ["LayerHooks", "Runner"]


class Runner:
    def __init__(
        self,
        options: EngineOptions,
        parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  frozen
        rendezvous: str = "",
        timeout_s: float = 60.0,
    ) -> None:
        """Store the settings. `rendezvous` is where ranks of one engine meet: `file:///path` (of a file in a private directory that does
        not exist yet) or `tcp://127.0.0.1:port`; unused when `tp_size` is 1. A rank that does not answer within `timeout_s` is an error."""
        self._options = options
        self._parallel = parallel
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s
        self._model: Model | None = None
        self._caches: tuple[LayerCache, ...] = ()
        self._memory: CacheMemory | None = None

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's configuration. After `load`."""
        return self._loaded.config

    def load(self) -> None:
        """Read configuration and weights and join the other ranks. ConfigError when the model cannot be used, TransportError when a rank
        does not come."""
        if self._options.device != "cpu":
            raise ConfigError(f"--device must be cpu, got {self._options.device!r}: the embedded engine runs on CPUs only")
        torch.set_num_threads(self._options.num_threads)
        config = read_model_config(self._options.model)
        checkpoint = open_checkpoint(self._options.model)
        precision = choose_precision(self._options, config.dtype, checkpoint.size_bytes)
        weights = load_weights(config, checkpoint, self._parallel, precision)
        group = join_group(self._parallel, self._rendezvous, self._timeout_s)
        self._model = Model.build(config, weights, precision, self._parallel, group)

    def identity(self) -> ModelIdentity:
        """What decides whether another engine's KV can be used here. After `load`."""
        return model_identity(self._loaded.config, self._options)

    def allocate_cache(self, kit: PlaneKit) -> KVCacheConfig:
        """Allocate one buffer for all layers and build `kv_caches` in it. Once, after `load`.

        buffer   | layer 0: num_blocks x block | pad to a page | layer 1 … |
        """
        config, layout, dtype = self._loaded.config, self._options.kv_cache_layout, self._loaded.precision.cache
        num_kv_heads = config.attention.num_kv_heads // self._parallel.tp_size
        shape = block_shape(layout, num_kv_heads, self._options.block_size, config.attention.head_dim)
        num_blocks = self._num_blocks(prod(shape) * dtype.itemsize)
        layer_bytes = -(-num_blocks * prod(shape) * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = kit.allocate_cache(layer_bytes * config.num_layers)
        names = tuple(config.layer_name(layer) for layer in range(config.num_layers))
        self._caches = tuple(
            LayerCache(name, _tensor_at(self._memory, layer * layer_bytes, (num_blocks, *shape), dtype), layout)
            for layer, name in enumerate(names)
        )
        return KVCacheConfig(
            num_blocks=num_blocks,
            block_size=self._options.block_size,
            groups=(KVCacheGroup(names),),
            layout=layout.value,
            num_kv_heads=num_kv_heads,
            head_dim=config.attention.head_dim,
            cache_dtype=str(dtype).removeprefix("torch."),
        )

    @property
    def kv_caches(self) -> Mapping[str, torch.Tensor]:
        """Cache tensor by layer name `model.layers.{i}.self_attn`; HND: [blocks, kv_heads, block_size, 2 * head_dim],
        NHD: [blocks, block_size, kv_heads, 2 * head_dim]; K is the first half of the last dimension."""
        return {cache.name: cache.tensor for cache in self._caches}

    @property
    def cache_memory(self) -> CacheMemory:
        """The buffer behind `kv_caches`; closed by `close`."""
        if self._memory is None:
            raise LocalProtocolError("the cache was used before it was allocated")
        return self._memory

    def run(self, slices: Sequence[SequenceSlice], hooks: LayerHooks | None = None) -> dict[str, SampledToken]:
        """Compute one step. Rank 0 returns a token for each slice that has `sampling`; other ranks return nothing.

        All ranks must be given the same slices in the same order. TransportError when another rank is gone."""
        if not slices:
            return {}
        logits = self.logits(slices, hooks)
        if self._parallel.tp_rank != 0:
            return {}
        sampled = [part for part in slices if part.sampling is not None]
        return choose_tokens(logits.to(torch.float64).numpy(), sampled)

    def logits(self, slices: Sequence[SequenceSlice], hooks: LayerHooks | None = None) -> torch.Tensor:
        """The forward pass of `run` alone: [slices that have `sampling`, vocabulary], the same on every rank."""
        num_blocks = len(self._caches[0].tensor) if self._caches else 0
        with torch.inference_mode():
            batch = make_flat_batch(slices, self._options.block_size, num_blocks, self.config.vocab_size)
            return self._loaded.forward(batch, self._caches, hooks)

    def close(self) -> None:
        """Leave the other ranks and give the memory back. Idempotent. Whoever holds views of `kv_caches` drops them first."""
        model, memory = self._model, self._memory
        self._model, self._memory, self._caches = None, None, ()
        if model is not None:
            model.group.close()
        if memory is not None:
            memory.close()

    @property
    def _loaded(self) -> Model:
        if self._model is None:
            raise LocalProtocolError("the model was used before it was loaded")
        return self._model

    def _num_blocks(self, block_bytes: int) -> int:
        if self._options.num_blocks:
            return self._options.num_blocks
        total_bytes, per_block = self._options.kv_cache_memory_bytes, block_bytes * self._loaded.config.num_layers
        if total_bytes < per_block:
            raise ConfigError(f"--kv-cache-memory-bytes {total_bytes} holds no block; one takes {per_block} bytes in all layers")
        return total_bytes // per_block


def _tensor_at(memory: CacheMemory, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    flat = torch.frombuffer(memory.buffer, dtype=dtype, count=prod(shape), offset=offset)
    return flat.view(shape)
