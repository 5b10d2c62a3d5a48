"""Runs: pieces that are neighbours on both sides, joined, so that one copy or descriptor moves them.

Pure. Pieces are sorted by their local offset first: their order means nothing, and sorted they join best.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.ports.data import Pieces
from kvferry.types import Region

__all__ = ["Bytes", "Offsets", "Runs", "batches", "between", "coalesce"]

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Copy `i` moves `size_bytes[i]` bytes between `local[i]` and `remote[i]`: offsets or addresses, as the maker says."""

    local: Offsets
    remote: Offsets
    size_bytes: Offsets

    def __len__(self) -> int:
        return len(self.local)

    @property
    def total_bytes(self) -> int:
        return int(self.size_bytes.sum())

    def moved(self, local_base: int, remote_base: int) -> "Runs":
        return Runs(self.local + local_base, self.remote + remote_base, self.size_bytes)


def coalesce(pieces: Pieces) -> Runs:
    """The fewest copies that move exactly these pieces."""
    order = np.argsort(pieces.local_offsets, kind="stable")
    local, remote = pieces.local_offsets[order], pieces.remote_offsets[order]
    joined = (np.diff(local) == pieces.piece_bytes) & (np.diff(remote) == pieces.piece_bytes)
    starts = np.flatnonzero(np.concatenate(([True], ~joined))) if len(local) else np.empty(0, np.int64)
    counts = np.diff(np.append(starts, len(local)))
    return Runs(local[starts], remote[starts], counts.astype(np.int64) * pieces.piece_bytes)


def between(pieces: Sequence[Pieces], local: Sequence[Region], remote: Sequence[Region]) -> Runs:
    """The same of a whole transfer, as addresses. What shares its offsets with others is joined once: layers mostly do."""
    known: dict[tuple[int, int, int], Runs] = {}
    parts = []
    for part in pieces:
        key = part.piece_bytes, id(part.local_offsets), id(part.remote_offsets)
        if key not in known:
            known[key] = coalesce(part)
        parts.append(known[key].moved(local[part.local_region].address, remote[part.remote_region].address))
    return _concatenate(parts)


def batches(runs: Runs, max_bytes: int, max_runs: int) -> Iterator[Runs]:
    """Cut into parts of at most `max_runs` copies and `max_bytes` bytes; a longer run is split."""
    runs = _split_long(runs, max_bytes)
    ends = np.cumsum(runs.size_bytes)
    first = 0
    while first < len(runs):
        before = int(ends[first] - runs.size_bytes[first])
        last = min(int(np.searchsorted(ends, before + max_bytes, side="right")), first + max_runs)
        yield Runs(runs.local[first:last], runs.remote[first:last], runs.size_bytes[first:last])
        first = last


def _split_long(runs: Runs, max_bytes: int) -> Runs:
    counts = -(-runs.size_bytes // max_bytes)
    if not len(runs) or int(counts.max()) == 1:
        return runs
    owner = np.repeat(np.arange(len(runs)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    skipped = nth * max_bytes
    return Runs(runs.local[owner] + skipped, runs.remote[owner] + skipped, np.minimum(max_bytes, runs.size_bytes[owner] - skipped))


def _concatenate(parts: Sequence[Runs]) -> Runs:
    empty = np.empty(0, np.int64)
    return Runs(
        np.concatenate([empty, *(part.local for part in parts)]),
        np.concatenate([empty, *(part.remote for part in parts)]),
        np.concatenate([empty, *(part.size_bytes for part in parts)]),
    )
