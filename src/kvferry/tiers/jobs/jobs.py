"""What a rank's offload worker does next: which rows are copied, loaded and stored, and when a load
or a store has ended.

    store   cache blocks --StoreRows--> row of the host pool --StoreEntry--> disk, object
    load    disk, object --LoadEntry--> row of the host pool --LoadRows--> cache blocks

No clock, no thread and no I/O: the caller passes `now`, performs the tasks on other threads and
reports each result by `complete`. All bytes pass through rows, so a load from a tier that hangs can
never write into the engine's cache, and its request need not wait for it. The checksum of a row is
known before it is stored in a tier, and checked with every copy from it: so a row whose memory was
damaged is neither sealed as an entry nor loaded.
"""

from collections.abc import Iterable, Sequence

from kvferry.tiers.base import EntryKey, LoadResult, StoreResult
from kvferry.tiers.commands import (
    POOL,
    CancelLoad,
    DropAll,
    LoadChunks,
    OffloadCommand,
    StoreChunks,
    VoidStores,
)
from kvferry.tiers.jobs.base import (
    CopyResult,
    JobOutbox,
    JobReports,
    JobRows,
    LoadEntry,
    LoadRows,
    StoreEntry,
    StoreRows,
    Task,
    TaskResult,
)
from kvferry.tiers.jobs.contents import TierContents
from kvferry.tiers.jobs.loads import LoadJobs
from kvferry.tiers.jobs.stores import EntryStores, StoreJobs
from kvferry.tiers.pool.host_pool import HostPool


class OffloadJobs:
    """The jobs of one rank. `row_bytes` has the size of a chunk in each KV-cache group; `tiers` are
    the tiers behind the host pool, the fastest first.
    """

    def __init__(
        self,
        pool: HostPool,
        row_bytes: Sequence[int],
        tiers: Sequence[str],
        load_timeout_s: float,
        *,
        keeps_rows: bool = True,
        contents: TierContents | None = None,
    ) -> None:
        """`keeps_rows`: the pool is a tier. Otherwise a row is free as soon as it was copied and
        stored. With `contents`, events report what the tiers hold.
        """
        self.keeps_rows = keeps_rows
        self.reports_contents = contents is not None
        self._pool = pool
        self._outbox = JobOutbox(contents, is_pool_tier=keeps_rows)
        rows, names = JobRows(pool, tuple(row_bytes), self._outbox), tuple(tiers)
        self._entries = EntryStores(names, rows, self._outbox)
        self._stores = StoreJobs(rows, self._entries, self._outbox)
        self._loads = LoadJobs(names, rows, self._entries, self._outbox, load_timeout_s)

    @property
    def is_idle(self) -> bool:
        return not self._outbox.has_open_tasks and self._loads.is_idle

    def handle(self, command: OffloadCommand, now: float) -> None:
        match command:
            case StoreChunks(request, chunks, number):
                self._pool.refresh(now)
                self._stores.begin(request, chunks, number, now)
            case VoidStores(request, keys):
                self._stores.void(request, keys)
            case LoadChunks(request, chunks):
                self._pool.refresh(now)
                self._loads.begin(request, chunks, now)
            case CancelLoad(request):
                self._loads.cancel(request, now)
            case DropAll():
                self._stores.void_all()
                self._pool.clear()
                if self._outbox.contents is not None:
                    self._outbox.contents.clear()
                    # Stores of what the tiers still have shall name it again.
                    self._entries.forget_all()

    def complete(self, task: Task, result: TaskResult, seconds: float, now: float) -> None:
        """Process the result of a task, which took `seconds`."""
        self._outbox.end(task)
        match task, result:
            case StoreRows(), CopyResult():
                self._stores.complete(task, result, seconds, now)
            case LoadRows(), CopyResult():
                self._loads.complete_copy(task, result, seconds, now)
            case LoadEntry(), LoadResult() | CopyResult():
                self._loads.complete_entry(task, result, seconds, now)
            case StoreEntry(), StoreResult() | CopyResult():
                self._entries.complete(task, result, seconds)
            case _:
                raise AssertionError(f"{result} is no result of {task}")
        self._loads.retry(now)

    def expire(self, now: float) -> None:
        """Fail every load whose time is over."""
        self._loads.expire(now)
        self._loads.retry(now)

    def next_deadline(self) -> float | None:
        return self._loads.next_deadline()

    def note_lost(self, tier: str, keys: Iterable[EntryKey]) -> None:
        """Note entries that a slower tier has noticed to be gone."""
        for key in keys:
            self._entries.forget(tier, key)
            self._outbox.note_gone(tier, key)

    def drain(self) -> JobReports:
        """The tasks and events since the last call."""
        for key in self._pool.take_evicted():
            self._outbox.note_gone(POOL, key)
        return self._outbox.drain()
