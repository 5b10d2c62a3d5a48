"""A KV cache that other processes of this host and user can map: an anonymous, sealed, named-by-nobody file in memory.

Whoever allocates it owns it. It has no path, so nothing is left behind whatever kills its owner; peers reach it through the owner's
entry in /proc while the owner lives.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import ConfigError

__all__ = ["SEALS", "SharedMemory", "SharedMemoryAllocator", "available_bytes", "check_fits"]

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""A shared file that could shrink would kill, with SIGBUS, whoever has mapped it."""

MADV_POPULATE_WRITE = 23
"""Not in Python's mmap yet. Without it the first write to every page costs a fault, and the first read into a block several times more."""
MAX_SHARE = 0.9
"""Of the available memory, for one cache."""
CGROUP_FILES = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and usage of a container, versions 2 and 1."""


class SharedMemory:
    """Implements `ports.memory.CacheMemory`. All its pages are taken at once, so that an engine cannot run out of them later."""

    def __init__(self, fd: int, pages: mmap.mmap) -> None:
        self._fd = fd
        self._pages: mmap.mmap | None = pages
        self._view = memoryview(pages)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self._size_bytes = len(pages)

    @classmethod
    def allocate(cls, size_bytes: int) -> "SharedMemory":
        """ConfigError when this host has not that much memory to give."""
        if size_bytes <= 0:
            raise ConfigError(f"a shared cache of {size_bytes} bytes cannot be made; give it at least one block")
        check_fits(size_bytes, available_bytes())
        fd = os.memfd_create("kvferry-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            pages = mmap.mmap(fd, size_bytes)
            with contextlib.suppress(OSError):  # kernels before 5.14: pages are mapped when they are first written
                pages.madvise(MADV_POPULATE_WRITE)
            return cls(fd, pages)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise ConfigError(f"a shared cache of {size_bytes} bytes cannot be had ({error}); make the cache smaller") from error

    @property
    def address(self) -> int:
        return self._address

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def buffer(self) -> memoryview:
        return self._view

    @property
    def fd(self) -> int:
        return self._fd

    def close(self) -> None:
        """The file is closed at once; its pages go when the last view of them has gone, here and in peers."""
        if self._pages is None:
            return
        pages, self._pages = self._pages, None
        os.close(self._fd)
        with contextlib.suppress(BufferError):  # a tensor still refers to them: unmapping under it would crash the process
            self._view.release()
            pages.close()
        self._view = memoryview(b"")


def check_fits(size_bytes: int, available: int) -> None:
    """ConfigError when a cache leaves the host too little. Else the kernel would kill processes, anybody's, to make room."""
    if size_bytes > available * MAX_SHARE:
        raise ConfigError(
            f"a shared cache of {size_bytes} bytes does not fit in the {available} bytes that this host or container has to give; "
            "make the cache smaller"
        )


def available_bytes(root: Path = Path("/")) -> int:
    """What the kernel could give without swapping, and what the container's limits leave of it."""
    meminfo = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    for limit, usage in CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # no such limit, or "max"
            available = min(available, int((root / limit).read_text()) - int((root / usage).read_text()))
    return max(0, available)


@dataclass(frozen=True, slots=True)
class SharedMemoryAllocator:
    """Implements `ports.memory.CacheAllocator`."""

    def allocate(self, size_bytes: int) -> SharedMemory:
        return SharedMemory.allocate(size_bytes)
