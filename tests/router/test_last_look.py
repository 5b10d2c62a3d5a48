"""A ticket that comes just after the client has left is handed back; a leg that takes longer is cancelled."""

import asyncio
from typing import Any

import pytest
import uvloop
from aiohttp import web
from tests.router.stubs import Behaviour, Stage, completes, drops_connection, hangs, prefills, prefills_without_blocks, stage
from tests.router.test_proxy import ONE

from kvferry.router import last_look


def once(gone: asyncio.Event, then: Behaviour) -> Behaviour:
    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await gone.wait()
        return await then(request, body)

    return behave


async def leave(s: Stage) -> None:
    """A client that leaves while P works; returns when the router has noticed."""
    request = asyncio.create_task(s.post(ONE))
    await s.p.entered.wait()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    for _ in range(500):
        await asyncio.sleep(0)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes, comes in time."""
    monkeypatch.setattr(last_look, "GRACE_S", 60.0)


@pytest.mark.usefixtures("_patient")
def test_a_ticket_on_its_way_is_handed_back() -> None:
    async def scene() -> None:
        gone = asyncio.Event()
        async with stage(once(gone, prefills), completes) as s:
            await leave(s)
            assert s.releases.handovers == []
            gone.set()
            await s.releases.happened.wait()
            assert (s.releases.tickets, s.d.calls) == (["ticket-1"], [])

    uvloop.run(scene())


def test_a_leg_that_takes_longer_is_cancelled() -> None:
    async def scene() -> None:
        async with stage(hangs, completes) as s:
            await leave(s)
            await s.p.cancelled.wait()
            assert (s.releases.handovers, s.d.calls) == ([], [])

    uvloop.run(scene())


@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize("then", [prefills_without_blocks, drops_connection])
def test_a_leg_without_a_ticket_hands_nothing_back_and_is_not_tried_again(then: Behaviour) -> None:
    async def scene() -> None:
        gone = asyncio.Event()
        async with stage([once(gone, then), completes], completes, max_retries=2) as s:
            await leave(s)
            gone.set()
            while await s.metric("kvferry:router_client_aborts_total") < 1:
                await asyncio.sleep(0)
            assert (s.releases.handovers, s.d.calls, s.prefillers[1].calls) == ([], [], [])

    uvloop.run(scene())


def test_what_the_leg_brings_reaches_a_client_that_stays() -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            assert (await s.post(ONE))[0] == 200
            assert (len(s.d.calls), s.releases.handovers) == (1, [])

    uvloop.run(scene())
