"""Tests of the pauses after failures of a storage. They have no clock: `now` is a number."""

from kvferry.tiers.backoff import FailureBackoff


def test_a_storage_that_works_is_always_allowed() -> None:
    backoff = FailureBackoff(first_s=5, max_s=60)
    assert backoff.allows(0)
    backoff.succeeded()
    assert backoff.allows(0)


def test_a_failure_stops_attempts_for_a_while() -> None:
    backoff = FailureBackoff(first_s=5, max_s=60)
    backoff.failed(10, "disk full")
    assert backoff.last_reason == "disk full"
    assert not backoff.allows(14.9)
    assert backoff.allows(15)


def test_tolerated_failures_have_no_consequence_and_a_success_forgets_them() -> None:
    backoff = FailureBackoff(first_s=5, max_s=60, tolerated=2)
    for _ in range(3):
        backoff.failed(0, "slow")
        backoff.failed(0, "slow")
        assert backoff.allows(0)
        backoff.succeeded()
    for _ in range(3):
        backoff.failed(0, "slow")
    assert not backoff.allows(0)


def test_after_a_pause_one_caller_tries() -> None:
    backoff = FailureBackoff(first_s=5, max_s=60)
    backoff.failed(0, "down")
    assert [backoff.allows(5), backoff.allows(5), backoff.allows(9)] == [True, False, False]
    assert backoff.allows(10), "a caller that never reported blocks all others for ever"


def test_pauses_double_up_to_the_longest() -> None:
    backoff = FailureBackoff(first_s=5, max_s=30)
    now, pauses = 0.0, []
    for _ in range(5):
        backoff.failed(now, "down")
        began = now
        while not backoff.allows(now):
            now += 1
        pauses.append(now - began)
    assert pauses == [5, 10, 20, 30, 30]


def test_attempts_that_fail_during_a_pause_do_not_prolong_it() -> None:
    backoff = FailureBackoff(first_s=5, max_s=60)
    for _ in range(16):
        backoff.failed(0, "down")
    backoff.failed(4, "down")
    assert backoff.allows(5)


def test_a_success_ends_the_pauses() -> None:
    backoff = FailureBackoff(first_s=5, max_s=60)
    backoff.failed(0, "down")
    assert backoff.allows(5)
    backoff.succeeded()
    assert backoff.allows(5)
    backoff.failed(6, "down")
    assert backoff.allows(11)
