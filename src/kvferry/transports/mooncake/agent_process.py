"""The transport's side of the agent: starts the process, and starts it again when it has ended.

The thread that owns the transport makes every call. No call but `start` and `close` waits.
"""

import logging
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import msgspec

from kvferry.errors import MissingDependency
from kvferry.mooncake_environment import mooncake_environment
from kvferry.transports.mooncake.agent import AgentSettings, ReadCall

START_S = 30.0
"""How long the first agent may take to load Mooncake's libraries and to map the cache."""
RESTART_S = 1.0
"""The shortest time between two starts."""
KILL_S = 5.0
MAX_ANSWER_BYTES = 1024
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
ENDED = "the process that calls Mooncake has ended"

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
    """A socket that carries one call at a time."""

    channel: socket.socket
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
        self._settings = settings
        self._host = host
        self._listener = listener
        self._memory_fd = memory_fd
        self._lanes: list[_Lane[T]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        self._not_before = 0.0

    def start(self) -> None:
        """Start the first agent and wait for it. `MissingDependency` if Mooncake does not work
        here.
        """
        control = self._spawn()
        problem = f"it needs more than {START_S:g} s to start"
        try:
            if control.poll(START_S):
                problem = control.recv_bytes().decode()
        except (EOFError, OSError):
            problem = "it ends the process that loads it"
        if problem:
            self.close()
            raise MissingDependency(
                f"the transport mooncake does not work here ({problem}); install it with: pip "
                "install 'kvferry[mooncake]', and the system's libibverbs (Debian: apt-get install "
                "libibverbs1)"
            )

    @property
    def has_idle_lane(self) -> bool:
        return any(lane.owner is None for lane in self._lanes)

    def submit(self, call: ReadCall, owner: T) -> None:
        """Make a call on an idle lane; `poll` returns its answer."""
        lane = next(lane for lane in self._lanes if lane.owner is None)
        lane.owner, lane.started = owner, time.monotonic()
        # If the process has ended, `poll` says so. A call is smaller than the socket's buffer,
        # which is empty: this never waits.
        with suppress(OSError):
            lane.channel.send(msgspec.msgpack.encode(call))

    def poll(self) -> list[tuple[T, str | None]]:
        """The calls that have ended, each with its problem. A call that has failed ends when the
        process is gone: Mooncake answers at the first failure, and other bytes of the call may
        still arrive. With the process, all calls have ended; then start another one.
        """
        if self._process is None or self._process.poll() is not None:
            return self._restart()
        answers: list[tuple[T, str | None]] = []
        for lane in self._lanes:
            if lane.owner is None:
                continue
            try:
                code = msgspec.msgpack.decode(lane.channel.recv(MAX_ANSWER_BYTES), type=int)
            except BlockingIOError:
                continue
            except (OSError, msgspec.MsgspecError):
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
        self._close_channels()
        if self._process is not None:
            self._process.kill()
            # A process that hangs in a driver ends when the driver lets it.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_S)
            self._process = None

    def _restart(self) -> list[tuple[T, str | None]]:
        lost: list[tuple[T, str | None]] = [
            (lane.owner, lane.problem or ENDED) for lane in self._lanes if lane.owner is not None
        ]
        self._close_channels()
        if time.monotonic() >= self._not_before:
            _log.warning("%s; another one is started", ENDED)
            try:
                self._spawn()
            except OSError as error:
                self._close_channels()
                _log.warning("no process for Mooncake can be started error=%s", error)
        return lost

    def _spawn(self) -> Connection:
        """Start a process. Calls can be submitted at once, and wait in the channels."""
        self._not_before = time.monotonic() + RESTART_S
        self._control, agent_control = Pipe()
        family, kind = socket.AF_UNIX, socket.SOCK_SEQPACKET
        pairs = [socket.socketpair(family, kind) for _ in range(self._settings.num_workers)]
        for ours, _ in pairs:
            ours.setblocking(False)
        self._lanes = [_Lane(ours) for ours, _ in pairs]
        theirs = [theirs for _, theirs in pairs]
        settings = AgentSettings(
            parent=os.getpid(),
            control=agent_control.fileno(),
            listener=self._listener.fileno(),
            memory=self._memory_fd,
            lanes=[each.fileno() for each in theirs],
            host=self._host,
            protocol=self._settings.protocol,
            device_name=self._settings.device_name,
        )
        try:
            self._process = subprocess.Popen(
                # -P: a folder `mooncake` in the working directory must not be imported.
                [sys.executable, "-P", "-m", "kvferry.transports.mooncake.agent", _json(settings)],
                pass_fds=[settings.control, *settings.lanes, settings.listener, settings.memory],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=mooncake_environment(os.environ, DEFAULTS),
                # Ctrl-C in a terminal is for the engine, which then closes the transport.
                start_new_session=True,
            )
        finally:
            agent_control.close()
            for each in theirs:
                each.close()
        return self._control

    def _close_channels(self) -> None:
        for lane in self._lanes:
            lane.channel.close()
        self._lanes = []
        if self._control is not None:
            self._control.close()
            self._control = None


def _json(settings: AgentSettings) -> str:
    return msgspec.json.encode(settings).decode()
