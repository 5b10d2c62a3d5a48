"""The `dist` data transport: moves bytes in process groups of `torch.distributed`, by NCCL between
GPUs and by gloo otherwise.

One thread owns the transport, as with every transport. Each pair of sides has a process group of
two members, an authenticated channel beside it, and one thread on each side
(`torch_dist/members.py`). Why, and when it is worth using:
docs/decisions/058-process-groups-as-a-transport.md and docs/p2p-nccl.md.
"""

import logging
import secrets
import socket
import time
from collections.abc import Sequence

import msgspec

from kvferry.errors import TransportError
from kvferry.transports.base import Operation, Segments, TransportOffer
from kvferry.transports.linked import LinkedTransport
from kvferry.transports.tcp import wire
from kvferry.transports.tcp.loop import SocketLoop, listening_on
from kvferry.transports.torch_dist.channel import DistOffer, DistSettings
from kvferry.transports.torch_dist.group import Backend, nccl_device
from kvferry.transports.torch_dist.members import DistLink, DistTransfer, ServedPeer
from kvferry.transports.torch_dist.staging import StagingPool
from kvferry.types import MemoryKind, PeerId, Region

MAX_PEERS = 256
MAX_UNAUTHENTICATED = 64
"""Most connections that have not proved that they know the token; the oldest is dropped."""
CLOSE_TIMEOUT_S = 5.0
"""How long `close` waits for all of its threads; the transfer worker waits longer for `close`."""

_log = logging.getLogger(__name__)


class DistTransport(LinkedTransport[DistLink, DistTransfer]):
    """Implements `transports.base.DataTransport`. After `register` the transport listens on a free
    port of `bind_host`.
    """

    name = "dist"
    supports_write_grants = True

    def __init__(
        self, bind_host: str, advertised_host: str, settings: DistSettings | None = None
    ) -> None:
        super().__init__()
        self._bind_host = bind_host.strip("[]")
        self._advertised_host = advertised_host.strip("[]")
        self._settings = settings or DistSettings()
        self._ranges: wire.Ranges
        self._offer: DistOffer
        self._pools: tuple[StagingPool, ...] = ()
        """For peers that we serve, and for our own transfers: they never wait for each other's
        buffers.
        """
        self._loop: SocketLoop
        self._served: list[ServedPeer] = []
        """In the order of their arrival. The loop's thread owns the list until the loop is closed.
        """
        self._dialled: list[DistLink] = []

    def _open(self, regions: tuple[Region, ...]) -> bool:
        self._ranges = wire.Ranges(regions)
        if not self._ranges.size_bytes or len({(each.memory, each.device) for each in regions}) > 1:
            return False
        listener = listening_on(self._bind_host, self._advertised_host, self.name)
        settings, is_device = self._settings, regions[0].memory is MemoryKind.VRAM
        may_use_nccl = is_device and settings.backend == "nccl"
        self._offer = DistOffer(
            self._advertised_host,
            listener.getsockname()[1],
            secrets.token_bytes(wire.TOKEN_BYTES),
            nccl_device(regions[0].device) if may_use_nccl else "",
        )
        pool_bytes = settings.device_pool_bytes if is_device else settings.host_pool_bytes
        self._pools = tuple(StagingPool(regions[0], pool_bytes // 2) for _ in range(2))
        self._loop = SocketLoop("kvferry-dist-accept")
        self._loop.start(listener, self._accept)
        return True

    def offer(self) -> TransportOffer:
        self._check_open()
        return TransportOffer(self.name, "", msgspec.msgpack.encode(self._offer))

    def _accept(self, connection: socket.socket) -> None:
        """On the loop's thread."""
        self._served = [each for each in self._served if each.is_alive()]
        strangers = [each for each in self._served if not (each.is_known or each.is_closed)]
        if sum(each.is_known for each in self._served) >= MAX_PEERS:
            connection.close()
            return
        # Drop the oldest: strangers that never send a proof must not keep peers out.
        if len(strangers) >= MAX_UNAUTHENTICATED:
            strangers[0].close()
        peer = ServedPeer(
            connection,
            self._offer.token,
            self._ranges,
            self._write_grants,
            pool=self._pools[0],
            num_channels=self._settings.num_channels,
        )
        try:
            peer.start()
        except RuntimeError as error:
            _log.warning("a peer cannot be served: no thread can be started error=%s", error)
            connection.close()
            return
        self._served.append(peer)

    def _connect(
        self, peer: PeerId, offer: TransportOffer, regions: tuple[Region, ...]
    ) -> DistLink:
        decoded = wire.checked_offer(peer, offer, DistOffer)
        link = DistLink(
            peer,
            regions,
            decoded,
            self._backend_with(decoded, peer),
            pool=self._pools[1],
            num_channels=self._settings.num_channels,
        )
        link.start()
        self._dialled = [link, *(each for each in self._dialled if each.is_alive())]
        return link

    def _post(
        self, link: DistLink, segments: Sequence[Segments], operation: Operation, grant_id: int
    ) -> DistTransfer:
        batches = self._cut(segments, link, wire.MAX_BATCH_BYTES, wire.MAX_BATCH_DESCRIPTORS)
        transfer = DistTransfer(self._next_handle(), link, operation, grant_id, batches=batches)
        link.waiting.put(transfer)
        return transfer

    def _progress(self) -> None:
        for transfer in self._transfers.values():
            self._is_usable(transfer.link)
        self._ended.extend(each.completion() for each in self._transfers.values() if each.has_ended)

    def _close(self) -> None:
        """Close the transport, once no copy touches the cache.

        A thread that waits for a stopped peer may end a few seconds later, on its own. Until then
        it uses a staging buffer and its sockets, but never the cache.
        """
        for pool in self._pools:
            pool.close()
        self._loop.close()
        for peer in self._served:
            peer.close()
        threads = (*self._served, *self._dialled)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            _log.warning(
                "dist transport: a thread still waits for a peer that does not answer; it will "
                "end on its own and cannot touch the cache"
            )
        self._pools, self._served, self._dialled = (), [], []

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
