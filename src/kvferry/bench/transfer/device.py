"""GPU memory for `kvferry bench transfer`; imported only for a GPU, because the module imports
torch.

Each side allocates twice its size. Transports serve the first half. Raw NIXL writes from and to the
second half, and the device's own copy reads from the second half. Tests run the same code with
torch on the CPU.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.bench.transfer.memory import BlockChecksums, Memory, MemorySource
from kvferry.errors import ConfigError, KVFerryError
from kvferry.transports.base import DataTransport
from kvferry.transports.copy.gather import Timing
from kvferry.transports.cuda_ipc.transport import CudaIpcTransport
from kvferry.transports.nixl.bounce.settings import BounceSettings
from kvferry.transports.nixl.bounce.transport import BounceNixlTransport
from kvferry.transports.nixl.transport import NetworkReach, NixlTransport
from kvferry.types import MemoryKind

MAX_SHARE = 0.9
"""The share of the free device memory that the benchmark may use."""
COPY_S = 20.0
ALWAYS_BOUNCE = BounceSettings(segment_bytes=1 << 40, min_descriptors=1)
KEY = b"both sides of a benchmark have the same secret"


@dataclass(frozen=True, slots=True)
class DeviceAllocator:
    """Allocates memory on one GPU; implements `MemoryAllocator`."""

    index: int | None
    """The number of the GPU; None: the CPU, with the same code."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.index is None else torch.device("cuda", self.index)

    def check_device(self) -> None:
        """Raise ConfigError if torch cannot use this GPU."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.index is not None and self.index >= count:
            found = "torch sees none" if count else "torch sees {count}"
            raise ConfigError(
                f"--device cuda:{self.index} is not a GPU that torch can use ({found}); use "
                "--device cpu, or see `kvferry doctor`"
            )

    def allocate(self, size_bytes: int) -> Memory:
        return DeviceBenchMemory(self.device, size_bytes)

    def check_capacity(self, size_bytes: int) -> None:
        if (
            self.index is not None
            and 4 * size_bytes > torch.cuda.mem_get_info(self.index)[0] * MAX_SHARE
        ):
            raise ConfigError(f"GPU {self.index} does not have four times {size_bytes} bytes free")

    def facts(self) -> Mapping[str, Any]:
        name = "the processor" if self.index is None else torch.cuda.get_device_name(self.index)
        settings = {
            key: value for key, value in sorted(os.environ.items()) if key.startswith("UCX_")
        }
        return {
            "copied_by": "torch",
            "device": name,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "ucx_settings": settings,
        }


class DeviceBenchMemory:
    """Memory of one side on a device; implements `Memory`."""

    serve_interval_s = 0.0
    move_s = 20.0
    slow_transports = frozenset({"nixl"})

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        is_gpu = device.type == "cuda"
        if is_gpu:
            torch.cuda.set_device(
                device
            )  # transports and NIXL use the CUDA context that is current here
        self.kind = MemoryKind.VRAM if is_gpu else MemoryKind.DRAM
        self.device = device.index or 0
        self._tensors: list[torch.Tensor] = [
            torch.zeros(2 * size_bytes, dtype=torch.uint8, device=device)
        ]
        self._size_bytes = size_bytes
        self._finish()

    @property
    def address(self) -> int:
        return self._tensors[0].data_ptr()

    @property
    def spare_address(self) -> int | None:
        return self.address + self._size_bytes

    def transports(self) -> Mapping[str, DataTransport]:
        here = NetworkReach.THIS_HOST
        return {
            "cuda_ipc": CudaIpcTransport(),
            "nixl": NixlTransport(reach=here),
            "nixl bounce": BounceNixlTransport(ALWAYS_BOUNCE, KEY, reach=here),
        }

    def source(self) -> MemorySource | None:
        return None

    def open_source(self, source: MemorySource | None) -> None:
        """Fill the spare half with the same bytes as the producer's memory: the device copies
        locally.
        """
        self._number(self._tensors[0][self._size_bytes :])

    def fill(self) -> None:
        self._number(self._tensors[0][: self._size_bytes])

    def overwrite(self) -> None:
        self._tensors[0][: self._size_bytes].zero_()
        self._finish()

    def copy(self, size_bytes: int) -> None:
        whole = self._tensors[0]
        whole[:size_bytes].copy_(whole[self._size_bytes : self._size_bytes + size_bytes])
        self._finish()

    def block_checksums(self, count: int) -> BlockChecksums:
        rows = self._tensors[0][: self._size_bytes].view(torch.int64).reshape(count, -1)
        first, last, sums = (
            part.cpu().numpy().view("uint64")
            for part in (rows[:, 0].contiguous(), rows[:, -1].contiguous(), rows.sum(dim=1))
        )
        return BlockChecksums(first, last, sums)

    def set_timing(self, transport: DataTransport, timing: Timing) -> None:
        if isinstance(transport, CudaIpcTransport):
            transport.set_timing(timing)

    def close(self) -> None:
        self._finish()
        self._tensors.clear()

    def _number(self, part: torch.Tensor) -> None:
        words = part.view(torch.int64)
        torch.arange(1, len(words) + 1, out=words)
        self._finish()

    def _finish(self) -> None:
        """Wait until the device has finished its work.

        Polls without pause, because a blocking wait of the driver may sleep and would add to the
        time.
        """
        if self.kind is MemoryKind.DRAM:
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        deadline = time.monotonic() + COPY_S
        while not event.query():
            if time.monotonic() > deadline:
                raise KVFerryError(
                    f"the GPU did not finish a copy within {COPY_S:.0f} s; is another process "
                    "using it?"
                )
