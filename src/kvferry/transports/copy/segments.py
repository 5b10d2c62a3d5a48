"""Runs: segments that are neighbours on both sides, joined, so that one copy or descriptor moves
them.

Pure. Segments are sorted by their local offset first: their order means nothing, and sorted they
join best.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.errors import KVFerryError, LocalProtocolError, TransportError
from kvferry.transports.base import Segments
from kvferry.transports.copy.native import native_or
from kvferry.types import MemoryKind, Region

__all__ = [
    "MAX_ADDRESS",
    "PLACE_NUMBERS",
    "Bytes",
    "Descriptors",
    "Offsets",
    "are_within",
    "batches",
    "check_regions",
    "check_segment_fields",
    "check_segments",
    "coalesce",
    "descriptors_between",
    "merged_ranges",
    "put_all",
    "put_places",
]


Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Copy `i` moves `size_bytes[i]` bytes between `local[i]` and `remote[i]`: offsets or
    addresses, as the maker says.
    """

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
    joined = (np.diff(local) == segments.segment_bytes) & (
        np.diff(remote) == segments.segment_bytes
    )
    starts = (
        np.flatnonzero(np.concatenate(([True], ~joined))) if len(local) else np.empty(0, np.int64)
    )
    counts = np.diff(np.append(starts, len(local)))
    return Descriptors(
        local[starts], remote[starts], counts.astype(np.int64) * segments.segment_bytes
    )


def descriptors_between(
    segments: Sequence[Segments], local: Sequence[Region], remote: Sequence[Region]
) -> Descriptors:
    """The same of a whole transfer, as addresses. What shares its offsets with others is joined
    once: layers mostly do.
    """
    known: dict[tuple[int, int, int], Descriptors] = {}
    parts = []
    for part in segments:
        key = part.segment_bytes, id(part.local_offsets), id(part.remote_offsets)
        if key not in known:
            known[key] = coalesce(part)
        parts.append(
            known[key].moved(local[part.local_region].address, remote[part.remote_region].address)
        )
    return _concatenate(parts)


def batches(
    descriptors: Descriptors, max_bytes: int, max_descriptors: int
) -> Iterator[Descriptors]:
    """Cut into parts of at most `max_descriptors` copies and `max_bytes` bytes; a longer run is
    split.
    """
    descriptors = _split_long(descriptors, max_bytes)
    ends = np.cumsum(descriptors.size_bytes)
    first = 0
    while first < len(descriptors):
        before = int(ends[first] - descriptors.size_bytes[first])
        last = min(
            int(np.searchsorted(ends, before + max_bytes, side="right")), first + max_descriptors
        )
        yield Descriptors(
            descriptors.local[first:last],
            descriptors.remote[first:last],
            descriptors.size_bytes[first:last],
        )
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


# -------------------- offsets -------------------- Arithmetic over all offsets of a transfer at
# once: by a native function, or by numpy where kvferry was installed without a compiler.
#
# Pure. There may be hundreds of thousands of them, or some dozens for each of a hundred regions:
# both shall cost little.


PLACE_NUMBERS = 5
"""What a table says of each place (`copy_table.py`). The kernel and the native function count by it
too.
"""


def _are_within(offsets: Offsets, last: int) -> bool:
    return not len(offsets) or bool(int(offsets.min()) >= 0 and int(offsets.max()) <= last)


def _put_all(table: Offsets, first: int, offsets: Offsets, last: int) -> int:
    if not _are_within(offsets, last):
        raise IndexError("an offset leaves its region")
    table[first : first + len(offsets)] = offsets
    return int(np.bitwise_or.reduce(offsets)) if len(offsets) else 0


def _put_places(
    table: Offsets,
    first: int,
    sources: Sequence[int],
    targets: Sequence[int],
    rest: tuple[int, int, int],
) -> int:
    places = table[first : first + PLACE_NUMBERS * len(sources)].reshape(-1, PLACE_NUMBERS)
    places[:, 0], places[:, 1], places[:, 2:] = sources, targets, rest
    return int(np.bitwise_or.reduce(places[:, :2], axis=None))


_within: Callable[[Offsets, int], bool] = native_or("are_within", _are_within)
_put: Callable[[Offsets, int, Offsets, int], int] = native_or("put_all", _put_all)
put_places: Callable[[Offsets, int, Sequence[int], Sequence[int], tuple[int, int, int]], int] = (
    native_or("put_places", _put_places)
)
"""For each place write its numbers into the table from `first` on: its source, its target, and the
rest. All sources and targets, or-ed.
"""


def are_within(offsets: Offsets, last: int) -> bool:
    """Whether every one of them is from 0 to `last`."""
    try:
        return _within(offsets, last)
    except (BufferError, ValueError):  # they do not lie side by side
        return _are_within(offsets, last)


def put_all(table: Offsets, first: int, offsets: Offsets, last: int) -> int:
    """Write them into the table from `first` on. All of them, or-ed: what its lowest bits say of
    every one. IndexError unless every one is from 0 to `last`; then what was written is worthless.
    """
    try:
        return _put(table, first, offsets, last)
    except (BufferError, ValueError):  # they do not lie side by side
        return _put_all(table, first, offsets, last)


# -------------------- bounds --------------------
# Range checks of transfers: every offset lies in its region, before any address is computed.
#
# Pure. Shared by all data transports, so that they refuse the same things with the same errors.


MAX_ADDRESS = 1 << 63
"""Offsets and addresses are computed in signed 64 bits."""


def check_segments(
    segments: Sequence[Segments], local: Sequence[Region], remote: Sequence[Region], peer: object
) -> None:
    """LocalProtocolError when our side of a segment is impossible, TransportError when the peer's
    is.
    """
    check_segment_fields(segments, local, remote, peer)
    seen = set[tuple[int, int, int]]()
    for part in segments:
        size = part.segment_bytes
        # Layers mostly share their offsets: looking once is enough.
        near = id(part.local_offsets), local[part.local_region].size_bytes, size
        if near not in seen:
            seen.add(near)
            _check_side(
                part.local_region, part.local_offsets, size, local, ("our", LocalProtocolError)
            )
        far = id(part.remote_offsets), remote[part.remote_region].size_bytes, size
        if far not in seen:
            seen.add(far)
            _check_side(
                part.remote_region, part.remote_offsets, size, remote, (f"{peer}'s", TransportError)
            )


def check_segment_fields(
    segments: Sequence[Segments], local: Sequence[Region], remote: Sequence[Region], peer: object
) -> None:
    """The same of all but the offsets themselves: for transports that look at each of a great many
    when its turn comes.
    """
    num_local, num_remote = len(local), len(remote)
    for part in segments:
        if part.segment_bytes <= 0 or len(part.local_offsets) != len(part.remote_offsets):
            raise LocalProtocolError(
                f"a transfer with {peer} has {part.segment_bytes} bytes a segment, "
                f"{len(part.local_offsets)} local and "
                f"{len(part.remote_offsets)} remote offsets; this is a bug in its planning"
            )
        if not 0 <= part.local_region < num_local:
            raise LocalProtocolError(
                f"region {part.local_region} is not one of our {num_local} regions"
            )
        if not 0 <= part.remote_region < num_remote:
            raise TransportError(
                f"region {part.remote_region} is not one of {peer}'s {num_remote} regions"
            )


def check_regions(regions: Sequence[Region], peer: object) -> None:
    """TransportError unless a peer's regions are possible memory ranges."""
    for region in regions:
        numbers = (region.address, region.block_bytes, region.stride_bytes, region.num_blocks)
        if min(numbers) < 0 or region.address + region.size_bytes >= MAX_ADDRESS:
            raise TransportError(
                f"region {region.name!r} of {peer} is not a range of memory; drop this peer"
            )


def merged_ranges(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """The ranges (address, size) that the regions cover, ascending; overlapping ones as one, and
    neighbours in host memory. On a device neighbours may be allocations of their own, of which no
    two can be shown to others as one.
    """
    merged: list[tuple[int, int]] = []
    for region in sorted(regions, key=lambda each: each.address):
        end = region.address + region.size_bytes
        reach = sum(merged[-1]) if merged else 0
        if merged and (
            region.address < reach or (region.address == reach and region.memory is MemoryKind.DRAM)
        ):
            first = merged[-1][0]
            merged[-1] = first, max(end, sum(merged[-1])) - first
        elif region.size_bytes:
            merged.append((region.address, region.size_bytes))
    return merged


def _check_side(
    region: int,
    offsets: npt.NDArray[np.int64],
    segment_bytes: int,
    regions: Sequence[Region],
    blame: tuple[str, type[KVFerryError]],
) -> None:
    whose, error = blame
    size_bytes = regions[region].size_bytes
    if not are_within(offsets, size_bytes - segment_bytes):
        raise error(
            f"offsets {int(offsets.min())} to {int(offsets.max())} with {segment_bytes} bytes a "
            f"segment leave {whose} region "
            f"{region} of {size_bytes} bytes"
        )
