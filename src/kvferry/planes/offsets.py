"""Arithmetic over all offsets of a transfer at once: by a compiled loop, or by numpy where kvferry was installed without a compiler.

Pure. There may be hundreds of thousands of them, or some dozens for each of a hundred regions: both shall cost little.
"""

from collections.abc import Callable

import numpy as np

from kvferry.planes.runs import Offsets

__all__ = ["add_all", "are_within"]


def _are_within(offsets: Offsets, last: int) -> bool:
    return not len(offsets) or bool(int(offsets.min()) >= 0 and int(offsets.max()) <= last)


def _add_all(table: Offsets, first: int, offsets: Offsets, base: int, last: int) -> int:
    if not _are_within(offsets, last):
        raise IndexError("an offset leaves its region")
    written = table[first : first + len(offsets)]
    np.add(offsets, base, out=written)
    return int(np.bitwise_or.reduce(written)) if len(offsets) else 0


_within: Callable[[Offsets, int], bool]
_add: Callable[[Offsets, int, Offsets, int, int], int]
try:
    from kvferry.planes._copy import add_all as _add
    from kvferry.planes._copy import are_within as _within
except ImportError:
    _within, _add = _are_within, _add_all


def are_within(offsets: Offsets, last: int) -> bool:
    """Whether every one of them is from 0 to `last`."""
    try:
        return _within(offsets, last)
    except (BufferError, ValueError):  # they do not lie side by side
        return _are_within(offsets, last)


def add_all(table: Offsets, first: int, offsets: Offsets, base: int, last: int) -> int:
    """Write `offsets + base` into the table from `first` on. All that was written, or-ed: what its lowest bits say of every one.
    IndexError unless every offset is from 0 to `last`; then what was written is worthless."""
    try:
        return _add(table, first, offsets, base, last)
    except (BufferError, ValueError):  # they do not lie side by side
        return _add_all(table, first, offsets, base, last)
