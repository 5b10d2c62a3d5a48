"""`kvferry doctor`: what this machine can do, and what to set. One line per topic; changes nothing."""

import argparse
import dataclasses
import json
import os
import platform
import re
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvferry.cli.findings import (
    DEFAULT_PLUGIN,
    SECOND_SIDE_CHANNEL_PORT,
    Finding,
    Severity,
    TorchReport,
    compiled_finding,
    core_finding,
    descriptor_finding,
    enabled_transports,
    gpu_finding,
    machine_finding,
    nixl_findings,
    port_finding,
    python_finding,
    torch_finding,
    transport_finding,
)
from kvferry.cli.gpu_findings import gpu_speed_findings, ucx_settings_finding
from kvferry.cli.parser import Parser
from kvferry.cli.probes import can_share_memory, driver_gpus, is_port_free, measure_gpu, probe_nixl, probe_torch
from kvferry.config import ClusterSecret, SideChannelConfig, ignored_variables
from kvferry.config.secret import FILE_NAME, runtime_directory
from kvferry.errors import ConfigError
from kvferry.planes.compiled import missing_native_functions
from kvferry.planes.nixl_agent import CUDA_ENVIRONMENT, DEFAULT_ENVIRONMENT
from kvferry.planes.staging_settings import BounceSettings
from kvferry.types import MemoryKind

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "examine", "parse_backend", "run"]

DESCRIPTION = "Say what this machine can do for KV transfer, and what to set. Exit code 1 when something will not work."
EXAMPLES = """\
  kvferry doctor
  kvferry doctor --backends LIBFABRIC
  kvferry doctor --json | jq '.findings[] | select(.level != "ok")'"""

REPORTED_SETTINGS = ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "UCX_RCACHE_MAX_UNRELEASED")
"""Of those that the nixl transport makes: they change what moves, the others what is logged."""
API_PORT = 8000
OTHER_PORTS = [8100, 8200, 8192, SECOND_SIDE_CHANNEL_PORT]
"""Those of the README's commands: prefill, decode, router, and the second engine's side channel."""
PLUGIN_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
PLAIN = {level: f"{level:<7}" for level in Severity}
COLOURED = {level: f"\033[{colour}m{PLAIN[level]}\033[0m" for level, colour in zip(Severity, (32, 33, 31), strict=True)}


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--backends", nargs="+", type=parse_backend, metavar="NAME", default=[], help="NIXL plugins to try to start, beside UCX"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def run(arguments: argparse.Namespace) -> int:
    findings = examine(os.environ, arguments.backends)
    is_ok = all(finding.level is not Severity.PROBLEM for finding in findings)
    if arguments.json:
        print(json.dumps({"is_ok": is_ok, "findings": [dataclasses.asdict(finding) for finding in findings]}, indent=2))
    else:
        for finding in findings:
            print(_line(finding, COLOURED if sys.stdout.isatty() else PLAIN))
    return 0 if is_ok else 1


def parse_backend(text: str) -> str:
    """For argparse: the name of a NIXL plugin, which becomes part of a file's name."""
    if not PLUGIN_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text[:80]!a} is no name of a NIXL plugin; write it like LIBFABRIC")
    return text


def examine(environ: Mapping[str, str], backends: Sequence[str] = ()) -> list[Finding]:
    """Every check, side by side because some take seconds, in a fixed order."""
    checks: list[Callable[[], list[Finding]]] = [
        lambda: [machine_finding(platform.machine(), " ".join(platform.libc_ver()))],
        lambda: [python_finding(sys.version_info[:3]), compiled_finding(missing_native_functions())],
        lambda: _torch(environ),
        lambda: _nixl(environ, backends),
        lambda: [_shared_memory()],
        lambda: _side_channel(environ),
        lambda: [_secret(environ)],
        lambda: [_api_port(), _other_ports()],
        lambda: [Finding(Severity.ADVICE, "environment", sentence) for sentence in ignored_variables(environ)],
        lambda: [descriptor_finding(resource.getrlimit(resource.RLIMIT_NOFILE)[0])],
        lambda: [core_finding(len(os.sched_getaffinity(0)))],
    ]
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="kvferry-doctor") as pool:
        return [finding for found in pool.map(lambda check: check(), checks) for finding in found]


def _torch(environ: Mapping[str, str]) -> list[Finding]:
    report = probe_torch()
    names = report.gpus if isinstance(report, TorchReport) else []
    return [torch_finding(report), gpu_finding(report, driver_gpus()), *_gpus(names, environ)]


def _gpus(names: Sequence[str], environ: Mapping[str, str]) -> list[Finding]:
    """One of each kind is measured."""
    settings = {name: value for name, value in (DEFAULT_ENVIRONMENT | CUDA_ENVIRONMENT).items() if name in REPORTED_SETTINGS}
    findings = [ucx_settings_finding(settings, environ)] if names else []
    bounce = BounceSettings().resolved(MemoryKind.VRAM)
    for name in dict.fromkeys(names):
        index = names.index(name)
        findings += gpu_speed_findings(f"cuda:{index} ({name})", measure_gpu(index, environ), bounce.segment_bytes)
    return findings


def _nixl(environ: Mapping[str, str], backends: Sequence[str]) -> list[Finding]:
    others = [name for name in dict.fromkeys(backends) if name != DEFAULT_PLUGIN]
    report, log = probe_nixl(environ, [DEFAULT_PLUGIN, *others])
    settings = {name: value for name, value in environ.items() if name.startswith("UCX_")}
    return [*nixl_findings(report, others), *([transport_finding(enabled_transports(log), settings)] if log else [])]


def _shared_memory() -> Finding:
    reason = can_share_memory()
    if reason is not None:
        return Finding(Severity.ADVICE, "shared memory", f"{reason}; engines on this machine use NIXL instead")
    return Finding(Severity.OK, "shared memory", "processes of this user can map each other's cache")


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
            Finding(Severity.ADVICE, "side channel", f"{where} is taken; set VLLM_NIXL_SIDE_CHANNEL_PORT to another for the next engine")
        ]
    return [Finding(Severity.OK, "side channel", f"{where} is free, advertised as {channel.advertised_host}")]


def _secret(environ: Mapping[str, str]) -> Finding:
    """Looks without making one: asking must not change the answer."""
    is_given = any(environ.get(name) for name in ("KVFERRY_SECRET", "KVFERRY_SECRET_FILE"))
    own: Path = runtime_directory(environ) / FILE_NAME
    if not is_given and not os.path.lexists(own):
        return Finding(Severity.OK, "secret", f"none yet; one for this machine is made on first use in {own}")
    try:
        secret = ClusterSecret.load(environ)
    except ConfigError as error:
        return Finding(Severity.PROBLEM, "secret", str(error))
    reach = "" if secret.is_explicit else " (this machine only; set KVFERRY_SECRET_FILE to reach others)"
    return Finding(Severity.OK, "secret", f"{secret.source}{reach}")


def _api_port() -> Finding:
    if is_port_free("127.0.0.1", API_PORT):
        return Finding(Severity.OK, "API port", f"{API_PORT} is free")
    return Finding(Severity.ADVICE, "API port", f"{API_PORT} is taken; choose another with --port")


def _other_ports() -> Finding:
    return port_finding([port for port in OTHER_PORTS if not is_port_free("127.0.0.1", port)], OTHER_PORTS)


def _line(finding: Finding, marks: Mapping[Severity, str]) -> str:
    return f"{marks[finding.level]}  {finding.topic:<13}  {finding.text}"
