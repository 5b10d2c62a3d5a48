"""Tests the fleet registry: which instances are members, which members may be chosen, and that
loads add up, whatever happens in whatever order.
"""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.operations import count_instructions
from tests.router.fleet_world import make_fleet, make_instance

from kvferry.errors import LocalProtocolError
from kvferry.router.fleet.fleet import Fleet, FleetOptions
from kvferry.router.fleet.health import HealthOptions
from kvferry.router.fleet.instances import Instance, Outcome, Role
from kvferry.router.fleet.members import Leg, Member, MemberState, RoutingHints
from kvferry.router.fleet.policies import POLICIES
from kvferry.types import Address

A, B = make_instance(0), make_instance(1)


def get(fleet: Fleet, instance: Instance) -> Member:
    member = fleet.get(instance)
    assert member is not None
    return member


def test_one_address_may_have_both_roles() -> None:
    fleet = make_fleet("round_robin", 0)
    both = [Instance(role, Address("host", 1)) for role in Role]
    for instance in both:
        fleet.add(instance, 0.0)
    assert [fleet.choose(role, RoutingHints(), 0.0) for role in Role] == both
    fleet.remove(both[0])
    assert [fleet.choose(role, RoutingHints(), 0.0) for role in Role] == [None, both[1]]


def test_adding_again_changes_nothing_but_ends_draining() -> None:
    fleet = make_fleet("round_robin", 2)
    leg = fleet.begin(A, 0.0)
    member = get(fleet, A)
    fleet.drain(A)
    assert fleet.add(A, 1.0) is member
    assert (member.state(1.0), member.num_running, len(fleet.members())) == (
        MemberState.HEALTHY,
        1,
        2,
    )
    fleet.end(leg, Outcome.ANSWERED, 1.0)


def test_an_address_is_one_member_with_or_without_tls() -> None:
    fleet = make_fleet("round_robin", 1)
    fleet.add(Instance(A.role, A.address, tls=True), 0.0)
    assert [member.instance.url for member in fleet.members()] == ["https://host0:8000"]
    assert fleet.remove(A)


def test_a_draining_member_gets_nothing_and_is_drained_when_nothing_is_under_way() -> None:
    fleet = make_fleet("round_robin", 2)
    leg = fleet.begin(A, 0.0)
    assert not fleet.is_drained(A)
    assert fleet.drain(A)
    assert {fleet.choose(Role.PREFILL, RoutingHints(conversation=A), 0.0) for _ in range(4)} == {B}
    assert not fleet.is_drained(A)
    fleet.end(leg, Outcome.ANSWERED, 1.0)
    assert fleet.is_drained(A)


def test_a_draining_member_is_not_even_the_last_resort() -> None:
    fleet = make_fleet("round_robin", 1)
    fleet.drain(A)
    assert fleet.choose(Role.PREFILL, RoutingHints(), 0.0) is None


def test_a_leg_may_outlive_its_member_and_says_nothing_about_the_next_at_its_address() -> None:
    fleet = make_fleet("round_robin", 1)
    legs = [fleet.begin(A, 0.0) for _ in range(3)]
    assert fleet.is_current(legs[0])
    fleet.remove(A)
    fleet.add(A, 0.0)
    assert not fleet.is_current(legs[0])
    for leg in legs:
        fleet.end(leg, Outcome.FAILED, 0.0)
    assert (get(fleet, A).load, get(fleet, A).num_running, get(fleet, A).state(0.0)) == (
        0,
        0,
        MemberState.NEW,
    )


def test_a_member_that_registered_itself_goes_unless_it_renews() -> None:
    fleet = make_fleet("round_robin", 1)
    fleet.renew(B, ttl_s=10, now=0.0)
    fleet.renew(B, ttl_s=10, now=5.0)
    assert (fleet.expire(14.9), fleet.expire(15.0), fleet.expire(15.0)) == ([], [B], [])
    assert [member.instance for member in fleet.members()] == [A]


def test_a_member_that_renews_late_but_answers_probes_stays_for_a_while() -> None:
    """Its machine is busy. One that fails probes, or has left, goes at once."""
    fleet = make_fleet("round_robin", 1)
    fleet.renew(B, ttl_s=10, now=0.0)
    fleet.note_probe_passed(B, 1.0)
    assert (fleet.expire(69.9), fleet.expire(70.0)) == ([], [B])
    for has_left in (False, True):
        fleet.renew(B, ttl_s=10, now=0.0)
        fleet.note_probe_passed(B, 1.0)
        if has_left:
            fleet.leave(B)
        else:
            fleet.note_probe_failed(B, 12.0)
            fleet.note_probe_failed(B, 13.0)
        assert fleet.expire(20.0) == [B]


def test_renewing_does_not_undo_an_operators_word() -> None:
    fleet = make_fleet("round_robin", 1)
    fleet.renew(A, ttl_s=10, now=0.0)
    assert fleet.expire(100.0) == []
    fleet.drain(A)
    fleet.renew(A, ttl_s=10, now=101.0)
    assert get(fleet, A).state(101.0) is MemberState.DRAINING


def test_one_that_has_left_by_its_own_word_may_come_back_and_one_that_was_drained_may_not() -> None:
    fleet = make_fleet("round_robin", 0)
    fleet.renew(A, ttl_s=10, now=0.0)
    assert fleet.leave(A)
    assert get(fleet, A).state(1.0) is MemberState.DRAINING
    fleet.renew(A, ttl_s=10, now=2.0)
    assert get(fleet, A).state(2.0) is MemberState.NEW
    fleet.drain(A)
    fleet.leave(A)
    fleet.renew(A, ttl_s=10, now=3.0)
    assert get(fleet, A).state(3.0) is MemberState.DRAINING, "an operator has said so"
    assert not fleet.leave(B)


def test_an_operators_drain_outlives_a_registration_until_the_instance_restarts() -> None:
    fleet = make_fleet("round_robin", 0)
    fleet.renew(A, ttl_s=10, now=0.0)
    fleet.drain(A)
    assert (fleet.expire(100.0), fleet.next_deadline()) == ([], 0.0), "only a probe is due"
    fleet.renew(A, ttl_s=10, now=100.0)
    assert get(fleet, A).state(100.0) is MemberState.DRAINING
    fleet.restarted(A, 101.0)
    assert get(fleet, A).state(101.0) is MemberState.DRAINING, "it has not registered yet"
    fleet.renew(A, ttl_s=10, now=102.0)
    assert get(fleet, A).state(102.0) is MemberState.HEALTHY
    fleet.drain(A)
    fleet.restarted(A, 103.0)
    assert fleet.expire(112.0) == [A], "the new process never registered"


def test_an_operators_drain_of_a_permanent_member_outlives_restarts() -> None:
    fleet = make_fleet("round_robin", 1)
    fleet.drain(A)
    fleet.restarted(A, 1.0)
    fleet.renew(A, ttl_s=10, now=2.0)
    assert get(fleet, A).state(2.0) is MemberState.DRAINING
    fleet.add(A, 3.0)
    fleet.leave(A)
    fleet.restarted(A, 4.0)
    assert get(fleet, A).has_left, "no operator has drained it"


def test_adding_for_good_ends_a_lease() -> None:
    fleet = make_fleet("round_robin", 0)
    fleet.renew(A, ttl_s=10, now=0.0)
    fleet.add(A, 1.0)
    assert fleet.expire(100.0) == []


def test_the_next_deadline_is_the_first_probe_or_lease_end() -> None:
    fleet = make_fleet("round_robin", 0, health=HealthOptions(jitter=0, probe_interval_s=100))
    assert fleet.next_deadline() is None
    fleet.renew(A, ttl_s=3, now=0.0)
    fleet.note_probe_passed(A, 0.0)
    assert fleet.next_deadline() == 63.0
    fleet.renew(A, ttl_s=300, now=0.0)
    assert fleet.next_deadline() == 100.0


def test_what_is_not_here_is_answered_plainly() -> None:
    fleet = make_fleet("round_robin", 0)
    fleet.restarted(A, 0.0)
    fleet.note_probe_passed(A, 0.0)
    fleet.note_probe_failed(A, 0.0)
    assert (fleet.drain(A), fleet.remove(A), fleet.is_drained(A), fleet.get(A)) == (
        False,
        False,
        True,
        None,
    )
    assert fleet.choose(Role.PREFILL, RoutingHints(), 0.0) is None


def test_a_leg_is_given_to_members_and_ended_once() -> None:
    fleet = make_fleet("round_robin", 1)
    with pytest.raises(LocalProtocolError, match="not in the fleet"):
        fleet.begin(B, 0.0)
    leg = fleet.begin(A, 0.0)
    fleet.end(leg, Outcome.ANSWERED, 0.0)
    with pytest.raises(LocalProtocolError, match="ended twice"):
        fleet.end(leg, Outcome.ANSWERED, 0.0)


def test_outcomes_are_counted_and_a_client_that_left_is_not_the_last_one() -> None:
    fleet = make_fleet("round_robin", 1)
    for outcome in (Outcome.FAILED, Outcome.ABANDONED, Outcome.ABANDONED):
        fleet.end(fleet.begin(A, 0.0), outcome, 0.0, "it broke")
    record = get(fleet, A).record
    assert (
        record.counts[Outcome.FAILED],
        record.counts[Outcome.ABANDONED],
        record.last_outcome,
    ) == (1, 2, Outcome.FAILED)
    assert record.last_error == "it broke"


def test_a_prompt_is_load_while_it_is_under_way() -> None:
    fleet = make_fleet("least_load", 2)
    heavy = fleet.begin(A, 0.0, RoutingHints(bytes(64 * 1024)))
    light = [fleet.begin(B, 0.0, RoutingHints(bytes(100))) for _ in range(10)]
    assert fleet.choose(Role.PREFILL, RoutingHints(), 0.0) == B
    fleet.end(heavy, Outcome.ANSWERED, 0.0)
    assert fleet.choose(Role.PREFILL, RoutingHints(), 0.0) == A
    for leg in light:
        fleet.end(leg, Outcome.ANSWERED, 0.0)


def test_who_begins_a_leg_may_say_what_it_weighs() -> None:
    fleet = make_fleet("least_load", 1)
    leg = fleet.begin(A, 0.0, RoutingHints(bytes(1000)), weight=7)
    assert get(fleet, A).load == 7
    fleet.end(leg, Outcome.ANSWERED, 0.0)
    assert get(fleet, A).load == 0


@pytest.mark.parametrize("policy", ["round_robin", "least_load", "prefix_affinity"])
def test_requests_that_come_at_once_are_spread_before_any_has_begun(policy: str) -> None:
    fleet = make_fleet(policy, 4)
    chosen = Counter(
        fleet.choose(Role.PREFILL, RoutingHints(bytes([number]) * 600), 0.0) for number in range(16)
    )
    assert sorted(chosen.values()) == [4, 4, 4, 4]


def test_a_look_at_who_is_next_takes_nothing() -> None:
    fleet = make_fleet("round_robin", 3)
    assert {fleet.peek(Role.PREFILL, RoutingHints(), 0.0) for _ in range(5)} == {A}
    assert fleet.choose(Role.PREFILL, RoutingHints(), 0.0) == A
    assert (fleet.peek(Role.PREFILL, RoutingHints(), 0.0), fleet.reasons(Role.PREFILL)) == (
        B,
        {"round_robin": 1},
    )
    assert fleet.peek(Role.DECODE, RoutingHints(), 0.0) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_choice_among_many_is_little_work(policy: str) -> None:
    """A choice costs a few instructions per member, so choosing from a fleet of 256 is cheap."""

    def work(size: int) -> int:
        fleet = make_fleet(policy, size)
        return count_instructions(
            lambda: fleet.choose(Role.PREFILL, RoutingHints(b"x" * 2000), 0.0)
        )

    assert work(256) - work(16) <= 240 * 40


@dataclass
class Known:
    """What the model knows about a member."""

    is_draining: bool = False
    lease_until: float = float("inf")
    has_restarted: bool = False
    """It has restarted since an operator drained it."""


INSTANCES = [make_instance(number, role) for role in Role for number in range(4)]
HEALTH = HealthOptions(probe_interval_s=3, first_ejection_s=2, longest_ejection_s=8, window_legs=4)


class FleetMachine(RuleBasedStateMachine):
    """Members join, drain, leave and restart; legs begin and end in any order. The model tracks the
    registry and the legs.
    """

    @initialize(
        policies=st.tuples(st.sampled_from(list(POLICIES)), st.sampled_from(list(POLICIES))),
        spare=st.sampled_from([frozenset[Role](), frozenset({Role.PREFILL})]),
        seed=st.integers(0, 99),
    )
    def start(self, policies: tuple[str, str], spare: frozenset[Role], seed: int) -> None:
        self.options = FleetOptions(
            dict(zip(Role, policies, strict=True)), optional_roles=spare, health=HEALTH
        )
        self.fleet = Fleet(self.options, random.Random(seed).random)
        self.now = 0.0
        self.known: dict[Instance, Known] = {}
        self.legs: list[Leg] = []

    @rule(instance=st.sampled_from(INSTANCES))
    def add(self, instance: Instance) -> None:
        self.fleet.add(instance, self.now)
        self.known[instance] = Known()

    @rule(instance=st.sampled_from(INSTANCES), ttl_s=st.integers(1, 6))
    def renew(self, instance: Instance, ttl_s: int) -> None:
        self.fleet.renew(instance, ttl_s, self.now)
        known = self.known.setdefault(instance, Known(lease_until=0.0))
        if known.lease_until != float("inf"):
            known.lease_until = self.now + ttl_s
        if known.has_restarted:
            known.is_draining = known.has_restarted = False

    @rule(instance=st.sampled_from(INSTANCES))
    def drain(self, instance: Instance) -> None:
        assert self.fleet.drain(instance) == (instance in self.known)
        if instance in self.known:
            self.known[instance].is_draining = True
            self.known[instance].has_restarted = False

    @rule(instance=st.sampled_from(INSTANCES))
    def remove(self, instance: Instance) -> None:
        assert self.fleet.remove(instance) == (self.known.pop(instance, None) is not None)

    @rule(instance=st.sampled_from(INSTANCES))
    def restart(self, instance: Instance) -> None:
        self.fleet.restarted(instance, self.now)
        if (member := self.fleet.get(instance)) is not None:
            assert member.state(self.now) in (MemberState.HEALTHY, MemberState.DRAINING)
            known = self.known[instance]
            known.has_restarted = known.is_draining and known.lease_until != float("inf")

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._expire()

    def _expire(self) -> None:
        expected = {
            instance
            for instance, known in self.known.items()
            if known.lease_until <= self.now and get(self.fleet, instance).expires_at <= self.now
        }
        gone = self.fleet.expire(self.now)
        assert set(gone) == expected
        for instance in gone:
            del self.known[instance]

    @rule(
        role=st.sampled_from(list(Role)),
        tried=st.sets(st.sampled_from(INSTANCES), max_size=3),
        data=st.data(),
    )
    def send(self, role: Role, tried: set[Instance], data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from([b"", b"a" * 600, b"a" * 600 + b"b" * 600, b"c" * 3000]))
        hints = RoutingHints(prompt, data.draw(st.none() | st.sampled_from(INSTANCES)))
        states = {
            member.instance: member.state(self.now)
            for member in self.fleet.members(role)
            if member.instance not in tried
        }
        chosen = self.fleet.choose(role, hints, self.now, tried)
        self._check_choice(role, chosen, states)
        if chosen is not None:
            self.legs.append(self.fleet.begin(chosen, self.now, hints))

    def _check_choice(
        self, role: Role, chosen: Instance | None, states: dict[Instance, MemberState]
    ) -> None:
        good = {
            instance
            for instance, state in states.items()
            if state in (MemberState.HEALTHY, MemberState.NEW)
        }
        resting = {instance for instance, state in states.items() if state is MemberState.COOLDOWN}
        active = {
            instance for instance, state in states.items() if state is not MemberState.DRAINING
        }
        if chosen is None:
            assert not good
            assert not resting
            assert not active or role in self.options.optional_roles
        elif good:
            assert states[chosen] in (
                MemberState.NEW,
                MemberState.HEALTHY,
                MemberState.SUSPECT,
                MemberState.HALF_OPEN,
            )
        elif role in self.options.optional_roles:
            assert states[chosen] in (MemberState.COOLDOWN, MemberState.HALF_OPEN)
        else:
            assert chosen in active

    @precondition(lambda self: bool(self.legs))
    @rule(outcome=st.sampled_from(list(Outcome)), data=st.data())
    def end(self, outcome: Outcome, data: st.DataObject) -> None:
        leg = data.draw(st.sampled_from(self.legs))
        self.legs.remove(leg)
        self.fleet.end(leg, outcome, self.now)

    @precondition(lambda self: bool(self.legs))
    @rule(data=st.data())
    def note_answer(self, data: st.DataObject) -> None:
        self.fleet.note_answer(data.draw(st.sampled_from(self.legs)), self.now)

    @rule(count=st.integers(1, 4), instance=st.sampled_from(INSTANCES))
    def die(self, count: int, instance: Instance) -> None:
        for _ in range(count if instance in self.known else 0):
            self.fleet.end(self.fleet.begin(instance, self.now), Outcome.FAILED, self.now)

    @rule(well=st.sets(st.sampled_from(INSTANCES)))
    def probe(self, well: set[Instance]) -> None:
        for instance in self.fleet.take_probes(self.now):
            (self.fleet.note_probe_passed if instance in well else self.fleet.note_probe_failed)(
                instance, self.now
            )
        # A failed probe may end the grace of a registration that has run out.
        self._expire()
        deadline = self.fleet.next_deadline()
        assert deadline is None or deadline > self.now

    @invariant()
    def the_registry_is_as_was_said(self) -> None:
        assert {member.instance for member in self.fleet.members()} == set(self.known)
        for instance, known in self.known.items():
            assert (
                get(self.fleet, instance).state(self.now) is MemberState.DRAINING
            ) == known.is_draining

    @invariant()
    def load_is_what_is_under_way(self) -> None:
        for member in self.fleet.members():
            own = [leg for leg in self.legs if leg.member is member]
            assert (member.num_running, member.load) == (len(own), sum(leg.weight for leg in own))

    @invariant()
    def whoever_is_well_is_ready_and_nobody_else(self) -> None:
        for member in self.fleet.members():
            state = member.state(self.now)
            if state is not MemberState.HALF_OPEN:  # ready unless a trial is in progress
                assert (member.ready_at <= self.now) == (
                    state in (MemberState.NEW, MemberState.HEALTHY, MemberState.SUSPECT)
                )

    @invariant()
    def there_is_one_trial_at_a_time(self) -> None:
        for member in self.fleet.members():
            trials = [
                leg
                for leg in self.legs
                if leg.member is member
                and leg.is_trial
                and leg.generation == member.breaker.generation
            ]
            assert len([leg for leg in trials if not leg.is_answered]) <= 1

    def teardown(self) -> None:
        """When all legs have ended, no load is left, and every remaining member can be chosen again
        after some time.
        """
        if not hasattr(self, "fleet"):
            return
        for leg in self.legs:
            self.fleet.end(leg, Outcome.ANSWERED, self.now)
        for member in self.fleet.members():
            assert (member.load, member.num_running) == (0, 0)
            self.fleet.note_probe_passed(member.instance, self.now)
        later = self.now + HEALTH.longest_ejection_s
        for member in self.fleet.members():
            if not member.is_draining:
                others = [
                    other.instance
                    for other in self.fleet.members(member.instance.role)
                    if other is not member
                ]
                assert (
                    self.fleet.choose(member.instance.role, RoutingHints(), later, others)
                    == member.instance
                )


TestFleetMachine = FleetMachine.TestCase
