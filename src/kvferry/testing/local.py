"""Test helpers that need no transports: a clock that tests advance by hand, and a transport kit
without transports.
"""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import ConfigError
from kvferry.transports.base import (
    BlockStore,
    CacheMemory,
    ControlTransport,
    DataTransport,
    EngineStream,
    HostStream,
    RowCopier,
)
from kvferry.transports.copy.rows import CpuRowCopier
from kvferry.types import Region

__all__ = ["LocalMemory", "LocalTransportKit", "ManualClock"]


class ManualClock:
    """A clock that returns the time when called. Only `advance` moves the time, forwards."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not go back ({seconds:g} s)")
        self._now += seconds


# -- local kit --
# A transport kit for engines that transfer nothing: plain memory, no transports. For tests,
# benchmarks and single engines.


class LocalMemory:
    """Cache memory in anonymous pages of this process."""

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
        # Python unmaps the pages when the last tensor over the pages is gone; Python refuses to
        # close a mapping while a tensor uses it.
        self._view = memoryview(b"")


@dataclass(frozen=True, slots=True)
class LocalTransportKit:
    """A transport kit that allocates plain memory and has no transports."""

    def allocate_cache(self, size_bytes: int) -> CacheMemory:
        return LocalMemory(size_bytes)

    def data_transports(self, memory: CacheMemory | None) -> Sequence[DataTransport]:
        return []

    def block_store(self, regions: Sequence[Region]) -> BlockStore:
        raise ConfigError(
            "this engine was started without transports, so no blocks arrive here; start it with "
            "a full transport kit"
        )

    def host_buffer_store(
        self, engine: Sequence[Region], host_buffer: Sequence[Region], memory: CacheMemory
    ) -> BlockStore:
        return self.block_store(host_buffer)

    def row_copier(self, regions: Sequence[Region]) -> RowCopier:
        return CpuRowCopier(regions)

    def engine_stream(self, engine: Sequence[Region]) -> EngineStream:
        return HostStream()

    def control_transport(self) -> ControlTransport:
        raise ConfigError(
            "this engine was started without transports and cannot talk to others; start it with "
            "a full transport kit"
        )

    def side_channel(self) -> ControlTransport:
        raise ConfigError(
            "this engine was started without transports and cannot serve a side channel; start it "
            "with a full transport kit"
        )
