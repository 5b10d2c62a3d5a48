"""Looks up which chunks of a prompt the tiers hold.

The host pool is asked on the engine's thread: a lookup reads an index in shared memory. Disks and
object stores are asked on threads of their own, as soon as the request arrives; until they have
answered, or the deadline is over, the engine is told to ask again.

A lookup is a hint. Only a load proves what a tier holds, and a load that fails is computed.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.connectors.contract import KVCacheGroup
from kvferry.connectors.prefix_search import usable_prefix
from kvferry.tiers.backoff import StorageFailed
from kvferry.tiers.base import EntryKeys, Tier
from kvferry.tiers.commands import POOL
from kvferry.tiers.pool.reader import PoolReader
from kvferry.tiers.task_runner import TaskThreads

NUM_THREADS = 4
CLOSE_TIMEOUT_S = 1.0

Keys = Sequence[EntryKeys]
"""The keys of a prompt's chunks, by group."""
FoundChunks = Sequence[Mapping[int, str]]
"""By group, the tier that has each chunk."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest prefix that can be loaded."""

    num_chunks: int
    num_tokens: int
    """All tokens of these chunks, or all but the last: see `TierLookup._windowed_prefix`."""
    found: FoundChunks
    is_complete: bool = True
    """False if a tier did not answer in time."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Why tiers could not say what they hold."""

    def tier(self, group: int, index: int) -> str:
        """Where a chunk was found: in the host pool, unless a slower tier has answered for it."""
        return self.found[group].get(index, POOL)

    @property
    def is_all_in_pool(self) -> bool:
        """Whether no slower tier has answered for any chunk."""
        return not any(self.found)

    def count_by_tier(self, group: int, span: range) -> Mapping[str, int]:
        """How many chunks of a span are in each tier."""
        if not self.found[group]:
            return {POOL: len(span)} if span else {}
        counts = Counter(tier for index, tier in self.found[group].items() if index in span)
        if counts.total() < len(span):
            counts[POOL] += len(span) - counts.total()
        return counts


@dataclass(slots=True)
class _Query:
    """What one request asks of the slower tiers."""

    keys: tuple[EntryKeys, ...]
    """By group."""
    in_pool: tuple[frozenset[int], ...]
    """By group, the chunks that the pool had when the query began."""
    deadline: float
    failures: dict[str, str] = field(default_factory=dict)
    """Why tiers could not answer. Complete when `answer` is set."""
    answer: FoundChunks | None = None
    """Set by a lookup thread, once."""
    is_ended: bool = False
    """The request has ended: no thread need ask any more."""


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
        self._has_local_attention = any(group.has_local_attention for group in groups)
        self._chunk_tokens = chunk_tokens
        self._pools = pools
        self._tiers = tiers
        self._timeout_s = timeout_s
        self._clock = clock
        self._queries: dict[str, _Query] = {}
        self._nothing: FoundChunks = tuple({} for _ in groups)
        self._threads = TaskThreads("kvferry-lookup", NUM_THREADS if tiers else 0)

    def begin(self, request: str, keys: Keys) -> None:
        """Ask the slower tiers for what the pool does not have. Never waits."""
        self.end(request)
        if not self._tiers or not keys[0]:
            return
        in_pool = tuple(
            frozenset(index for index, is_found in enumerate(found) if is_found)
            for found in self._in_pool(keys)
        )
        if all(len(group) == len(keys[0]) for group in in_pool):
            return
        query = _Query(tuple(keys), in_pool, self._clock() + self._timeout_s)
        self._queries[request] = query
        self._threads.run(lambda: self._ask_tiers(query))

    def result(
        self,
        request: str,
        keys: Keys,
        num_tokens: int,
        *,
        num_local_chunks: int = 0,
        max_chunks: int | None = None,
    ) -> Hit | None:
        """The longest prefix of a sequence of `num_tokens` tokens that can be loaded now, at most
        `max_chunks` chunks. The engine itself has the first `num_local_chunks` chunks. None if some
        tier has not answered yet.
        """
        query = self._queries.get(request)
        found, is_complete, failures = self._nothing, True, {}
        if query is not None:
            if query.answer is None and self._clock() < query.deadline:
                return None
            is_complete = query.answer is not None
            if query.answer is not None:
                found, failures = query.answer, query.failures
        at_hand = self._in_pool(keys)
        for is_at_hand, in_tiers in zip(at_hand, found, strict=True):
            if num_local_chunks:
                is_at_hand[:num_local_chunks] = b"\1" * min(num_local_chunks, len(is_at_hand))
            for index in in_tiers:
                is_at_hand[index] = 1
        num_chunks = len(keys[0]) if max_chunks is None else min(max_chunks, len(keys[0]))
        if not self._has_local_attention:
            for is_at_hand in at_hand:
                first_missing = is_at_hand.find(0, 0, num_chunks)
                num_chunks = num_chunks if first_missing < 0 else first_missing
            return Hit(num_chunks, num_chunks * self._chunk_tokens, found, is_complete, failures)

        def has_chunk(group: int, index: int) -> bool:
            return bool(at_hand[group][index])

        num_chunks, num_loadable = self._windowed_prefix(num_chunks, num_tokens, has_chunk)
        return Hit(num_chunks, num_loadable, found, is_complete, failures)

    def end(self, request: str) -> None:
        query = self._queries.pop(request, None)
        if query is not None:
            query.is_ended = True

    def close(self) -> None:
        self._threads.close(CLOSE_TIMEOUT_S)
        for ranks in self._tiers.values():
            for tier in ranks:
                tier.close()
        for pool in self._pools:
            pool.close()

    # -- the host pool --

    def _in_pool(self, keys: Keys) -> list[bytearray]:
        """By group, 1 for each chunk that every rank has in the pool, 0 for the others."""
        now = self._clock()
        for pool in self._pools:
            pool.refresh(now)
        if not self._pools:
            return [bytearray(len(group)) for group in keys]
        by_rank = [[pool.are_stored(group) for group in keys] for pool in self._pools]
        if len(by_rank) == 1:
            return by_rank[0]
        return [
            bytearray(np.logical_and.reduce([np.frombuffer(each, np.bool_) for each in found]))
            for found in zip(*by_rank, strict=True)
        ]

    def _windowed_prefix(
        self, num_chunks: int, num_tokens: int, has_chunk: Callable[[int, int], bool]
    ) -> tuple[int, int]:
        """The longest usable prefix in chunks and in tokens, if some group has local attention.

        An engine always computes the last token itself, so a hit leaves it out: the engine decides
        from the number of loaded tokens which blocks it needs, and the last token attends further
        back than the token after it.
        """
        num_chunks = usable_prefix(self._groups, self._chunk_tokens, num_chunks, has_chunk)
        if num_chunks and num_chunks * self._chunk_tokens == num_tokens:
            if self._has_window_of(num_tokens - 1, num_chunks, has_chunk):
                return num_chunks, num_tokens - 1
            num_chunks = usable_prefix(self._groups, self._chunk_tokens, num_chunks - 1, has_chunk)
        return num_chunks, num_chunks * self._chunk_tokens

    def _has_window_of(
        self, position: int, num_chunks: int, has_chunk: Callable[[int, int], bool]
    ) -> bool:
        """Whether all chunks are at hand that the token at this position attends to."""
        return all(
            has_chunk(number, index)
            for number, group in enumerate(self._groups)
            for index in range(
                group.first_visible_token(position) // self._chunk_tokens, num_chunks
            )
        )

    # -- lookup threads --

    def _ask_tiers(self, query: _Query) -> None:
        if query.is_ended or self._clock() >= query.deadline:
            # The request does not wait any more. A storage that hangs must not leave a queue of
            # old questions behind.
            return
        try:
            query.answer = self._find(query)
        # Top of a task: the request computes its prompt.
        except Exception:
            _log.exception("lookup failed because of a bug")
            query.answer = self._nothing

    def _find(self, query: _Query) -> list[dict[int, str]]:
        found: list[dict[int, str]] = [{} for _ in self._groups]
        length = len(query.keys[0])
        for number, group in enumerate(self._groups):
            if not group.has_local_attention:
                length = min(length, self._find_prefix(query, number, found[number], length))
        for number, group in enumerate(self._groups):
            if group.has_local_attention:
                # One token more than the next token needs: see `_windowed_prefix`.
                first = group.first_visible_token(max(0, length * self._chunk_tokens - 1))
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
                try:
                    count = min(tier.find_prefix(keys[index:max_length]) for tier in ranks)
                except StorageFailed as failure:
                    query.failures[name] = str(failure)
                    continue
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
            if not wanted:
                return
            keys = [query.keys[group][index] for index in wanted]
            try:
                answers = [tier.find(keys) for tier in ranks]
            except StorageFailed as failure:
                query.failures[name] = str(failure)
                continue
            found.update(
                (index, name)
                for position, index in enumerate(wanted)
                if all(answer[position] for answer in answers)
            )
