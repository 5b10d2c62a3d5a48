"""Into how many pieces a transfer falls, by layout and by what differs between the two sides: planned as a real one is. Pure.

Adjacent blocks that are adjacent on both sides become one piece; what is counted here is the most there can be.
"""

from dataclasses import dataclass

from kvferry.protocol.arrangement import dense_axes
from kvferry.protocol.geometry import Geometry
from kvferry.protocol.planning import plan_read
from kvferry.protocol.ranks import heads_of, visits
from kvferry.sizing.shape import CacheShape, LayerGroup, LayerKind
from kvferry.types import AxisKind, KVLayout, Region

__all__ = ["CROSS_LAYER", "LAYOUTS", "PieceCount", "Sides", "count_pieces"]

HND, NHD, CROSS_LAYER = "HND", "NHD", "cross-layer"
LAYOUTS = (HND, NHD, CROSS_LAYER)


@dataclass(frozen=True, slots=True)
class Sides:
    """What the producer and the consumer are cut into."""

    p_tp: int
    d_tp: int
    p_block: int
    d_block: int

    @property
    def title(self) -> str:
        tp = f"TP {self.p_tp}" if self.p_tp == self.d_tp else f"TP {self.p_tp} to {self.d_tp}"
        block = f"blocks of {self.p_block}" if self.p_block == self.d_block else f"blocks of {self.p_block} to {self.d_block}"
        return f"{tp}, {block}"


@dataclass(frozen=True, slots=True)
class PieceCount:
    layout: str
    sides: Sides
    pieces: int
    """Into one of the consumer's ranks, from all it reads from."""
    piece_bytes: int
    """Of the smallest."""


def count_pieces(shape: CacheShape, layout: str, sides: Sides, tokens: int) -> PieceCount:
    counts = [_of_group(group, group.head_bytes(shape.dtype), layout, sides, tokens) for group in shape.groups]
    return PieceCount(layout, sides, sum(pieces for pieces, _ in counts), min(size for _, size in counts))


def _of_group(group: LayerGroup, item_bytes: int, layout: str, sides: Sides, tokens: int) -> tuple[int, int]:
    """How many, and how large. Layers that do not share their blocks fall into pieces alike, so one is planned."""
    grain = min(sides.p_block, sides.d_block)
    end = group.held_blocks(tokens, grain) * grain
    layers = group.layers if layout == CROSS_LAYER else 1
    heads = 1 if group.kind is LayerKind.LATENT else group.kv_heads
    ours = _geometry(0, sides.d_tp, sides.d_block, heads, layers, item_bytes, layout, end)
    pieces, smallest = 0, 0
    for visit in visits(0, sides.d_tp, sides.p_tp, heads):
        theirs = _geometry(visit.rank, sides.p_tp, sides.p_block, heads, layers, item_bytes, layout, end)
        for part in plan_read(ours, theirs, visit.heads, [range(ours.num_blocks)], [range(theirs.num_blocks)], range(end)):
            pieces += len(part.local_offsets) * (group.layers // layers)
            smallest = min(smallest or part.piece_bytes, part.piece_bytes)
    return pieces, smallest


def _geometry(rank: int, tp: int, block: int, total: int, layers: int, item_bytes: int, layout: str, tokens: int) -> Geometry:
    """One region of a rank's cache, long enough for so many tokens. Blocks of all layers are HND inside."""
    heads = len(heads_of(rank, tp, total))
    by_head, by_token = (AxisKind.HEAD, heads), (AxisKind.TOKEN, block)
    order = (by_token, by_head) if layout == NHD else (by_head, by_token)
    axes = dense_axes([(AxisKind.LAYER, layers), *order], item_bytes)
    size = layers * heads * block * item_bytes
    num_blocks = -(-tokens // block)
    names = tuple(map(str, range(layers)))
    region = Region("0", 0, size, size, num_blocks, axes=axes, layers=names if layers > 1 else ())
    return Geometry(rank, tp, block, num_blocks, KVLayout.NHD if layout == NHD else KVLayout.HND, heads, 1, (region,), total)
