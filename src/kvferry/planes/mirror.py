"""A mirror of an engine's cache in host memory: blocks copied there before peers read them, and back after they have arrived.

Called by the thread that owns the store. Both sides have the same regions and block numbers; only addresses and spacing differ. This one
is for an engine whose cache is host memory too, where a mirror is needed by tests alone; the one for CUDA is in `cuda_mirror`.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.errors import LocalProtocolError
from kvferry.planes.copiers import fastest_copier
from kvferry.planes.gather import SLICE_BYTES, SLICE_COST, Direction, RegionCopy, copy_in_slices
from kvferry.planes.pacing import paced
from kvferry.planes.views import view_of
from kvferry.ports.block_store import HOLE
from kvferry.ports.data import Pieces
from kvferry.types import MemoryKind, Region

__all__ = ["HostMirror", "Mirror", "blocks_by_region"]


class Mirror(Protocol):
    """Each copy is an iterator: one bounded slice of work per step, and how many seconds to wait before the next. Numbers of blocks are
    checked when it is asked for."""

    def save(self, blocks: Sequence[Sequence[int]]) -> Iterator[float]:
        """From the engine's memory to the mirror."""

    def load(self, blocks: Sequence[Sequence[int]]) -> Iterator[float]:
        """From the mirror to the engine's memory."""

    def close(self) -> None: ...


class HostMirror:
    def __init__(self, engine: Sequence[Region], mirror: Sequence[Region]) -> None:
        if any(region.memory is not MemoryKind.DRAM for region in (*engine, *mirror)):
            raise LocalProtocolError("this mirror is for a cache in host memory")
        self._engine, self._mirror = tuple(engine), tuple(mirror)
        self._views = [(view_of(a), view_of(b)) for a, b in zip(engine, mirror, strict=True)]
        self._copier = fastest_copier()

    def save(self, blocks: Sequence[Sequence[int]]) -> Iterator[float]:
        return self._copies(blocks, Direction.READ)

    def load(self, blocks: Sequence[Sequence[int]]) -> Iterator[float]:
        return self._copies(blocks, Direction.WRITE)

    def close(self) -> None:
        self._views = []

    def _copies(self, blocks: Sequence[Sequence[int]], direction: Direction) -> Iterator[float]:
        """The mirror is the local side: it is what is read into."""
        copies = []
        for index, chosen in blocks_by_region(blocks, self._engine):
            engine, mirror = self._engine[index], self._mirror[index]
            pieces = Pieces(index, index, engine.block_bytes, chosen * mirror.stride_bytes, chosen * engine.stride_bytes)
            theirs, ours = self._views[index]
            copies.append(RegionCopy(pieces, ours, theirs, direction))
        return paced((copied + SLICE_COST for copied, _ in copy_in_slices(copies, self._copier)), SLICE_BYTES)


def blocks_by_region(blocks: Sequence[Sequence[int]], regions: Sequence[Region]) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Which blocks of each region are meant, in rising order, holes left out. LocalProtocolError for blocks that are not there."""
    by_group = [np.unique(np.asarray(group, np.int64)) for group in blocks]
    by_group = [numbers[numbers != HOLE] for numbers in by_group]
    chosen = []
    for index, region in enumerate(regions):
        numbers = by_group[region.group] if region.group < len(by_group) else np.empty(0, np.int64)
        if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < region.num_blocks:
            raise LocalProtocolError(f"blocks {numbers[0]} to {numbers[-1]} of region {region.name!r}, which has {region.num_blocks}")
        if len(numbers):
            chosen.append((index, numbers))
    return chosen
