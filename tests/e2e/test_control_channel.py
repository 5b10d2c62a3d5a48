"""Tests faults of the side channel and the control channel (slow, silent, cut, half open) while D
could still read the KV.

KV moves through shared memory here, so D can read even bytes that it must not use: only the
confirmation is missing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import aiohttp
import pytest
from tests.e2e.conftest import SHORT
from tests.e2e.handovers import (
    FAILED,
    FINISHED,
    assert_ended_well,
    assert_recovers,
    count,
    fresh,
    hand_over,
    is_loading,
)
from tests.e2e.harness import Cluster, Engine, ask, assert_quiescent, new_session
from tests.e2e.proxied_engine import BEHIND, Channels

from kvferry.testing.fault_proxy import FaultProxy, ProxyDirection, ProxySide

pytestmark = pytest.mark.slow

SILENCE = (
    "no longer answers heartbeats",
    "did not confirm",
    "did not answer the handshake",
    "was lost",
)


@dataclass(frozen=True)
class Place:
    p: Engine
    decoders: dict[str, Engine]
    """The decode engines by failure policy."""
    channels: Channels


@pytest.fixture(scope="module")
def place(shared: Cluster) -> Iterator[Place]:
    starting = {
        policy: shared.serve(f"decode behind {policy}", extra=SHORT, policy=policy)
        for policy in ("fail", "recompute")
    }
    p = shared.serve("prefill behind", extra=SHORT, at=BEHIND).ready()
    decoders = {policy: process.ready() for policy, process in starting.items()}
    with Channels.opened(p) as channels:
        yield Place(p, decoders, channels)
    for engine in (p, *decoders.values()):
        shared.dismiss(engine.process)


def play(
    place: Place, plain: Engine, story: Callable[[aiohttp.ClientSession], Awaitable[None]]
) -> None:
    """Run a story after every D has fetched from P once. Then let the channels flow, and check that
    every D can fetch from P again and that every block is free.
    """

    async def whole() -> None:
        async with new_session() as session:
            for d in place.decoders.values():
                await assert_recovers(session, place.p, d, plain)
            try:
                await story(session)
            finally:
                place.channels.flow()
            for d in place.decoders.values():
                await assert_recovers(session, place.p, d, plain)
            await assert_quiescent(session, place.p, *place.decoders.values())

    asyncio.run(whole())


async def assert_nothing_comes_over(
    session: aiohttp.ClientSession, place: Place, plain: Engine
) -> None:
    """Check that requests end by the failure policy, one after another, and that none uses KV that
    P did not confirm.
    """
    finished = [await count(session, d, FINISHED) for d in place.decoders.values()]
    for _ in range(2):
        prompt = fresh()
        right = await ask(session, plain, prompt)
        answers = await asyncio.gather(
            *(hand_over(session, place.p, d, prompt) for d in place.decoders.values())
        )
        for policy, answer in zip(place.decoders, answers, strict=True):
            assert_ended_well(answer, right, policy, *SILENCE)
    assert [await count(session, d, FINISHED) for d in place.decoders.values()] == finished


@pytest.mark.parametrize(
    "directions",
    [(), (ProxyDirection.TO_SERVER,), (ProxyDirection.TO_CLIENT,)],
    ids=["both ways", "towards P", "towards D"],
)
def test_a_channel_that_stalls_is_as_the_death_of_p(
    place: Place, plain: Engine, directions: tuple[ProxyDirection, ...]
) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        place.channels.all(lambda proxy: proxy.stall(*directions))
        await assert_nothing_comes_over(session, place, plain)
        # Meanwhile P's leases end, because P received D's Confirm or because they expired.
        await assert_quiescent(session, place.p, *place.decoders.values())

    play(place, plain, story)


def test_a_channel_that_is_reset_under_a_request_fails_it_and_the_next_works(
    place: Place, plain: Engine
) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        prompt = fresh()
        right = await ask(session, plain, prompt)
        place.channels.all(lambda proxy: proxy.stall(ProxyDirection.TO_CLIENT))
        asked = {
            policy: asyncio.create_task(hand_over(session, place.p, d, prompt))
            for policy, d in place.decoders.items()
        }
        while not await is_loading(session, place.decoders.values()):
            assert not any(task.done() for task in asked.values())
        place.channels.all(FaultProxy.reset)
        place.channels.flow()
        for policy, task in asked.items():
            assert_ended_well(await task, right, policy, *SILENCE)

    play(place, plain, story)


def test_a_half_open_channel_whose_server_is_gone_is_noticed_by_silence(
    place: Place, plain: Engine
) -> None:
    """D's connection looks good, but no server receives the Confirm that D sends. The next request
    connects again and works.
    """

    async def story(session: aiohttp.ClientSession) -> None:
        prompt = fresh()
        right = await ask(session, plain, prompt)
        place.channels.all(lambda proxy: proxy.vanish(ProxySide.SERVER))
        answers = await asyncio.gather(
            *(hand_over(session, place.p, d, prompt) for d in place.decoders.values())
        )
        for policy, answer in zip(place.decoders, answers, strict=True):
            assert_ended_well(answer, right, policy, *SILENCE)

    play(place, plain, story)


@pytest.mark.parametrize(
    "bad",
    [FaultProxy.reset, lambda proxy: proxy.vanish(ProxySide.CLIENT)],
    ids=["reset", "half open, D gone"],
)
def test_a_channel_lost_between_requests_costs_nothing(
    place: Place, plain: Engine, bad: Callable[[FaultProxy], None]
) -> None:
    """D notices the loss and connects again, at the latest with the next request."""

    async def story(session: aiohttp.ClientSession) -> None:
        accepted = [proxy.num_accepted for proxy in place.channels.proxies]
        place.channels.all(bad)
        for d in place.decoders.values():
            await assert_recovers(session, place.p, d, plain)
        assert all(
            proxy.num_accepted >= before + 2
            for proxy, before in zip(place.channels.proxies, accepted, strict=True)
        )

    play(place, plain, story)


def test_a_channel_cut_in_the_middle_of_a_handshake_fails_by_its_deadline(
    place: Place, plain: Engine
) -> None:
    """Too few bytes pass for a ZeroMQ handshake to complete: ZeroMQ connects again and again and
    never succeeds.
    """

    async def story(session: aiohttp.ClientSession) -> None:
        place.channels.all(FaultProxy.reset)
        place.channels.all(lambda proxy: proxy.cut_after(100, ProxyDirection.TO_CLIENT))
        await assert_nothing_comes_over(session, place, plain)

    play(place, plain, story)


def test_a_delayed_channel_changes_nothing_but_the_time(place: Place, plain: Engine) -> None:
    """Every message is delayed by 0.1 s in each direction; D waits 2 s for an answer."""

    async def story(session: aiohttp.ClientSession) -> None:
        failed = [await count(session, d, FAILED) for d in place.decoders.values()]
        place.channels.all(lambda proxy: proxy.delay(0.1))
        prompts = [fresh() for _ in range(4)]
        for d in place.decoders.values():
            answers = await asyncio.gather(
                *(hand_over(session, place.p, d, prompt) for prompt in prompts)
            )
            assert answers == list(
                await asyncio.gather(*(ask(session, plain, prompt) for prompt in prompts))
            )
        assert [await count(session, d, FAILED) for d in place.decoders.values()] == failed

    play(place, plain, story)
