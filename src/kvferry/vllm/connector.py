"""kvferry's connectors as vLLM connectors: vLLM's base class outside, kvferry's connector inside.

The classes forward and translate calls; the decisions are in `kvferry.connectors`. As in vLLM,
there is one instance per role. Scheduler calls run on the engine's main thread. In a worker, the
engine's thread only exchanges commands and events; all transfers happen on the transfer worker's
thread. See docs/decisions/011-inside-vllm.md.
"""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from kvferry.connectors import contract
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.connectors.metadata import NixlWorkerMetadata
from kvferry.connectors.params import PrefillForPeer, read_params
from kvferry.errors import ConfigError
from kvferry.events import TransferTimes
from kvferry.logs import LEVEL_VARIABLE, ForwardingHandler, LogSettings
from kvferry.vllm.block_demand import BlockDemand
from kvferry.vllm.compatibility import check_supported, why_not_asleep
from kvferry.vllm.engine_core import find_pause, watch_weights
from kvferry.vllm.first_token import FirstTokenNote
from kvferry.vllm.idle import IdleWait, find_engine_loop, longest_wait_s
from kvferry.vllm.loaded_weights import LoadedWeights, WeightsSample, WeightsVersion
from kvferry.vllm.metrics import KVFerryPromMetrics, KVFerryStats
from kvferry.vllm.plugin import register
from kvferry.vllm.progress import PrefillProgressTable
from kvferry.vllm.release import find_cache_hit_source, warn_if_untested
from kvferry.vllm.remote_loads import OptionalLoadFailures, RemoteLoads
from kvferry.vllm.salts import CacheSalts
from kvferry.vllm.states import shorten_prefill_leg, state_specs, state_views
from kvferry.vllm.translate import (
    BlocksView,
    VllmRequestView,
    cache_config,
    connector_config,
    null_blocks_as_holes,
    strip_transfer_params,
    transfer_config,
)

if TYPE_CHECKING:
    from kvferry.vllm.tracing import ConnectorTracer


def log_with_vllm() -> None:
    """Send kvferry's log lines to vLLM's handlers, in vLLM's format; from vLLM's level on, unless
    KVFERRY_LOG_LEVEL is set.

    Idempotent. Does nothing if the operator has configured a logger named kvferry.
    """
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvferry")
    if ours.handlers or not theirs.handlers:
        return
    ours.addHandler(ForwardingHandler(theirs))
    asked = LogSettings.of(None, None, os.environ) if LEVEL_VARIABLE in os.environ else None
    ours.setLevel(theirs.getEffectiveLevel() if asked is None else asked.level_number)
    ours.propagate = False


_log = logging.getLogger(__name__)

# vLLM's MultiConnector looks up a child connector by its registered name. Plugins may be
# restricted, so registration must not depend on the plugin entry point.
register()


@dataclass
class StepMetadata(KVConnectorMetadata):
    """kvferry's message of one step, wrapped for vLLM."""

    inner: contract.KVConnectorMetadata
    optional_loads: tuple[str, ...] = ()
    """The optional loads that start in this step."""
    weights_sample: int | None = None
    """The number of the reset for which the workers sample their weights in this step."""


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """A rank's report to kvferry's scheduler half, wrapped for vLLM."""

    inner: contract.KVConnectorWorkerMetadata | None
    failed_loads: frozenset[str] = frozenset()
    """Optional loads that failed on this rank."""
    weights: WeightsSample | None = None
    times: dict[str, list[TransferTimes]] = field(default_factory=dict)
    """When the loads that have ended reached each stage; empty if vLLM writes no spans."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        assert isinstance(other, WorkerMetadata)
        inner = (
            self.inner.aggregate(other.inner)
            if self.inner is not None and other.inner is not None
            else self.inner or other.inner
        )
        weights = (
            self.weights.aggregate(other.weights)
            if self.weights is not None and other.weights is not None
            else self.weights or other.weights
        )
        times = {
            request: [*self.times.get(request, ()), *other.times.get(request, ())]
            for request in self.times.keys() | other.times.keys()
        }
        return WorkerMetadata(inner, self.failed_loads | other.failed_loads, weights, times)


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """kvferry's handshake data of one rank, wrapped for vLLM."""

    inner: contract.KVConnectorHandshakeMetadata


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """The pull connector, under the name that the plugin registers: vLLM's MultiConnector looks up
    a child again by the name of its class.
    """

    # Read by kvferry's MultiConnector; see `kvferry.connectors.contract`.
    honours_token_range = True
    opens_side_channel = True
    inner_name = "NixlConnector"
    transfer_mode = "pull"
    _cache_hit_source = find_cache_hit_source()
    _stats_class: type[KVConnectorStats] = KVFerryStats

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_with_vllm()
        warn_if_untested()
        check_supported(vllm_config, kv_cache_config)
        is_worker = role is KVConnectorRole.WORKER
        rank = get_tensor_model_parallel_rank() if is_worker else 0
        formats = (
            ",".join(sorted({b.get_name() for b in get_current_attn_backends(vllm_config)}))
            if is_worker
            else ""
        )
        self._loaded_weights = (
            LoadedWeights.find(vllm_config.parallel_config.tensor_parallel_size)
            if is_worker
            else LoadedWeights()
        )
        config = connector_config(vllm_config, self.inner_name, rank, formats, self._loaded_weights)
        our_role = (
            contract.KVConnectorRole.WORKER if is_worker else contract.KVConnectorRole.SCHEDULER
        )
        self._weights = WeightsVersion()
        self._unread: dict[str, Any] = {}
        """vLLM's requests that arrived while the version of the weights was unknown."""
        self._weights_sample: WeightsSample | None = None
        if not is_worker:
            watch_weights(self._weights_may_change)
        self._is_paused = find_pause()
        self._salts = CacheSalts.from_config(vllm_config)
        if not is_worker and vllm_config.lora_config is not None:
            self._salts.adapters.watch_engine()
        cache = cache_config(vllm_config, kv_cache_config, formats)
        self._has_states = cache.has_states
        self._first_token_note = FirstTokenNote(vllm_config, cache.has_states)
        num_state_groups = sum(group.is_state for group in cache.groups)
        self._needs = BlockDemand(
            cache.block_size, len(cache.groups) - num_state_groups, num_state_groups
        )
        self._loads = RemoteLoads()
        self._excused = OptionalLoadFailures()
        self._has_unreported_stats = False
        self._handshakes: dict[int, contract.KVConnectorHandshakeMetadata] = {}
        self._is_traced = bool(vllm_config.observability_config.otlp_traces_endpoint)
        self._tracer = _make_tracer() if self._is_traced and not is_worker else None
        self._load_times: dict[str, list[TransferTimes]] = {}
        self._idle = IdleWait(
            None if is_worker else find_engine_loop(),
            longest_wait_s(vllm_config.parallel_config.distributed_executor_backend),
        )
        self._has_work: Callable[[], bool] = self.has_urgent_work
        self._inner = KVConnectorFactory.create_connector(config, our_role, cache)
        self._inner.set_wakeup(self._idle.wake)

    def join_multi_connector(self, has_work: Callable[[], bool]) -> None:
        """Called by kvferry's MultiConnector, whose other children may have work too: a step of an
        idle engine waits only while `has_work` is false.
        """
        self._has_work = has_work

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        reason = why_not_asleep(transfer_config(kv_transfer_config, cls.inner_name).extra)
        if reason:
            log_with_vllm()
            _log.error("sleep mode refused connector=%s reason=%s", cls.__name__, reason)
        return not reason

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.get_from_extra_config(
            "enable_cross_layers_blocks", False
        ):
            return "BLHNC"
        return None if vllm_config.model_config.use_mla else "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return cls._stats_class(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return KVFerryPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, cls.transfer_mode
        )

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        self._has_unreported_stats = False
        stats = self._inner.get_kv_connector_stats()
        return None if stats is None else self._stats_class(stats.to_dict())

    def shutdown(self) -> None:
        self._inner.shutdown()

    # -- scheduler --

    def _view(self, request: Any) -> VllmRequestView:
        # A prefill leg whose prompt came as embeddings is not shortened.
        has_unknown_states = self._has_states and request.prompt_embeds is not None
        return VllmRequestView(
            request,
            self._salts,
            self._weights.version,
            has_unknown_states=has_unknown_states,
        )

    def reset_cache(self) -> bool | None:
        """Drop all KV that was computed so far. vLLM calls this when cached KV is no longer valid,
        because weights have changed or will change, and also if its own prefix cache could not be
        reset.
        """
        # vLLM resets its prefix cache only if no block is used.
        self._drop_kv(is_cache_empty=self._are_blocks_free)
        _log.info("all KV was dropped because the caches are reset")
        return None

    def _weights_may_change(self, call: str) -> None:
        """Drop all KV, as at a reset; the prefix cache keeps that of the old weights."""
        pool = self._kv_cache_manager.block_pool
        has_cached_blocks = any(block.block_hash is not None for block in pool.blocks)
        self._drop_kv(is_cache_empty=self._are_blocks_free and not has_cached_blocks)
        _log.info("all KV was dropped because a remote call may change the weights call=%s", call)

    def _drop_kv(self, *, is_cache_empty: bool) -> None:
        self._weights.reset(is_cache_empty)
        self._inner.reset_cache()
        self._inner.set_weights_version(self._weights.version)
        self._loads.reset(self._kv_cache_manager)

    @property
    def _are_blocks_free(self) -> bool:
        # The null block is always in use.
        num_blocks: int = self._kv_cache_manager.block_pool.num_gpu_blocks
        return self._num_free_blocks == num_blocks - 1

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._needs.watermark = kv_cache_manager.watermark_blocks

    def on_new_request(self, request: Any) -> None:
        if self._tracer is not None:
            self._tracer.add(request)
        self._salts.note_request(request)
        is_producer = self._vllm_config.kv_transfer_config.is_kv_producer
        role = read_params(request.kv_transfer_params)
        if self._has_states and is_producer and isinstance(role, PrefillForPeer):
            shorten_prefill_leg(request)
        if self._weights.is_known:
            self._accept(request)
        else:
            self._unread[str(request.request_id)] = request
            self._inner.expect_request(self._view(request))
        # vLLM's request keeps its own reference to the parameters.
        strip_transfer_params(request)

    def _accept(self, request: Any) -> None:
        self._inner.on_new_request(self._view(request))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._weights.note_needed()
        if not self._weights.is_known:
            self._needs.note_skipped()
            return None, False
        count: int | None = 0
        is_async = False
        # While the request was queued, its LoRA adapter may have been replaced by another.
        if not self._salts.has_lost_adapter(request):
            count, is_async = self._inner.get_num_new_matched_tokens(
                self._view(request), num_computed_tokens
            )
        if request.skip_reading_prefix_cache:
            # The request must compute its whole prompt, for example because its client wants the
            # logprobs of the prompt. vLLM ignores the answer then.
            count, is_async = 0, False
        if count is None:
            self._needs.note_skipped()
        else:
            self._needs.note_candidate(request, num_computed_tokens, will_load=is_async)
        return count, is_async

    def note_skipped(self) -> None:
        """Called by kvferry's MultiConnector when another child has no answer yet, so that vLLM
        skips the request in this step.
        """
        self._needs.note_skipped()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._needs.note_admitted(request, num_external_tokens)
        self._inner.update_state_after_alloc(
            self._view(request), BlocksView(blocks), num_external_tokens
        )
        if num_external_tokens:
            if self._tracer is not None:
                self._tracer.begin_load(request)
            self._loads.begin(request)
            if self._inner.is_load_optional(str(request.request_id)):
                self._loads.announce_optional(str(request.request_id))
        else:
            # vLLM has gone on with the request, or another child of a MultiConnector loads for it.
            self._loads.end_request(str(request.request_id))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._wrapped(scheduler_output, scheduler_output)

    def _wrapped(self, scheduler_output: Any, plan: Any) -> StepMetadata:
        """Build the step's message. `plan` is the step in the form that kvferry's scheduler half
        expects.
        """
        if self._is_paused():
            # Retained turns would delay the pause, and so a sleep, for minutes.
            self._inner.reclaim_blocks(sys.maxsize)
        self._idle.wait(self._has_work)
        lacking = self._needs.missing_to_start(self._num_free_blocks)
        if lacking:
            self._inner.reclaim_blocks(lacking)
        self._needs.note_planned(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            self._weights.note_needed()
        return StepMetadata(
            self._inner.build_connector_meta(plan),
            self._loads.take_unannounced(),
            self._weights.take_sample_request(),
        )

    @property
    def _num_free_blocks(self) -> int:
        return int(self._kv_cache_manager.block_pool.get_num_free_blocks())

    def has_pending_block_frees(self) -> bool:
        # vLLM asks when a running request lacks blocks, before it preempts another request.
        self._inner.reclaim_blocks(self._needs.missing_to_run(self._num_free_blocks))
        return self._inner.has_pending_block_frees()

    def has_urgent_work(self) -> bool:
        """Whether an idle engine must not wait before its next step."""
        return self.has_pending_push_work()

    def has_pending_push_work(self) -> bool:
        return self._has_unreported_stats or self._inner.has_pending_push_work()

    def update_connector_output(self, connector_output: Any) -> None:
        worker_metadata = connector_output.kv_connector_worker_meta
        finished = set(connector_output.finished_recving or ())
        failed = set(connector_output.failed_recving or ())
        if worker_metadata is not None:
            self._loads.note_failed(worker_metadata.failed_loads)
            if worker_metadata.weights is not None:
                self._take_weights_sample(worker_metadata.weights)
        void = self._loads.end(finished, failed, self._kv_cache_manager)
        ours = contract.KVConnectorOutput(
            finished_sending=set(connector_output.finished_sending or ()),
            finished_recving=finished,
            failed_recving=failed | void,
            kv_connector_worker_meta=None if worker_metadata is None else worker_metadata.inner,
        )
        self._inner.update_connector_output(ours)
        if self._tracer is not None:
            self._trace_output(self._tracer, ours, worker_metadata)

    def _trace_output(
        self,
        tracer: "ConnectorTracer",
        output: contract.KVConnectorOutput,
        worker_metadata: WorkerMetadata | None,
    ) -> None:
        times, failed, reasons = {}, set(output.failed_recving), {}
        if worker_metadata is not None:
            times, failed = worker_metadata.times, failed | worker_metadata.failed_loads
            if isinstance(worker_metadata.inner, NixlWorkerMetadata):
                reasons = worker_metadata.inner.failed
        tracer.end_loads(output.finished_recving, frozenset(failed), times, reasons)
        tracer.end_leases(output.finished_sending)

    def _take_weights_sample(self, sample: WeightsSample) -> None:
        if not self._weights.take_sample(sample):
            return
        version = self._weights.version
        _log.info("weights sampled after a reset version=%s", version or "of the start")
        self._inner.set_weights_version(version)
        arrived, self._unread = self._unread, {}
        for request in arrived.values():
            self._accept(request)

    def _end_request(self, request: Any) -> None:
        self._needs.end(request.request_id)
        if self._unread.pop(str(request.request_id), None) is not None:
            # The inner connector has to read the ticket in order to tell the peer that the request
            # has ended.
            self._accept(request)
        self._loads.end_request(str(request.request_id))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._end_request(request)
        result = self._inner.request_finished(self._view(request), null_blocks_as_holes(block_ids))
        return self._finished(request, result)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert isinstance(self._inner, contract.SupportsHMA)
        self._end_request(request)
        view = self._view(request)
        if self._has_states and request.num_in_flight_tokens and view.is_transferable:
            _log.info(
                "no ticket issued: a step that is still running replaces the states request=%s",
                request.request_id,
            )
            view = replace(view, has_unknown_states=True)
        result = self._inner.request_finished_all_groups(
            view, tuple(map(null_blocks_as_holes, block_ids))
        )
        return self._finished(request, result)

    def _finished(
        self, request: Any, result: tuple[bool, dict[str, Any] | None]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._tracer is not None:
            self._tracer.finish(request, result)
        is_delayed, params = result
        return is_delayed, self._first_token_note.add_to(params, request)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        if not all(isinstance(part, HandshakeMetadata) for part in metadata.values()):
            raise ConfigError(
                "vLLM's MultiConnector passes on only the handshake data of its first child: list "
                "KVFerryConnector first"
            )
        handshakes = {rank: part.inner for rank, part in metadata.items()}
        if handshakes == self._handshakes:
            return
        self._handshakes = handshakes
        self._inner.set_xfer_handshake_metadata(handshakes)
        # Routers find this engine's side channel on `/metrics`, but vLLM's front-end receives stats
        # only with a step. So the connector asks for a first step.
        self._has_unreported_stats = True

    # -- worker --

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        # A layer that shares the cache of another layer is in no group; its KV moves with the other
        # layer.
        layers = {
            layer for group in self._kv_cache_config.kv_cache_groups for layer in group.layer_names
        }
        specs = {
            layer: spec
            for group in self._kv_cache_config.kv_cache_groups
            for layer, spec in state_specs(group).items()
        }
        states = state_views(
            kv_caches,
            specs,
            self._vllm_config.parallel_config.tensor_parallel_size,
            self._vllm_config.model_config.hf_text_config,
        )
        self._inner.register_kv_caches(
            {layer: kv_caches[layer] for layer in kv_caches if layer in layers - specs.keys()}
            | states
        )

    def unregister_kv_caches(self) -> None:
        self._inner.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        self._inner.restore_kv_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        inner = self._inner.get_handshake_metadata()
        return None if inner is None else HandshakeMetadata(inner)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._excused.add_optional(connector_metadata.optional_loads)
        if connector_metadata.weights_sample is not None:
            self._weights_sample = self._loaded_weights.sample(connector_metadata.weights_sample)
        self._inner.bind_connector_metadata(connector_metadata.inner)
        # vLLM calls start_load_kv after the forward pass, where the commands would wait for a whole
        # step of this engine while a peer waits for an answer. So the commands are submitted here.
        self._inner.start_load_kv(None)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._inner.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return None

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._inner.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._inner.save_kv_layer(layer_name, kv_layer, attn_metadata)

    def wait_for_save(self) -> None:
        self._inner.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._inner.get_transfer_results(finished_req_ids)
        failed = self._excused.remove_optional(results.finished_recving, results.failed_recving)
        if self._is_traced:
            self._load_times |= results.recving_times
        return KVConnectorTransferResults(
            results.finished_sending, results.finished_recving, failed
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        sample, self._weights_sample = self._weights_sample, None
        times, self._load_times = self._load_times, {}
        worker_metadata = WorkerMetadata(
            self._inner.build_connector_worker_meta(), self._excused.take_failed(), sample, times
        )
        is_empty = worker_metadata.inner is None and not (
            worker_metadata.failed_loads or sample or times
        )
        return None if is_empty else worker_metadata


def _make_tracer() -> "ConnectorTracer":
    # Imported here, because vLLM works without OpenTelemetry if it writes no spans.
    from kvferry.vllm.tracing import ConnectorTracer

    return ConnectorTracer()


class KVFerryPushConnector(KVFerryConnector):
    """The push connector; in addition to the pull connector, it reports the progress of prefill
    legs to kvferry's scheduler half.
    """

    inner_name = "NixlPushConnector"
    transfer_mode = "push"

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._prefills = PrefillProgressTable()

    def _accept(self, request: Any) -> None:
        is_for_peer = isinstance(read_params(request.kv_transfer_params), PrefillForPeer)
        progress = self._prefills.add(request) if is_for_peer else None
        self._inner.on_new_request(replace(self._view(request), progress=progress))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._wrapped(scheduler_output, self._prefills.plan(scheduler_output, self._tables))

    def _end_request(self, request: Any) -> None:
        super()._end_request(request)
        self._prefills.end(str(request.request_id))

    def _tables(self, request_id: str) -> tuple[list[int], ...]:
        return tuple(map(null_blocks_as_holes, self._kv_cache_manager.get_block_ids(request_id)))


class KVFerryMooncakeConnector(KVFerryConnector):
    """The pull connector whose transport is mooncake."""

    inner_name = "MooncakeConnector"


NixlConnector = NixlPullConnector = KVFerryConnector
"""The name of vLLM's own connector, so that the module path is the only change in a configuration.
"""
NixlPushConnector = KVFerryPushConnector
"""The name of vLLM's own push connector."""
MooncakeConnector = KVFerryMooncakeConnector
"""The name of vLLM's own connector for Mooncake's Transfer Engine."""
