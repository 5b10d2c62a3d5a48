"""Asks this machine what it can do.

What may crash or hang (NIXL, torch, a driver) is asked in a process of its own, with a deadline.
"""

import errno
import mmap
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from kvferry.cli.findings import NixlReport, ProbeFailed, TorchReport
from kvferry.cli.gpu_findings import GpuReport

__all__ = ["ProbeOutput", "can_share_memory", "driver_gpus", "is_port_free", "measure_gpu", "probe_nixl", "probe_torch", "run_probe"]

_Report = TypeVar("_Report", TorchReport, NixlReport, GpuReport)

PROBE_TIMEOUT_S = 60.0
GPU_BENCHMARK = ("bench", "transfer", "--json", "--segments", "16", "--moved", "256", "--rounds", "7", "--device")
"""What is measured of a GPU: enough to tell transports apart, in a few seconds of which most is starting up."""

TORCH_CODE = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"version": torch.__version__, "gpus": gpus, "cuda": torch.version.cuda}))
"""

# Not to stdout, UCX's default, where a late line of its log would follow the answer.
UCX_LOGGING = {"UCX_LOG_LEVEL": "debug", "UCX_LOG_FILE": "stderr"}

# A fork for each plugin: one that crashes or hangs says nothing about the others, and importing NIXL takes longer than all of them.
# A child writes a byte once its plugin has started and then exits normally, so that a crash on the way out is seen as what it is.
NIXL_CODE = """
import json, os, signal, sys
from importlib.metadata import version
from kvferry.planes.nixl_agent import load_nixl, netlink_copies
from kvferry.types import MemoryKind
nixl, _ = load_nixl(MemoryKind.DRAM)
def make_agent():
    return nixl.nixl_agent("kvferry-doctor", nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
started, exit_signals, copies = [], {}, 0
for plugin in sys.argv[1:]:
    answers, answer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        try:
            agent = make_agent()
            agent.create_backend(plugin)
        except BaseException:
            os._exit(1)
        os.write(answer, bytes([len(netlink_copies())]))
        del agent
        sys.exit(0)
    os.close(answer)
    said, status = os.read(answers, 1), os.waitpid(child, 0)[1]
    os.close(answers)
    if said:
        started.append(plugin)
        copies = max(copies, said[0])
        if os.WIFSIGNALED(status):
            exit_signals[plugin] = os.WTERMSIG(status)
report = {"version": version("nixl"), "plugins": make_agent().get_plugin_list(), "started": started}
print(json.dumps({**report, "exit_signals": exit_signals, "netlink_copies": copies}))
sys.stdout.flush()
os._exit(0)  # the answer is given; how this process would end was seen in its children
"""

SHARED_BYTES = b"kvferry"
# The parent's number is passed in: where pid namespaces meet, os.getppid() would be another's.
SHARE_CODE = """
import mmap, os, sys
opened = os.open(f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}", os.O_RDWR)
with mmap.mmap(opened, mmap.PAGESIZE) as shared:
    sys.stdout.write(shared[:7].decode())
"""


@dataclass(frozen=True, slots=True)
class ProbeOutput:
    """The last line a probe wrote, and everything it wrote beside."""

    line: str
    log: str


def run_probe(
    code: str, *arguments: str, environ: Mapping[str, str] | None = None, timeout_s: float = PROBE_TIMEOUT_S
) -> ProbeOutput | ProbeFailed:
    """Run a segment of Python in a process of its own."""
    return _run_python("-c", code, *arguments, environ=environ, timeout_s=timeout_s)


def _run_python(*arguments: str, environ: Mapping[str, str] | None, timeout_s: float) -> ProbeOutput | ProbeFailed:
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            env=None if environ is None else dict(environ),
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ProbeFailed(f"no answer within {timeout_s:g} s")
    except OSError as error:
        return ProbeFailed(f"cannot be asked ({error.strerror})")
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return ProbeFailed(_failure_reason(done))
    return ProbeOutput(lines[-1], done.stdout + done.stderr)


def probe_torch() -> TorchReport | ProbeFailed:
    output = run_probe(TORCH_CODE)
    return output if isinstance(output, ProbeFailed) else _decoded(output, TorchReport)


def probe_nixl(environ: Mapping[str, str], plugins: Sequence[str]) -> tuple[NixlReport | ProbeFailed, str]:
    """The report of a process that tried to start these plugins, and UCX's log with its table of transports."""
    output = run_probe(NIXL_CODE, *plugins, environ={**environ, **UCX_LOGGING})
    return (output, "") if isinstance(output, ProbeFailed) else (_decoded(output, NixlReport), output.log)


def measure_gpu(index: int, environ: Mapping[str, str]) -> GpuReport | ProbeFailed:
    """How fast KV moves between two processes on one GPU."""
    output = _run_python("-m", "kvferry", *GPU_BENCHMARK, f"cuda:{index}", environ=environ, timeout_s=PROBE_TIMEOUT_S)
    return output if isinstance(output, ProbeFailed) else _decoded(output, GpuReport)


def driver_gpus() -> list[str]:
    """GPUs as the driver's own tool lists them; none without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return []
    return [line for line in done.stdout.splitlines() if line.startswith("GPU ")]


def can_share_memory() -> str | None:
    """None when another process of this user can map our anonymous memory; else why not."""
    try:
        opened = os.memfd_create("kvferry-doctor")
    except (AttributeError, OSError) as error:
        return f"anonymous shared memory cannot be made ({error})"
    try:
        os.ftruncate(opened, mmap.PAGESIZE)
        os.pwrite(opened, SHARED_BYTES, 0)
        output = run_probe(SHARE_CODE, str(os.getpid()), str(opened), timeout_s=10.0)
    finally:
        os.close(opened)
    if isinstance(output, ProbeFailed):
        return f"another process cannot open it ({output.reason})"
    return None if output.line == SHARED_BYTES.decode() else "another process sees other bytes"


def is_port_free(host: str, port: int) -> bool:
    """Whether we could listen there now. True when the host is not ours to listen on: that is another complaint."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _decoded(output: ProbeOutput, kind: type[_Report]) -> _Report | ProbeFailed:
    try:
        return msgspec.json.decode(output.line, type=kind)
    except (msgspec.DecodeError, ValueError):
        return ProbeFailed(f"gave an answer that cannot be read ({ascii(output.line)[:80]})")


def _failure_reason(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"the process that asked it was killed by signal {-done.returncode}"
    lines = done.stderr.strip().splitlines()
    return f"cannot be used ({ascii(lines[-1])[1:161]})" if lines else f"ended with exit code {done.returncode}"
