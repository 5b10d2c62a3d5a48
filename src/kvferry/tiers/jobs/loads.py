"""Loads chunks: entries of slower tiers into rows of the host pool, and rows into blocks of the
engine's cache. Pure.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.tiers.base import EntryKey, LoadOutcome, LoadResult
from kvferry.tiers.commands import POOL, Chunk, Chunks, LoadEnded
from kvferry.tiers.jobs.base import CopyResult, JobOutbox, JobRows, LoadEntry, LoadRows, batches
from kvferry.tiers.jobs.stores import EntryStores
from kvferry.tiers.pool.reader import StoredRow
from kvferry.transports.base import RowBlocks

MAX_COPY_BYTES = 1024 * 1024 * 1024
"""The most bytes of one `LoadRows`."""

_COUNTERS = {
    LoadOutcome.MISSING: "misses",
    LoadOutcome.REFUSED: "refused",
    LoadOutcome.FAILED: "failed_loads",
}


@dataclass(slots=True)
class _Load:
    """A load that has not ended."""

    request: str
    deadline: float
    began: float
    open: dict[EntryKey, Chunk]
    """The chunks whose blocks are not filled yet."""
    num_copies: int = 0
    """How many `LoadRows` may be writing into the blocks now."""
    failure: str = ""
    """Why the load needs no chunk any more."""
    is_late: bool = False
    """Whether the load has failed because it took too long."""
    missing: list[EntryKey] = field(default_factory=list)
    bytes_by_tier: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _EntryLoad:
    """An entry that is being loaded from slower tiers, for one or more loads."""

    chunk: Chunk
    untried: deque[str]
    """The tiers that have not been tried yet."""
    waiting: list[tuple[_Load, Chunk]]
    """The loads that wait for the entry, each with the blocks that it shall fill."""
    row: int | None = None

    @property
    def still_waiting(self) -> list[tuple[_Load, Chunk]]:
        return [(load, chunk) for load, chunk in self.waiting if not load.failure]


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the row of a load came from, and what its checksum must be."""

    chunk: Chunk
    tier: str
    stored: StoredRow


@dataclass(frozen=True, slots=True)
class _CopyIn:
    """A `LoadRows` that has not ended."""

    load: _Load
    sources: Sequence[_Source]


@dataclass(slots=True)
class LoadJobs:
    """The loads that have not ended, the entries that they wait for, and their copies into the
    cache.
    """

    tiers: tuple[str, ...]
    """The fastest first."""
    rows: JobRows
    entry_stores: EntryStores
    outbox: JobOutbox
    timeout_s: float
    _loads: dict[str, _Load] = field(default_factory=dict, init=False)
    """By request."""
    _copies: dict[LoadRows, _CopyIn] = field(default_factory=dict, init=False)
    _entries: dict[EntryKey, _EntryLoad] = field(default_factory=dict, init=False)
    _without_row: deque[_EntryLoad] = field(default_factory=deque, init=False)
    """Entries that wait for a free row of the pool."""

    @property
    def is_idle(self) -> bool:
        return not self._loads

    def begin(self, request: str, chunks: Chunks, now: float) -> None:
        load = _Load(request, now + self.timeout_s, now, {chunk.key: chunk for chunk in chunks})
        self._loads[request] = load
        sources, others = [], []
        for chunk in load.open.values():
            found = self.rows.find(chunk.key)
            if found is None:
                others.append(chunk)
            else:
                self.rows.pool.touch(chunk.key)
                sources.append(_Source(chunk, POOL, found))
        # Copies first: an entry that fails at once ends the load, but not before its copies.
        self._start_copies(load, sources)
        for chunk in others:
            self._load_entry(load, chunk, chunk.tiers, now)
        self._check(load, now)

    def cancel(self, request: str, now: float) -> None:
        if request in self._loads:
            self._fail(self._loads[request], "the request has ended", now)

    def expire(self, now: float) -> None:
        """Fail every load whose time is over."""
        for load in [load for load in self._loads.values() if load.deadline <= now]:
            if not load.failure:
                # Only what was still to come counts, so that the engine learns which tier is slow.
                load.bytes_by_tier.clear()
                for chunk in load.open.values():
                    if chunk.tiers and chunk.tiers[0] != POOL:
                        self._count_bytes(load, chunk, chunk.tiers[0])
                load.is_late = True
                self._fail(load, f"the load took longer than {self.timeout_s:g} s", now)

    def next_deadline(self) -> float | None:
        deadlines = (load.deadline for load in self._loads.values() if not load.failure)
        return min(deadlines, default=None)

    # -- entries of slower tiers --

    def complete_entry(
        self, task: LoadEntry, result: LoadResult | CopyResult, seconds: float, now: float
    ) -> None:
        self.outbox.count(task.tier, "load_seconds", seconds)
        entry = self._entries[task.key]
        if isinstance(result, LoadResult):
            self.outbox.count(task.tier, _COUNTERS[result.outcome])
            self.entry_stores.forget(task.tier, task.key)
            if result.outcome is not LoadOutcome.FAILED:
                self.outbox.note_gone(task.tier, task.key)
            reason = result.reason or f"the tier {task.tier} no longer has the chunk"
            self._advance(entry, reason, now)
            return
        del self._entries[task.key]
        waiting = entry.still_waiting
        if not waiting:
            self.rows.pool.discard(task.row)
            return
        self.entry_stores.note_known(task.tier, task.key, now)
        self.outbox.note_held(task.tier, task.key)
        is_published = self.rows.publish(task.key, task.row, *result.checksums)
        tier = task.tier
        for load, chunk in waiting:
            stored = self.rows.find(task.key)
            if stored is None:  # the pool was cleared meanwhile
                self._load_entry(load, chunk, (task.tier,), now)
            else:
                self._start_copies(load, [_Source(chunk, tier, stored)])
                tier = POOL  # the others need no further read of the tier
        if is_published:
            # Only now: the copies have pinned the row.
            self.rows.release(task.key)

    def retry(self, now: float) -> None:
        """Try once more to load the entries that wait for a row of the pool."""
        for _ in range(len(self._without_row)):
            self._advance(self._without_row.popleft(), "the host pool has no free row", now)

    def _load_entry(self, load: _Load, chunk: Chunk, hints: Sequence[str], now: float) -> None:
        """Load a chunk that the pool does not have from the tiers, one after the other, those in
        `hints` first. Loads of the same chunk share one `_EntryLoad`.
        """
        entry = self._entries.get(chunk.key)
        if entry is not None:
            entry.waiting.append((load, chunk))
            return
        hinted = [tier for tier in hints if tier in self.tiers]
        others = [tier for tier in self.tiers if tier not in hinted]
        entry = _EntryLoad(chunk, deque([*hinted, *others]), [(load, chunk)])
        self._entries[chunk.key] = entry
        self._advance(entry, "no tier has the chunk", now)

    def _advance(self, entry: _EntryLoad, reason: str, now: float) -> None:
        """Take the chunk from the pool if it is there by now, else try the next tier. `reason` is
        why the chunk is missing if there is none.
        """
        key, pool = entry.chunk.key, self.rows.pool
        found = None if entry.row is not None else self.rows.find(key)
        waiting = entry.still_waiting
        if found is not None or not entry.untried or not waiting:
            del self._entries[key]
            if entry.row is not None:
                pool.discard(entry.row)
            for load, chunk in waiting:
                if found is not None:
                    self._start_copies(load, [_Source(chunk, POOL, found)])
                elif not load.failure:
                    load.missing.append(key)
                    self._fail(load, reason, now)
            return
        if entry.row is None and not pool.holds(key):
            entry.row = pool.reserve(key)
        if entry.row is None:
            self._without_row.append(entry)
            return
        size_bytes = self.rows.size(entry.chunk)
        place = self.rows.place(entry.chunk, entry.row)
        self.outbox.start(LoadEntry(entry.untried.popleft(), key, entry.row, place, size_bytes))

    # -- copies into the cache --

    def _start_copies(self, load: _Load, sources: Sequence[_Source]) -> None:
        def size_of(source: _Source) -> int:
            return self.rows.size(source.chunk)

        for batch in batches(sources, size_of, MAX_COPY_BYTES):
            task = LoadRows(tuple(self._pinned(source) for source in batch))
            load.num_copies += 1
            self._copies[task] = _CopyIn(load, batch)
            self.outbox.start(task)

    def _pinned(self, source: _Source) -> RowBlocks:
        if source.stored.row is not None:
            self.rows.pool.pin(source.stored.row)
        return RowBlocks(source.stored.address, source.chunk.group, source.chunk.block_ids)

    def complete_copy(self, task: LoadRows, result: CopyResult, seconds: float, now: float) -> None:
        self.outbox.count(POOL, "load_seconds", seconds)
        copy = self._copies.pop(task)
        load = copy.load
        load.num_copies -= 1
        for index, source in enumerate(copy.sources):
            if source.stored.row is not None:
                self.rows.pool.unpin(source.stored.row)
            checksum = None if result.reason else result.checksums[index]
            self._end_source(load, source, checksum, now)
        if result.reason:
            self._fail(load, result.reason, now)
        self._check(load, now)

    def _end_source(self, load: _Load, source: _Source, checksum: int | None, now: float) -> None:
        """Process the copy of one row; `checksum` is None if the copy failed."""
        key, size, count = source.chunk.key, self.rows.size(source.chunk), self.outbox.count
        if checksum is not None and checksum != source.stored.checksum:
            # Damaged, or evicted and overwritten while it was copied.
            count(POOL, "refused")
            self.rows.distrust(key, source.stored)
            if not load.failure:
                self._load_entry(load, source.chunk, (), now)
            return
        if checksum is not None:
            if load.open.pop(key, None) is not None:
                self._count_bytes(load, source.chunk, source.tier)
            count(source.tier, "loads")
            count(source.tier, "loaded_bytes", size)

    # -- ends of loads --

    def _count_bytes(self, load: _Load, chunk: Chunk, tier: str) -> None:
        load.bytes_by_tier[tier] = load.bytes_by_tier.get(tier, 0) + self.rows.size(chunk)

    def _fail(self, load: _Load, reason: str, now: float) -> None:
        load.failure = load.failure or reason
        load.open.clear()
        self._check(load, now)

    def _check(self, load: _Load, now: float) -> None:
        """Report a load that has ended. Blocks that a copy may still write are never reported."""
        if load.open or load.num_copies or self._loads.get(load.request) is not load:
            return
        del self._loads[load.request]
        seconds = 0.0 if load.failure and not load.is_late else now - load.began
        self.outbox.report(
            LoadEnded(load.request, load.failure, tuple(load.missing), seconds, load.bytes_by_tier)
        )
