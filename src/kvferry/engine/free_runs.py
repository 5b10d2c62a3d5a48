"""Free blocks as maximal runs of adjacent ones, so that whoever needs many gets few runs: a transfer moves a run as one segment.

Runs are sorted into classes by length, [2^k, 2^(k+1)) each, so that a run that is long enough, and hardly longer than needed, is found
without a search. Small needs use up small runs and leave the long ones whole.

Pure. Adding a block and taking a run are O(1), whatever their number.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

__all__ = ["FreeExtents"]

_MAX_CANDIDATES = 8
"""Runs of the class that may or may not hold enough: so many are looked at."""


class FreeExtents:
    def __init__(self, num_blocks: int) -> None:
        """Blocks 0 to `num_blocks` - 1, as one run."""
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        # Ordered dicts forget their first entry in O(1); plain ones step over all that have left before it.
        self._classes: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_blocks.bit_length())]
        self._occupied = 0
        """Bit k: class k is not empty."""
        self._num_blocks = num_blocks
        if num_blocks:
            self._link(0, num_blocks)

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[int]:
        return (block for start, end in self._end_of.items() for block in range(start, end))

    def add(self, block: int) -> None:
        start, end = self._start_of.get(block, block), self._end_of.get(block + 1, block + 1)
        if start < block:
            self._unlink(start, block)
        if end > block + 1:
            self._unlink(block + 1, end)
        self._link(start, end)
        self._num_blocks += 1

    def take_after(self, block: int, count: int) -> range:
        """Up to `count` blocks that follow `block`, which is not free itself."""
        end = self._end_of.get(block + 1)
        return range(0) if end is None or not count else self._cut(block + 1, end, count)

    def take(self, count: int) -> list[range]:
        """`count` blocks, or all there are: one run where one is long enough, else the longest ones."""
        taken: list[range] = []
        while count and self._occupied:
            start = self._choose(count)
            taken.append(self._cut(start, self._end_of[start], count))
            count -= len(taken[-1])
        return taken

    def _choose(self, count: int) -> int:
        min_class = (count - 1).bit_length()
        found = self._occupied >> min_class << min_class
        if found:
            return next(iter(self._classes[(found & -found).bit_length() - 1]))
        if min_class and self._occupied >> (min_class - 1):
            candidates = islice(self._classes[min_class - 1], _MAX_CANDIDATES)
            for start in candidates:
                if self._end_of[start] - start >= count:
                    return start
        return next(iter(self._classes[self._occupied.bit_length() - 1]))

    def _cut(self, start: int, end: int, count: int) -> range:
        taken = range(start, min(end, start + count))
        self._unlink(start, end)
        if taken.stop < end:
            self._link(taken.stop, end)
        self._num_blocks -= len(taken)
        return taken

    def _link(self, start: int, end: int) -> None:
        self._end_of[start], self._start_of[end] = end, start
        size = (end - start).bit_length() - 1
        self._classes[size][start] = None
        self._occupied |= 1 << size

    def _unlink(self, start: int, end: int) -> None:
        del self._end_of[start], self._start_of[end]
        size = (end - start).bit_length() - 1
        del self._classes[size][start]
        if not self._classes[size]:
            self._occupied &= ~(1 << size)
