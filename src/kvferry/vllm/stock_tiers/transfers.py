"""Transfers between rows of vLLM's CPU tier and a storage tier, on threads of their own.

Storage may hang. vLLM must then get an answer within a deadline, and may give the rows to other
chunks at once. So a thread never passes a row to the storage: it copies between the row and a
buffer of its own, and only while the transfer has not been given up.

`Transfers` belongs to the engine's main thread; its lock guards the states that the threads change.
"""

import logging
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from queue import PriorityQueue

from kvferry.tiers.base import (
    LoadOutcome,
    LoadResult,
    ObjectKey,
    StoreOutcome,
    StoreResult,
    Tier,
)

__all__ = ["LOADS", "STORES", "Chunk", "FinishedJob", "IoThreads", "Transfers"]

LOADS, STORES = "loads", "stores"
CLOSE_TIMEOUT_S = 5.0
"""How long `close` waits for calls in progress. A call that hangs longer uses no row."""
LOG_INTERVAL_S = 10.0

_log = logging.getLogger(__name__)


# -- threads --


class IoThreads:
    """A few threads that run blocking calls, the more urgent ones first."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._tasks: PriorityQueue[tuple[int, int, Callable[[], None] | None]] = PriorityQueue()
        self._num_tasks = 0
        self._busy_since: list[float | None] = [None] * num_threads
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"{name}-{number}", daemon=True)
            for number in range(num_threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], None], priority: int = 0) -> None:
        """Run a task soon; a lower `priority` number comes first. One thread calls this."""
        self._num_tasks += 1
        self._tasks.put((priority, self._num_tasks, task))

    def are_stuck(self, after_s: float) -> bool:
        """Whether each thread has been in one call for longer than `after_s`."""
        limit = time.monotonic() - after_s
        return all(since is not None and since < limit for since in self._busy_since)

    def close(self) -> None:
        """End the threads once they have run what they have begun; give up hanging ones."""
        for _ in self._threads:
            self.submit_stop()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def submit_stop(self) -> None:
        self._num_tasks += 1
        self._tasks.put((-1, self._num_tasks, None))

    def _run(self, number: int) -> None:
        while True:
            task = self._tasks.get()[2]
            if task is None:
                return
            self._busy_since[number] = time.monotonic()
            try:
                task()
            except Exception:
                # A tier does not raise; if one does, later transfers still need the thread.
                _log.exception("a call to a storage tier raised")
            self._busy_since[number] = None


# -- transfers --


class _State(Enum):
    QUEUED = auto()
    IN_STORAGE = auto()
    """A thread is in a call to the storage; it has no access to the row."""
    COPYING = auto()
    """A thread reads or writes the row."""
    ENDED = auto()
    GIVEN_UP = auto()


@dataclass(slots=True, eq=False)
class Chunk:
    """One object on its way."""

    name: bytes
    """vLLM's key."""
    key: ObjectKey
    row: int
    state: _State = _State.QUEUED
    is_done: bool = False
    """Whether the object was loaded or is stored."""

    @property
    def is_open(self) -> bool:
        return self.state not in (_State.ENDED, _State.GIVEN_UP)


@dataclass(frozen=True, slots=True)
class FinishedJob:
    job_id: int
    is_load: bool
    done: tuple[bytes, ...]
    failed: tuple[bytes, ...]
    seconds: float


@dataclass(slots=True, eq=False)
class _Job:
    job_id: int
    is_load: bool
    chunks: Sequence[Chunk]
    started: float
    deadline: float

    def finish(self, now: float) -> FinishedJob:
        return FinishedJob(
            self.job_id,
            self.is_load,
            tuple(chunk.name for chunk in self.chunks if chunk.is_done),
            tuple(chunk.name for chunk in self.chunks if not chunk.is_done),
            now - self.started,
        )


@dataclass(slots=True)
class Transfers:
    """The jobs of one tier."""

    tier: Tier
    rows: memoryview
    """All rows of vLLM's CPU tier, flat."""
    row_bytes: int
    readers: IoThreads
    writers: IoThreads
    load_timeout_s: float
    store_timeout_s: float
    max_pending_stores: int
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Objects by direction and outcome since the last look; the lock guards them."""
    _jobs: dict[int, _Job] = field(default_factory=dict, init=False)
    _num_pending_stores: int = field(default=0, init=False)
    _lock: threading.Condition = field(default_factory=threading.Condition, init=False)
    _buffers: threading.local = field(default_factory=threading.local, init=False)
    _next_log: float = field(default=0.0, init=False)

    def load(self, job_id: int, chunks: Sequence[Chunk]) -> None:
        self._begin(job_id, chunks, self.load_timeout_s, is_load=True)
        for chunk in chunks:
            self.readers.submit(partial(self._load, chunk), priority=1)

    def store(self, job_id: int, chunks: Sequence[Chunk]) -> None:
        """Store chunks, unless too many wait already, each of which keeps a row from reuse."""
        num_pending = self._num_pending_stores
        has_room = not num_pending or num_pending + len(chunks) <= self.max_pending_stores
        if not has_room or self.writers.are_stuck(self.store_timeout_s):
            self.drop(job_id, chunks, is_load=False)
            return
        self._num_pending_stores += len(chunks)
        self._begin(job_id, chunks, self.store_timeout_s, is_load=False)
        for chunk in chunks:
            self.writers.submit(partial(self._store, chunk))

    def drop(self, job_id: int, chunks: Sequence[Chunk], is_load: bool) -> None:
        """Report a job as failed without trying it."""
        with self._lock:
            self.counts[LOADS if is_load else STORES, "dropped"] += len(chunks)
        for chunk in chunks:
            chunk.state = _State.GIVEN_UP
        if not is_load:
            self._num_pending_stores += len(chunks)
        self._begin(job_id, chunks, 0.0, is_load)

    def take_finished(self) -> list[FinishedJob]:
        """Remove and return the jobs that have ended. Jobs past their deadline are given up."""
        now = time.monotonic()
        ended = []
        with self._lock:
            for job in self._jobs.values():
                if now > job.deadline:
                    self._give_up(job)
                if not any(chunk.is_open for chunk in job.chunks):
                    ended.append(job)
        for job in ended:
            del self._jobs[job.job_id]
            if not job.is_load:
                self._num_pending_stores -= len(job.chunks)
        return [job.finish(now) for job in ended]

    def drain(self, timeout_s: float) -> None:
        """End all jobs: what waits is given up at once, and calls in progress after `timeout_s`.
        Afterwards no thread touches a row. `take_finished` returns all jobs.
        """
        with self._lock:
            for chunk in self._open_chunks():
                if chunk.state is _State.QUEUED:
                    chunk.state = _State.GIVEN_UP
            self._lock.wait_for(lambda: not any(self._open_chunks()), timeout_s)
            for job in self._jobs.values():
                self._give_up(job)
            # Only copies are left, which take milliseconds.
            self._lock.wait_for(lambda: not any(self._open_chunks()))

    def has_jobs(self) -> bool:
        return bool(self._jobs)

    def take_counts(self) -> dict[tuple[str, str], int]:
        with self._lock:
            counts = dict(self.counts)
            self.counts.clear()
        return counts

    def _begin(self, job_id: int, chunks: Sequence[Chunk], timeout_s: float, is_load: bool) -> None:
        now = time.monotonic()
        self._jobs[job_id] = _Job(job_id, is_load, chunks, now, now + timeout_s)

    def _open_chunks(self) -> Iterator[Chunk]:
        return (chunk for job in self._jobs.values() for chunk in job.chunks if chunk.is_open)

    def _give_up(self, job: _Job) -> None:
        for chunk in job.chunks:
            if chunk.state in (_State.QUEUED, _State.IN_STORAGE):
                chunk.state = _State.GIVEN_UP
                self.counts[LOADS if job.is_load else STORES, "timed_out"] += 1

    # -- on a thread --

    def _load(self, chunk: Chunk) -> None:
        buffer = self._buffer()
        if not self._advance(chunk, _State.IN_STORAGE):
            return
        result = self.tier.load(chunk.key, buffer)
        is_loaded = result.outcome is LoadOutcome.LOADED
        self._note(LOADS, result)
        if is_loaded and self._advance(chunk, _State.COPYING):
            self._row(chunk)[:] = buffer
        self._end(chunk, is_loaded)

    def _store(self, chunk: Chunk) -> None:
        buffer = self._buffer()
        if not self._advance(chunk, _State.COPYING):
            return
        buffer[:] = self._row(chunk)
        if not self._advance(chunk, _State.IN_STORAGE):
            return
        result = self.tier.store(chunk.key, buffer)
        self._note(STORES, result)
        self._end(chunk, result.outcome in (StoreOutcome.STORED, StoreOutcome.PRESENT))

    def _advance(self, chunk: Chunk, state: _State) -> bool:
        with self._lock:
            if chunk.state is _State.GIVEN_UP:
                return False
            chunk.state = state
            return True

    def _end(self, chunk: Chunk, is_done: bool) -> None:
        with self._lock:
            if chunk.state is not _State.GIVEN_UP:
                chunk.state, chunk.is_done = _State.ENDED, is_done
            self._lock.notify_all()

    def _note(self, direction: str, result: LoadResult | StoreResult) -> None:
        now = time.monotonic()
        with self._lock:
            self.counts[direction, str(result.outcome)] += 1
            is_log_due = bool(result.reason) and now >= self._next_log
            if is_log_due:
                self._next_log = now + LOG_INTERVAL_S
        if is_log_due:
            # Storage that fails does so for every object: counters have the numbers.
            _log.warning(
                "a chunk of KV was not loaded or not stored outcome=%s reason=%s",
                result.outcome,
                result.reason,
            )

    def _row(self, chunk: Chunk) -> memoryview:
        return self.rows[chunk.row * self.row_bytes : (chunk.row + 1) * self.row_bytes]

    def _buffer(self) -> memoryview:
        """This thread's own buffer, at a page boundary."""
        if not hasattr(self._buffers, "view"):
            self._buffers.view = memoryview(mmap.mmap(-1, self.row_bytes))
        view: memoryview = self._buffers.view
        return view
