"""What `kvferry doctor` says of GPUs: how fast KV moves between two processes on one, by which transport it would go, and with which
settings.

Pure: `kvferry bench transfer` has measured, in a process of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvferry.cli.findings import Finding, ProbeFailed, Severity

__all__ = ["GpuReport", "GpuSpeeds", "bounce_advice_bytes", "gpu_speed_findings", "gpu_speeds", "ucx_settings_finding"]

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
    """Of scattered segments of one size, in 10^9 bytes per second; None where something does not work."""

    segment_bytes: int
    copy: float
    cuda_ipc: float | None
    nixl: float | None
    nixl_bounce: float | None
    nixl_contiguous: float | None
    descriptor_us: float | None
    """What NIXL takes for each descriptor."""


def gpu_speeds(report: GpuReport) -> GpuSpeeds | ProbeFailed:
    rows = {row.transport: row for row in report.rows if row.pattern == "scattered" and row.gbps is not None}
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
        descriptor_us=plain.median_us / plain.copies if plain and plain.median_us and plain.copies else None,
    )


def bounce_advice_bytes(speeds: GpuSpeeds) -> int | None:
    """The size of segments from which on NIXL is as fast with a descriptor for each as staged: a power of two. None when nobody knows.

    A descriptor takes as long whatever its size, and bounce-buffer transfers are as fast whatever their segments."""
    if speeds.descriptor_us is None or speeds.nixl_bounce is None:
        return None
    meeting = min(speeds.nixl_bounce * 1e3 * speeds.descriptor_us, MAX_ADVICE_BYTES)
    return 1 << max(0, round(meeting) - 1).bit_length()


def gpu_speed_findings(gpu: str, report: GpuReport | ProbeFailed, default_bounce_bytes: int) -> list[Finding]:
    """How fast each way is, and which transport would be chosen."""
    speeds = report if isinstance(report, ProbeFailed) else gpu_speeds(report)
    if isinstance(speeds, ProbeFailed):
        text = f"{gpu}: nothing could be measured ({speeds.reason}); see `kvferry bench transfer --device cuda`"
        return [Finding(Severity.ADVICE, "GPU speed", text)]
    return [Finding(Severity.OK, "GPU speed", f"{gpu}: {_measured(speeds)}"), _choice(gpu, speeds, default_bounce_bytes)]


def ucx_settings_finding(settings: Mapping[str, str], environ: Mapping[str, str]) -> Finding:
    """`settings` are those that the nixl transport makes, unless the user has made them."""
    shown = [
        f"{name}={environ.get(name, value)} ({'yours' if name in environ else 'set by kvferry'})"
        for name, value in sorted(settings.items())
    ]
    if environ.get(GET_ZCOPY, "y").lower() not in ("y", "yes", "on", "1", "try"):
        text = f"{', '.join(shown)}; without {GET_ZCOPY}=y NIXL reads GPU memory through host TCP, thousands of times slower: unset it"
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
    parts.append(", ".join(f"{name} {_shown(gbps)}" for name, gbps in ways if gbps is not None) or "no transport")
    if speeds.descriptor_us is not None:
        parts.append(f"; NIXL takes {speeds.descriptor_us:.1f} µs for each descriptor")
    if speeds.nixl_contiguous is not None:
        parts.append(f", and {_shown(speeds.nixl_contiguous)} for one long segment")
    return "".join(parts)


def _choice(gpu: str, speeds: GpuSpeeds, default_bounce_bytes: int) -> Finding:
    across = _advice_across_hosts(speeds, default_bounce_bytes)
    if speeds.cuda_ipc is None:
        text = f"{gpu}: nixl everywhere, because cuda_ipc does not work here (see the log of an engine); {across}"
        return Finding(Severity.ADVICE, "GPU transport", text)
    share = speeds.cuda_ipc / speeds.copy
    text = f"{gpu}: cuda_ipc within this host, at {share:.2f} of the device's own copy; {across}"
    if share < GOOD_SHARE:
        return Finding(Severity.ADVICE, "GPU transport", f"{text}; that is little: is something else running on this GPU?")
    return Finding(Severity.OK, "GPU transport", text)


def _advice_across_hosts(speeds: GpuSpeeds, default_bounce_bytes: int) -> str:
    if speeds.nixl is None:
        return "NIXL does not carry memory of this GPU, so other hosts are reached through host memory only (kv_buffer_device cpu)"
    advised = bounce_advice_bytes(speeds)
    if advised is None:
        return "nixl to other hosts"
    setting = f"nixl to other hosts, staged where segments are below {_size(advised)}"
    if advised == default_bounce_bytes:
        return f"{setting}, the default"
    return f"{setting}: set bounce_max_segment_bytes to {advised} (the default is {default_bounce_bytes})"


def _shown(gbps: float) -> str:
    return f"{gbps:,.0f} GB/s" if gbps >= 10 else f"{gbps:.1f} GB/s"


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"
