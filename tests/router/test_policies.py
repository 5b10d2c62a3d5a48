"""Tests the rules of the routing policies, over generated fleets."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operations import count_instructions
from tests.router.fleet_world import conversation_texts, make_fleet, make_instance

from kvferry.errors import ConfigError
from kvferry.router.fleet.fleet import Fleet, FleetOptions
from kvferry.router.fleet.health import Breaker, HealthOptions
from kvferry.router.fleet.instances import Instance, Outcome, Role
from kvferry.router.fleet.members import Member, RoutingHints, leg_weight
from kvferry.router.fleet.policies import (
    POLICIES,
    LeastLoad,
    Policy,
    PowerOfTwo,
    PrefixAffinity,
    PrefixIndex,
    RoundRobin,
    hash_prefixes,
    make_policy,
)

chances = st.floats(0, 1, exclude_max=True)
loads = st.lists(st.integers(0, 50), min_size=1, max_size=16)
texts = st.binary(max_size=3000)


def make_member(
    number: int, load: int = 0, last_chosen: int = 0, role: Role = Role.PREFILL
) -> Member:
    return Member(
        make_instance(number, role),
        Breaker(HealthOptions(), lambda: 0.5),
        load=load,
        last_chosen=last_chosen,
    )


def make_members(loads: Sequence[int], role: Role = Role.PREFILL) -> list[Member]:
    return [make_member(number, load, number, role) for number, load in enumerate(loads)]


def serve(
    fleet: Fleet, count: int, hints: RoutingHints | None = None, role: Role = Role.PREFILL
) -> list[Instance]:
    """Runs legs one after the other, each ended before the next begins; returns the instances that
    got them.
    """
    chosen = []
    for _ in range(count):
        instance = fleet.choose(role, hints or RoutingHints(), 0.0)
        assert instance is not None
        fleet.end(fleet.begin(instance, 0.0, hints), Outcome.ANSWERED, 0.0)
        chosen.append(instance)
    return chosen


@pytest.mark.parametrize("name", POLICIES)
@given(loads=loads, draw=chances, text=texts, data=st.data())
def test_every_policy_chooses_one_of_the_candidates_and_changes_nothing(
    name: str, loads: list[int], draw: float, text: bytes, data: st.DataObject
) -> None:
    policy = make_policy(name, Role.PREFILL, lambda: draw)
    members = make_members(loads)
    for member in data.draw(st.lists(st.sampled_from(members), max_size=5)):
        policy.note_begun(member, RoutingHints(text))
    candidates = data.draw(st.lists(st.sampled_from(members), min_size=1, unique=True))
    last = data.draw(st.none() | st.sampled_from([member.instance for member in members]))
    chosen, _ = policy.choose(candidates, RoutingHints(text, last))
    assert chosen in candidates
    assert policy.choose(candidates, RoutingHints(text, last))[0] is chosen


@given(size=st.integers(1, 16), count=st.integers(0, 100))
def test_round_robin_is_fair_to_one(size: int, count: int) -> None:
    counts = Counter(serve(make_fleet("round_robin", size), count))
    assert (
        max(counts.values(), default=0)
        - min((counts[make_instance(n)] for n in range(size)), default=0)
        <= 1
    )


@given(leaves=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=12))
def test_round_robin_stays_fair_among_those_who_stay_while_others_come_and_go(
    leaves: list[tuple[int, int]],
) -> None:
    """A rotating index would favour the member that follows one that left."""
    fleet, staying, counts = (
        make_fleet("round_robin", 6),
        {make_instance(6), make_instance(7)},
        Counter[Instance](),
    )
    for instance in sorted(staying, key=str):
        fleet.add(instance, 0.0)
    for number, legs in leaves:
        instance = make_instance(number)
        fleet.add(instance, 0.0) if fleet.get(instance) is None else fleet.remove(instance)
        counts.update(serve(fleet, legs))
    one, other = (counts[instance] for instance in staying)
    assert abs(one - other) <= 1


def test_an_index_that_goes_round_would_not_stay_fair() -> None:
    class IndexRoundRobin(RoundRobin):
        index = 0

        def choose(self, candidates: Sequence[Member], hints: RoutingHints) -> tuple[Member, str]:
            self.index += 1
            return candidates[self.index % len(candidates)], "index"

    def excess(policy: Policy) -> int:
        """How many more legs one of two members gets than the other while a third member comes and
        goes.
        """
        one, other, third = members = make_members([0, 0, 0])
        counts = Counter[Member]()
        for last_chosen in range(60):
            chosen, _ = policy.choose(members if last_chosen % 2 else [one, other], RoutingHints())
            chosen.last_chosen = last_chosen + 3
            counts[chosen] += 1
        assert counts[third] > 0
        return abs(counts[one] - counts[other])

    assert excess(RoundRobin()) <= 1
    assert excess(IndexRoundRobin()) > 10


@given(loads=loads)
def test_least_load_picks_a_minimum(loads: list[int]) -> None:
    chosen, _ = LeastLoad().choose(make_members(loads), RoutingHints())
    assert chosen.load == min(loads)


def test_equally_loaded_members_take_turns() -> None:
    assert len(set(serve(make_fleet("least_load", 5), 5))) == 5


def pairs_seen(
    policy_of: Callable[[Callable[[], float]], Policy], loads: Sequence[int]
) -> list[tuple[int, int]]:
    """How often each member is chosen, over all pairs that can be drawn, as (load of the chosen
    member, times).
    """
    members = make_members(loads)
    num_pairs = len(loads) * (len(loads) - 1)
    draws = [(number + 0.5) / num_pairs for number in range(num_pairs)]
    return sorted(
        Counter(
            policy_of(
                lambda draw=draw: draw,  # type: ignore[misc]
            )
            .choose(members, RoutingHints())[0]
            .load
            for draw in draws
        ).items()
    )


@given(loads=st.integers(2, 8).flatmap(lambda size: st.permutations(range(size))))
def test_the_better_of_two_is_never_the_worse(loads: list[int]) -> None:
    """Over all ordered pairs, a member with i worse members is the better one of 2 i pairs. The
    worst member of all is never chosen.
    """
    size = len(loads)
    assert pairs_seen(PowerOfTwo, loads) == [
        (load, 2 * (size - 1 - load)) for load in range(size - 1)
    ]


def test_the_worse_of_two_would_be_seen() -> None:
    class WorseOfTwo(PowerOfTwo):
        def choose(self, candidates: Sequence[Member], hints: RoutingHints) -> tuple[Member, str]:
            flipped = [make_member(0, -member.load) for member in candidates]
            chosen, reason = super().choose(flipped, hints)
            return candidates[flipped.index(chosen)], reason

    assert pairs_seen(WorseOfTwo, range(4)) != pairs_seen(PowerOfTwo, range(4))


# -- marks and prefixes --


@given(
    head=st.binary(min_size=1, max_size=20_000),
    tail=st.binary(max_size=2000),
    other=st.binary(max_size=2000),
)
def test_what_begins_alike_has_alike_marks(head: bytes, tail: bytes, other: bytes) -> None:
    shared = len(hash_prefixes(head))
    assert (
        hash_prefixes(head + tail)[:shared]
        == hash_prefixes(head + other)[:shared]
        == hash_prefixes(memoryview(head))
    )


@given(text=st.binary(min_size=512, max_size=8000), at=st.integers(0, 511))
def test_a_change_at_the_start_changes_every_mark(text: bytes, at: int) -> None:
    changed = bytearray(text)
    changed[at] ^= 1
    assert not set(hash_prefixes(text)) & set(hash_prefixes(bytes(changed)))


def test_a_next_turn_has_the_marks_of_the_last_one() -> None:
    turns = conversation_texts("ann", num_turns=8, turn_bytes=700)
    for last, following in pairwise(turns):
        assert hash_prefixes(following)[: len(hash_prefixes(last))] == hash_prefixes(last)


def test_a_long_prompt_has_few_marks_and_is_looked_at_for_a_bounded_time() -> None:
    assert len(hash_prefixes(bytes(64 * 1024))) < 32
    assert len(hash_prefixes(bytes(64 * 1024 * 1024))) < 64
    huge = bytes(64 * 1024 * 1024)
    assert count_instructions(lambda: hash_prefixes(huge)) < 3 * count_instructions(
        lambda: hash_prefixes(huge[: 64 * 1024])
    )


@given(
    max_hashes=st.integers(2, 40),
    given_texts=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 12_000), st.integers(0, 255)), max_size=30
    ),
)
def test_the_index_never_exceeds_its_bound(
    max_hashes: int, given_texts: list[tuple[int, int, int]]
) -> None:
    index, members = PrefixIndex(max_hashes), make_members([0] * 4)
    for number, size, letter in given_texts:
        index.add(hash_prefixes(bytes([letter]) * size), members[number])
        assert len(index) <= max_hashes


def test_what_is_used_again_outlives_what_is_not() -> None:
    index, member = PrefixIndex(max_hashes=8), make_member(0)
    often, once = hash_prefixes(bytes(1024)), hash_prefixes(b"1" * 1024)
    index.add(once, member)
    for letter in b"abcdef":
        index.add(often, member)
        index.add(hash_prefixes(bytes([letter]) * 1024), member)
    assert list(index.holders(often)) == [[member], [member]]
    assert list(index.holders(once)) == []


def test_a_member_that_restarted_holds_nothing() -> None:
    index, members = PrefixIndex(), make_members([0, 0])
    marks = hash_prefixes(bytes(600))
    for member in members:
        index.add(marks, member)
    members[0].incarnation += 1
    assert list(index.holders(marks)) == [[members[1]]]


@given(
    size=st.integers(2, 16),
    head=st.binary(min_size=512, max_size=4000),
    tails=st.lists(st.binary(max_size=400), min_size=1, max_size=20),
)
def test_equal_prefixes_go_to_one_instance_while_loads_are_balanced(
    size: int, head: bytes, tails: list[bytes]
) -> None:
    fleet = make_fleet("prefix_affinity", size)
    chosen = [serve(fleet, 1, RoutingHints(head + tail))[0] for tail in tails]
    assert set(chosen) == {chosen[0]}


def test_without_affinity_equal_prefixes_would_be_spread() -> None:
    assert len(set(serve(make_fleet("least_load", 4), 20, RoutingHints(bytes(2000))))) == 4


@given(
    size=st.integers(2, 8), count=st.integers(1, 60), text=st.binary(min_size=600, max_size=5000)
)
def test_a_popular_prefix_is_spread_when_its_holder_has_much_more_to_do(
    size: int, count: int, text: bytes
) -> None:
    """None of these legs ends. The most loaded instance may have one and a half times the load of
    the least loaded, plus a few legs.
    """
    fleet, weight = make_fleet("prefix_affinity", size), leg_weight(Role.PREFILL, len(text))
    for _ in range(count):
        hints = RoutingHints(text)
        instance = fleet.choose(Role.PREFILL, hints, 0.0)
        assert instance is not None
        fleet.begin(instance, 0.0, hints)
    most, least = (pick(member.load for member in fleet.members()) for pick in (max, min))
    assert most <= 1.5 * least + 3 * weight
    assert count <= 3 or least > 0 or size > 2


def test_without_the_bound_a_popular_prefix_would_stay_with_one() -> None:
    policy, members, hints = (
        PrefixAffinity(max_ratio=1e9, slack_legs=10**9),
        make_members([0, 0, 0]),
        RoutingHints(bytes(1000)),
    )
    for _ in range(30):
        chosen, _ = policy.choose(members, hints)
        policy.note_begun(chosen, hints)
        chosen.load += 2024
    assert sorted(member.load for member in members) == [0, 0, 30 * 2024]


def test_the_longest_beginning_counts() -> None:
    fleet = make_fleet("prefix_affinity", 3)
    short, long = bytes(1024), bytes(1024) + b"x" * 2048
    fleet.end(fleet.begin(make_instance(1), 0.0, RoutingHints(short)), Outcome.ANSWERED, 0.0)
    fleet.end(fleet.begin(make_instance(2), 0.0, RoutingHints(long)), Outcome.ANSWERED, 0.0)
    assert serve(fleet, 1, RoutingHints(long + b"y" * 600)) == [make_instance(2)]
    assert fleet.reasons(Role.PREFILL) == {"prefix": 1}


# -- conversations --


@given(size=st.integers(1, 8), data=st.data())
def test_a_conversation_returns_to_its_instance_whatever_its_load(
    size: int, data: st.DataObject
) -> None:
    fleet = make_fleet("conversation_affinity", size, Role.DECODE)
    last = make_instance(data.draw(st.integers(0, size - 1)), Role.DECODE)
    for _ in range(data.draw(st.integers(0, 5))):
        fleet.begin(last, 0.0)
    assert fleet.choose(Role.DECODE, RoutingHints(conversation=last), 0.0) == last


def test_a_conversation_whose_instance_is_gone_goes_to_the_least_loaded() -> None:
    fleet = make_fleet("conversation_affinity", 3, Role.DECODE)
    last = make_instance(0, Role.DECODE)
    fleet.begin(make_instance(1, Role.DECODE), 0.0)
    for leave in (fleet.drain, fleet.remove):
        leave(last)
        assert fleet.choose(Role.DECODE, RoutingHints(conversation=last), 0.0) == make_instance(
            2, Role.DECODE
        )


def test_the_prefill_side_of_a_conversation_falls_back_to_the_prefix() -> None:
    fleet = make_fleet("conversation_affinity", 4)
    hints = RoutingHints(bytes(4096))
    assert len({serve(fleet, 1, hints)[0] for _ in range(4)}) == 1


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match="'best' is not a routing policy; choose one of round_robin, least_load, "
        "power_of_two, prefix_affinity",
    ):
        Fleet(FleetOptions(policies=dict.fromkeys(Role, "best")), random.random)


@given(one=st.integers(0, 10**8), other=st.integers(0, 10**8))
def test_a_prefill_is_a_load_by_its_length_and_a_decode_is_one(one: int, other: int) -> None:
    assert (leg_weight(Role.PREFILL, one) > leg_weight(Role.PREFILL, other)) == (one > other)
    assert leg_weight(Role.DECODE, one) == leg_weight(Role.DECODE, other) == 1
