"""What a rank's offload worker does next: which rows are copied, read and written, and when a load
or a store has ended.

    store   cache blocks --SaveRows--> row of the host pool --WriteObject--> disk, object
    load    disk, object --ReadObject--> row of the host pool --LoadRows--> cache blocks

Each kind of task has its jobs: `stores.py`, `writes.py`, `reads.py` and `loads.py`. They share the
rows of the pool (`rows.py`) and hand their tasks and reports to one outbox (`outbox.py`).

No clock, no thread and no I/O: the caller passes `now`, performs the tasks on other threads and
reports each result by `complete`. All bytes pass through rows, so a read that hangs can never write
into the engine's cache, and its request need not wait for it.
"""

from collections.abc import Iterable, Sequence

from kvferry.tiers.base import LoadResult, ObjectKey, StoreResult
from kvferry.tiers.commands import (
    POOL,
    CancelLoad,
    DropAll,
    EndStores,
    LoadChunks,
    OffloadCommand,
    OffloadEvent,
    StoreChunks,
    TierCounts,
    VoidStores,
)
from kvferry.tiers.jobs.contents import TierContents
from kvferry.tiers.jobs.loads import LoadJobs
from kvferry.tiers.jobs.outbox import JobOutbox
from kvferry.tiers.jobs.reads import ReadJobs
from kvferry.tiers.jobs.rows import JobRows
from kvferry.tiers.jobs.stores import StoreJobs
from kvferry.tiers.jobs.tasks import (
    CopyResult,
    LoadRows,
    ReadObject,
    SaveRows,
    Task,
    TaskResult,
    WriteObject,
)
from kvferry.tiers.jobs.writes import WriteJobs
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
        written. With `contents`, events report what the tiers hold.
        """
        self._pool = pool
        self._outbox = outbox = JobOutbox(contents, is_pool_tier=keeps_rows)
        rows = JobRows(pool, tuple(row_bytes), outbox, is_tier=keeps_rows)
        self._writes = WriteJobs(tuple(tiers), rows, outbox)
        self._stores = StoreJobs(rows, self._writes, outbox)
        self._loads = LoadJobs(
            rows, ReadJobs(tuple(tiers), rows, self._writes, outbox), outbox, load_timeout_s
        )

    @property
    def keeps_rows(self) -> bool:
        return self._outbox.is_pool_tier

    @property
    def reports_contents(self) -> bool:
        return self._outbox.contents is not None

    @property
    def is_idle(self) -> bool:
        return not self._outbox.has_open_tasks and self._loads.is_idle

    def handle(self, command: OffloadCommand, now: float) -> None:
        match command:
            case StoreChunks(request, chunks, number):
                self._pool.refresh(now)
                self._stores.begin(request, chunks, number, now)
            case EndStores(request):
                self._stores.end_request(request)
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
                    self._writes.forget_all()

    def complete(self, task_id: int, result: TaskResult, seconds: float, now: float) -> None:
        """Process the result of a task, which took `seconds`."""
        match self._outbox.end(task_id), result:
            case SaveRows() as task, CopyResult():
                self._stores.complete(task, result, seconds, now)
            case LoadRows() as task, CopyResult():
                self._loads.complete_copy(task, result, seconds, now)
            case ReadObject() as task, LoadResult():
                self._loads.complete_read(task, result, seconds, now)
            case WriteObject() as task, StoreResult():
                self._writes.complete(task, result, seconds)
            case task, _:
                raise AssertionError(f"{result} is no result of {task}")
        self._loads.retry_reads(now)

    def expire(self, now: float) -> None:
        """Fail every load whose time is over."""
        self._loads.expire(now)
        self._loads.retry_reads(now)

    def next_deadline(self) -> float | None:
        return self._loads.next_deadline()

    def note_lost(self, tier: str, keys: Iterable[ObjectKey]) -> None:
        """Note objects that a slower tier has noticed to be gone."""
        for key in keys:
            self._writes.forget(tier, key)
            self._outbox.note_gone(tier, key)

    def take_tasks(self) -> list[Task]:
        return self._outbox.take_tasks()

    def take_events(self) -> list[OffloadEvent]:
        for key in self._pool.take_evicted():
            self._outbox.note_gone(POOL, key)
        return self._outbox.take_events()

    def take_counts(self) -> TierCounts:
        return self._outbox.take_counts()
