"""Runs: segments that are neighbours on both sides, joined, so that one copy or descriptor moves them.

Pure. Segments are sorted by their local offset first: their order means nothing, and sorted they join best.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.ports.data import Segments
from kvferry.types import Region

__all__ = ["Bytes", "Descriptors", "Offsets", "batches", "coalesce", "descriptors_between"]

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Copy `i` moves `size_bytes[i]` bytes between `local[i]` and `remote[i]`: offsets or addresses, as the maker says."""

    local: Offsets
    remote: Offsets
    size_bytes: Offsets

    def __len__(self) -> int:
        return len(self.local)

    @property
    def total_bytes(self) -> int:
        return int(self.size_bytes.sum())

    def moved(self, local_base: int, remote_base: int) -> "Descriptors":
        return Descriptors(self.local + local_base, self.remote + remote_base, self.size_bytes)


def coalesce(segments: Segments) -> Descriptors:
    """The fewest copies that move exactly these segments."""
    order = np.argsort(segments.local_offsets, kind="stable")
    local, remote = segments.local_offsets[order], segments.remote_offsets[order]
    joined = (np.diff(local) == segments.segment_bytes) & (np.diff(remote) == segments.segment_bytes)
    starts = np.flatnonzero(np.concatenate(([True], ~joined))) if len(local) else np.empty(0, np.int64)
    counts = np.diff(np.append(starts, len(local)))
    return Descriptors(local[starts], remote[starts], counts.astype(np.int64) * segments.segment_bytes)


def descriptors_between(segments: Sequence[Segments], local: Sequence[Region], remote: Sequence[Region]) -> Descriptors:
    """The same of a whole transfer, as addresses. What shares its offsets with others is joined once: layers mostly do."""
    known: dict[tuple[int, int, int], Descriptors] = {}
    parts = []
    for part in segments:
        key = part.segment_bytes, id(part.local_offsets), id(part.remote_offsets)
        if key not in known:
            known[key] = coalesce(part)
        parts.append(known[key].moved(local[part.local_region].address, remote[part.remote_region].address))
    return _concatenate(parts)


def batches(descriptors: Descriptors, max_bytes: int, max_descriptors: int) -> Iterator[Descriptors]:
    """Cut into parts of at most `max_descriptors` copies and `max_bytes` bytes; a longer run is split."""
    descriptors = _split_long(descriptors, max_bytes)
    ends = np.cumsum(descriptors.size_bytes)
    first = 0
    while first < len(descriptors):
        before = int(ends[first] - descriptors.size_bytes[first])
        last = min(int(np.searchsorted(ends, before + max_bytes, side="right")), first + max_descriptors)
        yield Descriptors(descriptors.local[first:last], descriptors.remote[first:last], descriptors.size_bytes[first:last])
        first = last


def _split_long(descriptors: Descriptors, max_bytes: int) -> Descriptors:
    counts = -(-descriptors.size_bytes // max_bytes)
    if not len(descriptors) or int(counts.max()) == 1:
        return descriptors
    owner = np.repeat(np.arange(len(descriptors)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    skipped = nth * max_bytes
    return Descriptors(
        descriptors.local[owner] + skipped,
        descriptors.remote[owner] + skipped,
        np.minimum(max_bytes, descriptors.size_bytes[owner] - skipped),
    )


def _concatenate(parts: Sequence[Descriptors]) -> Descriptors:
    empty = np.empty(0, np.int64)
    return Descriptors(
        np.concatenate([empty, *(part.local for part in parts)]),
        np.concatenate([empty, *(part.remote for part in parts)]),
        np.concatenate([empty, *(part.size_bytes for part in parts)]),
    )
