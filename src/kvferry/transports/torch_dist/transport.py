"""The `dist` data transport: moves bytes in process groups of `torch.distributed`, by NCCL between
GPUs and by gloo otherwise.

One thread owns the transport, as with every transport. Each pair of sides has a process group of
two members, an authenticated channel beside it, and one thread on each side
(`torch_dist/initiator.py`, `torch_dist/server.py`). Why, and when it is worth using:
docs/decisions/058-process-groups-as-a-transport.md and docs/p2p-nccl.md.
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from kvferry.errors import TransportError
from kvferry.transports.base import (
    Completion,
    Handle,
    Operation,
    Segments,
    TransportOffer,
    memory_not_registered,
)
from kvferry.transports.copy.segments import (
    batches,
    check_regions,
    check_segments,
    descriptors_between,
)
from kvferry.transports.tcp import wire
from kvferry.transports.tcp.transport import listening_on
from kvferry.transports.torch_dist.channel import DistOffer
from kvferry.transports.torch_dist.group import Backend, nccl_device
from kvferry.transports.torch_dist.initiator import DistTransfer, PeerLink
from kvferry.transports.torch_dist.server import DistServer, StagedWriteGrants
from kvferry.transports.torch_dist.settings import DistSettings
from kvferry.transports.torch_dist.staging import StagingPool
from kvferry.transports.write_grants import check_grant_id
from kvferry.types import MemoryKind, PeerId, Region

POLL_INTERVAL_S = 0.001
CANCELLED = "cancelled"
CLOSE_TIMEOUT_S = 5.0
"""How long `close` waits for all of its threads; the transfer worker waits longer for `close`."""

_log = logging.getLogger(__name__)


class DistTransport:
    """Implements `transports.base.DataTransport`. After `register` the transport listens on a free
    port of `bind_host`.
    """

    def __init__(
        self, bind_host: str, advertised_host: str, settings: DistSettings | None = None
    ) -> None:
        self._bind_host = bind_host.strip("[]")
        self._advertised_host = advertised_host.strip("[]")
        self._settings = settings or DistSettings()
        self._regions: tuple[Region, ...] = ()
        self._offer = DistOffer("", 0, b"")
        self._parts: tuple[DistServer, StagingPool, StagingPool] | None = None
        self._links: dict[PeerId, tuple[PeerLink, tuple[Region, ...]]] = {}
        self._stopped: list[PeerLink] = []
        """Links that are no longer used, whose threads may not have ended yet."""
        self._transfers: dict[Handle, tuple[PeerLink, DistTransfer]] = {}
        self._revocations: set[Handle] = set()
        self._ended: deque[Completion] = deque()
        """Completions that other threads append and the owner's `poll` removes."""
        self._last_handle = 0

    @property
    def name(self) -> str:
        return "dist"

    def register(self, regions: Sequence[Region]) -> bool:
        ranges = wire.Ranges(regions)
        if not ranges.size_bytes or len({(each.memory, each.device) for each in regions}) > 1:
            return False
        token = secrets.token_bytes(wire.TOKEN_BYTES)
        listener = listening_on(self._bind_host, self._advertised_host)
        self._regions = tuple(regions)
        is_device = regions[0].memory is MemoryKind.VRAM
        may_use_nccl = is_device and self._settings.backend == "nccl"
        self._offer = DistOffer(
            self._advertised_host,
            listener.getsockname()[1],
            token,
            nccl_device(regions[0].device) if may_use_nccl else "",
        )
        pool_bytes = (
            self._settings.device_pool_bytes if is_device else self._settings.host_pool_bytes
        )
        # Two pools: peers that we serve and our own transfers never wait for each other's buffers.
        serving, own = (StagingPool(regions[0], pool_bytes // 2) for _ in range(2))
        write_grants = StagedWriteGrants(self._regions, self._ended.append)
        server = DistServer(
            listener, token, ranges, serving, write_grants, self._settings.num_channels
        )
        self._parts = server, serving, own
        server.start()
        return True

    def offer(self) -> TransportOffer:
        self._running()
        return TransportOffer(self.name, "", msgspec.msgpack.encode(self._offer))

    def connect(self, peer: PeerId, offer: TransportOffer, regions: Sequence[Region]) -> None:
        _, _, own = self._running()
        check_regions(regions, peer)
        decoded = _decoded(peer, offer)
        self.disconnect(peer)
        backend = self._backend_with(decoded, peer)
        link = PeerLink(peer, decoded, backend, own, self._settings.num_channels)
        self._links[peer] = link, tuple(regions)
        link.start()

    def disconnect(self, peer: PeerId) -> None:
        self._drop(peer, f"peer {peer} was disconnected")

    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle:
        return self._start(peer, segments, Operation.READ)

    def write(self, peer: PeerId, segments: Sequence[Segments], grant_id: int = 0) -> Handle:
        check_grant_id(grant_id)
        return self._start(peer, segments, Operation.WRITE, grant_id)

    @property
    def supports_write_grants(self) -> bool:
        return True

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        self._running()[0].write_grants.grant_writes(grant_id, blocks)

    def revoke_writes(self, grant_id: int) -> Handle:
        server, _, _ = self._running()
        handle = self._next_handle()
        self._revocations.add(handle)
        server.write_grants.revoke_writes(grant_id, handle)
        return handle

    def poll(self) -> list[Completion]:
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        for completion in ended:
            self._revocations.discard(completion.handle)
            used, transfer = self._transfers.pop(completion.handle, (None, None))
            if used is None or transfer is None or transfer.is_not_granted:
                continue
            link, _ = self._links.get(transfer.peer, (None, ()))
            if completion.error not in (None, CANCELLED) and link is used:
                # The peer may have restarted: the next transfer needs a new handshake.
                self._drop(transfer.peer, str(completion.error))
        self._stopped = [link for link in self._stopped if link.is_alive]
        return ended

    def cancel(self, handle: Handle) -> None:
        _, transfer = self._transfers.get(handle, (None, None))
        if transfer is not None:
            transfer.end(CANCELLED)

    def poll_interval_s(self) -> float | None:
        if self._ended:
            return 0.0
        return POLL_INTERVAL_S if self._transfers or self._revocations else None

    def serving_interval_s(self) -> float | None:
        return None

    def close(self) -> None:
        """Close the transport, once no copy touches the cache.

        A thread that waits for a stopped peer may end a few seconds later, on its own. Until then
        it uses a staging buffer and its sockets, but never the cache.
        """
        for peer in list(self._links):
            self._drop(peer, "the transport was closed")
        if self._parts is not None:
            server, *pools = self._parts
            self._parts = None
            for pool in pools:
                pool.close()
            deadline = time.monotonic() + CLOSE_TIMEOUT_S
            has_ended = [server.close(deadline), *(link.join(deadline) for link in self._stopped)]
            if not all(has_ended):
                _log.warning(
                    "dist transport: a thread still waits for a peer that does not answer; it will "
                    "end on its own and cannot touch the cache"
                )
        self._stopped.clear()
        self._transfers.clear()
        self._revocations.clear()
        self._ended.clear()

    def _running(self) -> tuple[DistServer, StagingPool, StagingPool]:
        if self._parts is None:
            raise memory_not_registered(self.name)
        return self._parts

    def _backend_with(self, offer: DistOffer, peer: PeerId) -> Backend:
        if self._settings.backend == "gloo":
            return Backend.GLOO
        ours, theirs = self._offer.nccl_device, offer.nccl_device
        if not (ours and theirs):
            raise TransportError(
                f"backend is nccl, but {peer if ours else 'this engine'} has no cache on a GPU, no "
                "NCCL, or another backend; set backend to gloo"
            )
        return Backend.NCCL

    def _start(
        self, peer: PeerId, segments: Sequence[Segments], operation: Operation, grant_id: int = 0
    ) -> Handle:
        link, regions = self._links.get(peer, (None, ()))
        if link is None:
            raise TransportError(f"peer {peer} is not connected over dist")
        check_segments(segments, self._regions, regions, peer)
        handle = self._next_handle()
        descriptors = descriptors_between(segments, self._regions, regions)
        cut = batches(descriptors, wire.MAX_BATCH_BYTES, wire.MAX_BATCH_DESCRIPTORS)
        transfer = DistTransfer(handle, peer, operation, grant_id, cut, self._ended.append)
        self._transfers[handle] = link, transfer
        link.add(transfer)
        return handle

    def _next_handle(self) -> Handle:
        self._last_handle += 1
        return Handle(self._last_handle)

    def _drop(self, peer: PeerId, why: str) -> None:
        link, _ = self._links.pop(peer, (None, ()))
        if link is not None:
            link.stop(why)
            self._stopped.append(link)


def _decoded(peer: PeerId, offer: TransportOffer) -> DistOffer:
    try:
        decoded = msgspec.msgpack.decode(offer.blob, type=DistOffer)
    except msgspec.MsgspecError as error:
        raise TransportError(
            f"the dist offer of {peer} cannot be understood ({error}); do both sides run the same "
            "kvferry?"
        ) from error
    if not decoded.host or not 0 < decoded.port < 1 << 16 or len(decoded.token) != wire.TOKEN_BYTES:
        raise TransportError(
            f"the dist offer of {peer} names no address that can be dialled; drop this peer"
        )
    return decoded
