"""One tensor-parallel rank: a runner and the worker's half of the connector contract.

One thread makes every call. `execute` takes the contract's calls in their order for every plan, with tokens or without.
"""

from collections.abc import Callable

import torch

from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    ParallelConfig,
)
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.engine.runner import Runner
from kvferry.engine.setup import EngineSetup
from kvferry.engine.step import StepPlan, StepResult
from kvferry.errors import ConfigError, LocalProtocolError

__all__ = ["Worker", "connector_config"]


class Worker:
    """Build it with `start`; it owns the runner, the cache and the connector until `close`."""

    def __init__(self, runner: Runner, kv_cache_config: KVCacheConfig, connector: KVConnectorBase_V1 | None) -> None:
        self._runner = runner
        self._kv_cache_config = kv_cache_config
        self._connector = connector
        self._hooks = None if connector is None else _ConnectorHooks(connector)

    @classmethod
    def start(
        cls, setup: EngineSetup, parallel: ParallelConfig, rendezvous: str, wake: Callable[[], None], report_stage: Callable[[str], None]
    ) -> "Worker":
        """Load the model, join the other ranks, allocate the cache and register it. `report_stage` hears what is being done."""
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

    def _connect(self, setup: EngineSetup, parallel: ParallelConfig, wake: Callable[[], None]) -> None:
        config = connector_config(setup, self._runner, parallel)
        connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, self._kv_cache_config)
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


def connector_config(setup: EngineSetup, runner: Runner, parallel: ParallelConfig) -> ConnectorConfig:
    """What both roles of the connector are built from."""
    if setup.options.kv_transfer is None or setup.side_channel is None:
        raise ConfigError("a KV connector needs kv_transfer and a side channel; give both or neither")
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
