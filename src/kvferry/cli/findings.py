"""What `kvferry doctor` says: one finding per line, and how the answers of its probes become findings. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

__all__ = [
    "Failed",
    "Finding",
    "Level",
    "NixlReport",
    "TorchReport",
    "compiled_finding",
    "core_finding",
    "descriptor_finding",
    "enabled_transports",
    "gpu_finding",
    "machine_finding",
    "nixl_findings",
    "port_finding",
    "python_finding",
    "torch_finding",
    "transport_finding",
]

RDMA_TRANSPORTS = ("rc", "dc", "ud", "srd", "gga")
TRANSPORT_ROW = re.compile(r"\|\s*[a-z-]*\s*\|\s*[a-z0-9_]*\s*\|\s*\+\s*(\w+)\s*\|")
DEFAULT_PLUGIN = "UCX"
SECOND_SIDE_CHANNEL_PORT = 5601
LEAST_PYTHON = (3, 11)
LEAST_CORES = 3
TESTED_ARCHITECTURES = ("x86_64", "aarch64")
LEAST_DESCRIPTORS = 4096


class Level(StrEnum):
    OK = "ok"
    ADVICE = "advice"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    topic: str
    text: str


class TorchReport(msgspec.Struct, frozen=True):
    """What a process that imported torch found."""

    version: str
    gpus: list[str] = []
    cuda: str | None = None
    """The CUDA version torch was built for; None: a CPU build."""


class NixlReport(msgspec.Struct, frozen=True):
    """What a process that made a NIXL agent found."""

    version: str
    plugins: list[str] = []
    started: list[str] = []
    """Of those that were asked for."""
    exit_signals: dict[str, int] = {}
    """By plugin, the signal that killed a process when it exited after starting that plugin."""
    netlink_copies: int = 0
    """Copies of libnl in a process that has started UCX. NIXL brings one, the distribution's libefa another."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A probe that did not answer, and why, in a few words."""

    reason: str


def machine_finding(architecture: str, libc: str) -> Finding:
    if architecture not in TESTED_ARCHITECTURES:
        tested = " and ".join(TESTED_ARCHITECTURES)
        return Finding(Level.ADVICE, "machine", f"{architecture}, {libc}: kvferry is tested on {tested}; run `make test` here first")
    return Finding(Level.OK, "machine", f"{architecture}, {libc}")


def python_finding(version: tuple[int, int, int]) -> Finding:
    text = ".".join(map(str, version))
    if version[:2] < LEAST_PYTHON:
        return Finding(Level.PROBLEM, "Python", f"{text} is too old; kvferry needs 3.11 or newer")
    return Finding(Level.OK, "Python", text)


def compiled_finding(missing: Sequence[str]) -> Finding:
    """`missing`: loops that should be compiled, and are not."""
    if not missing:
        return Finding(Level.OK, "C module", "all its loops are here")
    text = f"{', '.join(missing)} missing, so KV moves slower; install kvferry anew with a C compiler at hand (`make setup`)"
    return Finding(Level.ADVICE, "C module", text)


def core_finding(cores: int) -> Finding:
    if cores < LEAST_CORES:
        return Finding(Level.ADVICE, "cores", f"{cores}: prefill, decode and router share them, so expect order of magnitude, not speed")
    return Finding(Level.OK, "cores", f"{cores}")


def descriptor_finding(limit: int) -> Finding:
    if limit < LEAST_DESCRIPTORS:
        return Finding(Level.ADVICE, "open files", f"a process may open {limit}; run `ulimit -n 65536` before serving many clients")
    return Finding(Level.OK, "open files", f"a process may open {limit}")


def torch_finding(report: TorchReport | Failed) -> Finding:
    if isinstance(report, Failed):
        return Finding(Level.PROBLEM, "torch", f"{report.reason}; install it anew (`make setup`)")
    return Finding(Level.OK, "torch", f"{report.version}, {'CPU build' if report.cuda is None else f'for CUDA {report.cuda}'}")


def gpu_finding(report: TorchReport | Failed, driver_gpus: list[str]) -> Finding:
    """`driver_gpus` is what the driver sees, whatever torch was built for."""
    if isinstance(report, TorchReport) and report.gpus:
        return Finding(Level.OK, "GPUs", f"{len(report.gpus)}: {', '.join(sorted(set(report.gpus)))}")
    if driver_gpus:
        return Finding(Level.ADVICE, "GPUs", f"{len(driver_gpus)} found, but torch cannot use them; install a torch built for CUDA")
    return Finding(Level.ADVICE, "GPUs", "none found; the embedded engine runs on the CPU (`--device cpu`, the default)")


def nixl_findings(report: NixlReport | Failed, asked_for: Sequence[str] = ()) -> list[Finding]:
    """`asked_for` are the plugins that the user named beside UCX."""
    if isinstance(report, Failed):
        return [Finding(Level.PROBLEM, "NIXL", f"{report.reason}; engines can still use shared memory and TCP (planes: shm, tcp)")]
    found = ", ".join(sorted(report.plugins)) or "none"
    first = Finding(Level.OK, "NIXL", f"{report.version}, UCX starts here; plugins found: {found}")
    if DEFAULT_PLUGIN not in report.started:
        text = f"{report.version} works, but its UCX plugin does not start (plugins found: {found}); install nixl anew"
        first = Finding(Level.PROBLEM, "NIXL", text)
    return [first, *_exit_findings(report), *(_plugin_finding(name, report) for name in asked_for)]


def _exit_findings(report: NixlReport) -> list[Finding]:
    """How processes that have used NIXL end here."""
    crashes = [f"by signal {number} after using {name}" for name, number in report.exit_signals.items()]
    if crashes:
        text = (
            f"processes here are killed when they exit ({', '.join(crashes)}); please report it with the output of `kvferry doctor --json`"
        )
        return [Finding(Level.PROBLEM, "NIXL exit", text)]
    if report.netlink_copies > 1:
        text = (
            "the distribution's libefa loads a second libnl; kvferry's processes exit cleanly, and vLLM's with kvferry installed; other "
            "users of NIXL end with SIGSEGV (remove ibverbs-providers, or see docs/decisions/042-two-copies-of-libnl.md)"
        )
        return [Finding(Level.ADVICE, "NIXL exit", text)]
    return []


def _plugin_finding(name: str, report: NixlReport) -> Finding:
    """It was asked for by name, so it is a problem when it does not start."""
    if name in report.started:
        return Finding(Level.OK, "NIXL plugin", f"{name} starts here")
    if name not in report.plugins:
        text = f"{name} is not found; use one of {', '.join(sorted(report.plugins))}"
        return Finding(Level.PROBLEM, "NIXL plugin", text)
    return Finding(Level.PROBLEM, "NIXL plugin", f"{name} is found but does not start here; install the libraries it needs, or use UCX")


def port_finding(taken: list[int], looked_at: list[int]) -> Finding:
    """Of the ports in the README's commands."""
    if not taken:
        return Finding(Level.OK, "other ports", f"{', '.join(map(str, looked_at))} are free")
    side = [str(port) for port in taken if port == SECOND_SIDE_CHANNEL_PORT]
    http = [str(port) for port in taken if port != SECOND_SIDE_CHANNEL_PORT]
    parts = [f"{', '.join(http)} taken; choose others with --port"] if http else []
    parts += [f"{side[0]} taken; set VLLM_NIXL_SIDE_CHANNEL_PORT to another"] if side else []
    return Finding(Level.ADVICE, "other ports", "; ".join(parts))


def enabled_transports(log: str) -> list[str]:
    """UCX's own table of transports, as its debug log prints it."""
    return sorted(set(TRANSPORT_ROW.findall(log)))


def transport_finding(transports: list[str], settings: Mapping[str, str]) -> Finding:
    """`settings` are the UCX_ variables in force; they are the usual reason for a missing transport."""
    listed = ", ".join(transports)
    given = "".join(f", with {name}={value}" for name, value in sorted(settings.items()))
    if not transports:
        return Finding(Level.ADVICE, "UCX", f"told nothing about its transports{given}")
    if "cma" not in transports:
        return Finding(Level.ADVICE, "UCX", f"{listed}{given}; without cma NIXL is slow on one machine, so allow ptrace in the container")
    if not any(name.split("_")[0] in RDMA_TRANSPORTS for name in transports):
        return Finding(Level.OK, "UCX", f"{listed}{given}; no RDMA device, so KV moves between machines over TCP")
    return Finding(Level.OK, "UCX", f"{listed}{given}")
