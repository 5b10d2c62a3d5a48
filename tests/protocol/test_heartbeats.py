"""Tests that one heartbeat renews all leases of a peer, and that a silent peer is detected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.heartbeats import DueHeartbeat, HeartbeatSchedule, heartbeat_interval_s
from kvferry.types import RequestId

A, B = RequestId("a"), RequestId("b")


@pytest.mark.parametrize(
    ("lease_ttl_s", "interval_s"), [(30, 5), (60, 10), (6, 1), (13, 2), (3, 0.5)]
)
def test_the_interval_is_a_sixth_of_the_lease(lease_ttl_s: float, interval_s: float) -> None:
    assert heartbeat_interval_s(lease_ttl_s) == interval_s


def test_one_beat_carries_all_leases_of_a_peer() -> None:
    beats: HeartbeatSchedule[str] = HeartbeatSchedule()
    beats.track("p", A, 5, now=0)
    beats.track("p", B, 5, now=1)
    beats.track("q", A, 5, now=1)
    assert beats.due(now=4) == []
    assert beats.due(now=5) == [DueHeartbeat("p", 1, [A, B])]
    assert beats.next_deadline() == 6


def test_a_lease_read_twice_is_renewed_until_both_are_done() -> None:
    beats: HeartbeatSchedule[str] = HeartbeatSchedule()
    beats.track("p", A, 5, now=0)
    beats.track("p", A, 5, now=0)
    beats.untrack("p", A)
    assert beats.due(now=5) == [DueHeartbeat("p", 1, [A])]
    beats.untrack("p", A)
    beats.untrack("p", A)
    beats.untrack("q", A)
    assert beats.due(now=50) == []
    assert beats.next_deadline() is None


def test_a_peer_that_stays_silent_is_lost_and_one_that_answers_is_not() -> None:
    beats: HeartbeatSchedule[str] = HeartbeatSchedule(max_unanswered=3)
    beats.track("p", A, 1, now=0)
    for now in (1, 2, 3):
        beats.due(now)
        assert beats.lost(now) == []
    beats.answered("p", 2)
    assert beats.lost(4) == ["p"]
    beats.answered("p", 3)
    beats.answered("q", 3)
    assert beats.lost(4) == []
    beats.forget("p")
    assert beats.next_deadline() is None


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 10)), min_size=1))
def test_no_tracked_lease_goes_longer_than_its_interval_without_a_beat(
    tracked: list[tuple[int, float]],
) -> None:
    beats: HeartbeatSchedule[int] = HeartbeatSchedule()
    wanted = {}
    for number, (peer, interval_s) in enumerate(tracked):
        beats.track(peer, RequestId(str(number)), interval_s, now=0)
        wanted[number] = (peer, interval_s)
    wake = beats.next_deadline()
    assert wake is not None
    assert wake <= min(interval_s for _, interval_s in wanted.values())
    for beat in beats.due(10):
        assert {int(lease) for lease in beat.leases} == {
            n for n, (peer, _) in wanted.items() if peer == beat.peer
        }
