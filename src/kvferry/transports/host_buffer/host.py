"""Work cut into turns of about a millisecond, so that no message waits for it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.errors import LocalProtocolError
from kvferry.transports.base import HOLE, Segments
from kvferry.transports.copy.gather import (
    SLICE_BYTES,
    SLICE_COST,
    CopyDirection,
    RegionCopy,
    copy_in_slices,
    fastest_copier,
    region_view,
)
from kvferry.types import MemoryKind, Region

__all__ = ["CpuHostBuffer", "HostBuffer", "blocks_by_region", "run_in_ticks"]


def run_in_ticks(costs: Iterable[int], tick_cost: int) -> Iterator[float]:
    """Take steps of the work, each of which says what it has cost, and pause when they come to
    `tick_cost`. The last turn has no pause: short work is over in one. Yields how long to pause, in
    seconds: not at all, but others have their turn.
    """
    spent = 0
    for cost in costs:
        spent += cost
        if spent >= tick_cost:
            yield 0.0
            spent = 0


# -------------------- mirror -------------------- A host buffer of an engine's cache in host
# memory: blocks copied there before peers read them, and back after they have arrived.
#
# Called by the thread that owns the store. Both sides have the same regions and block numbers; only
# addresses and spacing differ. This one is for an engine whose cache is host memory too, where a
# host buffer is needed by tests alone; the one for CUDA is in `cuda_mirror`.


class HostBuffer(Protocol):
    """Each copy is an iterator: one bounded slice of work per step, and how many seconds to wait
    before the next. Numbers of blocks are checked when it is asked for.
    """

    def save(self, blocks: Sequence[Sequence[int]]) -> Iterator[float]:
        """From the engine's memory to the host buffer."""

    def load(self, blocks: Sequence[Sequence[int]]) -> Iterator[float]:
        """From the host buffer to the engine's memory."""

    def close(self) -> None: ...


class CpuHostBuffer:
    def __init__(self, engine: Sequence[Region], host_buffer: Sequence[Region]) -> None:
        if any(region.memory is not MemoryKind.DRAM for region in (*engine, *host_buffer)):
            raise LocalProtocolError("this host buffer is for a cache in host memory")
        self._engine, self._host_buffer = tuple(engine), tuple(host_buffer)
        self._views = [
            (region_view(a), region_view(b)) for a, b in zip(engine, host_buffer, strict=True)
        ]
        self._copier = fastest_copier()

    def save(self, blocks: Sequence[Sequence[int]]) -> Iterator[float]:
        return self._copies(blocks, CopyDirection.READ)

    def load(self, blocks: Sequence[Sequence[int]]) -> Iterator[float]:
        return self._copies(blocks, CopyDirection.WRITE)

    def close(self) -> None:
        self._views = []

    def _copies(self, blocks: Sequence[Sequence[int]], direction: CopyDirection) -> Iterator[float]:
        """The host buffer is the local side: it is what is read into."""
        copies = []
        for index, chosen in blocks_by_region(blocks, self._engine):
            engine, host_buffer = self._engine[index], self._host_buffer[index]
            segments = Segments(
                index,
                index,
                engine.block_bytes,
                chosen * host_buffer.stride_bytes,
                chosen * engine.stride_bytes,
            )
            theirs, ours = self._views[index]
            copies.append(RegionCopy(segments, ours, theirs, direction))
        return run_in_ticks(
            (copied + SLICE_COST for copied, _ in copy_in_slices(copies, self._copier)), SLICE_BYTES
        )


def blocks_by_region(
    blocks: Sequence[Sequence[int]], regions: Sequence[Region]
) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Which blocks of each region are meant, in rising order, holes left out. LocalProtocolError
    for blocks that are not there.
    """
    by_group = [np.unique(np.asarray(group, np.int64)) for group in blocks]
    by_group = [numbers[numbers != HOLE] for numbers in by_group]
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
