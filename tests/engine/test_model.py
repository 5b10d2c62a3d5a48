"""Tests the forward pass: it equals that of transformers, and its result does not depend on how the
work is split.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.engine.ranks import GREEDY, Tables, one_rank, poison, runs_of, tables_of

from kvferry.engine.make_model.writer import make_model
from kvferry.engine.messages import SequenceSlice
from kvferry.engine.model.attention import make_rotary_table
from kvferry.engine.model.config import RopeConfig
from kvferry.engine.options import EngineOptions
from kvferry.errors import LocalProtocolError
from kvferry.types import KVLayout

WITHOUT_STATES = ["qwen3", "llama", "mla", "window"]
"""A slice of such a model can be computed again; a state that has advanced cannot go back."""


@pytest.fixture(scope="module", params=[*WITHOUT_STATES, "hybrid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    make_model(directory, family=request.param, seed=1)
    return directory


@pytest.fixture
def options(model: Path) -> EngineOptions:
    return EngineOptions(model=model, num_blocks=64)


@pytest.fixture
def table(options: EngineOptions) -> Tables:
    return tables_of(options, blocks=20)


def random_tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(512) for _ in range(count))


def reference_logits(
    model: Path, tokens: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The logits of transformers at every position."""
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, attn_implementation="eager"
    )
    with torch.no_grad():
        logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits


def chunked(
    tokens: tuple[int, ...], table: Tables, sizes: Iterator[int]
) -> Iterator[SequenceSlice]:
    start = 0
    while start < len(tokens):
        part = tokens[start : start + next(sizes)]
        yield SequenceSlice("a", part, start, table, GREEDY)
        start += len(part)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.double() - other.double()).abs().max().item()


@pytest.mark.parametrize("layout", list(KVLayout))
def test_logits_of_prefill_and_decode_equal_those_of_transformers(
    options: EngineOptions, table: Tables, layout: KVLayout
) -> None:
    tokens = random_tokens(300, seed=1)
    expected = reference_logits(options.model, tokens)
    with one_rank(replace(options, kv_cache_layout=layout)) as runner:
        whole = runner.logits([SequenceSlice("a", tokens[:290], 0, table, GREEDY)])
        assert distance(whole[0], expected[289]) <= 1e-4
        for position in range(290, 300):
            one = runner.logits([SequenceSlice("a", (tokens[position],), position, table, GREEDY)])
            assert distance(one[0], expected[position]) <= 1e-4
        assert distance(one[0], expected[0]) > 1.0


def test_without_float32_arithmetic_on_either_side_only_the_rounding_of_the_cache_is_left(
    options: EngineOptions, table: Tables
) -> None:
    for seed in range(20, 24):
        tokens = random_tokens(300, seed)
        with one_rank(options) as runner:
            found = runner.logits([SequenceSlice("a", tokens, 0, table, GREEDY)])[0]
        assert distance(found, reference_logits(options.model, tokens, torch.float64)[-1]) <= 4e-5


def test_logits_of_a_chunked_prefill_equal_those_of_transformers(
    options: EngineOptions, table: Tables
) -> None:
    tokens = random_tokens(300, seed=2)
    expected = reference_logits(options.model, tokens)
    with one_rank(options) as runner:
        for part in chunked(tokens, table, iter([7, 16, 1, 130, 1, 1, 144])):
            last = part.start + len(part.token_ids) - 1
            assert distance(runner.logits([part])[0], expected[last]) <= 1e-4


@pytest.mark.parametrize("compute_dtype", ["float32", "float64"])
def test_explicit_arithmetic_equals_transformers_too(
    options: EngineOptions, table: Tables, compute_dtype: str
) -> None:
    tokens = random_tokens(100, seed=3)
    with one_rank(replace(options, compute_dtype=compute_dtype)) as runner:
        found = runner.logits([SequenceSlice("a", tokens, 0, table, GREEDY)])
    assert str(found.dtype) == f"torch.{compute_dtype}"
    assert distance(found[0], reference_logits(options.model, tokens)[-1]) <= 1e-4


@pytest.mark.parametrize(
    ("dtype", "compute_dtype", "likeness"),
    # Arithmetic in bfloat16 needs a CPU that supports it.
    [("float16", "auto", 0.999), ("float16", "float32", 0.999), ("bfloat16", "float32", 0.9)],
)
def test_half_precision_stays_near_float32(
    options: EngineOptions, table: Tables, dtype: str, compute_dtype: str, likeness: float
) -> None:
    tokens = random_tokens(40, seed=4)
    expected = reference_logits(options.model, tokens)
    with one_rank(replace(options, dtype=dtype, compute_dtype=compute_dtype)) as runner:
        caches = [cache for name, cache in runner.kv_caches.items() if name.endswith("self_attn")]
        assert {str(cache.dtype) for cache in caches} == {f"torch.{dtype}"}
        found = runner.logits([SequenceSlice("a", tokens, 0, table, GREEDY)])[0].float()
    assert torch.corrcoef(torch.stack((found, expected[-1])))[0, 1] > likeness
    assert torch.corrcoef(torch.stack((found, expected[-2])))[0, 1] < 0.5


@pytest.mark.parametrize("model", WITHOUT_STATES, indirect=True)
def test_logits_do_not_depend_on_chunks_or_on_the_rest_of_the_batch(
    options: EngineOptions, table: Tables
) -> None:
    tokens = random_tokens(250, seed=5)
    with one_rank(replace(options, num_blocks=200)) as runner:
        alone = runner.logits([SequenceSlice("a", tokens, 0, table, GREEDY)])[0]
        for part in chunked(tokens, table, iter([100, 33, 116, 1])):
            in_chunks = runner.logits([part])[0]
        others = [
            SequenceSlice("b", random_tokens(90, seed=6), 0, runs_of(options, 64, 16), GREEDY),
            SequenceSlice("c", random_tokens(1, seed=7), 0, runs_of(options, 120, 1), GREEDY),
            SequenceSlice("d", random_tokens(5, seed=8), 0, runs_of(options, 130, 1), None),
        ]
        in_a_batch = runner.logits(
            [others[0], SequenceSlice("a", tokens, 0, table, GREEDY), *others[1:]]
        )[1]
        decodes = [replace(others[1]), SequenceSlice("a", tokens[-1:], 249, table, GREEDY)]
        decoded_in_a_batch = runner.logits(decodes)[1]
        other = runner.logits([SequenceSlice("a", tokens[:-1], 0, table, GREEDY)])[0]
    # K and V are stored in float32, so their last bit may flip. With float32 arithmetic the
    # difference would be 1e-6 or more.
    assert distance(alone, in_chunks) <= 1e-7
    assert distance(alone, in_a_batch) <= 1e-7
    assert distance(alone, decoded_in_a_batch) <= 1e-7
    assert distance(alone, other) > 1.0


@pytest.mark.parametrize("model", WITHOUT_STATES, indirect=True)
@pytest.mark.parametrize("length", [35, 5])
def test_a_nan_left_behind_in_a_block_does_not_reach_its_next_owner(
    options: EngineOptions, length: int
) -> None:
    tokens = random_tokens(length, seed=9)
    ours, theirs = runs_of(options, 3, 3), runs_of(options, 20, 8)
    queries = [
        SequenceSlice("a", tokens[-1:], length - 1, ours, GREEDY),
        SequenceSlice("b", (1,), 70, theirs, GREEDY),
    ]
    with one_rank(options) as runner:
        runner.run(
            [
                SequenceSlice("a", tokens[:-1], 0, ours, None),
                SequenceSlice("b", random_tokens(70, seed=10), 0, theirs, None),
            ]
        )
        clean = runner.logits(queries)
        poison(runner, ours, range(length, 48))
        for cache in runner.kv_caches.values():
            cache[50:] = torch.nan
        assert torch.equal(runner.logits(queries), clean)
        poison(runner, ours, range(length - 2, length - 1))
        assert runner.logits(queries)[0].isnan().all()
        assert torch.equal(runner.logits(queries)[1], clean[1])


def test_nothing_is_computed_for_the_vocabulary_when_nothing_is_sampled(
    options: EngineOptions, table: Tables
) -> None:
    with one_rank(options) as runner:
        assert runner.logits(
            [SequenceSlice("a", random_tokens(20, seed=11), 0, table, None)]
        ).shape == (0, 512)


@pytest.mark.parametrize("model", ["qwen3", "mla"], indirect=True)
@pytest.mark.parametrize(
    "part",
    [
        SequenceSlice("a", (), 0, ((1,),), GREEDY),
        SequenceSlice("a", (1,), -1, ((1,),), GREEDY),
        SequenceSlice("a", (1,), 16, ((1,),), GREEDY),
        SequenceSlice("a", (1,), 0, ((64,),), GREEDY),
        SequenceSlice("a", (1,), 0, ((-1,),), GREEDY),
        SequenceSlice("a", (512,), 0, ((1,),), GREEDY),
        SequenceSlice("a", (-1,), 0, ((1,),), GREEDY),
        SequenceSlice("a", (1,), 0, ((1,), (2,)), GREEDY),
        SequenceSlice("a", (1,), 0, (), GREEDY),
    ],
)
def test_a_slice_that_does_not_fit_is_refused_before_anything_is_written(
    options: EngineOptions, part: SequenceSlice
) -> None:
    with one_rank(options) as runner:
        good = SequenceSlice("b", (5, 6), 0, ((2,),), None)
        with pytest.raises(LocalProtocolError, match="request a was scheduled with"):
            runner.run([good, part])
        assert all(not cache.any() for cache in runner.kv_caches.values())


@pytest.mark.parametrize("model", ["qwen3", "mla"], indirect=True)
def test_tied_embeddings_and_sharded_weights_equal_transformers(
    options: EngineOptions, table: Tables, tmp_path: Path
) -> None:
    config = json.loads((options.model / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(options.model / "model.safetensors")
    del tensors["lm_head.weight"]
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for shard, members in shards.items():
        save_file(
            {name: tensors[name] for name in members}, tmp_path / shard, metadata={"format": "pt"}
        )
    placed = {name: shard for shard, members in shards.items() for name in members}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": placed})
    )
    tokens = random_tokens(60, seed=12)
    with one_rank(replace(options, model=tmp_path)) as runner:
        found = runner.logits([SequenceSlice("a", tokens, 0, table, GREEDY)])
    expected = reference_logits(tmp_path, tokens)[-1]
    assert distance(found[0], expected) <= 1e-4 * expected.abs().max().item()
    assert distance(expected, reference_logits(options.model, tokens)[-1]) > 1.0


def test_llama3_rotary_scaling_and_biases_equal_transformers(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=2048, attention_bias=True, eos_token_id=[1, 2],
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    )  # fmt: skip
    reference = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.uniform_(-0.3, 0.3)
    reference.save_pretrained(tmp_path)
    tokens = random_tokens(600, seed=13)
    with one_rank(EngineOptions(model=tmp_path, num_blocks=64)) as runner:
        found = runner.logits([SequenceSlice("a", tokens, 0, (tuple(range(40)),), GREEDY)])[0]
        scaled = runner.config.layers[0].rope
        assert runner.config.eos_token_ids == (1, 2)
    assert distance(found, reference_logits(tmp_path, tokens)[-1]) <= 1e-4
    plain = make_rotary_table(RopeConfig(scaled.theta), 16, 600, torch.float32)
    assert distance(plain.cos, make_rotary_table(scaled, 16, 600, torch.float32).cos) > 0.1
