"""Where the regions of an engine's cache lie in its host buffer in host memory: the same blocks, densely, region after region. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from kvferry.types import MemoryKind, Region

__all__ = ["host_buffer_bytes", "host_buffer_regions"]

ALIGNMENT = 4096
"""Of each region, so that none shares a page with its neighbour."""


def host_buffer_bytes(regions: Sequence[Region]) -> int:
    return sum(_padded_bytes(region) for region in _largest_of_each(regions).values())


def host_buffer_regions(regions: Sequence[Region], address: int) -> tuple[Region, ...]:
    """The same regions in a buffer of `host_buffer_bytes` at this address. Those that share memory (groups whose layers take turns with the
    blocks of one tensor) share their host buffer."""
    places = {}
    for start, region in _largest_of_each(regions).items():
        places[start] = (address, region.block_bytes)
        address += _padded_bytes(region)
    return tuple(
        replace(region, address=places[region.address][0], stride_bytes=places[region.address][1], memory=MemoryKind.DRAM, device=0)
        for region in regions
    )


def _largest_of_each(regions: Sequence[Region]) -> dict[int, Region]:
    """By address, the one whose blocks are largest."""
    largest: dict[int, Region] = {}
    for region in regions:
        known = largest.get(region.address)
        if known is None or known.block_bytes < region.block_bytes:
            largest[region.address] = region
    return largest


def _padded_bytes(region: Region) -> int:
    return -(-region.block_bytes * region.num_blocks // ALIGNMENT) * ALIGNMENT
