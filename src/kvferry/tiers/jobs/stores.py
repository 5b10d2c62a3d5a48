"""Copies blocks of the engine's cache into rows of the host pool. Pure."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from kvferry.tiers.base import ObjectKey
from kvferry.tiers.commands import POOL, Chunk, Chunks, StoresCopied, StoresEnded
from kvferry.tiers.jobs.outbox import JobOutbox
from kvferry.tiers.jobs.rows import JobRows, batches
from kvferry.tiers.jobs.tasks import CopyResult, SaveRows
from kvferry.tiers.jobs.writes import WriteJobs
from kvferry.transports.base import RowBlocks

MAX_SAVE_BYTES = 256 * 1024 * 1024
"""The most bytes of one `SaveRows`: a store that shall be void does not occupy the thread for long.
"""
MAX_PENDING_SAVE_BYTES = 4 * 1024 * 1024 * 1024
"""The most bytes of all `SaveRows` that have not ended: the blocks of finished requests wait for
them, so more stores would take blocks from the requests that run.
"""


@dataclass(slots=True)
class _Save:
    """A `SaveRows` that has not ended."""

    request: str
    store_number: int
    chunks: tuple[Chunk, ...]
    rows: tuple[int, ...]
    size_bytes: int
    void_keys: set[ObjectKey] = field(default_factory=set)
    is_void: bool = False
    """As a whole."""


@dataclass(slots=True)
class StoreJobs:
    """The copies out of the cache that have not ended, and the requests that wait for them."""

    rows: JobRows
    writes: WriteJobs
    outbox: JobOutbox
    _saves: dict[int, _Save] = field(default_factory=dict, init=False)
    """By task."""
    _ending: set[str] = field(default_factory=set, init=False)
    """Finished requests whose blocks are still being copied."""
    _last_store: int = field(default=0, init=False)
    _num_copied: int = field(default=0, init=False)
    """No copy reads the blocks of any store up to this number."""

    def begin(self, request: str, chunks: Chunks, number: int, now: float) -> None:
        """Copy the chunks that the pool lacks, and let the slower tiers get those they lack."""
        self._last_store = max(self._last_store, number)
        reserved = self._reserve_rows(chunks, now)
        for batch in batches(reserved, lambda pair: self.rows.size(pair[0]), MAX_SAVE_BYTES):
            self._start_save(request, number, batch)
        self._report_copied()

    def end_request(self, request: str) -> None:
        """Report `StoresEnded` as soon as no copy reads blocks of the request."""
        self._ending.add(request)
        self._check_ending(request)

    def void(self, request: str, keys: Collection[ObjectKey]) -> None:
        """Do not publish these chunks of a request, or all if there are no keys."""
        for save in self._saves.values():
            if save.request == request:
                save.void_keys.update(keys)
                save.is_void = save.is_void or not keys

    def void_all(self) -> None:
        for save in self._saves.values():
            save.is_void = True

    def complete(self, task: SaveRows, result: CopyResult, seconds: float, now: float) -> None:
        count, pool = self.outbox.count, self.rows.pool
        count(POOL, "store_seconds", seconds)
        save = self._saves.pop(task.task_id)
        for index, (chunk, row) in enumerate(zip(save.chunks, save.rows, strict=True)):
            if result.reason or save.is_void or chunk.key in save.void_keys:
                pool.discard(row)
                count(POOL, "failed_stores" if result.reason else "dropped_stores")
            elif self.rows.publish(chunk.key, row, result.checksums[index]):
                count(POOL, "stores")
                count(POOL, "stored_bytes", self.rows.size(chunk))
                self.writes.begin(chunk, row, now)
                self.rows.release(chunk.key)
        self._check_ending(save.request)
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
        pending = sum(save.size_bytes for save in self._saves.values())
        room = (MAX_PENDING_SAVE_BYTES - pending) // max(self.rows.row_bytes)
        first = list(chunks)[: max(0, min(room, self.rows.pool.num_rows))]
        if len(first) < len(chunks):
            self.outbox.count(POOL, "dropped_stores", len(chunks) - len(first))
        return first

    def _is_stored(self, chunk: Chunk, now: float) -> bool:
        """Whether the chunk need not be copied. Writes it to slower tiers that lack it."""
        found = self.rows.find(chunk.key)
        if found is not None:
            self.rows.pool.touch(chunk.key)
            if found.row is not None:
                self.outbox.note_held(POOL, chunk.key)
                self.writes.begin(chunk, found.row, now)
            return True
        if self.rows.pool.holds(chunk.key):
            return True  # it is being copied for another request
        return not self.rows.is_tier and not self.writes.lacking(chunk, now)

    def _start_save(self, request: str, number: int, batch: list[tuple[Chunk, int]]) -> None:
        task_id = self.outbox.next_task_id()
        chunks, rows = zip(*batch, strict=True)
        size_bytes = sum(map(self.rows.size, chunks))
        self._saves[task_id] = _Save(request, number, chunks, rows, size_bytes)
        address = self.rows.pool.row_address
        copies = (RowBlocks(address(row), chunk.group, chunk.block_ids) for chunk, row in batch)
        self.outbox.start(SaveRows(task_id, tuple(copies)))

    def _report_copied(self) -> None:
        numbers = (save.store_number for save in self._saves.values())
        num_copied = min(numbers, default=self._last_store + 1) - 1
        if num_copied > self._num_copied:
            self._num_copied = num_copied
            self.outbox.report(StoresCopied(num_copied))

    def _check_ending(self, request: str) -> None:
        is_copying = any(save.request == request for save in self._saves.values())
        if request in self._ending and not is_copying:
            self._ending.discard(request)
            self.outbox.report(StoresEnded(request))
