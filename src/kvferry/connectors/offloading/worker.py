"""The worker side of `OffloadingConnector`: builds the rank's offload worker, submits each step's
commands and collects its events.

Runs on the worker process's main thread and never blocks there.
"""

import logging
from collections.abc import Callable, Mapping

from kvferry.config import OffloadingExtraConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVTensor,
    WorkerSide,
)
from kvferry.connectors.geometry import geometry_of
from kvferry.connectors.offloading.metadata import (
    FailedLoad,
    LoadTime,
    OffloadingHandshakeMetadata,
    OffloadingMetadata,
    OffloadingWorkerMetadata,
    OffloadStats,
)
from kvferry.connectors.offloading.settings import chunk_namespace, open_pool, open_tiers
from kvferry.tiers.base import TierUsage
from kvferry.tiers.commands import POOL, ContentsChanged, LoadEnded, StoresCopied, StoresEnded
from kvferry.tiers.contents import TierContents
from kvferry.tiers.jobs.jobs import OffloadJobs
from kvferry.tiers.worker import OffloadWorker
from kvferry.transports.base import EngineStream, HostStream

_log = logging.getLogger(__name__)


class OffloadingWorker(WorkerSide):
    """The connector of one tensor-parallel rank."""

    def __init__(
        self, config: ConnectorConfig, cache: KVCacheConfig, extra: OffloadingExtraConfig
    ) -> None:
        self._config = config
        self._cache = cache
        self._extra = extra
        self._worker: OffloadWorker | None = None
        self._handshake: OffloadingHandshakeMetadata | None = None
        self._wake_engine: Callable[[], None] | None = None
        self._order: EngineStream = HostStream()
        self._worker_metadata = OffloadingWorkerMetadata()
        self._reported: dict[str, TierUsage] = {}
        self._was_busy = False

    def register_kv_caches(self, kv_caches: Mapping[str, KVTensor]) -> None:
        """Open the host pool and the tiers, and start the offload worker."""
        geometry = geometry_of(self._config, self._cache, kv_caches)
        rank, tp_size = geometry.tp_rank, geometry.tp_size
        self._order = self._config.kit.engine_stream(geometry.regions)
        copier = self._config.kit.row_copier(geometry.regions)
        blocks = self._extra.blocks_of_chunk(self._cache.block_size)
        groups = range(len(self._cache.groups))
        row_bytes = tuple(copier.row_bytes(group, blocks) for group in groups)
        namespace = chunk_namespace(self._config, self._cache, geometry, blocks)
        block_bytes = sum(copier.row_bytes(group, 1) for group in groups)
        pool = open_pool(self._extra, namespace, max(row_bytes), block_bytes, tp_size)
        copier.pin(pool.address, pool.size_bytes)
        tiers = open_tiers(self._extra, namespace, self._config.secret, tp_size)
        jobs = OffloadJobs(
            pool,
            row_bytes,
            tuple(tiers),
            self._extra.load_timeout,
            keeps_rows=self._extra.cpu_bytes(block_bytes * tp_size) > 0,
            contents=TierContents() if self._config.publishes_kv_events else None,
        )
        name = f"kvferry-offload{rank}"
        self._worker = OffloadWorker(jobs, pool, tiers, copier, self._extra.io_threads, name)
        if self._wake_engine is not None:
            self._worker.set_wakeup(self._wake_engine)
        self._worker.start()
        self._handshake = OffloadingHandshakeMetadata(rank, namespace.factors, row_bytes)
        _log.info(
            "tiers open tiers=%s rows=%d row_bytes=%d namespace=%s rank=%d",
            ",".join(self._extra.store_after()),
            pool.num_rows,
            max(row_bytes),
            namespace.hex,
            rank,
        )

    def unregister_kv_caches(self) -> None:
        # The copier only knows addresses, which stay the same.
        self._running_worker().wait_idle()

    def get_handshake_metadata(self) -> OffloadingHandshakeMetadata | None:
        return self._handshake

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        self._wake_engine = wake
        if self._worker is not None:
            self._worker.set_wakeup(wake)

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, OffloadingMetadata)
        self._worker_metadata.timed_step = metadata.timed_step
        if metadata.commands:
            self._running_worker().submit(metadata.commands, self._order.mark())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for event in self._running_worker().take_events():
            match event:
                case StoresEnded(request):
                    results.finished_sending.add(request)
                case StoresCopied(number):
                    self._worker_metadata.copied[self._config.parallel.tp_rank] = number
                case ContentsChanged():
                    report = (self._config.parallel.tp_rank, event)
                    self._worker_metadata.contents.append(report)
                case LoadEnded(request, reason, missing, seconds, bytes_by_tier):
                    results.finished_recving.add(request)
                    if reason:
                        results.failed_recving.add(request)
                        results.optional_failures.add(request)
                        results.failure_reasons[request] = reason
                        self._worker_metadata.failed[request] = FailedLoad(reason, missing)
                        _log.info("load from tiers failed request=%s reason=%s", request, reason)
                    if seconds:
                        self._worker_metadata.times.append(LoadTime(seconds, bytes_by_tier))
        return results

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """The reports for the scheduler that `get_transfer_results` has collected."""
        metadata = self._worker_metadata
        is_busy = self._running_worker().is_busy
        if is_busy != self._was_busy:
            metadata.busy[self._config.parallel.tp_rank] = self._was_busy = is_busy
        if metadata.is_empty:
            return None
        self._worker_metadata = OffloadingWorkerMetadata()
        return metadata

    def get_kv_connector_stats(self) -> OffloadStats | None:
        if self._worker is None:
            return None
        stats = OffloadStats()
        stats.add_tiers(self._worker.take_counts())
        reporter = f"tp{self._config.parallel.tp_rank}"
        is_first_rank = self._config.parallel.tp_rank == 0
        for tier, usage in self._worker.usage().items():
            known = self._reported.get(tier)
            # Every rank has a part of the pool of its own, but all ranks share the other tiers.
            if usage != known and (tier == POOL or is_first_rank):
                stats.set_usage(reporter, tier, usage)
                evicted = usage.num_evicted - (known.num_evicted if known is not None else 0)
                if evicted:
                    stats.add_tiers({tier: {"evictions": evicted}})
                self._reported[tier] = usage
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _running_worker(self) -> OffloadWorker:
        assert self._worker is not None, "the engine has not called register_kv_caches"
        return self._worker
