"""The pieces of a transfer, counted by planning it, in cases that can be counted by hand."""

import pytest

from kvferry.sizing.pieces import Sides, count_pieces
from kvferry.sizing.shape import CacheShape, LayerGroup, LayerKind

LLAMA = CacheShape((LayerGroup(LayerKind.FULL, 80, 8, 256),), "bfloat16")


@pytest.mark.parametrize(
    ("layout", "sides", "pieces", "piece_bytes"),
    [
        ("HND", Sides(1, 1, 16, 16), 80 * 64, 65_536),
        ("cross-layer", Sides(1, 1, 16, 16), 64, 80 * 65_536),
        ("HND", Sides(1, 1, 16, 32), 80 * 64 * 8, 8_192),
        ("HND", Sides(2, 1, 16, 16), 80 * 64 * 2, 32_768),
        ("NHD", Sides(1, 2, 16, 16), 80 * 1024, 2_048),
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
