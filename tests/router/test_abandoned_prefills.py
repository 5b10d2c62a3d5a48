"""Tests prefill legs that are abandoned before P has answered: P is told at once, and its blocks
are released by the id of the leg.
"""

import asyncio

import pytest
import uvloop
from tests.router.stubs import Stage, completes, drops_connection, hangs, prefills, stage
from tests.router.test_proxy import ONE

from kvferry.types import Address


async def leave(s: Stage) -> None:
    """Sends a request whose client leaves while P computes."""
    request = asyncio.create_task(s.post(ONE))
    await s.p.entered.wait()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


async def until_probed(s: Stage) -> None:
    """Wait until a probe has begun and ended."""
    num_looks = s.p.num_looks
    while s.p.num_looks < num_looks + 2:
        await asyncio.sleep(0.01)


def test_p_is_told_at_once_and_is_not_asked_again() -> None:
    async def scene() -> None:
        async with stage([hangs, completes], completes, max_retries=2) as s:
            await leave(s)
            await s.p.cancelled.wait()
            while await s.metric("kvferry:router_client_aborts_total") < 1:
                await asyncio.sleep(0)
            assert (s.releases.handovers, s.d.calls, s.prefillers[1].calls) == ([], [], [])

    uvloop.run(scene())


@pytest.mark.parametrize("ending", ["the client leaves", "P breaks off"])
def test_a_leg_without_an_answer_is_released_by_its_id(ending: str) -> None:
    """P's engine may have computed the prompt although its front-end sends no answer."""

    async def scene() -> None:
        behaviour = hangs if ending == "the client leaves" else drops_connection
        async with stage(behaviour, completes, probe_interval_s=0.02) as s:
            s.p.side_channel = "127.0.0.1:5600"
            await until_probed(s)
            if ending == "the client leaves":
                await leave(s)
            else:
                assert (await s.post(ONE))[0] == 502
            while not s.releases.legs:
                await asyncio.sleep(0.01)
            leg_id = s.p.calls[0].body["kv_transfer_params"]["leg_id"]
            assert s.releases.legs == [(Address("127.0.0.1", 5600), leg_id)]
            assert s.releases.handovers == []

    uvloop.run(scene())


def test_what_the_leg_brings_reaches_a_client_that_stays() -> None:
    async def scene() -> None:
        async with stage(prefills, completes, probe_interval_s=0.02) as s:
            s.p.side_channel = "127.0.0.1:5600"
            await until_probed(s)
            assert (await s.post(ONE))[0] == 200
            assert (len(s.d.calls), s.releases.handovers, s.releases.legs) == (1, [], [])

    uvloop.run(scene())


def test_a_router_that_is_closed_while_p_computes_releases_the_leg() -> None:
    async def scene() -> None:
        async with stage(hangs, completes, probe_interval_s=0.02) as s:
            s.p.side_channel = "127.0.0.1:5600"
            await until_probed(s)
            request = asyncio.create_task(s.post(ONE))
            await s.p.entered.wait()
        await asyncio.gather(request, return_exceptions=True)
        leg_id = s.p.calls[0].body["kv_transfer_params"]["leg_id"]
        assert s.releases.legs == [(Address("127.0.0.1", 5600), leg_id)]

    uvloop.run(scene())
