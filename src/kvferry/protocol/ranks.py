"""Which KV heads a tensor-parallel rank holds, and which of a producer's ranks each of a consumer's goes to. Pure.

Rank r of T holds heads r*H/T to (r+1)*H/T of H; with more ranks than heads, T/H neighbours hold the same one.

    P, TP 4, 2 heads    |0 |0'|1 |1'|    D's only rank reads head 0 of P's rank 0 and head 1 of rank 2. Ranks 1 and 3 have nothing for
    D, TP 1             |  0  1     |    it, but hold a lease that must end: it goes there too, and reads nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["RankMapping", "can_divide", "heads_of", "rank_mappings"]


@dataclass(frozen=True, slots=True)
class RankMapping:
    """One of a consumer's ranks goes to one of a producer's."""

    rank: int
    """The producer's."""
    heads: range
    """What is read there. Empty: the visit only lets the lease end."""
    consumer_ranks: tuple[int, ...]
    """All of the consumer's ranks that go there."""


def can_divide(total_heads: int, size: int) -> bool:
    return total_heads % size == 0 or size % total_heads == 0


def heads_of(rank: int, size: int, total_heads: int) -> range:
    return _share(rank, size, total_heads)


@lru_cache(maxsize=256)
def rank_mappings(rank: int, size: int, remote_size: int, total_heads: int) -> tuple[RankMapping, ...]:
    """Where rank `rank` of a consumer of TP `size` goes. Together its ranks go to each of the producer's, and each reads its heads once."""
    reads = [_reads(each, size, remote_size, total_heads) for each in range(size)]
    for remote in set(range(remote_size)).difference(*reads):
        reads[remote * size // remote_size][remote] = []
    return tuple(
        RankMapping(remote, _as_range(heads), tuple(each for each in range(size) if remote in reads[each]))
        for remote, heads in sorted(reads[rank].items())
    )


def _reads(rank: int, size: int, remote_size: int, total_heads: int) -> dict[int, list[int]]:
    """Heads by the producer's rank they are read from. Of several that hold a head, the one that lies where we lie: equal sizes pair up."""
    reads: dict[int, list[int]] = {}
    for head in heads_of(rank, size, total_heads):
        holders = _share(head, total_heads, remote_size)
        nearest = min(max(rank * remote_size // size, holders.start), holders.stop - 1)
        reads.setdefault(nearest, []).append(head)
    return reads


def _share(part: int, parts: int, things: int) -> range:
    """What part number `part` of `parts` gets of so many things. More parts than things: neighbours share one."""
    first = part * things // parts
    return range(first, max(first + 1, (part + 1) * things // parts))


def _as_range(heads: Sequence[int]) -> range:
    return range(heads[0], heads[-1] + 1) if heads else range(0)
