"""The device of one tensor-parallel rank: opened and measured at start, trimmed at the end.

CUDA is first touched in `open_device`, so that only processes that compute have a CUDA context. One
thread of a worker process makes every call.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvferry.connectors.contract import ParallelConfig
from kvferry.engine.options import first_gpu, gpu_of_rank, ranks_on_gpu
from kvferry.errors import ConfigError

_log = logging.getLogger(__name__)

CPU_CACHE_BYTES = 256 * 1024 * 1024
"""Size of the KV cache on CPUs, because no option gives the engine's share of the host memory."""


@dataclass(frozen=True, slots=True)
class RankDevice:
    """The device that one rank computes on."""

    torch_device: torch.device
    num_sharing: int = 1
    """Number of ranks of this engine that compute on the device, including this rank."""
    has_own_gpus: bool = False
    """True if every rank of this engine has its own GPU; NCCL can join the ranks only then."""

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    def cache_bytes(self, utilization: float) -> int:
        """Return the largest size of the KV cache, once all ranks have loaded their weights.

        On a GPU, the size is this rank's share of the memory that `utilization` leaves after the
        use of all processes. Raises ConfigError when no memory is left.
        """
        if not self.is_cuda:
            return CPU_CACHE_BYTES
        free, total = torch.cuda.mem_get_info(self.torch_device)
        left = int(total * utilization) - (total - free)
        if left <= 0:
            raise ConfigError(
                f"{self.torch_device} has {free} of {total} bytes free, and "
                f"--gpu-memory-utilization {utilization:g} leaves none of them for the KV cache; "
                "stop other processes on this GPU, raise the share, or set --kv-cache-memory-bytes"
            )
        return left // self.num_sharing

    @contextmanager
    def room_for(self, what: str) -> Iterator[None]:
        """Raise ConfigError when the device has too little memory for `what`."""
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            free, total = torch.cuda.mem_get_info(self.torch_device)
            raise ConfigError(
                f"{self.torch_device} has no room for {what}: {free} of {total} bytes are free; "
                "stop other processes on this GPU, choose another --device, or set a smaller "
                "--kv-cache-memory-bytes"
            ) from None

    @property
    def held_bytes(self) -> int:
        """Device memory reserved by torch for this process, in use or cached; 0 on the CPU."""
        return torch.cuda.memory_reserved(self.torch_device) if self.is_cuda else 0

    @property
    def used_bytes(self) -> int:
        """Device memory that all processes together use; 0 on the CPU."""
        if not self.is_cuda:
            return 0
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return total - free

    @property
    def spare_bytes(self) -> int:
        """Device memory that torch has reserved but does not use."""
        return (
            self.held_bytes - torch.cuda.memory_allocated(self.torch_device) if self.is_cuda else 0
        )

    def trim(self) -> None:
        """Return unused memory to the device; waits for the device."""
        if self.is_cuda:
            torch.cuda.empty_cache()


CPU = RankDevice(torch.device("cpu"))


def open_device(device: str, parallel: ParallelConfig) -> RankDevice:
    """Return the device of this rank and make it current for this thread.

    Raises ConfigError when the device does not exist or does not work.
    """
    first = first_gpu(device)
    if first is None:
        return CPU
    num_gpus = _count_gpus(device)
    if first >= num_gpus:
        raise ConfigError(
            f"--device {device}: this machine has no such GPU, the last is cuda:{num_gpus - 1}"
        )
    gpu = gpu_of_rank(first, parallel.tp_rank, num_gpus)
    found = torch.device("cuda", gpu)
    try:
        torch.cuda.set_device(found)
        torch.zeros(1, device=found).add_(1).item()
    # RuntimeError covers everything that CUDA raises: the GPU is reserved by another process,
    # broken, or too old for this torch.
    except RuntimeError as error:
        raise ConfigError(
            f"--device {device}: {found} cannot be used: {_first_line(error)}"
        ) from None
    num_sharing = ranks_on_gpu(gpu, first, parallel.tp_size, num_gpus)
    if num_sharing > 1:
        _log.warning(
            "rank %d shares %s with %d other ranks of this engine",
            parallel.tp_rank,
            found,
            num_sharing - 1,
        )
    return RankDevice(found, num_sharing, parallel.tp_size <= num_gpus)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small host tensor to the device without waiting.

    The copy uses pinned memory and keeps the order of the current stream.
    """
    if device.type == "cpu" or not tensor.numel():
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def _count_gpus(device: str) -> int:
    if torch.version.cuda is None:
        raise ConfigError(
            f"--device {device} needs a torch that was built for CUDA, but {torch.__version__} "
            "was not; install one, or use --device cpu"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ConfigError(
            f"--device {device}: torch finds no CUDA device here; `kvferry doctor` shows what it "
            "finds; or use --device cpu"
        )
    return count


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().partition("\n")[0]
