"""A reader whose producer is stopped in the middle of a read, over TCP. Run as a program, because UCX chooses its transports once.

Prints as JSON whether the cancelled read was said to have ended while the producer was stopped, whether it ended afterwards, and how many
bytes were written after it had ended.
"""

import json
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import numpy as np

from kvferry.planes.nixl import NetworkReach, NixlDataPlane
from kvferry.ports.data import Completion, Pieces, PlaneOffer
from kvferry.types import EngineId, Epoch, PeerId, Region

BLOCKS, BLOCK_BYTES = 256, 256 * 1024
PEER = PeerId(EngineId("p"), Epoch("e"), 0)
STOPPED_S, DEADLINE_S = 12.0, 30.0
"""Longer than any patience that was ever tried."""


def regions_at(address: int) -> list[Region]:
    return [Region("kv", address, BLOCK_BYTES, BLOCK_BYTES, BLOCKS)]


def serve(pipe: Connection) -> None:
    memory = np.full(BLOCKS * BLOCK_BYTES, 7, np.uint8)
    plane = NixlDataPlane(num_threads=1, reach=NetworkReach.THIS_HOST)
    assert plane.register(regions_at(memory.ctypes.data))
    pipe.send((plane.offer(), memory.ctypes.data))
    while not pipe.poll(0.0005):
        plane.poll()
    plane.close()


def poll_until_ended(plane: NixlDataPlane, seconds: float) -> list[Completion]:
    until, ended = time.monotonic() + seconds, list[Completion]()
    while not ended and time.monotonic() < until:
        ended = plane.poll()
        time.sleep(0.001)
    return ended


def main() -> None:
    ours, theirs = multiprocessing.Pipe()
    producer = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    producer.start()
    assert ours.poll(DEADLINE_S)
    offer, address = ours.recv()
    memory = np.zeros(BLOCKS * BLOCK_BYTES, np.uint8)
    plane = NixlDataPlane(num_threads=1, reach=NetworkReach.THIS_HOST)
    assert plane.register(regions_at(memory.ctypes.data))
    plane.connect(PEER, PlaneOffer(offer.plane, offer.reach, offer.blob), regions_at(address))
    offsets = np.arange(BLOCKS, dtype=np.int64) * BLOCK_BYTES
    plane.read(PEER, [Pieces(0, 0, BLOCK_BYTES, offsets[:1], offsets[:1])])
    assert poll_until_ended(plane, DEADLINE_S)
    handle = plane.read(PEER, [Pieces(0, 0, BLOCK_BYTES, offsets[::2].copy(), offsets[1::2].copy())])
    while int(np.count_nonzero(memory[::BLOCK_BYTES])) < 8:
        plane.poll()
    os.kill(producer.pid or 0, signal.SIGSTOP)
    try:
        plane.cancel(handle)
        while_stopped = poll_until_ended(plane, STOPPED_S)
        memory[:] = 99 if while_stopped else memory
    finally:
        os.kill(producer.pid or 0, signal.SIGCONT)
    afterwards = while_stopped or poll_until_ended(plane, DEADLINE_S)
    memory[:] = 99
    poll_until_ended(plane, 2.0)
    stale = int(np.count_nonzero(memory != 99))
    print(json.dumps({"ended_while_stopped": bool(while_stopped), "ended": [each.error for each in afterwards], "stale_bytes": stale}))
    ours.send("end")
    producer.join(DEADLINE_S)
    plane.close()


if __name__ == "__main__":
    main()
