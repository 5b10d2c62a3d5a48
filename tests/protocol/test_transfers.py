"""Every state meets every event: a defined next state or a loud bug, and no way to leave bytes
landing in freed blocks.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LocalProtocolError
from kvferry.protocol.transfer import FINAL, TRANSITIONS, TransferEvent, TransferState, next_state

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
    assert (state, event) in TRANSITIONS


@given(st.lists(st.sampled_from(TransferEvent)))
def test_only_a_confirmed_transfer_is_done(events: list[TransferEvent]) -> None:
    state = TransferState.TRACKED
    seen = []
    for event in events:
        if (state, event) in TRANSITIONS:
            state = next_state(state, event)
            seen.append(event)
    if state is TransferState.DONE:
        confirmed = seen.index(TransferEvent.CONFIRMED)
        assert seen[confirmed - 1] is TransferEvent.BYTES_MOVED
        assert not set(seen[:confirmed]) & set(FAILURE_EVENTS)
        assert seen[-1] is TransferEvent.PLACED
        assert TransferEvent.ABORTED not in seen


def test_what_is_confirmed_is_not_lost_with_the_producer() -> None:
    for event in set(FAILURE_EVENTS) - {TransferEvent.ABORTED}:
        assert next_state(TransferState.PLACING, event) is TransferState.PLACING


def test_a_moving_transfer_stops_before_it_fails() -> None:
    for event in FAILURE_EVENTS:
        assert next_state(TransferState.MOVING, event) is TransferState.STOPPING
    assert next_state(TransferState.PLACING, TransferEvent.ABORTED) is TransferState.STOPPING
    assert {
        event
        for state, event in TRANSITIONS
        if state is TransferState.STOPPING and TRANSITIONS[state, event] in FINAL
    } == {
        TransferEvent.BYTES_MOVED,
        TransferEvent.MOVE_FAILED,
        TransferEvent.PLACED,
        TransferEvent.PLACING_FAILED,
    }


def test_final_states_lead_nowhere() -> None:
    assert not any(state in FINAL for state, _ in TRANSITIONS)
