"""What joins this host with others, and what makes two processes one host."""

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4

__all__ = ["has_rdma", "host_identity", "nixl_locality"]

RDMA_DEVICES = Path("/sys/class/infiniband")
"""The kernel lists InfiniBand, RoCE, EFA and iWARP devices here alike."""
SHARED_MEMORY_TRANSPORTS = frozenset({"all", "sm", "shm", "cma", "knem", "xpmem"})
HOST_TRANSPORTS = SHARED_MEMORY_TRANSPORTS - {"all"} | {"tcp", "self", "posix", "sysv", "mm", "cuda", "cuda_copy", "cuda_ipc", "gdr_copy"}
RDMA_TRANSPORTS = frozenset({"ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "ud"})
"""Whoever forbids one of these wants to do without: what is left may be slower than TCP, or nothing."""


def has_rdma(backends: Sequence[str], environ: Mapping[str, str], devices: Path = RDMA_DEVICES) -> bool:
    """Whether NIXL has more than TCP to reach other hosts. Of backends other than UCX it is believed: somebody has named them."""
    if any(backend != "UCX" for backend in backends):
        return True
    allowed = _allowed(environ)
    forbidden = {name.removeprefix("^") for name in allowed} if any(name.startswith("^") for name in allowed) else set()
    if allowed <= HOST_TRANSPORTS or forbidden & RDMA_TRANSPORTS or not devices.is_dir():
        return False
    present = {device.name for device in devices.iterdir()}
    named = {name.strip().partition(":")[0] for name in environ.get("UCX_NET_DEVICES", "all").split(",")}
    return bool(present if "all" in named else present & named)


def nixl_locality(backends: Sequence[str], environ: Mapping[str, str]) -> str:
    """What NIXL says of itself as `TransportOffer.near`: everywhere with a fabric, else in this host and network, by shared memory; without
    that nowhere, which no other process is."""
    if has_rdma(backends, environ):
        return ""
    if not any(name in SHARED_MEMORY_TRANSPORTS or name.startswith("^") for name in _allowed(environ)):
        return uuid4().hex
    return f"{host_identity()} {os.readlink('/proc/self/ns/net')}"


def _allowed(environ: Mapping[str, str]) -> set[str]:
    return {name.strip().removeprefix("\\") for name in environ.get("UCX_TLS", "all").split(",")}


@functools.cache
def host_identity() -> str:
    """Equal for two processes exactly when one can open the other's files in /proc: same boot, process namespace and user."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as boot:
        facts = (boot.read().strip(), os.readlink("/proc/self/ns/pid").encode(), str(os.getuid()).encode())
    return hashlib.sha256(b"\0".join(facts)).hexdigest()[:32]
