"""Memory on a CUDA device that transports hold for themselves."""

import torch

__all__ = ["DeviceMemory", "device_bytes", "enter_device"]


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
    """Make a device's context the calling thread's. What is in torch's and what is in the driver's view is the same context."""
    torch.cuda.set_device(device)
    torch.cuda.current_stream(device).query()


def device_bytes(device: int) -> int:
    """All memory that a device has, in use or not."""
    return int(torch.cuda.get_device_properties(device).total_memory)
