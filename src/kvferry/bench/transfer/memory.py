"""The memory of one side of `kvferry bench transfer`, on the host or on a device.

`Memory` is the contract for filling, moving and checking memory; this module implements the
contract for the host, `kvferry.bench.transfer.device` for GPUs. Every 8 bytes of a producer's
memory hold their own position, so that a reader can check which bytes arrived.
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
from kvferry.host_memory import available_bytes, check_fits
from kvferry.transports.base import DataTransport
from kvferry.transports.copy.gather import Timing, copy_by_numpy, fastest_copier
from kvferry.transports.mooncake.transport import MooncakeTransport
from kvferry.transports.nixl.transport import NetworkReach, NixlTransport
from kvferry.transports.shm import SharedMemory, ShmTransport
from kvferry.transports.tcp.transport import TcpTransport
from kvferry.types import MemoryKind

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class MemorySource:
    """How another process opens the memory of a producer."""

    pid: int
    fd: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockChecksums:
    """The first word, the last word and the sum of all words of each block."""

    first: Words
    last: Words
    sums: Words


class Memory(Protocol):
    """The memory of one side; the owner that allocates the memory calls `close`."""

    kind: MemoryKind
    device: int
    serve_interval_s: float
    """How long the producer may sleep between two polls of its transports."""
    move_s: float
    """The timeout of one move."""
    slow_transports: frozenset[str]
    """The transports that are slow per descriptor and therefore move fewer bytes at a time."""

    @property
    def address(self) -> int: ...

    @property
    def spare_address(self) -> int | None:
        """The address of a second range of the same size; raw NIXL writes between the spare ranges.

        No transport serves this range. None: raw NIXL writes are not measured.
        """

    def transports(self) -> Mapping[str, DataTransport]:
        """Return every data transport that can move this kind of memory, new and unregistered, by
        name.
        """

    def source(self) -> MemorySource | None:
        """Return the argument for `open_source` on the other side."""

    def open_source(self, source: MemorySource | None) -> None:
        """Prepare the bytes from which `copy` and raw NIXL writes read."""

    def fill(self) -> None:
        """Write its own position into every 8 bytes."""

    def overwrite(self) -> None:
        """Overwrite everything, so that the next check covers only the next move."""

    def copy(self, size_bytes: int) -> None:
        """Copy this many contiguous bytes and wait for the end: the fastest possible copy."""

    def block_checksums(self, count: int) -> BlockChecksums:
        """Return the checksums of the memory, divided into `count` blocks."""

    def set_timing(self, transport: DataTransport, timing: Timing) -> None:
        """Set whether completions include the device time, on transports that can measure device
        time.
        """

    def close(self) -> None: ...


class MemoryAllocator(Protocol):
    """Allocates memory; plain data, because the allocator is sent to the producer process."""

    def allocate(self, size_bytes: int) -> Memory: ...

    def check_capacity(self, size_bytes: int) -> None:
        """Raise ConfigError if the memory of both sides does not fit."""

    def facts(self) -> Mapping[str, Any]:
        """Return facts about the memory to report with the results."""


def check_moved(block_checksums: BlockChecksums, move: Move) -> None:
    """Raise KVFerryError unless every moved block equals its source and no other block was
    written.
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
        raise KVFerryError("a move delivered wrong bytes; this is a bug")


@dataclass(frozen=True, slots=True)
class HostAllocator:
    """Allocates shared memory of this host; implements `MemoryAllocator`."""

    def allocate(self, size_bytes: int) -> Memory:
        return HostBenchMemory(SharedMemory.allocate(size_bytes))

    def check_capacity(self, size_bytes: int) -> None:
        check_fits(2 * size_bytes, available_bytes())

    def facts(self) -> Mapping[str, Any]:
        return {"copied_by": "numpy" if fastest_copier() is copy_by_numpy else "native function"}


class HostBenchMemory:
    """Memory of one side on the host; implements `Memory`."""

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
            "mooncake": MooncakeTransport(self._memory, "127.0.0.1", "127.0.0.1"),
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
        """Copy with memcpy, from the producer's memory to ours."""
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
