"""The blocks of a paged KV cache: who holds them, which are free, and which still hold a known prefix.

A block is *held* (its count of holders is above zero) or *free*. A block that has been published under a hash keeps its contents when it
becomes free, and can be shared again until it is reused: blank free blocks are used first, then published ones, least recently freed first.

    allocate -> held, blank --publish--> held, published --release--> free, published --share--> held, published
                     |                                                       |
                     +--release--> free, blank <------- allocate (reused) ---+

Pure. Every operation is O(1) per block and happens wholly or changes nothing.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvferry.errors import LocalProtocolError

__all__ = ["BlockPool", "BlockTable", "hash_block", "hash_root"]

_HASH_BYTES = 16


def hash_root(cache_salt: str) -> bytes:
    """Where the hash chain of a prompt begins; different salts never share blocks."""
    return blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES, person=b"kvferry-blocks").digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of one full block that follows `parent`."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=_HASH_BYTES, key=parent).digest()


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks of one sequence as connectors see them: one KV-cache group."""

    block_ids: Sequence[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(self.block_ids),)


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free_blank: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._free_published: OrderedDict[int, None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free_blank) + len(self._free_published)

    @property
    def num_used(self) -> int:
        """Blocks somebody holds. Free blocks with known contents are not in use."""
        return self._num_blocks - self.num_free

    def find_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of leading hashes that are published. They are not held by this."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_beside(self, block_ids: Iterable[int]) -> int:
        """How many blocks would be free if these were held."""
        return self.num_free - sum(not self._holders[block] for block in block_ids)

    def acquire(self, shared: Sequence[int], count: int) -> list[int] | None:
        """Hold `shared` once more and `count` new blocks. The new ones, or None (and nothing changed) when there are too few.

        Runs of adjacent blocks are preferred where they cost nothing: a transfer moves a run as one piece."""
        if self.num_free_beside(shared) < count:
            return None
        for block in shared:
            self._hold(block)
        return self._take(shared, count)

    def extend(self, held: Sequence[int], count: int) -> list[int] | None:
        """Hold `count` more blocks for somebody who holds `held`. None, and nothing changed, when there are too few."""
        return self._take(held, count) if self.num_free >= count else None

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one hold on each. The last in the list is the first to be reused: a prefix is worth more than its tail."""
        for block in block_ids:
            if self._holders[block] < 1:
                raise LocalProtocolError(f"block {block} was released more often than held")
        for block in reversed(block_ids):
            self._holders[block] -= 1
            if not self._holders[block]:
                (self._free_blank if self._hash_of[block] is None else self._free_published)[block] = None

    def publish(self, block: int, block_hash: bytes) -> None:
        """Say that a held block is full and its contents are those of `block_hash`. The first block of a hash stays its block."""
        if not self._holders[block]:
            raise LocalProtocolError(f"block {block} was published while nobody holds it")
        if self._hash_of[block] is None and block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def forget(self, block: int) -> None:
        """The contents of a block are not what its hash says. Blocks without a hash are ignored."""
        block_hash = self._hash_of[block]
        if block_hash is None:
            return
        self._hash_of[block] = None
        del self._block_of[block_hash]
        if not self._holders[block]:
            del self._free_published[block]
            self._free_blank[block] = None

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """LocalProtocolError unless the pool is consistent and `held` (one list per holder) is exactly what is held."""
        expected = [0] * self._num_blocks
        for block_ids in held:
            for block in block_ids:
                expected[block] += 1
        if expected != self._holders:
            wrong = next(block for block in range(self._num_blocks) if expected[block] != self._holders[block])
            raise LocalProtocolError(f"block {wrong} has {self._holders[wrong]} holds, {expected[wrong]} are accounted for")
        blank = {b for b in range(self._num_blocks) if not self._holders[b] and self._hash_of[b] is None}
        published = {b for b in range(self._num_blocks) if not self._holders[b] and self._hash_of[b] is not None}
        if set(self._free_blank) != blank or set(self._free_published) != published:
            raise LocalProtocolError("the free lists do not hold exactly the free blocks")
        if self._block_of != {h: b for b, h in enumerate(self._hash_of) if h is not None}:
            raise LocalProtocolError("the published hashes and the blocks' own disagree")

    def _hold(self, block: int) -> None:
        if not self._holders[block]:
            del (self._free_blank if self._hash_of[block] is None else self._free_published)[block]
        self._holders[block] += 1

    def _take(self, behind: Sequence[int], count: int) -> list[int]:
        """Blank blocks that continue the run of `behind`, then the oldest free ones in ascending order."""
        start = end = behind[-1] + 1 if behind else self._num_blocks
        while end < start + count and end in self._free_blank:
            self._hold(end)
            end += 1
        return [*range(start, end), *sorted(self._take_oldest() for _ in range(count - (end - start)))]

    def _take_oldest(self) -> int:
        block = next(iter(self._free_blank or self._free_published))
        self.forget(block)
        self._hold(block)
        return block
