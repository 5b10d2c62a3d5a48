"""Which KV heads a tensor-parallel rank holds, and which of a producer's ranks each of a consumer's
goes to. Pure.

Rank r of T holds heads r*H/T to (r+1)*H/T of H; with more ranks than heads, T/H neighbours hold the
same one.

    P, TP 4, 2 heads    |0 |0'|1 |1'|    D's only rank reads head 0 of P's rank 0 and head 1 of rank 2. Ranks 1 and 3 have nothing for
    D, TP 1             |  0  1     |    it, but hold a lease that must end: it goes there too, and reads nothing.
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

__all__ = [
    "CommonAxis",
    "Geometry",
    "RankMapping",
    "arrival_axes",
    "can_divide",
    "check_geometry",
    "common_axes",
    "dense_axes",
    "geometry_from_layout",
    "heads_of",
    "is_dense",
    "offsets_along",
    "rank_mappings",
    "reads_in_producers_order",
    "region_info",
]


@dataclass(frozen=True, slots=True)
class RankMapping:
    """One of a consumer's ranks goes to one of a producer's."""

    rank: int
    """The producer's."""
    heads: range
    """What is read there. Empty: the visit only lets the lease end."""
    consumer_ranks: tuple[int, ...]
    """All of the consumer's ranks that go there."""


def can_divide(total_heads: int, size: int) -> bool:
    return total_heads % size == 0 or size % total_heads == 0


def heads_of(rank: int, size: int, total_heads: int) -> range:
    return _share(rank, size, total_heads)


@lru_cache(maxsize=256)
def rank_mappings(
    rank: int, size: int, remote_size: int, total_heads: int
) -> tuple[RankMapping, ...]:
    """Where rank `rank` of a consumer of TP `size` goes. Together its ranks go to each of the
    producer's, and each reads its heads once.
    """
    reads = [_reads(each, size, remote_size, total_heads) for each in range(size)]
    for remote in set(range(remote_size)).difference(*reads):
        reads[remote * size // remote_size][remote] = []
    return tuple(
        RankMapping(
            remote, _as_range(heads), tuple(each for each in range(size) if remote in reads[each])
        )
        for remote, heads in sorted(reads[rank].items())
    )


def _reads(rank: int, size: int, remote_size: int, total_heads: int) -> dict[int, list[int]]:
    """Heads by the producer's rank they are read from. Of several that hold a head, the one that
    lies where we lie: equal sizes pair up.
    """
    reads: dict[int, list[int]] = {}
    for head in heads_of(rank, size, total_heads):
        holders = _share(head, total_heads, remote_size)
        nearest = min(max(rank * remote_size // size, holders.start), holders.stop - 1)
        reads.setdefault(nearest, []).append(head)
    return reads


def _share(part: int, parts: int, things: int) -> range:
    """What part number `part` of `parts` gets of so many things. More parts than things: neighbours
    share one.
    """
    first = part * things // parts
    return range(first, max(first + 1, (part + 1) * things // parts))


def _as_range(heads: Sequence[int]) -> range:
    return range(heads[0], heads[-1] + 1) if heads else range(0)


# -------------------- arrangement -------------------- How layers, tokens and heads lie in a block,
# as axes; and in which order a producer's blocks are best read. Integer arithmetic; pure.
#
# HND       head x token                      all tokens of a head, then the next head
# NHD       token x head
# one region for all layers                   layer x (either)
# a kernel that cuts blocks into parts        token x head x token


SMALL_SEGMENT_BYTES = 4096
"""Shorter runs are not read one by one: a descriptor costs as much as copying about so many bytes
once more.
"""

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CommonAxis:
    """One index of two arrangements of the same things, and how far each goes for one step of
    it.
    """

    count: int
    first_bytes: int
    second_bytes: int


def dense_axes(counts: Iterable[tuple[AxisKind, int]], item_bytes: int) -> tuple[Axis, ...]:
    """Axes, outermost first, of items without gaps. What has one element is left out, and
    neighbours of one kind are one axis.
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
    """Where each of a kind lies, from the first. With several axes of a kind the outer one counts
    slower.
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
    """Our block's contents in the producer's order: as many layers, tokens and heads as we have,
    arranged as they are there.
    """
    wanted = {kind: prod(axis.count for axis in local if axis.kind is kind) for kind in AxisKind}
    inner: list[tuple[AxisKind, int]] = []
    for axis in reversed(remote):
        if axis.kind is AxisKind.TOKEN:
            part = gcd(axis.count, wanted[AxisKind.TOKEN])
            inner.append((axis.kind, part))
            wanted[AxisKind.TOKEN] //= part
        elif axis.kind is AxisKind.HEAD:
            inner.append((axis.kind, wanted.pop(axis.kind, 1)))
    # What the producer has only one of, or in smaller blocks, goes outside; our layers outermost,
    # for each is read by itself.
    outer = [
        (kind, wanted.get(kind, 1)) for kind in (AxisKind.LAYER, AxisKind.TOKEN, AxisKind.HEAD)
    ]
    return dense_axes([*outer, *reversed(inner)], item_bytes)


@lru_cache(maxsize=1024)
def reads_in_producers_order(
    local: tuple[Axis, ...], remote: tuple[Axis, ...], item_bytes: int
) -> bool:
    """Whether a read brings blocks in the producer's order, to be put into ours afterwards, because
    ours would take many small runs.
    """
    arrived = arrival_axes(local, remote, item_bytes)
    if arrived == local or _common_segment_bytes(local, arrived, item_bytes) >= SMALL_SEGMENT_BYTES:
        return False
    return common_axes(arrived, local) is not None


def common_axes(first: Sequence[Axis], second: Sequence[Axis]) -> tuple[CommonAxis, ...] | None:
    """One set of indices for two arrangements of the same counts; None where their cuts do not fit
    into each other.
    """
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


# -------------------- geometry --------------------
# How one worker's cache is cut, and whether blocks of a peer's can be placed into ours. Pure.
#
# What cannot be planned is refused at the handshake, by `check_geometry`, with the reason.


_MAX_ADDRESS = 1 << 63
_MAX_DEVICE = 1 << 20
_MAX_COUNT = 1 << 16
"""Of a block's tokens and heads: what is planned from a peer's numbers stays small."""
_Pairs = dict[str, tuple[object, object]]


@dataclass(frozen=True, slots=True)
class Geometry:
    """How one worker's cache is cut: what planning needs of it."""

    tp_rank: int
    tp_size: int
    block_size: int
    num_blocks: int
    layout: KVLayout
    num_kv_heads: int
    """Heads in this worker's cache."""
    head_dim: int
    regions: tuple[Region, ...]
    total_kv_heads: int
    """Heads of all ranks together, each counted once."""
    needs_whole_blocks: bool = False
    """A window may begin within a block, and this engine would show others the block as if all of
    it had been loaded.
    """

    @property
    def heads(self) -> range:
        return heads_of(self.tp_rank, self.tp_size, self.total_kv_heads)

    @property
    def can_cut_blocks(self) -> bool:
        """Whether it is known where in a block each token of each head lies."""
        return all(region.axes is not None for region in self.regions)

    def tokens_per_item_of_layers(self) -> dict[str, int]:
        """How many tokens lie together at one index of a region's axes: one, unless a kernel packs
        them in its own way.
        """
        return {
            layer: self.block_size // r.count(AxisKind.TOKEN)
            for r in self.regions
            for layer in r.layer_names
        }

    def group_of_layers(self) -> dict[str, int]:
        return {layer: region.group for region in self.regions for layer in region.layer_names}

    def token_bytes_of_layers(self) -> dict[str, float]:
        """What one token of one head takes. Whole numbers, where the cache is what it says."""
        share = self.block_size * self.num_kv_heads
        return {
            layer: r.block_bytes / (len(r.layer_names) * share)
            for r in self.regions
            for layer in r.layer_names
        }


def geometry_from_layout(layout: RankLayout) -> Geometry:
    """A peer's geometry, checked for sense; RemoteProtocolError otherwise."""
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
        raise RemoteProtocolError(f"a layout that cannot be read: {error}") from None
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
        raise RemoteProtocolError("a layout whose numbers do not fit together")
    return geometry


def check_geometry(peer: str, local: Geometry, remote: Geometry) -> None:
    """IncompatiblePeer, naming each field, when blocks of `remote` cannot be placed into
    `local`.
    """
    total = local.total_kv_heads
    pairs: _Pairs = {
        "total_kv_heads": (total, remote.total_kv_heads),
        "num_kv_heads": (len(heads_of(remote.tp_rank, remote.tp_size, total)), remote.num_kv_heads),
        "head_dim": (local.head_dim, remote.head_dim),
        "layers": (sorted(local.group_of_layers()), sorted(remote.group_of_layers())),
        "groups": (local.group_of_layers(), remote.group_of_layers()),
    }
    differences = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if not differences:
        differences = _bytes_that_differ(local, remote)
    if not can_divide(total, remote.tp_size):
        differences["tp_size"] = (local.tp_size, remote.tp_size)
    if not _can_divide_blocks(local, remote):
        differences["block_size"] = (local.block_size, remote.block_size)
    if differences:
        raise IncompatiblePeer(peer, differences)


def _bytes_that_differ(local: Geometry, remote: Geometry) -> _Pairs:
    """Of two caches of the same layers."""
    can_cut = local.can_cut_blocks and remote.can_cut_blocks
    if can_cut and local.tokens_per_item_of_layers() == remote.tokens_per_item_of_layers():
        pairs: _Pairs = {
            "token_bytes": (local.token_bytes_of_layers(), remote.token_bytes_of_layers())
        }
    else:
        # It is not known what lies where in a block, so all must be alike.
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
            "order in a block": (_described(local), _described(remote)),
        }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _described(geometry: Geometry) -> list[str]:
    orders = [
        None if r.axes is None else [f"{axis.count} {axis.kind}s" for axis in r.axes]
        for r in geometry.regions
    ]
    return [
        "not known" if order is None else " of ".join([*order, f"{geometry.block_size} tokens"])
        for order in orders
    ]


def _can_divide_blocks(local: Geometry, remote: Geometry) -> bool:
    larger, smaller = (
        max(local.block_size, remote.block_size),
        min(local.block_size, remote.block_size),
    )
    return larger % smaller == 0 and not (
        local.needs_whole_blocks and local.block_size > remote.block_size
    )


def region_info(region: Region) -> RegionInfo:
    """A region as a peer is told of it."""
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
    )


def _makes_sense(region: Region, geometry: Geometry) -> bool:
    counts = {AxisKind.LAYER: len(region.layer_names), AxisKind.HEAD: geometry.num_kv_heads}
    return (
        region.num_blocks == geometry.num_blocks
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
