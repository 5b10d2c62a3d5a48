"""A rank for tests of jobs: a real cache, pool and copies. The test performs the tasks."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from kvferry.tiers.base import EntryKey, LoadOutcome, LoadResult, StoreOutcome, StoreResult
from kvferry.tiers.commands import (
    Chunk,
    ContentsChanged,
    OffloadCommand,
    OffloadEvent,
    StoreChunks,
    TiersCounted,
)
from kvferry.tiers.jobs.base import (
    CopyResult,
    LoadEntry,
    LoadRows,
    StoreEntry,
    StoreRows,
    Task,
    TaskResult,
)
from kvferry.tiers.jobs.contents import TierContents
from kvferry.tiers.jobs.jobs import OffloadJobs
from kvferry.tiers.pool.host_pool import HostPool
from kvferry.tiers.pool.policies import LruPolicy
from kvferry.transports.copy.rows import CpuRowCopier
from kvferry.types import Region

BLOCK_BYTES, NUM_BLOCKS, LAYERS = 512, 24, 2
ROW_BYTES = BLOCK_BYTES * LAYERS
TIMEOUT_S = 10.0


def key_of(number: int) -> EntryKey:
    return EntryKey(number.to_bytes(32, "big"))


@dataclass
class Rank:
    """A rank's cache, its pool and its jobs; `disk` and `object` are dictionaries."""

    num_rows: int = 8
    tiers: tuple[str, ...] = ("disk", "object")
    keeps_rows: bool = True
    now: float = 100.0
    stored: dict[tuple[str, EntryKey], bytes] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)
    events: list[OffloadEvent] = field(default_factory=list)
    reported: set[tuple[str, EntryKey]] = field(default_factory=set)
    """What the tiers hold, as the events say."""

    _counts: dict[str, Counter[str]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.cache = np.zeros((LAYERS, NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        regions = [
            Region(
                f"layer.{n}", int(self.cache[n].ctypes.data), BLOCK_BYTES, BLOCK_BYTES, NUM_BLOCKS
            )
            for n in range(LAYERS)
        ]
        self.copier = CpuRowCopier(regions)
        self.pool = HostPool.private(ROW_BYTES, self.num_rows, LruPolicy)
        self.jobs = OffloadJobs(
            self.pool,
            (ROW_BYTES,),
            self.tiers,
            TIMEOUT_S,
            keeps_rows=self.keeps_rows,
            contents=TierContents(),
        )

    def contents(self, key: EntryKey) -> bytes:
        """The KV of a chunk: what the engine computes for it."""
        return random.Random(key).randbytes(ROW_BYTES)

    def fill(self, block: int, key: EntryKey) -> None:
        data = np.frombuffer(self.contents(key), np.uint8).reshape(LAYERS, BLOCK_BYTES)
        self.cache[:, block] = data

    def block(self, block: int) -> bytes:
        return self.cache[:, block].tobytes()

    def send(self, *commands: OffloadCommand) -> None:
        for command in commands:
            self.jobs.handle(command, self.now)
        self._collect()

    def perform(self, task: Task) -> TaskResult:
        """Do what a task says, with the tiers in good health."""
        match task:
            case StoreRows(rows):
                return CopyResult(self.copier.save(rows))
            case LoadRows(rows):
                return CopyResult(self.copier.load(rows))
            case LoadEntry(tier, key):
                if (tier, key) not in self.stored:
                    return LoadResult(LoadOutcome.MISSING)
                source = np.frombuffer(self.stored[tier, key], np.uint8).ctypes.data
                loaded = replace(task.place, address=source)
                return CopyResult([self.copier.copy_row(loaded, task.place.address)])
            case StoreEntry(tier, key):
                stored = np.empty(task.size_bytes, np.uint8)
                if self.copier.copy_row(task.place, stored.ctypes.data) != task.checksum:
                    return CopyResult(reason="damaged")
                self.stored[tier, key] = stored.tobytes()
                return StoreResult(StoreOutcome.STORED)

    def finish(self, task: Task, result: TaskResult | None = None) -> None:
        self.tasks.remove(task)
        self.jobs.complete(task, result or self.perform(task), 0.001, self.now)
        self._collect()

    def finish_all(self) -> None:
        while self.tasks:
            self.finish(self.tasks[0])

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.jobs.expire(self.now)
        self._collect()

    def task(self, kind: type[Task]) -> Task:
        (found,) = [task for task in self.tasks if isinstance(task, kind)]
        return found

    def counts(self) -> dict[str, Counter[str]]:
        counts, self._counts = self._counts, {}
        return counts

    def _collect(self) -> None:
        reports = self.jobs.drain()
        self.tasks += reports.tasks
        for event in reports.events:
            if isinstance(event, ContentsChanged):
                self._note_contents(event)
            elif isinstance(event, TiersCounted):
                for tier, row in event.counts.items():
                    self._counts.setdefault(tier, Counter()).update(row)
            else:
                self.events.append(event)

    def _note_contents(self, event: ContentsChanged) -> None:
        if event.is_cleared:
            self.reported.clear()
        for tier, keys in event.removed.items():
            self.reported -= {(tier, key) for key in keys}
        for tier, keys in event.stored.items():
            self.reported |= {(tier, key) for key in keys}


def chunk(number: int, block: int, *tiers: str) -> Chunk:
    return Chunk(key_of(number), 0, (block,), tiers)


def store(rank: Rank, number: int, *tiers: str) -> None:
    """Store one chunk, completely, and wipe the block."""
    rank.fill(0, key_of(number))
    rank.send(StoreChunks("storing", (chunk(number, 0, *tiers),)))
    rank.finish_all()
    rank.cache[:, 0] = 0
