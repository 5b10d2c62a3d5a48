"""What joins this host with others, and what makes two processes one host."""

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["has_fabric", "host_reach"]

RDMA_DEVICES = Path("/sys/class/infiniband")
"""The kernel lists InfiniBand, RoCE, EFA and iWARP devices here alike."""
HOST_TRANSPORTS = frozenset({"tcp", "sm", "shm", "self", "cma", "knem", "xpmem", "posix", "sysv", "mm", "cuda", "cuda_copy", "cuda_ipc"})


def has_fabric(backends: Sequence[str], environ: Mapping[str, str], devices: Path = RDMA_DEVICES) -> bool:
    """Whether NIXL has more than TCP to reach other hosts. Of backends other than UCX it is believed: somebody has named them."""
    if any(backend != "UCX" for backend in backends):
        return True
    allowed = {name.strip().removeprefix("\\") for name in environ.get("UCX_TLS", "all").split(",")}
    if allowed <= HOST_TRANSPORTS:
        return False
    return devices.is_dir() and any(devices.iterdir())


@functools.cache
def host_reach() -> str:
    """Equal for two processes exactly when one can open the other's files in /proc: same boot, process namespace and user."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as boot:
        facts = (boot.read().strip(), os.readlink("/proc/self/ns/pid").encode(), str(os.getuid()).encode())
    return hashlib.sha256(b"\0".join(facts)).hexdigest()[:32]
