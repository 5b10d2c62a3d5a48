"""Tests that two ranks compute what one rank computes, and that a rank fails with an error when
its sibling rank dies.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tests.engine.ranks import DEADLINE_S, GREEDY, one_rank, runs_of, several_ranks, tables_of
from tests.sampling import exhaustive

from kvferry.connectors.contract import ParallelConfig
from kvferry.engine.make_model.weights import FAMILIES
from kvferry.engine.make_model.writer import make_model
from kvferry.engine.messages import SamplingParams, SequenceSlice
from kvferry.engine.model.tensor_parallel import join_group
from kvferry.engine.options import EngineOptions
from kvferry.engine.runner import Runner
from kvferry.errors import ConfigError, TransportError

pytestmark = pytest.mark.slow

NUMBERS = random.Random(5)
TOKENS = tuple(NUMBERS.randrange(512) for _ in range(200))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineOptions]:
    made = {}
    for name, family, heads in (
        *((family, family, 4) for family in FAMILIES),
        ("one KV head", "qwen3", 2),
    ):
        directory = tmp_path_factory.mktemp(family)
        make_model(directory, family=family, seed=2, heads=heads)
        made[name] = EngineOptions(model=directory, num_blocks=70, tensor_parallel_size=2)
    return made


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(each, marks=() if each in ("qwen3", "mla") else exhaustive)
            for each in FAMILIES
        ),
        "one KV head",
    ],
)
def test_two_ranks_give_the_logits_of_one_and_of_transformers(
    models: dict[str, EngineOptions], tmp_path: Path, name: str
) -> None:
    options = models[name]
    table, other = tables_of(options, blocks=16), runs_of(options, 60, 1)
    steps = [
        [
            SequenceSlice("a", TOKENS[:150], 0, table, GREEDY),
            SequenceSlice("b", TOKENS[50:53], 0, other, GREEDY),
        ],
        [
            SequenceSlice("b", TOKENS[53:54], 3, other, GREEDY),
            SequenceSlice("a", TOKENS[150:199], 150, table, None),
        ],
        [SequenceSlice("a", TOKENS[199:], 199, table, GREEDY)],
    ]
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    with one_rank(replace(options, tensor_parallel_size=1)) as runner:
        alone = [runner.logits(step) for step in steps]
    with several_ranks(options, tmp_path) as ranks:
        assert [config.num_kv_heads for config in ranks.cache_configs] == [1, 1]
        together = [ranks.logits(step) for step in steps]
        sampling = SamplingParams(temperature=1.0)
        first, second = ranks.run(
            [SequenceSlice("a", TOKENS[199:], 199, table, sampling, draw_seed=7)]
        )
    for one, (rank_0, rank_1) in zip(alone, together, strict=True):
        assert torch.equal(rank_0, rank_1)
        assert (one - rank_0).abs().max() <= 1e-7
    assert (together[2][0][0] - expected[199]).abs().max() <= 1e-4
    assert (together[2][0][0] - expected[198]).abs().max() > 1.0
    assert list(first) == ["a"]
    assert second == {}


def test_a_killed_rank_is_an_error_for_the_other_at_once(
    models: dict[str, EngineOptions], tmp_path: Path
) -> None:
    step = [SequenceSlice("a", TOKENS, 0, tables_of(models["qwen3"], blocks=16), GREEDY)]
    with several_ranks(models["qwen3"], tmp_path) as ranks:
        ranks.run(step)
        ranks.processes[1].kill()
        ranks.processes[1].join()
        ranks.send(0, "run", step)
        with pytest.raises(TransportError, match="rank 0 of 2 lost another rank"):
            ranks.answer(0)


def test_a_silent_rank_is_an_error_after_the_deadline(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        joining = [
            pool.submit(join_group, ParallelConfig(2, rank), f"file://{tmp_path}/rendezvous", 2.0)
            for rank in range(2)
        ]
        groups = [future.result(DEADLINE_S) for future in joining]
        sums = [
            pool.submit(group.sum, torch.tensor([value]))
            for group, value in zip(groups, (1.0, 2.0), strict=True)
        ]
        assert [future.result(DEADLINE_S).item() for future in sums] == [3.0, 3.0]
        parts = [
            pool.submit(group.concatenate, torch.tensor([[value]]))
            for group, value in zip(groups, (1.0, 2.0), strict=True)
        ]
        assert [future.result(DEADLINE_S).tolist() for future in parts] == [[[1.0, 2.0]]] * 2
        with pytest.raises(TransportError, match="rank 0 of 2 lost another rank"):
            groups[0].sum(torch.zeros(1))
        for group in groups:
            group.close()


def test_a_rank_that_never_comes_is_an_error_after_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="rank 0 of 2 could not join"):
        join_group(ParallelConfig(2, 0), f"file://{tmp_path}/rendezvous", timeout_s=0.2)


@pytest.mark.parametrize(
    "rendezvous", ["", "file://", "tcp://127.0.0.1", "127.0.0.1:80", "http://127.0.0.1:80"]
)
def test_a_meeting_place_that_is_none_is_refused(rendezvous: str) -> None:
    with pytest.raises(ConfigError, match="rendezvous must be"):
        join_group(ParallelConfig(2, 0), rendezvous, timeout_s=0.2)


def test_a_size_that_does_not_divide_the_heads_is_refused(models: dict[str, EngineOptions]) -> None:
    runner = Runner(
        replace(models["qwen3"], tensor_parallel_size=3),
        ParallelConfig(3, 0),
        "file:///nowhere/rendezvous",
    )
    with pytest.raises(
        ConfigError,
        match="--tensor-parallel-size 3 does not divide the model's num_attention_heads 4",
    ):
        runner.load()
