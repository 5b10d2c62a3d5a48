"""Tests every pair of transfer state and event: each has a defined next state or is reported as a
bug, and no transition frees blocks while bytes may still arrive in them.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LocalProtocolError
from kvferry.protocol.consumer.receiving import ON_ENTER
from kvferry.protocol.consumer.states import (
    IGNORED,
    TRANSITIONS,
    TransferEvent,
    TransferState,
    next_state,
)

FINAL = frozenset({TransferState.DONE, TransferState.FAILED, TransferState.ENDED})

FAILURE_EVENTS = (
    TransferEvent.REFUSED,
    TransferEvent.PEER_LOST,
    TransferEvent.DEADLINE_PASSED,
    TransferEvent.ABORTED,
)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(TransferState, TransferEvent)))
def test_every_state_meets_every_event(state: TransferState, event: TransferEvent) -> None:
    if (state, event) in TRANSITIONS:
        assert next_state(state, event) in TransferState
    else:
        with pytest.raises(LocalProtocolError, match=str(state)):
            next_state(state, event)


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(sorted(set(TransferState) - FINAL), FAILURE_EVENTS))
)
def test_trouble_can_come_in_any_state_that_is_not_final(
    state: TransferState, event: TransferEvent
) -> None:
    assert ((state, event) in TRANSITIONS) != ((state, event) in IGNORED)


def test_no_event_is_both_ignored_and_acted_on() -> None:
    assert not IGNORED & set(TRANSITIONS)


def test_entering_any_state_does_something() -> None:
    assert set(ON_ENTER) == set(TransferState)


@given(st.lists(st.sampled_from(TransferEvent)))
def test_only_a_confirmed_transfer_is_done(events: list[TransferEvent]) -> None:
    state = TransferState.TRACKED
    seen = []
    for event in events:
        if (state, event) in TRANSITIONS:
            state = next_state(state, event)
            seen.append(event)
    if state is TransferState.DONE:
        last = max(
            index
            for index, event in enumerate(seen)
            if event in (TransferEvent.CONFIRMED, TransferEvent.WRITES_REVOKED)
        )
        assert seen[last - 1] is TransferEvent.BYTES_MOVED
        assert not set(seen) & set(FAILURE_EVENTS)
        assert seen[last + 1 :] == [TransferEvent.PLACED]


def test_what_is_confirmed_is_not_lost_with_the_producer() -> None:
    for state in (TransferState.PLACING, TransferState.AWAITING_REVOKED):
        for event in set(FAILURE_EVENTS) - {TransferEvent.ABORTED}:
            assert (state, event) in IGNORED


STILL_WRITING = {
    TransferState.STOPPING: (
        TransferState.MOVING,
        {TransferEvent.BYTES_MOVED, TransferEvent.MOVE_FAILED},
    ),
    TransferState.REVOKING: (TransferState.FILLING, {TransferEvent.WRITES_REVOKED}),
    TransferState.DISCARDING: (
        TransferState.PLACING,
        {TransferEvent.PLACED, TransferEvent.PLACING_FAILED},
    ),
}
"""Maps each state in which blocks are still written to the state it is entered from and to the
events that end the writing, which are the only ways out.
"""


@pytest.mark.parametrize("state", STILL_WRITING)
def test_a_transfer_fails_only_when_nothing_writes_into_its_blocks_any_more(
    state: TransferState,
) -> None:
    before, ends = STILL_WRITING[state]
    assert next_state(before, TransferEvent.ABORTED) is state
    ways_out = {event: to for (at, event), to in TRANSITIONS.items() if at is state}
    assert ways_out == dict.fromkeys(ends, TransferState.FAILED)


def test_reads_in_flight_are_stopped_first() -> None:
    for event in (*FAILURE_EVENTS, TransferEvent.READ_FAILED):
        assert next_state(TransferState.MOVING, event) is TransferState.STOPPING


def test_final_states_lead_nowhere() -> None:
    assert not any(state in FINAL for state, _ in TRANSITIONS)
