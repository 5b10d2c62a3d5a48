"""Reads objects of slower tiers into rows of the host pool, for loads that wait for them. Pure."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.tiers.base import LoadOutcome, LoadResult, ObjectKey
from kvferry.tiers.commands import Chunk
from kvferry.tiers.jobs.outbox import JobOutbox
from kvferry.tiers.jobs.rows import JobRows
from kvferry.tiers.jobs.tasks import ReadObject
from kvferry.tiers.jobs.writes import WriteJobs
from kvferry.tiers.pool.reader import StoredRow

_COUNTERS = {
    LoadOutcome.MISSING: "misses",
    LoadOutcome.REFUSED: "refused",
    LoadOutcome.FAILED: "failed_loads",
}


@dataclass(slots=True)
class Load:
    """A load that has not ended."""

    request: str
    deadline: float
    began: float
    open: dict[ObjectKey, Chunk]
    """The chunks whose blocks are not filled yet."""
    num_copies: int = 0
    """How many `LoadRows` may be writing into the blocks now."""
    failure: str = ""
    """Why the load needs no chunk any more."""
    is_late: bool = False
    """Whether the load has failed because it took too long."""
    missing: list[ObjectKey] = field(default_factory=list)
    bytes_by_tier: dict[str, int] = field(default_factory=dict)


Waiting = Sequence[tuple[Load, Chunk]]
"""The loads that wait for an object, each with the blocks that it shall fill."""


# -- how a read ends --


@dataclass(frozen=True, slots=True)
class ChunkFound:
    """The host pool has the chunk by now."""

    stored: StoredRow
    waiting: Waiting


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """The tier has filled a reserved row and checked it. Some load waits for the chunk."""

    tier: str
    row: int
    waiting: Waiting


@dataclass(frozen=True, slots=True)
class ChunkMissing:
    """No tier could provide the chunk."""

    reason: str
    waiting: Waiting


ReadEnd = ChunkFound | ChunkRead | ChunkMissing


# -- state --


@dataclass(slots=True)
class _Read:
    """An object that is being read from a tier, for one or more loads."""

    chunk: Chunk
    untried: deque[str]
    """The tiers that have not been tried yet."""
    waiting: list[tuple[Load, Chunk]]
    row: int | None = None

    @property
    def still_waiting(self) -> list[tuple[Load, Chunk]]:
        return [(load, chunk) for load, chunk in self.waiting if not load.failure]


@dataclass(slots=True)
class ReadJobs:
    """The reads that have not ended. Each method returns how reads have ended during the call."""

    tiers: tuple[str, ...]
    """The fastest first."""
    rows: JobRows
    writes: WriteJobs
    outbox: JobOutbox
    _reads: dict[int, _Read] = field(default_factory=dict, init=False)
    """By task."""
    _reads_by_key: dict[ObjectKey, _Read] = field(default_factory=dict, init=False)
    _without_row: deque[_Read] = field(default_factory=deque, init=False)
    """Reads that wait for a free row of the pool."""

    def begin(self, load: Load, chunk: Chunk, hints: Sequence[str]) -> ReadEnd | None:
        """Read a chunk that the pool does not have from the tiers, one after the other, those in
        `hints` first. Loads of the same chunk share one read.
        """
        read = self._reads_by_key.get(chunk.key)
        if read is not None:
            read.waiting.append((load, chunk))
            return None
        hinted = [tier for tier in hints if tier in self.tiers]
        others = [tier for tier in self.tiers if tier not in hinted]
        read = _Read(chunk, deque([*hinted, *others]), [(load, chunk)])
        self._reads_by_key[chunk.key] = read
        return self._advance(read, "no tier has the chunk")

    def complete(
        self, task: ReadObject, result: LoadResult, seconds: float, now: float
    ) -> ReadEnd | None:
        self.outbox.count(task.tier, "load_seconds", seconds)
        read = self._reads.pop(task.task_id)
        if result.outcome is not LoadOutcome.LOADED:
            self.outbox.count(task.tier, _COUNTERS[result.outcome])
            self.writes.forget(task.tier, task.key)
            if result.outcome is not LoadOutcome.FAILED:
                self.outbox.note_gone(task.tier, task.key)
            reason = result.reason or f"the tier {task.tier} no longer has the chunk"
            return self._advance(read, reason)
        del self._reads_by_key[task.key]
        waiting = read.still_waiting
        if not waiting:
            self.rows.pool.discard(task.row)
            return None
        self.writes.note_known(task.tier, task.key, now)
        self.outbox.note_held(task.tier, task.key)
        return ChunkRead(task.tier, task.row, waiting)

    def retry(self) -> Iterator[ReadEnd]:
        """Try once more to begin the reads that wait for a row. The caller processes each end
        before it asks for the next: a load that has failed needs no other row.
        """
        for _ in range(len(self._without_row)):
            end = self._advance(self._without_row.popleft(), "the host pool has no free row")
            if end is not None:
                yield end

    def _advance(self, read: _Read, reason: str) -> ReadEnd | None:
        """Take the chunk from the pool if it is there by now, else try the next tier. `reason` is
        why the chunk is missing if there is none.
        """
        key, pool = read.chunk.key, self.rows.pool
        found = None if read.row is not None else self.rows.find(key)
        waiting = read.still_waiting
        if found is not None or not read.untried or not waiting:
            del self._reads_by_key[key]
            if found is not None:
                return ChunkFound(found, waiting)
            if read.row is not None:
                pool.discard(read.row)
            return ChunkMissing(reason, waiting)
        if read.row is None and not pool.holds(key):
            read.row = pool.reserve(key)
        if read.row is None:
            self._without_row.append(read)
            return None
        task_id, tier = self.outbox.next_task_id(), read.untried.popleft()
        task = ReadObject(task_id, tier, key, read.row, self.rows.size(read.chunk))
        self._reads[task.task_id] = read
        self.outbox.start(task)
        return None
