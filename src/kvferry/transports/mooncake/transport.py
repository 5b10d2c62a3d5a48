"""The `mooncake` data transport: reads KV from peers by Mooncake's Transfer Engine.

Owned by one thread. Mooncake runs in a process of its own, the agent (`agent.py`), which maps the
same memory as this process. Why: docs/decisions/057-mooncake-transfer-engine.md.

    our engine                 our agent                    the peer's agent
    MooncakeTransport -calls-> TransferEngine ---------->   TransferEngine
          `---------------------- greeting ------------->   (its listener belongs to the peer's
                                                            engine, so its port never changes)

The transport only reads. A read is cut into batches, which the agent's lanes fetch side by side.
"""

import ipaddress
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from kvferry.errors import ConfigError, TransportError
from kvferry.transports.base import (
    Completion,
    Handle,
    Segments,
    TransportOffer,
    memory_not_registered,
)
from kvferry.transports.copy.segments import (
    MAX_ADDRESS,
    Descriptors,
    batches,
    check_regions,
    check_segments,
    descriptors_between,
)
from kvferry.transports.mooncake.agent import GREETING_BYTES, Greeting, ReadCall
from kvferry.transports.mooncake.agent_process import ENDED, AgentProcess, MooncakeSettings
from kvferry.transports.shm import SharedMemory
from kvferry.transports.write_grants import write_grants_unsupported
from kvferry.types import Address, PeerId, Region

MAX_BATCH_BYTES = 8 * 1024 * 1024
MAX_DESCRIPTORS = 1000
"""Of all calls for one peer at a time. Mooncake refuses more than it has room for in its queue, and
a call must fit into the buffer of a lane's channel.
"""
POLL_INTERVAL_S = 0.001
SERVING_INTERVAL_S = 1.0
"""How often an agent that serves peers is looked after."""
MAX_REPEATED = 20
"""How many batches a read repeats because our agents have ended. A few are with the agent when it
ends.
"""
BACKLOG = 512
CANCELLED = "cancelled"


class _MooncakeOffer(msgspec.Struct, frozen=True, array_like=True):
    """Where the agent greets, and the memory that it serves, as mapped in the owner's process."""

    host: str
    port: int
    address: int
    size_bytes: int


class MooncakeTransport:
    """Implements `transports.base.DataTransport` over one SharedMemory, which the caller owns."""

    def __init__(
        self,
        memory: SharedMemory,
        bind_host: str,
        advertised_host: str,
        settings: MooncakeSettings | None = None,
    ) -> None:
        self._memory = memory
        self._bind_host = bind_host.strip("[]")
        self._advertised_host = advertised_host.strip("[]")
        self._settings = settings or MooncakeSettings()
        self._regions: tuple[Region, ...] = ()
        self._running: tuple[AgentProcess[_Call], socket.socket, str] | None = None
        """The agent, the listener that it inherits, and our numeric address for peers."""
        self._links: dict[PeerId, _Link] = {}
        self._transfers: deque[_Transfer] = deque()
        self._last_handle = 0

    @property
    def name(self) -> str:
        return "mooncake"

    def register(self, regions: Sequence[Region]) -> bool:
        if not self._memory.contains(regions):
            return False
        host, listener = _listening_on(self._bind_host, self._advertised_host)
        agent = AgentProcess[_Call](self._settings, host, listener, self._memory.fd)
        self._regions = tuple(regions)
        self._running = agent, listener, host
        try:
            agent.start()
        except BaseException:
            self.close()
            raise
        return True

    def offer(self) -> TransportOffer:
        if self._running is None:
            raise memory_not_registered(self.name)
        _, listener, host = self._running
        memory = self._memory
        offer = _MooncakeOffer(host, listener.getsockname()[1], memory.address, memory.size_bytes)
        return TransportOffer(self.name, "", msgspec.msgpack.encode(offer))

    def connect(self, peer: PeerId, offer: TransportOffer, regions: Sequence[Region]) -> None:
        check_regions(regions, peer)
        link = _Link(peer, _decoded(peer, offer), tuple(regions), self._settings.connect_s)
        self.disconnect(peer)
        self._links[peer] = link

    def disconnect(self, peer: PeerId) -> None:
        self._drop(peer, f"peer {peer} was disconnected")

    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle:
        started = time.perf_counter()
        link = self._checked(peer, segments)
        descriptors = descriptors_between(segments, self._regions, link.regions)
        max_descriptors = max(1, MAX_DESCRIPTORS // self._max_calls_per_peer)
        parts = batches(descriptors, MAX_BATCH_BYTES, max_descriptors)
        return self._start(link, parts, started)

    def write(self, peer: PeerId, segments: Sequence[Segments], grant_id: int = 0) -> Handle:
        """TransportError: the peer's memory cannot be written. A write of nothing succeeds."""
        link = self._checked(peer, segments)
        if any(part.total_bytes for part in segments):
            raise TransportError("the mooncake transport only reads; let the peer read instead")
        return self._start(link, iter(()), time.perf_counter())

    @property
    def supports_write_grants(self) -> bool:
        return False

    @property
    def _max_calls_per_peer(self) -> int:
        """A peer never gets all lanes, so that a silent one does not block the others. A call waits
        in a loop that uses a core; over tcp, one thread moves the bytes of all calls, and the loops
        of several would take the cores from it.
        """
        if self._settings.protocol == "tcp":
            return 1
        return max(1, self._settings.num_workers // 2)

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        raise write_grants_unsupported(self.name)

    def revoke_writes(self, grant_id: int) -> Handle:
        raise write_grants_unsupported(self.name)

    def poll(self) -> list[Completion]:
        if self._running is None:
            return []
        agent, _, _ = self._running
        now = time.monotonic()
        for (transfer, part), problem in agent.poll():
            transfer.in_flight -= 1
            if problem == ENDED and transfer.may_repeat:
                transfer.repeat(part)
            elif problem is not None:
                self._fail(transfer, problem)
        for transfer in list(self._transfers):
            # After the answers: a batch counts only if the peer's agent is alive now.
            problem = transfer.link.problem(now)
            if problem is not None:
                self._fail(transfer, problem)
        self._submit(agent)
        stopped_before = now - self._settings.stop_s
        if any(transfer.is_overdue(stopped_before) for transfer in self._transfers):
            agent.kill()
        ended = [transfer for transfer in self._transfers if transfer.has_ended]
        for transfer in ended:
            self._transfers.remove(transfer)
        return [transfer.completion() for transfer in ended]

    def cancel(self, handle: Handle) -> None:
        for transfer in self._transfers:
            if transfer.handle == handle:
                transfer.stop(CANCELLED)

    def poll_interval_s(self) -> float | None:
        return POLL_INTERVAL_S if self._transfers else None

    def serving_interval_s(self) -> float | None:
        return SERVING_INTERVAL_S

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._transfers.clear()
        if self._running is not None:
            agent, listener, _ = self._running
            agent.close()
            listener.close()
            self._running = None

    def _checked(self, peer: PeerId, segments: Sequence[Segments]) -> "_Link":
        link = self._links.get(peer)
        if link is None or self._running is None:
            raise TransportError(f"peer {peer} is not connected over mooncake")
        check_segments(segments, self._regions, link.regions, peer)
        return link

    def _start(self, link: "_Link", parts: Iterator[Descriptors], started: float) -> Handle:
        self._last_handle += 1
        handle = Handle(self._last_handle)
        self._transfers.append(
            _Transfer(
                handle, link, parts, next(parts, None), started, time.perf_counter() - started
            )
        )
        return handle

    def _submit(self, agent: AgentProcess["_Call"]) -> None:
        """Give idle lanes the next batches, one for each transfer in turn."""
        limit = self._max_calls_per_peer
        for _ in range(len(self._transfers) * limit):
            if not agent.has_idle_lane:
                return
            transfer = self._transfers[0]
            self._transfers.rotate(-1)
            busy = sum(t.in_flight for t in self._transfers if t.link is transfer.link)
            if transfer.is_ready and busy < limit:
                part = transfer.take_part()
                agent.submit(transfer.link.call(part, self._memory.address), (transfer, part))

    def _fail(self, transfer: "_Transfer", problem: str) -> None:
        """Stop all transfers with the peer, which may have restarted: the next transfer needs a new
        handshake.
        """
        transfer.stop(problem)
        if self._links.get(transfer.link.peer) is transfer.link:
            self._drop(transfer.link.peer, problem)

    def _drop(self, peer: PeerId, why: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.close()
            for transfer in self._transfers:
                if transfer.link is link:
                    transfer.stop(why)


class _Link:
    """The connection to a peer's agent. It carries one greeting, and its end means that the agent
    has ended, whose ports and addresses may then belong to another process.
    """

    def __init__(
        self, peer: PeerId, offer: _MooncakeOffer, regions: tuple[Region, ...], connect_s: float
    ) -> None:
        for region in regions:
            if (
                region.address < offer.address
                or region.address + region.size_bytes > offer.address + offer.size_bytes
            ):
                raise TransportError(
                    f"region {region.name!r} of {peer} is not in the memory it offers over "
                    "mooncake; drop this peer"
                )
        self.peer = peer
        self.regions = regions
        self.greeting: Greeting | None = None
        self._offer = offer
        self._received = b""
        self._greet_until = time.monotonic() + connect_s
        family = socket.AF_INET6 if ":" in offer.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        # Errors show when the greeting is received.
        with suppress(OSError):
            self._socket.connect((offer.host, offer.port))

    def problem(self, now: float) -> str | None:
        """Receive the greeting. Says why the peer cannot be read from, if it cannot."""
        if self._socket.fileno() < 0:
            return None
        try:
            while chunk := self._socket.recv(GREETING_BYTES + 1):
                self._received += chunk
                if len(self._received) >= GREETING_BYTES:
                    self.greeting = self._checked_greeting()
            return f"the Mooncake process of {self.peer} has ended"
        except BlockingIOError:
            if self.greeting is None and now > self._greet_until:
                return f"the Mooncake process of {self.peer} did not greet in time"
            return None
        except (OSError, ValueError) as error:
            return f"the Mooncake process of {self.peer} cannot be reached ({error})"

    def close(self) -> None:
        self._socket.close()

    def _checked_greeting(self) -> Greeting:
        greeting = Greeting.decode(self._received)
        if not greeting.port or greeting.address + self._offer.size_bytes > MAX_ADDRESS:
            raise ValueError("its greeting names no memory that can be read")
        return greeting

    def call(self, batch: Descriptors, our_memory: int) -> ReadCall:
        """The call for a batch between addresses in the two engines' processes."""
        assert self.greeting is not None
        moved = batch.moved(-our_memory, self.greeting.address - self._offer.address)
        return ReadCall(
            str(Address(self._offer.host, self.greeting.port)),
            self.greeting.incarnation,
            moved.local.tolist(),
            moved.remote.tolist(),
            moved.size_bytes.tolist(),
        )


@dataclass(slots=True, eq=False)
class _Transfer:
    """One read. `in_flight` batches are with the agent, which may write into our memory."""

    handle: Handle
    link: _Link
    parts: Iterator[Descriptors]
    next_part: Descriptors | None
    started: float
    post_s: float
    in_flight: int = 0
    total_bytes: int = 0
    segments: int = 0
    num_repeated: int = 0
    error: str | None = field(default=None, init=False)
    stopped_at: float = field(default=0.0, init=False)

    @property
    def is_ready(self) -> bool:
        return self.error is None and self.next_part is not None and self.link.greeting is not None

    @property
    def has_ended(self) -> bool:
        return not self.in_flight and (self.error is not None or self.next_part is None)

    def take_part(self) -> Descriptors:
        """The next batch, which then is with the agent."""
        part = self.next_part
        assert part is not None
        self.next_part = next(self.parts, None)
        self.in_flight += 1
        self.total_bytes += part.total_bytes
        self.segments += len(part)
        return part

    @property
    def may_repeat(self) -> bool:
        return self.error is None and self.num_repeated < MAX_REPEATED

    def repeat(self, part: Descriptors) -> None:
        """Read a batch again with the next agent: the last one has ended, often because a read
        from another peer had failed.
        """
        if self.next_part is not None:
            self.parts = chain((self.next_part,), self.parts)
        self.next_part = part
        self.num_repeated += 1
        self.total_bytes -= part.total_bytes
        self.segments -= len(part)

    def stop(self, error: str) -> None:
        """Submit no more batches. The first reason counts."""
        if self.error is None:
            self.error, self.stopped_at = error, time.monotonic()

    def is_overdue(self, stopped_before: float) -> bool:
        return self.error is not None and self.in_flight > 0 and self.stopped_at < stopped_before

    def completion(self) -> Completion:
        return Completion(
            self.handle,
            self.error,
            self.total_bytes,
            self.segments,
            self.post_s,
            time.perf_counter() - self.started,
        )


_Call = tuple[_Transfer, Descriptors]
"""What a call of the agent is made for: a batch of a read."""


def _listening_on(bind_host: str, advertised_host: str) -> tuple[str, socket.socket]:
    """Our numeric address for peers, and a listener on a free port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(advertised_host, 0, type=socket.SOCK_STREAM)[
            0
        ]
        host = "" if bind_host in ("", "*", "0.0.0.0", "::") else bind_host
        return str(address[0]), socket.create_server((host, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"the mooncake transport cannot listen on {bind_host or '*'} for {advertised_host} "
            f"({error}); name an address of this host"
        ) from error


def _decoded(peer: PeerId, offer: TransportOffer) -> _MooncakeOffer:
    with suppress(msgspec.MsgspecError, ValueError):
        decoded = msgspec.msgpack.decode(offer.blob, type=_MooncakeOffer)
        ipaddress.ip_address(decoded.host)
        if 0 < decoded.port < 1 << 16 and decoded.address >= 0 < decoded.size_bytes < MAX_ADDRESS:
            return decoded
    raise TransportError(
        f"the mooncake offer of {peer} cannot be understood; do both sides run the same kvferry?"
    )
