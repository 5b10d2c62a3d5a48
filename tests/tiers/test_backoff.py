"""Tests of the pauses after failures of a storage. The test advances the clock."""

import pytest

from kvferry.testing.local import ManualClock
from kvferry.tiers.backoff import StorageHealth, StorageNotAsked


class Storage(StorageHealth):
    """A storage that fails or works at given times."""

    def __init__(self, tolerated: int = 0) -> None:
        self.clock = ManualClock(0)
        super().__init__(self.clock, tolerated)

    def allows(self, now: float) -> bool:
        self.clock.advance(now - self.clock())
        try:
            self.check()
        except StorageNotAsked:
            return False
        return True


def test_a_failure_stops_attempts_for_a_while_and_a_success_ends_all_pauses() -> None:
    storage = Storage()
    assert storage.allows(0)
    storage.succeeded()
    assert storage.allows(0)
    storage.failed("disk full")
    with pytest.raises(StorageNotAsked, match="waiting after a failure: disk full"):
        storage.check()
    assert not storage.allows(4.9)
    assert storage.allows(5)
    storage.succeeded()
    assert storage.allows(6)
    storage.failed("disk full")
    assert [storage.allows(10.9), storage.allows(11)] == [False, True], "the pause has doubled"


def test_tolerated_failures_have_no_consequence_and_a_success_forgets_them() -> None:
    storage = Storage(tolerated=2)
    for _ in range(3):
        storage.failed("slow")
        storage.failed("slow")
        assert storage.allows(0)
        storage.succeeded()
    for _ in range(3):
        storage.failed("slow")
    assert not storage.allows(0)


def test_after_a_pause_one_caller_tries() -> None:
    storage = Storage()
    storage.failed("down")
    assert [storage.allows(5), storage.allows(5), storage.allows(9)] == [True, False, False]
    assert storage.allows(10), "a caller that never reported blocks all others for ever"


def test_pauses_double_up_to_the_longest() -> None:
    storage, now, pauses = Storage(), 0.0, []
    for _ in range(6):
        storage.failed("down")
        began = now
        while not storage.allows(now):
            now += 1
        pauses.append(now - began)
    assert pauses == [5, 10, 20, 40, 60, 60]


def test_attempts_that_fail_during_a_pause_do_not_prolong_it() -> None:
    storage = Storage()
    for _ in range(16):
        storage.failed("down")
    assert not storage.allows(4)
    storage.failed("down")
    assert storage.allows(5)
