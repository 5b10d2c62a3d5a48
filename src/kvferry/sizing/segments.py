"""The number of segments of a transfer, by layout and by the differences between the two sides.
Pure.

The count uses the planner of real transfers. A real transfer joins segments that are adjacent on
both sides, so the count here is an upper bound.

A chunk is as many tokens as the smaller block holds, and a period is as many chunks as the larger
block holds. Every period splits into segments in the same way, and so does every layer of a block.
So only a few periods and layers are planned, and the total follows from how many segments one more
period or layer adds.
"""

from dataclasses import dataclass

from kvferry.errors import ConfigError
from kvferry.protocol.planning.axes import dense_axes
from kvferry.protocol.planning.geometry import Geometry
from kvferry.protocol.planning.heads import heads_of, rank_mappings
from kvferry.protocol.planning.plan import plan_read
from kvferry.sizing.shape import LayerCacheKind, LayerGroup, ModelCacheShape
from kvferry.types import AxisKind, KVLayout, Region

HND, NHD, CROSS_LAYER = "HND", "NHD", "cross-layer"
LAYOUTS = (HND, NHD, CROSS_LAYER)
MAX_BLOCK_ITEMS = 2**20
"""The bound on tokens times heads of one layer's block: planning visits each of these items once.
"""


@dataclass(frozen=True, slots=True)
class Sides:
    """Tensor parallelism and block size of the producer (P) and the consumer (D)."""

    p_tp: int
    d_tp: int
    p_block: int
    d_block: int

    @property
    def title(self) -> str:
        tp = f"TP {self.p_tp}" if self.p_tp == self.d_tp else f"TP {self.p_tp} to {self.d_tp}"
        block = (
            f"blocks of {self.p_block}"
            if self.p_block == self.d_block
            else f"blocks of {self.p_block} to {self.d_block}"
        )
        return f"{tp}, {block}"


@dataclass(frozen=True, slots=True)
class SegmentCount:
    """The number of segments for one layout and one pair of sides."""

    layout: str
    sides: Sides
    segments: int
    """The segments read into one rank of the consumer, from all ranks it reads from."""
    segment_bytes: int
    """The size of the smallest segment."""


def count_segments(shape: ModelCacheShape, layout: str, sides: Sides, tokens: int) -> SegmentCount:
    """The count that planning the whole transfer would give, at the cost of planning a few blocks.
    Raises `ConfigError` if even one block is too large to plan.
    """
    heads, block = max(_heads(group) for group in shape.groups), max(sides.p_block, sides.d_block)
    if heads * block > MAX_BLOCK_ITEMS:
        raise ConfigError(
            f"blocks of {block:,} tokens and {heads:,} KV heads are too large to plan; tokens "
            f"times heads may be at most {MAX_BLOCK_ITEMS:,}: use smaller blocks"
        )
    granularity = min(sides.p_block, sides.d_block)
    counts = [
        _over_layers(
            group,
            group.head_bytes(shape.dtype),
            layout,
            sides,
            group.held_blocks(tokens, granularity),
        )
        for group in shape.groups
    ]
    return SegmentCount(
        layout, sides, sum(segments for segments, _ in counts), min(size for _, size in counts)
    )


def planned_segments(
    heads: int, layers: int, item_bytes: int, layout: str, sides: Sides, chunks: int
) -> tuple[int, int]:
    """The number of segments and the size of the smallest, for `chunks` chunks of blocks that hold
    `layers` layers, all planned one by one.
    """
    end = chunks * min(sides.p_block, sides.d_block)
    ours = _geometry(0, sides.d_tp, sides.d_block, heads, layers, item_bytes, layout, end)
    segments, smallest = 0, 0
    for rank_mapping in rank_mappings(0, sides.d_tp, sides.p_tp, heads):
        theirs = _geometry(
            rank_mapping.rank, sides.p_tp, sides.p_block, heads, layers, item_bytes, layout, end
        )
        for part in plan_read(
            ours,
            theirs,
            [range(ours.num_blocks)],
            [range(theirs.num_blocks)],
            range(end),
        ):
            segments += len(part.local_offsets)
            smallest = min(smallest or part.segment_bytes, part.segment_bytes)
    return segments, smallest


def _over_layers(
    group: LayerGroup, item_bytes: int, layout: str, sides: Sides, chunks: int
) -> tuple[int, int]:
    if layout != CROSS_LAYER:
        segments, smallest = _over_small_blocks(_heads(group), 1, item_bytes, layout, sides, chunks)
        return segments * group.layers, smallest
    if group.layers <= 3:
        return _over_small_blocks(_heads(group), group.layers, item_bytes, layout, sides, chunks)
    # A block of one layer has no layer axis, so two and three layers are the first counts to
    # compare.
    two, smallest = _over_small_blocks(_heads(group), 2, item_bytes, layout, sides, chunks)
    three, _ = _over_small_blocks(_heads(group), 3, item_bytes, layout, sides, chunks)
    if two == three:
        # One more layer adds no segment: all layers of a block form one segment.
        return two, smallest // 2 * group.layers
    return two + (three - two) * (group.layers - 2), smallest


def _over_small_blocks(
    heads: int, layers: int, item_bytes: int, layout: str, sides: Sides, chunks: int
) -> tuple[int, int]:
    """Plan one and two periods, plus the remainder, and extrapolate to all periods."""
    period = max(sides.p_block, sides.d_block) // min(sides.p_block, sides.d_block)
    periods, rest = divmod(chunks, period)
    if periods < 3:
        return planned_segments(heads, layers, item_bytes, layout, sides, chunks)
    short, smallest = planned_segments(heads, layers, item_bytes, layout, sides, period + rest)
    longer, _ = planned_segments(heads, layers, item_bytes, layout, sides, 2 * period + rest)
    return short + (longer - short) * (periods - 1), smallest


def _heads(group: LayerGroup) -> int:
    return 1 if group.kind is LayerCacheKind.LATENT else group.kv_heads


def _geometry(
    rank: int,
    tp: int,
    block: int,
    total: int,
    layers: int,
    item_bytes: int,
    layout: str,
    tokens: int,
) -> Geometry:
    """A rank's cache as one region of `tokens` tokens. Cross-layer blocks are HND inside."""
    heads = len(heads_of(rank, tp, total))
    by_head, by_token = (AxisKind.HEAD, heads), (AxisKind.TOKEN, block)
    order = (by_token, by_head) if layout == NHD else (by_head, by_token)
    axes = dense_axes([(AxisKind.LAYER, layers), *order], item_bytes)
    size = layers * heads * block * item_bytes
    num_blocks = -(-tokens // block)
    names = tuple(map(str, range(layers)))
    region = Region("0", 0, size, size, num_blocks, axes=axes, layers=names if layers > 1 else ())
    return Geometry(
        rank,
        tp,
        block,
        num_blocks,
        KVLayout.NHD if layout == NHD else KVLayout.HND,
        heads,
        1,
        (region,),
        total,
    )
