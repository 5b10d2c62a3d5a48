"""Tests how much well-known models cache per token, against figures worked out by hand from their
published sizes.
"""

from typing import Any

import pytest
from tests.sizing import configs

from kvferry.errors import ConfigError
from kvferry.sizing.hf_config import auto_dtype, shape_of_config
from kvferry.sizing.shape import LayerCacheKind, LayerGroup, ModelCacheShape, canonical_dtype

GEMMA3_4B_GLOBAL = 5
"""Number of layers with global attention: every sixth of 34 layers."""


def shape(config: dict[str, Any], dtype: str = "") -> ModelCacheShape:
    return shape_of_config(config, dtype or auto_dtype(config) or "bfloat16")


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [
        (configs.LLAMA_70B, 80 * 2 * 8 * 128 * 2),
        (configs.LLAMA_8B, 32 * 2 * 8 * 128 * 2),
        (configs.LLAMA_8B_FP8_CACHE, 32 * 2 * 8 * 128),
        (configs.MISTRAL_V01, 32 * 2 * 8 * 128 * 2),
        (configs.MISTRAL_V03, 32 * 2 * 8 * 128 * 2),
        (configs.MISTRAL_SMALL_3, 40 * 2 * 8 * 128 * 2),
        (configs.MIXTRAL, 32 * 2 * 8 * 128 * 2),
        (configs.QWEN2_7B, 28 * 2 * 4 * 128 * 2),
        (configs.QWEN3_32B, 64 * 2 * 8 * 128 * 2),
        (configs.QWEN3_NEXT, 12 * 2 * 2 * 256 * 2),
        (configs.QWEN3_NEXT_AS_PUBLISHED, 12 * 2 * 2 * 256 * 2),
        (configs.GEMMA2_9B, 42 * 2 * 8 * 256 * 4),
        (configs.GEMMA3_4B, 34 * 2 * 4 * 256 * 2),
        (configs.GEMMA3_27B, 62 * 2 * 16 * 128 * 2),
        (configs.GEMMA3N, 20 * 2 * 2 * 256 * 2),
        (configs.DEEPSEEK_V2_LITE, 27 * 576 * 2),
        (configs.DEEPSEEK_V3, 61 * 576 * 2),
        (configs.DEEPSEEK_V32, 61 * (576 * 2 + 132)),
        (configs.DEEPSEEK_VL2_TINY, 12 * 2 * 10 * 128 * 2),
        (configs.KIMI_LINEAR, 7 * 576 * 2),
        (configs.MINIMAX_TEXT_01, 10 * 2 * 8 * 128 * 2),
        (configs.GPT_OSS_20B, 24 * 2 * 8 * 64 * 2),
        (configs.LLAMA4_SCOUT, 48 * 2 * 8 * 128 * 2),
        (configs.PHI3_MINI, 32 * 2 * 32 * 96 * 2),
        (configs.PHI4, 40 * 2 * 10 * 128 * 2),
        (configs.GPT2, 12 * 2 * 12 * 64 * 2),
        (configs.FALCON_7B, 32 * 2 * 1 * 64 * 2),
        (configs.FALCON_40B, 60 * 2 * 8 * 64 * 2),
        (configs.DBRX, 40 * 2 * 8 * 128 * 2),
        (configs.CHATGLM3, 28 * 2 * 2 * 128 * 2),
        (configs.COMMAND_R7B, 32 * 2 * 8 * 128 * 2),
        (configs.JAMBA, 4 * 2 * 8 * 128 * 2),
        (configs.NEMOTRON_H, 2 * 2 * 8 * 128 * 2),
        (configs.NEMOTRON_NAS, (8 + 4 + 8) * 2 * 128 * 2),
    ],
)
def test_a_known_model_caches_what_its_published_sizes_say(
    config: dict[str, Any], bytes_per_token: int
) -> None:
    assert shape(config).bytes_per_token() == bytes_per_token


@pytest.mark.parametrize(
    ("config", "full", "windowed", "window"),
    [
        (configs.MISTRAL_V01, 0, 32, 4096),
        (configs.MISTRAL_V03, 32, 0, None),
        (configs.QWEN2_7B, 28, 0, None),
        (configs.QWEN2_WINDOWED, 20, 8, 4096),
        (configs.GEMMA2_9B, 21, 21, 4096),
        (configs.GEMMA3_4B, GEMMA3_4B_GLOBAL, 34 - GEMMA3_4B_GLOBAL, 1024),
        (configs.GEMMA3_27B, 10, 52, 1024),
        (configs.GEMMA3N, 4, 16, 512),
        (configs.GPT_OSS_20B, 12, 12, 128),
        (configs.LLAMA4_SCOUT, 12, 36, 8192),
        (configs.PHI3_MINI, 0, 32, 2047),
        (configs.COMMAND_R7B, 8, 24, 4096),
    ],
)
def test_layers_with_a_window_are_told_from_those_without(
    config: dict[str, Any], full: int, windowed: int, window: int | None
) -> None:
    groups = shape(config).groups
    assert sum(group.layers for group in groups if group.window is None) == full
    assert sum(group.layers for group in groups if group.window is not None) == windowed
    assert {group.window for group in groups} - {None} == ({window} - {None})


def test_layers_that_see_chunks_are_named_so() -> None:
    assert {group.kind for group in shape(configs.LLAMA4_SCOUT).groups} == {
        LayerCacheKind.FULL,
        LayerCacheKind.CHUNKED,
    }
    listed = {**configs.LLAMA4_SCOUT["text_config"], "no_rope_layers": [1, 1, 1, 0] * 12}
    assert shape(listed).groups == shape(configs.LLAMA4_SCOUT).groups


@pytest.mark.parametrize("interval", [1, 4, 48])
def test_every_nth_layer_attends_where_only_the_interval_is_written(interval: int) -> None:
    config = {**configs.QWEN3_NEXT_AS_PUBLISHED, "full_attention_interval": interval}
    assert [group.layers for group in shape(config).groups] == [48 // interval]


def test_a_list_of_types_goes_before_an_interval() -> None:
    assert shape({**configs.QWEN3_NEXT, "full_attention_interval": 2}).layers == 12


def test_latent_layers_are_those_listed_from_one_on() -> None:
    listed = configs.KIMI_LINEAR["linear_attn_config"]
    only = {**configs.KIMI_LINEAR, "linear_attn_config": {**listed, "full_attn_layers": [27]}}
    assert [group.layers for group in shape(only).groups] == [1]
    assert [
        group.layers for group in shape({**configs.KIMI_LINEAR, "linear_attn_config": None}).groups
    ] == [27]
    with pytest.raises(
        ConfigError, match=r"full_attn_layers is \[0\], which must list whole numbers from 1 to 27"
    ):
        shape({**configs.KIMI_LINEAR, "linear_attn_config": {**listed, "full_attn_layers": [0]}})


def test_lightning_layers_cache_nothing() -> None:
    ones = {**configs.MINIMAX_TEXT_01, "attn_type_list": [1] * 80}
    assert (shape(configs.MINIMAX_TEXT_01).layers, shape(ones).layers) == (10, 80)


def test_values_of_no_width_mean_plain_attention_where_nothing_is_latent() -> None:
    (group,) = shape(configs.DEEPSEEK_VL2_TINY).groups
    assert (group.kind, group.kv_heads, group.width) == (LayerCacheKind.FULL, 10, 256)


def test_a_window_bounds_what_a_prompt_takes_but_not_what_full_layers_take() -> None:
    found = shape(configs.GPT_OSS_20B)
    layer = 2 * 8 * 64 * 2
    assert found.prompt_bytes(100) == 100 * 24 * layer == 100 * found.bytes_per_token()
    assert found.prompt_bytes(1000) == 12 * layer * (1000 + 128) != 1000 * found.bytes_per_token()
    assert (
        found.prompt_bytes(1001) - found.prompt_bytes(1000)
        == found.bytes_per_late_token()
        == 12 * layer
    )


def test_a_layer_with_a_window_holds_the_blocks_its_last_tokens_lie_in() -> None:
    windowed = LayerGroup(LayerCacheKind.SLIDING, 1, 1, 2, window=32)
    assert [windowed.held_blocks(tokens, 16) for tokens in (1, 16, 32, 33, 48, 49, 1600)] == [
        1,
        1,
        2,
        3,
        2,
        3,
        2,
    ]
    assert LayerGroup(LayerCacheKind.FULL, 1, 1, 2).held_blocks(49, 16) == 4


def test_ranks_share_heads_and_neighbours_hold_the_same_when_there_are_more_ranks() -> None:
    found = shape(configs.LLAMA_70B)
    assert [found.bytes_per_token(tp) for tp in (1, 2, 8, 16)] == [327_680, 163_840, 40_960, 40_960]


def test_every_rank_holds_the_whole_latent_vector() -> None:
    found = shape(configs.DEEPSEEK_V3)
    assert [found.bytes_per_token(tp) for tp in (1, 2, 8, 16)] == [61 * 576 * 2] * 4


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("bfloat16", 1152),
        ("bf16", 1152),
        ("fp8", 576),
        ("fp8_e4m3", 576),
        ("fp8_ds_mla", 656),
        ("float32", 2304),
    ],
)
def test_the_cache_may_have_another_dtype_than_the_weights(dtype: str, size: int) -> None:
    assert shape(configs.DEEPSEEK_V3, canonical_dtype(dtype)).bytes_per_token() == 61 * size


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (configs.LLAMA_70B, "bfloat16"),
        (configs.GEMMA2_9B, "float32"),
        (configs.CHATGLM3, "float16"),
        (configs.GEMMA3_4B, "bfloat16"),
        (configs.GEMMA3N, "bfloat16"),
        (configs.QWEN3_NEXT, "bfloat16"),
        (configs.LLAMA_8B_FP8_CACHE, "fp8"),
        (configs.GPT2, None),
    ],
)
def test_the_dtype_is_the_checkpoints_unless_somebody_says_otherwise(
    config: dict[str, Any], expected: str | None
) -> None:
    assert auto_dtype(config) == expected


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "config.json does not give the number of layers"),
        (
            {"num_hidden_layers": 4},
            "config.json has neither num_key_value_heads nor num_attention_heads",
        ),
        (
            {"num_hidden_layers": 4, "num_key_value_heads": 2},
            "config.json has neither head_dim nor both hidden_size and num_attention_heads",
        ),
        (
            {"num_hidden_layers": 4, "num_attention_heads": 3, "hidden_size": 64},
            "hidden_size 64, which 3 heads do not divide",
        ),
        ({**configs.LLAMA_8B, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({**configs.LLAMA_8B, "num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({**configs.LLAMA_8B, "num_hidden_layers": 1.5}, "num_hidden_layers is 1.5"),
        ({**configs.LLAMA_8B, "num_key_value_heads": True}, "num_key_value_heads is True"),
        ({**configs.LLAMA_8B, "num_key_value_heads": [8, 8]}, "another number of KV heads"),
        (
            {**configs.LLAMA_8B, "layer_types": ["full_attention"]},
            "config.json has 32 layers, but layer_types does not list as many",
        ),
        (
            {**configs.LLAMA_8B, "layer_types": ["psychic"] * 32},
            "a layer of type 'psychic' in layer_types, which kvferry does not know",
        ),
        (
            {**configs.LLAMA_8B, "layer_types": ["sliding_attention"] * 32},
            "layers with a window but has no sliding_window",
        ),
        (
            {**configs.LLAMA_8B, "layer_types": ["mamba"] * 32},
            "none of the model's layers has a KV cache",
        ),
        ({**configs.DEEPSEEK_V3, "qk_rope_head_dim": None}, "no qk_rope_head_dim"),
        (
            {**configs.NEMOTRON_NAS, "num_hidden_layers": 5},
            "5 layers, but block_configs does not list as many",
        ),
        (configs.T5, "a model with an encoder"),
    ],
)
def test_what_cannot_be_understood_is_one_sentence_with_a_fix(
    config: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match="; ") as caught:
        shape(config)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_dtype_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="use --dtype with one of float32, bfloat16"):
        canonical_dtype("posit16")
    with pytest.raises(ConfigError, match="latent attention only"):
        shape(configs.LLAMA_8B, "fp8_ds_mla")
