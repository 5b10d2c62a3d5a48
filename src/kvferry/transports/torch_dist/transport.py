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
from collections.abc import Sequence

import msgspec

from kvferry.errors import TransportError
from kvferry.transports.base import Operation, Segments, TransportOffer
from kvferry.transports.linked import LinkedTransport
from kvferry.transports.tcp import wire
from kvferry.transports.tcp.loop import listening_on
from kvferry.transports.torch_dist.channel import DistOffer
from kvferry.transports.torch_dist.group import Backend, nccl_device
from kvferry.transports.torch_dist.initiator import DistLink, DistTransfer
from kvferry.transports.torch_dist.server import DistServer
from kvferry.transports.torch_dist.settings import DistSettings
from kvferry.transports.torch_dist.staging import StagingPool
from kvferry.types import MemoryKind, PeerId, Region

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
        self._stopped: list[DistLink] = []
        """Links that are no longer used, whose threads may not have ended yet."""
        self._offer: DistOffer
        self._server: DistServer
        self._pools: tuple[StagingPool, StagingPool]
        """For peers that we serve, and for our own transfers: they never wait for each other's
        buffers.
        """

    def _open(self, regions: tuple[Region, ...]) -> bool:
        ranges = wire.Ranges(regions)
        if not ranges.size_bytes or len({(each.memory, each.device) for each in regions}) > 1:
            return False
        token, settings = secrets.token_bytes(wire.TOKEN_BYTES), self._settings
        listener = listening_on(self._bind_host, self._advertised_host, self.name)
        is_device = regions[0].memory is MemoryKind.VRAM
        may_use_nccl = is_device and settings.backend == "nccl"
        self._offer = DistOffer(
            self._advertised_host,
            listener.getsockname()[1],
            token,
            nccl_device(regions[0].device) if may_use_nccl else "",
        )
        pool_bytes = settings.device_pool_bytes if is_device else settings.host_pool_bytes
        serving, own = (StagingPool(regions[0], pool_bytes // 2) for _ in range(2))
        self._pools = serving, own
        self._server = DistServer(
            listener, token, ranges, serving, self._write_grants, settings.num_channels
        )
        self._server.start()
        return True

    def offer(self) -> TransportOffer:
        self._check_open()
        return TransportOffer(self.name, "", msgspec.msgpack.encode(self._offer))

    def _connect(
        self, peer: PeerId, offer: TransportOffer, regions: tuple[Region, ...]
    ) -> DistLink:
        decoded = wire.checked_offer(peer, offer, DistOffer)
        backend = self._backend_with(decoded, peer)
        _, own = self._pools
        link = DistLink(peer, regions, decoded, backend, own, self._settings.num_channels)
        link.start()
        return link

    def _post(
        self, link: DistLink, segments: Sequence[Segments], operation: Operation, grant_id: int
    ) -> DistTransfer:
        batches = self._cut(segments, link, wire.MAX_BATCH_BYTES, wire.MAX_BATCH_DESCRIPTORS)
        transfer = DistTransfer(
            self._next_handle(),
            link,
            operation,
            grant_id,
            batches=batches,
            report=self._ended.append,
        )
        link.add(transfer)
        return transfer

    def _progress(self) -> None:
        self._stopped = [link for link in self._stopped if link.is_alive]

    def _stop(self, transfer: DistTransfer, why: str) -> None:
        transfer.end(why)

    def _disconnect(self, link: DistLink, why: str) -> None:
        link.stop(why)
        self._stopped.append(link)

    def _close(self) -> None:
        """Close the transport, once no copy touches the cache.

        A thread that waits for a stopped peer may end a few seconds later, on its own. Until then
        it uses a staging buffer and its sockets, but never the cache.
        """
        for pool in self._pools:
            pool.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        has_ended = [self._server.close(deadline), *(link.join(deadline) for link in self._stopped)]
        if not all(has_ended):
            _log.warning(
                "dist transport: a thread still waits for a peer that does not answer; it will "
                "end on its own and cannot touch the cache"
            )
        self._stopped.clear()

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
