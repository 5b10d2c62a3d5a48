"""What `kvferry doctor` says: one finding per line, and how the answers of its probes become
findings. Pure.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

__all__ = [
    "Finding",
    "GpuReport",
    "GpuSpeeds",
    "NixlReport",
    "ProbeFailed",
    "Severity",
    "TorchReport",
    "bounce_advice_bytes",
    "compiled_finding",
    "core_finding",
    "descriptor_finding",
    "enabled_transports",
    "gpu_finding",
    "gpu_speed_findings",
    "gpu_speeds",
    "machine_finding",
    "nixl_findings",
    "port_finding",
    "python_finding",
    "torch_finding",
    "transport_finding",
    "ucx_settings_finding",
]


RDMA_TRANSPORTS = ("rc", "dc", "ud", "srd", "gga")
TRANSPORT_ROW = re.compile(r"\|\s*[a-z-]*\s*\|\s*[a-z0-9_]*\s*\|\s*\+\s*(\w+)\s*\|")
DEFAULT_PLUGIN = "UCX"
SECOND_SIDE_CHANNEL_PORT = 5601
MIN_PYTHON = (3, 11)
MIN_CORES = 3
TESTED_ARCHITECTURES = ("x86_64", "aarch64")
MIN_OPEN_FILES = 4096


class Severity(StrEnum):
    OK = "ok"
    ADVICE = "advice"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Severity
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
    """Copies of libnl in a process that has started UCX. NIXL brings one, the distribution's libefa
    another.
    """


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """A probe that did not answer, and why, in a few words."""

    reason: str


def machine_finding(architecture: str, libc: str) -> Finding:
    if architecture not in TESTED_ARCHITECTURES:
        tested = " and ".join(TESTED_ARCHITECTURES)
        return Finding(
            Severity.ADVICE,
            "machine",
            f"{architecture}, {libc}: kvferry is tested on {tested}; run `make test` here first",
        )
    return Finding(Severity.OK, "machine", f"{architecture}, {libc}")


def python_finding(version: tuple[int, int, int]) -> Finding:
    text = ".".join(map(str, version))
    if version[:2] < MIN_PYTHON:
        return Finding(
            Severity.PROBLEM, "Python", f"{text} is too old; kvferry needs 3.11 or newer"
        )
    return Finding(Severity.OK, "Python", text)


def compiled_finding(missing: Sequence[str]) -> Finding:
    """`missing`: loops that should be compiled, and are not."""
    if not missing:
        return Finding(Severity.OK, "C module", "all its loops are here")
    text = (
        f"{', '.join(missing)} missing, so KV moves slower; reinstall kvferry with a C compiler "
        "at hand (`make setup`)"
    )
    return Finding(Severity.ADVICE, "C module", text)


def core_finding(cores: int) -> Finding:
    if cores < MIN_CORES:
        return Finding(
            Severity.ADVICE,
            "cores",
            f"{cores}: prefill, decode and router share them, so expect order of magnitude, not "
            "speed",
        )
    return Finding(Severity.OK, "cores", f"{cores}")


def descriptor_finding(limit: int) -> Finding:
    if limit < MIN_OPEN_FILES:
        return Finding(
            Severity.ADVICE,
            "open files",
            f"a process may open {limit}; run `ulimit -n 65536` before serving many clients",
        )
    return Finding(Severity.OK, "open files", f"a process may open {limit}")


def torch_finding(report: TorchReport | ProbeFailed) -> Finding:
    if isinstance(report, ProbeFailed):
        return Finding(Severity.PROBLEM, "torch", f"{report.reason}; reinstall it (`make setup`)")
    return Finding(
        Severity.OK,
        "torch",
        f"{report.version}, {'CPU build' if report.cuda is None else f'for CUDA {report.cuda}'}",
    )


def gpu_finding(report: TorchReport | ProbeFailed, driver_gpus: list[str]) -> Finding:
    """`driver_gpus` is what the driver sees, whatever torch was built for."""
    if isinstance(report, TorchReport) and report.gpus:
        return Finding(
            Severity.OK, "GPUs", f"{len(report.gpus)}: {', '.join(sorted(set(report.gpus)))}"
        )
    if driver_gpus:
        return Finding(
            Severity.ADVICE,
            "GPUs",
            f"{len(driver_gpus)} found, but torch cannot use them; install a torch built for CUDA",
        )
    return Finding(
        Severity.ADVICE,
        "GPUs",
        "none found; the embedded engine runs on the CPU (`--device cpu`, the default)",
    )


def nixl_findings(report: NixlReport | ProbeFailed, requested: Sequence[str] = ()) -> list[Finding]:
    """`requested` are the plugins that the user named beside UCX."""
    if isinstance(report, ProbeFailed):
        return [
            Finding(
                Severity.PROBLEM,
                "NIXL",
                f"{report.reason}; engines can still use shared memory and TCP (transports: shm, "
                "tcp)",
            )
        ]
    found = ", ".join(sorted(report.plugins)) or "none"
    first = Finding(
        Severity.OK, "NIXL", f"{report.version}, UCX starts here; plugins found: {found}"
    )
    if DEFAULT_PLUGIN not in report.started:
        text = (
            f"{report.version} works, but its UCX plugin does not start (plugins found: {found}); "
            "reinstall nixl"
        )
        first = Finding(Severity.PROBLEM, "NIXL", text)
    return [first, *_exit_findings(report), *(_plugin_finding(name, report) for name in requested)]


def _exit_findings(report: NixlReport) -> list[Finding]:
    """How processes that have used NIXL end here."""
    crashes = [
        f"by signal {number} after using {name}" for name, number in report.exit_signals.items()
    ]
    if crashes:
        text = (
            f"processes here are killed when they exit ({', '.join(crashes)}); please report it "
            "with the output of `kvferry doctor --json`"
        )
        return [Finding(Severity.PROBLEM, "NIXL exit", text)]
    if report.netlink_copies > 1:
        text = (
            "the distribution's libefa loads a second libnl; kvferry's processes exit cleanly, "
            "and vLLM's with kvferry installed; other "
            "users of NIXL end with SIGSEGV (remove ibverbs-providers, or see "
            "docs/decisions/042-two-copies-of-libnl.md)"
        )
        return [Finding(Severity.ADVICE, "NIXL exit", text)]
    return []


def _plugin_finding(name: str, report: NixlReport) -> Finding:
    """It was asked for by name, so it is a problem when it does not start."""
    if name in report.started:
        return Finding(Severity.OK, "NIXL plugin", f"{name} starts here")
    if name not in report.plugins:
        text = f"{name} is not found; use one of {', '.join(sorted(report.plugins))}"
        return Finding(Severity.PROBLEM, "NIXL plugin", text)
    return Finding(
        Severity.PROBLEM,
        "NIXL plugin",
        f"{name} is found but does not start here; install the libraries it needs, or use UCX",
    )


def port_finding(taken: list[int], checked_ports: list[int]) -> Finding:
    """Of the ports in the README's commands."""
    if not taken:
        return Finding(Severity.OK, "other ports", f"{', '.join(map(str, checked_ports))} are free")
    side = [str(port) for port in taken if port == SECOND_SIDE_CHANNEL_PORT]
    http = [str(port) for port in taken if port != SECOND_SIDE_CHANNEL_PORT]
    parts = [f"{', '.join(http)} taken; choose others with --port"] if http else []
    parts += [f"{side[0]} taken; set VLLM_NIXL_SIDE_CHANNEL_PORT to another"] if side else []
    return Finding(Severity.ADVICE, "other ports", "; ".join(parts))


def enabled_transports(log: str) -> list[str]:
    """UCX's own table of transports, as its debug log prints it."""
    return sorted(set(TRANSPORT_ROW.findall(log)))


def transport_finding(transports: list[str], settings: Mapping[str, str]) -> Finding:
    """`settings` are the UCX_ variables in force; they are the usual reason for a missing
    transport.
    """
    listed = ", ".join(transports)
    given = "".join(f", with {name}={value}" for name, value in sorted(settings.items()))
    if not transports:
        return Finding(Severity.ADVICE, "UCX", f"reported no transports{given}")
    if "cma" not in transports:
        return Finding(
            Severity.ADVICE,
            "UCX",
            f"{listed}{given}; without cma NIXL is slow on one machine, so allow ptrace in the "
            "container",
        )
    if not any(name.split("_")[0] in RDMA_TRANSPORTS for name in transports):
        return Finding(
            Severity.OK,
            "UCX",
            f"{listed}{given}; no RDMA device, so KV moves between machines over TCP",
        )
    return Finding(Severity.OK, "UCX", f"{listed}{given}")


# -------------------- gpu findings -------------------- What `kvferry doctor` says of GPUs: how
# fast KV moves between two processes on one, by which transport it would go, and with which
# settings.
#
# Pure: `kvferry bench transfer` has measured, in a process of its own.


GOOD_SHARE = 0.8
"""Of the device's own copy."""
MAX_ADVICE_BYTES = 64 * 1024 * 1024
GET_ZCOPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"


class TransportRow(msgspec.Struct, frozen=True):
    """A row of the benchmark."""

    transport: str
    segment_bytes: int
    pattern: str
    gbps: float | None = None
    """None: this transport could not move it."""
    copies: int | None = None
    median_us: float | None = None


class BaselineRow(msgspec.Struct, frozen=True):
    pattern: str
    memcpy_gbps: float
    contiguous_nixl_gbps: float | None = None


class GpuReport(msgspec.Struct, frozen=True):
    """What the benchmark answered, as far as it is used here."""

    rows: list[TransportRow]
    baselines: list[BaselineRow]


@dataclass(frozen=True, slots=True)
class GpuSpeeds:
    """Of scattered segments of one size, in 10^9 bytes per second; None where something does not
    work.
    """

    segment_bytes: int
    copy: float
    cuda_ipc: float | None
    nixl: float | None
    nixl_bounce: float | None
    nixl_contiguous: float | None
    descriptor_us: float | None
    """What NIXL takes for each descriptor."""


def gpu_speeds(report: GpuReport) -> GpuSpeeds | ProbeFailed:
    rows = {
        row.transport: row
        for row in report.rows
        if row.pattern == "scattered" and row.gbps is not None
    }
    baselines = [row for row in report.baselines if row.pattern == "scattered"]
    if not rows or not baselines:
        return ProbeFailed("no transport carries memory of this GPU")
    plain = rows.get("nixl")
    speeds = {name: row.gbps for name, row in rows.items()}
    return GpuSpeeds(
        segment_bytes=next(iter(rows.values())).segment_bytes,
        copy=baselines[0].memcpy_gbps,
        cuda_ipc=speeds.get("cuda_ipc"),
        nixl=speeds.get("nixl"),
        nixl_bounce=speeds.get("nixl bounce"),
        nixl_contiguous=baselines[0].contiguous_nixl_gbps,
        descriptor_us=plain.median_us / plain.copies
        if plain and plain.median_us and plain.copies
        else None,
    )


def bounce_advice_bytes(speeds: GpuSpeeds) -> int | None:
    """The size of segments from which on NIXL is as fast with a descriptor for each as staged: a
    power of two. None when nobody knows.

    A descriptor takes as long whatever its size, and bounce-buffer transfers are as fast whatever
    their segments.
    """
    if speeds.descriptor_us is None or speeds.nixl_bounce is None:
        return None
    meeting = min(speeds.nixl_bounce * 1e3 * speeds.descriptor_us, MAX_ADVICE_BYTES)
    return 1 << max(0, round(meeting) - 1).bit_length()


def gpu_speed_findings(
    gpu: str, report: GpuReport | ProbeFailed, default_bounce_bytes: int
) -> list[Finding]:
    """How fast each way is, and which transport would be chosen."""
    speeds = report if isinstance(report, ProbeFailed) else gpu_speeds(report)
    if isinstance(speeds, ProbeFailed):
        text = (
            f"{gpu}: nothing could be measured ({speeds.reason}); see `kvferry bench transfer "
            "--device cuda`"
        )
        return [Finding(Severity.ADVICE, "GPU speed", text)]
    return [
        Finding(Severity.OK, "GPU speed", f"{gpu}: {_measured(speeds)}"),
        _choice(gpu, speeds, default_bounce_bytes),
    ]


def ucx_settings_finding(settings: Mapping[str, str], environ: Mapping[str, str]) -> Finding:
    """`settings` are those that the nixl transport makes, unless the user has made them."""
    shown = [
        f"{name}={environ.get(name, value)} ({'yours' if name in environ else 'set by kvferry'})"
        for name, value in sorted(settings.items())
    ]
    if environ.get(GET_ZCOPY, "y").lower() not in ("y", "yes", "on", "1", "try"):
        text = (
            f"{', '.join(shown)}; without {GET_ZCOPY}=y NIXL reads GPU memory through host TCP, "
            "thousands of times slower: unset it"
        )
        return Finding(Severity.ADVICE, "UCX on GPUs", text)
    return Finding(Severity.OK, "UCX on GPUs", ", ".join(shown))


def _measured(speeds: GpuSpeeds) -> str:
    size = _size(speeds.segment_bytes)
    parts = [f"the device copies at {speeds.copy:,.0f} GB/s; scattered segments of {size}: "]
    ways = [
        ("cuda_ipc", speeds.cuda_ipc),
        ("nixl", speeds.nixl),
        ("nixl bounce", speeds.nixl_bounce),
    ]
    parts.append(
        ", ".join(f"{name} {_shown(gbps)}" for name, gbps in ways if gbps is not None)
        or "no transport"
    )
    if speeds.descriptor_us is not None:
        parts.append(f"; NIXL takes {speeds.descriptor_us:.1f} µs for each descriptor")
    if speeds.nixl_contiguous is not None:
        parts.append(f", and {_shown(speeds.nixl_contiguous)} for one long segment")
    return "".join(parts)


def _choice(gpu: str, speeds: GpuSpeeds, default_bounce_bytes: int) -> Finding:
    across = _advice_across_hosts(speeds, default_bounce_bytes)
    if speeds.cuda_ipc is None:
        text = (
            f"{gpu}: nixl everywhere, because cuda_ipc does not work here (see the log of an "
            f"engine); {across}"
        )
        return Finding(Severity.ADVICE, "GPU transport", text)
    share = speeds.cuda_ipc / speeds.copy
    text = f"{gpu}: cuda_ipc within this host, at {share:.2f} of the device's own copy; {across}"
    if share < GOOD_SHARE:
        return Finding(
            Severity.ADVICE,
            "GPU transport",
            f"{text}; that is little: is something else running on this GPU?",
        )
    return Finding(Severity.OK, "GPU transport", text)


def _advice_across_hosts(speeds: GpuSpeeds, default_bounce_bytes: int) -> str:
    if speeds.nixl is None:
        return (
            "NIXL does not carry memory of this GPU, so other hosts are reached through host "
            "memory only (kv_buffer_device cpu)"
        )
    advised = bounce_advice_bytes(speeds)
    if advised is None:
        return "nixl to other hosts"
    setting = f"nixl to other hosts, staged where segments are below {_size(advised)}"
    if advised == default_bounce_bytes:
        return f"{setting}, the default"
    return (
        f"{setting}: set bounce_max_segment_bytes to {advised} (the default is "
        f"{default_bounce_bytes})"
    )


def _shown(gbps: float) -> str:
    return f"{gbps:,.0f} GB/s" if gbps >= 10 else f"{gbps:.1f} GB/s"


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"
