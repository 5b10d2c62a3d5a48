"""The offload worker of one rank: owns the rank's jobs, its host pool and its tiers.

A `WorkerThread` runs it: the engine's thread submits commands and takes events, and never waits.
Only the worker's thread calls `OffloadJobs` and changes the pool; other threads perform the tasks
(`task_runner.py`) and put the results into the worker's queue.

If the worker fails, the engine goes on without tiers: outstanding loads are reported as failed as
soon as no copy is active, and every later command is answered at once.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.tiers.backoff import log_trouble
from kvferry.tiers.base import Tier, TierUsage, WatchesEntries
from kvferry.tiers.commands import (
    POOL,
    CancelLoad,
    ContentsChanged,
    LoadChunks,
    LoadEnded,
    OffloadCommand,
    OffloadEvent,
    StoreChunks,
    StoresCopied,
    TiersCounted,
)
from kvferry.tiers.jobs.base import StoreEntry, StoreRows
from kvferry.tiers.jobs.jobs import OffloadJobs
from kvferry.tiers.pool.host_pool import HostPool
from kvferry.tiers.task_runner import EndedTask, TaskRunner
from kvferry.transports.base import RowCopier

CLOSE_TIMEOUT_S = 5.0
"""How long each part may take to stop."""
STOP_TIMEOUT_S = 25.0
"""More than copies, loads, stores and the slowest tier, mooncake, may take together."""
REPORT_INTERVAL_S = 1.0
"""How often the fill of the tiers is reported while the worker is idle."""

WorkerCommand = OffloadCommand | threading.Event
"""An event is set as soon as the worker is idle."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OffloadSnapshot:
    """What the tiers hold, and whether the worker has work."""

    usage: Mapping[str, TierUsage] = field(default_factory=dict)
    has_work: bool = False


class OffloadWorker:
    """Runs the jobs of one rank. `step` is one tick."""

    title = "offload worker"

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
            name: tier for name, tier in tiers.items() if isinstance(tier, WatchesEntries)
        }
        self._clock = clock
        self._ended: queue.SimpleQueue[EndedTask | None] = queue.SimpleQueue()
        """The results of tasks; None wakes the worker."""
        self._runner = TaskRunner(
            pool, tiers, copier, num_io_threads, name, clock, report=self._ended.put
        )
        self._waiting: list[threading.Event] = []
        self._open_loads: set[str] = set()
        self._last_store = 0
        """What the engine waits for: if the jobs fail, at any line, all of it is answered."""
        self._failure = ""
        self._snapshot = OffloadSnapshot()

    def waits_for_mark(self, command: WorkerCommand) -> bool:
        """Loads wait for the mark, because earlier work of the engine may still write into their
        blocks. Stores do not: the engine has seen the output of the steps that filled the blocks.
        A `VoidStores` must be handled before the copy that it concerns can end, so it never waits.
        """
        return isinstance(command, LoadChunks | CancelLoad | threading.Event)

    def step(
        self,
        commands: Sequence[WorkerCommand],
        *,
        wait_s: float | None = None,
        late_commands: Callable[[], Sequence[WorkerCommand]] = tuple,
        engine_seen_at: float = math.inf,
    ) -> Sequence[OffloadEvent]:
        ended = self._wait(0.0 if commands else self.idle_s() if wait_s is None else wait_s)
        self._expect(commands)
        # The late commands are handled before the results: a `VoidStores` that was submitted before
        # its copy has ended must take effect.
        late = late_commands()
        self._expect(late)
        commands = [*commands, *late]
        if self._failure:
            return self._answers() if commands else ()
        events = self._run(commands, ended)
        self._open_loads -= {each.request for each in events if isinstance(each, LoadEnded)}
        return events

    def failed(self, error: Exception) -> Sequence[OffloadEvent]:
        """The cache of the tiers is lost, serving goes on."""
        _log.error(
            "the offload worker stopped because of a bug; KV is no longer offloaded",
            exc_info=error,
        )
        self._failure = f"the offload worker has stopped: {type(error).__name__}: {error}"
        return self._end()

    def idle_s(self) -> float:
        deadline = None if self._failure else self._jobs.next_deadline()
        if deadline is None:
            return REPORT_INTERVAL_S
        return min(max(0.0, deadline - self._clock()), REPORT_INTERVAL_S)

    def snapshot(self) -> OffloadSnapshot:
        return self._snapshot

    def wakes_engine(self, events: Sequence[OffloadEvent], engine_seen_at: float) -> bool:
        return not all(isinstance(event, TiersCounted) for event in events)

    def wake(self) -> None:
        self._ended.put(None)

    def close(self) -> None:
        """Stop all threads and close pool, tiers and copier. A thread that hangs in the operating
        system is left behind; it holds no memory of the engine's cache.
        """
        self._runner.close(CLOSE_TIMEOUT_S, 0.0 if self._failure else CLOSE_TIMEOUT_S / 2)

    def _wait(self, timeout_s: float) -> list[EndedTask]:
        """The tasks that have ended, after a wait for the first."""
        ended: list[EndedTask | None] = []
        try:
            ended.append(self._ended.get(timeout=timeout_s))
            while True:
                ended.append(self._ended.get_nowait())
        except queue.Empty:
            return [task for task in ended if task is not None]

    def _run(
        self, commands: Sequence[WorkerCommand], ended: Sequence[EndedTask]
    ) -> list[OffloadEvent]:
        now = self._clock()
        for command in commands:
            if not isinstance(command, threading.Event):
                self._jobs.handle(command, now)
        for each in ended:
            if each.result.reason:
                is_store = isinstance(each.task, StoreEntry | StoreRows)
                operation = "stored" if is_store else "loaded"
                log_trouble(operation, each.task.tier, each.result.reason)
            self._jobs.complete(each.task, each.result, each.seconds, now)
        self._jobs.expire(now)
        for name, watching in self._watching.items():
            self._jobs.note_lost(name, watching.take_lost())
        reports = self._jobs.drain()
        for new in reports.tasks:
            self._runner.start(new)
        for event in reports.events:
            if isinstance(event, ContentsChanged):
                for name, watching in self._watching.items():
                    watching.watch(event.stored.get(name, ()))
        usage = self._runner.usage()
        if not self._jobs.keeps_rows:
            del usage[POOL]
        self._snapshot = OffloadSnapshot(usage, has_work=not self._jobs.is_idle)
        if self._jobs.is_idle:
            self._end_waits()
        return reports.events

    def _end(self) -> list[OffloadEvent]:
        """Answer every command as an engine without tiers would, now and from now on."""
        # No copy may read or write blocks whose end is reported.
        while not self._runner.stop_copies(CLOSE_TIMEOUT_S):
            _log.warning("the offload worker waits for a copy to end")
        self._snapshot = OffloadSnapshot(self._snapshot.usage)
        cleared = [ContentsChanged(is_cleared=True)] if self._jobs.reports_contents else []
        return [*self._answers(), *cleared]

    def _expect(self, commands: Sequence[WorkerCommand]) -> None:
        for command in commands:
            match command:
                case LoadChunks(request):
                    self._open_loads.add(request)
                case StoreChunks(number=number):
                    self._last_store = max(self._last_store, number)
                case threading.Event():
                    self._waiting.append(command)

    def _answers(self) -> list[OffloadEvent]:
        """All loads have failed, and no copy reads the blocks of a store."""
        self._end_waits()
        loads, self._open_loads = self._open_loads, set()
        failed = (LoadEnded(request, self._failure) for request in sorted(loads))
        return [StoresCopied(self._last_store), *failed]

    def _end_waits(self) -> None:
        while self._waiting:
            self._waiting.pop().set()
