"""Host buffers: a copy of an engine's cache in host memory, which transports register instead.

Blocks are copied to the host buffer before peers read them, and back to the engine after they have
arrived. `HostBuffer` is the contract. `CpuHostBuffer` is for an engine whose cache is host memory
too; only tests need it. The host buffer of a CUDA cache is in `host_buffer/cuda.py`.

The thread that owns the store makes all calls. See
docs/decisions/020-host-buffers-and-order-on-arrival.md.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.errors import LocalProtocolError
from kvferry.transports.base import NO_BLOCK
from kvferry.transports.copy.gather import (
    SLICE_BYTES,
    SLICE_COST,
    RegionCopy,
    copy_in_slices,
    fastest_copier,
    region_view,
)
from kvferry.transports.copy.segments import Bytes
from kvferry.types import MemoryKind, Region


def run_in_ticks(costs: Iterable[int], tick_cost: int) -> Iterator[float]:
    """Cut work into ticks of about `tick_cost`, so that no message waits long for the work.

    `costs` does one step of the work at a time and yields the cost of the step. At the end of each
    tick this iterator yields how many seconds to wait: 0, so that other jobs run in between. Work
    that fits in one tick yields nothing.
    """
    spent = 0
    for cost in costs:
        spent += cost
        if spent >= tick_cost:
            yield 0.0
            spent = 0


# -- host buffers --
# The host buffer has the same regions and block ids as the engine; only the addresses and strides
# differ.


class HostBuffer(Protocol):
    """Copies blocks between the engine's memory and the host buffer.

    Each copy is an iterator: one step does one bounded slice of work and yields how many seconds to
    wait before the next step. Block ids are checked by `save` and `load`, before the first step.
    """

    def save(self, blocks: Sequence[Sequence[int]]) -> Iterator[float]:
        """Copy blocks (ids by group) from the engine's memory to the host buffer."""

    def load(self, blocks: Sequence[Sequence[int]]) -> Iterator[float]:
        """Copy blocks (ids by group) from the host buffer to the engine's memory."""

    def close(self) -> None: ...


_Views = Sequence[tuple[int, Bytes]]
"""The stride of each region, and its bytes."""


class CpuHostBuffer:
    """Implements `HostBuffer` for an engine whose cache is in host memory."""

    def __init__(self, engine: Sequence[Region], host_buffer: Sequence[Region]) -> None:
        if any(region.memory is not MemoryKind.DRAM for region in (*engine, *host_buffer)):
            raise LocalProtocolError("this host buffer is for a cache in host memory")
        self._regions = tuple(engine)
        self._engine = [(region.stride_bytes, region_view(region)) for region in engine]
        self._host_buffer = [(region.stride_bytes, region_view(region)) for region in host_buffer]
        self._copier = fastest_copier()

    def save(self, blocks: Sequence[Sequence[int]]) -> Iterator[float]:
        return self._copies(blocks, self._engine, self._host_buffer)

    def load(self, blocks: Sequence[Sequence[int]]) -> Iterator[float]:
        return self._copies(blocks, self._host_buffer, self._engine)

    def close(self) -> None:
        self._engine, self._host_buffer = [], []

    def _copies(
        self, blocks: Sequence[Sequence[int]], sources: _Views, targets: _Views
    ) -> Iterator[float]:
        copies = []
        for index, chosen in blocks_by_region(blocks, self._regions):
            (from_stride, source), (to_stride, target) = sources[index], targets[index]
            block_bytes = self._regions[index].block_bytes
            copies.append(
                RegionCopy(source, target, block_bytes, chosen * from_stride, chosen * to_stride)
            )
        return run_in_ticks(
            (copied + SLICE_COST for copied, _ in copy_in_slices(copies, self._copier)), SLICE_BYTES
        )


def blocks_by_region(
    blocks: Sequence[Sequence[int]], regions: Sequence[Region]
) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Return the blocks to copy in each region, in ascending order, without holes.
    LocalProtocolError for block ids that do not exist.
    """
    by_group = [np.unique(np.asarray(group, np.int64)) for group in blocks]
    by_group = [numbers[numbers != NO_BLOCK] for numbers in by_group]
    chosen = []
    for index, region in enumerate(regions):
        numbers = by_group[region.group] if region.group < len(by_group) else np.empty(0, np.int64)
        if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < region.num_blocks:
            raise LocalProtocolError(
                f"blocks {numbers[0]} to {numbers[-1]} of region {region.name!r}, which has "
                f"{region.num_blocks}"
            )
        if len(numbers):
            chosen.append((index, numbers))
    return chosen
