"""Transport sides for the conformance suite whose memory is on a GPU. They are module functions, so
that a spawned process can make them too.
"""

import os
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from kvferry.testing.transport_pairs import MEMORY_BYTES, Bytes, TransportSide, layout
from kvferry.transports.base import DataTransport
from kvferry.transports.cuda_ipc.transport import CudaIpcTransport
from kvferry.transports.nixl.bounce.settings import BounceSettings
from kvferry.transports.nixl.bounce.transport import BounceNixlTransport
from kvferry.transports.nixl.transport import NixlTransport
from kvferry.transports.torch_dist.channel import DistSettings
from kvferry.transports.torch_dist.transport import DistTransport
from kvferry.types import MemoryKind, Region


class DeviceBytes:
    """Device memory with the part of numpy's interface that the suite needs. Reading it copies the
    bytes to the host.
    """

    def __init__(self, size_bytes: int) -> None:
        self.tensor = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")

    @property
    def data(self) -> memoryview:
        return np.asarray(self).data

    def copy(self) -> Bytes:
        return np.asarray(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Bytes:
        torch.cuda.synchronize()
        here: Bytes = self.tensor.cpu().numpy()
        return here

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, at: Any) -> Bytes:
        part: Bytes = np.asarray(self)[at]
        return part

    def __setitem__(self, at: Any, value: Any) -> None:
        self.tensor[at] = (
            torch.from_numpy(np.array(value)).cuda() if isinstance(value, np.ndarray) else value
        )
        torch.cuda.synchronize()

    def __eq__(self, other: object) -> Any:
        return np.asarray(self) == other

    __hash__ = None  # type: ignore[assignment]


def vram_regions(address: int) -> tuple[Region, ...]:
    return tuple(replace(region, memory=MemoryKind.VRAM) for region in layout(address))


def over_device(transport: DataTransport) -> TransportSide:
    memory = DeviceBytes(MEMORY_BYTES)
    regions = vram_regions(memory.tensor.data_ptr())
    assert transport.register(regions)
    return TransportSide(transport, cast(Bytes, memory), regions, lambda: None)


def gloo_side() -> TransportSide:
    """With one GPU the transport chooses gloo by itself: NCCL refuses two members on one GPU."""
    return over_device(DistTransport("127.0.0.1", "127.0.0.1"))


def nccl_side() -> TransportSide:
    """NCCL takes the two processes for two hosts, so it does not notice that they share a GPU."""
    os.environ["NCCL_HOSTID"] = str(os.getpid())
    return over_device(DistTransport("127.0.0.1", "127.0.0.1", DistSettings(backend="nccl")))


def cuda_ipc_side() -> TransportSide:
    return over_device(CudaIpcTransport())


def nixl_side() -> TransportSide:
    return over_device(NixlTransport())


def bounce_nixl_side() -> TransportSide:
    """Segments that are not contiguous use a bounce buffer much smaller than the large region."""
    return _bounce(
        BounceSettings(
            segment_bytes=1 << 40, buffer_bytes=2 << 20, chunk_bytes=96 * 1024, min_descriptors=2
        )
    )


def roomy_bounce_nixl_side() -> TransportSide:
    """The segments go through a bounce buffer that holds half of the large region."""
    return _bounce(
        BounceSettings(
            segment_bytes=1 << 40, buffer_bytes=64 << 20, chunk_bytes=4 << 20, min_descriptors=2
        )
    )


def _bounce(settings: BounceSettings) -> TransportSide:
    return over_device(BounceNixlTransport(settings, b"the secret of these tests"))
