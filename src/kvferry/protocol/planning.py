"""Blocks that arrived in another order than ours, and how they are put into ours. Plain data; pure.

A read brings blocks as the producer arranges them, because that takes the fewest segments. Where
the consumer's attention wants another order (heads before tokens, say), every block is put in order
once all of it is here, in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
import numpy.typing as npt

from kvferry.errors import RemoteProtocolError
from kvferry.protocol.layout import (
    Geometry,
    arrival_axes,
    common_axes,
    offsets_along,
    reads_in_producers_order,
)
from kvferry.protocol.tickets import HOLE
from kvferry.types import Axis, AxisKind, MemoryKind, Region

__all__ = ["BlockPermutation", "Segments", "plan_permutations", "plan_read"]


@dataclass(frozen=True, slots=True, eq=False)
class BlockPermutation:
    """Some blocks of one of our regions; all are to be rearranged alike.

    A block holds `prod(shape)` items of `item_bytes`. The item with index (i, j, …) lies at i *
    arrived[0] + j * arrived[1] + … bytes from the block's start, and belongs at i * wanted[0] + j *
    wanted[1] + …
    """

    region: int
    block_bytes: int
    offsets: npt.NDArray[np.int64]
    """Where each block starts, in bytes from the region's start."""
    item_bytes: int
    shape: tuple[int, ...]
    arrived: tuple[int, ...]
    wanted: tuple[int, ...]


# -------------------- planning -------------------- From two caches' geometry and two block lists
# to the segments that move. Integer arithmetic only; pure.
#
# Both sides' blocks are cut into grains: as many tokens as the smaller block holds. A grain lies in
# one block on each side, so one template of runs, made once for two arrangements, is laid over all
# of them:
#
#     ours, 8 tokens      |  a:  0 .. 7                    |  b:  8 .. 15                   |
#     theirs, 4           |  p:  0 .. 3   |  q:  4 .. 7    |  r:  8 .. 11  |  s: 12 .. 15   |
#     grains                     0               1                2               3
#
# Block ids come from a ticket, so they are checked here against what the handshake said before any
# offset is computed.


Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Equal-sized segments between one local and one remote region; offsets are bytes from each
    region's start.

    Segment `i` is `local[local_offsets[i]:][:segment_bytes] <->
    remote[remote_offsets[i]:][:segment_bytes]`. Regions may share these arrays: nobody writes to
    them.
    """

    local_region: int
    remote_region: int
    segment_bytes: int
    local_offsets: Offsets
    remote_offsets: Offsets

    @property
    def total_bytes(self) -> int:
        return self.segment_bytes * len(self.local_offsets)

    def swapped(self) -> "Segments":
        """The same, as the other side sees it."""
        return Segments(
            self.remote_region,
            self.local_region,
            self.segment_bytes,
            self.remote_offsets,
            self.local_offsets,
        )


@dataclass(frozen=True, slots=True)
class _Cut:
    """What of one grain moves, and where in its block: these layers, tokens and heads of an
    arrangement.
    """

    axes: tuple[Axis, ...]
    layers: tuple[int, ...]
    tokens: range
    heads: range

    def offsets(self) -> Offsets:
        layers = offsets_along(self.axes, AxisKind.LAYER)[list(self.layers)]
        tokens = offsets_along(self.axes, AxisKind.TOKEN)[self.tokens.start : self.tokens.stop]
        heads = offsets_along(self.axes, AxisKind.HEAD)[self.heads.start : self.heads.stop]
        return (layers[:, None, None] + heads[:, None] + tokens).ravel()


@dataclass(frozen=True, slots=True, eq=False)
class _Template:
    """Runs of equal size within a block on each side."""

    segment_bytes: int
    local: Offsets
    remote: Offsets


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """Grains that are read, in these blocks, and lie in the same place of each: which within ours
    and which within theirs.
    """

    here: int
    there: int
    local_blocks: Offsets
    remote_blocks: Offsets


def plan_read(
    local: Geometry,
    remote: Geometry,
    heads: range,
    local_blocks: Sequence[Sequence[int]],
    remote_blocks: Sequence[Sequence[int]],
    tokens: range,
    needed_from: Sequence[int] = (),
) -> list[Segments]:
    """Segments that fill our blocks with the KV of `tokens` (positions) and `heads`, which both
    sides hold.

    Both lists hold each group's blocks from token 0 on. Where ours has a hole, nothing is needed;
    where only theirs has one, there is no plan, but for tokens before the group's `needed_from`,
    which nobody will look at.
    """
    if not tokens or not heads:
        return []
    groups = {region.group for region in local.regions}
    chunks = {
        group: _chunks(
            local,
            remote,
            group,
            local_blocks,
            remote_blocks,
            tokens,
            needed_from[group] if needed_from else 0,
        )
        for group in groups
    }
    size = min(local.block_size, remote.block_size)
    mine, other = (
        _ChunkShare(size, side.block_size, _within(heads, side)) for side in (local, remote)
    )
    offset_cache = _OffsetCache()
    return [
        _segments(overlap, mine, other, part, offset_cache)
        for overlap in _overlaps(local.regions, remote.regions)
        for part in chunks[overlap.local.group]
    ]


def plan_permutations(
    local: Geometry,
    remotes: Sequence[Geometry],
    local_blocks: Sequence[Sequence[int]],
    tokens: range,
) -> list[BlockPermutation]:
    """What `plan_read` brings in a producer's order, once it is here from all of that producer's
    ranks in `remotes`.
    """
    if not tokens or not remotes:
        return []
    first, end = tokens.start // local.block_size, -(-tokens.stop // local.block_size)
    orders: dict[int, set[tuple[Axis, ...] | None]] = {}
    for remote in remotes:
        for overlap in _overlaps(local.regions, remote.regions):
            orders.setdefault(overlap.local_index, set()).add(overlap.axes_here)
    permutations = []
    present = {
        group: _existing(blocks[blocks != HOLE], local.num_blocks, "our")
        for group in {region.group for region in local.regions}
        for blocks in [_block_slice(local_blocks, group, first, end, "our")]
    }
    for index, region in enumerate(local.regions):
        if len(orders[index]) > 1:
            raise RemoteProtocolError(
                "the producer's ranks or layers arrange their blocks differently"
            )
        came = orders[index].pop()
        if came is None or region.axes is None or came == region.axes:
            continue
        steps = common_axes(came, region.axes)
        if steps and len(present[region.group]):
            shape, arrived, wanted = zip(
                *((step.count, step.first_bytes, step.second_bytes) for step in steps), strict=True
            )
            offsets = present[region.group] * region.stride_bytes
            permutations.append(
                BlockPermutation(
                    index, region.block_bytes, offsets, region.item_bytes, shape, arrived, wanted
                )
            )
    return permutations


@dataclass(frozen=True, slots=True)
class _Overlap:
    """A region of ours and one of theirs that hold some of the same layers."""

    local_index: int
    remote_index: int
    local: Region
    remote: Region
    local_layers: tuple[int, ...]
    remote_layers: tuple[int, ...]

    @property
    def axes_here(self) -> tuple[Axis, ...] | None:
        """In which order our blocks are filled; None: not known, as a whole."""
        ours, theirs, item_bytes = self.local.axes, self.remote.axes, self.local.item_bytes
        if ours is None or theirs is None:
            return None
        can_place = self.local.memory is MemoryKind.DRAM
        return (
            arrival_axes(ours, theirs, item_bytes)
            if can_place and reads_in_producers_order(ours, theirs, item_bytes)
            else ours
        )


def _overlaps(ours: Sequence[Region], theirs: Sequence[Region]) -> list[_Overlap]:
    place = {
        layer: (index, number)
        for index, region in enumerate(theirs)
        for number, layer in enumerate(region.layer_names)
    }
    overlaps = []
    for index, region in enumerate(ours):
        shared: dict[int, list[tuple[int, int]]] = {}
        for number, layer in enumerate(region.layer_names):
            there, remote_number = place[layer]
            shared.setdefault(there, []).append((number, remote_number))
        for there, numbers in shared.items():
            here, at = zip(*numbers, strict=True)
            overlaps.append(_Overlap(index, there, region, theirs[there], here, at))
    return overlaps


def _chunks(
    local: Geometry,
    remote: Geometry,
    group: int,
    local_blocks: Sequence[Sequence[int]],
    remote_blocks: Sequence[Sequence[int]],
    tokens: range,
    needed_from: int,
) -> list[_Chunks]:
    size = min(local.block_size, remote.block_size)
    first = tokens.start // local.block_size * local.block_size
    numbers = np.arange(first // size, -(-tokens.stop // size), dtype=np.int64)
    in_ours, in_theirs = local.block_size // size, remote.block_size // size
    last = int(numbers[-1])
    ours = _block_slice(local_blocks, group, 0, last // in_ours + 1, "our")[numbers // in_ours]
    theirs = _block_slice(remote_blocks, group, 0, last // in_theirs + 1, "the ticket's")[
        numbers // in_theirs
    ]
    wanted = (ours != HOLE) & ~((theirs == HOLE) & ((numbers + 1) * size <= needed_from))
    ours, theirs = (
        _existing(ours[wanted], local.num_blocks, "our"),
        _existing(theirs[wanted], remote.num_blocks, "the ticket's"),
    )
    # One side's blocks are grains, so which part of the other's a grain is decides all.
    ratio = max(in_ours, in_theirs)
    parts = (
        [(number, numbers[wanted] % ratio == number) for number in range(ratio)]
        if ratio > 1
        else [(0, np.ones(len(ours), bool))]
    )
    return [
        _Chunks(number % in_ours, number % in_theirs, ours[chosen], theirs[chosen])
        for number, chosen in parts
        if np.any(chosen)
    ]


@dataclass(frozen=True, slots=True)
class _ChunkShare:
    """What of a grain of so many tokens moves: these heads of a rank's cache, whose blocks have so
    many tokens.
    """

    tokens: int
    block_size: int
    heads: range

    def cut(
        self, region: Region, axes: tuple[Axis, ...], layers: tuple[int, ...], number: int
    ) -> _Cut:
        """Of grain `number` of a block of this region, arranged like that."""
        items = region.count(AxisKind.TOKEN) * self.tokens // self.block_size
        return _Cut(axes, layers, range(number * items, (number + 1) * items), self.heads)


class _OffsetCache:
    """Templates laid over grains. Layers that move the same runs of the same blocks get the same
    arrays: transports may go by that.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[_Template, _Chunks, int, int], tuple[Offsets, Offsets]] = {}

    def offsets(
        self, template: _Template, chunks: _Chunks, local_stride: int, remote_stride: int
    ) -> tuple[Offsets, Offsets]:
        """Where the runs begin, in a local and in a remote region."""
        key = template, chunks, local_stride, remote_stride
        if key not in self._known:
            local = (chunks.local_blocks[:, None] * local_stride + template.local).ravel()
            remote = (chunks.remote_blocks[:, None] * remote_stride + template.remote).ravel()
            for offsets in (local, remote):
                offsets.setflags(write=False)
            self._known[key] = local, remote
        return self._known[key]


def _segments(
    overlap: _Overlap,
    mine: _ChunkShare,
    other: _ChunkShare,
    chunks: _Chunks,
    offset_cache: _OffsetCache,
) -> Segments:
    ours, theirs = overlap.local, overlap.remote
    axes = overlap.axes_here
    if axes is not None and theirs.axes is not None:
        here = mine.cut(ours, axes, overlap.local_layers, chunks.here)
        there = other.cut(theirs, theirs.axes, overlap.remote_layers, chunks.there)
        template = _template(here, there, ours.item_bytes)
    else:
        template = _whole_blocks(ours.block_bytes)
    offsets = offset_cache.offsets(template, chunks, ours.stride_bytes, theirs.stride_bytes)
    return Segments(overlap.local_index, overlap.remote_index, template.segment_bytes, *offsets)


@lru_cache(maxsize=64)
def _whole_blocks(block_bytes: int) -> _Template:
    return _Template(block_bytes, np.zeros(1, np.int64), np.zeros(1, np.int64))


@lru_cache(maxsize=1024)
def _template(local: _Cut, remote: _Cut, item_bytes: int) -> _Template:
    """The fewest runs of equal size that move one grain."""
    to, source = local.offsets(), remote.offsets()
    order = np.argsort(to)
    to, source = to[order], source[order]
    starts = np.flatnonzero(
        np.append(True, (np.diff(to) != item_bytes) | (np.diff(source) != item_bytes))
    )
    sizes = np.diff(np.append(starts, len(to)))
    items = gcd(*sizes.tolist())
    kept = np.concatenate(
        [np.arange(start, start + size, items) for start, size in zip(starts, sizes, strict=True)]
    )
    return _Template(items * item_bytes, to[kept], source[kept])


def _within(heads: range, geometry: Geometry) -> range:
    """Heads of the model as numbers within a rank's cache."""
    first = geometry.heads.start
    return range(heads.start - first, heads.stop - first)


def _block_slice(
    blocks: Sequence[Sequence[int]], group: int, first: int, end: int, whose: str
) -> Offsets:
    if group >= len(blocks) or len(blocks[group]) < end:
        held = len(blocks[group]) if group < len(blocks) else 0
        raise RemoteProtocolError(
            f"{whose} block list of group {group} has {held} blocks, {end} are needed"
        )
    return np.asarray(blocks[group][first:end], dtype=np.int64)


def _existing(chosen: Offsets, num_blocks: int, whose: str) -> Offsets:
    if len(chosen) and (int(chosen.min()) < 0 or int(chosen.max()) >= num_blocks):
        what = (
            "has a hole where a block is needed"
            if HOLE in chosen
            else f"names blocks outside 0..{num_blocks - 1}"
        )
        raise RemoteProtocolError(f"{whose} block list {what}")
    return chosen
