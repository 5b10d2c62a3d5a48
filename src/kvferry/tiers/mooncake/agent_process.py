"""The tier's side of the agent: starts the process, and gives each call a lane and a deadline."""

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kvferry.tiers.mooncake.agent import AgentSettings, Call, MooncakePlace
from kvferry.transports.mooncake.process import MALFORMED, AgentFailed, CallChannel, MooncakeProcess

NUM_LANES = 8
CLOSE_S = 7.0
"""Longer than the agent needs to take lent memory out of the store."""
DEFAULTS = {
    # Mooncake logs a dozen lines when it starts.
    "MC_LOG_LEVEL": "ERROR",
    # Otherwise a call waits 30 s for a master that hangs.
    "MC_RPC_TIMEOUT_MS": "5000",
}
"""Variables of the agent that the operator has not set."""
MIN_WAIT_S = 0.001


@dataclass(slots=True, eq=False)
class Lane:
    """One call at a time. The thread that took the lane from `AgentProcess` owns it."""

    channel: CallChannel
    file: int
    process: MooncakeProcess
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
        self.channel.send(call)
        try:
            answer = self.channel.receive(list[int], max(MIN_WAIT_S, until - time.monotonic()))
        except TimeoutError:
            raise AgentFailed("Mooncake did not answer in time") from None
        if len(answer) not in (0, len(call.names)):
            raise AgentFailed(MALFORMED)
        self.is_overdue = False
        return answer

    def reclaim(self) -> bool:
        """Take a late answer. Whether the lane can be used again."""
        with suppress(TimeoutError, AgentFailed):
            self.channel.receive(list[int], 0)
            self.is_overdue = False
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
        self._idle: list[Lane] = []
        self._overdue: list[Lane] = []
        self._is_closed = False
        self._process = self._start()
        try:
            self._process.check_started("tier")
        except BaseException:
            self._close_lanes()
            raise

    @contextmanager
    def lane(self, until: float) -> Iterator[Lane]:
        lane = self._take(until)
        try:
            yield lane
        finally:
            with self._changed:
                if lane.process is not self._process or self._is_closed:
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
        # Without lent memory there is nothing to take out of the store.
        self._process.close(CLOSE_S if self._place.lent_bytes else 0)

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
        if self._process.is_running:
            for lane in [lane for lane in self._overdue if lane.reclaim()]:
                self._overdue.remove(lane)
                self._idle.append(lane)
            if len(self._overdue) < NUM_LANES:
                return
        self._process.kill()
        self._process.close()
        self._close_lanes()
        try:
            self._process = self._start()
        except OSError as error:
            raise AgentFailed(
                f"the process that calls Mooncake cannot be started: {error.strerror}"
            ) from None
        self._changed.notify_all()

    def _start(self) -> MooncakeProcess:
        files: list[int] = []
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            for _ in range(NUM_LANES):
                files.append(os.memfd_create("kvferry-mooncake", flags))
                # A shorter file would end this process at its next access to the memory.
                fcntl.fcntl(files[-1], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            process = MooncakeProcess(
                "kvferry.tiers.mooncake.agent",
                AgentSettings(files, self._place),
                num_channels=NUM_LANES,
                files=files,
                defaults=DEFAULTS,
            )
        except OSError:
            for file in files:
                os.close(file)
            raise
        self._idle = [
            Lane(channel, file, process)
            for channel, file in zip(process.channels, files, strict=True)
        ]
        return process

    def _close_lanes(self) -> None:
        for lane in (*self._idle, *self._overdue):
            lane.close()
        self._idle, self._overdue = [], []
