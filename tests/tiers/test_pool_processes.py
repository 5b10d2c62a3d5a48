"""Tests of the host pool with real processes: sharing, kills at any moment, rows that are
overwritten while another process reads them, and a file system without space.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from tests.sampling import exhaustive
from tests.tiers.pool_engine import (
    EngineProcess,
    PoolEngine,
    begin_store,
    clear,
    contents,
    found_of,
    key,
    overwrite_for_ever,
    path_of,
    start_engine,
    store_all,
    store_for_ever,
)

from kvferry.errors import ConfigError

pytestmark = pytest.mark.slow


class Engines:
    """Starts engine processes, and kills those that the test has not killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[EngineProcess] = []

    def start(self, num_rows: int, **options: int) -> EngineProcess:
        self._started.append(start_engine(self._folder, num_rows, **options))
        return self._started[-1]

    def close(self) -> None:
        for engine in self._started:
            engine.process.kill()
            engine.process.join()
            engine.pipe.close()


@pytest.fixture
def engines(folder: Path) -> Iterator[Engines]:
    started = Engines(folder)
    yield started
    started.close()


def test_a_decode_engine_finds_what_a_prefill_engine_stored(engines: Engines) -> None:
    prefill, decode = engines.start(8), engines.start(4)
    assert prefill.ask(store_all, [1, 2, 3]) == [True] * 3
    assert decode.ask(found_of, [0, 1, 2, 3, 4]) == [1, 2, 3]
    assert decode.ask(store_all, [4]) == [True]
    assert prefill.ask(found_of, [0, 1, 2, 3, 4]) == [1, 2, 3, 4]
    prefill.ask(clear)
    assert decode.ask(found_of, [1, 2, 3, 4]) == [4]


def test_two_engines_may_store_the_same_object(engines: Engines) -> None:
    one, two = engines.start(2), engines.start(2)
    assert [one.ask(store_all, [1]), two.ask(store_all, [1])] == [[True], [True]]
    reader = engines.start(1)
    assert reader.ask(found_of, [1]) == [1]
    one.kill()
    two.ask(store_all, [2, 3])  # evicts object 1
    assert reader.ask(found_of, [1, 2, 3]) == [1, 2, 3]


def test_the_objects_of_a_killed_engine_stay_and_the_next_engine_adopts_them(
    folder: Path, engines: Engines
) -> None:
    first, other = engines.start(5), engines.start(3)
    first.ask(store_all, [1, 2, 3])
    first.ask(begin_store, 4)  # killed in the middle of this store
    path = first.ask(path_of)
    first.kill()
    assert other.ask(found_of, [1, 2, 3, 4]) == [1, 2, 3]
    second = engines.start(5)
    assert second.ask(path_of) == path
    assert second.ask(found_of, [1, 2, 3, 4]) == [1, 2, 3]
    assert second.ask(store_all, [4, 5]) == [True, True]
    assert second.ask(found_of, [1, 2, 3, 4, 5]) == [1, 2, 3, 4, 5]
    assert other.ask(found_of, [1, 2, 3, 4, 5]) == [1, 2, 3, 4, 5]


def test_the_segment_of_an_engine_that_lives_is_not_adopted(folder: Path, engines: Engines) -> None:
    first = engines.start(3)
    second = engines.start(3)
    assert first.ask(path_of) != second.ask(path_of)
    assert len([*folder.iterdir()]) == 2


def kills(folder: Path, engines: Engines, count: int) -> None:
    rng = np.random.default_rng(0)
    first = 0
    for _ in range(count):
        victim = engines.start(16)
        victim.ask(store_all, [*range(first, first + 16)])
        victim.tell(store_for_ever, first + 16)
        time.sleep(0.02 + 0.05 * rng.random())  # the moment of the kill, at random
        victim.kill()
        # It stores at most some ten thousand objects in this time.
        known = range(first, first + 100_000)
        adopted = PoolEngine.open(folder, 16)
        held = [number for number in known if adopted.pool.holds(key(number))]
        assert len(held) >= 15, "at most the row that was being written is lost"
        assert all(adopted.has(key(number)) for number in held)
        assert adopted.pool.usage().num_entries == len(held)
        adopted.pool.close()
        first = max(held) + 1
    assert len([*folder.iterdir()]) == 1


def test_kills_in_the_middle_of_evictions_leave_only_whole_objects(
    folder: Path, engines: Engines
) -> None:
    kills(folder, engines, 5)


@exhaustive
def test_many_kills_in_the_middle_of_evictions_leave_only_whole_objects(
    folder: Path, engines: Engines
) -> None:
    kills(folder, engines, 100)


# -- races --


def test_a_reader_never_accepts_a_row_that_is_overwritten_meanwhile(
    folder: Path, engines: Engines
) -> None:
    """The control shows that the race is real: without the comparison of checksums, wrong bytes are
    seen in the same copies.
    """
    numbers = [1, 2, 3, 4]
    row_bytes = 1_000_000
    writer = engines.start(2, row_bytes=row_bytes)
    reader = PoolEngine.open(folder, 1, row_bytes)
    writer.ask(store_all, [1, 2])
    writer.tell(overwrite_for_ever, numbers)
    num_right = num_refused = num_wrong_without_check = 0
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        reader.refresh()
        for number in numbers:
            found = reader.pool.find(key(number))
            if found is None:
                continue
            loaded, checksum = reader.load_unchecked(found)
            is_right = np.array_equal(loaded, contents(key(number), row_bytes))
            if checksum == found.checksum:
                assert is_right, "wrong bytes were accepted"
                num_right += 1
            else:
                num_refused += 1
                num_wrong_without_check += not is_right
        if num_right >= 300 and num_wrong_without_check >= 100:
            break
    assert num_right >= 300
    assert num_wrong_without_check >= 100, "the writer never overwrote a row during a copy"
    assert num_refused >= num_wrong_without_check


# -- space --


IN_SMALL_FILE_SYSTEM = """
import os, subprocess, sys
place = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], check=True)
from pathlib import Path
from tests.tiers import test_pool_processes
getattr(test_pool_processes, sys.argv[2])(Path(place) / "pool")
"""


def run_in_small_file_system(tmp_path: Path, scene: str) -> None:
    """Run a function in a process that sees a file system of 8 MiB at this path."""
    unshare = ["unshare", "--mount", "--map-root-user"]
    probe = subprocess.run(
        [*unshare, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if probe.returncode:
        pytest.skip("this user may not mount file systems")
    ran = subprocess.run(
        [*unshare, sys.executable, "-c", IN_SMALL_FILE_SYSTEM, str(tmp_path), scene],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ran.returncode == 0, ran.stderr


MIB = 1 << 20


def orphans_make_room(folder: Path) -> None:
    """Two engines leave 2 MiB each, one lives with 2 MiB: a fourth needs more than is free."""
    oldest, older, living = (PoolEngine.open(folder, 2, MIB - 20_000 - n) for n in range(3))
    for engine in (living, oldest, older):
        engine.store(key(0))
        time.sleep(0.01)
    oldest.pool.close()
    older.pool.close()
    new = PoolEngine.open(folder, 3, MIB)
    remaining = {path_of(engine) for engine in (older, living, new)}
    assert {*folder.iterdir()} == remaining
    assert new.store(key(1))
    newer = PoolEngine.open(folder, 1, MIB // 2)
    assert newer.store(key(2))  # there was room, so nothing was removed
    assert {*folder.iterdir()} == {path_of(engine) for engine in (older, living, new, newer)}


def segments_of_other_versions_make_room(folder: Path) -> None:
    """They go first, although the other segment without an owner has had no store for longer."""
    kept, upgraded = (PoolEngine.open(folder, 2, MIB + n) for n in range(2))
    for engine in (kept, upgraded):
        engine.store(key(0))
        engine.pool.close()
        time.sleep(0.01)
    upgraded_path = path_of(upgraded)
    assert upgraded_path is not None
    with upgraded_path.open("r+b") as file:
        file.seek(8)
        file.write(b"\x01")
    new = PoolEngine.open(folder, 5, MIB)
    assert {*folder.iterdir()} == {path_of(kept), path_of(new)}


def no_room_is_a_clear_error(folder: Path) -> None:
    living, gone = (PoolEngine.open(folder, 2, MIB) for _ in range(2))
    gone.store(key(0))
    gone.pool.close()
    with pytest.raises(ConfigError, match="No space left"):
        PoolEngine.open(folder, 7, MIB)
    assert [*folder.iterdir()] == [path_of(living)]
    assert living.store(key(0))


def readers_let_go_of_removed_segments(folder: Path) -> None:
    """A reader that looks again unmaps a removed segment, and only then is its space free."""
    reader = start_engine(folder, 1, row_bytes=100)
    gone = PoolEngine.open(folder, 5, MIB)
    gone.store(key(0))
    assert reader.ask(store_all, [1]) == [True]
    reader.ask(found_of, [0])
    path = path_of(gone)
    assert path is not None
    gone.pool.close()
    reader.tell(look_for_ever)
    new = PoolEngine.open(folder, 6, MIB)
    assert not path.exists()
    assert new.store(key(2))
    reader.kill()


def look_for_ever(engine: PoolEngine) -> None:
    while True:
        engine.refresh()
        time.sleep(0.05)


@pytest.mark.parametrize(
    "scene",
    [
        orphans_make_room,
        segments_of_other_versions_make_room,
        no_room_is_a_clear_error,
        readers_let_go_of_removed_segments,
    ],
)
def test_in_a_small_file_system(tmp_path: Path, scene: object) -> None:
    run_in_small_file_system(tmp_path, scene.__name__)  # type: ignore[attr-defined]


# -- soak --


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def soak(folder: Path, count: int) -> None:
    """Store and load objects in turns, with evictions and restarts, beside a second engine."""
    engine, other = PoolEngine.open(folder, 64, 4096), PoolEngine.open(folder, 16, 4096)
    levels = []
    num_loaded = 0
    for number in range(count):
        assert engine.store(key(number))
        engine.pool.take_evicted()
        if number % 4 == 0:
            other.refresh()
            num_loaded += other.has(key(number)) + engine.has(key(max(0, number - 30)))
        if number % 1000 == 999:
            engine.pool.close()
            engine = PoolEngine.open(folder, 64, 4096)
        if number % (count // 20) == 0:
            folder_bytes = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
            num_fds = len(os.listdir("/proc/self/fd"))
            num_maps = len(Path("/proc/self/maps").read_text().splitlines())
            levels.append((resident_bytes(), num_fds, num_maps, folder_bytes))
    assert num_loaded >= count // 2 - 8
    settled = levels[5:]
    resident, fds, maps, used = (list(each) for each in zip(*settled, strict=True))
    assert max(resident[-5:]) <= resident[0] + 8 * MIB
    assert max(fds) <= fds[0] + 2
    assert max(maps) <= maps[0] + 20
    assert {*used} == {used[0]}
    assert len([*folder.iterdir()]) == 2


def run_alone(work: Callable[[Path, int], None], folder: Path, count: int) -> None:
    """Run in a new process: what other tests have left in this one would change its levels."""
    process = get_context("spawn").Process(target=work, args=(folder, count))
    process.start()
    process.join(900)
    assert process.exitcode == 0


def test_memory_and_files_stay_flat_over_5000_stores(folder: Path) -> None:
    run_alone(soak, folder, 5_000)


@exhaustive
def test_memory_and_files_stay_flat_over_100000_stores(folder: Path) -> None:
    run_alone(soak, folder, 100_000)
