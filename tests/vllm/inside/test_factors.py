"""Tests that every option of vLLM that changes KV is compared by name, that nothing else is, and
that docs/decisions/045-what-changes-kv.md names every option of the installed vLLM.
"""

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from tests.vllm.inside.engines import vllm_config
from transformers import configuration_utils
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    DiffusionConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    VllmConfig,
)
from vllm.model_executor.layers import rotary_embedding

import vllm
from kvferry.protocol.messages import WIRE_VERSION, Factor
from kvferry.vllm.identity.factors import (
    COMPARED_IF_SET,
    COMPARED_OPTIONS,
    COMPARED_VARIABLES,
    model_identity,
)
from kvferry.vllm.release import cache_release, release
from vllm import envs

ROOT = Path(__file__).parents[3]
DECISION = ROOT / "docs/decisions/045-what-changes-kv.md"
FACTORS_BEFORE = ROOT / f"tests/protocol/recorded/wire_{WIRE_VERSION - 1}_vllm_factors.json"
"""The names of the factors that engines of that version report for a model without states."""
CONFIGS = {
    "model_config": ModelConfig,
    "cache_config": CacheConfig,
    "attention_config": AttentionConfig,
    "diffusion_config": DiffusionConfig,
    "multimodal_config": MultiModalConfig,
    "lora_config": LoRAConfig,
    "load_config": LoadConfig,
    "vllm_config": VllmConfig,
}
NOT_IN = {
    "cache_hit_alignment_tokens": ("0.31",),
    "hash_block_size": ("0.31",),
    "indexer_tp_shard_min_rows": ("0.31", "0.32"),
    "minimax_m3_indexer_cp": ("0.31", "0.32"),
    "simple_cpu_offload_num_blocks": ("0.31", "0.32"),
    "sleep_mode_offload_cudagraph": ("0.31",),
    "sparse_mla_prefill_workspace_factor": ("0.31",),
    "tokenspeed_mla_min_split_kv": ("0.31",),
    "trtllm_ragged_backend": ("0.31", "0.32"),
    "user_specified_mamba_block_size": ("0.32", "0.33"),
    "watchdog_config": ("0.31", "0.32"),
}
"""Options that some of the tested releases do not have, with these releases."""
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000,
    "short_factor": [1.0] * 32,
    "long_factor": [4.0] * 32,
    "original_max_position_embeddings": 256,
}
LONG = {"hf_overrides": {"rope_parameters": LONG_ROPE}}


def factors_of(config: VllmConfig) -> dict[str, Factor]:
    identity = model_identity(config, "CPU_ATTN")
    return {
        "architecture": identity.architecture,
        "weights": identity.weights,
        "dtype": identity.dtype,
        **identity.settings,
    }


def factors(model: Path, **settings: Any) -> dict[str, Factor]:
    return factors_of(vllm_config(str(model), "p", json.dumps(settings, sort_keys=True)))


def differing(one: dict[str, Factor], other: dict[str, Factor]) -> set[str]:
    return {name for name in one | other if one.get(name) != other.get(name)}


def table(config: type) -> dict[str, str]:
    """The options that the decision lists for one of vLLM's configurations, with how each is
    compared.
    """
    section = DECISION.read_text().split(f"### {config.__name__}\n")[1].split("\n### ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    named = [(name, row[1]) for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert len(dict(named)) == len(named), f"an option of {config.__name__} is listed twice"
    return dict(named)


@pytest.mark.parametrize("config", CONFIGS.values())
def test_every_option_of_vllm_is_classified(config: type) -> None:
    """Options that later releases removed or brought stay in the tables: `NOT_IN` names them."""
    options = {field.name for field in fields(config)}
    assert options - set(table(config)) == set()
    lacking = {name for name, releases in NOT_IN.items() if release(vllm.__version__) in releases}
    assert set(table(config)) - options <= lacking
    assert lacking & options == set()


@pytest.mark.parametrize("name", COMPARED_OPTIONS)
def test_what_the_adapter_compares_is_listed_as_compared(name: str) -> None:
    listed = {option for option, how in table(CONFIGS[name]).items() if how == "yes"}
    assert set(COMPARED_OPTIONS[name]) <= listed


def test_the_factors_are_those_of_the_wire_version_before(model: Path) -> None:
    """A factor that only one of two engines reports counts as a difference, so a new one would
    split a fleet during an upgrade.
    """
    names = {name for name in factors(model) if not name.startswith("config.")}
    assert names == set(json.loads(FACTORS_BEFORE.read_text()))


def test_no_other_rope_reads_the_engine_options() -> None:
    folder = Path(rotary_embedding.__file__).parent
    readers = [path.stem for path in folder.glob("*.py") if "max_model_len" in path.read_text()]
    assert readers == ["phi3_long_rope_scaled_rope"]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (
            {"hf_overrides": {"rope_parameters": LONG_ROPE}},
            {"config.rope_parameters", "max_model_len"},
        ),
        ({"hf_overrides": {"rms_norm_eps": 0.01}}, {"config.rms_norm_eps"}),
        ({"dtype": "bfloat16"}, {"dtype"}),
        ({"model_impl": "transformers"}, {"architecture"}),
        ({"load_format": "dummy"}, {"weights"}),
        ({"enable_lora": True, "lora_dtype": "bfloat16"}, {"lora_dtype"}),
        ({"enable_lora": True, "lora_target_modules": ["q_proj"]}, {"lora_target_modules"}),
        ({"additional_config": {"mode": "fast"}}, {"additional_config"}),
        (
            {"attention_config": {"use_prefill_query_quantization": True}},
            {"use_prefill_query_quantization"},
        ),
        ({"kv_cache_dtype_skip_layers": ["0"]}, {"kv_cache_dtype_skip_layers"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_option_that_changes_kv_differs_by_its_name(
    model: Path, settings: dict[str, Any], names: set[str]
) -> None:
    found = differing(factors(model), factors(model, **settings))
    assert names == {
        next((name for name in names if path == name or path.startswith(f"{name}.")), path)
        for path in found
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"max_model_len": 256},
        {"seed": 7},
        {"block_size": 64},
        {"max_num_batched_tokens": 512},
        {"enable_prefix_caching": False},
        {"served_model_name": "another"},
        {"enable_lora": True},
        {"max_logprobs": 5},
        {"num_gpu_blocks_override": 128},
        {"load_format": "safetensors"},
    ],
    ids=lambda value: "-".join(value),
)
def test_an_option_that_does_not_change_kv_makes_no_difference(
    model: Path, settings: dict[str, Any]
) -> None:
    assert differing(factors(model), factors(model, **settings)) == set()


def test_long_rope_compares_on_which_side_of_the_original_length_an_engine_is(model: Path) -> None:
    short, at_the_limit, long, longest = (
        factors(model, **LONG, max_model_len=length) for length in (128, 256, 257, 512)
    )
    assert differing(short, at_the_limit) == differing(long, longest) == set()
    assert differing(at_the_limit, long) == {"max_model_len"}
    assert short["max_model_len"] == "at most 256"
    assert long["max_model_len"] == "more than 256"


def test_llama_4_compares_its_temperature_tuning(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm_config(str(model), "p", "{}")
    monkeypatch.setattr(config.model_config, "_architecture", "Llama4ForCausalLM")
    short = factors_of(config)
    monkeypatch.setattr(config.model_config, "max_model_len", 40_000)
    assert differing(short, factors_of(config)) == {"attn_temperature_tuning"}
    monkeypatch.setattr(
        config.model_config, "override_generation_config", {"attn_temperature_tuning": False}
    )
    assert differing(short, factors_of(config)) == set()


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("mm_processor_kwargs", {"num_crops": 4}, "mm_processor_kwargs.num_crops"),
        ("media_io_kwargs", {"video": {"num_frames": 8}}, "media_io_kwargs.video.num_frames"),
        ("video_pruning_rate", 0.5, "video_pruning_rate"),
    ],
)
def test_how_images_are_processed_is_compared(
    model: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: Any, name: str
) -> None:
    config = vllm_config(str(model), "p", "{}")
    monkeypatch.setattr(config.model_config, "multimodal_config", MultiModalConfig())
    plain = factors_of(config)
    monkeypatch.setattr(
        config.model_config, "multimodal_config", MultiModalConfig(**{option: value})
    )
    assert name in differing(plain, factors_of(config)) <= {name, option}


def test_the_files_of_an_image_processor_are_compared(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_size(size: int) -> dict[str, Factor]:
        shutil.copytree(model, tmp_path / str(size))
        (tmp_path / str(size) / "preprocessor_config.json").write_text(
            json.dumps({"size": {"shortest_edge": size}, "_name_or_path": str(tmp_path)})
        )
        config = vllm_config(str(tmp_path / str(size)), "p", "{}")
        monkeypatch.setattr(config.model_config, "multimodal_config", MultiModalConfig())
        return factors_of(config)

    assert differing(with_size(224), with_size(448)) == {
        "preprocessor_config.json.size.shortest_edge"
    }


@pytest.mark.parametrize("name", [*COMPARED_VARIABLES, *COMPARED_IF_SET])
def test_variables_that_change_kv_are_compared(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = vllm_config(str(model), "p", "{}")
    plain = factors_of(config)
    monkeypatch.setattr(envs, name, "something else", raising=False)
    assert differing(plain, factors_of(config)) == {name}


def test_another_version_of_transformers_makes_no_difference(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = factors(model)
    monkeypatch.setattr(configuration_utils, "__version__", "9.9")
    assert differing(plain, factors(model)) == set()


def test_the_same_model_in_another_folder_is_the_same(model: Path, tmp_path: Path) -> None:
    """Saved by another version of Transformers, with numbers written otherwise."""
    copy = tmp_path / "copy"
    copy.mkdir()
    settings = json.loads((model / "config.json").read_text())
    settings |= {
        "transformers_version": "4.40.0",
        "_name_or_path": "somebody/somewhere",
        "torch_dtype": settings.pop("dtype", settings.pop("torch_dtype", "float32")),
        "eos_token_id": [1, 2],
        "use_cache": False,
        "rope_theta": int(settings.get("rope_theta", 10000)),
    }
    (copy / "config.json").write_text(json.dumps(settings))
    shutil.copy(model / "model.safetensors", copy)
    assert differing(factors(model), factors(copy)) == set()


def test_a_replaced_tensor_is_another_model(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.2.self_attn.v_proj.weight"] *= 2
    save_file(tensors, copy / "model.safetensors")
    assert differing(factors(model), factors(copy)) == {"weights"}


@pytest.mark.parametrize(
    "version", ["0.33.0.dev5+gaaaa", "0.33.0rc1", "0.1.dev1+gbbbb", "0.33.0b2.dev1"]
)
def test_builds_between_releases_share_no_layout(version: str) -> None:
    assert cache_release(version) == version
    assert cache_release("0.32.1+cpu") == cache_release("0.32.0.post1") == release("0.32.0")
