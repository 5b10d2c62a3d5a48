"""Memory on a CUDA device that transports hold for themselves."""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.errors import TransportError
from kvferry.transports.base import StreamEvent
from kvferry.transports.copy.gather import AddressCopies, Timing
from kvferry.transports.copy.native import spin_wait
from kvferry.transports.copy.segments import Offsets
from kvferry.transports.copy.table import (
    TABLE_NUMBERS,
    TableLayout,
    flat_addresses,
    split_by_launch,
    write_table,
)
from kvferry.transports.cuda_ipc import driver as cuda_driver

__all__ = [
    "CudaAddressCopier",
    "CudaCopyJob",
    "CudaDevice",
    "CudaOrder",
    "CudaTable",
    "DeviceMemory",
    "copy_by_torch",
    "device_bytes",
    "enter_device",
]


class DeviceMemory:
    """One stretch of device memory, an allocation of its own. Whoever allocates it closes it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._address, self._size_bytes = tensor.data_ptr(), tensor.numel()

    @classmethod
    def allocate(cls, size_bytes: int, device: int) -> "DeviceMemory":
        """torch.OutOfMemoryError when the device has not that much."""
        return cls(torch.empty(size_bytes, dtype=torch.uint8, device=torch.device("cuda", device)))

    @property
    def address(self) -> int:
        return self._address

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def close(self) -> None:
        self._tensor = None


def enter_device(device: int) -> None:
    """Make a device's context the calling thread's. What is in torch's and what is in the driver's
    view is the same context.
    """
    torch.cuda.set_device(device)
    torch.cuda.current_stream(device).query()


def device_bytes(device: int) -> int:
    """All memory that a device has, in use or not."""
    return int(torch.cuda.get_device_properties(device).total_memory)


# -------------------- cuda table -------------------- A table of copies as a GPU reads it: written
# in pinned memory, brought to the device, with an event that says when it was last read.


class CudaTable:
    """Whoever copies by it records `event` afterwards; before that has passed nobody writes it
    anew. Programs that read it over the bus would wait longer than they copy, so it has room on the
    device.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = torch.empty(TABLE_NUMBERS, dtype=torch.int64, pin_memory=True)
        self._on_device = torch.empty(TABLE_NUMBERS, dtype=torch.int64, device=device)
        self.numbers: Offsets = self._pinned.numpy()
        self.addresses = self._on_device.data_ptr(), self._pinned.data_ptr()
        """On the device, and here."""
        self.event = torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(device))  # torch makes it with the first record
        self.event_handle: int = self.event.cuda_event

    def write(self, parts: Sequence[AddressCopies]) -> TableLayout:
        return write_table(self.numbers, parts)

    def upload(self, layout: TableLayout, stream: torch.cuda.Stream) -> torch.Tensor:
        """For a kernel that is started in another way than by `cuda_driver.start_kernel`."""
        cuda_driver.upload(*self.addresses, 8 * layout.num_numbers, stream.cuda_stream)
        return self._on_device

    def is_complete(self) -> bool:
        return bool(self.event.query())


# -------------------- cuda copier -------------------- Copies between addresses that a GPU can
# reach: one kernel for all segments of a size, on streams of its own.
#
# Jobs take turns on two streams: while one is copying, the table of the next goes to the device,
# and no job waits for another's last bytes.
#
# Called by one thread, with the device's context current in it. It waits for the device in `close`,
# for as long as it is told to in `watch` and `pause`, and when a launch has failed. Without triton,
# or without the compiler it needs, plain torch does the same, slower.


FALLBACK_WORDS = 4 * 1024 * 1024
"""What plain torch copies at a time: the two indices of each take 16 bytes."""
SCRATCH_BYTES = 128 * 1024
"""What the kernel is tried with."""
ALIGNMENT = 16
FIRST_TABLES, MAX_TABLES = 4, 16
"""Each takes 1 MiB of pinned memory and 1 MiB of the device's. With so many launches under way the
device has enough to do.
"""

_log = logging.getLogger(__name__)

Launch = Callable[[CudaTable, TableLayout, int, bool, torch.cuda.Stream], None]
"""`segment_kernel.SegmentKernel`, or what stands in for it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Timespan:
    began: torch.cuda.Event
    ended: torch.cuda.Event


class CudaCopyJob:
    """Implements `transports.address_copy.CopyJob`."""

    def __init__(self, table: CudaTable | None, timespan: _Timespan | None) -> None:
        """`table`: the last one that is read for it."""
        self._table = table
        self.timespan = timespan

    def forget(self) -> None:
        """It is over, and its table is used for something else."""
        self._table = None

    def is_done(self) -> bool:
        try:
            return self._table is None or (
                self._table.is_complete()
                and (self.timespan is None or bool(self.timespan.ended.query()))
            )
        except RuntimeError as error:
            raise TransportError(
                f"the GPU has failed ({error}); nothing more can be copied by this process"
            ) from error

    def device_s(self, first: "CudaCopyJob") -> float | None:
        """From the beginning of another job to the end of this one, once it is done; None where no
        times were taken.
        """
        if first.timespan is None or self.timespan is None:
            return None
        return float(first.timespan.began.elapsed_time(self.timespan.ended)) / 1000


class CudaAddressCopier:
    """Implements `transports.address_copy.AddressCopier`."""

    def __init__(self, device: int, launch: Launch | None = None) -> None:
        self.timing = Timing.OFF
        self._device = torch.device("cuda", device)
        self._stream, self._next_stream = (
            torch.cuda.Stream(self._device),
            torch.cuda.Stream(self._device),
        )
        self._free = [self._new_table() for _ in range(FIRST_TABLES)]
        self._used: deque[tuple[CudaTable, CudaCopyJob]] = deque()
        self._launch = launch or self._best_launch(self._free[0])

    @property
    def reaches_other_gpus(self) -> bool:
        """Plain torch would copy what lies elsewhere to this device first, and write into that."""
        return self._launch is not copy_by_torch

    def start(self, copies: Sequence[AddressCopies]) -> CudaCopyJob:
        """Neighbours of one size go together, as far as a table goes."""
        stream, self._next_stream = self._next_stream, self._stream
        self._stream, tables = stream, []
        try:
            timespan: _Timespan | None = None
            for parts in split_by_launch(copies):
                table, size_bytes = self._take_table(), parts[0].size_bytes
                layout = table.write(parts)
                tables.append(table)
                timespan = timespan or self._begin_timespan(stream)
                self._launch(
                    table, layout, size_bytes, (layout.bits | size_bytes) % ALIGNMENT == 0, stream
                )
            if timespan is not None:
                timespan.ended.record(stream)
        # no memory for a table, or the device has failed: this transfer's, not the thread's end
        except Exception as error:
            with contextlib.suppress(RuntimeError):
                if tables:
                    self.wait()  # whoever hears of it takes the memory back
                    self._free += tables
            raise (
                error
                if isinstance(error, TransportError)
                else TransportError(f"the GPU cannot copy this ({error})")
            ) from error
        job = CudaCopyJob(tables[-1] if tables else None, timespan)
        self._used.extend((table, job) for table in tables)
        return job

    @property
    def is_full(self) -> bool:
        """Whether so much is under way that more would only wait."""
        return len(self._used) >= MAX_TABLES and not self._used[0][0].is_complete()

    def watch(self, seconds: float) -> None:
        """Until one more of the kernels under way is through, for so long at most."""
        while self._reclaim_table():
            pass
        if self._used:
            cuda_driver.is_complete(self._used[0][0].event_handle, seconds)

    def pause(self, seconds: float) -> None:
        """Awake. A device that has failed is found by its jobs."""
        with contextlib.suppress(RuntimeError):
            if self._reclaim_table():
                return
        if self._used:
            cuda_driver.is_complete(self._used[0][0].event_handle, seconds)
        else:
            spin_wait(seconds)

    def wait(self) -> None:
        """Until nothing of it is under way: a millisecond or so, or as long as the device is kept
        from it.
        """
        for stream in (self._stream, self._next_stream):
            stream.synchronize()

    def close(self) -> None:
        self.wait()
        self._used.clear()
        self._free.clear()

    def _begin_timespan(self, stream: torch.cuda.Stream) -> _Timespan | None:
        if self.timing is Timing.OFF:
            return None
        timespan = _Timespan(*(torch.cuda.Event(enable_timing=True) for _ in range(2)))
        timespan.began.record(stream)
        return timespan

    def _take_table(self) -> CudaTable:
        """One that no kernel reads any more."""
        if not self._free:
            self._reclaim_table()
        return self._free.pop() if self._free else self._new_table()

    def _new_table(self) -> CudaTable:
        """torch may give it memory that work in the order of the calling thread's stream still
        uses: ours waits for that.
        """
        table = CudaTable(self._device)
        for stream in (self._stream, self._next_stream):
            stream.wait_event(table.event)
        return table

    def _reclaim_table(self) -> bool:
        if not self._used or not self._used[0][0].is_complete():
            return False
        table, job = self._used.popleft()
        if not self._used or self._used[0][1] is not job:
            job.forget()
        self._free.append(table)
        return True

    def _best_launch(self, table: CudaTable) -> Launch:
        try:
            # Imported only where there is a device, and not everywhere is there triton.
            from kvferry.transports.copy.kernel import SegmentKernel

            with torch.cuda.stream(self._stream):
                return SegmentKernel(
                    table, torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self._device)
                )
        except Exception as error:  # whatever keeps a compiler from working: there is another way
            _log.warning(
                "triton does not work here (%s); segments are copied by plain torch, slower", error
            )
            return copy_by_torch


def copy_by_torch(
    table: CudaTable,
    layout: TableLayout,
    size_bytes: int,
    is_aligned: bool,
    stream: torch.cuda.Stream,
) -> None:
    """What the kernel does, by indexing: the table is turned into an index for every word."""
    word_bytes = 8 if is_aligned else 1
    step = max(1, FALLBACK_WORDS * word_bytes // size_bytes)
    with torch.cuda.stream(stream):
        words = torch.arange(size_bytes // word_bytes, device="cuda")
        sources, targets = (
            torch.from_numpy(side) for side in flat_addresses(table.numbers, layout)
        )
        for first in range(0, len(sources), step):
            origins = _words_at(sources[first : first + step], words, word_bytes)
            ends = _words_at(targets[first : first + step], words, word_bytes)
            ends.memory[ends.indices] = origins.memory[origins.indices]
        table.event.record(stream)


@dataclass(frozen=True, slots=True, eq=False)
class _Words:
    memory: torch.Tensor
    indices: torch.Tensor


@dataclass(frozen=True, slots=True)
class _DeviceRange:
    """Device memory from the first to the last of some addresses, as CUDA's array interface wants
    it. Gaps are not touched.
    """

    address: int
    words: int
    word_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        typestr = "<i8" if self.word_bytes == 8 else "|u1"
        return {
            "shape": (self.words,),
            "typestr": typestr,
            "data": (self.address, False),
            "version": 3,
        }


def _words_at(addresses: torch.Tensor, words: torch.Tensor, word_bytes: int) -> _Words:
    first = int(addresses.min())
    length = (int(addresses.max()) - first) // word_bytes + len(words)
    memory = torch.as_tensor(_DeviceRange(first, length, word_bytes), device="cuda")
    return _Words(memory, ((addresses.cuda() - first) // word_bytes)[:, None] + words)


# -------------------- cuda device --------------------
# A CUDA device as one thread uses it: its context, and a copier on it.


class CudaDevice:
    """The device is the engine's; what is made here is ours. Close it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._here = threading.local()
        self._copier: CudaAddressCopier | None = None

    def enter(self) -> None:
        """Make its context the calling thread's: those of other threads do not count."""
        if not getattr(self._here, "has_entered", False):
            enter_device(self.number)
            self._here.has_entered = True

    def work(self) -> None:
        """As `enter`, in the thread that works here from now on, which is not the engine's: that
        one may capture a graph meanwhile.
        """
        if not getattr(self._here, "is_at_work", False):
            self.enter()
            cuda_driver.ignore_captures()
            self._here.is_at_work = True

    def prepare(self) -> None:
        """Compile what will be needed."""
        self._copier = CudaAddressCopier(self.number)

    @property
    def copier(self) -> CudaAddressCopier:
        if self._copier is None:
            raise TransportError("this device has been closed")
        return self._copier

    def wait(self) -> None:
        """Until nothing of ours is under way there."""
        self.copier.wait()

    def close(self) -> None:
        copier, self._copier = self._copier, None
        if copier is not None:
            self.enter()
            copier.close()
            torch.cuda.empty_cache()


# -------------------- cuda order --------------------
# The order of an engine that computes on a CUDA device: events of the stream it uses.


@dataclass(frozen=True, slots=True)
class _EventMark:
    event: torch.cuda.Event

    def is_complete(self) -> bool:
        return bool(self.event.query())


class CudaOrder:
    """Implements `ports.order.EngineStream`."""

    def __init__(self, device: int) -> None:
        self._device = torch.device("cuda", device)

    def mark(self) -> StreamEvent | None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _EventMark(event)
