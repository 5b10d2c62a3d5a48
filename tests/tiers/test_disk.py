"""Tests of what the disk tier does beyond the contract: its folder, its limit, its failures."""

import errno
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from tests.tiers.storages import DiskStorage, mounted

from kvferry.errors import ConfigError
from kvferry.logs import RepeatFilter
from kvferry.testing.local import ManualClock
from kvferry.testing.tier_conformance import (
    NAMESPACE,
    OTHER_NAMESPACE,
    SECRET,
    aligned_buffer,
    new_key,
    payload_of,
)
from kvferry.tiers.backoff import StorageFailed
from kvferry.tiers.base import EntryKey, LoadOutcome, StoreOutcome
from kvferry.tiers.disk import space as disk_space
from kvferry.tiers.disk.space import DiskSpace, draft_name
from kvferry.tiers.disk.tier import DiskTier, read_file_by_os
from kvferry.tiers.files import OPEN_FLAGS
from kvferry.tiers.keys import NAMESPACE_FILE, Namespace
from kvferry.transports.copy.native import native_or

PAYLOAD_BYTES = 8192
OBJECT_BYTES = 4096 + PAYLOAD_BYTES
HOUR_S = 3600.0
DEADLINE_S = 60.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def tier(tmp_path: Path, clock: ManualClock) -> Iterator[DiskTier]:
    with opened(tmp_path / "cache", clock=clock) as tier:
        yield tier


@contextmanager
def opened(
    root: Path,
    namespace: Namespace = NAMESPACE,
    max_bytes: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[DiskTier]:
    tier = DiskTier(root, namespace, SECRET, max_bytes, clock)
    try:
        yield tier
    finally:
        tier.close()


def store(tier: DiskTier, *keys: EntryKey) -> list[StoreOutcome]:
    return [tier.store(key, payload_of(key, PAYLOAD_BYTES)).outcome for key in keys]


def load(tier: DiskTier, key: EntryKey) -> LoadOutcome:
    into = aligned_buffer(PAYLOAD_BYTES)
    outcome = tier.load(key, into).outcome
    assert outcome is not LoadOutcome.LOADED or into == payload_of(key, PAYLOAD_BYTES)
    return outcome


def object_path(root: Path, key: EntryKey, namespace: Namespace = NAMESPACE) -> Path:
    return DiskStorage(root).path(namespace, key)


def all_files(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if not path.is_dir()}


# -- the folder --


def test_only_the_owner_may_open_the_folder_and_its_objects(tier: DiskTier, tmp_path: Path) -> None:
    key = new_key()
    store(tier, key)
    path = object_path(tmp_path / "cache", key)
    for folder in (tmp_path / "cache", path.parents[1], path.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == OBJECT_BYTES


def test_the_folder_names_what_it_holds(tier: DiskTier, tmp_path: Path) -> None:
    text = tmp_path / "cache" / NAMESPACE.hex / "namespace.json"
    assert text.read_text(encoding="utf-8") == NAMESPACE.text


@pytest.mark.parametrize(
    "instead", ["nothing", "empty", "damaged", "dangling link", "FIFO", "folder"]
)
def test_what_lies_in_place_of_the_description_is_replaced_and_never_followed(
    tmp_path: Path, instead: str
) -> None:
    path, elsewhere = tmp_path / "cache" / NAMESPACE.hex / "namespace.json", tmp_path / "elsewhere"
    path.parent.mkdir(parents=True)
    match instead:
        case "empty":
            path.touch()
        case "damaged":
            path.write_text(NAMESPACE.text[:-1] + "]")
        case "dangling link":
            path.symlink_to(elsewhere)
        case "FIFO":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
    with opened(tmp_path / "cache") as tier:
        if instead == "folder":
            assert list(path.iterdir()) == []
        else:
            assert path.read_text(encoding="utf-8") == NAMESPACE.text
            assert not path.is_symlink()
        assert store(tier, new_key()) == [StoreOutcome.STORED]
    assert not elsewhere.exists()
    assert not list(path.parent.glob(".namespace*"))


def test_a_description_that_a_full_disk_refused_is_written_later(
    small_disk: Path, clock: ManualClock
) -> None:
    filler = fill(small_disk)
    path = small_disk / NAMESPACE.hex / "namespace.json"
    with opened(small_disk, clock=clock) as tier:
        assert not path.exists()
        filler.unlink()
        assert store(tier, new_key()) == [StoreOutcome.STORED]
        assert path.read_text(encoding="utf-8") == NAMESPACE.text


def test_a_folder_that_all_users_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod o-w"):
        DiskTier(tmp_path, NAMESPACE, SECRET, None)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be used"):
        DiskTier(tmp_path / "cache", NAMESPACE, SECRET, None)


def test_a_link_in_place_of_the_namespace_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / NAMESPACE.hex).symlink_to(elsewhere)
    with opened(tmp_path / "cache") as tier:
        assert store(tier, new_key()) == [StoreOutcome.FAILED]
    assert list(elsewhere.iterdir()) == []


def test_a_link_in_place_of_an_object_is_refused_and_its_target_stays(
    tier: DiskTier, tmp_path: Path
) -> None:
    key = new_key()
    store(tier, key)
    path, target = object_path(tmp_path / "cache", key), tmp_path / "target"
    path.rename(target)
    path.symlink_to(target)
    assert load(tier, key) is LoadOutcome.REFUSED
    assert not path.is_symlink()
    assert target.stat().st_size == OBJECT_BYTES


def test_a_fifo_in_place_of_an_object_is_refused(tier: DiskTier, tmp_path: Path) -> None:
    key = new_key()
    store(tier, key)
    path = object_path(tmp_path / "cache", key)
    path.unlink()
    os.mkfifo(path)
    assert load(tier, key) is LoadOutcome.REFUSED
    assert not path.exists()


@contextmanager
def a_folder(path: Path) -> Iterator[None]:
    path.mkdir()
    yield


@contextmanager
def a_file_that_may_not_be_replaced(path: Path) -> Iterator[None]:
    path.write_bytes(b"damaged")
    if subprocess.run(["chattr", "+i", str(path)], capture_output=True, check=False).returncode:
        pytest.skip("only root can make a file immutable, and not on every file system")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)


@pytest.mark.parametrize("instead", [a_folder, a_file_that_may_not_be_replaced])
def test_what_is_in_the_way_of_one_object_fails_only_its_stores(
    tier: DiskTier, tmp_path: Path, instead: Callable[[Path], AbstractContextManager[None]]
) -> None:
    key = new_key()
    path = object_path(tmp_path / "cache", key)
    path.parent.mkdir()
    with instead(path):
        for _ in range(2):
            result = tier.store(key, payload_of(key, PAYLOAD_BYTES))
            assert result.outcome is StoreOutcome.FAILED
            assert str(path) in result.reason
            assert store(tier, new_key()) == [StoreOutcome.STORED]
        assert load(tier, key) is LoadOutcome.REFUSED
        assert not list(path.parent.glob(".*"))
        assert tier.find([key]) == [path.is_file()]


def test_direct_io_is_used_where_the_file_system_allows_it(tier: DiskTier, tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
        is_allowed = True
    except OSError:
        is_allowed = False
    assert tier.uses_direct_io == is_allowed
    with mounted(tmp_path / "ramfs", "ramfs") as folder, opened(folder) as other:
        assert not other.uses_direct_io
        assert [path.name for path in all_files(folder)] == ["namespace.json"]


def test_memory_that_is_not_aligned_is_stored_and_loaded_too(tier: DiskTier) -> None:
    key = new_key()
    odd = aligned_buffer(PAYLOAD_BYTES + 1)[1:]
    odd[:] = payload_of(key, PAYLOAD_BYTES)
    assert tier.store(key, odd).outcome is StoreOutcome.STORED
    assert load(tier, key) is LoadOutcome.LOADED
    into = aligned_buffer(PAYLOAD_BYTES + 1)[1:]
    assert tier.load(key, into).outcome is LoadOutcome.LOADED
    assert into == odd


# -- failures of the file system --


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    with mounted(tmp_path / "small", "tmpfs", "size=1m,mode=700") as folder:
        yield folder


def fill(folder: Path) -> Path:
    """Take all space that is left, and return the file that takes it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError:
            pass
    return filler


def test_a_full_disk_fails_one_store_and_drops_the_next_ones_for_a_while(
    small_disk: Path, clock: ManualClock
) -> None:
    with opened(small_disk, clock=clock) as tier:
        kept = new_key()
        assert store(tier, kept) == [StoreOutcome.STORED]
        filler = fill(small_disk)
        result = tier.store(new_key(), aligned_buffer(PAYLOAD_BYTES))
        assert result.outcome is StoreOutcome.FAILED
        assert "No space left on device; free space, or lower the disk tier's size" in result.reason
        assert not list(small_disk.rglob("*.tmp")), "a failed store left its draft"
        assert load(tier, kept) is LoadOutcome.LOADED
        filler.unlink()
        assert store(tier, new_key()) == [StoreOutcome.DROPPED]
        clock.advance(5)
        assert store(tier, new_key(), new_key()) == [StoreOutcome.STORED] * 2


def test_a_disk_that_takes_only_part_of_an_object_shows_none(
    small_disk: Path, clock: ManualClock
) -> None:
    with opened(small_disk, clock=clock) as tier:
        key = new_key()
        result = tier.store(key, aligned_buffer(2 * 2**20))
        assert result.outcome is StoreOutcome.FAILED
        assert tier.find([key]) == [False]
        clock.advance(5)
        assert store(tier, key) == [StoreOutcome.STORED], "the failed store kept its space"


def test_a_read_only_disk_serves_loads(small_disk: Path, clock: ManualClock) -> None:
    key, damaged = new_key(), new_key()
    with opened(small_disk, clock=clock) as tier:
        store(tier, key, damaged)
        object_path(small_disk, damaged).write_bytes(b"damaged")
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        assert store(tier, new_key()) == [StoreOutcome.FAILED]
    with opened(small_disk, max_bytes=1) as tier:
        assert load(tier, key) is LoadOutcome.LOADED
        assert [load(tier, damaged), load(tier, damaged)] == [LoadOutcome.REFUSED] * 2
        tier.remove([key])
        assert tier.find([key]) == [True]


def test_a_namespace_that_was_removed_is_made_again(tier: DiskTier, tmp_path: Path) -> None:
    root, key = tmp_path / "cache", new_key()
    store(tier, key)
    shutil.rmtree(root / NAMESPACE.hex)
    assert load(tier, key) is LoadOutcome.MISSING
    assert tier.find([key]) == [False]
    assert store(tier, key) == [StoreOutcome.STORED]
    assert load(tier, key) is LoadOutcome.LOADED
    assert (root / NAMESPACE.hex / "namespace.json").exists()


def test_a_root_that_was_removed_is_not_made_again(
    tier: DiskTier, tmp_path: Path, clock: ManualClock
) -> None:
    root, key = tmp_path / "cache", new_key()
    store(tier, key)
    shutil.rmtree(root)
    result = tier.store(key, payload_of(key, PAYLOAD_BYTES))
    assert result.outcome is StoreOutcome.FAILED
    assert "No such file or directory" in result.reason
    assert not root.exists()
    assert load(tier, key) is LoadOutcome.MISSING
    tier.remove([key])
    root.mkdir()
    assert store(tier, key) == [StoreOutcome.DROPPED]
    clock.advance(5)
    assert store(tier, key) == [StoreOutcome.STORED]


def test_a_file_in_place_of_a_folder_fails_stores_and_has_no_objects(
    tier: DiskTier, tmp_path: Path
) -> None:
    key = new_key()
    object_path(tmp_path / "cache", key).parent.write_text("in the way")
    assert store(tier, key) == [StoreOutcome.FAILED]
    assert load(tier, key) is LoadOutcome.MISSING
    assert tier.find([key]) == [False]


def test_a_folder_that_cannot_be_read_fails_lookups(tier: DiskTier, tmp_path: Path) -> None:
    """As an error of the disk does: here the folder is a link to itself."""
    key = new_key()
    object_path(tmp_path / "cache", key).parent.symlink_to(
        object_path(tmp_path / "cache", key).parent
    )
    with pytest.raises(StorageFailed, match="cannot be looked up"):
        tier.find([key])
    with pytest.raises(StorageFailed, match="cannot be looked up"):
        tier.find_prefix([key])


# -- the limit --


def make_older(root: Path, key: EntryKey, age_s: float) -> None:
    at = time.time() - age_s
    os.utime(object_path(root, key), (at, at))


def test_the_least_recently_used_objects_are_evicted(tier: DiskTier, tmp_path: Path) -> None:
    root, keys = tmp_path / "cache", [new_key() for _ in range(10)]
    store(tier, *keys)
    for number, key in enumerate(keys):
        make_older(root, key, HOUR_S - number)
    assert load(tier, keys[0]) is LoadOutcome.LOADED
    assert store(tier, keys[1]) == [StoreOutcome.PRESENT]
    space = DiskSpace(root, max_bytes=5 * OBJECT_BYTES)
    space.sweep()
    # 95 % of five objects leaves room for four.
    assert tier.find(keys) == [True, True, *[False] * 6, True, True]
    usage = space.usage()
    assert (usage.num_entries, usage.num_evicted) == (4, 6)
    assert usage.used_bytes == 4 * OBJECT_BYTES


def test_what_cannot_be_evicted_keeps_its_space_and_the_next_objects_are_evicted(
    tier: DiskTier,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A scan evicts two at most, so that the whole first scan fails.
    monkeypatch.setattr(disk_space, "MAX_EVICTIONS_PER_SCAN", 2)
    root = tmp_path / "cache"
    stuck, keys = ([new_key() for _ in range(count)] for count in (3, 10))
    for key in stuck:
        (object_path(root, key) / "inside").mkdir(parents=True)
    store(tier, *keys)
    for number, key in enumerate((*stuck, *keys)):
        make_older(root, key, HOUR_S - number)
    stuck_bytes = sum(object_path(root, key).stat().st_size for key in stuck)
    space = DiskSpace(root, max_bytes=stuck_bytes + 5 * OBJECT_BYTES)
    with caplog.filtering(RepeatFilter()):
        space.sweep()
    assert tier.find(keys) == [False] * 6 + [True] * 4
    assert space.usage().used_bytes == stuck_bytes + 4 * OBJECT_BYTES
    assert space.usage().num_evicted == 6
    [message] = caplog.messages
    assert f"{object_path(root, stuck[0])} cannot be evicted" in message


def test_a_folder_below_its_limit_keeps_everything(tier: DiskTier, tmp_path: Path) -> None:
    keys = [new_key() for _ in range(10)]
    store(tier, *keys)
    space = DiskSpace(tmp_path / "cache", max_bytes=11 * OBJECT_BYTES)
    space.sweep()
    assert all(tier.find(keys))
    assert space.usage().num_entries == 10


def test_the_limit_bounds_all_namespaces_together(tmp_path: Path) -> None:
    root, old, new = tmp_path / "cache", new_key(), new_key()
    with opened(root, OTHER_NAMESPACE) as other, opened(root) as tier:
        store(other, old)
        store(tier, new)
        at = time.time() - HOUR_S
        os.utime(object_path(root, old, OTHER_NAMESPACE), (at, at))
        DiskSpace(root, max_bytes=int(1.5 * OBJECT_BYTES)).sweep()
        assert (other.find([old]), tier.find([new])) == ([False], [True])


def test_watched_objects_are_reported_when_they_are_evicted_or_missing(
    tier: DiskTier, tmp_path: Path
) -> None:
    root = tmp_path / "cache"
    evicted, removed, kept, unwatched, late = (new_key() for _ in range(5))
    store(tier, evicted, removed, kept, unwatched)
    for key in (evicted, unwatched):
        make_older(root, key, HOUR_S)
    with opened(root, OTHER_NAMESPACE) as other:
        # The same key in another namespace is another object.
        store(other, removed)
        space = DiskSpace(root, int(2.3 * OBJECT_BYTES), f"{root}/{NAMESPACE.hex}")
        space.watch([evicted, removed, kept])
        object_path(root, removed).unlink()
        space.sweep()
        assert tier.find([evicted, kept, unwatched]) == [False, True, False]
        assert sorted(space.take_lost()) == sorted([evicted, removed])
        assert space.take_lost() == []
        # An object that is gone before it is watched is reported by the next scan.
        space.watch([late])
        space.sweep()
        assert space.take_lost() == [late]


def test_a_scan_that_fails_loses_no_object(tier: DiskTier, tmp_path: Path) -> None:
    root, key = tmp_path / "cache", new_key()
    store(tier, key)
    space = DiskSpace(root, 2**30, f"{root}/{NAMESPACE.hex}")
    space.watch([key])
    space.sweep()
    known = space.usage()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # no folder can be opened
    try:
        space.sweep()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert space.usage() == known
    assert space.take_lost() == []


def test_eviction_touches_no_files_of_others(tier: DiskTier, tmp_path: Path) -> None:
    root, key = tmp_path / "cache", new_key()
    store(tier, key)
    folder = object_path(root, key).parent
    others = [
        root / "notes.txt",
        root / "models" / "weights",
        folder / "readme",
        folder.parent / "x",
    ]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100_000))
    outside = tmp_path / "outside" / "ab"
    outside.mkdir(parents=True)
    (outside / new_key().hex()).write_bytes(b"not ours")
    (root / ("0" * 32)).symlink_to(outside.parent)
    kept = all_files(tmp_path) - {object_path(root, key)}
    DiskSpace(root, max_bytes=1).sweep()
    assert all_files(tmp_path) == kept


def test_engines_that_evict_at_once_evict_no_more_than_one(tier: DiskTier, tmp_path: Path) -> None:
    root, keys = tmp_path / "cache", [new_key() for _ in range(400)]
    store(tier, *keys)
    for number, key in enumerate(keys):
        make_older(root, key, HOUR_S - number)
    spaces = [DiskSpace(root, max_bytes=20 * OBJECT_BYTES) for _ in range(4)]
    with ThreadPoolExecutor(len(spaces)) as pool:
        for sweep in [pool.submit(space.sweep) for space in spaces]:
            sweep.result(DEADLINE_S)
    assert tier.find_prefix(keys[-19:]) == 19
    assert not any(tier.find(keys[:-19]))
    assert sum(space.usage().num_evicted for space in spaces) == 400 - 19


def test_a_clock_that_jumps_changes_only_the_order(tier: DiskTier, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    future, past, present = new_key(), new_key(), new_key()
    store(tier, future, past, present)
    make_older(root, future, -365 * 24 * HOUR_S)
    make_older(root, past, 365 * 24 * HOUR_S)
    DiskSpace(root, max_bytes=int(2.3 * OBJECT_BYTES)).sweep()
    assert tier.find([future, past, present]) == [True, False, True]
    # A use brings the object back to the present, so it does not stay for ever.
    assert load(tier, future) is LoadOutcome.LOADED
    assert abs(object_path(root, future).stat().st_mtime - time.time()) < HOUR_S


def test_most_loads_write_nothing(tier: DiskTier, tmp_path: Path) -> None:
    root, key = tmp_path / "cache", new_key()
    store(tier, key)
    make_older(root, key, 30)
    before = object_path(root, key).stat().st_mtime_ns
    load(tier, key)
    assert object_path(root, key).stat().st_mtime_ns == before
    make_older(root, key, 90)
    load(tier, key)
    assert object_path(root, key).stat().st_mtime_ns > before


@pytest.mark.parametrize("num_fitting", [10, 10.3])
def test_a_full_folder_drops_stores_until_the_sweeper_has_evicted(
    tmp_path: Path, num_fitting: float
) -> None:
    """With room for a third of an object, the folder is 97 % full."""
    with opened(tmp_path / "cache", max_bytes=int(num_fitting * OBJECT_BYTES)) as tier:
        outcomes: list[StoreOutcome] = []
        deadline = time.monotonic() + DEADLINE_S
        while outcomes.count(StoreOutcome.STORED) < 50:
            assert time.monotonic() < deadline, outcomes[-10:]
            outcomes += store(tier, new_key())
            held = [p for p in all_files(tmp_path) if p.name != "namespace.json"]
            assert len(held) <= 10, "the folder exceeds its limit"
        assert set(outcomes) <= {StoreOutcome.STORED, StoreOutcome.DROPPED}
        assert tier.usage().num_evicted >= 40
        assert tier.usage().used_bytes <= 10 * OBJECT_BYTES


def test_an_object_for_which_no_room_can_be_made_empties_the_folder_only_once(
    tier: DiskTier, tmp_path: Path
) -> None:
    root, stuck, keys = tmp_path / "cache", new_key(), [new_key() for _ in range(3)]
    object_path(root, stuck).mkdir(parents=True)
    space = DiskSpace(root, max_bytes=10 * OBJECT_BYTES)
    store(tier, *keys)
    assert space.sweep()
    assert not space.has_room(10 * OBJECT_BYTES)
    assert not space.sweep()
    assert not any(tier.find(keys))
    store(tier, *keys)
    assert space.sweep()
    assert all(tier.find(keys))


def test_an_object_larger_than_the_limit_is_dropped(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", max_bytes=OBJECT_BYTES - 1) as tier:
        result = tier.store(new_key(), aligned_buffer(PAYLOAD_BYTES))
        assert result.outcome is StoreOutcome.DROPPED
        assert "is full" in result.reason


def test_drafts_of_dead_writers_are_deleted_and_those_of_living_ones_kept(
    tier: DiskTier, tmp_path: Path
) -> None:
    root, key = tmp_path / "cache", new_key()
    store(tier, key)
    folder = object_path(root, key).parent
    ages_s = {"young": 10.0, "old": HOUR_S, "future": -HOUR_S}
    drafts = {
        (name, path.name): path.parent / draft_name(path.name)
        for name in ages_s
        for path in (folder / new_key().hex(), folder.parent / NAMESPACE_FILE)
    }
    for (name, _), draft in drafts.items():
        draft.write_bytes(b"half a file")
        at = time.time() - ages_s[name]
        os.utime(draft, (at, at))
    DiskSpace(root, max_bytes=2**30).sweep()
    assert [name for (name, _), draft in drafts.items() if draft.exists()] == ["young"] * 2
    assert load(tier, key) is LoadOutcome.LOADED


def test_what_a_process_that_is_killed_as_it_opens_the_folder_leaves_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    root = tmp_path / "cache"
    with monkeypatch.context() as changed:
        changed.setattr(os, "unlink", die)
        with opened(root):
            pass
    left = all_files(root)
    assert len(left) > 1
    for file in left:
        os.utime(file, (1, 1))
    DiskSpace(root, max_bytes=2**30).sweep()
    assert [file.name for file in all_files(root)] == [NAMESPACE_FILE]


# -- other processes --


@contextmanager
def beside(root: Path, task: str, *keys: EntryKey) -> Iterator["subprocess.Popen[str]"]:
    """Run tests/tiers/disk_process.py until the block ends."""
    command = [sys.executable, "-m", "tests.tiers.disk_process", str(root), task]
    process = subprocess.Popen(
        [*command, *(key.hex() for key in keys)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.communicate(timeout=DEADLINE_S)


def test_two_processes_may_store_and_remove_one_key_while_a_third_loads_it(
    tier: DiskTier, tmp_path: Path
) -> None:
    root, keys = tmp_path / "cache", [new_key() for _ in range(3)]
    outcomes: set[LoadOutcome] = set()
    task = "store-and-remove"
    with beside(root, task, *keys) as first, beside(root, task, *keys) as second:
        deadline = time.monotonic() + DEADLINE_S
        num_loaded = 0
        while num_loaded < 100:
            assert time.monotonic() < deadline, outcomes
            for key in keys:
                into = aligned_buffer(len(payload_of(key)))
                outcomes.add(outcome := tier.load(key, into).outcome)
                if outcome is LoadOutcome.LOADED:
                    assert into == payload_of(key)
                    num_loaded += 1
    assert outcomes <= {LoadOutcome.LOADED, LoadOutcome.MISSING}
    assert (first.returncode, second.returncode) == (0, 0)
    assert not list(root.rglob("*.tmp"))


def test_another_process_may_evict_during_a_load(tier: DiskTier, tmp_path: Path) -> None:
    root, key = tmp_path / "cache", new_key()
    counts = dict.fromkeys(LoadOutcome, 0)
    with beside(root, "evict") as evicting:
        deadline = time.monotonic() + DEADLINE_S
        while min(counts[LoadOutcome.LOADED], counts[LoadOutcome.MISSING]) < 10:
            assert time.monotonic() < deadline, counts
            store(tier, key)
            counts[load(tier, key)] += 1
    assert counts[LoadOutcome.REFUSED] == counts[LoadOutcome.FAILED] == 0
    assert evicting.returncode == 0


def test_stores_succeed_while_another_process_clears_the_folder(tmp_path: Path) -> None:
    root, keys = tmp_path / "cache", [new_key() for _ in range(3)]
    # Each store that fails pauses the next ones by this clock, for ever.
    with opened(root, clock=ManualClock()) as tier, beside(root, "clear") as clearing:
        num_missing = 0
        deadline = time.monotonic() + DEADLINE_S
        while num_missing < 100:
            assert time.monotonic() < deadline
            for key in keys:
                result = tier.store(key, payload_of(key, PAYLOAD_BYTES))
                assert result.outcome in (StoreOutcome.STORED, StoreOutcome.PRESENT), result
            num_missing += tier.find(keys).count(False)
    assert clearing.returncode == 0


def test_a_writer_that_is_killed_leaves_no_object(tier: DiskTier, tmp_path: Path) -> None:
    root, key = tmp_path / "cache", new_key()
    folder = object_path(root, key).parent
    with beside(root, "store-large", key) as writer:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            assert time.monotonic() < deadline
            if drafts := list(folder.glob("*.tmp")):
                os.kill(writer.pid, signal.SIGSTOP)  # is the writer still in the middle of it?
                if drafts[0].exists():
                    break
                os.kill(writer.pid, signal.SIGCONT)
        writer.kill()
    assert drafts[0].exists()
    assert tier.find([key]) == [False]
    assert load(tier, key) is LoadOutcome.MISSING
    assert store(tier, key) == [StoreOutcome.STORED]
    at = time.time() - HOUR_S
    os.utime(drafts[0], (at, at))
    DiskSpace(root, max_bytes=2**30).sweep()
    assert not drafts[0].exists()
    assert load(tier, key) is LoadOutcome.LOADED


# -- reading a file --

ReadFile = Callable[[str, int, int, tuple[memoryview, ...]], tuple[int, int, float, int]]


@pytest.fixture(params=["native", "os"])
def read_file(request: pytest.FixtureRequest) -> ReadFile:
    return read_file_by_os if request.param == "os" else native_or("read_file", read_file_by_os)


@pytest.mark.parametrize("direct", [0, os.O_DIRECT])
@pytest.mark.parametrize("size_bytes", [0, 100, 8192, 12288, 20000])
def test_a_file_is_read_into_parts(
    tmp_path: Path, read_file: ReadFile, direct: int, size_bytes: int
) -> None:
    path = tmp_path / "file"
    contents = bytes(payload_of(new_key(), 20480))[:size_bytes]
    path.write_bytes(contents)
    parts = aligned_buffer(4096), aligned_buffer(8192)
    mode, stored_bytes, changed_s, num_read = read_file(str(path), OPEN_FLAGS, direct, parts)
    assert stat.S_ISREG(mode)
    assert abs(changed_s - path.stat().st_mtime) <= 1
    assert (stored_bytes, num_read) == (size_bytes, min(size_bytes, 12288))
    assert b"".join(parts)[:num_read] == contents[:num_read]


def test_parts_that_are_not_aligned_are_read_through_the_page_cache(
    tmp_path: Path, read_file: ReadFile
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 32)
    part = aligned_buffer(8192)[1:4097]
    assert read_file(str(path), OPEN_FLAGS, os.O_DIRECT, (part,))[3] == 4096
    assert part == path.read_bytes()[:4096]


def test_what_is_no_file_is_not_read(tmp_path: Path, read_file: ReadFile) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    part = aligned_buffer(4096)
    mode, _, _, num_read = read_file(str(tmp_path / "pipe"), OPEN_FLAGS, 0, (part,))
    assert (stat.S_ISFIFO(mode), num_read) == (True, 0)
    for name, error in [
        ("nothing", errno.ENOENT),
        ("link", errno.ELOOP),
        ("pipe/x", errno.ENOTDIR),
    ]:
        with pytest.raises(OSError, match=os.strerror(error)) as caught:
            read_file(str(tmp_path / name), OPEN_FLAGS, 0, (part,))
        assert caught.value.errno == error
