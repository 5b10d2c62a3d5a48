"""The worker side of the pull and push connectors: builds the rank's transfer worker, submits each
step's commands to the transfer worker and collects its events.

Runs on the worker process's main thread and never blocks there; all transfers happen on the thread
of the transfer worker (docs/decisions/005-worker-thread.md).
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kvferry.config import BufferDevice, NixlExtraConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVTensor,
    WorkerSide,
)
from kvferry.connectors.geometry import (
    compatibility_factors,
    geometry_of,
    host_buffer_bytes,
    host_buffer_regions,
)
from kvferry.connectors.nixl.metadata import (
    NixlConnectorMetadata,
    NixlHandshakeMetadata,
    NixlWorkerMetadata,
    registered_epoch,
)
from kvferry.connectors.stats import TransferStats
from kvferry.errors import ConfigError, KVFerryError
from kvferry.events import (
    BytesMoved,
    Event,
    EvictionDeferred,
    HandshakeFailed,
    LeaseEnded,
    MessageDropped,
    PeerConnected,
    PrefillCompleted,
    ReservationGranted,
    ReservationRefused,
    RetainedBlocksFetched,
    TransferAbandoned,
    TransferFailed,
    TransferFinished,
    TransferTimes,
)
from kvferry.logs import repeats_of
from kvferry.protocol.consumer.context import ConsumerSettings
from kvferry.protocol.messages import Factor, RankLayout, TransportOffer, encode_layout
from kvferry.protocol.peers import PeerSettings
from kvferry.protocol.planning.geometry import Geometry
from kvferry.protocol.producer.push_writer import ProducerSettings
from kvferry.transports.base import (
    BlockStore,
    CacheMemory,
    ControlTransport,
    DataTransport,
    EngineStream,
    HostStream,
)
from kvferry.types import EngineId, Epoch, LeaseEnd, MemoryKind, RequestId
from kvferry.worker.commands import GrantLease, OpenStream, StartLoad, WorkerCommand
from kvferry.worker.worker import (
    TransferWorker,
    TransferWorkerSettings,
    TransferWorkerSnapshot,
    TransferWorkerThread,
)

NEEDS_CACHE = (StartLoad, GrantLease, OpenStream)

_log = logging.getLogger(__name__)


class NixlConnectorWorker(WorkerSide):
    """The connector of one tensor-parallel rank."""

    def __init__(
        self, config: ConnectorConfig, cache: KVCacheConfig, extra: NixlExtraConfig
    ) -> None:
        self._config = config
        self._cache = cache
        self._extra = extra
        self._kv_caches: Mapping[str, KVTensor] = {}
        self._registration = 0
        self._thread: TransferWorkerThread | None = None
        """None until the cache is registered, and while the engine sleeps."""
        self._optional_loads: set[str] = set()
        self._postponed: list[WorkerCommand] = []
        """Commands that arrived while the engine sleeps, for example of new requests."""
        self._handshake: NixlHandshakeMetadata | None = None
        self._wake_engine: Callable[[], None] | None = None
        self._host_buffer: CacheMemory | None = None
        self._order: EngineStream = HostStream()
        self._stats = TransferStats()
        self._worker_metadata = NixlWorkerMetadata()
        self._reported = TransferWorkerSnapshot()
        self._receive_totals = ReceiveTotals()

    def register_kv_caches(self, kv_caches: Mapping[str, KVTensor]) -> None:
        """Register the cache, or its host buffer, with every transport that supports the memory,
        and start the transfer worker.
        """
        self._kv_caches = kv_caches
        own = geometry_of(self._config, self._cache, kv_caches)
        self._order = self._config.kit.engine_stream(own.regions)
        geometry = self._transport_geometry(own)
        transports = self._registered_transports(geometry)
        control = self._config.kit.control_transport()
        # Each peer chooses one of these offers in the handshake.
        offers = tuple(transport.offer() for transport in transports)
        factors = compatibility_factors(self._config, self._cache)
        uses_host_buffer = self._host_buffer is not None
        layout = encode_layout(_layout(geometry, control, offers, uses_host_buffer))
        self._handshake = NixlHandshakeMetadata(
            geometry.tp_rank,
            layout,
            factors,
            self._config.epoch,
            self._registration,
            uses_host_buffer,
        )
        store = self._block_store(own, geometry)
        fenced = frozenset(
            transport.name for transport in transports if transport.supports_write_grants
        )
        settings = transfer_worker_settings(
            replace(self._config, epoch=registered_epoch(self._config.epoch, self._registration)),
            self._extra,
            geometry,
            offers,
            factors,
            uses_host_buffer,
            fenced,
        )
        transfer_worker = TransferWorker(settings, transports, control, store, time.monotonic)
        self._thread = TransferWorkerThread(transfer_worker, f"kvferry-tp{geometry.tp_rank}")
        if self._wake_engine is not None:
            self._thread.set_wakeup(self._wake_engine)
        self._thread.start()

    def unregister_kv_caches(self) -> None:
        """Close the transfer worker with its transports: then nothing of this process touches the
        cache, and no peer can reach it.
        """
        if self._thread is None:
            return
        self._stop()
        self._thread = self._host_buffer = None
        _log.info("cache unregistered rank=%d", self._config.parallel.tp_rank)

    def restore_kv_caches(self) -> None:
        if self._thread is not None or not self._kv_caches:
            return
        self._registration += 1
        self.register_kv_caches(self._kv_caches)
        postponed, self._postponed = self._postponed, []
        self._worker_thread().submit(postponed)

    def get_handshake_metadata(self) -> NixlHandshakeMetadata | None:
        return self._handshake

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        self._wake_engine = wake
        if self._thread is not None:
            self._thread.set_wakeup(wake)

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, NixlConnectorMetadata)
        self._optional_loads |= metadata.optional_loads
        if self._thread is None:
            # vLLM does not wake up an engine whose sleep has failed on the way, but goes on.
            if any(isinstance(each, NEEDS_CACHE) for each in metadata.commands):
                raise KVFerryError(
                    "the engine schedules requests while its cache is unregistered for a sleep, "
                    "which must have failed; restart the engine"
                )
            self._postponed += metadata.commands
        elif metadata.commands:
            self._thread.submit(metadata.commands, self._order.mark())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for event in () if self._thread is None else self._thread.take_events():
            self._take(event, results)
        results.optional_failures |= self._optional_loads & results.failed_recving
        self._optional_loads -= results.finished_recving
        return results

    def build_connector_worker_meta(self) -> NixlWorkerMetadata | None:
        """The reports for the scheduler that `get_transfer_results` has collected."""
        worker_metadata, self._worker_metadata = self._worker_metadata, NixlWorkerMetadata()
        return None if worker_metadata == NixlWorkerMetadata() else worker_metadata

    def get_kv_connector_stats(self) -> TransferStats | None:
        # Levels are reported only when they change, so that a step without transfers reports no
        # stats.
        held = self.snapshot()
        if held != self._reported:
            reporter = f"tp{self._config.parallel.tp_rank}"
            self._stats.set_level("num_leases", reporter, held.leases)
            self._stats.set_level("num_transfers", reporter, held.transfers)
            self._stats.set_level("num_peers", reporter, held.peers)
            self._stats.set_level("num_registrations", reporter, held.registrations)
            self._reported = held
        return self._stats.drain()

    def snapshot(self) -> TransferWorkerSnapshot:
        return self._thread.snapshot() if self._thread is not None else TransferWorkerSnapshot()

    def shutdown(self) -> None:
        self._stop()
        self._kv_caches = {}

    def _stop(self) -> None:
        if self._thread is not None:
            self._thread.close()
        if self._host_buffer is not None:
            self._host_buffer.close()

    def _worker_thread(self) -> TransferWorkerThread:
        assert self._thread is not None, "the engine has not called register_kv_caches"
        return self._thread

    def _transport_geometry(self, own: Geometry) -> Geometry:
        """The geometry that transports see: the engine's own cache, or a host buffer that is
        allocated here.
        """
        is_elsewhere = any(region.memory is not MemoryKind.DRAM for region in own.regions)
        uses_host_buffer = (
            is_elsewhere and self._config.kv_transfer.kv_buffer_device is BufferDevice.CPU
        ) or (
            # vLLM allocates its cache itself.
            self._extra.needs_shared_cache and (is_elsewhere or self._config.cache_memory is None)
        )
        if not uses_host_buffer and not self._extra.force_host_buffer:
            return own
        self._host_buffer = self._config.kit.allocate_cache(host_buffer_bytes(own.regions))
        _log.info(
            "host buffer allocated bytes=%d rank=%d", self._host_buffer.size_bytes, own.tp_rank
        )
        return replace(own, regions=host_buffer_regions(own.regions, self._host_buffer.address))

    def _block_store(self, own: Geometry, seen: Geometry) -> BlockStore:
        kit = self._config.kit
        return (
            kit.block_store(own.regions)
            if self._host_buffer is None
            else kit.host_buffer_store(own.regions, seen.regions, self._host_buffer)
        )

    def _registered_transports(self, geometry: Geometry) -> list[DataTransport]:
        transports = []
        for transport in self._config.kit.data_transports(
            self._host_buffer or self._config.cache_memory
        ):
            if transport.register(geometry.regions):
                transports.append(transport)
            # This transport cannot carry this kind of memory.
            else:
                transport.close()
        if not transports:
            raise ConfigError(
                "no data transport supports the memory of this KV cache; run `kvferry doctor` to "
                "see which transports work on this machine"
            )
        _log.info(
            "data transports registered transports=%s rank=%d",
            ",".join(transport.name for transport in transports),
            geometry.tp_rank,
        )
        return transports

    def _take(self, event: Event, results: KVConnectorTransferResults) -> None:
        match event:
            case TransferFinished(request, times):
                self._receive_totals.report(request, times, results)
                results.finished_recving.add(request)
            case TransferFailed(request, reason, times):
                self._receive_totals.report(request, times, results)
                _log.warning("transfer failed request=%s reason=%s", request, reason)
                results.finished_recving.add(request)
                results.failed_recving.add(request)
                results.failure_reasons[request] = reason
                self._worker_metadata.failed[request] = reason
            # The request will fail, but its blocks may still be written; `TransferFailed` follows.
            case TransferAbandoned(request, reason):
                if request not in self._optional_loads:
                    results.given_up_recving[request] = reason
            case LeaseEnded(request, end):
                # Every rank has a lease of the same request; rank 0 alone counts it.
                counter = {
                    LeaseEnd.EXPIRED: "kv_expired_reqs",
                    LeaseEnd.LAPSED: "retained_turns_expired",
                }.get(end)
                if counter is not None and self._config.parallel.tp_rank == 0:
                    self._stats.count(counter)
                results.finished_sending.add(request)
            case ReservationGranted(request):
                self._worker_metadata.reserved[request] += 1
            case ReservationRefused(request, reason):
                self._worker_metadata.refused[request] = reason
            case EvictionDeferred(request):
                self._worker_metadata.being_read.add(request)
            case _:
                self._note(event)

    def _note(self, event: Event) -> None:
        """Count or log an event that no request waits for."""
        match event:
            case BytesMoved(transport, total_bytes, segments, planned, post_s, transfer_s, is_ok):
                self._receive_totals.note(event)
                if is_ok:
                    self._stats.record_transfer(
                        transport, total_bytes, segments, planned, post_s, transfer_s
                    )
                else:
                    self._stats.count("failed_transfers")
            case HandshakeFailed(engine, reason, is_incompatible):
                self._stats.count("failed_handshakes")
                if is_incompatible:
                    self._stats.count("incompatible_peers")
                _log.warning(
                    "peer lost peer=%s reason=%s", engine, reason, extra=repeats_of(engine)
                )
            # Every rank moves its own bytes, but all ranks move the same tokens; rank 0 alone
            # counts tokens.
            case PrefillCompleted(_, num_tokens, num_left, landed_bytes):
                self._stats.count("pushed_bytes_early", landed_bytes)
                if self._config.parallel.tp_rank == 0:
                    self._stats.count("pushed_tokens", num_tokens)
                    self._stats.count("pushed_tokens_left", num_left)
            case RetainedBlocksFetched(_, num_tokens, num_bytes):
                self._stats.count("reuse_loaded_bytes", num_bytes)
                if self._config.parallel.tp_rank == 0:
                    self._stats.count("reuse_loaded_tokens", num_tokens)
            case PeerConnected(engine, transport, reason):
                _log.info(
                    "peer connected peer=%s transport=%s because=%s", engine, transport, reason
                )
            case MessageDropped(reason):
                self._stats.count("dropped_messages")
                _log.info("message from a peer dropped reason=%s", reason, extra=repeats_of())


def transfer_worker_settings(
    config: ConnectorConfig,
    extra: NixlExtraConfig,
    geometry: Geometry,
    offers: tuple[TransportOffer, ...],
    factors: Mapping[str, Factor],
    uses_host_buffer: bool = False,
    fenced: frozenset[str] = frozenset(),
) -> TransferWorkerSettings:
    """Translate the connector's configuration into the plain values of the transfer worker's
    settings.
    """
    engine, epoch = EngineId(config.kv_transfer.engine_id), Epoch(config.epoch)
    peers = PeerSettings(
        factors=factors if extra.enforce_handshake_compat else None,
        geometry=geometry,
        offers=offers,
        pinned_transports=tuple(extra.transports),
        handshake_timeout_s=extra.handshake_timeout,
        engine_ttl_s=extra.engine_ttl,
    )
    producer = ProducerSettings(
        engine=engine,
        epoch=epoch,
        lease_ttl_s=extra.kv_lease_duration,
        lease_extension_s=extra.lease_extension_s,
        grant_wait_s=extra.grant_wait,
        write_timeout_s=extra.read_timeout,
        leg_wait_s=extra.leg_wait,
        uses_host_buffer=uses_host_buffer,
        peer_addresses=extra.peer_addresses,
    )
    consumer = ConsumerSettings(
        engine=engine,
        epoch=epoch,
        peers=peers,
        queue_timeout_s=extra.queue_timeout,
        step_timeout_s=extra.step_timeout,
        read_timeout_s=extra.read_timeout,
        confirm_timeout_s=extra.confirm_timeout,
        receive_timeout_s=extra.receive_timeout,
        push_registration_timeout_s=extra.push_registration_timeout_s,
        lease_ttl_s=extra.kv_lease_duration,
        uses_host_buffer=uses_host_buffer,
        writable_transports=extra.writable_transports(
            (offer.transport for offer in offers), fenced
        ),
        fenced=fenced,
    )
    return TransferWorkerSettings(producer=producer, consumer=consumer, secret=config.secret)


def _layout(
    geometry: Geometry,
    control: ControlTransport,
    offers: tuple[TransportOffer, ...],
    uses_host_buffer: bool,
) -> RankLayout:
    return RankLayout(
        tp_rank=geometry.tp_rank,
        tp_size=geometry.tp_size,
        block_size=geometry.block_size,
        num_blocks=geometry.num_blocks,
        layout=geometry.layout,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        control_address=control.address,
        regions=list(geometry.regions),
        offers=list(offers),
        total_kv_heads=geometry.total_kv_heads,
        uses_host_buffer=uses_host_buffer,
    )


# -- receive totals --
# How each receive went: the timings of the transfer worker together with the bytes its transports
# moved. Runs on the worker process's main thread.


@dataclass(slots=True)
class ReceiveTotals:
    """Bytes, segments and transport of each receive in progress; entries are dropped when the
    receive ends.
    """

    _moved: dict[RequestId, tuple[int, int, str]] = field(default_factory=dict, init=False)

    def note(self, event: BytesMoved) -> None:
        if event.request is not None and event.is_ok:
            total_bytes, segments, _ = self._moved.get(event.request, (0, 0, ""))
            self._moved[event.request] = (
                total_bytes + event.total_bytes,
                segments + event.segments,
                event.transport,
            )

    def report(
        self, request: RequestId, times: TransferTimes | None, results: KVConnectorTransferResults
    ) -> None:
        """Report the totals of an ended receive, if the transfer worker timed the receive."""
        total_bytes, segments, transport = self._moved.pop(request, (0, 0, ""))
        if times is not None:
            times = replace(times, total_bytes=total_bytes, segments=segments, transport=transport)
            results.recving_times[request] = [times]
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("load ended request=%s %s", request, _describe_stages(times))


def _describe_stages(times: TransferTimes) -> str:
    """The stages that a load has reached, in milliseconds since the request arrived."""
    stages = {
        "attached": times.attached_at,
        "allocated": times.allocated_at,
        "began": times.began_at,
        "moved": times.moved_at,
        "confirmed": times.confirmed_at,
    }
    reached = [
        f"{name}_ms={1e3 * (at - times.tracked_at):.1f}"
        for name, at in stages.items()
        if at is not None
    ]
    return " ".join([*reached, f"bytes={times.total_bytes}", f"transport={times.transport}"])
