"""The options that an engine is started with, and the GPU of each tensor-parallel rank.

Pure and without torch: the API process imports this module too, and must not touch a GPU.
`EngineOptions` is checked on construction; the flags of `kvferry serve` come from its fields.
"""

import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from kvferry.config import KVTransferConfig
from kvferry.config.fields import Count, Natural, Timeout, check_fields, span
from kvferry.errors import ConfigError
from kvferry.logs import LogSettings
from kvferry.types import KVLayout

if TYPE_CHECKING:
    from kvferry.config import SideChannelConfig
    from kvferry.transports.base import TransportKit


_GPU = re.compile(r"cuda(?::([0-9]{1,4}))?")


def first_gpu(device: str) -> int | None:
    """Return the GPU of rank 0, or None for the CPU; ConfigError when `device` names neither."""
    if device == "cpu":
        return None
    match = _GPU.fullmatch(device)
    if match is None:
        raise ConfigError(f"--device must be cpu, cuda or cuda:N, got {device[:80]!a}")
    return int(match[1] or 0)


def gpu_of_rank(first: int, rank: int, num_gpus: int) -> int:
    """Assign GPUs to ranks round-robin, starting with GPU `first`."""
    return (first + rank) % num_gpus


def ranks_on_gpu(gpu: int, first: int, tp_size: int, num_gpus: int) -> int:
    """Return how many ranks of an engine compute on `gpu`."""
    return sum(gpu_of_rank(first, rank, num_gpus) == gpu for rank in range(tp_size))


# -- options --
# The settings of one engine.


ProcessCount = Annotated[int, span("a whole number", 1, 256)]
"""How many processes to start: a typo must not start a million."""
MemoryShare = Annotated[float, Meta(gt=0, le=1, description="a number above 0 and at most 1")]
Seed = Annotated[
    int, Meta(ge=-(2**63), le=2**63 - 1, description="a whole number of at most 64 bits")
]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of an embedded engine; the flags of `kvferry serve` come from these fields."""

    model: Path
    served_model_name: str = ""
    """Model name in the API; empty means the model path as given."""
    dtype: str = "auto"
    """Format of weights and activations: auto (the checkpoint's), float32, bfloat16, float16."""
    kv_cache_dtype: str = "auto"
    """Format of the KV cache.

    auto (as `dtype`), float32, bfloat16, float16, fp8 (as fp8_e4m3), fp8_e4m3, fp8_e5m2.
    """
    compute_dtype: str = "auto"
    """Format of the arithmetic.

    auto selects float64 for small models, so that greedy tokens do not depend on batching (see
    `engine/model/weights.py`), and `dtype` for larger models.
    """
    device: str = "cpu"
    """cpu, cuda (as cuda:0), or cuda:N, the GPU of rank 0.

    Further ranks use the following GPUs, and share GPUs if there are too few.
    """
    block_size: Count = 16
    num_blocks: Natural = 0
    """Number of blocks in the cache; 0 means as many as fit into `kv_cache_memory_bytes`."""
    kv_cache_memory_bytes: Natural | None = None
    """Cache size per rank.

    None means 256 MiB on CPUs, and the memory that `gpu_memory_utilization` leaves on GPUs.
    """
    gpu_memory_utilization: MemoryShare = 0.9
    """The share of a GPU's memory that all processes may use, with the cache allocated."""
    kv_cache_layout: KVLayout = KVLayout.HND
    cross_layer_blocks: bool = False
    """Whether all layers of a block are contiguous, so that a transfer moves one segment."""
    max_model_len: Natural = 0
    """Limit on prompt and output tokens; 0 means the checkpoint's own limit."""
    max_num_seqs: Count = 128
    max_num_batched_tokens: Count = 2048
    tensor_parallel_size: ProcessCount = 1
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    num_threads: Count = 1
    """Number of torch threads per worker."""
    seed: Seed = 0
    kv_transfer: KVTransferConfig | None = None
    shutdown_timeout_s: Timeout = 10.0
    """How long requests may take to finish after Ctrl-C (SIGINT)."""
    drain_timeout_s: Timeout = 30.0
    """How long requests may take to finish, and peers to fetch leased blocks, after SIGTERM."""
    otlp_traces_endpoint: str = ""
    """The collector's URL for spans; empty: no spans are written."""

    def __post_init__(self) -> None:
        check_fields(self, flag_of)
        first_gpu(self.device)


def flag_of(name: str) -> str:
    """Return the flag of `kvferry serve` that sets an option, for error messages."""
    renamed = {"num_blocks": "--num-gpu-blocks-override"}
    return renamed.get(name, f"--{name.removesuffix('_s').replace('_', '-')}")


# -- setup --
# Everything that the processes of an engine are started with.


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The options, the transport kit and the incarnation of an engine.

    Picklable plain data; the core and every tensor-parallel rank receive the same setup.
    """

    options: EngineOptions
    kit: "TransportKit"
    secret: bytes = field(default=b"", repr=False)
    """The cluster secret; empty without a connector."""
    side_channel: "SideChannelConfig | None" = None
    epoch: str = field(default_factory=lambda: secrets.token_hex(8))
    """The id of this incarnation, created once per start: one setup starts one engine."""
    logs: LogSettings = field(default_factory=lambda: LogSettings("warning"))
    """Log settings of the core and the ranks."""
    rank_timeout_s: float = 60.0
    """How long the core waits for an answer of a rank."""
