"""The `nixl` data plane: wherever NIXL reaches (UCX by default). Sole importer of nixl.

Owned by one thread. Facts it is built on, NIXL 1.5.1 with UCX 1.23:

- Posting may copy everything before it returns (CMA, fewer than 1,024 descriptors) or hand it to NIXL's threads; so transfers are posted in
  bounded batches, at most one in each `poll`.
- NIXL's progress thread burns a core while idle, so it is off and `poll` makes progress. The side that reads always needs that. The side
  that is read needs it while a connection comes up, and on emulated transports (tcp) for every byte; see `serving_interval_s`.
- Memory is written after `remove_remote_agent`, or the process aborts, if something was still posted. So whatever is posted is waited for;
  only when that takes longer than CANCEL_PATIENCE_S are handles released under way, before their agent. That is not enough over tcp: what
  a producer that was stopped or cut off sends when it is back still arrives (docs/faults.md, "Known holes").
- A batch of 1,024 descriptors or more is divided among NIXL's threads, each with connections of its own: an error of one does not say that
  the others have stopped. Smaller ones go over one connection, which fails as a whole.
- A peer that dies shows as an error of the next status call, within milliseconds on one host.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError, LocalProtocolError, MissingDependency, TransportError
from kvferry.planes.bounds import check_pieces, check_regions, merged_ranges
from kvferry.planes.fabric import nixl_is_near
from kvferry.planes.nixl_transfer import Link, NixlTransfer, Posted, Telemetry
from kvferry.planes.runs import Offsets, Runs, batches, coalesce, concatenate
from kvferry.ports.data import Completion, Handle, Pieces, PlaneOffer
from kvferry.types import MemoryKind, PeerId, Region

__all__ = ["NetworkReach", "NixlDataPlane", "load_nixl"]

MAX_BATCH_BYTES = 32 * 1024 * 1024
MAX_BATCH_RUNS = 1000
"""Below 1,024, from where on NIXL uses its threads: see above."""
BUSY_S = 120e-6
"""Progress that took longer moved something: idle it takes 3 µs when called at once again, 60 µs when caches have gone cold."""
BUSY_MEMORY_S = 0.02
BUSY_INTERVAL_S = 0.001
SERVING_INTERVAL_S = 0.01
QUIET_AFTER_S = 1.0
QUIET_SERVING_INTERVAL_S = 0.1
"""While peers may read, but nothing has moved for so long: a turn of the ferry takes 0.3 ms when caches have gone cold, and an idle process
shall take less than 1 % of a core. The ferry looks more often by itself when a read is likely to begin."""
CLOSE_PATIENCE_S = 2.0

DEFAULT_ENVIRONMENT = {
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    # Both write an error for every peer that dies; what matters of it is in the failed completion.
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
}
CUDA_ENVIRONMENT = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}
"""Without it a READ between two processes on one GPU node goes through host TCP, 4,000 times slower."""


class NetworkReach(Enum):
    """From where NIXL's transports may be reached."""

    ANYWHERE = "anywhere"
    THIS_HOST = "this host"


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    agent: str
    metadata: bytes


class NixlDataPlane:
    """Implements `ports.data.DataPlane`. Nothing of NIXL is loaded before `register`."""

    def __init__(self, backends: Sequence[str] = ("UCX",), num_threads: int = 4, reach: NetworkReach = NetworkReach.ANYWHERE) -> None:
        self._backends = tuple(backends)
        self._reach = reach
        self._num_threads = num_threads
        self._agent: _Agent | None = None
        self._regions: tuple[Region, ...] = ()
        self._links: dict[PeerId, Link] = {}
        self._closing_links: list[Link] = []
        self._transfers: deque[NixlTransfer] = deque()
        self._last_handle = 0
        self._busy_until = 0.0

    @property
    def name(self) -> str:
        return "nixl"

    def register(self, regions: Sequence[Region]) -> bool:
        kinds = {(region.memory, region.device) for region in regions}
        if len(kinds) != 1:
            return False
        ((kind, device),) = kinds
        if self._reach is NetworkReach.THIS_HOST:
            # UCX listens on every interface, and trusts whoever knows its wire format.
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        agent = _Agent.open(self._backends, self._num_threads, kind, device)
        if not agent.register(merged_ranges(regions)):
            agent.close()
            return False
        self._agent = agent
        self._regions = tuple(regions)
        return True

    def offer(self) -> PlaneOffer:
        agent = self._registered()
        near = nixl_is_near(self._backends, os.environ)
        return PlaneOffer(self.name, "", msgspec.msgpack.encode(_Offer(agent.name, agent.metadata())), near)

    def connect(self, peer: PeerId, offer: PlaneOffer, regions: Sequence[Region]) -> None:
        agent = self._registered()
        try:
            decoded = msgspec.msgpack.decode(offer.blob, type=_Offer)
        except msgspec.MsgspecError as error:
            raise TransportError(f"the nixl offer of {peer} cannot be understood ({error}); do both sides run the same kvferry?") from error
        check_regions(regions, peer)
        if decoded.agent == agent.name or len({(region.memory, region.device) for region in regions}) != 1:
            raise TransportError(f"the nixl offer of {peer} names this very engine, or memory of several kinds; drop this peer")
        self.disconnect(peer)
        self._finish_closing_links()
        if any(link.agent == decoded.agent for link in self._closing_links):
            # Torn down under way, it is safe only once its agent is removed; a new connection would keep that agent.
            raise TransportError(f"an earlier connection to {peer} is still being closed; try again in a moment")
        if not self._uses(decoded.agent):
            agent.add(decoded.agent, decoded.metadata, peer)
        self._links[peer] = Link(peer, decoded.agent, tuple(regions))

    def disconnect(self, peer: PeerId) -> None:
        link = self._links.get(peer)
        if link is not None:
            self._drop(link, f"peer {peer} was disconnected")

    def read(self, peer: PeerId, pieces: Sequence[Pieces]) -> Handle:
        return self._start(peer, pieces, "READ")

    def write(self, peer: PeerId, pieces: Sequence[Pieces]) -> Handle:
        return self._start(peer, pieces, "WRITE")

    def poll(self) -> list[Completion]:
        if self._agent is None:
            return []
        self._progress(self._agent)
        for transfer in self._transfers:
            self._check(self._agent, transfer)
        posted = self._post_next(self._agent)
        if posted is not None:
            # Between processes of one host a read is over when it has been posted.
            self._check(self._agent, posted)
        ended = [transfer for transfer in self._transfers if transfer.has_ended]
        self._transfers = deque(transfer for transfer in self._transfers if not transfer.has_ended)
        self._finish_closing_links()
        return [transfer.completion() for transfer in ended]

    def cancel(self, handle: Handle) -> None:
        for transfer in self._transfers:
            if transfer.handle == handle:
                transfer.stop("cancelled")

    def poll_interval_s(self) -> float | None:
        if not self._transfers:
            return BUSY_INTERVAL_S if self._closing_links else None
        can_move = any(transfer.can_post or transfer.has_ended for transfer in self._transfers)
        return 0.0 if can_move or self._is_busy() else BUSY_INTERVAL_S

    def serving_interval_s(self) -> float | None:
        if self._is_busy():
            return BUSY_INTERVAL_S
        return SERVING_INTERVAL_S if time.monotonic() < self._busy_until + QUIET_AFTER_S else QUIET_SERVING_INTERVAL_S

    def close(self) -> None:
        """Waits a bounded time for what is posted, so that no byte is written afterwards."""
        if self._agent is None:
            return
        for peer in list(self._links):
            self.disconnect(peer)
        deadline = time.monotonic() + CLOSE_PATIENCE_S
        while self._transfers and time.monotonic() < deadline:
            self.poll()
        for transfer in self._transfers:
            transfer.abandon(self._agent)
        self._finish_closing_links()
        self._transfers.clear()
        self._closing_links.clear()
        self._agent.close()
        self._agent = None

    def _registered(self) -> "_Agent":
        if self._agent is None:
            raise LocalProtocolError("the nixl plane is used before its memory is registered, or after it is closed")
        return self._agent

    def _start(self, peer: PeerId, pieces: Sequence[Pieces], operation: str) -> Handle:
        link = self._links.get(peer)
        if link is None or self._agent is None:
            raise TransportError(f"peer {peer} is not connected over nixl")
        check_pieces(pieces, self._regions, link.regions, peer)
        self._last_handle += 1
        transfer = NixlTransfer(Handle(self._last_handle), link, operation, self._batches(pieces, link))
        self._transfers.append(transfer)
        return transfer.handle

    def _batches(self, pieces: Sequence[Pieces], link: Link) -> Iterator[Runs]:
        """Descriptors are made when the first batch is posted, not when the transfer is asked for."""
        local, remote = self._regions, link.regions
        runs = [coalesce(part).moved(local[part.local_region].address, remote[part.remote_region].address) for part in pieces]
        yield from batches(concatenate(runs), MAX_BATCH_BYTES, MAX_BATCH_RUNS)

    def _progress(self, agent: "_Agent") -> None:
        # The thread's own CPU time: a call that was merely interrupted did not move anything.
        began = time.thread_time()
        agent.progress()
        if time.thread_time() - began > BUSY_S:
            self._busy_until = time.monotonic() + BUSY_MEMORY_S

    def _is_busy(self) -> bool:
        return time.monotonic() < self._busy_until

    def _check(self, agent: "_Agent", transfer: NixlTransfer) -> None:
        try:
            transfer.collect(agent)
        except TransportError as error:
            self._drop(transfer.link, str(error))
        if transfer.is_overdue(time.monotonic()):
            self._drop(transfer.link, f"peer {transfer.link.peer} did not end a cancelled transfer")
            transfer.abandon(agent)

    def _post_next(self, agent: "_Agent") -> NixlTransfer | None:
        """One batch of the transfer whose turn it is: that transfer."""
        for _ in range(len(self._transfers)):
            transfer = self._transfers[0]
            self._transfers.rotate(-1)
            if not transfer.can_post:
                continue
            try:
                transfer.post(agent)
            except TransportError as error:
                self._drop(transfer.link, str(error))
            return transfer
        return None

    def _drop(self, link: Link, why: str) -> None:
        """Stop using a connection. Its agent is removed once nothing is posted to it."""
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            self._closing_links.append(link)
        for transfer in self._transfers:
            if transfer.link is link:
                transfer.stop(why)

    def _finish_closing_links(self) -> None:
        quiet = [link for link in self._closing_links if not any(t.link is link and t.posted for t in self._transfers)]
        for link in quiet:
            self._closing_links.remove(link)
            if not self._uses(link.agent):
                self._registered().remove(link.agent)

    def _uses(self, agent: str) -> bool:
        return any(link.agent == agent for link in (*self._links.values(), *self._closing_links))


class _Agent:
    """A NIXL agent whose misuse, errors and silence all come out as TransportError."""

    def __init__(self, agent: Any, errors: tuple[type[Exception], ...], kind: MemoryKind, device: int) -> None:
        self._agent = agent
        self._errors = errors
        self._kind = kind
        self._device = device
        self._registration: Any = None
        self.name: str = agent.name

    @classmethod
    def open(cls, backends: tuple[str, ...], num_threads: int, kind: MemoryKind, device: int) -> "_Agent":
        """ConfigError when NIXL or one of the backends is not here."""
        nixl, errors = load_nixl(kind)
        config = nixl.nixl_agent_config(enable_prog_thread=False, capture_telemetry=True, num_threads=num_threads, backends=list(backends))
        try:
            agent = nixl.nixl_agent(f"kvferry-{uuid4().hex}", config)
        except errors as error:
            raise ConfigError(
                f"NIXL cannot start {', '.join(backends)} ({error}), named in `backends`: it is missing, or wants a device that is "
                "not here; use UCX, or see `kvferry doctor`"
            ) from error
        missing = set(backends) - set(agent.backends)
        if missing:
            raise ConfigError(
                f"`backends` names {', '.join(sorted(missing))}, which NIXL has not; it has {', '.join(agent.get_plugin_list())}"
            )
        return cls(agent, errors, kind, device)

    def register(self, ranges: list[tuple[int, int]]) -> bool:
        rows = np.array([(address, size, self._device) for address, size in ranges], np.uint64)
        try:
            self._registration = self._agent.register_memory(rows, self._kind.value)
        except self._errors:
            return False
        return self._registration is not None

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def add(self, name: str, metadata: bytes, peer: PeerId) -> None:
        try:
            added = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise TransportError(f"peer {peer} cannot be reached over nixl ({error})") from error
        if added.decode(errors="replace") != name:
            self.remove(added.decode(errors="replace"))
            raise TransportError(f"the nixl offer of {peer} is for another agent than it says; drop this peer")

    def remove(self, name: str) -> None:
        with contextlib.suppress(*self._errors):
            self._agent.remove_remote_agent(name)

    def post(self, operation: str, batch: Runs, link: Link) -> Posted:
        local = self._descriptors(batch.local, batch.size_bytes, self._device)
        remote = self._descriptors(batch.remote, batch.size_bytes, link.regions[0].device)
        kinds = self._kind.value, link.regions[0].memory.value
        try:
            sides = [self._agent.get_xfer_descs(rows, kind) for rows, kind in zip((local, remote), kinds, strict=True)]
            if None in sides:
                raise TransportError(f"NIXL refused the descriptors of a transfer with {link.peer}; its log says why")
            posted = self._agent.initialize_xfer(operation, *sides, link.agent)
        except self._errors as error:
            raise TransportError(f"NIXL cannot prepare a transfer with {link.peer} ({error})") from error
        try:
            state = self._agent.transfer(posted)
        except self._errors as error:
            state = str(error)
        if state not in ("DONE", "PROC"):
            self.release(posted)
            raise TransportError(f"NIXL cannot post a transfer with {link.peer} ({state})")
        return posted

    def is_done(self, posted: Posted, link: Link) -> bool:
        try:
            state = self._agent.check_xfer_state(posted)
        except self._errors as error:
            state = str(error)
        if state not in ("DONE", "PROC"):
            raise TransportError(f"a transfer with {link.peer} failed in NIXL ({state})")
        return bool(state == "DONE")

    def telemetry(self, posted: Posted) -> Telemetry:
        try:
            told = self._agent.get_xfer_telemetry(posted)
        except self._errors as error:
            raise TransportError(f"NIXL does not tell what a transfer moved ({error})") from error
        return Telemetry(told.startTime, told.startTime + told.xferDuration, told.postDuration, told.totalBytes, told.descCount)

    def release(self, posted: Posted) -> bool:
        try:
            self._agent.release_xfer_handle(posted)
        except self._errors:
            return False
        return True

    def progress(self) -> None:
        with contextlib.suppress(*self._errors):
            self._agent.get_new_notifs()

    def close(self) -> None:
        """Without this the agent may crash the interpreter when that ends."""
        if self._registration is not None:
            with contextlib.suppress(*self._errors):
                self._agent.deregister_memory(self._registration)
        self._registration = None
        self._agent = None

    @staticmethod
    def _descriptors(addresses: Offsets, sizes: Offsets, device: int) -> npt.NDArray[np.uint64]:
        rows = np.empty((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, sizes, device
        return rows


def load_nixl(kind: MemoryKind) -> tuple[Any, tuple[type[Exception], ...]]:
    """NIXL, with the errors it raises. Settings that its libraries read when they are loaded are made first, unless the user has."""
    settings = DEFAULT_ENVIRONMENT | (CUDA_ENVIRONMENT if kind is MemoryKind.VRAM else {})
    for key, value in settings.items():
        os.environ.setdefault(key, value)
    try:
        import nixl
        import nixl._bindings as bindings
    except ImportError as error:
        raise MissingDependency(f"NIXL cannot be loaded ({error}); pip install nixl, or set planes to shm and tcp") from error
    errors = [thing for thing in vars(bindings).values() if isinstance(thing, type) and issubclass(thing, Exception)]
    return nixl, (*errors, RuntimeError, TypeError, ValueError)
