"""Tests the circuit breaker of an instance, alone and in a fleet: when it opens, for how long, and
what closes it.
"""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.fleet_world import (
    answer,
    begin_trial,
    chosen,
    fail,
    make_fleet,
    make_instance,
    refuse,
    state_of,
)

from kvferry.errors import ConfigError
from kvferry.router.fleet.fleet import Fleet, FleetOptions
from kvferry.router.fleet.health import Breaker, BreakerPhase, HealthOptions
from kvferry.router.fleet.instances import COOLDOWN_S, Instance, Outcome, Role
from kvferry.router.fleet.members import MemberState, RoutingHints

UNPROBED = HealthOptions(probe_interval_s=0, jitter=0)
A, B, C = (make_instance(number) for number in range(3))


# -- when it opens --


def test_failures_in_a_row_eject() -> None:
    fleet = make_fleet("round_robin", 3, health=UNPROBED)
    fail(fleet, A, 0.0, times=2)
    assert state_of(fleet, A, 0.0) is MemberState.HEALTHY
    fail(fleet, A, 0.0)
    assert (state_of(fleet, A, 0.0), chosen(fleet, 0.0)) == (MemberState.EJECTED, {B, C})


def test_an_answer_between_failures_starts_the_count_again() -> None:
    fleet = make_fleet("round_robin", 3, health=replace(UNPROBED, window_legs=1000))
    for _ in range(20):
        fail(fleet, A, 0.0, times=2)
        answer(fleet, A, 0.0)
        assert state_of(fleet, A, 0.0) is MemberState.HEALTHY


def test_an_instance_that_fails_every_other_leg_is_ejected_by_its_share() -> None:
    """A stream is counted once, when its first event arrives."""
    fleet = make_fleet("round_robin", 3, health=UNPROBED)
    for number in range(5):
        assert state_of(fleet, A, 0.1 * number) is MemberState.HEALTHY
        stream = fleet.begin(A, 0.1 * number)
        fleet.note_answer(stream, 0.1 * number)
        fleet.end(stream, Outcome.ANSWERED, 0.1 * number)
        fail(fleet, A, 0.1 * number)
    assert state_of(fleet, A, 0.5) is MemberState.EJECTED


def test_the_same_share_over_a_longer_time_does_not_eject() -> None:
    fleet = make_fleet("round_robin", 3, health=UNPROBED)
    for number in range(50):
        answer(fleet, A, 10.0 * number)
        fail(fleet, A, 10.0 * number)
    assert state_of(fleet, A, 500.0) is MemberState.HEALTHY


def test_what_was_long_ago_does_not_count() -> None:
    fleet = make_fleet("round_robin", 3, health=UNPROBED)
    for now in (0.0, 0.0, 0.0, 0.0, 1000.0):
        answer(fleet, A, now)
        fail(fleet, A, now)
    assert state_of(fleet, A, 1000.0) is MemberState.HEALTHY


@given(
    ends=st.lists(
        st.sampled_from([Outcome.ABANDONED, Outcome.REFUSED, Outcome.ANSWERED]), max_size=40
    )
)
def test_refusals_and_clients_that_leave_never_eject(ends: list[Outcome]) -> None:
    fleet = make_fleet("round_robin", 2, health=UNPROBED)
    for outcome in ends:
        fleet.end(fleet.begin(A, 0.0), outcome, 0.0)
    assert state_of(fleet, A, COOLDOWN_S) is MemberState.HEALTHY


def test_legs_begun_before_an_ejection_do_not_prolong_it_nor_end_it() -> None:
    """When an instance dies, all its running legs fail; that counts as one death."""
    fleet = make_fleet("round_robin", 2, health=UNPROBED)
    legs = [fleet.begin(A, 0.0) for _ in range(100)]
    for leg in legs[:50]:
        fleet.end(leg, Outcome.FAILED, 1.0)
    for leg in legs[50:]:
        fleet.end(leg, Outcome.ANSWERED, 1.5)
    breaker = fleet.members()[0].breaker
    assert (breaker.num_ejections, breaker.ejected_until, breaker.phase) == (
        1,
        3.0,
        BreakerPhase.EJECTED,
    )


# -- for how long --


def ejection_times(options: HealthOptions, count: int, draw: float = 0.5) -> list[float]:
    """The ejection times of an instance whose every trial fails."""
    breaker, now, times = Breaker(options, lambda: draw), 0.0, []
    for _ in range(count):
        breaker.eject(now)
        times.append(breaker.ejected_until - now)
        now = breaker.ejected_until
        assert breaker.begin(now)
        assert breaker.note_failure(breaker.generation, now)
    return times


def test_each_failed_trial_doubles_the_time_up_to_a_cap() -> None:
    assert ejection_times(UNPROBED, 8) == [2, 4, 8, 16, 32, 60, 60, 60]


@given(count=st.integers(1, 100), draw=st.floats(0, 1, exclude_max=True), jitter=st.floats(0, 0.9))
def test_times_never_exceed_the_cap_and_never_vanish(
    count: int, draw: float, jitter: float
) -> None:
    options = replace(UNPROBED, jitter=jitter)
    for time in ejection_times(options, count, draw):
        assert (
            0.1 * options.first_ejection_s * (1 - 1e-6)
            <= time
            <= options.longest_ejection_s * (1 + 1e-6)
        )


def test_instances_that_fail_together_do_not_come_back_together() -> None:
    fleet = make_fleet("round_robin", 9, health=replace(UNPROBED, jitter=0.2))
    for number in range(8):
        fail(fleet, make_instance(number), 0.0, times=3)
    ends = sorted(
        member.breaker.ejected_until
        for member in fleet.members()
        if member.breaker.phase is BreakerPhase.EJECTED
    )
    assert len(ends) == 8
    assert all(one < other for one, other in pairwise(ends))


def test_a_relapse_takes_longer_and_is_forgiven_in_time() -> None:
    breaker = Breaker(UNPROBED, lambda: 0.0)
    lengths, now = [], 0.0
    for well_for in (0.0, 10.0, UNPROBED.backoff_reset_s):
        now += well_for
        breaker.eject(now)
        lengths.append(breaker.ejected_until - now)
        now = breaker.ejected_until
        breaker.begin(now)
        breaker.note_answer(breaker.generation, now)
        assert breaker.phase is BreakerPhase.CLOSED
    assert lengths == [2, 4, 2]


# -- what closes it --


def eject_and_wait(health: HealthOptions = UNPROBED) -> tuple[Fleet, float]:
    """A fleet whose instance A is half open, and the time."""
    fleet = make_fleet("round_robin", 3, health=health)
    fail(fleet, A, 0.0, times=3)
    assert state_of(fleet, A, 1.9) is MemberState.EJECTED
    assert state_of(fleet, A, 2.0) is MemberState.HALF_OPEN
    return fleet, 2.0


def test_half_open_gives_one_trial_at_a_time() -> None:
    fleet, now = eject_and_wait()
    trial = begin_trial(fleet, A, now)
    assert trial.is_trial
    assert chosen(fleet, now) == {B, C}
    fleet.end(trial, Outcome.ABANDONED, now)
    assert begin_trial(fleet, A, now).is_trial


def test_an_answered_trial_closes() -> None:
    fleet, now = eject_and_wait()
    fleet.end(begin_trial(fleet, A, now), Outcome.ANSWERED, now)
    assert (state_of(fleet, A, now), chosen(fleet, now)) == (MemberState.HEALTHY, {A, B, C})


def test_failures_of_before_an_ejection_do_not_count_after_it() -> None:
    fleet = make_fleet("round_robin", 3, health=UNPROBED)
    for _ in range(5):
        answer(fleet, A, 0.0)
        fail(fleet, A, 0.0)
    fleet.end(begin_trial(fleet, A, 2.0), Outcome.ANSWERED, 2.0)
    fail(fleet, A, 2.0)
    assert state_of(fleet, A, 2.0) is MemberState.HEALTHY


def test_the_first_segment_of_a_stream_closes_and_its_end_adds_nothing() -> None:
    fleet, now = eject_and_wait()
    trial = begin_trial(fleet, A, now)
    fleet.note_answer(trial, now)
    assert (state_of(fleet, A, now), chosen(fleet, now)) == (MemberState.HEALTHY, {A, B, C})
    fleet.note_answer(trial, now)
    fleet.end(trial, Outcome.FAILED, now)
    assert (state_of(fleet, A, now), fleet.members()[0].breaker.failures_in_a_row) == (
        MemberState.HEALTHY,
        1,
    )


def test_a_failed_trial_ejects_for_twice_as_long() -> None:
    fleet, now = eject_and_wait()
    fleet.end(begin_trial(fleet, A, now), Outcome.FAILED, now)
    assert state_of(fleet, A, now + 3.9) is MemberState.EJECTED
    assert state_of(fleet, A, now + 4.0) is MemberState.HALF_OPEN


def test_a_refused_trial_rests_and_is_repeated() -> None:
    fleet, now = eject_and_wait()
    fleet.end(begin_trial(fleet, A, now), Outcome.REFUSED, now)
    assert chosen(fleet, now) == {B, C}
    assert (state_of(fleet, A, now), A in chosen(fleet, now + COOLDOWN_S)) == (
        MemberState.HALF_OPEN,
        True,
    )


def test_an_answer_that_was_a_last_resort_closes() -> None:
    fleet = make_fleet("round_robin", 2, health=UNPROBED)
    fail(fleet, A, 0.0, times=3)
    assert fleet.choose(Role.PREFILL, RoutingHints(), 0.0, tried=[B]) == A
    answer(fleet, A, 0.0)
    assert state_of(fleet, A, 0.0) is MemberState.HEALTHY


def test_a_restart_ends_ejection_and_rest() -> None:
    fleet = make_fleet("round_robin", 2, health=UNPROBED)
    fail(fleet, A, 0.0, times=3)
    refuse(fleet, A, 0.0)
    fleet.restarted(A, 0.0)
    assert (state_of(fleet, A, 0.0), chosen(fleet, 0.0)) == (MemberState.HEALTHY, {A, B})


def test_what_the_last_life_had_under_way_is_no_failure_of_this_one() -> None:
    fleet = make_fleet("round_robin", 2, health=UNPROBED)
    legs = [fleet.begin(A, 0.0) for _ in range(5)]
    fleet.restarted(A, 1.0)
    for leg in legs:
        assert not fleet.is_current(leg)
        fleet.end(leg, Outcome.FAILED, 1.0)
    assert state_of(fleet, A, 1.0) is MemberState.HEALTHY


def test_a_new_life_starts_with_the_shortest_time() -> None:
    breaker = Breaker(UNPROBED, lambda: 0.0)
    for now in (0.0, 10.0, 20.0):
        breaker.eject(now)
    breaker.restart()
    breaker.eject(30.0)
    assert breaker.ejected_until == 32.0


# -- refusals --


def test_an_instance_that_refused_is_passed_over_for_a_moment() -> None:
    fleet = make_fleet("round_robin", 3)
    refuse(fleet, B, 10.0)
    assert (chosen(fleet, 10.0), state_of(fleet, B, 10.0)) == ({A, C}, MemberState.COOLDOWN)
    assert chosen(fleet, 10.0 + 0.9 * COOLDOWN_S) == {A, C}
    assert chosen(fleet, 10.0 + COOLDOWN_S) == {A, B, C}


def test_an_answer_to_what_it_had_taken_before_does_not_bring_a_refusing_instance_back() -> None:
    fleet = make_fleet("round_robin", 3)
    earlier = fleet.begin(A, 0.0)
    refuse(fleet, A, 0.0)
    assert (
        fleet.count(Role.PREFILL, Outcome.REFUSED),
        fleet.count(Role.PREFILL, Outcome.ANSWERED),
    ) == (1, 0)
    fleet.end(earlier, Outcome.ANSWERED, 0.5)
    assert chosen(fleet, 0.5) == {B, C}


def test_when_all_refused_they_take_turns_as_ever() -> None:
    fleet = make_fleet("round_robin", 3)
    for instance in (A, B, C):
        refuse(fleet, instance, 0.0)
    assert chosen(fleet, 0.0) == {A, B, C}


def test_each_instance_is_tried_once_the_resting_ones_late_and_the_ejected_ones_last() -> None:
    fleet = make_fleet("round_robin", 3)
    fail(fleet, A, 0.0, times=3)
    refuse(fleet, B, 0.0)
    tried: list[Instance] = []
    while (instance := fleet.choose(Role.PREFILL, RoutingHints(), 0.0, tried)) is not None:
        tried.append(instance)
    assert tried == [C, B, A]
    assert fleet.reasons(Role.PREFILL) == {"round_robin": 1, "cooldown": 1, "last_resort": 1}


# -- the share of a role that may be ejected --


@given(
    size=st.integers(1, 12),
    share=st.floats(0, 1),
    failing=st.lists(st.integers(0, 11), max_size=60),
)
def test_the_ejected_share_is_bounded_and_somebody_always_stays(
    size: int, share: float, failing: list[int]
) -> None:
    options = FleetOptions(
        dict.fromkeys(Role, "round_robin"), max_ejected_share=share, health=UNPROBED
    )
    fleet = Fleet(options, random.Random(0).random)
    for number in range(size):
        fleet.add(make_instance(number), 0.0)
    for number in failing:
        fail(fleet, make_instance(number % size), 0.0)
        num_ejected = sum(member.state(0.0) is MemberState.EJECTED for member in fleet.members())
        assert num_ejected <= share * size
        assert num_ejected < size


def test_the_last_of_a_role_is_suspect_and_counts_as_the_ejected_do() -> None:
    fleet = make_fleet("round_robin", 2, health=UNPROBED)
    for instance in (A, B):
        fail(fleet, instance, 0.0, times=3)
    assert (state_of(fleet, A, 0.0), state_of(fleet, B, 0.0)) == (
        MemberState.EJECTED,
        MemberState.SUSPECT,
    )
    assert chosen(fleet, 0.0) == {A, B}
    answer(fleet, B, 0.0)
    assert (state_of(fleet, B, 0.0), chosen(fleet, 0.0)) == (MemberState.HEALTHY, {B})


def test_a_resting_one_is_asked_before_a_suspect() -> None:
    fleet = make_fleet("round_robin", 3, health=UNPROBED)
    for instance in (A, B, C):
        fail(fleet, instance, 0.0, times=3)
    fleet.restarted(A, 0.0)
    refuse(fleet, A, 0.0)
    assert [state_of(fleet, instance, 0.0) for instance in (A, B, C)] == [
        MemberState.COOLDOWN,
        MemberState.EJECTED,
        MemberState.SUSPECT,
    ]
    assert chosen(fleet, 0.0) == {A}


def test_a_suspect_is_ejected_by_its_next_failure_once_another_is_back() -> None:
    fleet = make_fleet("round_robin", 2, health=UNPROBED)
    for instance in (A, B):
        fail(fleet, instance, 0.0, times=3)
    answer(fleet, A, 2.0)
    fail(fleet, B, 2.0)
    assert (state_of(fleet, A, 2.0), state_of(fleet, B, 2.0)) == (
        MemberState.HEALTHY,
        MemberState.EJECTED,
    )


def test_a_role_that_can_be_spared_may_be_ejected_whole_and_comes_back() -> None:
    options = FleetOptions(
        dict.fromkeys(Role, "round_robin"),
        optional_roles=frozenset({Role.PREFILL}),
        health=UNPROBED,
    )
    fleet = Fleet(options, random.Random(0).random)
    fleet.add(A, 0.0)
    fail(fleet, A, 0.0, times=3)
    assert fleet.choose(Role.PREFILL, RoutingHints(), 0.0) is None
    assert fleet.choose(Role.PREFILL, RoutingHints(), 2.0) == A


@pytest.mark.parametrize(
    "setting",
    [
        {"failures_in_a_row": 0},
        {"window_s": 0},
        {"max_failed_probes": 0},
        {"jitter": 1.1},
        {"failure_share": -1},
        {"probe_interval_s": -1},
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        HealthOptions(**setting)
