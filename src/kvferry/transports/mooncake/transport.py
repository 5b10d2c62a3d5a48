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
import logging
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
from kvferry.transports.mooncake.agent import GREETING_BYTES, AgentSettings, Greeting, ReadCall
from kvferry.transports.mooncake.process import ENDED, AgentFailed, CallChannel, MooncakeProcess
from kvferry.transports.shm import SharedMemory
from kvferry.transports.tcp.loop import listening_on
from kvferry.types import Address, PeerId, Region

MAX_BATCH_BYTES = 8 * 1024 * 1024
MAX_DESCRIPTORS = 1000
"""Of all calls for one peer at a time. Mooncake refuses more than it has room for in its queue, and
a call must fit into the buffer of a lane's channel.
"""
SERVING_INTERVAL_S = 1.0
"""How often an agent that serves peers is looked after."""
RESTART_S = 1.0
"""The shortest time between two starts."""
DEFAULTS = {
    # Mooncake logs a dozen lines when it starts, and each connection that fails.
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
    # Otherwise a read waits 30 s for a peer that is stopped.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "10",
    "MC_TCP_STATUS_TIMEOUT_SEC": "10",
    # Otherwise a descriptor fails that waits 1 s for a place in Mooncake's queue; on a busy machine
    # some do.
    "MC_TCP_ADMISSION_TIMEOUT_MS": "10000",
    # Each descriptor is a round trip, and a connection carries one at a time. The default is 4, the
    # maximum 16.
    "MC_TCP_LANES_PER_PEER": "16",
    # Otherwise a call fails that takes longer than 30 s. `read_timeout` is the limit of a read.
    "MC_TRANSFER_TIMEOUT": "86400",
}
"""Variables of the agent that the operator has not set."""

MAX_REPEATED = 20
"""How many batches a read repeats because our agents have ended. A few are with the agent when it
ends.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    protocol: str = "tcp"
    num_workers: int = 10
    """Reads that the agent makes at once."""
    device_name: str = ""
    connect_s: float = 5.0
    """How long a peer may take to greet. A new agent needs about a second to start."""
    stop_s: float = 15.0
    """How long a stopped read may still write into our memory before the agent is killed; longer
    than Mooncake waits for a silent peer.
    """


class _MooncakeOffer(msgspec.Struct, frozen=True, array_like=True):
    """Where the agent greets, and the memory that it serves, as mapped in the owner's process."""

    host: str
    port: int
    address: int
    size_bytes: int


class MooncakeTransport(LinkedTransport["_MooncakeLink", "_Read"]):
    """Implements `transports.base.DataTransport` over one SharedMemory, which the caller owns. One
    agent runs at a time, on the same listener and the same memory.
    """

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
        self._host = ""
        """Our numeric address for peers."""
        self._listener: socket.socket
        """The agent inherits it, so its port never changes."""
        self._agent: MooncakeProcess | None = None
        self._lanes: list[_Lane] = []
        """Of the agent."""
        self._not_before = 0.0
        """When the next agent may be started."""

    def _open(self, regions: tuple[Region, ...]) -> bool:
        if not self._memory.contains(regions):
            return False
        self._host = _numeric(self._advertised_host)
        self._listener = listening_on(self._bind_host, self._host, self.name)
        try:
            self._start_agent().check_started("transport")
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
        if self._agent is not None and self._agent.is_running:
            self._take_answers()
        else:
            self._replace_agent()
        for transfer in self._transfers.values():
            # After the answers: a batch counts only if the peer's agent is alive now.
            self._is_usable(transfer.link)
        self._submit()
        stopped_before = time.monotonic() - self._settings.stop_s
        if any(transfer.is_overdue(stopped_before) for transfer in self._transfers.values()):
            self._kill_agent()
        self._ended.extend(each.completion() for each in self._transfers.values() if each.has_ended)

    def serving_interval_s(self) -> float | None:
        return SERVING_INTERVAL_S

    def _close(self) -> None:
        self._close_agent()
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

    # -- calls of the agent --

    def _submit(self) -> None:
        """Give idle lanes the next batches, one for each transfer in turn."""
        for lane in self._lanes:
            if lane.read is not None:
                continue
            read = self._next_in_turn(self._may_submit)
            if read is None:
                return
            read.in_flight += 1
            lane.read, lane.batch, lane.started = read, read.waiting.popleft(), time.monotonic()
            lane.channel.send(read.link.call(lane.batch, self._memory.address))

    def _may_submit(self, read: "_Read") -> bool:
        link = read.link
        if not read.waiting or read.error is not None or link.greeting is None:
            return False
        busy = sum(each.in_flight for each in self._transfers.values() if each.link is link)
        return busy < self._max_calls_per_peer

    def _take_answers(self) -> None:
        """A call that has failed ends only when the agent is gone: Mooncake answers at the first
        failure, and other bytes of the call may still arrive.
        """
        for lane in self._lanes:
            if lane.read is None:
                continue
            try:
                code = lane.channel.receive(int, timeout_s=0)
            except TimeoutError:
                continue
            except AgentFailed:
                # The process is ending, or defective.
                self._kill_agent()
                return
            if code:
                took = time.monotonic() - lane.started
                lane.problem = f"Mooncake cannot read (code {code} after {took:.1f} s)"
                self._kill_agent()
            else:
                lane.read.arrived(lane.batch)
                lane.read = None

    # -- the agent --

    def _start_agent(self) -> MooncakeProcess:
        self._not_before = time.monotonic() + RESTART_S
        settings, files = self._settings, (self._listener.fileno(), self._memory.fd)
        self._agent = MooncakeProcess(
            "kvferry.transports.mooncake.agent",
            AgentSettings(*files, self._host, settings.protocol, settings.device_name),
            num_channels=settings.num_workers,
            files=files,
            defaults=DEFAULTS,
        )
        self._lanes = [_Lane(channel) for channel in self._agent.channels]
        return self._agent

    def _kill_agent(self) -> None:
        """End the agent without waiting; its calls end when it is gone."""
        if self._agent is not None:
            self._agent.kill()

    def _close_agent(self) -> None:
        """Idempotent."""
        for lane in self._lanes:
            lane.channel.close()
        self._lanes = []
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def _replace_agent(self) -> None:
        """The agent is gone, and so all of its calls have ended. Batches that did not fail are read
        again by the next agent: often a read from another peer has failed.
        """
        for lane in self._lanes:
            if (read := lane.read) is None:
                continue
            read.in_flight -= 1
            if read.may_repeat and not lane.problem:
                read.num_repeated += 1
                read.waiting.appendleft(lane.batch)
            else:
                self._drop(read.link, lane.problem or ENDED)
        self._close_agent()
        if time.monotonic() >= self._not_before:
            _log.warning("%s; another one is started", ENDED)
            try:
                self._start_agent()
            except OSError as error:
                _log.warning("no process for Mooncake can be started error=%s", error)


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

    @property
    def may_repeat(self) -> bool:
        return self.error is None and self.num_repeated < MAX_REPEATED

    def arrived(self, batch: Descriptors) -> None:
        self.in_flight -= 1
        self.total_bytes += batch.total_bytes
        self.segments += len(batch)

    def stop(self, why: str) -> None:
        """Submit no more batches. The first reason counts."""
        if self.error is None:
            self.error, self.stopped_at = why, time.monotonic()

    def is_overdue(self, stopped_before: float) -> bool:
        return self.error is not None and self.in_flight > 0 and self.stopped_at < stopped_before


@dataclass(slots=True, eq=False)
class _Lane:
    """A channel to the agent, which makes one call on it at a time."""

    channel: CallChannel
    read: _Read | None = None
    """Whose batch is being read; None: the lane is idle."""
    batch: Descriptors = field(init=False)
    started: float = 0.0
    problem: str = ""
    """Why the call has failed, until the agent is gone; empty for other calls."""


def _numeric(host: str) -> str:
    """Our address for peers: Mooncake and `_MooncakeLink` ask no name server."""
    try:
        return str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"the mooncake transport cannot be reached at {host} ({error}); name an address of "
            "this host"
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
