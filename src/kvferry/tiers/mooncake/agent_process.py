"""The tier's side of the agent: starts the process, and gives each call a lane and a deadline."""

import fcntl
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from kvferry.errors import MissingDependency
from kvferry.mooncake_environment import mooncake_environment
from kvferry.tiers.mooncake.agent import AgentSettings, Call, LaneFiles
from kvferry.types import Address

NUM_LANES = 8
IMPORT_S = 30.0
"""How long the agent may take to load Mooncake's libraries."""
CLOSE_S = 7.0
"""Longer than the agent needs to take lent memory out of the store."""
KILL_S = 5.0
MAX_ANSWER_BYTES = 64 * 1024
DEFAULTS = {
    # Mooncake logs a dozen lines when it starts.
    "MC_LOG_LEVEL": "ERROR",
    # Otherwise a call waits 30 s for a master that hangs.
    "MC_RPC_TIMEOUT_MS": "5000",
}
"""Variables of the agent that the operator has not set."""


@dataclass(frozen=True, slots=True)
class MooncakePlace:
    """Where the store is, and what this process adds to it."""

    master: Address
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    host: str = ""
    lent_bytes: int = 0


ENDED = "the process that calls Mooncake has ended"
MALFORMED = "the process that calls Mooncake gave a malformed answer"
MIN_WAIT_S = 0.001


class AgentFailed(Exception):
    """The agent did not answer. The text is a sentence for the log."""


@dataclass(slots=True)
class Lane:
    """One call at a time. The thread that took the lane from `AgentProcess` owns it."""

    channel: socket.socket
    file: int
    generation: int
    is_overdue: bool = False
    """The agent has not answered the last call properly, and may still use the memory."""
    _memory: memoryview = field(default_factory=lambda: memoryview(b""))

    def memory(self, size_bytes: int) -> memoryview:
        """The first bytes of the memory that the agent maps too. Raises OSError for want of
        memory.
        """
        if len(self._memory) < size_bytes:
            size = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self.file, size)
            self._memory = memoryview(mmap.mmap(self.file, size))
        return self._memory[:size_bytes]

    def call(self, call: Call, until: float) -> list[int]:
        """Make one call. `until` is in seconds of `time.monotonic`."""
        self.is_overdue = True
        try:
            # A call is smaller than the socket's buffer, which is empty: this never waits.
            self.channel.send(msgspec.msgpack.encode(call))
            self.channel.settimeout(max(MIN_WAIT_S, until - time.monotonic()))
            message = self.channel.recv(MAX_ANSWER_BYTES)
            answer = msgspec.msgpack.decode(message, type=list[int])
        except TimeoutError:
            raise AgentFailed("Mooncake did not answer in time") from None
        except OSError:
            raise AgentFailed(ENDED) from None
        except msgspec.MsgspecError:
            raise AgentFailed(MALFORMED if message else ENDED) from None
        if len(answer) not in (0, len(call.names)):
            raise AgentFailed(MALFORMED)
        self.is_overdue = False
        return answer

    def reclaim(self) -> bool:
        """Take a late answer. Whether the lane can be used again."""
        with suppress(OSError):
            self.channel.settimeout(0)
            self.is_overdue = not self.channel.recv(MAX_ANSWER_BYTES)
        return not self.is_overdue

    def close(self) -> None:
        self.channel.close()
        os.close(self.file)


class AgentProcess:
    """Starts the agent, and starts it again if it has ended or if all its lanes are overdue. Any
    thread may call any method.
    """

    def __init__(self, place: MooncakePlace) -> None:
        """Raises `MissingDependency` if the agent cannot load Mooncake. Connects to nothing."""
        self._place = place
        self._changed = threading.Condition()
        self._generation = 0
        self._idle: list[Lane] = []
        self._overdue: list[Lane] = []
        self._is_closed = False
        self._process, self._control = self._start()
        self._check_import()

    @contextmanager
    def lane(self, until: float) -> Iterator[Lane]:
        lane = self._take(until)
        try:
            yield lane
        finally:
            with self._changed:
                if lane.generation != self._generation or self._is_closed:
                    lane.close()
                else:
                    (self._overdue if lane.is_overdue else self._idle).append(lane)
                self._changed.notify()

    def close(self) -> None:
        """End the process. Idempotent."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._close_lanes()
            self._changed.notify_all()
        self._control.close()
        try:
            # Without lent memory there is nothing to take out of the store.
            self._process.wait(CLOSE_S if self._place.lent_bytes else 0)
        except subprocess.TimeoutExpired:
            self._end_process()

    def _take(self, until: float) -> Lane:
        with self._changed:
            while True:
                if self._is_closed:
                    raise AgentFailed("the tier is closed")
                self._renew()
                if self._idle:
                    return self._idle.pop()
                if not self._changed.wait(until - time.monotonic()) and not self._idle:
                    raise AgentFailed("all calls to Mooncake are waiting for an answer")

    def _renew(self) -> None:
        """Make lanes usable again, if possible."""
        if self._process.poll() is None:
            for lane in [lane for lane in self._overdue if lane.reclaim()]:
                self._overdue.remove(lane)
                self._idle.append(lane)
            if len(self._overdue) < NUM_LANES:
                return
        self._end_process()
        self._control.close()
        self._close_lanes()
        try:
            self._process, self._control = self._start()
        except OSError as error:
            self._close_lanes()
            raise AgentFailed(
                f"the process that calls Mooncake cannot be started: {error.strerror}"
            ) from None
        self._changed.notify_all()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        self._generation += 1
        control, agent_control = Pipe()
        agent_sockets, files = [], []
        for _ in range(NUM_LANES):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            file = os.memfd_create("kvferry-mooncake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # A shorter file would end this process at its next access to the memory.
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._idle.append(Lane(ours, file, self._generation))
            agent_sockets.append(theirs)
            files.append(LaneFiles(theirs.fileno(), file))
        place = self._place
        settings = AgentSettings(
            parent=os.getpid(),
            control=agent_control.fileno(),
            lanes=files,
            master_host=place.master.host,
            master_port=place.master.port,
            metadata_server=place.metadata_server,
            protocol=place.protocol,
            device_name=place.device_name,
            host=place.host,
            lent_bytes=place.lent_bytes,
        )
        try:
            process = subprocess.Popen(
                # -P: a folder `mooncake` in the working directory must not be imported.
                [sys.executable, "-P", "-m", "kvferry.tiers.mooncake.agent", _json(settings)],
                pass_fds=[
                    settings.control,
                    *(n for lane in files for n in (lane.socket, lane.memory)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=mooncake_environment(os.environ, DEFAULTS),
                # Ctrl-C in a terminal is for the engine, which then closes the tier.
                start_new_session=True,
            )
        finally:
            agent_control.close()
            for each in agent_sockets:
                each.close()
        return process, control

    def _check_import(self) -> None:
        problem = f"it takes longer than {IMPORT_S:g} s"
        try:
            if self._control.poll(IMPORT_S):
                problem = self._control.recv_bytes().decode()
        except (EOFError, OSError):
            problem = "it ends the process that loads it"
        if problem:
            self.close()
            raise MissingDependency(
                f"the tier mooncake cannot load Mooncake ({problem}); install it with: "
                "pip install 'kvferry[mooncake]', and the system's libibverbs (Debian: "
                "apt-get install libibverbs1)"
            )

    def _close_lanes(self) -> None:
        for lane in (*self._idle, *self._overdue):
            lane.close()
        self._idle, self._overdue = [], []

    def _end_process(self) -> None:
        self._process.kill()
        # A process that hangs in a driver ends when the driver lets it.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)


def _json(settings: AgentSettings) -> str:
    return msgspec.json.encode(settings).decode()
