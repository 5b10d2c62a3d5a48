"""Looks up which chunks of a prompt the tiers hold.

The host pool is asked on the engine's thread: a lookup is a dictionary access per chunk. Disks and
object stores are asked on threads of their own, as soon as the request arrives; until they have
answered, or the deadline is over, the engine is told to ask again.

A lookup is a hint. Only a load proves what a tier holds, and a load that fails is computed.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.connectors.contract import KVCacheGroup
from kvferry.connectors.prefix_search import usable_prefix
from kvferry.tiers.base import ObjectKey, Tier
from kvferry.tiers.jobs import POOL
from kvferry.tiers.pool_reader import PoolReader
from kvferry.tiers.threads import TaskThreads

__all__ = ["Hit", "Pending", "TierLookup"]

NUM_THREADS = 4
CLOSE_TIMEOUT_S = 1.0

Keys = Sequence[Sequence[ObjectKey]]
"""The keys of a prompt's chunks, by group."""
_NOTHING: Sequence[Mapping[int, str]] = ()

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest prefix that the tiers hold, and the tier of each chunk in each group."""

    num_chunks: int
    tiers: tuple[tuple[str, ...], ...] = ()
    """By group, the tier of each chunk; empty where no tier has it or no token needs it."""
    is_complete: bool = True
    """False if a tier did not answer in time."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Some tier has not answered yet."""


@dataclass(slots=True)
class _Query:
    """What one request asks of the slower tiers."""

    keys: tuple[tuple[ObjectKey, ...], ...]
    """By group."""
    in_pool: tuple[frozenset[int], ...]
    """By group, the chunks that the pool had when the query began."""
    deadline: float
    answer: list[dict[int, str]] | None = None
    """By group, the tier of each chunk that was found. Set by a lookup thread, once."""


class TierLookup:
    """Owned by the engine's thread. `pools` has one reader for each rank; `tiers` has, for each
    tier behind the pool, one `Tier` for each rank.
    """

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        chunk_tokens: int,
        pools: Sequence[PoolReader],
        tiers: Mapping[str, Sequence[Tier]],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups = groups
        self._chunk_tokens = chunk_tokens
        self._pools = pools
        self._tiers = tiers
        self._timeout_s = timeout_s
        self._clock = clock
        self._queries: dict[str, _Query] = {}
        self._threads = TaskThreads("kvferry-lookup", NUM_THREADS if tiers else 0)

    def begin(self, request: str, keys: Keys) -> None:
        """Ask the slower tiers for what the pool does not have. Never waits."""
        if not self._tiers or not keys[0]:
            return
        hit = self._find_known(keys, len(keys[0]), _NOTHING)
        if hit.num_chunks == len(keys[0]):
            return
        in_pool = tuple(
            frozenset(index for index, key in enumerate(group) if self._is_in_pool(key))
            for group in keys
        )
        query = _Query(tuple(map(tuple, keys)), in_pool, self._clock() + self._timeout_s)
        self._queries[request] = query
        self._threads.run(lambda: self._ask_tiers(query))

    def result(self, request: str, keys: Keys, max_chunks: int | None = None) -> Hit | Pending:
        """The longest prefix, of at most `max_chunks` chunks, that can be loaded now."""
        query = self._queries.get(request)
        slow: Sequence[Mapping[int, str]] = _NOTHING
        if query is not None:
            if query.answer is None and self._clock() < query.deadline:
                return Pending()
            slow = query.answer or slow
        num_chunks = len(keys[0]) if max_chunks is None else min(max_chunks, len(keys[0]))
        hit = self._find_known(keys, num_chunks, slow)
        return hit if query is None or query.answer is not None else replace(hit, is_complete=False)

    def end(self, request: str) -> None:
        self._queries.pop(request, None)

    def close(self) -> None:
        self._threads.close(CLOSE_TIMEOUT_S)
        for ranks in self._tiers.values():
            for tier in ranks:
                tier.close()
        for pool in self._pools:
            pool.close()

    def _find_known(self, keys: Keys, num_chunks: int, slow: Sequence[Mapping[int, str]]) -> Hit:
        """The longest prefix that is in the pool or was found in slower tiers."""
        now = self._clock()
        for pool in self._pools:
            pool.refresh(now)

        def tier_of(group: int, index: int) -> str:
            if self._is_in_pool(keys[group][index]):
                return POOL
            return slow[group].get(index, "") if slow else ""

        count = usable_prefix(
            self._groups,
            self._chunk_tokens,
            num_chunks,
            lambda group, index: bool(tier_of(group, index)),
        )
        tiers = tuple(
            tuple(tier_of(group, index) for index in range(count))
            for group in range(len(self._groups))
        )
        return Hit(count, tiers)

    def _is_in_pool(self, key: ObjectKey) -> bool:
        """Whether every rank has the chunk in the pool."""
        return bool(self._pools) and all(key in pool for pool in self._pools)

    # -- lookup threads --

    def _ask_tiers(self, query: _Query) -> None:
        try:
            query.answer = self._find(query)
        # Top of a task: the request computes its prompt.
        except Exception:
            _log.exception("lookup failed because of a bug")
            query.answer = [{} for _ in self._groups]

    def _find(self, query: _Query) -> list[dict[int, str]]:
        found: list[dict[int, str]] = [{} for _ in self._groups]
        length = len(query.keys[0])
        for number, group in enumerate(self._groups):
            if not group.has_local_attention:
                length = min(length, self._find_prefix(query, number, found[number], length))
        for number, group in enumerate(self._groups):
            if group.has_local_attention:
                first = group.first_visible_token(length * self._chunk_tokens)
                self._find_each(query, number, found[number], first // self._chunk_tokens, length)
        return found

    def _find_prefix(
        self, query: _Query, group: int, found: dict[int, str], max_length: int
    ) -> int:
        """Note which tier has each chunk of the longest prefix, and return its length."""
        keys, in_pool = query.keys[group], query.in_pool[group]
        index = 0
        while index < max_length:
            if index in in_pool:
                index += 1
                continue
            for name, ranks in self._tiers.items():
                count = min(tier.find_prefix(keys[index:max_length]) for tier in ranks)
                if count:
                    found.update(dict.fromkeys(range(index, index + count), name))
                    index += count
                    break
            else:
                return index
        return index

    def _find_each(
        self, query: _Query, group: int, found: dict[int, str], first: int, end: int
    ) -> None:
        """Note which tier has each of these chunks."""
        for name, ranks in self._tiers.items():
            wanted = [
                index
                for index in range(first, end)
                if index not in query.in_pool[group] and index not in found
            ]
            keys = [query.keys[group][index] for index in wanted]
            answers = [tier.find(keys) for tier in ranks]
            found.update(
                (index, name)
                for position, index in enumerate(wanted)
                if all(answer[position] for answer in answers)
            )
