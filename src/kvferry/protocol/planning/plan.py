"""Plans a read: from two caches' geometry and two block lists to the segments that move.

`plan_read` returns the segments of a read. If the consumer's order within a block would need many
small segments, the plan reads blocks in the producer's order, and `plan_permutations` returns how
to rearrange each block in place after the read
(docs/decisions/020-host-buffers-and-order-on-arrival.md, 021-blocks-of-unequal-form.md).

Block ids come from a ticket, so the plan checks each block id against the handshake's layout before
computing any offset. Integer arithmetic only; pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
import numpy.typing as npt

from kvferry.errors import RemoteProtocolError
from kvferry.protocol.planning.axes import (
    arrival_axes,
    common_axes,
    offsets_along,
    reads_in_producers_order,
)
from kvferry.protocol.planning.geometry import Geometry
from kvferry.protocol.planning.heads import heads_of, heads_to_read
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.types import Axis, AxisKind, BlockIds, MemoryKind, Region


@dataclass(frozen=True, slots=True, eq=False)
class BlockPermutation:
    """Blocks of one of our regions that all need the same rearrangement.

    A block holds `prod(shape)` items of `item_bytes`. The item with index (i, j, …) has arrived at
    byte i * arrived[0] + j * arrived[1] + … of the block, and belongs at byte
    i * wanted[0] + j * wanted[1] + …
    """

    region: int
    block_bytes: int
    offsets: npt.NDArray[np.int64]
    """Start of each block, in bytes from the region's start."""
    item_bytes: int
    shape: tuple[int, ...]
    arrived: tuple[int, ...]
    wanted: tuple[int, ...]


# -- planning --
# The plan cuts the blocks of both sides into chunks of as many tokens as the smaller block holds. A
# chunk lies within one block on each side, so one template of segments, computed once for a pair of
# arrangements, applies to every chunk:
#
#     ours, 8 tokens      |  a:  0 .. 7                    |  b:  8 .. 15                   |
#     theirs, 4 tokens    |  p:  0 .. 3   |  q:  4 .. 7    |  r:  8 .. 11  |  s: 12 .. 15   |
#     chunks                     0               1                2               3
#
# A state is one chunk: it lies in the block of the last token, whatever size the blocks have.


Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Equal-sized segments between one local and one remote region.

    Offsets are bytes from each region's start. Segment `i` is
    `local[local_offsets[i]:][:segment_bytes] <-> remote[remote_offsets[i]:][:segment_bytes]`.
    Several `Segments` may share the offset arrays, which are therefore read-only.
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
        """Return the same segments from the other side's point of view (for a write)."""
        return Segments(
            self.remote_region,
            self.local_region,
            self.segment_bytes,
            self.remote_offsets,
            self.local_offsets,
        )


@dataclass(frozen=True, slots=True)
class _Cut:
    """The part of one chunk that moves: layers, tokens and heads within a block with these axes."""

    axes: tuple[Axis, ...]
    layers: tuple[int, ...]
    tokens: range
    heads: range

    def offsets(self) -> Offsets:
        """Return the offset of each item in the block, by layer, then head, then token."""
        layers = offsets_along(self.axes, AxisKind.LAYER)[list(self.layers)]
        tokens = offsets_along(self.axes, AxisKind.TOKEN)[self.tokens.start : self.tokens.stop]
        heads = offsets_along(self.axes, AxisKind.HEAD)[self.heads.start : self.heads.stop]
        return (layers[:, None, None] + heads[:, None] + tokens).ravel()


@dataclass(frozen=True, slots=True, eq=False)
class _Template:
    """Segments of equal size that move one chunk; offsets are bytes within each side's block."""

    segment_bytes: int
    local: Offsets
    remote: Offsets


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """Chunks to read that all have the same position within their blocks.

    `here` is the position within our block, `there` the position within the producer's block. Chunk
    `i` lies in `local_blocks[i]` and `remote_blocks[i]`.
    """

    here: int
    there: int
    local_blocks: Offsets
    remote_blocks: Offsets


_KnownOffsets = dict[tuple[_Template, _Chunks, int, int], tuple[Offsets, Offsets]]
"""Offsets of segments in the local and in the remote region, for each template and group of chunks
and for the strides of both regions. Regions with equal segments in the same blocks get the same
array objects: transports compare the arrays by identity (`transports/copy/segments.py`,
`transports/copy/table.py`).
"""


def plan_read(
    local: Geometry,
    remote: Geometry,
    local_blocks: BlockIds,
    remote_blocks: BlockIds,
    tokens: range,
    needed_from: Sequence[int] = (),
) -> list[Segments]:
    """Return the segments that fill our blocks with the KV of `tokens` (positions), as far as our
    rank reads it from this rank of the producer.

    Both block lists hold each group's blocks from token 0. A hole in our list needs no KV. A hole
    only in the producer's list raises RemoteProtocolError, except for tokens before the group's
    `needed_from`, to which no token will attend.
    """
    if not tokens:
        return []
    chunks = {}
    for group, is_state in {region.group: region.is_state for region in local.regions}.items():
        blocks, start = (local_blocks, remote_blocks), needed_from[group] if needed_from else 0
        chunks[group] = (
            _state_chunk(local, remote, group, *blocks, tokens)
            if is_state
            else _chunks(local, remote, group, *blocks, tokens, start)
        )
    known: _KnownOffsets = {}
    segments = []
    for overlap in _overlaps(local.regions, remote.regions):
        total = local.heads_in(overlap.local)
        heads = heads_to_read(local.tp_rank, local.tp_size, remote.tp_rank, remote.tp_size, total)
        if heads:
            segments += [
                _segments(overlap, local, remote, heads, part, known)
                for part in chunks[overlap.local.group]
            ]
    return segments


def check_prefill(geometry: Geometry, num_tokens: int, shared: int, end: int) -> None:
    """Raise RemoteProtocolError unless a prefill of `num_tokens` tokens, of which our prompt
    certainly shares the first `shared`, holds the KV and the states after our first `end` tokens.
    """
    if shared < end:
        raise RemoteProtocolError(
            f"the prefill was of another prompt or of other weights: {shared} tokens are known to "
            f"be the same, but {end} are needed"
        )
    if geometry.has_states and num_tokens != end:
        raise RemoteProtocolError(
            f"the producer's states are those after {num_tokens} tokens, but the states after "
            f"{end} tokens are needed"
        )


def plan_permutations(
    local: Geometry,
    remotes: Sequence[Geometry],
    local_blocks: BlockIds,
    tokens: range,
) -> list[BlockPermutation]:
    """Return the permutations of the blocks that `plan_read` reads in the producer's order.

    `remotes` are the ranks of the producer; the permutations apply after the reads from all ranks.
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
        group: _existing(blocks[blocks != NO_BLOCK], local.num_blocks, "our")
        for group in {region.group for region in local.regions}
        for blocks in [_block_slice(local_blocks, group, first, end, "our")]
    }
    for index, region in enumerate(local.regions):
        # One block of ours may be filled by several ranks and from several regions. In-place
        # rearrangement needs a single order for the whole block.
        if len(orders[index]) > 1:
            raise RemoteProtocolError(
                "the producer's ranks or layers store their blocks in different orders"
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
    """A region of ours and a region of the producer that have layers in common."""

    local_index: int
    remote_index: int
    local: Region
    remote: Region
    local_layers: tuple[int, ...]
    remote_layers: tuple[int, ...]

    @property
    def axes_here(self) -> tuple[Axis, ...] | None:
        """Axes in which a read fills our blocks; None if unknown, so only whole blocks move."""
        ours, theirs, item_bytes = self.local.axes, self.remote.axes, self.local.item_bytes
        if ours is None or theirs is None:
            return None
        # The plan never asks for blocks in device memory to be rearranged.
        can_place = self.local.memory is MemoryKind.DRAM
        return (
            arrival_axes(ours, theirs, item_bytes)
            if can_place and reads_in_producers_order(ours, theirs, item_bytes)
            else ours
        )


def _overlaps(ours: Sequence[Region], theirs: Sequence[Region]) -> list[_Overlap]:
    """Return every pair of regions with common layers; `check_geometry` has compared the layers."""
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
    local_blocks: BlockIds,
    remote_blocks: BlockIds,
    tokens: range,
    needed_from: int,
) -> list[_Chunks]:
    """Return the chunks of one group that hold `tokens`, by position within their blocks."""
    size = min(local.block_size, remote.block_size)
    # Start at the boundary of our block, even if `tokens` starts within the block.
    first = tokens.start // local.block_size * local.block_size
    numbers = np.arange(first // size, -(-tokens.stop // size), dtype=np.int64)
    in_ours, in_theirs = local.block_size // size, remote.block_size // size
    last = int(numbers[-1])
    ours = _block_slice(local_blocks, group, 0, last // in_ours + 1, "our")[numbers // in_ours]
    theirs = _block_slice(remote_blocks, group, 0, last // in_theirs + 1, "the ticket's")[
        numbers // in_theirs
    ]
    # Skip our holes, and the producer's holes that lie completely before `needed_from`.
    wanted = (ours != NO_BLOCK) & ~((theirs == NO_BLOCK) & ((numbers + 1) * size <= needed_from))
    ours, theirs = (
        _existing(ours[wanted], local.num_blocks, "our"),
        _existing(theirs[wanted], remote.num_blocks, "the ticket's"),
    )
    # On the side with the smaller blocks, a block is one chunk. So the position of a chunk within
    # the larger block determines the position on both sides.
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


def _state_chunk(
    local: Geometry,
    remote: Geometry,
    group: int,
    local_blocks: BlockIds,
    remote_blocks: BlockIds,
    tokens: range,
) -> list[_Chunks]:
    """Return the chunk with the state after the last of `tokens`; none if our block list has no
    block for that state, because `tokens` is only a part of what will be read.
    """
    here, there = ((tokens.stop - 1) // side.block_size for side in (local, remote))
    ours = _block_slice(local_blocks, group, here, here + 1, "our")
    if ours[0] == NO_BLOCK:
        return []
    theirs = _block_slice(remote_blocks, group, there, there + 1, "the ticket's")
    return [
        _Chunks(
            0,
            0,
            _existing(ours, local.num_blocks, "our"),
            _existing(theirs, remote.num_blocks, "the ticket's"),
        )
    ]


def _segments(
    overlap: _Overlap,
    local: Geometry,
    remote: Geometry,
    heads: range,
    chunks: _Chunks,
    known: _KnownOffsets,
) -> Segments:
    ours, theirs = overlap.local, overlap.remote
    axes = overlap.axes_here
    if axes is not None and theirs.axes is not None:
        size = min(local.block_size, remote.block_size)
        here = _cut(local, ours, axes, overlap.local_layers, heads, chunks.here, size)
        there = _cut(remote, theirs, theirs.axes, overlap.remote_layers, heads, chunks.there, size)
        template = _template(here, there, ours.item_bytes)
    else:
        template = _whole_blocks(ours.block_bytes)
    key = template, chunks, ours.stride_bytes, theirs.stride_bytes
    if key not in known:
        known[key] = (
            _starts(chunks.local_blocks, ours.stride_bytes, template.local),
            _starts(chunks.remote_blocks, theirs.stride_bytes, template.remote),
        )
    return Segments(overlap.local_index, overlap.remote_index, template.segment_bytes, *known[key])


def _starts(blocks: Offsets, stride_bytes: int, within_block: Offsets) -> Offsets:
    starts = (blocks[:, None] * stride_bytes + within_block).ravel()
    starts.setflags(write=False)
    return starts


def _cut(
    side: Geometry,
    region: Region,
    axes: tuple[Axis, ...],
    layers: tuple[int, ...],
    heads: range,
    number: int,
    chunk_tokens: int,
) -> _Cut:
    """Return the cut of chunk `number` of a block in one side's region, arranged as `axes` say.

    `heads` are head numbers of the model; the cut has head numbers within the rank's cache.
    """
    first = heads_of(side.tp_rank, side.tp_size, side.heads_in(region)).start
    tokens = side.block_size if region.is_state else chunk_tokens
    # A kernel may pack several tokens at one index, so a token axis may count fewer items than the
    # block has tokens.
    items = region.count(AxisKind.TOKEN) * tokens // side.block_size
    return _Cut(
        axes,
        layers,
        range(number * items, (number + 1) * items),
        range(heads.start - first, heads.stop - first),
    )


@lru_cache(maxsize=64)
def _whole_blocks(block_bytes: int) -> _Template:
    return _Template(block_bytes, np.zeros(1, np.int64), np.zeros(1, np.int64))


@lru_cache(maxsize=1024)
def _template(local: _Cut, remote: _Cut, item_bytes: int) -> _Template:
    """Return the fewest segments of equal size that move one chunk."""
    to, source = local.offsets(), remote.offsets()
    # A segment ends where the next item does not follow directly on both sides. All segments of a
    # template have one size, so longer ones are cut to the greatest common divisor of the sizes.
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


def _block_slice(blocks: BlockIds, group: int, first: int, end: int, whose: str) -> Offsets:
    """Return blocks `first` to `end` of a group; RemoteProtocolError if the list is too short."""
    if group >= len(blocks) or len(blocks[group]) < end:
        held = len(blocks[group]) if group < len(blocks) else 0
        raise RemoteProtocolError(
            f"{whose} block list of group {group} has {held} blocks, but {end} are needed"
        )
    return np.asarray(blocks[group][first:end], dtype=np.int64)


def _existing(chosen: Offsets, num_blocks: int, whose: str) -> Offsets:
    """Return `chosen` unchanged; RemoteProtocolError for a hole or a block id out of range."""
    if len(chosen) and (int(chosen.min()) < 0 or int(chosen.max()) >= num_blocks):
        what = (
            "has no block where one is needed"
            if NO_BLOCK in chosen
            else f"names blocks outside 0..{num_blocks - 1}"
        )
        raise RemoteProtocolError(f"{whose} block list {what}")
    return chosen
