"""The blocks of a paged KV cache: the block pool, the free blocks and the block tables.

`BlockPool` knows the holders of each block, the free blocks, and the blocks with a known prefix.
`FreeExtents` keeps free blocks as maximal contiguous ranges (extents), because a transfer moves an
extent as one segment.

Pure. Every operation is O(1) per block and happens completely or changes nothing.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

from kvferry.errors import LocalProtocolError
from kvferry.protocol.tickets import NO_BLOCK

_MAX_CANDIDATES = 8
"""How many extents `take` examines in the class whose extents may be too short."""


class FreeExtents:
    """Free blocks as maximal extents, so that a request for many blocks gets few extents.

    Extents are sorted into classes by length, [2^k, 2^(k+1)) each, so that an extent that is long
    enough, and not much longer than needed, is found without a search. Small requests use up short
    extents and leave long extents whole. Adding a block and taking an extent are O(1), regardless
    of the number of extents.
    """

    def __init__(self, num_blocks: int) -> None:
        """Start with one extent of the blocks 0 to `num_blocks` - 1."""
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        # An OrderedDict finds its first entry in O(1); a plain dict steps over all entries deleted
        # before it.
        self._classes: list[OrderedDict[int, None]] = [
            OrderedDict() for _ in range(num_blocks.bit_length())
        ]
        self._occupied = 0
        """Bit k is set if class k is not empty."""
        self._num_blocks = num_blocks
        if num_blocks:
            self._link(0, num_blocks)

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[int]:
        return (block for start, end in self._end_of.items() for block in range(start, end))

    def add(self, block: int) -> None:
        # Merge the block with the extents before and after it.
        start, end = self._start_of.get(block, block), self._end_of.get(block + 1, block + 1)
        if start < block:
            self._unlink(start, block)
        if end > block + 1:
            self._unlink(block + 1, end)
        self._link(start, end)
        self._num_blocks += 1

    def take_after(self, block: int, count: int) -> range:
        """Take up to `count` blocks that directly follow `block`, which is not free itself."""
        end = self._end_of.get(block + 1)
        return range(0) if end is None or not count else self._cut(block + 1, end, count)

    def take(self, count: int) -> list[range]:
        """Take `count` blocks, or all that are free.

        Prefers one extent that is long enough, else the longest extents.
        """
        taken: list[range] = []
        while count and self._occupied:
            start = self._choose(count)
            taken.append(self._cut(start, self._end_of[start], count))
            count -= len(taken[-1])
        return taken

    def _choose(self, count: int) -> int:
        # Every extent of class `min_class` or higher holds `count` blocks; an extent of the class
        # below may.
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


# -- block pool --
# A block is *held* (its number of holders is above zero) or *free*. A block published under a hash
# keeps its contents when the block becomes free. Sequences can share the block again until the pool
# forgets the contents in order to reuse the block, the least recently freed block first. All
# KV-cache groups share one pool; the published blocks are known per group.
#
#                    held, blank --publish--> held, published
#                     ^     |                   |       ^
#              allocate   release            release   share
#                     |     v                   v       |
#                    free, blank <--forget-- free, published


_HASH_BYTES = 16
_BLANK_SHARE = 8
"""One in eight free blocks stays blank, even if all others are published.

Single blocks that were freed at different times are rarely adjacent, but a stock of blank blocks
contains long extents. In a full cache, a stock of an eighth gives four to twelve times fewer
extents than no stock.
"""


def hash_root(cache_salt: str) -> bytes:
    """Return the start of a prompt's hash chain; different salts never share blocks."""
    return blake2b(
        cache_salt.encode("utf-8", "surrogatepass"),
        digest_size=_HASH_BYTES,
        person=b"kvferry-blocks",
    ).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of one full block that follows `parent`."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=_HASH_BYTES, key=parent).digest()


@dataclass(slots=True)
class GroupTable:
    """The blocks of one sequence in one KV-cache group, from token 0 on.

    Holes come first, because local attention drops the earliest tokens.
    """

    block_ids: list[int] = field(default_factory=list)
    num_holes: int = 0
    num_published: int = 0
    """Number of leading entries that are published, or that must not be published."""

    @property
    def held(self) -> list[int]:
        return self.block_ids[self.num_holes :] if self.num_holes else self.block_ids

    @property
    def num_held(self) -> int:
        return len(self.block_ids) - self.num_holes

    @property
    def last(self) -> int:
        return self.block_ids[-1] if self.block_ids else NO_BLOCK


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks of one sequence by KV-cache group, for connectors; `NO_BLOCK` for freed blocks."""

    tables: Sequence[GroupTable]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(list(table.block_ids) for table in self.tables)


class BlockRequest(NamedTuple):
    """A request for new blocks in one group of a sequence."""

    after: int
    """The new blocks should directly follow this block; `NO_BLOCK` means no preference."""
    num_blocks: int


class BlockPool:
    """Holders and published hashes of all blocks."""

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        self._num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._group_of = [0] * num_blocks
        """The group of each block that has a hash."""
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
        """Number of blocks with a holder; free blocks with known contents do not count."""
        return self._num_blocks - self.num_free

    @property
    def published(self) -> Sequence[Mapping[bytes, int]]:
        """The block of each published hash, per group; an entry here does not hold the block."""
        return self._block_of

    def num_free_beside(self, block_ids: Iterable[int]) -> int:
        """Return how many blocks would be free if `block_ids` were held."""
        return self.num_free - sum(not self._holders[block] for block in block_ids)

    def acquire(
        self, shared: Sequence[int], block_requests: Sequence[BlockRequest]
    ) -> list[list[int]] | None:
        """Add a holder to the `shared` blocks and allocate new blocks for each request.

        `shared` blocks must be published or held. Returns the new blocks, or None, with nothing
        changed, if too few blocks are free. Contiguous blocks are preferred where they cost
        nothing: a transfer moves an extent as one segment.
        """
        if self.num_free_beside(shared) < sum(count for _, count in block_requests):
            return None
        for block in shared:
            if not self._holders[block]:
                del self._free_published[block]
            self._holders[block] += 1
        return self._take(block_requests)

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove one holder from each block.

        The last block of the list is reused first: the start of a prefix is worth more than its
        end.
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
        """Register a held block as full, with the contents of `block_hash`.

        If another block already has the hash, that block keeps it and this call changes nothing.
        """
        if block < 0 or not self._holders[block]:
            raise LocalProtocolError(f"block {block} was published without a holder")
        if self._hash_of[block] is None and block_hash not in self._block_of[group]:
            self._hash_of[block] = block_hash
            self._group_of[block] = group
            self._block_of[group][block_hash] = block

    def forget(self, block: int) -> None:
        """Remove the hash of a block whose contents are wrong or will be overwritten.

        Blocks without a hash are ignored.
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
        """Raise LocalProtocolError unless the pool is consistent and `held` is complete.

        `held` has one list per holder; together the lists must contain exactly the held blocks.
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
                f"block {wrong} has {self._holders[wrong]} holds, but {expected[wrong]} are "
                "accounted for"
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
                raise LocalProtocolError("the published hashes and the hashes of the blocks differ")

    def _take(self, block_requests: Sequence[BlockRequest]) -> list[list[int]]:
        """Return new blocks per request: adjacent blocks of `after` first, then long extents."""
        # Every request first extends its own range: `_take_blank` could otherwise use blocks
        # adjacent to a later request.
        self._make_blank(sum(block_request.num_blocks for block_request in block_requests))
        fresh = [
            [] if wanted.after == NO_BLOCK else list(self._free_blank.take_after(*wanted))
            for wanted in block_requests
        ]
        for block_request, run in zip(block_requests, fresh, strict=True):
            run += self._take_blank(block_request.num_blocks - len(run))
            for block in run:
                self._holders[block] = 1
        return fresh

    def _make_blank(self, count: int) -> None:
        """Forget the least recently freed blocks until `count` blocks and the stock are blank."""
        wanted = count + (self.num_free - count) // _BLANK_SHARE if count else 0
        for _ in range(wanted - len(self._free_blank)):
            self.forget(next(iter(self._free_published)))

    def _take_blank(self, count: int) -> list[int]:
        return [block for run in self._free_blank.take(count) for block in run] if count else []
