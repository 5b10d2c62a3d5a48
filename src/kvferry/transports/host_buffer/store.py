"""The block store of a worker, and the host buffer of a cache in host memory.

A host buffer is a copy of an engine's cache in host memory, which transports register instead of
the cache: blocks are copied to it before peers read them, and back to the engine after they have
arrived. The store runs these copies and rearranges blocks as jobs, round robin, in slices of about
a millisecond. It rearranges blocks in host memory only, not in regions on a device. The host buffer
of a CUDA cache is in `host_buffer/cuda.py`.

The thread that owns the store makes all calls. See
docs/decisions/020-host-buffers-and-order-on-arrival.md.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.errors import LocalProtocolError
from kvferry.transports.base import (
    NO_BLOCK,
    BlockPermutation,
    Segments,
    StoreCompletion,
    StoreHandle,
)
from kvferry.transports.copy.gather import (
    SLICE_BYTES,
    SLICE_COST,
    copy_in_slices,
    fastest_copier,
    region_view,
)
from kvferry.transports.copy.segments import Bytes, Offsets
from kvferry.transports.host_buffer.rearrange import STEP_BYTES, check_placement, rearrange
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
    """Implements `HostBuffer` for a cache in host memory that transports cannot share."""

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
        segments, shared = [], dict[tuple[int, int], Offsets]()
        for index, chosen in blocks_by_region(blocks, self._regions):
            # Regions that move the same blocks share their offsets.
            offsets = (
                shared.setdefault((id(chosen), side[index][0]), chosen * side[index][0])
                for side in (sources, targets)
            )
            segments.append(Segments(index, index, self._regions[index].block_bytes, *offsets))
        source_views, target_views = ([view for _, view in side] for side in (sources, targets))
        slices = copy_in_slices(segments, source_views, target_views, self._copier)
        return run_in_ticks((copied + SLICE_COST for copied, _ in slices), SLICE_BYTES)


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


# -- the store --


@dataclass(slots=True, eq=False)
class _Job:
    """One call of `place` or `copy_to_host_buffer`. Each slice yields how many seconds to wait."""

    handle: StoreHandle
    slices: Iterator[float]
    wait_s: float = 0.0


class HostBlockStore:
    """Implements `transports.base.BlockStore`. `regions` are the regions that transports see. If
    these are not the engine's own regions, `host_buffer` copies between the two.
    """

    def __init__(self, regions: Sequence[Region], host_buffer: HostBuffer | None = None) -> None:
        self._views: list[Bytes | None] = [
            region_view(region) if region.memory is MemoryKind.DRAM else None for region in regions
        ]
        self._host_buffer = host_buffer
        self._jobs: deque[_Job] = deque()
        self._last_handle = 0

    def place(
        self, permutations: Sequence[BlockPermutation], blocks: Sequence[Sequence[int]] = ()
    ) -> StoreHandle:
        parts = [(placement, self._view(placement)) for placement in permutations]
        costs = (cost for placement, view in parts for cost in rearrange(placement, view))
        return self._start(
            chain(
                run_in_ticks(costs, STEP_BYTES),
                self._required_host_buffer().load(blocks) if blocks else (),
            )
        )

    def copy_to_host_buffer(self, blocks: Sequence[Sequence[int]]) -> StoreHandle:
        return self._start(self._required_host_buffer().save(blocks))

    def poll(self) -> list[StoreCompletion]:
        if not self._jobs:
            return []
        job = self._jobs.popleft()
        try:
            wait_s = next(job.slices, None)
        except Exception as error:  # top of a job: only the blocks of this job are lost
            return [StoreCompletion(job.handle, f"{type(error).__name__}: {error}")]
        if wait_s is None:
            return [StoreCompletion(job.handle, None)]
        job.wait_s = wait_s
        self._jobs.append(job)
        return []

    def poll_interval_s(self) -> float | None:
        return min((job.wait_s for job in self._jobs), default=None)

    def close(self) -> None:
        self._jobs.clear()
        self._views = []
        if self._host_buffer is not None:
            self._host_buffer.close()

    def _start(self, slices: Iterator[float]) -> StoreHandle:
        self._last_handle += 1
        handle = StoreHandle(self._last_handle)
        self._jobs.append(_Job(handle, slices))
        return handle

    def _view(self, placement: BlockPermutation) -> Bytes:
        view = self._views[placement.region] if 0 <= placement.region < len(self._views) else None
        if view is None:
            raise LocalProtocolError(
                f"region {placement.region} is not one of ours in host memory, so its blocks "
                "cannot be rearranged"
            )
        check_placement(placement, len(view))
        return view

    def _required_host_buffer(self) -> HostBuffer:
        if self._host_buffer is None:
            raise LocalProtocolError(
                "transports see the engine's own cache, so there is nothing to copy"
            )
        return self._host_buffer
