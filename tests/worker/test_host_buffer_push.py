"""Tests a transfer worker with a host buffer whose engine preempts blocks while they are being
copied, and fills them with other content.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from tests.worker.world import LAYERS, Place, World

from kvferry.protocol.producer.producer import Producer
from kvferry.transports.host_buffer import store as mirror
from kvferry.types import RequestId
from kvferry.worker.commands import (
    AbortLoad,
    CloseStream,
    FailPush,
    OpenStream,
    PublishTicket,
    WithdrawStream,
    WorkerCommand,
)

A = RequestId("a")
OURS = [3, 4]


@pytest.fixture(autouse=True)
def _slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy one region per tick."""
    monkeypatch.setattr(mirror, "SLICE_BYTES", 1)


@pytest.fixture
def world() -> Iterator[World]:
    made = World(place_of_p=Place(uses_host_buffer=True))
    yield made
    for side in made.sides:
        side.close()


def copying(world: World) -> World:
    """P streams a prefill; its first two blocks are being copied to the host buffer."""
    ticket = world.p.issue("a", [*OURS, 5])
    world.p.inbox += [
        OpenStream(A, world.p.serial),
        PublishTicket(A, "h1", ticket, 8, (tuple(OURS),)),
    ]
    world.p.step()
    assert copied_layers(world) < LAYERS
    return world


def copied_layers(world: World) -> int:
    return int((world.p.mirror[:, OURS] == world.p.memory[:, OURS]).all(axis=(1, 2)).sum())


def known_to(world: World) -> np.ndarray:
    """Let P prepare to load two blocks from D, and return their content. The handshake is complete,
    and P knows that it may read.
    """
    world.d.memory[:] = np.random.default_rng(1).integers(
        1, 256, world.d.memory.shape, dtype=np.uint8
    )
    ticket = world.d.issue("b", [20, 21])
    world.d.grant("b")
    world.p.track("load", ticket)
    world.run()
    return world.d.memory[:, [20, 21]].copy()


def preempt_and_load(world: World) -> None:
    """Give the blocks to a request that loads KV. The withdrawal of the preempted request comes
    after the load command.
    """
    world.p.start("load", OURS, range(0, 8))
    world.p.inbox.append(WithdrawStream(A, world.p.serial))


def test_a_load_into_blocks_that_are_still_copied_for_a_preempted_prefill_waits_for_the_copy(
    world: World,
) -> None:
    content = known_to(world)
    copying(world)
    preempt_and_load(world)
    world.run(40)
    assert world.p.finished() == ["load"]
    assert (world.p.memory[:, OURS] == content).all()
    world.assert_quiescent()


def test_without_the_wait_the_copy_would_overwrite_what_was_loaded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the comparison above."""
    monkeypatch.setattr(Producer, "is_copying", lambda producer, blocks: False)
    content = known_to(world)
    copying(world)
    preempt_and_load(world)
    world.run(40)
    assert world.p.finished() == ["load"]
    assert not (world.p.memory[:, OURS] == content).all()


def test_what_the_engine_says_of_a_load_that_waits_is_said_in_order(world: World) -> None:
    known_to(world)
    copying(world)
    preempt_and_load(world)
    world.p.inbox.append(AbortLoad(RequestId("load")))
    world.run(40)
    assert (world.p.finished(), world.p.failed()) == ([], ["the request was aborted"]), (
        "blocks that were given come back once"
    )
    world.assert_quiescent()


@pytest.mark.parametrize("how", ["withdrawn", "withheld", "closed"])
def test_only_blocks_that_the_engine_has_kept_are_reported(world: World, how: str) -> None:
    commands: dict[str, list[WorkerCommand]] = {
        "withdrawn": [WithdrawStream(A, 1)],
        "withheld": [FailPush(A, "h1", "aborted")],
        "closed": [CloseStream(A, ((5,),))],
    }
    copying(world).p.inbox += commands[how]
    world.run()
    world.clock.advance(31)
    world.run()
    assert world.p.freed() == ([("a", "expired")] if how == "closed" else [])
    assert (world.p.mirror[:, 5] == world.p.memory[:, 5]).all() == (how == "closed")
    world.assert_quiescent()


def test_a_block_that_is_exposed_again_at_once_holds_what_the_next_prefill_computed(
    world: World,
) -> None:
    copying(world)
    world.p.memory[:, OURS] = 77
    ticket = world.p.issue("c", OURS)
    world.p.inbox += [
        WithdrawStream(A, 1),
        OpenStream(RequestId("c"), 2),
        PublishTicket(RequestId("c"), "h2", ticket, 8, (tuple(OURS),)),
    ]
    world.p.inbox.append(CloseStream(RequestId("c")))
    world.d.track("r", ticket)
    world.d.start("r", [8, 9], range(0, 8))
    world.run(40)
    assert world.d.finished() == ["r"]
    assert (world.d.memory[:, [8, 9]] == 77).all()
    world.assert_quiescent()
