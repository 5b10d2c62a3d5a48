"""Sides for the conformance suite whose memory is on a GPU; module functions, so that a spawned process can make them too."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from kvferry.planes.cuda_ipc import CudaIpcDataPlane
from kvferry.planes.nixl import NixlDataPlane
from kvferry.planes.staged_nixl import StagedNixlDataPlane, StagingSettings
from kvferry.ports.data import DataPlane
from kvferry.testing.plane_sides import MEMORY_BYTES, Bytes, Side, layout
from kvferry.types import MemoryKind, Region

__all__ = ["DeviceBytes", "cuda_ipc_side", "nixl_side", "over_device", "roomy_staged_nixl_side", "staged_nixl_side", "vram_regions"]


class DeviceBytes:
    """A stretch of device memory that looks like numpy's as far as the suite needs it: what is read is brought here first."""

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
        self.tensor[at] = torch.from_numpy(np.array(value)).cuda() if isinstance(value, np.ndarray) else value
        torch.cuda.synchronize()

    def __eq__(self, other: object) -> Any:
        return np.asarray(self) == other

    __hash__ = None  # type: ignore[assignment]


def vram_regions(address: int) -> tuple[Region, ...]:
    return tuple(replace(region, memory=MemoryKind.VRAM) for region in layout(address))


def over_device(plane: DataPlane) -> Side:
    memory = DeviceBytes(MEMORY_BYTES)
    regions = vram_regions(memory.tensor.data_ptr())
    assert plane.register(regions)
    return Side(plane, cast(Bytes, memory), regions, lambda: None)


def cuda_ipc_side() -> Side:
    return over_device(CudaIpcDataPlane())


def nixl_side() -> Side:
    return over_device(NixlDataPlane())


def staged_nixl_side() -> Side:
    """Everything is staged that is more than one run, through a ring that is much smaller than the large region."""
    return _staged(StagingSettings(piece_bytes=1 << 40, ring_bytes=2 << 20, chunk_bytes=96 * 1024, min_runs=2))


def roomy_staged_nixl_side() -> Side:
    """Through a ring that holds half of the large region."""
    return _staged(StagingSettings(piece_bytes=1 << 40, ring_bytes=64 << 20, chunk_bytes=4 << 20, min_runs=2))


def _staged(settings: StagingSettings) -> Side:
    return over_device(StagedNixlDataPlane(NixlDataPlane(), settings, b"the secret of these tests"))
