"""Tests that the weights of two engines are equal only if vLLM has loaded the same."""

import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.vllm.inside.engines import vllm_config

from kvferry.errors import ConfigError
from kvferry.protocol.messages import Factor
from kvferry.vllm.identity.factors import model_identity, weight_files
from kvferry.vllm.identity.loaded_weights import LoadedWeights


def names(model: Path, **settings: Any) -> list[str]:
    config = vllm_config(str(model), "p", json.dumps(settings, sort_keys=True))
    return [path.name for path in weight_files(config)]


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    shutil.copytree(model, tmp_path / "copy")
    return tmp_path / "copy"


def test_other_consolidated_files_are_other_weights(copy: Path, tmp_path: Path) -> None:
    """vLLM loads them where it finds them, in a local folder too; both folders have the same
    `model.safetensors`.
    """
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors, copy / "consolidated.safetensors")
    other = tmp_path / "other"
    shutil.copytree(copy, other)
    tensors["model.layers.2.self_attn.v_proj.weight"][0, 0] += 1
    save_file(tensors, other / "consolidated.safetensors")
    assert names(copy) == names(other) == ["consolidated.safetensors"]
    identities = [
        model_identity(vllm_config(str(each), "p", "{}"), "CPU_ATTN").weights
        for each in (copy, other)
    ]
    assert identities[0] != identities[1]


def test_the_files_of_the_load_format_count(copy: Path) -> None:
    (copy / "pytorch_model.pt").write_bytes(os.urandom(100))
    shutil.copy(copy / "model.safetensors", copy / "consolidated.safetensors")
    both = ["consolidated.safetensors", "model.safetensors"]
    assert names(copy, load_format="safetensors") == names(copy, load_format="hf") == both
    assert names(copy) == both[:1]
    assert names(copy, load_format="pt") == ["pytorch_model.pt"]


def test_files_beside_those_of_the_index_do_not_count(copy: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(copy / "model.safetensors", copy / "model-00002.safetensors")
    assert names(copy) == ["model.safetensors"]


def test_weights_that_are_gone_are_refused(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be found again"):
        names(copy)


def test_weights_that_vllm_made_up_or_received_are_known_as_loaded_only(model: Path) -> None:
    config = vllm_config(str(model), "p", json.dumps({"load_format": "dummy"}))
    one, other = (
        model_identity(config, "CPU_ATTN", LoadedWeights(identity)).weights
        for identity in ("one", "other")
    )
    assert one != other


def test_weights_in_memory_decide_where_all_engines_can_compare_them(model: Path) -> None:
    """Then the files do not matter: they may have been replaced since vLLM loaded them."""
    config = vllm_config(str(model), "p", "{}")
    by_files = model_identity(config, "CPU_ATTN").weights
    partly = LoadedWeights("tp_size 2 one")
    whole = LoadedWeights("one", is_comparable=True)
    assert model_identity(config, "CPU_ATTN", partly).weights == by_files
    assert model_identity(config, "CPU_ATTN", whole).weights == "loaded one"


def test_files_that_changed_since_vllm_started_do_not_stand_for_what_it_has_read(
    copy: Path,
) -> None:
    """The copy is younger than this process, so a worker may have read other bytes."""
    config = vllm_config(str(copy), "p", "{}")
    loaded = LoadedWeights("tp_size 1 one", _models=[torch.nn.Linear(1, 1)])
    assert model_identity(config, "CPU_ATTN", loaded).weights == "loaded tp_size 1 one"


def test_other_code_of_a_model_is_another_model(model: Path, tmp_path: Path) -> None:
    """Two hosts have remote code under equal names; the class is in one file, what it calls in
    another.
    """

    def code(package: str, helper: str) -> dict[str, Factor]:
        folder = tmp_path / package / "transformers_modules" / "own"
        folder.mkdir(parents=True)
        (folder / "modeling_own.py").write_text(
            "import abc, typing, torch\n"
            "from .helper import scale\n"
            "class Own(torch.nn.Linear, abc.ABC, typing.Generic[typing.TypeVar('T')]): ...\n"
        )
        (folder / "helper.py").write_text(f"def scale(): return {helper}\n")
        name = f"{package}.transformers_modules.own.modeling_own"
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(tmp_path))
            own = importlib.import_module(name).Own(1, 1)
        loaded = LoadedWeights("one", is_comparable=True, _models=[torch.nn.Sequential(own)])
        identity = model_identity(vllm_config(str(model), "p", "{}"), "CPU_ATTN", loaded)
        return {name: value for name, value in identity.settings.items() if "code." in name}

    one = code("one", "1")
    assert one.keys() == {"code.modeling_own.py", "code.helper.py"}
    assert code("same", "1") == one
    assert code("other", "2") != one
