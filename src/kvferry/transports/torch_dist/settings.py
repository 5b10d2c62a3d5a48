"""Settings of the `dist` transport, apart from the code that imports torch. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DistSettings:
    """How much memory the transport uses, and which library moves the bytes."""

    host_pool_bytes: int = 1 << 30
    """Most memory of all staging buffers, if the cache is in host memory. Two buffers are always
    allowed.
    """
    device_pool_bytes: int = 1 << 30
    """The same, if the cache is on a GPU."""
    backend: str = "gloo"
    """gloo, or nccl between GPUs."""
    num_channels: int = 0
    """The channels of an NCCL group; 0: NCCL decides."""
