"""How KV caches are divided over ranks and laid out in blocks, and which pairs are compatible.

Three parts: which KV heads a TP rank holds and which producer ranks a consumer rank attaches to;
the order of layers, tokens and heads within a block, as axes; and the geometry of a worker's cache,
which the handshake checks. Integer arithmetic; pure.

Heads: rank r of T holds heads r*H/T to (r+1)*H/T of H. With more ranks than heads, T/H neighbouring
ranks hold the same head (docs/decisions/012-unequal-tensor-parallelism.md). The states of a hybrid
model are divided in the same way, but each part of a state has its own number of heads.

    P, TP 4, 2 heads    |0 |0'|1 |1'|    D's only rank reads head 0 from P's rank 0
    D, TP 1             |  0  1     |    and head 1 from P's rank 2.

P's ranks 1 and 3 hold no head that D still needs, but each holds a lease that must end. So D's rank
attaches to P's ranks 1 and 3 too, without reading.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

import numpy as np
import numpy.typing as npt

from kvferry.errors import IncompatiblePeer, RemoteProtocolError
from kvferry.protocol.messages import RankLayout, RegionInfo
from kvferry.types import Axis, AxisKind, KVLayout, MemoryKind, Region


@dataclass(frozen=True, slots=True)
class RankMapping:
    """A producer rank that one consumer rank attaches to."""

    rank: int
    """The producer rank."""
    consumer_ranks: tuple[int, ...]
    """All consumer ranks that attach to this producer rank: the sibling ranks of a reader."""


def can_divide(total_heads: int, size: int) -> bool:
    """Return whether `total_heads` heads can be divided over `size` ranks."""
    return total_heads % size == 0 or size % total_heads == 0


def heads_of(rank: int, size: int, total_heads: int) -> range:
    """Return the heads that rank `rank` of `size` holds."""
    return _share(rank, size, total_heads)


@lru_cache(maxsize=256)
def rank_mappings(
    rank: int, size: int, remote_size: int, *head_counts: int
) -> tuple[RankMapping, ...]:
    """Return the producer ranks that consumer rank `rank` of TP `size` attaches to.

    Together the consumer's ranks attach to every rank of the producer, and each consumer rank
    attaches to every rank from which it reads. `head_counts` are the numbers of heads over all
    ranks, one for each way in which the regions of the cache are divided.
    """
    reads: list[set[int]] = [
        set().union(*(_reads(each, size, remote_size, total) for total in head_counts))
        for each in range(size)
    ]
    # Producer ranks from which no head is read: one consumer rank attaches without reading.
    for remote in set(range(remote_size)).difference(*reads):
        reads[remote * size // remote_size].add(remote)
    return tuple(
        RankMapping(remote, tuple(each for each in range(size) if remote in reads[each]))
        for remote in sorted(reads[rank])
    )


def heads_to_read(
    rank: int, size: int, remote_rank: int, remote_size: int, total_heads: int
) -> range:
    """Return the heads that consumer rank `rank` of TP `size` reads from a producer rank.

    Each consumer rank reads each of its heads from one producer rank. The range may be empty.
    """
    return _as_range(_reads(rank, size, remote_size, total_heads).get(remote_rank, ()))


@lru_cache(maxsize=1024)
def _reads(rank: int, size: int, remote_size: int, total_heads: int) -> dict[int, list[int]]:
    """Return the heads to read from each producer rank.

    If several producer ranks hold a head, choose the rank nearest to our relative position; with
    equal TP sizes every rank reads from the rank of the same number.
    """
    reads: dict[int, list[int]] = {}
    for head in heads_of(rank, size, total_heads):
        holders = _share(head, total_heads, remote_size)
        nearest = min(max(rank * remote_size // size, holders.start), holders.stop - 1)
        reads.setdefault(nearest, []).append(head)
    return reads


def _share(part: int, parts: int, things: int) -> range:
    """Return the share of part `part` when `things` things are divided among `parts` parts.

    With more parts than things, neighbouring parts share one thing.
    """
    first = part * things // parts
    return range(first, max(first + 1, (part + 1) * things // parts))


def _as_range(heads: Sequence[int]) -> range:
    return range(heads[0], heads[-1] + 1) if heads else range(0)


# -- axes --
# The order of layers, tokens and heads within a block, outermost axis first, and the order in which
# a producer's blocks are best read:
#
#     HND                                     head x token: all tokens of a head, then the next head
#     NHD                                     token x head
#     one region for all layers               layer x (HND or NHD)
#     a kernel that cuts blocks into parts    token x head x token


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


# -- geometry --
# The shape of one worker's cache. At the handshake, `check_geometry` refuses every pair of caches
# for which no read can be planned, and names the reason.


_MAX_ADDRESS = 1 << 63
_MAX_DEVICE = 1 << 20
_MAX_COUNT = 1 << 16
"""Maximum tokens per block, heads and TP size: bounds the arrays planned from a peer's numbers."""
_Pairs = dict[str, tuple[object, object]]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of one worker's cache, as far as planning needs it."""

    tp_rank: int
    tp_size: int
    block_size: int
    num_blocks: int
    layout: KVLayout
    num_kv_heads: int
    """Number of heads in this worker's cache."""
    head_dim: int
    regions: tuple[Region, ...]
    total_kv_heads: int
    """Number of heads over all ranks; replicated heads count once."""
    needs_whole_blocks: bool = False
    """Producers with smaller blocks than ours are refused, because their blocks may fill one of
    ours only in part, and this engine would use the rest as well: it shares the block with other
    requests as a complete one, or its attention kernel reads past the last token.
    """

    @property
    def heads(self) -> range:
        return heads_of(self.tp_rank, self.tp_size, self.total_kv_heads)

    @property
    def has_states(self) -> bool:
        return any(region.is_state for region in self.regions)

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Return every number of heads over all ranks by which some region is divided."""
        return tuple(sorted({self.heads_in(region) for region in self.regions}))

    def heads_in(self, region: Region) -> int:
        """Return the number of heads over all ranks by which this region is divided."""
        return region.state_heads or self.total_kv_heads

    @property
    def can_cut_blocks(self) -> bool:
        """Return whether the position of each token and head within a block is known."""
        return all(region.axes is not None for region in self.regions)

    def tokens_per_item_of_layers(self) -> dict[str, int]:
        """Return, for each layer, how many tokens share one index of the region's axes.

        The number is one, unless the attention kernel packs several tokens together.
        """
        return {
            layer: self.block_size // r.count(AxisKind.TOKEN)
            for r in self.regions
            for layer in r.layer_names
            if not r.is_state
        }

    def group_of_layers(self) -> dict[str, int]:
        return {layer: region.group for region in self.regions for layer in region.layer_names}

    def token_bytes_of_layers(self) -> dict[str, float]:
        """Return, for each layer, the bytes per token and head.

        The numbers are whole if the cache has the declared shape.
        """
        share = self.block_size * self.num_kv_heads
        return {
            layer: r.block_bytes / (len(r.layer_names) * share)
            for r in self.regions
            for layer in r.layer_names
            if not r.is_state
        }

    def states_of_layers(self) -> dict[str, tuple[int, float]]:
        """Return, for each layer that holds a state, the number of heads over all ranks and the
        bytes per head.
        """
        return {
            layer: (r.state_heads, r.block_bytes / (len(r.layer_names) * r.count(AxisKind.HEAD)))
            for r in self.regions
            for layer in r.layer_names
            if r.is_state
        }


def geometry_from_layout(layout: RankLayout) -> Geometry:
    """Return a peer's geometry; RemoteProtocolError if the layout is not consistent."""
    try:
        geometry = Geometry(
            layout.tp_rank,
            layout.tp_size,
            layout.block_size,
            layout.num_blocks,
            KVLayout(layout.layout),
            layout.num_kv_heads,
            layout.head_dim,
            tuple(map(_region, layout.regions)),
            layout.total_kv_heads,
        )
    except ValueError as error:
        raise RemoteProtocolError(f"the layout cannot be decoded: {error}") from None
    sizes = (
        layout.tp_size,
        layout.block_size,
        layout.num_blocks,
        layout.num_kv_heads,
        layout.total_kv_heads,
        layout.head_dim,
    )
    is_good = (
        min(sizes) > 0
        and max(layout.block_size, layout.num_kv_heads, layout.total_kv_heads, layout.tp_size)
        <= _MAX_COUNT
        and 0 <= layout.tp_rank < layout.tp_size
        and len(geometry.regions) > 0
        and sum(len(r.layer_names) for r in geometry.regions) == len(geometry.group_of_layers())
        and all(_makes_sense(region, geometry) for region in geometry.regions)
    )
    if not is_good:
        raise RemoteProtocolError("the numbers of the layout contradict each other")
    return geometry


def check_geometry(peer: str, local: Geometry, remote: Geometry) -> None:
    """Raise IncompatiblePeer, naming each field, if `remote` blocks cannot be read into `local`."""
    total = local.total_kv_heads
    pairs: _Pairs = {
        "total_kv_heads": (total, remote.total_kv_heads),
        "num_kv_heads": (len(heads_of(remote.tp_rank, remote.tp_size, total)), remote.num_kv_heads),
        "head_dim": (local.head_dim, remote.head_dim),
        "layers": (sorted(local.group_of_layers()), sorted(remote.group_of_layers())),
        "groups": (local.group_of_layers(), remote.group_of_layers()),
        "states": (local.states_of_layers(), remote.states_of_layers()),
    }
    differences = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if not differences:
        differences = _bytes_that_differ(local, remote)
    if not all(can_divide(count, remote.tp_size) for count in local.head_counts):
        differences["tp_size"] = (local.tp_size, remote.tp_size)
    if not _can_divide_blocks(local, remote):
        differences["block_size"] = (local.block_size, remote.block_size)
    if differences:
        raise IncompatiblePeer(peer, differences)


def _bytes_that_differ(local: Geometry, remote: Geometry) -> _Pairs:
    """Return the differences in bytes per token, or in block layout, of two caches with the same
    layers.
    """
    can_cut = local.can_cut_blocks and remote.can_cut_blocks
    if can_cut and local.tokens_per_item_of_layers() == remote.tokens_per_item_of_layers():
        pairs: _Pairs = {
            "token_bytes": (local.token_bytes_of_layers(), remote.token_bytes_of_layers())
        }
    else:
        # The positions within a block are unknown or packed differently, so only whole blocks can
        # move and both caches must have the same block layout. TP sizes may differ only if both
        # ranks hold the same number of heads (replicated heads).
        pairs = {
            "tp_size": (local.tp_size, remote.tp_size)
            if local.num_kv_heads != remote.num_kv_heads
            else (0, 0),
            "block_size": (local.block_size, remote.block_size),
            "kv_cache_layout": (str(local.layout), str(remote.layout)),
            "regions": (
                [r.layer_names for r in local.regions],
                [r.layer_names for r in remote.regions],
            ),
            "block_bytes": (
                [r.block_bytes for r in local.regions],
                [r.block_bytes for r in remote.regions],
            ),
            "order within a block": (_described(local), _described(remote)),
        }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _described(geometry: Geometry) -> list[str]:
    """Describe the order within a block for an error message, one text per region."""
    orders = [
        None if r.axes is None else [f"{axis.count} {axis.kind}s" for axis in r.axes]
        for r in geometry.regions
    ]
    return [
        "not known" if order is None else " of ".join([*order, f"{geometry.block_size} tokens"])
        for order in orders
    ]


def _can_divide_blocks(local: Geometry, remote: Geometry) -> bool:
    """Return whether one block size divides the other and our engine accepts partly filled blocks.

    If our blocks are larger and the producer has freed blocks before the attention window, one of
    our blocks can only be filled in part.
    """
    larger, smaller = (
        max(local.block_size, remote.block_size),
        min(local.block_size, remote.block_size),
    )
    return larger % smaller == 0 and not (
        local.needs_whole_blocks and local.block_size > remote.block_size
    )


def region_info(region: Region) -> RegionInfo:
    """Return the description of a region that the handshake sends to a peer."""
    return RegionInfo(
        region.name,
        region.address,
        region.block_bytes,
        region.stride_bytes,
        region.num_blocks,
        str(region.memory),
        region.device,
        region.group,
        None
        if region.axes is None
        else [(str(axis.kind), axis.count, axis.stride_bytes) for axis in region.axes],
        list(region.layers),
        region.state_heads,
    )


def _region(info: RegionInfo) -> Region:
    axes = (
        None
        if info.axes is None
        else tuple(Axis(AxisKind(kind), count, stride) for kind, count, stride in info.axes)
    )
    return Region(
        info.name,
        info.address,
        info.block_bytes,
        info.stride_bytes,
        info.num_blocks,
        MemoryKind(info.memory),
        info.device,
        info.group,
        axes,
        tuple(info.layers),
        info.state_heads,
    )


def _makes_sense(region: Region, geometry: Geometry) -> bool:
    """Return whether a peer's region is consistent with the rest of the peer's layout."""
    heads = (
        len(heads_of(geometry.tp_rank, geometry.tp_size, region.state_heads))
        if 0 < region.state_heads <= _MAX_COUNT
        else geometry.num_kv_heads
    )
    counts = {AxisKind.LAYER: len(region.layer_names), AxisKind.HEAD: heads}
    return (
        region.num_blocks == geometry.num_blocks
        and 0 <= region.state_heads <= _MAX_COUNT
        and not (region.is_state and (region.axes is None or region.count(AxisKind.TOKEN) != 1))
        and 0 < region.block_bytes <= region.stride_bytes
        and region.group >= 0
        and region.address >= 0
        and region.address + region.size_bytes <= _MAX_ADDRESS
        and 0 <= region.device < _MAX_DEVICE
        and (
            region.axes is None
            or (
                is_dense(region.axes, region.block_bytes)
                and all(region.count(kind) == count for kind, count in counts.items())
                and geometry.block_size % region.count(AxisKind.TOKEN) == 0
            )
        )
    )
