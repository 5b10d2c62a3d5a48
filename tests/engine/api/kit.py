"""The least that an engine without a connector needs: private memory for its cache."""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.ports.block_store import BlockStore
from kvferry.ports.control import ControlPlane
from kvferry.ports.data import DataPlane
from kvferry.ports.memory import CacheMemory
from kvferry.ports.order import EngineOrder, HostOrder
from kvferry.types import Region

__all__ = ["PrivateMemoryKit"]


class PrivateMemory:
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._pages = mmap.mmap(-1, max(size_bytes, 1))
        self.buffer = memoryview(self._pages)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))

    def close(self) -> None:
        """The pages go back when the last tensor in them does."""


@dataclass(frozen=True, slots=True)
class PrivateMemoryKit:
    def allocate_cache(self, size_bytes: int) -> CacheMemory:
        return PrivateMemory(size_bytes)

    def data_planes(self, memory: CacheMemory | None) -> Sequence[DataPlane]:
        return ()

    def block_store(self, regions: Sequence[Region]) -> BlockStore:
        raise NotImplementedError

    def staged_block_store(self, engine: Sequence[Region], mirror: Sequence[Region], memory: CacheMemory) -> BlockStore:
        raise NotImplementedError

    def engine_order(self, engine: Sequence[Region]) -> EngineOrder:
        return HostOrder()

    def control_plane(self) -> ControlPlane:
        raise NotImplementedError

    def side_channel(self) -> ControlPlane:
        raise NotImplementedError
