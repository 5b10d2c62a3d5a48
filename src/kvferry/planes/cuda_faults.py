"""Bytes of a CUDA device put into the wrong places, for `FaultyDataPlane`. Waits for the device: nobody sees the right ones afterwards."""

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["corrupt"]


@dataclass(frozen=True, slots=True)
class _Bytes:
    """As CUDA's array interface wants them."""

    address: int
    size_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size_bytes,), "strides": None, "typestr": "|u1", "data": (self.address, False), "version": 3}


def corrupt(device: int, address: int, size_bytes: int, shift: int) -> None:
    """Rotate these bytes by `shift`; where that changes nothing, change each."""
    with torch.cuda.device(device):
        piece = torch.as_tensor(_Bytes(address, size_bytes), device=torch.device("cuda", device))
        moved = piece.roll(shift)
        piece.copy_(piece ^ 1 if torch.equal(moved, piece) else moved)
        torch.cuda.synchronize()
