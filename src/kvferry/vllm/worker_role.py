"""The calls that vLLM makes in a worker. The engine's thread only exchanges commands and events;
all transfers happen on the transfer worker's thread.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from kvferry.connectors.contract import WorkerSide
from kvferry.errors import LocalProtocolError
from kvferry.vllm.engine.states import state_specs, state_views
from kvferry.vllm.identity.loaded_weights import LoadedWeights
from kvferry.vllm.messages import HandshakeMetadata, WorkerMetadata
from kvferry.vllm.metrics.multi import MultiKVEvents


class WorkerRole(KVConnectorBase_V1):
    """The part of `KVFerryConnector` in a worker."""

    _side: Any
    _loaded_weights: LoadedWeights

    def _start_worker(self, vllm_config: Any) -> None:
        """Prepare the calls of this role. Runs before the side is built."""
        self._is_traced = bool(vllm_config.observability_config.otlp_traces_endpoint)
        self._report = WorkerMetadata()

    @property
    def worker_side(self) -> WorkerSide:
        if self.role is not KVConnectorRole.WORKER:
            raise LocalProtocolError("the scheduler's connector got a call for a worker's")
        side: WorkerSide = self._side
        return side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        # A layer that shares the cache of another layer is in no group; its KV moves with the other
        # layer.
        groups = self._kv_cache_config.kv_cache_groups
        layers = {layer for group in groups for layer in group.layer_names}
        specs = state_specs(*groups)
        states = state_views(
            kv_caches,
            specs,
            self._vllm_config.parallel_config.tensor_parallel_size,
            self._vllm_config.model_config.hf_text_config,
        )
        self.worker_side.register_kv_caches(
            {layer: kv_caches[layer] for layer in kv_caches if layer in layers - specs.keys()}
            | states
        )

    def unregister_kv_caches(self) -> None:
        self.worker_side.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        self.worker_side.restore_kv_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        inner = self.worker_side.get_handshake_metadata()
        return None if inner is None else HandshakeMetadata(inner)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self.worker_side.handle_preemptions(kv_connector_metadata.inner)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if connector_metadata.weights_sample is not None:
            self._report.weights = self._loaded_weights.sample(connector_metadata.weights_sample)
        # Commands are submitted here, not in `start_load_kv`, which vLLM calls after the forward
        # pass: they would wait for a whole step of this engine while a peer waits for an answer.
        self.worker_side.bind_connector_metadata(connector_metadata.inner)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.worker_side.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker_side.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.worker_side.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self.worker_side.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def finish_forward(self) -> None:
        self.worker_side.finish_forward()

    def wait_for_save(self) -> None:
        self.worker_side.wait_for_save()

    def reset_capture_state(self) -> None:
        self.worker_side.reset_capture_state()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self.worker_side.get_transfer_results(finished_req_ids)
        # vLLM would apply its failure policy to an optional load. Its request starts over instead.
        self._report.failed_loads |= results.optional_failures
        if self._is_traced:
            self._report.times |= results.recving_times
        return KVConnectorTransferResults(
            results.finished_sending,
            results.finished_recving,
            results.failed_recving - results.optional_failures,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_side.get_block_ids_with_load_errors()

    def get_kv_connector_kv_cache_events(self) -> Any:
        parts = self.worker_side.get_kv_connector_kv_cache_events()
        return None if parts is None else MultiKVEvents(parts)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report, self._report = self._report, WorkerMetadata()
        report.inner = self.worker_side.build_connector_worker_meta()
        return None if report.is_empty else report
