"""Copies between addresses that a GPU can reach: one kernel for all segments of a size, on streams of its own.

Jobs take turns on two streams: while one is copying, the table of the next goes to the device, and no job waits for another's last bytes.

Called by one thread, with the device's context current in it. It waits for the device in `close`, for as long as it is told to in `watch`
and `pause`, and when a launch has failed. Without triton, or without the compiler it needs, plain torch does the same, slower.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.errors import TransportError
from kvferry.planes import cuda_driver
from kvferry.planes.address_copy import AddressCopies, Timing
from kvferry.planes.copy_table import TableLayout, flat_addresses, split_by_launch
from kvferry.planes.cuda_table import CudaTable
from kvferry.planes.driver_calls import spin_wait

__all__ = ["CudaAddressCopier", "CudaCopyJob", "copy_by_torch"]

FALLBACK_WORDS = 4 * 1024 * 1024
"""What plain torch copies at a time: the two indices of each take 16 bytes."""
SCRATCH_BYTES = 128 * 1024
"""What the kernel is tried with."""
ALIGNMENT = 16
FIRST_TABLES, MAX_TABLES = 4, 16
"""Each takes 1 MiB of pinned memory and 1 MiB of the device's. With so many launches under way the device has enough to do."""

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
            return self._table is None or (self._table.is_complete() and (self.timespan is None or bool(self.timespan.ended.query())))
        except RuntimeError as error:
            raise TransportError(f"the GPU has failed ({error}); nothing more can be copied by this process") from error

    def device_s(self, first: "CudaCopyJob") -> float | None:
        """From the beginning of another job to the end of this one, once it is done; None where no times were taken."""
        if first.timespan is None or self.timespan is None:
            return None
        return float(first.timespan.began.elapsed_time(self.timespan.ended)) / 1000


class CudaAddressCopier:
    """Implements `transports.address_copy.AddressCopier`."""

    def __init__(self, device: int, launch: Launch | None = None) -> None:
        self.timing = Timing.OFF
        self._device = torch.device("cuda", device)
        self._stream, self._next_stream = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
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
                self._launch(table, layout, size_bytes, (layout.bits | size_bytes) % ALIGNMENT == 0, stream)
            if timespan is not None:
                timespan.ended.record(stream)
        except Exception as error:  # no memory for a table, or the device has failed: this transfer's, not the thread's end
            with contextlib.suppress(RuntimeError):
                if tables:
                    self.wait()  # whoever hears of it takes the memory back
                    self._free += tables
            raise error if isinstance(error, TransportError) else TransportError(f"the GPU cannot copy this ({error})") from error
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
        """Until nothing of it is under way: a millisecond or so, or as long as the device is kept from it."""
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
        """torch may give it memory that work in the order of the calling thread's stream still uses: ours waits for that."""
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
            from kvferry.planes.piece_kernel import SegmentKernel

            with torch.cuda.stream(self._stream):
                return SegmentKernel(table, torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self._device))
        except Exception as error:  # whatever keeps a compiler from working: there is another way
            _log.warning("triton does not work here (%s); segments are copied by plain torch, slower", error)
            return copy_by_torch


def copy_by_torch(table: CudaTable, layout: TableLayout, size_bytes: int, is_aligned: bool, stream: torch.cuda.Stream) -> None:
    """What the kernel does, by indexing: the table is turned into an index for every word."""
    word_bytes = 8 if is_aligned else 1
    step = max(1, FALLBACK_WORDS * word_bytes // size_bytes)
    with torch.cuda.stream(stream):
        words = torch.arange(size_bytes // word_bytes, device="cuda")
        sources, targets = (torch.from_numpy(side) for side in flat_addresses(table.numbers, layout))
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
    """Device memory from the first to the last of some addresses, as CUDA's array interface wants it. Gaps are not touched."""

    address: int
    words: int
    word_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        typestr = "<i8" if self.word_bytes == 8 else "|u1"
        return {"shape": (self.words,), "typestr": typestr, "data": (self.address, False), "version": 3}


def _words_at(addresses: torch.Tensor, words: torch.Tensor, word_bytes: int) -> _Words:
    first = int(addresses.min())
    length = (int(addresses.max()) - first) // word_bytes + len(words)
    memory = torch.as_tensor(_DeviceRange(first, length, word_bytes), device="cuda")
    return _Words(memory, ((addresses.cuda() - first) // word_bytes)[:, None] + words)
