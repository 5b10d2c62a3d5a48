"""Decides which blocks are stored in the tiers, and when the engine may use them again.

A block is stored when the engine has seen the output of the step that filled it. A running request
holds its blocks, so they can be copied while the engine goes on. The workers report which stores
have been copied; a request that finishes earlier keeps its blocks until its copies have ended
(`EndStores`). A preempted request, and a request whose sliding window has moved on, loses blocks at
once: copies that have not ended are then void (`VoidStores`).
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.connectors.contract import KVCacheGroup, Request, ScheduledSlice
from kvferry.connectors.offloading.metadata import EndStores
from kvferry.connectors.offloading.requests import TrackedRequest
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.tiers.base import EntryKey
from kvferry.tiers.commands import OffloadCommand, StoreChunks, VoidStores
from kvferry.types import BlockIds


@dataclass(slots=True)
class SeenChunks:
    """How often requests have needed each chunk, for tiers that store only what is needed again."""

    store_after: Mapping[str, int]
    max_chunks: int
    tiers_of_all: tuple[str, ...] | None = field(init=False)
    """The tiers of every chunk, if no tier waits until a chunk is needed again."""
    _counts: OrderedDict[EntryKey, int] = field(default_factory=OrderedDict, init=False)

    def __post_init__(self) -> None:
        is_counting = any(after > 1 for after in self.store_after.values())
        self.tiers_of_all = None if is_counting else tuple(self.store_after)

    def note_uses(self, keys: Iterable[EntryKey]) -> None:
        """Count that one more request needs these chunks."""
        if self.tiers_of_all is not None:
            return
        for key in keys:
            self._counts[key] = self._counts.pop(key, 0) + 1
            if len(self._counts) > self.max_chunks:
                self._counts.popitem(last=False)

    def tiers_to_store(self, key: EntryKey) -> tuple[str, ...]:
        """The tiers that shall have the chunk now."""
        if self.tiers_of_all is not None:
            return self.tiers_of_all
        count = self._counts.get(key, 0)
        return tuple(tier for tier, after in self.store_after.items() if count >= after)


class RequestStores:
    """The stores of all requests. With `prompt_only`, the KV of output is not stored."""

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        chunk_tokens: int,
        seen: SeenChunks,
        commands: list[OffloadCommand | EndStores],
        *,
        prompt_only: bool,
    ) -> None:
        self._local_groups = tuple(
            number for number, group in enumerate(groups) if group.has_local_attention
        )
        self._chunk_tokens = chunk_tokens
        self._seen = seen
        self._commands = commands
        self._prompt_only = prompt_only
        self.watched: dict[str, TrackedRequest] = {}
        """The requests whose progress matters: they have chunks to offer, or a sliding window that
        may move on during a copy.
        """
        self.ending: set[str] = set()
        """Finished requests whose blocks are still being copied."""
        self._num_stores = 0
        self._copied_by_rank: dict[int, int] = {}
        self._num_copied = 0
        """On every rank, no copy reads the blocks of any store up to this number."""

    def set_ranks(self, ranks: Iterable[int]) -> None:
        """Count a store as copied when these ranks have copied it."""
        self._copied_by_rank = dict.fromkeys(ranks, 0)

    def note_copied(self, copied_by_rank: Mapping[int, int]) -> None:
        for rank, number in copied_by_rank.items():
            self._copied_by_rank[rank] = max(number, self._copied_by_rank.get(rank, 0))
            self._num_copied = min(self._copied_by_rank.values())

    def watch(self, tracked: TrackedRequest) -> None:
        """Follow a request that begins to compute, if it has chunks to offer."""
        if self._num_offerable(tracked):
            self.watched[tracked.request_id] = tracked

    def restart(self, tracked: TrackedRequest) -> None:
        """A preempted request has lost its blocks."""
        if self._is_copying(tracked):
            self._commands.append(VoidStores(tracked.request_id))
        tracked.store.num_offered = tracked.store.last_store = 0
        self.watch(tracked)

    # -- progress --

    def advance(self, slices: Sequence[ScheduledSlice]) -> None:
        """Offer the chunks that requests have filled before this step."""
        if not self.watched:
            return
        for part in slices:
            tracked = self.watched.get(part.request_id)
            if tracked is not None and not tracked.load.num_loading_tokens:
                self._advance(part, tracked)
        if self._local_groups:
            # The engine does not show the block tables of requests that this step does not compute.
            # Blocks that left their sliding windows may be free.
            listed = {part.request_id for part in slices}
            for tracked in [each for name, each in self.watched.items() if name not in listed]:
                self._void_unseen(tracked, None)

    def finish(self, tracked: TrackedRequest, request: Request, tables: BlockIds) -> bool:
        """Offer the last chunks of a request that has ended; whether its blocks must be kept until
        their copies have ended.
        """
        num_blocks = tracked.store.num_offered * tracked.blocks_per_chunk
        if self._is_copying(tracked) and any(len(table) < num_blocks for table in tables):
            # The request was preempted after the last step: the engine reuses its blocks.
            self._commands.append(VoidStores(tracked.request_id))
            return False
        self._void_unseen(tracked, tables)
        end = self._num_storable(tracked, request.num_computed_tokens)
        if end > len(tracked.chain):
            tracked.chain.extend(request.all_token_ids, end * self._chunk_tokens)
        self._offer(tracked, tables, min(end, len(tracked.chain)))
        if not self._is_copying(tracked):
            return False
        self._commands.append(EndStores(tracked.request_id, tracked.store.last_store))
        self.ending.add(tracked.request_id)
        return True

    def _advance(self, part: ScheduledSlice, tracked: TrackedRequest) -> None:
        end = min(self._num_storable(tracked, part.num_written), len(tracked.chain))
        if end > tracked.store.num_offered or self._is_sliding(tracked):
            tables = part.block_ids
            self._void_unseen(tracked, tables)
            self._offer(tracked, tables, end)
        is_done = tracked.store.num_offered >= self._num_offerable(tracked)
        if is_done and not self._is_sliding(tracked):
            del self.watched[part.request_id]

    def _offer(self, tracked: TrackedRequest, tables: BlockIds, end: int) -> None:
        state, keys = tracked.store, tracked.chain.keys[0]
        first = state.num_offered
        if end <= first:
            return
        if state.num_counted < end:
            self._seen.note_uses(keys[state.num_counted : end])
            state.num_counted = end
        chunks = tracked.chunk_table(
            tables,
            range(first, end),
            self._seen.tiers_of_all or (lambda _, index: self._seen.tiers_to_store(keys[index])),
        )
        state.num_offered = end
        if not len(chunks):
            return
        tracked.describe(range(first, end))
        if not self._is_copying(tracked):
            state.uncopied_from = first
        self._num_stores += 1
        state.last_store = self._num_stores
        self._commands.append(StoreChunks(tracked.request_id, chunks, self._num_stores))

    def _num_offerable(self, tracked: TrackedRequest) -> int:
        """How many leading chunks may be stored while the request runs."""
        return self._num_storable(tracked, len(tracked.chain) * self._chunk_tokens)

    def _num_storable(self, tracked: TrackedRequest, num_computed_tokens: int) -> int:
        """How many leading chunks hold KV that may be stored."""
        limit = tracked.num_prompt_tokens if self._prompt_only else num_computed_tokens
        return min(limit, num_computed_tokens) // self._chunk_tokens

    # -- blocks that are gone --

    def _is_copying(self, tracked: TrackedRequest) -> bool:
        """Whether a copy may be reading blocks of the request."""
        return tracked.store.last_store > self._num_copied

    def _is_sliding(self, tracked: TrackedRequest) -> bool:
        """Whether blocks may leave a sliding window while a copy reads them."""
        return bool(self._local_groups) and self._is_copying(tracked)

    def _void_unseen(self, tracked: TrackedRequest, tables: BlockIds | None) -> None:
        """Make stores void whose blocks have left a sliding window: the engine reuses them. Without
        block tables, all may have left.
        """
        if not self._is_sliding(tracked):
            return
        state = tracked.store
        gone: list[EntryKey] = []
        first_kept = state.num_offered
        for group in self._local_groups:
            keys, table = tracked.chain.keys[group], () if tables is None else tables[group]
            # Blocks leave a window from the front.
            index = state.uncopied_from
            while index < state.num_offered and (index >= len(table) or table[index] == NO_BLOCK):
                gone.append(keys[index])
                index += 1
            first_kept = min(first_kept, index)
        state.uncopied_from = first_kept
        if gone:
            self._commands.append(VoidStores(tracked.request_id, tuple(gone)))
