"""The block store of a worker: runs jobs round robin, in slices of about a millisecond.

One thread owns the store. The store rearranges blocks in host memory only, not in regions on a
device. If a device cache has a host buffer, transports register the host buffer instead of the
cache, and the store rearranges blocks in the host buffer.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from kvferry.errors import LocalProtocolError
from kvferry.transports.base import BlockPermutation, StoreCompletion, StoreHandle
from kvferry.transports.copy.gather import region_view
from kvferry.transports.copy.segments import Bytes
from kvferry.transports.host_buffer.host import HostBuffer, run_in_ticks
from kvferry.transports.host_buffer.rearrange import STEP_BYTES, check_placement, rearrange
from kvferry.types import MemoryKind, Region


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
