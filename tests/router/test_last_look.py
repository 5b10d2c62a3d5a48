"""A ticket that comes just after the client has left is handed back; a leg that takes longer is cancelled."""

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest

from kvferry.errors import TransportError
from kvferry.router.last_look import LastLook
from kvferry.router.legs import Handover
from kvferry.types import Address

HANDOVER = Handover(msgspec.Raw(b"{}"), "ticket", Address("127.0.0.1", 5600))


@dataclass
class Recorded:
    handed_back: list[Handover] = field(default_factory=list)

    def release(self, handover: Handover) -> None:
        self.handed_back.append(handover)


async def leave(last_look: LastLook, leg: "asyncio.Future[Handover | None]") -> None:
    """A handler whose client leaves while P works."""

    async def wait_for_leg() -> Handover | None:
        return await leg

    handler = asyncio.create_task(last_look.run(wait_for_leg()))
    await asyncio.sleep(0)
    handler.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handler


def test_a_ticket_on_its_way_is_handed_back() -> None:
    async def scene() -> None:
        releases = Recorded()
        last_look = LastLook(releases)
        leg: asyncio.Future[Handover | None] = asyncio.get_running_loop().create_future()
        await leave(last_look, leg)
        leg.set_result(HANDOVER)
        await last_look.close()
        assert releases.handed_back == [HANDOVER]

    asyncio.run(scene())


def test_a_leg_that_takes_longer_is_cancelled() -> None:
    async def scene() -> None:
        releases = Recorded()
        last_look = LastLook(releases)
        leg: asyncio.Future[Handover | None] = asyncio.get_running_loop().create_future()
        await leave(last_look, leg)
        await last_look.close()
        assert leg.cancelled()
        assert releases.handed_back == []

    asyncio.run(scene())


@pytest.mark.parametrize("outcome", [None, TransportError("P is gone")])
def test_a_leg_without_a_ticket_hands_nothing_back(outcome: TransportError | None) -> None:
    async def scene() -> None:
        releases = Recorded()
        last_look = LastLook(releases)
        leg: asyncio.Future[Handover | None] = asyncio.get_running_loop().create_future()
        await leave(last_look, leg)
        leg.set_exception(outcome) if outcome else leg.set_result(None)
        await last_look.close()
        assert releases.handed_back == []

    asyncio.run(scene())


def test_what_the_leg_brings_reaches_a_client_that_stays() -> None:
    async def scene() -> None:
        async def leg() -> Handover:
            return HANDOVER

        assert await LastLook(Recorded()).run(leg()) == HANDOVER

    asyncio.run(scene())
