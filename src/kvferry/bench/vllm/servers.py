"""Real vLLM servers as child processes: command lines, environment, start, pause and stop.

However the benchmark ends, kill -9 included, no process is left behind (see
`kvferry.cli.cluster.processes`).
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvferry.cli.arguments import Parser, whole
from kvferry.cli.cluster.http_client import is_healthy
from kvferry.cli.cluster.processes import ChildProcess, ProcessGroup
from kvferry.cli.cluster.reaper import members_of_group
from kvferry.cli.cluster.vllm_servers import (
    LOOPBACK,
    free_ports,
    server_command,
    server_variables,
)
from kvferry.errors import ConfigError, KVFerryError
from kvferry.types import Address

MODEL_NAME = "tiny"
START_S = 240.0
POLL_INTERVAL_S = 0.5
IMPORT_S = 60.0
CLOSE_TIMEOUT_S = 15.0
REAPER_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class VllmServer:
    """One server to start; the model is small, float32 and eager, as vLLM's CPU build requires."""

    name: str
    model: Path
    port: int
    transfer: Mapping[str, Any] | None = None
    """The value of `--kv-transfer-config`; None: a server without a connector."""
    side_channel_port: int | None = None
    core: int | None = None
    """The only core of the server's worker; None: vLLM chooses."""
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> Address:
        return Address(LOOPBACK, self.port)

    def command(self, python: Path) -> list[str]:
        flags = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "2048"]
        flags += ["--block-size", "32", *self.flags]
        return server_command(python, str(self.model), MODEL_NAME, self.port, flags, self.transfer)

    def variables(self) -> dict[str, str]:
        """Return the variables that the server gets in addition to our own environment."""
        own = {**server_variables(), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        if self.core is not None:
            own["VLLM_CPU_OMP_THREADS_BIND"] = str(self.core)
        if self.side_channel_port is not None:
            own["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self.side_channel_port)
        return {**own, **self.environment}


class RunningServers:
    """Healthy servers, in the order of the request; the servers can be paused and resumed."""

    def __init__(
        self, group: int, processes: Sequence[ChildProcess], addresses: Sequence[Address]
    ) -> None:
        self._group = group
        self.processes = tuple(processes)
        self.addresses = tuple(addresses)

    def pause(self) -> None:
        """Stop every process of every server with SIGSTOP: the processes use no CPU and answer
        nothing.
        """
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the processes continue."""
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in members_of_group(self._group) - {self._group}:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


@contextmanager
def start_servers(servers: Sequence[VllmServer], python: Path) -> Iterator[RunningServers]:
    """Start servers in parallel; yield when all are healthy, and stop all after the block."""
    with launch_servers(servers, python) as running:
        wait_healthy(running)
        yield running


@contextmanager
def launch_servers(servers: Sequence[VllmServer], python: Path) -> Iterator[RunningServers]:
    """Start servers in parallel and stop all after the block; `wait_healthy` waits for them.

    The servers share one secret, so that one server may transfer KV to another.
    """
    directory = Path(tempfile.gettempdir()) / f"kvferry-vllm-{secrets.token_hex(8)}"
    shared = {"KVFERRY_SECRET": secrets.token_hex(32)}
    processes = [
        ChildProcess(
            server.name, server.command(python), {**os.environ, **shared, **server.variables()}
        )
        for server in servers
    ]
    with ProcessGroup(directory, REAPER_GRACE_S) as group:
        running = RunningServers(group.id, processes, [server.address for server in servers])
        try:
            for process in processes:
                process.start(group.id)
            yield running
        finally:
            # A paused process cannot exit.
            running.resume()
            for process in processes:
                process.terminate()
            for process in processes:
                process.close(CLOSE_TIMEOUT_S)


def default_python() -> Path:
    """Return the interpreter of the environment that `make setup-vllm` makes, if in this directory.

    Otherwise return our own interpreter.
    """
    beside = Path(".venv-vllm/bin/python")
    return beside.absolute() if beside.exists() else Path(sys.executable)


def check_vllm(python: Path) -> None:
    """Raise ConfigError if this interpreter has no vLLM, before anything slow is started."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        done = subprocess.run(
            [str(python), "-c", code], capture_output=True, timeout=IMPORT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"--vllm-python {python} cannot be run ({error}); name an interpreter with vLLM "
            "installed"
        ) from error
    if done.returncode != 0:
        raise ConfigError(
            f"{python} has no vLLM; run `make setup-vllm`, or name an interpreter that has it "
            "with --vllm-python"
        )


def check_cuda(python: Path) -> None:
    """Raise ConfigError if torch finds no GPU, before anything slow is started."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, timeout=IMPORT_S, check=False
    )
    if done.returncode != 0:
        raise ConfigError(
            f"--device cuda: the torch of {python} finds no GPU; leave the flag out, or name an "
            "interpreter whose torch does with --vllm-python"
        )


def wait_healthy(running: RunningServers) -> None:
    """Return when all servers answer; raise KVFerryError if one has ended or is too slow."""
    deadline = time.monotonic() + START_S
    waiting = list(zip(running.processes, running.addresses, strict=True))
    while waiting:
        waiting = [(process, address) for process, address in waiting if not is_healthy(address)]
        for process, _ in waiting:
            _check(process)
            if time.monotonic() > deadline:
                raise KVFerryError(
                    _with_log(
                        process, f"{process.name} did not become healthy within {START_S:g} s"
                    )
                )
        if waiting:
            time.sleep(POLL_INTERVAL_S)


def _check(process: ChildProcess) -> None:
    try:
        process.check_alive()
    except KVFerryError as error:
        raise KVFerryError(_with_log(process, str(error))) from error


def _with_log(process: ChildProcess, what: str) -> str:
    return "\n".join([f"{what}; last log lines:", *(f"  {line}" for line in process.tail(40))])


# -- server pairs --
# A prefill server and a decode server with one connector, as an operator of a two-core machine
# starts the servers; and arguments that both benchmarks share.


OURS, STOCK = "ours", "stock"
ROLES = ("prefill", "decode")
TRANSFER_CONFIGS = {
    OURS: {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_role": "kv_both",
    },
    STOCK: {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"},
}


@dataclass(frozen=True, slots=True)
class PairSettings:
    """The settings of a pair of servers.

    `connector` is OURS or STOCK. `transfer` is added to the connector's configuration;
    `environments` holds extra variables by role.
    """

    connector: str
    python: Path
    model: Path
    transfer: Mapping[str, Any] = field(default_factory=dict)
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerPair:
    """A running prefill server and decode server."""

    servers: RunningServers

    @property
    def prefill(self) -> Address:
        return self.servers.addresses[0]

    @property
    def decode(self) -> Address:
        return self.servers.addresses[1]


@contextmanager
def start_pair(settings: PairSettings) -> Iterator[ServerPair]:
    """Start a pair of servers; P computes on core 0, D on core 1."""
    print_progress(
        f"starting vLLM with {'our' if settings.connector == OURS else 'its own'} connector "
        "(about a minute)"
    )
    ports = free_ports(4)
    servers = [
        VllmServer(
            name=f"{settings.connector} {role}",
            model=settings.model,
            port=ports[core],
            side_channel_port=ports[2 + core],
            core=core,
            transfer=TRANSFER_CONFIGS[settings.connector] | dict(settings.transfer),
            environment=settings.environments.get(role, {}),
        )
        for core, role in enumerate(ROLES)
    ]
    with start_servers(servers, settings.python) as running:
        yield ServerPair(running)


def add_vllm_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    parser.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PATH",
        help="interpreter with vLLM and kvferry installed (default: .venv-vllm/bin/python or this "
        "one)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="checkpoint in the layout of Hugging Face (default: a tiny generated one)",
    )


@contextmanager
def model_directory(given: Path | None) -> Iterator[Path]:
    """Yield the operator's model, or a tiny model that is removed afterwards."""
    if given is not None:
        if not (given / "config.json").is_file():
            raise ConfigError(
                f"--model {given} has no config.json; name a folder with a checkpoint, or leave "
                "the flag out"
            )
        yield given
        return
    # Imported here because the module imports torch, which takes a second.
    from kvferry.engine.make_model.writer import make_model

    with TemporaryDirectory(prefix="kvferry-bench-") as directory:
        make_model(Path(directory) / "tiny")
        yield Path(directory) / "tiny"


COUNT = whole(1, 99_999)


def vllm_python(given: Path | None) -> Path:
    """Return the interpreter to use; raise ConfigError if the interpreter has no vLLM."""
    python = given or default_python()
    check_vllm(python)
    return python


def print_progress(what: str) -> None:
    """Print a progress message to standard error, because standard output is for results."""
    print(f"kvferry: {what}", file=sys.stderr, flush=True)
