"""A mirror of a CUDA cache in pinned host memory. Copies go through a stream of their own, so that they run beside the engine's kernels.

Called by the thread that owns the store; it never waits for the device. A copy from the engine needs no event of the engine's stream: a
lease is granted after the engine has seen the request's last token, which its kernels computed after they had written the blocks.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.planes.mirror import blocks_by_region
from kvferry.planes.views import view_of
from kvferry.types import MemoryKind, Region

__all__ = ["CudaMirror"]

SLICE_S = 0.001
"""How long one slice hands copies to the device: each takes some microseconds, whatever its size."""
WAIT_S = 0.0002
"""How soon a copy that was handed over is asked after."""


@dataclass(frozen=True, slots=True)
class _Strided:
    """A region as CUDA's array interface wants it: rows of blocks."""

    region: Region

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        region = self.region
        return {
            "shape": (region.num_blocks, region.block_bytes),
            "strides": (region.stride_bytes, 1),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }


class CudaMirror:
    """Implements `planes.mirror.Mirror`. `mirror` lies densely in `memory` (address and size), which is pinned until `close`."""

    def __init__(self, engine: Sequence[Region], mirror: Sequence[Region], memory: tuple[int, int]) -> None:
        devices = {region.device for region in engine}
        if len(devices) != 1 or any(region.memory is not MemoryKind.VRAM for region in engine):
            raise LocalProtocolError("this mirror is for a cache on one CUDA device")
        self._engine = tuple(engine)
        self._device = torch.device("cuda", devices.pop())
        self._stream = torch.cuda.Stream(self._device)
        self._memory = memory
        self._pin(memory)
        self._rows = [
            (torch.as_tensor(_Strided(a), device=self._device), torch.from_numpy(view_of(b)).view(b.num_blocks, b.block_bytes))
            for a, b in zip(engine, mirror, strict=True)
        ]

    def save(self, blocks: Sequence[Sequence[int]]) -> Iterator[float]:
        chosen = blocks_by_region(blocks, self._engine)
        return self._copy([(self._rows[index][1], self._rows[index][0], numbers) for index, numbers in chosen])

    def load(self, blocks: Sequence[Sequence[int]]) -> Iterator[float]:
        chosen = blocks_by_region(blocks, self._engine)
        return self._copy([(*self._rows[index], numbers) for index, numbers in chosen])

    def close(self) -> None:
        """Wait for the device: what it still copies would land in memory that is somebody else's."""
        if self._rows:
            self._rows = []
            self._stream.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._memory[0])

    def _copy(self, parts: list[tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.int64]]]) -> Iterator[float]:
        done = torch.cuda.Event()
        try:
            yield from self._hand_over(parts)
            done.record(self._stream)
            while not done.query():
                yield WAIT_S
        except Exception:
            # Whoever hears of it takes the blocks back, so nothing of it may still be under way.
            self._stream.synchronize()
            raise

    def _hand_over(self, parts: list[tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.int64]]]) -> Iterator[float]:
        until = time.perf_counter() + SLICE_S
        for to, source, numbers in parts:
            for first, end in _runs(numbers):
                with torch.cuda.stream(self._stream):
                    to[first:end].copy_(source[first:end], non_blocking=True)
                if time.perf_counter() >= until:
                    yield 0.0
                    until = time.perf_counter() + SLICE_S

    def _pin(self, memory: tuple[int, int]) -> None:
        status = torch.cuda.cudart().cudaHostRegister(*memory, 0)
        if int(status) != 0:
            raise ConfigError(f"a host buffer of {memory[1]} bytes cannot be pinned (CUDA error {int(status)}); raise the memlock limit")


def _runs(numbers: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Neighbours together: first, and one past the last."""
    cuts = (np.flatnonzero(np.diff(numbers) != 1) + 1).tolist()
    for first, end in zip([0, *cuts], [*cuts, len(numbers)], strict=True):
        yield int(numbers[first]), int(numbers[end - 1]) + 1
