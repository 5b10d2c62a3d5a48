"""The pull connector in a worker: builds the rank's ferry, hands it each step's commands and collects its events.

Runs on the worker's main thread and does nothing else there.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvferry.config import BufferDevice, NixlExtraConfig
from kvferry.connectors.carried import Carried
from kvferry.connectors.contract import ConnectorConfig, KVCacheConfig, KVConnectorTransferResults, KVTensor
from kvferry.connectors.geometry import compatibility_factors, geometry_of
from kvferry.connectors.host_buffer import mirror_bytes, mirrored
from kvferry.connectors.pull_metadata import PullHandshakeMetadata, PullMetadata, PullNews
from kvferry.connectors.stats import TransferStats
from kvferry.errors import ConfigError
from kvferry.events import (
    BytesMoved,
    Event,
    HandshakeFailed,
    KeptBlocksFetched,
    LeaseEnded,
    LeaseLingers,
    MessageDropped,
    PeerConnected,
    PrefillCompleted,
    PullFailed,
    PullFinished,
    PullGivenUp,
    PullPromised,
    PullRefused,
)
from kvferry.ferry.ferry import Ferry, FerrySettings, FerrySnapshot
from kvferry.ferry.thread import FerryThread
from kvferry.ports.block_store import BlockStore
from kvferry.ports.control import ControlPlane
from kvferry.ports.data import DataPlane
from kvferry.ports.memory import CacheMemory
from kvferry.ports.order import EngineOrder, HostOrder
from kvferry.protocol.codec import encode_layout
from kvferry.protocol.consumer_settings import ConsumerSettings
from kvferry.protocol.geometry import Geometry, region_info
from kvferry.protocol.messages import Factor, OfferInfo, RankLayout
from kvferry.protocol.peers import PeerSettings
from kvferry.protocol.producer import ProducerSettings
from kvferry.types import EngineId, Epoch, LeaseEnd, MemoryKind

__all__ = ["PullWorker", "ferry_settings"]

_log = logging.getLogger(__name__)


class PullWorker:
    def __init__(self, config: ConnectorConfig, cache: KVCacheConfig, extra: NixlExtraConfig) -> None:
        self._config = config
        self._cache = cache
        self._extra = extra
        self._thread: FerryThread | None = None
        self._handshake: PullHandshakeMetadata | None = None
        self._wake_engine: Callable[[], None] | None = None
        self._mirror: CacheMemory | None = None
        self._order: EngineOrder = HostOrder()
        self._stats = TransferStats()
        self._news = PullNews()
        self._reported = FerrySnapshot()
        self._carried = Carried()

    def register_kv_caches(self, kv_caches: Mapping[str, KVTensor]) -> None:
        """Register the cache, or its mirror, with every plane that can carry it, and start the ferry."""
        own = geometry_of(self._config, self._cache, kv_caches)
        self._order = self._config.kit.engine_order(own.regions)
        geometry = self._seen_by_planes(own)
        planes = self._registered_planes(geometry)
        control = self._config.kit.control_plane()
        offers = tuple(OfferInfo(o.plane, o.reach, o.blob, o.near) for o in (plane.offer() for plane in planes))
        factors = compatibility_factors(self._config, self._cache)
        is_staged = self._mirror is not None
        layout = encode_layout(_layout(geometry, control, offers, is_staged))
        self._handshake = PullHandshakeMetadata(geometry.tp_rank, layout, factors, self._config.epoch, is_staged)
        store = self._block_store(own, geometry)
        fenced = frozenset(plane.name for plane in planes if plane.fences_writes)
        settings = ferry_settings(self._config, self._extra, geometry, offers, factors, is_staged, fenced)
        ferry = Ferry(settings, planes, control, store, time.monotonic)
        self._thread = FerryThread(ferry, control.wake, f"kvferry-tp{geometry.tp_rank}")
        if self._wake_engine is not None:
            self._thread.set_wakeup(self._wake_engine)
        self._thread.start()

    def handshake_metadata(self) -> PullHandshakeMetadata | None:
        return self._handshake

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        self._wake_engine = wake
        if self._thread is not None:
            self._thread.set_wakeup(wake)

    def start_load_kv(self, metadata: PullMetadata) -> None:
        if metadata.commands:
            self._ferry_thread().submit(metadata.commands, self._order.mark())

    def get_transfer_results(self) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for event in self._ferry_thread().take_events():
            self._take(event, results)
        return results

    def take_news(self) -> PullNews | None:
        """What `get_transfer_results` has come across."""
        news, self._news = self._news, PullNews()
        return None if news.is_empty else news

    def take_stats(self) -> TransferStats | None:
        held = self.snapshot()
        if held != self._reported:
            reporter = f"tp{self._config.parallel.tp_rank}"
            self._stats.set_level("num_leases", reporter, held.leases)
            self._stats.set_level("num_pulls", reporter, held.pulls)
            self._stats.set_level("num_peers", reporter, held.peers)
            self._stats.set_level("num_registrations", reporter, held.registrations)
            self._reported = held
        stats, self._stats = self._stats, TransferStats()
        return None if stats.is_empty() else stats

    def snapshot(self) -> FerrySnapshot:
        return self._thread.snapshot() if self._thread is not None else FerrySnapshot()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
        if self._mirror is not None:
            self._mirror.close()

    def _ferry_thread(self) -> FerryThread:
        assert self._thread is not None, "register_kv_caches comes first"
        return self._thread

    def _seen_by_planes(self, own: Geometry) -> Geometry:
        """The engine's own cache, or a mirror of it in host memory, allocated now."""
        is_elsewhere = any(region.memory is not MemoryKind.DRAM for region in own.regions)
        is_staged = is_elsewhere and self._config.kv_transfer.kv_buffer_device is BufferDevice.CPU
        if not is_staged and not self._extra.force_host_buffer:
            return own
        self._mirror = self._config.kit.allocate_cache(mirror_bytes(own.regions))
        _log.info("host buffer allocated bytes=%d rank=%d", self._mirror.size_bytes, own.tp_rank)
        return replace(own, regions=mirrored(own.regions, self._mirror.address))

    def _block_store(self, own: Geometry, seen: Geometry) -> BlockStore:
        kit = self._config.kit
        return kit.block_store(own.regions) if self._mirror is None else kit.staged_block_store(own.regions, seen.regions, self._mirror)

    def _registered_planes(self, geometry: Geometry) -> list[DataPlane]:
        planes = []
        for plane in self._config.kit.data_planes(self._mirror or self._config.cache_memory):
            if plane.register(geometry.regions):
                planes.append(plane)
            else:
                plane.close()
        if not planes:
            raise ConfigError("no data plane can carry this cache; `kvferry doctor` says which planes work here")
        _log.info("data planes registered planes=%s rank=%d", ",".join(plane.name for plane in planes), geometry.tp_rank)
        return planes

    def _take(self, event: Event, results: KVConnectorTransferResults) -> None:
        match event:
            case PullFinished(request, times):
                self._carried.tell(request, times, results)
                results.finished_recving.add(request)
            case PullFailed(request, reason, times):
                self._carried.tell(request, times, results)
                _log.warning("pull failed request=%s reason=%s", request, reason)
                results.finished_recving.add(request)
                results.failed_recving.add(request)
                results.failure_reasons[request] = reason
            case PullGivenUp(request, reason):
                results.given_up_recving[request] = reason
            case LeaseEnded(request, end):
                # Of one request every rank has a lease.
                counter = {LeaseEnd.EXPIRED: "kv_expired_reqs", LeaseEnd.LAPSED: "kept_turns_lapsed"}.get(end)
                if counter is not None and self._config.parallel.tp_rank == 0:
                    self._stats.count(counter)
                results.finished_sending.add(request)
            case PullPromised(request):
                self._news.promised[request] += 1
            case PullRefused(request, reason):
                self._news.refused[request] = reason
            case LeaseLingers(request):
                self._news.lingering.add(request)
            case _:
                self._note(event)

    def _note(self, event: Event) -> None:
        """What is counted or logged, and no request waits for."""
        match event:
            case BytesMoved(plane, total_bytes, pieces, planned, post_s, transfer_s, is_ok):
                self._carried.note(event)
                if is_ok:
                    self._stats.record_transfer(plane, total_bytes, pieces, planned, post_s, transfer_s)
                else:
                    self._stats.count("failed_transfers")
            case HandshakeFailed(engine, reason):
                self._stats.count("failed_handshakes")
                _log.warning("peer lost peer=%s reason=%s", engine, reason)
            case PrefillCompleted(_, num_tokens, num_left, landed_bytes):
                self._stats.count("pushed_bytes_early", landed_bytes)
                if self._config.parallel.tp_rank == 0:
                    self._stats.count("pushed_tokens", num_tokens)
                    self._stats.count("pushed_tokens_left", num_left)
            case KeptBlocksFetched(_, num_tokens, num_bytes):
                self._stats.count("reuse_pulled_bytes", num_bytes)
                if self._config.parallel.tp_rank == 0:
                    self._stats.count("reuse_pulled_tokens", num_tokens)
            case PeerConnected(engine, plane, reason):
                _log.info("peer connected peer=%s plane=%s because=%s", engine, plane, reason)
            case MessageDropped(reason):
                self._stats.count("dropped_messages")
                _log.info("message dropped reason=%s", reason)


def ferry_settings(
    config: ConnectorConfig,
    extra: NixlExtraConfig,
    geometry: Geometry,
    offers: tuple[OfferInfo, ...],
    factors: Mapping[str, Factor],
    is_staged: bool = False,
    fenced: frozenset[str] = frozenset(),
) -> FerrySettings:
    engine, epoch = EngineId(config.kv_transfer.engine_id), Epoch(config.epoch)
    demanded = factors if extra.enforce_handshake_compat else None
    peers = PeerSettings(demanded, geometry, offers, tuple(extra.planes), extra.handshake_timeout, extra.engine_ttl)
    return FerrySettings(
        ProducerSettings(
            engine,
            epoch,
            extra.kv_lease_duration,
            extra.lease_extension_s,
            extra.grant_wait,
            is_staged,
            extra.peer_addresses,
        ),
        ConsumerSettings(
            engine,
            peers,
            extra.read_timeout,
            extra.confirm_timeout,
            extra.receive_timeout,
            is_staged,
            extra.push_registration_timeout_s,
            extra.kv_lease_duration,
            epoch,
            extra.lends_by((offer.plane for offer in offers), fenced),
            fenced,
        ),
        config.secret,
    )


def _layout(geometry: Geometry, control: ControlPlane, offers: tuple[OfferInfo, ...], is_staged: bool) -> RankLayout:
    return RankLayout(
        tp_rank=geometry.tp_rank,
        tp_size=geometry.tp_size,
        block_size=geometry.block_size,
        num_blocks=geometry.num_blocks,
        layout=str(geometry.layout),
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        control_address=control.address,
        regions=[region_info(region) for region in geometry.regions],
        offers=list(offers),
        total_kv_heads=geometry.total_kv_heads,
        is_staged=is_staged,
    )
