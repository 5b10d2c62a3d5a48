"""Free blocks as maximal runs of adjacent ones, so that whoever needs many gets few runs: a
transfer moves a run as one segment.

Runs are sorted into classes by length, [2^k, 2^(k+1)) each, so that a run that is long enough, and
hardly longer than needed, is found without a search. Small needs use up small runs and leave the
long ones whole.

Pure. Adding a block and taking a run are O(1), whatever their number.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

from kvferry.errors import LocalProtocolError
from kvferry.protocol.tickets import HOLE

__all__ = [
    "BlockPool",
    "BlockRequest",
    "BlockTable",
    "FreeExtents",
    "GroupTable",
    "hash_block",
    "hash_root",
]


_MAX_CANDIDATES = 8
"""Runs of the class that may or may not hold enough: so many are looked at."""


class FreeExtents:
    def __init__(self, num_blocks: int) -> None:
        """Blocks 0 to `num_blocks` - 1, as one run."""
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        # Ordered dicts forget their first entry in O(1); plain ones step over all that have left
        # before it.
        self._classes: list[OrderedDict[int, None]] = [
            OrderedDict() for _ in range(num_blocks.bit_length())
        ]
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
        """`count` blocks, or all there are: one run where one is long enough, else the longest
        ones.
        """
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


# -------------------- blocks -------------------- The blocks of a paged KV cache: who holds them,
# which are free, and which still hold a known prefix.
#
# A block is *held* (its count of holders is above zero) or *free*. A block that has been published
# under a hash keeps its contents when it becomes free, and can be shared again until it is
# forgotten, so that it can be reused: the least recently freed first. All KV-cache groups take from
# the same blocks; what is published is known per group.
#
#     allocate -> held, blank --publish--> held, published --release--> free, published --share--> held, published
#         ^            |                                                       |
#         +------------+---release--> free, blank <------------- forget -------+
#
# Pure. Every operation is O(1) per block and happens wholly or changes nothing.


_HASH_BYTES = 16
_BLANK_SHARE = 8
"""One in so many free blocks is blank, where the others are published. Single blocks that were
freed at different times seldom lie side by side; out of a stock of blank ones long runs can be
chosen. In a full cache an eighth makes four to twelve times fewer runs than none.
"""


def hash_root(cache_salt: str) -> bytes:
    """Where the hash chain of a prompt begins; different salts never share blocks."""
    return blake2b(
        cache_salt.encode("utf-8", "surrogatepass"),
        digest_size=_HASH_BYTES,
        person=b"kvferry-blocks",
    ).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of one full block that follows `parent`."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=_HASH_BYTES, key=parent).digest()


@dataclass(slots=True)
class GroupTable:
    """The blocks of one sequence in one KV-cache group, from token 0 on. Holes come first:
    attention forgets what is furthest back.
    """

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
    """The blocks of one sequence as connectors see them: a list per KV-cache group, `HOLE` where
    there is none any more.
    """

    tables: Sequence[GroupTable]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(list(table.block_ids) for table in self.tables)


class BlockRequest(NamedTuple):
    """New blocks for one group of a sequence."""

    after: int
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
        self._free_blank = FreeExtents(num_blocks)
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

    def acquire(
        self, shared: Sequence[int], block_requests: Sequence[BlockRequest]
    ) -> list[list[int]] | None:
        """Hold `shared`, which are published or held, once more, and new blocks for each want. The
        new ones, or None (and nothing changed) when there are too few.

        Runs of adjacent blocks are preferred where they cost nothing: a transfer moves a run as one
        segment.
        """
        if self.num_free_beside(shared) < sum(count for _, count in block_requests):
            return None
        for block in shared:
            if not self._holders[block]:
                del self._free_published[block]
            self._holders[block] += 1
        return self._take(block_requests)

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one hold on each. The last in the list is the first to be reused: a prefix is
        worth more than its tail.
        """
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
        """Say that a held block is full and its contents are those of `block_hash`. The first block
        of a hash stays its block.
        """
        if block < 0 or not self._holders[block]:
            raise LocalProtocolError(f"block {block} was published while nobody holds it")
        if self._hash_of[block] is None and block_hash not in self._block_of[group]:
            self._hash_of[block] = block_hash
            self._group_of[block] = group
            self._block_of[group][block_hash] = block

    def forget(self, block: int) -> None:
        """Let nobody find a block any more: its contents are not what its hash says, or will not
        be. Blocks without a hash are ignored.
        """
        block_hash = self._hash_of[block]
        if block_hash is None:
            return
        self._hash_of[block] = None
        del self._block_of[self._group_of[block]][block_hash]
        if not self._holders[block]:
            del self._free_published[block]
            self._free_blank.add(block)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """LocalProtocolError unless the pool is consistent and `held` (one list per holder) is
        exactly what is held.
        """
        expected = [0] * self._num_blocks
        for block_ids in held:
            for block in block_ids:
                expected[block] += 1
        if expected != self._holders:
            wrong = next(
                block
                for block in range(self._num_blocks)
                if expected[block] != self._holders[block]
            )
            raise LocalProtocolError(
                f"block {wrong} has {self._holders[wrong]} holds, {expected[wrong]} are accounted "
                "for"
            )
        blank = [
            b for b in range(self._num_blocks) if not self._holders[b] and self._hash_of[b] is None
        ]
        published = {
            b
            for b in range(self._num_blocks)
            if not self._holders[b] and self._hash_of[b] is not None
        }
        if (
            sorted(self._free_blank) != blank
            or len(self._free_blank) != len(blank)
            or set(self._free_published) != published
        ):
            raise LocalProtocolError("the free lists do not hold exactly the free blocks")
        for group, block_of in enumerate(self._block_of):
            if block_of != {
                h: b
                for b, h in enumerate(self._hash_of)
                if h is not None and self._group_of[b] == group
            }:
                raise LocalProtocolError("the published hashes and the blocks' own disagree")

    def _take(self, block_requests: Sequence[BlockRequest]) -> list[list[int]]:
        """For each want, blocks that continue the run in front of it, then others in long runs."""
        self._make_blank(sum(block_request.num_blocks for block_request in block_requests))
        fresh = [
            [] if block_request.after == HOLE else list(self._free_blank.take_after(*block_request))
            for block_request in block_requests
        ]
        for block_request, run in zip(block_requests, fresh, strict=True):
            run += self._take_blank(block_request.num_blocks - len(run))
            for block in run:
                self._holders[block] = 1
        return fresh

    def _make_blank(self, count: int) -> None:
        """Forget the contents of the least recently freed blocks until `count` and the stock are
        blank.
        """
        wanted = count + (self.num_free - count) // _BLANK_SHARE if count else 0
        for _ in range(wanted - len(self._free_blank)):
            self.forget(next(iter(self._free_published)))

    def _take_blank(self, count: int) -> list[int]:
        return [block for run in self._free_blank.take(count) for block in run] if count else []
