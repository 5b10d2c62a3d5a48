"""Into how many pieces a transfer falls, by layout and by what differs between the two sides. Pure.

A piece is a run of bytes that lies together on both sides:

    HND  a layer's block is [heads, tokens]   some heads lie together; some tokens of it are one run in every head
    NHD  a layer's block is [tokens, heads]   some tokens lie together; some heads of it are one run in every token
    cross-layer                               a block of all layers lies together, as long as all of it moves

Small blocks that go into a larger one arrive as the producer arranges them, and are put in order there: one piece each.

Adjacent blocks that are adjacent on both sides become one piece; what is counted here is the most there can be.
"""

from dataclasses import dataclass

from kvferry.protocol.ranks import visits
from kvferry.sizing.shape import CacheShape, LayerGroup, LayerKind

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
    counts = [_of_group(shape, group, layout, sides, tokens) for group in shape.groups]
    return PieceCount(layout, sides, sum(pieces for pieces, _ in counts), min(size for _, size in counts))


def _of_group(shape: CacheShape, group: LayerGroup, layout: str, sides: Sides, tokens: int) -> tuple[int, int]:
    """How many, and how large."""
    is_latent = group.kind is LayerKind.LATENT
    heads = 1 if is_latent else group.kv_heads
    together = min(sides.p_block, sides.d_block)
    units = group.held_blocks(tokens, together)
    sources = [visit for visit in visits(0, sides.d_tp, sides.p_tp, heads) if visit.heads]
    are_whole = group.heads_per_rank(sides.p_tp) == group.heads_per_rank(sides.d_tp)
    token_bytes = group.head_bytes(shape.dtype)
    pieces, smallest = 0, 0
    for visit in sources:
        if layout == CROSS_LAYER and are_whole and sides.p_block == sides.d_block:
            runs, layers = 1, 1
        elif layout == NHD:
            runs, layers = 1 if are_whole else together, group.layers
        else:
            # Blocks of all layers are HND inside.
            runs, layers = 1 if together == sides.p_block else len(visit.heads), group.layers
        size = len(visit.heads) * together * token_bytes * (group.layers // layers) // runs
        pieces += units * runs * layers
        smallest = min(smallest or size, size)
    return pieces, smallest
