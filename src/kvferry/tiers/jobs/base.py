"""What all jobs of a rank share: the tasks that they give to other threads, the outbox for tasks
and reports, and the rows of the host pool. Pure.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from kvferry.tiers.base import EntryKey, LoadResult, StoreResult
from kvferry.tiers.commands import POOL, Chunk, OffloadEvent, TierCounts, TiersCounted
from kvferry.tiers.jobs.contents import TierContents
from kvferry.tiers.pool.host_pool import HostPool
from kvferry.tiers.pool.reader import StoredRow
from kvferry.transports.base import RowBlocks

MAX_DISTRUSTED = 4096

T = TypeVar("T")


# -- tasks and their results --


@dataclass(frozen=True, slots=True, eq=False)
class StoreRows:
    """Copy blocks of the cache into rows; the result is a `CopyResult`."""

    tier: ClassVar[str] = POOL
    rows: tuple[RowBlocks, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LoadRows:
    """Copy rows into blocks of the cache; the result is a `CopyResult`."""

    tier: ClassVar[str] = POOL
    rows: tuple[RowBlocks, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LoadEntry:
    """Load an entry of a tier into a row; the result is a `CopyResult` with the checksum of the
    entry, or a `LoadResult` that says why the tier did not load it.
    """

    tier: str
    key: EntryKey
    row: int
    place: RowBlocks
    """The row, and the blocks for which it is loaded."""
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class StoreEntry:
    """Store a row in a tier; the result is a `StoreResult`, or a `CopyResult` if the row does not
    have this checksum any more.
    """

    tier: str
    key: EntryKey
    row: int
    place: RowBlocks
    size_bytes: int
    checksum: int


Task = StoreRows | LoadRows | LoadEntry | StoreEntry
"""Two tasks are never equal: the jobs find what they know of a task by the task itself."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """The checksums of the copied rows; none if the copy failed for the given reason."""

    checksums: Sequence[int] = ()
    reason: str = ""


TaskResult = CopyResult | LoadResult | StoreResult


# -- what the jobs hand to the thread of the worker --


@dataclass(slots=True)
class JobReports:
    """What has collected since the last `JobOutbox.drain`."""

    tasks: list[Task] = field(default_factory=list)
    """To be performed on other threads."""
    events: list[OffloadEvent] = field(default_factory=list)


@dataclass(slots=True)
class JobOutbox:
    """Collects tasks and reports of all jobs, and knows the tasks that have not ended."""

    contents: TierContents | None
    """Without it, no event says what the tiers hold."""
    is_pool_tier: bool
    """If not, nothing is reported of the host pool, and a row is free as soon as it was copied and
    stored in a slower tier.
    """
    _open_tasks: set[Task] = field(default_factory=set, init=False)
    _reports: JobReports = field(default_factory=JobReports, init=False)
    _counts: TierCounts = field(default_factory=dict, init=False)

    def start(self, task: Task) -> None:
        self._reports.tasks.append(task)
        self._open_tasks.add(task)

    def end(self, task: Task) -> None:
        self._open_tasks.remove(task)

    @property
    def has_open_tasks(self) -> bool:
        return bool(self._open_tasks)

    def report(self, event: OffloadEvent) -> None:
        self._reports.events.append(event)

    def count(self, tier: str, name: str, by: float = 1) -> None:
        if self._is_reported(tier):
            row = self._counts.setdefault(tier, {})
            row[name] = row.get(name, 0) + by

    def note_held(self, tier: str, key: EntryKey) -> None:
        if self.contents is not None and self._is_reported(tier):
            self.contents.add(tier, key)

    def note_gone(self, tier: str, key: EntryKey) -> None:
        if self.contents is not None:
            self.contents.remove(tier, key)

    def drain(self) -> JobReports:
        change = None if self.contents is None else self.contents.take_change()
        if change is not None:
            self.report(change)
        if self._counts:
            self.report(TiersCounted(self._counts))
            self._counts = {}
        reports, self._reports = self._reports, JobReports()
        return reports

    def _is_reported(self, tier: str) -> bool:
        return tier != POOL or self.is_pool_tier


# -- rows of the host pool --


@dataclass(slots=True)
class JobRows:
    """The pool, and the rows of other engines that must not be used."""

    pool: HostPool
    row_bytes: tuple[int, ...]
    """The size of a chunk in each KV-cache group."""
    outbox: JobOutbox
    _distrusted: OrderedDict[EntryKey, int] = field(default_factory=OrderedDict, init=False)
    """Rows of other engines that were found damaged, with their checksums."""

    def size(self, chunk: Chunk) -> int:
        return self.row_bytes[chunk.group]

    def place(self, chunk: Chunk, row: int) -> RowBlocks:
        """A row of our own for this chunk."""
        return RowBlocks(self.pool.row_address(row), chunk.group, chunk.block_ids)

    def find(self, key: EntryKey) -> StoredRow | None:
        """Where the entry is in the pool, in a row that may be used."""
        found = self.pool.find(key)
        if found is not None and found.row is None and self._distrusted.get(key) == found.checksum:
            return None
        return found

    def distrust(self, key: EntryKey, stored: StoredRow) -> None:
        """Do not use a row again. A row of another engine cannot be removed, only ignored."""
        if stored.row is not None:
            self.pool.remove(key)
            self.outbox.note_gone(POOL, key)
            return
        self._distrusted[key] = stored.checksum
        if len(self._distrusted) > MAX_DISTRUSTED:
            self._distrusted.popitem(last=False)

    def publish(self, key: EntryKey, row: int, checksum: int) -> bool:
        """Let loads find a row. False if the pool was cleared while the row was filled. The caller
        calls `release` when it has pinned the row for everything that still needs it.
        """
        is_published = self.pool.publish(row, checksum)
        if is_published:
            self.outbox.note_held(POOL, key)
        return is_published

    def release(self, key: EntryKey) -> None:
        """Keep a row only if the pool is a tier. Pins keep its bytes until they are used."""
        if not self.outbox.is_pool_tier:
            self.pool.remove(key)


def batches(items: Iterable[T], size_of: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Batches of at most `max_bytes`, but at least one item, in order. Takes items lazily."""
    batch: list[T] = []
    batch_bytes = 0
    for item in items:
        size = size_of(item)
        if batch and batch_bytes + size > max_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += size
    if batch:
        yield batch
