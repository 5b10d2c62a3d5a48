"""How one worker's cache is cut, and whether blocks of a peer's can be placed into ours. Pure.

What cannot be planned is refused at the handshake, by `check_geometry`, with the reason.
"""

from dataclasses import dataclass

from kvferry.errors import IncompatiblePeer, RemoteProtocolError
from kvferry.protocol.arrangement import is_dense
from kvferry.protocol.messages import RankLayout, RegionInfo
from kvferry.protocol.ranks import can_divide, heads_of
from kvferry.types import Axis, AxisKind, KVLayout, MemoryKind, Region

__all__ = ["Geometry", "check_geometry", "geometry_from_layout", "region_info"]

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
    """A window may begin within a block, and this engine would show others the block as if all of it had been loaded."""

    @property
    def heads(self) -> range:
        return heads_of(self.tp_rank, self.tp_size, self.total_kv_heads)

    @property
    def can_cut_blocks(self) -> bool:
        """Whether it is known where in a block each token of each head lies."""
        return all(region.axes is not None for region in self.regions)

    def tokens_per_item_of_layers(self) -> dict[str, int]:
        """How many tokens lie together at one index of a region's axes: one, unless a kernel packs them in its own way."""
        return {layer: self.block_size // r.count(AxisKind.TOKEN) for r in self.regions for layer in r.layer_names}

    def group_of_layers(self) -> dict[str, int]:
        return {layer: region.group for region in self.regions for layer in region.layer_names}

    def token_bytes_of_layers(self) -> dict[str, float]:
        """What one token of one head takes. Whole numbers, where the cache is what it says."""
        share = self.block_size * self.num_kv_heads
        return {layer: r.block_bytes / (len(r.layer_names) * share) for r in self.regions for layer in r.layer_names}


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
    sizes = (layout.tp_size, layout.block_size, layout.num_blocks, layout.num_kv_heads, layout.total_kv_heads, layout.head_dim)
    is_good = (
        min(sizes) > 0
        and max(layout.block_size, layout.num_kv_heads, layout.total_kv_heads, layout.tp_size) <= _MAX_COUNT
        and 0 <= layout.tp_rank < layout.tp_size
        and len(geometry.regions) > 0
        and sum(len(r.layer_names) for r in geometry.regions) == len(geometry.group_of_layers())
        and all(_makes_sense(region, geometry) for region in geometry.regions)
    )
    if not is_good:
        raise RemoteProtocolError("a layout whose numbers do not fit together")
    return geometry


def check_geometry(peer: str, local: Geometry, remote: Geometry) -> None:
    """IncompatiblePeer, naming each field, when blocks of `remote` cannot be placed into `local`."""
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
        pairs: _Pairs = {"token_bytes": (local.token_bytes_of_layers(), remote.token_bytes_of_layers())}
    else:
        # It is not known what lies where in a block, so all must be alike.
        pairs = {
            "tp_size": (local.tp_size, remote.tp_size) if local.num_kv_heads != remote.num_kv_heads else (0, 0),
            "block_size": (local.block_size, remote.block_size),
            "kv_cache_layout": (str(local.layout), str(remote.layout)),
            "regions": ([r.layer_names for r in local.regions], [r.layer_names for r in remote.regions]),
            "block_bytes": ([r.block_bytes for r in local.regions], [r.block_bytes for r in remote.regions]),
            "order in a block": (_described(local), _described(remote)),
        }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _described(geometry: Geometry) -> list[str]:
    orders = [None if r.axes is None else [f"{axis.count} {axis.kind}s" for axis in r.axes] for r in geometry.regions]
    return ["not known" if order is None else " of ".join([*order, f"{geometry.block_size} tokens"]) for order in orders]


def _can_divide_blocks(local: Geometry, remote: Geometry) -> bool:
    larger, smaller = max(local.block_size, remote.block_size), min(local.block_size, remote.block_size)
    return larger % smaller == 0 and not (local.needs_whole_blocks and local.block_size > remote.block_size)


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
        None if region.axes is None else [(str(axis.kind), axis.count, axis.stride_bytes) for axis in region.axes],
        list(region.layers),
    )


def _region(info: RegionInfo) -> Region:
    axes = None if info.axes is None else tuple(Axis(AxisKind(kind), count, stride) for kind, count, stride in info.axes)
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
