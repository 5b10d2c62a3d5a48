"""Model runners for tests: one rank in this process, or all ranks of a tensor-parallel engine, each
in a process of its own.
"""

import multiprocessing
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kvferry.connectors.contract import KVCacheConfig, ParallelConfig
from kvferry.engine.cache.layout import form_groups
from kvferry.engine.messages import SampledToken, SamplingParams, SequenceSlice
from kvferry.engine.model.config import read_model_config
from kvferry.engine.options import EngineOptions
from kvferry.engine.runner import Runner
from kvferry.errors import KVFerryError
from kvferry.testing.local import LocalTransportKit

Tables = tuple[tuple[int, ...], ...]
"""The block ids of a sequence, per KV-cache group."""
GREEDY = SamplingParams(temperature=0.0)
DEADLINE_S = 60.0


@contextmanager
def one_rank(options: EngineOptions) -> Iterator[Runner]:
    runner = Runner(options)
    try:
        runner.load()
        runner.allocate_cache(LocalTransportKit())
        yield runner
    finally:
        runner.close()


class Ranks:
    """The ranks of one engine; each rank is a spawned process that runs the calls it is sent."""

    def __init__(self, options: EngineOptions, rendezvous: Path, timeout_s: float) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.processes = []
        self._pipes: list[Connection] = []
        for rank in range(options.tensor_parallel_size):
            ours, theirs = spawn.Pipe()
            parallel = ParallelConfig(options.tensor_parallel_size, rank)
            process = spawn.Process(
                target=_serve, args=(theirs, options, parallel, f"file://{rendezvous}", timeout_s)
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)
        self.cache_configs: list[KVCacheConfig] = [self._answer(pipe) for pipe in self._pipes]

    def send(self, rank: int, method: str, slices: Sequence[SequenceSlice]) -> None:
        self._pipes[rank].send((method, slices))

    def answer(self, rank: int) -> Any:
        return self._answer(self._pipes[rank])

    def logits(self, slices: Sequence[SequenceSlice]) -> list[torch.Tensor]:
        """The logits from every rank."""
        return [torch.tensor(rows, dtype=torch.float64) for rows in self._all("logits", slices)]

    def run(self, slices: Sequence[SequenceSlice]) -> list[dict[str, SampledToken]]:
        return self._all("run", slices)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(DEADLINE_S)
            if process.is_alive():
                process.kill()
                process.join()

    def _all(self, method: str, slices: Sequence[SequenceSlice]) -> list[Any]:
        for rank in range(len(self._pipes)):
            self.send(rank, method, slices)
        return [self._answer(pipe) for pipe in self._pipes]

    def _answer(self, pipe: Connection) -> Any:
        assert pipe.poll(DEADLINE_S), "a rank did not answer"
        value = pipe.recv()
        if isinstance(value, Exception):
            raise value
        return value


@contextmanager
def several_ranks(
    options: EngineOptions, directory: Path, timeout_s: float = DEADLINE_S
) -> Iterator[Ranks]:
    """`directory` holds the rendezvous file of the ranks."""
    ranks = Ranks(options, directory / "rendezvous", timeout_s)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(
    pipe: Connection,
    options: EngineOptions,
    parallel: ParallelConfig,
    rendezvous: str,
    timeout_s: float,
) -> None:
    runner = Runner(options, parallel, rendezvous, timeout_s)
    try:
        runner.load()
        pipe.send(runner.allocate_cache(LocalTransportKit()))
        while True:
            method, slices = pipe.recv()
            value = getattr(runner, method)(slices)
            pipe.send(value.tolist() if isinstance(value, torch.Tensor) else value)
    except EOFError:
        pass
    except KVFerryError as error:
        pipe.send(error)
    finally:
        runner.close()


def tables_of(options: EngineOptions, blocks: int, seed: int = 3) -> Tables:
    """The blocks of a sequence in every KV-cache group: the first blocks of the cache in random
    order, as after some traffic.
    """
    groups = form_groups(read_model_config(options.model))
    chosen = random.Random(seed).sample(range(blocks * len(groups)), blocks * len(groups))
    return tuple(tuple(chosen[index :: len(groups)]) for index in range(len(groups)))


def runs_of(options: EngineOptions, first: int, blocks: int) -> Tables:
    """Like `tables_of`, but with adjacent blocks from `first` on."""
    groups = form_groups(read_model_config(options.model))
    return tuple(
        tuple(range(first + index * blocks, first + (index + 1) * blocks))
        for index in range(len(groups))
    )


def by_token(cache: torch.Tensor) -> torch.Tensor:
    """A layer's cache with shape [blocks, tokens, …]; the cache has layout HND or is latent."""
    return cache if cache.dim() == 3 else cache.transpose(1, 2)


def poison(
    runner: Runner, table: Tables, positions: range, groups: Sequence[int] | None = None
) -> None:
    """Write NaN into the slots of these positions, in all layers of the given groups, or of all
    groups.
    """
    for index, group in enumerate(form_groups(runner.config)):
        if groups is None or index in groups:
            for name in group.layer_names:
                slots = by_token(runner.kv_caches[name])
                size = slots.shape[1]
                for position in positions:
                    slots[table[index][position // size], position % size] = torch.nan


def prefill(runner: Runner, prompt: Sequence[int], block_ids: Tables) -> None:
    """Compute all but the last token, whose logits come with the first decode step."""
    if len(prompt) > 1:
        runner.run([SequenceSlice("prefill", tuple(prompt[:-1]), 0, block_ids, None)])


def greedy(
    runner: Runner, prompts: Sequence[Sequence[int]], tables: Sequence[Tables], count: int
) -> list[list[int]]:
    """The next `count` tokens of each prompt, computed in one batch. The cache holds the KV of
    every prompt token but the last.
    """
    known = [list(prompt) for prompt in prompts]
    for _ in range(count):
        slices = [
            SequenceSlice(str(number), (tokens[-1],), len(tokens) - 1, table, GREEDY)
            for number, (tokens, table) in enumerate(zip(known, tables, strict=True))
        ]
        sampled = runner.run(slices)
        for number, tokens in enumerate(known):
            tokens.append(sampled[str(number)].token_id)
    return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]
