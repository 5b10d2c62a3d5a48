"""The host buffer of a CUDA cache, in pinned host memory.

Copies run on a stream of their own, beside the engine's kernels. The thread that owns the store
makes all calls, and never waits for the device except in `close` and after an error.

A copy from the engine needs no event of the engine's stream: the worker asks for the copy after the
engine has seen the output of the step that filled the blocks, and the engine's kernels computed
that output after they had written the blocks.

The device's copy engines copy long contiguous segments. Kernels gather scattered blocks, and can
access pinned memory like device memory: one copy for each block would cost this thread about 40 us.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.transports.copy.cuda import DeviceArray
from kvferry.transports.host_buffer.store import blocks_by_region
from kvferry.types import MemoryKind, Region

SLICE_S = 0.001
"""How long one slice submits copies to the device: each submission takes some ten microseconds,
whatever its size.
"""
WAIT_S = 0.0002
"""How soon to ask again whether submitted copies are done."""
LONG_SEGMENT_BYTES = 512 * 1024
"""Average length from which contiguous segments are worth one copy each."""
GATHER_BYTES = 16 * 1024 * 1024
"""Most bytes that one kernel gathers: it needs as much temporary memory on the device."""
PORTABLE_AND_MAPPED = 3
"""Flags of cudaHostRegister."""


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """The blocks to copy in one region. `numbers` are block ids."""

    to: torch.Tensor
    source: torch.Tensor
    numbers: npt.NDArray[np.int64]
    block_bytes: int


class CudaHostBuffer:
    """Implements `host_buffer.store.HostBuffer`. `host_buffer` lies in `memory` (address and size),
    which is pinned until `close`.
    """

    def __init__(
        self, engine: Sequence[Region], host_buffer: Sequence[Region], memory: tuple[int, int]
    ) -> None:
        devices = {region.device for region in engine}
        if len(devices) != 1 or any(region.memory is not MemoryKind.VRAM for region in engine):
            raise LocalProtocolError("this host buffer is for a cache on one CUDA device")
        self._engine = tuple(engine)
        self._device = torch.device("cuda", devices.pop())
        self._stream = torch.cuda.Stream(self._device)
        self._memory = memory
        self._pin(memory)
        self._rows = [
            (self._tensor(a, b), self._tensor(b, a))
            for a, b in zip(engine, host_buffer, strict=True)
        ]

    def save(self, blocks: Sequence[Sequence[int]]) -> Iterator[float]:
        return self._copy(self._chosen(blocks, [(to, source) for source, to in self._rows]))

    def load(self, blocks: Sequence[Sequence[int]]) -> Iterator[float]:
        return self._copy(self._chosen(blocks, self._rows))

    def close(self) -> None:
        """Wait for the device before the memory is unpinned: a copy that is still active would
        write into memory that may have been reused.
        """
        if self._rows:
            self._rows = []
            self._stream.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._memory[0])

    def _tensor(self, region: Region, other: Region) -> torch.Tensor:
        """Return a region as a tensor with one row of words for each block.

        The device sees pinned memory at the same address as the host does. Words have 8 bytes if
        both sides of the copy are aligned.
        """
        numbers = [
            n
            for each in (region, other)
            for n in (each.address, each.block_bytes, each.stride_bytes)
        ]
        word_bytes = 8 if not any(n % 8 for n in numbers) else 1
        shape = region.num_blocks, region.block_bytes // word_bytes
        strides = region.stride_bytes, word_bytes
        rows = DeviceArray(region.address, shape, word_bytes, strides)
        return torch.as_tensor(rows, device=self._device)

    def _chosen(
        self, blocks: Sequence[Sequence[int]], rows: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[_Copy]:
        """Return the copies of blocks. `rows` has target and source of each region."""
        return [
            _Copy(*rows[index], numbers, self._engine[index].block_bytes)
            for index, numbers in blocks_by_region(blocks, self._engine)
        ]

    def _copy(self, copies: list[_Copy]) -> Iterator[float]:
        done = torch.cuda.Event()
        try:
            yield from self._submit_copies(copies)
            done.record(self._stream)
            while not done.query():
                yield WAIT_S
        except Exception:
            # The caller reuses the blocks as soon as it sees the error, so no copy may be active.
            self._stream.synchronize()
            raise

    def _submit_copies(self, copies: list[_Copy]) -> Iterator[float]:
        until = time.perf_counter() + SLICE_S
        for copy in copies:
            contiguous = list(_contiguous_blocks(copy.numbers))
            is_scattered = (
                len(copy.numbers) * copy.block_bytes < len(contiguous) * LONG_SEGMENT_BYTES
            )
            for _ in self._gathered(copy) if is_scattered else self._copied(copy, contiguous):
                if time.perf_counter() >= until:
                    yield 0.0
                    until = time.perf_counter() + SLICE_S

    def _copied(self, copy: _Copy, contiguous: list[tuple[int, int]]) -> Iterator[None]:
        for first, end in contiguous:
            with torch.cuda.stream(self._stream):
                copy.to[first:end].copy_(copy.source[first:end], non_blocking=True)
            yield

    def _gathered(self, copy: _Copy) -> Iterator[None]:
        step = max(1, GATHER_BYTES // copy.block_bytes)
        for first in range(0, len(copy.numbers), step):
            with torch.cuda.stream(self._stream):
                rows = torch.from_numpy(copy.numbers[first : first + step]).to(
                    self._device, non_blocking=True
                )
                copy.to.index_copy_(0, rows, copy.source.index_select(0, rows))
            yield

    def _pin(self, memory: tuple[int, int]) -> None:
        status = torch.cuda.cudart().cudaHostRegister(*memory, PORTABLE_AND_MAPPED)
        if int(status) != 0:
            raise ConfigError(
                f"a host buffer of {memory[1]} bytes cannot be pinned (CUDA error {int(status)}); "
                "raise the memlock limit"
            )


def _contiguous_blocks(numbers: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Join adjacent blocks: yields the first block and one past the last."""
    cuts = (np.flatnonzero(np.diff(numbers) != 1) + 1).tolist()
    for first, end in zip([0, *cuts], [*cuts, len(numbers)], strict=True):
        yield int(numbers[first]), int(numbers[end - 1]) + 1
