"""One tensor-parallel rank's model, cache and sampler: a list of sequence slices in, the sampled tokens out.

Not thread-safe: one thread of a worker process makes every call, in the order `load`, `allocate_cache`, `run`*, `close`.
"""

from collections.abc import Mapping, Sequence

import torch

from kvferry.connectors.contract import KVCacheConfig, ModelIdentity, ParallelConfig
from kvferry.engine.cache_shape import CacheLayout, plan_cache_layout
from kvferry.engine.checkpoint import open_checkpoint
from kvferry.engine.flat_batch import make_flat_batch
from kvferry.engine.identity import model_identity
from kvferry.engine.kv_cache import LayerCache
from kvferry.engine.model import LayerHooks, Model
from kvferry.engine.model_config import ModelConfig, read_model_config
from kvferry.engine.options import EngineOptions
from kvferry.engine.parallel import join_group
from kvferry.engine.precision import choose_precision
from kvferry.engine.rank_device import CPU, RankDevice, open_device
from kvferry.engine.sampling import choose_tokens
from kvferry.engine.step import SampledToken, SequenceSlice
from kvferry.engine.weights import load_weights
from kvferry.errors import LocalProtocolError
from kvferry.ports.kit import TransportKit
from kvferry.ports.memory import CacheMemory

__all__ = ["LayerHooks", "Runner"]

TRIM_CHECK_STEPS = 256
MAX_SPARE_BYTES = 1024 * 1024 * 1024
"""Batches are of ever other shapes, and what torch kept of one may be too small for the next: without a bound that adds up."""


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
        self._shape: CacheLayout | None = None
        self._caches: tuple[LayerCache, ...] = ()
        self._memory: CacheMemory | None = None
        self._device: RankDevice = CPU
        self._num_steps = 0

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's configuration. After `load`."""
        return self._loaded.config

    def load(self) -> None:
        """Read configuration and weights and join the other ranks. ConfigError when the model cannot be used, TransportError when a rank
        does not come."""
        self._device = open_device(self._options.device, self._parallel)
        torch.set_num_threads(self._options.num_threads)
        config = read_model_config(self._options.model)
        checkpoint = open_checkpoint(self._options.model)
        precision = choose_precision(self._options, config.dtype, checkpoint.size_bytes)
        with self._device.room_for("the weights"):
            weights = load_weights(config, checkpoint, self._parallel, precision, self._device.torch_device)
        group = join_group(self._parallel, self._rendezvous, self._timeout_s, self._device)
        self._model = Model.build(config, weights, precision, group)

    def identity(self) -> ModelIdentity:
        """What decides whether another engine's KV can be used here. After `load`."""
        return model_identity(self._loaded.config, self._options)

    def allocate_cache(self, kit: TransportKit) -> KVCacheConfig:
        """Allocate one buffer for all layers and build `kv_caches` in it. Once, after `load`."""
        config = self._loaded.config
        self._shape = plan_cache_layout(config, self._parallel, self._options, self._loaded.precision.cache, self._cache_bytes())
        caches = self._shape.layer_caches(self._allocate(kit, self._shape.size_bytes))
        self._caches = tuple(caches[config.layer_name(layer)] for layer in range(config.num_layers))
        return self._shape.to_config()

    @property
    def kv_caches(self) -> Mapping[str, torch.Tensor]:
        """Cache tensor by layer name `model.layers.{i}.self_attn`; HND: [blocks, kv_heads, block_size, 2 * head_dim],
        NHD: [blocks, block_size, kv_heads, 2 * head_dim], K is the first half of the last dimension; latent: [blocks, block_size, width].
        Layers of different groups may have the same tensor."""
        return {cache.name: cache.tensor for cache in self._caches}

    @property
    def cache_memory(self) -> CacheMemory | None:
        """The buffer behind `kv_caches`, closed by `close`; None when they are on a device. After `allocate_cache`."""
        assert self._allocated
        return self._memory

    def run(self, slices: Sequence[SequenceSlice], hooks: LayerHooks | None = None) -> dict[str, SampledToken]:
        """Compute one step. Rank 0 returns a token for each slice that has `sampling`; other ranks return nothing.

        All ranks must be given the same slices in the same order. TransportError when another rank is gone."""
        if not slices:
            return {}
        logits = self.logits(slices, hooks)
        self._trim_spare_memory()
        if self._parallel.tp_rank != 0:
            return {}
        sampled = [part for part in slices if part.sampling is not None]
        return choose_tokens(logits.cpu().to(torch.float64).numpy(), sampled)

    def logits(self, slices: Sequence[SequenceSlice], hooks: LayerHooks | None = None) -> torch.Tensor:
        """The forward pass of `run` alone: [slices that have `sampling`, vocabulary], the same on every rank."""
        model, shape = self._loaded, self._allocated
        with torch.inference_mode():
            batch = make_flat_batch(slices, shape.groups, shape.block_size, shape.num_blocks, model.config.vocab_size)
            return model.forward(batch.on(self._device.torch_device), self._caches, hooks)

    def close(self) -> None:
        """Leave the other ranks and give the memory back. Idempotent. Whoever holds views of `kv_caches` drops them first."""
        model, memory = self._model, self._memory
        self._model, self._memory, self._shape, self._caches = None, None, None, ()
        if model is not None:
            model.group.close()
            del model
        if memory is not None:
            memory.close()
        self._device.trim()

    @property
    def device(self) -> RankDevice:
        """What it computes on. After `load`."""
        return self._device

    def _trim_spare_memory(self) -> None:
        self._num_steps += 1
        if self._num_steps % TRIM_CHECK_STEPS == 0 and self._device.spare_bytes > MAX_SPARE_BYTES:
            self._device.trim()

    def _cache_bytes(self) -> int:
        """The same on every rank: they count the same blocks. None has its cache yet when the others measure."""
        options = self._options
        if options.num_blocks or options.kv_cache_memory_bytes is not None:
            return options.kv_cache_memory_bytes or 0
        own = torch.tensor([self._device.cache_bytes(options.gpu_memory_utilization)], device=self._device.torch_device)
        return int(self._loaded.group.concatenate(own).min())

    def _allocate(self, kit: TransportKit, size_bytes: int) -> torch.Tensor:
        """Zeroed bytes: where transports reach them best in host memory, or on the device."""
        if not self._device.is_cuda:
            self._memory = kit.allocate_cache(size_bytes)
            return torch.frombuffer(self._memory.buffer, dtype=torch.uint8)[:size_bytes]
        with self._device.room_for("the KV cache"):
            return torch.zeros(size_bytes, dtype=torch.uint8, device=self._device.torch_device)

    @property
    def _loaded(self) -> Model:
        if self._model is None:
            raise LocalProtocolError("the model was used before it was loaded")
        return self._model

    @property
    def _allocated(self) -> CacheLayout:
        if self._shape is None:
            raise LocalProtocolError("the cache was used before it was allocated")
        return self._shape
