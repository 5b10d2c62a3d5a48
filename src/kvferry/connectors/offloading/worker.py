"""The worker side of `OffloadingConnector`: builds the rank's offload worker, submits each step's
commands and collects its events.

Runs on the worker process's main thread and never blocks there.
"""

import logging
import threading
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
    EndStores,
    OffloadingHandshakeMetadata,
    OffloadingMetadata,
    OffloadingWorkerMetadata,
    OffloadStats,
)
from kvferry.connectors.offloading.settings import chunk_namespace, open_pool, open_tiers
from kvferry.errors import KVFerryError
from kvferry.tiers.base import TierUsage
from kvferry.tiers.commands import (
    POOL,
    ContentsChanged,
    LoadEnded,
    OffloadEvent,
    StoresCopied,
    TiersCounted,
)
from kvferry.tiers.jobs.contents import TierContents
from kvferry.tiers.jobs.jobs import OffloadJobs
from kvferry.tiers.worker import STOP_TIMEOUT_S, OffloadSnapshot, OffloadWorker, WorkerCommand
from kvferry.transports.base import EngineStream, HostStream
from kvferry.worker.thread import WorkerThread

OffloadThread = WorkerThread[WorkerCommand, OffloadEvent, OffloadSnapshot]

_log = logging.getLogger(__name__)


class OffloadingWorker(WorkerSide):
    """The connector of one tensor-parallel rank."""

    def __init__(
        self, config: ConnectorConfig, cache: KVCacheConfig, extra: OffloadingExtraConfig
    ) -> None:
        self._config = config
        self._cache = cache
        self._extra = extra
        self._thread: OffloadThread | None = None
        self._handshake: OffloadingHandshakeMetadata | None = None
        self._wake_engine: Callable[[], None] | None = None
        self._order: EngineStream = HostStream()
        self._worker_metadata = OffloadingWorkerMetadata()
        self._stats = OffloadStats()
        self._reported: dict[str, TierUsage] = {}
        self._was_busy = False
        self._ending: list[EndStores] = []
        """Finished requests whose blocks are still being copied."""
        self._num_copied = 0
        """No copy reads the blocks of any store up to this number."""

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
        worker = OffloadWorker(jobs, pool, tiers, copier, self._extra.io_threads, name)
        self._thread = OffloadThread(worker, name)
        if self._wake_engine is not None:
            self._thread.set_wakeup(self._wake_engine)
        self._thread.start()
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
        is_idle = threading.Event()
        self._running().submit([is_idle])
        if not is_idle.wait(STOP_TIMEOUT_S):
            raise KVFerryError(f"the offload worker was not idle within {STOP_TIMEOUT_S:g} s")

    def get_handshake_metadata(self) -> OffloadingHandshakeMetadata | None:
        return self._handshake

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        self._wake_engine = wake
        if self._thread is not None:
            self._thread.set_wakeup(wake)

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, OffloadingMetadata)
        self._worker_metadata.timed_step = metadata.timed_step
        self._ending += [each for each in metadata.commands if isinstance(each, EndStores)]
        commands = [each for each in metadata.commands if not isinstance(each, EndStores)]
        if commands:
            self._running().submit(commands, self._order.mark())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for event in self._running().take_events():
            match event:
                case StoresCopied(number):
                    self._num_copied = number
                    self._worker_metadata.copied[self._config.parallel.tp_rank] = number
                case TiersCounted(counts):
                    self._stats.add_tiers(counts)
                case ContentsChanged():
                    report = (self._config.parallel.tp_rank, event)
                    self._worker_metadata.contents.append(report)
                case LoadEnded(request, reason):
                    self._worker_metadata.loads.append(event)
                    results.finished_recving.add(request)
                    if reason:
                        results.failed_recving.add(request)
                        results.optional_failures.add(request)
                        results.failure_reasons[request] = reason
                        _log.info("load from tiers failed request=%s reason=%s", request, reason)
        for ended in [each for each in self._ending if each.number <= self._num_copied]:
            self._ending.remove(ended)
            results.finished_sending.add(ended.request)
        return results

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """The reports for the scheduler that `get_transfer_results` has collected."""
        metadata = self._worker_metadata
        thread = self._running()
        # Counters that wait for `take_stats` need a step too.
        is_busy = thread.snapshot().has_work or thread.has_events or not self._stats.is_empty()
        if is_busy != self._was_busy:
            metadata.busy[self._config.parallel.tp_rank] = self._was_busy = is_busy
        if metadata.is_empty:
            return None
        self._worker_metadata = OffloadingWorkerMetadata()
        return metadata

    def get_kv_connector_stats(self) -> OffloadStats | None:
        if self._thread is None:
            return None
        stats, self._stats = self._stats, OffloadStats()
        reporter = f"tp{self._config.parallel.tp_rank}"
        is_first_rank = self._config.parallel.tp_rank == 0
        for tier, usage in self._thread.snapshot().usage.items():
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
        if self._thread is not None:
            self._thread.close(STOP_TIMEOUT_S)

    def _running(self) -> OffloadThread:
        assert self._thread is not None, "the engine has not called register_kv_caches"
        return self._thread
