"""The number of pieces that a plan promises is the number that planning a read really gives."""

import pytest

from kvferry.protocol.planning import Geometry, plan_read
from kvferry.protocol.ranks import heads_of, visits
from kvferry.sizing.pieces import Sides, count_pieces
from kvferry.sizing.shape import CacheShape, LayerGroup, LayerKind
from kvferry.types import KVLayout, Region

LAYERS, HEAD_DIM, NUM_BLOCKS = 3, 8, 64


def geometry(rank: int, tp: int, heads: int, block: int, layout: KVLayout) -> Geometry:
    ours = len(heads_of(rank, tp, heads))
    size = ours * block * 2 * HEAD_DIM * 2
    runs = 1 if layout is KVLayout.HND else block
    regions = tuple(Region(f"layer.{i}", 4096 * i, size, size, NUM_BLOCKS, head_runs=runs) for i in range(LAYERS))
    return Geometry(rank, tp, block, NUM_BLOCKS, layout, ours, HEAD_DIM, regions, heads)


@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 2), (2, 1), (4, 1), (1, 2), (1, 4), (8, 2), (2, 8), (8, 8)])
@pytest.mark.parametrize("tokens", [1, 16, 100])
def test_a_plan_counts_the_pieces_that_a_read_has(layout: KVLayout, p_tp: int, d_tp: int, tokens: int) -> None:
    heads, block = 4, 16
    blocks = [list(range(-(-tokens // block)))]
    d = geometry(0, d_tp, heads, block, layout)
    plans = [
        plan_read(d, geometry(visit.rank, p_tp, heads, block, layout), visit.heads, blocks, blocks, range(tokens))
        for visit in visits(0, d_tp, p_tp, heads)
    ]
    pieces = [piece for plan in plans for piece in plan]
    shape = CacheShape((LayerGroup(LayerKind.FULL, LAYERS, heads, 2 * HEAD_DIM),), "bfloat16")
    counted = count_pieces(shape, str(layout), Sides(p_tp, d_tp, block, block), tokens)
    assert counted.pieces == sum(len(piece.local_offsets) for piece in pieces)
    assert counted.piece_bytes == min(piece.piece_bytes for piece in pieces)


LLAMA = CacheShape((LayerGroup(LayerKind.FULL, 80, 8, 256),), "bfloat16")


@pytest.mark.parametrize(
    ("layout", "sides", "pieces", "piece_bytes"),
    [
        ("HND", Sides(1, 1, 16, 16), 80 * 64, 65_536),
        ("cross-layer", Sides(1, 1, 16, 16), 64, 80 * 65_536),
        ("HND", Sides(1, 1, 16, 32), 80 * 64, 65_536),
        ("NHD", Sides(1, 1, 32, 16), 80 * 64, 65_536),
        ("HND", Sides(1, 1, 32, 16), 80 * 64 * 8, 8_192),
        ("cross-layer", Sides(1, 2, 16, 16), 80 * 64, 32_768),
    ],
)
def test_blocks_of_all_layers_and_blocks_of_unequal_size_fall_into_so_many(
    layout: str, sides: Sides, pieces: int, piece_bytes: int
) -> None:
    counted = count_pieces(LLAMA, layout, sides, 1024)
    assert (counted.pieces, counted.piece_bytes) == (pieces, piece_bytes)
    assert counted.pieces * counted.piece_bytes == LLAMA.prompt_bytes(1024) // sides.d_tp


def test_a_latent_cache_is_read_from_one_rank_whatever_the_tp() -> None:
    latent = CacheShape((LayerGroup(LayerKind.LATENT, 61, 1, 576, rotary=64),), "bfloat16")
    counts = {tp: count_pieces(latent, "HND", Sides(tp, other, 64, 64), 6400).pieces for tp, other in ((1, 1), (8, 1), (1, 8), (8, 8))}
    assert set(counts.values()) == {61 * 100}


def test_layers_with_a_window_send_only_the_blocks_they_hold() -> None:
    hybrid = CacheShape((LayerGroup(LayerKind.FULL, 12, 8, 128), LayerGroup(LayerKind.SLIDING, 12, 8, 128, window=128)), "bfloat16")
    assert count_pieces(hybrid, "HND", Sides(1, 1, 16, 16), 1600).pieces == 12 * 100 + 12 * 8
