"""The offload worker of one rank: a thread that owns the rank's jobs and its host pool.

The engine's thread submits commands and takes reports (`worker_reports.py`), and never waits. Only
the worker's own thread calls `OffloadJobs` and changes the pool; other threads perform the tasks
(`task_runner.py`) and put results into the worker's inbox.

If the worker fails, the engine goes on without tiers: outstanding loads are reported as failed as
soon as no copy is active, and every later command is answered at once.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.errors import KVFerryError
from kvferry.tiers.base import StoreResult, Tier, TierUsage, WatchesObjects
from kvferry.tiers.commands import (
    POOL,
    CancelLoad,
    ContentsChanged,
    LoadChunks,
    OffloadCommand,
    OffloadEvent,
    TierCounts,
)
from kvferry.tiers.jobs.base import JobReports, TaskResult
from kvferry.tiers.jobs.jobs import OffloadJobs
from kvferry.tiers.pool.host_pool import HostPool
from kvferry.tiers.task_runner import EndedTask, TaskRunner
from kvferry.tiers.trouble_log import log_trouble
from kvferry.tiers.worker_reports import WorkerReports
from kvferry.transports.base import RowCopier, StreamEvent

CLOSE_TIMEOUT_S = 5.0
"""How long each part may take to stop."""
STOP_TIMEOUT_S = 25.0
"""More than copies, reads, writes and the slowest tier, mooncake, may take together."""
MARK_INTERVAL_S = 0.001
"""How often the engine's stream is queried while commands wait for a mark."""
REPORT_INTERVAL_S = 1.0
"""How often the fill of the tiers is reported while the worker is idle."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Commands of one `submit`, and the mark on the engine's stream that must be complete first."""

    commands: tuple[OffloadCommand, ...]
    mark: StreamEvent | None


_Item = _Batch | EndedTask | threading.Event
"""An event is set when the worker is idle."""


class OffloadWorker:
    """Owns the pool, the tiers and the copier from `start` to `close`."""

    def __init__(
        self,
        jobs: OffloadJobs,
        pool: HostPool,
        tiers: Mapping[str, Tier],
        copier: RowCopier,
        num_io_threads: int,
        name: str = "kvferry-offload",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs = jobs
        self._watching = {
            name: tier for name, tier in tiers.items() if isinstance(tier, WatchesObjects)
        }
        self._clock = clock
        self._inbox: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._runner = TaskRunner(
            pool, tiers, copier, num_io_threads, name, clock, report=self._inbox.put
        )
        self._held: deque[_Batch] = deque()
        """Loads that wait for the mark of their batch, and cancels that follow them, in order."""
        self._waiting: list[threading.Event] = []
        self._reports = WorkerReports()
        self._is_closing = False
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # -- the engine's thread --

    def start(self) -> None:
        self._thread.start()

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        self._reports.set_wakeup(wake)

    def submit(self, commands: Sequence[OffloadCommand], mark: StreamEvent | None = None) -> None:
        """Submit commands without waiting. They run in order, and not before the engine's stream
        has passed `mark`.
        """
        if commands:
            self._inbox.put(_Batch(tuple(commands), mark))

    def take_events(self) -> list[OffloadEvent]:
        return self._reports.take_events()

    def take_counts(self) -> TierCounts:
        """Take the counters since the last call."""
        return self._reports.take_counts()

    @property
    def is_busy(self) -> bool:
        """Whether anything is in progress, or has ended since the last `take_counts`, or an event
        waits for `take_events`.
        """
        return self._reports.is_busy

    def usage(self) -> dict[str, TierUsage]:
        """What each tier holds, as of the worker's last look."""
        return self._reports.usage()

    def wait_idle(self) -> None:
        """Wait until all earlier commands are done, so that no copy uses the cache. KVFerryError
        if that takes too long.
        """
        is_idle = threading.Event()
        self._inbox.put(is_idle)
        if not is_idle.wait(STOP_TIMEOUT_S):
            raise KVFerryError(f"the offload worker was not idle within {STOP_TIMEOUT_S:g} s")

    def close(self) -> None:
        """Stop all threads and close pool, tiers and copier. Idempotent. A thread that hangs in the
        operating system is left behind; it holds no memory of the engine's cache.
        """
        if self._is_closing:
            return
        self._is_closing = True
        if self._thread.ident is None:
            self._close_parts()
            return
        self._inbox.put(None)
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise KVFerryError(f"the offload worker did not stop within {STOP_TIMEOUT_S:g} s")

    # -- the worker's thread --

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._tick()
        # Top of the thread: the cache is lost, serving goes on.
        except Exception as error:
            _log.exception("the offload worker stopped because of a bug; KV is no longer offloaded")
            self._failure = f"the offload worker has stopped: {type(error).__name__}: {error}"
            self._answer_without_jobs()
        finally:
            self._close_parts()

    def _tick(self) -> None:
        item = self._next_item()
        now = self._clock()
        match item:
            case _Batch():
                self._take_batch(item, now)
            case EndedTask(task_id, tier, result, seconds):
                _note_trouble(tier, result)
                self._jobs.complete(task_id, result, seconds, now)
            case threading.Event():
                self._waiting.append(item)
        while self._held and (self._held[0].mark is None or self._held[0].mark.is_complete()):
            for command in self._held.popleft().commands:
                self._jobs.handle(command, now)
        self._jobs.expire(now)
        for name, watching in self._watching.items():
            self._jobs.note_lost(name, watching.take_lost())
        reports = self._jobs.drain()
        for task in reports.tasks:
            self._runner.start(task)
        self._report(reports)
        if self._waiting and not self._held and self._jobs.is_idle:
            self._end_waits()

    def _take_batch(self, batch: _Batch, now: float) -> None:
        """Handle the commands of a step.

        Loads wait for the mark, because earlier work of the engine may still write into their
        blocks. Stores do not: the engine has seen the output of the steps that filled the blocks.
        A `VoidStores` must be handled before the copy that it concerns can end, so it never waits.
        """
        self._reports.expect(batch.commands)
        loads = tuple(c for c in batch.commands if isinstance(c, LoadChunks | CancelLoad))
        for command in batch.commands:
            if not isinstance(command, LoadChunks | CancelLoad):
                self._jobs.handle(command, now)
        if loads:
            self._held.append(_Batch(loads, batch.mark))

    def _next_item(self) -> _Item | None:
        try:
            return self._inbox.get(timeout=self._wait_s())
        except queue.Empty:
            return None

    def _wait_s(self) -> float:
        if self._held:
            return MARK_INTERVAL_S
        deadline = self._jobs.next_deadline()
        if deadline is None:
            return REPORT_INTERVAL_S
        return min(max(0.0, deadline - self._clock()), REPORT_INTERVAL_S)

    def _report(self, reports: JobReports) -> None:
        usage = self._runner.usage()
        if not self._jobs.keeps_rows:
            del usage[POOL]
        self._reports.update(reports.counts, usage, has_work=not self._jobs.is_idle)
        for event in reports.events:
            if isinstance(event, ContentsChanged):
                for name, watching in self._watching.items():
                    watching.watch(event.stored.get(name, ()))
        if reports.events:
            self._reports.send(reports.events)

    def _answer_without_jobs(self) -> None:
        """Answer every command as an engine without tiers would, until `close`."""
        # No copy may read or write blocks whose end is reported.
        while not self._runner.stop_copies(CLOSE_TIMEOUT_S):
            _log.warning("the offload worker waits for a copy to end")
        self._reports.answer_all(self._failure)
        if self._jobs.reports_contents:
            self._reports.send([ContentsChanged(is_cleared=True)])
        self._end_waits()
        while not self._is_closing:
            match self._inbox.get():
                case _Batch(commands):
                    self._reports.expect(commands)
                    self._reports.answer_all(self._failure)
                case threading.Event() as is_idle:
                    is_idle.set()

    def _end_waits(self) -> None:
        while self._waiting:
            self._waiting.pop().set()

    def _close_parts(self) -> None:
        self._runner.close(CLOSE_TIMEOUT_S, 0.0 if self._failure else CLOSE_TIMEOUT_S / 2)


def _note_trouble(tier: str, result: TaskResult) -> None:
    if result.reason:
        operation = "stored" if isinstance(result, StoreResult) else "loaded"
        log_trouble(operation, tier, result.reason)
