"""Tests of the pauses after failures of a storage. The test advances the clock."""

import pytest

from kvferry.testing.local import ManualClock
from kvferry.tiers.backoff import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    StorageHealth,
    StorageNotAsked,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def health(clock: ManualClock) -> StorageHealth:
    return StorageHealth(clock)


def is_allowed(health: StorageHealth) -> bool:
    try:
        health.check()
    except StorageNotAsked:
        return False
    return True


def test_a_storage_that_works_is_always_allowed(health: StorageHealth) -> None:
    assert is_allowed(health)
    health.succeeded()
    assert is_allowed(health)


def test_a_failure_stops_attempts_for_a_while(health: StorageHealth, clock: ManualClock) -> None:
    health.failed("disk full")
    with pytest.raises(StorageNotAsked, match="waiting after a failure: disk full"):
        health.check()
    clock.advance(FIRST_PAUSE_S - 0.5)
    assert not is_allowed(health)
    clock.advance(0.5)
    assert is_allowed(health)


def test_tolerated_failures_have_no_consequence_and_a_success_forgets_them(
    clock: ManualClock,
) -> None:
    health = StorageHealth(clock, tolerated=2)
    for _ in range(3):
        health.failed("slow")
        health.failed("slow")
        assert is_allowed(health)
        health.succeeded()
    for _ in range(3):
        health.failed("slow")
    assert not is_allowed(health)


def test_after_a_pause_one_caller_tries(health: StorageHealth, clock: ManualClock) -> None:
    health.failed("down")
    clock.advance(FIRST_PAUSE_S)
    assert [is_allowed(health), is_allowed(health)] == [True, False]
    clock.advance(FIRST_PAUSE_S)
    assert is_allowed(health), "a caller that never reported blocks all others for ever"


def test_pauses_double_up_to_the_longest(health: StorageHealth, clock: ManualClock) -> None:
    pauses = []
    for _ in range(6):
        health.failed("down")
        began = clock()
        while not is_allowed(health):
            clock.advance(1)
        pauses.append(clock() - began)
    assert pauses == [5, 10, 20, 40, MAX_PAUSE_S, MAX_PAUSE_S]


def test_attempts_that_fail_during_a_pause_do_not_prolong_it(
    health: StorageHealth, clock: ManualClock
) -> None:
    for _ in range(16):
        health.failed("down")
    clock.advance(4)
    health.failed("down")
    clock.advance(1)
    assert is_allowed(health)


def test_a_success_ends_the_pauses(health: StorageHealth, clock: ManualClock) -> None:
    health.failed("down")
    clock.advance(FIRST_PAUSE_S)
    assert is_allowed(health)
    health.succeeded()
    assert is_allowed(health)
    health.failed("down")
    clock.advance(FIRST_PAUSE_S)
    assert is_allowed(health)
