"""A CUDA device as one thread uses it: its context, and a copier on it."""

import threading

import torch

from kvferry.errors import TransportError
from kvferry.planes import cuda_driver
from kvferry.planes.cuda_copier import CudaAddressCopier
from kvferry.planes.device_memory import enter_device

__all__ = ["CudaDevice"]


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
        """As `enter`, in the thread that works here from now on, which is not the engine's: that one may capture a graph meanwhile."""
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
