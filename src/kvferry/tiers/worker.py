"""The offload worker of one rank: a thread that owns the rank's jobs and its host pool, and the
threads that copy rows, read and write for it.

The engine's thread submits commands and takes events, and never waits. Only the worker's own thread
calls `OffloadJobs` and `HostPool`; the other threads get tasks and put results into its inbox.
If the worker fails, the engine goes on without tiers: outstanding loads are reported as failed as
soon as no copy is active, and every later command is answered at once.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from kvferry.errors import KVFerryError
from kvferry.tiers.base import (
    LoadOutcome,
    LoadResult,
    StoreOutcome,
    StoreResult,
    Tier,
    TierUsage,
    WatchesObjects,
)
from kvferry.tiers.commands import (
    POOL,
    CancelLoad,
    ContentsChanged,
    EndStores,
    LoadChunks,
    LoadEnded,
    OffloadCommand,
    OffloadEvent,
    StoreChunks,
    StoresCopied,
    StoresEnded,
    TierCounts,
)
from kvferry.tiers.host_pool import HostPool
from kvferry.tiers.jobs.jobs import OffloadJobs
from kvferry.tiers.jobs.tasks import (
    CopyResult,
    LoadRows,
    ReadObject,
    SaveRows,
    Task,
    TaskResult,
    WriteObject,
)
from kvferry.tiers.threads import TaskThreads
from kvferry.transports.base import RowCopier, StreamEvent

__all__ = ["OffloadWorker"]

CLOSE_TIMEOUT_S = 5.0
"""How long each part may take to stop."""
STOP_TIMEOUT_S = 25.0
"""More than copies, reads, writes and the slowest tier, mooncake, may take together."""
MARK_INTERVAL_S = 0.001
"""How often the engine's stream is queried while commands wait for a mark."""
LOG_INTERVAL_S = 60.0
REPORT_INTERVAL_S = 1.0
"""How often the fill of the tiers is reported while the worker is idle."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Commands of one `submit`, and the mark on the engine's stream that must be complete first."""

    commands: tuple[OffloadCommand, ...]
    mark: StreamEvent | None


@dataclass(frozen=True, slots=True)
class _Result:
    task_id: int
    tier: str
    result: TaskResult
    seconds: float


@dataclass(slots=True)
class _Trouble:
    """When the failures of one tier were last logged, and how many were suppressed since."""

    logged_at: float = -inf
    num_suppressed: int = 0


@dataclass(slots=True)
class _Unanswered:
    """What the engine waits for. If the jobs fail, at any line, this is what must be answered."""

    loads: set[str] = field(default_factory=set)
    ends: set[str] = field(default_factory=set)
    last_store: int = 0

    def add(self, commands: Sequence[OffloadCommand]) -> None:
        for command in commands:
            match command:
                case LoadChunks(request):
                    self.loads.add(request)
                case EndStores(request):
                    self.ends.add(request)
                case StoreChunks(number=number):
                    self.last_store = max(self.last_store, number)

    def remove(self, events: Sequence[OffloadEvent]) -> None:
        for event in events:
            match event:
                case LoadEnded(request):
                    self.loads.discard(request)
                case StoresEnded(request):
                    self.ends.discard(request)

    def answers(self, failure: str) -> list[OffloadEvent]:
        return [
            StoresCopied(self.last_store),
            *(LoadEnded(request, failure) for request in sorted(self.loads)),
            *(StoresEnded(request) for request in sorted(self.ends)),
        ]


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
        self._pool = pool
        self._tiers = tiers
        self._watching = {
            name: tier for name, tier in tiers.items() if isinstance(tier, WatchesObjects)
        }
        self._copier = copier
        self._clock = clock
        self._inbox: queue.SimpleQueue[_Batch | _Result | None] = queue.SimpleQueue()
        self._held: deque[_Batch] = deque()
        """Loads that wait for the mark of their batch, and cancels that follow them, in order."""
        self._unanswered = _Unanswered()
        self._outbox: deque[OffloadEvent] = deque()
        self._wake_engine: Callable[[], None] = _no_wakeup
        self._is_closing = False
        self._failure = ""
        self._counts: TierCounts = {}
        self._counts_lock = threading.Lock()
        self._usage: dict[str, TierUsage] = {}
        self._is_busy = False
        self._troubles: dict[tuple[str, type[TaskResult]], _Trouble] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Loads and stores have a thread each, so that no load waits for the copy of a store.
        self._saver = TaskThreads(f"{name}-save", 1)
        self._loader = TaskThreads(f"{name}-load", 1)
        self._io = TaskThreads(f"{name}-io", num_io_threads if tiers else 0)

    # -- the engine's thread --

    def start(self) -> None:
        self._thread.start()

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        self._wake_engine = wake

    def submit(self, commands: Sequence[OffloadCommand], mark: StreamEvent | None = None) -> None:
        """Submit commands without waiting. They run in order, and not before the engine's stream
        has passed `mark`.
        """
        if commands:
            self._inbox.put(_Batch(tuple(commands), mark))

    def take_events(self) -> list[OffloadEvent]:
        return [self._outbox.popleft() for _ in range(len(self._outbox))]

    def take_counts(self) -> TierCounts:
        """Take the counters since the last call."""
        with self._counts_lock:
            counts, self._counts = self._counts, {}
        return counts

    @property
    def is_busy(self) -> bool:
        """Whether anything is in progress, or has ended since the last `take_counts`, or an event
        waits for `take_events`.
        """
        return self._is_busy or bool(self._counts) or bool(self._outbox)

    def usage(self) -> dict[str, TierUsage]:
        """What each tier holds, as of the worker's last look."""
        return dict(self._usage)

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
            case _Result(task_id, tier, result, seconds):
                self._note_trouble(tier, result, now)
                self._jobs.complete(task_id, result, seconds, now)
        while self._held and (self._held[0].mark is None or self._held[0].mark.is_complete()):
            for command in self._held.popleft().commands:
                self._jobs.handle(command, now)
        self._jobs.expire(now)
        for task in self._jobs.take_tasks():
            self._start(task)
        for name, watching in self._watching.items():
            self._jobs.note_lost(name, watching.take_lost())
        self._report(self._jobs.take_events())

    def _take_batch(self, batch: _Batch, now: float) -> None:
        """Handle the commands of a step.

        Loads wait for the mark, because earlier work of the engine may still write into their
        blocks. Stores do not: the engine has seen the output of the steps that filled the blocks.
        A `VoidStores` must be handled before the copy that it concerns can end, so it never waits.
        """
        self._unanswered.add(batch.commands)
        loads = tuple(c for c in batch.commands if isinstance(c, LoadChunks | CancelLoad))
        for command in batch.commands:
            if not isinstance(command, LoadChunks | CancelLoad):
                self._jobs.handle(command, now)
        if loads:
            self._held.append(_Batch(loads, batch.mark))

    def _next_item(self) -> "_Batch | _Result | None":
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

    def _report(self, events: Sequence[OffloadEvent]) -> None:
        counts = self._jobs.take_counts()
        if counts:
            with self._counts_lock:
                for tier, row in counts.items():
                    total = self._counts.setdefault(tier, {})
                    for name, value in row.items():
                        total[name] = total.get(name, 0) + value
        self._is_busy = not self._jobs.is_idle
        usage = {name: tier.usage() for name, tier in self._tiers.items()}
        if self._jobs.keeps_rows:
            usage[POOL] = self._pool.usage()
        self._usage = usage
        for event in events:
            if isinstance(event, ContentsChanged):
                for name, watching in self._watching.items():
                    watching.watch(event.stored.get(name, ()))
        if events:
            self._send(events)

    def _send(self, events: Sequence[OffloadEvent]) -> None:
        self._unanswered.remove(events)
        self._outbox.extend(events)
        self._wake_engine()

    def _note_trouble(self, tier: str, result: TaskResult, now: float) -> None:
        """Log one reason a minute for each tier and direction: thousands of objects may fail at
        once, and every reason names another object.
        """
        if not result.reason:
            return
        trouble = self._troubles.setdefault((tier, type(result)), _Trouble())
        if now - trouble.logged_at < LOG_INTERVAL_S:
            trouble.num_suppressed += 1
            return
        _log.warning(
            "KV cannot be stored or loaded tier=%s reason=%s suppressed=%d",
            tier,
            result.reason,
            trouble.num_suppressed,
        )
        trouble.logged_at, trouble.num_suppressed = now, 0

    def _start(self, task: Task) -> None:
        match task:
            case SaveRows(task_id, rows):
                self._saver.run(lambda: self._copy(task_id, lambda: self._copier.save(rows)))
            case LoadRows(task_id, rows):
                self._loader.run(lambda: self._copy(task_id, lambda: self._copier.load(rows)))
            case ReadObject() | WriteObject():
                self._io.run(lambda: self._transfer(task))

    def _copy(self, task_id: int, copy: Callable[[], list[int]]) -> None:
        began = self._clock()
        try:
            result = CopyResult(copy())
        # Top of a task: only the rows of this task are lost.
        except Exception as error:
            result = CopyResult(reason=f"a copy failed: {type(error).__name__}: {error}")
        self._inbox.put(_Result(task_id, POOL, result, self._clock() - began))

    def _transfer(self, task: ReadObject | WriteObject) -> None:
        result: LoadResult | StoreResult
        row = self._pool.row(task.row)[: task.size_bytes]
        began = self._clock()
        try:
            if isinstance(task, ReadObject):
                result = self._tiers[task.tier].load(task.key, row)
            else:
                result = self._tiers[task.tier].store(task.key, row)
        # Top of a task: a bug of one tier must not lose the row.
        except Exception as error:
            _log.exception("tier failed because of a bug tier=%s", task.tier)
            reason = f"the tier {task.tier} failed: {type(error).__name__}"
            result = (
                LoadResult(LoadOutcome.FAILED, reason)
                if isinstance(task, ReadObject)
                else StoreResult(StoreOutcome.FAILED, reason)
            )
        self._inbox.put(_Result(task.task_id, task.tier, result, self._clock() - began))

    def _answer_without_jobs(self) -> None:
        """Answer every command as an engine without tiers would, until `close`."""
        # No copy may read or write blocks whose end is reported.
        while not (self._loader.close(CLOSE_TIMEOUT_S) and self._saver.close(CLOSE_TIMEOUT_S)):
            _log.warning("the offload worker waits for a copy to end")
        self._send(self._unanswered.answers(self._failure))
        if self._jobs.reports_contents:
            self._send([ContentsChanged(is_cleared=True)])
        while not self._is_closing:
            item = self._inbox.get()
            if isinstance(item, _Batch):
                self._unanswered.add(item.commands)
                self._send(self._unanswered.answers(self._failure))

    def _close_parts(self) -> None:
        # A copy reads and writes the engine's cache, which the engine frees next: wait for copies.
        for threads in (self._loader, self._saver):
            threads.close(CLOSE_TIMEOUT_S)
        self._io.close(0.0 if self._failure else CLOSE_TIMEOUT_S / 2)
        for tier in self._tiers.values():
            tier.close()
        self._copier.close()
        self._pool.close()


def _no_wakeup() -> None:
    return None
