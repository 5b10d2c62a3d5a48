"""The shape of one worker's cache, and which pairs of caches are compatible.

At the handshake, `check_geometry` refuses every pair of caches for which no read can be planned,
and names the reason. Pure.
"""

from dataclasses import dataclass

from kvferry.errors import IncompatiblePeer, RemoteProtocolError
from kvferry.protocol.messages import RankLayout
from kvferry.protocol.planning.axes import is_dense
from kvferry.protocol.planning.heads import can_divide, heads_of
from kvferry.types import AxisKind, KVLayout, Region

_MAX_ADDRESS = 1 << 63
_MAX_DEVICE = 1 << 20
_MAX_COUNT = 1 << 16
"""Maximum tokens per block, heads and TP size: bounds the arrays planned from a peer's numbers."""
_MAX_AXES = 8
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
    geometry = Geometry(
        layout.tp_rank,
        layout.tp_size,
        layout.block_size,
        layout.num_blocks,
        layout.layout,
        layout.num_kv_heads,
        layout.head_dim,
        tuple(layout.regions),
        layout.total_kv_heads,
    )
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
                len(region.axes) <= _MAX_AXES
                and is_dense(region.axes, region.block_bytes)
                and all(region.count(kind) == count for kind, count in counts.items())
                and geometry.block_size % region.count(AxisKind.TOKEN) == 0
            )
        )
    )
