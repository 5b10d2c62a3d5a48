"""Compare NIXL's POSIX and OBJ plugins with what the disk and object tiers use.

    python benchmarks/measure_tier_io.py disk /folder/on/the/disk
    python benchmarks/measure_tier_io.py object

Prints a table of MB/s, the median of nine rounds. In each round the contestants take turns. A disk
contestant opens, writes and closes one file for each object, with direct I/O; the reads follow
after all writes of the round. `object` starts moto's S3 server on this machine. The numbers are in
docs/decisions/052-persistent-tiers.md.
"""

import argparse
import mmap
import os
import secrets
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvferry.testing.tier_conformance import new_key
from kvferry.tiers.base import EntryKey, LoadOutcome, StoreOutcome
from kvferry.tiers.disk.tier import DiskTier
from kvferry.tiers.keys import Namespace
from kvferry.tiers.object_store import Bucket, ObjectTier

ROUNDS = 9
DISK_SHAPES = ((256, 256 * 1024), (64, 2 * 2**20))
OBJECT_SHAPES = ((32, 2**20), (8, 8 * 2**20))
DISK_THREADS = (1, 2, 4)
OBJECT_THREADS = 8
DEADLINE_S = 120.0
NAMESPACE = Namespace({"measured": True})


class Rows:
    """Page-aligned memory for the objects of one shape, with random contents."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self.count, self.size_bytes = count, size_bytes
        self.memory = mmap.mmap(-1, count * size_bytes)
        self.array = np.frombuffer(self.memory, np.uint8)
        self.fill()

    def fill(self) -> None:
        self.array[:] = np.frombuffer(secrets.token_bytes(self.array.size), np.uint8)

    def __getitem__(self, index: int) -> memoryview:
        return memoryview(self.memory)[index * self.size_bytes : (index + 1) * self.size_bytes]

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)


class Threads:
    """pwritev and preadv on threads, one file for each object, no checks."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        self._folder, self._num_threads = folder, num_threads

    def write(self, rows: Rows, names: list[str]) -> None:
        self._each(rows, names, os.O_WRONLY | os.O_CREAT, os.pwritev)

    def read(self, rows: Rows, names: list[str]) -> None:
        self._each(rows, names, os.O_RDONLY, os.preadv)

    def _each(self, rows: Rows, names: list[str], flags: int, move: Callable[..., int]) -> None:
        def one(index: int) -> None:
            opened = os.open(self._folder / names[index], flags | os.O_DIRECT, 0o600)
            try:
                assert move(opened, [rows[index]], 0) == rows.size_bytes
            finally:
                os.close(opened)

        with ThreadPoolExecutor(self._num_threads) as pool:
            list(pool.map(one, range(rows.count)))


class TierCalls:
    """The tier itself: header, MAC, draft and rename, or PUT and GET."""

    def __init__(self, tier: DiskTier | ObjectTier, num_threads: int) -> None:
        self._tier, self._num_threads = tier, num_threads

    def write(self, rows: Rows, names: list[str]) -> None:
        def one(index: int) -> None:
            result = self._tier.store(_key(names[index]), rows[index])
            assert result.outcome is StoreOutcome.STORED, result

        self._each(rows, one)

    def read(self, rows: Rows, names: list[str]) -> None:
        def one(index: int) -> None:
            result = self._tier.load(_key(names[index]), rows[index])
            assert result.outcome is LoadOutcome.LOADED, result

        self._each(rows, one)

    def _each(self, rows: Rows, one: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(self._num_threads) as pool:
            list(pool.map(one, range(rows.count)))


class Nixl:
    """One NIXL transfer for all objects."""

    def __init__(self, backend: str, params: dict[str, str], folder: Path | None = None) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self._name = secrets.token_hex(4)
        config = nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent: Any = nixl_agent(self._name, config)
        self._agent.create_backend(backend, params)
        self._folder = folder

    def write(self, rows: Rows, names: list[str]) -> None:
        self._move("WRITE", rows, names, os.O_WRONLY | os.O_CREAT)

    def read(self, rows: Rows, names: list[str]) -> None:
        self._move("READ", rows, names, os.O_RDONLY)

    def _move(self, operation: str, rows: Rows, names: list[str], flags: int) -> None:
        agent, size = self._agent, rows.size_bytes
        memory = [(rows.address + i * size, size, 0) for i in range(rows.count)]
        kind, opened = "OBJ", []
        places = [(0, size, number, name) for number, name in enumerate(names)]
        if self._folder is not None:
            kind = "FILE"
            opened = [os.open(self._folder / name, flags | os.O_DIRECT, 0o600) for name in names]
            places = [(0, size, file, "") for file in opened]
        local = agent.register_memory([(*each, "") for each in memory], "DRAM")
        remote = agent.register_memory(places, kind)
        handle = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs(memory, "DRAM"),
            remote.trim(),
            self._name,
        )
        deadline = time.monotonic() + DEADLINE_S
        state = agent.transfer(handle)
        while state != "DONE":
            assert state == "PROC", state
            assert time.monotonic() < deadline
            time.sleep(50e-6)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        agent.deregister_memory(remote)
        agent.deregister_memory(local)
        for file in opened:
            os.close(file)


def _key(name: str) -> EntryKey:
    return EntryKey(bytes.fromhex(name))


def measure(
    contestants: dict[str, Any], shapes: tuple[tuple[int, int], ...], clean: Callable[[], None]
) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| " + " | ".join(["MB/s, median (least to most)", *_columns(shapes)]) + " |"
    yield "|---" * (1 + 2 * len(shapes)) + "|"
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for count, size in shapes:
        rows = Rows(count, size)
        for turn in range(ROUNDS):
            order = list(contestants.items())
            for name, contestant in order[turn % len(order) :] + order[: turn % len(order)]:
                rows.fill()
                digest = hash(rows.array.tobytes())
                names = [new_key().hex() for _ in range(count)]
                for verb, call in (("write", contestant.write), ("read", contestant.read)):
                    if verb == "read":
                        rows.array[:] = 0
                    began = time.perf_counter()
                    call(rows, names)
                    taken_s = time.perf_counter() - began
                    column = f"{verb} {count} x {size // 1024} KiB"
                    rates[name][column].append(count * size / taken_s / 1e6)
                assert hash(rows.array.tobytes()) == digest, f"{name} read other bytes"
                clean()
    for name, columns in rates.items():
        cells = [
            f"{statistics.median(each):,.0f} ({min(each):,.0f} to {max(each):,.0f})"
            for each in (columns[column] for column in _columns(shapes))
        ]
        yield f"| {name} | " + " | ".join(cells) + " |"


def _columns(shapes: tuple[tuple[int, int], ...]) -> list[str]:
    return [
        f"{verb} {count} x {size // 1024} KiB"
        for count, size in shapes
        for verb in ("write", "read")
    ]


def measure_disk(folder: Path) -> None:
    plain = folder / "plain"
    plain.mkdir(parents=True)
    tier = DiskTier(folder / "tier", NAMESPACE, b"secret", max_bytes=None)
    assert tier.uses_direct_io
    contestants = {
        **{f"preadv and pwritev, threads: {n}": Threads(plain, n) for n in DISK_THREADS},
        **{f"`DiskTier` (MAC, rename), threads: {n}": TierCalls(tier, n) for n in DISK_THREADS},
        **{
            f"NIXL POSIX, {queue}": Nixl("POSIX", {queue: "true"}, plain)
            for queue in ("use_aio", "use_uring", "use_posix_aio")
        },
    }

    def clean() -> None:
        for path in (*plain.iterdir(), *(folder / "tier").glob("*/??/*")):
            path.unlink()

    try:
        print(*measure(contestants, DISK_SHAPES, clean), sep="\n")
    finally:
        tier.close()
        shutil.rmtree(folder)


def measure_object() -> None:
    from tests.tiers.s3_server import request, s3_server

    os.environ.update(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret")
    with s3_server() as server:
        request(server, "PUT", "/bucket")
        bucket = Bucket("bucket", "", f"http://{server}", "us-east-1")
        with closing(ObjectTier(bucket, NAMESPACE, b"secret")) as tier:
            contestants = {
                f"`ObjectTier` (obstore) on {OBJECT_THREADS} threads": TierCalls(
                    tier, OBJECT_THREADS
                ),
                "NIXL OBJ": Nixl(
                    "OBJ",
                    {
                        "bucket": "bucket",
                        "endpoint_override": f"http://{server}",
                        "scheme": "http",
                        "region": "us-east-1",
                        "access_key": "key",
                        "secret_key": "secret",
                        "use_virtual_addressing": "false",
                    },
                ),
            }
            print(*measure(contestants, OBJECT_SHAPES, lambda: None), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("disk", "object"))
    parser.add_argument("folder", type=Path, nargs="?", default=Path("measured-tier-io"))
    arguments = parser.parse_args()
    if arguments.what == "disk":
        measure_disk(arguments.folder)
    else:
        measure_object()
