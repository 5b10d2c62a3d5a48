"""The `tcp` data transport: moves bytes between hosts without RDMA, over plain connections.

One thread owns the transport, as with every transport. A second thread (`tcp/loop.py`) owns the
sockets: it serves peers without help from the owner, and moves our transfers. The messages on a
connection: `tcp/wire.py`. Why not NIXL over TCP:
docs/decisions/023-a-tcp-transport-of-our-own.md.
"""

import secrets
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec
import numpy as np

from kvferry.errors import ConfigError, TransportError
from kvferry.transports.base import (
    Completion,
    Handle,
    Operation,
    Segments,
    TransportOffer,
    memory_not_registered,
)
from kvferry.transports.copy.gather import AddressedMemory
from kvferry.transports.copy.segments import (
    batches,
    check_regions,
    check_segments,
    descriptors_between,
)
from kvferry.transports.tcp import wire
from kvferry.transports.tcp.client import Dialler, TcpBatch, TcpLink, TcpTransfer, numeric_addresses
from kvferry.transports.tcp.loop import SocketLoop
from kvferry.transports.tcp.server import TcpServer, TcpWriteGrants
from kvferry.transports.write_grants import check_grant_id
from kvferry.types import MemoryKind, PeerId, Region

POLL_INTERVAL_S = 0.001
BACKLOG = 512
CANCELLED = "cancelled"


class TcpTransport:
    """Implements `transports.base.DataTransport`. After `register` the transport listens on a free
    port of `bind_host`.
    """

    def __init__(self, bind_host: str, advertised_host: str) -> None:
        self._bind_host = bind_host.strip("[]")
        self._advertised_host = advertised_host.strip("[]")
        self._token = secrets.token_bytes(wire.TOKEN_BYTES)
        self._regions: tuple[Region, ...] = ()
        self._memory: AddressedMemory | None = None
        self._port = 0
        self._links: dict[PeerId, tuple[TcpLink, tuple[Region, ...]]] = {}
        self._transfers: dict[Handle, TcpTransfer] = {}
        self._ended: deque[Completion] = deque()
        """Completions that the loop's thread appends and the owner's `poll` removes."""
        self._last_handle = 0
        self._parts: tuple[SocketLoop, Dialler, TcpWriteGrants] | None = None
        self._revocations: set[Handle] = set()
        """Revocations whose completion `poll` has not returned yet."""

    @property
    def name(self) -> str:
        return "tcp"

    def register(self, regions: Sequence[Region]) -> bool:
        ranges = wire.Ranges(regions)
        if any(region.memory is not MemoryKind.DRAM for region in regions) or not ranges.size_bytes:
            return False
        listener = listening_on(self._bind_host, self._advertised_host)
        self._port = listener.getsockname()[1]
        self._memory = AddressedMemory(ranges.first, ranges.size_bytes)
        self._regions = tuple(regions)
        loop = SocketLoop("kvferry-tcp")
        write_grants = TcpWriteGrants(loop, self._regions, self._ended.append)
        self._parts = loop, Dialler(loop, self._ended.append), write_grants
        loop.start(
            listener, TcpServer(loop, self._token, ranges, self._memory, write_grants).accept
        )
        return True

    def offer(self) -> TransportOffer:
        self._running()
        return TransportOffer(
            self.name,
            "",
            msgspec.msgpack.encode(wire.TcpOffer(self._advertised_host, self._port, self._token)),
        )

    def connect(self, peer: PeerId, offer: TransportOffer, regions: Sequence[Region]) -> None:
        loop, dialler, _ = self._running()
        check_regions(regions, peer)
        decoded = _decoded(peer, offer)
        self.disconnect(peer)
        link = TcpLink(peer, decoded, addresses=deque(numeric_addresses(decoded)))
        self._links[peer] = link, tuple(regions)
        loop.call(partial(dialler.open, link))

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
        self._running()[2].grant_writes(grant_id, blocks)

    def revoke_writes(self, grant_id: int) -> Handle:
        _, _, write_grants = self._running()
        handle = self._next_handle()
        self._revocations.add(handle)
        write_grants.revoke_writes(grant_id, handle)
        return handle

    def poll(self) -> list[Completion]:
        failure = self._parts[0].failure if self._parts else None
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        if failure is not None and not ended:
            # The socket thread ended every transfer it knew of before it set `failure`. The
            # transfers that are left never reached that thread.
            ended = [
                transfer.completion(f"the tcp transport has stopped: {failure}")
                for transfer in self._transfers.values()
            ]
            # Only that thread receives bytes, so no byte can land under a revoked grant id.
            ended += [Completion(handle, None, 0, 0, 0.0, 0.0) for handle in self._revocations]
        for completion in ended:
            self._revocations.discard(completion.handle)
            transfer = self._transfers.pop(completion.handle, None)
            if transfer is None or transfer.is_not_granted:
                continue
            link, _ = self._links.get(transfer.link.peer, (None, ()))
            if completion.error not in (None, CANCELLED) and link is transfer.link:
                # The peer may have restarted: the next transfer needs a new handshake.
                self._drop(transfer.link.peer, str(completion.error))
        return ended

    def cancel(self, handle: Handle) -> None:
        transfer = self._transfers.get(handle)
        if transfer is not None and self._parts is not None:
            loop, dialler, _ = self._parts
            loop.call(partial(dialler.cancel, transfer.link, handle))

    def poll_interval_s(self) -> float | None:
        if self._ended:
            return 0.0
        return POLL_INTERVAL_S if self._transfers or self._revocations else None

    def serving_interval_s(self) -> float | None:
        return None

    def close(self) -> None:
        if self._parts is not None:
            self._parts[0].close()
        self._parts = self._memory = None
        self._links.clear()
        self._transfers.clear()
        self._revocations.clear()
        self._ended.clear()

    def _running(self) -> tuple[SocketLoop, Dialler, TcpWriteGrants]:
        if self._parts is None:
            raise memory_not_registered(self.name)
        return self._parts

    def _start(
        self,
        peer: PeerId,
        segments: Sequence[Segments],
        operation: Operation,
        grant_id: int = 0,
    ) -> Handle:
        link, regions = self._links.get(peer, (None, ()))
        if link is None or self._parts is None or self._memory is None:
            raise TransportError(f"peer {peer} is not connected over tcp")
        check_segments(segments, self._regions, regions, peer)
        handle = self._next_handle()
        transfer = TcpTransfer(
            handle,
            link,
            operation,
            self._batches(segments, regions, self._memory),
            time.perf_counter(),
            grant_id,
        )
        self._transfers[handle] = transfer
        loop, dialler, _ = self._parts
        loop.call(partial(dialler.start, transfer))
        return handle

    def _next_handle(self) -> Handle:
        self._last_handle += 1
        return Handle(self._last_handle)

    def _batches(
        self, segments: Sequence[Segments], remote: Sequence[Region], memory: AddressedMemory
    ) -> Iterator[TcpBatch]:
        """Cut a transfer into batches. The loop's thread computes each batch just before it sends
        the request for the batch.
        """
        for batch in batches(
            descriptors_between(segments, self._regions, remote),
            wire.MAX_BATCH_BYTES,
            wire.MAX_BATCH_DESCRIPTORS,
        ):
            rows = np.stack((batch.remote, batch.size_bytes), axis=1).astype("<i8")
            yield TcpBatch(rows, memory.views(batch.local.tolist(), batch.size_bytes.tolist()))

    def _drop(self, peer: PeerId, why: str) -> None:
        link, _ = self._links.pop(peer, (None, ()))
        if link is not None:
            loop, dialler, _ = self._running()
            loop.call(partial(dialler.drop, link, why))


def listening_on(host: str, advertised_host: str) -> socket.socket:
    """Open a listening socket. A wildcard listens on IPv4 and IPv6 if the advertised address is an
    IPv6 address.
    """
    if host in ("", "*"):
        host = "::" if ":" in advertised_host else "0.0.0.0"
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            if host == "::":
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"the tcp transport cannot listen on {host} ({error}); name an address of this host"
        ) from error
    return listener


def _decoded(peer: PeerId, offer: TransportOffer) -> wire.TcpOffer:
    try:
        decoded = msgspec.msgpack.decode(offer.blob, type=wire.TcpOffer)
    except msgspec.MsgspecError as error:
        raise TransportError(
            f"the tcp offer of {peer} cannot be understood ({error}); do both sides run the same "
            "kvferry?"
        ) from error
    if not decoded.host or not 0 < decoded.port < 1 << 16 or len(decoded.token) != wire.TOKEN_BYTES:
        raise TransportError(
            f"the tcp offer of {peer} names no address that can be dialled; drop this peer"
        )
    return decoded
