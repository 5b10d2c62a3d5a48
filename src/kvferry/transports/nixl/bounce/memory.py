"""Memory of a bounce buffer, on the host or on a device, and the copier that reaches the memory.

Only code for device memory imports torch: the import needs torch with CUDA.
"""

import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvferry.errors import TransportError
from kvferry.transports.copy.gather import AddressCopier, HostAddressCopier
from kvferry.types import MemoryKind, Region

WITHOUT_CUDA = (ImportError, RuntimeError, AssertionError, AttributeError)
"""Without CUDA, torch raises any of the four. RuntimeError is also torch's error for lack of device
memory.
"""


@dataclass(slots=True)
class BufferMemory:
    """Memory of a bounce buffer. The code that allocates the memory closes it."""

    address: int
    size_bytes: int
    owner: object
    """The array or tensor whose memory this is."""

    def close(self) -> None:
        self.owner = None


BufferAllocator = Callable[[int, Region], BufferMemory]
"""Allocates this many bytes in the same memory as the region. TransportError if there is too little
memory.
"""


def allocate_buffer(size_bytes: int, like: Region) -> BufferMemory:
    """Allocate a bounce buffer beside a cache. Implements `BufferAllocator`."""
    try:
        if like.memory is MemoryKind.DRAM:
            # Page-aligned, and the pages are allocated on first use.
            pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return BufferMemory(np.frombuffer(pages, np.uint8).ctypes.data, size_bytes, pages)
        from kvferry.transports.copy.cuda import allocate

        tensor = allocate(size_bytes, like.device)
        return BufferMemory(tensor.data_ptr(), tensor.numel(), tensor)
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
