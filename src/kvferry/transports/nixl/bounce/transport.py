"""The `nixl` data transport with bounce buffers, for transfers of many small segments.

NIXL takes about 9 µs for each descriptor of any size. So one side gathers the segments into a
bounce buffer, the gathered bytes move as one segment, and the receiving side scatters the bytes:
chunk by chunk, with all three steps running at once. Transfers of few or large segments, and
transfers with peers that have no bounce buffer, go directly through the plain NIXL transport. Owned
by one thread. The parts:

    initiator   our own transfers                owner      transfers that peers have started
    messages    messages of the two sides        slots      which bytes lie where
    settings    which transfers, how much memory

See docs/decisions/037-bounce-buffers.md for the reasons.
"""

import contextlib
import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from kvferry.errors import KVFerryError, RemoteProtocolError, TransportError
from kvferry.sleep import SHORT_SLEEP_S
from kvferry.transports.base import Completion, Handle, Segments, TransportOffer
from kvferry.transports.copy.gather import AddressCopier, HostAddressCopier
from kvferry.transports.copy.segments import check_segments
from kvferry.transports.nixl.bounce.initiator import (
    BounceTransfers,
    OutgoingMessages,
    RemoteBounceBuffer,
)
from kvferry.transports.nixl.bounce.messages import (
    BOUNCE_VERSION,
    BounceMessage,
    NotificationCodec,
    SlotRequest,
)
from kvferry.transports.nixl.bounce.owner import RECLAIM_S, SlotServer, ToOwner
from kvferry.transports.nixl.bounce.settings import (
    BounceSettings,
    ResolvedBounceSettings,
    is_fragmented,
)
from kvferry.transports.nixl.bounce.slots import BounceBuffer, CopyLimits, SlotTable
from kvferry.transports.nixl.transport import NixlTransport
from kvferry.types import EngineId, Epoch, MemoryKind, PeerId, Region

__all__ = ["BounceNixlTransport", "BounceSettings", "HostMemory", "ReplyRoutes"]


class HostMemory:
    """One range of host memory, whose pages are allocated on first use. The allocating code must
    call `close`.
    """

    def __init__(self, pages: mmap.mmap) -> None:
        self._pages: mmap.mmap | None = pages
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self._size_bytes = len(pages)

    @classmethod
    def allocate(cls, size_bytes: int) -> "HostMemory":
        return cls(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    @property
    def address(self) -> int:
        return self._address

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def close(self) -> None:
        if self._pages is not None:
            with contextlib.suppress(
                BufferError
            ):  # a view still exists: unmapping the memory would crash the process
                self._pages.close()
            self._pages = None


# -- reply routes --
# Connections to agents that have asked us for a slot, made from the metadata in the requests. Owned
# by the thread of the transport.


MAX_ROUTES = 256
"""Most agents that are remembered; requests of further agents cannot be answered."""
IDLE_S = 60.0
"""How long an unused route is kept."""
RETRY_S = 1.0
"""How long after a failure a route is not tried again."""


@dataclass(slots=True)
class _Route:
    peer: PeerId
    metadata: bytes
    used_at: float
    retry_at: float = 0.0


class ReplyRoutes:
    """Sends replies to the agents that have asked us for a slot."""

    def __init__(self, plain: NixlTransport, region: Region) -> None:
        self._plain = plain
        self._region = region
        """A valid region, which `connect_agent` requires; nothing is posted to the agents."""
        self._routes: dict[str, _Route] = {}

    def learn(self, agent: str, metadata: bytes, now: float) -> None:
        """Store the metadata of an agent, or mark the route as used if `metadata` is empty."""
        route = self._routes.get(agent)
        if route is None and metadata and len(self._routes) < MAX_ROUTES:
            self._routes[agent] = _Route(
                PeerId(EngineId(f"the asking agent {agent}"), Epoch(agent), 0), metadata, now
            )
        elif route is not None:
            route.metadata, route.used_at = metadata or route.metadata, now

    def send(self, agent: str, note: bytes, now: float) -> None:
        """Send a notification to an agent. TransportError if the agent cannot be reached."""
        route = self._routes.get(agent)
        if route is None or now < route.retry_at:
            raise TransportError(f"there is no way to answer {agent}")
        route.used_at = now
        try:
            if not self._plain.is_connected(route.peer):
                self._plain.connect_agent(route.peer, agent, route.metadata, [self._region])
            self._plain.notify(route.peer, note)
        except TransportError:
            route.retry_at = now + RETRY_S
            raise

    def forget_idle(self, now: float, busy: Collection[str]) -> None:
        for agent, route in list(self._routes.items()):
            if agent not in busy and now > route.used_at + IDLE_S:
                self._plain.disconnect(route.peer)
                del self._routes[agent]


# -- transport --


BUSY_S = 0.002
"""How long after the last activity `poll` keeps polling without sleep.

A chunk takes less time than a sleep.
"""
WAITING_INTERVAL_S = 0.001
DRAIN_TIMEOUT_S = 2.0
CLEANUP_INTERVAL_S = 1.0
DEVICE_TICK_BYTES = 1 << 40
"""Practically no limit: the device copies asynchronously, after the tick."""

_log = logging.getLogger(__name__)


class _BounceOffer(msgspec.Struct, frozen=True, array_like=True):
    """The plain transport's offer with more fields; the plain transport reads the first two."""

    agent: str
    metadata: bytes
    buffer_address: int = 0
    buffer_bytes: int = 0
    version: int = 0
    """Version of the bounce-buffer messages; both sides must have the same version."""


class _BufferMemory(Protocol):
    """Memory of a bounce buffer, on the host or on a device."""

    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Peer:
    """A connected peer; `bounce_buffer` is None if transfers with the peer always go directly."""

    regions: tuple[Region, ...]
    bounce_buffer: RemoteBounceBuffer | None


@dataclass(slots=True)
class _ActiveBounce:
    """The objects that exist once a bounce buffer is registered."""

    memory: _BufferMemory
    region: Region
    copier: AddressCopier
    transfers: BounceTransfers
    slot_server: SlotServer
    routes: ReplyRoutes
    codec: NotificationCodec
    active_at: float = 0.0
    """When a message last arrived or a posted chunk last completed."""
    cleaned_at: float = 0.0
    num_dropped: int = 0
    """Number of notifications that could not be verified or decoded."""


class BounceNixlTransport:
    """Implements `base.DataTransport` by wrapping the plain NIXL transport."""

    def __init__(
        self,
        plain: NixlTransport,
        settings: BounceSettings,
        key: bytes,
        reclaim_s: float = RECLAIM_S,
    ) -> None:
        self._plain = plain
        self._wanted = settings
        self._key = key
        self._reclaim_s = reclaim_s
        self._regions: tuple[Region, ...] = ()
        self._settings: ResolvedBounceSettings | None = None
        self._bounce: _ActiveBounce | None = None
        self._peers: dict[PeerId, _Peer] = {}
        self._last_handle = 0
        self._ours: dict[Handle, Handle] = {}
        """Our handles of direct transfers, by the plain transport's handle."""
        self._entered_by: int | None = None

    @property
    def name(self) -> str:
        return self._plain.name

    @property
    def num_dropped_notifications(self) -> int:
        return 0 if self._bounce is None else self._bounce.num_dropped

    def register(self, regions: Sequence[Region]) -> bool:
        is_one = len({(each.memory, each.device) for each in regions}) == 1
        settings = (
            self._wanted.resolved(regions[0].memory, _device_bytes(regions[0])) if is_one else None
        )
        memory = (
            _allocate(settings, regions[0]) if settings is not None and settings.is_on else None
        )
        if memory is None or settings is None:
            is_carried = self._plain.register(regions)
        else:
            bounce_buffer = Region(
                "staging",
                memory.address,
                memory.size_bytes,
                memory.size_bytes,
                1,
                regions[0].memory,
                regions[0].device,
            )
            is_carried = self._plain.register([*regions, bounce_buffer])
            if is_carried:
                self._bounce = self._enable_bounce(settings, memory, bounce_buffer, regions)
            else:
                memory.close()
        self._regions, self._settings = (tuple(regions), settings) if is_carried else ((), None)
        return is_carried

    def offer(self) -> TransportOffer:
        offer = self._plain.offer()
        if self._bounce is None:
            return offer
        name, metadata = self._plain.identity()
        bounce_buffer = self._bounce.region
        return replace(
            offer,
            blob=msgspec.msgpack.encode(
                _BounceOffer(
                    name, metadata, bounce_buffer.address, bounce_buffer.size_bytes, BOUNCE_VERSION
                )
            ),
        )

    def connect(self, peer: PeerId, offer: TransportOffer, regions: Sequence[Region]) -> None:
        try:
            decoded = msgspec.msgpack.decode(offer.blob, type=_BounceOffer)
        except msgspec.MsgspecError as error:
            raise TransportError(
                f"the nixl offer of {peer} cannot be understood ({error}); do both sides run the "
                "same kvferry?"
            ) from error
        self._forget(peer, f"peer {peer} was connected anew")
        theirs, bounce_buffer = list(regions), None
        if (
            self._bounce is not None
            and decoded.version == BOUNCE_VERSION
            and decoded.buffer_bytes > 0
            and regions
        ):
            size, like = decoded.buffer_bytes, regions[0]
            theirs.append(
                Region("staging", decoded.buffer_address, size, size, 1, like.memory, like.device)
            )
            bounce_buffer = RemoteBounceBuffer(decoded.agent, decoded.buffer_address, size)
        self._plain.connect(peer, offer, theirs)
        self._peers[peer] = _Peer(tuple(regions), bounce_buffer)

    def disconnect(self, peer: PeerId) -> None:
        self._forget(peer, f"peer {peer} was disconnected")
        self._plain.disconnect(peer)

    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle:
        bounce_buffer = self._buffer_for(peer, segments)
        if bounce_buffer is None:
            return self._named(self._plain.read(peer, segments))
        return self._start(peer, bounce_buffer, segments, is_read=True)

    def write(self, peer: PeerId, segments: Sequence[Segments], grant_id: int = 0) -> Handle:
        bounce_buffer = self._buffer_for(peer, segments)
        if bounce_buffer is None:
            return self._named(self._plain.write(peer, segments, grant_id))
        return self._start(peer, bounce_buffer, segments, is_read=False)

    @property
    def supports_write_grants(self) -> bool:
        return self._plain.supports_write_grants

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        self._plain.grant_writes(grant_id, blocks)

    def revoke_writes(self, grant_id: int) -> Handle:
        return self._plain.revoke_writes(grant_id)

    def poll(self) -> list[Completion]:
        bounce = self._bounce
        if bounce is None:
            return self._ours_of(self._plain.poll())
        self._enter_device(bounce.region)
        now, plain = time.monotonic(), list[Completion]()
        if len(bounce.transfers) or bounce.slot_server.is_serving:
            self._plain.expect_calls(now + BUSY_S)
        self._receive(bounce, now)
        self._tick(bounce, now)
        # A completed chunk may allow the next chunk, so a second tick follows at once.
        if completions := self._plain.poll_posted():
            now = time.monotonic()
            plain = [each for each in completions if not bounce.transfers.settle(each, now)]
            if len(plain) < len(completions):
                bounce.active_at = now
                self._tick(bounce, now)
        ended = self._ours_of(plain)
        if len(bounce.transfers):
            self._drop_lost(bounce, now)
            ended += [*self._start_fallbacks(bounce), *bounce.transfers.take_ended()]
        if not ended and not self._plain.can_post and self._is_expecting(bounce, now):
            bounce.copier.pause(SHORT_SLEEP_S)
        return ended

    def cancel(self, handle: Handle) -> None:
        for plain, ours in self._ours.items():
            if ours == handle:
                self._plain.cancel(plain)
        if self._bounce is not None:
            self._bounce.transfers.cancel(handle, time.monotonic())

    def poll_interval_s(self) -> float | None:
        bounce, interval = self._bounce, self._plain.poll_interval_s()
        if bounce is None or (not len(bounce.transfers) and not bounce.slot_server.is_serving):
            return interval
        own = self._waiting_interval_s(bounce)
        return own if interval is None else min(own, interval)

    def serving_interval_s(self) -> float | None:
        if self._bounce is not None and self._bounce.slot_server.is_serving:
            return self._waiting_interval_s(self._bounce)
        return self._plain.serving_interval_s()

    def close(self) -> None:
        bounce = self._bounce
        if bounce is not None:
            bounce.transfers.stop_all("the transport was closed", time.monotonic())
            deadline = time.monotonic() + DRAIN_TIMEOUT_S
            while len(bounce.transfers) and time.monotonic() < deadline:
                self.poll()
        self._plain.close()
        if bounce is not None:
            bounce.copier.close()
            bounce.memory.close()
        self._bounce = None
        self._peers.clear()
        self._ours.clear()

    # -- setting up --

    def _enable_bounce(
        self,
        settings: ResolvedBounceSettings,
        memory: _BufferMemory,
        region: Region,
        regions: Sequence[Region],
    ) -> _ActiveBounce:
        name, metadata = self._plain.identity()
        on_device = region.memory is MemoryKind.VRAM
        limits = CopyLimits(
            settings.chunk_bytes, DEVICE_TICK_BYTES if on_device else settings.chunk_bytes
        )
        bounce_buffer = BounceBuffer(region.address, region.size_bytes, _copier_for(region), limits)
        own, served_slots = SlotTable.shared_pair(region.size_bytes)
        return _ActiveBounce(
            memory,
            region,
            bounce_buffer.copier,
            BounceTransfers(bounce_buffer, own, self._plain, metadata, self._reclaim_s),
            SlotServer(bounce_buffer, served_slots, regions, self._reclaim_s),
            ReplyRoutes(self._plain, region),
            NotificationCodec(self._key, name),
        )

    def _enter_device(self, region: Region) -> None:
        """Make the device's context current in the polling thread.

        UCX and torch use the context of the calling thread, and the polling thread may not be the
        thread that registered the memory.
        """
        if region.memory is MemoryKind.VRAM and self._entered_by != threading.get_ident():
            from kvferry.transports.copy.cuda import enter_device
            from kvferry.transports.cuda_ipc import driver as cuda_driver

            enter_device(region.device)
            cuda_driver.ignore_captures()
            self._entered_by = threading.get_ident()

    # -- transfers --

    def _buffer_for(self, peer: PeerId, segments: Sequence[Segments]) -> RemoteBounceBuffer | None:
        """Return the peer's bounce buffer if the segments shall use bounce buffers, else None.

        The segments are checked here, because to the plain transport the bounce buffers are
        ordinary regions, which a wrong segment could reach.
        """
        if self._bounce is None or self._settings is None:
            return None
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"peer {peer} is not connected over nixl")
        check_segments(segments, self._regions, known.regions, peer)
        if known.bounce_buffer is None or not self._plain.is_connected(peer):
            return None
        is_worth_it = is_fragmented(
            segments, self._settings
        ) and self._bounce.transfers.can_request(known.bounce_buffer.agent, time.monotonic())
        return known.bounce_buffer if is_worth_it else None

    def _start(
        self,
        peer: PeerId,
        bounce_buffer: RemoteBounceBuffer,
        segments: Sequence[Segments],
        *,
        is_read: bool,
    ) -> Handle:
        assert self._bounce is not None
        handle = self._next_handle()
        self._bounce.active_at = time.monotonic()  # an answer is on its way
        self._bounce.transfers.start(
            handle, peer, bounce_buffer, segments, self._regions, is_read=is_read
        )
        return handle

    def _start_fallbacks(self, bounce: _ActiveBounce) -> list[Completion]:
        """Start the transfers that got no slot directly; return failed completions for the rest."""
        failed = []
        for handle, peer, segments, is_read in bounce.transfers.take_fallbacks():
            try:
                self._ours[(self._plain.read if is_read else self._plain.write)(peer, segments)] = (
                    handle
                )
            except KVFerryError as error:
                failed.append(Completion(handle, str(error), 0, 0, 0.0, 0.0))
        return failed

    def _next_handle(self) -> Handle:
        self._last_handle += 1
        return Handle(self._last_handle)

    def _named(self, plain: Handle) -> Handle:
        self._ours[plain] = self._next_handle()
        return self._ours[plain]

    def _ours_of(self, completions: Iterable[Completion]) -> list[Completion]:
        return [
            replace(completion, handle=self._ours.pop(completion.handle))
            for completion in completions
        ]

    def _forget(self, peer: PeerId, why: str) -> None:
        self._peers.pop(peer, None)
        if self._bounce is not None:
            self._bounce.transfers.fail_peer(peer, why, time.monotonic())
            self._send(self._bounce, self._bounce.transfers.take_outgoing(), time.monotonic())

    def _drop_lost(self, bounce: _ActiveBounce, now: float) -> None:
        for peer in bounce.transfers.peers():
            if not self._plain.is_connected(peer):
                bounce.transfers.fail_peer(peer, f"the connection to {peer} has failed", now)

    # -- messages --

    def _receive(self, bounce: _ActiveBounce, now: float) -> None:
        for note in self._plain.take_notes():
            try:
                envelope = bounce.codec.open(note)
            except RemoteProtocolError:
                bounce.num_dropped += 1
                continue
            bounce.active_at = now
            for message in envelope.messages:
                self._take(bounce, envelope.sender, message, now)

    def _take(self, bounce: _ActiveBounce, sender: str, message: BounceMessage, now: float) -> None:
        if isinstance(message, SlotRequest):
            bounce.routes.learn(sender, message.metadata, now)
        if isinstance(message, ToOwner):
            bounce.slot_server.receive(sender, message, now)
        else:
            bounce.transfers.receive(sender, message, now)

    def _tick(self, bounce: _ActiveBounce, now: float) -> None:
        if len(bounce.transfers):
            bounce.transfers.advance(now)
        if bounce.transfers.has_outgoing:
            self._send(bounce, bounce.transfers.take_outgoing(), now)
        if bounce.slot_server.is_serving:
            bounce.slot_server.advance(now)
        if bounce.slot_server.has_outgoing:
            self._send(bounce, bounce.slot_server.take_outgoing(), now)
        if now > bounce.cleaned_at + CLEANUP_INTERVAL_S:
            bounce.cleaned_at = now
            bounce.routes.forget_idle(now, bounce.slot_server.senders())

    def _send(self, bounce: _ActiveBounce, mail: Iterable[OutgoingMessages], now: float) -> None:
        for agent, messages in mail:
            try:
                for note in bounce.codec.close(agent, messages):
                    self._notify(bounce, agent, note, now)
            except TransportError:
                bounce.slot_server.lost(agent, now)

    def _notify(self, bounce: _ActiveBounce, agent: str, note: bytes, now: float) -> None:
        # Prefer the connection that our own transfers use; otherwise reply over a route.
        for peer, known in self._peers.items():
            if (
                known.bounce_buffer is not None
                and known.bounce_buffer.agent == agent
                and self._plain.is_connected(peer)
            ):
                self._plain.notify(peer, note)
                return
        bounce.routes.send(agent, note, now)

    @staticmethod
    def _is_expecting(bounce: _ActiveBounce, now: float) -> bool:
        """Whether the next message or completion may arrive at any moment. Then `poll` itself
        pauses.
        """
        return now < bounce.active_at + BUSY_S and (
            len(bounce.transfers) > 0 or bounce.slot_server.is_serving
        )

    def _waiting_interval_s(self, bounce: _ActiveBounce) -> float:
        if self._is_expecting(bounce, time.monotonic()):
            return 0.0
        return (
            SHORT_SLEEP_S
            if bounce.transfers.can_move or bounce.slot_server.can_move
            else WAITING_INTERVAL_S
        )


def _device_bytes(like: Region) -> int | None:
    """Return the total memory of the region's device; None for host memory or without CUDA."""
    if like.memory is MemoryKind.DRAM:
        return None
    # Imported only if there is a device, because the import needs torch with CUDA.
    try:
        from kvferry.transports.copy.cuda import device_bytes

        return device_bytes(like.device)
    except (ImportError, RuntimeError, AssertionError):
        return None


def _allocate(settings: ResolvedBounceSettings, like: Region) -> _BufferMemory | None:
    """Allocate a bounce buffer; None if memory is short, so that all transfers go directly."""
    if like.memory is MemoryKind.DRAM:
        return HostMemory.allocate(settings.buffer_bytes)
    # Imported only if there is a device, because the import needs torch with CUDA.
    try:
        from kvferry.transports.copy.cuda import DeviceMemory, enter_device

        enter_device(like.device)
        return DeviceMemory.allocate(settings.buffer_bytes, like.device)
    except (
        ImportError,
        RuntimeError,
        AssertionError,
        AttributeError,
    ) as error:  # without CUDA, torch raises any of the four
        _log.warning(
            "no bounce buffer of %d bytes on device %d (%s): small segments go one by one",
            settings.buffer_bytes,
            like.device,
            error,
        )
        return None


def _copier_for(region: Region) -> AddressCopier:
    if region.memory is MemoryKind.DRAM:
        return HostAddressCopier()
    from kvferry.transports.copy.cuda import CudaAddressCopier

    return CudaAddressCopier(region.device)
