"""The `nixl` data plane with staging: a transfer of many small pieces goes through registered rings as few large ones.

NIXL takes about 9 µs for each descriptor whatever its size. So one side gathers the pieces into its ring, the ring's bytes move as one
piece, and the other side scatters them: chunk by chunk, all three at once. Transfers of few or large pieces, and those with peers
without a ring, go plainly. Owned by one thread. The parts:

    staging_transfers   our own transfers            staging_lender    what peers have asked of us
    staging_wire        what the two tell each other  staging_stream, staging_ring, staging_lane   which bytes are where

docs/decisions/037-staged-nixl.md says why it is as it is.
"""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from kvferry.breath import BREATH_S
from kvferry.errors import KVFerryError, RemoteProtocolError, TransportError
from kvferry.planes.address_copy import AddressCopier, HostAddressCopier
from kvferry.planes.bounds import check_pieces
from kvferry.planes.host_memory import HostMemory
from kvferry.planes.nixl import NixlDataPlane
from kvferry.planes.staging_lane import StagingPace, StagingRing
from kvferry.planes.staging_lender import RECLAIM_S, ToOwner, WindowLender
from kvferry.planes.staging_ring import WindowTable
from kvferry.planes.staging_routes import ReturnRoutes
from kvferry.planes.staging_settings import ResolvedStaging, StagingSettings, is_fragmented
from kvferry.planes.staging_transfers import Mail, RingOf, StagedTransfers
from kvferry.planes.staging_wire import STAGING_VERSION, Ask, Message, Postmark
from kvferry.ports.data import Completion, Handle, Pieces, PlaneOffer
from kvferry.types import MemoryKind, PeerId, Region

__all__ = ["StagedNixlDataPlane", "StagingSettings"]

BUSY_S = 0.002
"""So long after something has happened we look for what is next all the time: a chunk takes less than a sleep."""
WAITING_INTERVAL_S = 0.001
CLOSE_PATIENCE_S = 2.0
TIDY_S = 1.0
DEVICE_TURN_BYTES = 1 << 40

_log = logging.getLogger(__name__)


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """As the plain plane's, which looks at the first two only."""

    agent: str
    metadata: bytes
    ring_address: int = 0
    ring_bytes: int = 0
    version: int = 0
    """Of what is said about rings: only equal ones understand each other."""


class _RingMemory(Protocol):
    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Peer:
    regions: tuple[Region, ...]
    ring: RingOf | None


@dataclass(slots=True)
class _Staging:
    """What there is once a ring is registered."""

    memory: _RingMemory
    region: Region
    copier: AddressCopier
    transfers: StagedTransfers
    lender: WindowLender
    routes: ReturnRoutes
    postmark: Postmark
    stirred_at: float = 0.0
    """When something last happened: a message, or the end of something posted."""
    tidied_at: float = 0.0
    num_dropped: int = 0
    """Notifications that were not understood."""


class StagedNixlDataPlane:
    """Implements `ports.data.DataPlane`."""

    def __init__(self, plain: NixlDataPlane, settings: StagingSettings, key: bytes, reclaim_s: float = RECLAIM_S) -> None:
        self._plain = plain
        self._wanted = settings
        self._key = key
        self._reclaim_s = reclaim_s
        self._regions: tuple[Region, ...] = ()
        self._settings: ResolvedStaging | None = None
        self._staging: _Staging | None = None
        self._peers: dict[PeerId, _Peer] = {}
        self._last_handle = 0
        self._ours: dict[Handle, Handle] = {}
        """Handles of transfers that go plainly, by the plain plane's."""
        self._entered_by: int | None = None

    @property
    def name(self) -> str:
        return self._plain.name

    @property
    def num_dropped_notes(self) -> int:
        return 0 if self._staging is None else self._staging.num_dropped

    def register(self, regions: Sequence[Region]) -> bool:
        is_one = len({(each.memory, each.device) for each in regions}) == 1
        settings = self._wanted.resolved(regions[0].memory, _device_bytes(regions[0])) if is_one else None
        memory = _allocate(settings, regions[0]) if settings is not None and settings.is_on else None
        if memory is None or settings is None:
            is_carried = self._plain.register(regions)
        else:
            ring = Region("staging", memory.address, memory.size_bytes, memory.size_bytes, 1, regions[0].memory, regions[0].device)
            is_carried = self._plain.register([*regions, ring])
            if is_carried:
                self._staging = self._stage(settings, memory, ring, regions)
            else:
                memory.close()
        self._regions, self._settings = (tuple(regions), settings) if is_carried else ((), None)
        return is_carried

    def offer(self) -> PlaneOffer:
        offer = self._plain.offer()
        if self._staging is None:
            return offer
        name, metadata = self._plain.identity()
        ring = self._staging.region
        return replace(offer, blob=msgspec.msgpack.encode(_Offer(name, metadata, ring.address, ring.size_bytes, STAGING_VERSION)))

    def connect(self, peer: PeerId, offer: PlaneOffer, regions: Sequence[Region]) -> None:
        try:
            decoded = msgspec.msgpack.decode(offer.blob, type=_Offer)
        except msgspec.MsgspecError as error:
            raise TransportError(f"the nixl offer of {peer} cannot be understood ({error}); do both sides run the same kvferry?") from error
        self._forget(peer, f"peer {peer} was connected anew")
        theirs, ring = list(regions), None
        if self._staging is not None and decoded.version == STAGING_VERSION and decoded.ring_bytes > 0 and regions:
            size, like = decoded.ring_bytes, regions[0]
            theirs.append(Region("staging", decoded.ring_address, size, size, 1, like.memory, like.device))
            ring = RingOf(decoded.agent, decoded.ring_address, size)
        self._plain.connect(peer, offer, theirs)
        self._peers[peer] = _Peer(tuple(regions), ring)

    def disconnect(self, peer: PeerId) -> None:
        self._forget(peer, f"peer {peer} was disconnected")
        self._plain.disconnect(peer)

    def read(self, peer: PeerId, pieces: Sequence[Pieces]) -> Handle:
        ring = self._ring_for(peer, pieces)
        if ring is None:
            return self._named(self._plain.read(peer, pieces))
        return self._start(peer, ring, pieces, is_read=True)

    def write(self, peer: PeerId, pieces: Sequence[Pieces], number: int = 0) -> Handle:
        ring = self._ring_for(peer, pieces)
        if ring is None:
            return self._named(self._plain.write(peer, pieces, number))
        return self._start(peer, ring, pieces, is_read=False)

    @property
    def fences_writes(self) -> bool:
        return self._plain.fences_writes

    def lend(self, number: int, blocks: Sequence[Sequence[int]]) -> None:
        self._plain.lend(number, blocks)

    def take_back(self, number: int) -> Handle:
        return self._plain.take_back(number)

    def poll(self) -> list[Completion]:
        staging = self._staging
        if staging is None:
            return self._ours_of(self._plain.poll())
        self._enter_device(staging.region)
        now, plain = time.monotonic(), list[Completion]()
        if len(staging.transfers) or staging.lender.is_serving:
            self._plain.expect_calls(now + BUSY_S)
        self._receive(staging, now)
        self._turn(staging, now)
        if completions := self._plain.poll_posted():
            now = time.monotonic()
            plain = [each for each in completions if not staging.transfers.settle(each, now)]
            if len(plain) < len(completions):
                staging.stirred_at = now
                self._turn(staging, now)
        ended = self._ours_of(plain)
        if len(staging.transfers):
            self._drop_lost(staging, now)
            ended += [*self._start_unstaged(staging), *staging.transfers.take_ended()]
        if not ended and not self._plain.can_post and self._is_expecting(staging, now):
            staging.copier.pause(BREATH_S)
        return ended

    def cancel(self, handle: Handle) -> None:
        for plain, ours in self._ours.items():
            if ours == handle:
                self._plain.cancel(plain)
        if self._staging is not None:
            self._staging.transfers.cancel(handle, time.monotonic())

    def poll_interval_s(self) -> float | None:
        staging, interval = self._staging, self._plain.poll_interval_s()
        if staging is None or (not len(staging.transfers) and not staging.lender.is_serving):
            return interval
        own = self._waiting_interval_s(staging)
        return own if interval is None else min(own, interval)

    def serving_interval_s(self) -> float | None:
        if self._staging is not None and self._staging.lender.is_serving:
            return self._waiting_interval_s(self._staging)
        return self._plain.serving_interval_s()

    def close(self) -> None:
        staging = self._staging
        if staging is not None:
            staging.transfers.stop_all("the plane was closed", time.monotonic())
            deadline = time.monotonic() + CLOSE_PATIENCE_S
            while len(staging.transfers) and time.monotonic() < deadline:
                self.poll()
        self._plain.close()
        if staging is not None:
            staging.copier.close()
            staging.memory.close()
        self._staging = None
        self._peers.clear()
        self._ours.clear()

    # -- setting up ------------------------------------------------------------------------------------------------

    def _stage(self, settings: ResolvedStaging, memory: _RingMemory, region: Region, regions: Sequence[Region]) -> _Staging:
        name, metadata = self._plain.identity()
        on_device = region.memory is MemoryKind.VRAM
        pace = StagingPace(settings.chunk_bytes, DEVICE_TURN_BYTES if on_device else settings.chunk_bytes)
        ring = StagingRing(region.address, region.size_bytes, _copier_for(region), pace)
        own, lent = WindowTable.two_of(region.size_bytes)
        return _Staging(
            memory,
            region,
            ring.copier,
            StagedTransfers(ring, own, self._plain, metadata, self._reclaim_s),
            WindowLender(ring, lent, regions, self._reclaim_s),
            ReturnRoutes(self._plain, region),
            Postmark(self._key, name),
        )

    def _enter_device(self, region: Region) -> None:
        """UCX and torch both work in the context of the calling thread, and the one that polls may not be the one that registered."""
        if region.memory is MemoryKind.VRAM and self._entered_by != threading.get_ident():
            from kvferry.planes import cuda_driver
            from kvferry.planes.device_memory import enter_device

            enter_device(region.device)
            cuda_driver.ignore_captures()
            self._entered_by = threading.get_ident()

    # -- transfers -------------------------------------------------------------------------------------------------

    def _ring_for(self, peer: PeerId, pieces: Sequence[Pieces]) -> RingOf | None:
        """The peer's ring if these pieces are to be staged. They are checked here: to NIXL the rings are regions like others."""
        if self._staging is None or self._settings is None:
            return None
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"peer {peer} is not connected over nixl")
        check_pieces(pieces, self._regions, known.regions, peer)
        if known.ring is None or not self._plain.is_connected(peer):
            return None
        is_worth_it = is_fragmented(pieces, self._settings) and self._staging.transfers.can_ask(known.ring.agent, time.monotonic())
        return known.ring if is_worth_it else None

    def _start(self, peer: PeerId, ring: RingOf, pieces: Sequence[Pieces], *, is_read: bool) -> Handle:
        assert self._staging is not None
        handle = self._next_handle()
        self._staging.stirred_at = time.monotonic()  # an answer is on its way
        self._staging.transfers.start(handle, peer, ring, pieces, self._regions, is_read=is_read)
        return handle

    def _start_unstaged(self, staging: _Staging) -> list[Completion]:
        """Those whose peer had no window for them. What cannot be started has failed."""
        failed = []
        for handle, peer, pieces, is_read in staging.transfers.take_unstaged():
            try:
                self._ours[(self._plain.read if is_read else self._plain.write)(peer, pieces)] = handle
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
        return [replace(completion, handle=self._ours.pop(completion.handle)) for completion in completions]

    def _forget(self, peer: PeerId, why: str) -> None:
        self._peers.pop(peer, None)
        if self._staging is not None:
            self._staging.transfers.fail_peer(peer, why, time.monotonic())
            self._send(self._staging, self._staging.transfers.take_mail(), time.monotonic())

    def _drop_lost(self, staging: _Staging, now: float) -> None:
        for peer in staging.transfers.peers():
            if not self._plain.is_connected(peer):
                staging.transfers.fail_peer(peer, f"the connection to {peer} has failed", now)

    # -- messages --------------------------------------------------------------------------------------------------

    def _receive(self, staging: _Staging, now: float) -> None:
        for note in self._plain.take_notes():
            try:
                envelope = staging.postmark.open(note)
            except RemoteProtocolError:
                staging.num_dropped += 1
                continue
            staging.stirred_at = now
            for message in envelope.messages:
                self._take(staging, envelope.sender, message, now)

    def _take(self, staging: _Staging, sender: str, message: Message, now: float) -> None:
        if isinstance(message, Ask):
            staging.routes.meet(sender, message.metadata, now)
        if isinstance(message, ToOwner):
            staging.lender.receive(sender, message, now)
        else:
            staging.transfers.receive(sender, message, now)

    def _turn(self, staging: _Staging, now: float) -> None:
        if len(staging.transfers):
            staging.transfers.advance(now)
        if staging.transfers.has_mail:
            self._send(staging, staging.transfers.take_mail(), now)
        if staging.lender.is_serving:
            staging.lender.advance(now)
        if staging.lender.has_mail:
            self._send(staging, staging.lender.take_mail(), now)
        if now > staging.tidied_at + TIDY_S:
            staging.tidied_at = now
            staging.routes.forget_idle(now, staging.lender.senders())

    def _send(self, staging: _Staging, mail: Iterable[Mail], now: float) -> None:
        for agent, messages in mail:
            try:
                for note in staging.postmark.close(agent, messages):
                    self._notify(staging, agent, note, now)
            except TransportError:
                staging.lender.lost(agent, now)

    def _notify(self, staging: _Staging, agent: str, note: bytes, now: float) -> None:
        for peer, known in self._peers.items():
            if known.ring is not None and known.ring.agent == agent and self._plain.is_connected(peer):
                self._plain.notify(peer, note)
                return
        staging.routes.send(agent, note, now)

    @staticmethod
    def _is_expecting(staging: _Staging, now: float) -> bool:
        """Whether the next thing may happen at any moment. Then `poll` itself pauses."""
        return now < staging.stirred_at + BUSY_S and (len(staging.transfers) > 0 or staging.lender.is_serving)

    def _waiting_interval_s(self, staging: _Staging) -> float:
        if self._is_expecting(staging, time.monotonic()):
            return 0.0
        return BREATH_S if staging.transfers.can_move or staging.lender.can_move else WAITING_INTERVAL_S


def _device_bytes(like: Region) -> int | None:
    """All memory of its device; None when there is none, or it does not work."""
    if like.memory is MemoryKind.DRAM:
        return None
    # Imported only where there is a device: it takes torch with CUDA.
    try:
        from kvferry.planes.device_memory import device_bytes

        return device_bytes(like.device)
    except (ImportError, RuntimeError, AssertionError):
        return None


def _allocate(settings: ResolvedStaging, like: Region) -> _RingMemory | None:
    """None when there is not that much memory: then everything goes plainly."""
    if like.memory is MemoryKind.DRAM:
        return HostMemory.allocate(settings.ring_bytes)
    # Imported only where there is a device: it takes torch with CUDA.
    try:
        from kvferry.planes.device_memory import DeviceMemory, enter_device

        enter_device(like.device)
        return DeviceMemory.allocate(settings.ring_bytes, like.device)
    except (ImportError, RuntimeError, AssertionError, AttributeError) as error:  # torch without CUDA has several ways to say so
        _log.warning("no staging ring of %d bytes on device %d (%s): small pieces go one by one", settings.ring_bytes, like.device, error)
        return None


def _copier_for(region: Region) -> AddressCopier:
    if region.memory is MemoryKind.DRAM:
        return HostAddressCopier()
    from kvferry.planes.cuda_copier import CudaAddressCopier

    return CudaAddressCopier(region.device)
