"""Arithmetic over all offsets of a transfer at once: by a compiled loop, or by numpy where kvferry was installed without a compiler.

Pure. There may be hundreds of thousands of them, or some dozens for each of a hundred regions: both shall cost little.
"""

from collections.abc import Callable

import numpy as np

from kvferry.planes.runs import Offsets

__all__ = ["are_within", "put_all"]


def _are_within(offsets: Offsets, last: int) -> bool:
    return not len(offsets) or bool(int(offsets.min()) >= 0 and int(offsets.max()) <= last)


def _put_all(table: Offsets, first: int, offsets: Offsets, last: int) -> int:
    if not _are_within(offsets, last):
        raise IndexError("an offset leaves its region")
    table[first : first + len(offsets)] = offsets
    return int(np.bitwise_or.reduce(offsets)) if len(offsets) else 0


_within: Callable[[Offsets, int], bool]
_put: Callable[[Offsets, int, Offsets, int], int]
try:
    from kvferry.planes._copy import are_within as _within
    from kvferry.planes._copy import put_all as _put
except ImportError:
    _within, _put = _are_within, _put_all


def are_within(offsets: Offsets, last: int) -> bool:
    """Whether every one of them is from 0 to `last`."""
    try:
        return _within(offsets, last)
    except (BufferError, ValueError):  # they do not lie side by side
        return _are_within(offsets, last)


def put_all(table: Offsets, first: int, offsets: Offsets, last: int) -> int:
    """Write them into the table from `first` on. All of them, or-ed: what its lowest bits say of every one. IndexError unless every one is
    from 0 to `last`; then what was written is worthless."""
    try:
        return _put(table, first, offsets, last)
    except (BufferError, ValueError):  # they do not lie side by side
        return _put_all(table, first, offsets, last)
