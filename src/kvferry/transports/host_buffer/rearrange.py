"""Rearranges the items of blocks in place, step by step, by numpy's strided copies.

Some blocks are copied to a side buffer, and from there every item is written to its new position.
Blocks whose starts are evenly spaced share one strided copy, so that tiny adjacent blocks do not
cost one call each. The thread that owns the store makes all calls.
"""

from collections.abc import Iterator
from math import prod

import numpy as np
import numpy.typing as npt

from kvferry.errors import LocalProtocolError
from kvferry.transports.base import BlockPermutation
from kvferry.transports.copy.segments import Bytes

STEP_BYTES = 2 * 1024 * 1024
"""Most bytes that one step moves: a strided copy of short items reaches about 2 GB/s, so a step
takes about a millisecond.
"""
SEGMENT_COST = 32 * 1024
"""Overhead of one group of evenly spaced blocks (some ten microseconds), expressed as the number of
bytes that could be moved in that time.
"""
ASIDE_BUFFER_BYTES = 256 * 1024
"""Size of the side buffer: it fits into the second-level cache."""


def check_placement(placement: BlockPermutation, size_bytes: int) -> None:
    """LocalProtocolError unless all bytes that are read or written lie in the blocks, and the
    blocks lie in a region of `size_bytes` and do not overlap.
    """
    dims = len(placement.shape)
    sizes = (placement.block_bytes, placement.item_bytes, *placement.shape)
    if not len(placement.arrived) == len(placement.wanted) == dims > 0 or min(sizes) <= 0:
        raise LocalProtocolError(
            f"blocks of {placement.shape} items cannot be rearranged from {placement.arrived} to "
            f"{placement.wanted}"
        )
    for strides in (placement.arrived, placement.wanted):
        last = sum(
            (size - 1) * stride for size, stride in zip(placement.shape, strides, strict=True)
        )
        if min(strides) < 0 or last + placement.item_bytes > placement.block_bytes:
            raise LocalProtocolError(
                f"items of shape {placement.shape} at strides {strides} leave a block of "
                f"{placement.block_bytes} bytes"
            )
    starts = np.sort(placement.offsets)
    if len(starts) and (starts[0] < 0 or starts[-1] > size_bytes - placement.block_bytes):
        raise LocalProtocolError(
            f"blocks at {starts[0]} to {starts[-1]} leave region {placement.region} of "
            f"{size_bytes} bytes"
        )
    if np.any(np.diff(starts) < placement.block_bytes):
        raise LocalProtocolError(
            f"blocks of region {placement.region} that are to be rearranged overlap"
        )


def rearrange(placement: BlockPermutation, region: Bytes) -> Iterator[int]:
    """Rearrange a few blocks at each step; yields the cost of the step in bytes. The caller has
    checked the placement against the region.
    """
    size = placement.block_bytes
    at_once = max(1, ASIDE_BUFFER_BYTES // size) if size <= STEP_BYTES else 1
    aside = np.empty(at_once * size, np.uint8)
    for start, step, count in _evenly_spaced(np.sort(placement.offsets), at_once):
        if size <= STEP_BYTES:
            _copy_aside(region, aside, start, step, (count, size))
            _write(placement, region, aside, start, (step, count))
            yield count * size + SEGMENT_COST
        else:
            yield from _rearrange_large(placement, region, aside, start)


def _rearrange_large(
    placement: BlockPermutation, region: Bytes, aside: Bytes, start: int
) -> Iterator[int]:
    """Rearrange a block that needs several steps: copy the block aside, then write a few rows of
    its longest dimension at a time.
    """
    size = placement.block_bytes
    for first in range(0, size, STEP_BYTES):
        aside[first : first + STEP_BYTES] = region[
            start + first : start + min(size, first + STEP_BYTES)
        ]
        # A plain copy is several times faster than a strided one, so it counts as less.
        yield STEP_BYTES // 4
    axis = max(range(len(placement.shape)), key=placement.shape.__getitem__)
    source = _items(placement, aside, 0, placement.arrived)
    target = _items(placement, region, start, placement.wanted)
    row_bytes = max(1, prod(placement.shape) * placement.item_bytes // placement.shape[axis])
    step = max(1, STEP_BYTES // row_bytes)
    for first in range(0, placement.shape[axis], step):
        rows = (slice(None),) * axis + (slice(first, first + step),)
        target[rows] = source[rows]
        yield row_bytes * min(step, placement.shape[axis] - first)


def _copy_aside(region: Bytes, aside: Bytes, start: int, step: int, shape: tuple[int, int]) -> None:
    count, size = shape
    aside[: count * size].reshape(shape)[:] = np.ndarray(
        shape, np.uint8, region.data, start, (step, 1)
    )


def _write(
    placement: BlockPermutation, region: Bytes, aside: Bytes, start: int, run: tuple[int, int]
) -> None:
    step, count = run
    item = np.dtype((np.void, placement.item_bytes))
    shape = (count, *placement.shape)
    source = np.ndarray(shape, item, aside.data, 0, (placement.block_bytes, *placement.arrived))
    np.ndarray(shape, item, region.data, start, (step, *placement.wanted))[...] = source


def _items(
    placement: BlockPermutation, memory: Bytes, start: int, strides: tuple[int, ...]
) -> npt.NDArray[np.void]:
    return np.ndarray(
        placement.shape, np.dtype((np.void, placement.item_bytes)), memory.data, start, strides
    )


def _evenly_spaced(starts: npt.NDArray[np.int64], longest: int) -> Iterator[tuple[int, int, int]]:
    """Cut sorted starts into evenly spaced groups: yields first start, spacing, and count."""
    steps = np.diff(starts)
    bends = (np.flatnonzero(np.diff(steps)) + 1).tolist()
    first = 0
    for bend in [*bends, len(starts) - 1]:
        # A group includes the start at the bend; the next group begins after it.
        for at in range(first, bend + 1, longest):
            count = min(longest, bend + 1 - at)
            yield int(starts[at]), int(starts[at + 1] - starts[at]) if count > 1 else 0, count
        first = bend + 1
