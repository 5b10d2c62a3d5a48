"""One NIXL agent, whose misuse, errors and silence all come out as TransportError. Sole importer of
nixl. Owned by its transport's thread.

Facts it is built on, NIXL 1.5.1 with UCX 1.23:

- Memory is written after `remove_remote_agent`, or the process aborts, if something was still
  posted; and a released handle is forgotten, its read not taken back. What ends every write for
  certain is the end of the agent, with its sockets and queue pairs.
- The agent ends when nobody refers to NIXL's object any more: each handle of a transfer does, and
  so does an exception that passed through NIXL, as long as somebody keeps it. Hence `is_gone`.
- REMOTE_DISCONNECT says that a connection has failed as a whole, with everything that was posted on
  it. Other errors say nothing about the rest; and from 1,024 descriptors on NIXL divides a batch
  among its threads, which have a connection each.
"""

import contextlib
import ctypes
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError, MissingDependency, TransportError
from kvferry.transports.copy.segments import Descriptors, Offsets, merged_ranges
from kvferry.transports.nixl.transfer import (
    Agent,
    NixlLink,
    NixlTransfer,
    Posted,
    Telemetry,
    UncertainFailure,
)
from kvferry.types import MemoryKind, PeerId, Region

__all__ = [
    "CUDA_ENVIRONMENT",
    "DEFAULT_ENVIRONMENT",
    "AgentPool",
    "NixlAgent",
    "load_distribution_netlink",
    "load_nixl",
    "netlink_copies",
]


DIVIDED_FROM = 1024
"""Descriptors, from which on NIXL uses its threads."""
DISCONNECTED = "REMOTE_DISCONNECT"

DEFAULT_ENVIRONMENT = {
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    # Both write an error for every peer that dies; what matters of it is in the failed completion.
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
}
CUDA_ENVIRONMENT = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}
"""Without it a READ between two processes on one GPU node goes through host TCP, 4,000 times
slower.
"""

NETLINK_LIBRARY = "libnl-route-3.so.200"
"""The distribution's libnl, by the name under which rdma-core's libraries load it. NIXL's wheel has
a copy under another name.
"""


class NixlAgent:
    """Implements `nixl_transfer.Agent`. Close it."""

    def __init__(
        self, agent: Any, errors: tuple[type[Exception], ...], kind: MemoryKind, device: int
    ) -> None:
        self.name: str = agent.name
        self.remotes: set[str] = set()
        """Agents of peers that have been added."""
        self._agent = agent
        self._incarnation = weakref.ref(agent.agent)
        self._errors = errors
        self._kind = kind
        self._device = device
        self._registration: Any = None
        self._last_completed_at: dict[str, float] = {}
        self._disconnected: set[str] = set()

    @classmethod
    def open(
        cls, backends: tuple[str, ...], num_threads: int, kind: MemoryKind, device: int
    ) -> "NixlAgent":
        """ConfigError when NIXL or one of the backends is not here."""
        nixl, errors = load_nixl(kind)
        config = nixl.nixl_agent_config(
            enable_prog_thread=False,
            capture_telemetry=True,
            num_threads=num_threads,
            backends=list(backends),
        )
        try:
            agent = nixl.nixl_agent(f"kvferry-{uuid4().hex}", config)
        except errors as error:
            raise ConfigError(
                f"NIXL cannot start {', '.join(backends)} ({error}), named in `backends`: it is "
                "missing, or wants a device that is "
                "not here; use UCX, or see `kvferry doctor`"
            ) from error
        missing = set(backends) - set(agent.backends)
        if missing:
            raise ConfigError(
                f"`backends` names {', '.join(sorted(missing))}, which NIXL has not; it has "
                f"{', '.join(agent.get_plugin_list())}"
            )
        return cls(agent, errors, kind, device)

    @property
    def is_gone(self) -> bool:
        """Closed, and nothing is left of it that could write."""
        return self._agent is None and self._incarnation() is None

    def register(self, regions: Sequence[Region]) -> bool:
        rows = np.array(
            [(address, size, self._device) for address, size in merged_ranges(regions)], np.uint64
        )
        try:
            self._registration = self._agent.register_memory(rows, self._kind.value)
        except self._errors:
            return False
        return self._registration is not None

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def add(self, name: str, metadata: bytes, peer: PeerId) -> None:
        try:
            added = self._agent.add_remote_agent(metadata).decode(errors="replace")
        except self._errors as error:
            raise TransportError(f"peer {peer} cannot be reached over nixl ({error})") from error
        if added != name:
            if added not in self.remotes:  # it may be that of an honest peer
                self.remove(added)
            raise TransportError(
                f"the nixl offer of {peer} is for another agent than it says; drop this peer"
            )
        self.remotes.add(added)
        self._disconnected.discard(added)

    def remove(self, name: str) -> None:
        self.remotes.discard(name)
        self._last_completed_at.pop(name, None)
        with contextlib.suppress(*self._errors):
            self._agent.remove_remote_agent(name)

    def post(self, operation: str, batch: Descriptors, link: NixlLink) -> Posted:
        local = self._descriptors(batch.local, batch.size_bytes, self._device)
        remote = self._descriptors(batch.remote, batch.size_bytes, link.regions[0].device)
        kinds = self._kind.value, link.regions[0].memory.value
        try:
            sides = [
                self._agent.get_xfer_descs(rows, kind)
                for rows, kind in zip((local, remote), kinds, strict=True)
            ]
            if None in sides:
                raise TransportError(
                    f"NIXL refused the descriptors of a transfer with {link.peer}; its log says why"
                )
            posted = Posted(self._agent.initialize_xfer(operation, *sides, link.agent), len(batch))
        except self._errors as error:
            raise TransportError(
                f"NIXL cannot prepare a transfer with {link.peer} ({error})"
            ) from error
        try:
            state = self._agent.transfer(posted.handle)
        except self._errors as error:
            state = str(error)
        if state not in ("DONE", "PROC"):
            self.release(posted)
            raise self._failure(
                f"NIXL cannot post a transfer with {link.peer} ({state})", state, posted, link
            )
        return posted

    def is_done(self, posted: Posted, link: NixlLink) -> bool:
        try:
            state = self._agent.check_xfer_state(posted.handle)
        except self._errors as error:
            state = str(error)
        if state not in ("DONE", "PROC"):
            raise self._failure(
                f"a transfer with {link.peer} failed in NIXL ({state})", state, posted, link
            )
        if state == "DONE":
            self._last_completed_at[link.agent] = time.monotonic()
        return bool(state == "DONE")

    def last_completed_at(self, link: NixlLink) -> float:
        return self._last_completed_at.get(link.agent, 0.0)

    def telemetry(self, posted: Posted) -> Telemetry:
        try:
            report = self._agent.get_xfer_telemetry(posted.handle)
        except self._errors as error:
            raise TransportError(f"NIXL does not tell what a transfer moved ({error})") from error
        return Telemetry(
            report.startTime,
            report.startTime + report.xferDuration,
            report.postDuration,
            report.totalBytes,
            report.descCount,
        )

    def release(self, posted: Posted) -> None:
        with contextlib.suppress(*self._errors):
            self._agent.release_xfer_handle(posted.handle)

    def progress(self) -> list[bytes]:
        """Let NIXL work. What peers have sent by `notify` since the last time, from whomever."""
        try:
            received = self._agent.get_new_notifs()
        except self._errors:
            return []
        return [note for notes in received.values() for note in notes]

    def notify(self, note: bytes, link: NixlLink) -> None:
        """Send a peer a few bytes, whole and in order. TransportError when it is known to be
        gone.
        """
        try:
            self._agent.send_notif(link.agent, note)
        except self._errors as error:
            raise TransportError(f"NIXL cannot send anything to {link.peer} ({error})") from error

    def close(self) -> None:
        """Idempotent. All handles are to be released and forgotten before: the agent would live on,
        and might crash the interpreter when that ends.
        """
        if self._agent is None:
            return
        for name in tuple(self.remotes):
            self.remove(name)
        if self._registration is not None:
            with contextlib.suppress(*self._errors):
                self._agent.deregister_memory(self._registration)
        self._registration = None
        self._agent = None
        if not self.is_gone:
            gc.collect()

    def _failure(self, why: str, state: str, posted: Posted, link: NixlLink) -> TransportError:
        if DISCONNECTED in state:
            self._disconnected.add(link.agent)
        # NIXL itself removes an agent that it has seen disconnected; what else was posted to it
        # fails by that.
        is_certain = link.agent in self._disconnected and posted.descriptors < DIVIDED_FROM
        return TransportError(why) if is_certain else UncertainFailure(why)

    @staticmethod
    def _descriptors(addresses: Offsets, sizes: Offsets, device: int) -> npt.NDArray[np.uint64]:
        rows = np.empty((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, sizes, device
        return rows


def load_nixl(kind: MemoryKind) -> tuple[Any, tuple[type[Exception], ...]]:
    """NIXL, with the errors it raises. Settings that its libraries read when they are loaded are
    made first, unless the user has.
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
    """Files of libnl-route that this process has loaded. Two are one too many for a process that
    did not load NIXL by `load_nixl`.
    """
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if "/libnl-route-3" in line}


def load_distribution_netlink() -> None:
    """Load the distribution's libnl, if there is one, before UCX does; else the process may die
    with SIGSEGV when it exits.

    UCX's EFA module needs `libefa.so.1`, which NIXL's wheel lacks. Where rdma-core is installed,
    the distribution's `libefa` brings a second libnl into the process. If UCX loads it, its
    constructors register with the wheel's copy, which has these names already and refuses them; its
    destructors then unlink entries that were never linked. Loaded on its own, it registers with
    itself. See docs/decisions/042-two-copies-of-libnl.md.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(NETLINK_LIBRARY)


# -------------------- nixl generations -------------------- The agents that our own transfers are
# posted on: the one in use, and earlier ones that are being given up.
#
#     in use ──── a stopped transfer waits in vain ────▶ retired ──── only such transfers are left ────▶ closed, gone
#
# A stopped transfer whose peer is silent ends with its agent only: before that the peer may still
# answer, and NIXL would write. So its agent is retired: nothing new begins on it, what others have
# begun goes on to its end, and then it is closed. Others meet a new agent. Owned by the thread of
# the transport.


MAX_RETIRED = 3
"""Each has about 17 files and two threads. The number comes down by itself: nothing is added to a
retired agent, and what is under way on it ends, or is stopped by its deadline and then waits in
vain too. Until then whatever else waits in vain waits on, on the agent in use.
"""


class AgentPool:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._in_use: NixlAgent | None = None
        self._retired: list[NixlAgent] = []
        self._leaving: set[str] = set()
        """Agents of peers that the one in use shall forget, once nothing is posted to them."""

    @property
    def is_settled(self) -> bool:
        return not self._retired and not self._leaving

    def is_in_use(self, agent: Agent) -> bool:
        return agent is self._in_use

    def connected(self) -> list[NixlAgent]:
        """Those on which something may move."""
        return [
            agent for agent in (self._in_use, *self._retired) if agent is not None and agent.remotes
        ]

    def reach(
        self, link: NixlLink, transfers: Iterable[NixlTransfer], open_agent: Callable[[], NixlAgent]
    ) -> NixlAgent:
        """The agent in use, opened if there is none, and connected. TransportError when the peer
        cannot be reached.
        """
        if self._in_use is None:
            self._in_use = open_agent()
        self._forget_leaving(transfers)
        if link.agent in self._leaving:
            # A connection that has failed is got rid of by forgetting its agent only.
            raise TransportError(
                f"an earlier connection to {link.peer} is still being closed; try again in a moment"
            )
        if link.agent not in self._in_use.remotes:
            self._in_use.add(link.agent, link.metadata, link.peer)
        return self._in_use

    def leave(self, name: str) -> None:
        """Forget a peer's agent, as soon as nothing is posted to it."""
        if self._in_use is not None and name in self._in_use.remotes:
            self._leaving.add(name)

    def needs_agent_close(self, transfer: NixlTransfer) -> bool:
        return transfer.must_close_agent(time.monotonic(), self._timeout_s)

    def advance(self, transfers: Iterable[NixlTransfer]) -> None:
        """Retire, close and forget what can be. What waited in vain has ended when its agent is
        gone.
        """
        lost = {transfer.agent for transfer in transfers if self.needs_agent_close(transfer)}
        if self._in_use in lost and len(self._retired) < MAX_RETIRED:
            self._retire()
        for agent in self._retired:
            remaining = [
                transfer
                for transfer in transfers
                if transfer.agent is agent and not transfer.has_ended
            ]
            if all(self.needs_agent_close(transfer) for transfer in remaining):
                _end(agent, remaining)
        self._retired = [agent for agent in self._retired if not agent.is_gone]
        self._forget_leaving(transfers)

    def close(self, transfers: Iterable[NixlTransfer]) -> None:
        if self._in_use is not None:
            self._retire()
        for agent in self._retired:
            _end(agent, transfers)
        self._retired.clear()

    def _retire(self) -> None:
        assert self._in_use is not None
        self._retired.append(self._in_use)
        self._in_use = None
        self._leaving.clear()

    def _forget_leaving(self, transfers: Iterable[NixlTransfer]) -> None:
        if self._in_use is None or not self._leaving:
            return
        busy = {
            transfer.link.agent
            for transfer in transfers
            if transfer.agent is self._in_use and not transfer.has_ended
        }
        for name in self._leaving - busy:
            self._leaving.discard(name)
            self._in_use.remove(name)


def _end(agent: NixlAgent, transfers: Iterable[NixlTransfer]) -> None:
    for transfer in transfers:
        if transfer.agent is agent:
            transfer.abandon()
    agent.close()
