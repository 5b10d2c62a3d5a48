"""The `nixl` data transport with bounce buffers, for transfers of many small segments.

NIXL takes about 9 µs for each descriptor of any size. So one side gathers the segments into a
bounce buffer, the gathered bytes move as one segment, and the receiving side scatters the bytes:
chunk by chunk, with all three steps running at once. Transfers of few or large segments, and
transfers with peers that have no bounce buffer, go directly through the plain NIXL transport. Owned
by one thread. The parts:

    initiator   our own transfers                owner      transfers that peers have started
    messages    messages of the two sides        slots      which bytes lie where
    settings    which transfers, how much memory memory     allocating the bounce buffer
    mailbox     sending and receiving messages

The bounce buffer is allocated when the first transfer needs it: a transfer of our own, or a peer's
request for a slot. If there is too little memory, transfers go directly, and a later transfer tries
again. See docs/decisions/037-bounce-buffers.md for the reasons.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from kvferry.errors import TransportError
from kvferry.sleep import SHORT_SLEEP_S
from kvferry.transports.base import Completion, Handle, Operation, Segments, TransportOffer
from kvferry.transports.copy.gather import AddressCopier
from kvferry.transports.linked import decoded_offer
from kvferry.transports.nixl.agent import NixlLink
from kvferry.transports.nixl.bounce.initiator import BounceTransfers
from kvferry.transports.nixl.bounce.mailbox import Mailbox
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
    SlotRequest,
    ToOwner,
    TransferEnded,
)
from kvferry.transports.nixl.bounce.owner import RECLAIM_S, SlotServer
from kvferry.transports.nixl.bounce.settings import (
    BounceSettings,
    ResolvedBounceSettings,
    is_fragmented,
)
from kvferry.transports.nixl.bounce.slots import BounceBuffer, SlotTable
from kvferry.transports.nixl.transport import (
    DRAIN_TIMEOUT_S,
    NetworkReach,
    NixlOffer,
    NixlTransport,
)
from kvferry.types import MemoryKind, PeerId, Region

BUSY_S = 0.002
"""How long after the last activity `poll` keeps polling without sleep.

A chunk takes less time than a sleep.
"""
WAITING_INTERVAL_S = 0.001
ALLOCATION_RETRY_S = 10.0
"""How long after a failed allocation transfers go directly, before the next one tries again."""
DEVICE_TICK_BYTES = 1 << 40
"""Practically no limit: the device copies asynchronously, after the tick."""

_log = logging.getLogger(__name__)


class _BounceOffer(NixlOffer, frozen=True, array_like=True):
    """The plain transport's offer with one more field; the plain transport reads the others."""

    bounce_version: int = 0
    """`BOUNCE_VERSION` of the sender; 0 if the sender never has a bounce buffer.

    In offers of version 1 this is the address of the bounce buffer, which is no known version.
    """


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

    def is_expecting(self, now: float) -> bool:
        """Whether the next message or completion may arrive at any moment. Then `poll` itself
        pauses.
        """
        return now < self.active_at + BUSY_S and self.is_busy

    def waiting_interval_s(self) -> float:
        if self.is_expecting(time.monotonic()):
            return 0.0
        can_move = self.transfers.can_move or self.slot_server.can_move
        return SHORT_SLEEP_S if can_move else WAITING_INTERVAL_S


class BounceNixlTransport(NixlTransport):
    """The NIXL transport, with bounce buffers for transfers of many small segments."""

    def __init__(
        self,
        settings: BounceSettings,
        secret: bytes,
        backends: Sequence[str] = ("UCX",),
        num_threads: int = 4,
        reach: NetworkReach = NetworkReach.ANYWHERE,
        *,
        memory_may_go: bool = False,
        reclaim_s: float = RECLAIM_S,
        allocate: BufferAllocator = allocate_buffer,
    ) -> None:
        super().__init__(backends, num_threads, reach, memory_may_go=memory_may_go)
        self._wanted = settings
        self._secret = secret
        self._reclaim_s = reclaim_s
        self._allocate = allocate
        self._settings: ResolvedBounceSettings
        self._mailbox: Mailbox | None = None
        """From registration on, unless bounce buffers are off: peers may ask us for slots."""
        self._retry_at, self._allocation_error = 0.0, ""
        """When the next allocation may be tried, after an allocation has failed."""
        self._bounce: _ActiveBounce | None = None
        self._entered_by: int | None = None

    @property
    def num_dropped_notifications(self) -> int:
        return 0 if self._mailbox is None else self._mailbox.num_dropped

    def _open(self, regions: tuple[Region, ...]) -> bool:
        if not regions:
            return False
        self._settings = self._wanted.resolved(regions[0].memory, device_bytes(regions[0]))
        if self._settings.is_on:
            prepare_device(regions[0])
        if not super()._open(regions):
            return False
        if self._settings.is_on:
            self._mailbox = Mailbox(self, self._secret, regions[0])
        return True

    def offer(self) -> TransportOffer:
        offer = super().offer()
        if self._mailbox is None:
            return offer
        own = self.identity()
        blob = msgspec.msgpack.encode(_BounceOffer(own.agent, own.metadata, BOUNCE_VERSION))
        return replace(offer, blob=blob)

    def _connect(
        self, peer: PeerId, offer: TransportOffer, regions: tuple[Region, ...]
    ) -> NixlLink:
        decoded = decoded_offer(peer, offer, _BounceOffer)
        self._forget(peer, f"peer {peer} was connected again")
        link = self._connected(peer, decoded, regions)
        link.grants_slots = decoded.bounce_version == BOUNCE_VERSION
        return link

    def disconnect(self, peer: PeerId) -> None:
        link = self._links.get(peer)
        if link is not None and link.grants_slots:  # not a route of the mailbox
            self._forget(peer, f"peer {peer} was disconnected")
        super().disconnect(peer)

    def poll(self) -> list[Completion]:
        mailbox = self._mailbox
        if mailbox is None:
            return super().poll()
        self._enter_device()
        now = time.monotonic()
        if self._bounce is not None and self._bounce.is_busy:
            self._known_until = now + BUSY_S
        self._receive(mailbox, now)
        bounce = self._bounce
        if bounce is None:
            return super().poll()
        self._tick(mailbox, bounce, now)
        completions = super().poll()
        now = time.monotonic()
        ended = [each for each in completions if not bounce.transfers.settle(each, now)]
        if len(ended) < len(completions):
            # A completed chunk may allow the next chunk, so a second tick follows at once.
            bounce.active_at = now
            self._tick(mailbox, bounce, now)
        for peer in bounce.transfers.peers() - self._links.keys():
            bounce.transfers.fail_peer(peer, f"the connection to {peer} has failed", now)
        ended += bounce.transfers.take_ended()
        if not ended and not self.can_post and bounce.is_expecting(now):
            bounce.copier.pause(SHORT_SLEEP_S)
        return ended

    def cancel(self, handle: Handle) -> None:
        super().cancel(handle)
        if self._bounce is not None:
            self._bounce.transfers.cancel(handle, time.monotonic())

    def poll_interval_s(self) -> float | None:
        bounce, interval = self._bounce, super().poll_interval_s()
        if bounce is None or not bounce.is_busy:
            return interval
        own = bounce.waiting_interval_s()
        return own if interval is None else min(own, interval)

    def serving_interval_s(self) -> float | None:
        if self._bounce is not None and self._bounce.slot_server.is_serving:
            return self._bounce.waiting_interval_s()
        return super().serving_interval_s()

    def close(self) -> None:
        bounce = self._bounce
        if bounce is not None:
            bounce.transfers.stop_all("the transport was closed", time.monotonic())
            deadline = time.monotonic() + DRAIN_TIMEOUT_S
            while len(bounce.transfers) and time.monotonic() < deadline:
                self.poll()
        self._mailbox = None  # from now on, `poll` is that of the plain transport
        super().close()
        if bounce is not None:
            bounce.copier.close()
            bounce.memory.close()
        self._bounce = None

    # -- the bounce buffer --

    def _activate(self, peer: PeerId | str) -> _ActiveBounce:
        """Return the bounce buffer, which the first call allocates for `peer`.

        TransportError, with nothing changed, if there is too little memory.
        """
        if self._bounce is not None:
            return self._bounce
        size_bytes, like, now = self._settings.buffer_bytes, self._regions[0], time.monotonic()
        where = "the host" if like.memory is MemoryKind.DRAM else f"cuda:{like.device}"
        if now < self._retry_at:
            raise TransportError(self._allocation_error)
        try:
            self._bounce = self._allocated(like)
        except TransportError as error:
            self._retry_at = now + ALLOCATION_RETRY_S
            self._allocation_error = (
                f"no bounce buffer of {size_bytes} bytes can be allocated on {where}: small "
                "segments are moved one by one, which is slow; leave more memory free, or set "
                f"bounce_buffer_bytes to a smaller size, or to 0 ({error})"
            )
            _log.warning("%s peer=%s", self._allocation_error, peer)
            raise TransportError(self._allocation_error) from error
        _log.info("bounce buffer of %d bytes allocated on %s peer=%s", size_bytes, where, peer)
        return self._bounce

    def _allocated(self, like: Region) -> _ActiveBounce:
        """Allocate the bounce buffer and register it with NIXL. TransportError if either fails."""
        self._enter_device()
        memory = self._allocate(self._settings.buffer_bytes, like)
        size_bytes = memory.size_bytes
        region = Region(
            "bounce", memory.address, size_bytes, size_bytes, 1, like.memory, like.device
        )
        try:
            copier = copier_for(region)
            if not self.add_memory(region):
                copier.close()
                raise TransportError("NIXL cannot register the memory")
        except TransportError:
            memory.close()
            raise
        on_device = region.memory is MemoryKind.VRAM
        tick_bytes = DEVICE_TICK_BYTES if on_device else self._settings.chunk_bytes
        bounce_buffer = BounceBuffer(
            region.address, size_bytes, copier, self._settings.chunk_bytes, tick_bytes
        )
        own, served_slots = SlotTable.shared_pair(size_bytes)
        metadata = self.identity().metadata  # includes the bounce buffer from now on
        return _ActiveBounce(
            memory,
            copier,
            BounceTransfers(bounce_buffer, own, self, metadata, self._reclaim_s),
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

    def _start(
        self, peer: PeerId, segments: Sequence[Segments], operation: Operation, grant_id: int = 0
    ) -> Handle:
        """Start a transfer through bounce buffers, or else directly.

        The first transfer for bounce buffers allocates ours. If that fails, transfers go directly.
        """
        link, mailbox, now = self._linked(peer), self._mailbox, time.monotonic()
        if mailbox is not None and link.grants_slots:
            self._check_segments(segments, link)
            bounce = None
            if is_fragmented(segments, self._settings):
                with contextlib.suppress(TransportError):  # logged by `_activate`
                    bounce = self._activate(peer)
            if bounce is not None and bounce.transfers.can_request(link.agent, now):
                handle, bounce.active_at = self._next_handle(), now  # an answer is on its way
                bounce.transfers.start(handle, link, operation, segments, self._regions)
                return handle
        return super()._start(peer, segments, operation, grant_id)

    def _forget(self, peer: PeerId, why: str) -> None:
        if self._mailbox is not None and self._bounce is not None:
            now, transfers = time.monotonic(), self._bounce.transfers
            transfers.fail_peer(peer, why, now)
            self._send(self._mailbox, transfers.outgoing.drain(), now)

    # -- messages --

    def _receive(self, mailbox: Mailbox, now: float) -> None:
        for envelope in mailbox.receive():
            for message in envelope.messages:
                self._take(mailbox, envelope.sender, message, now)
            if self._bounce is not None:
                self._bounce.active_at = now
        senders = set() if self._bounce is None else self._bounce.slot_server.senders()
        mailbox.forget_idle(now, senders)

    def _take(self, mailbox: Mailbox, sender: str, message: BounceMessage, now: float) -> None:
        if isinstance(message, SlotRequest):
            mailbox.learn(sender, message.metadata, now)
            try:
                self._activate(sender)
            except TransportError as error:
                # The peer's transfer then goes directly.
                refused = TransferEnded(message.transfer, str(error)[:MAX_WHY])
                self._send(mailbox, [(sender, [refused])], now)
        if self._bounce is None:
            return  # a further message of a transfer that was refused
        if isinstance(message, ToOwner):
            self._bounce.slot_server.receive(sender, message, now)
        else:
            self._bounce.transfers.receive(sender, message, now)

    def _tick(self, mailbox: Mailbox, bounce: _ActiveBounce, now: float) -> None:
        transfers, slot_server = bounce.transfers, bounce.slot_server
        if len(transfers):
            transfers.advance(now)
        self._send(mailbox, transfers.outgoing.drain(), now)
        self._send(mailbox, ((agent, [part]) for agent, part in transfers.parts()), now)
        if slot_server.is_serving:
            slot_server.advance(now)
        self._send(mailbox, slot_server.outgoing.drain(), now)

    def _send(
        self, mailbox: Mailbox, mail: Iterable[tuple[str, list[BounceMessage]]], now: float
    ) -> None:
        for agent, messages in mail:
            try:
                mailbox.send(agent, messages, now)
            except TransportError:
                if self._bounce is not None:
                    self._bounce.slot_server.lost(agent, now)
