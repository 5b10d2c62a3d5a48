"""Decides how much of a prompt is loaded from the tiers, and by which command.

A load only saves computation: when it fails, the engine computes the prompt, whatever
`kv_load_failure_policy` says. An engine that admits a second load first asks once more for what is
left of the prefix.
"""

from collections.abc import Iterable, Mapping, Sequence

from kvferry.connectors.contract import KVCacheGroup, Request
from kvferry.connectors.offloading.break_even import BreakEven
from kvferry.connectors.offloading.lookup import Hit, TierLookup
from kvferry.connectors.offloading.metadata import EndStores, OffloadStats
from kvferry.connectors.offloading.requests import LoadState, TrackedRequest
from kvferry.tiers.backoff import log_trouble
from kvferry.tiers.base import EntryKey
from kvferry.tiers.commands import POOL, CancelLoad, LoadChunks, LoadEnded, OffloadCommand
from kvferry.types import BlockIds


class RequestLoads:
    """The loads of all requests. Without `break_even`, everything that is found is loaded."""

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        chunk_tokens: int,
        max_loads: int,
        break_even: BreakEven | None,
        commands: list[OffloadCommand | EndStores],
    ) -> None:
        self._groups = groups
        self._chunk_tokens = chunk_tokens
        self._max_loads = max_loads
        """How often a request may try to load: the second time without the chunks that were
        missing.
        """
        self._break_even = break_even
        self._commands = commands
        self._lookup: TierLookup | None = None
        self._row_bytes: Sequence[int] = ()
        self._missing: dict[str, tuple[EntryKey, ...]] = {}
        """Loads that failed on some rank, with the chunks that no tier had."""
        self._stats = OffloadStats()

    def open(self, lookup: TierLookup, row_bytes: Sequence[int]) -> None:
        """Begin to look up. `row_bytes` has the size of a chunk in each group."""
        self._lookup = lookup
        self._row_bytes = row_bytes

    def close(self) -> None:
        if self._lookup is not None:
            self._lookup.close()

    def take_stats(self) -> OffloadStats | None:
        stats, self._stats = self._stats, OffloadStats()
        return None if stats.is_empty() else stats

    # -- lookups --

    def begin_lookup(self, tracked: TrackedRequest) -> None:
        self.restart(tracked)
        if self._lookup is not None:
            self._lookup.begin(tracked.request_id, tracked.chain.keys)

    def restart(self, tracked: TrackedRequest) -> None:
        """Let a preempted request, which has lost its blocks, load again."""
        tracked.load.num_loads_left, tracked.load.max_chunks = self._max_loads, None

    def find(
        self, tracked: TrackedRequest, request: Request, num_computed_tokens: int
    ) -> int | None:
        """How many tokens more than the engine has can be loaded; None if it shall ask again."""
        state = tracked.load
        if self._lookup is None or not state.num_loads_left:
            return 0
        num_tokens = request.num_tokens
        if num_tokens // self._chunk_tokens > len(tracked.chain):
            # A preempted request: its output is part of what it must compute again.
            tracked.chain.extend(request.all_token_ids, num_tokens)
        found = self._lookup.result(
            tracked.request_id,
            tracked.chain.keys,
            num_tokens,
            num_local_chunks=num_computed_tokens // self._chunk_tokens,
            max_chunks=state.max_chunks,
        )
        if found is None:
            return None
        state.num_local_tokens, state.hit = num_computed_tokens, found
        self._count_lookup(state, found, num_tokens - num_computed_tokens)
        num_missing = found.num_tokens - num_computed_tokens
        # A chunk of several blocks is loaded whole. If the engine has its first blocks, they may be
        # shared with other requests and must not be written.
        if num_missing <= 0 or num_computed_tokens % self._chunk_tokens:
            return 0
        if self._break_even is not None and not self._break_even.is_load_faster(
            num_missing, self._bytes_to_load(state, found)
        ):
            self._stats.count("skipped_tokens", num_missing)
            state.num_loads_left = 0
            return 0
        return num_missing

    def _count_lookup(self, state: LoadState, hit: Hit, num_queried: int) -> None:
        if state.is_counted:
            return
        state.is_counted = True
        self._stats.count("queried_tokens", max(0, num_queried))
        if not hit.is_complete:
            self._stats.count("lookup_timeouts")
        for tier, reason in hit.failures.items():
            self._stats.add_tiers({tier: {"failed_lookups": 1}})
            log_trouble("looked up", tier, reason)

    def _bytes_to_load(self, state: LoadState, hit: Hit) -> Mapping[str, int]:
        sizes: dict[str, int] = {}
        for number, (group, row_bytes) in enumerate(
            zip(self._groups, self._row_bytes, strict=True)
        ):
            visible = group.first_visible_token(hit.num_tokens)
            first = max(state.num_local_tokens, visible) // self._chunk_tokens
            for tier, count in hit.count_by_tier(number, range(first, hit.num_chunks)).items():
                sizes[tier] = sizes.get(tier, 0) + count * row_bytes
        return sizes

    # -- loads --

    def start(self, tracked: TrackedRequest, tables: BlockIds, num_tokens: int) -> None:
        """Load what `find` has found, now that the engine has allocated blocks for it."""
        state, hit = tracked.load, tracked.load.hit
        if hit is None:
            return
        first = state.num_local_tokens // self._chunk_tokens
        end = -(-(state.num_local_tokens + num_tokens) // self._chunk_tokens)
        span = range(first, min(end, hit.num_chunks))
        chunks = tracked.chunk_table(
            tables,
            span,
            # A tuple is the usual case, and several times faster.
            (POOL,) if hit.is_all_in_pool else lambda group, index: (hit.tier(group, index),),
        )
        tracked.describe(span)
        state.num_loading_tokens = num_tokens
        state.num_loads_left -= 1
        self._commands.append(LoadChunks(tracked.request_id, chunks))

    def note_failures(self, loads: Iterable[LoadEnded]) -> None:
        """Note the chunks that were missing on some rank, until all ranks have ended the load."""
        for load in loads:
            if load.missing:
                self._missing[load.request] = self._missing.get(load.request, ()) + load.missing

    def end(self, request_id: str, tracked: TrackedRequest | None, *, has_failed: bool) -> None:
        """All ranks have ended a load. `tracked` is None if the request has ended before."""
        missing = self._missing.pop(request_id, ())
        if tracked is None or not tracked.load.num_loading_tokens:
            return
        state = tracked.load
        num_tokens, state.num_loading_tokens = state.num_loading_tokens, 0
        if not has_failed:
            self._stats.count("hit_tokens", num_tokens)
            return
        self._stats.count("failed_loads")
        state.max_chunks = _first_missing(tracked, missing)
        if self._lookup is not None and state.num_loads_left:
            # The first answer was wrong, so ask again. Without chunks this only ends the query.
            keys = tracked.chain.keys
            self._lookup.begin(request_id, [group[: state.max_chunks] for group in keys])

    def finish(self, request_id: str, tracked: TrackedRequest | None) -> bool:
        """End the lookup of a request, and its load; whether it had one. The engine keeps the
        blocks until the end of the load is reported.
        """
        if self._lookup is not None:
            self._lookup.end(request_id)
        is_loading = tracked is not None and tracked.load.num_loading_tokens > 0
        if is_loading:
            self._commands.append(CancelLoad(request_id))
        return is_loading


def _first_missing(tracked: TrackedRequest, missing: Sequence[EntryKey]) -> int:
    lost = set(missing)
    for index, keys in enumerate(zip(*tracked.chain.keys, strict=True)):
        if not lost.isdisjoint(keys):
            return index
    # The load failed as a whole: compute the prompt.
    return 0
