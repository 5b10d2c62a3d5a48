"""Copies rows of the host pool into blocks of the engine's cache, and says when a load has ended.
Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.tiers.base import LoadResult
from kvferry.tiers.commands import POOL, Chunk, Chunks, LoadEnded
from kvferry.tiers.jobs.outbox import JobOutbox
from kvferry.tiers.jobs.reads import (
    ChunkFound,
    ChunkMissing,
    ChunkRead,
    Load,
    ReadEnd,
    ReadJobs,
    Waiting,
)
from kvferry.tiers.jobs.rows import JobRows, batches
from kvferry.tiers.jobs.tasks import CopyResult, LoadRows, ReadObject
from kvferry.tiers.pool.reader import StoredRow
from kvferry.transports.base import RowBlocks

MAX_LOAD_BYTES = 1024 * 1024 * 1024
"""The most bytes of one `LoadRows`."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the row of a load came from, and what its checksum must be."""

    chunk: Chunk
    tier: str
    stored: StoredRow | None
    """None for a row that was read and checked just now: this copy finds its checksum."""
    read_row: int | None = None
    """The row of our own into which the object was read."""
    followers: Waiting = ()
    """Other loads that wait for the same row; they copy it when its checksum is known."""

    @property
    def own_row(self) -> int | None:
        return self.read_row if self.stored is None else self.stored.row


@dataclass(frozen=True, slots=True)
class _Copy:
    """A `LoadRows` that has not ended."""

    load: Load
    sources: Sequence[_Source]


@dataclass(slots=True)
class LoadJobs:
    """The loads that have not ended, and the copies into the cache."""

    rows: JobRows
    reads: ReadJobs
    outbox: JobOutbox
    timeout_s: float
    _loads: dict[str, Load] = field(default_factory=dict, init=False)
    """By request."""
    _copies: dict[int, _Copy] = field(default_factory=dict, init=False)
    """By task."""

    @property
    def is_idle(self) -> bool:
        return not self._loads

    def begin(self, request: str, chunks: Chunks, now: float) -> None:
        load = Load(request, now + self.timeout_s, now, {chunk.key: chunk for chunk in chunks})
        self._loads[request] = load
        sources, others = [], []
        for chunk in load.open.values():
            found = self.rows.find(chunk.key)
            if found is None:
                others.append(chunk)
            else:
                self.rows.pool.touch(chunk.key)
                sources.append(_Source(chunk, POOL, found))
        # Copies first: a read that fails at once ends the load, but not before its copies.
        self._start_copies(load, sources)
        for chunk in others:
            self._read(load, chunk, chunk.tiers, now)
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

    # -- reads of slower tiers --

    def complete_read(
        self, task: ReadObject, result: LoadResult, seconds: float, now: float
    ) -> None:
        self._end_read(self.reads.complete(task, result, seconds, now), now)

    def retry_reads(self, now: float) -> None:
        """Begin the reads that have waited for a row that is free by now."""
        for end in self.reads.retry():
            self._end_read(end, now)

    def _read(self, load: Load, chunk: Chunk, hints: Sequence[str], now: float) -> None:
        self._end_read(self.reads.begin(load, chunk, hints), now)

    def _end_read(self, end: ReadEnd | None, now: float) -> None:
        match end:
            case ChunkFound(stored, waiting):
                for load, chunk in waiting:
                    self._start_copies(load, [_Source(chunk, POOL, stored)])
            case ChunkRead(tier, row, [(load, chunk), *others]):
                self._start_copies(load, [_Source(chunk, tier, None, row, others)])
            case ChunkMissing(reason, waiting):
                for load, chunk in waiting:
                    if not load.failure:
                        load.missing.append(chunk.key)
                        self._fail(load, reason, now)

    # -- copies into the cache --

    def _start_copies(self, load: Load, sources: Sequence[_Source]) -> None:
        def size_of(source: _Source) -> int:
            return self.rows.size(source.chunk)

        for batch in batches(sources, size_of, MAX_LOAD_BYTES):
            task_id = self.outbox.next_task_id()
            rows = tuple(self._pinned(source) for source in batch)
            load.num_copies += 1
            self._copies[task_id] = _Copy(load, batch)
            self.outbox.start(LoadRows(task_id, rows))

    def _pinned(self, source: _Source) -> RowBlocks:
        if source.own_row is not None:
            self.rows.pool.pin(source.own_row)
        if source.stored is not None:
            address = source.stored.address
        else:
            assert source.read_row is not None
            address = self.rows.pool.row_address(source.read_row)
        return RowBlocks(address, source.chunk.group, source.chunk.block_ids)

    def complete_copy(self, task: LoadRows, result: CopyResult, seconds: float, now: float) -> None:
        self.outbox.count(POOL, "load_seconds", seconds)
        copy = self._copies.pop(task.task_id)
        load = copy.load
        load.num_copies -= 1
        for index, source in enumerate(copy.sources):
            if source.own_row is not None:
                self.rows.pool.unpin(source.own_row)
            checksum = None if result.reason else result.checksums[index]
            self._end_source(load, source, checksum, now)
        if result.reason:
            self._fail(load, result.reason, now)
        self._check(load, now)

    def _end_source(self, load: Load, source: _Source, checksum: int | None, now: float) -> None:
        """Process the copy of one row; `checksum` is None if the copy failed."""
        key, size, count = source.chunk.key, self.rows.size(source.chunk), self.outbox.count
        if source.stored is None:
            self._publish_read_row(source, checksum, now)
        elif checksum is not None and checksum != source.stored.checksum:
            # Damaged, or evicted and overwritten while it was copied.
            count(POOL, "refused")
            self.rows.distrust(key, source.stored)
            if not load.failure:
                self._read(load, source.chunk, (), now)
            return
        if checksum is not None:
            if load.open.pop(key, None) is not None:
                self._count_bytes(load, source.chunk, source.tier)
            count(source.tier, "loads")
            count(source.tier, "loaded_bytes", size)

    def _publish_read_row(self, source: _Source, checksum: int | None, now: float) -> None:
        """Keep a row in the pool that a slower tier has just checked, and copy it for all loads."""
        key, row = source.chunk.key, source.read_row
        assert row is not None
        is_published = checksum is not None and self.rows.publish(key, row, checksum)
        if checksum is None:
            self.rows.pool.discard(row)
        for load, chunk in source.followers:
            if not load.failure:
                self._read(load, chunk, (source.tier,), now)
        if is_published:
            # Only now: the copies for the followers have pinned the row.
            self.rows.release(key)

    # -- ends of loads --

    def _count_bytes(self, load: Load, chunk: Chunk, tier: str) -> None:
        load.bytes_by_tier[tier] = load.bytes_by_tier.get(tier, 0) + self.rows.size(chunk)

    def _fail(self, load: Load, reason: str, now: float) -> None:
        load.failure = load.failure or reason
        load.open.clear()
        self._check(load, now)

    def _check(self, load: Load, now: float) -> None:
        """Report a load that has ended. Blocks that a copy may still write are never reported."""
        if load.open or load.num_copies or self._loads.get(load.request) is not load:
            return
        del self._loads[load.request]
        seconds = 0.0 if load.failure and not load.is_late else now - load.began
        self.outbox.report(
            LoadEnded(load.request, load.failure, tuple(load.missing), seconds, load.bytes_by_tier)
        )
