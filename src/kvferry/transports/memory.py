"""The `memory` transports: peers in one process, joined by a `MemoryNetwork`. For tests and the
simulator.

Deterministic: frames arrive in the order in which they were sent, and bytes move only in `poll`.
One thread owns each transport; transports of one network may have different owners.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import ConfigError, TransportError
from kvferry.transports.base import (
    MAX_MESSAGE_BYTES,
    ControlEvent,
    Disconnected,
    Handle,
    Operation,
    Received,
    Route,
    Segments,
    TransportOffer,
)
from kvferry.transports.copy.gather import region_view
from kvferry.transports.copy.segments import Bytes
from kvferry.transports.copying import CopyingTransport, Slices
from kvferry.transports.linked import Link
from kvferry.transports.write_grants import Int64Array, grant_not_active
from kvferry.types import MemoryKind, PeerId, Region

MAX_QUEUED_FRAMES = 1000
"""Most frames that wait for one side before `send` raises TransportError."""


@dataclass(slots=True)
class MemoryNetwork:
    """Joins memory transports. When a transport closes, its peers see the same as if a process had
    died.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    control: dict[str, "MemoryControlTransport"] = field(default_factory=dict)
    connections: dict[tuple[str, str], "_MemoryConnection"] = field(default_factory=dict)
    """By the addresses of the dialling and of the dialled side."""
    data: dict[int, "MemoryTransport"] = field(default_factory=dict)
    _last_id: int = 0

    def next_id(self) -> int:
        with self.lock:
            self._last_id += 1
            return self._last_id


@dataclass(slots=True, eq=False)
class _MemoryLink(Link):
    other: "MemoryTransport"

    def problem(self) -> str | None:
        return None if self.other.is_on_network else f"peer {self.peer} has left the memory network"


class MemoryTransport(CopyingTransport[_MemoryLink]):
    """Implements `transports.base.DataTransport` for regions of this process.

    With `supports_write_grants`, peers copy only into granted blocks. A peer copies one slice at a
    time while it holds this side's lock, so any thread can revoke a grant between two slices.
    """

    name = "memory"

    def __init__(self, network: MemoryNetwork, supports_write_grants: bool = False) -> None:
        super().__init__()
        self._network = network
        self._number = network.next_id()
        self.supports_write_grants = supports_write_grants
        self._lock = threading.Lock()
        """Held by each peer that copies a slice into our regions."""

    @property
    def regions(self) -> tuple[Region, ...]:
        return self._regions

    @property
    def views(self) -> list[Bytes]:
        return self._views

    @property
    def is_on_network(self) -> bool:
        return self._number in self._network.data

    def offer(self) -> TransportOffer:
        return TransportOffer(self.name, f"network {id(self._network)}", str(self._number).encode())

    def revoke_writes(self, grant_id: int) -> Handle:
        with self._lock:
            return super().revoke_writes(grant_id)

    def admit(
        self, grant_id: int, addresses: Int64Array, sizes: Int64Array, slices: Slices
    ) -> Slices:
        """Yield a peer's slices into our regions while the grant is active. The peer's thread calls
        this method.
        """
        if not len(addresses):
            return
        if why := self._write_grants.refusal(grant_id, addresses, sizes):
            raise TransportError(f"a write was refused: {why}")
        while True:
            with self._lock, self._write_grants.receiving(grant_id) as is_active:
                if not is_active:
                    raise TransportError(f"a write was refused: {grant_not_active(grant_id)}")
                moved = next(slices, None)
            if moved is None:
                return
            yield moved

    def _open(self, regions: tuple[Region, ...]) -> bool:
        if any(region.memory is not MemoryKind.DRAM for region in regions):
            return False
        self._views = [region_view(region) for region in regions]
        self._network.data[self._number] = self
        return True

    def _connect(
        self, peer: PeerId, offer: TransportOffer, regions: tuple[Region, ...]
    ) -> _MemoryLink:
        number = int(offer.blob) if offer.blob.isdigit() else 0
        other = self._network.data.get(number)
        if other is None or offer.reach != self.offer().reach or other.regions != regions:
            raise TransportError(
                f"peer {peer} is not on this memory network, or not with these regions"
            )
        return _MemoryLink(peer, regions, other)

    def _linked(self, peer: PeerId) -> _MemoryLink:
        if peer in self._links:
            self._is_usable(self._links[peer])
        return super()._linked(peer)

    def _views_of(self, link: _MemoryLink, operation: Operation) -> list[Bytes]:
        return link.other.views

    def _admitted(
        self, slices: Slices, link: _MemoryLink, segments: Sequence[Segments], grant_id: int
    ) -> Slices:
        if not link.other.supports_write_grants:
            return slices
        starts = [
            link.regions[part.remote_region].address + part.remote_offsets for part in segments
        ]
        sizes = [
            np.full(len(part.remote_offsets), part.segment_bytes, np.int64) for part in segments
        ]
        empty = np.empty(0, np.int64)
        return link.other.admit(
            grant_id, np.concatenate([empty, *starts]), np.concatenate([empty, *sizes]), slices
        )

    def _close(self) -> None:
        with self._lock:  # no peer copies a slice now, and none will under a grant
            self._write_grants.clear()
        super()._close()
        self._network.data.pop(self._number, None)


@dataclass(slots=True, eq=False)
class _MemoryConnection:
    """A connection from a dialling side to the side that listens at `address`, if there is one."""

    dialler: "MemoryControlTransport"
    address: str
    identity: bytes
    unsent: deque[ControlEvent] = field(default_factory=deque)
    """Frames sent before a transport listened at the address."""


class MemoryControlTransport:
    """Implements `transports.base.ControlTransport`. Port 0 means the next free port."""

    def __init__(self, network: MemoryNetwork, port: int = 0) -> None:
        self._network = network
        self.address = f"tcp://memory:{port or 50_000 + network.next_id()}"
        self._changed = threading.Condition(network.lock)
        self.events: deque[ControlEvent] = deque()
        self._is_woken = False
        self._is_closed = False
        self.dropped_frames = 0
        """Number of frames that were dropped because they were too long."""
        with network.lock:
            if self.address in network.control:
                raise ConfigError(f"{self.address} is taken; choose another port")
            network.control[self.address] = self
            for connection in network.connections.values():
                if connection.address == self.address:
                    self.events.extend(connection.unsent)

    def send(self, address: str, frame: bytes) -> None:
        with self._network.lock:
            if self._is_closed or not self._is_short(frame):
                return
            connection = self._network.connections.get((self.address, address))
            if connection is None:
                connection = self._dial(address)
            listener = self._network.control.get(address)
            waiting = connection.unsent if listener is None else listener.events
            if len(waiting) >= MAX_QUEUED_FRAMES:
                raise TransportError(
                    f"{address} takes no more frames: {len(waiting)} are waiting for it"
                )
            received = Received(Route(connection.identity), frame)
            if listener is None:
                waiting.append(received)
            else:
                listener.receive(received)

    def reply(self, route: Route, frame: bytes) -> None:
        with self._network.lock:
            if route.dialled:
                if (self.address, route.dialled) in self._network.connections:
                    self.send(route.dialled, frame)
                return
            for connection in self._network.connections.values():
                if connection.identity == route.identity and connection.address == self.address:
                    dialler = connection.dialler
                    if self._is_short(frame) and len(dialler.events) < MAX_QUEUED_FRAMES:
                        dialler.receive(Received(Route(b"", self.address), frame))

    def poll(self, timeout_s: float | None) -> list[ControlEvent]:
        with self._changed:
            self._changed.wait_for(
                lambda: self.events or self._is_woken or self._is_closed, timeout_s
            )
            self._is_woken = False
            arrived, self.events = list(self.events), deque()
            return arrived

    def wake(self) -> None:
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def forget(self, address: str) -> None:
        with self._network.lock:
            self._network.connections.pop((self.address, address), None)

    def lose(self, address: str) -> None:
        """Report that a dialled connection is gone. The other side learns nothing."""
        with self._network.lock:
            self.forget(address)
            self.receive(Disconnected(address))

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            for connection in list(self._network.connections.values()):
                if connection.dialler is self:
                    self.forget(connection.address)
                elif connection.address == self.address:
                    connection.dialler.lose(self.address)
            del self._network.control[self.address]
            self.events.clear()
            self._changed.notify_all()

    def receive(self, event: ControlEvent) -> None:
        self.events.append(event)
        self._changed.notify_all()

    def _dial(self, address: str) -> _MemoryConnection:
        if not address.startswith("tcp://"):
            raise TransportError(f"{address!r} cannot be dialled: it is not tcp://host:port")
        identity = self._network.next_id().to_bytes(8, "big")
        connection = _MemoryConnection(self, address, identity)
        self._network.connections[self.address, address] = connection
        return connection

    def _is_short(self, frame: bytes) -> bool:
        self.dropped_frames += len(frame) > MAX_MESSAGE_BYTES
        return len(frame) <= MAX_MESSAGE_BYTES
