"""The two processes of `kvferry bench transfer`: a producer that owns memory and serves it, a consumer that reads it in every way there is.

The producer ends when its pipe does, so also when the consumer is killed. Whatever is waited for has a deadline. A stop is noticed between
moves: what one of them has posted is not torn down under way.
"""

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import numpy as np

from kvferry.bench.transfer_memory import HostPlace, Memory, Place, Source, check_moved
from kvferry.bench.transfer_moves import Move
from kvferry.bench.transfer_raw_nixl import Listed, RawMove, RawNixl
from kvferry.bench.transfer_rows import MEMCPY, RAW_NIXL, RAW_NIXL_ONE, RAW_NIXL_WRITE
from kvferry.breath import breathe
from kvferry.cli.interrupts import StopRequest
from kvferry.errors import KVFerryError, MissingDependency
from kvferry.planes.address_copy import Timing
from kvferry.planes.runs import Offsets
from kvferry.ports.data import Completion, DataPlane, Pieces, PlaneOffer
from kvferry.types import EngineId, Epoch, MemoryKind, PeerId, Region

__all__ = ["Consumer", "Producer", "Shape", "Way", "start_producer"]

PRODUCER = PeerId(EngineId("producer"), Epoch("1"), 0)
START_S = 60.0
END_S = 10.0
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

    def registered(self, address: int, kind: MemoryKind = MemoryKind.DRAM, device: int = 0) -> list[Region]:
        blocks = self.region_bytes // PAGE_BYTES
        starts = [address + n * self.region_bytes for n in range(self.regions)]
        return [Region(f"layer {n}", start, PAGE_BYTES, PAGE_BYTES, blocks, kind, device) for n, start in enumerate(starts)]


@dataclass(frozen=True, slots=True)
class Producer:
    """What the producer says of itself. `raw_nixl` is None where NIXL is not installed."""

    regions: list[Region]
    spare_address: int | None
    source: Source | None
    offers: dict[str, PlaneOffer]
    raw_nixl: bytes | None


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way to make a move, or a part of it."""

    name: str
    move: Move
    run: Callable[[], Completion | None]
    """The timed part, and what a plane says of it."""
    observe: Callable[[], Completion | None]
    """The same, while it is looked at how long the device takes. Not timed."""
    verify: Callable[[], None]
    """Not timed: once more, into memory that has forgotten everything. KVFerryError when other bytes came."""


def open_ways(memory: Memory, regions: Sequence[Region], only: str | None) -> tuple[dict[str, DataPlane], RawNixl | None]:
    """Every data plane over this memory, and NIXL bare. Without NIXL there is neither of the two. `only`: that plane, and nothing else."""
    usable = {}
    for name, plane in memory.planes().items():
        with contextlib.suppress(MissingDependency):
            if only in (None, name) and plane.register(regions):
                usable[name] = plane
    if "nixl" not in usable or only is not None:
        return usable, None
    size_bytes = sum(region.size_bytes for region in regions) * (1 if memory.spare_address is None else 2)
    return usable, RawNixl(memory.address, size_bytes, memory.kind, memory.device)


def serve(pipe: Connection, shape: Shape, place: Place, only: str | None) -> None:
    """The producer's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both; the pipe's end is enough
    memory = place.allocate(shape.total_bytes)
    memory.fill()
    regions = shape.registered(memory.address, memory.kind, memory.device)
    planes, raw = open_ways(memory, regions, only)
    offers = {name: plane.offer() for name, plane in planes.items()}
    with contextlib.suppress(EOFError, OSError):  # the other side has ended
        pipe.send(Producer(regions, memory.spare_address, memory.source(), offers, raw.metadata() if raw else None))
        while not pipe.poll(memory.serving_s):
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
def start_producer(
    shape: Shape, stop: StopRequest | None = None, place: Place | None = None, only: str | None = None
) -> Iterator[Producer]:
    """`only`: the name of a plane, when the others are not wanted."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, shape, place or HostPlace(), only), daemon=True)
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

    def __init__(self, memory: Memory, producer: Producer, planes: Mapping[str, DataPlane], raw: RawNixl | None, stop: StopRequest) -> None:
        self._memory = memory
        self._producer = producer
        self._planes = planes
        self._raw = raw
        self._stop = stop
        self._pieces: list[Pieces] = []

    @classmethod
    @contextlib.contextmanager
    def connected(
        cls, shape: Shape, producer: Producer, stop: StopRequest | None = None, place: Place | None = None, only: str | None = None
    ) -> Iterator["Consumer"]:
        with ExitStack() as stack:
            memory = (place or HostPlace()).allocate(shape.total_bytes)
            stack.callback(memory.close)
            planes, raw = open_ways(memory, shape.registered(memory.address, memory.kind, memory.device), only)
            for plane in planes.values():
                stack.callback(plane.close)
            shared = {name: plane for name, plane in planes.items() if name in producer.offers}
            for name, plane in shared.items():
                plane.connect(PRODUCER, producer.offers[name], producer.regions)
            if raw is not None and producer.raw_nixl is not None:
                stack.callback(raw.close)
                raw.connect(producer.raw_nixl)
            memory.open_source(producer.source)
            yield cls(memory, producer, shared, raw, stop or StopRequest())

    @property
    def planes(self) -> list[str]:
        return list(self._planes)

    @property
    def has_raw_nixl(self) -> bool:
        return self._raw is not None

    def ways(self, move: Move, most_descriptors: int | None) -> list[Way]:
        """Every way to make this move, ready to be timed. Those that need long for a descriptor move no more of it than is given here."""
        part = move if most_descriptors is None else move.part(most_descriptors)
        copy = partial(self._copy, move)
        ways = [Way(MEMCPY, move, copy, copy, lambda: None), *self._raw_ways(move, part)]
        for name in self._planes:
            chosen = part if name in self._memory.slow_ways else move
            pieces = chosen.pieces()
            run, observe = partial(self._read, name, pieces), partial(self._read_observed, name, pieces)
            ways.append(Way(name, chosen, run, observe, partial(self._verify, run, chosen)))
        return ways

    def prepare(self, move: Move) -> None:
        """What `read` is to read."""
        self._pieces = move.pieces()

    def read(self, plane_name: str) -> Completion:
        """The move that was prepared, as a ferry does it: ask, then poll as often as the plane wants to be polled."""
        return self._read(plane_name, self._pieces)

    def forget(self) -> None:
        """Overwrite what has arrived, so that the next check is of the next move."""
        self._memory.forget()

    def check(self, move: Move) -> None:
        """KVFerryError unless every block that moved is its source, from the first to the last byte, and no other was written."""
        check_moved(self._memory.edges(move.blocks.count), move)

    def _copy(self, move: Move) -> None:
        self._stop.check()
        self._memory.copy(move.total_bytes)

    def _read(self, plane_name: str, pieces: Sequence[Pieces]) -> Completion:
        self._stop.check()
        plane = self._planes[plane_name]
        deadline = time.monotonic() + self._memory.move_s
        plane.read(PRODUCER, pieces)
        while not (ended := plane.poll()):
            if time.monotonic() > self._stop.sooner(deadline):
                self._stop.check()
                raise KVFerryError(f"a read over {plane_name} did not end within {self._memory.move_s:.0f} s; is the machine overloaded?")
            interval_s = plane.poll_interval_s()
            if interval_s:
                breathe(interval_s)
        if not ended[0].ok:
            raise KVFerryError(f"a read over {plane_name} failed: {ended[0].error}")
        return ended[0]

    def _read_observed(self, plane_name: str, pieces: Sequence[Pieces]) -> Completion:
        plane = self._planes[plane_name]
        self._memory.take_times(plane, Timing.ON)
        try:
            return self._read(plane_name, pieces)
        finally:
            self._memory.take_times(plane, Timing.OFF)

    def _raw_ways(self, move: Move, part: Move) -> list[Way]:
        if self._raw is None:
            return []
        raw, here, there = self._raw, self._memory.address, self._producer.regions[0].address
        raw.forget()
        read = partial(self._run_raw, raw.prepare("READ", _listed(here, part, part.local_blocks), _listed(there, part, part.remote_blocks)))
        ways = [Way(RAW_NIXL, part, read, read, partial(self._verify, read, part))]
        spare, their_spare = self._memory.spare_address, self._producer.spare_address
        if spare is None or their_spare is None:
            return ways
        one = partial(self._run_raw, raw.prepare("READ", *(_one_piece(address, move.total_bytes) for address in (here, there))))
        ways.append(Way(RAW_NIXL_ONE, move, one, one, partial(self._verify, one, move.joined())))
        list_write = raw.prepare("WRITE", _listed(spare, part, part.remote_blocks), _listed(their_spare, part, part.local_blocks))
        whole = [_one_piece(address, move.blocks.count * move.blocks.piece_bytes) for address in (here, their_spare)]
        erase, fetch = raw.prepare("WRITE", *whole), raw.prepare("READ", *whole)
        write = partial(self._run_raw, list_write)
        ways.append(Way(RAW_NIXL_WRITE, part, write, write, partial(self._verify_write, [erase, list_write, fetch], part)))
        return ways

    def _run_raw(self, move: RawMove) -> None:
        assert self._raw is not None
        self._stop.check()
        self._raw.run(move, time.monotonic() + self._memory.move_s, self._stop)

    def _verify(self, run: Callable[[], object], move: Move) -> None:
        self.forget()
        run()
        self.check(move)

    def _verify_write(self, steps: Sequence[RawMove], move: Move) -> None:
        """What was written is in the producer's spare memory: that is overwritten, written to, and fetched."""
        self.forget()
        for step in steps:
            self._run_raw(step)
        self.check(move)


def _listed(address: int, move: Move, chosen: Offsets) -> Listed:
    return Listed(address, move.blocks.piece_bytes, move.blocks.count, chosen)


def _one_piece(address: int, size_bytes: int) -> Listed:
    return Listed(address, size_bytes, 1, np.zeros(1, np.int64))
