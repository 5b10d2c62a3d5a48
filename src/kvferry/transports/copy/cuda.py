"""Copies on a CUDA device: memory, the copier, and the engine's stream.

Imports torch with CUDA, so only code for device memory imports this module. One thread makes all
calls of a copier, with the device's context current in that thread.
"""

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
from kvferry.transports.copy.cuda_table import CudaTable
from kvferry.transports.copy.gather import AddressCopies, Timing
from kvferry.transports.copy.native import spin_wait
from kvferry.transports.copy.table import (
    TableLayout,
    flat_addresses,
    split_by_launch,
)
from kvferry.transports.cuda_ipc import driver as cuda_driver


def allocate(size_bytes: int, device: int) -> torch.Tensor:
    """Allocate device memory. torch.OutOfMemoryError if the device does not have enough."""
    return torch.empty(size_bytes, dtype=torch.uint8, device=torch.device("cuda", device))


def enter_device(device: int) -> None:
    """Make a device's primary context current in the calling thread. torch and the driver API use
    the same context.
    """
    torch.cuda.set_device(device)
    torch.cuda.current_stream(device).query()  # a CUDA call, so that the context exists


def device_bytes(device: int) -> int:
    """Return the total memory of a device, used and free."""
    return int(torch.cuda.get_device_properties(device).total_memory)


# -- copier --
# Copies between addresses that a GPU can reach: one kernel for all segments of one size, on two
# streams of its own. Jobs alternate between the streams: the table of one job is uploaded while
# another job copies, and no job waits for the last bytes of another.
#
# The copier waits for the device only in `wait` and `close`, in `watch` and `pause` for as long as
# the caller says, and after a failed launch. Without triton, or without the compiler that triton
# needs, plain torch does the same work more slowly.


FALLBACK_WORDS = 4 * 1024 * 1024
"""Words that plain torch copies at a time: the two indexes of each word take 16 bytes."""
SCRATCH_BYTES = 128 * 1024
"""Size of the device memory on which the kernel is tried."""
ALIGNMENT = 16
FIRST_TABLES, MAX_TABLES = 4, 16
"""Tables made at first, and tables in use from which the copier is full. A table takes 1 MiB of
pinned memory and 1 MiB of device memory. `MAX_TABLES` launches are enough to keep the device busy.
"""

_log = logging.getLogger(__name__)

Launch = Callable[[CudaTable, TableLayout, int, bool, torch.cuda.Stream], None]
"""Starts the copies of one table: `copy.kernel.SegmentKernel`, or its substitute
`copy_by_torch`.
"""


@dataclass(frozen=True, slots=True, eq=False)
class _Timespan:
    """Events around the copies of one job, for `device_s`."""

    began: torch.cuda.Event
    ended: torch.cuda.Event


class CudaCopyJob:
    """Implements `transports.copy.gather.CopyJob`."""

    def __init__(self, table: CudaTable | None, timespan: _Timespan | None) -> None:
        """`table`: the last table of the job."""
        self._table = table
        self.timespan = timespan

    def forget(self) -> None:
        """Mark the job as done, because its last table is about to be reused."""
        self._table = None

    def make_wait(self, stream: torch.cuda.Stream) -> None:
        """Let work that is given to `stream` from now on wait for this job."""
        if self._table is not None:
            stream.wait_event(self._table.event)

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
        """Return the seconds from the beginning of job `first` to the end of this job, once this
        job is done; None if times were not measured.
        """
        if first.timespan is None or self.timespan is None:
            return None
        return float(first.timespan.began.elapsed_time(self.timespan.ended)) / 1000


class CudaAddressCopier:
    """Implements `transports.copy.gather.AddressCopier` on one device."""

    def __init__(self, device: int, launch: Launch | None = None) -> None:
        self.timing = Timing.OFF
        self._device = torch.device("cuda", device)
        self._stream = torch.cuda.Stream(self._device)
        self._next_stream = torch.cuda.Stream(self._device)
        self._free = [self._new_table() for _ in range(FIRST_TABLES)]
        self._used: deque[tuple[CudaTable, CudaCopyJob]] = deque()
        self._launch = launch or self._best_launch(self._free[0])

    @property
    def reaches_other_gpus(self) -> bool:
        """Whether the copier can read and write the memory of other GPUs. Plain torch cannot: it
        would first copy such memory to this device, and then write into that copy.
        """
        return self._launch is not copy_by_torch

    def start(self, copies: Sequence[AddressCopies]) -> CudaCopyJob:
        """Start a job. Adjacent copies of one size share a launch, as far as a table has room."""
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
        # No memory for a table, or the device has failed: only this transfer fails.
        except Exception as error:
            with contextlib.suppress(RuntimeError):
                if tables:
                    self.wait()  # the caller reuses the memory as soon as it sees the error
                    self._free += tables
            raise (
                error
                if isinstance(error, TransportError)
                else TransportError(f"the GPU cannot copy this ({error})")
            ) from error
        job = CudaCopyJob(tables[-1] if tables else None, timespan)
        self._used.extend((table, job) for table in tables)
        return job

    def wait_before_next(self, event: torch.cuda.Event) -> None:
        """Let the next job wait for an event."""
        self._next_stream.wait_event(event)

    @property
    def is_full(self) -> bool:
        """Whether so many launches are active that another launch would only wait."""
        return len(self._used) >= MAX_TABLES and not self._used[0][0].is_complete()

    def watch(self, seconds: float) -> None:
        """Wait until one more active kernel has finished, for at most `seconds`."""
        while self._reclaim_table():
            pass
        if self._used:
            cuda_driver.is_complete(self._used[0][0].event_handle, seconds)

    def pause(self, seconds: float) -> None:
        """Wait without sleeping until an active kernel has finished, for at most `seconds`. Jobs
        report failures of the device, this method does not.
        """
        with contextlib.suppress(RuntimeError):
            if self._reclaim_table():
                return
        if self._used:
            cuda_driver.is_complete(self._used[0][0].event_handle, seconds)
        else:
            spin_wait(seconds)

    def wait(self) -> None:
        """Wait until no copy is active: about a millisecond, or as long as other work occupies the
        device.
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
        """Return a table that no kernel reads any more."""
        if not self._free:
            self._reclaim_table()
        return self._free.pop() if self._free else self._new_table()

    def _new_table(self) -> CudaTable:
        """Make a table. torch may reuse memory that earlier work on the calling thread's current
        stream still uses, so both of our streams wait for that work.
        """
        table = CudaTable(self._device)
        for stream in (self._stream, self._next_stream):
            stream.wait_event(table.event)
        return table

    def _reclaim_table(self) -> bool:
        if not self._used or not self._used[0][0].is_complete():
            return False
        table, job = self._used.popleft()
        # Forget the job with its last table: until then an earlier table may still be in use.
        if not self._used or self._used[0][1] is not job:
            job.forget()
        self._free.append(table)
        return True

    def _best_launch(self, table: CudaTable) -> Launch:
        try:
            # Imported here, because triton is not installed everywhere.
            from kvferry.transports.copy.kernel import SegmentKernel

            with torch.cuda.stream(self._stream):
                return SegmentKernel(
                    table, torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self._device)
                )
        except Exception as error:  # any failure of the compiler: plain torch can do the work
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
    """Copy by indexing, instead of by the kernel: the table becomes an index for every word."""
    word_bytes = 8 if is_aligned else 1
    step = max(1, FALLBACK_WORDS * word_bytes // size_bytes)
    with torch.cuda.stream(stream):
        words = torch.arange(size_bytes // word_bytes, device="cuda")
        sources, targets = (
            torch.from_numpy(side) for side in flat_addresses(table.numbers, layout)
        )
        for first in range(0, len(sources), step):
            source, origins = _words_at(sources[first : first + step], words, word_bytes)
            target, ends = _words_at(targets[first : first + step], words, word_bytes)
            target[ends] = source[origins]
        table.event.record(stream)


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """Device memory as an array of words, in the form of CUDA's array interface. No word outside of
    the array's elements is touched.
    """

    address: int
    shape: tuple[int, ...]
    word_bytes: int
    strides: tuple[int, ...] | None = None
    """In bytes; None if the elements adjoin."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": f"<i{self.word_bytes}" if self.word_bytes > 1 else "|u1",
            "data": (self.address, False),
            "version": 3,
        }


def _words_at(
    addresses: torch.Tensor, words: torch.Tensor, word_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return device memory from the first to the last address, and the indexes of the words there
    that belong to the addresses.
    """
    first = int(addresses.min())
    length = (int(addresses.max()) - first) // word_bytes + len(words)
    memory = torch.as_tensor(DeviceArray(first, (length,), word_bytes), device="cuda")
    return memory, ((addresses.cuda() - first) // word_bytes)[:, None] + words


# -- device --
# A CUDA device as one thread uses it: its context, and a copier.


class CudaDevice:
    """A device that the engine owns, with the context and the copier that a transport uses on the
    device. The transport closes this object.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._here = threading.local()
        self._copier: CudaAddressCopier | None = None

    def enter(self) -> None:
        """Make the device's context current in the calling thread."""
        enter_device(self.number)

    def work(self) -> None:
        """Like `enter`, once per thread, for the thread that makes the copies. The engine's thread
        may capture a CUDA graph at the same time; calls of this thread must neither fail nor spoil
        the capture.
        """
        if not getattr(self._here, "is_at_work", False):
            self.enter()
            cuda_driver.ignore_captures()
            self._here.is_at_work = True

    def prepare(self) -> None:
        """Make the copier, and compile its kernel."""
        self._copier = CudaAddressCopier(self.number)

    @property
    def copier(self) -> CudaAddressCopier:
        if self._copier is None:
            raise TransportError("this device has been closed")
        return self._copier

    def wait(self) -> None:
        """Wait until no copy of ours is active on the device."""
        self.copier.wait()

    def close(self) -> None:
        copier, self._copier = self._copier, None
        if copier is not None:
            self.enter()
            copier.close()
            torch.cuda.empty_cache()


# -- engine stream --
# Events of the CUDA stream on which an engine computes.


@dataclass(frozen=True, slots=True)
class _EventMark:
    event: torch.cuda.Event

    def is_complete(self) -> bool:
        return bool(self.event.query())


class CudaEngineStream:
    """Implements `transports.base.EngineStream` for an engine on a CUDA device."""

    def __init__(self, device: int) -> None:
        self._device = torch.device("cuda", device)

    def mark(self) -> StreamEvent | None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _EventMark(event)
