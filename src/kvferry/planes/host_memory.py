"""Host memory that transports hold for themselves. Its pages are taken as they are used."""

import contextlib
import ctypes
import mmap

__all__ = ["HostMemory"]


class HostMemory:
    """One stretch of host memory. Whoever allocates it closes it."""

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
            with contextlib.suppress(BufferError):  # somebody still looks at it: unmapping under it would crash the process
                self._pages.close()
            self._pages = None
