"""Tests every form of the KV cache for every kind of model: number formats, both layouts, and
layers stored separately or together.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tests.engine.ranks import GREEDY, by_token, one_rank, poison, runs_of, tables_of
from tests.engine.test_model import distance, random_tokens, reference_logits

from kvferry.engine.cache.layout import LayerCache
from kvferry.engine.make_model.writer import make_model
from kvferry.engine.messages import SequenceSlice
from kvferry.engine.options import EngineOptions
from kvferry.engine.runner import Runner
from kvferry.testing.local import LocalTransportKit
from kvferry.types import KVLayout

FORMATS = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineOptions]:
    made = {}
    for family in ("qwen3", "mla", "window"):
        directory = tmp_path_factory.mktemp(family)
        make_model(directory, family=family, seed=3)
        made[family] = EngineOptions(model=directory, num_blocks=64)
    return made


@pytest.mark.parametrize("family", ["qwen3", "mla", "window"])
@pytest.mark.parametrize("name", list(FORMATS))
def test_logits_do_not_depend_on_when_the_context_was_computed(
    models: dict[str, EngineOptions], family: str, name: str
) -> None:
    options = replace(models[family], kv_cache_dtype=name)
    tokens, table = random_tokens(80, seed=1), tables_of(options, blocks=8)
    with one_rank(options) as runner:
        at_once = runner.logits([SequenceSlice("a", tokens, 0, table, GREEDY)])[0]
        runner.run([SequenceSlice("a", tokens[:50], 0, table, None)])
        runner.run([SequenceSlice("a", tokens[50:79], 50, table, None)])
        decoded = runner.logits([SequenceSlice("a", tokens[79:], 79, table, GREEDY)])[0]
        other = runner.logits([SequenceSlice("a", (tokens[79] ^ 1,), 79, table, GREEDY)])[0]
        assert {str(cache.dtype) for cache in runner.kv_caches.values()} == {
            f"torch.{FORMATS[name]}"
        }
    assert distance(at_once, decoded) <= 1e-7
    assert distance(at_once, other) > 0.5


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_narrower_cache_gives_other_logits_than_a_wide_one_but_not_far_from_them(
    models: dict[str, EngineOptions], name: str
) -> None:
    tokens, table = random_tokens(60, seed=2), tables_of(models["qwen3"], blocks=8)
    expected = reference_logits(models["qwen3"].model, tokens)
    with one_rank(replace(models["qwen3"], kv_cache_dtype=name)) as runner:
        found = runner.logits([SequenceSlice("a", tokens, 0, table, GREEDY)])[0].float()
    assert (distance(found, expected[-1]) <= 1e-4) == (name == "float32")
    assert torch.corrcoef(torch.stack((found, expected[-1])))[0, 1] > (
        0.7 if name.startswith("fp8") else 0.99
    )
    assert torch.corrcoef(torch.stack((found, expected[-2])))[0, 1] < 0.5


@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_what_does_not_fit_the_format_is_stored_as_its_largest_number(
    dtype: torch.dtype, layout: KVLayout
) -> None:
    cache = LayerCache("layer", 0, torch.zeros(3, 2, 2, 4, dtype=dtype), layout, value_width=2)
    largest = torch.finfo(dtype).max
    values = torch.tensor([1e300, -1e300, torch.inf, 1.5], dtype=torch.float64)
    cache.write(torch.tensor([1]), torch.tensor([1]), values.expand(1, 2, 4))
    stored = cache.gather(torch.tensor([[1]]), torch.float64)
    assert stored[0, :, 1].tolist() == [[largest, -largest, largest, 1.5]] * 2
    assert not stored[0, :, 0].any()
    assert not cache.gather(torch.tensor([[0, 2]]), torch.float64).any()
    cache.write(torch.tensor([0]), torch.tensor([0]), torch.full((1, 2, 4), torch.nan))
    assert cache.gather(torch.tensor([[0]]), torch.float64)[0, :, 0].isnan().all()


def test_a_bound_that_the_arithmetic_would_round_up_is_not_exceeded() -> None:
    cache = LayerCache(
        "layer", 0, torch.zeros(1, 1, 1, 2, dtype=torch.float16), KVLayout.HND, value_width=1
    )
    cache.write(
        torch.tensor([0]), torch.tensor([0]), torch.tensor([[[1e38, -1e38]]], dtype=torch.bfloat16)
    )
    assert cache.gather(torch.tensor([[0]]), torch.float64).flatten().tolist() == [65504, -65504]


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_a_nan_in_eight_bits_does_not_reach_whoever_does_not_see_it(
    models: dict[str, EngineOptions], name: str
) -> None:
    options = replace(models["window"], kv_cache_dtype=name)
    tokens, table = random_tokens(71, seed=4), runs_of(options, 0, 6)
    step = [SequenceSlice("a", tokens[70:], 70, table, GREEDY)]
    with one_rank(options) as runner:
        runner.run([SequenceSlice("a", tokens[:70], 0, table, None)])
        clean = runner.logits(step)
        poison(runner, table, range(23), groups=[1, 2])
        poison(runner, table, range(71, 96))
        assert torch.equal(runner.logits(step), clean)
        poison(runner, table, range(23, 24), groups=[2])
        assert runner.logits(step).isnan().all()


SHAPES = {
    ("qwen3", KVLayout.HND): (4, (2, 16, 128)),
    ("qwen3", KVLayout.NHD): (4, (16, 2, 128)),
    ("mla", KVLayout.HND): (4, (16, 96)),
    ("mla", KVLayout.NHD): (4, (16, 96)),
    ("window", KVLayout.HND): (2, (2, 16, 128)),
    ("window", KVLayout.NHD): (2, (16, 2, 128)),
}


@pytest.mark.parametrize(("family", "layout"), list(SHAPES))
@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_layers_of_a_block_lie_together_when_asked_and_compute_the_same(
    models: dict[str, EngineOptions], family: str, layout: KVLayout, dtype: str
) -> None:
    slots, shape = SHAPES[family, layout]
    options = replace(models[family], kv_cache_layout=layout, kv_cache_dtype=dtype)
    tokens, table = random_tokens(80, seed=5), tables_of(options, blocks=8)
    steps = [
        SequenceSlice("a", tokens[:79], 0, table, GREEDY),
        SequenceSlice("a", tokens[79:], 79, table, GREEDY),
    ]
    with (
        one_rank(options) as apart,
        one_rank(replace(options, cross_layer_blocks=True)) as together,
    ):
        for step in steps:
            assert torch.equal(apart.logits([step]), together.logits([step]))
        block = torch.zeros(shape).numel()
        starts = sorted({cache.data_ptr() for cache in together.kv_caches.values()})
        item = next(iter(together.kv_caches.values())).element_size()
        assert together.cache_memory is not None
        assert [start - together.cache_memory.address for start in starts] == [
            slot * block * item for slot in range(slots)
        ]
        assert together.cache_memory.size_bytes == 64 * slots * block * item
        for name, cache in together.kv_caches.items():
            assert tuple(cache.shape) == (64, *shape)
            assert cache.stride(0) == slots * block
            assert cache[0].is_contiguous()
            assert torch.equal(cache.view(torch.uint8), apart.kv_caches[name].view(torch.uint8))
            assert cache.view(torch.uint8).any()


@pytest.mark.parametrize(("family", "layout"), list(SHAPES))
def test_the_cache_is_described_as_it_is(
    models: dict[str, EngineOptions], family: str, layout: KVLayout
) -> None:
    slots, shape = SHAPES[family, layout]
    runner = Runner(
        replace(models[family], kv_cache_layout=layout, num_blocks=0, kv_cache_memory_bytes=2**20)
    )
    runner.load()
    described = runner.allocate_cache(LocalTransportKit())
    assert described.num_blocks == 2**20 // (4 * slots * torch.zeros(shape).numel())
    assert (described.num_kv_heads, described.head_dim) == ((1, 96) if family == "mla" else (2, 64))
    assert described.layout == ("HND" if family == "mla" else layout.value)
    assert [group.sliding_window for group in described.groups] == (
        [None, 48, 48] if family == "window" else [None]
    )
    identity = runner.identity()
    assert (identity.total_kv_heads, identity.head_dim) == (
        described.num_kv_heads,
        described.head_dim,
    )
    assert all(
        cache.is_contiguous() and cache.data_ptr() % 4096 == 0
        for cache in runner.kv_caches.values()
    )
    runner.close()


def test_a_latent_is_normalised_and_its_key_turns_with_the_position(
    models: dict[str, EngineOptions],
) -> None:
    with one_rank(models["mla"]) as runner:
        runner.run([SequenceSlice("a", (7, 7), 0, ((5,),), None)])
        first, second = by_token(runner.kv_caches["model.layers.0.self_attn"])[5, :2].double()
    assert first[:64].square().mean().item() == pytest.approx(1.0, abs=1e-4)
    assert torch.allclose(first[:64], second[:64])
    assert not torch.allclose(first[64:], second[64:], atol=0.1)
    turned = (first[64:].view(-1, 2).square().sum(-1), second[64:].view(-1, 2).square().sum(-1))
    assert torch.allclose(*turned, rtol=1e-4)


@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_latents_with_biases_and_direct_queries_equal_transformers(
    tmp_path: Path, q_lora_rank: int | None
) -> None:
    config = transformers.DeepseekV2Config(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, first_k_dense_replace=3,
        q_lora_rank=q_lora_rank, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8,
        v_head_dim=10, attention_bias=True,
        max_position_embeddings=512, rms_norm_eps=1e-2,
    )  # fmt: skip
    reference = transformers.DeepseekV2ForCausalLM(config).float()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.uniform_(-0.3, 0.3, generator=generator)
    reference.save_pretrained(tmp_path)
    tokens = random_tokens(100, seed=6)
    expected = reference_logits(tmp_path, tokens)
    with one_rank(EngineOptions(model=tmp_path, num_blocks=8)) as runner:
        for start, end in ((0, 60), (60, 99), (99, 100)):
            found = runner.logits(
                [SequenceSlice("a", tokens[start:end], start, (tuple(range(7)),), GREEDY)]
            )[0]
            assert distance(found, expected[end - 1]) <= 1e-4
        assert distance(found, expected[-2]) > 0.1
