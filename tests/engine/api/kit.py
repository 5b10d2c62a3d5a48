"""A transport kit for an engine without a connector: it provides only private memory for the KV
cache.
"""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.transports.base import (
    BlockStore,
    CacheMemory,
    ControlTransport,
    DataTransport,
    EngineStream,
    HostStream,
    RowCopier,
)
from kvferry.types import Region


class PrivateMemory:
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._pages = mmap.mmap(-1, max(size_bytes, 1))
        self.buffer = memoryview(self._pages)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))

    def close(self) -> None:
        """Does nothing: the pages are freed together with the last tensor that uses them."""


@dataclass(frozen=True, slots=True)
class PrivateMemoryKit:
    def allocate_cache(self, size_bytes: int) -> CacheMemory:
        return PrivateMemory(size_bytes)

    def data_transports(self, memory: CacheMemory | None) -> Sequence[DataTransport]:
        return ()

    def block_store(self, regions: Sequence[Region]) -> BlockStore:
        raise NotImplementedError

    def host_buffer_store(
        self, engine: Sequence[Region], host_buffer: Sequence[Region], memory: CacheMemory
    ) -> BlockStore:
        raise NotImplementedError

    def row_copier(self, regions: Sequence[Region]) -> RowCopier:
        raise NotImplementedError

    def engine_stream(self, engine: Sequence[Region]) -> EngineStream:
        return HostStream()

    def control_transport(self) -> ControlTransport:
        raise NotImplementedError

    def side_channel(self) -> ControlTransport:
        raise NotImplementedError
