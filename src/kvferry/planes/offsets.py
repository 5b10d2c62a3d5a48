"""Arithmetic over all offsets of a transfer at once: by a compiled loop, or by numpy where kvferry was installed without a compiler.

Pure. There may be hundreds of thousands of them, or some dozens for each of a hundred regions: both shall cost little.
"""

import numpy as np

from kvferry.planes.runs import Offsets

__all__ = ["add_all", "are_within"]

try:
    from kvferry.planes import _copy
except ImportError:
    _copy = None  # type: ignore[assignment]


def are_within(offsets: Offsets, last: int) -> bool:
    """Whether every one of them is from 0 to `last`."""
    if _copy is not None and offsets.flags.c_contiguous and offsets.dtype == np.int64:
        return _copy.are_within(offsets, last)
    return not len(offsets) or bool(int(offsets.min()) >= 0 and int(offsets.max()) <= last)


def add_all(table: Offsets, first: int, offsets: Offsets, base: int) -> int:
    """Write `offsets + base` into the table from `first` on. All that was written, or-ed: what its lowest bits say of every one."""
    if _copy is not None and offsets.flags.c_contiguous and offsets.dtype == np.int64:
        return _copy.add_all(table, first, offsets, base)
    written = table[first : first + len(offsets)]
    np.add(offsets, base, out=written)
    return int(np.bitwise_or.reduce(written)) if len(offsets) else 0
