"""Connectors without a peer, as vLLM connectors: `OffloadingConnector`, and what it shares with the
connectors of `step_loading.py`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvferry.connectors.offloading import connector as offloading
from kvferry.vllm.connector import KVFerryConnector
from kvferry.vllm.kv_events import KVEventTranslator
from kvferry.vllm.offload_metrics import OffloadPromMetrics, OffloadVllmStats
from kvferry.vllm.progress import PrefillProgressTable
from kvferry.vllm.translate import VllmRequestView, null_blocks_as_holes, publishes_kv_events


class StorageConnector(KVFerryConnector):
    """A connector that moves KV between the engine and a store, not between engines."""

    opens_side_channel = False
    _stats_class = OffloadVllmStats

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        # Blocks are stored whole, and the layout is part of their name.
        return None

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def requires_kv_delivery(self) -> bool:
        return False


class KVFerryOffloadingConnector(StorageConnector):
    """Keeps KV in tiers; in addition to the pull connector, it reports the progress of every
    request's prompt to kvferry's scheduler half.
    """

    loads_are_optional = True
    inner_name = "OffloadingConnector"

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._prefills = PrefillProgressTable()
        self._publishes_events = publishes_kv_events(vllm_config)
        self._event_translator: KVEventTranslator | None = None

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._publishes_events:
            self._event_translator = KVEventTranslator(kv_cache_manager, self._needs.block_size)
            self._offloading.publish_events(self._event_translator.describe)

    def take_events(self) -> Iterable[Any]:
        translator = self._event_translator
        if translator is None:
            return []
        return [translator.translate(event) for event in self._offloading.take_events()]

    @property
    def _offloading(self) -> offloading.OffloadingConnector:
        assert isinstance(self._inner, offloading.OffloadingConnector)
        return self._inner

    def has_urgent_work(self) -> bool:
        assert isinstance(self._inner, offloading.OffloadingConnector)
        return self._has_unreported_stats or self._inner.has_pending_commands

    def _view(self, request: Any) -> VllmRequestView:
        return replace(super()._view(request), progress=self._prefills.get(str(request.request_id)))

    def _accept(self, request: Any) -> None:
        self._prefills.add(request)
        super()._accept(request)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        for request_id, request in self._prefills.running():
            self._check_adapter(request_id, request)
        plan = self._prefills.plan(scheduler_output, self._tables)
        metadata = self._wrapped(scheduler_output, plan)
        for part in plan.slices:
            if not self._offloading.is_watched(part.request_id):
                self._prefills.park(part.request_id)
        return metadata

    def _check_adapter(self, request_id: str, request: Any) -> None:
        """Store nothing of a request whose LoRA adapter vLLM may have replaced meanwhile."""
        if request.lora_request and self._salts.has_lost_adapter(request):
            self._offloading.withdraw(request_id)

    def _end_request(self, request: Any) -> None:
        super()._end_request(request)
        self._check_adapter(str(request.request_id), request)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        answer = super().request_finished(request, block_ids)
        self._prefills.end(str(request.request_id))
        return answer

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        answer = super().request_finished_all_groups(request, block_ids)
        self._prefills.end(str(request.request_id))
        return answer

    def _tables(self, request_id: str) -> tuple[list[int], ...]:
        return tuple(map(null_blocks_as_holes, self._kv_cache_manager.get_block_ids(request_id)))


OffloadingConnector = KVFerryOffloadingConnector
"""The name of vLLM's own offloading connector."""
