"""Tests layers with a sliding window: they equal those of transformers, and nothing outside the
window is ever read.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.engine.ranks import GREEDY, Tables, by_token, one_rank, poison, runs_of, tables_of
from tests.engine.test_model import distance, random_tokens, reference_logits

from kvferry.engine.cache.layout import form_groups
from kvferry.engine.make_model.writer import make_model
from kvferry.engine.messages import SequenceSlice
from kvferry.engine.model.config import read_model_config
from kvferry.engine.options import EngineOptions
from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.protocol.tickets import NO_BLOCK

WINDOW = 48


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    directory = tmp_path_factory.mktemp("window")
    make_model(directory, family="window", seed=1)
    return EngineOptions(model=directory, num_blocks=90)


def with_holes(table: Tables, options: EngineOptions, position: int) -> Tables:
    """The table without the blocks that no token from `position` on attends to."""
    groups = form_groups(read_model_config(options.model))
    gone = [group.first_visible_token(position) // options.block_size for group in groups]
    return tuple(
        (NO_BLOCK,) * count + blocks[count:] for count, blocks in zip(gone, table, strict=True)
    )


def test_a_cache_with_fewer_blocks_than_groups_is_refused_with_the_number_it_needs(
    options: EngineOptions,
) -> None:
    needed = len(form_groups(read_model_config(options.model)))
    with one_rank(replace(options, num_blocks=needed)) as runner:
        assert runner.cache_memory is not None
        size_bytes = runner.cache_memory.size_bytes
        # One block per group is enough for a prompt.
        runner.logits(
            [SequenceSlice("a", (1, 2, 3), 0, tuple((block,) for block in range(needed)), GREEDY)]
        )
    assert needed > 1
    for few in (
        replace(options, num_blocks=needed - 1),
        replace(options, num_blocks=0, kv_cache_memory_bytes=size_bytes - 1),
    ):
        with (
            pytest.raises(
                ConfigError,
                match=f"would have {needed - 1} blocks, but this model needs at least {needed}, "
                "one for each group",
            ),
            one_rank(few),
        ):
            pass


@pytest.mark.parametrize("length", [48, 49, 63, 64, 65, 150])
def test_blocks_behind_the_window_may_be_gone_and_hold_anything(
    options: EngineOptions, length: int
) -> None:
    tokens, table = random_tokens(length + 40, seed=1), tables_of(options, blocks=20)
    before = [SequenceSlice("a", tokens[:length], 0, table, GREEDY)]
    with one_rank(options) as runner:
        runner.logits(before)
        decode = SequenceSlice("a", (tokens[length],), length, table, GREEDY)
        chunk = SequenceSlice("a", tokens[length:], length, table, GREEDY)
        expected = [runner.logits([decode]), runner.logits([chunk])]
        runner.logits(before)
        held = with_holes(table, options, length)
        mine = {block for blocks in held for block in blocks if block != NO_BLOCK}
        for cache in runner.kv_caches.values():
            cache[[block for block in range(options.num_blocks) if block not in mine]] = torch.nan
        assert (held[1][0] == NO_BLOCK) == (length - WINDOW + 1 >= options.block_size)
        assert torch.equal(runner.logits([replace(decode, block_ids=held)]), expected[0])
        assert torch.equal(runner.logits([replace(chunk, block_ids=held)]), expected[1])


def test_a_nan_just_outside_the_window_is_not_seen_and_one_just_inside_is(
    options: EngineOptions,
) -> None:
    length = 100
    tokens, table = random_tokens(length + 5, seed=2), tables_of(options, blocks=20)
    first_visible_token = length - WINDOW + 1
    steps = [
        [SequenceSlice("a", (tokens[length],), length, table, GREEDY)],
        [SequenceSlice("a", tokens[length:], length, table, GREEDY)],
        [
            SequenceSlice("a", (tokens[length],), length, table, GREEDY),
            SequenceSlice("b", (1,), 0, runs_of(options, 80, 1), GREEDY),
        ],
    ]
    for step in steps:
        with one_rank(replace(options, num_blocks=90)) as runner:
            runner.run([SequenceSlice("a", tokens[:length], 0, table, None)])
            clean = runner.logits(step)
            poison(runner, table, range(first_visible_token), groups=[1, 2])
            assert torch.equal(runner.logits(step), clean)
            poison(runner, table, range(first_visible_token, first_visible_token + 1), groups=[1])
            assert runner.logits(step)[0].isnan().all()
    with one_rank(options) as runner:
        runner.run([SequenceSlice("a", tokens[:length], 0, table, None)])
        poison(runner, table, range(1), groups=[0])
        assert runner.logits(steps[0])[0].isnan().all()


def test_a_hole_where_the_window_looks_is_refused_before_anything_is_written(
    options: EngineOptions,
) -> None:
    table = runs_of(options, 0, 8)
    with one_rank(options) as runner:
        for hole, start in ((0, 62), (1, 70), (3, 60), (4, 60)):
            pierced = (
                table[0],
                table[1],
                tuple(NO_BLOCK if index == hole else block for index, block in enumerate(table[2])),
            )
            step = [
                SequenceSlice("b", (1,), 0, runs_of(options, 60, 1), None),
                SequenceSlice("a", (1, 2, 3, 4, 5), start, pierced, GREEDY),
            ]
            with pytest.raises(
                LocalProtocolError, match="request a was scheduled with a null block where tokens"
            ):
                runner.run(step)
        with pytest.raises(
            LocalProtocolError, match="a null block where tokens 0 to 64 are needed"
        ):
            runner.run(
                [SequenceSlice("a", (1,), 64, ((NO_BLOCK, *table[0][1:]), *table[1:]), GREEDY)]
            )
        assert all(not cache.any() for cache in runner.kv_caches.values())
        pierced = (table[0], (NO_BLOCK, *table[1][1:]), (NO_BLOCK, *table[2][1:]))
        runner.run([SequenceSlice("a", (1,), 63, pierced, GREEDY)])


def test_groups_are_cut_to_the_size_of_the_scarcest_kind(tmp_path: Path) -> None:
    def sizes(**settings: Any) -> list[tuple[int | None, list[int]]]:
        library: Any = transformers
        library.Gemma3TextConfig(architectures=["Gemma3ForCausalLM"], **settings).save_pretrained(
            tmp_path
        )
        groups = form_groups(read_model_config(tmp_path))
        return [
            (group.sliding_window, [int(name.split(".")[2]) for name in group.layer_names])
            for group in groups
        ]

    assert sizes(num_hidden_layers=8, sliding_window=512, sliding_window_pattern=4) == [
        (None, [3, 7]),
        (512, [0, 1]),
        (512, [2, 4]),
        (512, [5, 6]),
    ]
    assert sizes(num_hidden_layers=7, sliding_window=512, sliding_window_pattern=3) == [
        (None, [2, 5]),
        (512, [0, 1]),
        (512, [3, 4]),
        (512, [6]),
    ]
    assert sizes(num_hidden_layers=3, sliding_window=512) == [(512, [0, 1, 2])]
    assert sizes(num_hidden_layers=3, sliding_window=512, layer_types=["full_attention"] * 3) == [
        (None, [0, 1, 2])
    ]
    assert sizes(num_hidden_layers=6, sliding_window=512, max_position_embeddings=512) == [
        (None, [0, 1, 2, 3, 4, 5])
    ]


def test_layers_of_different_groups_share_memory_and_blocks_keep_them_apart(
    options: EngineOptions,
) -> None:
    table = ((4, 7), (1, 5), (2, 3))
    with one_rank(options) as runner:
        caches = runner.kv_caches
        groups = form_groups(runner.config)
        assert [[int(name.split(".")[2]) for name in group.layer_names] for group in groups] == [
            [2, 5],
            [0, 1],
            [3, 4],
        ]
        assert {
            tuple(caches[group.layer_names[slot]].data_ptr() for group in groups)
            for slot in range(2)
        } == {(caches[name].data_ptr(),) * 3 for name in groups[0].layer_names}
        runner.run([SequenceSlice("a", random_tokens(20, seed=3), 0, table, None)])
        for name in groups[0].layer_names:
            used = by_token(caches[name]).flatten(2).abs().amin(-1) > 0
            assert used[[4, 1, 2]].all()
            assert used[[7, 5, 3], :4].all()
            assert not used[[7, 5, 3], 4:].any()
            assert not used[[0, 6, *range(8, 90)]].any()


SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
}  # fmt: skip
WINDOWED: dict[str, tuple[dict[str, Any], int]] = {
    "Mistral": ({"num_hidden_layers": 2, "sliding_window": 20}, 1),
    "Qwen2": (
        {
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "use_sliding_window": True,
            "max_window_layers": 1,
        },
        4,
    ),
    "Qwen3": (
        {
            "num_hidden_layers": 4,
            "sliding_window": 33,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
        2,
    ),
    "Gemma3": (
        {
            "num_hidden_layers": 5,
            "sliding_window": 20,
            "sliding_window_pattern": 2,
            "attention_bias": True,
            "query_pre_attn_scalar": 40,
            "tie_word_embeddings": False,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_theta": 50000.0,
        },
        3,
    ),
}


@pytest.mark.parametrize("family", list(WINDOWED))
def test_every_family_that_has_windows_equals_transformers(tmp_path: Path, family: str) -> None:
    settings, num_groups = WINDOWED[family]
    library: Any = transformers
    config_class = getattr(library, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    reference = getattr(library, f"{family}ForCausalLM")(config_class(**SMALL, **settings)).float()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.uniform_(-0.3, 0.3, generator=generator)
    reference.save_pretrained(tmp_path)
    tokens = random_tokens(150, seed=6)
    options = EngineOptions(model=tmp_path, num_blocks=64)
    table = tables_of(options, blocks=10)
    assert len(table) == num_groups
    expected = reference_logits(tmp_path, tokens)
    with one_rank(options) as runner:
        for start, end in ((0, 70), (70, 71), (71, 149), (149, 150)):
            found = runner.logits(
                [
                    SequenceSlice(
                        "a", tokens[start:end], start, with_holes(table, options, start), GREEDY
                    )
                ]
            )[0]
            assert distance(found, expected[end - 1]) <= 1e-4
        assert distance(found, expected[-2]) > 0.1
