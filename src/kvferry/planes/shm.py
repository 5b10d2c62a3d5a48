"""The `shm` data transport: a peer on this host maps our cache, and we map its, and each copies what it wants by itself.

Owned by one thread. A peer's file is opened through /proc/PID/fd and used only after it has proved to be the one offered: same life of the
same process, same file, sealed against shrinking. It is mapped for reading; for writing only when something is written.
"""

import fcntl
import mmap
import os
import stat
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from kvferry.errors import LocalProtocolError, TransportError
from kvferry.planes.bounds import check_regions, check_segments
from kvferry.planes.copiers import Copier, fastest_copier
from kvferry.planes.copying import CopyQueue
from kvferry.planes.fabric import host_identity
from kvferry.planes.gather import CopyDirection
from kvferry.planes.lending import write_grants_unsupported
from kvferry.planes.process import ProcessIncarnation, start_ticks
from kvferry.planes.runs import Bytes
from kvferry.planes.shared_memory import SharedMemory, SharedMemoryAllocator
from kvferry.ports.data import Completion, Handle, Segments, TransportOffer
from kvferry.types import MemoryKind, PeerId, Region

__all__ = ["SharedMemory", "SharedMemoryAllocator", "ShmTransport"]

MAX_INT = (1 << 31) - 1
MAX_ADDRESS = (1 << 63) - 1
DEATH_CHECK_S = 2.0
"""How often peers that nothing is read from are looked at; a dead one's mapping would hold its whole cache in memory."""


class _ShmOffer(msgspec.Struct, frozen=True, array_like=True):
    """How to reach one SharedMemory. `address` is where its owner has mapped it: regions are named by that."""

    pid: int
    start_ticks: int
    fd: int
    device: int
    inode: int
    address: int
    size_bytes: int


class ShmTransport:
    """Implements `ports.data.DataTransport` over one SharedMemory, which stays its owner's."""

    def __init__(self, memory: SharedMemory, copier: Copier | None = None) -> None:
        self._memory = memory
        self._regions: tuple[Region, ...] = ()
        self._views: list[Bytes] = []
        self._peers: dict[PeerId, _Mapping] = {}
        self._queue = CopyQueue(copier or fastest_copier())
        self._next_death_check = 0.0

    @property
    def name(self) -> str:
        return "shm"

    def register(self, regions: Sequence[Region]) -> bool:
        first, last = self._memory.address, self._memory.address + self._memory.size_bytes
        if not all(r.memory is MemoryKind.DRAM and first <= r.address and r.address + r.size_bytes <= last for r in regions):
            return False
        whole = np.frombuffer(self._memory.buffer, np.uint8)
        self._regions = tuple(regions)
        self._views = [whole[r.address - first : r.address - first + r.size_bytes] for r in regions]
        return True

    def offer(self) -> TransportOffer:
        ticks, file = start_ticks(os.getpid()), os.fstat(self._memory.fd)
        if ticks is None:
            raise LocalProtocolError("/proc does not show this process, so its cache cannot be offered over shm; mount /proc")
        memory = self._memory
        offer = _ShmOffer(os.getpid(), ticks, memory.fd, file.st_dev, file.st_ino, memory.address, memory.size_bytes)
        return TransportOffer(self.name, host_identity(), msgspec.msgpack.encode(offer))

    def connect(self, peer: PeerId, offer: TransportOffer, regions: Sequence[Region]) -> None:
        check_regions(regions, peer)
        mapping = _Mapping(peer, _decoded(peer, offer), tuple(regions))
        self.disconnect(peer)
        self._peers[peer] = mapping

    def disconnect(self, peer: PeerId) -> None:
        self._drop(peer, f"peer {peer} was disconnected")

    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle:
        return self._start(peer, segments, CopyDirection.READ)

    def write(self, peer: PeerId, segments: Sequence[Segments], grant_id: int = 0) -> Handle:
        return self._start(peer, segments, CopyDirection.WRITE)

    @property
    def supports_write_grants(self) -> bool:
        return False

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        raise write_grants_unsupported(self.name)

    def revoke_writes(self, grant_id: int) -> Handle:
        raise write_grants_unsupported(self.name)

    def poll(self) -> list[Completion]:
        self._queue.advance(self._is_alive)
        ended = self._queue.take_ended()
        if time.monotonic() >= self._next_death_check:
            self._next_death_check = time.monotonic() + DEATH_CHECK_S
            for peer in [peer for peer, mapping in self._peers.items() if mapping.has_ended()]:
                self._drop(peer, _ended(peer))
        return ended

    def cancel(self, handle: Handle) -> None:
        self._queue.cancel(handle)

    def poll_interval_s(self) -> float | None:
        if len(self._queue):
            return 0.0
        return DEATH_CHECK_S if self._peers else None

    def serving_interval_s(self) -> float | None:
        return None

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._queue.clear()
        self._views = []
        self._regions = ()

    def _start(self, peer: PeerId, segments: Sequence[Segments], direction: CopyDirection) -> Handle:
        mapping = self._peers.get(peer)
        if mapping is None:
            raise TransportError(f"peer {peer} is not connected over shm")
        check_segments(segments, self._regions, mapping.regions, peer)
        return self._queue.start(peer, segments, self._views, mapping.views(direction), direction)

    def _is_alive(self, peer: PeerId) -> bool:
        """Whether a peer with transfers still lives; if not, all that is held for it is dropped."""
        if self._peers[peer].has_ended():
            self._drop(peer, _ended(peer))
        return peer in self._peers

    def _drop(self, peer: PeerId, why: str) -> None:
        self._queue.fail_peer(peer, why)
        mapping = self._peers.pop(peer, None)
        if mapping is not None:
            mapping.close()


class _Mapping:
    """A peer's cache, mapped here."""

    def __init__(self, peer: PeerId, offer: _ShmOffer, regions: tuple[Region, ...]) -> None:
        for region in regions:
            if region.address < offer.address or region.address + region.size_bytes > offer.address + offer.size_bytes:
                raise TransportError(f"region {region.name!r} of {peer} is not in the memory it offers over shm; drop this peer")
        self.regions = regions
        self._peer = peer
        self._offer = offer
        incarnation = ProcessIncarnation.watch(offer.pid, offer.start_ticks)
        if incarnation is None:
            raise TransportError(_ended(peer))
        self._incarnation = incarnation
        self._maps: dict[CopyDirection, mmap.mmap] = {}
        self._views: dict[CopyDirection, list[Bytes]] = {}
        try:
            self.views(CopyDirection.READ)
        except TransportError:
            self._incarnation.close()
            raise

    def views(self, direction: CopyDirection) -> list[Bytes]:
        """The peer's regions, writable only for writes. TransportError when they cannot be mapped."""
        if direction not in self._maps:
            self._maps[direction] = pages = self._map(direction)
            whole = np.frombuffer(pages, np.uint8)
            starts = [region.address - self._offer.address for region in self.regions]
            self._views[direction] = [whole[at : at + r.size_bytes] for at, r in zip(starts, self.regions, strict=True)]
        return self._views[direction]

    def has_ended(self) -> bool:
        return self._incarnation.has_ended()

    def close(self) -> None:
        """Every transfer with this peer has been dropped before, so no view of the pages is left but ours."""
        self._views.clear()
        while self._maps:
            self._maps.popitem()[1].close()
        self._incarnation.close()

    def _map(self, direction: CopyDirection) -> mmap.mmap:
        flags, protection = os.O_RDONLY, mmap.PROT_READ
        if direction is CopyDirection.WRITE:
            flags, protection = os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE
        try:
            fd = os.open(f"/proc/{self._offer.pid}/fd/{self._offer.fd}", flags | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransportError(f"the shared cache of {self._peer} cannot be opened ({error}); is it the same user's?") from error
        try:
            self._prove(fd)
            return mmap.mmap(fd, self._offer.size_bytes, prot=protection)
        except (OSError, ValueError) as error:
            raise TransportError(f"the shared cache of {self._peer} cannot be mapped ({error}); is there memory left?") from error
        finally:
            os.close(fd)

    def _prove(self, fd: int) -> None:
        file, offer = os.fstat(fd), self._offer
        is_it = stat.S_ISREG(file.st_mode) and (file.st_dev, file.st_ino, file.st_size) == (offer.device, offer.inode, offer.size_bytes)
        if not is_it or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or self._incarnation.has_ended():
            raise TransportError(f"file {offer.fd} of process {offer.pid} is not the cache that {self._peer} offered; it was restarted")


def _decoded(peer: PeerId, offer: TransportOffer) -> _ShmOffer:
    try:
        decoded = msgspec.msgpack.decode(offer.blob, type=_ShmOffer)
    except msgspec.MsgspecError as error:
        raise TransportError(f"the shm offer of {peer} cannot be understood ({error}); do both sides run the same kvferry?") from error
    numbers = (decoded.pid, decoded.fd, decoded.address, decoded.size_bytes)
    if offer.reach != host_identity() or min(numbers) < 0 or max(decoded.pid, decoded.fd) > MAX_INT or max(numbers) > MAX_ADDRESS:
        raise TransportError(f"the shm offer of {peer} is from another host, user or container; use another transport")
    return decoded


def _ended(peer: PeerId) -> str:
    return f"the process of peer {peer} has ended"
