"""Copies between addresses that a GPU can reach: one kernel for all pieces of a size, on streams of its own.

Jobs take turns on two streams: while one is copying, the table of the next goes to the device, and no job waits for another's last bytes.

Called by one thread, with the device's context current in it. It never waits for the device but in `close`. Without triton, or without the
compiler it needs, plain torch does the same, slower.
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
from kvferry.planes.copy_table import TABLE_NUMBERS, TableLayout, by_launch, flat_addresses, write_table
from kvferry.planes.runs import Offsets

__all__ = ["CudaAddressCopier", "CudaCopyJob", "copy_by_torch"]

FALLBACK_WORDS = 4 * 1024 * 1024
"""What plain torch copies at a time: the two indices of each take 16 bytes."""
SCRATCH_BYTES, TRIAL_NUMBERS = 128 * 1024, 16
"""What the kernel is tried with."""
ALIGNMENT = 16
MAX_TABLES = 16
"""Each takes 1 MiB of pinned memory and 1 MiB of the device's. With so many launches under way the device has enough to do."""

_log = logging.getLogger(__name__)

Launch = Callable[[torch.Tensor, TableLayout, int, bool, torch.cuda.Stream], None]
"""`piece_kernel.PieceKernel`, or what stands in for it."""


class _Table:
    """Written in pinned memory, read on the device: programs that read it over the bus would wait longer than they copy."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = torch.empty(TABLE_NUMBERS, dtype=torch.int64, pin_memory=True)
        self._numbers: Offsets = self._pinned.numpy()
        self._uploaded = torch.empty(TABLE_NUMBERS, dtype=torch.int64, device=device)

    def write(self, parts: Sequence[AddressCopies]) -> TableLayout:
        return write_table(self._numbers, parts)

    def uploaded(self, layout: TableLayout, stream: torch.cuda.Stream) -> torch.Tensor:
        """What a kernel on this stream is to read."""
        cuda_driver.upload(self._uploaded.data_ptr(), self._pinned.data_ptr(), 8 * layout.num_numbers, stream.cuda_stream)
        return self._uploaded


@dataclass(frozen=True, slots=True)
class CudaCopyJob:
    """Implements `planes.address_copy.CopyJob`."""

    event: torch.cuda.Event
    began: torch.cuda.Event | None
    """Where times are taken."""

    def device_s(self) -> float:
        """How long the device was at it. Once it is done, and where times are taken."""
        return 0.0 if self.began is None else self.began.elapsed_time(self.event) / 1000

    def is_done(self) -> bool:
        try:
            return bool(self.event.query())
        except RuntimeError as error:
            raise TransportError(f"the GPU has failed ({error}); nothing more can be copied by this process") from error


class CudaAddressCopier:
    """Implements `planes.address_copy.AddressCopier`."""

    def __init__(self, device: int, launch: Launch | None = None) -> None:
        self.timing = Timing.OFF
        self._device = torch.device("cuda", device)
        self._stream, self._next_stream = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._free = [_Table(self._device)]
        self._used: deque[tuple[torch.cuda.Event, _Table]] = deque()
        self._launch = launch or self._best_launch()

    @property
    def reaches_other_gpus(self) -> bool:
        """Plain torch would copy what lies elsewhere to this device first, and write into that."""
        return self._launch is not copy_by_torch

    def start(self, copies: Sequence[AddressCopies]) -> CudaCopyJob:
        """Neighbours of one size go together, as far as a table goes."""
        stream, self._next_stream = self._next_stream, self._stream
        self._stream, tables = stream, list[_Table]()
        began = torch.cuda.Event(enable_timing=True) if self.timing is Timing.ON else None
        try:
            for parts in by_launch(copies):
                table, size_bytes = self._take_table(), parts[0].size_bytes
                tables.append(table)
                layout = table.write(parts)
                is_aligned = (layout.bits | size_bytes) % ALIGNMENT == 0
                uploaded = table.uploaded(layout, stream)
                if began is not None and len(tables) == 1:
                    began.record(stream)
                self._launch(uploaded, layout, size_bytes, is_aligned, stream)
            if began is not None and not tables:
                began.record(stream)
            done = torch.cuda.Event(enable_timing=began is not None)
            done.record(stream)
        except Exception as error:  # no memory for a table, or the device has failed: this transfer's, not the thread's end
            with contextlib.suppress(RuntimeError):
                self.wait()  # whoever hears of it takes the memory back
            raise error if isinstance(error, TransportError) else TransportError(f"the GPU cannot copy this ({error})") from error
        # Not before: an event that was never recorded counts as passed.
        self._used.extend((done, table) for table in tables)
        return CudaCopyJob(done, began)

    @property
    def is_full(self) -> bool:
        """Whether so much is under way that more would only wait."""
        return len(self._used) >= MAX_TABLES and not self._used[0][0].query()

    def watch(self, seconds: float) -> None:
        """Until one more of the kernels under way is through, for so long at most."""
        while self._used and self._used[0][0].query():
            self._free.append(self._used.popleft()[1])
        if self._used:
            cuda_driver.has_passed(self._used[0][0].cuda_event, seconds)

    def wait(self) -> None:
        """Until nothing of it is under way: a millisecond or so, or as long as the device is kept from it."""
        for stream in (self._stream, self._next_stream):
            stream.synchronize()

    def close(self) -> None:
        self.wait()
        self._used.clear()
        self._free.clear()

    def _take_table(self) -> _Table:
        """One that no kernel reads any more."""
        if not self._free and self._used and self._used[0][0].query():
            self._free.append(self._used.popleft()[1])
        return self._free.pop() if self._free else _Table(self._device)

    def _best_launch(self) -> Launch:
        try:
            # Imported only where there is a device, and not everywhere is there triton.
            from kvferry.planes.piece_kernel import PieceKernel

            with torch.cuda.stream(self._stream):
                numbers = torch.empty(TRIAL_NUMBERS, dtype=torch.int64, pin_memory=True)
                return PieceKernel(numbers, torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self._device))
        except Exception as error:  # whatever keeps a compiler from working: there is another way
            _log.warning("triton does not work here (%s); pieces are copied by plain torch, slower", error)
            return copy_by_torch


def copy_by_torch(table: torch.Tensor, layout: TableLayout, size_bytes: int, is_aligned: bool, stream: torch.cuda.Stream) -> None:
    """What the kernel does, by indexing: the table is turned into an index for every word."""
    word_bytes = 8 if is_aligned else 1
    step = max(1, FALLBACK_WORDS * word_bytes // size_bytes)
    with torch.cuda.stream(stream):
        words = torch.arange(size_bytes // word_bytes, device="cuda")
        addresses = flat_addresses(table[: layout.num_numbers].cpu().numpy(), layout)
        sources, targets = (torch.from_numpy(side) for side in addresses)
        for first in range(0, len(sources), step):
            origins = _words_at(sources[first : first + step], words, word_bytes)
            ends = _words_at(targets[first : first + step], words, word_bytes)
            ends.memory[ends.indices] = origins.memory[origins.indices]


@dataclass(frozen=True, slots=True, eq=False)
class _Words:
    memory: torch.Tensor
    indices: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Stretch:
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
    memory = torch.as_tensor(_Stretch(first, length, word_bytes), device="cuda")
    return _Words(memory, ((addresses.cuda() - first) // word_bytes)[:, None] + words)
