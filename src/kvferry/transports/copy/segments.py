"""Segments of a transfer: coalescing, batches, and range checks.

Segments that are adjacent on both sides are joined, so that one copy or descriptor moves them. They
are sorted by local offset first: their order has no meaning, and sorted segments join best. Pure.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.errors import KVFerryError, LocalProtocolError, TransportError
from kvferry.transports.base import Segments
from kvferry.transports.copy.native import native_or
from kvferry.types import MemoryKind, Region

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Descriptor `i` moves `size_bytes[i]` bytes between `local[i]` and `remote[i]`. These are
    offsets or addresses, depending on the function that made the descriptors.
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
    """Return the fewest descriptors that move exactly these segments, sorted by local offset."""
    local, remote, size = segments.local_offsets, segments.remote_offsets, segments.segment_bytes
    if len(local) < 2:
        return Descriptors(local, remote, np.full(len(local), size, np.int64))
    order = np.argsort(local, kind="stable")
    local, remote = local[order], remote[order]
    joined = (np.diff(local) == size) & (np.diff(remote) == size)
    starts = np.flatnonzero(np.concatenate(([True], ~joined)))
    counts = np.diff(np.append(starts, len(local)))
    return Descriptors(local[starts], remote[starts], counts.astype(np.int64) * size)


MAX_PLACES = 2048
"""Most segments in a group, and most places in a table (`copy/table.py`)."""


def group_by_offsets(segments: Sequence[Segments]) -> list[Sequence[Segments]]:
    """Group segments that share their offsets, sorted by size and length, with at most `MAX_PLACES`
    segments in a group. Offsets are shared if they are the same array.
    """
    if not segments:
        return []
    # Mostly all segments share their offsets, so check that first: there may be a hundred layers.
    size = segments[0].segment_bytes
    near, far = segments[0].local_offsets, segments[0].remote_offsets
    for part in segments:
        if (
            part.local_offsets is not near
            or part.remote_offsets is not far
            or part.segment_bytes != size
        ):
            break
    else:
        if len(segments) <= MAX_PLACES:
            return [segments] if len(near) else []
    found: dict[tuple[int, int, int], list[Segments]] = {}
    for part in segments:
        if len(part.local_offsets):
            found.setdefault(
                (part.segment_bytes, id(part.local_offsets), id(part.remote_offsets)), []
            ).append(part)
    groups = sorted(
        found.values(), key=lambda same: (same[0].segment_bytes, len(same[0].local_offsets))
    )
    return [
        same[first : first + MAX_PLACES]
        for same in groups
        for first in range(0, len(same), MAX_PLACES)
    ]


def descriptors_between(
    segments: Sequence[Segments], local: Sequence[Region], remote: Sequence[Region]
) -> Descriptors:
    """Coalesce a whole transfer into descriptors with addresses. Segments that share their arrays
    of offsets are coalesced once: layers mostly share them.
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
    """Cut descriptors into batches of at most `max_descriptors` copies and `max_bytes` bytes; a
    longer descriptor is split.
    """
    if len(descriptors) <= max_descriptors and descriptors.total_bytes <= max_bytes:
        if len(descriptors):
            yield descriptors
        return
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
    if int(counts.max()) == 1:
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


# -- arithmetic on offsets --
# One call handles all offsets of a transfer: by a native function, or by numpy if kvferry was
# installed without a compiler. There may be hundreds of thousands of offsets in one region, or a
# few dozen in each of a hundred regions; both must be cheap.


PLACE_NUMBERS = 5
"""Numbers that describe one place in a table (`copy/table.py`). The kernel and the native function
rely on this value too.
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
"""Write the entry of each place into the table from `first` on: source, target, and `rest`. Returns
the bitwise OR of all sources and targets.
"""


def are_within(offsets: Offsets, last: int) -> bool:
    """Whether every offset is from 0 to `last`."""
    try:
        return _within(offsets, last)
    except (BufferError, ValueError):  # the array is not contiguous: numpy can handle it
        return _are_within(offsets, last)


def put_all(table: Offsets, first: int, offsets: Offsets, last: int) -> int:
    """Write offsets into the table from `first` on. Returns the bitwise OR of all offsets, whose
    lowest bits show the alignment of every offset. IndexError unless every offset is from 0 to
    `last`; then the written part of the table is undefined.
    """
    try:
        return _put(table, first, offsets, last)
    except (BufferError, ValueError):  # the array is not contiguous: numpy can handle it
        return _put_all(table, first, offsets, last)


# -- range checks --
# Every offset must lie in its region before any address is computed. All data transports share
# these checks, so that they refuse the same transfers with the same errors.


MAX_ADDRESS = 1 << 63
"""Offsets and addresses are computed in signed 64 bits."""


def check_segments(
    segments: Sequence[Segments], local: Sequence[Region], remote: Sequence[Region], peer: object
) -> None:
    """LocalProtocolError if our side of a segment is out of range, TransportError if the peer's
    side is.
    """
    check_segment_fields(segments, local, remote, peer)
    seen = set[tuple[int, int, int]]()
    for part in segments:
        size = part.segment_bytes
        # Layers mostly share their arrays of offsets: one check of each array is enough.
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
    """Check everything but the offsets. For transports that check the offsets of a segment when
    they copy the segment, because a transfer can have very many segments.
    """
    num_local, num_remote = len(local), len(remote)
    for part in segments:
        if part.segment_bytes <= 0 or len(part.local_offsets) != len(part.remote_offsets):
            raise LocalProtocolError(
                f"a transfer with {peer} has {part.segment_bytes} bytes a segment, "
                f"{len(part.local_offsets)} local and {len(part.remote_offsets)} remote "
                "offsets; this is a bug of the plan"
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
    """TransportError unless a peer's regions are valid ranges of memory."""
    for region in regions:
        numbers = (region.address, region.block_bytes, region.stride_bytes, region.num_blocks)
        if min(numbers) < 0 or region.address + region.size_bytes >= MAX_ADDRESS:
            raise TransportError(
                f"region {region.name!r} of {peer} is not a range of memory; drop this peer"
            )


def merged_ranges(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """Return the ranges (address, size) that the regions cover, in ascending order. Overlapping
    regions are merged; adjacent regions only in host memory. On a device adjacent regions may be
    separate allocations, which cannot be exported to other processes as one range.
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
