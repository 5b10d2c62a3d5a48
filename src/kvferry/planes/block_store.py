"""The block store of a worker whose cache is host memory: jobs in turn, a slice each.

Owned by one thread. Regions on another device can be carried by planes, but nothing here can touch them.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.errors import LocalProtocolError
from kvferry.planes.gather import Bytes
from kvferry.planes.rearranging import check_placement, rearrange
from kvferry.planes.views import view_of
from kvferry.ports.block_store import Placement, StoredBlocks, StoreHandle
from kvferry.types import MemoryKind, Region

__all__ = ["HostBlockStore"]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    handle: StoreHandle
    slices: Iterator[int]


class HostBlockStore:
    """Implements `ports.block_store.BlockStore`."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._views: list[Bytes | None] = [view_of(region) if region.memory is MemoryKind.DRAM else None for region in regions]
        self._jobs: deque[_Job] = deque()
        self._last_handle = 0

    def place(self, placements: Sequence[Placement]) -> StoreHandle:
        parts = [(placement, self._view(placement)) for placement in placements]
        return self._start(slice_bytes for placement, view in parts for slice_bytes in rearrange(placement, view))

    def poll(self) -> list[StoredBlocks]:
        if not self._jobs:
            return []
        job = self._jobs.popleft()
        try:
            is_over = next(job.slices, None) is None
        except Exception as error:  # top of a job: only its own blocks are lost
            return [StoredBlocks(job.handle, f"{type(error).__name__}: {error}")]
        if is_over:
            return [StoredBlocks(job.handle, None)]
        self._jobs.append(job)
        return []

    def poll_interval_s(self) -> float | None:
        return 0.0 if self._jobs else None

    def close(self) -> None:
        self._jobs.clear()
        self._views = []

    def _start(self, slices: Iterator[int]) -> StoreHandle:
        self._last_handle += 1
        handle = StoreHandle(self._last_handle)
        self._jobs.append(_Job(handle, slices))
        return handle

    def _view(self, placement: Placement) -> Bytes:
        view = self._views[placement.region] if 0 <= placement.region < len(self._views) else None
        if view is None:
            raise LocalProtocolError(f"region {placement.region} is not one of ours in host memory, so its blocks cannot be rearranged")
        check_placement(placement, len(view))
        return view
