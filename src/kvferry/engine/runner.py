"""The worker of one tensor-parallel rank: model, KV cache, sampler and the connector's worker role.

`Runner` owns the model and the cache: sequence slices in, sampled tokens out. `Worker` adds the
connector. Not thread-safe: one thread of the rank's process makes every call. `model_identity`
decides which engines may share KV.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVConnectorHandshakeMetadata,
    KVConnectorOutput,
    ModelIdentity,
    ParallelConfig,
    WorkerSide,
)
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.engine.cache.layout import CacheLayout, LayerCache, StateCache, plan_cache_layout
from kvferry.engine.messages import SampledToken, SequenceSlice, StepPlan, StepResult
from kvferry.engine.model.checkpoint import Checkpoint, open_checkpoint
from kvferry.engine.model.config import ModelConfig, read_json_object, read_model_config
from kvferry.engine.model.device import CPU, RankDevice, open_device
from kvferry.engine.model.flat_batch import make_flat_batch
from kvferry.engine.model.sampling import choose_tokens
from kvferry.engine.model.tensor_parallel import join_group
from kvferry.engine.model.transformer import LayerHooks, Model
from kvferry.engine.model.weights import choose_precision, load_weights
from kvferry.engine.options import EngineOptions, EngineSetup
from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.protocol.handshake import named_factors
from kvferry.transports.base import CacheMemory, TransportKit
from kvferry.weight_files import file_states

COSMETIC_KEYS = ("_name_or_path", "transformers_version")
"""Keys of config.json that name the origin of the file and do not affect the computation."""


def model_identity(
    config: ModelConfig, options: EngineOptions, checkpoint: Checkpoint
) -> ModelIdentity:
    """Return the identity of a model; engines with equal identities may use each other's KV.

    Compared are every setting of config.json, except the cosmetic ones, and every byte of the
    weight files.
    """
    settings = read_json_object(config.directory / "config.json")
    kept = {key: value for key, value in settings.items() if key not in COSMETIC_KEYS}
    precision = choose_precision(options, config.dtype, checkpoint.size_bytes)
    return ModelIdentity(
        architecture=config.architecture,
        weights=checkpoint.digest(),
        num_layers=config.num_layers,
        total_kv_heads=config.attention.num_kv_heads,
        head_dim=config.attention.head_dim,
        dtype=str(precision.weights).removeprefix("torch."),
        settings=named_factors("config.", kept),
    )


# -- runner --
# Call order: `load`, `allocate_cache`, `run` any number of times, `close`.


TRIM_CHECK_STEPS = 256
MAX_SPARE_BYTES = 1024 * 1024 * 1024
"""How much memory torch may cache beyond its use before the runner trims it.

Batches differ in shape, and a buffer that torch cached for one batch may be too small for the next
batch; without a bound the cached memory grows.
"""


class Runner:
    """The model, cache and sampler of one tensor-parallel rank."""

    def __init__(
        self,
        options: EngineOptions,
        parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  frozen
        rendezvous: str = "",
        timeout_s: float = 60.0,
    ) -> None:
        """Store the settings.

        `rendezvous` is where the ranks of one engine meet: `file:///path` (a new or empty file that
        only this engine uses) or `tcp://127.0.0.1:port`; unused when `tp_size` is 1. A rank that
        does not answer within `timeout_s` is an error.
        """
        self._options = options
        self._parallel = parallel
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s
        self._model: Model | None = None
        self._checkpoint: Checkpoint | None = None
        self._file_states: tuple[tuple[int, ...], ...] = ()
        """Of the weight files, before their tensors were read."""
        self._shape: CacheLayout | None = None
        self._caches: tuple[LayerCache | StateCache, ...] = ()
        self._memory: CacheMemory | None = None
        self._device: RankDevice = CPU
        self._num_steps = 0

    @property
    def config(self) -> ModelConfig:
        """The configuration of the checkpoint; available after `load`."""
        return self._loaded.config

    def load(self) -> None:
        """Read the configuration and the weights, and join the other ranks.

        Raises ConfigError when the model cannot be used and TransportError when a rank does not
        join.
        """
        self._device = open_device(self._options.device, self._parallel)
        torch.set_num_threads(self._options.num_threads)
        config = read_model_config(self._options.model)
        checkpoint = self._checkpoint = open_checkpoint(self._options.model)
        self._file_states = file_states(checkpoint.paths)
        precision = choose_precision(self._options, config.dtype, checkpoint.size_bytes)
        with self._device.room_for("the weights"):
            weights = load_weights(
                config, checkpoint, self._parallel, precision, self._device.torch_device
            )
        group = join_group(self._parallel, self._rendezvous, self._timeout_s, self._device)
        self._model = Model.build(config, weights, precision, group)

    def identity(self) -> ModelIdentity:
        """Return the identity that decides which engines' KV can be used here; after `load`."""
        assert self._checkpoint is not None, "identity before load"
        found = model_identity(self._loaded.config, self._options, self._checkpoint)
        if file_states(self._checkpoint.paths) != self._file_states:
            raise ConfigError(
                f"the weights in {self._options.model} changed while the engine loaded them; start "
                "it again when they are complete"
            )
        return found

    def allocate_cache(self, kit: TransportKit) -> KVCacheConfig:
        """Allocate one buffer for all layers and build `kv_caches` in it; once, after `load`."""
        config = self._loaded.config
        self._shape = plan_cache_layout(
            config, self._parallel, self._options, self._loaded.precision.cache, self._cache_bytes()
        )
        caches = self._shape.layer_caches(self._allocate(kit, self._shape.size_bytes))
        self._caches = tuple(caches[config.layer_name(layer)] for layer in range(config.num_layers))
        return self._shape.to_config()

    @property
    def kv_caches(self) -> Mapping[str, torch.Tensor]:
        """The cache tensor of each layer, by layer name `model.layers.{i}.self_attn`.

            HND      [blocks, kv_heads, block_size, 2 * head_dim]   K is the first half of the last
            NHD      [blocks, block_size, kv_heads, 2 * head_dim]   dimension
            latent   [blocks, block_size, width]

        A layer with a state has several tensors, `model.layers.{i}.mamba.{part}` (see
        `StateCache`). Layers of different groups may share memory.
        """
        return {name: each for cache in self._caches for name, each in cache.tensors.items()}

    @property
    def cache_memory(self) -> CacheMemory | None:
        """The buffer behind `kv_caches`; None when the caches are on a device.

        Available after `allocate_cache`; `close` frees the buffer.
        """
        assert self._allocated
        return self._memory

    def run(
        self, slices: Sequence[SequenceSlice], hooks: LayerHooks | None = None
    ) -> dict[str, SampledToken]:
        """Compute one step and return the sampled tokens.

        Rank 0 returns a token for each slice with `sampling`, other ranks return none. All ranks
        must receive the same slices in the same order. Raises TransportError when another rank is
        gone.
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
        """Run the forward pass only: [slices with `sampling`, vocabulary], equal on every rank."""
        model, shape = self._loaded, self._allocated
        with torch.inference_mode():
            batch = make_flat_batch(
                slices, shape.groups, shape.block_size, shape.num_blocks, model.config.vocab_size
            )
            return model.forward(batch.on(self._device.torch_device), self._caches, hooks)

    def close(self) -> None:
        """Leave the process group and free the memory; idempotent.

        Callers must drop their views of `kv_caches` first.
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
        """The device that this rank computes on; available after `load`."""
        return self._device

    def _trim_spare_memory(self) -> None:
        self._num_steps += 1
        if self._num_steps % TRIM_CHECK_STEPS == 0 and self._device.spare_bytes > MAX_SPARE_BYTES:
            self._device.trim()

    def _cache_bytes(self) -> int:
        """Return the cache size in bytes: the smallest that any rank can offer, so all ranks agree.

        No rank has allocated its cache while other ranks measure their free memory.
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
        """Return zeroed bytes, on the device or in host memory allocated by the transports' kit."""
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


# -- worker --
# One tensor-parallel rank: a runner and the connector's worker role. `execute` makes the calls of
# the connector contract in the contract's order for every plan, with or without tokens.


class Worker:
    """Owns the runner, the cache and the worker's connector, from `start` until `close`."""

    def __init__(self, runner: Runner, kv_cache_config: KVCacheConfig) -> None:
        self._runner = runner
        self._kv_cache_config = kv_cache_config
        self._connector: WorkerSide | None = None
        self._hooks: _ConnectorHooks | None = None

    @classmethod
    def start(
        cls,
        setup: EngineSetup,
        parallel: ParallelConfig,
        rendezvous: str,
        wake: Callable[[], None],
        report_stage: Callable[[str], None],
    ) -> "Worker":
        """Load the model, join the other ranks, allocate the cache and start the connector.

        The connector registers the cache. `report_stage` receives the name of each stage.
        """
        runner = Runner(setup.options, parallel, rendezvous, setup.rank_timeout_s)
        try:
            report_stage("loading the model")
            runner.load()
            report_stage("allocating the KV cache")
            kv_cache_config = runner.allocate_cache(setup.kit)
            worker = cls(runner, kv_cache_config)
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
        config, cache = connector_config(setup, self._runner, parallel), self._kv_cache_config
        description = KVConnectorFactory.describe_for(config.kv_transfer, cache)
        connector = description.make_worker(config, cache)
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
            raise LocalProtocolError(f"step {plan.step} has no metadata for the connector")
        # The order of these calls is the connector contract (see kvferry/connectors/sides.py).
        self._connector.handle_preemptions(metadata)
        self._connector.bind_connector_metadata(metadata)
        self._connector.start_load_kv(plan)
        tokens = self._runner.run(plan.slices, self._hooks)
        self._connector.finish_forward()
        self._connector.wait_for_save()
        output = self._collect(self._connector, plan)
        self._connector.clear_connector_metadata()
        return StepResult(tokens, output)

    def _collect(self, connector: WorkerSide, plan: StepPlan) -> KVConnectorOutput:
        results = connector.get_transfer_results(set(plan.finished_request_ids))
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            failure_reasons=results.failure_reasons,
            optional_failures=results.optional_failures,
            given_up_recving=results.given_up_recving,
            recving_times=results.recving_times,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )

    def close(self) -> None:
        """Stop the connector, then the runner; idempotent.

        The connector may still be moving the runner's memory, so the connector stops first.
        """
        connector, self._connector, self._hooks = self._connector, None, None
        try:
            if connector is not None:
                connector.shutdown()
        finally:
            self._runner.close()


class _ConnectorHooks:
    """Calls the connector before and after each layer of the forward pass."""

    def __init__(self, connector: WorkerSide) -> None:
        self._connector = connector

    def before_layer(self, layer_name: str) -> None:
        self._connector.wait_for_layer_load(layer_name)

    def after_layer(self, layer_name: str, cache: torch.Tensor) -> None:
        self._connector.save_kv_layer(layer_name, cache, None)


def connector_config(
    setup: EngineSetup, runner: Runner, parallel: ParallelConfig
) -> ConnectorConfig:
    """Return the configuration of the connector, for both of its roles."""
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
