"""How layers, tokens and heads lie in a block, as axes; and in which order a producer's blocks are best read. Integer arithmetic; pure.

HND       head x token                      all tokens of a head, then the next head
NHD       token x head
one region for all layers                   layer x (either)
a kernel that cuts blocks into parts        token x head x token
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

import numpy as np
import numpy.typing as npt

from kvferry.types import Axis, AxisKind

__all__ = ["CommonAxis", "arrival_axes", "common_axes", "dense_axes", "is_dense", "offsets_along", "reads_in_producers_order"]

SMALL_SEGMENT_BYTES = 4096
"""Shorter runs are not read one by one: a descriptor costs as much as copying about so many bytes once more."""

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CommonAxis:
    """One index of two arrangements of the same things, and how far each goes for one step of it."""

    count: int
    first_bytes: int
    second_bytes: int


def dense_axes(counts: Iterable[tuple[AxisKind, int]], item_bytes: int) -> tuple[Axis, ...]:
    """Axes, outermost first, of items without gaps. What has one element is left out, and neighbours of one kind are one axis."""
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
    """Whether these axes name each byte of a block exactly once."""
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
    """Where each of a kind lies, from the first. With several axes of a kind the outer one counts slower."""
    offsets = np.zeros(1, dtype=np.int64)
    for axis in axes:
        if axis.kind is kind:
            offsets = (offsets[:, None] + np.arange(axis.count, dtype=np.int64) * axis.stride_bytes).ravel()
    return offsets


@lru_cache(maxsize=1024)
def arrival_axes(local: tuple[Axis, ...], remote: tuple[Axis, ...], item_bytes: int) -> tuple[Axis, ...]:
    """Our block's contents in the producer's order: as many layers, tokens and heads as we have, arranged as they are there."""
    wanted = {kind: prod(axis.count for axis in local if axis.kind is kind) for kind in AxisKind}
    inner: list[tuple[AxisKind, int]] = []
    for axis in reversed(remote):
        if axis.kind is AxisKind.TOKEN:
            part = gcd(axis.count, wanted[AxisKind.TOKEN])
            inner.append((axis.kind, part))
            wanted[AxisKind.TOKEN] //= part
        elif axis.kind is AxisKind.HEAD:
            inner.append((axis.kind, wanted.pop(axis.kind, 1)))
    # What the producer has only one of, or in smaller blocks, goes outside; our layers outermost, for each is read by itself.
    outer = [(kind, wanted.get(kind, 1)) for kind in (AxisKind.LAYER, AxisKind.TOKEN, AxisKind.HEAD)]
    return dense_axes([*outer, *reversed(inner)], item_bytes)


@lru_cache(maxsize=1024)
def reads_in_producers_order(local: tuple[Axis, ...], remote: tuple[Axis, ...], item_bytes: int) -> bool:
    """Whether a read brings blocks in the producer's order, to be put into ours afterwards, because ours would take many small runs."""
    arrived = arrival_axes(local, remote, item_bytes)
    if arrived == local or _common_segment_bytes(local, arrived, item_bytes) >= SMALL_SEGMENT_BYTES:
        return False
    return common_axes(arrived, local) is not None


def common_axes(first: Sequence[Axis], second: Sequence[Axis]) -> tuple[CommonAxis, ...] | None:
    """One set of indices for two arrangements of the same counts; None where their cuts do not fit into each other."""
    steps: list[CommonAxis] = []
    for kind in AxisKind:
        ours, theirs = ([axis for axis in axes if axis.kind is kind] for axes in (first, second))
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
    """How many bytes follow each other in the same order in both, at least."""
    run = item_bytes
    for a, b in zip(reversed(first), reversed(second), strict=False):
        if a.kind is not b.kind:
            break
        run *= gcd(a.count, b.count)
        if a.count != b.count:
            break
    return run
