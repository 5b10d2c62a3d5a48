"""A side channel and a control channel that are slow, silent, cut or half open, while the bytes
themselves could still be read.

KV goes by shared memory here, so whatever D may not use is there all the same: only the
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

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
    """By policy."""
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
    """Everybody knows everybody; the story; then the channels flow, everybody works with everybody
    again, and every block is free.
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
    """Requests end by the failure policy, one after the other, none with KV that was not
    confirmed.
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
        # P's leases end meanwhile, by the confirmation it got or by running out.
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
    """D's connection looks good; the Confirm it sends is heard by nobody. The next request dials
    again and works.
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
    """D learns of it and dials again, at the latest with the next request."""

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
    """So few bytes pass that no greeting ever comes to its end: ZeroMQ dials again and again, in
    vain.
    """

    async def story(session: aiohttp.ClientSession) -> None:
        place.channels.all(FaultProxy.reset)
        place.channels.all(lambda proxy: proxy.cut_after(100, ProxyDirection.TO_CLIENT))
        await assert_nothing_comes_over(session, place, plain)

    play(place, plain, story)


def test_a_delayed_channel_changes_nothing_but_the_time(place: Place, plain: Engine) -> None:
    """A fifth of what D waits for an answer, on every message in both directions."""

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
