"""Arithmetic over all offsets of a transfer at once: by a native function, or by numpy where kvferry was installed without a compiler.

Pure. There may be hundreds of thousands of them, or some dozens for each of a hundred regions: both shall cost little.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kvferry.planes.compiled import native_or
from kvferry.planes.runs import Offsets

__all__ = ["PLACE_NUMBERS", "are_within", "put_all", "put_places"]

PLACE_NUMBERS = 5
"""What a table says of each place (`copy_table.py`). The kernel and the native function count by it too."""


def _are_within(offsets: Offsets, last: int) -> bool:
    return not len(offsets) or bool(int(offsets.min()) >= 0 and int(offsets.max()) <= last)


def _put_all(table: Offsets, first: int, offsets: Offsets, last: int) -> int:
    if not _are_within(offsets, last):
        raise IndexError("an offset leaves its region")
    table[first : first + len(offsets)] = offsets
    return int(np.bitwise_or.reduce(offsets)) if len(offsets) else 0


def _put_places(table: Offsets, first: int, sources: Sequence[int], targets: Sequence[int], rest: tuple[int, int, int]) -> int:
    places = table[first : first + PLACE_NUMBERS * len(sources)].reshape(-1, PLACE_NUMBERS)
    places[:, 0], places[:, 1], places[:, 2:] = sources, targets, rest
    return int(np.bitwise_or.reduce(places[:, :2], axis=None))


_within: Callable[[Offsets, int], bool] = native_or("are_within", _are_within)
_put: Callable[[Offsets, int, Offsets, int], int] = native_or("put_all", _put_all)
put_places: Callable[[Offsets, int, Sequence[int], Sequence[int], tuple[int, int, int]], int] = native_or("put_places", _put_places)
"""For each place write its numbers into the table from `first` on: its source, its target, and the rest. All sources and targets, or-ed."""


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
