"""A connector whose only peer is its own engine: it loads KV from the blocks of an earlier request, between steps, on its own thread.

`kv_transfer_params`: {"keep": true} holds a request's blocks when it ends, {"copy_of": id} loads from such a request and then frees it;
{"copy_of": id, "how": "corrupt"} spoils one block on the way, {"how": "fail"} reports a failure.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    Request,
)
from kvferry.connectors.stats import KVConnectorStats


@dataclass(frozen=True)
class CopyJob:
    request_id: str
    source_id: str
    sources: list[int]
    targets: list[int]
    how: str


@dataclass
class CopyMetadata(KVConnectorMetadata):
    jobs: list[CopyJob] = field(default_factory=list)


@dataclass
class CopyStats(KVConnectorStats):
    def aggregate(self, other: KVConnectorStats) -> "CopyStats":
        return CopyStats({name: self.data.get(name, 0) + value for name, value in other.data.items()})


class CopyConnector(KVConnectorBase_V1):
    def __init__(self, config: ConnectorConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(config, role, kv_cache_config)
        self._kept: dict[str, list[int]] = {}
        self._jobs: list[CopyJob] = []
        self._results = KVConnectorTransferResults()
        self._caches: Mapping[str, torch.Tensor] = {}
        self._wake: Callable[[], None] = lambda: None
        self._todo: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[CopyJob] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def shutdown(self) -> None:
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join()
            self._thread = None

    # -- scheduler ---------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if (request.kv_transfer_params or {}).get("copy_of") not in self._kept:
            return 0, False
        count = request.num_prompt_tokens - num_computed_tokens
        return count, count > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        params = request.kv_transfer_params or {}
        (targets,) = blocks.get_block_ids()
        sources = self._kept.pop(params["copy_of"])[: len(targets)]
        self._jobs.append(CopyJob(request.request_id, params["copy_of"], sources, targets, params.get("how", "")))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        jobs, self._jobs = self._jobs, []
        return CopyMetadata(jobs)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if not (request.kv_transfer_params or {}).get("keep"):
            return False, None
        self._kept[request.request_id] = block_ids
        return True, {"blocks": len(block_ids)}

    # -- worker ------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        self._caches = kv_caches
        self._thread = threading.Thread(target=self._copy_all, name="copy-connector")
        self._thread.start()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert isinstance(self._connector_metadata, CopyMetadata)
        for job in self._connector_metadata.jobs:
            self._todo.put(job)

    def wait_for_layer_load(self, layer_name: str) -> None:
        assert layer_name in self._caches

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        assert kv_layer.data_ptr() == self._caches[layer_name].data_ptr()

    def wait_for_save(self) -> None:
        assert self.has_connector_metadata()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        while not self._done.empty():
            job = self._done.get()
            results.finished_recving.add(job.request_id)
            results.finished_sending.add(job.source_id)
            if job.how == "fail":
                results.failed_recving.add(job.request_id)
                results.failure_reasons[job.request_id] = "the copy was told to fail"
        return results

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return CopyStats({"worker_steps": 1}) if self._role is KVConnectorRole.WORKER else None

    def _copy_all(self) -> None:
        while (job := self._todo.get()) is not None:
            if job.how != "fail":
                for cache in self._caches.values():
                    cache[job.targets] = cache[job.sources]
                    if job.how == "corrupt":
                        cache[job.targets[0]] += 1.0
            self._done.put(job)
            self._wake()
