"""Findings of `kvferry doctor`: how the answers of probes become lines for the user. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvferry.vllm.release import TESTED, release

# The first part of the names of UCX's RDMA transports (`rc_mlx5`, `dc_mlx5`, ...).
RDMA_TRANSPORTS = ("rc", "dc", "ud", "srd", "gga")
# An enabled row of UCX's transport table; UCX marks enabled transports with a plus sign.
TRANSPORT_ROW = re.compile(r"\|\s*[a-z-]*\s*\|\s*[a-z0-9_]*\s*\|\s*\+\s*(\w+)\s*\|")
DEFAULT_PLUGIN = "UCX"
SECOND_SIDE_CHANNEL_PORT = 5601
MIN_PYTHON = (3, 11)
MIN_CORES = 3
TESTED_ARCHITECTURES = ("x86_64", "aarch64")
MIN_OPEN_FILES = 4096
MIN_SHM_BYTES = 1 << 30
"""Containers have 64 MiB of /dev/shm by default, in which no host pool of use fits."""
MIN_FREE_SHARE = 0.9
"""The share of a GPU's memory that vLLM takes by default."""


class Severity(StrEnum):
    """How serious a finding is; a PROBLEM makes `kvferry doctor` exit with code 1."""

    OK = "ok"
    ADVICE = "advice"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Severity
    topic: str
    text: str


class TorchReport(msgspec.Struct, frozen=True):
    """The answer of a process that imported torch."""

    version: str
    gpus: list[str] = []
    cuda: str | None = None
    """The CUDA version that torch was built for; None for a CPU build."""
    gpu_bytes: list[int] = []
    """The memory of each GPU."""
    free_bytes: list[int] = []
    """What no process has allocated of it."""
    apart: list[tuple[int, int]] = []
    """Pairs of GPUs that cannot access each other's memory."""
    nccl: str | None = None


class NixlReport(msgspec.Struct, frozen=True):
    """The answer of a process that made a NIXL agent."""

    version: str
    plugins: list[str] = []
    started: list[str] = []
    """The requested plugins that started."""
    exit_signals: dict[str, int] = {}
    """By plugin, the signal that killed a process on exit after the process had started the
    plugin.
    """
    netlink_copies: int = 0
    """The number of copies of libnl in a process that has started UCX.

    NIXL's wheel has one copy; the distribution's libefa loads another
    (docs/decisions/042-two-copies-of-libnl.md).
    """


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """The outcome of a probe that gave no answer, with a short reason."""

    reason: str


class NotInstalled(ProbeFailed):
    """The outcome of a probe for a package that is not installed."""


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
    """Report C loops; `missing` names the loops that should be compiled and are not."""
    if not missing:
        return Finding(Severity.OK, "C module", "all compiled loops are present")
    text = (
        f"{', '.join(missing)} not compiled, so KV moves slower; install a C compiler and "
        "reinstall kvferry (`make setup`)"
    )
    return Finding(Severity.ADVICE, "C module", text)


def core_finding(cores: int) -> Finding:
    if cores < MIN_CORES:
        return Finding(
            Severity.ADVICE,
            "cores",
            f"{cores}: prefill, decode and router share them, so timings here show the order of "
            "magnitude only",
        )
    return Finding(Severity.OK, "cores", f"{cores}")


def descriptor_finding(limit: int) -> Finding:
    if limit < MIN_OPEN_FILES:
        return Finding(
            Severity.ADVICE,
            "open files",
            f"a process may open {limit} files; run `ulimit -n 65536` before serving many clients",
        )
    return Finding(Severity.OK, "open files", f"a process may open {limit} files")


def extras_finding(missing: Mapping[str, Sequence[str]]) -> Finding:
    """Report the extras; `missing` maps each extra to its packages that are not installed."""
    incomplete = [extra for extra, packages in missing.items() if packages]
    if not incomplete:
        return Finding(Severity.OK, "extras", f"{', '.join(missing)}: all packages are installed")
    text = (
        f"{', '.join(incomplete)} not installed, which the connector does not need "
        f"(pip install 'kvferry[{','.join(incomplete)}]')"
    )
    return Finding(Severity.OK, "extras", text)


def torch_finding(report: TorchReport | ProbeFailed) -> Finding:
    if isinstance(report, NotInstalled):
        text = f"{report.reason}; only the embedded engine and KV in GPU memory need it"
        return Finding(Severity.ADVICE, "torch", text)
    if isinstance(report, ProbeFailed):
        return Finding(Severity.PROBLEM, "torch", f"{report.reason}; reinstall it (`make setup`)")
    build = "CPU build" if report.cuda is None else f"for CUDA {report.cuda}"
    nccl = "" if report.nccl is None else f", NCCL {report.nccl} (between ranks of one engine)"
    return Finding(Severity.OK, "torch", f"{report.version}, {build}{nccl}")


def vllm_finding(version: str | None) -> Finding:
    """Report vLLM; `version` is None if vLLM is not installed in this environment."""
    if version is None:
        return Finding(Severity.OK, "vLLM", "not installed here; the embedded engine works without")
    tested = ", ".join(TESTED)
    if version.split("+")[0] in TESTED:
        return Finding(Severity.OK, "vLLM", f"{version}, as tested with kvferry")
    if release(version) in map(release, TESTED):
        return Finding(Severity.OK, "vLLM", f"{version}; kvferry is tested with {tested}")
    text = (
        f"{version}, but kvferry is tested with {tested}; install vllm=={TESTED[-1]}, or try a "
        "newer one with care"
    )
    return Finding(Severity.ADVICE, "vLLM", text)


def gpu_finding(report: TorchReport | ProbeFailed, driver_gpus: list[str]) -> Finding:
    """Report GPUs; `driver_gpus` are the GPUs that the driver sees, whatever torch was built
    for.
    """
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
    """Report NIXL; `requested` are the plugins that the user named besides UCX."""
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
    first = Finding(Severity.OK, "NIXL", f"{report.version}, UCX starts; plugins found: {found}")
    if DEFAULT_PLUGIN not in report.started:
        text = (
            f"{report.version} works, but its UCX plugin does not start (plugins found: {found}); "
            "reinstall nixl"
        )
        first = Finding(Severity.PROBLEM, "NIXL", text)
    return [first, *_exit_findings(report), *(_plugin_finding(name, report) for name in requested)]


def _exit_findings(report: NixlReport) -> list[Finding]:
    """Report how processes that have used NIXL exit on this machine."""
    crashes = [
        f"by signal {number} after using {name}" for name, number in report.exit_signals.items()
    ]
    if crashes:
        text = (
            f"processes that used NIXL are killed when they exit ({', '.join(crashes)}); please "
            "report this with the output of `kvferry doctor --json`"
        )
        return [Finding(Severity.PROBLEM, "NIXL exit", text)]
    if report.netlink_copies > 1:
        text = (
            "the distribution's libefa loads a second libnl; processes of kvferry, and of vLLM "
            "with kvferry installed, exit cleanly; other programs that use NIXL exit with SIGSEGV "
            "(remove ibverbs-providers, or see docs/decisions/042-two-copies-of-libnl.md)"
        )
        return [Finding(Severity.ADVICE, "NIXL exit", text)]
    return []


def _plugin_finding(name: str, report: NixlReport) -> Finding:
    """Report one plugin; a plugin that the user asked for by name and that does not start is a
    problem.
    """
    if name in report.started:
        return Finding(Severity.OK, "NIXL plugin", f"{name} starts")
    if name not in report.plugins:
        text = f"NIXL has no plugin {name}; available: {', '.join(sorted(report.plugins))}"
        return Finding(Severity.PROBLEM, "NIXL plugin", text)
    return Finding(
        Severity.PROBLEM,
        "NIXL plugin",
        f"NIXL has the plugin {name}, but it does not start; install the libraries it needs, or "
        "use UCX",
    )


def port_finding(taken: list[int], checked_ports: list[int]) -> Finding:
    """Report which ports of the README's commands are free."""
    if not taken:
        return Finding(Severity.OK, "other ports", f"{', '.join(map(str, checked_ports))} are free")
    side = [str(port) for port in taken if port == SECOND_SIDE_CHANNEL_PORT]
    http = [str(port) for port in taken if port != SECOND_SIDE_CHANNEL_PORT]
    parts = [f"{', '.join(http)} in use; choose others with --port"] if http else []
    parts += [f"{side[0]} in use; set VLLM_NIXL_SIDE_CHANNEL_PORT to another port"] if side else []
    return Finding(Severity.ADVICE, "other ports", "; ".join(parts))


def enabled_transports(log: str) -> list[str]:
    """Return the enabled transports from the table that UCX prints in its debug log."""
    return sorted(set(TRANSPORT_ROW.findall(log)))


def transport_finding(transports: list[str], settings: Mapping[str, str]) -> Finding:
    """Report the transports of UCX.

    `settings` are the UCX_ variables in force, which are the usual reason for a missing transport.
    """
    listed = ", ".join(transports)
    given = "".join(f", with {name}={value}" for name, value in sorted(settings.items()))
    if not transports:
        return Finding(Severity.ADVICE, "UCX", f"reported no transports{given}")
    if "cma" not in transports:
        return Finding(
            Severity.ADVICE,
            "UCX",
            f"{listed}{given}; without cma NIXL is slow within one machine: allow ptrace in the "
            "container",
        )
    if not any(name.split("_")[0] in RDMA_TRANSPORTS for name in transports):
        return Finding(
            Severity.OK,
            "UCX",
            f"{listed}{given}; no RDMA device, so KV moves between machines over TCP",
        )
    return Finding(Severity.OK, "UCX", f"{listed}{given}")


def pool_findings(
    folder: str, total_bytes: int, free_bytes: int, orphans: Mapping[str, int]
) -> list[Finding]:
    """Report the memory file system of the host pool, which is the tier `cpu`.

    `orphans` maps each segment whose owner has ended to its size in bytes.
    """
    sizes = f"{free_bytes / 2**30:,.1f} of {total_bytes / 2**30:,.1f} GiB are free"
    if total_bytes < MIN_SHM_BYTES:
        first = Finding(
            Severity.ADVICE,
            "host pool",
            f"{folder}: {sizes}, too few for a tier cpu; mount a larger /dev/shm (docker run "
            "--shm-size 16g), or set pool_path to a folder in another tmpfs",
        )
    else:
        first = Finding(Severity.OK, "host pool", f"{folder}: {sizes} for the tier cpu")
    if not orphans:
        return [first]
    text = (
        f"{len(orphans)} segments of engines that have ended hold "
        f"{sum(orphans.values()) / 2**30:,.1f} GiB of {folder}; an engine of the same model and "
        f"size takes them over; if none will come, run `kvferry store clear --pool {folder} --yes`"
    )
    return [first, Finding(Severity.ADVICE, "host pool", text)]


# -- GPU findings --


def gpu_memory_findings(report: TorchReport) -> list[Finding]:
    """Report the GPUs whose memory other processes hold, because vLLM then does not start."""
    return [
        Finding(
            Severity.ADVICE,
            "GPU memory",
            f"cuda:{index}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free; vLLM takes "
            f"{MIN_FREE_SHARE:.0%} by default: end other processes (nvidia-smi lists them), or "
            f"lower --gpu-memory-utilization to {max(0.05, int(95 * free / total) / 100):.2f}",
        )
        for index, (free, total) in enumerate(
            zip(report.free_bytes, report.gpu_bytes, strict=False)
        )
        if free < MIN_FREE_SHARE * total
    ]


def peer_access_finding(report: TorchReport) -> Finding:
    """Report which GPUs of a machine with several can read each other's memory."""
    if not report.apart:
        text = f"all {len(report.gpus)} GPUs read each other's memory directly (cuda_ipc)"
        return Finding(Severity.OK, "GPU peers", text)
    pairs = ", ".join(f"{one} and {other}" for one, other in report.apart)
    text = (
        f"GPUs {pairs} cannot read each other's memory, so KV between them goes through the host; "
        "put P and D on GPUs that can (nvidia-smi topo -p2p r)"
    )
    return Finding(Severity.ADVICE, "GPU peers", text)


def rdma_finding(devices: Mapping[str, str]) -> Finding:
    """Report RDMA on a machine with GPUs; `devices` maps each device to the state of its port."""
    if not devices:
        text = (
            "no device, so KV between hosts goes over TCP; in a container, pass /dev/infiniband in "
            "and allow memory to be locked (ulimit -l unlimited)"
        )
        return Finding(Severity.ADVICE, "RDMA", text)
    listed = ", ".join(f"{name} ({state})" for name, state in devices.items())
    if not any("ACTIVE" in state for state in devices.values()):
        return Finding(
            Severity.ADVICE, "RDMA", f"{listed}: no port is active; check cables and switch"
        )
    return Finding(Severity.OK, "RDMA", listed)


# How fast KV moves between two processes on one GPU, which transport an engine would choose, and
# with which settings. `kvferry bench transfer` has measured, in a separate process.


GOOD_SHARE = 0.8
"""The share of the device's own copy speed from which cuda_ipc counts as fast."""
# The advice never goes beyond this segment size.
MAX_ADVICE_BYTES = 64 * 1024 * 1024
GET_ZCOPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"


class TransportRow(msgspec.Struct, frozen=True):
    """One row of the benchmark's output."""

    transport: str
    segment_bytes: int
    pattern: str
    gbps: float | None = None
    """The speed in 10^9 bytes per second; None if this transport could not move the data."""
    copies: int | None = None
    median_us: float | None = None


class BaselineRow(msgspec.Struct, frozen=True):
    """The speed of plain copies, for comparison."""

    pattern: str
    memcpy_gbps: float
    contiguous_nixl_gbps: float | None = None


class GpuReport(msgspec.Struct, frozen=True):
    """The benchmark's output; only the fields that are used here."""

    rows: list[TransportRow]
    baselines: list[BaselineRow]


@dataclass(frozen=True, slots=True)
class GpuSpeeds:
    """The speeds for scattered segments of one size, in 10^9 bytes per second; None if a transport
    does not work.
    """

    segment_bytes: int
    copy: float
    """The speed of the device's own copy."""
    cuda_ipc: float | None
    nixl: float | None
    nixl_bounce: float | None
    nixl_contiguous: float | None
    descriptor_us: float | None
    """The time that NIXL takes for each descriptor."""


def gpu_speeds(report: GpuReport) -> GpuSpeeds | ProbeFailed:
    """Pick the speeds out of the report; ProbeFailed if no transport moved the memory of this
    GPU.
    """
    rows = {
        row.transport: row
        for row in report.rows
        if row.pattern == "scattered" and row.gbps is not None
    }
    baselines = [row for row in report.baselines if row.pattern == "scattered"]
    if not rows or not baselines:
        return ProbeFailed("no transport can move memory of this GPU")
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
    """Return the segment size at which plain NIXL becomes as fast as bounce buffers, or None if
    unknown.

    A descriptor takes the same time whatever its size, and a transfer through bounce buffers is
    equally fast whatever the size of its segments. The result is rounded up to a power of two.
    """
    if speeds.descriptor_us is None or speeds.nixl_bounce is None:
        return None
    meeting = min(speeds.nixl_bounce * 1e3 * speeds.descriptor_us, MAX_ADVICE_BYTES)
    return 1 << max(0, round(meeting) - 1).bit_length()


def gpu_speed_findings(
    gpu: str, report: GpuReport | ProbeFailed, default_bounce_bytes: int
) -> list[Finding]:
    """Report the speed of each transport and the transport that an engine would choose."""
    speeds = report if isinstance(report, ProbeFailed) else gpu_speeds(report)
    if isinstance(speeds, ProbeFailed):
        text = (
            f"{gpu}: the speed could not be measured ({speeds.reason}); see `kvferry bench "
            "transfer --device cuda`"
        )
        return [Finding(Severity.ADVICE, "GPU speed", text)]
    return [
        Finding(Severity.OK, "GPU speed", f"{gpu}: {_measured(speeds)}"),
        _choice(gpu, speeds, default_bounce_bytes),
    ]


def bounce_finding(gpu: str, buffer_bytes: int, segment_bytes: int) -> Finding:
    """Report how much memory of a GPU an engine gives to the bounce buffer, and when."""
    text = (
        f"{gpu}: {_size(buffer_bytes)}, allocated when the first NIXL transfer of segments below "
        f"{_size(segment_bytes)} starts, and never if all peers are reached by cuda_ipc; "
        "bounce_buffer_bytes sets the size, 0 means no bounce buffer"
    )
    return Finding(Severity.OK, "bounce buffer", text)


def ucx_settings_finding(settings: Mapping[str, str], environ: Mapping[str, str]) -> Finding:
    """Report the UCX settings on GPUs.

    `settings` are the values that the nixl transport sets unless the user has set the variable.
    """
    shown = [
        (
            f"{name}={environ.get(name, value)} "
            f"({'set by you' if name in environ else 'set by kvferry'})"
        )
        for name, value in sorted(settings.items())
    ]
    if environ.get(GET_ZCOPY, "y").lower() not in ("y", "yes", "on", "1", "try"):
        text = (
            f"{', '.join(shown)}; without {GET_ZCOPY}=y NIXL reads GPU memory through host TCP, "
            "thousands of times slower: unset the variable"
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
            f"{gpu}: nixl within this host too, because cuda_ipc does not work here (the log of "
            f"an engine says why); {across}"
        )
        return Finding(Severity.ADVICE, "GPU transport", text)
    share = speeds.cuda_ipc / speeds.copy
    text = (
        f"{gpu}: cuda_ipc within this host, at {share:.2f} of the speed of the device's own copy; "
        f"{across}"
    )
    if share < GOOD_SHARE:
        return Finding(
            Severity.ADVICE,
            "GPU transport",
            f"{text}; that is slow: is another process using this GPU?",
        )
    return Finding(Severity.OK, "GPU transport", text)


def _advice_across_hosts(speeds: GpuSpeeds, default_bounce_bytes: int) -> str:
    if speeds.nixl is None:
        return (
            "NIXL cannot move memory of this GPU, so other hosts are reached through host memory "
            "only (kv_buffer_device cpu)"
        )
    advised = bounce_advice_bytes(speeds)
    if advised is None:
        return "nixl to other hosts"
    setting = f"nixl to other hosts, through bounce buffers for segments below {_size(advised)}"
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
