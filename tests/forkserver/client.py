"""Starts processes in a tenth of the usual time: a Python process imports all modules once, and
each new process is forked from it.

Most of an engine's start time is importing torch, and for vLLM much more; a test run starts
hundreds of engines. A forked process has its own files, environment, process group and exit code
like any other; only its command line, as the kernel shows it, differs. The README's commands,
`kvferry up` and the benchmarks are tested with spawned processes, except for some vLLM processes.
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

ROOT = Path(__file__).parents[2]
START_S = 300.0
"""The first import of vLLM after its installation takes minutes on a busy machine."""
END_S = 60.0
INSIDE = ("ip", "netns", "exec")


class ForkedProcess:
    """A process forked by the forkserver, with the interface of `subprocess.Popen`."""

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
            with suppress(ProcessLookupError):  # it has ended, its exit code is not here yet
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The Python process that has imported all modules. One serves a whole test run and ends with
    it.
    """

    def __init__(
        self, python: Path, modules: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        """`variables`: environment variables that the modules need when they are imported."""
        self._python = python
        self._modules = tuple(modules)
        self._variables = {**(variables or {}), "OMP_NUM_THREADS": "1"}
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._request_lock = threading.Lock()

    def can_start(self, command: Sequence[str]) -> bool:
        """True for `python -m …` with our interpreter, also inside a network namespace."""
        return _split(command)[1][:2] == [str(self._python), "-m"]

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], announcement: int, group: int
    ) -> ProcessHandle:
        """Fork a process; the signature is the one that `ChildProcess` calls."""
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
            try:
                answer = receive_message(link)
            except TimeoutError:
                # A late answer would be taken for the answer to the next request.
                self._kill()
                raise
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
                # The forkserver has its own process group, so Ctrl-C reaches only the tests. It
                # ends when they end.
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

    def _kill(self) -> None:
        assert self._link is not None
        assert self._process is not None
        self._link.close()
        self._link = None
        self._process.kill()
        self._process.wait(END_S)

    def _close(self) -> None:
        if self._link is not None and self._process is not None:
            self._link.close()
            self._process.wait(END_S)


def num_spawned(words: Sequence[str]) -> int:
    """Return how many generations of child processes a command starts with `multiprocessing`."""
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
    """Split a command into its network namespace ("" if none) and the rest."""
    return (command[3], list(command[4:])) if tuple(command[:3]) == INSIDE else ("", list(command))
