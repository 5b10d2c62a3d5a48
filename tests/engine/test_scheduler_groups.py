"""Tests how the scheduler handles several KV-cache groups, some of them with a sliding window.
Blocks hold 4 tokens unless a test says otherwise.
"""

import pytest
from tests.engine.scripted import (
    FULL,
    PROMPT,
    Rig,
    Script,
    assert_quiescent,
    make_limits,
    make_request,
    predict,
    window,
)

from kvferry.connectors.contract import KVCacheGroup
from kvferry.engine.messages import SequenceSlice
from kvferry.protocol.tickets import NO_BLOCK

LONG = list(range(1, 41))
HYBRID = (FULL, window(6))


def holes(table: tuple[int, ...] | list[int]) -> int:
    """Number of holes in a block table; all holes must come first."""
    count = sum(block == NO_BLOCK for block in table)
    assert list(table[:count]) == [NO_BLOCK] * count
    return count


def only(slices: tuple[SequenceSlice, ...]) -> SequenceSlice:
    (part,) = slices
    return part


def test_a_window_gives_back_what_no_later_token_looks_at() -> None:
    rig = Rig(make_limits(groups=HYBRID, max_num_batched_tokens=8), has_connector=False)
    rig.add(make_request("a", LONG[:24], max_tokens=1))
    seen = [[holes(table) for table in only(rig.step().slices).block_ids] for _ in range(3)]
    assert seen == [[0, 0], [0, 0], [0, 2]], "tokens 8 and 16 look back to tokens 3 and 11"
    assert_quiescent(rig)


def test_a_long_prompt_never_holds_more_than_its_window_and_one_chunk() -> None:
    rig = Rig(
        make_limits(groups=HYBRID, max_num_batched_tokens=8, num_blocks=40), has_connector=False
    )
    rig.add(make_request("a", LONG, max_tokens=20))
    most = 0
    while rig.scheduler.wants_step:
        tables = [part.block_ids[1] for part in rig.step().slices]
        most = max([most, *(len(table) - holes(table) for table in tables)])
    assert most == 4 <= rig.limits.max_held_blocks[1]
    assert rig.tokens_of("a") == predict(rig.requests["a"])
    assert_quiescent(rig)


def test_all_groups_take_from_one_pool() -> None:
    rig = Rig(make_limits(groups=HYBRID), has_connector=False)
    rig.add(make_request("a", PROMPT))
    first, second = only(rig.step().slices).block_ids
    assert not set(first) & set(second)
    assert rig.scheduler.status().num_used_blocks == 6


def test_a_cached_prefix_is_used_though_the_window_has_let_go_of_its_beginning() -> None:
    rig = Rig(
        make_limits(groups=HYBRID, max_num_batched_tokens=8, num_blocks=40), has_connector=False
    )
    rig.add(make_request("a", LONG[:24], max_tokens=1))
    rig.run()
    rig.add(make_request("b", [*LONG[:22], 49], max_tokens=1))
    part = only(rig.step().slices)
    assert part.start == 20
    assert [holes(table) for table in part.block_ids] == [0, 3]
    assert rig.last["b"].num_cached_tokens == 20
    assert_quiescent(rig)


def test_a_prefix_is_as_long_as_all_groups_can_use_it() -> None:
    """The pool is so small that a second prompt takes the first blocks that the window group gave
    back; the full-attention group still has all its blocks.
    """
    rig = Rig(
        make_limits(groups=HYBRID, max_num_batched_tokens=8, num_blocks=11, max_model_len=33),
        has_connector=False,
    )
    rig.add(make_request("a", LONG[:24], max_tokens=1))
    rig.run()
    rig.add(make_request("other", range(40, 44), max_tokens=1))
    rig.run()
    rig.add(make_request("b", LONG[:13], max_tokens=1))
    part = only(rig.step().slices)
    assert part.start < 12, "the window's blocks for token 12 are gone"
    rig.run()
    assert rig.tokens_of("b") == predict(rig.requests["b"])


def test_the_same_tokens_are_different_blocks_in_different_groups() -> None:
    rig = Rig(make_limits(groups=(FULL, FULL)), has_connector=False)
    for name in "ab":
        rig.add(make_request(name, PROMPT, max_tokens=1))
        part = only(rig.step().slices)
    assert part.start == 8
    assert not set(part.block_ids[0]) & set(part.block_ids[1])


def test_a_load_takes_only_the_blocks_that_the_next_token_looks_at() -> None:
    rig = Rig(make_limits(groups=HYBRID, num_blocks=40))
    rig.add(make_request("a", LONG), Script(available_tokens=39))
    rig.step()
    load = rig.connector.loads["a"]
    assert [holes(table) for table in load.tables] == [0, 8], "token 39 looks back to token 34"
    assert [len(table) for table in load.tables] == [10, 10]
    assert rig.scheduler.status().num_used_blocks == 12
    rig.end_load("a")
    rig.run()
    assert rig.tokens_of("a") == predict(rig.requests["a"])
    assert_quiescent(rig)


def test_a_whole_prompt_that_is_loaded_keeps_what_its_last_token_looks_at() -> None:
    """Token 40 would attend back to token 36; token 39, which is computed again, to token 35."""
    rig = Rig(make_limits(groups=(FULL, window(5)), num_blocks=40))
    rig.add(make_request("a", LONG), Script(available_tokens=40))
    rig.step()
    assert holes(rig.connector.loads["a"].tables[1]) == 8
    rig.end_load("a")
    rig.run()
    assert rig.tokens_of("a") == predict(rig.requests["a"])


def test_a_load_behind_a_local_prefix_drops_what_its_end_does_not_look_at() -> None:
    rig = Rig(make_limits(groups=HYBRID, num_blocks=40))
    rig.add(make_request("a", LONG[:17], max_tokens=1))
    rig.run()
    rig.add(make_request("b", LONG[:23]), Script(available_tokens=22))
    rig.step()
    load = rig.connector.loads["b"]
    assert (load.start, load.end) == (16, 22)
    assert [holes(table) for table in load.tables] == [0, 4]
    rig.end_load("b")
    rig.run()
    assert rig.tokens_of("b") == predict(rig.requests["b"])
    assert_quiescent(rig)


def load_with_small_producer_blocks(prompt: list[int], available_tokens: int, size: int) -> Rig:
    """Load a prompt from a P whose blocks hold 2 tokens into a D whose blocks hold 8. Of the D
    block in which the window begins, P has only the last tokens.
    """
    rig = Rig(
        make_limits(groups=(FULL, window(size)), block_size=8, num_blocks=40), producer_block_size=2
    )
    rig.add(make_request("a", prompt, max_tokens=1), Script(available_tokens=available_tokens))
    rig.step()
    rig.end_load("a")
    rig.run()
    assert rig.tokens_of("a") == predict(rig.requests["a"])
    return rig


def test_a_loaded_block_in_which_the_window_begins_is_never_found_by_others() -> None:
    """Token 34 attends back to token 29, so of block 3 (tokens 24 to 31) P had only 28 to 31. Token
    32 of the second request would attend back to token 27.
    """
    rig = load_with_small_producer_blocks(LONG, 34, size=6)
    rig.add(make_request("b", [*LONG[:32], 49], max_tokens=1))
    assert only(rig.step().slices).start == 0
    rig.run()
    assert rig.tokens_of("b") == predict(rig.requests["b"])
    assert_quiescent(rig)


def test_nor_is_it_found_with_the_help_of_a_block_that_somebody_else_computed() -> None:
    """With a window of 12, token 34 attends back to token 23, so P had tokens 22 to 34. Block 1
    comes from a shorter prompt that was computed here.
    """
    rig = Rig(
        make_limits(groups=(FULL, window(12)), block_size=8, num_blocks=40), producer_block_size=2
    )
    rig.add(make_request("short", LONG[:17], max_tokens=1))
    rig.run()
    rig.add(make_request("a", LONG, max_tokens=1), Script(available_tokens=34))
    rig.step()
    assert rig.connector.loads["a"].start == 16
    rig.end_load("a")
    rig.run()
    rig.add(make_request("b", [*LONG[:24], 49], max_tokens=1))
    assert only(rig.step().slices).start == 16, (
        "token 24 would look back to token 13, through block 1 into block 2"
    )
    assert rig.tokens_of("b") == predict(rig.requests["b"])


def test_a_loaded_block_that_begins_within_the_window_is_found() -> None:
    """The control: if the window begins at a block boundary, the loaded block is complete, and
    other requests compute none of it.
    """
    rig = load_with_small_producer_blocks(LONG, 32, size=9)
    rig.add(make_request("b", [*LONG[:32], 49], max_tokens=1))
    assert only(rig.step().slices).start == 32
    assert rig.tokens_of("b") == predict(rig.requests["b"])


def test_a_block_that_was_loaded_in_part_and_then_computed_to_its_end_is_not_found_either() -> None:
    """With a window of 2, token 20 attends back to token 19: of block 2 (tokens 16 to 23) P had 18
    and 19, and D computed 20 to 23.
    """
    rig = load_with_small_producer_blocks(LONG[:25], 20, size=2)
    rig.add(make_request("b", [*LONG[:24], 49], max_tokens=1))
    assert only(rig.step().slices).start == 0
    rig.run()
    assert rig.tokens_of("b") == predict(rig.requests["b"])


def test_a_finished_request_hands_over_a_table_per_group_with_holes() -> None:
    rig = Rig(make_limits(groups=HYBRID, num_blocks=40, max_num_batched_tokens=32))
    rig.add(make_request("p", LONG, max_tokens=1), Script(is_delayed=True))
    rig.run()
    # Ten blocks of the full group, and the blocks of the window group that token 39 attends to,
    # from token 34 on. The peer computes token 39 again.
    assert len(rig.lent["p"]) == 10 + 2
    assert rig.scheduler.status().num_used_blocks == 12
    rig.end_sending("p")
    rig.step()
    assert_quiescent(rig)


def test_what_was_computed_from_an_invalid_block_of_any_group_counts_for_nothing() -> None:
    rig = Rig(make_limits(groups=HYBRID, num_blocks=40))
    rig.add(make_request("a", LONG[:12]), Script(available_tokens=11))
    rig.add(make_request("b", LONG[:3]))
    rig.step()
    rig.news.invalid_block_ids = {rig.connector.loads["a"].tables[1][-1], NO_BLOCK, 10_000}
    rig.step()
    rig.end_load("a")
    rig.run()
    assert rig.last["a"].finish_reason == "error"
    assert rig.tokens_of("b") == predict(rig.requests["b"]), "a hole is nobody's block"
    assert_quiescent(rig)


def test_blocks_that_a_window_gives_back_save_others_from_being_preempted() -> None:
    limits = make_limits(groups=(window(4),), num_blocks=6, max_num_batched_tokens=12)
    rig = Rig(limits, has_connector=False)
    for name in "ab":
        rig.add(make_request(name, [ord(name) % 50, *LONG[:7]], max_tokens=20))
    rig.run()
    assert rig.scheduler.counters.preemptions == 0
    assert all(rig.tokens_of(name) == predict(rig.requests[name]) for name in "ab")
    assert_quiescent(rig)


@pytest.mark.parametrize(
    ("groups", "budget", "most"),
    [
        ((FULL,), 8, 40),
        ((FULL, FULL), 8, 20),
        (
            (FULL, window(6)),
            8,
            24,
        ),  # a step sees 13 tokens: at worst 4 blocks; 6 are left for the other group
        ((FULL, window(6), window(6)), 4, 16),  # 9 tokens: at worst 3 blocks, twice; 4 are left
        ((FULL, KVCacheGroup((), attention_chunk=6)), 8, 24),
        ((window(6),), 8, 63),  # the model's limit
    ],
)
def test_the_longest_prompt_that_is_taken_runs_in_an_empty_cache(
    groups: tuple[KVCacheGroup, ...], budget: int, most: int
) -> None:
    rig = Rig(
        make_limits(groups=groups, num_blocks=10, max_num_batched_tokens=budget),
        has_connector=False,
    )
    rig.add(make_request("fits", [1] * most, max_tokens=1))
    rig.run()
    assert rig.last["fits"].finish_reason == "length"
    assert rig.scheduler.counters.preemptions == 0
    rig.add(make_request("longer", [1] * (most + 1), max_tokens=1))
    assert rig.last["longer"].error_status == 400
    assert_quiescent(rig)


def test_prompts_that_are_not_cut_count_whole_in_every_group() -> None:
    limits = make_limits(
        groups=HYBRID, num_blocks=10, max_num_batched_tokens=8, enable_chunked_prefill=False
    )
    assert limits.max_total_tokens == 21
