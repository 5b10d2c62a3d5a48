"""The `tcp` data transport: moves bytes between hosts without RDMA, over plain connections.

One thread owns the transport, as with every transport. A second thread (`tcp/loop.py`) owns the
sockets: it serves peers without help from the owner, and moves our transfers. The messages on a
connection: `tcp/wire.py`. Why not NIXL over TCP:
docs/decisions/023-a-tcp-transport-of-our-own.md.
"""

import secrets
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec
import numpy as np

from kvferry.transports.base import Completion, Operation, Segments, TransportOffer
from kvferry.transports.copy.gather import AddressedMemory
from kvferry.transports.linked import LinkedTransport
from kvferry.transports.tcp import wire
from kvferry.transports.tcp.client import TcpBatch, TcpLink, TcpTransfer
from kvferry.transports.tcp.loop import SocketLoop, listening_on
from kvferry.transports.tcp.server import TcpServer
from kvferry.types import MemoryKind, PeerId, Region


class TcpTransport(LinkedTransport[TcpLink, TcpTransfer]):
    """Implements `transports.base.DataTransport`. After `register` the transport listens on a free
    port of `bind_host`.
    """

    name = "tcp"
    supports_write_grants = True

    def __init__(self, bind_host: str, advertised_host: str) -> None:
        super().__init__()
        self._bind_host = bind_host.strip("[]")
        self._advertised_host = advertised_host.strip("[]")
        self._token = secrets.token_bytes(wire.TOKEN_BYTES)
        self._port = 0
        self._memory: AddressedMemory
        self._loop: SocketLoop
        self._server: TcpServer

    def _open(self, regions: tuple[Region, ...]) -> bool:
        ranges = wire.Ranges(regions)
        if any(region.memory is not MemoryKind.DRAM for region in regions) or not ranges.size_bytes:
            return False
        listener = listening_on(self._bind_host, self._advertised_host, self.name)
        self._port = listener.getsockname()[1]
        self._memory = AddressedMemory(ranges.first, ranges.size_bytes)
        self._loop = SocketLoop("kvferry-tcp")
        self._server = TcpServer(self._loop, self._token, ranges, self._memory, self._write_grants)
        self._loop.start(listener, self._server.accept)
        return True

    def offer(self) -> TransportOffer:
        self._check_open()
        offer = wire.TcpOffer(self._advertised_host, self._port, self._token)
        return TransportOffer(self.name, "", msgspec.msgpack.encode(offer))

    def _connect(self, peer: PeerId, offer: TransportOffer, regions: tuple[Region, ...]) -> TcpLink:
        decoded = wire.checked_offer(peer, offer, wire.TcpOffer)
        link = TcpLink(peer, regions, decoded, self._loop, self._ended.append)
        self._loop.call(link.open)
        return link

    def _post(
        self, link: TcpLink, segments: Sequence[Segments], operation: Operation, grant_id: int
    ) -> TcpTransfer:
        batches = self._batches(segments, link)
        transfer = TcpTransfer(self._next_handle(), link, operation, grant_id, batches=batches)
        self._loop.call(partial(link.start, transfer))
        return transfer

    def _progress(self) -> None:
        failure = self._loop.failure
        if failure is None or self._ended:
            return
        # The socket thread ended every transfer it knew of before it set `failure`. The transfers
        # that are left never reached that thread.
        for transfer in self._transfers.values():
            transfer.stop(f"the tcp transport has stopped: {failure}")
            self._ended.append(transfer.completion())
        # Only that thread receives bytes, so no byte can land under a revoked grant id.
        self._ended.extend(Completion(handle, None) for handle in self._revocations)

    def _stop(self, transfer: TcpTransfer, why: str) -> None:
        self._loop.call(partial(transfer.link.stop, transfer, why))

    def _disconnect(self, link: TcpLink, why: str) -> None:
        self._loop.call(partial(link.drop, why))

    def _interrupt_writes(self, grant_id: int) -> None:
        self._loop.call(partial(self._server.reject_writers, grant_id))

    def _close(self) -> None:
        self._loop.close()

    def _batches(self, segments: Sequence[Segments], link: TcpLink) -> Iterator[TcpBatch]:
        """The loop's thread computes each batch just before it sends the request for the batch."""
        for batch in self._cut(segments, link, wire.MAX_BATCH_BYTES, wire.MAX_BATCH_DESCRIPTORS):
            rows = np.stack((batch.remote, batch.size_bytes), axis=1).astype("<i8")
            views = self._memory.views(batch.local.tolist(), batch.size_bytes.tolist())
            yield TcpBatch(rows, views)
