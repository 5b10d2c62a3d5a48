"""A region of this process's memory as numpy sees it."""

import ctypes

import numpy as np

from kvferry.errors import LocalProtocolError
from kvferry.planes.runs import Bytes
from kvferry.types import Region

__all__ = ["view_of"]


def view_of(region: Region) -> Bytes:
    """The bytes from the region's first block to its last. Valid as long as the memory is; nobody checks that."""
    if region.size_bytes <= 0:
        raise LocalProtocolError(f"region {region.name!r} is empty")
    return np.ctypeslib.as_array((ctypes.c_uint8 * region.size_bytes).from_address(region.address))
