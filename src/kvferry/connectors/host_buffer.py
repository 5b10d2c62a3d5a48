"""Where the regions of an engine's cache lie in its mirror in host memory: the same blocks, densely, region after region. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from kvferry.types import MemoryKind, Region

__all__ = ["mirror_bytes", "mirrored"]

ALIGNMENT = 4096
"""Of each region, so that none shares a page with its neighbour."""


def mirror_bytes(regions: Sequence[Region]) -> int:
    return sum(map(_padded_bytes, regions))


def mirrored(regions: Sequence[Region], address: int) -> tuple[Region, ...]:
    """The same regions in a buffer of `mirror_bytes` at this address."""
    result = []
    for region in regions:
        result.append(replace(region, address=address, stride_bytes=region.block_bytes, memory=MemoryKind.DRAM, device=0))
        address += _padded_bytes(region)
    return tuple(result)


def _padded_bytes(region: Region) -> int:
    return -(-region.block_bytes * region.num_blocks // ALIGNMENT) * ALIGNMENT
