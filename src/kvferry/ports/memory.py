"""Where an engine's KV cache lives, so that transports can reach it.

The engine asks for one buffer per worker at start-up and builds its tensors in it.
"""

from typing import Protocol

__all__ = ["CacheAllocator", "CacheMemory"]


class CacheMemory(Protocol):
    """One contiguous writable buffer, zeroed, page aligned. Its owner is whoever allocated it."""

    @property
    def address(self) -> int:
        """Virtual address of the first byte in this process."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def buffer(self) -> memoryview:
        """The bytes, writable; valid until `close`."""

    def close(self) -> None:
        """Give the memory back. Idempotent. No view of `buffer` may be used afterwards."""


class CacheAllocator(Protocol):
    def allocate(self, size_bytes: int) -> CacheMemory: ...
