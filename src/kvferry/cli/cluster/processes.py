"""Child processes that must not outlive the command that started the processes.

`ProcessGroup` owns the process group: however this process ends, the reaper stops every member.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

from kvferry.cli.cluster.addresses import ANNOUNCE_FD_VARIABLE, parse_announcement
from kvferry.errors import KVFerryError
from kvferry.types import Address

_LOG_LINES = 2000
_LINE_BYTES = 4096
_REAP_S = 20.0
_TERMINATE_GRACE_S = 3.0
_LOG_DRAIN_S = 0.5
_REAPER_TIMEOUT_S = 10.0


class ProcessGroup:
    """A process group with a reaper as the leader, and a directory that is removed with the
    group.
    """

    def __init__(self, directory: Path, grace_s: float = 10.0) -> None:
        """`grace_s` is the time that members have to exit after SIGTERM before the reaper kills
        them.
        """
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
        # The reaper waits for the end of its stdin: the kernel closes our end even after kill -9.
        self._reaper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, process_group=0
        )
        return self

    @property
    def id(self) -> int:
        assert self._reaper is not None
        return self._reaper.pid

    def close(self) -> None:
        """Stop all remaining members and remove the directory; raise KVFerryError if that
        failed.
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
                f"some processes of group {guardian.pid} did not exit in time; find them with `ps "
                "-eo pid,pgid,args`"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ProcessHandle(Protocol):
    """The methods of `subprocess.Popen` that ChildProcess uses."""

    @property
    def pid(self) -> int: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; raise `subprocess.TimeoutExpired` after the timeout."""

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


class ProcessStarter(Protocol):
    """Starts a process; tests pass other starters than `spawn_process`."""

    def __call__(
        self, command: Sequence[str], environment: Mapping[str, str], announcement: int, group: int
    ) -> ProcessHandle:
        """Start a process that inherits the file descriptor `announcement` and writes to its
        `stdout`.

        Raise OSError if the process cannot be started.
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
    """One process and its log; `close` is idempotent and returns when the process has exited."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        start: ProcessStarter = spawn_process,
        on_line: Callable[[str], None] | None = None,
        address: Address | None = None,
        log_file: Path | None = None,
    ) -> None:
        """`on_line` receives each line of the log, in the reader's thread. `address` is where the
        process will listen, if it does not announce that itself. `log_file` gets the whole log.
        """
        self.name = name
        self._on_line = on_line
        self._command = list(command)
        self._environment = dict(environment)
        self._start = start
        self._process: ProcessHandle | None = None
        self._reader: threading.Thread | None = None
        self._announcements = -1
        self._address = address
        self.log_file = log_file
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
        """Return the last lines that the process wrote."""
        return list(self._log)[-lines:]

    @property
    def is_serving(self) -> bool:
        """Whether the process has announced its address; a serving process must not exit by
        itself.
        """
        return self._address is not None

    @property
    def has_failed(self) -> bool:
        return self._process is not None and self._process.poll() not in (None, 0)

    def check_alive(self) -> None:
        """Raise KVFerryError if the process has exited, whatever the exit code."""
        code = self._process.poll() if self._process else None
        if code is not None:
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"exited with code {code}"
            )
            raise KVFerryError(f"{self.name} {how}")

    def poll_address(self) -> Address | None:
        """Return the address once the process has announced one; raise KVFerryError if the process
        exited.
        """
        if self._address is None and select.select([self._announcements], [], [], 0)[0]:
            # The line is far shorter than a pipe's atomic write, so one read returns the whole
            # line.
            self._address = parse_announcement(os.read(self._announcements, 4096))
            if self._address is None:
                self._wait_for_end()
                self.check_alive()
                raise KVFerryError(
                    f"{self.name} closed its announcement pipe without reporting an address"
                )
        if self._process is not None and self._process.poll() is not None:
            self._wait_for_end()
            self.check_alive()
        return self._address

    def wait(self, timeout_s: float) -> None:
        """Wait until the process has exited with code 0; raise KVFerryError on failure or
        timeout.
        """
        assert self._process is not None
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise KVFerryError(f"{self.name} did not exit within {timeout_s:g} s") from None
        if code != 0:
            self.check_alive()

    def terminate(self) -> None:
        """Send SIGTERM; `close` waits for the exit."""
        self._send_signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does; `close` waits for the exit."""
        self._send_signal(signal.SIGINT)

    def close(self, grace_s: float = 10.0) -> None:
        """Stop the process, with SIGKILL if the process does not exit within `grace_s`.

        A process that was already signaled gets no second signal within the grace period, because
        an engine takes a second signal as a request to cancel its running requests.
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
        # Ctrl-C may have interrupted `start` before the pipe and the reader existed.
        if self._announcements >= 0:
            os.close(self._announcements)
        # Children of the process may hold the pipe a little longer. The reaper stops those
        # children, and then the reader thread ends too.
        if self._reader is not None:
            self._reader.join(_LOG_DRAIN_S)

    def _send_signal(self, number: signal.Signals) -> None:
        # Read the attribute once: a signal handler may call this method while `close` clears it.
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
        """Wait for the exit code and the last log lines: a process that closes the pipe is usually
        exiting.
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
        with stream, open(self.log_file or os.devnull, "wb", buffering=0) as file:
            while line := stream.readline(_LINE_BYTES):
                text = line.decode(errors="replace").rstrip()
                self._log.append(text)
                if self._on_line is not None:
                    self._on_line(text)
                # A full disk must not stop the process, which would wait for its log to be read.
                with suppress(OSError):
                    file.write(line)
