"""Copies between an engine's cache and rows of the host pool, beside memcpy of the same segments.

`Cache` is the contract for the memory of an engine. `HostCache` implements it for engines on the
CPU. A GPU's cache would be a second implementation: regions in device memory, the kit's row copier
for them, and the device's own copy in place of memcpy.
"""

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from kvferry.bench.tiers.rounds import Comparison, Contestant, TimedCall, take_turns
from kvferry.cli.runtime import StopRequest
from kvferry.errors import KVFerryError
from kvferry.transports.base import RowBlocks, RowCopier
from kvferry.transports.copy.gather import fastest_copier
from kvferry.transports.copy.rows import CpuRowCopier, row_segments
from kvferry.transports.copy.segments import Bytes, Descriptors, Offsets
from kvferry.types import Region

SEED = 7


@dataclass(frozen=True, slots=True)
class MemoryScope:
    segments_kib: tuple[int, ...] = (4, 16, 64)
    regions: int = 32
    moved_mib: int = 128
    """Far more than the cache of any processor."""
    rounds: int = 15


class Cache(Protocol):
    """The memory of one engine's cache, and the memory of rows."""

    copier: RowCopier
    segment_bytes: int
    moved_bytes: int

    @property
    def rows(self) -> Sequence[RowBlocks]:
        """All rows, each with one block; the blocks are in random order."""

    def memcpy_save(self) -> TimedCall:
        """A plain copy of all segments from the cache to the rows, without checksums."""

    def memcpy_load(self) -> TimedCall: ...

    def memcpy_whole(self) -> TimedCall:
        """A plain copy of as many bytes in one piece."""

    def check(self) -> None:
        """Raise `KVFerryError` unless the rows have the bytes of their blocks."""


class HostCache:
    """Implements `Cache` in host memory."""

    def __init__(self, segment_bytes: int, num_regions: int, moved_bytes: int) -> None:
        num_blocks = moved_bytes // (segment_bytes * num_regions)
        size = num_blocks * num_regions * segment_bytes
        self._cache, self._rows = (np.frombuffer(mmap.mmap(-1, size), np.uint8) for _ in range(2))
        rng = np.random.default_rng(SEED)
        self._cache.view(np.uint64)[:] = rng.integers(0, 1 << 63, size // 8, np.uint64)
        address, region_bytes = int(self._cache.ctypes.data), num_blocks * segment_bytes
        regions = [
            Region(
                f"region {n}", address + n * region_bytes, segment_bytes, segment_bytes, num_blocks
            )
            for n in range(num_regions)
        ]
        self.copier: RowCopier = CpuRowCopier(regions)
        self.segment_bytes, self.moved_bytes = segment_bytes, size
        row_bytes = segment_bytes * num_regions
        self.rows = tuple(
            RowBlocks(int(self._rows.ctypes.data) + n * row_bytes, 0, (int(block),))
            for n, block in enumerate(rng.permutation(num_blocks))
        )
        segments = row_segments(self.rows, regions)
        self._in_cache = segments.cache - address
        self._in_rows = segments.host - int(self._rows.ctypes.data)
        self._sizes = segments.sizes

    def memcpy_save(self) -> TimedCall:
        return self._memcpy(self._rows, self._cache, self._in_rows, self._in_cache)

    def memcpy_load(self) -> TimedCall:
        return self._memcpy(self._cache, self._rows, self._in_cache, self._in_rows)

    def memcpy_whole(self) -> TimedCall:
        return lambda: np.copyto(self._rows, self._cache)

    def check(self) -> None:
        in_row, in_cache = int(self._in_rows[-1]), int(self._in_cache[-1])
        size = int(self._sizes[-1])
        if not np.array_equal(
            self._rows[in_row : in_row + size], self._cache[in_cache : in_cache + size]
        ):
            raise KVFerryError("a copy has moved other bytes; please report this as a bug")

    def _memcpy(
        self, target: Bytes, source: Bytes, targets: Offsets, sources: Offsets
    ) -> TimedCall:
        copy = fastest_copier()
        # Like the row copier, in the order of the source.
        order = np.argsort(sources, kind="stable")
        moves = Descriptors(sources[order], targets[order], self._sizes[order])
        return lambda: copy(target, source, moves)


def measure_memory(scope: MemoryScope, stop: StopRequest) -> Iterator[Comparison]:
    """Yield two comparisons for each segment size: saving and loading."""
    for kib in scope.segments_kib:
        cache: Cache = HostCache(kib * 1024, scope.regions, scope.moved_mib << 20)
        yield _compare("save", cache, partial(cache.copier.save, cache.rows), scope, stop)
        yield _compare("load", cache, partial(cache.copier.load, cache.rows), scope, stop)


def _compare(
    work: str, cache: Cache, ours: TimedCall, scope: MemoryScope, stop: StopRequest
) -> Comparison:
    memcpy = cache.memcpy_save() if work == "save" else cache.memcpy_load()
    contestants = [
        Contestant("row copier", ours),
        Contestant("memcpy", memcpy),
        Contestant("memcpy in one piece", cache.memcpy_whole()),
    ]
    seconds = take_turns(contestants, scope.rounds, stop)
    ours()
    cache.check()
    return Comparison(
        "memory",
        work,
        cache.segment_bytes,
        cache.moved_bytes,
        seconds,
        "row copier",
        "memcpy",
    )
