"""A prefill and a decode server with one connector, as an operator of a two-core machine starts them, and what both benchmarks ask for."""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvferry.bench.vllm_servers import RunningServers, VllmServer, check_vllm, default_python, free_ports, start_servers
from kvferry.cli.parser import Parser
from kvferry.errors import ConfigError
from kvferry.types import Address

__all__ = [
    "OURS",
    "ROLES",
    "STOCK",
    "PairSettings",
    "ServerPair",
    "add_vllm_arguments",
    "model_directory",
    "parse_count",
    "print_progress",
    "start_pair",
    "vllm_python",
]

OURS, STOCK = "ours", "stock"
ROLES = ("prefill", "decode")
_TRANSFER = {
    OURS: {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvferry.vllm", "kv_role": "kv_both"},
    STOCK: {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"},
}


@dataclass(frozen=True, slots=True)
class PairSettings:
    """`connector`: OURS or STOCK. `transfer` is added to its configuration; `environments` are added by role, prefill and decode."""

    connector: str
    python: Path
    model: Path
    transfer: Mapping[str, Any] = field(default_factory=dict)
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerPair:
    servers: RunningServers

    @property
    def prefill(self) -> Address:
        return self.servers.addresses[0]

    @property
    def decode(self) -> Address:
        return self.servers.addresses[1]


@contextmanager
def start_pair(settings: PairSettings) -> Iterator[ServerPair]:
    """P computes on core 0, D on core 1."""
    print_progress(f"starting vLLM with {'our' if settings.connector == OURS else 'its own'} connector (about a minute)")
    ports = free_ports(4)
    servers = [
        VllmServer(
            name=f"{settings.connector} {role}",
            model=settings.model,
            port=ports[core],
            side_channel_port=ports[2 + core],
            core=core,
            transfer=_TRANSFER[settings.connector] | dict(settings.transfer),
            environment=settings.environments.get(role, {}),
        )
        for core, role in enumerate(ROLES)
    ]
    with start_servers(servers, settings.python) as running:
        yield ServerPair(running)


def add_vllm_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PATH",
        help="an interpreter with vLLM and kvferry in it (default: .venv-vllm/bin/python or ours)",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint in the layout of Hugging Face (default: a tiny one is made)")


@contextmanager
def model_directory(given: Path | None) -> Iterator[Path]:
    """The operator's model, or a tiny one for the occasion."""
    if given is not None:
        if not (given / "config.json").is_file():
            raise ConfigError(f"--model {given} has no config.json; name a folder with a checkpoint, or leave it out")
        yield given
        return
    # Imported here because it brings torch, which takes a second.
    from kvferry.engine.make_model import make_model

    with TemporaryDirectory(prefix="kvferry-bench-") as directory:
        make_model(Path(directory) / "tiny")
        yield Path(directory) / "tiny"


def parse_count(text: str) -> int:
    """For argparse: how many of something, at least one."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 99999, got {text[:80]!a}")
    return int(text)


def vllm_python(given: Path | None) -> Path:
    """ConfigError when it has no vLLM."""
    python = given or default_python()
    check_vllm(python)
    return python


def print_progress(what: str) -> None:
    """On the way, for people: standard output is for results."""
    print(f"kvferry: {what}", file=sys.stderr, flush=True)
