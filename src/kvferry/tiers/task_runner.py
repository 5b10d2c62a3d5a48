"""The threads of the tiers: they copy rows, load and store entries for a rank's offload worker, and
look keys up for the scheduler. Their calls may block in the operating system.
"""

import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvferry.tiers.base import LoadOutcome, LoadResult, StoreOutcome, StoreResult, Tier, TierUsage
from kvferry.tiers.commands import POOL
from kvferry.tiers.jobs.base import (
    CopyResult,
    LoadEntry,
    LoadRows,
    StoreEntry,
    StoreRows,
    Task,
    TaskResult,
)
from kvferry.tiers.pool.host_pool import HostPool
from kvferry.transports.base import RowCopier

_log = logging.getLogger(__name__)


class TaskThreads:
    """Threads that run functions in the order in which they are given.

    Not `ThreadPoolExecutor`: the interpreter waits for its threads at exit, also for one that hangs
    in a dead file system. The functions must not raise.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        self._is_closing = False
        for thread in self._threads:
            thread.start()

    def run(self, function: Callable[[], None]) -> None:
        self._queue.put(function)

    def close(self, timeout_s: float) -> bool:
        """Drop the functions that have not begun, and wait for the others. False if a thread is
        still busy after `timeout_s`. Idempotent.
        """
        self._is_closing = True
        for _ in self._threads:
            self._queue.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (function := self._queue.get()) is not None:
            if not self._is_closing:
                function()


@dataclass(frozen=True, slots=True)
class EndedTask:
    task: Task
    result: TaskResult
    seconds: float


class TaskRunner:
    """Owns the pool, the tiers, the copier and the threads that use them. `report` is called on
    these threads, once for each task.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Mapping[str, Tier],
        copier: RowCopier,
        num_io_threads: int,
        name: str,
        clock: Callable[[], float],
        report: Callable[[EndedTask], None],
    ) -> None:
        self._pool = pool
        self._tiers = tiers
        self._copier = copier
        self._clock = clock
        self._report = report
        # Loads and stores have a thread each, so that no load waits for the copy of a store.
        self._storer = TaskThreads(f"{name}-save", 1)
        self._loader = TaskThreads(f"{name}-load", 1)
        self._io = TaskThreads(f"{name}-io", num_io_threads if tiers else 0)
        self._memory = threading.local()

    def start(self, task: Task) -> None:
        match task:
            case StoreRows():
                threads = self._storer
            case LoadRows():
                threads = self._loader
            case _:
                threads = self._io
        threads.run(lambda: self._run(task))

    def usage(self) -> dict[str, TierUsage]:
        """What the tiers and the pool hold."""
        return {name: tier.usage() for name, tier in self._tiers.items()} | {
            POOL: self._pool.usage()
        }

    def stop_copies(self, timeout_s: float) -> bool:
        """Drop the copies that have not begun, and wait for the others. False if one has not ended
        in time; then call again.
        """
        return self._loader.close(timeout_s) and self._storer.close(timeout_s)

    def close(self, copy_timeout_s: float, io_timeout_s: float) -> None:
        # A copy reads and writes the engine's cache, which the engine frees next: wait for copies.
        for threads in (self._loader, self._storer):
            threads.close(copy_timeout_s)
        self._io.close(io_timeout_s)
        for tier in self._tiers.values():
            tier.close()
        self._copier.close()
        self._pool.close()

    # -- the threads of tasks --

    def _run(self, task: Task) -> None:
        began = self._clock()
        try:
            result = self._perform(task)
        # Top of a task: only the rows of this task are lost.
        except Exception as error:
            result = _failure(task, error)
        self._report(EndedTask(task, result, self._clock() - began))

    def _perform(self, task: Task) -> TaskResult:
        match task:
            case StoreRows(rows):
                return CopyResult(self._copier.save(rows))
            case LoadRows(rows):
                return CopyResult(self._copier.load(rows))
            case LoadEntry():
                return self._load_entry(task)
            case StoreEntry():
                return self._store_entry(task)

    # A tier reads and writes memory of its thread alone, and the copy from or to the row computes
    # the checksum. So the checksum stands for exactly the bytes that the tier has checked, and the
    # tier seals exactly the bytes that the checksum stands for, whatever happens to the row.

    def _load_entry(self, task: LoadEntry) -> LoadResult | CopyResult:
        row, own = self._pool.row(task.row), self._own_memory(task.size_bytes)
        result = self._tiers[task.tier].load(task.key, own)
        if result.outcome is not LoadOutcome.LOADED:
            return result
        loaded = replace(task.place, address=_address_of(own))
        return CopyResult([self._copier.copy_row(loaded, _address_of(row))])

    def _store_entry(self, task: StoreEntry) -> StoreResult | CopyResult:
        row, own = self._pool.row(task.row), self._own_memory(task.size_bytes)
        checksum = self._copier.copy_row(
            replace(task.place, address=_address_of(row)), _address_of(own)
        )
        if checksum != task.checksum:
            return CopyResult(reason=f"row {task.row} of the host pool is damaged")
        return self._tiers[task.tier].store(task.key, own)

    def _own_memory(self, size_bytes: int) -> memoryview:
        """Memory of the calling thread, which starts at a page boundary."""
        pages = getattr(self._memory, "pages", None)
        if pages is None:
            pages = self._memory.pages = mmap.mmap(-1, self._pool.row_bytes)
        return memoryview(pages)[:size_bytes]


def _address_of(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


def _failure(task: Task, error: Exception) -> TaskResult:
    if isinstance(task, StoreRows | LoadRows):
        return CopyResult(reason=f"a copy failed: {type(error).__name__}: {error}")
    _log.error("tier failed because of a bug tier=%s", task.tier, exc_info=error)
    reason = f"the tier {task.tier} failed: {type(error).__name__}"
    if isinstance(task, LoadEntry):
        return LoadResult(LoadOutcome.FAILED, reason)
    return StoreResult(StoreOutcome.FAILED, reason)
