from collections import OrderedDict
from dataclasses import dataclass
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.connectors.contract import KVCacheGroup
from kvferry.engine.cache.blocks import (
    BlockPool,
    BlockRequest,
    BlockTable,
    GroupTable,
    hash_block,
    hash_root,
)
from kvferry.engine.cache.prefix import find_prefix
from kvferry.errors import LocalProtocolError
from kvferry.protocol.tickets import NO_BLOCK


def chain(*blocks: list[int], salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    for tokens in blocks:
        hashes.append(hash_block(hashes[-1] if hashes else hash_root(salt), tokens))
    return hashes


def acquire(pool: BlockPool, count: int, shared: tuple[int, ...] = ()) -> list[int]:
    fresh = pool.acquire(shared, [BlockRequest(shared[-1] if shared else NO_BLOCK, count)])
    assert fresh is not None
    return fresh[0]


def find(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    return find_prefix(pool.published, [KVCacheGroup(())], hashes, len(hashes) + 1, 1).tables[0]


def test_a_hash_depends_on_tokens_parents_and_salt() -> None:
    assert chain([1, 2], [3, 4]) == chain([1, 2], [3, 4])
    others = [
        chain([1, 2], [4, 3]),
        chain([2, 1], [3, 4]),
        chain([1, 2], [3, 4], salt="tenant"),
        chain([0, 0], [3, 4]),
    ]
    assert len({hashes[-1] for hashes in [*others, chain([1, 2], [3, 4])]}) == 5


def test_a_fresh_pool_hands_out_a_run() -> None:
    pool = BlockPool(8)
    assert acquire(pool, 3) == [0, 1, 2]
    assert pool.num_used == 3


def test_too_few_free_blocks_change_nothing() -> None:
    pool = BlockPool(4)
    held = acquire(pool, 3)
    pool.publish(held[0], chain([1])[0])
    assert pool.acquire((held[0],), [BlockRequest(held[0], 2)]) is None
    assert pool.acquire((), [BlockRequest(held[2], 1), BlockRequest(NO_BLOCK, 1)]) is None
    pool.check([held])


def test_a_released_block_is_found_again_until_it_is_reused() -> None:
    pool = BlockPool(2)
    hashes = chain([1], [2])
    held = acquire(pool, 2)
    for block, block_hash in zip(held, hashes, strict=True):
        pool.publish(block, block_hash)
    pool.release(held)
    assert pool.num_used == 0
    assert find(pool, hashes) == held
    (reused,) = acquire(pool, 1)
    assert reused == held[1], "the tail goes first: it is worth less than the prefix"
    assert find(pool, hashes) == held[:1]


def test_blank_blocks_are_used_before_cached_ones() -> None:
    pool = BlockPool(3)
    (cached,) = acquire(pool, 1)
    pool.publish(cached, chain([1])[0])
    pool.release([cached])
    assert cached not in acquire(pool, 2)
    assert acquire(pool, 1) == [cached]
    assert find(pool, chain([1])) == []


def test_the_least_recently_freed_cached_block_is_reused_first() -> None:
    pool = BlockPool(2)
    first, second = acquire(pool, 2)
    pool.publish(first, chain([1])[0])
    pool.publish(second, chain([2])[0])
    pool.release([second])
    pool.release([first])
    assert acquire(pool, 1) == [second]


def test_a_shared_block_is_free_only_when_all_have_released_it() -> None:
    pool = BlockPool(4)
    held = acquire(pool, 1)
    pool.publish(held[0], chain([1])[0])
    assert acquire(pool, 1, shared=(held[0],)) == [1]
    pool.release(held)
    assert pool.num_used == 2
    pool.release([held[0], 1])
    assert pool.num_used == 0
    with pytest.raises(LocalProtocolError):
        pool.release(held)


def test_only_a_run_of_leading_hashes_counts_as_a_prefix() -> None:
    pool = BlockPool(4)
    hashes = chain([1], [2], [3])
    held = acquire(pool, 3)
    pool.publish(held[0], hashes[0])
    pool.publish(held[2], hashes[2])
    assert find(pool, hashes) == held[:1]


def test_extending_continues_the_run_when_the_next_block_is_blank() -> None:
    pool = BlockPool(8)
    held = acquire(pool, 2)
    other = acquire(pool, 1)
    pool.release(other)
    assert pool.acquire((), [BlockRequest(held[-1], 2)]) == [[2, 3]]
    assert BlockTable([GroupTable([0, 1]), GroupTable([NO_BLOCK, 2], 1)]).get_block_ids() == (
        [0, 1],
        [NO_BLOCK, 2],
    )


def test_fragments_come_in_ascending_order() -> None:
    pool = BlockPool(6)
    first, second = acquire(pool, 3), acquire(pool, 3)
    pool.release(second)
    pool.release(first)
    assert acquire(pool, 6) == [0, 1, 2, 3, 4, 5]


def test_the_first_block_of_a_hash_stays_its_block() -> None:
    pool = BlockPool(2)
    first, second = acquire(pool, 2)
    for block in (first, second):
        pool.publish(block, chain([1])[0])
    assert find(pool, chain([1])) == [first]
    pool.release([first, second])
    pool.check([])


def test_a_forgotten_block_is_never_found_again() -> None:
    pool = BlockPool(2)
    held = acquire(pool, 1)
    pool.publish(held[0], chain([1])[0])
    pool.release(held)
    pool.forget(held[0])
    pool.forget(held[0])
    assert find(pool, chain([1])) == []
    pool.check([])


def test_publishing_what_nobody_holds_is_a_bug() -> None:
    with pytest.raises(LocalProtocolError):
        BlockPool(1).publish(0, b"hash")


def test_the_check_notices_a_hold_nobody_accounts_for() -> None:
    pool = BlockPool(2)
    acquire(pool, 1)
    with pytest.raises(LocalProtocolError):
        pool.check([])


def test_each_group_of_a_sequence_gets_a_run_of_its_own() -> None:
    pool = BlockPool(12, num_groups=2)
    assert pool.acquire((), [BlockRequest(NO_BLOCK, 3), BlockRequest(NO_BLOCK, 2)]) == [
        [0, 1, 2],
        [3, 4],
    ]
    assert pool.acquire((), [BlockRequest(2, 1), BlockRequest(4, 2)]) == [[7], [5, 6]], (
        "what lies behind a run is left to the one who can continue it"
    )


def test_the_stock_of_blank_blocks_comes_from_the_least_recently_freed() -> None:
    pool = BlockPool(32)
    hashes = chain(*([number] for number in range(32)))
    held = acquire(pool, 32)
    for block, block_hash in zip(held, hashes, strict=True):
        pool.publish(block, block_hash)
    for block in held:
        pool.release([block])
    acquire(pool, 3)
    assert sorted(pool.published[0].values()) == held[6:], (
        "three are used, and an eighth of the rest is kept blank"
    )


@dataclass
class OldestFirst:
    """The control: blocks are reused in the order in which they were freed, whatever lies beside
    them.
    """

    free: OrderedDict[int, None]

    def acquire(self, block_requests: list[BlockRequest]) -> list[list[int]]:
        return [
            [self.free.popitem(last=False)[0] for _ in range(block_request.num_blocks)]
            for block_request in block_requests
        ]

    def release(self, blocks: list[int]) -> None:
        self.free.update(dict.fromkeys(reversed(blocks)))


def count_runs(tables: list[list[int]]) -> int:
    return sum(
        index == 0 or block != table[index - 1] + 1
        for table in tables
        for index, block in enumerate(table)
    )


def runs_after_a_long_life(seed: int, is_caching: bool) -> tuple[int, int]:
    """How many segments of adjacent blocks the prompts of two-group sequences got, from the pool
    and from the control, while other sequences grow and end at random.
    """
    rng, num_blocks = Random(seed), 1000
    pool, control = BlockPool(num_blocks, 2), OldestFirst(OrderedDict.fromkeys(range(num_blocks)))
    live: list[tuple[list[list[int]], list[list[int]]]] = []
    runs, control_runs, names = 0, 0, count()
    for _ in range(400):
        for ours, theirs in rng.sample(live, min(len(live), 6)):
            for tables, more in (
                (ours, pool.acquire((), [BlockRequest(table[-1], 1) for table in ours])),
                (theirs, control.acquire([BlockRequest(0, 1)] * 2)),
            ):
                assert more is not None
                for table, blocks in zip(tables, more, strict=True):
                    table += blocks
        block_requests = [
            BlockRequest(NO_BLOCK, rng.randint(20, 60)),
            BlockRequest(NO_BLOCK, rng.randint(4, 12)),
        ]
        while (
            pool.num_free < sum(block_request.num_blocks for block_request in block_requests) + 200
        ):
            ours, theirs = live.pop(rng.randrange(len(live)))
            for group, table in enumerate(ours):
                for block in table[: -1 if is_caching else 0]:
                    pool.publish(block, b"%d" % next(names), group)
                pool.release(table)
            for table in theirs:
                control.release(table)
        given = pool.acquire((), block_requests)
        assert given is not None
        live.append((given, control.acquire(block_requests)))
        runs, control_runs = runs + count_runs(live[-1][0]), control_runs + count_runs(live[-1][1])
    pool.check([table for ours, _ in live for table in ours])
    return runs, control_runs


@pytest.mark.parametrize(("is_caching", "factor"), [(False, 10), (True, 5)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_after_a_long_life_prompts_still_get_few_runs(
    seed: int, is_caching: bool, factor: int
) -> None:
    runs, control_runs = runs_after_a_long_life(seed, is_caching)
    assert runs * factor < control_runs, f"{runs} runs; oldest first makes {control_runs}"


class PoolMachine(RuleBasedStateMachine):
    """Holders acquire and release blocks at random; the pool's accounting always adds up."""

    @initialize(num_blocks=st.integers(1, 12))
    def build(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, num_groups=2)
        self.held: list[list[int]] = []
        self.names = 0

    @rule(count=st.integers(0, 5), others=st.lists(st.integers(0, 3), max_size=2), data=st.data())
    def acquire(self, count: int, others: list[int], data: st.DataObject) -> None:
        shared = data.draw(st.sampled_from([[], *self.held]))
        before = self.pool.num_free
        block_requests = [
            BlockRequest(shared[-1] if shared else NO_BLOCK, count),
            *(BlockRequest(NO_BLOCK, other) for other in others),
        ]
        fresh = self.pool.acquire(shared, block_requests)
        assert (fresh is None) == (before < count + sum(others))
        if fresh is not None:
            assert [len(blocks) for blocks in fresh] == [count, *others]
            blocks = [block for blocks in fresh for block in blocks]
            assert len({*blocks, *shared}) == len(blocks) + len(set(shared))
            self.held.append([*shared, *blocks])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        if blocks:
            self.names += data.draw(st.integers(0, 1))
            self.pool.publish(
                data.draw(st.sampled_from(blocks)), b"%d" % self.names, data.draw(st.integers(0, 1))
            )

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(block=st.integers(0, 11))
    def forget(self, block: int) -> None:
        if block < self.pool.num_blocks:
            self.pool.forget(block)

    @invariant()
    def books_add_up(self) -> None:
        self.pool.check(self.held)
        assert self.pool.num_used == len({block for blocks in self.held for block in blocks})


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 2**31), min_size=1), st.text())
def test_any_tokens_and_any_salt_can_be_hashed(tokens: list[int], salt: str) -> None:
    assert len(chain(tokens, salt=salt)[0]) == 16
