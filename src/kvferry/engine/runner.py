"""The identity of a model: two engines with equal identities may use each other's KV. Reads the
weights' headers and samples of them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

import torch

from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    ModelIdentity,
    ParallelConfig,
)
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.engine.cache.layout import CacheLayout, LayerCache, plan_cache_layout
from kvferry.engine.messages import SampledToken, SequenceSlice, StepPlan, StepResult
from kvferry.engine.model.checkpoint import open_checkpoint
from kvferry.engine.model.config import ModelConfig, read_json_object, read_model_config
from kvferry.engine.model.device import CPU, RankDevice, open_device
from kvferry.engine.model.flat_batch import make_flat_batch
from kvferry.engine.model.sampling import choose_tokens
from kvferry.engine.model.tensor_parallel import join_group
from kvferry.engine.model.transformer import LayerHooks, Model
from kvferry.engine.model.weights import choose_precision, load_weights
from kvferry.engine.options import EngineOptions, EngineSetup
from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.transports.base import CacheMemory, TransportKit

__all__ = ["LayerHooks", "Runner", "Worker", "connector_config", "model_identity"]


COSMETIC_KEYS = ("_name_or_path", "transformers_version")
"""Of config.json: these say where the file came from, not what the model computes."""


def model_identity(config: ModelConfig, options: EngineOptions) -> ModelIdentity:
    """The fingerprint hashes config.json in canonical form (less its cosmetic keys) and
    `Checkpoint.digest` of the weights.
    """
    checkpoint = open_checkpoint(config.directory)
    settings = read_json_object(config.directory / "config.json")
    kept = {key: value for key, value in settings.items() if key not in COSMETIC_KEYS}
    digest = blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16)
    digest.update(checkpoint.digest().encode())
    precision = choose_precision(options, config.dtype, checkpoint.size_bytes)
    return ModelIdentity(
        architecture=config.architecture,
        fingerprint=digest.hexdigest(),
        num_layers=config.num_layers,
        total_kv_heads=config.attention.num_kv_heads,
        head_dim=config.attention.head_dim,
        dtype=str(precision.weights).removeprefix("torch."),
    )


# -------------------- runner -------------------- One tensor-parallel rank's model, cache and
# sampler: a list of sequence slices in, the sampled tokens out.
#
# Not thread-safe: one thread of a worker process makes every call, in the order `load`,
# `allocate_cache`, `run`*, `close`.


TRIM_CHECK_STEPS = 256
MAX_SPARE_BYTES = 1024 * 1024 * 1024
"""Batches are of ever other shapes, and what torch kept of one may be too small for the next:
without a bound that adds up.
"""


class Runner:
    def __init__(
        self,
        options: EngineOptions,
        parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  frozen
        rendezvous: str = "",
        timeout_s: float = 60.0,
    ) -> None:
        """Store the settings. `rendezvous` is where ranks of one engine meet: `file:///path` (of a
        file in a private directory that does not exist yet) or `tcp://127.0.0.1:port`; unused when
        `tp_size` is 1. A rank that does not answer within `timeout_s` is an error.
        """
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
        """Read configuration and weights and join the other ranks. ConfigError when the model
        cannot be used, TransportError when a rank does not come.
        """
        self._device = open_device(self._options.device, self._parallel)
        torch.set_num_threads(self._options.num_threads)
        config = read_model_config(self._options.model)
        checkpoint = open_checkpoint(self._options.model)
        precision = choose_precision(self._options, config.dtype, checkpoint.size_bytes)
        with self._device.room_for("the weights"):
            weights = load_weights(
                config, checkpoint, self._parallel, precision, self._device.torch_device
            )
        group = join_group(self._parallel, self._rendezvous, self._timeout_s, self._device)
        self._model = Model.build(config, weights, precision, group)

    def identity(self) -> ModelIdentity:
        """What decides whether another engine's KV can be used here. After `load`."""
        return model_identity(self._loaded.config, self._options)

    def allocate_cache(self, kit: TransportKit) -> KVCacheConfig:
        """Allocate one buffer for all layers and build `kv_caches` in it. Once, after `load`."""
        config = self._loaded.config
        self._shape = plan_cache_layout(
            config, self._parallel, self._options, self._loaded.precision.cache, self._cache_bytes()
        )
        caches = self._shape.layer_caches(self._allocate(kit, self._shape.size_bytes))
        self._caches = tuple(caches[config.layer_name(layer)] for layer in range(config.num_layers))
        return self._shape.to_config()

    @property
    def kv_caches(self) -> Mapping[str, torch.Tensor]:
        """Cache tensor by layer name `model.layers.{i}.self_attn`; HND: [blocks, kv_heads,
        block_size, 2 * head_dim], NHD: [blocks, block_size, kv_heads, 2 * head_dim], K is the first
        half of the last dimension; latent: [blocks, block_size, width]. Layers of different groups
        may have the same tensor.
        """
        return {cache.name: cache.tensor for cache in self._caches}

    @property
    def cache_memory(self) -> CacheMemory | None:
        """The buffer behind `kv_caches`, closed by `close`; None when they are on a device. After
        `allocate_cache`.
        """
        assert self._allocated
        return self._memory

    def run(
        self, slices: Sequence[SequenceSlice], hooks: LayerHooks | None = None
    ) -> dict[str, SampledToken]:
        """Compute one step. Rank 0 returns a token for each slice that has `sampling`; other ranks
        return nothing.

        All ranks must be given the same slices in the same order. TransportError when another rank
        is gone.
        """
        if not slices:
            return {}
        logits = self.logits(slices, hooks)
        self._trim_spare_memory()
        if self._parallel.tp_rank != 0:
            return {}
        sampled = [part for part in slices if part.sampling is not None]
        return choose_tokens(logits.cpu().to(torch.float64).numpy(), sampled)

    def logits(
        self, slices: Sequence[SequenceSlice], hooks: LayerHooks | None = None
    ) -> torch.Tensor:
        """The forward pass of `run` alone: [slices that have `sampling`, vocabulary], the same on
        every rank.
        """
        model, shape = self._loaded, self._allocated
        with torch.inference_mode():
            batch = make_flat_batch(
                slices, shape.groups, shape.block_size, shape.num_blocks, model.config.vocab_size
            )
            return model.forward(batch.on(self._device.torch_device), self._caches, hooks)

    def close(self) -> None:
        """Leave the other ranks and give the memory back. Idempotent. Whoever holds views of
        `kv_caches` drops them first.
        """
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
        """The same on every rank: they count the same blocks. None has its cache yet when the
        others measure.
        """
        options = self._options
        if options.num_blocks or options.kv_cache_memory_bytes is not None:
            return options.kv_cache_memory_bytes or 0
        own = torch.tensor(
            [self._device.cache_bytes(options.gpu_memory_utilization)],
            device=self._device.torch_device,
        )
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


# -------------------- worker --------------------
# One tensor-parallel rank: a runner and the worker's half of the connector contract.
#
# One thread makes every call. `execute` takes the contract's calls in their order for every plan,
# with tokens or without.


class Worker:
    """Build it with `start`; it owns the runner, the cache and the connector until `close`."""

    def __init__(
        self, runner: Runner, kv_cache_config: KVCacheConfig, connector: KVConnectorBase_V1 | None
    ) -> None:
        self._runner = runner
        self._kv_cache_config = kv_cache_config
        self._connector = connector
        self._hooks = None if connector is None else _ConnectorHooks(connector)

    @classmethod
    def start(
        cls,
        setup: EngineSetup,
        parallel: ParallelConfig,
        rendezvous: str,
        wake: Callable[[], None],
        report_stage: Callable[[str], None],
    ) -> "Worker":
        """Load the model, join the other ranks, allocate the cache and register it. `report_stage`
        hears what is being done.
        """
        runner = Runner(setup.options, parallel, rendezvous, setup.rank_timeout_s)
        try:
            report_stage("loading the model")
            runner.load()
            report_stage("allocating the KV cache")
            kv_cache_config = runner.allocate_cache(setup.kit)
            worker = cls(runner, kv_cache_config, None)
            if setup.options.kv_transfer is not None:
                report_stage("registering the KV cache")
                worker._connect(setup, parallel, wake)
        except BaseException:
            runner.close()
            raise
        return worker

    def _connect(
        self, setup: EngineSetup, parallel: ParallelConfig, wake: Callable[[], None]
    ) -> None:
        config = connector_config(setup, self._runner, parallel)
        connector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, self._kv_cache_config
        )
        try:
            connector.set_wakeup(wake)
            connector.register_kv_caches(self._runner.kv_caches)
        except BaseException:
            connector.shutdown()
            raise
        self._connector, self._hooks = connector, _ConnectorHooks(connector)

    @property
    def runner(self) -> Runner:
        return self._runner

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        return self._kv_cache_config

    def handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self._connector is None else self._connector.get_handshake_metadata()

    def execute(self, plan: StepPlan) -> StepResult:
        if self._connector is None:
            return StepResult(self._runner.run(plan.slices))
        metadata = plan.connector_metadata
        if metadata is None:
            raise LocalProtocolError(f"step {plan.step} brings no message for the connector")
        self._connector.handle_preemptions(metadata)
        self._connector.bind_connector_metadata(metadata)
        self._connector.start_load_kv(plan)
        tokens = self._runner.run(plan.slices, self._hooks)
        self._connector.finish_forward()
        self._connector.wait_for_save()
        output = self._collect(self._connector, plan)
        self._connector.clear_connector_metadata()
        return StepResult(tokens, output)

    def _collect(self, connector: KVConnectorBase_V1, plan: StepPlan) -> KVConnectorOutput:
        results = connector.get_transfer_results(set(plan.finished_request_ids))
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            failure_reasons=results.failure_reasons,
            given_up_recving=results.given_up_recving,
            recving_times=results.recving_times,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )

    def close(self) -> None:
        """Stop the connector first: it may be moving the runner's memory. Idempotent."""
        connector, self._connector, self._hooks = self._connector, None, None
        try:
            if connector is not None:
                connector.shutdown()
        finally:
            self._runner.close()


class _ConnectorHooks:
    def __init__(self, connector: KVConnectorBase_V1) -> None:
        self._connector = connector

    def before_layer(self, layer_name: str) -> None:
        self._connector.wait_for_layer_load(layer_name)

    def after_layer(self, layer_name: str, cache: torch.Tensor) -> None:
        self._connector.save_kv_layer(layer_name, cache, None)


def connector_config(
    setup: EngineSetup, runner: Runner, parallel: ParallelConfig
) -> ConnectorConfig:
    """What both roles of the connector are built from."""
    if setup.options.kv_transfer is None or setup.side_channel is None:
        raise ConfigError(
            "a KV connector needs kv_transfer and a side channel; give both or neither"
        )
    return ConnectorConfig(
        kv_transfer=setup.options.kv_transfer,
        model=runner.identity(),
        parallel=parallel,
        side_channel=setup.side_channel,
        secret=setup.secret,
        epoch=setup.epoch,
        kit=setup.kit,
        cache_memory=runner.cache_memory,
        max_model_len=runner.config.max_model_len(setup.options.max_model_len),
    )
