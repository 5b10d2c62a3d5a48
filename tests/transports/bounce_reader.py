"""A process that repeats a long read through bounce buffers and reports when each read begins. A
test kills or stops the process in the middle of a read.
"""

from multiprocessing.connection import Connection

from tests.transports.bounce_plans import shuffled
from tests.transports.sides import slow_bounce_side

from kvferry.transports.base import TransportOffer
from kvferry.types import EngineId, Epoch, PeerId, Region

PEER = PeerId(EngineId("far"), Epoch("1"), 0)


def read_for_ever(pipe: Connection, offer: TransportOffer, regions: tuple[Region, ...]) -> None:
    """Send after each read its error, or None, and whether bytes arrived."""
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
