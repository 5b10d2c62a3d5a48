"""A process that writes over tcp with a write grant as often as the test asks, and reports how each
write ended.
"""

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
from tests.transports.sides import tcp_side
from tests.transports.tcp_peers import DEADLINE_S, PEER

from kvferry.testing.transport_pairs import LARGE_BLOCK_BYTES, LARGE_BLOCKS, LARGE_REGION
from kvferry.transports.base import Segments, TransportOffer
from kvferry.types import Region


@dataclass
class WriterProcess:
    process: BaseProcess
    pipe: Connection

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def write(self, grant_id: int, repeats: int) -> None:
        """Write the whole large region, `repeats` times."""
        self.pipe.send((grant_id, repeats))

    def how_it_ended(self) -> str | None:
        assert self.pipe.poll(DEADLINE_S), "the write has not ended"
        error: str | None = self.pipe.recv()
        return error

    def close(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)
        self.pipe.close()


def start_writer(offer: TransportOffer, regions: tuple[Region, ...]) -> WriterProcess:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_write, args=(theirs, offer, regions), daemon=True
    )
    process.start()
    theirs.close()
    return WriterProcess(process, ours)


def _write(pipe: Connection, offer: TransportOffer, regions: tuple[Region, ...]) -> None:
    side = tcp_side()
    side.memory[:] = 5
    side.transport.connect(PEER, offer, regions)
    offsets = np.arange(LARGE_BLOCKS, dtype=np.int64) * LARGE_BLOCK_BYTES
    while True:
        grant_id, repeats = pipe.recv()
        side.transport.write(
            PEER,
            [Segments(LARGE_REGION, LARGE_REGION, LARGE_BLOCK_BYTES, offsets, offsets)] * repeats,
            grant_id,
        )
        while not (ended := side.transport.poll()):
            time.sleep(0.001)
        pipe.send(ended[0].error)
