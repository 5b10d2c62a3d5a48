"""Tests what `--device` means: which GPU each rank gets, which values are refused, and which number
formats a device uses.
"""

import asyncio
import multiprocessing
from pathlib import Path

import pytest
import torch
from tests.engine.ranks import GREEDY, runs_of

from kvferry.connectors.contract import ParallelConfig
from kvferry.engine.cache.layout import plan_cache_layout
from kvferry.engine.client import EngineClient
from kvferry.engine.make_model.writer import make_model
from kvferry.engine.messages import SequenceSlice
from kvferry.engine.model.checkpoint import open_checkpoint
from kvferry.engine.model.config import read_model_config
from kvferry.engine.model.device import CPU, open_device
from kvferry.engine.model.flat_batch import make_flat_batch
from kvferry.engine.model.tensor_parallel import SoloGroup
from kvferry.engine.model.transformer import Model
from kvferry.engine.model.weights import FLOAT64_WEIGHTS_LIMIT_BYTES, choose_precision, load_weights
from kvferry.engine.options import EngineOptions, first_gpu, gpu_of_rank, ranks_on_gpu
from kvferry.errors import ConfigError
from kvferry.testing.local import LocalTransportKit

SMALL, LARGE = FLOAT64_WEIGHTS_LIMIT_BYTES, FLOAT64_WEIGHTS_LIMIT_BYTES + 1


@pytest.mark.parametrize(
    ("device", "gpu"), [("cpu", None), ("cuda", 0), ("cuda:0", 0), ("cuda:17", 17)]
)
def test_a_device_names_the_gpu_of_the_first_rank(device: str, gpu: int | None) -> None:
    assert first_gpu(device) == gpu


@pytest.mark.parametrize(
    "device",
    ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:1.0", "CUDA", "cuda:99999", "mps", "cuda:0\n"],
)
def test_any_other_device_is_refused_with_what_there_is(device: str) -> None:
    with pytest.raises(ConfigError, match="--device must be cpu, cuda or cuda:N"):
        EngineOptions(Path(), device=device)


@pytest.mark.parametrize(
    ("first", "ranks", "gpus", "expected"),
    [
        (0, 4, 4, [0, 1, 2, 3]),
        (2, 4, 4, [2, 3, 0, 1]),
        (0, 2, 1, [0, 0]),
        (1, 4, 2, [1, 0, 1, 0]),
        (3, 1, 8, [3]),
    ],
)
def test_ranks_take_the_gpus_in_turn_and_share_them_when_there_are_too_few(
    first: int, ranks: int, gpus: int, expected: list[int]
) -> None:
    found = [gpu_of_rank(first, rank, gpus) for rank in range(ranks)]
    assert found == expected
    assert [ranks_on_gpu(gpu, first, ranks, gpus) for gpu in found] == [
        found.count(gpu) for gpu in found
    ]


def test_an_engine_on_the_cpu_takes_a_fixed_share_of_memory() -> None:
    assert open_device("cpu", ParallelConfig(2, 1)) == CPU
    assert not CPU.is_cuda
    assert CPU.cache_bytes(0.9) == 256 * 1024 * 1024
    CPU.trim()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_cuda_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"--device cuda:0.*use --device cpu"):
        open_device("cuda:0", ParallelConfig())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_has_no_gpu_says_so_and_leaves_no_process(
    tmp_path: Path, ranks: int
) -> None:
    make_model(tmp_path)
    options = EngineOptions(tmp_path, device="cuda", tensor_parallel_size=ranks)
    with pytest.raises(ConfigError, match=r"--device cuda.*use --device cpu"):
        asyncio.run(EngineClient.start(options, LocalTransportKit()))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_the_share_of_a_gpu_s_memory_is_checked(share: float) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-utilization must be a number above 0"):
        EngineOptions(Path(), gpu_memory_utilization=share)


@pytest.mark.parametrize(
    ("device", "dtype", "checkpoint_bytes", "expected"),
    [
        ("cpu", "float32", SMALL, torch.float64),
        ("cpu", "float32", LARGE, torch.float32),
        ("cpu", "bfloat16", SMALL, torch.bfloat16),
        ("cuda", "float32", SMALL, torch.float64),
        ("cuda:1", "float16", SMALL, torch.float64),
        ("cuda", "bfloat16", SMALL, torch.float64),
        ("cuda", "bfloat16", LARGE, torch.bfloat16),
    ],
)
def test_small_models_compute_in_float64_and_cache_in_their_own_format(
    device: str, dtype: str, checkpoint_bytes: int, expected: torch.dtype
) -> None:
    precision = choose_precision(EngineOptions(Path(), device=device), dtype, checkpoint_bytes)
    assert precision.compute is expected
    assert precision.weights is precision.cache is getattr(torch, dtype)


def test_arithmetic_is_as_asked_on_any_device() -> None:
    options = EngineOptions(
        Path(), device="cuda", compute_dtype="float16", kv_cache_dtype="bfloat16"
    )
    precision = choose_precision(options, "float32", SMALL)
    assert (precision.weights, precision.cache, precision.compute) == (
        torch.float32,
        torch.bfloat16,
        torch.float16,
    )


def test_a_batch_for_the_cpu_is_not_copied() -> None:
    batch = make_flat_batch([], [], block_size=16, num_blocks=1, vocab_size=1)
    assert batch.on(torch.device("cpu")) is batch


@pytest.mark.parametrize("family", ["qwen3", "mla", "window"])
def test_a_forward_pass_makes_every_tensor_where_its_inputs_are(
    tmp_path: Path, family: str
) -> None:
    """All inputs are on the CPU here. A tensor that is made without naming a device is on the meta
    device and has no content; an operation on tensors of both devices is an error.
    """
    make_model(tmp_path, family=family)
    options, config = EngineOptions(tmp_path, num_blocks=64), read_model_config(tmp_path)
    checkpoint, cpu = open_checkpoint(tmp_path), torch.device("cpu")
    precision = choose_precision(options, config.dtype, checkpoint.size_bytes)
    model = Model.build(
        config,
        load_weights(config, checkpoint, ParallelConfig(), precision, cpu),
        precision,
        SoloGroup(),
    )
    shape = plan_cache_layout(config, ParallelConfig(), options, precision.cache, 0)
    by_name = shape.layer_caches(torch.zeros(shape.size_bytes, dtype=torch.uint8))
    caches = [by_name[config.layer_name(layer)] for layer in range(config.num_layers)]
    first, second = (runs_of(options, start, 10) for start in (0, 10 * len(shape.groups)))
    slices = [
        SequenceSlice("a", tuple(range(10, 160)), 0, first, None),
        SequenceSlice("b", tuple(range(10, 20)), 0, second, GREEDY),
        SequenceSlice("b", (20,), 10, second, GREEDY),
    ]
    batch = make_flat_batch(
        slices, shape.groups, shape.block_size, shape.num_blocks, config.vocab_size
    )
    with torch.inference_mode(), torch.device("meta"):
        assert torch.empty(1).is_meta
        logits = model.forward(batch, caches)
    assert logits.device == cpu
    assert not logits.isnan().any()
