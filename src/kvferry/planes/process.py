"""One life of a process on this host: is it the one that was meant, and has it ended?

Any thread. A process number alone is not enough: numbers are used again.
"""

import contextlib
import os
import select
from dataclasses import dataclass, field

__all__ = ["ProcessIncarnation", "start_ticks"]

PROC_STATE, PROC_START_TICKS = 0, 19
"""Fields of /proc/PID/stat after the command's name."""


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is no such process, or only its corpse."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[PROC_STATE] in (b"Z", b"X") else int(fields[PROC_START_TICKS])


@dataclass(slots=True)
class ProcessIncarnation:
    """Watches one process until it ends. Close it."""

    pid: int
    ticks: int
    _pidfd: int | None
    _poller: "select.poll | None" = field(default=None, init=False)

    @classmethod
    def watch(cls, pid: int, ticks: int) -> "ProcessIncarnation | None":
        """None when that life of the process is over."""
        pidfd: int | None = None
        with contextlib.suppress(OSError):  # kernels before 5.3, or the process is gone, which the next line finds
            pidfd = os.pidfd_open(pid)
        incarnation = cls(pid, ticks, pidfd)
        if start_ticks(pid) == ticks:
            return incarnation
        incarnation.close()
        return None

    def has_ended(self) -> bool:
        if self._pidfd is None:
            return start_ticks(self.pid) != self.ticks
        if self._poller is None:
            self._poller = select.poll()
            self._poller.register(self._pidfd, select.POLLIN)
        return bool(self._poller.poll(0))

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = self._poller = None
