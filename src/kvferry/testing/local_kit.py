"""A plane kit for engines that move nothing: plain memory, no planes. For tests, benchmarks and single engines."""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import ConfigError
from kvferry.ports.block_store import BlockStore
from kvferry.ports.control import ControlPlane
from kvferry.ports.data import DataPlane
from kvferry.ports.memory import CacheMemory
from kvferry.ports.order import EngineOrder, HostOrder
from kvferry.types import Region

__all__ = ["LocalKit", "LocalMemory"]


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
class LocalKit:
    def allocate_cache(self, size_bytes: int) -> CacheMemory:
        return LocalMemory(size_bytes)

    def data_planes(self, memory: CacheMemory | None) -> Sequence[DataPlane]:
        return []

    def block_store(self, regions: Sequence[Region]) -> BlockStore:
        raise ConfigError("this engine was started without planes, so no blocks arrive here; start it with a full plane kit")

    def staged_block_store(self, engine: Sequence[Region], mirror: Sequence[Region], memory: CacheMemory) -> BlockStore:
        return self.block_store(mirror)

    def engine_order(self, engine: Sequence[Region]) -> EngineOrder:
        return HostOrder()

    def control_plane(self) -> ControlPlane:
        raise ConfigError("this engine was started without planes and cannot talk to others; start it with a full plane kit")

    def side_channel(self) -> ControlPlane:
        raise ConfigError("this engine was started without planes and cannot serve a side channel; start it with a full plane kit")
