"""A process that begins a long read through bounce buffers and says so, again and again; to be
killed or stopped in the middle of one.
"""

from multiprocessing.connection import Connection

from tests.transports.bounce_plans import shuffled
from tests.transports.sides import slow_bounce_side

from kvferry.transports.base import TransportOffer
from kvferry.types import EngineId, Epoch, PeerId, Region

__all__ = ["read_for_ever"]

PEER = PeerId(EngineId("far"), Epoch("1"), 0)


def read_for_ever(pipe: Connection, offer: TransportOffer, regions: tuple[Region, ...]) -> None:
    """After each read: its error, or None, and whether the bytes came."""
    side = slow_bounce_side()
    side.transport.connect(PEER, offer, regions)
    plan = shuffled(4096, seed=5, count=4000)
    while True:
        side.memory[:] = 0
        side.transport.read(PEER, plan)
        pipe.send("begun")
        while not (ended := side.transport.poll()):
            pass
        pipe.send((ended[0].error, bool(side.memory.any())))
