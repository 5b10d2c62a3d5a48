"""Tests when an engine that hangs is ejected although its API server answers probes.

Only a token count that grew shows that an engine computes: neither a first reading nor a page that
shows no counts does.
"""

import asyncio
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import uvloop
from aiohttp import web
from tests.router.fleet_world import make_fleet, make_instance
from tests.router.stubs import Behaviour, Stage, StubEngine, completes, hangs, prefills, stage
from tests.router.test_blame import states
from tests.router.test_concurrent_legs import KEY, pushes

from kvferry.router.fleet.fleet import Fleet
from kvferry.router.fleet.health import HealthOptions

A = make_instance(0)
QUICK: dict[str, Any] = {"answer": 0.6, "stall_s": 0.4, "probe_interval_s": 0.05}
MANY = 30
"""Far more legs than an engine that hangs gets before it is ejected."""


def counting(engine: StubEngine, behaviour: Behaviour) -> Behaviour:
    """Behaves as `behaviour` and computes tokens, as the engine's `/metrics` page shows."""

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        engine.num_tokens = (engine.num_tokens or 0) + 7
        return await behaviour(request, body)

    return behave


async def post_until_ejected(s: Stage, hung: StubEngine) -> bool:
    """Send requests from six clients, so that legs overlap; False if the engine that hangs is not
    ejected after `MANY` legs. It may be back at once, for a trial.
    """
    was_ejected = False

    async def send(number: int) -> None:
        nonlocal was_ejected
        await asyncio.sleep(number * QUICK["answer"] / 6)
        while len(hung.calls) < MANY and not was_ejected:
            await s.post({"prompt": "a"})
            was_ejected = was_ejected or "ejected" in await states(s)

    await asyncio.gather(*(send(number) for number in range(6)))
    return was_ejected


@pytest.mark.parametrize("is_push", [False, True])
def test_a_d_that_hangs_is_ejected_under_steady_load(is_push: bool) -> None:
    """In push, each failed leg makes the router read anew whether D pushes."""

    async def scene() -> None:
        prefill = pushes if is_push else prefills
        async with stage(
            prefill, [completes, completes], push_key=KEY if is_push else None, **QUICK
        ) as s:
            for engine in (s.p, *s.decoders):
                engine.behaviour = counting(engine, engine.behaviour)
            for _ in range(4):
                assert (await s.post({"prompt": "a"}))[0] == 200
            s.d.behaviour = hangs
            assert await post_until_ejected(s, s.d)

    uvloop.run(scene())


def test_in_push_a_p_that_hangs_gets_no_d_ejected() -> None:
    """Both legs time out together. A D that computes nothing has no KV yet, and is not at fault."""

    async def scene() -> None:
        async with stage(pushes, [completes, completes], push_key=KEY, **QUICK) as s:
            for engine in (s.p, *s.decoders):
                engine.num_tokens = 0
            for _ in range(4):
                assert (await s.post({"prompt": "a"}))[0] == 200
            for engine in (s.p, *s.decoders):
                engine.behaviour = hangs
            answers = await asyncio.gather(*(s.post({"prompt": "a"}) for _ in range(12)))
            assert {status for status, *_ in answers} == {504}
            assert await s.metric("kvferry:router_legs_at_once") >= 12
            assert await states(s) == ["suspect", "healthy", "healthy"]

    uvloop.run(scene())


def misses_every_other_probe(engine: StubEngine) -> None:
    engine.is_stopped = not engine.is_stopped


def shows_its_page_every_other_time(engine: StubEngine) -> None:
    engine.mode = "" if engine.mode else "push"


@pytest.mark.parametrize("spoil", [misses_every_other_probe, shows_its_page_every_other_time])
def test_an_engine_that_hangs_is_ejected_if_only_every_other_probe_shows_it(
    spoil: Callable[[StubEngine], None],
) -> None:
    async def scene() -> None:
        # Failed probes alone eject nobody here.
        settings = QUICK | {"probe": 0.1, "probe_ejected_s": 0.05, "max_failed_probes": 1000}
        async with stage([hangs, prefills], completes, **settings) as s:
            s.p.num_tokens = 0
            s.p.before_probe = lambda: spoil(s.p)
            assert await post_until_ejected(s, s.p)

    uvloop.run(scene())


# -- the rule, without a clock --


def probed(*readings: tuple[float, tuple[float | None, float | None]]) -> Fleet:
    """A fleet whose only instance got these readings, each at its time."""
    fleet = make_fleet("round_robin", 1, health=HealthOptions(stall_s=60))
    for now, counts in readings:
        fleet.note_tokens(A, counts, now)
    return fleet


def has_stalled(fleet: Fleet, began: float, now: float) -> bool:
    return fleet.has_stalled(fleet.begin(A, began), now)


def test_an_engine_has_stalled_if_no_count_grew_for_the_time_of_a_leg() -> None:
    fleet = probed((0, (5, 9)), (40, (5, 9)), (70, (5, 9)))
    assert has_stalled(fleet, began=10, now=70)
    assert not has_stalled(fleet, began=11, now=70), "the leg is not old enough"


def test_the_time_in_which_a_d_waits_for_p_does_not_count() -> None:
    fleet = probed((0, (5, 9)), (40, (5, 9)), (70, (5, 9)))
    leg = fleet.begin(A, 1)
    assert fleet.has_stalled(leg, 70, ready_at=10)
    assert not fleet.has_stalled(leg, 70, ready_at=11)
    assert not fleet.has_stalled(leg, 70, ready_at=inf), "P has not answered yet"


@pytest.mark.parametrize("counts", [(6, 9), (5, 10), (None, 10)])
def test_a_count_that_grew_is_progress(counts: tuple[float | None, float]) -> None:
    fleet = probed((0, (5, 9)), (40, counts), (70, counts))
    assert not has_stalled(fleet, began=10, now=70)
    assert has_stalled(probed((0, (5, 9)), (9, counts), (70, counts)), began=10, now=70)


@pytest.mark.parametrize("nothing", [(None, None), (None, 9)])
def test_counts_that_are_missing_once_are_no_progress(nothing: tuple[None, float | None]) -> None:
    fleet = probed((0, (5, 9)), (30, nothing), (40, (5, 9)))
    assert has_stalled(fleet, began=10, now=70)


def test_a_first_reading_is_no_progress_and_shows_no_standstill_either() -> None:
    fleet = probed((20, (5, 9)))
    assert not has_stalled(fleet, began=10, now=100), "nothing to compare with"
    fleet.note_tokens(A, (5, 9), 70)
    assert not has_stalled(fleet, began=10, now=79), "it was watched for less than stall_s"
    assert has_stalled(fleet, began=10, now=80)


def test_an_engine_that_shows_no_counts_has_not_stalled() -> None:
    assert not has_stalled(probed((20, (None, None)), (70, (None, None))), began=10, now=100)
    # Nor has an engine whose page has shown none since the request came.
    assert not has_stalled(probed((5, (5, 9)), (70, (None, None))), began=10, now=100)


@pytest.mark.parametrize("is_announced", [False, True])
def test_a_new_incarnation_is_watched_anew(is_announced: bool) -> None:
    fleet = probed((0, (5, 9)), (30, (5, 9)))
    if is_announced:
        fleet.restarted(A, 50)
    fleet.note_tokens(A, (0, 0), 50)
    fleet.note_tokens(A, (0, 0), 90)
    assert not has_stalled(fleet, began=10, now=109)
    assert has_stalled(fleet, began=10, now=110)
