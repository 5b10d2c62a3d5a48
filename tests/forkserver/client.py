"""Processes that start in a tenth of the time: a real interpreter has imported everything once, and
each is forked from it.

What starting an engine costs is importing torch, and for vLLM much more; a test run starts
hundreds. A forked one is a process like any other, with its own files, variables, group and end;
its command line, as the kernel shows it, is all that differs. README's commands, `kvferry up` and
the benchmarks are tested with processes that are spawned, but for some of real vLLM's.
"""

import atexit
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from tests.forkserver.wire import receive_message, send_message

from kvferry.cli.cluster.processes import ProcessHandle

__all__ = ["ForkServer"]

ROOT = Path(__file__).parents[2]
START_S = 120.0
END_S = 10.0
INSIDE = ("ip", "netns", "exec")


class ForkedProcess:
    """One of its processes; what `subprocess.Popen` is for others."""

    def __init__(self, pid: int, output: int, report: int) -> None:
        self.pid = pid
        self.stdout: IO[bytes] | None = open(output, "rb")  # noqa: SIM115
        self._report = report
        self._code: int | None = None
        self._read_lock = threading.Lock()

    def poll(self) -> int | None:
        with self._read_lock:
            if self._code is None and select.select([self._report], [], [], 0)[0]:
                found = os.read(self._report, 4)
                self._code = struct.unpack("i", found)[0] if found else -signal.SIGKILL
                os.close(self._report)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(0.01)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and its end has not been told yet
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The interpreter that has imported everything. One for a whole test run; it ends with us."""

    def __init__(
        self, python: Path, modules: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        """`variables`: what the modules want to find in the environment when they are imported."""
        self._python = python
        self._modules = tuple(modules)
        self._variables = {**(variables or {}), "OMP_NUM_THREADS": "1"}
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._request_lock = threading.Lock()

    def can_start(self, command: Sequence[str]) -> bool:
        """`python -m …`, maybe in a network namespace."""
        return _split(command)[1][:2] == [str(self._python), "-m"]

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], announcement: int, group: int
    ) -> ProcessHandle:
        """As `ChildProcess` wants it."""
        namespace, words = _split(command)
        output, theirs = os.pipe()
        report, reporting = os.pipe()
        request = {
            "arguments": words[2:],
            "variables": dict(environment),
            "directory": os.getcwd(),
            "group": group,
            "namespace": namespace,
            "spares": num_spawned(words),
            "files": [announcement],
        }
        try:
            pid = self._request(request, [reporting, theirs, announcement])
        finally:
            os.close(theirs)
            os.close(reporting)
        return ForkedProcess(pid, output, report)

    def _request(self, request: Mapping[str, object], files: Sequence[int]) -> int:
        with self._request_lock:
            link = self._open()
            send_message(link, request, files)
            answer = receive_message(link)
        assert answer is not None, "the forkserver is gone"
        return int(answer[0]["pid"])

    def _open(self) -> socket.socket:
        if self._link is None:
            self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._link.settimeout(START_S)
            command = [
                str(self._python),
                "-u",
                "-m",
                "tests.forkserver.server",
                str(theirs.fileno()),
                *self._modules,
            ]
            ours = {
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("UCX_", "NIXL_"))
            }
            environment = {**ours, **self._variables}
            with theirs:
                # In a group of its own: Ctrl-C is for the tests, which then end.
                self._process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    process_group=0,
                )
            atexit.register(self._close)
        return self._link

    def _close(self) -> None:
        if self._link is not None and self._process is not None:
            self._link.close()
            self._process.wait(END_S)


def num_spawned(words: Sequence[str]) -> int:
    """How many generations of processes a command starts with `multiprocessing`."""
    if "vllm.entrypoints.openai.api_server" in words:
        return 2
    if "serve" not in words:
        return 0
    sizes = [
        words[index + 1]
        for index, word in enumerate(words[:-1])
        if word == "--tensor-parallel-size"
    ]
    return 2 if sizes and sizes[-1] != "1" else 1


def _split(command: Sequence[str]) -> tuple[str, list[str]]:
    """The network namespace, if any, and what is to run there."""
    return (command[3], list(command[4:])) if tuple(command[:3]) == INSIDE else ("", list(command))
