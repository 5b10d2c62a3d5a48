"""Tests of the host pool within one process: storing, finding, pins, eviction and removal, by one
and by several engines.
"""

import os
import secrets
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tiers.pool_engine import NAMESPACE, ROW_BYTES, PoolEngine, contents, key, path_of

from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.tiers.base import EntryKey, EntryKeys, TierUsage
from kvferry.tiers.keys import Namespace
from kvferry.tiers.pool.host_pool import HostPool
from kvferry.tiers.pool.policies import POLICIES, LruPolicy
from kvferry.tiers.pool.reader import LISTING_INTERVAL_S, PoolReader

A, B, C, D, E = (key(number) for number in range(5))


@pytest.fixture(params=["shared", "private"])
def engine(request: pytest.FixtureRequest, folder: Path) -> PoolEngine:
    """An engine with three rows."""
    if request.param == "private":
        return PoolEngine(HostPool.private(ROW_BYTES, 3, LruPolicy))
    return PoolEngine.open(folder, 3)


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
    rows = [engine.own_row(each) for each in (A, B, C)]
    for row in (*rows, *rows):
        engine.pool.pin(row)
    assert engine.pool.reserve(D) is None
    engine.pool.unpin(rows[1])
    assert engine.pool.reserve(D) is None
    engine.pool.unpin(rows[1])
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
    row = engine.own_row(A)
    with pytest.raises(LocalProtocolError, match="not being written"):
        engine.pool.publish(row, 1)
    with pytest.raises(LocalProtocolError, match="not being written"):
        engine.pool.discard(row)
    with pytest.raises(LocalProtocolError, match="not pinned"):
        engine.pool.unpin(row)
    engine.pool.remove(A)
    with pytest.raises(LocalProtocolError, match="holds no object"):
        engine.pool.pin(row)
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
    assert reader.find(A) is None
    reader.refresh(now=LISTING_INTERVAL_S)
    engine.store(B)
    assert [reader.find(each) is not None for each in (A, B, C)] == [True, True, False]
    asked: list[list[EntryKey]] = [[A, B, C], [C, A], [B], []]
    shown = [list(reader.are_stored(EntryKeys(b"".join(keys)))) for keys in asked]
    assert shown == [[True, True, False], [False, True], [True], []]


def test_keys_that_share_a_bucket_of_the_index_are_told_apart(folder: Path) -> None:
    """The ninth key finds the bucket full: readers miss it, and its owner does not."""
    alike = [EntryKey(bytes(8) + each[8:]) for each in map(key, range(10))]
    engine = PoolEngine.open(folder, 10)
    for each in alike[:9]:
        engine.store(each)
    reader = PoolReader(folder, NAMESPACE)
    reader.refresh(now=0.0)
    expected = [True] * 8 + [False] * 2
    keys = EntryKeys(b"".join(alike))
    assert list(reader.are_stored(keys)) == expected
    assert [reader.find(each) is not None for each in alike] == expected
    assert all(engine.has(each) for each in alike[:9])
    engine.pool.remove(alike[0])
    engine.store(alike[9])
    assert list(reader.are_stored(keys)) == [False, *[True] * 7, False, True]


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
        self.writing: dict[int, EntryKey] = {}
        self.pinned: list[tuple[int, EntryKey]] = []

    def begin(self, key: EntryKey) -> None:
        if not self.engine.pool.holds(key):
            row = self.engine.pool.reserve(key)
            if row is not None:
                self.writing[row] = key

    def publish(self, key: EntryKey) -> None:
        if self.writing:
            row, written = self.writing.popitem()
            self.engine.pool.publish(row, self.engine.write(row, written))

    def store(self, key: EntryKey) -> None:
        if not self.engine.pool.holds(key):
            self.engine.store(key)

    def discard(self, key: EntryKey) -> None:
        if self.writing:
            self.engine.pool.discard(self.writing.popitem()[0])

    def pin(self, key: EntryKey) -> None:
        found = self.engine.pool.find(key)
        if found is not None and found.row is not None:
            self.engine.pool.pin(found.row)
            self.pinned.append((found.row, key))

    def unpin(self, key: EntryKey) -> None:
        if self.pinned:
            self.engine.pool.unpin(self.pinned.pop()[0])

    def remove(self, key: EntryKey) -> None:
        self.engine.pool.remove(key)

    def touch(self, key: EntryKey) -> None:
        self.engine.pool.touch(key)

    def clear(self, key: EntryKey) -> None:
        self.engine.pool.clear()

    def look(self, key: EntryKey) -> None:
        self.onlooker.refresh()

    def restart(self, key: EntryKey) -> None:
        held = objects_of(self.engine)
        self.engine.pool.close()
        self.engine = PoolEngine.open(self.folder, 4, 200, self.policy)
        assert objects_of(self.engine) == held
        self.writing, self.pinned = {}, []

    def check(self) -> None:
        held = objects_of(self.engine)
        assert self.engine.pool.usage().num_entries == len(held)
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
    folder: Path, policy: str, steps: list[tuple[Callable[[Story, EntryKey], None], int]]
) -> None:
    story = Story(folder / secrets.token_hex(8), policy)
    for step, number in steps:
        step(story, key(number))
        story.check()
    story.end()
    story.close()
