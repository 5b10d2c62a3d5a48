"""Copies to where peers see blocks, in turn: of two that have a block in common the later waits until the earlier has ended. Pure.

An engine that preempts a request uses its blocks again at once, while a copy of them may be under way; the copy that the next owner asks
for must not be overtaken by it. Blocks are known by their number alone, whatever their group: groups may share memory.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

__all__ = ["HostCopyQueue"]


@dataclass(slots=True)
class HostCopyQueue:
    """Copies stand in line at each of their blocks; one that is first in all its lines is under way."""

    _blocks: dict[int, frozenset[int]] = field(default_factory=dict, init=False)
    """By copy."""
    _queues: dict[int, list[int]] = field(default_factory=dict, init=False)
    """By block, none of them empty."""
    _num_ahead: dict[int, int] = field(default_factory=dict, init=False)
    """By copy, in how many lines it is not the first."""

    def __len__(self) -> int:
        return len(self._blocks)

    def join(self, copy: int, blocks: Collection[int]) -> bool:
        """Whether it may begin at once; if not, `leave` of another says when."""
        self._blocks[copy] = frozenset(blocks)
        self._num_ahead[copy] = 0
        for block in self._blocks[copy]:
            queue = self._queues.setdefault(block, [])
            self._num_ahead[copy] += bool(queue)
            queue.append(copy)
        return self.is_running(copy)

    def leave(self, copy: int) -> list[int]:
        """It has ended, or is not wanted before it has begun. Returns those that may begin now."""
        begun = []
        for block in self._blocks.pop(copy):
            queue = self._queues[block]
            was_first = queue[0] == copy
            queue.remove(copy)
            if not queue:
                del self._queues[block]
            elif was_first:
                self._num_ahead[queue[0]] -= 1
                if self.is_running(queue[0]):
                    begun.append(queue[0])
        del self._num_ahead[copy]
        return sorted(begun)

    def is_running(self, copy: int) -> bool:
        return not self._num_ahead[copy]

    def has_any(self, blocks: Collection[int]) -> bool:
        """Whether one of these blocks is being copied, or will be."""
        return not self._queues.keys().isdisjoint(blocks)
