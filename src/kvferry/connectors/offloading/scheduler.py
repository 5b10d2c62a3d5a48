"""The scheduler side of `OffloadingConnector`: which prompts are loaded from tiers (`loads.py`),
which blocks are stored (`stores.py`), and the commands for the offload workers.

Runs on the engine's main thread and never blocks.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.config import OffloadingExtraConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorHandshakeMetadata,
    KVConnectorOutput,
    Request,
    SchedulerSide,
    Step,
)
from kvferry.connectors.offloading.break_even import BreakEven
from kvferry.connectors.offloading.events import DescribeBlocks, KVEvent, KVEventLog
from kvferry.connectors.offloading.loads import RequestLoads
from kvferry.connectors.offloading.metadata import (
    EndStores,
    OffloadingHandshakeMetadata,
    OffloadingMetadata,
    OffloadingWorkerMetadata,
    OffloadStats,
)
from kvferry.connectors.offloading.requests import TrackedRequest
from kvferry.connectors.offloading.settings import open_lookup
from kvferry.connectors.offloading.stores import RequestStores, SeenChunks
from kvferry.errors import LocalProtocolError
from kvferry.tiers.commands import DropAll, OffloadCommand, VoidStores
from kvferry.tiers.keys import KeyChain, Namespace
from kvferry.types import BlockIds


class OffloadingScheduler(SchedulerSide):
    """The state and decisions of the connector in the process that schedules."""

    def __init__(
        self,
        config: ConnectorConfig,
        cache: KVCacheConfig,
        extra: OffloadingExtraConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._cache = cache
        self._extra = extra
        self._clock = clock
        self._chunk_tokens = extra.blocks_of_chunk(cache.block_size) * cache.block_size
        self._has_holes = any(group.has_local_attention for group in cache.groups)
        self._commands: list[OffloadCommand | EndStores] = []
        """Filled by all parts, and sent with the next step."""
        self._break_even = BreakEven() if extra.break_even else None
        max_loads = 2 if cache.admits_second_load else 1
        self._loads = RequestLoads(
            cache.groups, self._chunk_tokens, max_loads, self._break_even, self._commands
        )
        self._stores = RequestStores(
            cache.groups,
            self._chunk_tokens,
            SeenChunks(extra.store_after(), extra.max_tracker_size),
            self._commands,
            prompt_only=extra.offload_prompt_only,
        )
        self._tracked: dict[str, TrackedRequest] = {}
        self._event_log: KVEventLog | None = None
        self._busy: dict[int, bool] = {}
        """By rank: whether it stores or loads, so that its counters are about to change."""

    def publish_events(self, describe: DescribeBlocks) -> None:
        """Make KV events from now on; `describe` describes blocks as the engine's events do."""
        num_ranks = self._config.parallel.tp_size
        self._event_log = KVEventLog(num_ranks, self._chunk_tokens, describe)

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Open the tiers of all ranks for lookups. Called when the workers have registered."""
        ranks = [
            part for part in metadata.values() if isinstance(part, OffloadingHandshakeMetadata)
        ]
        if len(ranks) != len(metadata) or not ranks:
            raise LocalProtocolError(
                "the scheduler and all ranks must use the same connector: OffloadingConnector"
            )
        namespaces = [Namespace(part.factors) for part in ranks]
        lookup = open_lookup(self._config, self._extra, self._cache, namespaces, self._clock)
        self._loads.open(lookup, ranks[0].row_bytes)
        self._stores.set_ranks(part.tp_rank for part in ranks)

    def shutdown(self) -> None:
        self._loads.close()

    # -- requests --

    def on_new_request(self, request: Request) -> None:
        salt = request.cache_salt
        if salt is None:
            # The engine cannot tell what the KV depends on, so it is neither stored nor loaded.
            return
        chain = KeyChain(self._chunk_tokens, salt, len(self._cache.groups))
        chain.extend(request.prompt_token_ids, request.num_prompt_tokens)
        tracked = TrackedRequest(
            request.request_id,
            chain,
            request.num_prompt_tokens,
            self._chunk_tokens // self._cache.block_size,
            self._has_holes,
            described_by=None if self._event_log is None else (self._event_log, request),
        )
        self._tracked[request.request_id] = tracked
        self._stores.watch(tracked)
        self._loads.begin_lookup(tracked)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.is_outdated:
            return 0, False
        count = self._loads.find(tracked, request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        tracked = self._tracked.get(request.request_id)
        if tracked is not None and num_external_tokens:
            self._loads.start(tracked, blocks.get_block_ids(), num_external_tokens)

    def request_finished_all_groups(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        tracked = self._tracked.pop(request_id, None)
        self._stores.watched.pop(request_id, None)
        was_loading = self._loads.finish(request_id, tracked)
        if tracked is None or was_loading or tracked.is_outdated:
            return False, None
        return self._stores.finish(tracked, request, block_ids), None

    def withdraw(self, request_id: str) -> None:
        """Load and store nothing of a request any more: its keys may not fit its KV."""
        tracked = self._tracked.get(request_id)
        if tracked is not None and not tracked.is_outdated:
            tracked.is_outdated = True
            self._stores.watched.pop(request_id, None)
            self._commands.append(VoidStores(request_id))

    def reset_cache(self) -> None:
        """Store nothing of the requests of now: their KV may be of weights that change."""
        self._commands.append(DropAll())
        for tracked in self._tracked.values():
            tracked.is_outdated = True
        self._stores.watched.clear()
        if self._event_log is not None:
            self._event_log.clear()

    # -- steps --

    def build_connector_meta(self, scheduler_output: Step) -> OffloadingMetadata:
        for request_id in scheduler_output.preempted_req_ids:
            tracked = self._tracked.get(request_id)
            if tracked is not None and not tracked.is_outdated:
                self._loads.restart(tracked)
                self._stores.restart(tracked)
        self._stores.advance(scheduler_output.slices)
        timed_step = None
        if self._break_even is not None:
            num_tokens = scheduler_output.total_num_scheduled_tokens
            timed_step = self._break_even.begin_step(num_tokens, self._clock())
        commands = tuple(self._commands)
        self._commands.clear()
        return OffloadingMetadata(commands, timed_step)

    def needs_slices(self, request_id: str) -> bool:
        return request_id in self._stores.watched

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        metadata = connector_output.kv_connector_worker_meta
        timed_step = None
        if isinstance(metadata, OffloadingWorkerMetadata):
            self._take_worker_metadata(metadata)
            timed_step = metadata.timed_step
        if self._break_even is not None:
            self._break_even.end_step(timed_step, self._clock())
        for request_id in connector_output.finished_recving:
            has_failed = request_id in connector_output.failed_recving
            self._loads.end(request_id, self._tracked.get(request_id), has_failed=has_failed)
        self._stores.ending -= connector_output.finished_sending

    def _take_worker_metadata(self, metadata: OffloadingWorkerMetadata) -> None:
        self._loads.note_failures(metadata.loads)
        self._stores.note_copied(metadata.copied)
        self._busy |= metadata.busy
        if self._break_even is not None:
            for load in metadata.loads:
                self._break_even.note_load(load.seconds, load.bytes_by_tier)
        if self._event_log is not None:
            for rank, change in metadata.contents:
                self._event_log.note_report(rank, change)

    # -- reports --

    def has_pending_push_work(self) -> bool:
        # Steps without tokens carry the counters of slow writes to the engine's metrics.
        return bool(self._commands) or any(self._busy.values())

    def has_urgent_work(self) -> bool:
        return bool(self._commands)

    def has_pending_block_frees(self) -> bool:
        return bool(self._stores.ending)

    def take_events(self) -> list[KVEvent]:
        return [] if self._event_log is None else self._event_log.take_events()

    def get_kv_connector_stats(self) -> OffloadStats | None:
        return self._loads.take_stats()
