"""Compares routing policies, and tests the circuit breaker against dead instances, in a simulated
fleet. Only counts are compared.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.fleet_world import Engine, World, conversation_texts, make_fleet, make_instance

from kvferry.router.fleet.health import HealthOptions
from kvferry.router.fleet.policies import POLICIES


def simulate(policy: str, engines: list[Engine], arrivals: list[tuple[float, bytes]]) -> World:
    fleet = make_fleet(policy, len(engines))
    world = World(fleet, {make_instance(number): engine for number, engine in enumerate(engines)})
    world.run(sorted(arrivals))
    assert (world.num_answered, world.num_lost) == (len(arrivals), 0)
    assert [member.load for member in fleet.members()] == [0] * len(engines)
    return world


def chats(num: int, turns: int, every_s: float, system: str = "") -> list[tuple[float, bytes]]:
    """The turns of every conversation, about `every_s` apart. The conversations are not in step,
    because round robin would then find the right instance by chance.
    """
    pauses = random.Random(5)
    arrivals = []
    for number in range(num):
        at = 0.0
        for text in conversation_texts(f"client{number}", turns, 1500, system):
            at += (0.5 + pauses.random()) * every_s
            arrivals.append((at, text))
    return arrivals


def test_prefix_affinity_finds_more_cached_than_the_others_and_still_balances() -> None:
    arrivals = chats(num=40, turns=6, every_s=2.0)
    worlds = {
        name: simulate(name, [Engine(max_cached=256) for _ in range(4)], arrivals)
        for name in POLICIES
    }
    hits = {name: world.cached_bytes for name, world in worlds.items()}
    assert hits["prefix_affinity"] > 1.5 * max(
        hits["round_robin"], hits["least_load"], hits["power_of_two"]
    )
    sent = worlds["prefix_affinity"].sent
    assert max(sent.values()) < 2 * min(sent.values())


def test_a_system_prompt_that_all_share_does_not_draw_all_to_one_instance() -> None:
    arrivals = chats(num=60, turns=3, every_s=0.4, system="be helpful " * 400)
    sent = simulate(
        "prefix_affinity", [Engine(bytes_per_s=1e5, max_cached=256) for _ in range(4)], arrivals
    ).sent
    assert len(sent) == 4
    assert max(sent.values()) < 0.6 * len(arrivals)


def test_policies_that_look_at_load_spare_a_slow_instance() -> None:
    arrivals = [(number * 0.01, f"{number}".encode() * 800) for number in range(600)]
    shares = {}
    for name in ("round_robin", "least_load", "power_of_two"):
        world = simulate(
            name,
            [Engine(bytes_per_s=2.5e4)] + [Engine(bytes_per_s=2.5e5) for _ in range(3)],
            arrivals,
        )
        shares[name] = world.sent[make_instance(0)] / len(arrivals)
    assert shares["round_robin"] == 0.25
    assert shares["least_load"] < 0.15
    assert shares["power_of_two"] < 0.2


def run_with_a_death(policy: str, health: HealthOptions) -> World:
    """One of four instances is dead from 5 s to 25 s, at 50 requests per second."""
    engines = [Engine() for _ in range(4)]
    engines[0].dead = [(5.0, 25.0)]
    world = World(
        make_fleet(policy, 4, health=health),
        {make_instance(number): engine for number, engine in enumerate(engines)},
    )
    world.run([(number * 0.02, b"%d" % number * 300) for number in range(3000)])
    assert (world.num_answered, world.num_lost) == (3000, 0)
    return world


@pytest.mark.parametrize("policy", ["round_robin", "least_load", "power_of_two", "prefix_affinity"])
def test_a_dead_instance_is_sent_little_and_comes_back_soon(policy: str) -> None:
    world = run_with_a_death(policy, HealthOptions())
    assert len(world.sent_to_dead) <= 3
    back = min(at for at in world.answered_at[make_instance(0)] if at >= 25.0)
    assert back < 25.0 + 2 * HealthOptions().probe_ejected_s


def test_without_probes_a_dead_instance_is_tried_now_and_then() -> None:
    world = run_with_a_death("least_load", HealthOptions(probe_interval_s=0))
    assert 3 < len(world.sent_to_dead) <= 3 + 5


def test_without_ejection_a_dead_instance_would_draw_legs_all_the_time() -> None:
    world = run_with_a_death(
        "least_load",
        HealthOptions(failures_in_a_row=10**6, window_legs=10**6, max_failed_probes=10**6),
    )
    assert len(world.sent_to_dead) > 200


deaths = st.lists(st.tuples(st.integers(1, 7), st.floats(0.1, 10), st.floats(0.5, 5)), max_size=12)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=20)
@given(deaths=deaths)
def test_no_request_is_lost_while_somebody_lives_and_a_death_costs_few_legs(
    policy: str, deaths: list[tuple[int, float, float]]
) -> None:
    """The first of eight instances never dies. Each death of another instance costs the failures
    that eject it, and a trial that was about to begin.
    """
    engines = [Engine() for _ in range(8)]
    for number, start, length in deaths:
        engines[number].dead.append((start, start + length))
    world = World(
        make_fleet(policy, 8),
        {make_instance(number): engine for number, engine in enumerate(engines)},
    )
    world.run([(number * 0.05, b"%d" % number * 300) for number in range(300)])
    assert (world.num_answered, world.num_lost) == (300, 0)
    assert len(world.sent_to_dead) <= 4 * len(deaths)
