"""The scheduler half of `OffloadingConnector`: which prompts are loaded from tiers, which blocks
are stored, and the commands for the offload workers.

Storing. A block is stored when the engine has seen the output of the step that filled it. A running
request holds its blocks, so they can be copied while the engine goes on. A finished request keeps
its blocks until the copies have ended (`EndStores`). A preempted request, and a request whose
sliding window has moved on, loses blocks at once: copies that have not ended are then void
(`VoidStores`).

Loading. A load only saves computation: when it fails, the engine computes the prompt, whatever
`kv_load_failure_policy` says, and asks once more for what is left of the prefix.

Runs on the engine's main thread and never blocks.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from kvferry.connectors.offloading.break_even import BreakEven
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
    CancelLoad,
    Chunk,
    DropAll,
    EndStores,
    LoadChunks,
    OffloadCommand,
    StoreChunks,
    VoidStores,
)
from kvferry.tiers.keys import KeyChain, Namespace

__all__ = ["OffloadingScheduler", "SeenChunks"]

MAX_LOADS = 2
"""How often a request may try to load: the second time without the chunks that were missing."""
RECENT_STEPS = 8
"""Copies of blocks that were offered longer ago have almost always ended: a request that finishes
then does not wait for them. If one has not ended, it is void.
"""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _TrackedRequest:
    """What the scheduler half knows of one request."""

    chain: KeyChain
    num_prompt_tokens: int
    num_stored: int = 0
    """How many leading chunks were offered to the workers, or came from them."""
    offered_at: int = -RECENT_STEPS - 1
    """The step of the last offer."""
    num_local_tokens: int = 0
    """How many tokens the engine had when it last asked."""
    hit: Hit | None = None
    is_loading: bool = False
    num_loads: int = 0
    max_chunks: int | None = None
    """No more chunks than this can be loaded: the next one was missing."""
    is_counted: bool = False


@dataclass(slots=True)
class SeenChunks:
    """How often requests have needed each chunk, for tiers that store only what is needed again."""

    store_after: Mapping[str, int]
    max_chunks: int
    _counts: OrderedDict[ObjectKey, int] = field(default_factory=OrderedDict, init=False)

    def tiers_to_store(self, key: ObjectKey) -> tuple[str, ...]:
        """Count one use, and return the tiers that shall have the chunk now."""
        count = 1
        if any(after > 1 for after in self.store_after.values()):
            count += self._counts.pop(key, 0)
            self._counts[key] = count
            if len(self._counts) > self.max_chunks:
                self._counts.popitem(last=False)
        return tuple(tier for tier, after in self.store_after.items() if count >= after)


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
        self._extra = extra
        self._clock = clock
        self._blocks_per_chunk = extra.blocks_of_chunk(cache.block_size)
        self._chunk_tokens = self._blocks_per_chunk * cache.block_size
        self._lookup: TierLookup | None = None
        self._row_bytes: tuple[int, ...] = ()
        self._tracked: dict[str, _TrackedRequest] = {}
        self._ending: set[str] = set()
        """Finished requests whose load has not ended on every rank."""
        self._failed: dict[str, tuple[ObjectKey, ...]] = {}
        """Loads that failed on some rank, with the chunks that no tier had."""
        self._seen = SeenChunks(extra.store_after(), extra.max_tracker_size)
        self._break_even = BreakEven()
        self._commands: list[OffloadCommand] = []
        self._is_worker_busy = False
        self._num_steps = 0
        self._step_began: tuple[float, int] | None = None
        """When the last step was built, and how many tokens it computes."""
        self._stats = OffloadStats()

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
        self._tracked[request.request_id] = _TrackedRequest(chain, request.num_prompt_tokens)
        if self._lookup is not None:
            self._lookup.begin(request.request_id, chain.keys)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or self._lookup is None or tracked.num_loads >= MAX_LOADS:
            return 0, False
        if request.num_tokens > tracked.num_prompt_tokens:
            # A preempted request: its output is part of what it must compute again.
            tracked.chain.extend(request.all_token_ids, request.num_tokens)
        found = self._lookup.result(request.request_id, tracked.chain.keys, tracked.max_chunks)
        if isinstance(found, Pending):
            return None, False
        tracked.num_local_tokens, tracked.hit = num_computed_tokens, found
        missing = found.num_chunks * self._chunk_tokens - num_computed_tokens
        if not tracked.is_counted:
            tracked.is_counted = True
            self._stats.count("queried_tokens", max(0, request.num_tokens - num_computed_tokens))
            if not found.is_complete:
                self._stats.count("lookup_timeouts")
        # A chunk of several blocks is loaded whole. If the engine has its first blocks, they may be
        # shared with other requests and must not be written.
        if missing <= 0 or num_computed_tokens % self._chunk_tokens:
            return 0, False
        if self._extra.break_even and not self._break_even.is_load_faster(
            missing, self._bytes_to_load(tracked)
        ):
            self._stats.count("skipped_tokens", missing)
            tracked.num_loads = MAX_LOADS
            return 0, False
        return missing, True

    def _bytes_to_load(self, tracked: _TrackedRequest) -> dict[str, int]:
        assert tracked.hit is not None
        first = tracked.num_local_tokens // self._chunk_tokens
        sizes: dict[str, int] = {}
        for row_bytes, tiers in zip(self._row_bytes, tracked.hit.tiers, strict=True):
            for tier in tiers[first:]:
                if tier:
                    sizes[tier] = sizes.get(tier, 0) + row_bytes
        return sizes

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not num_external_tokens or tracked.hit is None:
            return
        first = tracked.num_local_tokens // self._chunk_tokens
        end = -(-(tracked.num_local_tokens + num_external_tokens) // self._chunk_tokens)
        end = min(end, tracked.hit.num_chunks)
        chunks = self._chunks(
            tracked.chain.keys, blocks.get_block_ids(), (first, end), self._load_sources(tracked)
        )
        tracked.is_loading = True
        tracked.num_loads += 1
        tracked.num_stored = max(tracked.num_stored, first)
        self._commands.append(LoadChunks(request.request_id, chunks))
        self._stats.count("hit_tokens", num_external_tokens)

    def _load_sources(self, tracked: _TrackedRequest) -> Callable[[int, int], tuple[str, ...]]:
        hit = tracked.hit
        assert hit is not None
        return lambda group, index: (hit.tiers[group][index],) if hit.tiers[group][index] else ()

    def _chunks(
        self,
        keys: Sequence[Sequence[ObjectKey]],
        tables: Sequence[Sequence[int]],
        span: tuple[int, int],
        tiers: Callable[[int, int], tuple[str, ...]],
    ) -> tuple[Chunk, ...]:
        """The chunks of a span, in all groups that have blocks for them."""
        size = self._blocks_per_chunk
        chunks = []
        for group, table in enumerate(tables):
            for index in range(*span):
                block_ids = tuple(table[index * size : (index + 1) * size])
                if len(block_ids) == size and HOLE not in block_ids:
                    key = keys[group][index]
                    chunks.append(Chunk(key, group, block_ids, tiers(group, index)))
        return tuple(chunks)

    def take_output(self, output: KVConnectorOutput) -> None:
        self._note_step_ended()
        worker_metadata = output.kv_connector_worker_meta
        if isinstance(worker_metadata, OffloadingWorkerMetadata):
            for request_id, load in worker_metadata.failed.items():
                self._failed[request_id] = self._failed.get(request_id, ()) + load.missing
            if worker_metadata.is_busy is not None:
                self._is_worker_busy = worker_metadata.is_busy
            for load_time in worker_metadata.times:
                self._break_even.note_load(load_time.seconds, load_time.bytes_by_tier)
        for request_id in output.finished_recving:
            self._ending.discard(request_id)
            missing = self._failed.pop(request_id, ())
            tracked = self._tracked.get(request_id)
            if tracked is None or not tracked.is_loading:
                continue
            tracked.is_loading = False
            if request_id in output.failed_recving:
                self._stats.count("failed_loads")
                tracked.max_chunks = self._first_missing(tracked, missing)
                self._lookup_end(request_id)
            else:
                # The tiers have these chunks; they are offered again only to slower tiers.
                tracked.num_loads = 0

    def _first_missing(self, tracked: _TrackedRequest, missing: Sequence[ObjectKey]) -> int:
        lost = set(missing)
        for index, keys in enumerate(zip(*tracked.chain.keys, strict=True)):
            if not lost.isdisjoint(keys):
                return index
        # The load failed as a whole: compute the prompt.
        return 0

    def _lookup_end(self, request_id: str) -> None:
        if self._lookup is not None:
            self._lookup.end(request_id)

    def is_load_optional(self, request_id: str) -> bool:
        return True

    # -- stores --

    def build_connector_meta(
        self, slices: Sequence[ScheduledSlice], preempted: Iterable[str], num_tokens: int
    ) -> OffloadingMetadata:
        """Build the message of a step that computes `num_tokens` tokens."""
        self._num_steps += 1
        for request_id in preempted:
            self._void(request_id)
        for part in slices:
            tracked = self._tracked.get(part.request_id)
            if tracked is not None and not tracked.is_loading:
                self._advance(part, tracked)
        self._step_began = (self._clock(), num_tokens)
        commands, self._commands = tuple(self._commands), []
        return OffloadingMetadata(commands)

    def _void(self, request_id: str) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.num_stored = 0
            self._commands.append(VoidStores(request_id))

    def _advance(self, part: ScheduledSlice, tracked: _TrackedRequest) -> None:
        end = self._num_storable(tracked, part.start)
        is_windowed = any(group.has_local_attention for group in self._groups)
        if end <= tracked.num_stored and not (
            is_windowed and self._num_steps - tracked.offered_at <= RECENT_STEPS
        ):
            return
        tables = part.block_ids
        if is_windowed:
            self._void_unseen(part.request_id, tracked, tables)
        self._offer(part.request_id, tracked, tables, end)

    def _num_storable(self, tracked: _TrackedRequest, num_computed_tokens: int) -> int:
        """How many leading chunks hold KV that may be stored."""
        limit = (
            tracked.num_prompt_tokens if self._extra.offload_prompt_only else num_computed_tokens
        )
        return min(limit, num_computed_tokens) // self._chunk_tokens

    def _offer(
        self,
        request_id: str,
        tracked: _TrackedRequest,
        tables: Sequence[Sequence[int]],
        end: int,
        token_ids: Sequence[int] | None = None,
    ) -> None:
        if end <= tracked.num_stored:
            return
        chain = tracked.chain
        if len(chain) < end and token_ids is not None:
            chain.extend(token_ids, end * self._chunk_tokens)
        end = min(end, len(chain))
        wanted = {
            index: self._seen.tiers_to_store(chain.keys[0][index])
            for index in range(tracked.num_stored, end)
        }
        chunks = self._chunks(
            chain.keys, tables, (tracked.num_stored, end), lambda group, index: wanted[index]
        )
        tracked.num_stored = max(tracked.num_stored, end)
        chunks = tuple(chunk for chunk in chunks if chunk.tiers)
        if chunks:
            tracked.offered_at = self._num_steps
            self._commands.append(StoreChunks(request_id, chunks))

    def _void_unseen(
        self, request_id: str, tracked: _TrackedRequest, tables: Sequence[Sequence[int]]
    ) -> None:
        """Make stores void whose blocks have left a sliding window: the engine reuses them."""
        size, keys = self._blocks_per_chunk, tracked.chain.keys
        gone = tuple(
            keys[number][index]
            for number, group in enumerate(self._groups)
            if group.has_local_attention
            for index in range(min(tracked.num_stored, len(tracked.chain)))
            if HOLE in tables[number][index * size : (index + 1) * size]
        )
        if gone:
            self._commands.append(VoidStores(request_id, gone))

    def request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        tracked = self._tracked.pop(request_id, None)
        self._lookup_end(request_id)
        if tracked is None:
            return False, None
        if tracked.is_loading:
            # The engine keeps the blocks until the load is reported.
            self._ending.add(request_id)
            self._commands.append(CancelLoad(request_id))
            return False, None
        end = self._num_storable(tracked, request.num_computed_tokens)
        self._offer(request_id, tracked, block_ids, end, request.all_token_ids)
        if self._num_steps - tracked.offered_at <= RECENT_STEPS:
            self._commands.append(EndStores(request_id))
            return True, None
        if tracked.offered_at > 0:
            self._commands.append(VoidStores(request_id))
        return False, None

    def reset_cache(self) -> None:
        """Store nothing of the requests of now: their KV may be of weights that change."""
        self._commands.append(DropAll())
        for request_id, tracked in list(self._tracked.items()):
            if not tracked.is_loading:
                del self._tracked[request_id]
            tracked.num_loads = MAX_LOADS
            tracked.num_prompt_tokens = 0
            self._commands.append(VoidStores(request_id))

    # -- reports --

    def has_pending_commands(self) -> bool:
        return bool(self._commands)

    @property
    def is_worker_busy(self) -> bool:
        """Whether a rank still stores or loads, so that its counters are about to change."""
        return self._is_worker_busy

    def _note_step_ended(self) -> None:
        if self._step_began is not None:
            began, num_tokens = self._step_began
            self._break_even.note_step(num_tokens, self._clock() - began)
            self._step_began = None

    def take_stats(self) -> OffloadStats | None:
        stats, self._stats = self._stats, OffloadStats()
        return None if stats.is_empty() else stats
