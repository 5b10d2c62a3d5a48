"""From two caches' geometry and two block lists to the pieces that move. Integer arithmetic only; pure.

What cannot be planned is refused at the handshake, by `check_geometry`, with the reason. Block ids come from a ticket, so they are
checked here against what the handshake said before any offset is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.errors import IncompatiblePeer, RemoteProtocolError
from kvferry.protocol.messages import RankLayout
from kvferry.types import KVLayout, MemoryKind, Region

__all__ = ["Geometry", "Pieces", "check_geometry", "geometry_from_layout", "plan_read", "source_ranks"]

_MAX_ADDRESS = 1 << 63
_MAX_DEVICE = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Equal-sized pieces between one local and one remote region; offsets are bytes from each region's start.

    Piece `i` is `local[local_offsets[i]:][:piece_bytes] <-> remote[remote_offsets[i]:][:piece_bytes]`.
    """

    local_region: int
    remote_region: int
    piece_bytes: int
    local_offsets: npt.NDArray[np.int64]
    remote_offsets: npt.NDArray[np.int64]

    @property
    def total_bytes(self) -> int:
        return self.piece_bytes * len(self.local_offsets)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How one worker's cache is cut: what planning needs of it."""

    tp_rank: int
    tp_size: int
    block_size: int
    num_blocks: int
    layout: KVLayout
    num_kv_heads: int
    head_dim: int
    regions: tuple[Region, ...]


def source_ranks(local_rank: int, local_size: int, remote_size: int) -> tuple[int, ...]:
    """The remote ranks whose blocks a local rank reads."""
    if local_size >= remote_size:
        return (local_rank * remote_size // local_size,)
    share = remote_size // local_size
    return tuple(range(local_rank * share, (local_rank + 1) * share))


def geometry_from_layout(layout: RankLayout) -> Geometry:
    """A peer's geometry, checked for sense; RemoteProtocolError otherwise."""
    try:
        regions = tuple(
            Region(r.name, r.address, r.block_bytes, r.stride_bytes, r.num_blocks, MemoryKind(r.memory), r.device, r.group)
            for r in layout.regions
        )
        geometry = Geometry(
            layout.tp_rank,
            layout.tp_size,
            layout.block_size,
            layout.num_blocks,
            KVLayout(layout.layout),
            layout.num_kv_heads,
            layout.head_dim,
            regions,
        )
    except ValueError as error:
        raise RemoteProtocolError(f"a layout that cannot be read: {error}") from None
    sizes = (layout.tp_size, layout.block_size, layout.num_blocks, layout.num_kv_heads, layout.head_dim)
    is_good = (
        min(sizes) > 0
        and 0 <= layout.tp_rank < layout.tp_size
        and len(regions) > 0
        and all(r.num_blocks == layout.num_blocks and 0 < r.block_bytes <= r.stride_bytes and r.group >= 0 for r in regions)
        and all(r.address >= 0 and r.address + r.size_bytes <= _MAX_ADDRESS for r in regions)
        and all(0 <= r.device < _MAX_DEVICE for r in regions)
    )
    if not is_good:
        raise RemoteProtocolError("a layout whose numbers do not fit together")
    return geometry


def check_geometry(peer: str, local: Geometry, remote: Geometry) -> None:
    """IncompatiblePeer, naming each field, when blocks of `remote` cannot be placed into `local`."""
    pairs: dict[str, tuple[object, object]] = {
        "tp_size": (local.tp_size, remote.tp_size),
        "block_size": (local.block_size, remote.block_size),
        "kv_cache_layout": (str(local.layout), str(remote.layout)),
        "num_kv_heads": (local.num_kv_heads, remote.num_kv_heads),
        "head_dim": (local.head_dim, remote.head_dim),
        "regions": ([r.name for r in local.regions], [r.name for r in remote.regions]),
        "block_bytes": ([r.block_bytes for r in local.regions], [r.block_bytes for r in remote.regions]),
        "groups": ([r.group for r in local.regions], [r.group for r in remote.regions]),
    }
    differences = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if differences:
        raise IncompatiblePeer(peer, differences)


def plan_read(
    local: Geometry,
    remote: Geometry,
    local_blocks: Sequence[Sequence[int]],
    remote_blocks: Sequence[Sequence[int]],
    tokens: range,
) -> list[Pieces]:
    """Pieces that fill our blocks with the KV of `tokens` (positions); both lists hold each group's blocks from token 0 on."""
    first, end = tokens.start // local.block_size, -(-tokens.stop // local.block_size)
    if end <= first:
        return []
    groups = {region.group for region in local.regions}
    ours = {g: _block_slice(local_blocks, g, first, end, local.num_blocks, "our") for g in groups}
    theirs = {g: _block_slice(remote_blocks, g, first, end, remote.num_blocks, "the ticket's") for g in groups}
    return [
        Pieces(index, index, a.block_bytes, ours[a.group] * a.stride_bytes, theirs[b.group] * b.stride_bytes)
        for index, (a, b) in enumerate(zip(local.regions, remote.regions, strict=True))
    ]


def _block_slice(blocks: Sequence[Sequence[int]], group: int, first: int, end: int, num_blocks: int, whose: str) -> npt.NDArray[np.int64]:
    if group >= len(blocks) or len(blocks[group]) < end:
        held = len(blocks[group]) if group < len(blocks) else 0
        raise RemoteProtocolError(f"{whose} block list of group {group} has {held} blocks, {end} are needed")
    chosen = np.asarray(blocks[group][first:end], dtype=np.int64)
    if int(chosen.min()) < 0 or int(chosen.max()) >= num_blocks:
        raise RemoteProtocolError(f"{whose} block list names blocks outside 0..{num_blocks - 1}")
    return chosen
