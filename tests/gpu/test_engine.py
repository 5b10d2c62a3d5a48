"""Tests the embedded engine on a GPU: it generates the same tokens as on the CPU, for any batching
and any cache format, and it frees its device memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from tests.engine.ranks import GREEDY, Tables, one_rank, several_ranks
from torch._C._distributed_c10d import FileStore

from kvferry.connectors.contract import ParallelConfig
from kvferry.engine.cache.layout import form_groups
from kvferry.engine.make_model.writer import make_model
from kvferry.engine.messages import SampledToken, SequenceSlice
from kvferry.engine.model.config import read_model_config
from kvferry.engine.model.device import open_device
from kvferry.engine.model.tensor_parallel import GlooGroup, NcclGroup
from kvferry.engine.options import EngineOptions
from kvferry.engine.runner import Runner
from kvferry.errors import ConfigError
from kvferry.testing.local import LocalTransportKit
from kvferry.types import KVLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

FAMILIES = ("qwen3", "llama", "mla", "window", "hybrid")
NUM_PROMPTS, NEW_TOKENS, CHUNK = 20, 16, 48
FORMATS = [
    ("float32", "auto"),
    ("float16", "auto"),
    ("bfloat16", "auto"),
    ("bfloat16", "fp8_e4m3"),
    ("float16", "fp8_e5m2"),
]
GIB = 2**30

Run = Callable[[Sequence[SequenceSlice]], dict[str, SampledToken]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in folders.items():
        make_model(folder, family=family, seed=1)
    return folders


@pytest.fixture
def options(models: dict[str, Path]) -> EngineOptions:
    return on_gpu(models["qwen3"])


def on_gpu(model: Path) -> EngineOptions:
    return EngineOptions(model=model, device="cuda", num_blocks=1024)


def random_prompts(seed: int = 1) -> list[tuple[int, ...]]:
    rng = Random(seed)
    return [
        tuple(rng.randrange(10, 500) for _ in range(int(300 ** rng.random()) + 1))
        for _ in range(NUM_PROMPTS)
    ]


def scattered_tables(options: EngineOptions, prompts: Sequence[tuple[int, ...]]) -> list[Tables]:
    """Return shuffled block tables, per prompt and group, for prompt and generated tokens."""
    num_groups = len(form_groups(read_model_config(options.model)))
    free = Random(2).sample(range(options.num_blocks), options.num_blocks)
    tables = []
    for prompt in prompts:
        count = -(-(len(prompt) + NEW_TOKENS) // options.block_size)
        tables.append(tuple(tuple(free.pop() for _ in range(count)) for _ in range(num_groups)))
    return tables


def generate(
    run: Run, prompts: Sequence[tuple[int, ...]], tables: Sequence[Tables], chunk: int = 10_000
) -> list[list[int]]:
    """Generate greedy tokens of all prompts in one batch, up to `chunk` tokens of each per step."""
    known, computed = [list(prompt) for prompt in prompts], [0] * len(prompts)
    ends = [len(prompt) + NEW_TOKENS for prompt in prompts]
    while unfinished := [
        number for number, tokens in enumerate(known) if len(tokens) < ends[number]
    ]:
        slices = []
        for number in unfinished:
            start = computed[number]
            part = tuple(known[number][start : start + chunk])
            computed[number] += len(part)
            sampling = GREEDY if computed[number] == len(known[number]) else None
            slices.append(SequenceSlice(str(number), part, start, tables[number], sampling))
        for name, token in run(slices).items():
            known[int(name)].append(token.token_id)
    return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]


def tokens_of(options: EngineOptions, chunk: int = 10_000) -> list[list[int]]:
    prompts = random_prompts()
    with one_rank(options) as runner:
        return generate(runner.run, prompts, scattered_tables(options, prompts), chunk)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_float32_model_gives_the_tokens_of_the_cpu(models: dict[str, Path], family: str) -> None:
    options = on_gpu(models[family])
    found = tokens_of(options)
    assert found == tokens_of(replace(options, device="cpu"))
    assert len({tuple(tokens) for tokens in found}) > NUM_PROMPTS // 2


@pytest.mark.parametrize(("dtype", "cache_dtype"), FORMATS)
def test_tokens_do_not_depend_on_batch_or_chunks(
    options: EngineOptions, dtype: str, cache_dtype: str
) -> None:
    options = replace(options, dtype=dtype, kv_cache_dtype=cache_dtype)
    prompts = random_prompts()
    tables = scattered_tables(options, prompts)
    with one_rank(options) as runner:
        together = generate(runner.run, prompts, tables)
        alone = [
            generate(runner.run, [prompt], [table])[0]
            for prompt, table in zip(prompts, tables, strict=True)
        ]
        in_chunks = generate(runner.run, prompts, tables, CHUNK)
    assert together == alone
    assert together == in_chunks
    assert len({tuple(tokens) for tokens in together}) > NUM_PROMPTS // 2


def test_the_cache_is_on_the_gpu_in_the_format_asked_for_and_transports_get_no_host_memory(
    options: EngineOptions,
) -> None:
    with one_rank(
        replace(
            options, dtype="bfloat16", kv_cache_layout=KVLayout.NHD, block_size=32, num_blocks=7
        )
    ) as runner:
        assert runner.cache_memory is None
        for cache in runner.kv_caches.values():
            assert cache.device == torch.device("cuda", 0)
            assert cache.dtype is torch.bfloat16
            assert tuple(cache.shape) == (7, 32, 2, 128)
            assert not cache.any()


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_models_that_compute_in_their_own_format_stay_near(
    options: EngineOptions, compute_dtype: str
) -> None:
    """Models above the size limit for float64 are computed in such a format."""
    part = SequenceSlice("a", tuple(range(20, 220)), 0, (tuple(range(20)),), GREEDY)
    with (
        one_rank(options) as exact,
        one_rank(replace(options, compute_dtype=compute_dtype)) as near,
    ):
        wanted, found = (runner.logits([part]).double().flatten() for runner in (exact, near))
    likeness = torch.nn.functional.cosine_similarity(wanted, found, dim=0).item()
    assert likeness > (0.99999 if compute_dtype == "float32" else 0.95)


def test_all_layers_of_a_block_may_lie_together(options: EngineOptions) -> None:
    assert tokens_of(replace(options, cross_layer_blocks=True)) == tokens_of(options)


@pytest.mark.parametrize("family", ["qwen3", "mla"])
def test_two_ranks_on_one_gpu_give_a_single_ranks_tokens(
    models: dict[str, Path], tmp_path: Path, family: str
) -> None:
    options = replace(on_gpu(models[family]), dtype="float16")
    prompts = random_prompts()
    tables = scattered_tables(options, prompts)
    with several_ranks(replace(options, tensor_parallel_size=2), tmp_path) as ranks:
        found = generate(lambda slices: ranks.run(slices)[0], prompts, tables)
    assert found == tokens_of(options)


def test_ranks_without_a_size_agree_on_one(options: EngineOptions, tmp_path: Path) -> None:
    """The ranks measure the GPU one after the other, and the first allocates only after the last
    has measured.
    """
    few = replace(
        options, num_blocks=0, gpu_memory_utilization=share_in_use() + 0.1, tensor_parallel_size=2
    )
    with several_ranks(few, tmp_path) as ranks:
        counts = [described.num_blocks for described in ranks.cache_configs]
    assert counts[0] == counts[1] > 0


def test_the_cache_takes_what_its_share_of_the_gpu_leaves(options: EngineOptions) -> None:
    _, total = torch.cuda.mem_get_info()
    share = share_in_use() + 0.02
    with one_rank(replace(options, num_blocks=0, gpu_memory_utilization=share)) as runner:
        size_bytes = sum(cache.nbytes for cache in runner.kv_caches.values())
        assert 0.005 * total < size_bytes < 0.02 * total
    with (
        pytest.raises(
            ConfigError,
            match=r"--gpu-memory-utilization 0.0001 leaves none of them for the KV cache",
        ),
        one_rank(replace(options, num_blocks=0, gpu_memory_utilization=0.0001)),
    ):
        pass


def test_a_cache_that_does_not_fit_is_refused_with_what_is_free(options: EngineOptions) -> None:
    _, total = torch.cuda.mem_get_info()
    with (
        pytest.raises(ConfigError, match=r"cuda:0 has no room for the KV cache: .* bytes are free"),
        one_rank(replace(options, num_blocks=0, kv_cache_memory_bytes=2 * total)),
    ):
        pass


def test_a_gpu_that_is_not_there_is_refused() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(
        ConfigError,
        match=f"--device cuda:{count}: this machine has no such GPU, the last is cuda:{count - 1}",
    ):
        open_device(f"cuda:{count}", ParallelConfig())


def test_nccl_adds_up_what_ranks_with_a_gpu_each_have(tmp_path: Path) -> None:
    """The test uses one rank, because NCCL cannot connect two ranks on one GPU."""
    alone, cuda = ParallelConfig(1, 0), torch.device("cuda", 0)
    assert open_device("cuda", alone).has_own_gpus
    assert not open_device("cuda", ParallelConfig(torch.cuda.device_count() + 1, 0)).has_own_gpus
    store = FileStore(str(tmp_path / "store"), 1)
    group = NcclGroup(alone, store, GlooGroup(alone, store, 30.0), cuda, 30.0)
    part = torch.arange(6, dtype=torch.float64, device=cuda).view(2, 3)
    assert torch.equal(group.sum(part.clone()), part)
    assert torch.equal(group.sum(part.t().clone().t()), part)
    assert torch.equal(group.concatenate(part), part)
    group.close()
    group.close()


def test_device_memory_is_given_back(options: EngineOptions) -> None:
    held = []
    for _ in range(3):
        runner = Runner(replace(options, num_blocks=0, kv_cache_memory_bytes=GIB))
        runner.load()
        runner.allocate_cache(LocalTransportKit())
        generate(runner.run, [(11, 12, 13)], [((0, 1),)])
        assert runner.device.used_bytes > runner.device.held_bytes > GIB
        runner.close()
        runner.close()
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert held[1] == held[2], (
        "the libraries' own workspace comes with the first engine, and nothing more"
    )
    assert held[2][1] < GIB // 4


def share_in_use() -> float:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / total
