"""A connector whose only peer is its own engine: between steps, on its own thread, it loads KV from
the blocks of an earlier request.

`kv_transfer_params`: {"keep": true} holds a request's blocks when it ends; {"copy_of": id} loads
from such a request and then frees it; {"copy_of": id, "how": "corrupt"} corrupts one block on the
way; {"how": "fail"} reports a failure. The connector supports several KV-cache groups: in each
group, the blocks that the next token attends to must still be present.
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
    SupportsHMA,
)
from kvferry.connectors.stats import KVConnectorStats
from kvferry.protocol.tickets import NO_BLOCK

Tables = tuple[list[int], ...]


@dataclass(frozen=True)
class CopyJob:
    request_id: str
    source_id: str
    sources: Tables
    targets: Tables
    how: str


@dataclass
class CopyMetadata(KVConnectorMetadata):
    jobs: list[CopyJob] = field(default_factory=list)


@dataclass
class CopyStats(KVConnectorStats):
    def aggregate(self, other: KVConnectorStats) -> "CopyStats":
        return CopyStats(
            {name: self.data.get(name, 0) + value for name, value in other.data.items()}
        )


class CopyConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(
        self, config: ConnectorConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(config, role, kv_cache_config)
        self._kept: dict[str, Tables] = {}
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

    # -- scheduler --

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        kept = self._kept.get((request.kv_transfer_params or {}).get("copy_of", ""))
        count = 0 if kept is None else self._num_available(kept, request) - num_computed_tokens
        return max(0, count), count > 0

    def _num_available(self, kept: Tables, request: Request) -> int:
        """The whole prompt, or all but its last token if a group has local attention; 0 if that
        token would attend to a hole in a block table.
        """
        groups, block_size = self._kv_cache_config.groups, self._kv_cache_config.block_size
        end = request.num_prompt_tokens - any(group.has_local_attention for group in groups)
        places = [
            slice(group.first_visible_token(end) // block_size, -(-end // block_size))
            for group in groups
        ]
        return (
            0
            if any(NO_BLOCK in table[place] for table, place in zip(kept, places, strict=True))
            else end
        )

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if not num_external_tokens:
            return
        params = request.kv_transfer_params or {}
        pairs = [
            [
                (source, target)
                for source, target in zip(kept, table, strict=False)
                if target != NO_BLOCK
            ]
            for kept, table in zip(
                self._kept.pop(params["copy_of"]), blocks.get_block_ids(), strict=True
            )
        ]
        sources, targets = (
            tuple([pair[side] for pair in group] for group in pairs) for side in (0, 1)
        )
        self._jobs.append(
            CopyJob(request.request_id, params["copy_of"], sources, targets, params.get("how", ""))
        )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        jobs, self._jobs = self._jobs, []
        return CopyMetadata(jobs)

    def request_finished_all_groups(
        self, request: Request, block_ids: Tables
    ) -> tuple[bool, dict[str, Any] | None]:
        if not (request.kv_transfer_params or {}).get("keep"):
            return False, None
        self._kept[request.request_id] = block_ids
        return True, {"blocks": sum(block != NO_BLOCK for table in block_ids for block in table)}

    # -- worker --

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

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
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
                for group, sources, targets in zip(
                    self._kv_cache_config.groups, job.sources, job.targets, strict=True
                ):
                    self._copy(group.layer_names, sources, targets, job.how)
            self._done.put(job)
            self._wake()

    def _copy(
        self, layer_names: tuple[str, ...], sources: list[int], targets: list[int], how: str
    ) -> None:
        for cache in (self._caches[name] for name in layer_names):
            cache[targets] = cache[sources]
            if how == "corrupt":
                cache[targets[0]] += 1.0
