"""This process's memory, by region or by address."""

import ctypes
from collections.abc import Iterable

import numpy as np

from kvferry.errors import LocalProtocolError
from kvferry.planes.runs import Bytes
from kvferry.types import Region

__all__ = ["AddressedMemory", "region_view"]


class AddressedMemory:
    """A stretch of this process's memory, by address. Whoever asks has checked that a range may be touched: there may be gaps."""

    def __init__(self, first: int, size_bytes: int) -> None:
        self._first = first
        self._bytes = memoryview((ctypes.c_uint8 * size_bytes).from_address(first)).cast("B")

    def views(self, addresses: Iterable[int], sizes: Iterable[int]) -> list[memoryview]:
        memory, first = self._bytes, self._first
        return [memory[address - first : address - first + size] for address, size in zip(addresses, sizes, strict=True)]


def region_view(region: Region) -> Bytes:
    """The bytes from the region's first block to its last. Valid as long as the memory is; nobody checks that."""
    if region.size_bytes <= 0:
        raise LocalProtocolError(f"region {region.name!r} is empty")
    return np.ctypeslib.as_array((ctypes.c_uint8 * region.size_bytes).from_address(region.address))
