"""Which blocks peers may write now, by the number under which they were lent.

Pure. Where two threads use a table, its owner holds a lock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvferry.errors import LocalProtocolError
from kvferry.types import Region

__all__ = ["MAX_NUMBER", "LentBlocks", "LentTable", "Numbers", "check_number", "leaves_lent", "no_fence", "not_lent"]

MAX_NUMBER = (1 << 64) - 1

Numbers = npt.NDArray[np.int64]


def no_fence(plane: str) -> LocalProtocolError:
    return LocalProtocolError(f"blocks were to be lent on {plane}, which does not fence writes; this is a bug in whoever asked for it")


def not_lent(number: int) -> str:
    return f"number {number} is not lent, or no longer"


def leaves_lent(number: int) -> str:
    return f"a write leaves the blocks that were lent under number {number}"


def check_number(number: int) -> None:
    if not 0 <= number <= MAX_NUMBER:
        raise LocalProtocolError(f"{number} is not a number to write under: 0 to {MAX_NUMBER}")


@dataclass(frozen=True, eq=False)
class LentBlocks:
    """Some blocks of some regions. Their ranges are computed when a write is first compared with them: many never are."""

    regions: tuple[Region, ...]
    blocks: tuple[tuple[int, ...], ...]
    """By group."""

    def covers(self, addresses: Numbers, sizes: Numbers) -> bool:
        """Whether all runs lie in the blocks. Each has a size of at least 1, and its end is a number of 64 bits."""
        starts, ends = self._ranges
        at = np.searchsorted(starts, addresses, side="right") - 1
        return bool(len(starts)) and bool(np.all((at >= 0) & (addresses + sizes <= ends[at])))

    @cached_property
    def _ranges(self) -> tuple[Numbers, Numbers]:
        """Starts and ends, ascending; neighbours and overlapping ones as one."""
        by_group = [np.array(ids, np.int64) for ids in self.blocks]
        owned = [(region, by_group[region.group]) for region in self.regions if region.group < len(by_group)]
        first = [region.address + ids * region.stride_bytes for region, ids in owned]
        sizes = [np.full(len(ids), region.block_bytes, np.int64) for region, ids in owned]
        starts = np.concatenate([np.empty(0, np.int64), *first])
        order = np.argsort(starts, kind="stable")
        starts = starts[order]
        ends = np.maximum.accumulate(starts + np.concatenate([np.empty(0, np.int64), *sizes])[order])
        is_first = np.concatenate(([True], starts[1:] > ends[:-1]))[: len(starts)]
        is_last = np.concatenate((is_first[1:], [True]))[: len(starts)]
        return starts[is_first], ends[is_last]


@dataclass(slots=True)
class LentTable:
    regions: tuple[Region, ...]
    _lent: dict[int, LentBlocks] = field(default_factory=dict, init=False)
    _num_blocks: dict[int, int] = field(default_factory=dict, init=False)
    """By group: those that every region of it has."""

    def __post_init__(self) -> None:
        for region in self.regions:
            self._num_blocks[region.group] = min(region.num_blocks, self._num_blocks.get(region.group, region.num_blocks))

    def lend(self, number: int, blocks: Sequence[Sequence[int]]) -> None:
        check_number(number)
        if not number or number in self._lent:
            raise LocalProtocolError(f"number {number} cannot be lent: {'it means none' if not number else 'it is lent already'}")
        ids = tuple(tuple(group) for group in blocks)
        for group, num_blocks in self._num_blocks.items():
            asked = ids[group] if group < len(ids) else ()
            if asked and not 0 <= min(asked) <= max(asked) < num_blocks:
                raise LocalProtocolError(f"blocks {min(asked)} to {max(asked)} of group {group} were to be lent; it has {num_blocks}")
        self._lent[number] = LentBlocks(self.regions, ids)

    def get(self, number: int) -> LentBlocks | None:
        return self._lent.get(number)

    def remove(self, number: int) -> None:
        self._lent.pop(number, None)

    def clear(self) -> None:
        self._lent.clear()
