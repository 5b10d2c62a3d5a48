"""What an embedded engine is started with. Plain data, checked on construction; flags of `kvferry serve` come from these fields."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.engine.device_names import first_gpu
from kvferry.errors import ConfigError
from kvferry.types import KVLayout

if TYPE_CHECKING:
    from kvferry.config import KVTransferConfig

__all__ = ["EngineOptions", "flag_of"]

MAX_TIMEOUT_S = 86_400
"""Event loops take no timers that are much longer."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    model: Path
    served_model_name: str = ""
    """Empty: the model path as given."""
    dtype: str = "auto"
    """Of weights and activations: auto (the checkpoint's), float32, bfloat16, float16."""
    kv_cache_dtype: str = "auto"
    """Of the cache: auto (as `dtype`), float32, bfloat16, float16, fp8 (as fp8_e4m3), fp8_e4m3, fp8_e5m2."""
    compute_dtype: str = "auto"
    """Of arithmetic. auto: float64 for small models, so that greedy tokens do not depend on batching (`precision.py`); else `dtype`."""
    device: str = "cpu"
    """cpu, cuda (as cuda:0), or cuda:N: the GPU of rank 0. Further ranks take the next ones, and share them when there are too few."""
    block_size: int = 16
    num_blocks: int = 0
    """Blocks in the cache; 0: as many as fit into `kv_cache_memory_bytes`."""
    kv_cache_memory_bytes: int | None = None
    """Of each rank. None: 256 MiB on CPUs, what `gpu_memory_utilization` leaves on GPUs."""
    gpu_memory_utilization: float = 0.9
    """The share of a GPU's memory that may be in use, by whomever, once the cache is there."""
    kv_cache_layout: KVLayout = KVLayout.HND
    cross_layer_blocks: bool = False
    """Whether all layers of a block lie together in memory, so that a transfer moves them as one segment."""
    max_model_len: int = 0
    """0: the checkpoint's own limit."""
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    tensor_parallel_size: int = 1
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    num_threads: int = 1
    """Torch threads per worker."""
    seed: int = 0
    kv_transfer: "KVTransferConfig | None" = None
    shutdown_timeout_s: float = 10.0
    """How long requests may take to finish after Ctrl-C (SIGINT)."""
    drain_timeout_s: float = 30.0
    """How long requests may take to finish, and peers to fetch what is held for them, after SIGTERM."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "num_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag_of(name)} must be at least 1, got {getattr(self, name)}")
        for name in ("num_blocks", "max_model_len", "kv_cache_memory_bytes"):
            if not (getattr(self, name) or 0) >= 0:
                raise ConfigError(f"{flag_of(name)} must not be negative, got {getattr(self, name)}")
        for name in ("shutdown_timeout_s", "drain_timeout_s"):
            if not 0 <= getattr(self, name) <= MAX_TIMEOUT_S:
                raise ConfigError(f"{flag_of(name)} must be from 0 to {MAX_TIMEOUT_S} seconds, got {getattr(self, name)}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"--gpu-memory-utilization must be more than 0 and at most 1, got {self.gpu_memory_utilization}")
        first_gpu(self.device)


def flag_of(name: str) -> str:
    """The flag of `kvferry serve` that sets an option: what a sentence for its user names."""
    renamed = {"num_blocks": "--num-gpu-blocks-override"}
    return renamed.get(name, f"--{name.removesuffix('_s').replace('_', '-')}")
