"""A table of copies as a GPU reads it: written in pinned memory, brought to the device, with an event that says when it was last read."""

from collections.abc import Sequence

import torch

from kvferry.planes import cuda_driver
from kvferry.planes.address_copy import AddressCopies
from kvferry.planes.copy_table import TABLE_NUMBERS, TableLayout, write_table
from kvferry.planes.runs import Offsets

__all__ = ["CudaTable"]


class CudaTable:
    """Whoever copies by it records `event` afterwards; before that has passed nobody writes it anew. Programs that read it over the bus
    would wait longer than they copy, so it has room on the device."""

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
