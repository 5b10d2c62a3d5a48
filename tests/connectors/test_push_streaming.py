"""Tests push while the prompt is being computed: how many bytes have moved at each step, and what a
preemption costs.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from tests.connectors.pair import Blocks, EngineRequest, Slice, Step, step_until
from tests.connectors.test_push import (
    D_ID,
    P_ID,
    TOKENS,
    WAYS,
    Legs,
    closed,
    legs_between,
    push_side,
)

from kvferry.connectors.contract import RequestStatus
from kvferry.transports.memory import MemoryNetwork

BLOCK_BYTES = 3 * 4 * 16
"""The bytes of one block in all three layers."""


@pytest.fixture(
    params=[
        *((way, "") for way in WAYS),
        ("read", "p"),
        ("read", "d"),
        ("read", "pd"),
        ("written", "d"),
    ],
    ids=str,
)
def legs(request: pytest.FixtureRequest) -> Iterator[Legs]:
    """Two legs for each way to move bytes and each choice of sides that use a host buffer."""
    way, staged = request.param
    network = MemoryNetwork()
    p, d = (
        push_side(
            name, network, kv_lease_duration=600, force_host_buffer=name in staged, **WAYS[way]
        )
        for name in ("p", "d")
    )
    yield legs_between(p, d)
    closed(p, d)


class Prefill:
    """A prefill of ten tokens on P into blocks 5, 6, 7, four tokens at a time."""

    def __init__(self, legs: Legs, ticket: str, blocks: tuple[int, ...] = (5, 6, 7)) -> None:
        self.legs, self.blocks = legs, blocks
        self.request = EngineRequest(
            P_ID, TOKENS, {"do_remote_decode": True, "push_ticket": ticket}
        )
        legs.p.scheduler.on_new_request(self.request)

    def goes_on(self, computed: int) -> None:
        """Begin a step of P; `computed` tokens were computed before it."""
        self.legs.p.fill(list(self.blocks[: computed // 4]), seed=1)
        self.request.status, self.request.num_computed_tokens = RequestStatus.RUNNING, computed
        self.legs.p.step(Step((Slice(P_ID, computed, (self.blocks,)),)))

    def is_preempted(self) -> None:
        self.request.status, self.request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        self.legs.p.step(Step(()))

    def ends(self) -> None:
        self.legs.p.fill(list(self.blocks), seed=1)
        self.legs.p.prefill(self.request, list(self.blocks))

    def aborts(self) -> None:
        self.request.status = RequestStatus.FINISHED_ABORTED
        assert self.legs.p.scheduler.request_finished_all_groups(
            self.request, (list(self.blocks),)
        ) == (False, None)
        self.legs.p.step(Step(()))


class PrefillCounts:
    """Counts the bytes that have moved to D, from the metrics of both sides."""

    def __init__(self, legs: Legs) -> None:
        self.legs, self.moved = legs, 0

    def look(self) -> int:
        for side in (self.legs.d, self.legs.p):
            stats = side.worker.get_kv_connector_stats()
            self.moved += (
                0
                if stats is None
                else sum(row["bytes"] for row in stats.data.get("transports", {}).values())
            )
        return self.moved

    def until(self, blocks: int) -> None:
        step_until(lambda: self.look() == blocks * BLOCK_BYTES, self.legs.d, self.legs.p)


def test_each_full_block_moves_while_the_next_is_computed_and_only_the_last_is_left(
    legs: Legs,
) -> None:
    ticket, counted = legs.ticket(), PrefillCounts(legs)
    legs.begin(ticket)
    legs.registered()
    prefill = Prefill(legs, ticket)
    prefill.goes_on(0)
    prefill.goes_on(4)
    counted.until(blocks=1)
    prefill.goes_on(8)
    counted.until(blocks=2)
    assert D_ID not in legs.d.seen.finished_recving
    prefill.ends()
    legs.end()
    assert counted.look() == 3 * BLOCK_BYTES
    assert legs.d.seen.failed_recving == set()
    assert legs.has_arrived([1, 2, 3], [5, 6, 7])


def test_a_registration_that_comes_late_catches_up(legs: Legs) -> None:
    ticket, counted = legs.ticket(), PrefillCounts(legs)
    prefill = Prefill(legs, ticket)
    prefill.goes_on(4)
    prefill.goes_on(8)
    legs.begin(ticket)
    step_until(lambda: counted.look() == 2 * BLOCK_BYTES, legs.d, legs.p)
    prefill.ends()
    legs.end()
    assert legs.has_arrived([1, 2, 3], [5, 6, 7])


def test_with_a_local_prefix_only_what_comes_after_it_moves(legs: Legs) -> None:
    ticket, counted = legs.ticket(), PrefillCounts(legs)
    request = legs.arrive(ticket)
    legs.d.scheduler.get_num_new_matched_tokens(request, 4)
    legs.d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 6)
    legs.registered()
    prefill = Prefill(legs, ticket)
    prefill.goes_on(4)
    prefill.goes_on(8)
    counted.until(blocks=1)
    prefill.ends()
    legs.end()
    assert counted.look() == 2 * BLOCK_BYTES
    assert legs.has_arrived([2, 3], [6, 7])


def test_a_preempted_prefill_starts_again_in_other_blocks_and_nothing_of_the_first_is_used(
    legs: Legs,
) -> None:
    ticket, counted = legs.ticket(), PrefillCounts(legs)
    legs.begin(ticket)
    legs.registered()
    prefill = Prefill(legs, ticket)
    prefill.goes_on(4)
    prefill.goes_on(8)
    counted.until(blocks=2)
    prefill.is_preempted()
    legs.until("num_registrations", 1)
    for array in legs.p.memory.values():
        array[[5, 6, 7]] = 255
    prefill.blocks = (10, 11, 12)
    prefill.goes_on(4)
    counted.until(blocks=3)
    prefill.ends()
    legs.end()
    assert counted.look() == 5 * BLOCK_BYTES
    assert legs.d.seen.failed_recving == set()
    assert legs.has_arrived([1, 2, 3], [10, 11, 12])


def test_a_prefill_preempted_and_taken_up_again_at_once_in_other_blocks_is_read_anew(
    legs: Legs,
) -> None:
    """P found all its tokens in its prefix cache, so only the block ids show the preemption."""
    ticket, counted = legs.ticket(), PrefillCounts(legs)
    legs.begin(ticket)
    legs.registered()
    prefill = Prefill(legs, ticket)
    prefill.goes_on(8)
    counted.until(blocks=2)
    for array in legs.p.memory.values():
        array[[5, 6, 7]] = 255
    prefill.blocks = (10, 11, 12)
    prefill.goes_on(8)
    counted.until(blocks=4)
    prefill.ends()
    legs.end()
    assert counted.look() == 5 * BLOCK_BYTES
    assert legs.d.seen.failed_recving == set()
    assert legs.has_arrived([1, 2, 3], [10, 11, 12])


def test_a_prefill_that_is_aborted_halfway_fails_d_with_the_reason(legs: Legs) -> None:
    ticket, counted = legs.ticket(), PrefillCounts(legs)
    legs.begin(ticket)
    legs.registered()
    prefill = Prefill(legs, ticket)
    prefill.goes_on(8)
    counted.until(blocks=2)
    prefill.aborts()
    assert "the prefill leg ended as finished_aborted" in legs.failure()


@pytest.mark.parametrize("is_reading", [True, False])
def test_a_d_that_aborts_halfway_has_p_free_as_soon_as_it_has_computed(
    legs: Legs, is_reading: bool
) -> None:
    ticket, counted = legs.ticket(), PrefillCounts(legs)
    request = legs.begin(ticket)
    legs.registered()
    prefill = Prefill(legs, ticket)
    prefill.goes_on(8)
    if not is_reading:
        counted.until(blocks=2)
    request.status = RequestStatus.FINISHED_ABORTED
    legs.d.scheduler.request_finished(request, [1, 2, 3])
    step_until(lambda: D_ID in legs.d.seen.finished_recving, legs.d, legs.p)
    prefill.ends()
    legs.freed_p()


def test_a_d_that_needs_nothing_has_p_free_as_soon_as_it_has_computed(legs: Legs) -> None:
    ticket = legs.ticket()
    prefill = Prefill(legs, ticket)
    prefill.goes_on(8)
    request = legs.arrive(ticket)
    legs.d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 0)
    legs.d.step()
    prefill.goes_on(9)
    prefill.ends()
    legs.freed_p()
    assert legs.has_arrived([], [])


def test_without_blocks_that_are_full_nothing_is_published_before_the_end(legs: Legs) -> None:
    ticket, counted = legs.ticket(), PrefillCounts(legs)
    legs.begin(ticket)
    prefill = Prefill(legs, ticket)
    prefill.goes_on(3)
    prefill.ends()
    legs.end()
    assert counted.look() == 3 * BLOCK_BYTES
    assert all(
        np.array_equal(array[1], legs.p.memory[layer][5]) for layer, array in legs.d.memory.items()
    )


@pytest.mark.parametrize("computed", [4, 8, 10])
def test_blocks_that_d_has_given_back_are_never_written_whatever_p_does_afterwards(
    legs: Legs, computed: int
) -> None:
    """The blocks are filled with a canary in place of the data of their next owner."""
    ticket = legs.ticket()
    request = legs.begin(ticket)
    legs.registered()
    prefill = Prefill(legs, ticket)
    prefill.goes_on(min(computed, 8))
    if computed == 10:
        prefill.ends()
        legs.p.step()
    request.status = RequestStatus.FINISHED_ABORTED
    legs.d.scheduler.request_finished(request, [1, 2, 3])
    step_until(lambda: D_ID in legs.d.seen.finished_recving, legs.d, legs.p)
    for array in legs.d.memory.values():
        array[:] = 0xCA
    if computed < 10:
        prefill.goes_on(9)
        prefill.ends()
    legs.freed_p()
    again = legs.ticket("h2")
    legs.begin(again, name="next")
    legs.compute(again, name="of the next")
    step_until(
        lambda: (
            "next" in legs.d.seen.finished_recving and "of the next" in legs.p.seen.finished_sending
        ),
        legs.d,
        legs.p,
    )
    for layer, array in legs.d.memory.items():
        assert (array[[1, 2, 3]] == legs.p.memory[layer][[5, 6, 7]]).all(), (
            "the next owner has its own bytes"
        )
        assert (array[4:] == 0xCA).all()
        assert (array[0] == 0xCA).all()
