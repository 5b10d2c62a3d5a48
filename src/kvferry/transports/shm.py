"""Shared memory: KV caches that processes of one host and user can map, and the `shm` transport.

`SharedMemory` is a sealed memfd: an anonymous file in memory without a path. Nothing is left behind
however its owner dies. Peers open the file through the owner's entry in /proc while the owner is
alive. `ShmTransport` maps the caches of peers and copies between them and the local cache.

The thread that owns a transport makes every call. See
docs/decisions/004-shared-memory-by-memfd.md.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
from collections.abc import Iterable

import msgspec
import numpy as np

from kvferry.errors import ConfigError, TransportError
from kvferry.host_memory import available_bytes, check_fits
from kvferry.transports.base import Operation, TransportOffer
from kvferry.transports.copy.gather import Copier
from kvferry.transports.copy.segments import Bytes
from kvferry.transports.copying import CopyingTransport
from kvferry.transports.linked import LINK_CHECK_S, check_offered
from kvferry.transports.locality import (
    HostLink,
    OfferedInt,
    OfferedSize,
    decoded_host_offer,
    host_identity,
    own_start_ticks,
)
from kvferry.types import MemoryKind, PeerId, Region

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of the file. If the file could shrink, a process that has mapped it would die of SIGBUS."""

MADV_POPULATE_WRITE = 23
"""The madvise flag that maps all pages at once; Python's mmap module does not define it yet.
Without it the first write to every page costs a page fault, and the first read into a block takes
several times longer.
"""


class SharedMemory:
    """Implements `transports.base.CacheMemory`. All pages are allocated at once, so that an engine
    cannot run out of memory later.
    """

    def __init__(self, fd: int, pages: mmap.mmap) -> None:
        self.fd = fd
        self._pages: mmap.mmap | None = pages
        self.buffer = memoryview(pages)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self.size_bytes = len(pages)

    @classmethod
    def allocate(cls, size_bytes: int) -> "SharedMemory":
        """Allocate a zeroed cache. ConfigError if this host does not have enough memory."""
        if size_bytes <= 0:
            raise ConfigError(
                f"a shared cache of {size_bytes} bytes cannot be allocated; it needs at "
                "least one block"
            )
        check_fits(size_bytes, available_bytes())
        fd = os.memfd_create("kvferry-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            # Allocate the pages now: with a sparse file, SIGBUS would kill the engine when memory
            # runs out.
            os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            pages = mmap.mmap(fd, size_bytes)
            with contextlib.suppress(
                OSError
            ):  # kernels before 5.14 lack the flag: pages are then mapped on first write
                pages.madvise(MADV_POPULATE_WRITE)
            return cls(fd, pages)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise ConfigError(
                f"a shared cache of {size_bytes} bytes cannot be allocated ({error}); "
                "make the cache smaller"
            ) from error

    def contains(self, regions: Iterable[Region]) -> bool:
        """Whether all regions lie in this memory."""
        first, last = self.address, self.address + self.size_bytes
        return all(
            r.memory is MemoryKind.DRAM and first <= r.address and r.address + r.size_bytes <= last
            for r in regions
        )

    def close(self) -> None:
        """Close the file at once. The kernel frees the pages when the last mapping of them is gone,
        in this process and in peers.
        """
        if self._pages is None:
            return
        pages, self._pages = self._pages, None
        os.close(self.fd)
        with contextlib.suppress(
            BufferError
        ):  # a tensor still uses the pages: unmapping them would crash the process
            self.buffer.release()
            pages.close()
        self.buffer = memoryview(b"")


# -- shm transport --
# Each side maps the other side's cache and copies by itself; the peer's process takes no part.
# A peer's file is opened through /proc/PID/fd and used only after three checks: same incarnation of
# the process, same file, sealed against shrinking. The file is mapped read-only, and mapped for
# writing only when the first write starts.


class _ShmOffer(msgspec.Struct, frozen=True, array_like=True):
    """How to reach one SharedMemory. `address` is where the owner has mapped the memory; the
    owner's regions have addresses in that mapping.
    """

    pid: OfferedInt
    start_ticks: int
    fd: OfferedInt
    device: int
    inode: int
    address: OfferedSize
    size_bytes: OfferedSize


class ShmTransport(CopyingTransport["_ShmLink"]):
    """Implements `transports.base.DataTransport` over one SharedMemory, which the caller owns."""

    name = "shm"
    link_check_s = LINK_CHECK_S

    def __init__(self, memory: SharedMemory, copier: Copier | None = None) -> None:
        super().__init__(copier)
        self._memory = memory

    def offer(self) -> TransportOffer:
        self._check_open()
        file = os.fstat(self._memory.fd)
        memory = self._memory
        offer = _ShmOffer(
            os.getpid(),
            own_start_ticks(self.name),
            memory.fd,
            file.st_dev,
            file.st_ino,
            memory.address,
            memory.size_bytes,
        )
        return TransportOffer(self.name, host_identity(), msgspec.msgpack.encode(offer))

    def _open(self, regions: tuple[Region, ...]) -> bool:
        if not self._memory.contains(regions):
            return False
        first = self._memory.address
        whole = np.frombuffer(self._memory.buffer, np.uint8)
        self._views = [whole[r.address - first : r.address - first + r.size_bytes] for r in regions]
        return True

    def _connect(
        self, peer: PeerId, offer: TransportOffer, regions: tuple[Region, ...]
    ) -> "_ShmLink":
        decoded = decoded_host_offer(peer, offer, _ShmOffer)
        check_offered(peer, offer, regions, decoded.address, decoded.size_bytes)
        return _ShmLink(peer, regions, decoded)

    def _views_of(self, link: "_ShmLink", operation: Operation) -> list[Bytes]:
        return link.views(operation)


class _ShmLink(HostLink):
    """A peer's cache, mapped into this process."""

    def __init__(self, peer: PeerId, regions: tuple[Region, ...], offer: _ShmOffer) -> None:
        super().__init__(peer, regions, offer.pid, offer.start_ticks)
        self._offer = offer
        self._maps: dict[Operation, mmap.mmap] = {}
        self._views: dict[Operation, list[Bytes]] = {}
        try:
            # Map for reading at once, so that `connect` fails if the cache cannot be mapped.
            self.views(Operation.READ)
        except TransportError:
            self.close()
            raise

    def views(self, operation: Operation) -> list[Bytes]:
        """Return views of the peer's regions, writable only for writes. TransportError if the cache
        cannot be mapped.
        """
        if operation not in self._maps:
            self._maps[operation] = pages = self._map(operation)
            whole = np.frombuffer(pages, np.uint8)
            starts = [region.address - self._offer.address for region in self.regions]
            self._views[operation] = [
                whole[at : at + r.size_bytes] for at, r in zip(starts, self.regions, strict=True)
            ]
        return self._views[operation]

    def close(self) -> None:
        """Unmap the peer's cache. Every transfer with this peer was stopped before, so only this
        object still holds views of the pages.
        """
        self._views.clear()
        while self._maps:
            self._maps.popitem()[1].close()
        super().close()

    def _map(self, operation: Operation) -> mmap.mmap:
        flags, protection = os.O_RDONLY, mmap.PROT_READ
        if operation is Operation.WRITE:
            flags, protection = os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE
        try:
            fd = os.open(
                f"/proc/{self._offer.pid}/fd/{self._offer.fd}", flags | os.O_CLOEXEC | os.O_NONBLOCK
            )
        except OSError as error:
            raise TransportError(
                f"the shared cache of {self.peer} cannot be opened ({error}); does the "
                "peer run as the same user?"
            ) from error
        try:
            self._prove(fd)
            return mmap.mmap(fd, self._offer.size_bytes, prot=protection)
        except (OSError, ValueError) as error:
            raise TransportError(
                f"the shared cache of {self.peer} cannot be mapped ({error}); is there memory left?"
            ) from error
        finally:
            os.close(fd)

    def _prove(self, fd: int) -> None:
        """TransportError unless `fd` is the file that the peer offered, and the peer is alive."""
        file, offer = os.fstat(fd), self._offer
        is_it = stat.S_ISREG(file.st_mode) and (file.st_dev, file.st_ino, file.st_size) == (
            offer.device,
            offer.inode,
            offer.size_bytes,
        )
        # The incarnation is checked last: if the process is alive now, its pid was not reused
        # before the file was opened.
        if (
            not is_it
            or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            or self._incarnation.has_ended()
        ):
            raise TransportError(
                f"file {offer.fd} of process {offer.pid} is not the cache that "
                f"{self.peer} offered; the peer was restarted"
            )
