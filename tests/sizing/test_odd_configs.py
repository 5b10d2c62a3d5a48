"""Tests that any JSON in a config.json is either understood, or refused with one sentence that
names what is wrong with it.
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sizing import configs

from kvferry.errors import ConfigError
from kvferry.sizing.hf_config import auto_dtype, shape_of_config

BASES = [
    configs.LLAMA_8B,
    configs.QWEN2_WINDOWED,
    configs.QWEN3_NEXT_AS_PUBLISHED,
    configs.GEMMA3_4B["text_config"],
    configs.DEEPSEEK_V32,
    configs.KIMI_LINEAR,
    configs.MINIMAX_TEXT_01,
    configs.LLAMA4_SCOUT["text_config"],
    configs.FALCON_7B,
    configs.DBRX,
    configs.JAMBA,
    configs.NEMOTRON_H,
    configs.NEMOTRON_NAS,
]
KEYS = sorted(
    {key for base in BASES for key in base}
    | {
        "text_config",
        "language_config",
        "attn_layer_indices",
        "layers_block_type",
        "num_kv_shared_layers",
        "sliding_window_pattern",
    }
    | {
        "ffn_config",
        "num_key_value_heads_per_layer",
        "quantization_config",
        "is_encoder_decoder",
        "no_rope_layer_interval",
        "dtype",
    }
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["mamba", "*" * 8]),
)
INNER = st.sampled_from(
    [
        "attention",
        "n_heads_in_group",
        "no_op",
        "full_attn_layers",
        "kv_n_heads",
        "kv_cache_scheme",
        "num_bits",
        "type",
    ]
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(INNER | st.sampled_from(KEYS), inner)
    ),
    max_leaves=8,
)
ODD = st.one_of(
    VALUES,
    st.builds(
        lambda value, count: [value] * count, VALUES, st.sampled_from([4, 8, 27, 32, 48, 80])
    ),
)


@settings(max_examples=300, deadline=None)
@given(
    base=st.sampled_from(BASES),
    changed=st.dictionaries(st.sampled_from(KEYS), ODD, min_size=1, max_size=4),
)
def test_any_json_in_any_known_key_is_understood_or_one_sentence(
    base: dict[str, Any], changed: dict[str, Any]
) -> None:
    config = json.loads(json.dumps({**base, **changed}))
    try:
        shape = shape_of_config(config, auto_dtype(config) or "bfloat16")
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either end is good
    else:
        assert shape.bytes_per_token() > 0


@pytest.mark.parametrize(
    ("base", "key", "value", "sentence"),
    [
        (
            configs.LLAMA_8B,
            "layer_types",
            [["a"]] * 32,
            "lists ['a'] in layer_types, which must be the names of layer types",
        ),
        (configs.LLAMA_8B, "layer_types", "f" * 32, "layer_types does not list as many"),
        (configs.LLAMA_8B, "layer_types", 0, "layer_types does not list as many"),
        (configs.LLAMA_8B, "layers_block_type", [None] * 32, "lists None in layers_block_type"),
        (
            configs.NEMOTRON_NAS,
            "block_configs",
            [{"attention": None}] * 4,
            "a block in block_configs whose attention is None",
        ),
        (
            configs.NEMOTRON_NAS,
            "block_configs",
            [3] * 4,
            "a block in block_configs whose attention is None",
        ),
        (
            configs.NEMOTRON_NAS,
            "block_configs",
            [{"attention": {}}] * 4,
            "with attention but no n_heads_in_group",
        ),
        (
            configs.NEMOTRON_NAS,
            "block_configs",
            [{"attention": {"n_heads_in_group": 65}}] * 4,
            "n_heads_in_group is 65",
        ),
        (configs.NEMOTRON_NAS, "block_configs", {}, "block_configs does not list as many"),
        (
            configs.NEMOTRON_H,
            "hybrid_override_pattern",
            ["*"] * 8,
            "hybrid_override_pattern is not a text of as many characters",
        ),
        (
            configs.JAMBA,
            "attn_layer_offset",
            8,
            "attn_layer_offset is 8, which must be a whole number from 0 to 7",
        ),
        (configs.LLAMA_8B, "attn_layer_indices", [[1]], "attn_layer_indices is [[1]]"),
        (configs.MINIMAX_TEXT_01, "attn_type_list", [2] * 80, "attn_type_list is [2, 2"),
        (
            configs.KIMI_LINEAR,
            "linear_attn_config",
            [4],
            "linear_attn_config is [4], which must be an object",
        ),
        (
            configs.QWEN3_NEXT_AS_PUBLISHED,
            "full_attention_interval",
            0,
            "full_attention_interval is 0",
        ),
        (
            configs.LLAMA4_SCOUT["text_config"],
            "no_rope_layers",
            [{}] * 48,
            "no_rope_layers is [{}, {}",
        ),
        (
            configs.QWEN2_7B,
            "use_sliding_window",
            "yes",
            "use_sliding_window is 'yes', which must be true or false",
        ),
        (configs.DBRX, "attn_config", 8, "attn_config is 8, which must be an object"),
        (
            configs.LLAMA_8B,
            "num_key_value_heads",
            [True] * 32,
            "num_key_value_heads is [True, True",
        ),
        (
            configs.LLAMA_8B,
            "num_key_value_heads",
            list(range(32)) * 300,
            "num_key_value_heads lists another number of KV heads",
        ),
        (
            configs.LLAMA_8B,
            "num_hidden_layers",
            900_000_000,
            "num_hidden_layers is 900000000, which must be a whole number from 1 to 10,000",
        ),
    ],
)
def test_a_value_that_makes_no_sense_is_named_with_its_key(
    base: dict[str, Any], key: str, value: object, sentence: str
) -> None:
    with pytest.raises(ConfigError, match="; ") as caught:
        shape_of_config({**base, key: value}, "bfloat16")
    assert sentence in str(caught.value)
    assert shape_of_config(base, "bfloat16").groups, "without it all is well"


def test_layers_of_very_many_sizes_are_refused() -> None:
    listed = {
        **configs.LLAMA_8B,
        "head_dim": 128,
        "num_hidden_layers": 100,
        "num_key_value_heads": list(range(1, 101)),
    }
    with pytest.raises(
        ConfigError,
        match="layers of 100 different sizes, but at most 64 can be planned; give --layers",
    ):
        shape_of_config(listed, "bfloat16")


def test_what_is_nested_very_deep_is_found_or_named() -> None:
    deep: Any = configs.LLAMA_8B
    odd: Any = []
    for _ in range(5_000):
        deep, odd = {"text_config": deep}, [odd]
    assert shape_of_config(deep, "bfloat16") == shape_of_config(configs.LLAMA_8B, "bfloat16")
    with pytest.raises(ConfigError, match="head_dim is "):
        shape_of_config({**configs.LLAMA_8B, "head_dim": odd}, "bfloat16")
