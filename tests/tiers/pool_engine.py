"""An engine as the host pool sees it: a cache, a copier and a pool. Also in a process of its own,
which tests kill.
"""

import hashlib
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.tiers.base import EntryKey
from kvferry.tiers.keys import Namespace
from kvferry.tiers.pool.host_pool import HostPool, MakePolicy
from kvferry.tiers.pool.policies import LruPolicy
from kvferry.tiers.pool.reader import StoredRow
from kvferry.transports.base import RowBlocks
from kvferry.transports.copy.rows import CpuRowCopier
from kvferry.types import Region

NAMESPACE = Namespace({"model": "tiny", "tp_rank": 0})
ROW_BYTES = 50_000
"""Not a multiple of the page size."""
DEADLINE_S = 120


def key(number: int) -> EntryKey:
    return EntryKey(hashlib.blake2b(b"%d" % number, digest_size=32).digest())


@lru_cache(maxsize=1000)
def contents(key: EntryKey, row_bytes: int = ROW_BYTES) -> npt.NDArray[np.uint8]:
    """The bytes that belong to a key."""
    seed = int.from_bytes(key[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, row_bytes, dtype=np.uint8)


OPENED: list["PoolEngine"] = []
"""The engines that the current test has opened; the fixture `folder` closes them."""


class PoolEngine:
    """Stores and loads objects through a cache of two blocks: block 0 for stores, 1 for loads."""

    def __init__(self, pool: HostPool) -> None:
        size = pool.row_bytes
        self.pool = pool
        self._cache = np.zeros((2, size), np.uint8)
        region = Region("layer", int(self._cache.ctypes.data), size, size, num_blocks=2)
        self._copier = CpuRowCopier([region])

    @classmethod
    def open(
        cls,
        folder: Path,
        num_rows: int,
        row_bytes: int = ROW_BYTES,
        make_policy: MakePolicy = LruPolicy,
        namespace: Namespace = NAMESPACE,
    ) -> "PoolEngine":
        engine = cls(HostPool.open(folder, namespace, row_bytes, num_rows, make_policy))
        OPENED.append(engine)
        return engine

    def write(self, row: int, key: EntryKey) -> int:
        """Copy the key's contents to a row; returns the checksum."""
        self._cache[0] = contents(key, self.pool.row_bytes)
        [checksum] = self._copier.save([RowBlocks(self.pool.row_address(row), 0, (0,))])
        return checksum

    def store(self, key: EntryKey) -> bool:
        row = self.pool.reserve(key)
        return row is not None and self.pool.publish(row, self.write(row, key))

    def own_row(self, key: EntryKey) -> int:
        """The row of our own segment that holds the object."""
        found = self.pool.find(key)
        assert found is not None
        assert found.row is not None
        return found.row

    def refresh(self) -> None:
        self.pool.refresh(time.monotonic())

    def load(self, key: EntryKey) -> npt.NDArray[np.uint8] | None:
        """The object's bytes; None if it is missing, or was overwritten meanwhile."""
        found = self.pool.find(key)
        return None if found is None else self.load_row(found)

    def load_row(self, found: StoredRow) -> npt.NDArray[np.uint8] | None:
        loaded, checksum = self.load_unchecked(found)
        return loaded if checksum == found.checksum else None

    def load_unchecked(self, found: StoredRow) -> tuple[npt.NDArray[np.uint8], int]:
        [checksum] = self._copier.load([RowBlocks(found.address, 0, (1,))])
        return self._cache[1], checksum

    def has(self, key: EntryKey) -> bool:
        """Whether the object can be loaded. AssertionError if its bytes are wrong."""
        loaded = self.load(key)
        assert loaded is None or np.array_equal(loaded, contents(key, self.pool.row_bytes))
        return loaded is not None


# -- processes --


@dataclass
class EngineProcess:
    process: BaseProcess
    pipe: Connection

    def ask(self, command: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function with the process's engine, and return its result."""
        self.pipe.send((command, arguments))
        return self.answer()

    def tell(self, command: Callable[..., Any], *arguments: Any) -> None:
        """Run a function that does not return."""
        self.pipe.send((command, arguments))

    def answer(self) -> Any:
        assert self.pipe.poll(DEADLINE_S), "the engine process does not answer"
        return self.pipe.recv()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)
        assert self.process.exitcode == -9


def start_engine(folder: Path, num_rows: int, row_bytes: int = ROW_BYTES) -> EngineProcess:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(theirs, folder, num_rows, row_bytes), daemon=True
    )
    process.start()
    theirs.close()
    engine = EngineProcess(process, ours)
    assert engine.answer() == "ready"
    return engine


def _serve(pipe: Connection, folder: Path, num_rows: int, row_bytes: int) -> None:
    engine = PoolEngine.open(folder, num_rows, row_bytes)
    pipe.send("ready")
    while True:
        command, arguments = pipe.recv()
        pipe.send(command(engine, *arguments))


# -- commands --


def store_all(engine: PoolEngine, numbers: list[int]) -> list[bool]:
    return [engine.store(key(number)) for number in numbers]


def found_of(engine: PoolEngine, numbers: list[int]) -> list[int]:
    """The numbers whose objects can be loaded, with the right bytes."""
    engine.refresh()
    return [number for number in numbers if engine.has(key(number))]


def begin_store(engine: PoolEngine, number: int) -> int:
    """Write an object without publishing it; returns its row."""
    row = engine.pool.reserve(key(number))
    assert row is not None
    engine.write(row, key(number))
    return row


def clear(engine: PoolEngine) -> None:
    engine.pool.clear()


def path_of(engine: PoolEngine) -> Path:
    assert engine.pool.path is not None
    return engine.pool.path


def store_for_ever(engine: PoolEngine, first: int) -> None:
    """Store one object after the other, each of which evicts another."""
    number = first
    while True:
        engine.store(key(number))
        number += 1


def overwrite_for_ever(engine: PoolEngine, numbers: list[int]) -> None:
    """Store these objects in turn, in a pool with fewer rows."""
    while True:
        for number in numbers:
            if not engine.pool.holds(key(number)):
                engine.store(key(number))


def exit_at_once(engine: PoolEngine) -> None:
    os._exit(0)
