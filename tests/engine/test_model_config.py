"""Tests how checkpoints are read: a supported one is understood, and any other is refused with one
sentence that names the problem.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.connectors.contract import ParallelConfig
from kvferry.engine.make_model.writer import make_model
from kvferry.engine.model.checkpoint import open_checkpoint
from kvferry.engine.model.config import (
    LatentShape,
    LayerConfig,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    SamplingDefaults,
    read_model_config,
)
from kvferry.engine.model.weights import (
    HeadWeights,
    LatentWeights,
    ModelWeights,
    Precision,
    load_weights,
)
from kvferry.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "eos_token_id": 2,
}  # fmt: skip
GEMMA = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
}
DEEPSEEK = {
    **LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 2,
    "q_lora_rank": None,
}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(directory: Path, config: Any) -> ModelConfig:
    (directory / "config.json").write_text(
        config if isinstance(config, str) else json.dumps(config)
    )
    return read_model_config(directory)


def test_what_a_file_leaves_out_has_its_family_s_default(tmp_path: Path) -> None:
    llama, qwen3 = read(tmp_path, LLAMA), read(tmp_path, QWEN3)
    assert (
        llama.attention.num_kv_heads,
        llama.attention.head_dim,
        llama.attention.has_qk_norm,
    ) == (4, 16, False)
    assert (
        qwen3.attention.num_kv_heads,
        qwen3.attention.head_dim,
        qwen3.attention.has_qk_norm,
    ) == (2, 128, True)
    assert llama.layers[0].rope == RopeConfig(10000.0)
    assert (llama.dtype, llama.norm_eps, llama.has_tied_embeddings, llama.eos_token_ids) == (
        "float32",
        1e-6,
        False,
        (2,),
    )


def test_old_and_new_spellings_mean_the_same(tmp_path: Path) -> None:
    old = {
        "torch_dtype": "bfloat16",
        "rope_theta": 500000.0,
        "rope_scaling": {"type": "llama3", **SCALING},
    }
    new = {
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING},
    }
    assert read(tmp_path, LLAMA | old) == read(tmp_path, LLAMA | new)
    rope = read(tmp_path, LLAMA | new).layers[0].rope
    assert rope == RopeConfig(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 64))
    assert read(tmp_path, LLAMA | {"rope_scaling": None, "rope_theta": 7.0}).layers[
        0
    ].rope == RopeConfig(7.0)


def test_biases_are_where_each_family_has_them(tmp_path: Path) -> None:
    def biases(**changes: Any) -> tuple[bool, bool]:
        attention = read(tmp_path, LLAMA | changes).attention
        return attention.has_qkv_bias, attention.has_output_bias

    assert biases() == (False, False)
    assert biases(attention_bias=True) == (True, True)
    assert biases(architectures=["Qwen2ForCausalLM"]) == (True, False)


def test_every_end_of_sequence_token_of_both_files_counts_once(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert read(tmp_path, LLAMA).eos_token_ids == (2, 7)
    assert read(tmp_path, LLAMA | {"eos_token_id": None}).eos_token_ids == (7, 2)


def test_sampling_comes_from_the_generation_config(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    assert read(tmp_path, LLAMA).sampling == SamplingDefaults(1.0, 1.0, 0)
    path.write_text('{"temperature": 0.6, "top_p": 0.95, "top_k": 20}')
    assert read(tmp_path, LLAMA).sampling == SamplingDefaults(0.6, 0.95, 20)
    path.write_text('{"temperature": 0}')
    assert read(tmp_path, LLAMA).sampling == SamplingDefaults(0.0, 1.0, 0)
    for text in ('{"top_p": 1.5}', '{"top_k": -3}', '{"temperature": "hot"}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"generation_config\.json: (top_p|top_k|temp)"):
            read(tmp_path, LLAMA)


UNUSED_WINDOWS = [
    {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": False},
    {
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 32,
        "use_sliding_window": True,
        "max_window_layers": 2,
    },
    {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": True},
    {
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": None,
        "use_sliding_window": True,
        "max_window_layers": 0,
    },
    {"sliding_window": 32},
    {
        "architectures": ["Qwen3ForCausalLM"],
        "sliding_window": 32,
        "layer_types": ["full_attention"] * 2,
    },
    {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    {"architectures": ["MistralForCausalLM"], "sliding_window": 128},
]


@pytest.mark.parametrize("changes", UNUSED_WINDOWS)
def test_a_sliding_window_that_no_layer_uses_is_ignored(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert [layer.window for layer in read(tmp_path, LLAMA | changes).layers] == [None, None]


USED_WINDOWS = [
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 32}, [32, 32]),
    (
        {"architectures": ["MistralForCausalLM"], "sliding_window": 32,
         "layer_types": ["sliding_attention"] * 2},
        [32, 32],
    ),
    ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 9000}, [4096, 4096]),
    (
        {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": True,
         "max_window_layers": 1},
        [None, 32],
    ),
    (
        {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": True,
         "max_window_layers": 0},
        [32, 32],
    ),
    (
        {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 9, "use_sliding_window": True,
         "layer_types": ["sliding_attention", "full_attention"]},
        [9, None],
    ),
    (GEMMA | {"sliding_window": 32}, [32, 32, 32, 32]),
    (GEMMA | {"sliding_window": 32, "sliding_window_pattern": 2}, [32, None, 32, None]),
    (
        GEMMA | {"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"] * 2},
        [None, 32, None, 32],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "windows"), USED_WINDOWS)
def test_a_sliding_window_is_where_transformers_has_it(
    tmp_path: Path, changes: dict[str, Any], windows: list[int | None]
) -> None:
    assert [layer.window for layer in read(tmp_path, LLAMA | changes).layers] == windows


def test_gemma_rotates_layers_with_and_without_a_window_differently(tmp_path: Path) -> None:
    pattern = {"sliding_window": 32, "sliding_window_pattern": 2}
    old = {
        "rope_theta": 7.0,
        "rope_local_base_freq": 5.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    nested = {
        "full_attention": {"rope_type": "linear", "rope_theta": 7.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
    }
    full, sliding = (
        LayerConfig(RopeConfig(7.0, LinearScaling(8.0))),
        LayerConfig(RopeConfig(5.0), 32),
    )
    for spelling in (old, {"rope_parameters": nested}):
        assert read(tmp_path, GEMMA | pattern | spelling).layers == (sliding, full) * 2
    plain = read(tmp_path, GEMMA | pattern)
    assert plain.layers[:2] == (
        LayerConfig(RopeConfig(10_000.0), 32),
        LayerConfig(RopeConfig(1_000_000.0)),
    )
    # A window that no sequence outgrows counts as no window, but its layers keep their own rotary
    # embedding.
    assert read(tmp_path, GEMMA | pattern | {"sliding_window": 128}).layers[0] == LayerConfig(
        RopeConfig(10_000.0)
    )


def test_defaults_of_gemma_and_deepseek_are_those_of_transformers(tmp_path: Path) -> None:
    gemma, deepseek = read(tmp_path, GEMMA), read(tmp_path, DEEPSEEK)
    assert (
        gemma.attention.head_dim,
        gemma.attention.scale,
        gemma.has_tied_embeddings,
        gemma.is_gemma,
    ) == (256, 256**-0.5, True, True)
    assert deepseek.attention.latent == LatentShape(512, 128, 64, 128)
    assert (
        deepseek.attention.num_kv_heads,
        deepseek.attention.head_dim,
        deepseek.attention.scale,
    ) == (1, 576, 192**-0.5)
    del (without := dict(DEEPSEEK))["q_lora_rank"]
    assert read(tmp_path, without).attention.latent == LatentShape(512, 128, 64, 128, 1536)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (LLAMA, {1, 2, 4}),
        (QWEN3, {1, 2, 4}),
        (DEEPSEEK, {1, 2, 4}),
        (
            LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8},
            {1, 2, 4, 12},
        ),
    ],
)
def test_query_heads_are_divided_and_kv_heads_divided_or_repeated(
    tmp_path: Path, config: dict[str, Any], sizes: set[int]
) -> None:
    model = read(tmp_path, config)
    for size in range(1, 13):
        if size in sizes:
            model.check_tensor_parallel(size)
        else:
            with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size} "):
                model.check_tensor_parallel(size)


REFUSED = [
    ({"architectures": ["GPT2LMHeadModel"]}, "architectures must be one of LlamaForCausalLM"),
    ({"architectures": None}, "architectures must be"),
    ({"architectures": [["x"]]}, "architectures must be"),
    (
        {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
        "layer_types asks for sliding windows, which a Llama",
    ),
    (
        {"use_sliding_window": True},
        "use_sliding_window asks for sliding windows, which a LlamaForCausalLM does not have",
    ),
    (
        QWEN3 | {"layer_types": ["sliding_attention", "full_attention"]},
        "layer_types has sliding_attention, but use_sliding_window",
    ),
    (
        QWEN3 | {"layer_types": ["full_attention"]},
        "layer_types names 1 layers, but num_hidden_layers is 2",
    ),
    (
        {
            "architectures": ["MistralForCausalLM"],
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "layer_types contradicts sliding_window",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}},
        "rope_parameters differ between layer types",
    ),
    (
        GEMMA | {"rope_parameters": {"rope_theta": 7.0}},
        "rope_parameters must have full_attention and sliding_attention",
    ),
    (GEMMA | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    (GEMMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    (
        GEMMA | {"hidden_activation": "relu"},
        "hidden_activation must be gelu_pytorch_tanh, got 'relu'",
    ),
    (
        GEMMA | {"sliding_window": None},
        "sliding_window must be a whole number from 1 to 16777216, got null",
    ),
    (GEMMA | {"sliding_window": 0}, "sliding_window must be a whole number from 1 to 16777216"),
    (
        DEEPSEEK | {"first_k_dense_replace": 1},
        "first_k_dense_replace leaves 1 layers with experts, which are not supported",
    ),
    (
        DEEPSEEK | {"first_k_dense_replace": None},
        "first_k_dense_replace leaves 2 layers with experts",
    ),
    (DEEPSEEK | {"num_key_value_heads": 2}, "num_key_value_heads must equal the 4 attention heads"),
    (DEEPSEEK | {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
    (
        DEEPSEEK | {"rope_scaling": {"type": "yarn"}},
        "rope_type must be default, linear or llama3, got 'yarn'",
    ),
    ({"layer_types": ["linear_attention"]}, "layer_types has 'linear_attention'"),
    ({"layer_types": 5}, "layer_types must be a list"),
    (
        QWEN3 | {"max_window_layers": "x", "sliding_window": 32, "use_sliding_window": True},
        "max_window_layers must be",
    ),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is set"),
    ({"hidden_act": "gelu"}, "hidden_act must be silu"),
    ({"mlp_bias": True}, "mlp_bias is true"),
    (
        {"rope_scaling": {"rope_type": "yarn"}},
        "rope_type must be default, linear or llama3, got 'yarn'",
    ),
    ({"rope_scaling": {"rope_type": "llama3"}}, "factor must be a positive number"),
    (
        {"rope_scaling": {"rope_type": "llama3", **SCALING, "high_freq_factor": 1.0}},
        "high_freq_factor must be more",
    ),
    ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
    ({"rope_theta": 0}, "rope_theta must be a positive number"),
    ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
    ({"dtype": "int8"}, "dtype must be one of float32"),
    ({"dtype": 5}, "dtype must be one of float32"),
    ({"vocab_size": 0}, "vocab_size must be a whole number from 1 to 16777216, got 0"),
    ({"hidden_size": "64"}, "hidden_size must be a whole number"),
    ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
    ({"num_hidden_layers": 1 << 40}, "num_hidden_layers must be a whole number from 1 to 16777216"),
    ({"num_key_value_heads": 3}, "num_key_value_heads must divide the 4 attention heads"),
    ({"head_dim": 15}, "head_dim must be a multiple of 2"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
    ({"eos_token_id": ["x"]}, "eos_token_id must be a token id"),
]


@pytest.mark.parametrize(
    ("changes", "sentence"), REFUSED, ids=[sentence[:40] for _, sentence in REFUSED]
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {sentence}"):
        read(tmp_path, LLAMA | changes)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("{", "is not valid JSON"), ("[]", "must hold a JSON object"), ("\xff", "is not valid JSON")],
)
def test_a_file_that_is_no_configuration_is_refused(
    tmp_path: Path, content: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(tmp_path, content)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"config.json does not exist; give the folder of a Hugging Face checkpoint",
    ):
        read_model_config(tmp_path)


def test_a_length_beyond_the_model_s_positions_is_refused(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    assert (config.max_model_len(0), config.max_model_len(100)) == (128, 100)
    with pytest.raises(
        ConfigError, match="--max-model-len 129 is more than the model's 128 positions"
    ):
        config.max_model_len(129)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model(tmp_path)
    return tmp_path


def weights_of(
    directory: Path,
    parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  frozen
) -> ModelWeights:
    precision = Precision(torch.float32, torch.float32, torch.float32)
    return load_weights(
        read_model_config(directory),
        open_checkpoint(directory),
        parallel,
        precision,
        torch.device("cpu"),
    )


def change(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors.pop(name, None)
    save_file(
        tensors if tensor is None else {**tensors, name: tensor}, directory / "model.safetensors"
    )


def test_ranks_hold_parts_that_make_up_the_whole(model: Path) -> None:
    whole = weights_of(model)
    parts = [weights_of(model, ParallelConfig(2, rank)) for rank in range(2)]
    layer, halves = whole.layers[1], [part.layers[1] for part in parts]
    assert isinstance(layer.attention, HeadWeights)
    queries, keys, values = layer.attention.qkv.weight.split((256, 128, 128))
    for rank, half in enumerate(halves):
        expected = torch.cat((queries.chunk(2)[rank], keys.chunk(2)[rank], values.chunk(2)[rank]))
        assert isinstance(half.attention, HeadWeights)
        assert torch.equal(half.attention.qkv.weight, expected)
    assert torch.equal(
        torch.cat([half.output.weight for half in halves], dim=1), layer.output.weight
    )
    assert torch.equal(torch.cat([half.down.weight for half in halves], dim=1), layer.down.weight)
    assert torch.equal(torch.cat([part.lm_head.weight for part in parts]), whole.lm_head.weight)
    assert torch.equal(parts[0].embedding, whole.embedding)


def test_ranks_beyond_the_kv_heads_hold_the_same_ones(model: Path) -> None:
    whole = weights_of(model).layers[1].attention
    assert isinstance(whole, HeadWeights)
    queries, keys, values = whole.qkv.weight.split((256, 128, 128))
    for rank in range(4):
        part = weights_of(model, ParallelConfig(4, rank)).layers[1].attention
        assert isinstance(part, HeadWeights)
        expected = torch.cat(
            (queries.chunk(4)[rank], keys.chunk(2)[rank // 2], values.chunk(2)[rank // 2])
        )
        assert torch.equal(part.qkv.weight, expected)
        assert part.num_kv_heads == 1


def test_every_rank_makes_the_whole_latent_and_has_some_heads(tmp_path: Path) -> None:
    make_model(tmp_path, family="mla")
    whole = weights_of(tmp_path).layers[2].attention
    parts = [weights_of(tmp_path, ParallelConfig(4, rank)).layers[2].attention for rank in range(4)]
    assert isinstance(whole, LatentWeights)
    for rank, part in enumerate(parts):
        assert isinstance(part, LatentWeights)
        assert torch.equal(part.down.weight, whole.down.weight)
        assert torch.equal(part.keys, whole.keys[rank : rank + 1])
        assert torch.equal(part.values, whole.values[rank : rank + 1])
        assert torch.equal(part.query.weight, whole.query.weight.chunk(4)[rank])


def test_a_vocabulary_that_ranks_cannot_share_evenly_is_padded(model: Path) -> None:
    config = json.loads((model / "config.json").read_bytes())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 511}))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        change(model, name, load_file(model / "model.safetensors")[name][:511].clone())
    parts = [weights_of(model, ParallelConfig(2, rank)).lm_head.weight for rank in range(2)]
    assert [len(part) for part in parts] == [256, 256]
    assert torch.equal(torch.cat(parts)[:511], weights_of(model).lm_head.weight)
    assert not parts[1][-1].any()


DAMAGES = [
    ("model.norm.weight", None, "tensor model.norm.weight is missing"),
    (
        "model.norm.weight",
        torch.ones(3),
        r"tensor model.norm.weight has shape \[3\] where config.json needs \[256\]",
    ),
    (
        "model.layers.9.extra",
        torch.ones(3),
        "tensor model.layers.9.extra is not part of a Qwen3ForCausalLM",
    ),
    (
        "model.norm.weight",
        torch.ones(256, dtype=torch.int8),
        "tensor model.norm.weight has format I8",
    ),
]


@pytest.mark.parametrize(("name", "tensor", "sentence"), DAMAGES)
def test_weights_that_do_not_fit_the_configuration_are_refused_by_name(
    model: Path, name: str, tensor: torch.Tensor | None, sentence: str
) -> None:
    change(model, name, tensor)
    with pytest.raises(ConfigError, match=sentence):
        weights_of(model)


def test_rotary_frequencies_of_old_files_are_ignored(model: Path) -> None:
    change(model, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(32))
    weights_of(model)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 100,
        (50).to_bytes(8, "little") + b"[]" + b" " * 48,
        b'\x0d\0\0\0\0\0\0\0{"a":{"b":1}}',
    ],
)
def test_a_file_that_is_not_safetensors_is_refused(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(
        ConfigError,
        match=r"model.safetensors"
        r"(: the header of tensor a does not fit| is not a safetensors file)",
    ):
        weights_of(model)


def test_a_truncated_file_is_refused(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="does not fit the file; copy the checkpoint again"):
        weights_of(model)


@pytest.mark.parametrize(
    ("weight_map", "sentence"),
    [
        (
            {"model.norm.weight": "model-00002.safetensors"},
            "model-00002.safetensors does not exist; copy the whole checkpoint",
        ),
        (
            {"nothing": "model.safetensors"},
            "places tensor nothing in model.safetensors, which does not have it",
        ),
        (
            {"model.norm.weight": "../model.safetensors"},
            "'../model.safetensors', which is not the name of a safetensors file",
        ),
        ({"model.norm.weight": 5}, "5, which is not the name of a safetensors file"),
        ([], "weight_map must be an object"),
    ],
)
def test_an_index_that_points_nowhere_is_refused(
    model: Path, weight_map: Any, sentence: str
) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=sentence):
        weights_of(model)


def test_missing_weights_are_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"model.safetensors does not exist; copy the whole checkpoint"
    ):
        weights_of(model)
