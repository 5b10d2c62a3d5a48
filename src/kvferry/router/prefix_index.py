"""Which instances have lately been given a prompt that begins like this one.

A prompt is known by marks of its beginnings: a chain of hashes over blocks of its raw JSON text, since the next turn of a conversation
writes the last one's text again, but for the closing bracket, and goes on. Blocks grow with the distance from the start (an eighth of
it), so that a long prompt has few. Two prompts with one mark are routed alike, no more: engines compare tokens themselves, so a collision
costs a cache miss at most. Python's own hash is keyed per process, which denies collisions to whoever might want them, and is the fastest
at hand.

Pure. One thread.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from kvferry.router.members import Member

__all__ = ["PrefixIndex", "marks_of"]

_SMALLEST_BLOCK = 256
_LOOKED_AT_BYTES = 32 * 1024
"""Prompts that agree so far share the most anyway: one instance is right for all of them. Bounds the time that a huge prompt takes."""
_HOLDERS = 4


def _boundaries() -> Iterator[int]:
    at = 0
    while at <= _LOOKED_AT_BYTES:
        yield at
        at += max(_SMALLEST_BLOCK, at // 8 // _SMALLEST_BLOCK * _SMALLEST_BLOCK)


_BLOCKS = tuple(pairwise(_boundaries()))


def marks_of(prompt: bytes | memoryview) -> list[int]:
    """One per whole block, shortest beginning first. Text after the last whole block has none."""
    size, mark, marks = len(prompt), 0, []
    for start, end in _BLOCKS:
        if end > size:
            break
        mark = hash((mark, bytes(prompt[start:end])))
        marks.append(mark)
    return marks


@dataclass(slots=True)
class PrefixIndex:
    """The marks used last, each with the few members that were given it last."""

    max_marks: int = 65536
    _holders: OrderedDict[int, tuple[tuple[Member, int], ...]] = field(default_factory=OrderedDict, init=False)

    def __len__(self) -> int:
        return len(self._holders)

    def holders(self, marks: list[int]) -> Iterator[list[Member]]:
        """Longest beginning first. A member that has restarted since holds nothing."""
        for mark in reversed(marks):
            held = self._holders.get(mark)
            if held:
                yield [member for member, life in held if member.life == life]

    def add(self, marks: list[int], member: Member) -> None:
        """The longest is the first to be forgotten: what many share is kept."""
        holder = (member, member.life)
        for mark in reversed(marks):
            held = self._holders.get(mark, ())
            if not held or held[0] != holder:
                self._holders[mark] = (holder, *(other for other in held if other[0] is not member))[:_HOLDERS]
            self._holders.move_to_end(mark)
        while len(self._holders) > self.max_marks:
            self._holders.popitem(last=False)
