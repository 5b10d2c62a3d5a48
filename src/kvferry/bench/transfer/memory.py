"""The memory of one side of `kvferry bench transfer`: what it takes to fill, move and check it,
wherever it lies.

Every 8 bytes of a producer's memory say where they are, so that a reader can tell which it got.
"""

import ctypes
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.bench.transfer.moves import Move
from kvferry.errors import KVFerryError
from kvferry.transports.base import DataTransport
from kvferry.transports.copy.gather import Timing, copy_by_numpy, fastest_copier
from kvferry.transports.nixl.transport import NetworkReach, NixlTransport
from kvferry.transports.shm import SharedMemory, ShmTransport, available_bytes, check_fits
from kvferry.transports.tcp.transport import TcpTransport
from kvferry.types import MemoryKind

__all__ = [
    "BlockChecksums",
    "HostAllocator",
    "Memory",
    "MemoryAllocator",
    "MemorySource",
    "check_moved",
]

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class MemorySource:
    """Where another process finds a producer's memory."""

    pid: int
    fd: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockChecksums:
    """Of each block the first word, the last one, and the sum of all."""

    first: Words
    last: Words
    sums: Words


class Memory(Protocol):
    """One side's memory. Whoever allocates it closes it."""

    kind: MemoryKind
    device: int
    serve_interval_s: float
    """How long the producer may sleep between two turns of its transports."""
    move_s: float
    """How long a move may take before something is wrong."""
    slow_transports: frozenset[str]
    """Transports that need long for each descriptor: they move less at a time."""

    @property
    def address(self) -> int: ...

    @property
    def spare_address(self) -> int | None:
        """As much memory again, which no transport serves: raw NIXL writes from there to there.
        None: nothing is written.
        """

    def transports(self) -> Mapping[str, DataTransport]:
        """Every data transport that can carry such memory, fresh and unregistered, by the name it
        is told under.
        """

    def source(self) -> MemorySource | None:
        """For `open_source` of the other side."""

    def open_source(self, source: MemorySource | None) -> None:
        """Make ready what `copy` and writes take their bytes from."""

    def fill(self) -> None:
        """Let every 8 bytes say where they are."""

    def overwrite(self) -> None:
        """Overwrite everything, so that the next check is of the next move."""

    def copy(self, size_bytes: int) -> None:
        """One plain copy of as many bytes in one segment, until it is through: the fastest there
        is.
        """

    def block_checksums(self, count: int) -> BlockChecksums:
        """Of the memory, cut into so many blocks."""

    def set_timing(self, transport: DataTransport, timing: Timing) -> None:
        """Whether completions of a transport that can tell say how long the device was at it."""

    def close(self) -> None: ...


class MemoryAllocator(Protocol):
    """Where memory is taken. Plain data: it travels to the other process."""

    def allocate(self, size_bytes: int) -> Memory: ...

    def check_capacity(self, size_bytes: int) -> None:
        """ConfigError when two sides of this size do not fit."""

    def facts(self) -> Mapping[str, Any]:
        """What results are read beside."""


def check_moved(block_checksums: BlockChecksums, move: Move) -> None:
    """KVFerryError unless every block that moved is its source, from the first to the last byte,
    and no other was written.
    """
    words = move.blocks.segment_bytes // 8
    expected = np.zeros(move.blocks.count, np.uint64)
    expected[move.local_blocks] = move.remote_blocks * words + 1
    is_moved = expected > 0
    last = expected + np.uint64(words - 1) * is_moved
    sums = (expected + last) * np.uint64(words // 2)
    if not (
        np.array_equal(block_checksums.first, expected)
        and np.array_equal(block_checksums.last, last)
        and np.array_equal(block_checksums.sums, sums)
    ):
        raise KVFerryError("a move brought other bytes than were asked for; this is a bug")


@dataclass(frozen=True, slots=True)
class HostAllocator:
    """Shared memory of this host. Implements `MemoryAllocator`."""

    def allocate(self, size_bytes: int) -> Memory:
        return HostBenchMemory(SharedMemory.allocate(size_bytes))

    def check_capacity(self, size_bytes: int) -> None:
        check_fits(2 * size_bytes, available_bytes())

    def facts(self) -> Mapping[str, Any]:
        return {"copied_by": "numpy" if fastest_copier() is copy_by_numpy else "native function"}


class HostBenchMemory:
    """Implements `Memory`."""

    kind = MemoryKind.DRAM
    device = 0
    serve_interval_s = 0.001
    move_s = 120.0
    slow_transports: frozenset[str] = frozenset()
    spare_address = None

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._opened: mmap.mmap | None = None
        self._source_address = 0

    @property
    def address(self) -> int:
        return self._memory.address

    def transports(self) -> Mapping[str, DataTransport]:
        return {
            "shm": ShmTransport(self._memory),
            "nixl": NixlTransport(reach=NetworkReach.THIS_HOST),
            "tcp": TcpTransport("127.0.0.1", "127.0.0.1"),
        }

    def source(self) -> MemorySource | None:
        return MemorySource(os.getpid(), self._memory.fd)

    def open_source(self, source: MemorySource | None) -> None:
        assert source is not None
        fd = os.open(f"/proc/{source.pid}/fd/{source.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._opened = mmap.mmap(fd, self._memory.size_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._source_address = np.frombuffer(self._opened, np.uint8).ctypes.data

    def fill(self) -> None:
        np.frombuffer(self._memory.buffer, np.uint64)[:] = np.arange(
            1, self._memory.size_bytes // 8 + 1, dtype=np.uint64
        )

    def overwrite(self) -> None:
        np.frombuffer(self._memory.buffer, np.uint8).fill(0)

    def copy(self, size_bytes: int) -> None:
        """memcpy, from the producer's memory to ours."""
        ctypes.memmove(self.address, self._source_address, size_bytes)

    def block_checksums(self, count: int) -> BlockChecksums:
        rows = np.frombuffer(self._memory.buffer, np.uint64).reshape(count, -1)
        return BlockChecksums(rows[:, 0], rows[:, -1], rows.sum(axis=1, dtype=np.uint64))

    def set_timing(self, transport: DataTransport, timing: Timing) -> None:
        return None

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        self._memory.close()
