"""Which device an engine computes on: what `--device` says, and the GPU of each tensor-parallel rank.

Pure and without torch: the API process reads it too, and must not touch a GPU.
"""

import re

from kvferry.errors import ConfigError

__all__ = ["first_gpu", "gpu_of_rank", "ranks_on_gpu"]

_GPU = re.compile(r"cuda(?::([0-9]{1,4}))?")


def first_gpu(device: str) -> int | None:
    """The GPU of rank 0; None: the engine computes on CPUs. ConfigError when `device` is neither."""
    if device == "cpu":
        return None
    match = _GPU.fullmatch(device)
    if match is None:
        raise ConfigError(f"--device must be cpu, cuda or cuda:N, got {device[:80]!a}")
    return int(match[1] or 0)


def gpu_of_rank(first: int, rank: int, num_gpus: int) -> int:
    """Ranks take the GPUs in turn, from `first` on; the last is followed by GPU 0."""
    return (first + rank) % num_gpus


def ranks_on_gpu(gpu: int, first: int, tp_size: int, num_gpus: int) -> int:
    """How many of an engine's ranks compute there."""
    return sum(gpu_of_rank(first, rank, num_gpus) == gpu for rank in range(tp_size))
