"""One transfer by kernels of ours: its segments as addresses, a launch at a time. Owned by the transport's thread."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.errors import TransportError
from kvferry.planes.address_copy import AddressCopies
from kvferry.planes.copy_table import is_one_launch, split_by_tick
from kvferry.ports.data import Completion, Handle
from kvferry.types import PeerId

if TYPE_CHECKING:
    from kvferry.planes.cuda_copier import CudaAddressCopier, CudaCopyJob

__all__ = ["CudaTransfer"]


class CudaTransfer:
    def __init__(self, handle: Handle, peer: PeerId, copies: Sequence[AddressCopies]) -> None:
        self.handle = handle
        self.peer = peer
        self._began = time.perf_counter()
        self._copies = copies
        self._launches = split_by_tick(copies)
        self._next = next(self._launches, None)
        self._jobs: list[CudaCopyJob] = []
        self.error: str | None = None
        self._total_bytes = 0
        self._num_launches = 0
        self._post_s = 0.0

    @property
    def is_launching(self) -> bool:
        return self._next is not None

    @property
    def is_one_launch(self) -> bool:
        """Whether all of it is launched at once, by one kernel: then nothing of it moves if one of its offsets is impossible."""
        return len(self._copies) == 1 and is_one_launch(self._copies[0])

    def launch(self, copier: "CudaAddressCopier") -> None:
        """Some more of it."""
        assert self._next is not None, "all of it has been launched"
        began = time.perf_counter()
        try:
            self._jobs.append(copier.start(self._next))
        except TransportError as error:
            self.stop(str(error))
            return
        self._total_bytes += sum(part.total_bytes for part in self._next)
        self._next = next(self._launches, None)
        self._num_launches += 1
        self._post_s += time.perf_counter() - began

    def stop(self, why: str) -> None:
        """Launch no more of it; the first reason counts."""
        self._next = None
        self.error = self.error or why

    def has_ended(self) -> bool:
        """Whether no kernel of it touches memory any more, and none will."""
        try:
            return not self.is_launching and all(job.is_done() for job in reversed(self._jobs))
        except TransportError as error:
            self.stop(str(error))
            return True

    def completion(self) -> Completion:
        elapsed = time.perf_counter() - self._began
        device_s = None if self.error or not self._jobs or self._jobs[0].timespan is None else self._device_s()
        return Completion(self.handle, self.error, self._total_bytes, self._num_launches, self._post_s, elapsed, device_s)

    def _device_s(self) -> float | None:
        times = (job.device_s(self._jobs[0]) for job in self._jobs)
        return max((seconds for seconds in times if seconds is not None), default=None)
