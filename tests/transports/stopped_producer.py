"""A reader whose producer is stopped in the middle of a read, over TCP. Run as a program, because
UCX selects its transports once per process.

The program prints as JSON whether the cancelled read was reported as ended while the producer was
stopped, how it ended, and how many bytes arrived after the memory had been overwritten. Its only
argument is the cancel timeout of the transport in seconds.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np

from kvferry.transports.base import Completion, Segments, TransportOffer
from kvferry.transports.nixl.transport import NetworkReach, NixlTransport
from kvferry.types import EngineId, Epoch, PeerId, Region

BLOCKS, BLOCK_BYTES = 256, 256 * 1024
PEER = PeerId(EngineId("p"), Epoch("e"), 0)
STOPPED_S, DEADLINE_S = 4.0, 30.0
TURNS = 1000
"""Far more polls than the producer needs to send all requested bytes."""


def regions_at(address: int) -> list[Region]:
    return [Region("kv", address, BLOCK_BYTES, BLOCK_BYTES, BLOCKS)]


def serve(pipe: Connection) -> None:
    memory = np.full(BLOCKS * BLOCK_BYTES, 7, np.uint8)
    transport = NixlTransport(num_threads=1, reach=NetworkReach.THIS_HOST)
    assert transport.register(regions_at(memory.ctypes.data))
    pipe.send((transport.offer(), regions_at(memory.ctypes.data)))
    while turns := pipe.recv():
        for _ in range(turns):
            transport.poll()
            time.sleep(0.0005)
        pipe.send(turns)
    transport.close()


def poll_until_ended(transport: NixlTransport, seconds: float) -> list[Completion]:
    until, ended = time.monotonic() + seconds, list[Completion]()
    while not ended and time.monotonic() < until:
        ended = transport.poll()
        time.sleep(0.001)
    return ended


def poll_until_all_was_sent(
    transport: NixlTransport, pipe: Connection, producer: BaseProcess
) -> list[Completion]:
    """Poll until the producer has sent everything or has died: UCX ends a process whose reader left
    in the middle of a read (docs/faults.md).
    """
    pipe.send(TURNS)
    until, ended = time.monotonic() + DEADLINE_S, list[Completion]()
    while producer.is_alive() and not pipe.poll(0.001):
        assert time.monotonic() < until
        ended += transport.poll()
    for _ in range(100):
        ended += transport.poll()
    return ended


def start_producer() -> tuple[BaseProcess, Connection, TransportOffer, list[Region]]:
    """Start a producer that polls as often as each number it receives; 0 closes it."""
    ours, theirs = multiprocessing.Pipe()
    producer = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs,), daemon=True
    )
    producer.start()
    theirs.close()
    assert ours.poll(DEADLINE_S)
    offer, regions = ours.recv()
    return producer, ours, offer, regions


def main(patience_s: float) -> None:
    producer, ours, offer, regions = start_producer()
    memory = np.zeros(BLOCKS * BLOCK_BYTES, np.uint8)
    transport = NixlTransport(
        num_threads=1, reach=NetworkReach.THIS_HOST, cancel_timeout_s=patience_s
    )
    assert transport.register(regions_at(memory.ctypes.data))
    transport.connect(PEER, offer, regions)
    offsets = np.arange(BLOCKS, dtype=np.int64) * BLOCK_BYTES
    handle = transport.read(
        PEER, [Segments(0, 0, BLOCK_BYTES, offsets[::2].copy(), offsets[1::2].copy())]
    )
    while int(np.count_nonzero(memory[::BLOCK_BYTES])) < 8:
        ours.send(1)  # a poll sends a few of the 32 MiB
        ours.recv()
        assert not transport.poll()
    os.kill(producer.pid or 0, signal.SIGSTOP)
    try:
        transport.cancel(handle)
        while_stopped = poll_until_ended(transport, STOPPED_S)
        memory[:] = 99
    finally:
        os.kill(producer.pid or 0, signal.SIGCONT)
    ended = while_stopped + poll_until_all_was_sent(transport, ours, producer)
    stale = int(np.count_nonzero(memory != 99))
    print(
        json.dumps(
            {
                "ended_while_stopped": bool(while_stopped),
                "ended": [each.error for each in ended],
                "stale_bytes": stale,
            }
        )
    )
    if producer.is_alive():
        ours.send(0)
    producer.join(DEADLINE_S)
    transport.close()


if __name__ == "__main__":
    main(float(sys.argv[1]))
