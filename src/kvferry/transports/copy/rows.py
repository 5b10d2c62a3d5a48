"""Copies between a cache in host memory and the rows of storage tiers.

Any thread may call; the native copy runs without the GIL. See `transports.base.RowCopier`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvferry.errors import LocalProtocolError
from kvferry.transports.base import RowBlocks
from kvferry.transports.copy.checksum import Checksums, row_checksums, segment_checksum
from kvferry.transports.copy.gather import bytes_at
from kvferry.transports.copy.native import native_or
from kvferry.transports.copy.segments import MAX_ADDRESS, Offsets
from kvferry.types import MemoryKind, Region

# -- segments of rows --


@dataclass(frozen=True, slots=True, eq=False)
class RowSegments:
    """The segments of some rows, row after row: segment `i` has `sizes[i]` bytes at `cache[i]` in
    the cache and at `host[i]` in the row. The segments of row `r` end before segment `ends[r]`.
    """

    cache: Offsets
    host: Offsets
    sizes: Offsets
    ends: Offsets


def row_segments(rows: Sequence[RowBlocks], regions: Sequence[Region]) -> RowSegments:
    """Return the segments in the order of `RowBlocks`. LocalProtocolError, before any address is
    computed, if a group has no region, a block does not exist, or a row is not a range of memory.
    """
    # Rows of the same group and length are mostly adjacent: numpy handles them together.
    parts = [
        _segments_of_group(list(alike), regions_of(group, regions))
        for (group, _), alike in groupby(rows, lambda row: (row.group, len(row.block_ids)))
    ]
    cache, host, sizes, counts = (
        parts[0]
        if len(parts) == 1
        else (
            np.concatenate([np.empty(0, np.int64), *(part[n] for part in parts)]) for n in range(4)
        )
    )
    return RowSegments(cache, host, sizes, counts.cumsum())


def regions_of(group: int, regions: Sequence[Region]) -> list[Region]:
    found = [region for region in regions if region.group == group]
    if not found:
        raise LocalProtocolError(f"the cache has no region in KV-cache group {group}")
    return found


def check_block_ids(ids: npt.ArrayLike, regions: Sequence[Region]) -> None:
    """LocalProtocolError unless every block exists in all regions of a group."""
    ids, num_blocks = np.asarray(ids), min(region.num_blocks for region in regions)
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < num_blocks:
        raise LocalProtocolError(
            f"blocks {ids.min()} to {ids.max()} of KV-cache group {regions[0].group}, which has "
            f"{num_blocks} blocks"
        )


def _segments_of_group(
    rows: Sequence[RowBlocks], regions: Sequence[Region]
) -> tuple[Offsets, Offsets, Offsets, Offsets]:
    """Return cache addresses, row addresses and sizes of all segments, and each row's number of
    segments. All rows have equally many blocks of one group.
    """
    ids = np.array([row.block_ids for row in rows], np.int64)[:, :, np.newaxis]
    check_block_ids(ids, regions)
    sizes = np.array([region.block_bytes for region in regions], np.int64)
    block_bytes = int(sizes.sum())
    row_bytes = block_bytes * ids.shape[1]
    addresses = [row.address for row in rows]
    if not 0 < min(addresses) <= max(addresses) < MAX_ADDRESS - row_bytes:
        raise LocalProtocolError("a row of host memory has no valid address")
    bases = np.array([region.address for region in regions], np.int64)
    strides = np.array([region.stride_bytes for region in regions], np.int64)
    starts = np.array(addresses, np.int64).reshape(-1, 1, 1)
    in_row = np.arange(ids.shape[1], dtype=np.int64).reshape(-1, 1) * block_bytes
    cache = bases + ids * strides
    host = starts + in_row + (np.cumsum(sizes) - sizes)
    return (
        cache.ravel(),
        host.ravel(),
        np.broadcast_to(sizes, cache.shape).ravel(),
        np.full(len(rows), ids.shape[1] * len(regions), np.int64),
    )


# -- copier --


CopyAndSum = Callable[[Offsets, Offsets, Offsets, Checksums], None]
"""Copy segments (targets, sources, sizes) between addresses, and write the checksum of each segment
to the last array. The caller has checked all addresses.
"""


def copy_and_sum_by_numpy(
    targets: Offsets, sources: Offsets, sizes: Offsets, sums: Checksums
) -> None:
    for n, (target, source, size) in enumerate(
        zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
    ):
        # Another process may write to the source meanwhile: it is read once, into a buffer that
        # only this call sees.
        copied = bytes_at(source, size).copy()
        bytes_at(target, size)[:] = copied
        sums[n] = segment_checksum(copied)


copy_and_sum: CopyAndSum = native_or("copy_and_sum", copy_and_sum_by_numpy)


def copy_row(row: RowBlocks, target: int, regions: Sequence[Region]) -> int:
    """See `transports.base.RowCopier.copy_row`."""
    block = [region.block_bytes for region in regions_of(row.group, regions)]
    sizes = np.array(block * len(row.block_ids), np.int64)
    offsets, sums = sizes.cumsum() - sizes, np.zeros(len(sizes), np.uint64)
    copy_and_sum(target + offsets, row.address + offsets, sizes, sums)
    return int(row_checksums(sums, sizes, np.array([len(sizes)]))[0])


class CpuRowCopier:
    """Implements `transports.base.RowCopier` for a cache in host memory."""

    def __init__(self, regions: Sequence[Region], copy_and_sum: CopyAndSum = copy_and_sum) -> None:
        if any(region.memory is not MemoryKind.DRAM for region in regions):
            raise LocalProtocolError("this copier is for a cache in host memory")
        self._regions = tuple(regions)
        self._copy_and_sum = copy_and_sum

    def row_bytes(self, group: int, num_blocks: int) -> int:
        return num_blocks * sum(region.block_bytes for region in regions_of(group, self._regions))

    def save(self, rows: Sequence[RowBlocks]) -> list[int]:
        segments = row_segments(rows, self._regions)
        return self._copy(segments.host, segments.cache, segments)

    def load(self, rows: Sequence[RowBlocks]) -> list[int]:
        segments = row_segments(rows, self._regions)
        return self._copy(segments.cache, segments.host, segments)

    def copy_row(self, row: RowBlocks, target: int) -> int:
        return copy_row(row, target, self._regions)

    def pin(self, address: int, size_bytes: int) -> None:
        return None

    def unpin(self, address: int) -> None:
        return None

    def close(self) -> None:
        return None

    def _copy(self, targets: Offsets, sources: Offsets, segments: RowSegments) -> list[int]:
        sums = np.zeros(len(sources), np.uint64)
        if bool((sources[1:] >= sources[:-1]).all()):
            self._copy_and_sum(targets, sources, segments.sizes, sums)
        else:
            # Sorted by source: docs/decisions/018-copies-by-a-compiled-loop.md.
            order = np.argsort(sources, kind="stable")
            sorted_sums = np.zeros_like(sums)
            self._copy_and_sum(targets[order], sources[order], segments.sizes[order], sorted_sums)
            sums[order] = sorted_sums
        checksums: list[int] = row_checksums(sums, segments.sizes, segments.ends).tolist()
        return checksums
