"""Tests an offload worker with its threads, a real pool and a real disk tier: every command is
answered, also if the worker's jobs fail.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.faulty import GatedCopier

from kvferry.logs import RepeatFilter
from kvferry.tiers.base import EntryKey, TierUsage
from kvferry.tiers.commands import (
    CancelLoad,
    Chunk,
    ContentsChanged,
    DropAll,
    LoadChunks,
    LoadEnded,
    OffloadCommand,
    OffloadEvent,
    StoreChunks,
    StoresCopied,
    TiersCounted,
)
from kvferry.tiers.disk.tier import DiskTier
from kvferry.tiers.jobs.contents import TierContents
from kvferry.tiers.jobs.jobs import OffloadJobs
from kvferry.tiers.keys import Namespace
from kvferry.tiers.pool.host_pool import HostPool
from kvferry.tiers.pool.policies import LruPolicy
from kvferry.tiers.worker import OffloadWorker
from kvferry.transports.copy.rows import CpuRowCopier
from kvferry.types import Region
from kvferry.worker.thread import WorkerThread

BLOCK_BYTES, NUM_BLOCKS = 512, 8
DEADLINE_S = 60.0


class BrokenPool(HostPool):
    """A pool with a bug: one of its next calls raises."""

    calls_until_bug: int | None = None

    def refresh(self, now: float) -> None:
        super().refresh(now)
        if self.calls_until_bug is not None:
            self.calls_until_bug -= 1
            if self.calls_until_bug < 0:
                raise RuntimeError("a bug")


@dataclass
class Mark:
    """A mark on the engine's stream."""

    is_passed: bool = False
    error: str = ""

    def is_complete(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.is_passed


class Rank:
    def __init__(self, folder: Path, max_disk_bytes: int = 1 << 20) -> None:
        self.cache = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        address = int(self.cache.ctypes.data)
        region = Region("layer", address, BLOCK_BYTES, BLOCK_BYTES, NUM_BLOCKS)
        self.copier = GatedCopier(CpuRowCopier([region]))
        pool = BrokenPool.private(4096, 4, LruPolicy)
        assert isinstance(pool, BrokenPool)
        self.pool = pool
        disk = DiskTier(folder, Namespace({"model": "tiny"}), b"secret", max_disk_bytes)
        jobs = OffloadJobs(
            self.pool, (BLOCK_BYTES,), ("disk",), DEADLINE_S, contents=TierContents()
        )
        worker = OffloadWorker(jobs, self.pool, {"disk": disk}, self.copier, 2)
        self.worker = WorkerThread(worker)
        self.worker.start()
        self.events: list[OffloadEvent] = []

    def submit(self, *commands: OffloadCommand) -> None:
        self.worker.submit(commands)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.events
            self.events += self.worker.take_events()
            time.sleep(0.001)

    def reported(self, tier: str) -> set[EntryKey]:
        """What a tier holds, as the events say."""
        held: set[EntryKey] = set()
        for event in self.events:
            if isinstance(event, ContentsChanged):
                held = set() if event.is_cleared else held - {*event.removed.get(tier, ())}
                held |= {*event.stored.get(tier, ())}
        return held

    def counted(self, tier: str, name: str) -> float:
        reports = [each.counts for each in self.events if isinstance(each, TiersCounted)]
        return sum(counts.get(tier, {}).get(name, 0) for counts in reports)

    def ended(self) -> set[str]:
        return {event.request for event in self.events if isinstance(event, LoadEnded)}

    def num_copied(self) -> int:
        numbers = [event.number for event in self.events if isinstance(event, StoresCopied)]
        return max(numbers, default=0)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.copier.saves.set()
    made.copier.loads.set()
    made.worker.close()


def chunk(number: int, block: int, *tiers: str) -> Chunk:
    return Chunk(EntryKey(number.to_bytes(32, "big")), 0, (block,), tiers)


def on_disk(folder: Path) -> set[EntryKey]:
    return {
        EntryKey(bytes.fromhex(path.name)) for path in folder.glob("*/*/*") if len(path.name) == 64
    }


def test_a_chunk_is_stored_and_loaded(rank: Rank) -> None:
    rank.cache[1] = 7
    rank.submit(StoreChunks("a", (chunk(1, 1, "disk"),), 1))
    rank.wait_for(lambda: rank.num_copied() == 1)
    rank.submit(LoadChunks("b", (chunk(1, 2),)))
    rank.wait_for(lambda: "b" in rank.ended())
    assert (rank.cache[2] == 7).all()


def test_evictions_by_the_pool_and_by_the_disk_are_reported(tmp_path: Path) -> None:
    rank = Rank(tmp_path, max_disk_bytes=10 * 4608)
    keys = [chunk(number, 0).key for number in range(40)]
    for number, key in enumerate(keys):
        rank.submit(StoreChunks("a", (chunk(number, 0, "disk"),)))
        rank.wait_for(lambda key=key: key in rank.reported("cpu"))  # type: ignore[misc]
    # The limit holds ten objects; the sweeper runs beside the stores.
    rank.wait_for(lambda: len(on_disk(tmp_path)) < 10)
    rank.wait_for(lambda: rank.reported("disk") == on_disk(tmp_path))
    assert len(rank.reported("cpu")) == 4
    assert keys[-1] in rank.reported("cpu")
    rank.worker.close()


def test_a_worker_that_has_failed_reports_that_it_holds_nothing(rank: Rank) -> None:
    rank.submit(StoreChunks("a", (chunk(1, 1),)))
    rank.wait_for(lambda: rank.reported("cpu") == {chunk(1, 1).key})
    rank.pool.calls_until_bug = 0
    rank.submit(StoreChunks("a", (chunk(2, 1),)))
    rank.wait_for(lambda: not rank.reported("cpu"))


def test_a_load_waits_for_the_mark_and_its_cancel_for_the_load(rank: Rank) -> None:
    rank.cache[1] = 7
    rank.submit(StoreChunks("a", (chunk(1, 1),), 1))
    rank.wait_for(lambda: rank.num_copied() == 1)
    mark = Mark()
    rank.worker.submit((LoadChunks("b", (chunk(1, 2),)),), mark)
    rank.submit(CancelLoad("b"), StoreChunks("later", (), 2))
    rank.wait_for(lambda: rank.num_copied() == 2)
    assert "b" not in rank.ended()
    assert not rank.cache[2].any()
    mark.is_passed = True
    rank.wait_for(lambda: "b" in rank.ended())


def test_if_a_mark_cannot_be_queried_its_load_fails_and_the_engine_goes_on(rank: Rank) -> None:
    rank.worker.submit((LoadChunks("b", (chunk(1, 2),)),), Mark(error="CUDA error"))
    rank.wait_for(lambda: "b" in rank.ended())
    rank.submit(StoreChunks("a", (chunk(1, 1),), 1))
    rank.wait_for(lambda: rank.num_copied() == 1)


def test_objects_that_are_refused_together_are_one_line_in_the_log(
    rank: Rank, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = (1, 2)
    chunks = tuple(chunk(number, number, "disk") for number in numbers)
    rank.submit(StoreChunks("a", chunks, 1))
    rank.wait_for(lambda: rank.worker.snapshot().usage.get("disk", TierUsage()).num_entries == 2)
    for path in tmp_path.glob("*/*/*"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    rank.submit(DropAll(), *(LoadChunks(str(each), (chunks[each - 1],)) for each in numbers))
    rank.wait_for(lambda: rank.ended() == {"1", "2"})
    assert rank.counted("disk", "refused") == 2
    repeats = RepeatFilter()
    shown = [record for record in caplog.records if repeats.filter(record)]
    (line,) = [each.getMessage() for each in shown if each.name.endswith("backoff")]
    assert "tier=disk" in line
    assert "is damaged" in line


@pytest.mark.parametrize("calls_until_bug", [0, 1, 2])
def test_if_the_jobs_fail_in_the_middle_of_a_step_every_command_is_answered(
    rank: Rank, calls_until_bug: int
) -> None:
    """The first store, the second store and the load call the pool in turn."""
    rank.pool.calls_until_bug = calls_until_bug
    rank.submit(
        StoreChunks("a", (chunk(1, 1),), 1),
        StoreChunks("b", (chunk(2, 2),), 2),
        LoadChunks("c", (chunk(9, 3),)),
        LoadChunks("d", (chunk(9, 4),)),
    )
    rank.wait_for(lambda: rank.ended() == {"c", "d"} and rank.num_copied() == 2)
    assert len([event for event in rank.events if isinstance(event, LoadEnded)]) == 2
    rank.submit(StoreChunks("e", (chunk(3, 5),), 3), LoadChunks("f", ()))
    rank.wait_for(lambda: "f" in rank.ended() and rank.num_copied() == 3)
    (failed,) = [e for e in rank.events if isinstance(e, LoadEnded) and e.request == "f"]
    assert "the offload worker has stopped: RuntimeError: a bug" in failed.reason


def test_if_the_jobs_fail_no_end_is_reported_while_a_copy_reads_the_blocks(rank: Rank) -> None:
    rank.copier.saves.clear()
    rank.pool.calls_until_bug = 1
    rank.submit(StoreChunks("a", (chunk(1, 1),), 1))
    # A copy that has not begun when the jobs fail is dropped.
    rank.wait_for(lambda: rank.copier.num_saves_begun == 1)
    rank.submit(StoreChunks("b", (chunk(2, 2),), 2))
    time.sleep(0.05)
    assert not [each for each in rank.worker.take_events() if not isinstance(each, TiersCounted)]
    assert rank.worker.snapshot().has_work
    rank.copier.saves.set()
    rank.wait_for(lambda: rank.num_copied() == 2)
    # Otherwise the engine would run steps for ever.
    rank.wait_for(lambda: not rank.worker.snapshot().has_work)
