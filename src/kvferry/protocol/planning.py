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
from kvferry.protocol.placement import Placement
from kvferry.protocol.ranks import can_divide, heads_of
from kvferry.protocol.tickets import HOLE
from kvferry.types import KVLayout, MemoryKind, Region

__all__ = ["Geometry", "Pieces", "check_geometry", "geometry_from_layout", "plan_placement", "plan_read"]

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
    """Heads in this worker's cache."""
    head_dim: int
    regions: tuple[Region, ...]
    total_kv_heads: int
    """Heads of all ranks together, each counted once."""

    @property
    def heads(self) -> range:
        return heads_of(self.tp_rank, self.tp_size, self.total_kv_heads)

    @property
    def can_cut_blocks(self) -> bool:
        """Whether it is known where in a block each head lies."""
        return all(r.head_runs > 0 and r.block_bytes % (r.head_runs * self.num_kv_heads) == 0 for r in self.regions)


def geometry_from_layout(layout: RankLayout) -> Geometry:
    """A peer's geometry, checked for sense; RemoteProtocolError otherwise."""
    try:
        regions = tuple(
            Region(r.name, r.address, r.block_bytes, r.stride_bytes, r.num_blocks, MemoryKind(r.memory), r.device, r.group, r.head_runs)
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
            layout.total_kv_heads,
        )
    except ValueError as error:
        raise RemoteProtocolError(f"a layout that cannot be read: {error}") from None
    sizes = (layout.tp_size, layout.block_size, layout.num_blocks, layout.num_kv_heads, layout.total_kv_heads, layout.head_dim)
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
    total = local.total_kv_heads
    can_plan = can_divide(total, remote.tp_size) and (
        local.num_kv_heads == remote.num_kv_heads or (local.can_cut_blocks and remote.can_cut_blocks)
    )
    pairs: dict[str, tuple[object, object]] = {
        "block_size": (local.block_size, remote.block_size),
        "kv_cache_layout": (str(local.layout), str(remote.layout)),
        "total_kv_heads": (total, remote.total_kv_heads),
        "num_kv_heads": (len(heads_of(remote.tp_rank, remote.tp_size, total)), remote.num_kv_heads),
        "head_dim": (local.head_dim, remote.head_dim),
        "regions": ([r.name for r in local.regions], [r.name for r in remote.regions]),
        "block_bytes": (
            [r.block_bytes * remote.num_kv_heads // local.num_kv_heads for r in local.regions],
            [r.block_bytes for r in remote.regions],
        ),
        "head_runs": ([r.head_runs for r in local.regions], [r.head_runs for r in remote.regions]),
        "groups": ([r.group for r in local.regions], [r.group for r in remote.regions]),
    }
    differences = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if not can_plan:
        differences["tp_size"] = (local.tp_size, remote.tp_size)
    if differences:
        raise IncompatiblePeer(peer, differences)


def plan_read(
    local: Geometry,
    remote: Geometry,
    heads: range,
    local_blocks: Sequence[Sequence[int]],
    remote_blocks: Sequence[Sequence[int]],
    tokens: range,
) -> list[Pieces]:
    """Pieces that fill our blocks with the KV of `tokens` (positions) and `heads`, which both sides hold.

    Both lists hold each group's blocks from token 0 on. Where ours has a hole, nothing is needed; where only theirs has one, there is no
    plan.
    """
    first, end = tokens.start // local.block_size, -(-tokens.stop // local.block_size)
    if end <= first or not heads:
        return []
    groups = {region.group for region in local.regions}
    wanted = {g: _block_slice(local_blocks, g, first, end, "our") for g in groups}
    ours = {g: _existing(blocks[blocks != HOLE], local.num_blocks, "our") for g, blocks in wanted.items()}
    theirs = {
        g: _existing(_block_slice(remote_blocks, g, first, end, "the ticket's")[wanted[g] != HOLE], remote.num_blocks, "the ticket's")
        for g in groups
    }
    are_whole = len(heads) == local.num_kv_heads == remote.num_kv_heads
    plan = []
    for index, (a, b) in enumerate(zip(local.regions, remote.regions, strict=True)):
        runs = 1 if are_whole else a.head_runs
        piece_bytes = len(heads) * a.block_bytes // (runs * local.num_kv_heads)
        to, source = _offsets(local, a, heads, runs, ours[a.group]), _offsets(remote, b, heads, runs, theirs[b.group])
        if len(to):
            plan.append(Pieces(index, index, piece_bytes, to, source))
    return plan


def plan_placement(
    local: Geometry, remotes: Sequence[Geometry], local_blocks: Sequence[Sequence[int]], tokens: range, needed_from: Sequence[int]
) -> list[Placement]:
    """How blocks that arrived as `remotes` arrange theirs are put into our order; nothing where that is the same."""
    return []


def _offsets(geometry: Geometry, region: Region, heads: range, runs: int, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where `heads` lie: a block is `runs` rows, and each row is the same few bytes of every head in turn."""
    row_bytes = region.block_bytes // runs
    head_bytes = row_bytes // geometry.num_kv_heads
    in_block = np.arange(runs, dtype=np.int64) * row_bytes + (heads.start - geometry.heads.start) * head_bytes
    return (blocks[:, None] * region.stride_bytes + in_block).ravel()


def _block_slice(blocks: Sequence[Sequence[int]], group: int, first: int, end: int, whose: str) -> npt.NDArray[np.int64]:
    if group >= len(blocks) or len(blocks[group]) < end:
        held = len(blocks[group]) if group < len(blocks) else 0
        raise RemoteProtocolError(f"{whose} block list of group {group} has {held} blocks, {end} are needed")
    return np.asarray(blocks[group][first:end], dtype=np.int64)


def _existing(chosen: npt.NDArray[np.int64], num_blocks: int, whose: str) -> npt.NDArray[np.int64]:
    if len(chosen) and (int(chosen.min()) < 0 or int(chosen.max()) >= num_blocks):
        what = "has a hole where a block is needed" if HOLE in chosen else f"names blocks outside 0..{num_blocks - 1}"
        raise RemoteProtocolError(f"{whose} block list {what}")
    return chosen
