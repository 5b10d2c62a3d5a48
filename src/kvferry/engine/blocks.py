"""The blocks of a paged KV cache: who holds them, which are free, and which still hold a known prefix.

A block is *held* (its count of holders is above zero) or *free*. A block that has been published under a hash keeps its contents when it
becomes free, and can be shared again until it is reused: blank free blocks are used first, then published ones, least recently freed first.
All KV-cache groups take from the same blocks; what is published is known per group.

    allocate -> held, blank --publish--> held, published --release--> free, published --share--> held, published
                     |                                                       |
                     +--release--> free, blank <------- allocate (reused) ---+

Pure. Every operation is O(1) per block and happens wholly or changes nothing.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from kvferry.engine.free_runs import FreeRuns
from kvferry.errors import LocalProtocolError
from kvferry.protocol.tickets import HOLE

__all__ = ["BlockPool", "BlockTable", "GroupTable", "Want", "hash_block", "hash_root"]

_HASH_BYTES = 16


def hash_root(cache_salt: str) -> bytes:
    """Where the hash chain of a prompt begins; different salts never share blocks."""
    return blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES, person=b"kvferry-blocks").digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of one full block that follows `parent`."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=_HASH_BYTES, key=parent).digest()


@dataclass(slots=True)
class GroupTable:
    """The blocks of one sequence in one KV-cache group, from token 0 on. Holes come first: attention forgets what is furthest back."""

    block_ids: list[int] = field(default_factory=list)
    num_holes: int = 0
    num_published: int = 0
    """Leading places that the pool knows by their hashes, or that must not be published."""

    @property
    def held(self) -> list[int]:
        return self.block_ids[self.num_holes :] if self.num_holes else self.block_ids

    @property
    def num_held(self) -> int:
        return len(self.block_ids) - self.num_holes

    @property
    def last(self) -> int:
        return self.block_ids[-1] if self.block_ids else HOLE


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks of one sequence as connectors see them: a list per KV-cache group, `HOLE` where there is none any more."""

    tables: Sequence[GroupTable]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(list(table.block_ids) for table in self.tables)


class Want(NamedTuple):
    """New blocks for one group of a sequence."""

    behind: int
    """The block they are to follow if they can; `HOLE` for none."""
    num_blocks: int


class BlockPool:
    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        self._num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._group_of = [0] * num_blocks
        """Of those that have a hash."""
        self._block_of: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._free_blank = FreeRuns(num_blocks)
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

    @property
    def published(self) -> Sequence[Mapping[bytes, int]]:
        """Per group, the block of each known hash. They are held by nobody for being found here."""
        return self._block_of

    def num_free_beside(self, block_ids: Iterable[int]) -> int:
        """How many blocks would be free if these were held."""
        return self.num_free - sum(not self._holders[block] for block in block_ids)

    def acquire(self, shared: Sequence[int], wants: Sequence[Want]) -> list[list[int]] | None:
        """Hold `shared`, which are published or held, once more, and new blocks for each want. The new ones, or None (and nothing
        changed) when there are too few.

        Runs of adjacent blocks are preferred where they cost nothing: a transfer moves a run as one piece."""
        if self.num_free_beside(shared) < sum(count for _, count in wants):
            return None
        for block in shared:
            if not self._holders[block]:
                del self._free_published[block]
            self._holders[block] += 1
        return self._take(wants)

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one hold on each. The last in the list is the first to be reused: a prefix is worth more than its tail."""
        for block in block_ids:
            if block < 0 or self._holders[block] < 1:
                raise LocalProtocolError(f"block {block} was released more often than held")
        for block in reversed(block_ids):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._hash_of[block] is None:
                self._free_blank.add(block)
            else:
                self._free_published[block] = None

    def publish(self, block: int, block_hash: bytes, group: int = 0) -> None:
        """Say that a held block is full and its contents are those of `block_hash`. The first block of a hash stays its block."""
        if block < 0 or not self._holders[block]:
            raise LocalProtocolError(f"block {block} was published while nobody holds it")
        if self._hash_of[block] is None and block_hash not in self._block_of[group]:
            self._hash_of[block] = block_hash
            self._group_of[block] = group
            self._block_of[group][block_hash] = block

    def forget(self, block: int) -> None:
        """The contents of a block are not what its hash says. Blocks without a hash are ignored."""
        if self._unname(block) and not self._holders[block]:
            del self._free_published[block]
            self._free_blank.add(block)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """LocalProtocolError unless the pool is consistent and `held` (one list per holder) is exactly what is held."""
        expected = [0] * self._num_blocks
        for block_ids in held:
            for block in block_ids:
                expected[block] += 1
        if expected != self._holders:
            wrong = next(block for block in range(self._num_blocks) if expected[block] != self._holders[block])
            raise LocalProtocolError(f"block {wrong} has {self._holders[wrong]} holds, {expected[wrong]} are accounted for")
        blank = [b for b in range(self._num_blocks) if not self._holders[b] and self._hash_of[b] is None]
        published = {b for b in range(self._num_blocks) if not self._holders[b] and self._hash_of[b] is not None}
        if sorted(self._free_blank) != blank or len(self._free_blank) != len(blank) or set(self._free_published) != published:
            raise LocalProtocolError("the free lists do not hold exactly the free blocks")
        for group, block_of in enumerate(self._block_of):
            if block_of != {h: b for b, h in enumerate(self._hash_of) if h is not None and self._group_of[b] == group}:
                raise LocalProtocolError("the published hashes and the blocks' own disagree")

    def _take(self, wants: Sequence[Want]) -> list[list[int]]:
        """For each want, blank blocks that continue the run in front of it, then blank ones in long runs, then the least recently freed.

        The last are taken for all wants together: groups of one sequence were freed together, and in order their blocks make runs."""
        fresh = [[] if want.behind == HOLE else list(self._free_blank.take_behind(*want)) for want in wants]
        others = [self._take_blank(want.num_blocks - len(run)) for want, run in zip(wants, fresh, strict=True)]
        lacking = [want.num_blocks - len(run) - len(rest) for want, run, rest in zip(wants, fresh, others, strict=True)]
        reused = sorted(self._reuse_oldest() for _ in range(sum(lacking)))
        for run, rest, count in zip(fresh, others, lacking, strict=True):
            run += sorted([*rest, *reused[:count]])
            del reused[:count]
            for block in run:
                self._holders[block] = 1
        return fresh

    def _take_blank(self, count: int) -> list[int]:
        return [block for run in self._free_blank.take(count) for block in run] if count else []

    def _reuse_oldest(self) -> int:
        block, _ = self._free_published.popitem(last=False)
        self._unname(block)
        return block

    def _unname(self, block: int) -> bool:
        """Whether the block had a hash."""
        block_hash = self._hash_of[block]
        if block_hash is None:
            return False
        self._hash_of[block] = None
        del self._block_of[self._group_of[block]][block_hash]
        return True
