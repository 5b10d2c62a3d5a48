"""What a rank's offload worker does next: which rows are copied, read and written, and when a load
or a store has ended.

    store   cache blocks --SaveRows--> row of the host pool --WriteObject--> disk, object
    load    disk, object --ReadObject--> row of the host pool --LoadRows--> cache blocks

No clock, no thread and no I/O: the caller passes `now`, performs the tasks on other threads and
reports each result by `complete`. All bytes pass through rows, so a read that hangs can never write
into the engine's cache, and its request need not wait for it.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvferry.tiers.base import LoadOutcome, LoadResult, ObjectKey, StoreOutcome, StoreResult
from kvferry.tiers.commands import (
    CancelLoad,
    Chunk,
    Chunks,
    DropAll,
    EndStores,
    LoadChunks,
    LoadEnded,
    OffloadCommand,
    OffloadEvent,
    StoreChunks,
    StoresCopied,
    StoresEnded,
    TierCounts,
    VoidStores,
)
from kvferry.tiers.contents import TierContents
from kvferry.tiers.host_pool import HostPool
from kvferry.tiers.pool_reader import StoredRow
from kvferry.transports.base import RowBlocks

__all__ = [
    "POOL",
    "CopyResult",
    "LoadRows",
    "OffloadJobs",
    "ReadObject",
    "SaveRows",
    "Task",
    "TaskResult",
    "WriteObject",
]

POOL = "cpu"
"""The name of the host pool in metrics and in `Chunk.tiers`."""
MAX_SAVE_BYTES = 256 * 1024 * 1024
"""The most bytes of one `SaveRows`: a store that shall be void does not occupy the thread for long.
"""
MAX_PENDING_SAVE_BYTES = 4 * 1024 * 1024 * 1024
"""The most bytes of all `SaveRows` that have not ended: the blocks of finished requests wait for
them, so more stores would take blocks from the requests that run.
"""
MAX_LOAD_BYTES = 1024 * 1024 * 1024
MAX_DISTRUSTED = 4096
MAX_KNOWN_OBJECTS = 65_536
KNOWN_FOR_S = 60.0
"""So long a tier is not offered an object that it was seen to have. It may have evicted the object
since.
"""


# -- tasks --


@dataclass(frozen=True, slots=True)
class SaveRows:
    """Copy blocks of the cache into rows; the result is a `CopyResult`."""

    task_id: int
    rows: tuple[RowBlocks, ...]


@dataclass(frozen=True, slots=True)
class LoadRows:
    """Copy rows into blocks of the cache; the result is a `CopyResult`."""

    task_id: int
    rows: tuple[RowBlocks, ...]


@dataclass(frozen=True, slots=True)
class ReadObject:
    """Read an object into a row; the result is a `LoadResult`."""

    task_id: int
    tier: str
    key: ObjectKey
    row: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WriteObject:
    """Write a row to a tier; the result is a `StoreResult`."""

    task_id: int
    tier: str
    key: ObjectKey
    row: int
    size_bytes: int


Task = SaveRows | LoadRows | ReadObject | WriteObject


@dataclass(frozen=True, slots=True)
class CopyResult:
    """The checksums of the copied rows; none if the copy failed for the given reason."""

    checksums: Sequence[int] = ()
    reason: str = ""


TaskResult = CopyResult | LoadResult | StoreResult


# -- state --


@dataclass(slots=True)
class _Save:
    """A `SaveRows` that has not ended."""

    request: str
    number: int
    """That of its `StoreChunks`."""
    chunks: tuple[Chunk, ...]
    rows: tuple[int, ...]
    size_bytes: int
    void: set[ObjectKey] = field(default_factory=set)
    is_void: bool = False


@dataclass(slots=True)
class _Load:
    """A load that has not ended."""

    request: str
    deadline: float
    began: float
    open: dict[ObjectKey, Chunk]
    """The chunks whose blocks are not filled yet."""
    num_copies: int = 0
    """How many `LoadRows` may be writing into the blocks now."""
    failure: str = ""
    missing: list[ObjectKey] = field(default_factory=list)
    bytes_by_tier: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the row of a load came from, and what its checksum must be."""

    chunk: Chunk
    tier: str
    stored: StoredRow | None
    """None for a row that was read and checked just now: this copy finds its checksum."""
    read_row: int | None = None
    """The row of our own into which the object was read."""
    followers: tuple[tuple["_Load", Chunk], ...] = ()
    """Other loads that wait for the same row; they copy it when its checksum is known."""

    @property
    def own_row(self) -> int | None:
        return self.read_row if self.stored is None else self.stored.row


@dataclass(slots=True)
class _Copy:
    """A `LoadRows` that has not ended."""

    load: _Load
    sources: tuple[_Source, ...]


@dataclass(slots=True)
class _Read:
    """An object that is being read from a tier, for one or more loads."""

    chunk: Chunk
    tiers: deque[str]
    """The tiers that have not been tried yet."""
    waiting: list[tuple[_Load, Chunk]]
    row: int | None = None
    tier: str = ""


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
        self._contents = contents
        self._pool = pool
        self._keeps_rows = keeps_rows
        self._row_bytes = tuple(row_bytes)
        self._tiers = tuple(tiers)
        self._load_timeout_s = load_timeout_s
        self._saves: dict[int, _Save] = {}
        self._copies: dict[int, _Copy] = {}
        self._reads: dict[int, _Read] = {}
        self._reads_by_key: dict[ObjectKey, _Read] = {}
        self._writes: dict[int, WriteObject] = {}
        self._known: OrderedDict[tuple[str, ObjectKey], float] = OrderedDict()
        """The objects that slower tiers had, or began to get, at these times."""
        self._loads: dict[str, _Load] = {}
        self._distrusted: OrderedDict[ObjectKey, int] = OrderedDict()
        """Rows of other engines that were found damaged, with their checksums."""
        self._ending: set[str] = set()
        """Finished requests whose blocks are still being copied."""
        self._last_store = 0
        self._num_copied = 0
        """No copy reads the blocks of any store up to this number."""
        self._without_row: deque[_Read] = deque()
        """Reads that wait for a free row of the pool."""
        self._tasks: list[Task] = []
        self._events: list[OffloadEvent] = []
        self._counts: TierCounts = {}
        self._last_task = 0

    # -- the caller's side --

    def handle(self, command: OffloadCommand, now: float) -> None:
        match command:
            case StoreChunks(request, chunks, number):
                self._pool.refresh(now)
                self._last_store = max(self._last_store, number)
                self._store(request, chunks, number, now)
                self._note_copied()
            case EndStores(request):
                self._ending.add(request)
                self._check_ending(request)
            case VoidStores(request, keys):
                for save in self._saves.values():
                    if save.request == request:
                        save.void.update(keys)
                        save.is_void = save.is_void or not keys
            case LoadChunks(request, chunks):
                self._pool.refresh(now)
                self._load(request, chunks, now)
            case CancelLoad(request):
                if request in self._loads:
                    self._fail(self._loads[request], "the request has ended", now)
            case DropAll():
                for save in self._saves.values():
                    save.is_void = True
                self._pool.clear()
                if self._contents is not None:
                    # Stores of what the tiers still have shall name it again.
                    self._contents.clear()
                    self._known.clear()

    def complete(self, task_id: int, result: TaskResult, seconds: float, now: float) -> None:
        """Process the result of a task, which took `seconds`."""
        self._count_time(task_id, seconds)
        if task_id in self._saves:
            assert isinstance(result, CopyResult)
            self._end_save(self._saves.pop(task_id), result, now)
            self._note_copied()
        elif task_id in self._copies:
            assert isinstance(result, CopyResult)
            self._end_copy(self._copies.pop(task_id), result, now)
        elif task_id in self._reads:
            assert isinstance(result, LoadResult)
            self._end_read(self._reads.pop(task_id), result, now)
        else:
            assert isinstance(result, StoreResult)
            self._end_write(self._writes.pop(task_id), result)
        self._retry_without_row(now)

    def expire(self, now: float) -> None:
        """Fail every load whose time is over."""
        for load in [load for load in self._loads.values() if load.deadline <= now]:
            if not load.failure:
                self._fail(load, f"the load took longer than {self._load_timeout_s:g} s", now)
        self._retry_without_row(now)

    def next_deadline(self) -> float | None:
        return min(
            (load.deadline for load in self._loads.values() if not load.failure), default=None
        )

    def take_tasks(self) -> list[Task]:
        tasks, self._tasks = self._tasks, []
        return tasks

    def note_lost(self, tier: str, keys: Iterable[ObjectKey]) -> None:
        """Note objects that a slower tier has noticed to be gone."""
        for key in keys:
            self._known.pop((tier, key), None)
            self._note_gone(tier, key)

    def take_events(self) -> list[OffloadEvent]:
        for key in self._pool.take_evicted():
            self._note_gone(POOL, key)
        change = None if self._contents is None else self._contents.take_change()
        if change is not None:
            self._events.append(change)
        events, self._events = self._events, []
        return events

    def take_counts(self) -> TierCounts:
        counts, self._counts = self._counts, {}
        return counts

    @property
    def keeps_rows(self) -> bool:
        return self._keeps_rows

    @property
    def reports_contents(self) -> bool:
        return self._contents is not None

    @property
    def loading(self) -> list[str]:
        """The requests whose load has not ended."""
        return list(self._loads)

    @property
    def ending(self) -> list[str]:
        """The finished requests whose blocks are still being copied."""
        return list(self._ending)

    @property
    def is_idle(self) -> bool:
        return not (self._saves or self._copies or self._reads or self._writes or self._loads)

    # -- stores --

    def _store(self, request: str, chunks: Chunks, number: int, now: float) -> None:
        batch: list[tuple[Chunk, int]] = []
        batch_bytes = 0
        # The tail first, so that the head of a prompt, which other prompts share, is evicted last.
        for chunk in reversed(self._storable(chunks)):
            if self._is_stored(chunk, now):
                continue
            row = self._pool.reserve(chunk.key)
            if row is None:
                self._count(POOL, "dropped_stores")
                continue
            if batch and batch_bytes + self._row_bytes[chunk.group] > MAX_SAVE_BYTES:
                self._start_save(request, number, batch)
                batch, batch_bytes = [], 0
            batch.append((chunk, row))
            batch_bytes += self._row_bytes[chunk.group]
        if batch:
            self._start_save(request, number, batch)

    def _storable(self, chunks: Chunks) -> list[Chunk]:
        """As many leading chunks as may be copied now; without them the others are useless."""
        pending = sum(save.size_bytes for save in self._saves.values())
        room = (MAX_PENDING_SAVE_BYTES - pending) // max(self._row_bytes)
        first = list(chunks)[: max(0, min(room, self._pool.num_rows))]
        if len(first) < len(chunks):
            self._count(POOL, "dropped_stores", len(chunks) - len(first))
        return first

    def _is_stored(self, chunk: Chunk, now: float) -> bool:
        """Whether the chunk need not be copied. Writes it to slower tiers that lack it."""
        found = self._find(chunk.key)
        if found is not None:
            self._pool.touch(chunk.key)
            if found.row is not None:
                self._note_held(POOL, chunk.key)
                self._write_back(chunk, found.row, now)
            return True
        if self._pool.holds(chunk.key):
            return True  # it is being copied for another request
        return not self._keeps_rows and not self._lacking(chunk, now)

    def _start_save(self, request: str, number: int, batch: Sequence[tuple[Chunk, int]]) -> None:
        task_id = self._next_task()
        self._saves[task_id] = _Save(
            request,
            number,
            tuple(chunk for chunk, _ in batch),
            tuple(row for _, row in batch),
            sum(self._row_bytes[chunk.group] for chunk, _ in batch),
        )
        rows = tuple(
            RowBlocks(self._pool.row_address(row), chunk.group, chunk.block_ids)
            for chunk, row in batch
        )
        self._tasks.append(SaveRows(task_id, rows))

    def _end_save(self, save: _Save, result: CopyResult, now: float) -> None:
        for index, (chunk, row) in enumerate(zip(save.chunks, save.rows, strict=True)):
            if result.reason or save.is_void or chunk.key in save.void:
                self._pool.discard(row)
                self._count(POOL, "failed_stores" if result.reason else "dropped_stores")
                continue
            if not self._pool.publish(row, result.checksums[index]):
                continue  # the pool was cleared meanwhile
            self._note_held(POOL, chunk.key)
            self._count(POOL, "stores")
            self._count(POOL, "stored_bytes", self._row_bytes[chunk.group])
            self._write_back(chunk, row, now)
            self._drop_unkept(chunk.key)
        self._check_ending(save.request)

    def _note_copied(self) -> None:
        numbers = (save.number for save in self._saves.values())
        num_copied = min(numbers, default=self._last_store + 1) - 1
        if num_copied > self._num_copied:
            self._num_copied = num_copied
            self._events.append(StoresCopied(num_copied))

    def _check_ending(self, request: str) -> None:
        if request in self._ending and not any(
            save.request == request for save in self._saves.values()
        ):
            self._ending.discard(request)
            self._events.append(StoresEnded(request))

    def _write_back(self, chunk: Chunk, row: int, now: float) -> None:
        """Write a row to the slower tiers that shall have it and are not known to have it."""
        for tier in self._lacking(chunk, now):
            # Half of the rows stay free of slow writers, so that loads always find a row.
            if 2 * len(self._writes) >= self._pool.num_rows:
                self._count(tier, "dropped_stores")
                continue
            self._pool.pin(row)
            self._note_known(tier, chunk.key, now)
            task = WriteObject(
                self._next_task(), tier, chunk.key, row, self._row_bytes[chunk.group]
            )
            self._writes[task.task_id] = task
            self._tasks.append(task)

    def _lacking(self, chunk: Chunk, now: float) -> list[str]:
        """The slower tiers that shall have the chunk and were not seen to have it lately."""
        never = float("-inf")
        return [
            tier
            for tier in self._tiers
            if tier in chunk.tiers
            and now - self._known.get((tier, chunk.key), never) >= KNOWN_FOR_S
        ]

    def _note_known(self, tier: str, key: ObjectKey, now: float) -> None:
        self._known[tier, key] = now
        self._known.move_to_end((tier, key))
        if len(self._known) > MAX_KNOWN_OBJECTS:
            self._known.popitem(last=False)

    def _end_write(self, task: WriteObject, result: StoreResult) -> None:
        self._pool.unpin(task.row)
        if result.outcome in (StoreOutcome.DROPPED, StoreOutcome.FAILED):
            self._known.pop((task.tier, task.key), None)
        else:
            self._note_held(task.tier, task.key)
        match result.outcome:
            case StoreOutcome.STORED:
                self._count(task.tier, "stores")
                self._count(task.tier, "stored_bytes", task.size_bytes)
            case StoreOutcome.DROPPED:
                self._count(task.tier, "dropped_stores")
            case StoreOutcome.FAILED:
                self._count(task.tier, "failed_stores")
            case StoreOutcome.PRESENT:
                pass

    # -- loads --

    def _load(self, request: str, chunks: Chunks, now: float) -> None:
        load = _Load(
            request,
            now + self._load_timeout_s,
            now,
            {chunk.key: chunk for chunk in chunks},
        )
        self._loads[request] = load
        sources, others = [], []
        for chunk in load.open.values():
            found = self._find(chunk.key)
            if found is None:
                others.append(chunk)
            else:
                self._pool.touch(chunk.key)
                sources.append(_Source(chunk, POOL, found))
        # Copies first: a read that fails at once ends the load, but not before its copies.
        self._start_copies(load, sources)
        for chunk in others:
            self._read(load, chunk, chunk.tiers, now)
        self._check_load(load, now)

    def _start_copies(self, load: _Load, sources: Sequence[_Source]) -> None:
        """Copy rows into the blocks of a load."""
        batch: list[_Source] = []
        batch_bytes = 0
        for source in sources:
            size = self._row_bytes[source.chunk.group]
            if batch and batch_bytes + size > MAX_LOAD_BYTES:
                self._start_copy(load, batch)
                batch, batch_bytes = [], 0
            batch.append(source)
            batch_bytes += size
        if batch:
            self._start_copy(load, batch)

    def _start_copy(self, load: _Load, batch: Sequence[_Source]) -> None:
        task_id = self._next_task()
        rows = []
        for source in batch:
            if source.stored is not None:
                address = source.stored.address
            else:
                assert source.read_row is not None
                address = self._pool.row_address(source.read_row)
            if source.own_row is not None:
                self._pool.pin(source.own_row)
            rows.append(RowBlocks(address, source.chunk.group, source.chunk.block_ids))
        load.num_copies += 1
        self._copies[task_id] = _Copy(load, tuple(batch))
        self._tasks.append(LoadRows(task_id, tuple(rows)))

    def _end_copy(self, copy: _Copy, result: CopyResult, now: float) -> None:
        load = copy.load
        load.num_copies -= 1
        for index, source in enumerate(copy.sources):
            if source.own_row is not None:
                self._pool.unpin(source.own_row)
            checksum = None if result.reason else result.checksums[index]
            self._end_source(load, source, checksum, now)
        if result.reason:
            self._fail(load, result.reason, now)
        self._check_load(load, now)

    def _end_source(self, load: _Load, source: _Source, checksum: int | None, now: float) -> None:
        """Process the copy of one row; `checksum` is None if the copy failed."""
        key, size = source.chunk.key, self._row_bytes[source.chunk.group]
        if source.stored is None:
            self._end_read_row(source, checksum, now)
        elif checksum is not None and checksum != source.stored.checksum:
            # Damaged, or evicted and overwritten while it was copied.
            self._count(POOL, "refused")
            self._distrust(key, source.stored)
            if not load.failure:
                self._read(load, source.chunk, (), now)
            return
        if checksum is not None:
            load.open.pop(key, None)
            load.bytes_by_tier[source.tier] = load.bytes_by_tier.get(source.tier, 0) + size
            self._count(source.tier, "loads")
            self._count(source.tier, "loaded_bytes", size)

    def _end_read_row(self, source: _Source, checksum: int | None, now: float) -> None:
        """Keep a row in the pool that a slower tier has just checked, and copy it for all loads."""
        assert source.read_row is not None
        is_found = checksum is not None and self._pool.publish(source.read_row, checksum)
        if checksum is None:
            self._pool.discard(source.read_row)
        for load, chunk in source.followers:
            if not load.failure:
                self._read(load, chunk, (source.tier,), now)
        if is_found:
            self._note_held(POOL, source.chunk.key)
            # Only now: the copies for the followers have pinned the row.
            self._drop_unkept(source.chunk.key)

    def _fail(self, load: _Load, reason: str, now: float) -> None:
        load.failure = load.failure or reason
        load.open.clear()
        self._check_load(load, now)

    def _check_load(self, load: _Load, now: float) -> None:
        """Report a load that has ended. Blocks that a copy may still write are never reported."""
        if load.open or load.num_copies or self._loads.get(load.request) is not load:
            return
        del self._loads[load.request]
        self._events.append(
            LoadEnded(
                load.request,
                load.failure,
                tuple(load.missing),
                now - load.began,
                load.bytes_by_tier,
            )
        )

    # -- reads of slower tiers --

    def _read(self, load: _Load, chunk: Chunk, hints: Sequence[str], now: float) -> None:
        """Read a chunk that the pool does not have from the other tiers, one after the other."""
        read = self._reads_by_key.get(chunk.key)
        if read is not None:
            read.waiting.append((load, chunk))
            return
        known = [tier for tier in hints if tier in self._tiers]
        others = [tier for tier in self._tiers if tier not in known]
        read = _Read(chunk, deque([*known, *others]), [(load, chunk)])
        self._reads_by_key[chunk.key] = read
        self._advance_read(read, "no tier has the chunk", now)

    def _advance_read(self, read: _Read, reason: str, now: float) -> None:
        """Take the chunk from the pool if it is there by now, else try the next tier."""
        found = None if read.row is not None else self._find(read.chunk.key)
        if found is not None:
            del self._reads_by_key[read.chunk.key]
            for load, chunk in read.waiting:
                if not load.failure:
                    self._start_copies(load, [_Source(chunk, POOL, found)])
            return
        if not read.tiers or all(load.failure for load, _ in read.waiting):
            self._end_waiting(read, reason, now)
            return
        if read.row is None and not self._pool.holds(read.chunk.key):
            read.row = self._pool.reserve(read.chunk.key)
        if read.row is None:
            self._without_row.append(read)
            return
        read.tier = read.tiers.popleft()
        size_bytes = self._row_bytes[read.chunk.group]
        task = ReadObject(self._next_task(), read.tier, read.chunk.key, read.row, size_bytes)
        self._reads[task.task_id] = read
        self._tasks.append(task)

    def _end_waiting(self, read: _Read, reason: str, now: float) -> None:
        """No tier has the object, or no load needs it any more."""
        self._reads_by_key.pop(read.chunk.key, None)
        if read.row is not None:
            self._pool.discard(read.row)
        for load, chunk in read.waiting:
            if not load.failure:
                load.missing.append(chunk.key)
                self._fail(load, reason, now)

    def _end_read(self, read: _Read, result: LoadResult, now: float) -> None:
        if result.outcome is not LoadOutcome.LOADED:
            names = {LoadOutcome.REFUSED: "refused", LoadOutcome.FAILED: "failed_loads"}
            self._count(read.tier, names.get(result.outcome, "misses"))
            self._known.pop((read.tier, read.chunk.key), None)
            if result.outcome is not LoadOutcome.FAILED:
                self._note_gone(read.tier, read.chunk.key)
            reason = result.reason or f"the tier {read.tier} no longer has the chunk"
            self._advance_read(read, reason, now)
            return
        assert read.row is not None
        del self._reads_by_key[read.chunk.key]
        waiting = [(load, chunk) for load, chunk in read.waiting if not load.failure]
        if not waiting:
            self._pool.discard(read.row)
            return
        self._note_known(read.tier, read.chunk.key, now)
        self._note_held(read.tier, read.chunk.key)
        (load, chunk), *others = waiting
        self._start_copies(load, [_Source(chunk, read.tier, None, read.row, tuple(others))])

    def _retry_without_row(self, now: float) -> None:
        for _ in range(len(self._without_row)):
            read = self._without_row.popleft()
            self._advance_read(read, "the host pool has no free row", now)

    # -- helpers --

    def _drop_unkept(self, key: ObjectKey) -> None:
        if not self._keeps_rows:
            # Pins keep the bytes until they are written.
            self._pool.remove(key)

    def _find(self, key: ObjectKey) -> StoredRow | None:
        found = self._pool.find(key)
        if found is not None and found.row is None and self._distrusted.get(key) == found.checksum:
            return None
        return found

    def _distrust(self, key: ObjectKey, stored: StoredRow) -> None:
        """Do not use a row again. A row of another engine cannot be removed, only ignored."""
        if stored.row is not None:
            self._pool.remove(key)
            self._note_gone(POOL, key)
            return
        self._distrusted[key] = stored.checksum
        if len(self._distrusted) > MAX_DISTRUSTED:
            self._distrusted.popitem(last=False)

    def _note_held(self, tier: str, key: ObjectKey) -> None:
        if self._contents is not None and (tier != POOL or self._keeps_rows):
            self._contents.add(tier, key)

    def _note_gone(self, tier: str, key: ObjectKey) -> None:
        if self._contents is not None:
            self._contents.remove(tier, key)

    def _next_task(self) -> int:
        self._last_task += 1
        return self._last_task

    def _count_time(self, task_id: int, seconds: float) -> None:
        if task_id in self._saves or task_id in self._copies:
            self._count(
                POOL, "store_seconds" if task_id in self._saves else "load_seconds", seconds
            )
        elif task_id in self._reads:
            self._count(self._reads[task_id].tier, "load_seconds", seconds)
        else:
            self._count(self._writes[task_id].tier, "store_seconds", seconds)

    def _count(self, tier: str, name: str, by: float = 1) -> None:
        if tier == POOL and not self._keeps_rows:
            return
        row = self._counts.setdefault(tier, {})
        row[name] = row.get(name, 0) + by
