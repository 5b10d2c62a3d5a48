"""The order of layers, tokens and heads within a block, outermost axis first, and the order in
which a producer's blocks are best read. Pure.

    HND                                     head x token: all tokens of a head, then the next head
    NHD                                     token x head
    one region for all layers               layer x (HND or NHD)
    a kernel that cuts blocks into parts    token x head x token
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

import numpy as np
import numpy.typing as npt

from kvferry.types import Axis, AxisKind

SMALL_SEGMENT_BYTES = 4096
"""Segments shorter than this are avoided: one more descriptor costs about as much as copying this
many bytes once more (docs/decisions/021-blocks-of-unequal-form.md).
"""

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CommonAxis:
    """One index that two arrangements have in common, with the stride of each arrangement."""

    count: int
    first_bytes: int
    second_bytes: int


def dense_axes(counts: Iterable[tuple[AxisKind, int]], item_bytes: int) -> tuple[Axis, ...]:
    """Return the axes of densely packed items, outermost first.

    Axes with one element are left out, and adjacent axes of one kind are merged.
    """
    axes: list[Axis] = []
    stride = item_bytes
    for kind, count in reversed(list(counts)):
        if count > 1:
            if axes and axes[-1].kind is kind:
                axes[-1] = Axis(kind, axes[-1].count * count, axes[-1].stride_bytes)
            else:
                axes.append(Axis(kind, count, stride))
            stride *= count
    return tuple(reversed(axes))


def is_dense(axes: Sequence[Axis], block_bytes: int) -> bool:
    """Return whether the axes cover each byte of a block exactly once."""
    total = prod(axis.count for axis in axes)
    if total == 0 or block_bytes % total or any(axis.count < 2 for axis in axes):
        return False
    stride = block_bytes // total
    for axis in sorted(axes, key=lambda axis: axis.stride_bytes):
        if axis.stride_bytes != stride:
            return False
        stride *= axis.count
    return True


def offsets_along(axes: Sequence[Axis], kind: AxisKind) -> Offsets:
    """Return the offset of each element of one kind, relative to the first element.

    If several axes have the kind, the outer axis varies slowest.
    """
    offsets = np.zeros(1, dtype=np.int64)
    for axis in axes:
        if axis.kind is kind:
            offsets = (
                offsets[:, None] + np.arange(axis.count, dtype=np.int64) * axis.stride_bytes
            ).ravel()
    return offsets


@lru_cache(maxsize=1024)
def arrival_axes(
    local: tuple[Axis, ...], remote: tuple[Axis, ...], item_bytes: int
) -> tuple[Axis, ...]:
    """Return axes for our block's layers, tokens and heads, arranged in the producer's order."""
    wanted = {kind: prod(axis.count for axis in local if axis.kind is kind) for kind in AxisKind}
    inner: list[tuple[AxisKind, int]] = []
    for axis in reversed(remote):
        if axis.kind is AxisKind.TOKEN:
            part = gcd(axis.count, wanted[AxisKind.TOKEN])
            inner.append((axis.kind, part))
            wanted[AxisKind.TOKEN] //= part
        elif axis.kind is AxisKind.HEAD:
            inner.append((axis.kind, wanted.pop(axis.kind, 1)))
    # The outer axes hold the rest: kinds of which the producer has a single element, and tokens
    # beyond the producer's smaller block. Our layers are outermost, since each is read separately.
    outer = [
        (kind, wanted.get(kind, 1)) for kind in (AxisKind.LAYER, AxisKind.TOKEN, AxisKind.HEAD)
    ]
    return dense_axes([*outer, *reversed(inner)], item_bytes)


@lru_cache(maxsize=1024)
def reads_in_producers_order(
    local: tuple[Axis, ...], remote: tuple[Axis, ...], item_bytes: int
) -> bool:
    """Return whether to read blocks in the producer's order and rearrange the blocks afterwards.

    True if reading in our own order would need segments under `SMALL_SEGMENT_BYTES`, and the two
    orders can be converted into each other.
    """
    arrived = arrival_axes(local, remote, item_bytes)
    if arrived == local or _common_segment_bytes(local, arrived, item_bytes) >= SMALL_SEGMENT_BYTES:
        return False
    return common_axes(arrived, local) is not None


def common_axes(first: Sequence[Axis], second: Sequence[Axis]) -> tuple[CommonAxis, ...] | None:
    """Return one set of indices for two arrangements of the same elements.

    None if the axes of one arrangement do not subdivide the axes of the other.
    """
    steps: list[CommonAxis] = []
    for kind in AxisKind:
        ours, theirs = ([axis for axis in axes if axis.kind is kind] for axes in (first, second))
        # Match axes of one kind from the innermost outwards; split the longer axis at the shorter.
        while ours and theirs:
            a, b = ours.pop(), theirs.pop()
            count = min(a.count, b.count)
            if max(a.count, b.count) % count:
                return None
            steps.append(CommonAxis(count, a.stride_bytes, b.stride_bytes))
            for axis, rest in ((a, ours), (b, theirs)):
                if axis.count > count:
                    rest.append(Axis(kind, axis.count // count, axis.stride_bytes * count))
        if ours or theirs:
            return None
    return tuple(steps)


def _common_segment_bytes(first: Sequence[Axis], second: Sequence[Axis], item_bytes: int) -> int:
    """Return how many bytes, at least, are contiguous in the same order in both arrangements."""
    run = item_bytes
    for a, b in zip(reversed(first), reversed(second), strict=False):
        if a.kind is not b.kind:
            break
        run *= gcd(a.count, b.count)
        if a.count != b.count:
            break
    return run
