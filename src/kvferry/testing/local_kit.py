"""A transport kit for engines that move nothing: plain memory, no transports. For tests, benchmarks and single engines."""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import ConfigError
from kvferry.ports.block_store import BlockStore
from kvferry.ports.control import ControlTransport
from kvferry.ports.data import DataTransport
from kvferry.ports.memory import CacheMemory
from kvferry.ports.order import EngineStream, HostStream
from kvferry.types import Region

__all__ = ["LocalMemory", "LocalTransportKit"]


class LocalMemory:
    """Anonymous pages of this process."""

    def __init__(self, size_bytes: int) -> None:
        self._pages = mmap.mmap(-1, max(size_bytes, 1))
        self._view = memoryview(self._pages)[:size_bytes]
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))

    @property
    def address(self) -> int:
        return self._address

    @property
    def size_bytes(self) -> int:
        return len(self._view)

    @property
    def buffer(self) -> memoryview:
        return self._view

    def close(self) -> None:
        # Python unmaps the pages when the last tensor over them is gone; closing the mapping under one would be refused.
        self._view = memoryview(b"")


@dataclass(frozen=True, slots=True)
class LocalTransportKit:
    def allocate_cache(self, size_bytes: int) -> CacheMemory:
        return LocalMemory(size_bytes)

    def data_transports(self, memory: CacheMemory | None) -> Sequence[DataTransport]:
        return []

    def block_store(self, regions: Sequence[Region]) -> BlockStore:
        raise ConfigError("this engine was started without transports, so no blocks arrive here; start it with a full transport kit")

    def host_buffer_store(self, engine: Sequence[Region], host_buffer: Sequence[Region], memory: CacheMemory) -> BlockStore:
        return self.block_store(host_buffer)

    def engine_stream(self, engine: Sequence[Region]) -> EngineStream:
        return HostStream()

    def control_transport(self) -> ControlTransport:
        raise ConfigError("this engine was started without transports and cannot talk to others; start it with a full transport kit")

    def side_channel(self) -> ControlTransport:
        raise ConfigError("this engine was started without transports and cannot serve a side channel; start it with a full transport kit")
