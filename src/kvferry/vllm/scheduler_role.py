"""The calls that vLLM makes in the process that schedules. Runs on the engine's main thread.

Besides the calls of the scheduler side, these are vLLM's concerns alone: the salts of requests, the
version of the weights, loads whose KV must not be used, the blocks that vLLM lacks, spans, and the
waits of an idle engine.
"""

import logging
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvferry.connectors.contract import BlockTables, RequestStatus, SchedulerSide
from kvferry.connectors.nixl.params import PrefillForPeer, read_params
from kvferry.connectors.offloading.events import KVEvent
from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.vllm.engine.admissions import Admissions
from kvferry.vllm.engine.engine_core import find_engine_core, idle_wait, watch_weights
from kvferry.vllm.engine.first_token import FirstTokenNote
from kvferry.vllm.engine.progress import PrefillProgressTable
from kvferry.vllm.engine.states import shorten_prefill_leg, state_specs
from kvferry.vllm.identity.loaded_weights import WeightsSample, WeightsVersion
from kvferry.vllm.identity.salts import CacheSalts
from kvferry.vllm.messages import HandshakeMetadata, StepMetadata, VllmOutput
from kvferry.vllm.metrics.kv_events import KVEventTranslator
from kvferry.vllm.metrics.multi import MultiKVEvents
from kvferry.vllm.metrics.tracing import ConnectorTracer
from kvferry.vllm.translate import (
    BlocksView,
    VllmRequestView,
    null_blocks_as_holes,
    publishes_kv_events,
    strip_transfer_params,
)

_log = logging.getLogger(__name__)


class SchedulerRole(KVConnectorBase_V1):
    """The part of `KVFerryConnector` in the process that schedules."""

    _side: Any
    _has_own_sides: bool
    """Whether kvferry itself moves KV."""
    _issues_tickets: bool
    """Whether kvferry itself moves KV between engines."""

    def _start_scheduler(self, vllm_config: Any, kv_cache_config: Any, block_size: int) -> None:
        """Prepare the calls of this role. Runs before the side is built."""
        groups = kv_cache_config.kv_cache_groups
        num_state_groups = sum(bool(state_specs(group)) for group in groups)
        self._has_states = bool(num_state_groups)
        self._weights = WeightsVersion()
        self._unread: dict[str, Any] = {}
        """vLLM's requests that arrived while the version of the weights was unknown."""
        self._salts = CacheSalts.from_config(vllm_config)
        self._first_token_note = FirstTokenNote(vllm_config, self._has_states)
        self._admissions = Admissions(block_size, len(groups) - num_state_groups, num_state_groups)
        self._prefills = PrefillProgressTable(self._tables)
        self._has_unreported_stats = False
        self._handshakes: dict[int, Any] = {}
        self._events: KVEventTranslator | None = None
        self._tracer = ConnectorTracer(vllm_config)
        core = find_engine_core()
        self._idle = idle_wait(core, vllm_config.parallel_config.distributed_executor_backend)
        self._is_paused = (lambda: False) if core is None else core.is_scheduler_paused
        if core is not None and self._has_own_sides:
            watch_weights(core, self._weights_may_change)
        if vllm_config.lora_config is not None:
            self._salts.adapters.watch_engine()

    @property
    def scheduler_side(self) -> SchedulerSide:
        if self.role is not KVConnectorRole.SCHEDULER:
            raise LocalProtocolError("a worker's connector got a call for the scheduler's")
        side: SchedulerSide = self._side
        return side

    def _view(self, request: Any) -> VllmRequestView:
        # A prefill leg whose prompt came as embeddings is not shortened.
        has_unknown_states = self._has_states and request.prompt_embeds is not None
        return VllmRequestView(
            request,
            self._salts,
            self._weights.version,
            progress=self._prefills.get(str(request.request_id)),
            has_unknown_states=has_unknown_states,
        )

    def reset_cache(self) -> bool | None:
        """Drop all KV that was computed so far. vLLM calls this when cached KV is no longer valid,
        because weights have changed or will change, and also if its own prefix cache could not be
        reset.
        """
        # vLLM resets its prefix cache only if no block is used.
        is_reset = self._drop_kv(is_cache_empty=self._are_blocks_free)
        _log.info("all KV was dropped because the caches are reset")
        return is_reset

    def _weights_may_change(self, call: str) -> None:
        """Drop all KV, as at a reset; the prefix cache keeps that of the old weights."""
        pool = self._kv_cache_manager.block_pool
        has_cached_blocks = any(block.block_hash is not None for block in pool.blocks)
        self._drop_kv(is_cache_empty=self._are_blocks_free and not has_cached_blocks)
        _log.info("all KV was dropped because a remote call may change the weights call=%s", call)

    def _drop_kv(self, *, is_cache_empty: bool) -> bool | None:
        if self._has_own_sides:
            self._weights.reset(is_cache_empty)
        is_reset = self.scheduler_side.reset_cache()
        self.scheduler_side.set_weights_version(self._weights.version)
        self._admissions.reset_loads(self._kv_cache_manager)
        return is_reset

    @property
    def _are_blocks_free(self) -> bool:
        # The null block is always in use.
        num_blocks: int = self._kv_cache_manager.block_pool.num_gpu_blocks
        return self._num_free_blocks == num_blocks - 1

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._kv_cache_manager = kv_cache_manager
        self._admissions.watermark = kv_cache_manager.watermark_blocks
        self.scheduler_side.bind_kv_cache_manager(kv_cache_manager)
        if self._has_own_sides and publishes_kv_events(self._vllm_config):
            self._events = KVEventTranslator(kv_cache_manager, self._admissions.block_size)
            self.scheduler_side.publish_events(self._events.describe)

    def on_new_request(self, request: Any) -> None:
        self._tracer.add(request)
        self._salts.note_request(request)
        if not self._has_own_sides:
            self._accept(request)
            return
        is_producer = self._vllm_config.kv_transfer_config.is_kv_producer
        role = read_params(request.kv_transfer_params)
        if self._has_states and is_producer and isinstance(role, PrefillForPeer):
            shorten_prefill_leg(request)
        if self._weights.is_known:
            self._accept(request)
        else:
            self._unread[str(request.request_id)] = request
            self.scheduler_side.expect_request(self._view(request))
        # vLLM's request keeps its own reference to the parameters.
        strip_transfer_params(request)

    def _accept(self, request: Any) -> None:
        self._prefills.add(request)
        self.scheduler_side.on_new_request(self._view(request))
        if not self.scheduler_side.needs_slices(str(request.request_id)):
            self._prefills.end(str(request.request_id))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._weights.note_needed()
        if not self._weights.is_known:
            self._admissions.skip()
            return None, False
        count: int | None = 0
        is_async = False
        # While the request was queued, its LoRA adapter may have been replaced by another.
        if not self._has_own_sides or not self._salts.has_lost_adapter(request):
            count, is_async = self.scheduler_side.get_num_new_matched_tokens(
                self._view(request), num_computed_tokens
            )
        if request.skip_reading_prefix_cache:
            # The request must compute its whole prompt, for example because its client wants the
            # logprobs of the prompt. vLLM ignores the answer then.
            count, is_async = 0, False
        if count is None:
            self._admissions.skip()
        else:
            self._admissions.looked_up(request, num_computed_tokens, will_load=is_async)
        return count, is_async

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        groups = self.scheduler_side.get_loaded_kv_cache_group_ids(self._view(request))
        if groups is None:
            groups = super().get_loaded_kv_cache_group_ids(request)
        return tuple(sorted(groups))

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        sources = Counter(
            self.scheduler_side.get_external_cache_hit_sources(
                self._view(request), num_external_tokens
            )
        )
        others = num_external_tokens - sources.total()
        if others > 0:
            sources.update(super().get_external_cache_hit_sources(request, others))
        return dict(sources)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._admissions.admit(request, num_external_tokens):
            self._tracer.begin_load(request)
        self.scheduler_side.update_state_after_alloc(
            self._view(request), BlocksView(blocks), num_external_tokens
        )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        side = self.scheduler_side
        for request in self._prefills.running():
            self._check_adapter(request)
        step = self._prefills.plan(scheduler_output)
        if self._is_paused():
            # A pause ends when no request holds blocks, and a sleep begins with a pause: retained
            # turns would delay both for minutes.
            side.reclaim_blocks(sys.maxsize)
        self._idle.wait(self.has_urgent_work)
        lacking = self._admissions.missing_to_start(self._num_free_blocks)
        if lacking:
            side.reclaim_blocks(lacking)
        self._admissions.step_planned(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            self._weights.note_needed()
        metadata = StepMetadata(
            side.build_connector_meta(step), self._weights.take_sample_request()
        )
        for part in step.slices:
            if not side.needs_slices(part.request_id):
                self._prefills.park(part.request_id)
        return metadata

    def _check_adapter(self, request: Any) -> None:
        """Save nothing of a request whose LoRA adapter vLLM may have replaced meanwhile."""
        if request.lora_request and self._salts.has_lost_adapter(request):
            self.scheduler_side.withdraw(str(request.request_id))

    def _tables(self, request_id: str) -> BlockTables:
        return null_blocks_as_holes(self._kv_cache_manager.get_block_ids(request_id))

    @property
    def _num_free_blocks(self) -> int:
        return int(self._kv_cache_manager.block_pool.get_num_free_blocks())

    def has_pending_block_frees(self) -> bool:
        # vLLM asks when a running request lacks blocks, before it preempts another request.
        self.scheduler_side.reclaim_blocks(self._admissions.missing_to_run(self._num_free_blocks))
        return self.scheduler_side.has_pending_block_frees()

    def has_urgent_work(self) -> bool:
        """Whether an idle engine must not wait before its next step."""
        return self._has_unreported_stats or self.scheduler_side.has_urgent_work()

    def has_pending_push_work(self) -> bool:
        return self._has_unreported_stats or self.scheduler_side.has_pending_push_work()

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        finished = set(connector_output.finished_recving or ())
        failed = set(connector_output.failed_recving or ())
        if report is not None:
            self._admissions.void_loads(report.failed_loads)
            if report.weights is not None:
                self._take_weights_sample(report.weights)
        void = self._admissions.end_loads(finished, failed, self._kv_cache_manager)
        events = connector_output.kv_cache_events
        ours = VllmOutput(
            finished_sending=set(connector_output.finished_sending or ()),
            finished_recving=finished,
            failed_recving=failed | void,
            kv_cache_events=events.parts if isinstance(events, MultiKVEvents) else None,
            kv_connector_worker_meta=None if report is None else report.inner,
            theirs=connector_output,
        )
        self.scheduler_side.update_connector_output(ours)
        # A `MultiConnector` joins the reports of its children.
        connector_output.finished_recving = ours.finished_recving
        connector_output.finished_sending = ours.finished_sending
        self._tracer.end(finished, failed | void, ours.finished_sending, report)

    def _take_weights_sample(self, sample: WeightsSample) -> None:
        if not self._weights.take_sample(sample):
            return
        version = self._weights.version
        _log.info("weights sampled after a reset version=%s", version or "of the start")
        self.scheduler_side.set_weights_version(version)
        arrived, self._unread = self._unread, {}
        for request in arrived.values():
            self._accept(request)

    def take_events(self) -> Iterable[Any]:
        return [
            self._events.translate(event)
            if self._events is not None and isinstance(event, KVEvent)
            else event
            for event in self.scheduler_side.take_events()
        ]

    def register_finished_partial_tail(
        self, request: Any, block_ids: BlockTables, partial_tail_offloads: Any
    ) -> bool:
        return self.scheduler_side.register_finished_partial_tail(
            self._view(request), null_blocks_as_holes(block_ids), partial_tail_offloads
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: BlockTables
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = str(request.request_id)
        if self._unread.pop(request_id, None) is not None:
            # The scheduler side has to read the ticket in order to tell the peer that the request
            # has ended.
            self._accept(request)
        self._admissions.end(request_id)
        self._check_adapter(request)
        view = self._view(request)
        if (
            self._has_states
            and request.num_in_flight_tokens
            and view.status is not RequestStatus.FINISHED_ABORTED
        ):
            _log.info(
                "no ticket issued: a step that is still running replaces the states request=%s",
                request.request_id,
            )
            view = replace(view, has_unknown_states=True)
        is_delayed, params = self.scheduler_side.request_finished_all_groups(
            view, null_blocks_as_holes(block_ids)
        )
        self._prefills.end(request_id)
        self._tracer.finish(request, (is_delayed, params))
        if self._issues_tickets:
            params = self._first_token_note.add_to(params, request)
        return is_delayed, params

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
        self.scheduler_side.set_xfer_handshake_metadata(handshakes)
        # Routers find this engine's side channel on `/metrics`, but vLLM's front-end receives stats
        # only with a step. So the connector asks for a first step.
        self._has_unreported_stats = True
