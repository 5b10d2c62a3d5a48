"""Tests the free list that keeps free blocks as segments of adjacent blocks."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.engine.cache.blocks import FreeExtents


def runs_of(blocks: set[int]) -> list[range]:
    starts = sorted(block for block in blocks if block - 1 not in blocks)
    ends = sorted(block + 1 for block in blocks if block + 1 not in blocks)
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]


class RunsMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(0, 40))
    def build(self, num_blocks: int) -> None:
        self.runs = FreeExtents(num_blocks)
        self.free = set(range(num_blocks))
        self.taken: set[int] = set()

    def leave(self, blocks: set[int]) -> None:
        assert blocks <= self.free
        self.free -= blocks
        self.taken |= blocks

    @rule(count=st.integers(0, 20))
    def take(self, count: int) -> None:
        longest = max(map(len, runs_of(self.free)), default=0)
        got = self.runs.take(count)
        assert sum(map(len, got)) == min(count, len(self.free))
        if 0 < count <= longest:
            assert len(got) == 1 or longest < 2 * count, (
                "a run that is surely long enough is not missed"
            )
        self.leave({block for run in got for block in run})

    @precondition(lambda self: self.taken)
    @rule(count=st.integers(0, 5), data=st.data())
    def take_after(self, count: int, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.taken)))
        got = self.runs.take_after(block, count)
        assert all(first == block + 1 + index for index, first in enumerate(got))
        assert len(got) == count or block + 1 + len(got) not in self.free
        self.leave(set(got))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.taken)))
        self.taken.remove(block)
        self.free.add(block)
        self.runs.add(block)

    @invariant()
    def holds_exactly_the_free_blocks(self) -> None:
        if hasattr(self, "runs"):
            assert sorted(self.runs) == sorted(self.free)
            assert len(self.runs) == len(self.free)


TestRuns = RunsMachine.TestCase
TestRuns.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_small_needs_use_up_small_runs_and_leave_the_long_ones_whole() -> None:
    runs = FreeExtents(20)
    runs.take(20)
    for block in (3, *range(8, 20)):
        runs.add(block)
    assert runs.take(1) == [range(3, 4)]
    assert runs.take(12) == [range(8, 20)]


def test_a_need_that_no_run_meets_takes_the_longest_first() -> None:
    runs = FreeExtents(20)
    runs.take(20)
    for block in (0, 3, 4, 5, 6, 9, 10):
        runs.add(block)
    assert runs.take(5) == [range(3, 7), range(0, 1)]
