"""What joins this host with others, and what makes two processes one host."""

import contextlib
import functools
import hashlib
import os
import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

__all__ = ["ProcessIncarnation", "has_rdma", "host_identity", "nixl_locality", "start_ticks"]


RDMA_DEVICES = Path("/sys/class/infiniband")
"""The kernel lists InfiniBand, RoCE, EFA and iWARP devices here alike."""
SHARED_MEMORY_TRANSPORTS = frozenset({"all", "sm", "shm", "cma", "knem", "xpmem"})
HOST_TRANSPORTS = SHARED_MEMORY_TRANSPORTS - {"all"} | {
    "tcp",
    "self",
    "posix",
    "sysv",
    "mm",
    "cuda",
    "cuda_copy",
    "cuda_ipc",
    "gdr_copy",
}
RDMA_TRANSPORTS = frozenset({"ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "ud"})
"""Whoever forbids one of these wants to do without: what is left may be slower than TCP, or
nothing.
"""


def has_rdma(
    backends: Sequence[str], environ: Mapping[str, str], devices: Path = RDMA_DEVICES
) -> bool:
    """Whether NIXL has more than TCP to reach other hosts. Of backends other than UCX it is
    believed: somebody has named them.
    """
    if any(backend != "UCX" for backend in backends):
        return True
    allowed = _allowed(environ)
    forbidden = (
        {name.removeprefix("^") for name in allowed}
        if any(name.startswith("^") for name in allowed)
        else set()
    )
    if allowed <= HOST_TRANSPORTS or forbidden & RDMA_TRANSPORTS or not devices.is_dir():
        return False
    present = {device.name for device in devices.iterdir()}
    named = {
        name.strip().partition(":")[0] for name in environ.get("UCX_NET_DEVICES", "all").split(",")
    }
    return bool(present if "all" in named else present & named)


def nixl_locality(backends: Sequence[str], environ: Mapping[str, str]) -> str:
    """What NIXL says of itself as `TransportOffer.near`: everywhere with a fabric, else in this
    host and network, by shared memory; without that nowhere, which no other process is.
    """
    if has_rdma(backends, environ):
        return ""
    if not any(
        name in SHARED_MEMORY_TRANSPORTS or name.startswith("^") for name in _allowed(environ)
    ):
        return uuid4().hex
    return f"{host_identity()} {os.readlink('/proc/self/ns/net')}"


def _allowed(environ: Mapping[str, str]) -> set[str]:
    return {name.strip().removeprefix("\\") for name in environ.get("UCX_TLS", "all").split(",")}


@functools.cache
def host_identity() -> str:
    """Equal for two processes exactly when one can open the other's files in /proc: same boot,
    process namespace and user.
    """
    with open("/proc/sys/kernel/random/boot_id", "rb") as boot:
        facts = (
            boot.read().strip(),
            os.readlink("/proc/self/ns/pid").encode(),
            str(os.getuid()).encode(),
        )
    return hashlib.sha256(b"\0".join(facts)).hexdigest()[:32]


# -------------------- process --------------------
# One life of a process on this host: is it the one that was meant, and has it ended?
#
# Any thread. A process number alone is not enough: numbers are used again.


PROC_STATE, PROC_START_TICKS = 0, 19
"""Fields of /proc/PID/stat after the command's name."""


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is no such process, or
    only its corpse.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[PROC_STATE] in (b"Z", b"X") else int(fields[PROC_START_TICKS])


@dataclass(slots=True)
class ProcessIncarnation:
    """Watches one process until it ends. Close it."""

    pid: int
    ticks: int
    _pidfd: int | None
    _poller: "select.poll | None" = field(default=None, init=False)

    @classmethod
    def watch(cls, pid: int, ticks: int) -> "ProcessIncarnation | None":
        """None when that life of the process is over."""
        pidfd: int | None = None
        with contextlib.suppress(
            OSError
        ):  # kernels before 5.3, or the process is gone, which the next line finds
            pidfd = os.pidfd_open(pid)
        incarnation = cls(pid, ticks, pidfd)
        if start_ticks(pid) == ticks:
            return incarnation
        incarnation.close()
        return None

    def has_ended(self) -> bool:
        if self._pidfd is None:
            return start_ticks(self.pid) != self.ticks
        if self._poller is None:
            self._poller = select.poll()
            self._poller.register(self._pidfd, select.POLLIN)
        return bool(self._poller.poll(0))

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = self._poller = None
