"""One NIXL agent, with NIXL's errors turned into TransportError.

This is the only module that imports nixl. Owned by the transport's thread. Facts about NIXL 1.5.1
with UCX 1.23 that the module relies on:

- Removing a remote agent (`remove_remote_agent`) while a transfer is posted does not stop the
  transfer: bytes may still be written, or the process aborts. Releasing a handle does not cancel
  the read either. Only closing the agent, with all sockets and queue pairs, certainly ends every
  write.
- The agent is destroyed when the last reference to NIXL's object is gone. Each transfer handle
  holds a reference, and so does an exception that passed through NIXL, for as long as the exception
  is kept. Hence `is_gone`.
- REMOTE_DISCONNECT means that a whole connection has failed, with every transfer posted on the
  connection: the transport posts no batch so long that NIXL divides it among several connections.
  Any different error says nothing about the remaining transfers.
"""

import contextlib
import ctypes
import gc
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError, MissingDependency, TransportError
from kvferry.transports.base import Operation
from kvferry.transports.copy.segments import Descriptors, Offsets, merged_ranges
from kvferry.transports.linked import Link
from kvferry.transports.locality import variable_against_remapping
from kvferry.types import MemoryKind, PeerId, Region

DISCONNECTED = "REMOTE_DISCONNECT"

DEFAULT_ENVIRONMENT = {
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    # Both libraries log an error for every peer that dies; the failed completion already reports
    # the death.
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
}
CUDA_ENVIRONMENT = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}
"""Without this setting, a READ between two processes on one GPU node goes through host TCP, which
is 4,000 times slower.
"""

REMAPPED_MEMORY = "RCACHE_ENABLE=n,TLS=^cuda_ipc"
"""UCX's settings for memory whose addresses get other memory later: UCX caches registrations, and
the memory that it has opened with CUDA IPC, by address. Environment variables of UCX win.
"""

NETLINK_LIBRARY = "libnl-route-3.so.200"
"""The distribution's libnl, by the name under which the libraries of rdma-core load libnl.

NIXL's wheel contains a copy under another name.
"""


@dataclass(slots=True, eq=False)
class NixlLink(Link):
    """One connection to a peer's agent."""

    agent: str
    metadata: bytes
    """The newest metadata of the peer's agent that we have."""
    grants_slots: bool = False
    """Whether the peer has, or may allocate, a bounce buffer."""


class Telemetry(NamedTuple):
    """Times and sizes of one batch, measured by NIXL on NIXL's clock."""

    started_us: int
    ended_us: int
    post_us: int
    total_bytes: int
    descriptors: int


class UncertainFailure(TransportError):
    """A batch has failed, and some bytes of the batch may still be written."""


class NixlAgent:
    """One agent of NIXL. The owner must close it."""

    def __init__(
        self, agent: Any, errors: tuple[type[Exception], ...], kind: MemoryKind, device: int
    ) -> None:
        self.name: str = agent.name
        self.remotes: set[str] = set()
        """Names of the peers' agents that have been added."""
        self._agent = agent
        # The weak reference shows when NIXL's object has really been destroyed.
        self._agent_ref = weakref.ref(agent.agent)
        self._errors = errors
        self._kind = kind
        self._device = device
        self._registrations: list[Any] = []
        self._last_completed_at: dict[str, float] = {}
        self._disconnected: set[str] = set()

    @classmethod
    def open(
        cls,
        backends: tuple[str, ...],
        num_threads: int,
        kind: MemoryKind,
        device: int,
        ucx_settings: str = "",
    ) -> "NixlAgent":
        """Start an agent. ConfigError if NIXL or one of the backends is missing. `ucx_settings` are
        for UCX alone: the other backends are then not started.
        """
        against = variable_against_remapping(os.environ) if ucx_settings else ""
        if against and kind is not MemoryKind.DRAM:
            raise ConfigError(
                f"with {against}={os.environ[against]} UCX would use memory that sleep mode has "
                "freed; unset it, or start the engine without sleep mode"
            )
        nixl, errors = load_nixl(kind)
        config = nixl.nixl_agent_config(
            enable_prog_thread=False,
            capture_telemetry=True,
            num_threads=num_threads,
            backends=[] if ucx_settings else list(backends),
        )
        try:
            agent = nixl.nixl_agent(f"kvferry-{uuid4().hex}", config)
            if ucx_settings:
                threads = {"num_threads": str(num_threads)} if num_threads else {}
                agent.create_backend("UCX", {**threads, "engine_config": ucx_settings})
        except errors as error:
            raise ConfigError(
                f"NIXL cannot start {', '.join(backends)}, named in `backends` ({error}): "
                "the plugin is missing, or needs a device that this host does not have; "
                "use UCX, or see `kvferry doctor`"
            ) from error
        missing = set(backends) - set(agent.backends)
        if missing:
            raise ConfigError(
                f"NIXL has no backend {', '.join(sorted(missing))}, named in `backends`; "
                f"available: {', '.join(agent.get_plugin_list())}"
            )
        return cls(agent, errors, kind, device)

    @property
    def is_gone(self) -> bool:
        """True if the agent is closed and NIXL's object is destroyed, so that nothing can write any
        more.
        """
        return self._agent is None and self._agent_ref() is None

    def register(self, regions: Sequence[Region]) -> bool:
        """Register memory with NIXL; False if NIXL cannot register such memory.

        A peer that already has our metadata reaches memory registered later only after the peer
        has added our new metadata.
        """
        rows = np.array(
            [(address, size, self._device) for address, size in merged_ranges(regions)], np.uint64
        )
        try:
            registration = self._agent.register_memory(rows, self._kind.value)
        except self._errors:
            return False
        if registration is not None:
            self._registrations.append(registration)
        return registration is not None

    def deregister_last(self) -> None:
        """Undo the last successful `register`."""
        with contextlib.suppress(*self._errors):
            self._agent.deregister_memory(self._registrations.pop())

    def metadata(self) -> bytes:
        """Return what a peer needs to reach our memory. TransportError if NIXL fails."""
        try:
            return bytes(self._agent.get_agent_metadata())
        except self._errors as error:
            raise TransportError(f"NIXL gives no metadata of this agent ({error})") from error

    def add(self, name: str, metadata: bytes, peer: PeerId) -> None:
        """Connect to a peer's agent, or load new metadata of a connected agent.

        TransportError if the peer cannot be reached or the name is wrong.
        """
        try:
            added = self._agent.add_remote_agent(metadata).decode(errors="replace")
        except self._errors as error:
            raise TransportError(f"peer {peer} cannot be reached over nixl ({error})") from error
        if added != name:
            if added not in self.remotes:  # `added` may be the agent of an honest peer
                self.remove(added)
            raise TransportError(
                f"the nixl offer of {peer} names one agent and has the metadata of "
                "another; drop this peer"
            )
        self.remotes.add(added)
        self._disconnected.discard(added)

    def remove(self, name: str) -> None:
        self.remotes.discard(name)
        self._last_completed_at.pop(name, None)
        with contextlib.suppress(*self._errors):
            self._agent.remove_remote_agent(name)

    def post(self, operation: Operation, batch: Descriptors, link: NixlLink) -> Any:
        """Post one batch; return NIXL's handle of it. UncertainFailure if some bytes may be written
        despite the error.
        """
        remote_region = link.regions[0]
        sides = (
            (batch.local, self._device, self._kind),
            (batch.remote, remote_region.device, remote_region.memory),
        )
        try:
            made = [
                self._agent.get_xfer_descs(_rows(addresses, batch.size_bytes, device), kind.value)
                for addresses, device, kind in sides
            ]
            if None in made:
                raise TransportError(
                    f"NIXL refused the descriptors of a transfer with {link.peer}; NIXL's "
                    "log has the reason"
                )
            handle = self._agent.initialize_xfer(operation, *made, link.agent)
        except self._errors as error:
            raise TransportError(
                f"NIXL cannot prepare a transfer with {link.peer} ({error})"
            ) from error
        # Posting may complete the batch ("DONE"), start the batch ("PROC"), or fail.
        state = self._state(self._agent.transfer, handle)
        if state not in ("DONE", "PROC"):
            self.release(handle)
            raise self._failure(
                f"NIXL cannot post a transfer with {link.peer} ({state})", state, link
            )
        return handle

    def collect(self, handle: Any, link: NixlLink) -> Telemetry | None:
        """Return what a batch has moved; None while it is in flight. TransportError if it has
        failed, UncertainFailure as in `post`.
        """
        state = self._state(self._agent.check_xfer_state, handle)
        if state not in ("DONE", "PROC"):
            raise self._failure(
                f"a transfer with {link.peer} failed in NIXL ({state})", state, link
            )
        if state == "PROC":
            return None
        self._last_completed_at[link.agent] = time.monotonic()
        try:
            report = self._agent.get_xfer_telemetry(handle)
        except self._errors as error:
            raise TransportError(
                f"NIXL does not report how much a transfer moved ({error})"
            ) from error
        ended_us = report.startTime + report.xferDuration
        moved = report.postDuration, report.totalBytes, report.descCount
        return Telemetry(report.startTime, ended_us, *moved)

    def last_completed_at(self, link: NixlLink) -> float:
        """When a batch with this peer last completed, in local monotonic seconds; 0 if none has."""
        return self._last_completed_at.get(link.agent, 0.0)

    def release(self, handle: Any) -> None:
        """Release the handle of a batch. The release does not cancel a batch in flight."""
        with contextlib.suppress(*self._errors):
            self._agent.release_xfer_handle(handle)

    def progress(self) -> list[bytes]:
        """Drive NIXL's progress. Return the notifications since the last call, from all peers."""
        try:
            received = self._agent.get_new_notifs()
        except self._errors:
            return []
        return [note for notes in received.values() for note in notes]

    def notify(self, note: bytes, link: NixlLink) -> None:
        """Send a notification, complete and in order. TransportError if the peer is known to be
        gone.
        """
        try:
            self._agent.send_notif(link.agent, note)
        except self._errors as error:
            raise TransportError(
                f"NIXL cannot send a notification to {link.peer} ({error})"
            ) from error

    def close(self) -> None:
        """Close the agent. Idempotent.

        The caller first releases and drops all transfer handles. Otherwise NIXL's object survives,
        and may crash the interpreter at exit.
        """
        if self._agent is None:
            return
        for name in tuple(self.remotes):
            self.remove(name)
        while self._registrations:
            self.deregister_last()
        self._agent = None
        # A reference cycle, for example with the traceback of an exception, may keep the object
        # alive.
        if not self.is_gone:
            gc.collect()

    def _state(self, call: Callable[[Any], str], handle: Any) -> str:
        """Return the state of a batch that a call of NIXL reports, or NIXL's error."""
        try:
            return call(handle)
        except self._errors as error:
            return str(error)

    def _failure(self, why: str, state: str, link: NixlLink) -> TransportError:
        if DISCONNECTED in state:
            self._disconnected.add(link.agent)
        # NIXL removes an agent on its own after REMOTE_DISCONNECT, and all batches posted to the
        # removed agent fail.
        return TransportError(why) if link.agent in self._disconnected else UncertainFailure(why)


def _rows(addresses: Offsets, sizes: Offsets, device: int) -> npt.NDArray[np.uint64]:
    rows = np.empty((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, sizes, device
    return rows


def load_nixl(kind: MemoryKind) -> tuple[Any, tuple[type[Exception], ...]]:
    """Import NIXL; return the module and the exceptions that NIXL raises.

    Environment variables that the libraries read while loading are set first, unless set by the
    user.
    """
    settings = DEFAULT_ENVIRONMENT | (CUDA_ENVIRONMENT if kind is MemoryKind.VRAM else {})
    for key, value in settings.items():
        os.environ.setdefault(key, value)
    load_distribution_netlink()
    try:
        import nixl
        import nixl._bindings as bindings
    except ImportError as error:
        raise MissingDependency(
            f"NIXL cannot be loaded ({error}); pip install nixl, or set transports to shm and tcp"
        ) from error
    errors = [
        thing
        for thing in vars(bindings).values()
        if isinstance(thing, type) and issubclass(thing, Exception)
    ]
    return nixl, (*errors, RuntimeError, TypeError, ValueError)


def netlink_copies() -> set[str]:
    """Return the files of libnl-route that this process has loaded.

    Two copies are a crash risk in a process that did not load NIXL by `load_nixl`.
    """
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if "/libnl-route-3" in line}


def load_distribution_netlink() -> None:
    """Load the distribution's libnl, if installed, before UCX does.

    Otherwise the process may die with SIGSEGV at exit. UCX's EFA module needs `libefa.so.1`, which
    NIXL's wheel lacks. Where rdma-core is installed, the distribution's `libefa` brings a second
    libnl into the process. If UCX loads this second libnl, the constructors of libnl register with
    the wheel's copy, which has the same names already and refuses the registration; the destructors
    then unlink entries that were never linked. Loaded on its own, the second libnl registers with
    itself. See docs/decisions/042-two-copies-of-libnl.md.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(NETLINK_LIBRARY)
