"""Tests the number of segments of a transfer, found by planning it, in cases that can be counted by
hand.
"""

import pytest

from kvferry.errors import ConfigError
from kvferry.sizing.segments import CROSS_LAYER, LAYOUTS, Sides, count_segments, planned_segments
from kvferry.sizing.shape import LayerCacheKind, LayerGroup, ModelCacheShape

LLAMA = ModelCacheShape((LayerGroup(LayerCacheKind.FULL, 80, 8, 256),), "bfloat16")


@pytest.mark.parametrize(
    ("layout", "sides", "segments", "segment_bytes"),
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
    layout: str, sides: Sides, segments: int, segment_bytes: int
) -> None:
    counted = count_segments(LLAMA, layout, sides, 1024)
    assert (counted.segments, counted.segment_bytes) == (segments, segment_bytes)
    assert counted.segments * counted.segment_bytes == LLAMA.prompt_bytes(1024) // sides.d_tp


def test_a_latent_cache_is_read_from_one_rank_whatever_the_tp() -> None:
    latent = ModelCacheShape(
        (LayerGroup(LayerCacheKind.LATENT, 61, 1, 576, rotary=64),), "bfloat16"
    )
    counts = {
        tp: count_segments(latent, "HND", Sides(tp, other, 64, 64), 6400).segments
        for tp, other in ((1, 1), (8, 1), (1, 8), (8, 8))
    }
    assert set(counts.values()) == {61 * 100}


def test_layers_with_a_window_send_only_the_blocks_they_hold() -> None:
    hybrid = ModelCacheShape(
        (
            LayerGroup(LayerCacheKind.FULL, 12, 8, 128),
            LayerGroup(LayerCacheKind.SLIDING, 12, 8, 128, window=128),
        ),
        "bfloat16",
    )
    assert count_segments(hybrid, "HND", Sides(1, 1, 16, 16), 1600).segments == 12 * 100 + 12 * 8


SIDES = [
    Sides(1, 1, 16, 16),
    Sides(4, 1, 16, 16),
    Sides(1, 4, 16, 16),
    Sides(16, 2, 16, 16),
    Sides(1, 1, 16, 64),
    Sides(1, 1, 64, 16),
    Sides(2, 1, 8, 64),
    Sides(1, 16, 48, 16),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sides", SIDES, ids=lambda sides: sides.title)
@pytest.mark.parametrize(
    ("kind", "heads", "width"),
    [
        (LayerCacheKind.FULL, 8, 256),
        (LayerCacheKind.FULL, 8, 16),
        (LayerCacheKind.FULL, 1, 256),
        (LayerCacheKind.LATENT, 1, 576),
    ],
)
def test_counting_from_a_few_blocks_is_what_planning_all_of_them_gives(
    kind: LayerCacheKind, heads: int, width: int, sides: Sides, layout: str
) -> None:
    granularity = min(sides.p_block, sides.d_block)
    for layers in (1, 2, 3, 7, 32):
        shape = ModelCacheShape((LayerGroup(kind, layers, heads, width),), "bfloat16")
        together, apart = (layers, 1) if layout == CROSS_LAYER else (1, layers)
        for tokens in (1, granularity, 3 * granularity + 1, 500, 1024, 1031, 2000):
            chunks = -(-tokens // granularity)
            segments, smallest = planned_segments(heads, together, 2 * width, layout, sides, chunks)
            counted = count_segments(shape, layout, sides, tokens)
            assert (counted.segments, counted.segment_bytes) == (segments * apart, smallest), (
                layers,
                tokens,
            )
            assert (
                count_segments(shape, layout, sides, tokens + granularity).segments
                > counted.segments
            )


def test_a_prompt_of_a_thousand_million_tokens_is_counted_from_a_few_blocks() -> None:
    assert count_segments(LLAMA, "HND", Sides(1, 1, 16, 16), 10**9).segments == 80 * 10**9 // 16
    assert count_segments(LLAMA, "NHD", Sides(1, 2, 16, 16), 10**9).segments == 80 * 10**9
    assert count_segments(LLAMA, "NHD", Sides(1, 2, 16, 16), 10**9 + 1).segments == 80 * (
        10**9 + 16
    )


def test_blocks_too_large_to_plan_are_refused() -> None:
    many = ModelCacheShape((LayerGroup(LayerCacheKind.FULL, 1, 4096, 2),), "bfloat16")
    with pytest.raises(
        ConfigError,
        match=r"blocks of 512 tokens and 4,096 KV heads are too large to plan; "
        r".*: use smaller blocks",
    ):
        count_segments(many, "HND", Sides(1, 1, 16, 512), 1000)
