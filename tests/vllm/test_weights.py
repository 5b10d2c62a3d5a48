"""Tests that weights which give different KV have different fingerprints, and that the same weights
have the same fingerprint in any folder.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvferry.engine.make_model.writer import make_model
from kvferry.errors import ConfigError
from kvferry.vllm.weights import sample_adapter, sample_weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model(tmp_path / "a")
    return tmp_path / "a"


def test_the_same_weights_elsewhere_are_the_same(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "b")
    assert sample_weights(str(model), "main") == sample_weights(str(tmp_path / "b"), None)


def test_other_weights_of_the_same_shape_differ(model: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "b", seed=1)
    assert sample_weights(str(model), None) != sample_weights(str(tmp_path / "b"), None)


@pytest.mark.parametrize(
    "name", ["model.layers.2.input_layernorm.weight", "model.layers.1.self_attn.attn.k_scale"]
)
def test_one_small_tensor_is_enough_to_differ(model: Path, tmp_path: Path, name: str) -> None:
    tensors = load_file(model / "model.safetensors") | {
        "model.layers.1.self_attn.attn.k_scale": np.ones(1, np.float32)
    }
    save_file(tensors, model / "model.safetensors")
    shutil.copytree(model, tmp_path / "b")
    save_file(tensors | {name: tensors[name] * 1.5}, tmp_path / "b" / "model.safetensors")
    assert sample_weights(str(model), None) != sample_weights(str(tmp_path / "b"), None)


def test_files_beside_those_of_the_index_do_not_count(model: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    alone = sample_weights(str(model), None)
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    assert sample_weights(str(model), None) == alone


def test_weights_in_one_file_of_any_kind_are_sampled(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(name.encode() * 10_000)
    assert sample_weights(str(tmp_path / "a.gguf"), None) != sample_weights(
        str(tmp_path / "b.gguf"), None
    )


def test_what_cannot_be_read_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no weights"):
        sample_weights(str(tmp_path / "empty"), None)
    (model / "model-00002.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"cannot be read.*gone|cannot be read.*model-00002"):
        sample_weights(str(model), None)


def test_a_name_that_means_the_same_everywhere_is_its_own_fingerprint() -> None:
    assert sample_weights("s3://bucket/model", "v1") == "s3://bucket/model@v1"


def test_an_adapter_is_known_by_its_weights_and_read_again_when_they_change(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        (tmp_path / name).mkdir()
        save_file(
            {"lora_A": np.full(5000, value, np.float32)},
            tmp_path / name / "adapter_model.safetensors",
        )
    a, b, c = (sample_adapter(str(tmp_path / name)) for name in "abc")
    assert a == b != c
    save_file(
        {"lora_A": np.full(5000, 2.0, np.float32)}, tmp_path / "a" / "adapter_model.safetensors"
    )
    assert sample_adapter(str(tmp_path / "a")) == c
    assert sample_adapter("hub/adapter") == "hub/adapter"
