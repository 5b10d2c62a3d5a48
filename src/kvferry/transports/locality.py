"""Host identity and network: which processes share a host, and how NIXL reaches other hosts.

No state apart from a cache of the host's identity; any thread may call the functions. A `HostLink`
belongs to the thread of its transport.
"""

import functools
import hashlib
import os
import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import msgspec

from kvferry.errors import LocalProtocolError, TransportError
from kvferry.transports.base import TransportOffer
from kvferry.transports.linked import Link, OfferT, decoded_offer
from kvferry.types import PeerId, Region

RDMA_DEVICES = Path("/sys/class/infiniband")
"""The directory in which the kernel lists InfiniBand, RoCE, EFA and iWARP devices."""
SHARED_MEMORY_TRANSPORTS = frozenset({"all", "sm", "shm", "cma", "knem", "xpmem"})
"""Values of UCX_TLS that let UCX use shared memory."""
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
"""Values of UCX_TLS that do not use RDMA."""
RDMA_TRANSPORTS = frozenset({"ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "ud"})
"""Values of UCX_TLS that stand for RDMA. An operator who forbids one of them (`^rc`) wants no RDMA:
the transports that remain may be slower than TCP, or there may be none.
"""


def has_rdma(
    backends: Sequence[str], environ: Mapping[str, str], devices: Path = RDMA_DEVICES
) -> bool:
    """Whether NIXL has more than TCP to reach other hosts. Backends other than UCX are trusted: the
    operator has named them on purpose.
    """
    if any(backend != "UCX" for backend in backends):
        return True
    allowed, forbidden = _ucx_transports(environ)
    if allowed <= HOST_TRANSPORTS or forbidden & RDMA_TRANSPORTS or not devices.is_dir():
        return False
    present = {device.name for device in devices.iterdir()}
    named = {
        name.strip().partition(":")[0] for name in environ.get("UCX_NET_DEVICES", "all").split(",")
    }
    return bool(present if "all" in named else present & named)


def nixl_locality(backends: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the value of `TransportOffer.near` for NIXL.

    Empty (good anywhere) if NIXL has RDMA. Without RDMA the value names this host and its network
    namespace, where UCX uses shared memory. If UCX must not use shared memory either, the value is
    a random id that no other process shares.
    """
    if has_rdma(backends, environ):
        return ""
    if not _ucx_transports(environ)[0] & SHARED_MEMORY_TRANSPORTS:
        return uuid4().hex
    return f"{host_identity()} {os.readlink('/proc/self/ns/net')}"


def variable_against_remapping(environ: Mapping[str, str]) -> str:
    """The variable that lets UCX use memory by an address which has other memory by now; empty if
    there is none. UCX prefers its variables to the settings of the agent.
    """
    if environ.get("UCX_RCACHE_ENABLE", "n").lower() in ("y", "yes", "1", "on", "try"):
        return "UCX_RCACHE_ENABLE"
    allowed, forbidden = _ucx_transports(environ)
    opens_memory = allowed & {"all", "cuda", "cuda_ipc"} and not forbidden & {"cuda", "cuda_ipc"}
    return "UCX_TLS" if opens_memory and "UCX_TLS" in environ else ""


def _ucx_transports(environ: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """Return the transports that UCX_TLS allows, and those that it forbids (`^` before a name)."""
    names = {name.strip().removeprefix("\\") for name in environ.get("UCX_TLS", "all").split(",")}
    if any(name.startswith("^") for name in names):
        return {"all"}, {name.removeprefix("^") for name in names}
    return names, set()


@functools.cache
def host_identity() -> str:
    """Return an id that two processes share exactly if each can open the other's files in /proc:
    same boot, same pid namespace, same user.
    """
    with open("/proc/sys/kernel/random/boot_id", "rb") as boot:
        facts = (
            boot.read().strip(),
            os.readlink("/proc/self/ns/pid").encode(),
            str(os.getuid()).encode(),
        )
    return hashlib.sha256(b"\0".join(facts)).hexdigest()[:32]


# -- process incarnations --
# One incarnation of a process on this host: is it the process that was meant, and has it ended?
# A pid alone does not identify a process, because the kernel reuses pids.


PROC_STATE, PROC_START_TICKS = 0, 19
"""Indexes of the fields in /proc/PID/stat that follow the command's name."""


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is no such process,
    or only a zombie.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The command's name may contain spaces and parentheses: split after the last one.
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[PROC_STATE] in (b"Z", b"X") else int(fields[PROC_START_TICKS])


def own_start_ticks(transport: str) -> int:
    """When this process was started, for an offer to processes of this host."""
    ticks = start_ticks(os.getpid())
    if ticks is None:
        raise LocalProtocolError(
            f"/proc does not show this process, so its cache cannot be offered over {transport}; "
            "mount /proc"
        )
    return ticks


OfferedInt = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
OfferedSize = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Addresses and sizes; `OfferedInt` is for process ids and file descriptors."""


def decoded_host_offer(peer: PeerId, offer: TransportOffer, content: type[OfferT]) -> OfferT:
    """The content of a peer's offer. TransportError if it is malformed, or not of this host."""
    decoded = decoded_offer(peer, offer, content)
    if offer.reach != host_identity():
        raise TransportError(
            f"the {offer.transport} offer of {peer} is from another host, user or container; use "
            "another transport"
        )
    return decoded


@dataclass(slots=True)
class ProcessIncarnation:
    """Watches one incarnation of a process until the process ends. The caller closes it."""

    pid: int
    ticks: int
    _pidfd: int | None
    _poller: select.poll = field(default_factory=select.poll)

    @classmethod
    def watch(cls, pid: int, ticks: int) -> "ProcessIncarnation | None":
        """Start watching; None if this incarnation of the process has ended already."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # kernels before 5.3, or no such process: its start time shows that
            pidfd = None
        # Compare the start time after the pidfd is open: then the pidfd is of the right process.
        incarnation = cls(pid, ticks, pidfd)
        if pidfd is not None:
            incarnation._poller.register(pidfd, select.POLLIN)
        if start_ticks(pid) == ticks:
            return incarnation
        incarnation.close()
        return None

    def has_ended(self) -> bool:
        if self._pidfd is None:
            return start_ticks(self.pid) != self.ticks
        return bool(self._poller.poll(0))

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class HostLink(Link):
    """A peer in another process of this host, for as long as the process lives."""

    def __init__(
        self, peer: PeerId, regions: tuple[Region, ...], pid: int, start_ticks: int
    ) -> None:
        super().__init__(peer, regions)
        incarnation = ProcessIncarnation.watch(pid, start_ticks)
        if incarnation is None:
            raise TransportError(self._ended())
        self._incarnation = incarnation

    def problem(self) -> str | None:
        return self._ended() if self._incarnation.has_ended() else None

    def close(self) -> None:
        self._incarnation.close()

    def _ended(self) -> str:
        return f"the process of peer {self.peer} has ended"
