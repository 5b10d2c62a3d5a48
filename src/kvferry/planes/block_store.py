"""The block store of a worker: jobs in turn, about a millisecond each.

Owned by one thread. It touches host memory alone: of regions on another device nothing can be rearranged, but those of a staged cache are
never registered, their mirror is.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from kvferry.errors import LocalProtocolError
from kvferry.planes.mirror import Mirror
from kvferry.planes.pacing import paced
from kvferry.planes.rearranging import STEP_BYTES, check_placement, rearrange
from kvferry.planes.runs import Bytes
from kvferry.planes.views import view_of
from kvferry.ports.block_store import Placement, StoredBlocks, StoreHandle
from kvferry.types import MemoryKind, Region

__all__ = ["HostBlockStore"]


@dataclass(slots=True, eq=False)
class _Job:
    handle: StoreHandle
    slices: Iterator[float]
    wait_s: float = 0.0


class HostBlockStore:
    """Implements `ports.block_store.BlockStore`. `regions` are what planes see, `mirror` says how they follow the engine's, if they are
    not the engine's own."""

    def __init__(self, regions: Sequence[Region], mirror: Mirror | None = None) -> None:
        self._views: list[Bytes | None] = [view_of(region) if region.memory is MemoryKind.DRAM else None for region in regions]
        self._mirror = mirror
        self._jobs: deque[_Job] = deque()
        self._last_handle = 0

    def place(self, placements: Sequence[Placement], blocks: Sequence[Sequence[int]] = ()) -> StoreHandle:
        parts = [(placement, self._view(placement)) for placement in placements]
        costs = (cost for placement, view in parts for cost in rearrange(placement, view))
        return self._start(chain(paced(costs, STEP_BYTES), self._mirrored().load(blocks) if blocks else ()))

    def expose(self, blocks: Sequence[Sequence[int]]) -> StoreHandle:
        return self._start(self._mirrored().save(blocks))

    def poll(self) -> list[StoredBlocks]:
        if not self._jobs:
            return []
        job = self._jobs.popleft()
        try:
            wait_s = next(job.slices, None)
        except Exception as error:  # top of a job: only its own blocks are lost
            return [StoredBlocks(job.handle, f"{type(error).__name__}: {error}")]
        if wait_s is None:
            return [StoredBlocks(job.handle, None)]
        job.wait_s = wait_s
        self._jobs.append(job)
        return []

    def poll_interval_s(self) -> float | None:
        return min((job.wait_s for job in self._jobs), default=None)

    def close(self) -> None:
        self._jobs.clear()
        self._views = []
        if self._mirror is not None:
            self._mirror.close()

    def _start(self, slices: Iterator[float]) -> StoreHandle:
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

    def _mirrored(self) -> Mirror:
        if self._mirror is None:
            raise LocalProtocolError("planes see the engine's own cache, so there is nothing to copy")
        return self._mirror
