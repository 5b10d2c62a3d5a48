"""Tests that weights which give different KV have different fingerprints, and that the same weights
have the same fingerprint in any folder.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvferry.engine.make_model.writer import make_model
from kvferry.errors import ConfigError
from kvferry.vllm.weights import sample_weights


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


LAYER = {
    "q_proj": (4096, 4096),
    "k_proj": (1024, 4096),
    "v_proj": (1024, 4096),
    "o_proj": (4096, 4096),
    "gate_proj": (14336, 4096),
    "up_proj": (14336, 4096),
    "down_proj": (4096, 14336),
}


def write_large_model(path: Path, replaced: str | None = None) -> None:
    """Write a file with the tensors of a model of 8 billion parameters. The file has a hole where
    the numbers would be, except in the tensor `replaced`.
    """
    header: dict[str, Any] = {}
    end = 0
    for layer in range(32):
        for name, (rows, columns) in LAYER.items():
            start, end = end, end + 2 * rows * columns
            header[f"model.layers.{layer}.{name}.weight"] = {
                "dtype": "BF16",
                "shape": [rows, columns],
                "data_offsets": [start, end],
            }
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        data_start = file.tell()
        file.truncate(data_start + end)
        if replaced is not None:
            start, end = header[replaced]["data_offsets"]
            file.seek(data_start + start)
            file.write(b"\x01" * (end - start))


@pytest.mark.parametrize("layer", [0, 13, 31])
def test_one_replaced_tensor_of_a_large_model_is_enough_to_differ(
    tmp_path: Path, layer: int
) -> None:
    replaced = f"model.layers.{layer}.v_proj.weight"
    for name in "ab":
        (tmp_path / name).mkdir()
    write_large_model(tmp_path / "a" / "model.safetensors")
    write_large_model(tmp_path / "b" / "model.safetensors", replaced)
    a, b = (sample_weights(str(tmp_path / name), None) for name in "ab")
    assert a != b


def test_a_replaced_piece_of_a_file_without_a_table_of_tensors_is_enough_to_differ(
    tmp_path: Path,
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.bin").open("wb") as file:
            file.truncate(256 << 20)
            file.seek(150 * ((256 << 20) // 511) + 8192)
            file.write(name.encode() * (300 << 10))
    a, b = (sample_weights(str(tmp_path / name), None) for name in "ab")
    assert a != b


def test_the_same_weights_in_other_files_are_the_same(model: Path) -> None:
    whole = sample_weights(str(model), None)
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    for number in range(3):
        save_file(
            {name: tensors[name] for name in names[number::3]}, model / f"{number}.safetensors"
        )
    assert sample_weights(str(model), None) == whole


def test_the_files_that_vllm_loads_are_sampled(model: Path) -> None:
    (model / "pytorch_model.pt").write_bytes(b"other weights" * 1000)
    safetensors = sample_weights(str(model), None)
    pickled = sample_weights(str(model), None, load_format="pt")
    assert safetensors == sample_weights(str(model), None, load_format="safetensors") != pickled
    (model / "pytorch_model.pt").write_bytes(b"third weights" * 1000)
    assert sample_weights(str(model), None) == safetensors
    assert sample_weights(str(model), None, load_format="pt") != pickled


def test_a_tensor_beyond_the_end_of_its_file_is_refused(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"lies outside of model\.safetensors"):
        sample_weights(str(model), None)


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
