"""Memory of a bounce buffer, on the host or on a device, and the copier that reaches the memory.

Only code for device memory imports torch: the import needs torch with CUDA.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from typing import Protocol

from kvferry.errors import TransportError
from kvferry.transports.copy.gather import AddressCopier, HostAddressCopier
from kvferry.types import MemoryKind, Region

WITHOUT_CUDA = (ImportError, RuntimeError, AssertionError, AttributeError)
"""Without CUDA, torch raises any of the four. RuntimeError is also torch's error for lack of device
memory.
"""


class BufferMemory(Protocol):
    """Memory of a bounce buffer. The code that allocates the memory closes it."""

    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    def close(self) -> None: ...


BufferAllocator = Callable[[int, Region], BufferMemory]
"""Allocates this many bytes in the same memory as the region. TransportError if there is too little
memory.
"""


class HostMemory:
    """One range of host memory, whose pages are allocated on first use. The allocating code must
    call `close`.
    """

    def __init__(self, pages: mmap.mmap) -> None:
        self._pages: mmap.mmap | None = pages
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self._size_bytes = len(pages)

    @classmethod
    def allocate(cls, size_bytes: int) -> "HostMemory":
        return cls(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    @property
    def address(self) -> int:
        return self._address

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def close(self) -> None:
        if self._pages is not None:
            with contextlib.suppress(
                BufferError
            ):  # a view still exists: unmapping the memory would crash the process
                self._pages.close()
            self._pages = None


def allocate_buffer(size_bytes: int, like: Region) -> BufferMemory:
    """Allocate a bounce buffer beside a cache. Implements `BufferAllocator`."""
    try:
        if like.memory is MemoryKind.DRAM:
            return HostMemory.allocate(size_bytes)
        from kvferry.transports.copy.cuda import DeviceMemory

        return DeviceMemory.allocate(size_bytes, like.device)
    except (OSError, *WITHOUT_CUDA) as error:
        raise TransportError(str(error)) from error


def device_bytes(like: Region) -> int | None:
    """Return the total memory of the region's device; None for host memory or without CUDA."""
    if like.memory is MemoryKind.DRAM:
        return None
    try:
        from kvferry.transports.copy import cuda

        return cuda.device_bytes(like.device)
    except WITHOUT_CUDA:
        return None


def prepare_device(like: Region) -> None:
    """Make the device's context current, and compile the kernel of the copier.

    A transfer shall not have to wait for the compiler. Without CUDA this does nothing; NIXL then
    refuses the memory.
    """
    with contextlib.suppress(TransportError, *WITHOUT_CUDA):
        if like.memory is MemoryKind.VRAM:
            from kvferry.transports.copy.cuda import enter_device

            enter_device(like.device)
            copier_for(like).close()


def copier_for(region: Region) -> AddressCopier:
    """Make a copier. TransportError if the device has no memory for the copier's tables."""
    if region.memory is MemoryKind.DRAM:
        return HostAddressCopier()
    try:
        from kvferry.transports.copy.cuda import CudaAddressCopier

        return CudaAddressCopier(region.device)
    except WITHOUT_CUDA as error:
        raise TransportError(str(error)) from error
