"""Processes that one command starts and that must not outlive it.

`ProcessGroup` owns the group: whatever happens to us, its guardian stops every member.
`ChildProcess` owns one member: its log, its announcement and its end. The owner's thread makes
every call; one reader thread per child fills the log.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

from kvferry.cli.cluster.addresses import ANNOUNCE_FD_VARIABLE, parse_announcement
from kvferry.errors import KVFerryError
from kvferry.types import Address

__all__ = ["ChildProcess", "ProcessGroup", "ProcessHandle", "ProcessStarter", "spawn_process"]

_LOG_LINES = 200
_LINE_BYTES = 4096
_REAP_S = 20.0
_TERMINATE_GRACE_S = 3.0
_LOG_DRAIN_S = 0.5
_REAPER_TIMEOUT_S = 10.0


class ProcessGroup:
    """A process group with a guardian in it, and a directory that is removed with it."""

    def __init__(self, directory: Path, grace_s: float = 10.0) -> None:
        """`grace_s`: how long members may take to end before they are killed."""
        self._directory = directory
        self._grace_s = grace_s
        self._reaper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "ProcessGroup":
        command = [
            sys.executable,
            "-m",
            "kvferry.cli.cluster.reaper",
            str(self._grace_s),
            str(self._directory),
        ]
        quiet = subprocess.DEVNULL
        self._reaper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, process_group=0
        )
        return self

    @property
    def id(self) -> int:
        assert self._reaper is not None
        return self._reaper.pid

    def close(self) -> None:
        """Stop whoever is left and remove the directory. KVFerryError when that did not work
        out.
        """
        if self._reaper is None:
            return
        guardian, self._reaper = self._reaper, None
        assert guardian.stdin is not None
        guardian.stdin.close()
        try:
            code = guardian.wait(self._grace_s + _REAPER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(guardian.pid, signal.SIGKILL)
            code = guardian.wait(_REAP_S)
        if code != 0:
            raise KVFerryError(
                f"some processes of group {guardian.pid} could not be stopped in time; look for "
                "them with `ps -eo pid,pgid,args`"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ProcessHandle(Protocol):
    """What is asked of a process; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int:
        """`subprocess.TimeoutExpired` when it takes longer."""

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


class ProcessStarter(Protocol):
    def __call__(
        self, command: Sequence[str], environment: Mapping[str, str], announcement: int, group: int
    ) -> ProcessHandle:
        """It inherits the file `announcement`, and what it writes can be read from its `stdout`.
        OSError when it cannot be started.
        """


def spawn_process(
    command: Sequence[str], environment: Mapping[str, str], announcement: int, group: int
) -> ProcessHandle:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(announcement,),
        process_group=group,
    )


class ChildProcess:
    """One process with its log. `close` is idempotent and returns when the process is gone."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        start: ProcessStarter = spawn_process,
    ) -> None:
        self.name = name
        self._command = list(command)
        self._environment = dict(environment)
        self._start = start
        self._process: ProcessHandle | None = None
        self._reader: threading.Thread | None = None
        self._announcements = -1
        self._address: Address | None = None
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        self._was_signaled = False

    def start(self, group: int) -> None:
        reading, writing = os.pipe()
        try:
            self._process = self._start(
                self._command,
                self._environment | {ANNOUNCE_FD_VARIABLE: str(writing)},
                writing,
                group,
            )
        except OSError as error:
            os.close(reading)
            raise KVFerryError(f"{self.name} cannot be started: {error.strerror}") from error
        finally:
            os.close(writing)
        self._announcements = reading
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._read_log, args=(self._process.stdout,), name=f"log-{self.name}"
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def tail(self, lines: int = 20) -> list[str]:
        """The last lines it wrote."""
        return list(self._log)[-lines:]

    @property
    def is_serving(self) -> bool:
        """Whether it has said where it listens, so that it must not end by itself any more."""
        return self._address is not None

    @property
    def has_failed(self) -> bool:
        return self._process is not None and self._process.poll() not in (None, 0)

    def check_alive(self) -> None:
        """KVFerryError once the process has ended, for whatever reason."""
        code = self._process.poll() if self._process else None
        if code is not None:
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with exit code {code}"
            )
            raise KVFerryError(f"{self.name} {how}")

    def poll_address(self) -> Address | None:
        """Where it listens, as soon as it has said so. KVFerryError when it ended instead."""
        if self._address is None and select.select([self._announcements], [], [], 0)[0]:
            # The line is far shorter than a pipe's atomic write, so it comes whole or not at all.
            self._address = parse_announcement(os.read(self._announcements, 4096))
            if self._address is None:
                self._wait_for_end()
                self.check_alive()
                raise KVFerryError(
                    f"{self.name} closed its announcement without saying where it listens"
                )
        if self._address is None:
            self.check_alive()
        return self._address

    def wait(self, timeout_s: float) -> None:
        """Until it has done its work. KVFerryError when it takes longer or fails."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise KVFerryError(f"{self.name} did not end within {timeout_s:g} s") from None
        if code != 0:
            self.check_alive()

    def terminate(self) -> None:
        """Ask it to end; `close` waits for it."""
        self._send_signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """Ask it to end as Ctrl-C would; `close` waits for it."""
        self._send_signal(signal.SIGINT)

    def close(self, grace_s: float = 10.0) -> None:
        """End it, by kill when it does not go by itself. One that was asked before is not asked
        again while the patience lasts: engines take a second signal as the wish that they break
        off.
        """
        if self._process is None:
            return
        if not self._was_signaled or not self._ends_within(grace_s):
            grace_s = _TERMINATE_GRACE_S if self._was_signaled else grace_s
            self.terminate()
            if not self._ends_within(grace_s):
                self._process.kill()
                self._process.wait(_REAP_S)
        self._process = None
        os.close(self._announcements)
        # Its own children may hold the pipe a little longer. The group's guardian ends them, and
        # the reader with them.
        assert self._reader is not None
        self._reader.join(_LOG_DRAIN_S)

    def _send_signal(self, number: signal.Signals) -> None:
        # Once: a signal handler may ask while `close` is about to let go of it.
        process = self._process
        if process is not None:
            self._was_signaled = True
            process.send_signal(number)

    def _ends_within(self, timeout_s: float) -> bool:
        assert self._process is not None
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _wait_for_end(self) -> None:
        """A closed announcement usually means that it is ending; give it the moment to become an
        exit code and last lines.
        """
        deadline = time.monotonic() + _REAP_S
        while (
            self._process is not None
            and self._process.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        if self._reader is not None:
            self._reader.join(_LOG_DRAIN_S)

    def _read_log(self, stream: IO[bytes]) -> None:
        with stream:
            while line := stream.readline(_LINE_BYTES):
                self._log.append(line.decode(errors="replace").rstrip())
