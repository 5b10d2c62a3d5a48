"""The transport's side of the agent: starts the process, and starts it again when it has ended.

The thread that owns the transport makes every call. No call but `start` and `close` waits.
"""

import logging
import socket
import time
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvferry.transports.mooncake.agent import AgentSettings, ReadCall
from kvferry.transports.mooncake.process import ENDED, AgentFailed, CallChannel, MooncakeProcess

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

_log = logging.getLogger(__name__)
T = TypeVar("T")


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


@dataclass(slots=True, eq=False)
class _Lane(Generic[T]):
    """A channel and its current call."""

    channel: CallChannel
    owner: T | None = None
    """On whose behalf the call is made; None: the lane is idle."""
    started: float = 0.0
    problem: str = ""
    """Why the call has failed, until the process is gone; empty for other calls."""


class AgentProcess(Generic[T]):
    """One agent at a time, on the same listener and the same memory."""

    def __init__(
        self, settings: MooncakeSettings, host: str, listener: socket.socket, memory_fd: int
    ) -> None:
        self._num_lanes = settings.num_workers
        self._settings = AgentSettings(
            listener.fileno(), memory_fd, host, settings.protocol, settings.device_name
        )
        self._lanes: list[_Lane[T]] = []
        self._process: MooncakeProcess | None = None
        self._not_before = 0.0

    def start(self) -> None:
        """Start the first agent and wait for it. `MissingDependency` if Mooncake does not work
        here.
        """
        self._spawn().check_started("transport")

    @property
    def has_idle_lane(self) -> bool:
        return any(lane.owner is None for lane in self._lanes)

    def submit(self, call: ReadCall, owner: T) -> None:
        """Make a call on an idle lane; `poll` returns its answer."""
        lane = next(lane for lane in self._lanes if lane.owner is None)
        lane.owner, lane.started = owner, time.monotonic()
        lane.channel.send(call)

    def poll(self) -> list[tuple[T, str | None]]:
        """The calls that have ended, each with its problem. A call that has failed ends when the
        process is gone: Mooncake answers at the first failure, and other bytes of the call may
        still arrive. With the process, all calls have ended; then start another one.
        """
        if self._process is None or not self._process.is_running:
            return self._restart()
        answers: list[tuple[T, str | None]] = []
        for lane in self._lanes:
            if lane.owner is None:
                continue
            try:
                code = lane.channel.receive(int, timeout_s=0)
            except TimeoutError:
                continue
            except AgentFailed:
                # The process is ending, or defective; its calls have ended when it is gone.
                self.kill()
                break
            if code:
                took = time.monotonic() - lane.started
                lane.problem = f"Mooncake cannot read (code {code} after {took:.1f} s)"
                self.kill()
            else:
                answers.append((lane.owner, None))
                lane.owner = None
        return answers

    def kill(self) -> None:
        """End the process without waiting: `poll` reports its calls when it is gone."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process. Idempotent."""
        for lane in self._lanes:
            lane.channel.close()
        self._lanes = []
        if self._process is not None:
            self._process.close()
            self._process = None

    def _restart(self) -> list[tuple[T, str | None]]:
        lost: list[tuple[T, str | None]] = [
            (lane.owner, lane.problem or ENDED) for lane in self._lanes if lane.owner is not None
        ]
        self.close()
        if time.monotonic() >= self._not_before:
            _log.warning("%s; another one is started", ENDED)
            try:
                self._spawn()
            except OSError as error:
                _log.warning("no process for Mooncake can be started error=%s", error)
        return lost

    def _spawn(self) -> MooncakeProcess:
        self._not_before = time.monotonic() + RESTART_S
        self._process = MooncakeProcess(
            "kvferry.transports.mooncake.agent",
            self._settings,
            num_channels=self._num_lanes,
            files=[self._settings.listener, self._settings.memory],
            defaults=DEFAULTS,
        )
        self._lanes = [_Lane(channel) for channel in self._process.channels]
        return self._process
