"""Tests what `OffloadingConnector` stores and how long it keeps blocks: preemption, sliding windows
and resets.
"""

import pytest
from tests.connectors.offloading_side import FULL, TOKENS, WINDOW, Side, Start, probe
from tests.connectors.pair import Blocks, Slice

from kvferry.connectors.contract import KVCacheGroup
from kvferry.connectors.offloading.metadata import EndStores
from kvferry.errors import ConfigError
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.tiers.commands import VoidStores

# -- blocks --


def test_a_request_that_finishes_during_its_copies_keeps_its_blocks(start: Start) -> None:
    side = start()
    side.copiers[0].saves.clear()
    request = side.arrive("a", TOKENS)
    request.num_computed_tokens = len(TOKENS)
    tables = ([1, 2, 3, 4, 5],)
    for _ in range(20):
        side.step(Slice("a", 18, ((1, 2, 3, 4, 5),)))
    assert side.scheduler.request_finished_all_groups(request, tables) == (True, None)
    side.step()
    assert side.commands_of(EndStores) == [EndStores("a", 1)]
    assert side.scheduler.has_pending_block_frees()
    assert not side.freed
    side.copiers[0].saves.set()
    side.step_until(lambda: side.freed == {"a"})
    assert not side.scheduler.has_pending_block_frees()
    assert side.ask(side.arrive("b", TOKENS)) == 16


def test_a_preempted_request_stores_its_prompt_when_it_has_computed_it_again(start: Start) -> None:
    side = start()
    side.copiers[0].saves.clear()
    request = side.arrive("a", TOKENS)
    side.step(Slice("a", 18, ((1, 2, 3, 4, 5),)))
    assert not side.scheduler.needs_slices("a")
    side.step(preempted=["a"])
    assert side.commands_of(VoidStores) == [VoidStores("a")]
    # The engine computes another request in the same blocks.
    side.fill([1, 2, 3] * 6, [1, 2, 3, 4])
    side.copiers[0].saves.set()
    assert side.scheduler.needs_slices("a")
    side.step_until(lambda: "probe" in probe(side))
    side.fill(TOKENS, [6, 7, 8, 9, 10])
    request.num_computed_tokens = 18
    side.step(Slice("a", 18, ((6, 7, 8, 9, 10),)))
    side.finish(request, [6, 7, 8, 9, 10])
    check_loads(side, TOKENS)


def check_loads(side: Side, tokens: list[int]) -> None:
    request = side.arrive("check", tokens)
    assert side.ask(request) == 16
    side.load(request, 16, [11, 12, 13, 14])
    assert all(side.has(tokens, index, [11, 12, 13, 14]) for index in range(4))


def test_a_request_that_was_preempted_and_then_aborted_stores_nothing(start: Start) -> None:
    """The engine reports the preemption with the next step, after the abort."""
    side = start()
    side.copiers[0].saves.clear()
    request = side.arrive("a", TOKENS)
    side.step(Slice("a", 18, ((1, 2, 3, 4, 5),)))
    request.num_computed_tokens = 0
    assert not side.finish(request, [])
    side.fill([1, 2, 3] * 6, [1, 2, 3, 4])
    side.step(preempted=["a"])
    side.copiers[0].saves.set()
    probe(side)
    assert side.ask(side.arrive("b", TOKENS)) == 0


# -- sliding windows --

TABLES = ((1, 2, 3, 4, 5), (21, 22, 23, 24, 25))


def test_a_window_that_moves_on_during_a_copy_makes_the_store_void(start: Start) -> None:
    side = start(groups=(FULL, WINDOW))
    side.copiers[0].saves.clear()
    request = side.arrive("a", TOKENS)
    side.fill(TOKENS, *TABLES)
    side.step(Slice("a", 18, TABLES))
    for _ in range(20):
        side.step(Slice("a", 19, TABLES))
    moved = (TABLES[0], (NO_BLOCK, NO_BLOCK, 23, 24, 25))
    side.step(Slice("a", 22, moved))
    (void,) = side.commands_of(VoidStores)
    assert len(void.keys) == 2
    side.fill([1, 2, 3] * 6, [], [21, 22])
    side.copiers[0].saves.set()
    side.step_until(lambda: not side.scheduler.needs_slices("a"), Slice("a", 22, moved))
    request.num_computed_tokens = 22
    assert not side.finish(request, *moved)
    # The token after the prefix sees the chunks 2 and 3 of the window, and only a shorter prefix
    # would need those that are void.
    check_windows(side)


def check_windows(side: Side) -> None:
    request = side.arrive("check", TOKENS)
    assert side.ask(request) == 16
    side.load(request, 16, [11, 12, 13, 14], [NO_BLOCK, NO_BLOCK, 16, 17])
    assert all(
        side.has(TOKENS, index, [11, 12, 13, 14], [NO_BLOCK, NO_BLOCK, 16, 17])
        for index in range(4)
    )
    shorter = side.arrive("shorter", TOKENS[:9])
    assert side.ask(shorter) == 0


def test_a_running_request_that_a_step_leaves_out_makes_its_window_void(start: Start) -> None:
    """The engine may have freed blocks of its window, and does not show them."""
    side = start(groups=(FULL, WINDOW))
    side.copiers[0].saves.clear()
    side.arrive("a", TOKENS)
    side.fill(TOKENS, *TABLES)
    side.step(Slice("a", 18, TABLES))
    side.step()
    side.step()
    (void,) = side.commands_of(VoidStores)
    assert len(void.keys) == 4


def test_with_a_window_the_last_token_is_left_out(start: Start) -> None:
    """The engine computes it again, and it sees one token more than the token after it."""
    side = start(groups=(FULL, KVCacheGroup(("layer.2",), sliding_window=5)))
    prompt = TOKENS[:16]
    side.run("a", prompt, [1, 2, 3, 4], [21, 22, 23, 24])
    assert side.ask(side.arrive("b", prompt)) == 15
    # Of another prompt, the blocks that only the last token sees have left the window.
    other = [*range(16)]
    side.run("c", other, [1, 2, 3, 4], [NO_BLOCK, NO_BLOCK, NO_BLOCK, 24])
    assert side.ask(side.arrive("d", other)) == 0
    assert side.ask(side.arrive("e", [*other, 1])) == 16


def test_a_model_with_windows_has_chunks_of_one_block(start: Start) -> None:
    with pytest.raises(ConfigError, match="sliding windows"):
        start(groups=(FULL, WINDOW), extra={"blocks_per_chunk": 2})


# -- reset --


def test_after_a_reset_no_request_of_before_loads_or_stores(start: Start) -> None:
    side = start(extra={"offload_prompt_only": False})
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    side.copiers[0].loads.clear()
    loading, waiting, running = (side.arrive(name, TOKENS) for name in ("b", "c", "d"))
    assert side.ask(loading) == side.ask(waiting) == 16
    side.scheduler.update_state_after_alloc(loading, Blocks(([11, 12, 13, 14],)), 16)
    side.step()
    side.scheduler.reset_cache()
    side.copiers[0].loads.set()
    side.step_until(lambda: "b" in side.loaded | side.failed)
    side.commands.clear()
    for request in (loading, waiting, running):
        assert side.ask(request) == 0
        request.num_computed_tokens = 18
        side.step(Slice(request.request_id, 18, ((1, 2, 3, 4, 5),)))
        assert not side.finish(request, [1, 2, 3, 4, 5])
    assert not side.commands
    assert side.ask(side.arrive("e", TOKENS)) == 0, "the pool was cleared"


def test_a_withdrawn_request_stores_nothing(start: Start) -> None:
    side = start()
    side.copiers[0].saves.clear()
    request = side.arrive("a", TOKENS)
    side.step(Slice("a", 10, ((1, 2, 3),)))
    side.scheduler.withdraw("a")
    side.step(Slice("a", 18, ((1, 2, 3, 4, 5),)))
    request.num_computed_tokens = 18
    assert not side.finish(request, [1, 2, 3, 4, 5])
    side.copiers[0].saves.set()
    probe(side)
    assert side.ask(side.arrive("b", TOKENS)) == 0
