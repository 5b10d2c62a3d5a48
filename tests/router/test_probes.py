"""Tests health probes: when they are due, and what they may and may not change."""

from tests.router.fleet_world import (
    answer,
    begin_trial,
    chosen,
    fail,
    make_fleet,
    make_instance,
    state_of,
)

from kvferry.router.fleet.fleet import Fleet
from kvferry.router.fleet.health import HealthOptions
from kvferry.router.fleet.instances import Outcome
from kvferry.router.fleet.members import MemberState

PROBED = HealthOptions(jitter=0)
UNPROBED = HealthOptions(probe_interval_s=0, jitter=0)
A, B, C = (make_instance(number) for number in range(3))


def unseen(size: int) -> Fleet:
    fleet = make_fleet("round_robin", 0, health=PROBED)
    for number in range(size):
        fleet.add(make_instance(number), now=0.0)
    return fleet


def test_probes_are_due_at_once_and_then_by_the_interval() -> None:
    fleet = unseen(2)
    assert fleet.next_deadline() == 0.0
    assert set(fleet.take_probes(0.0)) == {A, B}
    for instance in (A, B):
        fleet.note_probe_passed(instance, 0.0)
    assert (fleet.take_probes(4.9), fleet.next_deadline()) == ([], 5.0)
    assert set(fleet.take_probes(5.0)) == {A, B}


def test_one_that_nobody_has_reached_is_looked_for_often_and_called_new() -> None:
    fleet = unseen(2)
    fleet.take_probes(0.0)
    fleet.note_probe_passed(B, 0.0)
    fleet.note_probe_failed(A, 0.0)
    assert [state_of(fleet, instance, 0.0) for instance in (A, B)] == [
        MemberState.NEW,
        MemberState.HEALTHY,
    ]
    assert (fleet.take_probes(0.9), fleet.take_probes(1.0)) == ([], [A])
    fleet.note_probe_passed(A, 1.0)
    assert (state_of(fleet, A, 1.0), fleet.take_probes(2.5)) == (MemberState.HEALTHY, [])


def test_one_that_was_found_ill_once_is_looked_at_again_soon() -> None:
    fleet = make_fleet("round_robin", 1, health=PROBED)
    assert fleet.take_probes(5.0) == [A]
    fleet.note_probe_failed(A, 5.0)
    assert (fleet.take_probes(5.9), fleet.take_probes(6.0)) == ([], [A])


def test_a_leg_that_is_answered_shows_that_somebody_is_there() -> None:
    fleet = unseen(1)
    assert state_of(fleet, A, 0.0) is MemberState.NEW
    answer(fleet, A, 0.0)
    assert state_of(fleet, A, 0.0) is MemberState.HEALTHY


def test_without_probes_nothing_is_due() -> None:
    fleet = make_fleet("round_robin", 2, health=UNPROBED)
    assert (fleet.take_probes(100.0), fleet.next_deadline()) == ([], None)


def test_ill_probes_eject_and_a_single_one_does_not() -> None:
    fleet = make_fleet("round_robin", 3, health=PROBED)
    fleet.note_probe_failed(A, 0.0)
    fleet.note_probe_passed(A, 1.0)
    fleet.note_probe_failed(A, 2.0)
    assert state_of(fleet, A, 2.0) is MemberState.HEALTHY
    fleet.note_probe_failed(A, 3.0, "no route")
    member = fleet.members()[0]
    assert (state_of(fleet, A, 3.0), member.record.last_error, member.record.last_error_at) == (
        MemberState.EJECTED,
        "no route",
        3.0,
    )


def test_a_well_probe_does_not_hide_that_legs_fail() -> None:
    fleet = make_fleet("round_robin", 3, health=PROBED)
    for now in (0.0, 1.0, 2.0):
        fail(fleet, A, now)
        fleet.note_probe_passed(A, now)
    assert state_of(fleet, A, 2.0) is MemberState.EJECTED


def test_with_probes_a_dead_instance_is_given_one_trial_in_a_long_time() -> None:
    """The instance gets one trial rather than none, because the probe itself may be wrong."""
    fleet = make_fleet("round_robin", 3, health=PROBED)
    fail(fleet, A, 0.0, times=3)
    assert A in fleet.take_probes(0.0)
    fleet.note_probe_failed(A, 0.1)
    for now in (2.0, 30.0, 61.9):
        fleet.note_probe_failed(A, now)
        assert (chosen(fleet, now), state_of(fleet, A, now)) == ({B, C}, MemberState.EJECTED)
    fleet.end(begin_trial(fleet, A, 62.0), Outcome.FAILED, 62.0)
    assert (chosen(fleet, 120.0), state_of(fleet, A, 120.0)) == ({B, C}, MemberState.EJECTED)


def test_one_that_was_down_and_is_up_is_tried_at_once() -> None:
    fleet = make_fleet("round_robin", 3, health=PROBED)
    fail(fleet, A, 0.0, times=3)
    fleet.note_probe_failed(A, 0.1)
    fleet.note_probe_passed(A, 1.1)
    assert state_of(fleet, A, 1.1) is MemberState.HALF_OPEN
    fleet.end(begin_trial(fleet, A, 1.1), Outcome.ANSWERED, 1.2)
    assert state_of(fleet, A, 1.2) is MemberState.HEALTHY


def test_one_that_was_left_out_for_its_probes_alone_is_back_with_the_first_good_one() -> None:
    """Only failed probes counted against the instance, so it gets all requests that arrive now, not
    just one of them as a trial.
    """
    fleet = make_fleet("round_robin", 3, health=PROBED)
    for now in (5.0, 6.0):
        fleet.note_probe_failed(A, now)
    assert (state_of(fleet, A, 6.0), chosen(fleet, 6.0)) == (MemberState.EJECTED, {B, C})
    fleet.note_probe_passed(A, 7.0)
    assert state_of(fleet, A, 7.0) is MemberState.HEALTHY
    fleet.begin(A, 7.0)
    assert chosen(fleet, 7.0) == {A, B, C}


def test_one_that_was_not_there_when_legs_came_is_new_when_it_is() -> None:
    fleet = unseen(3)
    fleet.note_probe_passed(B, 0.0)
    fleet.note_probe_passed(C, 0.0)
    fail(fleet, A, 0.0, times=3)
    assert state_of(fleet, A, 0.5) is MemberState.EJECTED
    fleet.note_probe_passed(A, 0.5)
    assert (state_of(fleet, A, 0.5), chosen(fleet, 0.5)) == (MemberState.HEALTHY, {A, B, C})


def test_one_that_was_left_out_for_its_legs_and_its_probes_has_to_show_that_it_answers() -> None:
    fleet = make_fleet("round_robin", 3, health=PROBED)
    fail(fleet, A, 5.0)
    for now in (5.0, 6.0):
        fleet.note_probe_failed(A, now)
    fleet.note_probe_passed(A, 7.0)
    assert state_of(fleet, A, 7.0) is MemberState.HALF_OPEN


def test_one_that_was_never_down_waits_for_the_end_of_its_time() -> None:
    """The instance passes its probe while its legs fail, so a passed probe must not end the
    ejection.
    """
    fleet = make_fleet("round_robin", 3, health=PROBED)
    fail(fleet, A, 0.0, times=3)
    fleet.note_probe_passed(A, 0.1)
    assert state_of(fleet, A, 1.9) is MemberState.EJECTED
    assert state_of(fleet, A, 2.0) is MemberState.HALF_OPEN


def test_an_ill_probe_ends_the_half_open_state() -> None:
    fleet = make_fleet("round_robin", 3, health=PROBED)
    fail(fleet, A, 0.0, times=3)
    fleet.note_probe_passed(A, 0.1)
    fleet.end(begin_trial(fleet, A, 2.5), Outcome.ABANDONED, 2.5)
    assert state_of(fleet, A, 2.5) is MemberState.HALF_OPEN
    fleet.note_probe_failed(A, 2.5)
    assert state_of(fleet, A, 60.0) is MemberState.EJECTED


def test_a_trial_under_way_outweighs_an_ill_probe() -> None:
    fleet = make_fleet("round_robin", 3, health=PROBED)
    fail(fleet, A, 0.0, times=3)
    fleet.note_probe_passed(A, 0.1)
    trial = begin_trial(fleet, A, 2.5)
    for now in (3.0, 4.0, 5.0):
        fleet.note_probe_failed(A, now)
    fleet.end(trial, Outcome.ANSWERED, 5.0)
    assert (state_of(fleet, A, 5.0), chosen(fleet, 5.0)) == (MemberState.HEALTHY, {A, B, C})


def test_an_ejected_instance_is_probed_at_once_and_often() -> None:
    fleet = make_fleet("round_robin", 3, health=PROBED)
    fleet.take_probes(0.0)
    fail(fleet, A, 0.5, times=3)
    assert fleet.take_probes(0.5) == [A]
    assert (fleet.take_probes(1.4), fleet.take_probes(1.5)) == ([], [A])


def test_health_checks_that_are_wrong_everywhere_take_nobody_out_of_use() -> None:
    """The probe may use a wrong path, or a proxy may be in between; requests are answered all the
    same.
    """
    fleet = make_fleet("round_robin", 3, health=PROBED)
    for now in (0.0, 5.0, 10.0):
        for instance in (A, B, C):
            fleet.note_probe_failed(instance, now)
    assert chosen(fleet, 10.0) == {A, B, C}
    for instance in (A, B, C):
        answer(fleet, instance, 10.0)
        fleet.note_probe_failed(instance, 15.0)
    assert [state_of(fleet, instance, 15.0) for instance in (A, B, C)] == [MemberState.HEALTHY] * 3


def test_one_whose_probe_has_not_been_answered_stays_ejected() -> None:
    fleet = make_fleet("round_robin", 3, health=PROBED)
    fail(fleet, A, 0.0, times=3)
    assert (state_of(fleet, A, 10.0), chosen(fleet, 10.0)) == (MemberState.EJECTED, {B, C})
