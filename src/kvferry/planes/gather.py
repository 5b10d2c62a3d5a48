"""Copying pieces between two mapped regions, in slices, at the speed of memory.

Called by the thread that owns the plane. Three ways, chosen by what the offsets look like. CPU time of the whole plane ÷ memcpy of the same
bytes (15 GB/s), at 4 / 16 / 64 KiB a piece, Neoverse-N1 with 4 KiB pages; in brackets one loop of memcpy in C over the same pieces:

    runs      neighbours on both sides joined (here eight), one copy each             0.49 / 0.70 / 0.82    (0.67 / 0.87 / 0.96)
    gather    scattered source, target in runs: `take` straight into each run         0.28 / 0.54 / 0.68    (0.36 / 0.67 / 0.85)
    stage     both scattered: `take` into a buffer that stays in cache, then out      0.17 / 0.31 / -       (0.36 / 0.67 / 0.83)
    runs      both scattered, long pieces: one copy each                                 - / -    / 0.56

`take` and the scatter see a piece as one opaque item (numpy void), which makes each of them a loop of memcpy; all let go of the
interpreter's lock.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvferry.planes.runs import Offsets, Runs, batches, coalesce
from kvferry.ports.data import Pieces

__all__ = ["Bytes", "Direction", "RegionCopy", "Stage"]

Bytes = npt.NDArray[np.uint8]

SLICE_BYTES = 8 * 1024 * 1024
"""What one slice copies at most: about a millisecond, so that no message waits for a transfer. Smaller ones cost 5 % for each halving."""
STAGE_BYTES = 256 * 1024
"""Best of 64 KiB to 1 MiB: it must hold many pieces and stay in the second-level cache."""
JOINED_RUN_BYTES = 32 * 1024
"""Joined neighbours of this length on average are worth a numpy call each."""
LONG_PIECE_BYTES = 64 * 1024
"""From here on a numpy call for each copy costs less than a second pass through the stage."""
MIN_GATHER_PIECES = 4
"""Target runs shorter than this are staged: a call each would cost more."""


class Direction(Enum):
    READ = "read"
    WRITE = "write"


class Stage:
    """The buffer that scattered pieces pass through; one per plane."""

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(STAGE_BYTES, np.uint8)

    def items(self, piece_bytes: int) -> npt.NDArray[np.void]:
        return _items(self._bytes, piece_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class RegionCopy:
    """One region's share of a transfer. The pieces have been checked against both regions."""

    pieces: Pieces
    local: Bytes
    remote: Bytes
    direction: Direction
    stage: Stage

    def slices(self) -> Iterator[tuple[int, int]]:
        """Copy one slice each time; yields its bytes and how many copies it took."""
        runs = coalesce(self._to_target())
        if len(runs) == 0:
            return iter(())
        return self._copy_runs(runs) if self._prefers_runs(runs) or not self._is_aligned() else self._gather()

    def _prefers_runs(self, runs: Runs) -> bool:
        pieces = self._to_target()
        mean_bytes = runs.total_bytes / len(runs)
        is_joined = mean_bytes >= MIN_GATHER_PIECES * pieces.piece_bytes and mean_bytes >= JOINED_RUN_BYTES
        is_scattered = _count_target_runs(pieces) * MIN_GATHER_PIECES > len(pieces.local_offsets)
        return is_joined or (is_scattered and pieces.piece_bytes >= LONG_PIECE_BYTES)

    def _to_target(self) -> Pieces:
        """The pieces with the side that is written as their local one."""
        pieces = self.pieces
        if self.direction is Direction.READ:
            return pieces
        return Pieces(pieces.remote_region, pieces.local_region, pieces.piece_bytes, pieces.remote_offsets, pieces.local_offsets)

    def _ends(self) -> tuple[Bytes, Bytes]:
        return (self.local, self.remote) if self.direction is Direction.READ else (self.remote, self.local)

    def _is_aligned(self) -> bool:
        """Whether both regions can be seen as rows of pieces."""
        size = self.pieces.piece_bytes
        fits = size <= STAGE_BYTES
        return fits and not (np.any(self.pieces.local_offsets % size) or np.any(self.pieces.remote_offsets % size))

    def _copy_runs(self, runs: Runs) -> Iterator[tuple[int, int]]:
        target, source = self._ends()
        for part in batches(runs, SLICE_BYTES, len(runs)):
            for to, origin, size in zip(part.local.tolist(), part.remote.tolist(), part.size_bytes.tolist(), strict=True):
                target[to : to + size] = source[origin : origin + size]
            yield part.total_bytes, len(part)

    def _gather(self) -> Iterator[tuple[int, int]]:
        size = self.pieces.piece_bytes
        target, source = (_items(end, size) for end in self._ends())
        pieces = self._to_target()
        order = np.argsort(pieces.local_offsets, kind="stable")
        targets, sources = pieces.local_offsets[order] // size, pieces.remote_offsets[order] // size
        step = max(1, SLICE_BYTES // size)
        for first in range(0, len(targets), step):
            to, origin = targets[first : first + step], sources[first : first + step]
            starts = np.flatnonzero(np.diff(to, prepend=to[0] - 2) != 1)
            if len(starts) * MIN_GATHER_PIECES <= len(to):
                _take_runs(source, target, origin, to, starts)
            else:
                self._through_stage(source, target, origin, to)
            yield len(to) * size, len(to)

    def _through_stage(self, source: npt.NDArray[np.void], target: npt.NDArray[np.void], origin: Offsets, to: Offsets) -> None:
        stage = self.stage.items(self.pieces.piece_bytes)
        for first in range(0, len(to), len(stage)):
            chunk = to[first : first + len(stage)]
            np.take(source, origin[first : first + len(stage)], out=stage[: len(chunk)], mode="clip")
            target[chunk] = stage[: len(chunk)]


def _take_runs(source: npt.NDArray[np.void], target: npt.NDArray[np.void], origin: Offsets, to: Offsets, starts: Offsets) -> None:
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), len(to)], strict=True):
        place = int(to[first])
        # mode="clip" lets take write into `out` without a copy of its own; the offsets were checked before.
        np.take(source, origin[first:last], out=target[place : place + last - first], mode="clip")


def _count_target_runs(pieces: Pieces) -> int:
    return int(np.count_nonzero(np.diff(np.sort(pieces.local_offsets)) != pieces.piece_bytes)) + 1


def _items(region: Bytes, piece_bytes: int) -> npt.NDArray[np.void]:
    """A region as whole pieces; a shorter rest at its end is not addressable this way and never asked for."""
    return region[: len(region) // piece_bytes * piece_bytes].view(np.dtype((np.void, piece_bytes)))
