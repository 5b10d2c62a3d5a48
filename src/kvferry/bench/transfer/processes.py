"""The two processes of `kvferry bench transfer`: a producer that serves memory, a consumer that
reads.

The consumer reads with every method: each transport, raw NIXL and memcpy. The producer exits when
its pipe is closed, also if the consumer is killed. Every wait has a timeout. The consumer checks
for a stop request between moves, so that a posted move is not torn down while in progress.
"""

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from kvferry.bench.transfer.memory import (
    HostAllocator,
    Memory,
    MemoryAllocator,
    MemorySource,
    check_moved,
)
from kvferry.bench.transfer.moves import Move
from kvferry.bench.transfer.report import MEMCPY, RAW_NIXL, RAW_NIXL_CONTIGUOUS, RAW_NIXL_WRITE
from kvferry.cli.runtime import StopRequest
from kvferry.errors import KVFerryError, MissingDependency
from kvferry.sleep import short_sleep
from kvferry.transports.base import Completion, DataTransport, Segments, TransportOffer
from kvferry.transports.copy.gather import Timing
from kvferry.transports.copy.segments import Offsets
from kvferry.transports.nixl.agent import load_nixl
from kvferry.types import EngineId, Epoch, MemoryKind, PeerId, Region

# -- raw NIXL --
# NIXL without kvferry, with one descriptor per block. Used as in NIXL's own examples: the
# descriptor lists of all blocks are prepared in advance, and a move names indices into the lists.
# Only the progress thread is off, because the thread would use one of the cores on which everything
# else is measured; both sides make progress by calling NIXL.


NUM_THREADS = 4
"""The number of NIXL threads that vLLM asks for; our own transport uses none."""


@dataclass(frozen=True, slots=True, eq=False)
class DescriptorList:
    """One side of a move: `count` adjacent blocks from `address` on, and the indices of moved
    blocks.
    """

    address: int
    segment_bytes: int
    count: int
    chosen: Offsets


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTransfer:
    """An operation, and for each side a prepared NIXL descriptor list with indices."""

    operation: str
    local: Any
    local_indices: list[int]
    remote: Any
    remote_indices: list[int]


class RawNixl:
    """The NIXL agent of one side over one range of memory; the owner calls `close`."""

    def __init__(
        self, address: int, size_bytes: int, kind: MemoryKind = MemoryKind.DRAM, device: int = 0
    ) -> None:
        nixl, self._errors = load_nixl(kind)
        config = nixl.nixl_agent_config(
            enable_prog_thread=False, num_threads=NUM_THREADS, backends=["UCX"]
        )
        self._agent: Any = nixl.nixl_agent(f"bench-{uuid4().hex}", config)
        self._kind = kind.value
        self._device = device
        self._registration = self._agent.register_memory(
            np.array([(address, size_bytes, device)], np.uint64), self._kind
        )
        self._peer = ""
        self._prepared: list[PreparedTransfer] = []

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def connect(self, metadata: bytes) -> None:
        self._peer = self._agent.add_remote_agent(metadata).decode()

    def prepare(
        self, operation: str, local: DescriptorList, remote: DescriptorList
    ) -> PreparedTransfer:
        """Prepare the lists of all blocks on both sides and the indices that move; not timed.

        `operation` is READ or WRITE.
        """
        near = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._rows(local), self._kind)
        far = self._agent.prep_xfer_dlist(self._peer, self._rows(remote), self._kind)
        move = PreparedTransfer(operation, near, local.chosen.tolist(), far, remote.chosen.tolist())
        self._prepared.append(move)
        return move

    def release_lists(self) -> None:
        """Release the prepared descriptor lists."""
        for move in self._prepared:
            for side in (move.local, move.remote):
                self._agent.release_dlist_handle(side)
        self._prepared.clear()

    def run(self, move: PreparedTransfer, deadline: float, stop: StopRequest) -> None:
        """Run one move until all bytes have arrived; the timed part."""
        verb = move.operation.lower()
        try:
            handle = self._agent.make_prepped_xfer(
                move.operation, move.local, move.local_indices, move.remote, move.remote_indices
            )
            state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < stop.earlier_deadline(deadline):
                state = self._agent.check_xfer_state(handle)
            self._agent.release_xfer_handle(handle)
        except self._errors as error:
            stop.check()
            raise KVFerryError(f"a {verb} by raw NIXL failed ({error})") from error
        if state != "DONE":
            stop.check()
            raise KVFerryError(
                f"a {verb} by raw NIXL did not finish ({state}); is the machine overloaded?"
            )

    def close(self) -> None:
        """Release everything; without `close` the agent may crash the interpreter at exit."""
        with contextlib.suppress(*self._errors):
            self.release_lists()
            if self._peer:
                self._agent.remove_remote_agent(self._peer)
            self._agent.deregister_memory(self._registration)
        self._agent = None

    def _rows(self, side: DescriptorList) -> npt.NDArray[np.uint64]:
        rows = np.empty((side.count, 3), np.uint64)
        rows[:, 0] = side.address + np.arange(side.count, dtype=np.int64) * side.segment_bytes
        rows[:, 1], rows[:, 2] = side.segment_bytes, self._device
        return rows


# -- producer and consumer --


PRODUCER = PeerId(EngineId("producer"), Epoch("1"), 0)
START_S = 60.0
END_S = 10.0
POLL_INTERVAL_S = 0.1
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """The memory of one side: regions of equal size, like the layers of a model."""

    regions: int
    region_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.regions * self.region_bytes

    def registered(
        self, address: int, kind: MemoryKind = MemoryKind.DRAM, device: int = 0
    ) -> list[Region]:
        blocks = self.region_bytes // PAGE_BYTES
        starts = [address + n * self.region_bytes for n in range(self.regions)]
        return [
            Region(f"layer {n}", start, PAGE_BYTES, PAGE_BYTES, blocks, kind, device)
            for n, start in enumerate(starts)
        ]


@dataclass(frozen=True, slots=True)
class ProducerInfo:
    """The message with which the producer reports its memory; `raw_nixl` is None without NIXL."""

    regions: list[Region]
    spare_address: int | None
    source: MemorySource | None
    offers: dict[str, TransportOffer]
    raw_nixl: bytes | None
    pipe: Connection | None = None
    """The consumer's end of the pipe; the producer sends nothing after this message."""

    @property
    def has_ended(self) -> bool:
        return self.pipe is not None and self.pipe.poll()


@dataclass(frozen=True, slots=True, eq=False)
class TransferMethod:
    """One method to run a move or a part of a move."""

    name: str
    move: Move
    run: Callable[[], Completion | None]
    """Run the timed part; return the transport's completion, if any."""
    observe: Callable[[], Completion | None]
    """Run the same move with the device time measured; not timed."""
    verify: Callable[[], None]
    """Run the move once more into overwritten memory and check the bytes; not timed.

    Raise KVFerryError if other bytes arrived.
    """


def open_transports(
    memory: Memory, regions: Sequence[Region], only: str | None
) -> tuple[dict[str, DataTransport], RawNixl | None]:
    """Register the memory with every data transport and with raw NIXL.

    Without NIXL neither the nixl transport nor raw NIXL is in the result, and without Mooncake no
    mooncake. With `only`, register
    that transport and nothing else.
    """
    usable = {}
    for name, transport in memory.transports().items():
        with contextlib.suppress(MissingDependency):
            if only in (None, name) and transport.register(regions):
                usable[name] = transport
    if "nixl" not in usable or only is not None:
        return usable, None
    size_bytes = sum(region.size_bytes for region in regions) * (
        1 if memory.spare_address is None else 2
    )
    return usable, RawNixl(memory.address, size_bytes, memory.kind, memory.device)


def serve(pipe: Connection, shape: Shape, allocator: MemoryAllocator, only: str | None) -> None:
    """The main function of the producer process."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal sends SIGINT to both processes; the end of the pipe is enough
    memory = allocator.allocate(shape.total_bytes)
    memory.fill()
    regions = shape.registered(memory.address, memory.kind, memory.device)
    transports, raw = open_transports(memory, regions, only)
    offers = {name: transport.offer() for name, transport in transports.items()}
    with contextlib.suppress(EOFError, OSError):  # the consumer has exited
        pipe.send(
            ProducerInfo(
                regions,
                memory.spare_address,
                memory.source(),
                offers,
                raw.metadata() if raw else None,
            )
        )
        while not pipe.poll(memory.serve_interval_s):
            for transport in transports.values():
                transport.poll()
            if raw is not None:
                raw.progress()
    if raw is not None:
        raw.close()
    for transport in transports.values():
        transport.close()
    memory.close()


@contextlib.contextmanager
def start_producer(
    shape: Shape,
    stop: StopRequest | None = None,
    allocator: MemoryAllocator | None = None,
    only: str | None = None,
) -> Iterator[ProducerInfo]:
    """Start a producer process; return its report when the producer is ready.

    `only` is the name of the one transport to open; None opens all.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=serve, args=(theirs, shape, allocator or HostAllocator(), only), daemon=True
    )
    process.start()
    theirs.close()
    try:
        try:
            _wait_for(ours, stop or StopRequest())
            producer: ProducerInfo = replace(ours.recv(), pipe=ours)
        except EOFError as error:
            raise KVFerryError(
                "the producer process exited before it was ready; its error is above"
            ) from error
        yield producer
    finally:
        ours.close()
        process.join(END_S)
        if process.is_alive():
            process.kill()
            process.join(END_S)


def _wait_for(pipe: Connection, stop: StopRequest) -> None:
    deadline = time.monotonic() + START_S
    while not pipe.poll(POLL_INTERVAL_S):
        stop.check()
        if time.monotonic() > deadline:
            raise KVFerryError(
                f"the producer process was not ready within {START_S:.0f} s; is the machine "
                "overloaded?"
            )
    stop.check()  # Ctrl-C in a terminal may have ended the producer too


class BenchConsumer:
    """Reads from the producer with every method: each transport, raw NIXL and plain memcpy."""

    def __init__(
        self,
        memory: Memory,
        producer: ProducerInfo,
        transports: Mapping[str, DataTransport],
        raw: RawNixl | None,
        stop: StopRequest,
    ) -> None:
        self._memory = memory
        self._producer = producer
        self._transports = transports
        self._raw = raw
        self._stop = stop
        self._segments: list[Segments] = []

    @classmethod
    @contextlib.contextmanager
    def connected(
        cls,
        shape: Shape,
        producer: ProducerInfo,
        stop: StopRequest | None = None,
        allocator: MemoryAllocator | None = None,
        only: str | None = None,
    ) -> Iterator["BenchConsumer"]:
        """Allocate memory, connect to the producer with all transports, and close all at the
        end.
        """
        with ExitStack() as stack:
            memory = (allocator or HostAllocator()).allocate(shape.total_bytes)
            stack.callback(memory.close)
            transports, raw = open_transports(
                memory, shape.registered(memory.address, memory.kind, memory.device), only
            )
            for transport in transports.values():
                stack.callback(transport.close)
            shared = {
                name: transport for name, transport in transports.items() if name in producer.offers
            }
            for name, transport in shared.items():
                transport.connect(PRODUCER, producer.offers[name], producer.regions)
            if raw is not None and producer.raw_nixl is not None:
                stack.callback(raw.close)
                raw.connect(producer.raw_nixl)
            memory.open_source(producer.source)
            yield cls(memory, producer, shared, raw, stop or StopRequest())

    @property
    def transports(self) -> list[str]:
        return list(self._transports)

    @property
    def has_raw_nixl(self) -> bool:
        return self._raw is not None

    def methods(self, move: Move, max_descriptors: int | None) -> list[TransferMethod]:
        """Return every method for this move, ready to be timed.

        Methods that are slow per descriptor move at most `max_descriptors` blocks.
        """
        part = move if max_descriptors is None else move.part(max_descriptors)
        copy = partial(self._copy, move)
        methods = [
            TransferMethod(MEMCPY, move, copy, copy, lambda: None),
            *self._raw_methods(move, part),
        ]
        for name in self._transports:
            chosen = part if name in self._memory.slow_transports else move
            segments = chosen.segments()
            run, observe = (
                partial(self._read, name, segments),
                partial(self._read_observed, name, segments),
            )
            methods.append(
                TransferMethod(name, chosen, run, observe, partial(self._verify, run, chosen))
            )
        return methods

    def prepare(self, move: Move) -> None:
        """Set the move for `read`."""
        self._segments = move.segments()

    def read(self, transport_name: str) -> Completion:
        """Run the prepared move as a transfer worker does: post the read, then poll at the
        transport's interval.
        """
        return self._read(transport_name, self._segments)

    def overwrite(self) -> None:
        """Overwrite the memory, so that the next check covers only the next move."""
        self._memory.overwrite()

    def check(self, move: Move) -> None:
        """Raise KVFerryError unless every moved block equals its source and no other block was
        written.
        """
        check_moved(self._memory.block_checksums(move.blocks.count), move)

    def _copy(self, move: Move) -> None:
        self._stop.check()
        self._memory.copy(move.total_bytes)

    def _read(self, transport_name: str, segments: Sequence[Segments]) -> Completion:
        self._stop.check()
        transport = self._transports[transport_name]
        deadline = time.monotonic() + self._memory.move_s
        transport.read(PRODUCER, segments)
        while not (ended := transport.poll()):
            if time.monotonic() > self._stop.earlier_deadline(deadline):
                self._stop.check()
                raise KVFerryError(
                    f"a read over {transport_name} did not finish within "
                    f"{self._memory.move_s:.0f} s; is the machine overloaded?"
                )
            interval_s = transport.poll_interval_s()
            if interval_s:
                short_sleep(interval_s)
        if not ended[0].ok:
            raise KVFerryError(f"a read over {transport_name} failed: {ended[0].error}")
        return ended[0]

    def _read_observed(self, transport_name: str, segments: Sequence[Segments]) -> Completion:
        transport = self._transports[transport_name]
        self._memory.set_timing(transport, Timing.ON)
        try:
            return self._read(transport_name, segments)
        finally:
            self._memory.set_timing(transport, Timing.OFF)

    def _raw_methods(self, move: Move, part: Move) -> list[TransferMethod]:
        """Return the raw NIXL methods: scattered read and, with spare memory, contiguous read and
        write.
        """
        if self._raw is None:
            return []
        raw, here, there = self._raw, self._memory.address, self._producer.regions[0].address
        raw.release_lists()
        read = partial(
            self._run_raw,
            raw.prepare(
                "READ",
                _listed(here, part, part.local_blocks),
                _listed(there, part, part.remote_blocks),
            ),
        )
        methods = [TransferMethod(RAW_NIXL, part, read, read, partial(self._verify, read, part))]
        spare, their_spare = self._memory.spare_address, self._producer.spare_address
        # Writes are measured only where both sides have spare memory, so that no served memory
        # changes.
        if spare is None or their_spare is None:
            return methods
        one = partial(
            self._run_raw,
            raw.prepare(
                "READ", *(_one_segment(address, move.total_bytes) for address in (here, there))
            ),
        )
        methods.append(
            TransferMethod(
                RAW_NIXL_CONTIGUOUS, move, one, one, partial(self._verify, one, move.joined())
            )
        )
        list_write = raw.prepare(
            "WRITE",
            _listed(spare, part, part.remote_blocks),
            _listed(their_spare, part, part.local_blocks),
        )
        whole = [
            _one_segment(address, move.blocks.count * move.blocks.segment_bytes)
            for address in (here, their_spare)
        ]
        erase, fetch = raw.prepare("WRITE", *whole), raw.prepare("READ", *whole)
        write = partial(self._run_raw, list_write)
        methods.append(
            TransferMethod(
                RAW_NIXL_WRITE,
                part,
                write,
                write,
                partial(self._verify_write, [erase, list_write, fetch], part),
            )
        )
        return methods

    def _run_raw(self, move: PreparedTransfer) -> None:
        assert self._raw is not None
        self._stop.check()
        self._raw.run(move, time.monotonic() + self._memory.move_s, self._stop)

    def _verify(self, run: Callable[[], object], move: Move) -> None:
        self.overwrite()
        run()
        self.check(move)

    def _verify_write(self, steps: Sequence[PreparedTransfer], move: Move) -> None:
        """Check a write: the written bytes are in the producer's spare memory.

        The steps overwrite the spare memory, write to the spare memory and read the spare memory
        back.
        """
        self.overwrite()
        for step in steps:
            self._run_raw(step)
        self.check(move)


def _listed(address: int, move: Move, chosen: Offsets) -> DescriptorList:
    return DescriptorList(address, move.blocks.segment_bytes, move.blocks.count, chosen)


def _one_segment(address: int, size_bytes: int) -> DescriptorList:
    return DescriptorList(address, size_bytes, 1, np.zeros(1, np.int64))
