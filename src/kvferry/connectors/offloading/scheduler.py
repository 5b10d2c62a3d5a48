"""The scheduler half of `OffloadingConnector`: which prompts are loaded from tiers, which blocks
are stored, and the commands for the offload workers.

Storing. A block is stored when the engine has seen the output of the step that filled it. A running
request holds its blocks, so they can be copied while the engine goes on. The workers report which
stores have been copied; a request that finishes earlier keeps its blocks until its copies have
ended (`EndStores`). A preempted request, and a request whose sliding window has moved on, loses
blocks at once: copies that have not ended are then void (`VoidStores`).

Loading. A load only saves computation: when it fails, the engine computes the prompt, whatever
`kv_load_failure_policy` says. An engine that admits a second load first asks once more for what is
left of the prefix.

Runs on the engine's main thread and never blocks.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.config import OffloadingExtraConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorHandshakeMetadata,
    KVConnectorOutput,
    Request,
    ScheduledSlice,
)
from kvferry.connectors.offloading.break_even import MIN_STEP_TOKENS, BreakEven
from kvferry.connectors.offloading.events import DescribeBlocks, KVEvent, KVEventLog
from kvferry.connectors.offloading.lookup import Hit, Pending, TierLookup
from kvferry.connectors.offloading.metadata import (
    OffloadingHandshakeMetadata,
    OffloadingMetadata,
    OffloadingWorkerMetadata,
    OffloadStats,
)
from kvferry.connectors.offloading.settings import open_pool_reader, open_tiers_to_look_up
from kvferry.errors import LocalProtocolError
from kvferry.protocol.tickets import HOLE
from kvferry.tiers.base import ObjectKey
from kvferry.tiers.commands import (
    POOL,
    CancelLoad,
    ChunkTable,
    DropAll,
    EndStores,
    LoadChunks,
    OffloadCommand,
    StoreChunks,
    VoidStores,
)
from kvferry.tiers.keys import KeyChain, Namespace

__all__ = ["OffloadingScheduler", "SeenChunks"]

MAX_TIMED_STEPS = 8
"""More steps than this are never in flight at once."""

BlockTables = Sequence[Sequence[int]]
"""The block ids of a request by KV-cache group."""
ChunkTiers = Callable[[int, int], tuple[str, ...]]
"""The tiers of the chunk with this index in this group."""


@dataclass(slots=True)
class _TrackedRequest:
    """What the scheduler half knows of one request."""

    chain: KeyChain
    num_prompt_tokens: int
    request: Request | None = None
    """Set if events describe the request's blocks."""
    is_outdated: bool = False
    """The keys may not fit the KV any more: the request loads and stores nothing."""

    num_offered: int = 0
    """How many leading chunks were offered to the workers since the request last started."""
    num_counted: int = 0
    """How many leading chunks were counted as used."""
    last_store: int = 0
    """The number of the request's last store; 0 if there was none since the last start."""
    uncopied_from: int = 0
    """The first chunk whose blocks may still be read by a copy, if `last_store` is not copied."""

    num_local_tokens: int = 0
    """How many tokens the engine had when it last asked."""
    hit: Hit | None = None
    is_loading: bool = False
    num_loads_left: int = 1
    max_chunks: int | None = None
    """No more chunks than this can be loaded: the next one was missing."""
    is_counted: bool = False
    """Whether the statistics contain the request's lookup."""


@dataclass(slots=True)
class SeenChunks:
    """How often requests have needed each chunk, for tiers that store only what is needed again."""

    store_after: Mapping[str, int]
    max_chunks: int
    _counts: OrderedDict[ObjectKey, int] = field(default_factory=OrderedDict, init=False)

    @property
    def tiers_of_all(self) -> tuple[str, ...] | None:
        """The tiers of every chunk, if no tier waits until a chunk is needed again."""
        return None if self._is_counting else tuple(self.store_after)

    def note_uses(self, keys: Iterable[ObjectKey]) -> None:
        """Count that one more request needs these chunks."""
        if not self._is_counting:
            return
        for key in keys:
            self._counts[key] = self._counts.pop(key, 0) + 1
            if len(self._counts) > self.max_chunks:
                self._counts.popitem(last=False)

    def tiers_to_store(self, key: ObjectKey) -> tuple[str, ...]:
        """The tiers that shall have the chunk now."""
        count = self._counts.get(key, 0) if self._is_counting else 1
        return tuple(tier for tier, after in self.store_after.items() if count >= after)

    @property
    def _is_counting(self) -> bool:
        return any(after > 1 for after in self.store_after.values())


class OffloadingScheduler:
    """The state and decisions of the connector in the process that schedules."""

    def __init__(
        self,
        config: ConnectorConfig,
        cache: KVCacheConfig,
        extra: OffloadingExtraConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._groups = cache.groups
        self._max_loads = 2 if cache.admits_second_load else 1
        """How often a request may try to load: the second time without the chunks that were
        missing.
        """
        self._local_groups = tuple(
            number for number, group in enumerate(cache.groups) if group.has_local_attention
        )
        self._extra = extra
        self._clock = clock
        self._blocks_per_chunk = extra.blocks_of_chunk(cache.block_size)
        self._chunk_tokens = self._blocks_per_chunk * cache.block_size
        self._lookup: TierLookup | None = None
        self._row_bytes: tuple[int, ...] = ()
        self._tracked: dict[str, _TrackedRequest] = {}
        self._watched: dict[str, _TrackedRequest] = {}
        """The requests whose progress matters: they have chunks to offer, or a sliding window that
        may move on during a copy.
        """
        self._failed: dict[str, tuple[ObjectKey, ...]] = {}
        """Loads that failed on some rank, with the chunks that no tier had."""
        self._ending: set[str] = set()
        """Finished requests whose blocks are still being copied."""
        self._num_stores = 0
        self._copied_by_rank: dict[int, int] = {}
        self._num_copied = 0
        """On every rank, no copy reads the blocks of any store up to this number."""
        self._seen = SeenChunks(extra.store_after(), extra.max_tracker_size)
        self._break_even = BreakEven()
        self._commands: list[OffloadCommand] = []
        self._is_worker_busy = False
        self._num_steps = 0
        self._timed_steps: dict[int, tuple[float, int]] = {}
        """When each step that computes many tokens was built, and how many tokens it computes."""
        self._last_output = 0.0
        """When the engine last reported a step's end."""
        self._stats = OffloadStats()
        self._event_log: KVEventLog | None = None

    def publish_events(self, describe: DescribeBlocks) -> None:
        """Make KV events from now on; `describe` describes blocks as the engine's events do."""
        num_ranks = self._config.parallel.tp_size
        self._event_log = KVEventLog(num_ranks, self._chunk_tokens, describe)

    def serve(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        """Open the tiers of all ranks for lookups. Called when the workers have registered."""
        ranks = [
            part for part in metadata.values() if isinstance(part, OffloadingHandshakeMetadata)
        ]
        if len(ranks) != len(metadata) or not ranks:
            raise LocalProtocolError(
                "the scheduler and all ranks must use the same connector: OffloadingConnector"
            )
        self._row_bytes = ranks[0].row_bytes
        self._copied_by_rank = {part.tp_rank: 0 for part in ranks}
        namespaces = [Namespace(part.factors) for part in ranks]
        pools = [
            reader
            for reader in (open_pool_reader(self._extra, space) for space in namespaces)
            if reader is not None
        ]
        opened = [
            open_tiers_to_look_up(self._extra, space, self._config.secret) for space in namespaces
        ]
        tiers = {name: [rank[name] for rank in opened] for name in opened[0]}
        self._lookup = TierLookup(
            self._groups,
            self._chunk_tokens,
            pools,
            tiers,
            self._extra.lookup_timeout,
            self._clock,
        )

    def close(self) -> None:
        if self._lookup is not None:
            self._lookup.close()

    # -- loads --

    def on_new_request(self, request: Request) -> None:
        salt = request.cache_salt
        if salt is None:
            # The engine cannot tell what the KV depends on, so it is neither stored nor loaded.
            return
        chain = KeyChain(self._chunk_tokens, salt, len(self._groups))
        chain.extend(request.prompt_token_ids, request.num_prompt_tokens)
        tracked = _TrackedRequest(chain, request.num_prompt_tokens, num_loads_left=self._max_loads)
        if self._event_log is not None:
            tracked.request = request
        self._tracked[request.request_id] = tracked
        self._watch(request.request_id, tracked)
        if self._lookup is not None:
            self._lookup.begin(request.request_id, chain.keys)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self._tracked.get(request.request_id)
        if (
            tracked is None
            or self._lookup is None
            or tracked.is_outdated
            or not tracked.num_loads_left
        ):
            return 0, False
        num_tokens = request.num_tokens
        if num_tokens // self._chunk_tokens > len(tracked.chain):
            # A preempted request: its output is part of what it must compute again.
            tracked.chain.extend(request.all_token_ids, num_tokens)
        found = self._lookup.result(
            request.request_id,
            tracked.chain.keys,
            num_tokens,
            num_local_chunks=num_computed_tokens // self._chunk_tokens,
            max_chunks=tracked.max_chunks,
        )
        if isinstance(found, Pending):
            return None, False
        tracked.num_local_tokens, tracked.hit = num_computed_tokens, found
        self._count_lookup(tracked, num_tokens - num_computed_tokens)
        missing = found.num_tokens - num_computed_tokens
        # A chunk of several blocks is loaded whole. If the engine has its first blocks, they may be
        # shared with other requests and must not be written.
        if missing <= 0 or num_computed_tokens % self._chunk_tokens:
            return 0, False
        if self._extra.break_even and not self._break_even.is_load_faster(
            missing, self._bytes_to_load(tracked, found)
        ):
            self._stats.count("skipped_tokens", missing)
            tracked.num_loads_left = 0
            return 0, False
        return missing, True

    def _count_lookup(self, tracked: _TrackedRequest, num_queried: int) -> None:
        assert tracked.hit is not None
        if tracked.is_counted:
            return
        tracked.is_counted = True
        self._stats.count("queried_tokens", max(0, num_queried))
        if not tracked.hit.is_complete:
            self._stats.count("lookup_timeouts")

    def _bytes_to_load(self, tracked: _TrackedRequest, hit: Hit) -> Mapping[str, int]:
        sizes: Counter[str] = Counter()
        for number, (group, row_bytes) in enumerate(
            zip(self._groups, self._row_bytes, strict=True)
        ):
            visible = group.first_visible_token(hit.num_tokens)
            first = max(tracked.num_local_tokens, visible) // self._chunk_tokens
            for tier, count in hit.count_by_tier(number, range(first, hit.num_chunks)).items():
                sizes[tier] += count * row_bytes
        return sizes

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not num_external_tokens or tracked.hit is None:
            return
        hit = tracked.hit
        first = tracked.num_local_tokens // self._chunk_tokens
        end = -(-(tracked.num_local_tokens + num_external_tokens) // self._chunk_tokens)
        span = range(first, min(end, hit.num_chunks))
        chunks = self._chunk_table(
            tracked.chain.keys,
            blocks.get_block_ids(),
            span,
            # A tuple is the usual case, and several times faster.
            (POOL,) if hit.is_all_in_pool else lambda group, index: (hit.tier(group, index),),
        )
        self._describe(tracked, span)
        tracked.is_loading = True
        tracked.num_loads_left -= 1
        self._commands.append(LoadChunks(request.request_id, chunks))
        self._stats.count("hit_tokens", num_external_tokens)

    def _chunk_table(
        self,
        keys: Sequence[Sequence[ObjectKey]],
        tables: BlockTables,
        span: range,
        tiers: ChunkTiers | tuple[str, ...],
    ) -> ChunkTable:
        """The chunks of a span, in all groups that have blocks for them, in the order of the
        prompt. Leaves out chunks without tiers.
        """
        size = self._blocks_per_chunk
        if len(tables) == 1 and not callable(tiers):
            blocks = tuple(tables[0][span.start * size : span.stop * size])
            if len(blocks) == len(span) * size and HOLE not in blocks:
                # The usual case, without a loop.
                chosen = tuple(keys[0][span.start : span.stop])
                count = len(chosen)
                return ChunkTable(size, chosen, (0,) * count, blocks, (tiers,) * count)
        rows: list[tuple[ObjectKey, int, tuple[str, ...]]] = []
        block_ids: list[int] = []
        for index in span:
            for group, table in enumerate(tables):
                blocks = tuple(table[index * size : (index + 1) * size])
                of_chunk = tiers(group, index) if callable(tiers) else tiers
                if of_chunk and len(blocks) == size and HOLE not in blocks:
                    rows.append((keys[group][index], group, of_chunk))
                    block_ids += blocks
        return ChunkTable(
            size,
            tuple(key for key, _, _ in rows),
            tuple(group for _, group, _ in rows),
            tuple(block_ids),
            tuple(of_chunk for _, _, of_chunk in rows),
        )

    def _end_load(self, request_id: str, *, has_failed: bool) -> None:
        missing = self._failed.pop(request_id, ())
        tracked = self._tracked.get(request_id)
        if tracked is None or not tracked.is_loading:
            return
        tracked.is_loading = False
        if not has_failed:
            return
        self._stats.count("failed_loads")
        tracked.max_chunks = self._first_missing(tracked, missing)
        if self._lookup is not None and tracked.num_loads_left:
            # The first answer was wrong, so ask again. Without chunks this only ends the query.
            keys = tracked.chain.keys
            self._lookup.begin(request_id, [group[: tracked.max_chunks] for group in keys])

    def _first_missing(self, tracked: _TrackedRequest, missing: Sequence[ObjectKey]) -> int:
        lost = set(missing)
        for index, keys in enumerate(zip(*tracked.chain.keys, strict=True)):
            if not lost.isdisjoint(keys):
                return index
        # The load failed as a whole: compute the prompt.
        return 0

    # -- stores --

    def build_connector_meta(
        self, slices: Sequence[ScheduledSlice], preempted: Iterable[str], num_tokens: int
    ) -> OffloadingMetadata:
        """Build the message of a step that computes `num_tokens` tokens."""
        self._num_steps += 1
        for request_id in preempted:
            self._restart(request_id)
        if self._watched:
            for part in slices:
                tracked = self._watched.get(part.request_id)
                if tracked is not None and not tracked.is_loading:
                    self._advance(part, tracked)
            if self._local_groups:
                self._void_unlisted({part.request_id for part in slices})
        timed_step = None
        if self._extra.break_even and num_tokens >= MIN_STEP_TOKENS:
            timed_step = self._num_steps
            self._timed_steps[timed_step] = (self._clock(), num_tokens)
            if len(self._timed_steps) > MAX_TIMED_STEPS:
                del self._timed_steps[next(iter(self._timed_steps))]
        commands, self._commands = tuple(self._commands), []
        return OffloadingMetadata(commands, timed_step)

    def is_watched(self, request_id: str) -> bool:
        """Whether `build_connector_meta` has a use for a slice of the request."""
        return request_id in self._watched

    def _restart(self, request_id: str) -> None:
        """A preempted request has lost its blocks."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.is_outdated:
            return
        if self._is_copying(tracked):
            self._commands.append(VoidStores(request_id))
        tracked.num_offered = tracked.last_store = 0
        tracked.num_loads_left, tracked.max_chunks = self._max_loads, None
        self._watch(request_id, tracked)

    def _watch(self, request_id: str, tracked: _TrackedRequest) -> None:
        if self._num_storable(tracked, len(tracked.chain) * self._chunk_tokens):
            self._watched[request_id] = tracked

    def _is_copying(self, tracked: _TrackedRequest) -> bool:
        """Whether a copy may be reading blocks of the request."""
        return tracked.last_store > self._num_copied

    def _advance(self, part: ScheduledSlice, tracked: _TrackedRequest) -> None:
        end = min(self._num_storable(tracked, part.start), len(tracked.chain))
        is_sliding = bool(self._local_groups) and self._is_copying(tracked)
        if end > tracked.num_offered or is_sliding:
            tables = part.block_ids
            if is_sliding:
                self._void_unseen(part.request_id, tracked, tables)
            self._offer(part.request_id, tracked, tables, end)
        if tracked.num_offered >= self._num_storable(
            tracked, len(tracked.chain) * self._chunk_tokens
        ) and not (self._local_groups and self._is_copying(tracked)):
            del self._watched[part.request_id]

    def _num_storable(self, tracked: _TrackedRequest, num_computed_tokens: int) -> int:
        """How many leading chunks hold KV that may be stored."""
        limit = (
            tracked.num_prompt_tokens if self._extra.offload_prompt_only else num_computed_tokens
        )
        return min(limit, num_computed_tokens) // self._chunk_tokens

    def _offer(
        self, request_id: str, tracked: _TrackedRequest, tables: BlockTables, end: int
    ) -> None:
        first = tracked.num_offered
        if end <= first:
            return
        keys = tracked.chain.keys
        if tracked.num_counted < end:
            self._seen.note_uses(keys[0][tracked.num_counted : end])
            tracked.num_counted = end
        chunks = self._chunk_table(
            keys,
            tables,
            range(first, end),
            self._seen.tiers_of_all or (lambda _, index: self._seen.tiers_to_store(keys[0][index])),
        )
        tracked.num_offered = end
        if not len(chunks):
            return
        self._describe(tracked, range(first, end))
        if not self._is_copying(tracked):
            tracked.uncopied_from = first
        self._num_stores += 1
        tracked.last_store = self._num_stores
        self._commands.append(StoreChunks(request_id, chunks, self._num_stores))

    def _describe(self, tracked: _TrackedRequest, span: range) -> None:
        """Describe chunks that tiers may hold soon, for KV events."""
        if self._event_log is not None and tracked.request is not None:
            self._event_log.note_request(tracked.request, tracked.chain.keys, span)

    def _void_unseen(self, request_id: str, tracked: _TrackedRequest, tables: BlockTables) -> None:
        """Make stores void whose blocks have left a sliding window: the engine reuses them."""
        gone: list[ObjectKey] = []
        for group in self._local_groups:
            table, keys = tables[group], tracked.chain.keys[group]
            # Blocks leave a window from the front.
            for index in range(tracked.uncopied_from, tracked.num_offered):
                if index < len(table) and table[index] != HOLE:
                    break
                gone.append(keys[index])
        if gone:
            self._commands.append(VoidStores(request_id, tuple(gone)))

    def _void_unlisted(self, listed: Collection[str]) -> None:
        """Make stores void of running requests that this step does not compute. The engine may
        have freed blocks that left their sliding windows, and does not show their block tables.
        """
        for request_id, tracked in self._watched.items():
            if request_id in listed or not self._is_copying(tracked):
                continue
            span = slice(tracked.uncopied_from, tracked.num_offered)
            gone = [key for group in self._local_groups for key in tracked.chain.keys[group][span]]
            if gone:
                tracked.uncopied_from = tracked.num_offered
                self._commands.append(VoidStores(request_id, tuple(gone)))

    def request_finished(
        self, request: Request, block_ids: BlockTables
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        tracked = self._tracked.pop(request_id, None)
        self._watched.pop(request_id, None)
        if self._lookup is not None:
            self._lookup.end(request_id)
        if tracked is None:
            return False, None
        if tracked.is_loading:
            # The engine keeps the blocks until the load is reported.
            self._commands.append(CancelLoad(request_id))
            return False, None
        if tracked.is_outdated:
            return False, None
        if self._is_copying(tracked):
            if any(len(t) < tracked.num_offered * self._blocks_per_chunk for t in block_ids):
                # The request was preempted after the last step: the engine reuses its blocks.
                self._commands.append(VoidStores(request_id))
                return False, None
            self._void_unseen(request_id, tracked, block_ids)
        end = self._num_storable(tracked, request.num_computed_tokens)
        if end > len(tracked.chain):
            tracked.chain.extend(request.all_token_ids, end * self._chunk_tokens)
        self._offer(request_id, tracked, block_ids, min(end, len(tracked.chain)))
        if not self._is_copying(tracked):
            return False, None
        self._commands.append(EndStores(request_id))
        self._ending.add(request_id)
        return True, None

    def withdraw(self, request_id: str) -> None:
        """Load and store nothing of a request any more: its keys may not fit its KV."""
        tracked = self._tracked.get(request_id)
        if tracked is not None and not tracked.is_outdated:
            tracked.is_outdated = True
            self._watched.pop(request_id, None)
            self._commands.append(VoidStores(request_id))

    def reset_cache(self) -> None:
        """Store nothing of the requests of now: their KV may be of weights that change."""
        self._commands.append(DropAll())
        for tracked in self._tracked.values():
            tracked.is_outdated = True
        self._watched.clear()
        if self._event_log is not None:
            self._event_log.clear()

    # -- reports --

    def take_output(self, output: KVConnectorOutput) -> None:
        now = self._clock()
        worker_metadata = output.kv_connector_worker_meta
        if isinstance(worker_metadata, OffloadingWorkerMetadata):
            self._take_worker_metadata(worker_metadata, now)
        self._last_output = now
        for request_id in output.finished_recving:
            self._end_load(request_id, has_failed=request_id in output.failed_recving)
        self._ending -= output.finished_sending

    def _take_worker_metadata(self, metadata: OffloadingWorkerMetadata, now: float) -> None:
        for request_id, load in metadata.failed.items():
            self._failed[request_id] = self._failed.get(request_id, ()) + load.missing
        if metadata.is_busy is not None:
            self._is_worker_busy = metadata.is_busy
        for load_time in metadata.times:
            self._break_even.note_load(load_time.seconds, load_time.bytes_by_tier)
        for rank, number in metadata.copied.items():
            self._copied_by_rank[rank] = max(number, self._copied_by_rank.get(rank, 0))
            self._num_copied = min(self._copied_by_rank.values())
        if self._event_log is not None:
            for rank, change in metadata.contents:
                self._event_log.note_report(rank, change)
        timed = self._timed_steps.pop(metadata.timed_step or 0, None)
        if timed is not None:
            built, num_tokens = timed
            # With async scheduling, the step before was still running when this one was built.
            self._break_even.note_step(num_tokens, now - max(built, self._last_output))

    def is_load_optional(self, request_id: str) -> bool:
        return True

    def has_pending_commands(self) -> bool:
        return bool(self._commands)

    def has_pending_block_frees(self) -> bool:
        return bool(self._ending)

    @property
    def is_worker_busy(self) -> bool:
        """Whether a rank still stores or loads, so that its counters are about to change."""
        return self._is_worker_busy

    def take_events(self) -> list[KVEvent]:
        return [] if self._event_log is None else self._event_log.take_events()

    def take_stats(self) -> OffloadStats | None:
        stats, self._stats = self._stats, OffloadStats()
        return None if stats.is_empty() else stats
