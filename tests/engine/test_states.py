"""Tests the layers that keep a state: the forward pass, the blocks of a sequence, and the length of
a prefill leg.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.engine.ranks import GREEDY, Tables, one_rank, runs_of, several_ranks
from tests.sampling import exhaustive

from kvferry.engine.cache.layout import form_groups
from kvferry.engine.make_model.writer import make_model
from kvferry.engine.messages import SequenceSlice
from kvferry.engine.model.config import read_model_config
from kvferry.engine.options import EngineOptions
from kvferry.engine.runner import Runner
from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.types import KVLayout


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    directory = tmp_path_factory.mktemp("hybrid")
    make_model(directory, family="hybrid", seed=1)
    return EngineOptions(model=directory, num_blocks=200)


def random_tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(508) for _ in range(count))


def tables(options: EngineOptions, first: int, blocks: int = 20) -> Tables:
    """Return the blocks of a sequence as an engine allocates them: one block for the states."""
    attention, states = runs_of(options, first, blocks)
    return attention, states[:1]


def compute(
    runner: Runner, tokens: Sequence[int], table: Tables, sizes: Sequence[int]
) -> torch.Tensor:
    """Return the logits of the last token, computed in steps of these sizes."""
    start = 0
    for size in sizes:
        part = SequenceSlice("a", tuple(tokens[start : start + size]), start, table, GREEDY)
        logits = runner.logits([part])
        start += size
    assert start == len(tokens)
    return logits[0]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.double() - other.double()).abs().max().item()


def test_chunks_single_tokens_and_a_whole_prompt_give_the_same_logits(
    options: EngineOptions,
) -> None:
    tokens = random_tokens(120, seed=2)
    with one_rank(options) as runner:
        whole = compute(runner, tokens, tables(options, 0), [120])
        chunks = compute(runner, tokens, tables(options, 40), [50, 1, 2, 3, 63, 1])
        single = compute(runner, tokens, tables(options, 80), [1] * 120)
        shorter = compute(runner, tokens[1:], tables(options, 120), [119])
    assert distance(whole, chunks) <= 1e-7
    assert distance(whole, single) <= 1e-7
    assert distance(whole, shorter) > 0.1


def test_the_other_sequences_of_a_step_change_nothing(options: EngineOptions) -> None:
    prompts = [random_tokens(count, seed=count) for count in (30, 7, 30, 1, 2)]
    places = [tables(options, 40 * number) for number in range(len(prompts))]
    with one_rank(options) as runner:
        alone = [
            compute(runner, [*prompt, 9], place, [len(prompt), 1])
            for prompt, place in zip(prompts, places, strict=True)
        ]
        runner.logits(
            [SequenceSlice(str(n), prompts[n], 0, places[n], None) for n in range(len(prompts))]
        )
        together = runner.logits(
            [
                SequenceSlice(str(n), (9,), len(prompts[n]), places[n], GREEDY)
                for n in range(len(prompts))
            ]
        )
    assert max(map(distance, alone, together)) <= 1e-7


def test_a_block_s_earlier_owner_leaves_nothing_behind(options: EngineOptions) -> None:
    tokens, table = random_tokens(20, seed=4), tables(options, 0)
    with one_rank(options) as runner:
        clean = compute(runner, tokens, table, [15, 5])
        for cache in runner.kv_caches.values():
            cache.fill_(torch.nan)
        assert torch.equal(compute(runner, tokens, table, [15, 5]), clean)


PARTS = [f"model.layers.{n}.mamba.{part}" for n in (0, 2) for part in ("recurrent", "conv.x")]


@pytest.mark.parametrize("part", PARTS)
def test_a_wrong_state_changes_the_greedy_tokens(options: EngineOptions, part: str) -> None:
    """The states of another prompt take the place of the right ones."""
    unseen = []
    with one_rank(options) as runner:
        for length in (20, 50, 150, 400):
            ours, theirs = tables(options, 0, 30), tables(options, 60, 30)
            prompt = random_tokens(length, seed=length)
            compute(runner, random_tokens(length, seed=7), theirs, [length])
            compute(runner, prompt, ours, [length])
            right = list(greedy(runner, length, ours))
            compute(runner, prompt, ours, [length])
            runner.kv_caches[part][ours[1][0]] = runner.kv_caches[part][theirs[1][0]]
            if list(greedy(runner, length, ours)) == right:
                unseen.append(length)
    assert unseen == []


def greedy(runner: Runner, length: int, table: Tables) -> Iterator[int]:
    token = 5
    for position in range(length, length + 32):
        token = runner.run([SequenceSlice("a", (token,), position, table, GREEDY)])["a"].token_id
        yield token


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [pytest.param(2, marks=exhaustive), 4])
def test_ranks_divide_the_states_by_heads(
    options: EngineOptions, tmp_path: Path, tp_size: int
) -> None:
    """With four ranks, two ranks hold the same group of B and C."""
    tokens, table = random_tokens(60, seed=5), tables(options, 0)
    steps = [
        [SequenceSlice("a", tokens[:40], 0, table, GREEDY)],
        [SequenceSlice("a", tokens[40:], 40, table, GREEDY)],
    ]
    with one_rank(options) as runner:
        alone = [runner.logits(step) for step in steps]
    with several_ranks(replace(options, tensor_parallel_size=tp_size), tmp_path) as ranks:
        for step, expected in zip(steps, alone, strict=True):
            for logits in ranks.logits(step):
                assert distance(logits, expected) <= 1e-7


@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("is_cross_layer", [False, True])
@pytest.mark.parametrize("layout", list(KVLayout))
def test_blocks_that_are_smaller_or_larger_than_a_state_hold_it(
    options: EngineOptions, block_size: int, is_cross_layer: bool, layout: KVLayout
) -> None:
    tokens = random_tokens(60, seed=6)
    changed = replace(
        options, block_size=block_size, cross_layer_blocks=is_cross_layer, kv_cache_layout=layout
    )
    with one_rank(options) as runner:
        expected = compute(runner, tokens, tables(options, 0), [60])
    with one_rank(changed) as runner:
        assert distance(compute(runner, tokens, tables(options, 0), [30, 30]), expected) <= 1e-7


def test_another_arrangement_of_layers_equals_transformers(tmp_path: Path) -> None:
    """Three groups of states, a state in the last layer, and no bias of the convolution."""
    torch.manual_seed(0)
    config = transformers.BambaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_state=16,
        mamba_conv_bias=False,
        max_position_embeddings=1024,
    )
    model: Any = transformers.BambaForCausalLM(config).double()
    model.save_pretrained(tmp_path)
    config_path = tmp_path / "config.json"
    config_path.write_text(
        json.dumps(json.loads(config_path.read_text()) | {"dtype": "float32"}, allow_nan=True)
    )
    options = EngineOptions(model=tmp_path, num_blocks=100)
    assert [group.is_state for group in form_groups(read_model_config(tmp_path))] == [
        False,
        True,
        True,
        True,
    ]
    tokens = random_tokens(50, seed=8)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    with one_rank(options) as runner:
        found = compute(runner, tokens, runs_of(options, 0, 10), [20, 29, 1])
    assert distance(found, expected) <= 1e-4


@pytest.mark.parametrize("states", [(), (-1,), (200,)])
def test_a_sequence_without_a_block_for_its_states_is_refused(
    options: EngineOptions, states: tuple[int, ...]
) -> None:
    with one_rank(options) as runner, pytest.raises(LocalProtocolError, match="request a"):
        runner.run([SequenceSlice("a", (1,), 0, ((1,), states), GREEDY)])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"attn_layer_indices": []}, "attn_layer_indices must name some of the 4 layers"),
        ({"attn_layer_indices": [0, 1, 2, 3]}, "attn_layer_indices must name some"),
        ({"attn_layer_indices": [4]}, "attn_layer_indices must name some"),
        ({"attn_layer_indices": "1"}, "attn_layer_indices must name some"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias is true"),
        ({"time_step_limit": [0.1, 1.0]}, "time_step_limit is set"),
        ({"mamba_n_heads": 7}, "mamba_n_heads times mamba_d_head must be"),
        ({"mamba_n_groups": 3}, "mamba_n_groups must divide the 8 heads"),
        ({"partial_rotary_factor": 1.0}, "partial_rotary_factor must be 0.5"),
    ],
)
def test_a_file_that_needs_other_arithmetic_is_refused(
    options: EngineOptions, tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    config = json.loads((options.model / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=complaint):
        read_model_config(tmp_path)
