"""A real `kvferry proxy` process, for tests of what an operator starts and what it prints."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 60.0


@dataclass(frozen=True)
class ProxyProcess:
    url: str
    printed: str
    """What the process printed when it began to listen."""


@contextmanager
def ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """End the process at the end of the context: with SIGTERM, and with SIGKILL if that fails."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(DEADLINE_S)
        finally:
            process.kill()


@contextmanager
def proxy_process(runtime: Path, *flags: str) -> Iterator[ProxyProcess]:
    """Run a router on a free port with a runtime directory of its own."""
    command = [sys.executable, "-m", "kvferry", "proxy", "--port", "0", *flags]
    output = runtime / "output"
    with (
        output.open("w") as file,
        subprocess.Popen(
            command, env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)}, stdout=file
        ) as process,
        ended(process),
    ):
        printed = _wait_for(output, process)
        yield ProxyProcess(printed.split("listens on ")[1].split(";")[0], printed)


def _wait_for(output: Path, process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + DEADLINE_S
    while not (printed := output.read_text()).endswith("\n"):
        assert process.poll() is None, "the router ended before it listened"
        assert time.monotonic() < deadline, "the router does not listen"
        time.sleep(0.02)
    return printed
