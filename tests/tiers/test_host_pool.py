"""Tests of the host pool within one process: storing, finding, pins, eviction, removal, adoption,
and segments that are malformed.
"""

import os
import random
import secrets
import stat
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tiers.pool_engine import NAMESPACE, ROW_BYTES, PoolEngine, contents, key

from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.host_memory import available_bytes
from kvferry.tiers.base import ObjectKey, TierUsage
from kvferry.tiers.host_pool import HostPool
from kvferry.tiers.keys import Namespace
from kvferry.tiers.policies import POLICIES, ArcPolicy, LruPolicy
from kvferry.tiers.pool_reader import LISTING_INTERVAL_S, PoolReader, list_segments

A, B, C, D, E = (key(number) for number in range(5))


@pytest.fixture(params=["shared", "private"])
def engine(request: pytest.FixtureRequest, folder: Path) -> PoolEngine:
    """An engine with three rows."""
    if request.param == "private":
        return PoolEngine(HostPool.private(ROW_BYTES, 3, LruPolicy))
    return PoolEngine.open(folder, 3)


def path_of(engine: PoolEngine) -> Path:
    assert engine.pool.path is not None
    return engine.pool.path


# -- one engine --


def test_what_was_stored_is_found_with_its_bytes(engine: PoolEngine) -> None:
    assert not engine.has(A)
    assert engine.store(A)
    assert engine.has(A)
    assert A in engine.pool
    assert B not in engine.pool
    assert engine.pool.usage() == TierUsage(ROW_BYTES, 1, 3 * ROW_BYTES, 0)


def test_rows_are_aligned_to_pages_and_apart(engine: PoolEngine) -> None:
    pool = engine.pool
    addresses = [pool.row_address(row) for row in range(3)]
    assert addresses[0] == pool.address
    assert all(address % os.sysconf("SC_PAGESIZE") == 0 for address in addresses)
    assert all(b - a >= ROW_BYTES for a, b in pairwise(addresses))
    assert addresses[-1] + ROW_BYTES <= pool.address + pool.size_bytes
    engine.write(1, A)
    assert pool.row(1) == contents(A).tobytes()


def test_an_object_is_not_found_before_it_is_published(engine: PoolEngine) -> None:
    row = engine.pool.reserve(A)
    assert row is not None
    checksum = engine.write(row, A)
    assert engine.pool.find(A) is None
    assert engine.pool.holds(A)
    assert engine.pool.publish(row, checksum)
    assert engine.has(A)


def test_a_discarded_row_can_be_used_again(engine: PoolEngine) -> None:
    rows = [engine.pool.reserve(each) for each in (A, B, C)]
    assert engine.pool.reserve(D) is None
    for row in rows:
        assert row is not None
        engine.pool.discard(row)
    assert not engine.pool.holds(A)
    assert [engine.store(each) for each in (A, B, C)] == [True] * 3
    assert engine.pool.take_evicted() == []


def test_the_least_recently_used_object_is_evicted(engine: PoolEngine) -> None:
    for each in (A, B, C):
        engine.store(each)
    engine.pool.touch(A)
    assert engine.store(D)
    assert engine.pool.take_evicted() == [B]
    assert engine.pool.take_evicted() == []
    assert [engine.has(each) for each in (A, B, C, D)] == [True, False, True, True]
    assert engine.pool.usage() == TierUsage(3 * ROW_BYTES, 3, 3 * ROW_BYTES, 1)


def test_pinned_rows_stay(engine: PoolEngine) -> None:
    for each in (A, B, C):
        engine.store(each)
    rows = [engine.pool.find(each) for each in (A, B, C)]
    for found in rows:
        assert found is not None
        assert found.row is not None
        engine.pool.pin(found.row)
        engine.pool.pin(found.row)
    assert engine.pool.reserve(D) is None
    assert rows[1] is not None
    assert rows[1].row is not None
    engine.pool.unpin(rows[1].row)
    assert engine.pool.reserve(D) is None
    engine.pool.unpin(rows[1].row)
    assert engine.store(D)
    assert engine.pool.take_evicted() == [B]


@pytest.mark.parametrize("how", ["remove", "clear"])
def test_a_removed_row_keeps_its_bytes_while_it_is_pinned(engine: PoolEngine, how: str) -> None:
    for each in (A, B, C):
        engine.store(each)
    found = engine.pool.find(A)
    assert found is not None
    assert found.row is not None
    engine.pool.pin(found.row)
    if how == "clear":
        engine.pool.clear()
    else:
        for each in (A, B, C):
            engine.pool.remove(each)
    assert engine.pool.find(A) is None
    assert [engine.store(each) for each in (C, D, E)] == [True, True, False]
    loaded = engine.load_row(found)
    assert loaded is not None
    assert np.array_equal(loaded, contents(A))
    engine.pool.unpin(found.row)
    assert engine.store(E)
    assert [engine.has(each) for each in (A, B, C, D, E)] == [False, False, True, True, True]


@pytest.mark.parametrize("how", ["remove", "clear"])
def test_an_object_that_is_removed_while_it_is_written_is_not_published(
    engine: PoolEngine, how: str
) -> None:
    row = engine.pool.reserve(A)
    assert row is not None
    if how == "clear":
        engine.pool.clear()
    else:
        engine.pool.remove(A)
    assert not engine.pool.holds(A)
    assert engine.store(A)  # in another row
    assert not engine.pool.publish(row, engine.write(row, A))
    assert engine.has(A)
    assert [engine.store(each) for each in (B, C)] == [True, True]
    assert engine.pool.take_evicted() == []
    assert all(engine.has(each) for each in (A, B, C))


def test_a_removed_object_that_was_being_written_can_be_discarded(engine: PoolEngine) -> None:
    row = engine.pool.reserve(A)
    assert row is not None
    engine.pool.clear()
    engine.pool.discard(row)
    assert [engine.store(each) for each in (A, B, C)] == [True] * 3
    assert engine.pool.take_evicted() == []


def test_bugs_of_the_caller_are_reported(engine: PoolEngine) -> None:
    engine.store(A)
    with pytest.raises(LocalProtocolError, match="stored twice"):
        engine.pool.reserve(A)
    found = engine.pool.find(A)
    assert found is not None
    assert found.row is not None
    with pytest.raises(LocalProtocolError, match="not being written"):
        engine.pool.publish(found.row, 1)
    with pytest.raises(LocalProtocolError, match="not being written"):
        engine.pool.discard(found.row)
    with pytest.raises(LocalProtocolError, match="not pinned"):
        engine.pool.unpin(found.row)
    engine.pool.remove(A)
    with pytest.raises(LocalProtocolError, match="holds no object"):
        engine.pool.pin(found.row)
    for wrong in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError, match="holds nothing"):
            HostPool.private(*wrong, LruPolicy)


# -- several engines --


def test_engines_find_each_others_objects(folder: Path) -> None:
    one, two = (PoolEngine.open(folder, 3) for _ in range(2))
    assert one.pool.path != two.pool.path
    one.store(A)
    two.store(B)
    two.refresh()
    assert two.has(A)
    found = two.pool.find(A)
    assert found is not None
    assert found.row is None
    assert not one.has(B)  # it has not looked yet
    one.refresh()
    assert one.has(B)
    assert not two.pool.holds(A)


def test_the_same_object_in_two_segments_is_found_until_both_have_evicted_it(folder: Path) -> None:
    one, two, reader = (PoolEngine.open(folder, rows) for rows in (1, 1, 3))
    assert [one.store(A), two.store(A)] == [True, True]
    reader.refresh()
    assert reader.has(A)
    one.store(B)
    reader.refresh()
    assert [reader.has(A), reader.has(B)] == [True, True]
    two.store(C)
    reader.refresh()
    assert [reader.has(A), reader.has(B), reader.has(C)] == [False, True, True]


def test_other_namespaces_are_not_found(folder: Path) -> None:
    one = PoolEngine.open(folder, 3)
    two = PoolEngine.open(folder, 3, namespace=Namespace({"model": "tiny", "tp_rank": 1}))
    one.store(A)
    two.refresh()
    assert not two.has(A)


def test_a_cleared_object_is_not_found_even_by_engines_that_have_not_looked_again(
    folder: Path,
) -> None:
    one, two = (PoolEngine.open(folder, 3) for _ in range(2))
    one.store(A)
    two.refresh()
    assert two.has(A)
    one.pool.clear()
    assert two.pool.find(A) is None
    two.refresh()
    assert A not in two.pool


def test_an_object_that_another_engine_uses_is_evicted_later(folder: Path) -> None:
    one, two = (PoolEngine.open(folder, 3) for _ in range(2))
    for each in (A, B, C):
        one.store(each)
    two.refresh()
    two.pool.touch(A)
    one.store(D)
    assert one.pool.take_evicted() == [B]
    one.store(E)
    assert one.pool.take_evicted() == [C]


def test_a_reader_looks_for_new_segments_only_now_and_then(folder: Path) -> None:
    reader = PoolReader(folder, NAMESPACE)
    reader.refresh(now=0.0)
    engine = PoolEngine.open(folder, 3)
    engine.store(A)
    reader.refresh(now=LISTING_INTERVAL_S / 2)
    assert A not in reader
    reader.refresh(now=LISTING_INTERVAL_S)
    assert A in reader
    engine.store(B)
    reader.refresh(now=LISTING_INTERVAL_S)
    assert [B in reader, len(reader)] == [True, 2]
    asked: list[list[ObjectKey]] = [[A, B, C], [C, A], [B], []]
    shown = [reader.are_stored(keys).tolist() for keys in asked]
    assert shown == [[True, True, False], [False, True], [True], []]
    assert [found is not None for found in reader.find([A, C, B])] == [True, False, True]


def test_keys_that_share_a_bucket_of_the_index_are_told_apart(folder: Path) -> None:
    """The ninth key finds the bucket full: readers miss it, and its owner does not."""
    alike = [ObjectKey(bytes(8) + each[8:]) for each in map(key, range(10))]
    engine = PoolEngine.open(folder, 10)
    for each in alike[:9]:
        engine.store(each)
    reader = PoolReader(folder, NAMESPACE)
    reader.refresh(now=0.0)
    expected = [True] * 8 + [False] * 2
    assert reader.are_stored(alike).tolist() == expected
    assert [each in reader for each in alike] == expected
    assert all(engine.has(each) for each in alike[:9])
    engine.pool.remove(alike[0])
    engine.store(alike[9])
    assert reader.are_stored(alike).tolist() == [False, *[True] * 7, False, True]


def test_what_a_reader_has_found_stays_mapped(folder: Path) -> None:
    one, two = (PoolEngine.open(folder, 3) for _ in range(2))
    one.store(A)
    two.refresh()
    found = two.pool.find(A)
    assert found is not None
    path = path_of(one)
    one.pool.close()
    path.unlink()
    two.pool.close()
    loaded = two.load_row(found)
    assert loaded is not None
    assert np.array_equal(loaded, contents(A))


class Story:
    """An engine with four rows that does what a test draws, and another engine that looks on."""

    def __init__(self, folder: Path, policy: str) -> None:
        self.folder = folder
        self.policy = POLICIES[policy]
        self.engine = PoolEngine.open(folder, 4, 200, self.policy)
        self.onlooker = PoolEngine.open(folder, 1, 200)
        self.writing: dict[int, ObjectKey] = {}
        self.pinned: list[tuple[int, ObjectKey]] = []

    def begin(self, key: ObjectKey) -> None:
        if not self.engine.pool.holds(key):
            row = self.engine.pool.reserve(key)
            if row is not None:
                self.writing[row] = key

    def publish(self, key: ObjectKey) -> None:
        if self.writing:
            row, written = self.writing.popitem()
            self.engine.pool.publish(row, self.engine.write(row, written))

    def store(self, key: ObjectKey) -> None:
        if not self.engine.pool.holds(key):
            self.engine.store(key)

    def discard(self, key: ObjectKey) -> None:
        if self.writing:
            self.engine.pool.discard(self.writing.popitem()[0])

    def pin(self, key: ObjectKey) -> None:
        found = self.engine.pool.find(key)
        if found is not None and found.row is not None:
            self.engine.pool.pin(found.row)
            self.pinned.append((found.row, key))

    def unpin(self, key: ObjectKey) -> None:
        if self.pinned:
            self.engine.pool.unpin(self.pinned.pop()[0])

    def remove(self, key: ObjectKey) -> None:
        self.engine.pool.remove(key)

    def touch(self, key: ObjectKey) -> None:
        self.engine.pool.touch(key)

    def clear(self, key: ObjectKey) -> None:
        self.engine.pool.clear()

    def look(self, key: ObjectKey) -> None:
        self.onlooker.refresh()

    def restart(self, key: ObjectKey) -> None:
        held = objects_of(self.engine)
        self.engine.pool.close()
        self.engine = PoolEngine.open(self.folder, 4, 200, self.policy)
        assert objects_of(self.engine) == held
        self.writing, self.pinned = {}, []

    def check(self) -> None:
        held = objects_of(self.engine)
        assert self.engine.pool.usage().num_objects == len(held)
        assert objects_of(self.onlooker) <= held
        for row, pinned in self.pinned:
            assert bytes_of(self.engine, row) == contents(pinned, 200).tobytes()

    def end(self) -> None:
        self.onlooker.refresh()
        assert objects_of(self.onlooker) == objects_of(self.engine)
        while self.writing:
            self.discard(A)
        while self.pinned:
            self.unpin(A)
        self.engine.pool.clear()
        assert [self.engine.store(key(n)) for n in range(4)] == [True] * 4
        assert objects_of(self.engine) == {0, 1, 2, 3}

    def close(self) -> None:
        self.engine.pool.close()
        self.onlooker.pool.close()


def objects_of(engine: PoolEngine) -> set[int]:
    return {number for number in range(10) if engine.has(key(number))}


def bytes_of(engine: PoolEngine, row: int) -> bytes:
    pool = engine.pool
    with path_of(engine).open("rb") as file:
        file.seek(pool.row_address(row) - pool.address - pool.size_bytes, os.SEEK_END)
        return file.read(pool.row_bytes)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [Story.store, Story.store, Story.begin, Story.publish, Story.discard, Story.pin,
                 Story.unpin, Story.remove, Story.touch, Story.clear, Story.look, Story.restart]
            ),
            st.integers(0, 9),
        ),
        max_size=60,
    )
)  # fmt: skip
def test_no_order_of_calls_loses_rows_or_mixes_them_up(
    folder: Path, policy: str, steps: list[tuple[Callable[[Story, ObjectKey], None], int]]
) -> None:
    story = Story(folder / secrets.token_hex(8), policy)
    for step, number in steps:
        step(story, key(number))
        story.check()
    story.end()
    story.close()


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
    assert first.pool.usage().num_objects == 2
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


def test_segments_are_described_for_people(folder: Path) -> None:
    one, two = PoolEngine.open(folder, 3), PoolEngine.open(folder, 2)
    one.store(A)
    two.pool.close()
    (folder / "broken.rows").write_bytes(b"x")
    shown = {info.path: info for info in list_segments(folder)}
    assert {*shown} == {path_of(one), path_of(two)}
    info = shown[path_of(one)]
    assert (info.is_live, info.num_objects, info.num_rows) == (True, 1, 3)
    assert (info.row_bytes, info.owner_pid) == (ROW_BYTES, os.getpid())
    assert info.namespace == NAMESPACE.hex
    assert info.namespace_text == NAMESPACE.text
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
    reader = PoolReader(place, NAMESPACE)
    reader.refresh(now=0.0)
    assert len(reader) == 0


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
    one_key, other_key = (ObjectKey(bytes(8) + each[8:]) for each in (A, B))
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
            # Mostly the table, sometimes the rows; never the header.
            size = path.stat().st_size
            file.seek(rng.randrange(16384, rng.choice([16384 + 4 * 113, size])))
            file.write(rng.randbytes(1))
    two = PoolEngine.open(here, 1, 200)
    for _ in range(2):
        two.refresh()
        for number in range(4):
            two.has(key(number))  # asserts that what is loaded is right
        reader = PoolReader(here, NAMESPACE)
        reader.refresh(now=0.0)
        reader.are_stored([key(number) for number in range(4)])
    one.pool.close()
    adopted = PoolEngine.open(here, 4, 200)
    for number in range(4):
        adopted.has(key(number))
    adopted.pool.clear()
    assert [adopted.store(key(number)) for number in range(4)] == [True] * 4
    adopted.pool.close()
    two.pool.close()
