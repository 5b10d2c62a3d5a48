"""Tests that a rank reads every head it needs exactly once, from a rank that holds it, and that
every rank with a lease is contacted.
"""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.planning.heads import (
    RankMapping,
    can_divide,
    heads_of,
    heads_to_read,
    rank_mappings,
)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw the number of KV heads, of the consumer's ranks and of the producer's ranks."""
    total = draw(st.integers(1, 12))
    fitting = [size for size in range(1, 25) if can_divide(total, size)]
    return total, draw(st.sampled_from(fitting)), draw(st.sampled_from(fitting))


@given(sizes())
def test_each_rank_reads_each_of_its_heads_once_from_a_rank_that_holds_it(
    shape: tuple[int, int, int],
) -> None:
    total, size, remote_size = shape
    for rank in range(size):
        reads = {
            rank_mapping.rank: heads_to_read(rank, size, rank_mapping.rank, remote_size, total)
            for rank_mapping in rank_mappings(rank, size, remote_size, total)
        }
        assert sorted(head for heads in reads.values() for head in heads) == list(
            heads_of(rank, size, total)
        )
        assert all(
            head in heads_of(remote, remote_size, total)
            for remote, heads in reads.items()
            for head in heads
        )


@given(sizes())
def test_every_rank_of_the_producer_is_visited_and_all_visitors_know_of_each_other(
    shape: tuple[int, int, int],
) -> None:
    total, size, remote_size = shape
    planned = {
        rank: {
            rank_mapping.rank: rank_mapping
            for rank_mapping in rank_mappings(rank, size, remote_size, total)
        }
        for rank in range(size)
    }
    for remote in range(remote_size):
        consumer_ranks = tuple(rank for rank in range(size) if remote in planned[rank])
        assert consumer_ranks
        assert all(
            planned[rank][remote].consumer_ranks == consumer_ranks for rank in consumer_ranks
        )


@given(sizes())
def test_equal_sizes_pair_up(shape: tuple[int, int, int]) -> None:
    total, size, _ = shape
    for rank in range(size):
        assert rank_mappings(rank, size, size, total) == (RankMapping(rank, (rank,)),)
        assert heads_to_read(rank, size, rank, size, total) == heads_of(rank, size, total)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_sizes_that_do_not_fit_are_left_to_the_handshake_to_refuse(
    total: int, size: int, remote_size: int
) -> None:
    for rank in range(size):
        assert all(
            0 <= rank_mapping.rank < remote_size and rank in rank_mapping.consumer_ranks
            for rank_mapping in rank_mappings(rank, size, remote_size, total)
        )


def test_a_rank_that_has_nothing_for_us_is_visited_by_one_of_ours() -> None:
    assert rank_mappings(0, 1, 4, 2) == (
        RankMapping(0, (0,)),
        RankMapping(1, (0,)),
        RankMapping(2, (0,)),
        RankMapping(3, (0,)),
    )
    assert [heads_to_read(0, 1, remote, 4, 2) for remote in range(4)] == [
        range(0, 1),
        range(0),
        range(1, 2),
        range(0),
    ]


def test_a_rank_attaches_to_every_rank_that_holds_kv_heads_or_parts_of_a_state_for_it() -> None:
    # One KV head, which our ranks 0 and 1 read from ranks 0 and 2, and a state of four heads.
    visited = [[each.rank for each in rank_mappings(rank, 2, 4, 1, 4)] for rank in range(2)]
    assert visited == [[0, 1], [2, 3]]
    assert [heads_to_read(0, 2, remote, 4, 4) for remote in (0, 1)] == [range(0, 1), range(1, 2)]


def test_ranks_that_share_a_head_spread_over_those_that_hold_it() -> None:
    assert [rank_mappings(rank, 4, 2, 1)[0].rank for rank in range(4)] == [0, 0, 1, 1]
