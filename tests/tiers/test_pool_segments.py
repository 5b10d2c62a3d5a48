"""Tests of the segments of the host pool: adoption, the folder, and segments that are malformed."""

import os
import random
import secrets
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tiers.pool_engine import NAMESPACE, ROW_BYTES, PoolEngine, key, path_of

from kvferry.errors import ConfigError
from kvferry.host_memory import available_bytes
from kvferry.tiers.base import EntryKey, EntryKeys
from kvferry.tiers.keys import Namespace
from kvferry.tiers.pool import host_pool
from kvferry.tiers.pool.host_pool import HostPool
from kvferry.tiers.pool.policies import ArcPolicy, LruPolicy
from kvferry.tiers.pool.reader import PoolReader, list_segments
from kvferry.tiers.pool.segment import SegmentLayout
from kvferry.tiers.pool.segment_files import OwnedSegment, create_segment

A, B, C, D, E = (key(number) for number in range(5))


# -- segments that stay --


def test_the_next_engine_adopts_the_segment_and_finds_its_objects(folder: Path) -> None:
    first = PoolEngine.open(folder, 3)
    for each in (A, B, C):
        first.store(each)
    first.pool.remove(B)
    first.pool.reserve(D)
    path = path_of(first)
    first.pool.close()
    first.pool.close()
    assert first.pool.usage().num_entries == 2
    second = PoolEngine.open(folder, 3, make_policy=ArcPolicy)
    assert path_of(second) == path
    assert [second.has(each) for each in (A, B, C, D)] == [True, False, True, False]
    assert second.store(D)
    assert second.store(E)
    assert second.pool.take_evicted() == [A]


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "namespace"),
    [
        (4, ROW_BYTES, NAMESPACE),
        (3, ROW_BYTES + 1, NAMESPACE),
        (3, ROW_BYTES, Namespace({"other": 1})),
    ],
)
def test_a_segment_of_other_sizes_or_namespace_is_not_adopted(
    folder: Path, num_rows: int, row_bytes: int, namespace: Namespace
) -> None:
    first = PoolEngine.open(folder, 3)
    first.pool.close()
    second = PoolEngine.open(folder, num_rows, row_bytes, namespace=namespace)
    assert path_of(second) != path_of(first)
    assert path_of(first).exists()


def test_the_segment_with_the_latest_store_is_adopted(folder: Path) -> None:
    engines = [PoolEngine.open(folder, 3) for _ in range(4)]
    engines[2].store(A)
    for engine in engines:
        engine.pool.close()
    assert path_of(PoolEngine.open(folder, 3)) == path_of(engines[2])


def test_a_segment_without_an_owner_is_still_read(folder: Path) -> None:
    first = PoolEngine.open(folder, 3)
    first.store(A)
    first.pool.close()
    other = PoolEngine.open(folder, 2)
    other.refresh()
    assert other.has(A)


def test_unfinished_files_are_removed_unless_their_maker_lives(folder: Path) -> None:
    PoolEngine.open(folder, 1).pool.close()
    (folder / ".new-1234").write_bytes(b"half")
    PoolEngine.open(folder, 1)
    assert not (folder / ".new-1234").exists()


def test_a_pool_larger_than_the_memory_is_refused_before_a_page_is_taken(tmp_path: Path) -> None:
    """The folder is on a disk, which would have room."""
    row_bytes = available_bytes() // 8
    with pytest.raises(ConfigError, match="free in this host or container"):
        HostPool.open(tmp_path / "pool", NAMESPACE, row_bytes, 8, LruPolicy)
    assert not list((tmp_path / "pool").iterdir())


def test_a_pool_that_can_never_fit_costs_no_other_segment(folder: Path) -> None:
    engine = PoolEngine.open(folder, 3)
    engine.store(A)
    engine.pool.close()
    before = sorted(folder.iterdir())
    with pytest.raises(ConfigError, match="free in this host or container"):
        HostPool.open(folder, Namespace({"another": 1}), 1 << 30, 1 << 20, LruPolicy)
    assert sorted(folder.iterdir()) == before


def test_ranks_allocate_one_after_the_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two that allocate at once would find enough memory for itself alone, and could remove
    the file that the other is making.
    """
    num_refused = 0

    def create_while_another_rank_opens(*place: Any) -> OwnedSegment:
        nonlocal num_refused
        monkeypatch.setattr(host_pool, "create_segment", create_segment)
        (folder / ".new-1234").write_bytes(b"not locked yet")
        with pytest.raises(ConfigError, match="another engine has been allocating"):
            PoolEngine.open(folder, 3)
        assert (folder / ".new-1234").exists()
        num_refused += 1
        return create_segment(*place)

    monkeypatch.setattr(host_pool, "create_segment", create_while_another_rank_opens)
    monkeypatch.setattr(host_pool, "ALLOCATION_WAIT_S", 0.0)
    first, second = (PoolEngine.open(folder, 3) for _ in range(2))
    assert num_refused == 1
    assert path_of(first) != path_of(second)


def test_segments_are_described_for_people(folder: Path) -> None:
    one, two = PoolEngine.open(folder, 3), PoolEngine.open(folder, 2)
    one.store(A)
    two.pool.close()
    (folder / "broken.rows").write_bytes(b"x")
    shown = {info.path: info for info in list_segments(folder)}
    assert {*shown} == {path_of(one), path_of(two)}
    info = shown[path_of(one)]
    assert (info.is_live, info.num_objects) == (True, 1)
    assert (info.header.layout.row_bytes, info.header.layout.num_rows) == (ROW_BYTES, 3)
    assert info.header.owner_pid == os.getpid()
    assert info.namespace == NAMESPACE.hex
    assert info.header.namespace_text == NAMESPACE.text
    assert info.total_bytes == path_of(one).stat().st_size
    assert info.last_store_s > 0
    assert shown[path_of(two)].is_live is False


# -- the folder --


def test_only_the_user_may_read_the_folder_and_the_segments(folder: Path) -> None:
    before = os.umask(0)
    try:
        engine = PoolEngine.open(folder, 3)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path_of(engine).stat().st_mode) == 0o600


def test_a_folder_with_a_lax_mode_is_closed_to_others(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    PoolEngine.open(folder, 1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def other_users_folder(folder: Path) -> Path:
    if os.geteuid() == 0:
        folder.mkdir()
        os.chown(folder, 12345, 12345)
        return folder
    return Path("/")


def link_to_a_folder(folder: Path) -> Path:
    target = folder.parent / "target"
    target.mkdir()
    folder.symlink_to(target)
    return folder


def a_file(folder: Path) -> Path:
    folder.write_bytes(b"")
    return folder


@pytest.mark.parametrize("make", [other_users_folder, link_to_a_folder, a_file])
def test_a_folder_that_is_not_ours_is_refused(folder: Path, make: Callable[[Path], Path]) -> None:
    place = make(folder)
    with pytest.raises(ConfigError, match="not a folder of this user"):
        PoolEngine.open(place, 1)
    assert not list(list_segments(place))


def test_another_users_segment_is_ignored(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make files of another user")
    one = PoolEngine.open(folder, 3)
    one.store(A)
    one.pool.close()
    os.chown(path_of(one), 12345, 12345)
    two = PoolEngine.open(folder, 3)
    two.refresh()
    assert path_of(two) != path_of(one)
    assert not two.has(A)


# -- malformed segments --


def truncate(path: Path, segment: bytes) -> None:
    path.write_bytes(segment[: len(segment) // 2])


def lengthen(path: Path, segment: bytes) -> None:
    path.write_bytes(segment + bytes(4096))


def empty(path: Path, segment: bytes) -> None:
    path.write_bytes(b"")


def make_sparse(path: Path, segment: bytes) -> None:
    path.write_bytes(segment[:16384])
    os.truncate(path, len(segment))


def zeros(path: Path, segment: bytes) -> None:
    path.write_bytes(bytes(len(segment)))


def noise(path: Path, segment: bytes) -> None:
    path.write_bytes(random.Random(0).randbytes(len(segment)))


def other_version(path: Path, segment: bytes) -> None:
    path.write_bytes(segment[:8] + b"\x09" + segment[9:])


def huge_numbers(path: Path, segment: bytes) -> None:
    path.write_bytes(segment[:16] + struct.pack("<QQ", 2**64 - 1, 2**64 - 1) + segment[32:])


def no_rows(path: Path, segment: bytes) -> None:
    path.write_bytes(segment[:24] + bytes(8) + segment[32:])


def long_text(path: Path, segment: bytes) -> None:
    path.write_bytes(segment[:12] + b"\xff\xff\xff\xff" + segment[16:])


def folder_instead(path: Path, segment: bytes) -> None:
    path.mkdir()


def pipe_instead(path: Path, segment: bytes) -> None:
    os.mkfifo(path)


def link_instead(path: Path, segment: bytes) -> None:
    target = path.parent.parent / "elsewhere"
    target.write_bytes(segment)
    path.symlink_to(target)


@pytest.mark.parametrize(
    "damage",
    [truncate, lengthen, empty, make_sparse, zeros, noise, other_version, huge_numbers, no_rows,
     long_text, folder_instead, pipe_instead, link_instead],
)  # fmt: skip
def test_a_malformed_segment_is_ignored(
    folder: Path, damage: Callable[[Path, bytes], None]
) -> None:
    one = PoolEngine.open(folder, 3)
    one.store(A)
    one.pool.close()
    path = path_of(one)
    segment = path.read_bytes()
    path.unlink()
    damage(path, segment)
    two = PoolEngine.open(folder, 3)
    two.refresh()
    assert path_of(two) != path
    assert not two.has(A)
    assert two.store(B)
    assert [info.path for info in list_segments(folder)] == [path_of(two)]


def test_an_adopted_segment_with_damaged_counters_stores_and_evicts_on(folder: Path) -> None:
    one = PoolEngine.open(folder, 3)
    for each in (A, B, C):
        one.store(each)
    one.pool.close()
    with path_of(one).open("r+b") as file:
        for at in (64, 16384):  # the header's fields that change; the numbers of A's and B's store
            file.seek(at)
            file.write(b"\xff" * 16)
    two = PoolEngine.open(folder, 3)
    assert path_of(two) == path_of(one)
    assert [two.store(each) for each in (D, E)] == [True] * 2
    assert two.pool.take_evicted() == [C, A]
    assert [two.has(each) for each in (B, D, E)] == [True] * 3


def test_a_use_beyond_the_last_number_is_counted(folder: Path) -> None:
    one = PoolEngine.open(folder, 1)
    one.store(A)
    layout = SegmentLayout(ROW_BYTES, 1)
    with path_of(one).open("r+b") as file:
        file.seek(layout.used_at)
        file.write(b"\xff" * 4)
    two = PoolEngine.open(folder, 1)
    two.refresh()
    two.pool.touch(A)
    assert path_of(one).read_bytes()[layout.used_at :][:4] == bytes(4)


def test_rows_that_are_too_small_for_the_cache_are_not_found(folder: Path) -> None:
    """A copy of such a row would read beyond the end of the mapping."""
    one = PoolEngine.open(folder, 3, row_bytes=100)
    one.store(A)
    two = PoolEngine.open(folder, 3)
    two.refresh()
    assert two.pool.find(A) is None
    assert one.has(A)


def test_the_same_bytes_undamaged_are_adopted(folder: Path) -> None:
    one = PoolEngine.open(folder, 3)
    one.store(A)
    one.pool.close()
    path = path_of(one)
    segment = path.read_bytes()
    path.unlink()
    path.write_bytes(segment)
    assert PoolEngine.open(folder, 3).has(A)


def test_an_entry_with_the_key_of_another_row_is_refused(folder: Path) -> None:
    # The keys share a bucket of the index, so that a reader finds both rows for either.
    one_key, other_key = (EntryKey(bytes(8) + each[8:]) for each in (A, B))
    one = PoolEngine.open(folder, 2)
    one.store(one_key)
    one.store(other_key)
    path = path_of(one)
    segment = path.read_bytes()
    with path.open("r+b") as file:
        for where, what in ((one_key, other_key), (other_key, one_key)):
            file.seek(segment.index(where))
            file.write(what)
    two = PoolEngine.open(folder, 1)
    two.refresh()
    assert two.pool.find(one_key) is not None
    assert [two.has(one_key), two.has(other_key)] == [False, False]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_damage_anywhere_in_a_segment_gives_no_error_and_no_wrong_bytes(
    folder: Path, rng: random.Random
) -> None:
    here = folder / secrets.token_hex(8)
    one = PoolEngine.open(here, 4, 200)
    for number in range(4):
        one.store(key(number))
    path = path_of(one)
    with path.open("r+b") as file:
        for _ in range(rng.randint(1, 30)):
            # Mostly the table, sometimes the rows or the header.
            size = path.stat().st_size
            end = rng.choice([16384 + 4 * 113, size, 128])
            file.seek(rng.randrange(0 if end == 128 else 16384, end))
            file.write(rng.randbytes(1))
    two = PoolEngine.open(here, 1, 200)
    for _ in range(2):
        two.refresh()
        for number in range(4):
            two.has(key(number))  # asserts that what is loaded is right
        reader = PoolReader(here, NAMESPACE)
        reader.refresh(now=0.0)
        reader.are_stored(EntryKeys(b"".join(map(key, range(4)))))
    one.pool.close()
    adopted = PoolEngine.open(here, 4, 200)
    for number in range(4):
        adopted.has(key(number))
    adopted.pool.clear()
    assert [adopted.store(key(number)) for number in range(4)] == [True] * 4
    adopted.pool.close()
    two.pool.close()
