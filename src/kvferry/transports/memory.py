"""The `memory` transports: peers in one process, joined by a `MemoryNetwork`. For tests and the
simulator.

Deterministic: frames arrive in the order in which they were sent, and bytes move only in `poll`.
One thread owns each transport; transports of one network may have different owners.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvferry.errors import ConfigError, TransportError
from kvferry.transports.base import (
    MAX_MESSAGE_BYTES,
    Completion,
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
from kvferry.transports.copy.queue import CopyQueue, Slices
from kvferry.transports.copy.segments import Bytes, check_segments
from kvferry.transports.write_grants import (
    GrantedBlocks,
    Int64Array,
    WriteGrantTable,
    check_grant_id,
    grant_not_active,
    write_grants_unsupported,
    write_outside_grant,
)
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
    data: dict[int, "MemoryTransport"] = field(default_factory=dict)
    _last_id: int = 0

    def next_id(self) -> int:
        with self.lock:
            self._last_id += 1
            return self._last_id


class MemoryTransport:
    """Implements `transports.base.DataTransport` for regions of this process.

    With `supports_write_grants`, peers copy only into granted blocks. A peer copies one slice at a
    time while it holds this side's lock, so any thread can revoke a grant between two slices.
    """

    def __init__(self, network: MemoryNetwork, supports_write_grants: bool = False) -> None:
        self._network = network
        self._number = network.next_id()
        self._supports_write_grants = supports_write_grants
        self._granted = WriteGrantTable(())
        self._lock = threading.Lock()
        """Guards `_granted` and every slice that a peer copies into our regions."""
        self._regions: tuple[Region, ...] = ()
        self._views: list[Bytes] = []
        self._peers: dict[PeerId, MemoryTransport] = {}
        self._queue = CopyQueue()

    @property
    def name(self) -> str:
        return "memory"

    @property
    def regions(self) -> tuple[Region, ...]:
        return self._regions

    @property
    def views(self) -> list[Bytes]:
        return self._views

    @property
    def is_on_network(self) -> bool:
        return self._number in self._network.data

    def register(self, regions: Sequence[Region]) -> bool:
        if any(region.memory is not MemoryKind.DRAM for region in regions):
            return False
        self._regions = tuple(regions)
        self._granted = WriteGrantTable(self._regions)
        self._views = [region_view(region) for region in regions]
        self._network.data[self._number] = self
        return True

    def offer(self) -> TransportOffer:
        return TransportOffer(self.name, f"network {id(self._network)}", str(self._number).encode())

    def connect(self, peer: PeerId, offer: TransportOffer, regions: Sequence[Region]) -> None:
        number = int(offer.blob) if offer.blob.isdigit() else 0
        other = self._network.data.get(number)
        if other is None or offer.reach != self.offer().reach or other.regions != tuple(regions):
            raise TransportError(
                f"peer {peer} is not on this memory network, or not with these regions"
            )
        self.disconnect(peer)
        self._peers[peer] = other

    def disconnect(self, peer: PeerId) -> None:
        self._queue.fail_peer(peer, f"peer {peer} was disconnected")
        self._peers.pop(peer, None)

    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle:
        return self._start(peer, segments, Operation.READ)

    def write(self, peer: PeerId, segments: Sequence[Segments], grant_id: int = 0) -> Handle:
        check_grant_id(grant_id)
        return self._start(peer, segments, Operation.WRITE, grant_id)

    @property
    def supports_write_grants(self) -> bool:
        return self._supports_write_grants

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        if not self._supports_write_grants:
            raise write_grants_unsupported(self.name)
        with self._lock:
            self._granted.grant_writes(grant_id, blocks)

    def revoke_writes(self, grant_id: int) -> Handle:
        if not self._supports_write_grants:
            raise write_grants_unsupported(self.name)
        with self._lock:
            self._granted.remove(grant_id)
        # A peer copies only under the lock, so no byte lands after the removal: end at once.
        return self._queue.end_at_once()

    def admit(
        self, grant_id: int, addresses: Int64Array, sizes: Int64Array, slices: Slices
    ) -> Slices:
        """Yield a peer's slices into our regions while the grant is active. The peer's thread calls
        this method.
        """
        checked: GrantedBlocks | None = None
        while len(addresses):
            with self._lock:
                granted = self._granted.get(grant_id)
                if granted is None:
                    raise TransportError(f"a write was refused: {grant_not_active(grant_id)}")
                # Compare the write with the granted blocks once, not for every slice.
                if granted is not checked and not granted.covers(addresses, sizes):
                    raise TransportError(f"a write was refused: {write_outside_grant(grant_id)}")
                checked = granted
                moved = next(slices, None)
            if moved is None:
                return
            yield moved

    def poll(self) -> list[Completion]:
        self._queue.advance(self._is_alive)
        return self._queue.take_ended()

    def cancel(self, handle: Handle) -> None:
        self._queue.cancel(handle)

    def poll_interval_s(self) -> float | None:
        return 0.0 if len(self._queue) else None

    def serving_interval_s(self) -> float | None:
        return None

    def close(self) -> None:
        self._network.data.pop(self._number, None)
        with self._lock:
            self._granted.clear()
        self._queue.clear()
        self._peers.clear()
        self._views = []
        self._regions = ()

    def _start(
        self,
        peer: PeerId,
        segments: Sequence[Segments],
        operation: Operation,
        grant_id: int = 0,
    ) -> Handle:
        other = self._peers.get(peer)
        if other is None or not self._is_alive(peer):
            raise TransportError(f"peer {peer} is not connected over memory")
        remote, views = other.regions, other.views
        check_segments(segments, self._regions, remote, peer)
        if operation is Operation.READ or not other.supports_write_grants:
            return self._queue.start(peer, segments, self._views, views, operation)
        empty = np.empty(0, np.int64)
        addresses = np.concatenate(
            [
                empty,
                *(remote[part.remote_region].address + part.remote_offsets for part in segments),
            ]
        )
        sizes = np.concatenate(
            [
                empty,
                *(
                    np.full(len(part.remote_offsets), part.segment_bytes, np.int64)
                    for part in segments
                ),
            ]
        )
        return self._queue.start(
            peer,
            segments,
            self._views,
            views,
            operation,
            partial(other.admit, grant_id, addresses, sizes),
        )

    def _is_alive(self, peer: PeerId) -> bool:
        if self._peers[peer].is_on_network:
            return True
        self._queue.fail_peer(peer, f"peer {peer} has left the memory network")
        self._peers.pop(peer)
        return False


@dataclass(slots=True, eq=False)
class _MemoryConnection:
    """A connection from a dialling side to a listening side. Frames wait in `unsent` until a
    transport listens at the address.
    """

    dialler: "MemoryControlTransport"
    address: str
    identity: bytes
    listener: "MemoryControlTransport | None" = None
    unsent: deque[bytes] = field(default_factory=deque)


class MemoryControlTransport:
    """Implements `transports.base.ControlTransport`. Port 0 means the next free port."""

    def __init__(self, network: MemoryNetwork, port: int = 0) -> None:
        self._network = network
        self._address = f"tcp://memory:{port or 50_000 + network.next_id()}"
        self._changed = threading.Condition(network.lock)
        self._events: deque[ControlEvent] = deque()
        self._dialled: dict[str, _MemoryConnection] = {}
        self._accepted: dict[bytes, _MemoryConnection] = {}
        self._is_woken = False
        self._is_closed = False
        self._dropped_frames = 0
        self._listen()

    @property
    def address(self) -> str:
        return self._address

    @property
    def dropped_frames(self) -> int:
        """Number of frames that were dropped because they were too long."""
        return self._dropped_frames

    def send(self, address: str, frame: bytes) -> None:
        with self._changed:
            if self._is_closed or not self._is_short(frame):
                return
            connection = self._dialled.get(address) or self._dial(address)
            waiting = (
                len(connection.unsent)
                if connection.listener is None
                else connection.listener.queued()
            )
            if waiting >= MAX_QUEUED_FRAMES:
                raise TransportError(
                    f"{address} takes no more frames: {waiting} are waiting for it"
                )
            connection.unsent.append(frame)
            _deliver(connection)

    def reply(self, route: Route, frame: bytes) -> None:
        if route.dialled:
            with self._changed:
                if route.dialled in self._dialled:
                    self.send(route.dialled, frame)
            return
        with self._changed:
            connection = self._accepted.get(route.identity)
            if (
                connection is not None
                and self._is_short(frame)
                and connection.dialler.queued() < MAX_QUEUED_FRAMES
            ):
                connection.dialler.receive(Received(Route(b"", connection.address), frame))

    def poll(self, timeout_s: float | None) -> list[ControlEvent]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._events or self._is_woken or self._is_closed, timeout_s
            )
            self._is_woken = False
            arrived, self._events = list(self._events), deque()
            return arrived

    def wake(self) -> None:
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def forget(self, address: str) -> None:
        with self._changed:
            connection = self._dialled.pop(address, None)
            if connection is not None and connection.listener is not None:
                connection.listener.hang_up(connection)

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            for address in list(self._dialled):
                self.forget(address)
            del self._network.control[self._address]
            for connection in list(self._accepted.values()):
                connection.dialler.lose(connection)
            self._accepted.clear()
            self._events.clear()
            self._changed.notify_all()

    # -- calls between transports of one network; the caller holds the network's lock --

    def accept(self, connection: _MemoryConnection) -> None:
        connection.listener = self
        self._accepted[connection.identity] = connection

    def hang_up(self, connection: _MemoryConnection) -> None:
        self._accepted.pop(connection.identity, None)

    def lose(self, connection: _MemoryConnection) -> None:
        if self._dialled.pop(connection.address, None) is not None:
            self.receive(Disconnected(connection.address))

    def receive(self, event: ControlEvent) -> None:
        self._events.append(event)
        self._changed.notify_all()

    def queued(self) -> int:
        return len(self._events)

    def connections(self) -> list[_MemoryConnection]:
        return list(self._dialled.values())

    # -- helpers --

    def _listen(self) -> None:
        with self._changed:
            if self._address in self._network.control:
                raise ConfigError(f"{self._address} is taken; choose another port")
            self._network.control[self._address] = self
            # Deliver the frames that were sent to this address before this side listened.
            for transport in list(self._network.control.values()):
                for connection in transport.connections():
                    if connection.address == self._address:
                        _deliver(connection, self)

    def _dial(self, address: str) -> _MemoryConnection:
        if not address.startswith("tcp://"):
            raise TransportError(f"{address!r} cannot be dialled: it is not tcp://host:port")
        connection = _MemoryConnection(self, address, self._network.next_id().to_bytes(8, "big"))
        self._dialled[address] = connection
        listener = self._network.control.get(address)
        if listener is not None:
            listener.accept(connection)
        return connection

    def _is_short(self, frame: bytes) -> bool:
        self._dropped_frames += len(frame) > MAX_MESSAGE_BYTES
        return len(frame) <= MAX_MESSAGE_BYTES


def _deliver(connection: _MemoryConnection, newcomer: MemoryControlTransport | None = None) -> None:
    if newcomer is not None:
        newcomer.accept(connection)
    while connection.listener is not None and connection.unsent:
        connection.listener.receive(
            Received(Route(connection.identity), connection.unsent.popleft())
        )
