"""Copies to where peers see blocks, in turn: of two that have a block in common the later waits until the earlier has ended. Pure.

An engine that preempts a request uses its blocks again at once, while a copy of them may be under way; the copy that the next owner asks
for must not be overtaken by it. Blocks are known by their number alone, whatever their group: groups may share memory.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

__all__ = ["CopyTurns"]


@dataclass(slots=True)
class CopyTurns:
    """Copies stand in line at each of their blocks; one that is first in all its lines is under way."""

    _blocks: dict[int, frozenset[int]] = field(default_factory=dict, init=False)
    """By copy."""
    _lines: dict[int, list[int]] = field(default_factory=dict, init=False)
    """By block, none of them empty."""
    _behind: dict[int, int] = field(default_factory=dict, init=False)
    """By copy, in how many lines it is not the first."""

    def __len__(self) -> int:
        return len(self._blocks)

    def join(self, copy: int, blocks: Collection[int]) -> bool:
        """Whether it may begin at once; if not, `leave` of another says when."""
        self._blocks[copy] = frozenset(blocks)
        self._behind[copy] = 0
        for block in self._blocks[copy]:
            line = self._lines.setdefault(block, [])
            self._behind[copy] += bool(line)
            line.append(copy)
        return self.is_under_way(copy)

    def leave(self, copy: int) -> list[int]:
        """It has ended, or is not wanted before it has begun. Returns those that may begin now."""
        begun = []
        for block in self._blocks.pop(copy):
            line = self._lines[block]
            was_first = line[0] == copy
            line.remove(copy)
            if not line:
                del self._lines[block]
            elif was_first:
                self._behind[line[0]] -= 1
                if self.is_under_way(line[0]):
                    begun.append(line[0])
        del self._behind[copy]
        return sorted(begun)

    def is_under_way(self, copy: int) -> bool:
        return not self._behind[copy]

    def has_any(self, blocks: Collection[int]) -> bool:
        """Whether one of these blocks is being copied, or will be."""
        return not self._lines.keys().isdisjoint(blocks)
