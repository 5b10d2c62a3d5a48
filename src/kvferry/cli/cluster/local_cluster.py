"""A cluster on this machine: prefill, decode and router processes, from start to a clean exit.

`UpOptions` and `LocalLaunch` are pure and make the command lines; `LocalCluster` runs the processes
and is used by one thread.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvferry.cli.checkpoints import DEFAULT_MODEL, DEFAULT_MODEL_NAME
from kvferry.cli.cluster.http_client import is_healthy
from kvferry.cli.cluster.processes import ChildProcess
from kvferry.errors import KVFerryError
from kvferry.types import Address

if TYPE_CHECKING:
    # The view needs the package rich; the command line of `kvferry up` is read without it.
    from kvferry.cli.cluster.startup_view import StartupView

LOOPBACK = "127.0.0.1"
CONNECTORS = {"pull": "NixlConnector", "push": "NixlPushConnector"}
"""The connector of each `--mode`."""
GPU_CACHE_BYTES = "1G"


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of `kvferry up`."""

    prefill: int = 1
    decode: int = 1
    model: Path = DEFAULT_MODEL
    model_name: str = DEFAULT_MODEL_NAME
    """The name that clients use for the model."""
    revision: str | None = None
    """The revision of the tokenizer, if `model` is a name on the hub; None: main."""
    port: int = 8000
    transports: tuple[str, ...] = ()
    """The data transport to use; empty: the best transport that works on this machine."""
    tensor_parallel_size: int = 1
    mode: str = "pull"
    device: str = "cpu"


class Launch(Protocol):
    """Makes the command lines of one cluster."""

    def engine(self) -> Sequence[str]: ...

    def router(
        self, prefillers: Sequence[Address], decoders: Sequence[Address]
    ) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class LocalLaunch:
    """Launches embedded engines on free ports, and a router on the port that the user chose."""

    options: UpOptions
    admin_key_file: Path

    def engine(self) -> list[str]:
        extra = (
            {"kv_connector_extra_config": {"transports": list(self.options.transports)}}
            if self.options.transports
            else {}
        )
        transfer = {"kv_connector": CONNECTORS[self.options.mode], "kv_role": "kv_both", **extra}
        return [
            *_kvferry("serve", str(self.options.model), "--host", LOOPBACK, "--port", "0"),
            *("--served-model-name", self.options.model_name),
            *("--tensor-parallel-size", str(self.options.tensor_parallel_size)),
            *self._device(),
            # Do not wait for peers to fetch blocks: all engines of the cluster stop together.
            *("--drain-timeout", "0"),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]

    def _device(self) -> list[str]:
        """Limit the cache: engines on one GPU must not each take all the memory that is left."""
        device = self.options.device
        return (
            []
            if device == "cpu"
            else ["--device", device, "--kv-cache-memory-bytes", GPU_CACHE_BYTES]
        )

    def router(self, prefillers: Sequence[Address], decoders: Sequence[Address]) -> list[str]:
        command = _kvferry(
            *("proxy", "--host", LOOPBACK, "--port", str(self.options.port)),
            *("--admin-key-file", str(self.admin_key_file)),
        )
        for name, addresses in (("prefiller", prefillers), ("decoder", decoders)):
            command += [f"--{name}-hosts", *(address.host for address in addresses)]
            command += [f"--{name}-ports", *(str(address.port) for address in addresses)]
        return command


def child_environment(environ: Mapping[str, str], secret_file: Path) -> dict[str, str]:
    """Return the environment of child processes.

    Side channels listen on free loopback ports. The secret is the operator's, or a secret for this
    cluster alone.
    """
    own = {
        "KVFERRY_SIDE_CHANNEL_HOST": LOOPBACK,
        "KVFERRY_SIDE_CHANNEL_BIND": LOOPBACK,
        "KVFERRY_SIDE_CHANNEL_PORT": "0",
        "PYTHONUNBUFFERED": "1",
    }
    if "KVFERRY_SECRET" not in environ and "KVFERRY_SECRET_FILE" not in environ:
        own["KVFERRY_SECRET_FILE"] = str(secret_file)
    return {**environ, **own}


def _kvferry(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvferry", *arguments]


# -- local cluster --


_POLL_INTERVAL_S = 0.05
CLOSE_TIMEOUT_S = 15.0
"""The time for all processes to exit after Ctrl-C.

The value is larger than an engine's `--shutdown-timeout`, so that an engine can end its streams
with an error message.
"""
# The prefix of lines that `kvferry serve` prints for the user, as opposed to log lines.
_STAGE_PREFIX = "kvferry: "


class LocalCluster:
    """Starts engines in parallel, then a router with the engines' ports; `close` stops all
    processes.
    """

    def __init__(
        self,
        launch: Launch,
        environment: Mapping[str, str],
        group: int,
        start_timeout_s: float,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """`on_line` receives the log lines of all processes, each in a thread of its process."""
        self._on_line = on_line
        self._launch = launch
        self._environment = environment
        self._group = group
        self._start_timeout_s = start_timeout_s
        self._children: list[ChildProcess] = []
        self.decoders: tuple[Address, ...] = ()

    def start(self, prefill: int, decode: int, view: "StartupView") -> Address:
        """Start all processes; return the router's address when all processes are healthy.

        KVFerryError names the process that failed.
        """
        names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        addresses = self._start_engines(names, view)
        self.decoders = tuple(addresses[prefill:])
        router = self._start(
            "router", self._launch.router(addresses[:prefill], addresses[prefill:]), view
        )
        return self._wait_healthy([router], view)[0]

    def check_alive(self) -> None:
        """Raise KVFerryError if a process that was serving has exited."""
        for child in self._children:
            if child.is_serving:
                child.check_alive()

    def last_log_lines(self) -> list[tuple[str, list[str]]]:
        """Return name and last log lines of each failed process; of all processes if none has
        failed.
        """
        ended = [child for child in self._children if child.has_failed]
        return [(child.name, child.tail()) for child in ended or self._children]

    def close(self) -> None:
        """Stop all processes, the router first, so that no request is sent to a stopped engine.

        Running requests get the time that router and engines allow after Ctrl-C.
        """
        for child in reversed(self._children):
            child.interrupt()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for child in reversed(self._children):
            child.close(max(0.0, deadline - time.monotonic()))

    def terminate_all(self) -> None:
        """Make `close` stop waiting for requests; a signal handler may call this method during
        `close`.
        """
        for child in reversed(self._children):
            child.terminate()

    def _start_engines(self, names: Sequence[str], view: "StartupView") -> list[Address]:
        engines = [self._start(name, self._launch.engine(), view) for name in names]
        return self._wait_healthy(engines, view)

    def _start(self, name: str, command: Iterable[str], view: "StartupView") -> ChildProcess:
        child = ChildProcess(name, list(command), self._environment, on_line=self._on_line)
        return self._begin(child, view)

    def _begin(self, child: ChildProcess, view: "StartupView") -> ChildProcess:
        self._children.append(child)
        view.begin(child.name, "starting")
        child.start(self._group)
        return child

    def _wait_healthy(self, children: list[ChildProcess], view: "StartupView") -> list[Address]:
        """Wait until every child is healthy; return the addresses in the order of `children`."""
        deadline = time.monotonic() + self._start_timeout_s
        found: dict[str, Address] = {}
        while len(found) < len(children):
            for child in [child for child in children if child.name not in found]:
                self._show_stage(child, view)
                address = child.poll_address()
                if address is not None and is_healthy(address):
                    found[child.name] = address
                    view.finish(child.name, f"ready on {address}")
            self.check_alive()
            if time.monotonic() > deadline:
                late = ", ".join(child.name for child in children if child.name not in found)
                raise KVFerryError(
                    f"{late} did not become healthy within {self._start_timeout_s:g} s"
                )
            time.sleep(_POLL_INTERVAL_S)
        return [found[child.name] for child in children]

    def _show_stage(self, child: ChildProcess, view: "StartupView") -> None:
        view.show(child.name, _stage(child))


def _stage(child: ChildProcess) -> str:
    """Return the last stage that the process printed for the user."""
    stages = [
        line.removeprefix(_STAGE_PREFIX) for line in child.tail() if line.startswith(_STAGE_PREFIX)
    ]
    return stages[-1] if stages else "starting"
