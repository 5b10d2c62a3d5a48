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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from kvferry.errors import ConfigError, TransportError
from kvferry.transports.base import Operation, Segments, TransportOffer
from kvferry.transports.copy.segments import MAX_ADDRESS, Descriptors
from kvferry.transports.linked import (
    Link,
    LinkedTransfer,
    LinkedTransport,
    check_offered,
    decoded_offer,
)
from kvferry.transports.mooncake.agent import GREETING_BYTES, Greeting, ReadCall
from kvferry.transports.mooncake.agent_process import AgentProcess, MooncakeSettings
from kvferry.transports.mooncake.process import ENDED
from kvferry.transports.shm import SharedMemory
from kvferry.types import Address, PeerId, Region

MAX_BATCH_BYTES = 8 * 1024 * 1024
MAX_DESCRIPTORS = 1000
"""Of all calls for one peer at a time. Mooncake refuses more than it has room for in its queue, and
a call must fit into the buffer of a lane's channel.
"""
SERVING_INTERVAL_S = 1.0
"""How often an agent that serves peers is looked after."""
MAX_REPEATED = 20
"""How many batches a read repeats because our agents have ended. A few are with the agent when it
ends.
"""
BACKLOG = 512


class _MooncakeOffer(msgspec.Struct, frozen=True, array_like=True):
    """Where the agent greets, and the memory that it serves, as mapped in the owner's process."""

    host: str
    port: int
    address: int
    size_bytes: int


class MooncakeTransport(LinkedTransport["_MooncakeLink", "_Read"]):
    """Implements `transports.base.DataTransport` over one SharedMemory, which the caller owns."""

    name = "mooncake"

    def __init__(
        self,
        memory: SharedMemory,
        bind_host: str,
        advertised_host: str,
        settings: MooncakeSettings | None = None,
    ) -> None:
        super().__init__()
        self._memory = memory
        self._bind_host = bind_host.strip("[]")
        self._advertised_host = advertised_host.strip("[]")
        self._settings = settings or MooncakeSettings()
        self._agent: AgentProcess[_Call]
        self._listener: socket.socket
        """The agent inherits it, so its port never changes."""
        self._host = ""
        """Our numeric address for peers."""

    def _open(self, regions: tuple[Region, ...]) -> bool:
        if not self._memory.contains(regions):
            return False
        self._host, self._listener = _listening_on(self._bind_host, self._advertised_host)
        self._agent = AgentProcess(self._settings, self._host, self._listener, self._memory.fd)
        try:
            self._agent.start()
        except BaseException:
            self._close()
            raise
        return True

    def offer(self) -> TransportOffer:
        self._check_open()
        port, memory = self._listener.getsockname()[1], self._memory
        offer = _MooncakeOffer(self._host, port, memory.address, memory.size_bytes)
        return TransportOffer(self.name, "", msgspec.msgpack.encode(offer))

    def _connect(
        self, peer: PeerId, offer: TransportOffer, regions: tuple[Region, ...]
    ) -> "_MooncakeLink":
        decoded = _decoded(peer, offer)
        check_offered(peer, offer, regions, decoded.address, decoded.size_bytes)
        return _MooncakeLink(peer, regions, decoded, self._settings.connect_s)

    def _post(
        self,
        link: "_MooncakeLink",
        segments: Sequence[Segments],
        operation: Operation,
        grant_id: int,
    ) -> "_Read":
        """TransportError: the peer's memory cannot be written. A write of nothing succeeds."""
        if operation is Operation.WRITE and any(part.total_bytes for part in segments):
            raise TransportError("the mooncake transport only reads; let the peer read instead")
        transfer = _Read(self._next_handle(), link, operation)
        max_descriptors = max(1, MAX_DESCRIPTORS // self._max_calls_per_peer)
        transfer.waiting.extend(self._cut(segments, link, MAX_BATCH_BYTES, max_descriptors))
        transfer.post_s = time.perf_counter() - transfer.started
        return transfer

    def _progress(self) -> None:
        for (transfer, batch), problem in self._agent.poll():
            transfer.in_flight -= 1
            if problem == ENDED and transfer.may_repeat:
                # The last agent has ended, often because a read from another peer had failed.
                transfer.repeat(batch)
            elif problem is not None:
                self._fail(transfer, problem)
        for transfer in self._transfers.values():
            # After the answers: a batch counts only if the peer's agent is alive now.
            problem = transfer.link.problem()
            if problem is not None:
                self._fail(transfer, problem)
        self._submit()
        stopped_before = time.monotonic() - self._settings.stop_s
        if any(transfer.is_overdue(stopped_before) for transfer in self._transfers.values()):
            self._agent.kill()
        self._ended.extend(each.completion() for each in self._transfers.values() if each.has_ended)

    def serving_interval_s(self) -> float | None:
        return SERVING_INTERVAL_S

    def _close(self) -> None:
        self._agent.close()
        self._listener.close()

    @property
    def _max_calls_per_peer(self) -> int:
        """A peer never gets all lanes, so that a silent one does not block the others. A call waits
        in a loop that uses a core; over tcp, one thread moves the bytes of all calls, and the loops
        of several would take the cores from it.
        """
        if self._settings.protocol == "tcp":
            return 1
        return max(1, self._settings.num_workers // 2)

    def _submit(self) -> None:
        """Give idle lanes the next batches, one for each transfer in turn."""
        while self._agent.has_idle_lane:
            transfer = self._next_in_turn(self._may_submit)
            if transfer is None:
                return
            batch = transfer.take_batch()
            self._agent.submit(transfer.link.call(batch, self._memory.address), (transfer, batch))

    def _may_submit(self, transfer: "_Read") -> bool:
        link = transfer.link
        if not transfer.waiting or transfer.error is not None or link.greeting is None:
            return False
        busy = sum(each.in_flight for each in self._transfers.values() if each.link is link)
        return busy < self._max_calls_per_peer

    def _fail(self, transfer: "_Read", problem: str) -> None:
        """Stop all transfers with the peer."""
        transfer.stop(problem)
        self._drop(transfer.link, problem)


class _MooncakeLink(Link):
    """The connection to a peer's agent. It carries one greeting, and its end means that the agent
    has ended, whose ports and addresses may then belong to another process.
    """

    def __init__(
        self, peer: PeerId, regions: tuple[Region, ...], offer: _MooncakeOffer, connect_s: float
    ) -> None:
        super().__init__(peer, regions)
        self.greeting: Greeting | None = None
        self._offer = offer
        self._received = b""
        self._greet_until = time.monotonic() + connect_s
        family = socket.AF_INET6 if ":" in offer.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        # Errors show when the greeting is received.
        with suppress(OSError):
            self._socket.connect((offer.host, offer.port))

    def problem(self) -> str | None:
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
            if self.greeting is None and time.monotonic() > self._greet_until:
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
class _Read(LinkedTransfer[_MooncakeLink]):
    """One read. `in_flight` batches are with the agent, which may write into our memory."""

    waiting: deque[Descriptors] = field(default_factory=deque)
    in_flight: int = 0
    num_repeated: int = 0
    stopped_at: float = 0.0

    @property
    def has_ended(self) -> bool:
        return not self.in_flight and (self.error is not None or not self.waiting)

    def take_batch(self) -> Descriptors:
        """The next batch, which then is with the agent."""
        batch = self.waiting.popleft()
        self.in_flight += 1
        self.total_bytes += batch.total_bytes
        self.segments += len(batch)
        return batch

    @property
    def may_repeat(self) -> bool:
        return self.error is None and self.num_repeated < MAX_REPEATED

    def repeat(self, batch: Descriptors) -> None:
        """Read a batch again with the next agent."""
        self.waiting.appendleft(batch)
        self.num_repeated += 1
        self.total_bytes -= batch.total_bytes
        self.segments -= len(batch)

    def stop(self, why: str) -> None:
        """Submit no more batches. The first reason counts."""
        if self.error is None:
            self.error, self.stopped_at = why, time.monotonic()

    def is_overdue(self, stopped_before: float) -> bool:
        return self.error is not None and self.in_flight > 0 and self.stopped_at < stopped_before


_Call = tuple[_Read, Descriptors]
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
    decoded = decoded_offer(peer, offer, _MooncakeOffer)
    with suppress(ValueError):
        ipaddress.ip_address(decoded.host)
        if 0 < decoded.port < 1 << 16 and decoded.address >= 0 < decoded.size_bytes < MAX_ADDRESS:
            return decoded
    raise TransportError(
        f"the mooncake offer of {peer} names no address or no memory that can be read; drop this "
        "peer"
    )
