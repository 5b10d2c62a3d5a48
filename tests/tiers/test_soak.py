"""Tests an offload worker with a host pool and a disk tier over many stores and loads, both tiers
full all the time: memory, files, threads and the use of the disk stay flat, and every load that
succeeds has the right bytes.
"""

import os
import random
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.sampling import exhaustive
from tests.tiers.pool_engine import NAMESPACE, key
from tests.tiers.test_pool_processes import MIB, resident_bytes, run_alone

from kvferry.tiers.commands import Chunk, LoadChunks, LoadEnded, StoreChunks, StoresCopied
from kvferry.tiers.disk.tier import DiskTier
from kvferry.tiers.jobs.jobs import OffloadJobs
from kvferry.tiers.pool.host_pool import HostPool
from kvferry.tiers.pool.policies import ArcPolicy
from kvferry.tiers.worker import OffloadWorker
from kvferry.transports.copy.rows import CpuRowCopier
from kvferry.types import Region
from kvferry.worker.thread import WorkerThread

BLOCK_BYTES, NUM_BLOCKS = 4096, 32
NUM_ROWS = 64
DISK_BYTES = 4 * MIB
REMEMBERED = 1000
"""More chunks than the pool has rows and the disk has room for."""
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Level:
    resident_bytes: int
    num_files: int
    num_threads: int
    disk_bytes: int


class Rank:
    """One rank: fills blocks, stores them, and loads earlier chunks into other blocks."""

    def __init__(self, folder: Path) -> None:
        self.cache = np.zeros((NUM_BLOCKS, BLOCK_BYTES // 8), np.uint64)
        address = int(self.cache.ctypes.data)
        region = Region("layer", address, BLOCK_BYTES, BLOCK_BYTES, NUM_BLOCKS)
        self.disk = folder / "disk"
        disk = DiskTier(self.disk, NAMESPACE, b"secret", DISK_BYTES)
        pool = HostPool.open(folder / "pool", NAMESPACE, BLOCK_BYTES, NUM_ROWS, ArcPolicy)
        jobs = OffloadJobs(pool, (BLOCK_BYTES,), ("disk",), DEADLINE_S)
        worker = OffloadWorker(jobs, pool, {"disk": disk}, CpuRowCopier([region]), 2)
        self.worker = WorkerThread(worker)
        self.worker.start()

    def store(self, first: int, count: int) -> None:
        """Store chunks of these numbers from the first blocks."""
        chunks = []
        for block, number in enumerate(range(first, first + count)):
            self.cache[block] = number
            chunks.append(Chunk(key(number), 0, (block,), ("disk",)))
        request = f"store {first}"
        self.worker.submit([StoreChunks(request, tuple(chunks), first + 1)])
        self.wait_for(StoresCopied(first + 1))

    def load(self, number: int) -> bool:
        """Load one chunk into the last block; False if no tier has it any more."""
        self.cache[-1] = 0
        request = f"load {number}"
        chunk = Chunk(key(number), 0, (NUM_BLOCKS - 1,), ("cpu", "disk"))
        self.worker.submit([LoadChunks(request, (chunk,))])
        event = self.wait_for(LoadEnded(request))
        assert isinstance(event, LoadEnded)
        if event.reason:
            return False
        assert (self.cache[-1] == number).all()
        return True

    def wait_for(self, wanted: StoresCopied | LoadEnded) -> object:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for event in self.worker.take_events():
                match event, wanted:
                    case StoresCopied(number), StoresCopied(expected) if number >= expected:
                        return event
                    case LoadEnded(request), LoadEnded(expected_request):
                        assert request == expected_request
                        return event
            assert time.monotonic() < deadline, wanted
            time.sleep(0.0001)

    def level(self) -> Level:
        used = sum(path.stat().st_size for path in self.disk.rglob("*") if path.is_file())
        num_files = len(os.listdir("/proc/self/fd"))
        return Level(resident_bytes(), num_files, threading.active_count(), used)


def soak(folder: Path, count: int) -> None:
    rng = random.Random(7)
    rank = Rank(folder)
    known: deque[int] = deque(maxlen=REMEMBERED)
    levels, num_loads, num_hits = [], 0, 0
    try:
        for first in range(0, count, 8):
            rank.store(first, 8)
            known.extend(range(first, first + 8))
            for number in rng.sample(known, 8):
                num_loads += 1
                num_hits += rank.load(number)
            if first % (count // 20) < 8:
                levels.append(rank.level())
        usage = rank.worker.snapshot().usage
    finally:
        rank.worker.close()
    assert num_loads == count
    assert 0.1 * count < num_hits < count
    assert min(usage["cpu"].num_evicted, usage["disk"].num_evicted) > 0
    # A worker remembers which objects it has written lately, 65,536 of them at most.
    settled = levels[14:]
    assert max(level.resident_bytes for level in settled) <= settled[0].resident_bytes + 8 * MIB
    assert max(level.num_files for level in settled) <= settled[0].num_files + 4
    assert {level.num_threads for level in settled} == {settled[0].num_threads}
    assert max(level.disk_bytes for level in levels) <= DISK_BYTES


def test_memory_and_disk_stay_flat_over_4000_stores_and_loads(folder: Path) -> None:
    run_alone(soak, folder, 4_000)


@exhaustive
def test_memory_and_disk_stay_flat_over_100000_stores_and_loads(folder: Path) -> None:
    run_alone(soak, folder, 100_000)
