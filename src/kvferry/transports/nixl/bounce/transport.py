"""The `nixl` data transport with bounce buffers, for transfers of many small segments.

NIXL takes about 9 µs for each descriptor of any size. So one side gathers the segments into a
bounce buffer, the gathered bytes move as one segment, and the receiving side scatters the bytes:
chunk by chunk, with all three steps running at once. Transfers of few or large segments, and
transfers with peers that have no bounce buffer, go directly through the plain NIXL transport. Owned
by one thread. The parts:

    initiator   our own transfers                owner      transfers that peers have started
    messages    messages of the two sides        slots      which bytes lie where
    settings    which transfers, how much memory memory     allocating the bounce buffer

The bounce buffer is allocated when the first transfer needs it: a transfer of our own, or a peer's
request for a slot. If there is too little memory, transfers go directly, and a later transfer tries
again. See docs/decisions/037-bounce-buffers.md for the reasons.
"""

import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from kvferry.errors import KVFerryError, RemoteProtocolError, TransportError
from kvferry.sleep import SHORT_SLEEP_S
from kvferry.transports.base import Completion, Handle, Segments, TransportOffer
from kvferry.transports.copy.gather import AddressCopier
from kvferry.transports.copy.segments import check_segments
from kvferry.transports.nixl.bounce.initiator import BounceTransfers, OutgoingMessages
from kvferry.transports.nixl.bounce.memory import (
    BufferAllocator,
    BufferMemory,
    allocate_buffer,
    copier_for,
    device_bytes,
    prepare_device,
)
from kvferry.transports.nixl.bounce.messages import (
    BOUNCE_VERSION,
    MAX_WHY,
    BounceMessage,
    NotificationCodec,
    SlotRequest,
    TransferEnded,
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
                PeerId(EngineId(f"agent {agent}"), Epoch(agent), 0), metadata, now
            )
        elif route is not None:
            route.metadata, route.used_at = metadata or route.metadata, now

    def send(self, agent: str, note: bytes, now: float) -> None:
        """Send a notification to an agent. TransportError if the agent cannot be reached."""
        route = self._routes.get(agent)
        if route is None or now < route.retry_at:
            raise TransportError(f"there is no route to agent {agent}")
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
ALLOCATION_RETRY_S = 10.0
"""How long after a failed allocation transfers go directly, before the next one tries again."""
DEVICE_TICK_BYTES = 1 << 40
"""Practically no limit: the device copies asynchronously, after the tick."""

_log = logging.getLogger(__name__)


class _BounceOffer(msgspec.Struct, frozen=True, array_like=True):
    """The plain transport's offer with more fields; the plain transport reads the first two."""

    agent: str
    metadata: bytes
    bounce_version: int = 0
    """`BOUNCE_VERSION` of the sender; 0 if the sender never has a bounce buffer.

    In offers of version 1 this is the address of the bounce buffer, which is no known version.
    """


@dataclass(frozen=True, slots=True)
class _Peer:
    """A connected peer."""

    regions: tuple[Region, ...]
    bounce_agent: str | None
    """The peer's agent that grants slots; None if transfers with the peer always go directly."""


@dataclass(slots=True)
class _Endpoint:
    """Exists from registration on, unless bounce buffers are off: peers may ask us for slots."""

    settings: ResolvedBounceSettings
    codec: NotificationCodec
    routes: ReplyRoutes
    cleaned_at: float = 0.0
    num_dropped: int = 0
    """Number of notifications that could not be verified or decoded."""
    retry_at: float = 0.0
    """When the next allocation may be tried, after an allocation has failed with `error`."""
    error: str = ""


@dataclass(slots=True)
class _ActiveBounce:
    """The objects that exist once the bounce buffer is allocated."""

    memory: BufferMemory
    copier: AddressCopier
    transfers: BounceTransfers
    slot_server: SlotServer
    active_at: float = 0.0
    """When a message last arrived or a posted chunk last completed."""

    @property
    def is_busy(self) -> bool:
        return len(self.transfers) > 0 or self.slot_server.is_serving


class BounceNixlTransport:
    """Implements `base.DataTransport` by wrapping the plain NIXL transport."""

    def __init__(
        self,
        plain: NixlTransport,
        settings: BounceSettings,
        key: bytes,
        reclaim_s: float = RECLAIM_S,
        allocate: BufferAllocator = allocate_buffer,
    ) -> None:
        self._plain = plain
        self._wanted = settings
        self._key = key
        self._reclaim_s = reclaim_s
        self._allocate = allocate
        self._regions: tuple[Region, ...] = ()
        self._endpoint: _Endpoint | None = None
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
        return 0 if self._endpoint is None else self._endpoint.num_dropped

    def register(self, regions: Sequence[Region]) -> bool:
        if not regions:
            return False
        settings = self._wanted.resolved(regions[0].memory, device_bytes(regions[0]))
        if settings.is_on:
            prepare_device(regions[0])
        if not self._plain.register(regions):
            return False
        self._regions = tuple(regions)
        if settings.is_on:
            name, _ = self._plain.identity()
            self._endpoint = _Endpoint(
                settings, NotificationCodec(self._key, name), ReplyRoutes(self._plain, regions[0])
            )
        return True

    def offer(self) -> TransportOffer:
        offer = self._plain.offer()
        if self._endpoint is None:
            return offer
        name, metadata = self._plain.identity()
        blob = msgspec.msgpack.encode(_BounceOffer(name, metadata, BOUNCE_VERSION))
        return replace(offer, blob=blob)

    def connect(self, peer: PeerId, offer: TransportOffer, regions: Sequence[Region]) -> None:
        try:
            decoded = msgspec.msgpack.decode(offer.blob, type=_BounceOffer)
        except msgspec.MsgspecError as error:
            raise TransportError(
                f"the nixl offer of {peer} cannot be understood ({error}); do both sides run the "
                "same kvferry?"
            ) from error
        self._forget(peer, f"peer {peer} was connected again")
        self._plain.connect(peer, offer, regions)
        is_known = decoded.bounce_version == BOUNCE_VERSION
        self._peers[peer] = _Peer(tuple(regions), decoded.agent if is_known else None)

    def disconnect(self, peer: PeerId) -> None:
        self._forget(peer, f"peer {peer} was disconnected")
        self._plain.disconnect(peer)

    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle:
        bounce = self._bounce_for(peer, segments)
        if bounce is None:
            return self._named(self._plain.read(peer, segments))
        return self._start(bounce, peer, segments, is_read=True)

    def write(self, peer: PeerId, segments: Sequence[Segments], grant_id: int = 0) -> Handle:
        bounce = self._bounce_for(peer, segments)
        if bounce is None:
            return self._named(self._plain.write(peer, segments, grant_id))
        return self._start(bounce, peer, segments, is_read=False)

    @property
    def supports_write_grants(self) -> bool:
        return self._plain.supports_write_grants

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        self._plain.grant_writes(grant_id, blocks)

    def revoke_writes(self, grant_id: int) -> Handle:
        return self._plain.revoke_writes(grant_id)

    def poll(self) -> list[Completion]:
        endpoint = self._endpoint
        if endpoint is None:
            return self._ours_of(self._plain.poll())
        self._enter_device()
        now, plain = time.monotonic(), list[Completion]()
        if self._bounce is not None and self._bounce.is_busy:
            self._plain.expect_calls(now + BUSY_S)
        self._receive(endpoint, now)
        bounce = self._bounce
        if bounce is None:
            return self._ours_of(self._plain.poll_posted())
        self._tick(endpoint, bounce, now)
        # A completed chunk may allow the next chunk, so a second tick follows at once.
        if completions := self._plain.poll_posted():
            now = time.monotonic()
            plain = [each for each in completions if not bounce.transfers.settle(each, now)]
            if len(plain) < len(completions):
                bounce.active_at = now
                self._tick(endpoint, bounce, now)
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
        if bounce is None or not bounce.is_busy:
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
        self._bounce = self._endpoint = None
        self._peers.clear()
        self._ours.clear()

    # -- the bounce buffer --

    def _activate(self, endpoint: _Endpoint, peer: PeerId | str) -> _ActiveBounce:
        """Return the bounce buffer, which the first call allocates for `peer`.

        TransportError, with nothing changed, if there is too little memory.
        """
        if self._bounce is not None:
            return self._bounce
        size_bytes, like, now = endpoint.settings.buffer_bytes, self._regions[0], time.monotonic()
        where = "the host" if like.memory is MemoryKind.DRAM else f"cuda:{like.device}"
        if now < endpoint.retry_at:
            raise TransportError(endpoint.error)
        try:
            self._bounce = self._allocated(endpoint.settings, like)
        except TransportError as error:
            endpoint.retry_at = now + ALLOCATION_RETRY_S
            endpoint.error = (
                f"no bounce buffer of {size_bytes} bytes can be allocated on {where}: small "
                "segments are moved one by one, which is slow; leave more memory free, or set "
                f"bounce_buffer_bytes to a smaller size, or to 0 ({error})"
            )
            _log.warning("%s peer=%s", endpoint.error, peer)
            raise TransportError(endpoint.error) from error
        _log.info("bounce buffer of %d bytes allocated on %s peer=%s", size_bytes, where, peer)
        return self._bounce

    def _allocated(self, settings: ResolvedBounceSettings, like: Region) -> _ActiveBounce:
        """Allocate the bounce buffer and register it with NIXL. TransportError if either fails."""
        self._enter_device()
        memory = self._allocate(settings.buffer_bytes, like)
        size_bytes = memory.size_bytes
        region = Region(
            "bounce", memory.address, size_bytes, size_bytes, 1, like.memory, like.device
        )
        try:
            copier = copier_for(region)
            if not self._plain.add_memory(region):
                copier.close()
                raise TransportError("NIXL cannot register the memory")
        except TransportError:
            memory.close()
            raise
        on_device = region.memory is MemoryKind.VRAM
        limits = CopyLimits(
            settings.chunk_bytes, DEVICE_TICK_BYTES if on_device else settings.chunk_bytes
        )
        bounce_buffer = BounceBuffer(region.address, size_bytes, copier, limits)
        own, served_slots = SlotTable.shared_pair(size_bytes)
        _, metadata = self._plain.identity()  # includes the bounce buffer from now on
        return _ActiveBounce(
            memory,
            copier,
            BounceTransfers(bounce_buffer, own, self._plain, metadata, self._reclaim_s),
            SlotServer(bounce_buffer, served_slots, self._regions, metadata, self._reclaim_s),
        )

    def _enter_device(self) -> None:
        """Make the device's context current in the polling thread.

        UCX and torch use the context of the calling thread, and the polling thread may not be the
        thread that registered the memory.
        """
        region = self._regions[0]
        if region.memory is MemoryKind.VRAM and self._entered_by != threading.get_ident():
            from kvferry.transports.copy.cuda import enter_device
            from kvferry.transports.cuda_ipc import driver as cuda_driver

            enter_device(region.device)
            cuda_driver.ignore_captures()
            self._entered_by = threading.get_ident()

    # -- transfers --

    def _bounce_for(self, peer: PeerId, segments: Sequence[Segments]) -> _ActiveBounce | None:
        """Return the bounce buffer if the segments shall go through it, else None.

        The first such segments allocate the bounce buffer. If that fails, segments go directly.
        """
        endpoint, known = self._endpoint, self._peers.get(peer)
        if endpoint is None or known is None or known.bounce_agent is None:
            return None  # the plain transport checks peer and segments
        check_segments(segments, self._regions, known.regions, peer)
        if not self._plain.is_connected(peer) or not is_fragmented(segments, endpoint.settings):
            return None
        try:
            bounce = self._activate(endpoint, peer)
        except TransportError:  # logged by `_activate`
            return None
        may_ask = bounce.transfers.can_request(known.bounce_agent, time.monotonic())
        return bounce if may_ask else None

    def _start(
        self, bounce: _ActiveBounce, peer: PeerId, segments: Sequence[Segments], *, is_read: bool
    ) -> Handle:
        handle, agent = self._next_handle(), self._peers[peer].bounce_agent
        assert agent is not None
        bounce.active_at = time.monotonic()  # an answer is on its way
        bounce.transfers.start(handle, peer, agent, segments, self._regions, is_read=is_read)
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
        if self._endpoint is not None and self._bounce is not None:
            self._bounce.transfers.fail_peer(peer, why, time.monotonic())
            self._send(self._endpoint, self._bounce.transfers.take_outgoing(), time.monotonic())

    def _drop_lost(self, bounce: _ActiveBounce, now: float) -> None:
        for peer in bounce.transfers.peers():
            if not self._plain.is_connected(peer):
                bounce.transfers.fail_peer(peer, f"the connection to {peer} has failed", now)

    # -- messages --

    def _receive(self, endpoint: _Endpoint, now: float) -> None:
        for note in self._plain.take_notes():
            try:
                envelope = endpoint.codec.decode(note)
            except RemoteProtocolError:
                endpoint.num_dropped += 1
                continue
            for message in envelope.messages:
                self._take(endpoint, envelope.sender, message, now)
            if self._bounce is not None:
                self._bounce.active_at = now
        if now > endpoint.cleaned_at + CLEANUP_INTERVAL_S:
            endpoint.cleaned_at = now
            senders = set() if self._bounce is None else self._bounce.slot_server.senders()
            endpoint.routes.forget_idle(now, senders)

    def _take(self, endpoint: _Endpoint, sender: str, message: BounceMessage, now: float) -> None:
        if isinstance(message, SlotRequest):
            endpoint.routes.learn(sender, message.metadata, now)
            try:
                self._activate(endpoint, sender)
            except TransportError as error:
                # The peer's transfer then goes directly.
                refused = TransferEnded(message.transfer, str(error)[:MAX_WHY])
                self._send(endpoint, [(sender, (refused,))], now)
        if self._bounce is None:
            return  # a further message of a transfer that was refused
        if isinstance(message, ToOwner):
            self._bounce.slot_server.receive(sender, message, now)
        else:
            self._bounce.transfers.receive(sender, message, now)

    def _tick(self, endpoint: _Endpoint, bounce: _ActiveBounce, now: float) -> None:
        if len(bounce.transfers):
            bounce.transfers.advance(now)
        if bounce.transfers.has_outgoing:
            self._send(endpoint, bounce.transfers.take_outgoing(), now)
        if bounce.slot_server.is_serving:
            bounce.slot_server.advance(now)
        if bounce.slot_server.has_outgoing:
            self._send(endpoint, bounce.slot_server.take_outgoing(), now)

    def _send(self, endpoint: _Endpoint, mail: Iterable[OutgoingMessages], now: float) -> None:
        for agent, messages in mail:
            try:
                for note in endpoint.codec.encode(agent, messages):
                    self._notify(endpoint, agent, note, now)
            except TransportError:
                if self._bounce is not None:
                    self._bounce.slot_server.lost(agent, now)

    def _notify(self, endpoint: _Endpoint, agent: str, note: bytes, now: float) -> None:
        # Prefer the connection that our own transfers use; otherwise reply over a route.
        for peer, known in self._peers.items():
            if known.bounce_agent == agent and self._plain.is_connected(peer):
                self._plain.notify(peer, note)
                return
        endpoint.routes.send(agent, note, now)

    @staticmethod
    def _is_expecting(bounce: _ActiveBounce, now: float) -> bool:
        """Whether the next message or completion may arrive at any moment. Then `poll` itself
        pauses.
        """
        return now < bounce.active_at + BUSY_S and bounce.is_busy

    def _waiting_interval_s(self, bounce: _ActiveBounce) -> float:
        if self._is_expecting(bounce, time.monotonic()):
            return 0.0
        return (
            SHORT_SLEEP_S
            if bounce.transfers.can_move or bounce.slot_server.can_move
            else WAITING_INTERVAL_S
        )
