"""Tests two real transfer workers whose caches have different memory orders: D's engine gets its
blocks in its own order, and only after they have been permuted.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from tests.worker.world import BLOCK_BYTES, LAYERS, World

from kvferry.events import TransferAbandoned, TransferFailed
from kvferry.protocol.consumer import receiving
from kvferry.protocol.planning.plan import BlockPermutation
from kvferry.transports.host_buffer import store as block_store
from kvferry.types import RequestId
from kvferry.worker.commands import AbortLoad

SHAPE, ARRIVED, WANTED = (4, 16), (16, 1), (1, 4)
"""A block is 4 rows of 16 bytes on P, and 16 rows of 4 bytes on D."""


def permutations(offsets: list[int], regions: int = LAYERS) -> list[BlockPermutation]:
    return [
        BlockPermutation(
            region, BLOCK_BYTES, np.array(offsets) * BLOCK_BYTES, 1, SHAPE, ARRIVED, WANTED
        )
        for region in range(regions)
    ]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(
        receiving,
        "plan_permutations",
        lambda local, remotes, blocks, *_: permutations(list(blocks[0])),
    )
    made = World()
    yield made
    for side in made.sides:
        side.close()


def pull(world: World) -> None:
    ticket = world.p.issue("a", [3, 4, 9])
    world.p.grant("a")
    world.d.track("r", ticket)
    world.d.start("r", [20, 7, 8], range(0, 12))


def test_blocks_arrive_in_our_order(world: World) -> None:
    pull(world)
    world.run()
    assert world.d.finished() == ["r"]
    theirs = world.p.memory[:, [3, 4, 9]].reshape(LAYERS, 3, *SHAPE)
    assert (
        world.d.memory[:, [20, 7, 8]].reshape(LAYERS, 3, *SHAPE[::-1]) == theirs.swapaxes(2, 3)
    ).all()
    assert not (world.d.memory[:, [20, 7, 8]] == world.p.memory[:, [3, 4, 9]]).all(), (
        "the order is the same on both sides"
    )
    assert not np.delete(world.d.memory, [20, 7, 8], axis=1).any()
    world.assert_quiescent()


def run_until_confirmed(world: World) -> None:
    """Run until P has freed the blocks; D learns of the confirmation in its next step."""
    for _ in range(100):
        world.d.step()
        world.p.step()
        if world.p.freed():
            return
    raise AssertionError(world.d.events)


def test_a_request_that_is_aborted_while_its_blocks_are_rearranged_ends_after_that(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_store, "STEP_BYTES", 1)
    pull(world)
    run_until_confirmed(world)
    world.d.step()
    assert world.d.transfer_worker.idle_s() == 0, (
        "its blocks are being rearranged, and that wants the next turn at once"
    )
    world.d.inbox.append(AbortLoad(RequestId("r")))
    world.run()
    kinds = [
        type(event)
        for event in world.d.events
        if isinstance(event, TransferAbandoned | TransferFailed)
    ]
    assert kinds == [TransferAbandoned, TransferFailed]
    assert world.d.finished() == []
    world.assert_quiescent()


def test_a_placement_that_leaves_our_memory_fails_the_request(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "plan_permutations", lambda *_: permutations([3], LAYERS + 1))
    pull(world)
    world.run()
    [reason] = world.d.failed()
    assert "region 3" in reason
    assert world.p.freed() == [("a", "confirmed")]
    world.assert_quiescent()
