"""Stores chunks: copies blocks of the cache into rows of the host pool, and stores the rows in the
slower tiers. Pure.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from kvferry.tiers.base import EntryKey, StoreOutcome, StoreResult
from kvferry.tiers.commands import POOL, Chunk, Chunks, StoresCopied
from kvferry.tiers.jobs.base import CopyResult, JobOutbox, JobRows, StoreEntry, StoreRows, batches
from kvferry.transports.base import RowBlocks

MAX_COPY_BYTES = 256 * 1024 * 1024
"""The most bytes of one `StoreRows`: a store that shall be void does not keep the thread for long.
"""
MAX_PENDING_BYTES = 4 * 1024 * 1024 * 1024
"""The most bytes of all `StoreRows` that have not ended: the blocks of finished requests wait for
them, so more stores would take blocks from the requests that run.
"""
MAX_KNOWN_ENTRIES = 65_536
KNOWN_FOR_S = 60.0
"""How long a tier that was seen to have an entry is not offered it again. The tier may evict the
entry in that time.
"""


@dataclass(slots=True)
class EntryStores:
    """The stores in slower tiers that have not ended, and which entries these tiers were seen to
    have.
    """

    tiers: tuple[str, ...]
    """The fastest first."""
    rows: JobRows
    outbox: JobOutbox
    _num_active: int = field(default=0, init=False)
    _known: OrderedDict[tuple[str, EntryKey], float] = field(
        default_factory=OrderedDict, init=False
    )
    """The entries that tiers had, or began to get, at these times."""

    def begin(self, chunk: Chunk, row: int, checksum: int, now: float) -> None:
        """Store a row in the tiers that lack it."""
        pool, place, size = self.rows.pool, self.rows.place(chunk, row), self.rows.size(chunk)
        for tier in self.lacking(chunk, now):
            # Half of the rows stay free of slow stores, so that loads always find a row.
            if 2 * self._num_active >= pool.num_rows:
                self.outbox.count(tier, "dropped_stores")
                continue
            pool.pin(row)
            self.note_known(tier, chunk.key, now)
            self.outbox.start(StoreEntry(tier, chunk.key, row, place, size, checksum))
            self._num_active += 1

    def complete(self, task: StoreEntry, result: StoreResult | CopyResult, seconds: float) -> None:
        count = self.outbox.count
        count(task.tier, "store_seconds", seconds)
        self._num_active -= 1
        self.rows.pool.unpin(task.row)
        if isinstance(result, CopyResult):
            stored = self.rows.find(task.key)
            if stored is not None and stored.row == task.row:
                count(POOL, "refused")
                self.rows.distrust(task.key, stored)
            result = StoreResult(StoreOutcome.FAILED, result.reason)
        match result.outcome:
            case StoreOutcome.STORED:
                count(task.tier, "stores")
                count(task.tier, "stored_bytes", task.size_bytes)
            case StoreOutcome.DROPPED:
                count(task.tier, "dropped_stores")
            case StoreOutcome.FAILED:
                count(task.tier, "failed_stores")
            case StoreOutcome.PRESENT:
                pass
        if result.outcome in (StoreOutcome.STORED, StoreOutcome.PRESENT):
            self.outbox.note_held(task.tier, task.key)
        else:
            self.forget(task.tier, task.key)

    def lacking(self, chunk: Chunk, now: float) -> list[str]:
        """The tiers that shall have the chunk and were not seen to have it lately."""
        never = float("-inf")
        return [
            tier
            for tier in self.tiers
            if tier in chunk.tiers
            and now - self._known.get((tier, chunk.key), never) >= KNOWN_FOR_S
        ]

    def note_known(self, tier: str, key: EntryKey, now: float) -> None:
        """Note that a tier has an entry, or begins to get it."""
        self._known[tier, key] = now
        self._known.move_to_end((tier, key))
        if len(self._known) > MAX_KNOWN_ENTRIES:
            self._known.popitem(last=False)

    def forget(self, tier: str, key: EntryKey) -> None:
        """Note that a tier may lack an entry."""
        self._known.pop((tier, key), None)

    def forget_all(self) -> None:
        self._known.clear()


@dataclass(slots=True)
class _CopyOut:
    """A `StoreRows` that has not ended."""

    request: str
    store_number: int
    chunks: tuple[Chunk, ...]
    rows: tuple[int, ...]
    size_bytes: int
    void_keys: set[EntryKey] = field(default_factory=set)
    is_void: bool = False
    """As a whole."""


@dataclass(slots=True)
class StoreJobs:
    """The copies out of the cache that have not ended."""

    rows: JobRows
    entries: EntryStores
    outbox: JobOutbox
    _copies: dict[StoreRows, _CopyOut] = field(default_factory=dict, init=False)
    _last_store: int = field(default=0, init=False)
    _num_copied: int = field(default=0, init=False)
    """No copy reads the blocks of any store up to this number."""

    def begin(self, request: str, chunks: Chunks, number: int, now: float) -> None:
        """Copy the chunks that the pool lacks, and let the slower tiers get those they lack."""
        self._last_store = max(self._last_store, number)
        reserved = self._reserve_rows(chunks, now)
        for batch in batches(reserved, lambda pair: self.rows.size(pair[0]), MAX_COPY_BYTES):
            self._start_copy(request, number, batch)
        self._report_copied()

    def void(self, request: str, keys: Collection[EntryKey]) -> None:
        """Do not publish these chunks of a request, or all if there are no keys."""
        for copy in self._copies.values():
            if copy.request == request:
                copy.void_keys.update(keys)
                copy.is_void = copy.is_void or not keys

    def void_all(self) -> None:
        for copy in self._copies.values():
            copy.is_void = True

    def complete(self, task: StoreRows, result: CopyResult, seconds: float, now: float) -> None:
        count, pool = self.outbox.count, self.rows.pool
        count(POOL, "store_seconds", seconds)
        copy = self._copies.pop(task)
        for index, (chunk, row) in enumerate(zip(copy.chunks, copy.rows, strict=True)):
            if result.reason or copy.is_void or chunk.key in copy.void_keys:
                pool.discard(row)
                count(POOL, "failed_stores" if result.reason else "dropped_stores")
            elif self.rows.publish(chunk.key, row, checksum := result.checksums[index]):
                count(POOL, "stores")
                count(POOL, "stored_bytes", self.rows.size(chunk))
                self.entries.begin(chunk, row, checksum, now)
                self.rows.release(chunk.key)
        self._report_copied()

    def _reserve_rows(self, chunks: Chunks, now: float) -> Iterator[tuple[Chunk, int]]:
        # The tail first, so that the head of a prompt, which other prompts share, is evicted last.
        for chunk in reversed(self._affordable(chunks)):
            if self._is_stored(chunk, now):
                continue
            row = self.rows.pool.reserve(chunk.key)
            if row is None:
                self.outbox.count(POOL, "dropped_stores")
            else:
                yield chunk, row

    def _affordable(self, chunks: Chunks) -> list[Chunk]:
        """As many leading chunks as may be copied now; without them the others are useless."""
        pending = sum(copy.size_bytes for copy in self._copies.values())
        room = (MAX_PENDING_BYTES - pending) // max(self.rows.row_bytes)
        first = list(chunks)[: max(0, min(room, self.rows.pool.num_rows))]
        if len(first) < len(chunks):
            self.outbox.count(POOL, "dropped_stores", len(chunks) - len(first))
        return first

    def _is_stored(self, chunk: Chunk, now: float) -> bool:
        """Whether the chunk need not be copied. Stores it in slower tiers that lack it."""
        found = self.rows.find(chunk.key)
        if found is not None:
            self.rows.pool.touch(chunk.key)
            if found.row is not None:
                self.outbox.note_held(POOL, chunk.key)
                self.entries.begin(chunk, found.row, found.checksum, now)
            return True
        if self.rows.pool.holds(chunk.key):
            return True  # it is being copied for another request
        return not self.outbox.is_pool_tier and not self.entries.lacking(chunk, now)

    def _start_copy(self, request: str, number: int, batch: list[tuple[Chunk, int]]) -> None:
        chunks, rows = zip(*batch, strict=True)
        address = self.rows.pool.row_address
        copies = (RowBlocks(address(row), chunk.group, chunk.block_ids) for chunk, row in batch)
        task = StoreRows(tuple(copies))
        size_bytes = sum(map(self.rows.size, chunks))
        self._copies[task] = _CopyOut(request, number, chunks, rows, size_bytes)
        self.outbox.start(task)

    def _report_copied(self) -> None:
        numbers = (copy.store_number for copy in self._copies.values())
        num_copied = min(numbers, default=self._last_store + 1) - 1
        if num_copied > self._num_copied:
            self._num_copied = num_copied
            self.outbox.report(StoresCopied(num_copied))
