"""Tests one rank as a worker uses it: cache geometry, hooks, sampling, identity and closing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.ranks import GREEDY, one_rank

from kvferry.connectors.contract import ModelIdentity
from kvferry.engine.make_model.writer import make_model
from kvferry.engine.messages import SamplingParams, SequenceSlice
from kvferry.engine.options import EngineOptions
from kvferry.engine.runner import Runner
from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.testing.local import LocalTransportKit
from kvferry.types import KVLayout

NAMES = [f"model.layers.{layer}.self_attn" for layer in range(4)]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return EngineOptions(model=directory, num_blocks=8)


@pytest.mark.parametrize(
    ("layout", "shape"), [(KVLayout.HND, (5, 2, 32, 128)), (KVLayout.NHD, (5, 32, 2, 128))]
)
def test_the_cache_is_one_buffer_with_a_page_aligned_tensor_per_layer(
    options: EngineOptions, layout: KVLayout, shape: tuple[int, ...]
) -> None:
    runner = Runner(
        replace(
            options, num_blocks=5, block_size=32, kv_cache_layout=layout, kv_cache_dtype="float16"
        )
    )
    runner.load()
    described = runner.allocate_cache(LocalTransportKit())
    assert described.num_blocks == 5
    assert described.block_size == 32
    assert described.layout == layout.value
    assert described.cache_dtype == "float16"
    assert (described.num_kv_heads, described.head_dim) == (2, 64)
    assert [list(group.layer_names) for group in described.groups] == [NAMES]
    assert list(runner.kv_caches) == NAMES
    memory = runner.cache_memory
    assert memory is not None
    start, end = memory.address, memory.address + memory.size_bytes
    for cache in runner.kv_caches.values():
        assert tuple(cache.shape) == shape
        assert cache.is_contiguous()
        assert cache.data_ptr() % 4096 == 0
        assert start <= cache.data_ptr()
        assert cache.data_ptr() + cache.nbytes <= end
    runner.close()


def test_the_number_of_blocks_follows_from_the_memory(options: EngineOptions) -> None:
    block_bytes = 4 * 2 * 16 * 128 * 4
    with one_rank(
        replace(options, num_blocks=0, kv_cache_memory_bytes=10 * block_bytes + 5)
    ) as runner:
        assert {len(cache) for cache in runner.kv_caches.values()} == {10}
    with (
        pytest.raises(
            ConfigError,
            match=f"--kv-cache-memory-bytes {block_bytes - 1} is too small for one block, which "
            f"takes {block_bytes} bytes",
        ),
        one_rank(replace(options, num_blocks=0, kv_cache_memory_bytes=block_bytes - 1)),
    ):
        pass


def test_keys_are_the_first_half_of_a_slot_and_only_used_slots_are_written(
    options: EngineOptions,
) -> None:
    with one_rank(options) as hnd, one_rank(replace(options, kv_cache_layout=KVLayout.NHD)) as nhd:
        for runner in (hnd, nhd):
            runner.run([SequenceSlice("a", tuple(range(20)), 0, ((6, 2),), None)])
        for name in NAMES:
            cache = hnd.kv_caches[name]
            assert torch.equal(cache.transpose(1, 2), nhd.kv_caches[name])
            assert cache[6].abs().amin() > 0
            assert cache[2, :, :4].abs().amin() > 0
            assert not cache[2, :, 4:].any()
            assert not cache[[0, 1, 3, 4, 5, 7]].any()
        # In layer 0, V depends on the token alone; K depends on the position too.
        hnd.run([SequenceSlice("b", (5, 5), 0, ((0,),), None)])
        slot_0, slot_1 = hnd.kv_caches[NAMES[0]][0, :, :2].unbind(1)
        assert torch.allclose(slot_0[:, 64:], slot_1[:, 64:])
        assert not torch.allclose(slot_0[:, :64], slot_1[:, :64], atol=0.1)


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def before_layer(self, layer_name: str) -> None:
        self.calls.append(("before", layer_name))

    def after_layer(self, layer_name: str, cache: torch.Tensor) -> None:
        assert cache[1].any()
        self.calls.append(("after", layer_name))


def test_hooks_are_called_around_every_layer_even_when_nothing_is_sampled(
    options: EngineOptions,
) -> None:
    for sampling in (None, GREEDY):
        recorder = Recorder()
        with one_rank(options) as runner:
            runner.run([SequenceSlice("a", (1, 2, 3), 0, ((1,),), sampling)], recorder)
        assert recorder.calls == [(when, name) for name in NAMES for when in ("before", "after")]


def test_only_slices_with_sampling_get_a_token_and_the_seed_decides_it(
    options: EngineOptions,
) -> None:
    def tokens(draw_seed: int, sampling: SamplingParams) -> list[int]:
        parts = [
            SequenceSlice(f"r{index}", (7, 8, 9), 0, ((1,),), sampling, draw_seed, index)
            for index in range(20)
        ]
        sampled = runner.run([*parts, SequenceSlice("prefill", (4, 5), 0, ((2,),), None)])
        assert list(sampled) == [part.request_id for part in parts]
        return [token.token_id for token in sampled.values()]

    with one_rank(options) as runner:
        assert runner.run([]) == {}
        assert tokens(1, SamplingParams()) == tokens(1, SamplingParams())
        assert tokens(1, SamplingParams()) != tokens(2, SamplingParams())
        assert len(set(tokens(1, SamplingParams()))) > 1
        assert len(set(tokens(1, GREEDY))) == 1


def test_another_revision_of_the_weights_has_another_identity(
    options: EngineOptions, tmp_path: Path
) -> None:
    with one_rank(options) as runner:
        identity = runner.identity()
        assert runner.identity() == identity
    assert (
        identity.architecture,
        identity.num_layers,
        identity.total_kv_heads,
        identity.head_dim,
    ) == ("Qwen3ForCausalLM", 4, 2, 64)
    assert identity.dtype == "float32"

    copy = replace(options, model=tmp_path)
    config = json.loads((options.model / "config.json").read_bytes())
    tensors = load_file(options.model / "model.safetensors")

    def identity_of_copy(**changes: object) -> ModelIdentity:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        save_file(tensors, tmp_path / "model.safetensors")
        with one_rank(copy) as runner:
            return runner.identity()

    # Files are compared, and the copy's was written by another program.
    identity = identity_of_copy()
    assert identity_of_copy(transformers_version="9.9", _name_or_path="elsewhere") == identity
    changed = identity_of_copy(rms_norm_eps=1e-5)
    assert changed == replace(identity, settings={**identity.settings, "config.rms_norm_eps": 1e-5})
    assert changed != identity
    tensors["model.layers.3.mlp.up_proj.weight"][17, 3] += 0.5
    assert identity_of_copy() == replace(identity, weights=identity_of_copy().weights) != identity


def test_closing_twice_is_harmless_and_use_before_loading_is_a_bug(options: EngineOptions) -> None:
    runner = Runner(options)
    with pytest.raises(LocalProtocolError, match="before it was loaded"):
        runner.run([SequenceSlice("a", (1,), 0, ((0,),), None)])
    runner.load()
    with pytest.raises(LocalProtocolError, match="before it was allocated"):
        _ = runner.cache_memory
    runner.allocate_cache(LocalTransportKit())
    runner.close()
    runner.close()
    assert not runner.kv_caches


@pytest.mark.parametrize(
    ("setting", "value"),
    [("dtype", "int8"), ("kv_cache_dtype", "fp4"), ("compute_dtype", "tf32"), ("device", "tpu")],
)
def test_formats_and_devices_that_are_not_supported_are_refused(
    options: EngineOptions, setting: str, value: str
) -> None:
    changes: dict[str, Any] = {setting: value}
    with pytest.raises(ConfigError, match=f"{setting} must be .*{value}"):
        Runner(replace(options, **changes)).load()
