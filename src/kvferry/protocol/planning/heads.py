"""Which KV heads a TP rank holds, and which producer ranks a consumer rank attaches to.

Rank r of T holds heads r*H/T to (r+1)*H/T of H. With more ranks than heads, T/H neighbouring
ranks hold the same head (docs/decisions/012-unequal-tensor-parallelism.md). The states of a hybrid
model are divided in the same way, but each part of a state has its own number of heads.

    P, TP 4, 2 heads    |0 |0'|1 |1'|    D's only rank reads head 0 from P's rank 0
    D, TP 1             |  0  1     |    and head 1 from P's rank 2.

P's ranks 1 and 3 hold no head that D still needs, but each holds a lease that must end. So D's rank
attaches to P's ranks 1 and 3 too, without reading. Integer arithmetic; pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class RankMapping:
    """A producer rank that one consumer rank attaches to."""

    rank: int
    """The producer rank."""
    consumer_ranks: tuple[int, ...]
    """All consumer ranks that attach to this producer rank: the sibling ranks of a reader."""


def can_divide(total_heads: int, size: int) -> bool:
    """Return whether `total_heads` heads can be divided over `size` ranks."""
    return total_heads % size == 0 or size % total_heads == 0


def heads_of(rank: int, size: int, total_heads: int) -> range:
    """Return the heads that rank `rank` of `size` holds."""
    return _share(rank, size, total_heads)


@lru_cache(maxsize=256)
def rank_mappings(
    rank: int, size: int, remote_size: int, *head_counts: int
) -> tuple[RankMapping, ...]:
    """Return the producer ranks that consumer rank `rank` of TP `size` attaches to.

    Together the consumer's ranks attach to every rank of the producer, and each consumer rank
    attaches to every rank from which it reads. `head_counts` are the numbers of heads over all
    ranks, one for each way in which the regions of the cache are divided.
    """
    reads: list[set[int]] = [
        set().union(*(_reads(each, size, remote_size, total) for total in head_counts))
        for each in range(size)
    ]
    # Producer ranks from which no head is read: one consumer rank attaches without reading.
    for remote in set(range(remote_size)).difference(*reads):
        reads[remote * size // remote_size].add(remote)
    return tuple(
        RankMapping(remote, tuple(each for each in range(size) if remote in reads[each]))
        for remote in sorted(reads[rank])
    )


def heads_to_read(
    rank: int, size: int, remote_rank: int, remote_size: int, total_heads: int
) -> range:
    """Return the heads that consumer rank `rank` of TP `size` reads from a producer rank.

    Each consumer rank reads each of its heads from one producer rank. The range may be empty.
    """
    return _as_range(_reads(rank, size, remote_size, total_heads).get(remote_rank, ()))


@lru_cache(maxsize=1024)
def _reads(rank: int, size: int, remote_size: int, total_heads: int) -> dict[int, list[int]]:
    """Return the heads to read from each producer rank.

    If several producer ranks hold a head, choose the rank nearest to our relative position; with
    equal TP sizes every rank reads from the rank of the same number.
    """
    reads: dict[int, list[int]] = {}
    for head in heads_of(rank, size, total_heads):
        holders = _share(head, total_heads, remote_size)
        nearest = min(max(rank * remote_size // size, holders.start), holders.stop - 1)
        reads.setdefault(nearest, []).append(head)
    return reads


def _share(part: int, parts: int, things: int) -> range:
    """Return the share of part `part` when `things` things are divided among `parts` parts.

    With more parts than things, neighbouring parts share one thing.
    """
    first = part * things // parts
    return range(first, max(first + 1, (part + 1) * things // parts))


def _as_range(heads: Sequence[int]) -> range:
    return range(heads[0], heads[-1] + 1) if heads else range(0)
