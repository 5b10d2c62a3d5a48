"""Range checks of transfers: every offset lies in its region, before any address is computed.

Pure. Shared by all data transports, so that they refuse the same things with the same errors.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.errors import KVFerryError, LocalProtocolError, TransportError
from kvferry.planes.offsets import are_within
from kvferry.ports.data import Segments
from kvferry.types import MemoryKind, Region

__all__ = ["MAX_ADDRESS", "check_regions", "check_segment_fields", "check_segments", "merged_ranges"]

MAX_ADDRESS = 1 << 63
"""Offsets and addresses are computed in signed 64 bits."""


def check_segments(segments: Sequence[Segments], local: Sequence[Region], remote: Sequence[Region], peer: object) -> None:
    """LocalProtocolError when our side of a segment is impossible, TransportError when the peer's is."""
    check_segment_fields(segments, local, remote, peer)
    seen = set[tuple[int, int, int]]()
    for part in segments:
        size = part.segment_bytes
        # Layers mostly share their offsets: looking once is enough.
        near = id(part.local_offsets), local[part.local_region].size_bytes, size
        if near not in seen:
            seen.add(near)
            _check_side(part.local_region, part.local_offsets, size, local, ("our", LocalProtocolError))
        far = id(part.remote_offsets), remote[part.remote_region].size_bytes, size
        if far not in seen:
            seen.add(far)
            _check_side(part.remote_region, part.remote_offsets, size, remote, (f"{peer}'s", TransportError))


def check_segment_fields(segments: Sequence[Segments], local: Sequence[Region], remote: Sequence[Region], peer: object) -> None:
    """The same of all but the offsets themselves: for transports that look at each of a great many when its turn comes."""
    num_local, num_remote = len(local), len(remote)
    for part in segments:
        if part.segment_bytes <= 0 or len(part.local_offsets) != len(part.remote_offsets):
            raise LocalProtocolError(
                f"a transfer with {peer} has {part.segment_bytes} bytes a segment, {len(part.local_offsets)} local and "
                f"{len(part.remote_offsets)} remote offsets; this is a bug in its planning"
            )
        if not 0 <= part.local_region < num_local:
            raise LocalProtocolError(f"region {part.local_region} is not one of our {num_local} regions")
        if not 0 <= part.remote_region < num_remote:
            raise TransportError(f"region {part.remote_region} is not one of {peer}'s {num_remote} regions")


def check_regions(regions: Sequence[Region], peer: object) -> None:
    """TransportError unless a peer's regions are possible memory ranges."""
    for region in regions:
        numbers = (region.address, region.block_bytes, region.stride_bytes, region.num_blocks)
        if min(numbers) < 0 or region.address + region.size_bytes >= MAX_ADDRESS:
            raise TransportError(f"region {region.name!r} of {peer} is not a range of memory; drop this peer")


def merged_ranges(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """The ranges (address, size) that the regions cover, ascending; overlapping ones as one, and neighbours in host memory. On a device
    neighbours may be allocations of their own, of which no two can be shown to others as one."""
    merged: list[tuple[int, int]] = []
    for region in sorted(regions, key=lambda each: each.address):
        end = region.address + region.size_bytes
        reach = sum(merged[-1]) if merged else 0
        if merged and (region.address < reach or (region.address == reach and region.memory is MemoryKind.DRAM)):
            first = merged[-1][0]
            merged[-1] = first, max(end, sum(merged[-1])) - first
        elif region.size_bytes:
            merged.append((region.address, region.size_bytes))
    return merged


def _check_side(
    region: int, offsets: npt.NDArray[np.int64], segment_bytes: int, regions: Sequence[Region], blame: tuple[str, type[KVFerryError]]
) -> None:
    whose, error = blame
    size_bytes = regions[region].size_bytes
    if not are_within(offsets, size_bytes - segment_bytes):
        raise error(
            f"offsets {int(offsets.min())} to {int(offsets.max())} with {segment_bytes} bytes a segment leave {whose} region "
            f"{region} of {size_bytes} bytes"
        )
