"""Which instances have lately been given a prompt that begins like this one.

A prompt is known by marks of its beginnings: a chain of hashes over its raw JSON text, since the next turn of a conversation writes the
last one's text again, but for the closing bracket, and goes on. Marks lie closer at the start (512 bytes) than far out (a sixth of the
distance), and far out only the text before each mark is looked at, so that a long prompt has few marks and costs little. Two prompts with
one mark are routed alike, no more: engines compare tokens themselves, so a collision costs a cache miss at most. Python's own hash is keyed
per process, which denies collisions to whoever might want them, and is the fastest at hand.

Pure. One thread.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.router.members import Member

__all__ = ["PrefixIndex", "hash_prefixes"]

_STEP_BYTES = 512
_DENSE_BYTES = 4 * 1024
_SAMPLE_BYTES = 256
_LOOKED_AT_BYTES = 2 * 1024 * 1024
_HOLDERS = 4

_Holder = tuple[Member, int]


def _hashed_ranges() -> Iterator[tuple[int, int]]:
    """Where the text of each mark begins and ends."""
    start = 0
    while start < _LOOKED_AT_BYTES:
        end = start + max(_STEP_BYTES, start // 6)
        yield (start if end <= _DENSE_BYTES else end - _SAMPLE_BYTES), end
        start = end


_SPANS = tuple(_hashed_ranges())


def hash_prefixes(prompt: bytes | memoryview) -> list[int]:
    """One per span that is full, shortest beginning first."""
    size, prefix_hash, prefix_hashes = len(prompt), 0, []
    for start, end in _SPANS:
        if end > size:
            break
        prefix_hash = hash((prefix_hash, bytes(prompt[start:end])))
        prefix_hashes.append(prefix_hash)
    return prefix_hashes


@dataclass(slots=True)
class PrefixIndex:
    """The marks used last, each with the few members that were given it last.

    Two generations: when the young one is full it becomes the old one, and what was in the old one and not used since is forgotten. That
    is a coarser order than least recently used, at a fraction of the time.
    """

    max_hashes: int = 65536
    _young: dict[int, tuple[_Holder, ...]] = field(default_factory=dict, init=False)
    _old: dict[int, tuple[_Holder, ...]] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def holders(self, prefix_hashes: list[int]) -> Iterator[list[Member]]:
        """Longest beginning first. A member that has restarted since holds nothing."""
        young, old = self._young, self._old
        for prefix_hash in reversed(prefix_hashes):
            held = young.get(prefix_hash) or old.get(prefix_hash)
            if held is not None:
                yield [member for member, incarnation in held if member.incarnation == incarnation]

    def add(self, prefix_hashes: list[int], member: Member) -> None:
        if len(self._young) + len(prefix_hashes) > self.max_hashes // 2:
            self._young, self._old = {}, self._young
        holder = (member, member.incarnation)
        young, old = self._young, self._old
        for prefix_hash in prefix_hashes[: self.max_hashes // 2]:
            held = young.get(prefix_hash)
            if held is None:
                held = old.get(prefix_hash, ())
            elif held[0] == holder:
                continue
            young[prefix_hash] = (holder, *(other for other in held if other[0] is not member))[:_HOLDERS] if held else (holder,)
