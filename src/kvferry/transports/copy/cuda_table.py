"""A table of copies that a kernel on a CUDA device reads: written in pinned memory, uploaded to the
device, with an event that completes when the table has been read. Imports torch with CUDA.
"""

from collections.abc import Sequence

import torch

from kvferry.transports.copy.gather import AddressCopies
from kvferry.transports.copy.segments import Offsets
from kvferry.transports.copy.table import TABLE_NUMBERS, TableLayout, write_table
from kvferry.transports.cuda_ipc import driver as cuda_driver


class CudaTable:
    """A table of copies (`copy/table.py`) in pinned memory and on the device.

    The user of a table records `event` after the copies; the table must not be written again before
    the event is complete. The kernel reads a copy on the device: reading addresses over the bus
    would take longer than copying the segments.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = torch.empty(TABLE_NUMBERS, dtype=torch.int64, pin_memory=True)
        self._on_device = torch.empty(TABLE_NUMBERS, dtype=torch.int64, device=device)
        self.numbers: Offsets = self._pinned.numpy()
        self.addresses = self._on_device.data_ptr(), self._pinned.data_ptr()
        """Addresses of the table on the device and in host memory."""
        self.event = torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(device))  # torch creates it on first record
        self.event_handle: int = self.event.cuda_event

    def write(self, parts: Sequence[AddressCopies]) -> TableLayout:
        return write_table(self.numbers, parts)

    def upload(self, layout: TableLayout, stream: torch.cuda.Stream) -> torch.Tensor:
        """Upload the table, for a kernel that is not started by `cuda_driver.start_kernel`."""
        cuda_driver.upload(*self.addresses, 8 * layout.num_numbers, stream.cuda_stream)
        return self._on_device

    def is_complete(self) -> bool:
        return bool(self.event.query())
