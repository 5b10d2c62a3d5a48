"""Tests the jobs of an offload worker with a real pool and real copies; the test performs the
tasks, in any order and with any outcome.
"""

import pickle
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers.job_rank import NUM_BLOCKS, ROW_BYTES, TIMEOUT_S, Rank, chunk, key_of, store

from kvferry.tiers.base import EntryKeys, LoadOutcome, LoadResult, StoreOutcome, StoreResult
from kvferry.tiers.commands import (
    CancelLoad,
    Chunk,
    ChunkTable,
    DropAll,
    LoadChunks,
    LoadEnded,
    StoreChunks,
    StoresCopied,
    VoidStores,
)
from kvferry.tiers.jobs.base import CopyResult, LoadEntry, LoadRows, StoreEntry, StoreRows
from kvferry.tiers.jobs.stores import KNOWN_FOR_S


def test_a_stored_chunk_is_loaded_into_other_blocks() -> None:
    rank = Rank()
    store(rank, 1)
    rank.send(LoadChunks("b", (chunk(1, 5),)))
    assert not rank.events
    rank.finish_all()
    assert rank.events == [LoadEnded("b", seconds=0.0, bytes_by_tier={"cpu": ROW_BYTES})]
    assert rank.block(5) == rank.contents(key_of(1))


@pytest.mark.parametrize("tier", ["disk", "object"])
def test_a_chunk_that_left_the_pool_is_read_from_a_slower_tier_and_is_in_the_pool_again(
    tier: str,
) -> None:
    rank = Rank()
    store(rank, 1, tier)
    rank.pool.remove(key_of(1))
    rank.send(LoadChunks("b", (chunk(1, 5, tier),)))
    assert isinstance(rank.tasks[0], LoadEntry)
    assert rank.tasks[0].tier == tier
    rank.finish_all()
    assert rank.events[-1] == LoadEnded("b", bytes_by_tier={tier: ROW_BYTES})
    assert rank.block(5) == rank.contents(key_of(1))
    assert key_of(1) in rank.pool


def test_without_a_cpu_tier_no_row_is_kept() -> None:
    rank = Rank(keeps_rows=False)
    store(rank, 1, "disk")
    assert rank.pool.usage().num_entries == 0
    rank.send(LoadChunks("b", (chunk(1, 5, "disk"),)))
    rank.finish_all()
    assert rank.block(5) == rank.contents(key_of(1))
    assert rank.pool.usage().num_entries == 0
    assert "cpu" not in rank.counts()


@pytest.mark.parametrize("is_all", [True, False])
def test_a_store_that_became_void_while_it_was_copied_is_not_stored(is_all: bool) -> None:
    rank = Rank()
    rank.fill(0, key_of(1))
    rank.send(StoreChunks("a", (chunk(1, 0, "disk"),)))
    copying = rank.task(StoreRows)
    rank.send(VoidStores("a", () if is_all else (key_of(1),)))
    rank.cache[:, 0] = 99  # the engine has given the block to another request
    rank.finish(copying)
    assert not rank.tasks
    assert key_of(1) not in rank.pool


def test_a_void_of_one_request_leaves_the_stores_of_another() -> None:
    rank = Rank()
    rank.fill(0, key_of(1))
    rank.send(StoreChunks("a", (chunk(1, 0),)), VoidStores("b"), VoidStores("a", (key_of(2),)))
    rank.finish_all()
    assert key_of(1) in rank.pool


def test_a_store_reads_its_blocks_until_the_copy_has_ended() -> None:
    rank = Rank()
    rank.send(StoreChunks("a", (chunk(1, 0, "disk"),), 1))
    assert not rank.events
    rank.finish(rank.task(StoreRows))
    assert rank.events == [StoresCopied(1)]
    assert isinstance(rank.tasks[0], StoreEntry)  # the slow store reads the row, not the blocks


def test_a_row_that_was_overwritten_while_it_was_copied_is_a_miss() -> None:
    rank = Rank(tiers=())
    store(rank, 1)
    rank.send(LoadChunks("b", (chunk(1, 5),)))
    row = rank.pool.find(key_of(1))
    assert row is not None
    assert row.row is not None
    rank.pool.row(row.row)[100] ^= 1
    rank.finish_all()
    (ended,) = rank.events
    assert isinstance(ended, LoadEnded)
    assert ended.reason
    assert ended.missing == (key_of(1),)
    assert key_of(1) not in rank.pool
    assert rank.counts()["cpu"]["refused"] == 1


def test_a_damaged_row_is_replaced_by_a_slower_tiers_copy() -> None:
    rank = Rank()
    store(rank, 1, "disk")
    found = rank.pool.find(key_of(1))
    assert found is not None
    assert found.row is not None
    rank.pool.row(found.row)[3] ^= 128
    rank.send(LoadChunks("b", (chunk(1, 5),)))
    rank.finish_all()
    assert rank.block(5) == rank.contents(key_of(1))
    assert rank.events[-1] == LoadEnded("b", bytes_by_tier={"disk": ROW_BYTES})


def test_a_tier_that_refuses_or_fails_is_followed_by_the_next() -> None:
    rank = Rank()
    store(rank, 1, "disk", "object")
    rank.pool.remove(key_of(1))
    rank.send(LoadChunks("b", (chunk(1, 5, "disk"),)))
    rank.finish(rank.tasks[0], LoadResult(LoadOutcome.REFUSED, "damaged"))
    rank.finish_all()
    assert rank.block(5) == rank.contents(key_of(1))
    assert rank.counts()["disk"]["refused"] == 1


def test_a_load_that_takes_too_long_ends_without_waiting_for_the_read() -> None:
    rank = Rank()
    store(rank, 1, "disk")
    rank.pool.remove(key_of(1))
    rank.send(LoadChunks("b", (chunk(1, 5, "disk"),)))
    stuck = rank.task(LoadEntry)
    rank.wait(TIMEOUT_S)
    (ended,) = rank.events
    assert isinstance(ended, LoadEnded)
    assert "longer than 10 s" in ended.reason
    assert (ended.seconds, ended.bytes_by_tier) == (TIMEOUT_S, {"disk": ROW_BYTES})
    rank.finish(stuck)
    assert not rank.tasks, "the late read must not write into the blocks"
    assert rank.jobs.is_idle


def test_a_load_that_takes_too_long_counts_only_what_was_still_to_come() -> None:
    """The tier that is slow must be learned, not the tier that has most of the chunks."""
    rank = Rank()
    store(rank, 1)
    store(rank, 2)
    store(rank, 3, "disk")
    rank.pool.remove(key_of(3))
    rank.send(LoadChunks("b", (chunk(1, 5), chunk(2, 6), chunk(3, 7, "disk"))))
    stuck = rank.task(LoadEntry)
    rank.finish(rank.task(LoadRows))
    rank.wait(TIMEOUT_S)
    (ended,) = rank.events
    assert isinstance(ended, LoadEnded)
    assert ended.bytes_by_tier == {"disk": ROW_BYTES}
    rank.finish(stuck)
    assert rank.jobs.is_idle


def test_a_load_is_not_reported_while_a_copy_may_write_into_its_blocks() -> None:
    rank = Rank()
    store(rank, 1)
    rank.send(LoadChunks("b", (chunk(1, 5), chunk(2, 6))))
    copying = rank.task(LoadRows)
    for read in [task for task in rank.tasks if isinstance(task, LoadEntry)]:
        rank.finish(read)
    for read in [task for task in rank.tasks if isinstance(task, LoadEntry)]:
        rank.finish(read)
    assert not rank.events
    rank.send(CancelLoad("b"))
    assert not rank.events
    rank.finish(copying)
    (ended,) = rank.events
    assert isinstance(ended, LoadEnded)
    assert ended.missing == (key_of(2),)


def test_two_requests_that_need_one_object_read_it_once() -> None:
    rank = Rank()
    store(rank, 1, "disk")
    rank.pool.remove(key_of(1))
    rank.send(LoadChunks("b", (chunk(1, 5, "disk"),)), LoadChunks("c", (chunk(1, 6, "disk"),)))
    assert len(rank.tasks) == 1
    rank.finish_all()
    assert {event.request for event in rank.events if isinstance(event, LoadEnded)} == {"b", "c"}
    assert rank.block(5) == rank.block(6) == rank.contents(key_of(1))


def test_without_a_cpu_tier_two_requests_that_need_one_object_read_it_once_too() -> None:
    rank = Rank(keeps_rows=False)
    store(rank, 1, "disk")
    rank.send(LoadChunks("b", (chunk(1, 5, "disk"),)), LoadChunks("c", (chunk(1, 6, "disk"),)))
    rank.finish(rank.task(LoadEntry))
    assert all(isinstance(task, LoadRows) for task in rank.tasks)
    rank.finish_all()
    assert rank.block(5) == rank.block(6) == rank.contents(key_of(1))
    assert rank.pool.find(key_of(1)) is None


def test_without_a_cpu_tier_a_chunk_that_came_from_a_tier_is_not_copied_again() -> None:
    rank = Rank(keeps_rows=False)
    store(rank, 1, "disk")
    rank.send(LoadChunks("b", (chunk(1, 5, "disk"),)))
    rank.finish_all()
    rank.send(StoreChunks("b", (chunk(1, 5, "disk"),)))
    assert not rank.tasks


def test_loads_wait_for_a_row_while_slow_writes_hold_rows() -> None:
    rank = Rank(num_rows=2)
    store(rank, 1, "disk")
    rank.pool.remove(key_of(1))
    for number in (2, 3):
        rank.fill(0, key_of(number))
        rank.send(StoreChunks("a", (chunk(number, 0, "object"),)))
        rank.finish(rank.task(StoreRows))
    assert sum(isinstance(task, StoreEntry) for task in rank.tasks) == 1, "half of the rows"
    rank.send(LoadChunks("b", (chunk(1, 5, "disk"),)))
    rank.finish_all()
    assert rank.block(5) == rank.contents(key_of(1))


def test_a_chunk_that_a_tier_has_is_not_written_there_again() -> None:
    rank = Rank()
    store(rank, 1, "disk")
    rank.send(StoreChunks("b", (chunk(1, 3, "disk", "object"),)))
    (task,) = rank.tasks
    assert isinstance(task, StoreEntry)
    assert task.tier == "object"


def test_a_chunk_that_a_tier_may_have_evicted_meanwhile_is_written_again() -> None:
    rank = Rank()
    store(rank, 1, "disk")
    rank.stored.clear()
    rank.wait(KNOWN_FOR_S)
    store(rank, 1, "disk")
    assert ("disk", key_of(1)) in rank.stored


def test_of_a_prompt_that_does_not_fit_the_head_is_stored() -> None:
    """Chunks behind a missing chunk are of no use."""
    rank = Rank(num_rows=4, tiers=())
    for block in range(10):
        rank.fill(block, key_of(block))
    rank.send(StoreChunks("a", tuple(chunk(n, n) for n in range(10))))
    rank.finish_all()
    assert [n for n in range(10) if rank.pool.find(key_of(n))] == [0, 1, 2, 3]
    assert rank.counts()["cpu"]["dropped_stores"] == 6


def test_stores_are_reported_as_copied_in_order() -> None:
    """The blocks of a store are read until all its copies have ended, void or not."""
    rank = Rank()
    for number in (1, 2, 3):
        rank.fill(number, key_of(number))
        rank.send(StoreChunks("a", (chunk(number, number),), number))
    first, second, third = rank.tasks
    rank.finish(second)
    assert not rank.events
    rank.send(VoidStores("a"))
    rank.finish(first)
    assert rank.events == [StoresCopied(2)]
    rank.finish(third)
    assert rank.events == [StoresCopied(2), StoresCopied(3)]
    # Nothing to copy: the pool has the chunk.
    rank.fill(4, key_of(4))
    rank.send(StoreChunks("a", (chunk(4, 4),), 4))
    rank.finish_all()
    rank.send(StoreChunks("b", (chunk(4, 4),), 5))
    assert rank.events[-1] == StoresCopied(5)


def test_a_table_of_chunks_is_stored_like_the_chunks() -> None:
    keys = EntryKeys(key_of(1) + key_of(2))
    chunks = ChunkTable(2, keys, (0, 1), (3, 4, 5, 6), (("disk",), ()))
    assert list(chunks) == [Chunk(key_of(1), 0, (3, 4), ("disk",)), Chunk(key_of(2), 1, (5, 6))]
    assert len(chunks) == 2
    alike = ChunkTable(1, keys, (1,), [3, 4], (("disk",),))
    assert list(alike) == [
        Chunk(key_of(1), 1, (3,), ("disk",)),
        Chunk(key_of(2), 1, (4,), ("disk",)),
    ]
    assert pickle.loads(pickle.dumps(alike)) == alike


def test_after_a_reset_nothing_from_before_is_found() -> None:
    rank = Rank(tiers=())
    store(rank, 1)
    rank.fill(0, key_of(2))
    rank.send(StoreChunks("a", (chunk(2, 0),)), DropAll())
    rank.finish_all()
    assert key_of(1) not in rank.pool
    assert key_of(2) not in rank.pool


def test_events_report_what_each_tier_gets_and_loses() -> None:
    rank = Rank(num_rows=1)
    store(rank, 1, "disk")
    assert rank.reported == {("cpu", key_of(1)), ("disk", key_of(1))}
    store(rank, 2)
    assert rank.reported == {("cpu", key_of(2)), ("disk", key_of(1))}
    rank.send(LoadChunks("a", (chunk(1, 5, "disk"),)))
    rank.finish(rank.task(LoadEntry), LoadResult(LoadOutcome.REFUSED, "it is damaged"))
    assert ("disk", key_of(1)) not in rank.reported


@pytest.mark.parametrize("is_copied_before", [False, True])
def test_a_damaged_row_is_never_stored_in_a_tier(is_copied_before: bool) -> None:
    """A tier would seal the damage, and vouch for it for ever."""
    rank = Rank()
    if is_copied_before:
        store(rank, 1)
        rank.send(StoreChunks("again", (chunk(1, 0, "disk"),)))
    else:
        rank.fill(0, key_of(1))
        rank.send(StoreChunks("storing", (chunk(1, 0, "disk"),)))
        rank.finish(rank.task(StoreRows))
    found = rank.pool.find(key_of(1))
    assert found is not None
    assert found.row is not None
    rank.pool.row(found.row)[7] ^= 1
    rank.finish_all()
    assert not rank.stored
    assert not rank.reported
    counts = rank.counts()
    assert (counts["cpu"]["refused"], counts["disk"]["failed_stores"]) == (1, 1)
    store(rank, 1, "disk")
    assert rank.stored["disk", key_of(1)] == rank.contents(key_of(1))


def test_a_damaged_row_is_reported_as_removed() -> None:
    rank = Rank(tiers=())
    store(rank, 1)
    rank.send(LoadChunks("a", (chunk(1, 5),)))
    rank.finish(rank.task(LoadRows), CopyResult([0]))
    assert not rank.reported


def test_an_object_from_before_is_reported_when_a_request_needs_it() -> None:
    """The disk has the object since an earlier engine, and the reset makes the pool forget it."""
    rank = Rank()
    store(rank, 1, "disk")
    rank.send(DropAll())
    assert not rank.reported
    rank.send(LoadChunks("a", (chunk(1, 5, "disk"),)))
    rank.finish_all()
    assert rank.reported == {("cpu", key_of(1)), ("disk", key_of(1))}
    rank.send(DropAll())
    store(rank, 1, "disk")
    assert rank.reported == {("cpu", key_of(1)), ("disk", key_of(1))}


def test_an_object_that_the_tier_has_lost_is_written_again() -> None:
    rank = Rank()
    store(rank, 1, "disk")
    rank.jobs.note_lost("disk", [key_of(1)])
    rank.send(StoreChunks("a", (chunk(1, 0, "disk"),)))
    assert rank.reported == {("cpu", key_of(1))}
    assert isinstance(rank.task(StoreEntry), StoreEntry)


def test_a_copy_that_fails_loses_its_rows_only() -> None:
    rank = Rank()
    rank.send(StoreChunks("a", (chunk(1, 0),), 1))
    rank.finish(rank.task(StoreRows), CopyResult(reason="the GPU has failed"))
    assert rank.events == [StoresCopied(1)]
    store(rank, 2)
    rank.send(LoadChunks("b", (chunk(2, 5),)))
    rank.finish(rank.task(LoadRows), CopyResult(reason="the GPU has failed"))
    (_, ended) = rank.events
    assert isinstance(ended, LoadEnded)
    assert ended.reason == "the GPU has failed"
    assert rank.jobs.is_idle


@dataclass
class Story:
    """An engine that stores and loads at random, and checks every report."""

    rank: Rank
    rng: random.Random
    blocks: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    """Blocks that no request has."""
    held: dict[str, list[int]] = field(default_factory=dict)
    ending: dict[str, list[int]] = field(default_factory=dict)
    loading: dict[str, tuple[Chunk, ...]] = field(default_factory=dict)
    num_requests: int = 0
    num_stores: int = 0
    numbers: dict[str, int] = field(default_factory=dict)
    """The number of each request's store."""
    num_copied: int = 0
    has_reset: bool = False

    def step(self) -> None:
        actions = [self.store, self.end, self.void, self.load, self.cancel, self.pause, self.lose]
        if self.rng.random() < 0.5 and self.rank.tasks:
            self.finish_task()
        else:
            self.rng.choice(actions)()
        self.check_events()

    def new_chunks(self, prefix: str) -> tuple[str, tuple[Chunk, ...]]:
        self.num_requests += 1
        count = self.rng.randint(1, min(3, len(self.blocks)))
        tiers = self.rank.tiers
        chunks = tuple(
            chunk(
                number,
                self.blocks.pop(self.rng.randrange(len(self.blocks))),
                *self.rng.sample(tiers, self.rng.randint(0, len(tiers))),
            )
            for number in self.rng.sample(range(8), count)
        )
        return f"{prefix}{self.num_requests}", chunks

    def store(self) -> None:
        if self.blocks:
            name, chunks = self.new_chunks("store")
            for part in chunks:
                self.rank.fill(part.block_ids[0], part.key)
            self.held[name] = [part.block_ids[0] for part in chunks]
            self.num_stores += 1
            self.numbers[name] = self.num_stores
            self.rank.send(StoreChunks(name, chunks, self.num_stores))

    def end(self) -> None:
        if self.held:
            name = self.rng.choice(sorted(self.held))
            self.ending[name] = self.held.pop(name)

    def void(self) -> None:
        if self.held:
            name = self.rng.choice(sorted(self.held))
            self.rank.send(VoidStores(name))
            for block in self.held.pop(name):
                self.rank.cache[:, block] = self.rng.randrange(256)
                self.blocks.append(block)

    def load(self) -> None:
        if self.blocks:
            name, chunks = self.new_chunks("load")
            self.loading[name] = chunks
            self.rank.send(LoadChunks(name, chunks))

    def cancel(self) -> None:
        if self.loading and self.rng.random() < 0.3:
            self.rank.send(CancelLoad(self.rng.choice(sorted(self.loading))))

    def pause(self) -> None:
        if self.rng.random() < 0.1:
            self.rank.send(DropAll())
            self.has_reset = True
        elif self.rng.random() < 0.2:
            self.rank.wait(self.rng.choice([0.1, TIMEOUT_S]))

    def lose(self) -> None:
        if self.rank.stored:
            tier, key = self.rng.choice(sorted(self.rank.stored))
            del self.rank.stored[tier, key]
            self.rank.jobs.note_lost(tier, [key])

    def finish_task(self) -> None:
        task = self.rng.choice(self.rank.tasks)
        if self.rng.random() < 0.8:
            self.rank.finish(task)
        elif isinstance(task, LoadEntry):
            outcome = self.rng.choice([o for o in LoadOutcome if o is not LoadOutcome.LOADED])
            self.rank.pool.row(task.row)[:] = bytes(len(self.rank.pool.row(task.row)))
            if outcome is not LoadOutcome.FAILED:
                self.rank.stored.pop((task.tier, task.key), None)
            self.rank.finish(task, LoadResult(outcome, "made up"))
        elif isinstance(task, StoreEntry):
            failure = self.rng.choice([StoreOutcome.FAILED, StoreOutcome.DROPPED])
            self.rank.finish(task, StoreResult(failure, "made up"))
        else:
            self.rank.finish(task, CopyResult(reason="made up"))

    def check_events(self) -> None:
        for event in self.rank.events:
            if isinstance(event, StoresCopied):
                self.num_copied = event.number
            if not isinstance(event, LoadEnded):
                continue
            for part in self.loading.pop(event.request):
                if not event.reason:
                    assert self.rank.block(part.block_ids[0]) == self.rank.contents(part.key)
                self.blocks.append(part.block_ids[0])
        self.rank.events.clear()
        for name in [each for each in self.ending if self.numbers[each] <= self.num_copied]:
            self.blocks += self.ending.pop(name)

    def check_contents(self) -> None:
        """The rank reports what its tiers hold; of slower tiers, only what it met since the last
        reset.
        """
        in_pool = {("cpu", key_of(n)) for n in range(8) if key_of(n) in self.rank.pool}
        slower = {(tier, key) for tier, key in self.rank.reported if tier != "cpu"}
        assert self.rank.reported - slower == (in_pool if self.rank.keeps_rows else set())
        assert slower <= self.rank.stored.keys()
        if not self.has_reset:
            assert slower == self.rank.stored.keys()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_rows=st.integers(1, 6),
    keeps_rows=st.booleans(),
    num_tiers=st.integers(0, 2),
)
def test_whatever_happens_every_load_and_store_ends_once_and_no_wrong_byte_is_accepted(
    seed: int, num_rows: int, keeps_rows: bool, num_tiers: int
) -> None:
    rank = Rank(num_rows, ("disk", "object")[:num_tiers], keeps_rows)
    story = Story(rank, random.Random(seed))
    for _ in range(80):
        story.step()
    rank.wait(TIMEOUT_S)
    while rank.tasks:
        story.finish_task()
    story.check_events()
    story.check_contents()
    assert not story.loading
    assert not story.ending
    assert rank.jobs.is_idle
    rank.pool.clear()
    assert all(rank.pool.reserve(key_of(n)) is not None for n in range(num_rows)), "a row is lost"
