"""The two processes of `kvferry bench transfer`: a producer that owns memory and serves it, a consumer that reads it in every way there is.

The producer ends when its pipe does, so also when the consumer is killed. Whatever is waited for has a deadline. A stop is noticed between
moves: what one of them has posted is not torn down under way.
"""

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from kvferry.bench.transfer_moves import Move
from kvferry.bench.transfer_raw_nixl import RawNixl
from kvferry.cli.interrupts import StopRequest
from kvferry.errors import KVFerryError, MissingDependency
from kvferry.planes.nixl import NetworkReach, NixlDataPlane
from kvferry.planes.shared_memory import SharedMemory
from kvferry.planes.shm import ShmDataPlane
from kvferry.planes.tcp import TcpDataPlane
from kvferry.ports.data import Completion, DataPlane, Pieces, PlaneOffer
from kvferry.types import EngineId, Epoch, PeerId, Region

__all__ = ["Consumer", "Producer", "Shape", "make_planes", "start_producer"]

PRODUCER = PeerId(EngineId("producer"), Epoch("1"), 0)
START_S = 60.0
MOVE_S = 120.0
END_S = 10.0
SERVING_S = 0.001
LOOK_S = 0.1
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """One side's memory: as many regions as a model might have layers, of equal size."""

    regions: int
    region_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.regions * self.region_bytes

    def registered(self, address: int) -> list[Region]:
        blocks = self.region_bytes // PAGE_BYTES
        return [Region(f"layer {n}", address + n * self.region_bytes, PAGE_BYTES, PAGE_BYTES, blocks) for n in range(self.regions)]


@dataclass(frozen=True, slots=True)
class Producer:
    """What the producer says of itself. `raw_nixl` is None where NIXL is not installed."""

    pid: int
    fd: int
    regions: list[Region]
    offers: dict[str, PlaneOffer]
    raw_nixl: bytes | None


def make_planes(memory: SharedMemory, regions: Sequence[Region]) -> tuple[dict[str, DataPlane], RawNixl | None]:
    """Every data plane of this machine over this memory, and NIXL bare. Without NIXL there is neither of the two."""
    planes: list[DataPlane] = [ShmDataPlane(memory), NixlDataPlane(reach=NetworkReach.THIS_HOST), TcpDataPlane("127.0.0.1", "127.0.0.1")]
    usable = {}
    for plane in planes:
        with contextlib.suppress(MissingDependency):
            if plane.register(regions):
                usable[plane.name] = plane
    raw = RawNixl(memory.address, memory.size_bytes) if "nixl" in usable else None
    return usable, raw


def serve(pipe: Connection, shape: Shape) -> None:
    """The producer's whole life: every 8 bytes say where they are, so that a reader can tell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both; the pipe's end is enough
    memory = SharedMemory.allocate(shape.total_bytes)
    np.frombuffer(memory.buffer, np.uint64)[:] = np.arange(1, shape.total_bytes // 8 + 1, dtype=np.uint64)
    regions = shape.registered(memory.address)
    planes, raw = make_planes(memory, regions)
    offers = {name: plane.offer() for name, plane in planes.items()}
    with contextlib.suppress(EOFError, OSError):  # the other side has ended
        pipe.send(Producer(os.getpid(), memory.fd, regions, offers, raw.metadata() if raw else None))
        while not pipe.poll(SERVING_S):
            for plane in planes.values():
                plane.poll()
            if raw is not None:
                raw.progress()
    if raw is not None:
        raw.close()
    for plane in planes.values():
        plane.close()
    memory.close()


@contextlib.contextmanager
def start_producer(shape: Shape, stop: StopRequest | None = None) -> Iterator[Producer]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, shape), daemon=True)
    process.start()
    theirs.close()
    try:
        try:
            _wait_for(ours, stop or StopRequest())
            producer: Producer = ours.recv()
        except EOFError as error:
            raise KVFerryError("the producer process ended before it was ready; its error is above") from error
        yield producer
    finally:
        ours.close()
        process.join(END_S)
        if process.is_alive():
            process.kill()
            process.join(END_S)


def _wait_for(pipe: Connection, stop: StopRequest) -> None:
    deadline = time.monotonic() + START_S
    while not pipe.poll(LOOK_S):
        stop.check()
        if time.monotonic() > deadline:
            raise KVFerryError(f"the producer process was not ready within {START_S:.0f} s; is the machine overloaded?")
    stop.check()  # Ctrl-C at a terminal may have ended the producer too


class Consumer:
    """Reads from the producer in every way: each plane, raw NIXL and plain memcpy."""

    def __init__(
        self, memory: SharedMemory, source: mmap.mmap, planes: dict[str, DataPlane], raw: RawNixl | None, stop: StopRequest
    ) -> None:
        self._memory = memory
        self._source_address = np.frombuffer(source, np.uint8).ctypes.data
        self._planes = planes
        self._raw = raw
        self._stop = stop
        self._pieces: list[Pieces] = []

    @classmethod
    @contextlib.contextmanager
    def connected(cls, shape: Shape, producer: Producer, stop: StopRequest | None = None) -> Iterator["Consumer"]:
        with ExitStack() as stack:
            memory = SharedMemory.allocate(shape.total_bytes)
            stack.callback(memory.close)
            planes, raw = make_planes(memory, shape.registered(memory.address))
            for name, plane in planes.items():
                stack.callback(plane.close)
                plane.connect(PRODUCER, producer.offers[name], producer.regions)
            if raw is not None and producer.raw_nixl is not None:
                stack.callback(raw.close)
                raw.connect(producer.raw_nixl, producer.regions[0].address)
            source = _map(producer, shape.total_bytes)
            stack.callback(source.close)
            yield cls(memory, source, planes, raw, stop or StopRequest())

    @property
    def planes(self) -> list[str]:
        return list(self._planes)

    @property
    def has_raw_nixl(self) -> bool:
        return self._raw is not None

    def prepare(self, move: Move) -> None:
        """Not timed: what was planned, as planes and raw NIXL take it."""
        self._pieces = move.pieces()
        if self._raw is not None:
            self._raw.prepare(move.blocks, move)

    def copy(self, move: Move) -> None:
        """Plain memcpy: as many bytes in one call, from the same memory to the same memory."""
        self._stop.check()
        ctypes.memmove(self._memory.address, self._source_address, move.total_bytes)

    def read_raw(self) -> None:
        assert self._raw is not None
        self._stop.check()
        self._raw.read(time.monotonic() + MOVE_S, self._stop)

    def read(self, plane_name: str) -> Completion:
        """The move that was prepared, as a ferry does it: ask, then poll as often as the plane wants to be polled."""
        self._stop.check()
        plane = self._planes[plane_name]
        deadline = time.monotonic() + MOVE_S
        plane.read(PRODUCER, self._pieces)
        while not (ended := plane.poll()):
            if time.monotonic() > self._stop.sooner(deadline):
                self._stop.check()
                raise KVFerryError(f"a read over {plane_name} did not end within {MOVE_S:.0f} s; is the machine overloaded?")
            interval_s = plane.poll_interval_s()
            if interval_s:
                time.sleep(interval_s)
        if not ended[0].ok:
            raise KVFerryError(f"a read over {plane_name} failed: {ended[0].error}")
        return ended[0]

    def forget(self) -> None:
        """Overwrite what has arrived, so that the next check is of the next move."""
        np.frombuffer(self._memory.buffer, np.uint8).fill(0)

    def check(self, move: Move) -> None:
        """KVFerryError unless every block that moved is its source, from the first to the last byte, and no other was written."""
        rows = np.frombuffer(self._memory.buffer, np.uint64).reshape(move.blocks.count, -1)
        words = rows.shape[1]
        expected = np.zeros(move.blocks.count, np.uint64)
        expected[move.local_blocks] = move.remote_blocks * words + 1
        is_moved = expected > 0
        last = expected + np.uint64(words - 1) * is_moved
        sums = rows.sum(axis=1, dtype=np.uint64)
        expected_sums = (expected + last) * np.uint64(words // 2)
        if not (np.array_equal(rows[:, 0], expected) and np.array_equal(rows[:, -1], last) and np.array_equal(sums, expected_sums)):
            raise KVFerryError("a move brought other bytes than were asked for; this is a bug")


def _map(producer: Producer, size_bytes: int) -> mmap.mmap:
    fd = os.open(f"/proc/{producer.pid}/fd/{producer.fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
