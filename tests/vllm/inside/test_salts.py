"""Tests that an engine with vLLM's own scheduler uses no KV that was computed under another LoRA
adapter, image or embedding, whatever vLLM calls it, and does use KV computed under the same.

`seed` stands for what the engine has really loaded: the made-up model computes other KV and other
tokens under another seed.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from tests.vllm.adapters import write_adapter, write_to_hub_cache
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import BLOCK, Engine
from tests.vllm.inside.legs import PUSH, Legs
from tests.vllm.inside.test_life_cycle import finish, greedy, prompt, settle
from vllm.config.multimodal import MultiModalConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.renderers.base import BaseRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from kvferry.vllm.identity.salts import CacheSalts

NUM_IMAGE_TOKENS = 16


@pytest.fixture
def pair(start_engine: StartEngine) -> tuple[Engine, Engine]:
    """P and D without prefix caches, so that every request needs its KV from P."""
    return (
        start_engine("p", enable_prefix_caching=False),
        start_engine("d", enable_prefix_caching=False),
    )


def lora(path: Path | str, number: int = 1, seed: int = 0, **more: Any) -> dict[str, Any]:
    return {"lora_request": LoRARequest("adapter", number, str(path), **more), "seed": seed}


def exchange(p: Engine, d: Engine, at_p: dict[str, Any], at_d: dict[str, Any]) -> int:
    """Send both legs, check D's tokens, and return how many tokens D loaded from P."""
    name, before = f"request {len(d.answers)}", d.loaded_tokens
    p.add(name, prompt(100), {"do_remote_decode": True}, max_tokens=1, **at_p)
    finish(p, name)
    d.add(name, prompt(100), p.answers[name].params, **at_d)
    assert finish(d, name, p) == greedy(prompt(100), 4, at_d["seed"])
    settle(p, d)
    return d.loaded_tokens - before


# -- LoRA adapters --


@pytest.mark.parametrize("other", [{"alpha": 64}, {"use_rslora": True}, {"seed": 1}])
def test_kv_of_an_adapter_with_another_effect_is_not_used(
    pair: tuple[Engine, Engine], tmp_path: Path, other: dict[str, Any]
) -> None:
    at_p, at_d = write_adapter(tmp_path / "p"), write_adapter(tmp_path / "d", **other)
    assert exchange(*pair, lora(at_p, seed=1), lora(at_d, seed=2)) == 0


def test_kv_of_a_copy_of_the_adapter_is_used(pair: tuple[Engine, Engine], tmp_path: Path) -> None:
    at_p = write_adapter(tmp_path / "p", base="/trained/here")
    at_d = write_adapter(tmp_path / "d", base="org/base")
    assert exchange(*pair, lora(at_p, 1, seed=1), lora(at_d, 7, seed=1)) == 100


def test_an_adapter_that_changed_on_disk_is_not_what_the_engine_has_loaded(
    pair: tuple[Engine, Engine], tmp_path: Path
) -> None:
    """D has loaded the first contents and serves them; P has started with the second."""
    first, served = write_adapter(tmp_path / "1"), write_adapter(tmp_path / "d")
    assert exchange(*pair, lora(first, 1, seed=1), lora(served, 1, seed=1)) == 100
    second = write_adapter(tmp_path / "2", seed=5)
    write_adapter(served, seed=5)
    assert exchange(*pair, lora(second, 2, seed=2), lora(served, 1, seed=1)) == 0
    # Nor can a peer rely on it when the first contents are back: vLLM may have read the second.
    write_adapter(served)
    assert exchange(*pair, lora(first, 1, seed=1), lora(served, 1, seed=2)) == 0


def test_an_adapter_whose_link_leads_elsewhere_has_changed(
    pair: tuple[Engine, Engine], tmp_path: Path
) -> None:
    """The clock of a file system may give both adapters the same times, and sizes are equal."""
    link, first, second = tmp_path / "d", tmp_path / "1", tmp_path / "2"
    for folder, seed in ((first, 0), (second, 5)):
        write_adapter(folder, seed=seed)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        while True:
            for folder in (first, second):
                os.utime(folder / name, ns=(0, 0))
            if (first / name).stat().st_ctime_ns == (second / name).stat().st_ctime_ns:
                break
    link.symlink_to(first)
    at_p = write_adapter(tmp_path / "p")
    assert exchange(*pair, lora(at_p, 1, seed=1), lora(link, 1, seed=1)) == 100
    link.unlink()
    link.symlink_to(second)
    assert exchange(*pair, lora(at_p, 1, seed=1), lora(link, 1, seed=2)) == 0


def test_an_adapter_is_known_from_the_moment_the_engine_loads_it(
    start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files change between vLLM's start and the adapter's first request."""
    monkeypatch.setattr(EngineCore, "add_lora", EngineCore.add_lora)  # restored at the end
    p, d = start_engine("p"), start_engine("d", enable_lora=True)
    executor = SimpleNamespace(add_lora=lambda request: True)
    served = lora(write_adapter(tmp_path / "d"), seed=1)
    assert EngineCore.add_lora(SimpleNamespace(model_executor=executor), served["lora_request"])
    write_adapter(tmp_path / "d", seed=5)
    second = write_adapter(tmp_path / "p", seed=5)
    assert exchange(p, d, lora(second, seed=2), served) == 0


def test_an_adapter_of_the_hub_is_known_by_its_files(
    pair: tuple[Engine, Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    write_to_hub_cache(tmp_path / "hub", "org/adapter", "first")
    first = write_adapter(tmp_path / "1")
    assert exchange(*pair, lora(first, 1, seed=1), lora("org/adapter", 1, seed=1)) == 100
    # Another process of this host downloads a newer revision, which P has loaded and D has not.
    write_to_hub_cache(tmp_path / "hub", "org/adapter", "second", seed=5)
    second = write_adapter(tmp_path / "2", seed=5)
    assert exchange(*pair, lora(second, 2, seed=2), lora("org/adapter", 1, seed=1)) == 0


@pytest.mark.parametrize("path", ["org/missing", "/missing"])
def test_adapters_without_files_on_this_host_are_not_the_same(
    pair: tuple[Engine, Engine], path: str
) -> None:
    assert exchange(*pair, lora(path, seed=1), lora(path, seed=2)) == 0


def test_an_adapter_loaded_in_place_replaces_the_one_under_its_id(
    pair: tuple[Engine, Engine], tmp_path: Path
) -> None:
    first, second = write_adapter(tmp_path / "1"), write_adapter(tmp_path / "2", seed=5)
    assert exchange(*pair, lora(first, 1, seed=1), lora(first, 1, seed=1)) == 100
    in_place = lora(second, 1, seed=2, load_inplace=True)
    assert exchange(*pair, in_place, in_place) == 100
    # D's workers serve the second adapter to a request that was queued with the first.
    assert exchange(*pair, lora(first, 5, seed=1), lora(first, 1, seed=2)) == 0


def test_a_prompt_during_which_its_adapter_was_replaced_gets_no_ticket(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    p = start_engine("p", max_num_batched_tokens=BLOCK, enable_prefix_caching=False)
    first, second = write_adapter(tmp_path / "1"), write_adapter(tmp_path / "2", seed=5)
    p.add("a", prompt(100), {"do_remote_decode": True}, max_tokens=1, **lora(first))
    p.step()
    p.add("b", prompt(10), max_tokens=1, **lora(second, load_inplace=True))
    finish(p, "a")
    assert p.answers["a"].params is None
    settle(p)


def test_a_queued_request_whose_adapter_was_replaced_loads_nothing(
    pair: tuple[Engine, Engine], tmp_path: Path
) -> None:
    p, d = pair
    first, second = write_adapter(tmp_path / "1"), write_adapter(tmp_path / "2", seed=5)
    params = p.prefill("a", prompt(100), **lora(first, seed=1))
    d.add("b", prompt(100), params, **lora(first, seed=2))
    d.add("c", prompt(10), max_tokens=1, **lora(second, seed=2, load_inplace=True))
    assert finish(d, "b", p) == greedy(prompt(100), 4, 2)
    assert d.loaded_tokens == 0
    settle(p, d)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("side", ["p", "d"])
def test_push_under_an_adapter_that_is_not_exchanged(
    start_engine: StartEngine, tmp_path: Path, policy: str, side: str
) -> None:
    """D computes if it knows; otherwise P says so and D's policy decides."""
    legs = Legs(
        start_engine("p", kv=PUSH), start_engine("d", kv=PUSH | {"kv_load_failure_policy": policy})
    )
    good, ticket = write_adapter(tmp_path / "good"), legs.ticket()
    paths = {"p": good, "d": good} | {side: Path("/missing")}
    legs.ask_d("b", prompt(100), ticket, **lora(paths["d"], seed=1))
    legs.ask_p("a", prompt(100), ticket, **lora(paths["p"], seed=1))
    said = finish(legs.d, "b", legs.p)
    assert said == ([] if (side, policy) == ("p", "fail") else greedy(prompt(100), 4, 1))
    settle(legs.p, legs.d)


# -- images and embeddings --


def shows(name: str, pixels: float | None, offset: int = 40, seed: int = 0) -> dict[str, Any]:
    """Return the arguments of a request that shows an image. `pixels`: the image's contents, if the
    engine core has them.
    """
    data = None
    if pixels is not None:
        tensor = MultiModalFieldElem(torch.full((3, 4), pixels), MultiModalBatchedField())
        data = MultiModalKwargsItem({"pixel_values": tensor})
    place = PlaceholderRange(offset, NUM_IMAGE_TOKENS)
    feature = MultiModalFeatureSpec(data, modality="image", identifier=name, mm_position=place)
    return {"mm_features": [feature], "seed": seed}


def see_images(*engines: Engine, numbers_media: bool) -> None:
    """Let vLLM's scheduler accept images; the generated model has no part that would see them."""
    for engine in engines:
        engine.scheduler.max_num_encoder_input_tokens = NUM_IMAGE_TOKENS
        engine.scheduler.encoder_cache_manager = EncoderCacheManager(NUM_IMAGE_TOKENS)
        engine.scheduler.connector._salts.numbers_media = numbers_media  # noqa: SLF001  as above


@pytest.mark.parametrize(
    ("at_p", "at_d", "num_loaded"),
    [
        (shows("number 1", 0.5, seed=1), shows("number 1", 0.7, seed=2), 0),
        (shows("number 1", 0.5, seed=1), shows("number 4", 0.5, seed=1), 100),
        (shows("number 1", 0.5, seed=1), shows("number 1", 0.5, offset=41, seed=2), 0),
        (shows("number 1", None, seed=1), shows("number 1", None, seed=2), 0),
    ],
)
def test_images_that_vllm_only_counts_are_known_by_their_contents(
    pair: tuple[Engine, Engine], at_p: dict[str, Any], at_d: dict[str, Any], num_loaded: int
) -> None:
    see_images(*pair, numbers_media=True)
    assert exchange(*pair, at_p, at_d) == num_loaded


@pytest.mark.parametrize(
    ("at_d", "num_loaded"),
    [
        (shows("hash 1", None, seed=1), 100),
        (shows("hash 2", None, seed=2), 0),
        (shows("hash 1", None, offset=41, seed=2), 0),
    ],
)
def test_images_that_vllm_hashes_are_known_by_hash_and_place(
    pair: tuple[Engine, Engine], at_d: dict[str, Any], num_loaded: int
) -> None:
    see_images(*pair, numbers_media=False)
    assert exchange(*pair, shows("hash 1", None, seed=1), at_d) == num_loaded


def config_with(*, has_prefix_cache: bool = True, **media: Any) -> Any:
    """Return the part of vLLM's configuration that decides how images are identified."""
    return SimpleNamespace(
        lora_config=None,
        model_config=SimpleNamespace(multimodal_config=MultiModalConfig(**media)),
        cache_config=SimpleNamespace(enable_prefix_caching=has_prefix_cache),
    )


@pytest.mark.parametrize("cache_gb", [0, 4])
@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_the_connector_knows_when_vllm_only_counts_images(
    cache_gb: int, has_prefix_cache: bool
) -> None:
    config = config_with(has_prefix_cache=has_prefix_cache, mm_processor_cache_gb=cache_gb)
    renderer: Any = SimpleNamespace(
        config=config, model_config=config.model_config, _validate_mm_uuids=lambda *_: None
    )
    items: Any = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    ids = BaseRenderer._process_mm_uuids(renderer, {}, items, {}, "1")  # noqa: SLF001  vLLM's rule
    assert CacheSalts.from_config(config).numbers_media is (ids == {"image": ["1-image-0"]})


@pytest.mark.parametrize(
    "other", [{"mm_processor_kwargs": {"num_crops": 4}}, {"media_io_kwargs": {"image": {"a": 1}}}]
)
def test_an_image_processed_under_other_settings_is_another_image(other: dict[str, Any]) -> None:
    features = shows("hash 1", None)["mm_features"]
    request = Request("a", prompt(100), SamplingParams(), None, mm_features=features)
    one, same, another = (
        CacheSalts.from_config(config_with(**media)).salt(request, "") for media in ({}, {}, other)
    )
    assert one == same != another


def test_a_token_is_no_embedding(pair: tuple[Engine, Engine]) -> None:
    """Where a prompt has an embedding, vLLM shows token id 0, which is also a token."""
    rows = torch.zeros(100, 4)
    at_p: dict[str, Any] = {"prompt_is_token_ids": [False] * 100, "seed": 1}
    at_d: dict[str, Any] = {"prompt_is_token_ids": [False] * 99 + [True], "seed": 2}
    p, d = pair
    p.add("a", [0] * 100, {"do_remote_decode": True}, max_tokens=1, prompt_embeds=rows, **at_p)
    finish(p, "a")
    d.add("b", [0] * 100, p.answers["a"].params, prompt_embeds=rows, **at_d)
    assert finish(d, "b", p) == greedy([0] * 100, 4, 2)
    assert d.loaded_tokens == 0
    settle(p, d)
