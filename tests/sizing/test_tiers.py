"""Tests the break-even between loading from a tier and computing, and how much a tier holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.sizing.shape import LayerCacheKind, LayerGroup, ModelCacheShape
from kvferry.sizing.tiers import (
    TierSpeed,
    break_even_tokens,
    load_s,
    num_tokens_held,
    tier_row,
)

LLAMA_8B = ModelCacheShape((LayerGroup(LayerCacheKind.FULL, 32, 8, 256),), "bfloat16")
"""131,072 bytes per token."""
WINDOWED = ModelCacheShape(
    (
        LayerGroup(LayerCacheKind.FULL, 4, 8, 256),
        LayerGroup(LayerCacheKind.SLIDING, 20, 8, 256, window=1024),
    ),
    "bfloat16",
)
LATENT = ModelCacheShape((LayerGroup(LayerCacheKind.LATENT, 4, 1, 576),), "bfloat16")


def test_the_break_even_follows_from_latency_and_speeds() -> None:
    # A token loads in 131,072 B / 13.1072 GB/s = 10 µs and is computed in 110 µs: 10.05 ms of
    # latency are made up for after 100.5 tokens, which are in 7 blocks of 16.
    tier = TierSpeed("disk", 13.1072, 0.01005)
    assert break_even_tokens(LLAMA_8B, tier, 16, 1, prefill=1 / 110e-6) == 112
    assert break_even_tokens(LLAMA_8B, tier, 1, 1, prefill=1 / 110e-6) == 101


def test_a_tier_that_is_slower_than_computing_never_wins() -> None:
    tier = TierSpeed("object", 1.31072, 0.0)
    assert break_even_tokens(LLAMA_8B, tier, 16, 1, prefill=10_001) is None
    assert break_even_tokens(LLAMA_8B, tier, 16, 1, prefill=9_999) == 16
    assert tier_row(LLAMA_8B, tier, 16, 1, 1 << 30, None).even_prefill == pytest.approx(10_000)


def test_windows_make_long_prompts_cheaper_to_load() -> None:
    """A token within the window costs 98,304 bytes, one beyond it 16,384."""
    tier = TierSpeed("disk", 1.0, 0.0)
    found = break_even_tokens(WINDOWED, tier, 16, 1, prefill=20_000)
    assert found is not None
    assert found > 1024
    assert break_even_tokens(LLAMA_8B, tier, 16, 1, prefill=20_000) is None


@given(
    gbps=st.floats(0.01, 100),
    latency_s=st.floats(0, 2),
    prefill=st.floats(10, 1e6),
    chunk=st.sampled_from([1, 16, 128]),
    shape=st.sampled_from([LLAMA_8B, WINDOWED, LATENT]),
    tp=st.sampled_from([1, 2, 8]),
)
def test_loading_wins_at_the_break_even_and_not_one_chunk_before(
    gbps: float, latency_s: float, prefill: float, chunk: int, shape: ModelCacheShape, tp: int
) -> None:
    tier = TierSpeed("disk", gbps, latency_s)
    found = break_even_tokens(shape, tier, chunk, tp, prefill)
    if found is None:
        tested, wins = 100_000_000 // chunk * chunk, False
    else:
        tested, wins = found, True
        before = found - chunk
        assert load_s(shape, tier, before, tp) >= before / prefill
    assert (load_s(shape, tier, tested, tp) < tested / prefill) == wins


def test_a_tier_holds_whole_chunks_with_headers_or_whole_pages() -> None:
    chunk_bytes = 16 * 131_072
    disk, cpu = TierSpeed("disk", 1), TierSpeed("cpu", 1)
    assert num_tokens_held(LLAMA_8B, disk, 16, 1, 10 * (chunk_bytes + 4096)) == 160
    assert num_tokens_held(LLAMA_8B, disk, 16, 1, 10 * (chunk_bytes + 4096) - 1) == 144
    assert num_tokens_held(LLAMA_8B, cpu, 16, 1, 10 * chunk_bytes) == 160
    # Each of two ranks has half of the heads, and a header of its own.
    assert num_tokens_held(LLAMA_8B, disk, 16, 2, 10 * (chunk_bytes + 2 * 4096)) == 160
    # Every rank of a model with latent attention holds all of it.
    latent = 16 * 4 * 576 * 2
    assert num_tokens_held(LATENT, disk, 16, 2, 20 * (latent + 4096)) == 160


def test_rows_of_the_host_pool_have_the_size_of_the_largest_group() -> None:
    largest = 16 * 20 * 4096
    cpu, disk = TierSpeed("cpu", 1), TierSpeed("disk", 1)
    assert num_tokens_held(WINDOWED, cpu, 16, 1, 2 * largest) == 16
    assert num_tokens_held(WINDOWED, disk, 16, 1, 2 * largest) == 16
    assert num_tokens_held(WINDOWED, disk, 16, 1, largest + 16 * 4 * 4096 + 2 * 4096) == 16
    assert num_tokens_held(WINDOWED, cpu, 16, 1, largest + 16 * 4 * 4096 + 2 * 4096) == 0
